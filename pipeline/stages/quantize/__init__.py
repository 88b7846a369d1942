"""Float weights in, weights for `--quantization ascend` on 310P out.

stage.py         the order of things: what may refuse, resume, check, record, put in place
contract.py      what every engine gets and gives
streaming.py     W8A8_DYNAMIC without data, by our own writer
msmodelslim.py   everything that msmodelslim does, in an environment of its own or in the base image
w8a8sc.py        the compressed form, which only a 310P host can make
environment.py   the environment that msmodelslim runs in
recipes.py       recipes by name, for an architecture
record.py        what is recorded beside the weights
"""
