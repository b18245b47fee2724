"""Ranks that share the positions of a sample: what is costed is the last of them.

Where attention is causal, a rank attends to the positions before its own, so that the last has most to do and the step
takes as long as it does. The first rank's products over its own positions are the same, its attention is the least:
work grows evenly from the first to the last, and that of all is known from these two.
"""

from __future__ import annotations

from foretell.trace.types import Trace

WORK = "cp_work"
"""In a trace's meta: FLOPs of all ranks that share a sample, over those of the rank that was traced."""


def work_of_all(first: Trace, last: Trace, ranks: int) -> float:
    """FLOPs of all ranks over those of the last."""
    least, most = flops_of(first), flops_of(last)
    return ranks * (least + most) / (2 * most) if most else float(ranks)


def all_ranks(trace: Trace, ranks: int) -> float:
    """By what one rank's FLOPs are multiplied to have those of all."""
    known = trace.meta.get(WORK, float(ranks))
    assert isinstance(known, (int, float))
    return known


def flops_of(trace: Trace) -> int:
    """Of one micro-batch, without what is computed again."""
    return sum(op.flops or 0 for op in trace.programs["micro_first"].ops if op.phase != "recompute")
