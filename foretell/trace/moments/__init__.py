"""AdamW's moments in 8 or 4 bits, with a scale for every block. The step that is traced and the one that is run are made by
the same code.

    rows.py       which parameters have codes, and their shapes: blocks never cross a row, so rows can be sharded
    codes.py      what a code stands for, and which code a number gets
    update.py     the op that updates a list of parameters
    kernel.py     the same on CUDA in one pass, where Triton is installed
    optimizer.py  the optimizer, which keeps everything else in the weights' own format
"""
