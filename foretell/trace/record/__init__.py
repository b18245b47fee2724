"""A step run once on fake tensors, and everything it does written down.

    step ── runs under ──► recorder ─► ops, storages, lifetimes ─► capture ─► Trace
              values, reads, branches, sized: code that looks into tensors
              attributes: what of an op besides shapes its cost depends on
              ragged, copies, subclasses, gradients: what fake tensors do otherwise
"""
