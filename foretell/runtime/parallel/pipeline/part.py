"""One stage of a model: the user's module with its own forward, of which only the stage's piece computes.

The module stays the object it was. Parameters of other stages are taken out and ghosts put in their places; modules
that lie whole within a stage, and the model itself, get a class that adds to theirs what happens when they are called:

    before the stage begins   a module with parameters is not run: it gives ghosts of the shapes it would give
    the stage's first block   ghosts among its arguments get the values that came from the stage before
    within the stage          modules run as they are, on values
    the next stage's block    is not run: its arguments are what goes to the next stage, and forward ends

Forward is the user's code throughout, so a value is either what a single process computes or a ghost; and a ghost that
reaches the end is an error, never a number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from foretell.errors import InternalError, UserError
from foretell.runtime.parallel.pipeline.ghost import (
    Ghost,
    form_of,
    ghost_like,
    ghost_maker,
    holds_ghost,
    is_ghost,
    leaves_of,
    resolve,
)
from foretell.trace.flow.stages import StageFlow
from foretell.trace.record.step import Batch, Loss, Workload, call_model, compute_loss

if TYPE_CHECKING:
    from foretell.runtime.parallel.context.positions import ContextParallel

NUMBER = "micro_batch_number"
"""Keyword by which the schedule says which micro-batch a stage is to run."""
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses from one stage to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> BoundaryTensor:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=True)


class _End(BaseException):
    """Forward has reached the next stage. Not an Exception: no handler of the user's may take it for an error."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.values = values


