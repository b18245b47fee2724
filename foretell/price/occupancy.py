"""How many of a device's multiprocessors an op keeps at work: by the thread blocks it is launched in. Rough, and assumed."""

from __future__ import annotations

from math import ceil, prod

from foretell.price.kernels.shapes import short
from foretell.trace.types import Op

TILE = 128
"""Rows and columns of a result that one thread block of a product computes; of attention, queries."""
ELEMENTS = 1024
"""That one thread block of an op over elements takes: 128 threads, 8 elements each."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "linear")


def blocks(op: Op) -> int:
    """Thread blocks of an op's kernel."""
    name, shapes = short(op.name), [ref.spec.shape for ref in (*op.outputs, *op.inputs) if ref.spec.shape]
    if not shapes:
        return 1
    first = shapes[0]
    if name in _PRODUCTS and len(first) >= 2:
        return prod(first[:-2]) * ceil(first[-2] / TILE) * ceil(first[-1] / TILE)
    if "attention" in name and len(first) >= 3:
        return prod(first[:-2]) * ceil(first[-2] / TILE)
    if "convolution" in name and len(first) >= 3:
        return ceil(first[0] * prod(first[2:]) / TILE) * ceil(first[1] / TILE)
    return max(1, ceil(max(prod(shape) for shape in shapes) / ELEMENTS))


def share(op: Op, multiprocessors: int) -> float:
    """Of the multiprocessors, at work while the op runs."""
    return min(1.0, blocks(op) / multiprocessors)
