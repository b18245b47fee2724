"""Kernels that can be trusted: rank a step's ops by what they could gain, search for kernels, verify and time them.

    rank.py ──► a task ──► search (templates × configurations), generate (a language model) ──► candidates ──► verify ──► clock

`rank.py` is pure and needs no torch. What a kernel's author wrote runs in processes of its own alone (`verify/process.py`), and so
does what a template or a model wrote. `corpus`: kernels that cheat, and good ones.
"""
