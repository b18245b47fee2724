"""Which tensors are logits: what a softmax loss reads from the head, and what follows from it without another product.

    hidden ─► head (a product) ─► logits ─► scaled, cast, shifted ─► log_softmax ─► loss
                                  └──────────── these, and their gradients ─────────────┘

Found by following the data, not by a width: a hidden layer may be as wide as the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from foretell.trace.types import Ref

if TYPE_CHECKING:
    from foretell.trace.record.recorder import RecordedOp

SOFTMAX = "aten._log_softmax.default"
_MIXES = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "matmul", "linear", "convolution", "conv", "scaled_mm", "grouped_mm",
    "int_mm", "scaled_dot_product", "embedding", "rnn", "lstm", "gru", "sparse", "einsum", "fft", "index_add", "scatter_add", "scatter_reduce",
)  # fmt: skip
"""What these make is another tensor than what they read."""


def logits_of(programs: Mapping[str, Iterable[RecordedOp]], born_in: Mapping[int, RecordedOp | None], parameters: Container[int]) -> set[int]:
    """Storages of logits, of their log-probabilities and of the gradients of both."""
    rows = [row for steps in programs.values() for row in steps if row.phase != "update"]
    found: set[int] = set()
    for row in rows:
        if row.name == SOFTMAX and row.phase == "forward" and row.inputs:
            found.update(_back_to_the_head(row.inputs[0].storage, born_in, parameters))
    if not found:
        return found
    for row in rows:
        if not _mixes(row):
            found.update(ref.storage for ref in row.outputs if ref.storage not in found and _follows(row, ref, found))
    return found


def _back_to_the_head(number: int, born_in: Mapping[int, RecordedOp | None], parameters: Container[int]) -> Iterator[int]:
    """A tensor and those it was made from one by one, up to the product that made the first."""
    seen: set[int] = set()
    while number not in seen and number not in parameters:
        seen.add(number)
        yield number
        row = born_in.get(number)
        if row is None or row.phase != "forward" or _mixes(row) or any(ref.storage in parameters for ref in row.inputs):
            return
        made = next((ref for ref in row.outputs if ref.storage == number), None)
        read = {ref.storage for ref in _as_large(row, made)} if made is not None else set()
        if len(read) != 1:
            return
        number = read.pop()


def _follows(row: RecordedOp, made: Ref, found: Container[int]) -> bool:
    """Whether a tensor is made from logits alone, and is as large or as wide as they are."""
    read = list(_as_large(row, made))
    shape = made.spec.shape
    return bool(read) and all(ref.storage in found and _alike(ref.spec.shape, shape) for ref in read)


def _alike(read: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """As many numbers, or rows of the same width and not a sum over most of them."""
    return prod(read) == prod(made) or (len(read) > 1 and len(made) > 1 and read[-1] == made[-1] and 2 * prod(made) >= prod(read))


def _as_large(row: RecordedOp, made: Ref) -> Iterator[Ref]:
    """Numbers that a row reads at least half as many of as it makes: neither targets nor a bias."""
    least = prod(made.spec.shape) / 2
    return (ref for ref in row.inputs if prod(ref.spec.shape) >= least and "float" in ref.spec.dtype)


def _mixes(row: RecordedOp) -> bool:
    return _mixing(row.name)


@functools.cache
def _mixing(op: str) -> bool:
    name = op.partition(".")[2].partition(".")[0].removesuffix("_backward").strip("_")
    return any(name == one or name.startswith((f"{one}_", f"cudnn_{one}", f"mkldnn_{one}", f"thnn_fused_{one}")) for one in _MIXES)