@dataclass(eq=False)
class StageModules:
    """What the modules of one stage know in common."""

    flow: StageFlow
    index: int
    loss: Loss | None
    receives: tuple[int, ...] | None = None
    """Which leaves of the first block's arguments come from the stage before; None while that is to be found out."""
    samples: tuple[Tensor, ...] = ()
    """What stood for them when that was found out."""
    sends: tuple[int, ...] | None = None
    """Which leaves of the next stage's first block's arguments go there."""
    copies: bool = False
    """The first block writes into its input, so it gets a copy."""
    fences: bool = False
    """Forward draws random numbers before the stage: other stages' numbers are ghosts here."""
    parameter_dtype: torch.dtype | None = None
    """In which parameters are used where that is not the dtype they are held in."""
    cast: frozenset[str] = frozenset()
    """Modules whose float inputs are cast to it."""
    split_backward: bool = False
    """The schedule detaches what a stage gives in place, which views do not allow."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around forward and loss: autocast."""
    gather: Callable[[Tensor], Tensor] = lambda value: value
    """Makes what goes to the next stage plain, where tensors are split."""
    context_of: ContextParallel | None = None
    """How positions are shared, where they are."""
    batches: Sequence[Batch] = ()
    """Micro-batches of the step that is running."""
    turn: int | None = None
    """Which comes next, where the schedule's numbers cannot be read: on fake tensors."""
    scale: float | Tensor = 1.0
    """Of the loss, so that gradients are the mean over micro-batches; a tensor where they are scaled besides."""
    losses: list[Tensor] = field(default_factory=list)
    """Of the step that is running, unscaled."""
    received: tuple[Tensor, ...] = ()
    running: bool = False
    entered: bool = False
    fence: _Fence | None = None
    drew: bool = False
    """Whether the last forward drew random numbers before the stage."""
    shapes: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.flow.stages - 1

    def number(self, given: Tensor) -> int:
        """Which micro-batch to run."""
        if self.turn is None:
            return int(given)
        self.turn += 1
        return self.turn - 1

    def run(self, model: nn.Module, received: tuple[Tensor, ...], batch: Batch) -> Any:
        """What this stage gives for one micro-batch: tensors for the next stage, or the loss."""
        self.received, self.running, self.entered = received, True, self.is_first
        if self.fences and not self.entered:
            self.fence = _Fence()
            self.fence.__enter__()
        try:
            with self.context():
                if self.is_first and self.context_of is not None:
                    batch = self.context_of.open(batch)
                if not self.is_last:
                    values = call_model(model, batch)
                    if not (isinstance(values, tuple) and all(isinstance(value, Tensor) for value in values)):
                        raise _elsewhere(self.flow.cuts[self.index])
                    return values
                loss = compute_loss(Workload(model, batch, self.loss))
                if self.context_of is not None and not holds_ghost(loss):
                    loss = self.context_of.finish(loss)
        finally:
            self.received, self.running = (), False
            self._lower_fence()
        if not self.entered:
            raise _elsewhere(self.flow.cuts[self.index - 1])
        if holds_ghost(loss):
            raise lost(loss, "the loss")
        self.losses.append(loss.detach())
        return loss * self.scale if isinstance(self.scale, Tensor) or self.scale != 1.0 else loss

    def enter(self, args: Any, kwargs: Any) -> None:
        """Give the ghosts among the first block's arguments their values."""
        self._lower_fence()
        leaves = pytree.tree_leaves((args, kwargs))
        places: list[int] = []
        for place, leaf in enumerate(leaves):
            if is_ghost(leaf) and not any(leaves[known] is leaf for known in places):
                places.append(place)
        if self.receives is None:
            self.receives = tuple(places)
            self.samples = tuple(_sample(leaves[place], self.flow.cuts[self.index - 1]) for place in places)
            self.received = self.samples
        if self.receives != tuple(places) or len(places) != len(self.received):
            raise _elsewhere(self.flow.cuts[self.index - 1])
        for place, value in zip(places, self.received, strict=True):
            if self.context_of is not None:
                value = self.context_of.receive(value, tuple(leaves[place].shape))
            if tuple(leaves[place].shape) != tuple(value.shape):
                raise InternalError(
                    f"stage {self.index} got {tuple(value.shape)} where {tuple(leaves[place].shape)} was due"
                )
            leaves[place].value = value.clone() if self.copies else value
        self.entered = True

    def leave(self, args: Any, kwargs: Any) -> _End:
        """What goes to the next stage."""
        leaves = pytree.tree_leaves(resolve((args, kwargs)))
        if not self.entered:
            raise _elsewhere(self.flow.cuts[self.index - 1])
        if self.sends is None or (self.sends and self.sends[-1] >= len(leaves)):
            raise _elsewhere(self.flow.cuts[self.index])
        values = []
        for place in self.sends:
            value = leaves[place]
            if is_ghost(value) or not isinstance(value, Tensor):
                raise lost(value, f"the stage that begins with {self.flow.cuts[self.index]}")
            values.append(self._sendable(value))
        return _End(tuple(values))

    def _sendable(self, value: Tensor) -> Tensor:
        """Contiguous, part of this stage's graph, and what the schedule may detach."""
        value = self.gather(value).contiguous()
        if torch.is_grad_enabled() and not value.requires_grad:
            return value.detach().requires_grad_()
        relayed = any(value is given for given in self.received)
        return value.clone() if self.split_backward and (relayed or value._is_view()) else value

    def _lower_fence(self) -> None:
        if self.fence is not None:
            if _get_current_dispatch_mode() is not self.fence:
                raise UserError(
                    "forward draws random numbers before this stage begins, inside a dispatch mode of its own",
                    "draw them with the data, or leave out the pipeline",
                )
            self.fence.__exit__(None, None, None)
            self.drew = self.fence.drawn
            self.fence = None


