"""A tensor of which this rank has a part, and which the model's code sees as the whole.

Its data are this rank's part; its shape is that of the whole. Every torch call that meets one asks the rules how its
operands must lie, brings them there, runs on the parts, and says how the answer lies. Autograd sees the local calls and
the exchanges, and nothing else: backward needs no rules. What was learned about a call is kept for the next like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from foretell.errors import UserError
from foretell.plan.tensor.rules import base_name, decide, writes
from foretell.plan.tensor.types import PARTIAL, Operand, Place, Refuse, Result, SliceKey, global_shape
from foretell.runtime.check import dry_run
from foretell.runtime.parallel.tensor.exchange import TensorGroup
from foretell.runtime.parallel.tensor.special import SPECIAL
from foretell.trace.flow.calls import OPENED, call_name, opened

_local = torch._C.DisableTorchFunctionSubclass


class WholeSpec:
    """Shape of the whole and how it lies on which kind of team; one object for each, so that it is quick to look up."""

    __slots__ = ("level", "place", "shape")
    _all: ClassVar[dict[tuple[tuple[int, ...], Place, int], WholeSpec]] = {}

    def __init__(self, shape: tuple[int, ...], place: Place, level: int) -> None:
        self.shape, self.place, self.level = torch.Size(shape), place, level

    @classmethod
    def of(cls, shape: tuple[int, ...], place: Place, level: int = 1) -> WholeSpec:
        key = (shape, place, level)
        known = cls._all.get(key)
        if known is None:
            known = cls._all[key] = cls(shape, place, level)
        return known


class SplitTensor(Tensor):
    """Split or partial; a tensor that is whole is a plain one."""

    _spec: WholeSpec
    _team: TensorGroup
    _under: tuple[WholeSpec, TensorGroup] | None = None
    """How this rank's part is split once more, over the ranks of an inner team."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _NAMES.get(func)
        if name is None:
            name = _NAMES[func] = call_name(func)
        read = _READS.get(name)
        if read is not None:
            return read(*args, **kwargs)
        if name in _PASSED or (name not in _TENSORS and getattr(func, "__name__", "") in ("__get__", "__set__")):
            with _local():
                return func(*(_part(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
        if name == "__iter__":
            return iter(args[0].unbind(0))
        if name in OPENED:
            return opened(func)(*args, **kwargs)
        return _call(func, name, args, kwargs)

    def __repr__(self, **_: Any) -> str:
        return f"SplitTensor(shape={tuple(self._spec.shape)}, place={self._spec.place})"

    def __format__(self, _: str) -> str:
        return repr(self)


class CarriedTensor(SplitTensor):
    """Stands for a tensor of a compiler that traces, which must stay of its class."""

    _inner: Tensor


_CARRIER = torch.empty(0)
_FAKE: dict[type, type] = {}
"""Class of fake tensors → that of those seen as the whole; they compute as what they were."""


def split(local: Tensor, place: Place, team: TensorGroup) -> Tensor:
    """See this rank's part as the whole."""
    with _local():
        if isinstance(local, SplitTensor) and local._spec.level != team.level:
            return _joint(local.view_as(local), local, place, team)
        return _seen(local.view_as(local), _spec_of(local, place, team), team)


def plain(x: Tensor) -> Tensor:
    """This rank's part, as a tensor like any other."""
    if not isinstance(x, SplitTensor):
        return x
    with _local():
        return _part(x).view_as(_part(x))


def whole(values: Any) -> Any:
    """The same structure with every split tensor gathered into a plain one. All ranks must call it."""

    def gather(value: Any) -> Any:
        if not isinstance(value, SplitTensor):
            return value
        if value._under is not None:
            found = value._team.bring(inside(value, value._team), value._spec.place, None, False)
            return gather(found)
        with _local():
            return _brought(value, value._spec.place, None, False, value._team)

    return torch.utils._pytree.tree_map(gather, values)


def laid_bare(x: Tensor) -> Tensor:
    """The same tensor, from now on one like any other: for a tensor that no code will see again as what it was."""
    if type(x) is SplitTensor and x._under is None:
        x.__class__ = Tensor
        x.__dict__.pop("_ways", None)
        return x
    return inside(x, x._team) if isinstance(x, SplitTensor) else x


def inside(x: Tensor, team: TensorGroup) -> Tensor:
    """What the ranks of a team have of a tensor, as they see it: plain, or split over an inner team."""
    if not isinstance(x, SplitTensor) or x._spec.level != team.level:
        return x
    with _local():
        part = _part(x).view_as(_part(x))
        return part if x._under is None else _seen(part, *x._under)


def _part(x: Tensor) -> Tensor:
    """The tensor to compute with."""
    if dry_run.active is not None:
        return x  # who traces sees through
    kind = type(x)
    if kind is SplitTensor or not issubclass(kind, SplitTensor):
        return x
    if kind is CarriedTensor:
        return x._inner  # type: ignore[attr-defined,no-any-return]
    with _bare([x]):
        return x.view_as(x)


@contextmanager
def _bare(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Fake tensors that are seen as the whole, as plain fake tensors for a while."""
    kinds = [(x, type(x)) for x in {id(x): x for x in tensors}.values() if type(x) in _FAKE.values()]
    for x, kind in kinds:
        x.__class__ = kind.__mro__[2]
    try:
        yield
    finally:
        for x, kind in kinds:
            x.__class__ = kind


# ---------------------------------------------------------------- what is read of a tensor


def _size(x: SplitTensor, dim: int | None = None) -> Any:
    return x._spec.shape if dim is None else x._spec.shape[dim]


_READS: dict[str, Callable[..., Any]] = {
    "shape": lambda x: x._spec.shape, "size": _size, "dim": lambda x: len(x._spec.shape),
    "ndim": lambda x: len(x._spec.shape), "ndimension": lambda x: len(x._spec.shape),
    "numel": lambda x: x._spec.shape.numel(), "nelement": lambda x: x._spec.shape.numel(),
    "__len__": lambda x: x._spec.shape[0], "is_same_size": lambda x, y: tuple(x.shape) == tuple(y.shape),
}  # fmt: skip
_PASSED = frozenset({
    "__hash__", "_is_view", "backward", "data_ptr", "element_size", "get_device", "is_complex", "is_conj",
    "is_contiguous", "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_signed", "is_storage",
    "is_tensor", "record_stream", "register_hook", "register_post_accumulate_grad_hook", "requires_grad",
    "requires_grad_", "retain_grad", "storage_offset", "stride", "untyped_storage",
})  # fmt: skip
"""What this rank's part answers as it is."""
_TENSORS = frozenset({"T", "mT", "data", "real", "imag", "H", "mH"})
"""Properties that are tensors; the others are read of this rank's part."""
_NAMES: dict[Any, str] = {}


# ---------------------------------------------------------------- one call


class _Known:
    """What is to be done for calls of one kind."""

    __slots__ = ("args", "as_it_is", "func", "kwargs", "out", "shares", "special", "specs", "ways")

    def __init__(self, func: Any, slots: list[Operand], result: Result) -> None:
        self.func = func
        self.args, self.kwargs, self.out = result.args, result.kwargs, result.out
        self.special = SPECIAL[result.special] if result.special else None
        self.shares = any(place is not None for place in result.places(1))
        self.ways: list[tuple[Place, Place]] = [
            (PARTIAL, PARTIAL) if slot.slot in result.unread else (slot.place, result.want.get(slot.slot))
            for slot in slots
        ]
        self.as_it_is = result.args is None and all(
            have == want and not (want is None and self.shares) for have, want in self.ways
        )
        """Operands and arguments need nothing."""
        self.specs: dict[tuple[int, ...], WholeSpec] = {}
        """Shape of a part → that of the whole."""


def _call(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    tensors: list[Any] = []
    known, team = _look_up(func, name, args, kwargs, tensors)
    if not team.level and any(isinstance(t, SplitTensor) and (t._under or t._spec.level) for t in tensors):
        return _call_within(known, team, tensors, args, kwargs)
    with _local():
        if not known.as_it_is:
            values = [
                _brought(t, have, want, known.shares, team) for t, (have, want) in zip(tensors, known.ways, strict=True)
            ]
            args, kwargs = _arguments(known, args, kwargs, values)
        elif any(type(t) is not SplitTensor for t in tensors):
            args, kwargs = _arguments(known, args, kwargs, [_part(t) for t in tensors])
        output = known.special(team, known.func, *args, **kwargs) if known.special else known.func(*args, **kwargs)
        if known.out is None:
            return output
        return _wrapped(output, known, team, args)


def _call_within(known: _Known, team: TensorGroup, tensors: list[Any], args: Any, kwargs: Any) -> Any:
    """The same where parts are split once more: what each rank then calls is a call on tensors split over the inner
    team, which knows what to do with it."""
    values = [
        team.bring(inside(t, team), have, want, known.shares) for t, (have, want) in zip(tensors, known.ways, strict=True)
    ]
    args, kwargs = _arguments(known, args, kwargs, values)
    output = known.special(team, known.func, *args, **kwargs) if known.special else known.func(*args, **kwargs)
    if known.out is None:
        return output
    with _local():
        return _wrapped(output, known, team, args)


def _look_up(func: Any, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> tuple[_Known, TensorGroup]:
    """What is known of a call like this; its tensors are collected on the way."""
    parts = [func]
    for value in args:
        kind = type(value)
        if kind is SplitTensor:
            tensors.append(value)
            parts.append(value._spec)
        elif kind is int:
            parts.append(value)
        else:
            parts.append(_key(value, tensors))
    for key, value in kwargs.items():
        parts += (key, _key(value, tensors))
    team = next(t._team for t in tensors if isinstance(t, SplitTensor))
    if team.level:
        team = next((t._team for t in tensors if isinstance(t, SplitTensor) and not t._spec.level), team)
    try:
        found = team.known.get(tuple(parts))
    except TypeError:  # an argument that cannot be a key
        return _learn(func, name, args, kwargs, team), team
    if found is None:
        found = team.known[tuple(parts)] = _learn(func, name, args, kwargs, team)
    return found, team


def _key(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return value._spec if isinstance(value, SplitTensor) else (value.shape, value.dtype is torch.bool)
    if isinstance(value, (tuple, list)):
        return tuple([_key(item, tensors) for item in value])
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    return (type(value), value) if isinstance(value, (bool, float)) else value


def _learn(func: Any, name: str, args: Any, kwargs: Any, team: TensorGroup) -> _Known:
    slots: list[Operand] = []
    given = tuple(_operand(value, slots, team) for value in args)
    named = {key: _operand(value, slots, team) for key, value in kwargs.items()}
    try:
        result = decide(name, given, named, team.setting)
    except Refuse as refusal:
        if writes(name) and slots[0].place is not None:
            raise UserError(
                f"{name} writes over a tensor of which every rank has a part: {refusal.reason}",
                "leave the layer before it out of the plan's split.rules, or set split.sequence to false",
            ) from None
        result = Result(None)
    first = slots[0].place
    if name.startswith("__i") and base_name(name)[1] and (result.want.get(0) != first or result.places(1)[0] != first):
        func = getattr(Tensor, f"__{name[3:]}")
    return _Known(func, slots, result)


def _operand(value: Any, slots: list[Operand], team: TensorGroup) -> Any:
    if isinstance(value, Tensor):
        mine = isinstance(value, SplitTensor) and value._spec.level == team.level
        place = value._spec.place if mine else None  # type: ignore[attr-defined]
        slots.append(Operand(len(slots), tuple(value.shape), place, value.dtype is torch.bool))
        return slots[-1]
    if isinstance(value, (tuple, list)):
        return tuple(_operand(item, slots, team) for item in value)
    return SliceKey(value.start, value.stop, value.step) if isinstance(value, slice) else value


def _arguments(known: _Known, args: Any, kwargs: Any, values: list[Tensor]) -> tuple[Any, Any]:
    if known.args is None:
        rest = iter(values)
        args = [_refilled(value, rest) for value in args]
        return args, {name: _refilled(value, rest) for name, value in kwargs.items()}
    kwargs = {name: _built(value, values) for name, value in (known.kwargs or {}).items()}
    return [_built(value, values) for value in known.args], kwargs


def _refilled(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) is tuple:
        return tuple([_refilled(item, tensors) for item in value])
    if isinstance(value, list):
        return [_refilled(item, tensors) for item in value]
    return value


def _built(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Operand):
        return tensors[value.slot]
    if isinstance(value, SliceKey):
        return slice(*value)
    return tuple(_built(item, tensors) for item in value) if isinstance(value, tuple) else value


def _brought(x: Tensor, have: Place, want: Place, shares: bool, team: TensorGroup) -> Tensor:
    """An operand as a call wants it. What was brought once is kept beside the tensor for the next call."""
    if have == want and (want is not None or not shares or not x.requires_grad):
        return _part(x)
    ways = x.__dict__.get("_ways")
    if ways is None:
        ways = {}
        if have is not None or x.grad_fn is not None or not x.requires_grad:
            x._ways = ways  # type: ignore[attr-defined]
    key = (want, shares, torch.is_grad_enabled())
    version = 0 if x.is_inference() else x._version
    found = ways.get(key)
    if found is not None and found[0] == version:
        return found[1]  # type: ignore[no-any-return]
    brought = team.bring(_part(x), have, want, shares)
    if have is not None or want is None or not brought._is_view():  # a slice that is a view holds its tensor
        ways[key] = (version, brought)
    return brought


# ---------------------------------------------------------------- answers


def _wrapped(output: Any, known: _Known, team: TensorGroup, args: Any) -> Any:
    if isinstance(output, Tensor):
        return _answer(output, known.out[0] if isinstance(known.out, tuple) else known.out, known, team, args)
    if not isinstance(output, (tuple, list)):
        return output
    places = known.out if isinstance(known.out, tuple) else (known.out,) * len(output)
    found = [
        _answer(item, place, known, team, args) if isinstance(item, Tensor) else item
        for item, place in zip(output, places, strict=True)
    ]
    return found if isinstance(output, list) else tuple(found) if type(output) is tuple else type(output)(found)


def _answer(x: Tensor, place: Place, known: _Known, team: TensorGroup, args: Any) -> Tensor:
    if place is None:
        return x
    if isinstance(x, SplitTensor) and x._spec.level != team.level:
        return _joint(x.view_as(x) if any(x is value for value in args) else x, x, place, team)
    shape = x.shape
    spec = known.specs.get(shape)
    if spec is None or spec.place != place:
        spec = known.specs[shape] = _spec_of(x, place, team)
    if type(x) is SplitTensor and x._spec is spec:
        return x
    if any(x is value for value in args):
        x = x.view_as(x)
    return _seen(x, spec, team)


def _joint(fresh: Tensor, x: SplitTensor, place: Place, team: TensorGroup) -> Tensor:
    """A fresh tensor, whose part is split over an inner team as that of `x` is, as split over an outer one too."""
    under = (x._spec, x._team)
    fresh.__dict__.pop("_ways", None)
    spec = WholeSpec.of(global_shape(tuple(under[0].shape), place), place, team.level)
    found = _seen(fresh, spec, team)
    found._under = under  # type: ignore[attr-defined]
    return found


def _spec_of(part: Tensor, place: Place, team: TensorGroup) -> WholeSpec:
    return WholeSpec.of(global_shape(tuple(part.size()), place), place, team.level)


def _seen(x: Tensor, spec: WholeSpec, team: TensorGroup) -> Tensor:
    """Make a fresh tensor one that the model's code sees as the whole."""
    kind = type(x)
    if kind is Tensor or kind is SplitTensor:
        x.__class__ = SplitTensor
    elif issubclass(kind, FakeTensor):
        kind = kind.__mro__[2] if kind in _FAKE.values() else kind
        with _bare([x]):
            x = x.view_as(x)
        if kind not in _FAKE:
            _FAKE[kind] = type("SplitFake", (SplitTensor, kind), {})
        x.__class__ = _FAKE[kind]
    else:
        inner = x
        with _disable_current_modes():
            x = _CARRIER.as_subclass(CarriedTensor)
        x._inner = inner  # type: ignore[attr-defined]
    x._spec, x._team = spec, team  # type: ignore[attr-defined]
    return x
