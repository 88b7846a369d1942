"""An image seen from inside, where it lies: what `verify` judges and `inspect` shows.

image.py      manifest, config, layers and tree of one image
base.py       which of its layers are the base's, and how that is known
place.py      a directory of its tree as the checks of weights take it
models.py     the directories with weights
launch.py     /models/launch.json as values, read with distrust
leftovers.py  what hubs, clients and editors leave behind
"""
