"""GPU kernels, a file for each op.

    kernel.py        what a training kernel is: reference, shapes it serves, bytes, and its ops `foretell_kernels::NAME`
    measured.toml    what it was measured to be worth, and where it is on; `measured.py` reads it
    catalog.py       all of them by name
    swap/            puts them into a model, and takes them out again
    rows.py          what kernels over rows share
    device/          the Triton, imported when an op first runs on a GPU

`paged_attention.py` serves, and imports Triton itself: only what runs on a GPU may import it and `device`.
"""
