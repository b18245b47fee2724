"""One step of a model on fake tensors, as CUDA would run it: no GPU, no weights, no memory.

    model ─► load, hub ─► record ─► fold ─► store ─► Trace (types)
               sandbox: the user's code, in a process of its own
               cuda: which kernels CUDA would select
               inductor: what torch.compile makes of a trace
               flow: which call reads what, for splits and stages
               script: the same from a user's train.py

Start with `record/capture.py`; what comes out is in `types.py`.
"""
