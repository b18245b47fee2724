"""What runs in the process of a kernel: `child.py` answers commands, `confine.py` is its cage, `calls.py`, `loops.py` and
`training.py` run the module, `watching.py` and `triton_kernels.py` note what else it does.
"""
