"""Values of small tensors, computed for real beside their fake twins, so that code may read them.

    torch.arange(5) ──► fake tensor, its storage ◄── Value: a real storage of the same bytes
    ids != pad      ──► all inputs have values: the op is run on them too
    scores.topk(2)  ──► scores have none: indices spread evenly, marked as assumed

A value belongs to a storage, so every view of it has it and every write changes it for all of them. What is written from
something unknown becomes unknown. Three ways to have one:

    followed    from constants, shapes, the example batch: what a real run would have
    drawn       from a random generator in the step: one possible run; a single number is drawn in the middle
    assumed     whole numbers and masks that come out of unknown floats: see `_RULES`
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from foretell.trace.doubts import EVENLY, IN_THE_MIDDLE

MOST_NUMBERS, MOST_WHOLE = 2**16, 2**20
"""Elements up to which values are followed: of floats, and of whole numbers and masks."""
MOST_DRAWN = 2**12
"""Elements up to which floats are drawn while a model is built: most of them are weights, which nobody reads. Those of a batch are drawn
as far as values are followed: points become voxels, and scores become masks."""
_of_batch: list[bool] = []
FOLLOWED, DRAWN, ASSUMED = 0, 1, 2


class Value:
    """What a fake storage would hold."""

    __slots__ = ("kind", "storage", "words")

    def __init__(self, storage: torch.UntypedStorage, kind: int, words: str = "") -> None:
        self.storage, self.kind, self.words = storage, kind, words


def value_of(tensor: Tensor) -> Value | None:
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    found: Value | None = storage.__dict__.get("value")
    if found is None and not isinstance(tensor, FakeTensor) and storage.device.type == "cpu":
        return Value(storage, FOLLOWED)  # a real tensor, made where no mode sees it
    return found


def forget(tensor: Tensor) -> None:
    if tensor.layout is torch.strided:
        tensor.untyped_storage().__dict__.pop("value", None)


def real(tensor: Tensor, value: Value) -> Tensor:
    """The real tensor that a fake one stands for: a view of the real storage."""
    with no_dispatch():
        made = torch.empty(0, dtype=tensor.dtype).set_(value.storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            made = made.conj()
        return made.neg() if tensor.is_neg() else made


def known(tensor: Tensor) -> Tensor | None:
    """Its real twin, where it has one."""
    value = value_of(tensor)
    return None if value is None else real(tensor, value)


def attach(tensor: Tensor, twin: Tensor, kind: int = FOLLOWED, words: str = "") -> None:
    """Give a fake tensor's storage the values of a real tensor of its shape."""
    with no_dispatch():
        size = tensor.untyped_storage().nbytes()
        storage = twin.untyped_storage()
        alike = twin.stride() == tensor.stride() and twin.storage_offset() == tensor.storage_offset() and storage.nbytes() == size
        if not alike or twin.is_conj() or twin.is_neg():
            storage = torch.UntypedStorage(size)
            place = torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            place.copy_(twin)
        tensor.untyped_storage().__dict__["value"] = Value(storage, kind, words)


def is_small(tensor: Tensor, most: int | None = None) -> bool:
    limit = MOST_NUMBERS if tensor.is_floating_point() or tensor.is_complex() else MOST_WHOLE
    return tensor.numel() <= (limit if most is None else min(limit, most)) and tensor.layout is torch.strided


# --- rules for what comes out of unknown numbers -----------------------------------------------------------------------


