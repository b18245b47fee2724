"""Sizes of products that are no multiple of what tensor cores like. Plain data, no torch."""

from __future__ import annotations

from collections import Counter

from foretell.trace.types import Trace

ALIGNED = 64
LEAST = 256
"""Smaller sizes are heads and channels, which no one pads."""
SHARE = 0.02
"""Of all FLOPs of products, below which a size is not told."""
_PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


def unaligned(trace: Trace) -> dict[str, float]:
    """Size → share of the products' FLOPs that have it as a side of a weight, the largest first."""
    flops: Counter[int] = Counter()
    total = 0
    for program in trace.programs.values():
        for op in program.ops:
            if op.name not in _PRODUCTS or not op.flops:
                continue
            total += op.flops
            for size in {size for ref in op.inputs[-2:] for size in ref.spec.shape[-2:]}:
                if size > LEAST and size % ALIGNED:
                    flops[size] += op.flops
    return {str(size): round(count / total, 6) for size, count in flops.most_common() if count > SHARE * total}
