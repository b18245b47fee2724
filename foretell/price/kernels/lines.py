"""How a CPU walks over tensors: line by line, each as long as all tensors of an op agree on where the next number is.

A line of three numbers takes about as long as one of thirty, so that (4096, 2, 1) * (4096, 1, 3) is many times slower than its
bytes say. Lines that lie evenly are a plane, and walked over in one go: each further plane takes longer than many lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from foretell.price.kernels.shapes import Shape, letters_of
from foretell.trace.types import TensorSpec

KINDS = frozenset({"pointwise", "reduction", "copy"})


def lines(kind: str, op: Shape) -> tuple[float, float]:
    """Lines and planes of an op besides the first; 0 where all its numbers lie in one."""
    if kind not in KINDS or not op.inputs or not op.outputs:
        return 0.0, 0.0
    first = max(op.inputs, key=lambda spec: spec.numel)
    out = op.outputs[0]
    if kind == "reduction":
        whole, others = first.shape, [_kept(op, first, out)]
    else:
        whole, others = out.shape, [spec.shape for spec in op.inputs if spec.numel > 1]
    inner, plane = _inner(whole, others)
    letters = letters_of(op.attrs)
    if whole and any(letter in "sb" for letter in letters):
        inner = min(inner, whole[-1])
    numel = math.prod(whole)
    return max(0.0, numel / max(1, inner) - 1), max(0.0, numel / max(1, plane) - 1)


def _kept(op: Shape, first: TensorSpec, out: TensorSpec) -> tuple[int, ...]:
    """The result of a reduction with a 1 for every dimension that was summed over."""
    dims = len(first.shape)
    if len(out.shape) == dims:
        return out.shape
    summed = {value % dims for value in op.attrs if type(value) is int and -dims <= value < dims} if dims else set()
    if not summed or dims - len(summed) != len(out.shape):
        return (1,) * dims  # all of it, or nobody knows
    return tuple([1 if place in summed else size for place, size in enumerate(first.shape)])


def _inner(whole: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Numbers up to the first dimension, from the right, at which a tensor begins or ceases to be broadcast, and up to the second."""
    sizes, known = [1], None
    for place in range(1, len(whole) + 1):
        size = whole[-place]
        if size == 1:
            continue
        spread = [place > len(shape) or shape[-place] != size for shape in others]
        if known is not None and spread != known:
            sizes.append(1)
        if len(sizes) > 2:
            break
        sizes[-1], known = sizes[-1] * size, spread
    return sizes[0], math.prod(sizes)
