"""Rules for calls that multiply matrices, look up rows, attend, or compute the loss."""

from __future__ import annotations

from string import ascii_letters
from typing import Any

from foretell.plan.tensor.types import PARTIAL, Operand, Partial, Place, Refine, Refuse, Result, Setting, Shard
from foretell.plan.tensor.views import Rule, keep

WEIGHTED = frozenset({"linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "_grouped_mm", "grouped_mm", "embedding",
                      "low_rank_product", "adapted_product"})  # fmt: skip
"""Calls in which a parameter may be the weight of a layer."""


# ---------------------------------------------------------------- products, as letters


def product(
    s: Setting, factors: list[tuple[Operand, str]], out: str, extra: tuple[Operand, str] | None = None
) -> Result:
    """A sum of products, dimensions named by letters; `extra` is added to it.

    The ranks may share a letter of the answer, which is then split, or one that is summed over: the answer is partial.
    """
    shared = _shared_letter(factors)
    if shared is None:
        return _resolved(s, factors, out, extra)
    letter, segments, stream = shared
    want: dict[int, Place] = {}
    for x, letters in factors:
        at = letters.find(letter)
        want[x.slot] = Shard(at, segments, stream) if at >= 0 and x.shape[at] == sum(segments) else None
    if letter in out:
        place: Place = Shard(out.index(letter), segments, stream)
    elif stream:
        raise Refuse("sums over the split positions")
    else:
        place = PARTIAL
    if extra is not None:
        want[extra[0].slot] = _extra(extra, letter, segments, stream, place)
    return Result(place, want)


def _extra(extra: tuple[Operand, str], letter: str, segments: tuple[int, ...], stream: bool, place: Place) -> Place:
    x, letters = extra
    if isinstance(place, Partial):
        return PARTIAL
    at = letters.find(letter)
    return Shard(at, segments, stream) if at >= 0 and x.shape[at] != 1 else None


def _resolved(s: Setting, factors: list[tuple[Operand, str]], out: str, extra: tuple[Operand, str] | None) -> Result:
    """Nothing is split: a partial factor is summed up first, into the way activations lie between regions."""
    for x, letters in factors:
        place = s.stream(x.shape) if isinstance(x.place, Partial) else None
        alone = place is not None and not any(letters[place.dim] in others for y, others in factors if y is not x)
        if place is not None and alone and letters[place.dim] in out:
            known = [(Operand(y.slot, y.shape, place) if y is x else y, others) for y, others in factors]
            return product(s, known, out, extra)
    return Result(None)


def _shared_letter(factors: list[tuple[Operand, str]]) -> tuple[str, tuple[int, ...], bool] | None:
    """The letter that split factors agree on: that of layers before that of the stream."""
    found = [(letters[x.place.dim], x) for x, letters in factors if isinstance(x.place, Shard)]
    layers = [(letter, x) for letter, x in found if isinstance(x.place, Shard) and not x.place.stream]
    if not found:
        return None
    letter, first = (layers or found)[0]
    assert isinstance(first.place, Shard)
    for other, x in layers:
        assert isinstance(x.place, Shard)
        if other != letter:
            raise Refuse("factors are split along different dimensions")
        mine, theirs = x.place.segments, first.place.segments
        if mine != theirs:
            if sum(mine) == sum(theirs) and len(mine) != len(theirs):
                coarse, finer = (x, theirs) if len(mine) < len(theirs) else (first, mine)
                raise Refine(coarse.slot, finer, "factors consist of different parts")
            raise Refuse("factors consist of different parts")
    return letter, first.place.segments, first.place.stream


def linear(s: Setting, x: Operand, weight: Operand, bias: Operand | None = None) -> Result:
    if len(weight.shape) != 2:
        raise Refuse("a weight that is no matrix")
    batch = ascii_letters[: len(x.shape) - 1]
    extra = (bias, "O") if bias is not None else None
    return product(s, [(x, f"{batch}I"), (weight, "OI")], f"{batch}O", extra)


