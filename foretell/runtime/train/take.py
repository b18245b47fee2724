"""A checkpoint read and checked for this rank of a job, whatever plan wrote it, and then taken up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.checkpoint.boxes import Box, BoxPart, whole
from foretell.checkpoint.format import Damaged, TensorMeta
from foretell.checkpoint.read import Reader, Want, differences
from foretell.checkpoint.saver import MEMORY_SHARE
from foretell.checkpoint.store import SavedCheckpoint
from foretell.checkpoint.tree import dtype_name, dtype_of
from foretell.errors import UserError
from foretell.plan.mesh import OWN_RANKS, coordinates
from foretell.plan.types import MASTER, Mesh, Plan
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.apply import Job
from foretell.runtime.train import distrust
from foretell.runtime.train.numbers.scaler import checked
from foretell.runtime.train.save import MODEL, OPTIMIZER, PLAN_SETTINGS, SYNC, extra_states, held_of, local_of, room
from foretell.trace.moments import rows
from foretell.trace.moments.optimizer import CodedAdamW, spread
from foretell.trace.moments.rows import CODE, EARLIER, FIRST, SCALE

_SHOWN = 3


@dataclass(kw_only=True)
class Staged:
    """A checkpoint as this rank needs it, read and checked, in memory of its own. Nothing live has changed yet."""

    weights: dict[str, Any]
    """By name, this rank's pieces, or what to call for them; so are tensors among the states."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] | None = None
    """Of replicas that step alone: what this one had, or, with `same` False, what the first of another number of them had."""
    same: bool = True
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
    _refuse_other_base(saved, job)
    asked: list[tuple[dict[str, Any], str, _Asked]] = []
    staged = Staged(weights={}, groups=_groups(saved, job))
    kept: dict[str, dict[str, TensorMeta]] = {}
    for full, spec in reader.tensors.items():
        if full.startswith(f"{OPTIMIZER}/"):
            name, _, key = full.removeprefix(f"{OPTIMIZER}/").rpartition("/")
            kept.setdefault(name, {})[key] = spec
    _refuse_earlier_codes(saved, kept)
    distrust.check_states(saved, kept, {name.removeprefix(f"{MODEL}/"): spec for name, spec in known.items()}, job.plan.optimizer)
    _refuse_other_form(saved, kept, job)
    for name, parameter in job.saved_parameters():
        if name in staged.weights:
            continue
        held = held_of(job, name, f"{MODEL}/{name}", parameter.detach())
        asked.append((staged.weights, name, _Asked(reader, held.name, tuple(held.tensor.shape), held.parts)))
        staged.weights[name] = asked[-1][2]
        values = staged.states.setdefault(name, {})
        values.update(saved.about.get("optimizer", {}).get("state", {}).get(name, {}))
        for key, spec in kept.get(name, {}).items():
            full = f"{OPTIMIZER}/{name}/{key}"
            if spec.shape == held.shape:
                asked.append((values, key, _Asked(reader, full, tuple(held.tensor.shape), held.parts)))
            elif job.plan.coded and key.endswith((CODE, SCALE)):
                count = rows.leading(held.shape)
                pieces = tuple(BoxPart(_by_rows(part.local, count, spec), _by_rows(part.whole, count, spec)) for part in held.parts)
                asked.append((values, key, _Asked(reader, full, (*held.tensor.shape[:count], *spec.shape[count:]), pieces)))
            else:
                box = whole(spec.shape)
                asked.append((values, key, _Asked(reader, full, tuple(spec.shape), (BoxPart(box, box),))))
    _read(reader, asked, (spare or room(job.ranks))() if job.moved is not None else None)
    staged.scaler = checked(saved.about.get("scaler"), saved.path)
    reader.check_own(job.ranks.rank, job.ranks.world)
    _stage_own(reader, job, staged)
    if job.outer is not None:
        _stage_sync(reader, job, staged)
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


def _refuse_other_base(saved: SavedCheckpoint, job: Job) -> None:
    """Raise where adapters were trained on other weights than the model has now."""
    before = saved.about.get("base")
    if job.base and before != job.base:
        raise UserError(
            f"the adapters of {saved.path} were trained on another base: its digest is {before} and that of the model {job.base}",
            "give the weights they were trained on with --init-from, or the seed they were built with",
        )


def _by_rows(box: Box, count: int, spec: TensorMeta) -> Box:
    """What is kept for the rows of a block, `count` dimensions of which count rows."""
    return Box((*box.offset[:count], *(0 for _ in spec.shape[count:])), (*box.size[:count], *spec.shape[count:]))


def _refuse_earlier_codes(saved: SavedCheckpoint, kept: Mapping[str, Mapping[str, TensorMeta]]) -> None:
    """Raise where codes are those of foretell 0.1, which stood for other roots."""
    if any(key.endswith(EARLIER) for keys in kept.values() for key in keys):
        problem = f"{saved.path} has moments in the 8-bit codes of foretell 0.1, which are not read any more"
        raise UserError(problem, "resume with that version, or begin anew from its weights with --init-from")


