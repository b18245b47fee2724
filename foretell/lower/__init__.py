"""A plan applied to a trace: the program of a rank.

    foreign/    training software that is predicted and not run: its differences as data, its data parallelism as rules

Lowering of what PyTorch itself runs is still in `cost/` (sharded, pipeline, tensor, context, expert).
"""
