"""Memory against time: what an output layer and its cross entropy take over so many chunks, and the fastest number that fits.

More chunks: fewer logits at a time, shorter products, and the weight's gradient read and written once more for each of them; beyond
`MOST_ROUNDINGS` it is added up in float32, whose memory outweighs the logits saved. Seconds are those of the device's profile, op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.kernels.linear_cross_entropy import AUTO, TILE, chunk_rows, padded, sum_dtype
from foretell.price.kernels.shapes import Shape
from foretell.price.time import Machine
from foretell.trace.types import TensorSpec
from foretell.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """One call, with gradients of rows and weight."""

    rows: int
    width: int
    words: int
    dtype: str = "bfloat16"
    """Of rows and products."""
    weight_dtype: str = "bfloat16"
    sums: str = AUTO
    """The format the weight's gradient is added up in, as `linear_cross_entropy` takes it."""


@dataclass(frozen=True, kw_only=True)
class HeadCost:
    """Of one number of chunks."""

    chunks: int
    bytes: int
    """Made by the call at its peak; gradients are among them, rows and weight are not."""
    seconds: float


def head_bytes(shape: HeadShape, chunks: int) -> int:
    size, words, width = DTYPE_BYTES[shape.dtype], shape.words, shape.width
    rows = chunk_rows(shape.rows, chunks)
    own = words * width * DTYPE_BYTES[shape.weight_dtype]
    added = words * width * DTYPE_BYTES[_sums(shape, chunks)]
    logits = rows * padded(words) * size
    cast = words * width * size if shape.weight_dtype != shape.dtype else 0
    return shape.rows * (width * size + 3 * 4) + cast + added + max(logits, own if added != own else 0)


def head_ops(shape: HeadShape, chunks: int) -> list[tuple[Shape, int]]:
    """The ops of a call, and how often each runs."""
    rows = chunk_rows(shape.rows, chunks)
    full, rest = divmod(shape.rows, rows)
    weight, added = (TensorSpec((shape.words, shape.width), dtype) for dtype in (shape.dtype, _sums(shape, chunks)))
    found: list[tuple[Shape, int]] = []
    for count, times in ((rows, full), (rest, int(rest > 0))):
        x, logits = TensorSpec((count, shape.width), shape.dtype), TensorSpec((count, shape.words), shape.dtype)
        across = TensorSpec((shape.words, count), shape.dtype)
        found += [
            (Shape("aten.mm.default", (x, TensorSpec((shape.width, shape.words), shape.dtype)), (logits,), ("layout:ct",)), times),
            (Shape("foretell.logits_gradient_.default", (logits,), (logits,), ()), times),
            (Shape("aten.mm.default", (logits, weight), (x,), ()), times),
            (Shape("aten.addmm.default", (added, across, x), (added,), ("layout:ctc",)), times),
        ]
    first = TensorSpec((shape.words, min(rows, shape.rows)), shape.dtype), TensorSpec((min(rows, shape.rows), shape.width), shape.dtype)
    found.append((found[3][0], -1))
    found.append((Shape("aten.mm.default", first, (added,), ("layout:tc",)), 1))
    return [(op, times) for op, times in found if times]


def head_seconds(shape: HeadShape, chunks: int, machine: Machine) -> float:
    ops = head_ops(shape, chunks)
    seconds = machine.ops.seconds([op for op, _ in ops])
    return sum(seconds[op] * times for op, times in ops)


def head_costs(shape: HeadShape, machine: Machine) -> tuple[HeadCost, ...]:
    """Numbers of chunks worth having, the fewest first: each takes less memory than those before it."""
    found: list[HeadCost] = []
    for rows in sorted({shape.rows, *range(TILE, shape.rows, TILE)}, reverse=True):
        chunks = -(-shape.rows // rows)
        cost = HeadCost(chunks=chunks, bytes=head_bytes(shape, chunks), seconds=0.0)
        if (not found or cost.bytes < found[-1].bytes) and chunk_rows(shape.rows, chunks) == rows:
            found.append(HeadCost(chunks=chunks, bytes=cost.bytes, seconds=head_seconds(shape, chunks, machine)))
    return tuple(found)


def fastest(costs: Sequence[HeadCost], free_bytes: int) -> HeadCost | None:
    """The one that takes the least time in that much memory; None where none fits."""
    return min((one for one in costs if one.bytes <= free_bytes), key=lambda one: one.seconds, default=None)


def _sums(shape: HeadShape, chunks: int) -> str:
    import torch

    count = -(-shape.rows // chunk_rows(shape.rows, chunks))
    return str(sum_dtype(getattr(torch, shape.weight_dtype), count, shape.sums)).removeprefix("torch.")
