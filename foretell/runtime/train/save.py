"""A job's state as pieces of whole tensors, and back: between a plan at work and a checkpoint of any other plan.

Tensors go by the names of the whole model. What a rank holds of one follows from how it was spread: first its share of
the tensor axis, then its rows of what is left. What several ranks hold alike is written by one of them, evenly shared.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.checkpoint.boxes import BoxPart, TensorSpread, local_shape, parts
from foretell.checkpoint.finite import NONFINITE
from foretell.checkpoint.format import OWN, Damaged, TensorMeta
from foretell.checkpoint.read import Reader
from foretell.checkpoint.saver import NotSaved, Saver, SaveResult
from foretell.checkpoint.store import SavedCheckpoint, candidates, complete, look
from foretell.checkpoint.tree import dtype_name
from foretell.checkpoint.write import TensorPiece
from foretell.errors import InternalError
from foretell.plan.mesh import OWN_RANKS
from foretell.plan.types import MASTER, Plan
from foretell.runtime.offload.memory.arena import available
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.apply import Job
from foretell.runtime.parallel.ranks import APART, SPREAD, Ranks
from foretell.runtime.parallel.runners import Piped
from foretell.runtime.process.control import Control
from foretell.runtime.train.distrust import data_of

__all__ = ["NONFINITE", "Damaged", "NotSaved", "Reader", "SaveResult", "SavedCheckpoint", "Saver", "candidates", "complete", "data_of", "look"]

MODEL, OPTIMIZER = "model", "optimizer"
SYNC = "sync"
"""What a replica that steps alone has for itself."""
PLAN_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer's group that say how it is computed: the plan's, never the checkpoint's."""
_AXES = {SPREAD: ("dp_shard", "cp"), APART: ("dp_shard",), "ep": ("dp_shard",)}
"""Dimensions of a mesh that are not an axis of the plan with ranks of its own → the axes they are made of."""
_FIRST = {"tp": 0, "ep": 1}
"""What was cut first: before data parallelism there are tensor splits and experts."""


@dataclass(frozen=True)
class Members:
    """A control as the saver wants it."""

    control: Control

    @property
    def rank(self) -> int:
        return self.control.ranks.rank

    @property
    def world(self) -> int:
        return self.control.ranks.world

    def gather(self, value: Any) -> list[Any]:
        return self.control.gather(value)


def room(ranks: Ranks) -> Callable[[], int | None]:
    """Tells how much host memory this rank may take: its share of what its machine has."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))

    def ask() -> int | None:
        there = available()
        return there // beside if there is not None else None

    return ask


def whole_of(model: nn.Module, plan: Plan) -> dict[str, TensorMeta]:
    """Every parameter of a model before anything is done to it, as its checkpoint has it."""

    def dtype(parameter: nn.Parameter) -> str:
        casts = plan.precision in ("bf16", MASTER) and parameter.is_floating_point()
        return "bfloat16" if casts else dtype_name(parameter.dtype)

    return {f"{MODEL}/{name}": TensorMeta(tuple(p.shape), dtype(p)) for name, p in model.named_parameters()}


def trained_of(job: Job) -> dict[str, TensorMeta]:
    """The same of a job with adapters, whose checkpoints have nothing else."""
    return {f"{MODEL}/{name}": TensorMeta(shape, dtype_name(dtype)) for name, (shape, dtype) in job.shapes.items()}


# --- what this rank has ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """A tensor of this rank: a parameter or something like it that the optimizer keeps."""

    name: str
    tensor: Tensor
    """This rank's piece."""
    shape: tuple[int, ...]
    parts: tuple[BoxPart, ...]
    alike: tuple[str, ...]
    """Axes along which other ranks have the same piece."""
    read: Callable[[int, int], Tensor] | None = None
    """Gives elements of the piece, from one to another, where it is on disk."""

    @property
    def bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def held_of(job: Job, name: str, full_name: str, tensor: Tensor) -> _Held:
    """How this rank's piece of a tensor lies in the whole; `name` is the parameter's."""
    cuts: list[TensorSpread] = []
    spread: set[str] = set()
    if isinstance(tensor, DTensor):
        for axes, cut in _cuts(job, name, tensor):
            cuts.append(cut)
            spread.update(axes)
    local = local_of(tensor)
    if local_shape(tensor.shape, cuts) != tuple(local.shape):
        raise InternalError(f"{full_name} is {tuple(local.shape)} on rank {job.ranks.rank}, which its plan does not explain")
    alike = tuple(axis for axis in OWN_RANKS if axis not in ("pp", *spread) and job.ranks.size(axis) > 1)
    return _Held(name=full_name, tensor=local, shape=tuple(tensor.shape), parts=parts(tensor.shape, cuts), alike=alike)