class _Fence(TorchDispatchMode):
    """Before a stage begins: random numbers are drawn by the stage that computes with them, and are ghosts here."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random or any(isinstance(leaf, Ghost) for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise UserError(
                f"forward fills a tensor with random numbers ({func}) before the stage begins",
                "draw them with the data, or leave out the pipeline",
            )
        self.drawn = True
        return pytree.tree_map_only(
            Tensor, lambda leaf: ghost_like(leaf, f"random numbers ({func})"), func(*args, **kwargs)
        )


# --- what a call of a module does ------------------------------------------------------------------------------------


class PieceModule(nn.Module):
    """Added before the class of a module that lies whole within stages."""

    _stage: StageModules
    _path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.__dict__["_stage"]
        if not stage.running:
            return super().__call__(*args, **kwargs)
        path = self.__dict__["_path"]
        cuts = stage.flow.cuts
        if not stage.is_last and path == cuts[stage.index]:
            raise stage.leave(args, kwargs)
        if not stage.is_first and path == cuts[stage.index - 1] and not stage.entered:
            stage.enter(args, kwargs)
        if not stage.entered:
            return _shapes_of(stage, path, super().__call__, args, kwargs)
        if stage.index not in stage.flow.modules[path]:
            raise _elsewhere(path)
        args, kwargs = resolve((args, kwargs))
        if holds_ghost((args, kwargs)):
            raise lost((args, kwargs), path)
        return super().__call__(*args, **kwargs)


class WholeModule(nn.Module):
    """Added before the class of the model itself: called by the schedule, it runs the stage."""

    _stage: StageModules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = self.__dict__["_stage"]
        if NUMBER in kwargs:
            return stage.run(self, args, stage.batches[stage.number(kwargs[NUMBER])])
        return super().__call__(*args, **kwargs)


@functools.cache
def _with(added: Any, kind: Any) -> Any:
    return type(kind.__name__, (added, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _shapes_of(stage: StageModules, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Ghosts of what a module would give: it is run on ghosts the first time, its shapes remembered after that."""
    given = list(leaves_of((args, kwargs)))
    key = (path, *map(_key, given), tuple(kwargs), _autocast(given))
    if key not in stage.shapes:
        if stage.parameter_dtype is not None and path in stage.cast:
            args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: _cast(leaf, stage.parameter_dtype), (args, kwargs))
        with torch.no_grad():
            outputs, shape = pytree.tree_flatten(call(*args, **kwargs))
        stage.shapes[key] = shape, [_described(leaf, given, path) for leaf in outputs]
    shape, found = stage.shapes[key]
    made = [given[what] if kind == "argument" else what() if kind == "ghost" else what for kind, what in found]
    return made[0] if shape.is_leaf() else pytree.tree_unflatten(made, shape)


def _described(leaf: Any, given: list[Any], path: str) -> tuple[str, Any]:
    place = next((place for place, other in enumerate(given) if other is leaf and isinstance(leaf, Tensor)), None)
    if place is not None:
        return "argument", place
    if isinstance(leaf, Tensor):
        return "ghost", ghost_maker(leaf, f"the output of {path}")
    if isinstance(leaf, _CONSTANTS):
        return "constant", leaf
    raise UserError(
        f"{path} gives a {type(leaf).__name__}, which cannot stand in for it on other stages",
        "let blocks give tensors, or leave out the pipeline",
    )


def _key(leaf: Any) -> Any:
    return form_of(leaf) if isinstance(leaf, (Tensor, *_CONSTANTS)) else type(leaf)


def _autocast(leaves: list[Any]) -> torch.dtype | None:
    """The dtype autocast computes in, if it is on."""
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None:
        return None
    kind = (first.form[3] if isinstance(first, Ghost) else first.device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _sample(ghost: Any, cut: str) -> Tensor:
    """A value of a ghost's shape, for the forward that finds out what crosses."""
    if not isinstance(ghost, Ghost):
        raise UserError(
            f"{cut} takes a distributed tensor from the stage before", "cut where activations are plain tensors"
        )
    if not ghost.dtype.is_floating_point:
        raise UserError(
            f"{cut} takes {ghost.origin} from the stage before, and it is {ghost.dtype}: only numbers that have a "
            "gradient can cross",
            "cut elsewhere, or leave out the pipeline",
        )
    return torch.empty(ghost.size(), dtype=ghost.dtype, device=ghost.device, requires_grad=True)


def lost(value: Any, needed: str) -> UserError:
    """A value that a stage needs and that no block hands on to it."""
    ghosts = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Ghost)]
    what = ghosts[0].origin if ghosts else "a value"
    return UserError(
        f"{needed} needs {what}, which an earlier stage computes and does not hand on through the block that is cut at",
        "cut where every tensor that is used later is an argument of the block, or leave out the pipeline",
    )