def _ones(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    return [torch.ones(output.shape, dtype=output.dtype) for output in outputs]


def _zeros(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    return [torch.zeros(output.shape, dtype=output.dtype) for output in outputs]


def _compared(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    """A mask lets everything pass; a single number is taken to be 1, and nothing is taken to be equal to it."""
    output = outputs[0]
    name = func._schema.name.partition("::")[2]
    itself = len(args) > 1 and args[0] is args[1]  # how a NaN is looked for
    if (itself and name == "ne") or (name == "eq" and isinstance(args[1], float) and not math.isfinite(args[1])):
        return _zeros(outputs, func, args)
    if output.numel() != 1 or name not in _COMPARES:
        return _ones(outputs, func, args)
    if name == "eq" or (name == "ne" and isinstance(args[1], Tensor)):
        return [None]
    other = args[1] if isinstance(args[1], (int, float)) else 1.0
    return [torch.full(output.shape, _COMPARES[name](1.0, other), dtype=output.dtype)]


_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def _spread(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    """Indices into a dimension, taken in turn: every place is chosen equally often, and none twice in a row of choices."""
    index = outputs[-1]
    dim = _argument(func, args, "dim", -1)
    if dim is None or not args[0].dim():
        return [*[None] * (len(outputs) - 1), torch.zeros(index.shape, dtype=index.dtype)]
    size = max(1, args[0].shape[dim])
    keeps = index.dim() == args[0].dim()
    last = index.shape[dim] if keeps and index.dim() else 1
    turns = torch.arange(index.numel() // max(1, last) * last, dtype=index.dtype) % size
    if keeps and index.dim():
        moved = [n for d, n in enumerate(index.shape) if d != dim % index.dim()]
        return [*[None] * (len(outputs) - 1), turns.view(*moved, last).movedim(-1, dim % index.dim())]
    return [*[None] * (len(outputs) - 1), turns.view(index.shape)]


def _in_order(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    """What is sorted was in order."""
    index = outputs[-1]
    dim = _argument(func, args, "dim", -1)
    if not index.dim():
        return [*[None] * (len(outputs) - 1), torch.zeros((), dtype=index.dtype)]
    shape = [1] * index.dim()
    shape[dim] = index.shape[dim]
    order = torch.arange(index.shape[dim], dtype=index.dtype).view(shape).expand(index.shape)
    return [*[None] * (len(outputs) - 1), order.contiguous()]


def _middle(outputs: list[Tensor], func: Any, args: Any) -> list[Tensor | None]:
    bounds = args[1] if isinstance(args[1], Tensor) else args[0]
    if func._schema.name == "aten::searchsorted":
        bounds = args[0]
    return [torch.full(outputs[0].shape, bounds.shape[-1] // 2, dtype=outputs[0].dtype)]


def _argument(func: Any, args: Any, name: str, otherwise: Any) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else argument.default_value
    return otherwise


ALL_ONE = "are taken to be 1"
Rule = Callable[[list[Tensor], Any, Any], list[Tensor | None]]
_RULES: dict[str, tuple[Rule, str]] = {
    **dict.fromkeys(("isnan", "isinf", "isneginf", "isposinf", "signbit"), (_zeros, "is taken to find none")),
    **dict.fromkeys(("isfinite", "isreal"), (_ones, "")),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "isclose", "isin"),
                    (_compared, "is taken to be true everywhere")),
    **dict.fromkeys(("topk", "argmax", "argmin", "max", "min", "multinomial", "median", "nanmedian", "mode", "kthvalue"),
                    (_spread, EVENLY)),
    **dict.fromkeys(("sort", "argsort"), (_in_order, "are taken to be in order")),
    **dict.fromkeys(("searchsorted", "bucketize"), (_middle, IN_THE_MIDDLE)),
    "_to_copy": (_ones, ALL_ONE),
}  # fmt: skip
"""Ops that make whole numbers or masks of floats: what ordinary data gives, and how that is said."""

_UNKNOWN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "empty_quantized"})
_OVERWRITES = frozenset({"uniform_", "normal_", "random_", "exponential_", "bernoulli_", "fill_", "zero_", "copy_"})
"""Ops after which nothing of what was in a tensor is left: it need not have been known."""
MOST_OVERWRITTEN = 2**6
"""Elements up to which that is followed: numbers that somebody reads, and not weights that are filled."""
_UNIFORM = frozenset({"rand", "rand_like", "uniform", "uniform_"})
_WHOLE_DRAW = frozenset({"randint", "randint_like"})


class ValueRule:
    """What an op is for values; looked at once."""

    __slots__ = ("draws", "follows", "name", "overwrites", "rule", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name.partition("::")[2]
        ours = schema.name.startswith(("aten::", "prims::"))
        self.writes = tuple(
            place for place, argument in enumerate(schema.arguments) if argument.alias_info is not None and argument.alias_info.is_write
        )
        views = bool(func.is_view) and not self.writes
        self.follows = ours and not views and self.name not in _UNKNOWN and self.name not in ("detach", "alias", "lift_fresh")
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.rule = _RULES.get(self.name) if ours else None
        self.overwrites = ours and self.name in _OVERWRITES


_about: dict[int, tuple[Any, ValueRule]] = {}
"""By identity: an overload's own hash takes longer than all else here."""


def about(func: Any) -> ValueRule:
    found = _about.get(id(func))
    if found is None:
        found = _about[id(func)] = (func, ValueRule(func))
    return found[1]


def flat(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from flat(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from flat(value)


def twins(values: Any, used: list[Value]) -> Any:
    """The same arguments with real tensors; raises `LookupError` where one has no value."""
    if isinstance(values, Tensor):
        value = value_of(values)
        if value is None:
            raise LookupError
        used.append(value)
        return real(values, value)
    if type(values) in (list, tuple):
        return type(values)(twins(value, used) for value in values)
    if isinstance(values, dict):
        return {key: twins(value, used) for key, value in values.items()}
    return values


def all_known(values: Any) -> bool:
    return all(tensor.numel() <= MOST_WHOLE and value_of(tensor) is not None for tensor in flat(values))


def follow(func: Any, args: Any, kwargs: Any, output: Any, recorded: bool, where: Callable[[], str]) -> None:
    """After an op on fake tensors: run it on their values, or forget, or assume."""
    op = about(func)
    if not op.follows:
        return
    if (op.overwrites or _places_all(op, args)) and is_renewed(args[0]):
        with no_dispatch():
            attach(args[0], torch.empty(args[0].shape, dtype=args[0].dtype))
    if not all_known(args) or (kwargs and not all_known(kwargs)):
        _unknown(op, func, args, output, where)
        return
    outputs = list(flat(output))
    most = MOST_DRAWN if op.draws and not recorded and not _of_batch and outputs and outputs[0].is_floating_point() else None
    if not outputs or not all(is_small(tensor, most) for tensor in outputs):
        _forget_written(op, args)
        return
    kind, words = (DRAWN, where()) if op.draws and recorded else (FOLLOWED, "")
    used: list[Value] = []
    try:
        made = run(func, args, kwargs, used, outputs if kind else None)
    except Exception:  # no kernel for this CPU, or one that wants more than values
        _forget_written(op, args)
        return
    worst = max(used, key=lambda value: value.kind, default=None)
    if worst is not None and worst.kind > kind:
        kind, words = worst.kind, worst.words
    if not op.writes:
        for fake, twin in zip(outputs, flat(made), strict=True):
            if fake.shape == twin.shape:  # a hint may say otherwise
                attach(fake, twin, kind, words)
    elif kind:
        for value in _written(op, args):
            if value.kind < kind:
                value.kind, value.words = kind, words


@contextmanager
def of_a_batch() -> Iterator[None]:
    """What is drawn in here is a batch, not weights."""
    _of_batch.append(True)
    try:
        yield
    finally:
        _of_batch.pop()


def _places_all(op: ValueRule, args: Any) -> bool:
    """Whether as many numbers are put into a row as it has places: `inverse[order] = arange(n)`."""
    index: Any = args[2] if op.name in ("scatter_", "index_copy_") and len(args) > 2 else None
    if op.name in ("index_put_", "_index_put_impl_") and len(args[1]) == 1:
        index = args[1][0]
    return isinstance(index, Tensor) and index.dtype == torch.int64 and args[0].dim() == 1 and index.numel() == args[0].numel()


def is_renewed(tensor: Tensor) -> bool:
    """Whether a tensor that is written all over is small enough to follow, and all of its storage."""
    most = MOST_OVERWRITTEN if tensor.is_floating_point() else MOST_DRAWN
    if tensor.layout is not torch.strided or not 0 < tensor.numel() <= most or value_of(tensor) is not None:
        return False
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def run(func: Any, args: Any, kwargs: Any, used: list[Value], drawn: list[Tensor] | None = None) -> Any:
    """An op's real outputs; `LookupError` where an input has no value. `drawn`: its fake outputs, if a step draws them."""
    real_args, real_kwargs = twins(args, used), twins(kwargs, used)
    with no_dispatch():
        middle = _middle_draw(func, real_args, drawn) if drawn is not None else None
        return middle if middle is not None else func(*real_args, **real_kwargs)


def _middle_draw(func: Any, args: Any, outputs: list[Tensor]) -> Any:
    """A single number drawn in a step is the one in the middle."""
    if len(outputs) != 1 or outputs[0].numel() != 1:
        return None
    shape, dtype, name = outputs[0].shape, outputs[0].dtype, about(func).name
    if name == "uniform_":
        low, high = _argument(func, args, "from", 0.0), _argument(func, args, "to", 1.0)
        return args[0].fill_((low + high) / 2)
    if name in _UNIFORM:
        return torch.full(shape, 0.5, dtype=dtype)
    if name in _WHOLE_DRAW:
        low, high = _argument(func, args, "low", 0), _argument(func, args, "high", 1)
        return torch.full(shape, (low + high) // 2, dtype=dtype)
    return None


def _written(op: ValueRule, args: Any) -> Iterator[Value]:
    for place in op.writes:
        for tensor in flat(args[place] if place < len(args) else None):
            value = value_of(tensor)
            if value is not None:
                yield value


def _forget_written(op: ValueRule, args: Any) -> None:
    for place in op.writes:
        for tensor in flat(args[place] if place < len(args) else None):
            forget(tensor)


def _unknown(op: ValueRule, func: Any, args: Any, output: Any, where: Callable[[], str]) -> None:
    if op.writes:
        _forget_written(op, args)
        return
    if op.rule is None:
        return
    outputs = list(flat(output))
    if not outputs or outputs[-1].is_floating_point() or outputs[-1].is_complex() or not is_small(outputs[-1]):
        return
    if op.name == "_to_copy" and not args[0].is_floating_point():
        return
    rule, words = op.rule
    with no_dispatch():
        made = rule(outputs, func, args)
    for fake, twin in zip(outputs, made, strict=True):
        if twin is not None and not fake.is_floating_point():
            attach(fake, twin, ASSUMED, f"{where() or f'aten.{op.name} in the batch'} {words}" if words else "")
