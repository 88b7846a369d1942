"""duopack: from a line in models.yaml to a ready-to-serve image for Atlas 300I Duo (Ascend 310P)."""

__version__ = "0.1.0"