def _refuse_other_form(saved: SavedCheckpoint, kept: Mapping[str, Mapping[str, TensorMeta]], job: Job) -> None:
    """Raise where moments were saved in codes that nobody here reads, or as they are where codes are kept here."""
    coded = {name for name, keys in kept.items() if FIRST + CODE in keys}
    if coded and not job.plan.coded and (job.moved is None or job.ranks.world > 1):
        problem = f"{saved.path} has moments in 8 or 4 bits, and the plan keeps them otherwise"
        remedy = f"a plan with the state_format it was saved with (one device, where precision is {MASTER}); or begin anew with --init-from"
        raise UserError(problem, remedy)
    if not isinstance(job.optimizer, CodedAdamW):
        return
    for name, parameter in job.saved_parameters():
        keys, own = kept.get(name), job.optimizer.has_codes(parameter)
        if keys is None or (own == (name in coded) and (not own or _same_codes(keys, parameter, job.optimizer.state_format))):
            continue
        problem = f"{saved.path} has not the moments of {name} in the format {job.optimizer.state_format} of the plan"
        raise UserError(problem, "resume with the state_format it was saved with, or begin anew from its weights with --init-from")


def _same_codes(keys: Mapping[str, TensorMeta], parameter: Tensor, state_format: str) -> bool:
    wanted = rows.shapes(parameter.shape, state_format)
    return all(name in keys and (keys[name].shape, keys[name].dtype) == one for name, one in wanted.items())


def _groups(saved: SavedCheckpoint, job: Job) -> list[dict[str, Any]]:
    """Settings for every group of this job's optimizer."""
    listed = saved.about.get("optimizer", {}).get("groups", [])
    known = {name for one in listed for name in one.get("names", ())}
    names = {p: name for name, p in job.named_parameters()}
    found = []
    for group in job.optimizer.param_groups:
        held = [names[p] for p in group["params"]]
        values = [one["values"] for one in listed if "names" not in one or set(held) & known <= set(one["names"])]
        if not values:
            raise UserError(
                f"{saved.path} has no settings of the optimizer for {held[0]} and those with it",
                "use the plan it was saved with",
            )
        distrust.check_settings(saved, values[0], group, PLAN_SETTINGS)
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
    for _, name, value in extra_states(job):
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


def _stage_sync(reader: Reader, job: Job, staged: Staged) -> None:
    """What this replica had; with another number of replicas a round begins from what all of them began theirs from."""
    mesh, ranks = saved_mesh(reader.saved), job.ranks
    if mesh.dp_shard != ranks.size("dp_shard"):
        problem = f"{reader.saved.path} was saved by replicas of {mesh.dp_shard} ranks, and those of the plan have {ranks.size('dp_shard')}"
        raise UserError(problem, "resume with as many shards; the number of replicas may change")
    staged.same = ranks.replica is not None or mesh.dp_replicate == ranks.size("dp_replicate")
    staged.sync = reader.own(ranks.rank if staged.same else ranks.coordinate("dp_shard"), only=SYNC)


def take(staged: Staged, job: Job) -> None:
    """Put it in place. Everything was checked: from here on nothing is expected to fail."""
    job.settle()
    shard.reshard(job.parts)
    with torch.no_grad():
        for name, parameter in job.saved_parameters():
            value = staged.weights[name]
            local_of(parameter.detach()).copy_(value() if isinstance(value, _Asked) else value)
        for part, name, value in extra_states(job):
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
                coded = rows.shapes(parameter.shape, job.plan.state_format) if f"{FIRST}{CODE}" in kept and not moved else {}
                states[index] = {
                    key: value if moved else _spread(value, parameter, coded.get(key, (None,))[0], copy=name in used)
                    for key, value in kept.items()
                }
            used.add(name)
    job.optimizer.load_state_dict({"state": states, "param_groups": groups})
    if job.scaler is not None:
        job.scaler.load(staged.scaler)
    if job.outer is not None and staged.sync is not None:
        _take_sync(staged, staged.sync, job)


def _take_sync(staged: Staged, kept: Mapping[str, Any], job: Job) -> None:
    """Weights and optimizer of this replica; the parameters have what all of them began the round from."""
    assert job.outer is not None
    if not staged.same:
        job.outer.start_from(kept["outer"])
        return
    job.outer.load(kept["outer"])
    for name, parameter in job.saved_parameters():
        for key, value in kept["states"].get(name, {}).items():
            local_of(job.optimizer.state[parameter][key]).copy_(value)


def _spread(value: Any, parameter: Tensor, shape: tuple[int, ...] | None, *, copy: bool) -> Any:
    """A piece of the optimizer's state where the parameter's is, as a part of the whole where that is one; `shape` is that of
    whole codes or scales."""
    if not isinstance(value, Tensor):
        return value
    local = local_of(parameter.detach())
    if shape is not None:
        return spread(value.to(local.device, copy=copy), parameter, shape)
    if value.shape != local.shape or not isinstance(parameter, DTensor):
        return value.clone() if copy else value
    return DTensor.from_local(
        value.to(local.device, copy=copy), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
