"""Adapters on the linear layers of a model, over a frozen base that may be held in fewer bits. The step that is traced and the
one that is run are made by the same code.

    put.py        on which layers they go, and everything else frozen
    layers.py     the class that an adapted layer gets
    functions.py  forward and backward by hand: nothing is saved that the gradients do not need
    formats.py    what packs a weight and unpacks it, by name: bf16, float8, int8, those of nf4.py
    nf4.py        4-bit NormalFloat: packing, unpacking, scales in 32 or in 8 bits
    kernel.py     the same unpacked on CUDA, where Triton is installed
    merge.py      an adapter added to the weights it was trained on
"""
