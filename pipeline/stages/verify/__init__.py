"""An image judged where it lies: every finding has an id, a severity, a sentence and a mend.

finding.py    what a finding is, and how findings of other parts become one
report.py     all checks of one image, and of every platform of an index
documents.py  manifest, config, layers
entries.py    the files: names, kinds, modes, links, leftovers, copies
weights.py    the directories with weights
launched.py   launch.json against the files, the labels and the scripts
locked.py     the image against models.lock
"""