def matmul(s: Setting, a: Operand, b: Operand | None = None, **kwargs: Any) -> Result:
    b = b if b is not None else kwargs.get("other", kwargs.get("mat2"))
    if not isinstance(b, Operand) or len(a.shape) < 1 or len(b.shape) < 1:
        raise Refuse("a product of numbers")
    batch = max(len(a.shape), len(b.shape)) - 2
    letters = ascii_letters[: max(batch, 0)]
    left = _batched(a, letters, "M" if len(a.shape) > 1 else "", "K")
    right = _batched(b, letters, "K", "N" if len(b.shape) > 1 else "")
    out = letters + ("M" if len(a.shape) > 1 else "") + ("N" if len(b.shape) > 1 else "")
    return product(s, [(a, left), (b, right)], out)


def _batched(x: Operand, letters: str, first: str, second: str) -> str:
    """Letters of an operand; a dimension that is broadcast gets one of its own."""
    own = len(x.shape) - len(first) - len(second)
    names = letters[len(letters) - own :] if own else ""
    return "".join("?" if x.shape[i] == 1 else name for i, name in enumerate(names)) + first + second


def rmatmul(s: Setting, a: Operand, b: Operand) -> Result:
    return matmul(s, b, a)


def addmm(s: Setting, bias: Operand, mat1: Operand, mat2: Operand, beta: float = 1, alpha: float = 1) -> Result:
    letters = "MN"[2 - len(bias.shape) :]
    return product(s, [(mat1, "MK"), (mat2, "KN")], "MN", (bias, letters))


def baddbmm(s: Setting, bias: Operand, batch1: Operand, batch2: Operand, beta: float = 1, alpha: float = 1) -> Result:
    letters = "BMN"[3 - len(bias.shape) :]
    return product(s, [(batch1, "BMK"), (batch2, "BKN")], "BMN", (bias, letters))


def grouped_mm(s: Setting, a: Operand, b: Operand, offs: Operand | None = None, **kwargs: Any) -> Result:
    """Rows of a, in groups that end at `offs`, times one matrix of b each."""
    if len(a.shape) != 2 or len(b.shape) != 3 or (isinstance(b.place, Shard) and b.place.dim == 0):
        raise Refuse("a grouped product of another form")
    if isinstance(a.place, Shard) and a.place.dim == 0:
        raise Refuse("rows in groups are not split evenly")
    return product(s, [(a, "MK"), (b, "GKN")], "MN")


def einsum(s: Setting, equation: str, *given: Any) -> Result:
    found = list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else list(given)
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        raise Refuse("an einsum without an arrow")
    spare = [letter for letter in ascii_letters if letter not in equation]
    dots = max((len(x.shape) - len(term.replace("...", "")) for x, term in zip(found, terms, strict=True)), default=0)
    filled = []
    for x, term in zip(found, terms, strict=True):
        own = len(x.shape) - len(term.replace("...", ""))
        names = "".join(spare[dots - own : dots])
        filled.append((x, term.replace("...", names)))
    if any(len(set(term)) != len(term) for _, term in filled):
        raise Refuse("an einsum that takes a diagonal")
    return product(s, filled, out.replace("...", "".join(spare[:dots])))


def outer(s: Setting, a: Operand, b: Operand) -> Result:
    return product(s, [(a, "M"), (b, "N")], "MN")


# ---------------------------------------------------------------- rows of a table


