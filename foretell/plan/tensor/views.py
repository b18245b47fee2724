"""Rules for calls that only look at a tensor in another way: reshape, transpose, split, slice, repeat, join."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from foretell.plan.tensor.types import (
    PARTIAL,
    Operand,
    Partial,
    Place,
    Refine,
    Refuse,
    Result,
    Setting,
    Shape,
    Shard,
    SliceKey,
    between,
    divided,
    edges,
    replaced,
    share,
)

Rule = Callable[..., Result]


def numbers(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dimensions, given one by one or as one sequence."""
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = tuple(values[0])
    return tuple(int(value) for value in values)


def wrap(dim: int, dims: int) -> int:
    if not -dims <= dim < dims:
        raise Refuse(f"there is no dimension {dim}")
    return dim % dims


def keep(x: Operand) -> dict[int, Place]:
    """Take it as it lies."""
    return {x.slot: x.place}


def moved(x: Operand, where: Callable[[int], int], args: tuple[Any, ...] | None = None) -> Result:
    """The split dimension d becomes where(d); nothing else changes."""
    out = x.place.at(where(x.place.dim)) if isinstance(x.place, Shard) else x.place
    return Result(out, keep(x), args)


# ---------------------------------------------------------------- reshape


def groups(old: Shape, new: Shape) -> Iterator[tuple[range, range]]:
    """Runs of dimensions that a reshape turns into each other."""
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        left = right = 1
        while True:
            if left <= right and i < len(old):
                left *= old[i]
                i += 1
            elif j < len(new):
                right *= new[j]
                j += 1
            elif i < len(old):
                left *= old[i]
                i += 1
            if left == right and (i > first_i or j > first_j) and (j > first_j or j == len(new)):
                break
            if i == len(old) and j == len(new):
                raise Refuse(f"cannot reshape {old} to {new}")
        yield range(first_i, i), range(first_j, j)


def reshaped(x: Operand, new: Shape, ranks: int) -> Shard:
    """Where the split dimension of x is after a reshape."""
    place = x.place
    assert isinstance(place, Shard)
    if 0 in x.shape:
        raise Refuse("an empty tensor")
    before, after = next(pair for pair in groups(x.shape, new) if place.dim in pair[0])
    inner = prod(x.shape[place.dim + 1 : before.stop])
    outer = prod(x.shape[before.start : place.dim])
    flat = tuple(segment * inner for segment in place.segments) * outer
    trouble: Refuse | None = None
    for dim in after:
        try:
            found = _lands(flat, dim, new, after, ranks)
        except Refuse as refusal:
            trouble = trouble or refusal
            continue
        if found:
            return Shard(dim, found, place.stream)
    raise (
        _finer(x, flat, new, after, ranks, inner, outer)
        or trouble
        or Refuse(f"a reshape of {x.shape} to {new} mixes its parts")
    )