def _cuts(job: Job, name: str, tensor: DTensor) -> Iterator[tuple[tuple[str, ...], TensorSpread]]:
    """The cuts that made a piece, in the order they were made, each with its axes."""
    mesh = tensor.device_mesh
    dims = {dim: _AXES.get(dim, (dim,)) for dim in mesh.mesh_dim_names or ()}
    if {axis for axes in dims.values() for axis in axes} - set(OWN_RANKS):
        raise InternalError(f"{name} lies on a mesh of {list(dims)}, which a checkpoint does not know")
    for number, (dim, axes) in sorted(enumerate(dims.items()), key=lambda one: _FIRST.get(one[1][0], len(_FIRST))):
        along = getattr(tensor.placements[number], "dim", None)
        if along is None:
            continue
        segments: tuple[int, ...] = ()
        if dim == "tp":
            place = job.split.places.get(name) if job.split is not None else None
            if place is None or place.dim != along:
                raise InternalError(f"{name} is split over the tensor axis and its rule is not known")
            segments = place.segments
        yield axes, TensorSpread(along, mesh.get_local_rank(number), mesh.size(number), segments)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned(job: Job) -> dict[str, nn.Parameter]:
    """Parameters of this rank that no earlier stage has, as they are between steps."""
    shard.reshard(job.parts)
    if not isinstance(job.runner, Piped):
        return dict(job.saved_parameters())
    return {name: p for name, p in job.runner.stages.owned_parameters() if p.requires_grad or job.plan.adapters is None}


def _everything(job: Job, mine: Mapping[str, nn.Parameter]) -> list[_Held]:
    found: dict[str, _Held] = {}
    for name, parameter in mine.items():
        live = parameter.detach() if job.outer is None else job.outer.begun[parameter]
        found[f"{MODEL}/{name}"] = held_of(job, name, f"{MODEL}/{name}", live)
        if job.outer is not None and job.ranks.coordinate("dp_replicate"):
            continue  # the others have states of their own, see `own_state`
        for key, value in job.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                full = f"{OPTIMIZER}/{name}/{key}"
                held = held_of(job, name, full, value.detach())
                if job.outer is not None:
                    held = replace(held, alike=tuple(axis for axis in held.alike if axis != "dp_replicate"))
                far = job.moved is not None and held.tensor.is_meta
                found[full] = replace(held, read=functools.partial(job.moved.read, name, key)) if far and job.moved else held
    return list(found.values())


def pieces(job: Job, mine: Mapping[str, nn.Parameter] | None = None) -> list[TensorPiece]:
    """What this rank writes. Ranks that hold the same pieces come to the same shares without a word between them. `mine` is
    `owned`, asked for between steps, where this is asked in the middle of one."""
    job.settle()
    by_axes: dict[tuple[str, ...], list[_Held]] = {}
    for held in _everything(job, owned(job) if mine is None else mine):
        by_axes.setdefault(held.alike, []).append(held)
    chosen = []
    for axes, some in by_axes.items():
        count, place = 1, 0
        for axis in axes:
            count, place = count * job.ranks.size(axis), place * job.ranks.size(axis) + job.ranks.coordinate(axis)
        loads = [0] * count
        for held in sorted(some, key=lambda held: (-held.bytes, held.name)):
            writer = loads.index(min(loads))
            loads[writer] += held.bytes
            if writer == place:
                chosen.append(held)
    return [_piece(held, part) for held in chosen for part in held.parts]


