"""A job's state as pieces of whole tensors, and back: between a plan at work and a checkpoint of any other plan.

Tensors go by the names of the whole model. What a rank holds of one follows from how it was spread: first its share of
the tensor axis, then its rows of what is left. What several ranks hold alike is written by one of them, evenly shared.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.checkpoint.boxes import BoxPart, TensorSpread, local_shape, parts, whole
from foretell.checkpoint.finite import NONFINITE
from foretell.checkpoint.format import OWN, Damaged, TensorMeta
from foretell.checkpoint.read import Reader, Want, differences
from foretell.checkpoint.saver import MEMORY_SHARE, NotSaved, Saver, SaveResult
from foretell.checkpoint.store import SavedCheckpoint, candidates, complete, look
from foretell.checkpoint.tree import dtype_name, dtype_of
from foretell.checkpoint.write import TensorPiece
from foretell.errors import InternalError, UserError
from foretell.plan.mesh import OWN_RANKS, coordinates
from foretell.plan.types import MASTER, Mesh, Plan
from foretell.runtime.offload.memory.arena import available
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.apply import Job, Piped
from foretell.runtime.parallel.ranks import APART, SPREAD, Ranks
from foretell.runtime.process.control import Control
from foretell.runtime.train import distrust
from foretell.runtime.train.distrust import data_of
from foretell.runtime.train.scaler import checked

__all__ = ["NONFINITE", "Damaged", "NotSaved", "Reader", "SaveResult", "SavedCheckpoint", "Saver", "candidates", "complete", "data_of", "look"]

MODEL, OPTIMIZER = "model", "optimizer"
_FLAGS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer's group that say how it is computed: the plan's, never the checkpoint's."""
_AXES = {SPREAD: ("dp_shard", "cp"), APART: ("dp_shard",), "ep": ("dp_shard",)}
"""Dimensions of a mesh that are not an axis of the plan with ranks of its own → the axes they are made of."""
_FIRST = {"tp": 0, "ep": 1}
"""What was cut first: before data parallelism there are tensor splits and experts."""
_SHOWN = 3


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


def _held(job: Job, name: str, full_name: str, tensor: Tensor) -> _Held:
    """How this rank's piece of a tensor lies in the whole; `name` is the parameter's."""
    cuts: list[TensorSpread] = []
    spread: set[str] = set()
    if isinstance(tensor, DTensor):
        for axes, cut in _cuts(job, name, tensor):
            cuts.append(cut)
            spread.update(axes)
    local = _local(tensor)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def owned(job: Job) -> dict[str, nn.Parameter]:
    """Parameters of this rank that no earlier stage has, as they are between steps."""
    shard.reshard(job.parts)
    return dict(job.runner.stages.owned_parameters() if isinstance(job.runner, Piped) else job.named_parameters())


def _everything(job: Job, mine: Mapping[str, nn.Parameter]) -> list[_Held]:
    found: dict[str, _Held] = {}
    for name, parameter in mine.items():
        found[f"{MODEL}/{name}"] = _held(job, name, f"{MODEL}/{name}", parameter.detach())
        for key, value in job.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                full = f"{OPTIMIZER}/{name}/{key}"
                held = _held(job, name, full, value.detach())
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
    for _, name, value in _beside(job):
        (buffers if isinstance(value, Tensor) else more).setdefault(name, value)
    return {"buffers": buffers, "more": more}