def _lands(flat: tuple[int, ...], dim: int, new: Shape, after: range, ranks: int) -> tuple[int, ...]:
    """Segments of one new dimension if the split falls on it; empty if it does not."""
    inner, outer = prod(new[dim + 1 : after.stop]), prod(new[after.start : dim])
    if len(flat) % outer:
        return ()
    period = flat[: len(flat) // outer]
    if period * outer != flat or any(segment % inner for segment in period):
        return ()
    segments = tuple(segment // inner for segment in period)
    if new[dim] == 1:
        return ()
    return divided(segments, ranks)


def _finer(
    x: Operand, flat: tuple[int, ...], new: Shape, after: range, ranks: int, inner: int, outer: int
) -> Refine | None:
    """One dimension becomes several, the first of which does not divide: its parts may be fused layers."""
    real = [dim for dim in after if new[dim] != 1]
    if len(flat) != 1 or outer != 1 or len(real) < 2 or new[real[1]] % ranks:
        return None
    parts = new[real[0]]
    if flat[0] % (parts * inner):
        return None
    segments = (flat[0] // parts // inner,) * parts
    return Refine(x.slot, segments, f"{parts} does not divide by {ranks}", parts)


def reshape(s: Setting, x: Operand, *sizes: Any, **kwargs: Any) -> Result:
    sizes = sizes or tuple(kwargs.values())
    if len(sizes) == 1 and not isinstance(sizes[0], (int, tuple, list)):
        raise Refuse("seen as another dtype")
    return _to(s, x, _filled(numbers(sizes), x.shape))


def _filled(sizes: Shape, old: Shape) -> Shape:
    if -1 not in sizes:
        return sizes
    known = prod(size for size in sizes if size != -1)
    return tuple(prod(old) // known if size == -1 else size for size in sizes)


def _to(s: Setting, x: Operand, new: Shape) -> Result:
    if not isinstance(x.place, Shard):
        return Result(x.place, keep(x), (x, new), {})
    out = reshaped(x, new, s.ranks)
    return Result(out, keep(x), (x, replaced(new, out.dim, share(out.segments, s.ranks))), {})


def flatten(s: Setting, x: Operand, start_dim: int = 0, end_dim: int = -1) -> Result:
    if not x.shape:
        return Result(x.place, keep(x))
    start, end = wrap(start_dim, len(x.shape)), wrap(end_dim, len(x.shape))
    new = (*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :])
    out = reshaped(x, new, s.ranks) if isinstance(x.place, Shard) else x.place
    return Result(out, keep(x))


def unflatten(s: Setting, x: Operand, dim: int, sizes: Any) -> Result:
    dim = wrap(dim, len(x.shape))
    sizes = _filled(numbers((sizes,)), (x.shape[dim],))
    new = (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    if not isinstance(x.place, Shard):
        return Result(x.place, keep(x))
    out = reshaped(x, new, s.ranks)
    local = replaced(new, out.dim, share(out.segments, s.ranks))
    return Result(out, keep(x), (x, dim, local[dim : dim + len(sizes)]), {})


def view_as(s: Setting, x: Operand, other: Operand) -> Result:
    return _by_shape("reshape", _to(s, x, other.shape), other)


def _by_shape(special: str, result: Result, other: Operand) -> Result:
    """Of the other tensor only the shape is used, however it lies."""
    return replace(result, special=special, unread=frozenset({other.slot}), want={**keep(other), **result.want})


def squeeze(s: Setting, x: Operand, dim: Any = None) -> Result:
    dims = range(len(x.shape)) if dim is None else [wrap(d, len(x.shape)) for d in numbers((dim,))]
    gone = tuple(d for d in dims if x.shape[d] == 1)
    result = moved(x, lambda d: d - sum(g < d for g in gone), (x, gone))  # a part may be 1 long where the whole is not
    return replace(result, kwargs={})


def unsqueeze(s: Setting, x: Operand, dim: int) -> Result:
    at = wrap(dim, len(x.shape) + 1)
    return moved(x, lambda d: d + (at <= d))


# ---------------------------------------------------------------- order of dimensions


def transpose(s: Setting, x: Operand, dim0: int, dim1: int) -> Result:
    a, b = wrap(dim0, len(x.shape)), wrap(dim1, len(x.shape))
    return moved(x, lambda d: b if d == a else a if d == b else d)


def reverse(s: Setting, x: Operand) -> Result:
    return moved(x, lambda d: len(x.shape) - 1 - d)


def transpose_last(s: Setting, x: Operand) -> Result:
    return transpose(s, x, -2, -1) if len(x.shape) > 1 else Result(x.place, keep(x))


def permute(s: Setting, x: Operand, *dims: Any) -> Result:
    order = [wrap(d, len(x.shape)) for d in numbers(dims)]
    return moved(x, order.index)


def movedim(s: Setting, x: Operand, source: Any, destination: Any) -> Result:
    dims = len(x.shape)
    start = [wrap(d, dims) for d in numbers((source,))]
    end = [wrap(d, dims) for d in numbers((destination,))]
    order = [-1] * dims
    for a, b in zip(start, end, strict=True):
        order[b] = a
    rest = iter(d for d in range(dims) if d not in start)
    order = [next(rest) if d == -1 else d for d in order]
    return moved(x, order.index)


# ---------------------------------------------------------------- pieces


def split(s: Setting, x: Operand, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Result:
    if split_size is None:
        split_size = kwargs.get("split_size_or_sections", kwargs.get("split_sizes"))
    dim = wrap(dim, len(x.shape))
    size = x.shape[dim]
    if isinstance(split_size, int):
        sizes = [min(split_size, size - start) for start in range(0, size, split_size)]
    else:
        sizes = list(numbers((split_size,)))
    return _pieces(s, x, dim, sizes, lambda local: (x, local, dim))


def chunk(s: Setting, x: Operand, chunks: int, dim: int = 0) -> Result:
    dim = wrap(dim, len(x.shape))
    each = -(-x.shape[dim] // chunks)
    sizes = [min(each, x.shape[dim] - start) for start in range(0, x.shape[dim], each)]
    if len(set(sizes)) > 1 and isinstance(x.place, Shard) and x.place.dim == dim:
        raise Refuse(f"{x.shape[dim]} is cut into {chunks} uneven pieces")
    return _pieces(s, x, dim, sizes, lambda local: (x, chunks, dim))


def _pieces(
    s: Setting, x: Operand, dim: int, sizes: Sequence[int], args: Callable[[list[int]], tuple[Any, ...]]
) -> Result:
    if not isinstance(x.place, Shard) or x.place.dim != dim:
        return Result(x.place, keep(x))
    cuts = edges(sizes)
    _aligned(s, x, cuts)
    parts = [_part(x.place, start, end) for start, end in pairwise(cuts)]
    local = [share(part.segments, s.ranks) for part in parts]
    spans = tuple((start, end - start) for start, end in pairwise(cuts))
    return Result(tuple(parts), keep(x), args(local), {}, along=True, spans=spans)


def _aligned(s: Setting, x: Operand, cuts: Sequence[int]) -> None:
    """Refuse, or ask for other segments, where pieces do not consist of whole segments."""
    place = x.place
    assert isinstance(place, Shard)
    have = edges(place.segments)
    if set(cuts) <= set(have):
        return
    finer = between((*have, *cuts))
    divided(finer, s.ranks)
    raise Refine(x.slot, finer, "pieces of it are used apart")


def _part(place: Shard, start: int, end: int) -> Shard:
    cuts = [cut for cut in edges(place.segments) if start <= cut <= end]
    return Shard(place.dim, between(cuts), place.stream)


def unbind(s: Setting, x: Operand, dim: int = 0) -> Result:
    return select(s, x, dim, 0)


def select(s: Setting, x: Operand, dim: int, index: Any) -> Result:
    dim = wrap(dim, len(x.shape))
    if isinstance(x.place, Shard) and x.place.dim == dim:
        raise Refuse("takes single entries of the split dimension")
    return moved(x, lambda d: d - (dim < d))


def narrow(s: Setting, x: Operand, dim: int, start: int, length: int) -> Result:
    dim = wrap(dim, len(x.shape))
    if not isinstance(x.place, Shard) or x.place.dim != dim:
        return Result(x.place, keep(x))
    at, part, span = _slice(s, x, dim, SliceKey(start, start + length, None))
    return Result(part, keep(x), (x, dim, at.start, at.stop - at.start), {}, along=True, spans=(span,))


def _slice(s: Setting, x: Operand, dim: int, cut: SliceKey) -> tuple[SliceKey, Shard, tuple[int, int]]:
    """A slice along the split dimension: of one rank's part, how it lies, and where it is in the whole."""
    place = x.place
    assert isinstance(place, Shard)
    start, stop, step = slice(*cut).indices(x.shape[dim])
    every = all(segment % (step * s.ranks) == 0 for segment in place.segments)
    if step > 1 and start < step and stop > x.shape[dim] - step + start and every:
        segments = tuple(segment // step for segment in place.segments)
        return SliceKey(start, None, step), Shard(dim, segments, place.stream), (0, x.shape[dim])
    if step != 1 or stop <= start:
        raise Refuse("takes scattered entries of the split dimension")
    _aligned(s, x, (start, stop))
    part = _part(place, start, stop)
    before = share(_part(place, 0, start).segments, s.ranks) if start else 0
    return SliceKey(before, before + share(part.segments, s.ranks), None), part, (start, stop - start)


def getitem(s: Setting, x: Operand, index: Any) -> Result:
    items = list(index) if isinstance(index, tuple) and not isinstance(index, SliceKey) else [index]
    if not isinstance(x.place, Shard):
        return Result(x.place, keep(x))
    if Ellipsis in [item for item in items if not isinstance(item, (Operand, SliceKey))]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        used = sum(_uses(item) for item in items if item is not Ellipsis)
        items[at : at + 1] = [SliceKey(None, None, None)] * (len(x.shape) - used)
    tensors = [item for item in items if isinstance(item, (Operand, tuple)) and not isinstance(item, SliceKey)]
    if len(tensors) > 1 or any(not isinstance(item, Operand) for item in tensors):
        raise Refuse("indexed by several tensors")
    return _indexed(s, x, items)


def _uses(item: Any) -> int:
    """Dimensions of the tensor that one item of an index takes up."""
    if item is None or isinstance(item, bool):
        return 0
    return len(item.shape) if isinstance(item, Operand) and item.mask else 1


def _indexed(s: Setting, x: Operand, items: list[Any]) -> Result:
    place = x.place
    assert isinstance(place, Shard)
    dim, out, found, local = 0, 0, place.dim, list(items)
    span: tuple[int, int] | None = None
    landed: Shard | None = None
    for position, item in enumerate(items):
        if isinstance(item, bool):
            raise Refuse("indexed by a truth value")
        if item is None:
            out += 1
            continue
        here = dim <= found < dim + _uses(item)
        if isinstance(item, SliceKey):
            if here and item != SliceKey(None, None, None):
                local[position], part, span = _slice(s, x, dim, item)
                landed = part.at(out)
            elif here:
                landed = place.at(out)
            out += 1
        elif here:
            raise Refuse("takes single entries of the split dimension")
        elif isinstance(item, Operand):
            out += 1 if item.mask else len(item.shape)
        dim += _uses(item)
    if landed is None:
        landed = place.at(out + found - dim)
    args = None if span is None else (x, tuple(local))
    return Result(landed, keep(x), args, {} if args else None, along=span is not None, spans=(span,) if span else ())


# ---------------------------------------------------------------- repeats and joins


def expand(s: Setting, x: Operand, *sizes: Any) -> Result:
    if len(sizes) == 1 and isinstance(sizes[0], Operand):
        return _by_shape("expand", expand(s, x, sizes[0].shape), sizes[0])
    shape = numbers(sizes)
    return Result(_expanded(x, shape), keep(x), (x, _expanded_local(s, x, shape)), {})


def _expanded(x: Operand, shape: Shape) -> Place:
    return x.place.at(x.place.dim + len(shape) - len(x.shape)) if isinstance(x.place, Shard) else x.place


def _expanded_local(s: Setting, x: Operand, shape: Shape) -> Shape:
    place = _expanded(x, shape)
    return replaced(shape, place.dim, share(place.segments, s.ranks)) if isinstance(place, Shard) else shape


def repeat(s: Setting, x: Operand, *sizes: Any) -> Result:
    if not isinstance(x.place, Shard):
        return Result(x.place, keep(x))
    times = numbers(sizes)
    times = (1,) * (len(x.shape) - len(times)) + times
    dim = x.place.dim + len(times) - len(x.shape)
    return Result(Shard(dim, x.place.segments * times[dim], x.place.stream), keep(x))


def repeat_interleave(s: Setting, x: Operand, repeats: Any, dim: int | None = None, **_: Any) -> Result:
    if not isinstance(repeats, int):
        raise Refuse("repeated by a tensor of counts")
    if not isinstance(x.place, Shard):
        return Result(x.place, keep(x))
    if dim is None:
        raise Refuse("flattens what is split")
    if wrap(dim, len(x.shape)) != x.place.dim:
        return Result(x.place, keep(x))
    return Result(Shard(x.place.dim, tuple(n * repeats for n in x.place.segments), x.place.stream), keep(x))


def cat(s: Setting, tensors: Any, dim: int = 0, **kwargs: Any) -> Result:
    parts = [x for x in tensors if not (len(x.shape) == 1 and x.shape[0] == 0)]
    dim = wrap(kwargs.get("axis", dim), len(parts[0].shape))
    if not any(isinstance(x.place, Shard) for x in parts):
        return _all_partial(parts)
    target = first_shard(parts)
    if target.dim != dim:
        return Result(target, {x.slot: target for x in parts})
    if target.stream or not all(
        isinstance(x.place, Shard) and x.place.dim == dim and not x.place.stream for x in parts
    ):
        raise Refuse("joins pieces along the split dimension")
    segments = tuple(n for x in parts if isinstance(x.place, Shard) for n in x.place.segments)
    return Result(Shard(dim, segments), {x.slot: x.place for x in parts})


def stack(s: Setting, tensors: Any, dim: int = 0) -> Result:
    dim = wrap(dim, len(tensors[0].shape) + 1)
    if not any(isinstance(x.place, Shard) for x in tensors):
        return _all_partial(tensors)
    target = first_shard(tensors)
    return Result(target.at(target.dim + (dim <= target.dim)), {x.slot: target for x in tensors})


def _all_partial(parts: Sequence[Operand]) -> Result:
    if all(isinstance(x.place, Partial) for x in parts):
        return Result(PARTIAL, {x.slot: PARTIAL for x in parts})
    return Result(None)


def first_shard(parts: Sequence[Operand]) -> Shard:
    """The place that decides: of a split layer before that of the stream; two that disagree are refused."""
    found = [x for x in parts if isinstance(x.place, Shard)]
    layers = [x for x in found if isinstance(x.place, Shard) and not x.place.stream]
    chosen = (layers or found)[0].place
    assert isinstance(chosen, Shard)
    for x in layers:
        assert isinstance(x.place, Shard)
        if x.place != chosen:
            raise Refuse("its parts are split along different dimensions")
    return chosen


def complex_pairs(s: Setting, x: Operand) -> Result:
    """view_as_complex takes the last dimension away, view_as_real adds one."""
    if isinstance(x.place, Shard) and x.place.dim == len(x.shape) - 1 and x.shape[-1] == 2:
        raise Refuse("looks along the split dimension")
    return Result(x.place, keep(x))


RULES: dict[str, Rule] = {
    "view": reshape, "reshape": reshape, "flatten": flatten, "unflatten": unflatten, "ravel": flatten,
    "view_as": view_as, "reshape_as": view_as, "squeeze": squeeze, "unsqueeze": unsqueeze,
    "transpose": transpose, "swapaxes": transpose, "swapdims": transpose, "t": reverse, "T": reverse,
    "mT": transpose_last, "permute": permute, "movedim": movedim, "moveaxis": movedim,
    "split": split, "split_with_sizes": split, "chunk": chunk, "unbind": unbind, "select": select, "narrow": narrow,
    "getitem": getitem, "expand": expand, "expand_as": expand, "broadcast_to": expand, "repeat": repeat, "tile": repeat,
    "view_as_complex": complex_pairs, "view_as_real": complex_pairs,
    "repeat_interleave": repeat_interleave, "cat": cat, "concat": cat, "concatenate": cat, "stack": stack,
}  # fmt: skip
