"""Ops whose outputs have sizes that depend on data: what they give while nothing is in their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from foretell.trace.record.values import (
    ASSUMED,
    about,
    attach,
)

if TYPE_CHECKING:
    from foretell.trace.record.reads import ReadingMode


def _nonzero(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    count = mode.share(func, args[0], hint)
    with mode:
        return args[0].new_empty((args[0].dim(), count), dtype=torch.int64).t()


def _masked_select(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    source, mask = args[:2]
    whole = torch.broadcast_shapes(source.shape, mask.shape)
    count = mode.share(func, mask, hint)
    with mode:
        return source.new_empty((count * whole.numel() // max(1, mask.numel()),))


def _index(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    """Masks among indices as the positions they stand for: one index per dimension of the mask."""
    found: list[Tensor | None] = []
    with mode:
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                count = mode.share(func, index, hint)
                found.extend(index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim()))
            else:
                found.append(index)
        return func(args[0], found)


def _as_many(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    """`unique` and its kin: of unknown numbers, none is there twice."""
    source = args[0]
    dim = args[1] if about(func).name in ("unique_dim", "unique_dim_consecutive") else None
    size = source.numel() if dim is None else source.shape[dim]
    if hint is None:
        mode.assume(f"{mode.where(func)} is taken to find no number twice")
    count = max(1, round(size * (1.0 if hint is None else hint))) if size else 0
    shape = [count] if dim is None else [count if at == dim % source.dim() else n for at, n in enumerate(source.shape)]
    with mode:
        places = source.shape if dim is None else (size,)
        return (source.new_empty(shape), source.new_empty(places, dtype=torch.int64), source.new_empty((count,), dtype=torch.int64))


def _bincount(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    count = max(int(hint or 1), least)
    if hint is None and not least:
        mode.assume(f"{mode.where(func)} is taken to find one kind")
    with mode:
        return args[0].new_empty((count,), dtype=torch.int64)


def _repeat_interleave(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    if hint is None:
        mode.assume(f"{mode.where(func)} is taken to repeat each once")
    with mode:
        return args[0].new_empty((max(1, round(args[0].numel() * (1.0 if hint is None else hint))),))


def _nms(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    """Boxes that overlap less than is allowed: none is taken to overlap more."""
    if hint is None:
        mode.assume(f"{mode.where(func)} is taken to keep every box")
    count = max(1, round(args[0].shape[0] * (1.0 if hint is None else hint))) if args[0].shape[0] else 0
    with mode:
        kept = args[0].new_empty((count,), dtype=torch.int64)
    with no_dispatch():
        order = torch.arange(count)
    attach(kept, order, ASSUMED, "")
    return kept


def _lstsq(mode: ReadingMode, func: Any, args: Any, kwargs: Any, hint: float | None) -> Any:
    """Least squares as CUDA's only driver solves them: neither ranks nor singular values are found."""
    if args[0].dtype != args[1].dtype:
        raise RuntimeError(f"torch.linalg.lstsq: Expected input and other to have the same dtype, but got {args[0].dtype} and {args[1].dtype}")
    if args[0].dtype.itemsize < 4:
        raise RuntimeError("This function doesn't handle types other than float and double")
    rows, columns = args[0].shape[-2:]
    vector = args[1].dim() == 1 or args[1].shape == args[0].shape[:-1]
    right = args[1].shape[-1:] if not vector else ()
    batch = args[0].shape[:-2] if vector else torch.broadcast_shapes(args[0].shape[:-2], args[1].shape[:-2])
    with mode:
        left = args[0].new_empty((*batch, *right)) if rows > columns else args[0].new_empty((0,))
        return args[0].new_empty((*batch, columns, *right)), left, args[0].new_empty((0,), dtype=torch.int64), args[0].new_empty((0,))


Special = Callable[..., Any]
"""Of a mode that reads, an op, its arguments and a hint."""
SPECIAL: dict[str, Special] = {
    "nonzero": _nonzero, "masked_select": _masked_select, "index": _index, "_unique2": _as_many, "unique_consecutive": _as_many,
    "unique_dim": _as_many, "unique_dim_consecutive": _as_many, "bincount": _bincount, "repeat_interleave": _repeat_interleave,
    "nms": _nms, "linalg_lstsq": _lstsq,
}  # fmt: skip
