"""Kernels that can be trusted: rank a step's ops by what they could gain, verify a kernel, time it. `rank`, `verify`, `clock`, `corpus`.

`rank.py` is pure and needs no torch. What a kernel's author wrote runs in processes of its own alone (`verify/process.py`).
"""
