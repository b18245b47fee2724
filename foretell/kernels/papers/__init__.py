"""Kernels of published papers, a file for each op; all are opt-in.

Each file has a reference in plain torch that runs on any device. Files named `*_triton.py` need Triton and are imported when a CUDA
tensor comes; without them, and for shapes they do not take, the reference runs.
"""
