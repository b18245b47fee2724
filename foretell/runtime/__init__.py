"""Apply a plan to a real module on torch.distributed, train, measure, check.

    process ─► ranks ─► parallel ─► train ─► run folder
                          data, offload        observe: what was measured
                          check: the same numbers as one process?
                          box: one rank of any plan on one device

Start with `parallel/apply.py` and `train/loop.py`.
"""
