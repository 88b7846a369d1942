"""What is in an image and what it weighs; what differs between two.

parts.py       base, models, scripts, the rest: every stored byte belongs to one part
duplicates.py  the same content at several paths
compare.py     two images: layers, files, settings, and what an update transfers
"""
