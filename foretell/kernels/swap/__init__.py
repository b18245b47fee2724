"""Kernels in a model: `apply.py` puts them in and takes them out, `gate.py` decides call by call.

    match.py     what a finder answers
    norms.py     modules that are an RMSNorm or a LayerNorm
    graphs.py    gated MLPs, and a residual add whose sum goes into a norm, in modules whose forward can be read as a graph
    rotary.py    attention that turns queries and keys by a function of its file
"""
