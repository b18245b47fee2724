"""Kernels of published papers, a file for each op; all are opt-in, nothing calls them by itself.

Each has a reference in plain torch that runs on any device, and is what a CPU gets. Where there is a kernel in Triton it is in
`kernels/device`, imported when the op first runs on a GPU; formats and shapes it does not take go to the reference there too.
"""
