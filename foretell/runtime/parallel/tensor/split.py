"""Tensor parallelism from outside the model: split its parameters, and let its own code run on the parts.

    record the flow ─► derive or check rules ─► parameters become DTensors ─► modules hand out this rank's parts

Parameters keep their names and their place in the modules. A fused layer is stored so that each rank's share is one
piece; `TensorParallel.whole` and `TensorParallel.stored` go between that order and the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Sharded

from foretell.errors import UserError
from foretell.plan.tensor.derive import Derived, derive, refusal
from foretell.plan.tensor.types import Shard
from foretell.plan.types import Plan, Split
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.parallel.tensor import values as tensor_values
from foretell.runtime.parallel.tensor.exchange import TensorGroup, joined, part
from foretell.trace.flow.calls import Flow
from foretell.trace.flow.record import record
from foretell.trace.record.step import Batch, Loss, Workload

gathered = tensor_values.whole


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """What was done to a model."""

    derived: Derived
    report: tuple[str, ...]
    team: TensorGroup
    places: Mapping[str, Shard] = field(default_factory=dict)
    """Name of a split parameter → how it is split. All others are whole on every rank of the axis."""

    @property
    def rules(self) -> Mapping[str, str]:
        """As a plan file has them."""
        return self.derived.rules

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, its gradient or its optimizer state, gathered and in the model's own order.

        Where the tensor is a DTensor all ranks that hold it must call this; a plain one is taken as whole already.
        """
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return reordered(full, self.places.get(name), self.team.size, stored=False)

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """The other way: a whole tensor in the model's own order → in the order its parts are stored."""
        return reordered(tensor, self.places.get(name), self.team.size, stored=True)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """How a model is to be split, before anything of it is."""

    flow: Flow
    derived: Derived
    team: TensorGroup


def split(
    model: nn.Module, plan: Plan, ranks: Ranks, batch: Batch, loss: Loss | None = None, *, flow: Flow | None = None
) -> TensorParallel | None:
    """Split a model in place over the plan's tensor axis; None where that has one rank. See `prepare`."""
    found = prepare(model, plan, ranks, batch, loss, flow=flow)
    return None if found is None else apply(model, found.derived, found.team)


def prepare(
    model: nn.Module, plan: Plan, ranks: Ranks, batch: Batch, loss: Loss | None = None, *, flow: Flow | None = None
) -> Prepared | None:
    """Find out how to split a model over the plan's tensor axis; None where that has one rank.

    `batch` and `loss` are those of one micro-batch: the flow is recorded with them, on fake tensors. Every rank must
    have built the same model. Raises a `UserError` that says why where the split cannot be proven right.
    """
    mesh = ranks.submesh(("tp",))
    if mesh is None:
        return None
    wish = plan.split or Split()
    flow = flow or record(Workload(model, batch, loss))
    derived = derive(
        flow,
        mesh.size(),
        sequence=wish.sequence,
        loss=wish.loss,
        rules=wish.rules,
        own=getattr(model, "_tp_plan", None),
    )
    trouble = None if wish.rules else refusal(derived)
    if trouble is not None:
        raise trouble
    for function in flow.functions:
        gather_for(function)
    return Prepared(flow=flow, derived=derived, team=TensorGroup(mesh, derived.setting))


def apply(model: nn.Module, derived: Derived, team: TensorGroup) -> TensorParallel:
    """Split a model in place as derived."""
    _check(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    places = {parameter: next(filter(None, map(derived.place, aliases)), None) for parameter, aliases in names.items()}
    spread = {parameter: _distributed(parameter, place, team) for parameter, place in places.items()}
    for module in list(model.modules()):
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        if own:
            module._parameters.update({name: spread[parameter] for name, parameter in own.items()})
            _hand_out(module, {name: places[parameter] for name, parameter in own.items()}, team)
    named = {name: place for parameter, place in places.items() if place is not None for name in names[parameter]}
    return TensorParallel(derived=derived, report=derived.report(), team=team, places=named)


def _distributed(parameter: nn.Parameter, place: Shard | None, team: TensorGroup) -> nn.Parameter:
    """A parameter as a DTensor of which this rank has its part."""
    data = parameter.detach()
    kept = (
        data if place is None else part(data, place, team.rank, team.size).clone(memory_format=torch.contiguous_format)
    )
    placement = Replicate() if place is None else Sharded(place.dim)
    spread = DTensor.from_local(
        kept, team.mesh, [placement], run_check=False, shape=data.shape, stride=data.contiguous().stride()
    )
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def reordered(full: Tensor, place: Shard | None, size: int, *, stored: bool) -> Tensor:
    """Between the model's own order and that in which each rank's share of every segment lies together."""
    if place is None or len(place.segments) == 1:
        return full
    if stored:
        return torch.cat([part(full, place, rank, size) for rank in range(size)], dim=place.dim)
    return joined(full.chunk(size, dim=place.dim), place)


# ---------------------------------------------------------------- parameters as the model's code sees them


def _hand_out(module: nn.Module, places: Mapping[str, Shard | None], team: TensorGroup) -> None:
    """Let a module's code find this rank's part where it reads a parameter."""
    plain = type(module)
    body = {name: property(_getter(name, place, team)) for name, place in places.items()}
    module.__class__ = type(
        plain.__name__, (plain,), {**body, "__module__": plain.__module__, "__doc__": plain.__doc__}
    )


def _getter(name: str, place: Shard | None, team: TensorGroup) -> Callable[[nn.Module], Any]:
    def get(module: nn.Module) -> Any:
        parameter = module._parameters[name]
        # A parameter that is also sharded over data ranks is on a larger mesh: nobody computes with it then.
        if not isinstance(parameter, DTensor) or not (
            parameter.device_mesh is team.mesh or parameter.device_mesh == team.mesh
        ):
            return parameter
        local = parameter.to_local()
        return local if place is None else tensor_values.split(local, place, team)

    return get


def gather_for(function: Any) -> None:
    """A user's own autograd function, forward and backward, is code for whole tensors."""
    plain = function.__dict__.get("apply")
    if plain is not None and getattr(plain, "_gathers", False):
        return
    inherited = function.apply

    def apply(*args: Any, **kwargs: Any) -> Any:
        return inherited(*gathered(args), **gathered(kwargs))

    found = staticmethod(apply)
    found._gathers = True  # type: ignore[attr-defined]
    function.apply = found


def _check(model: nn.Module) -> None:
    """Refuse modules that keep their parameters where they cannot be replaced."""
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise UserError(
                f"{path or type(model).__name__} keeps its weights in a list of its own ({type(module).__name__})",
                "use tp 1 and other axes of the mesh",
            )
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules") and any(
                isinstance(item, nn.Parameter) for item in _items(value)
            ):
                raise UserError(
                    f"{path or type(model).__name__} keeps a parameter in '{name}', where it cannot be replaced",
                    "keep parameters as attributes of their module, or use tp 1",
                )


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield value