def _elsewhere(path: str) -> UserError:
    return UserError(
        f"forward took another way through {path} than when it was cut",
        "a pipeline needs a forward that takes the same way through the blocks every time",
    )


# --- making a stage of a model ---------------------------------------------------------------------------------------


def stage_of(model: nn.Module, stage: StageModules) -> list[Callable[[], None]]:
    """Make this model the stage; returns what undoes it, to be called in reverse."""
    undo: list[Callable[[], None]] = []
    held = {id(parameter) for name, parameter in model.named_parameters() if name in stage.flow.held(stage.index)}
    called = {path: model.get_submodule(path) for path in stage.flow.modules}
    for path, module in called.items():
        if stage.index not in stage.flow.modules[path]:
            _take_buffers(module, path, undo)
    for path, module in model.named_modules():
        _take_parameters(module, path, held, stage, undo)
    for path, module in called.items():
        _swap(module, PieceModule, {"_stage": stage, "_path": path}, undo)
    _swap(model, WholeModule, {"_stage": stage, "forward": _ending(model.forward)}, undo)
    return undo


def _ending(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Forward that gives what goes to the next stage, where it ends there: hooks on the model then see it."""

    @functools.wraps(forward)
    def ending(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _End as end:
            return end.values

    return ending


def _take_parameters(module: nn.Module, path: str, held: set[int], stage: StageModules, undo: list[Any]) -> None:
    absent = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in held}
    if not absent:
        return
    before, attributes = dict(module._parameters), dict(vars(module))
    ghosts: dict[int, Tensor] = {}
    for name, parameter in absent.items():
        del module._parameters[name]
        label = f"{path}.{name}" if path else name
        ghosts[id(parameter)] = vars(module)[name] = ghost_like(parameter.detach(), label, stage.parameter_dtype)
    for name, value in attributes.items():  # recurrent layers keep their weights in a list besides
        if isinstance(value, list) and any(id(item) in ghosts for item in value):
            vars(module)[name] = [ghosts.get(id(item), item) for item in value]

    def back() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        module._parameters.clear()
        module._parameters.update(before)

    undo.append(back)


def _take_buffers(module: nn.Module, path: str, undo: list[Any]) -> None:
    for inner, owner in module.named_modules():
        if not any(buffer is not None for buffer in owner._buffers.values()):
            continue
        before, attributes = dict(owner._buffers), dict(vars(owner))
        for name, buffer in before.items():
            if buffer is not None:
                del owner._buffers[name]
                vars(owner)[name] = ghost_like(buffer, ".".join(filter(None, (path, inner, name))))

        def back(
            owner: nn.Module = owner, before: dict[str, Any] = before, attributes: dict[str, Any] = attributes
        ) -> None:
            vars(owner).clear()
            vars(owner).update(attributes)
            owner._buffers.clear()
            owner._buffers.update(before)

        undo.append(back)


def _swap(module: nn.Module, added: type, attributes: Mapping[str, Any], undo: list[Any]) -> None:
    kind: Any = type(module)
    before = dict(vars(module))
    try:
        module.__class__ = _with(added, kind)
    except TypeError as error:
        raise UserError(f"{kind.__name__} cannot be part of a stage: {error}", "leave out the pipeline") from error
    vars(module).update(attributes)

    def back() -> None:
        module.__class__ = kind  # type: ignore[assignment]
        for name in attributes:
            vars(module).pop(name, None)
            if name in before:
                vars(module)[name] = before[name]

    undo.append(back)


@contextmanager
def staged(model: nn.Module, stage: StageModules) -> Iterator[None]:
    """The model as this stage, for a while."""
    undo = stage_of(model, stage)
    try:
        yield
    finally:
        for back in reversed(undo):
            back()
