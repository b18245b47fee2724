"""Propose plans, estimate them, keep the best, and say why.

    question ─► space ─► estimate ─► solve ─► finalists, costed in full (`simulate`) ─► choice
                            block_costs: one block of each kind, once
                offload, heterogeneous, inference: further kinds of plans
                advice: what would make a step fit, or faster
                traces: what plans are costed from      profiles: what a probe measured, fitted

Start with `solve/choose.py`.
"""