def embedding(
    s: Setting, ids: Operand, weight: Operand, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Result:  # fmt: skip
    place = weight.place
    if isinstance(place, Shard) and place.dim == 1:
        return Result(Shard(len(ids.shape), place.segments), {weight.slot: place})
    if isinstance(place, Shard):
        if max_norm is not None or scale_grad_by_freq or sparse or len(place.segments) > 1:
            raise Refuse("an embedding that renormalises, counts or is sparse")
        return Result(s.stream((*ids.shape, weight.shape[1])), {weight.slot: place}, special="embedding")
    return Result(ids.place, keep(ids)) if isinstance(ids.place, Shard) else Result(None)


# ---------------------------------------------------------------- attention


def attention(
    s: Setting, query: Operand, key: Operand, value: Operand, attn_mask: Operand | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Result:  # fmt: skip
    found = [x for x in (query, key, value) if isinstance(x.place, Shard)]
    if not found:
        return Result(None)
    layers = [x for x in found if isinstance(x.place, Shard) and not x.place.stream]
    first = (layers or found)[0]
    place = first.place
    assert isinstance(place, Shard)
    from_end = place.dim - len(first.shape)
    if from_end >= -2:
        raise Refuse("attention over the split positions" if place.stream else "attention inside a split head")
    want: dict[int, Place] = {}
    for x in (query, key, value):
        want[x.slot] = _for_heads(s, x, first, from_end, enable_gqa)
    if attn_mask is not None:
        at = len(attn_mask.shape) + from_end
        whole = at < 0 or attn_mask.shape[at] == 1
        mine = want[query.slot]
        want[attn_mask.slot] = None if whole or not isinstance(mine, Shard) else mine.at(at)
    out = want[query.slot]
    if out is None:
        raise Refuse("one query head for several key-value heads")
    special = "random" if dropout_p > 0 else ""
    return Result(out, want, special=special)


def _for_heads(s: Setting, x: Operand, first: Operand, from_end: int, grouped: bool) -> Place:
    """How queries, keys or values must lie beside the first of them that is split."""
    place = first.place
    assert isinstance(place, Shard)
    dim = len(x.shape) + from_end
    if dim < 0:
        raise Refuse("attention of tensors with different dimensions")
    if isinstance(x.place, Shard) and x.place.dim == dim and x.place.stream == place.stream:
        if grouped and from_end == -3:
            if len(x.place.segments) > 1 or len(place.segments) > 1:
                raise Refuse("grouped heads in several parts")
            return x.place
        if x.place.segments != place.segments:
            raise Refuse("queries, keys and values consist of different parts")
        return x.place
    if isinstance(x.place, Shard) and not x.place.stream:
        raise Refuse("queries, keys and values are split along different dimensions")
    if x.shape[dim] == 1:
        return None
    if x.shape[dim] != place.size:
        if grouped and len(place.segments) == 1 and x.shape[dim] % s.ranks == 0:
            return Shard(dim, (x.shape[dim],), place.stream)
        raise Refuse(f"{x.shape[dim]} key-value heads do not divide by {s.ranks}", x.shape[dim])
    return place.at(dim)


# ---------------------------------------------------------------- loss


def cross_entropy(
    s: Setting, logits: Operand, target: Operand, weight: Operand | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Result:  # fmt: skip
    place = logits.place
    if not isinstance(place, Shard):
        return Result(None)
    classes = min(1, len(logits.shape) - 1)
    plain = weight is None and not label_smoothing and size_average is None and reduce is None
    if not plain or reduction not in ("mean", "sum") or len(target.shape) != len(logits.shape) - 1:
        raise Refuse("a cross entropy with weights, smoothing or soft targets")
    if place.dim == classes:
        if not s.loss:
            raise Refuse("the plan wants the loss on whole logits")
        if len(place.segments) > 1:
            raise Refuse("classes in several parts")
        return Result(None, keep(logits), special="cross_entropy_classes")
    return Result(None, keep(logits), special="cross_entropy_rows")


RULES: dict[str, Rule] = {
    "linear": linear, "matmul": matmul, "mm": matmul, "bmm": matmul, "mv": matmul, "addmm": addmm, "baddbmm": baddbmm,
    "_grouped_mm": grouped_mm, "grouped_mm": grouped_mm, "einsum": einsum, "outer": outer, "rmatmul": rmatmul, "embedding": embedding,
    "scaled_dot_product_attention": attention, "cross_entropy": cross_entropy,
}  # fmt: skip