def _piece(held: _Held, part: BoxPart) -> TensorPiece:
    inside, read = held.tensor[part.local.slices()], held.read
    if read is None:
        return TensorPiece(name=held.name, shape=held.shape, box=part.whole, tensor=inside)
    width, start = inside.element_size(), inside.storage_offset()

    def run(first: int, last: int) -> Tensor:
        """Bytes of it: of what lies in one run alone these are read, else all of the tensor is."""
        if inside.is_contiguous():
            return read(start + first // width, start + last // width).view(torch.uint8)
        found = read(0, held.tensor.numel()).view(held.tensor.shape)[part.local.slices()]
        return found.reshape(-1).view(torch.uint8)[first:last]

    return TensorPiece(name=held.name, shape=held.shape, box=part.whole, tensor=inside, read=run)


def own_state(job: Job) -> dict[str, Any]:
    """What this rank alone has: buffers, and whatever else its modules want kept."""
    buffers: dict[str, Tensor] = {}
    more: dict[str, Any] = {}
    for _, name, value in extra_states(job):
        (buffers if isinstance(value, Tensor) else more).setdefault(name, value)
    apart = {} if job.outer is None else {SYNC: {"outer": job.outer.state(), "states": _states(job)}}
    return {"buffers": buffers, "more": more, **apart}


def _states(job: Job) -> dict[str, dict[str, Tensor]]:
    """What this replica's own optimizer keeps, by parameter."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in job.saved_parameters():
        values = job.optimizer.state.get(parameter, {})
        found[name] = {key: local_of(value.detach()) for key, value in values.items() if isinstance(value, Tensor)}
    return found


def nonfinite(job: Job) -> list[str]:
    """Tensors of this rank that are not finite as the run begins, as masks with -inf are, by their names in a checkpoint."""
    found = {f"{MODEL}/{name}": local_of(parameter.detach()) for name, parameter in job.saved_parameters()}
    found |= {f"{OWN}/buffers/{name}": value for _, name, value in extra_states(job) if isinstance(value, Tensor)}
    floats = {name: value for name, value in found.items() if not value.is_meta and (value.is_floating_point() or value.is_complex())}
    flags = {name: value.isfinite().all() if value.itemsize > 1 else value.float().isfinite().all() for name, value in floats.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, flag in flags.items():
        by_device.setdefault(flag.device, []).append(name)
    read = {name: ok for names in by_device.values()
            for name, ok in zip(names, torch.stack([flags[name] for name in names]).tolist(), strict=True)}  # fmt: skip
    return sorted(name for name, ok in read.items() if not ok)


def extra_states(job: Job) -> Iterator[tuple[nn.Module, str, Any]]:
    """Part, name and value of all that is in a state dict and is no parameter."""
    for position, part in enumerate(job.parts):
        known = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        for name, value in part.state_dict().items():
            if name not in known:
                yield part, job.name_of(position, name), value


@dataclass(frozen=True, eq=False)
class Between:
    """What a job's tensors are between steps, remembered for a save in the middle of one, by another thread: parameters that
    are gathered then are not asked for, and no hook of the model runs."""

    mine: Mapping[str, nn.Parameter]
    """`owned`."""
    names: Mapping[nn.Parameter, str]
    own: frozenset[str]
    """Names of buffers."""

    @classmethod
    def of(cls, job: Job) -> Between | None:
        """None where a model keeps more than parameters and buffers, or the buffers are not where they seem to be."""
        mine, known = owned(job), own_state(job)
        if known["more"] or known["buffers"].keys() != _buffers(job).keys():
            return None
        return cls(mine, {p: name for name, p in job.named_parameters()}, frozenset(known["buffers"]))

    def state(self, job: Job) -> tuple[list[TensorPiece], dict[str, Any], dict[str, Any]]:
        """`pieces`, `own_state` and `extra`."""
        return pieces(job, self.mine), {"buffers": _buffers(job), "more": {}}, extra(job, self.names)


def _buffers(job: Job) -> dict[str, Tensor]:
    """Buffers that are saved, as they are now."""
    found: dict[str, Tensor] = {}
    for position, part in enumerate(job.parts):
        for path, module in part.named_modules():
            for name, value in module._buffers.items():
                if value is not None and name not in module._non_persistent_buffers_set:
                    found.setdefault(job.name_of(position, f"{path}.{name}" if path else name), value)
    return found


def extra(job: Job, names: Mapping[nn.Parameter, str] | None = None) -> dict[str, Any]:
    """Settings of the optimizer, and state of it that is no tensor. `names` are those of parameters between steps, where this
    is asked in the middle of one."""
    names = {p: name for name, p in job.named_parameters()} if names is None else names
    groups = [
        {"values": {key: _plain(value) for key, value in group.items() if key not in PLAN_SETTINGS},
         "names": [names[p] for p in group["params"]]}
        for group in job.optimizer.param_groups
    ]  # fmt: skip
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in job.optimizer.state.items():
        plain = {key: _plain(value) for key, value in values.items() if not isinstance(value, Tensor)}
        if plain:
            state[names[parameter]] = plain
    return {"groups": groups, "state": state}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