def nonfinite(job: Job) -> list[str]:
    """Tensors of this rank that are not finite as the run begins, as masks with -inf are, by their names in a checkpoint."""
    found = {f"{MODEL}/{name}": _local(parameter.detach()) for name, parameter in job.named_parameters()}
    found |= {f"{OWN}/buffers/{name}": value for _, name, value in _beside(job) if isinstance(value, Tensor)}
    floats = {name: value for name, value in found.items() if not value.is_meta and (value.is_floating_point() or value.is_complex())}
    flags = {name: value.isfinite().all() if value.itemsize > 1 else value.float().isfinite().all() for name, value in floats.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, flag in flags.items():
        by_device.setdefault(flag.device, []).append(name)
    read = {name: ok for names in by_device.values()
            for name, ok in zip(names, torch.stack([flags[name] for name in names]).tolist(), strict=True)}  # fmt: skip
    return sorted(name for name, ok in read.items() if not ok)


def _beside(job: Job) -> Iterator[tuple[nn.Module, str, Any]]:
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
        {"values": {key: _plain(value) for key, value in group.items() if key not in _FLAGS},
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


# --- taking it up ----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Staged:
    """A checkpoint as this rank needs it, read and checked, in memory of its own. Nothing live has changed yet."""

    weights: dict[str, Any]
    """By name, this rank's pieces, or what to call for them; so are tensors among the states."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    scaler: Mapping[str, Any] | None = None
    """The scale of the loss, where the run that was saved had one."""


@dataclass(frozen=True)
class _Asked:
    """A piece of a checkpoint: memory that will be filled, or the piece itself for whoever calls."""

    reader: Reader
    name: str
    shape: tuple[int, ...]
    parts: tuple[BoxPart, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.reader.tensors[self.name].dtype).itemsize

    def place(self, wants: list[Want]) -> Tensor:
        """Memory for it, and what must be read to fill that."""
        memory = torch.empty(self.shape, dtype=dtype_of(self.reader.tensors[self.name].dtype))
        wants += [Want(name=self.name, box=part.whole, into=memory[part.local.slices()]) for part in self.parts]
        return memory

    def __call__(self) -> Tensor:
        wants: list[Want] = []
        memory = self.place(wants)
        self.reader.read(wants)
        return memory


def stage(reader: Reader, job: Job, known: Mapping[str, TensorMeta], *, spare: Callable[[], int | None] | None = None) -> Staged:
    """Read what this rank needs; raises where the checkpoint is damaged or of something else. `known` is `whole_of`. Where
    states are elsewhere because there are too many, and `spare` says that host memory has no room for all of them once more,
    every byte is checked now and read again when it is taken."""
    saved = reader.saved
    refuse_other(saved, known, job.plan)
    asked: list[tuple[dict[str, Any], str, _Asked]] = []
    staged = Staged(weights={}, groups=_groups(saved, job))
    kept: dict[str, dict[str, TensorMeta]] = {}
    for full, spec in reader.tensors.items():
        if full.startswith(f"{OPTIMIZER}/"):
            name, _, key = full.removeprefix(f"{OPTIMIZER}/").rpartition("/")
            kept.setdefault(name, {})[key] = spec
    distrust.check_states(saved, kept, {name.removeprefix(f"{MODEL}/"): spec for name, spec in known.items()}, job.plan.optimizer)
    _refuse_codes(saved, {key for keys in kept.values() for key in keys}, job)
    for name, parameter in job.named_parameters():
        if name in staged.weights:
            continue
        held = _held(job, name, f"{MODEL}/{name}", parameter.detach())
        asked.append((staged.weights, name, _Asked(reader, held.name, tuple(held.tensor.shape), held.parts)))
        staged.weights[name] = asked[-1][2]
        values = staged.states.setdefault(name, {})
        values.update(saved.about.get("optimizer", {}).get("state", {}).get(name, {}))
        for key, spec in kept.get(name, {}).items():
            full = f"{OPTIMIZER}/{name}/{key}"
            if spec.shape == held.shape:
                asked.append((values, key, _Asked(reader, full, tuple(held.tensor.shape), held.parts)))
            else:
                box = whole(spec.shape)
                asked.append((values, key, _Asked(reader, full, tuple(spec.shape), (BoxPart(box, box),))))
    _read(reader, asked, (spare or room(job.ranks))() if job.moved is not None else None)
    staged.scaler = checked(saved.about.get("scaler"), saved.path)
    reader.check_own(job.ranks.rank, job.ranks.world)
    _stage_own(reader, job, staged)
    return staged


def _read(reader: Reader, asked: Sequence[tuple[dict[str, Any], str, _Asked]], spare: int | None) -> None:
    """Put pieces where they are asked for; where there is too little memory, look at every one and leave a way to it."""
    if spare is None or sum(piece.nbytes for _, _, piece in asked) <= MEMORY_SHARE * spare:
        wants: list[Want] = []
        for into, key, piece in asked:
            into[key] = piece.place(wants)
        reader.read(wants)
        return
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(lambda piece=piece: piece().numel()) for _, _, piece in asked]:  # type: ignore[misc]
            done.result()
    for into, key, piece in asked:
        into[key] = piece


def refuse_other(saved: SavedCheckpoint, known: Mapping[str, TensorMeta], plan: Plan) -> None:
    """Raise if a checkpoint is of another model or optimizer, saying which tensors differ."""
    found = {name: spec for name, spec in saved.manifest.tensors.items() if name.startswith(f"{MODEL}/")}
    unlike = differences(known, found)
    if unlike:
        more = f"; and {len(unlike) - _SHOWN} more" if len(unlike) > _SHOWN else ""
        raise UserError(
            f"{saved.path} is of another model: {'; '.join(unlike[:_SHOWN])}{more}",
            "give the plan of the model it was saved from, or start a new run",
            "\n".join(unlike) if more else "",
        )
    before = str(saved.about.get("plan", {}).get("optimizer", plan.optimizer))
    if before.partition("-")[0] != plan.optimizer.partition("-")[0]:
        raise UserError(
            f"{saved.path} was saved with optimizer {before} and the plan has {plan.optimizer}",
            "use a plan with the same optimizer, or begin anew from its weights with --init-from",
        )


def _refuse_codes(saved: SavedCheckpoint, keys: set[str], job: Job) -> None:
    """Raise where moments were saved in 8 bits and nobody here reads them."""
    if any(key.endswith("_code") for key in keys) and (job.moved is None or job.ranks.world > 1):
        problem = f"{saved.path} has moments in 8 bits, which are read on one device, by a plan of precision {MASTER}"
        raise UserError(problem, f"resume with precision {MASTER} on one device, any state_format; or begin anew with --init-from")


def _groups(saved: SavedCheckpoint, job: Job) -> list[dict[str, Any]]:
    """Settings for every group of this job's optimizer."""
    listed = saved.about.get("optimizer", {}).get("groups", [])
    names = {p: name for name, p in job.named_parameters()}
    found = []
    for group in job.optimizer.param_groups:
        held = [names[p] for p in group["params"]]
        values = [one["values"] for one in listed if "names" not in one or set(held) <= set(one["names"])]
        if not values:
            raise UserError(
                f"{saved.path} has no settings of the optimizer for {held[0]} and those with it",
                "use the plan it was saved with",
            )
        distrust.check_settings(saved, values[0], group, _FLAGS)
        found.append({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in values[0].items()})
    return found


def saved_mesh(saved: SavedCheckpoint) -> Mesh:
    try:
        return Mesh(**saved.about.get("plan", {}).get("mesh", {}))
    except TypeError:
        raise Damaged(f"{saved.path} was saved on a mesh nobody knows", "use an older checkpoint") from None


def _stage_own(reader: Reader, job: Job, staged: Staged) -> None:
    """Buffers of the rank most like this one: of the one that saw the same samples, where there was one."""
    mesh, ranks = saved_mesh(reader.saved), job.ranks
    mine = {axis: ranks.coordinate(axis) for axis in OWN_RANKS}

    def distance(rank: int) -> tuple[bool, ...]:
        at = coordinates(mesh, rank)
        data = at["dp_replicate"] * mesh.dp_shard + at["dp_shard"]
        like = {axis: mine[axis] if getattr(mesh, axis) == ranks.size(axis) else 0 for axis in ("tp", "cp", "pp")}
        return (data != min(ranks.data_rank, mesh.data - 1), *(at[axis] != place for axis, place in like.items()))

    nearest = sorted(reader.headers, key=lambda rank: (distance(rank), rank))
    buffers: dict[str, Tensor] = {}
    more: dict[str, Any] = {}
    for _, name, value in _beside(job):
        (buffers if isinstance(value, Tensor) else more)[name] = value
    for rank in nearest:
        if buffers.keys() <= staged.buffers.keys() and more.keys() <= staged.more.keys():
            break
        for key, into in (("buffers", staged.buffers), ("more", staged.more)):
            for name, value in reader.own(rank, only=key).items():
                into.setdefault(name, value)
    for name, live in buffers.items():
        found = staged.buffers.get(name)
        if not isinstance(found, Tensor | None):
            raise Damaged(f"{reader.saved.path} has a buffer {name} that is no tensor", "use an older checkpoint")
        if found is None or found.shape != live.shape or found.dtype != live.dtype:
            had = "is not in it" if found is None else f"is {TensorMeta(tuple(found.shape), dtype_name(found.dtype))} in it"
            raise UserError(f"{reader.saved.path} is of another model: the buffer {name} {had}", "give the plan of its model")


def take(staged: Staged, job: Job) -> None:
    """Put it in place. Everything was checked: from here on nothing is expected to fail."""
    job.settle()
    shard.reshard(job.parts)
    with torch.no_grad():
        for name, parameter in job.named_parameters():
            value = staged.weights[name]
            _local(parameter.detach()).copy_(value() if isinstance(value, _Asked) else value)
        for part, name, value in _beside(job):
            if isinstance(value, Tensor):
                value.copy_(staged.buffers[name])
            elif name in staged.more:
                part.get_submodule(name.rpartition(".")[0]).set_extra_state(staged.more[name])
    names = {p: name for name, p in job.named_parameters()}
    own = torch.optim.Optimizer.state_dict(job.optimizer)["param_groups"]  # states on disk stay there
    states, groups = {}, []
    used: set[str] = set()
    for live, group, values in zip(job.optimizer.param_groups, own, staged.groups, strict=True):
        groups.append({**group, **values})
        for parameter, index in zip(live["params"], group["params"], strict=True):
            name = names[parameter]
            kept = staged.states.get(name, {})
            if kept:  # two stages of a rank may hold one parameter: a copy for the second
                moved = job.moved is not None  # takes this rank's pieces, wherever they are
                states[index] = {key: value if moved else _spread(value, parameter, copy=name in used) for key, value in kept.items()}
            used.add(name)
    job.optimizer.load_state_dict({"state": states, "param_groups": groups})
    if job.scaler is not None:
        job.scaler.load(staged.scaler)


def _spread(value: Any, parameter: Tensor, *, copy: bool) -> Any:
    """A piece of the optimizer's state where the parameter's is, as a part of the whole where that is one."""
    if not isinstance(value, Tensor):
        return value
    local = _local(parameter.detach())
    if value.shape != local.shape or not isinstance(parameter, DTensor):
        return value.clone() if copy else value
    return DTensor.from_local(
        value.to(local.device, copy=copy), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
