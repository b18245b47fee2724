"""torch.compile as a transformation of a trace.

    compiled ─► joint ─► graph ─► partition ─► kernels ─► fuse ─► order ─► emit
                          rules, decompose, masks: what an op becomes
                blocks: one graph a block          cuda_graphs: recorded launches
"""
