"""Does a plan compute what one process computes? Losses and gradients side by side.

One process runs the model in fp32 with a plain loop of its own; ranks run it as the plan says. Both see the same
weights and the same global batch. In fp32 the two differ by the order of sums alone: a loss by 1e-4 of itself, a
tensor's gradient by 1e-4 of its norm.

In bf16 every result is rounded to eight bits, at most 2⁻⁸ of itself; in fp16 to eleven, at most 2⁻¹¹. Errors of n roundings that know nothing of each
other grow as √n, so a gradient is held to √n · 2⁻⁸ (2⁻¹¹) of its norm, n being the results in that format that one
micro-batch's forward and backward make, counted. Where a model magnifies rounding, one process in bf16 is itself further from fp32
than that: then the ranks, which round as often and elsewhere, may be as far from it on the other side, twice as far
from fp32. A loss is the mean of many: it is held to 2⁻⁸, where the weights themselves are rounded at every step to
√steps · 2⁻⁸, or again to twice what one process is off. With fp16 gradients a step counts when it is taken: one whose
scaled gradients overflow is run again with half the scale, here and in one process.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import ForetellError, ModelError, UserError
from foretell.plan.precision import MIXED, computes_in
from foretell.plan.types import FP16, Mesh, Plan
from foretell.runtime.check.twin import Twin, twin
from foretell.runtime.parallel.adapted import put_on
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.parallel.ranks import Ranks, start
from foretell.runtime.process.pool import Pool, RankFailure
from foretell.trace.load.model import Source, load
from foretell.trace.moments.optimizer import names_of_tables
from foretell.trace.record.step import Batch, Workload, build_optimizer, cast_floats, compute_loss, prepare_precision
from foretell.trace.sandbox import user_code

SEED = 17
DRAWS = 1000
"""The seed of the first micro-batch's random numbers."""
STEPS = 10
LEARNING_RATE = 1e-3
LOSS_BOUND = 1e-4
"""Relative, at every step."""
SMALL_LOSS = torch.finfo(torch.float32).eps / LOSS_BOUND
"""A loss below this is held to what terms of about one round to: one that adds up to nothing but for rounding has no digit
that two orders of adding it up share."""
GRADIENT_BOUND = 1e-4
"""‖Δg‖/‖g‖ of every tensor at the first step."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
MOST_SKIPPED = 40
"""Steps that may overflow before the scale is small enough."""
LIMIT_SECONDS = 120.0
BACKEND = "aot_eager"
"""How compiled graphs are run: captured, split into forward and backward, but not made into machine code."""
AXES = {
    "dp_replicate": "data replicas", "dp_shard": "data shards", "cp": "shared positions", "tp": "tensor split",
    "pp": "pipeline", "ep": "shared experts",
}  # fmt: skip


@dataclass(frozen=True)
class VerifyRun:
    """What a run gave."""

    losses: list[float]
    norms: list[float]
    """Norm of the whole gradient at every step, where the plan clips."""
    gradients: dict[str, Tensor]
    """Of the first step, before clipping, by the names of the whole model."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What may differ by how much, relative."""

    loss: float = LOSS_BOUND
    gradient: float = GRADIENT_BOUND
    tensors: Mapping[str, float] = field(default_factory=dict)
    """Gradients that may differ by more, by name."""

    def of(self, name: str) -> float:
        return max(self.gradient, self.tensors.get(name, 0.0))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a run is from its reference, beside what is allowed."""

    loss: float = math.nan
    """The largest relative difference of a step's loss."""
    loss_bound: float
    gradient: float = math.nan
    """‖Δg‖/‖g‖ of the tensor that is furthest off, measured by what it may be off, and which tensor that is."""
    gradient_name: str = ""
    gradient_bound: float
    norm: float = 0.0
    """Relative difference of the whole gradient's norm at the first step, where the plan clips."""
    problem: str = ""
    """Why there is nothing to compare."""

    @property
    def good(self) -> bool:
        within = self.loss <= self.loss_bound and max(self.gradient, self.norm) <= self.gradient_bound
        return within and not self.problem


# --- what both see ---------------------------------------------------------------------------------------------------


def batches(source: Source, count: int) -> list[Batch]:
    """Micro-batches of a global batch, each from a seed of its own; the same wherever they are made."""
    found = []
    for number in range(count):
        torch.manual_seed(SEED + 1 + number)
        found.append(load(source).batch)
    return found


def build(source: Source) -> Workload:
    """The model with real weights, the same wherever it is built, and without chance: dropout is off."""
    torch.manual_seed(SEED)
    workload = load(source)
    for module in workload.model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return workload


def draws(model: nn.Module, micro_batches: Iterable[int]) -> None:
    """Random numbers that the model draws in forward depend on the micro-batch alone, wherever it is run: a model that is
    called with these micro-batches in turn, step after step."""
    numbers = itertools.cycle(micro_batches)

    def seed(*_: Any) -> None:
        torch.manual_seed(DRAWS + next(numbers))

    model.register_forward_pre_hook(seed)


# --- the two runs ----------------------------------------------------------------------------------------------------


def reference(source: Source, plan: Plan, steps: int = STEPS) -> VerifyRun:
    """One process, fp32, nothing of the runtime: the mean loss over the global batch, clipped and updated by torch."""
    return _plain_run(source, plan.with_(precision="fp32"), steps, nullcontext())


def _plain_run(source: Source, plan: Plan, steps: int, counted: AbstractContextManager[Any]) -> VerifyRun:
    """One process in the plan's precision. `counted` is around the forward and backward of every micro-batch."""
    workload = build(source)
    model = workload.model.train()
    sharded = plan.precision in MIXED and plan.mesh.spread > 1  # weights in 16 bits, of which fp32 ones are kept
    dtype = getattr(torch, computes_in(plan.precision))
    if plan.adapters is not None:
        put_on(model, plan)
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    if plan.adapters is None or sharded:
        prepare_precision(model, MIXED[plan.precision][1] if sharded else plan.precision)
    computed = {name: p for name, p in model.named_parameters() if name in kept}
    trained = {name: nn.Parameter(p) for name, p in kept.items()} if sharded else computed
    parts = batches(source, plan.mesh.data * plan.accumulate)
    draws(model, range(len(parts)))
    if plan.precision == "bf16":
        parts = [cast_floats(part, dtype) for part in parts]
    scaler = torch.amp.GradScaler("cpu", enabled=plan.precision == FP16)
    tables = names_of_tables(model)
    whole = [p for name, p in trained.items() if name in tables]
    optimizer = build_optimizer(plan.optimizer, list(trained.values()), plan.state_format if plan.coded else "fp32", whole)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    run = VerifyRun([], [], {})
    for _ in range(steps + MOST_SKIPPED):
        total = 0.0
        for part in parts:
            with counted:
                with torch.autocast("cpu", dtype) if plan.precision in MIXED and not sharded else nullcontext():
                    loss = compute_loss(Workload(model, part, workload.loss)) / len(parts)
                scaler.scale(loss).backward()
            total += loss.item()
            if sharded:
                _hand_over(computed, trained)
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None and not run.losses}
        norm = nn.utils.clip_grad_norm_(trained.values(), plan.clip).item() if plan.clip is not None else None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < scale:  # it was not taken
            continue
        run.losses.append(total)
        run.gradients.update(gradients)
        run.norms.extend([] if norm is None else [norm])
        if len(run.losses) == steps:
            break
        if sharded:
            with torch.no_grad():
                torch._foreach_copy_(list(computed.values()), list(trained.values()))
    return run


def _hand_over(computed: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]) -> None:
    """Add gradients in 16 bits to fp32 ones, and forget them."""
    for name, parameter in computed.items():
        if parameter.grad is not None:
            own = trained[name]
            own.grad = parameter.grad.float() if own.grad is None else own.grad + parameter.grad.float()
            parameter.grad = None


def run_rank(_rank: int, _world: int, source: Source, plan: Plan, steps: int = STEPS, backend: str = BACKEND) -> VerifyRun:
    """One rank's part of the same, as the plan says; gradients only where no other rank has the same."""
    quiet_warnings()
    ranks = start(plan, device="cpu")
    job = apply(build(source), plan, ranks, learning_rate=LEARNING_RATE, backend=backend)
    mine = shared(source, plan, ranks, job)
    run = VerifyRun([], [], {})
    for _ in range(steps + MOST_SKIPPED):
        loss = job.backward(mine)
        gradients = job.gradients() if not run.losses else {}
        result = job.update(loss)
        if job.scaler is not None and result.grad_norm is not None and not bool(result.grad_norm.isfinite()):
            continue
        if ranks.data_rank == ranks.coordinate("tp") == ranks.coordinate("cp") == 0:
            run.gradients.update({name: grad.float() for name, grad in gradients.items()})
        run.losses.append(result.loss.item())
        if plan.clip is not None and result.grad_norm is not None:
            run.norms.append(result.grad_norm.item())
        if len(run.losses) == steps:
            break
    run.losses.extend([math.nan] * (steps - len(run.losses)))
    return run


def shared(source: Source, plan: Plan, ranks: Ranks, job: Job) -> list[Batch]:
    """This rank's micro-batches of the global batch; those of a whole model draw as they do in one process."""
    every = batches(source, plan.mesh.data * plan.accumulate)
    mine = [m * ranks.data_size + ranks.data_rank for m in range(plan.accumulate)]
    if plan.mesh.pp == 1:
        draws(job.parts[0], mine)
    return [every[number] for number in mine]


def quiet_warnings() -> None:
    """Gathering gradients for a comparison is slower than it could be, which torch says once for every rank."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def merge(runs: Sequence[VerifyRun]) -> VerifyRun:
    """The ranks' runs as one; what all of them know they must agree on."""
    gradients: dict[str, Tensor] = {}
    for run in runs:
        gradients.update(run.gradients)
    first = runs[0]
    agreed = all(run.losses == first.losses and run.norms == first.norms for run in runs)
    return VerifyRun(first.losses if agreed else [math.nan for _ in first.losses], first.norms, gradients)


def compare(known: VerifyRun, found: VerifyRun, bounds: Bounds | None = None) -> Difference:
    """A run beside its reference."""
    bounds = bounds or Bounds()
    problem = ""
    alone = sorted(known.gradients.keys() ^ found.gradients.keys())
    if alone:
        problem = f"gradients of {', '.join(alone[:3])} are in one run only"
    if not all(map(math.isfinite, found.losses)):
        problem = "a loss is no number, or the ranks disagree on it"
    distances = apart(known, found)
    name = max(distances, key=lambda key: _last(distances[key]) / bounds.of(key), default="")
    return Difference(
        loss=losses_apart(known.losses, found.losses),
        loss_bound=bounds.loss,
        gradient=distances.get(name, 0.0),
        gradient_name=name,
        gradient_bound=bounds.of(name),
        norm=_relative(known.norms[:1], found.norms[:1]),
        problem=problem,
    )


def apart(known: VerifyRun, found: VerifyRun) -> dict[str, float]:
    """‖Δg‖/‖g‖ of every tensor.

    A gradient cannot be known better than to the rounding of the whole gradient's norm: a tensor smaller than that
    (the bias of attention's keys, whose gradient is zero but for rounding) is held to it instead of to its own norm.
    """
    whole = math.sqrt(sum(float(grad.double().square().sum()) for grad in known.gradients.values()))
    rounding = torch.finfo(torch.float32).eps / GRADIENT_BOUND * whole
    distances = {}
    for name in sorted(known.gradients.keys() & found.gradients.keys()):
        grad = known.gradients[name].double()
        distances[name] = float((found.gradients[name].double() - grad).norm()) / max(float(grad.norm()), rounding)
    return distances


def _last(distance: float) -> float:
    """What is no number is further than anything."""
    return distance if math.isfinite(distance) else math.inf


def losses_apart(known: Iterable[float], found: Iterable[float]) -> float:
    """The largest relative difference of a step's loss."""
    return _relative(known, found, SMALL_LOSS)


def _relative(known: Iterable[float], found: Iterable[float], least: float = 1e-30) -> float:
    return max((abs(b - a) / max(abs(a), least) for a, b in zip(known, found, strict=True)), default=0.0)


# --- what 16 bits may differ by --------------------------------------------------------------------------------------


def bounds_of(source: Source, plan: Plan, known: VerifyRun, steps: int = STEPS) -> Bounds:
    """What is allowed for the plan's precision; `known` is the fp32 reference."""
    if plan.precision == "fp32":
        return Bounds()
    single, roundings = rounded(source, plan, steps)
    rounding = ROUNDING[computes_in(plan.precision)]
    loss = rounding * (math.sqrt(steps) if plan.precision == "bf16" else 1.0)
    return Bounds(
        loss=max(loss, 2 * losses_apart(known.losses, single.losses)),
        gradient=math.sqrt(roundings) * rounding,
        tensors={name: 2 * distance for name, distance in apart(known, single).items()},
    )


def rounded(source: Source, plan: Plan, steps: int = STEPS) -> tuple[VerifyRun, int]:
    """One process in the plan's precision, and how many results in 16 bits a micro-batch makes there."""
    counted = _Roundings(getattr(torch, computes_in(plan.precision)))
    run = _plain_run(source, plan, steps, counted)
    return run, counted.number // counted.passes


class _Roundings(TorchDispatchMode):
    """Counts results in a dtype that are no views."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.number, self.passes = dtype, 0, 0

    def __enter__(self) -> Any:
        self.passes += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(value) for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = func(*args, **(kwargs or {}))
        leaves = [value for value in pytree.tree_leaves(made) if isinstance(value, Tensor)]
        self.number += any(value.dtype is self.dtype and _storage(value) not in given for value in leaves)
        return made


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- a user's plan ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanCheck:
    """One thing to check about a plan."""

    name: str
    plan: Plan


def cases_of(plan: Plan) -> list[PlanCheck]:
    """Each axis by itself and all of them in fp32, then as planned: what is wrong is then known to its axis."""
    used = [axis for axis in AXES if getattr(plan.mesh, axis) > 1]
    plain = plan.with_(precision="fp32", compile="none", blocks={}, clip=None)
    found = []
    if len(used) > 1:
        for axis in used:
            mesh = Mesh(**{axis: getattr(plan.mesh, axis)})
            if axis == "ep":  # it is a part of dp_shard
                mesh = replace(mesh, dp_shard=mesh.ep)
            alone = plain.with_(mesh=mesh, pipeline=plan.pipeline if axis == "pp" else None)
            found.append(
                PlanCheck(f"{AXES[axis]} alone, fp32", alone.with_(reshard=plan.reshard if axis == "dp_shard" else True))
            )
    found.append(
        PlanCheck("as planned, but fp32" if plan.precision != "fp32" else "as planned", plan.with_(precision="fp32"))
    )
    if plan.precision != "fp32":
        found.append(PlanCheck(f"as planned, {plan.precision}", plan))
    return found


class Verifier:
    """Runs the cases of a plan's twin on gloo processes of this machine. User code runs in those alone."""

    def __init__(self, plan: Plan, *, steps: int = STEPS, limit_s: float = LIMIT_SECONDS) -> None:
        self.steps, self.limit_s = steps, limit_s
        self._pool = Pool(preload=["transformers"] if str(plan.model["model"]).startswith("hf:") else [])
        self._references: dict[Any, VerifyRun] = {}
        self._plan = plan

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def prepare(self) -> Twin:
        """The twin of the plan, made where user code may run."""
        if self._plan.sync is not None:
            problem = f"the plan has sync: replicas step alone for {self._plan.sync.every} steps, which is not what one process computes"
            raise UserError(problem, "verify the plan without sync; tests/cpu_dist/test_sync.py compares rounds with one process")
        user_code.before(user_code.files_of(self._plan.model))
        self.twin: Twin = self._alone(_twin, self._plan)
        return self.twin

    def run(self, case: PlanCheck) -> Difference:
        """One case beside its reference. A case that fails to run is a difference, not an error."""
        source, plan = self.twin.source, case.plan
        known = self._reference(plan)
        bounds = Bounds() if plan.precision == "fp32" else self._alone(bounds_rank, source, plan, known, self.steps)
        try:
            world = self._pool.ranks(plan.mesh.world)
            runs = world.run(run_rank, source, plan, self.steps, timeout_s=self.limit_s)
        except RankFailure as failure:
            if isinstance(failure.first, ForetellError):
                raise failure.first from None
            rank, text = next(iter(failure.errors.items()))
            problem = f"rank {rank}: {text.strip().splitlines()[-1]}"
            return Difference(loss_bound=bounds.loss, gradient_bound=bounds.gradient, problem=problem)
        return compare(known, merge(runs), bounds)

    def _reference(self, plan: Plan) -> VerifyRun:
        key = (plan.mesh.data * plan.accumulate, plan.clip)
        if key not in self._references:
            self._references[key] = self._alone(reference_rank, self.twin.source, plan, self.steps)
        return self._references[key]

    def _alone(self, function: Any, *args: Any) -> Any:
        """One process; what fails here is the model's own, not the plan's."""
        try:
            return self._pool.ranks(1).run(function, *args, timeout_s=self.limit_s)[0]
        except RankFailure as failure:
            if isinstance(failure.first, ForetellError):
                raise failure.first from None
            text = failure.errors[0].strip()
            problem = f"the twin of {self._plan.model['model']} does not run in one process: {text.splitlines()[-1]}"
            raise ModelError(problem, "run the model by itself first", text) from None


def _twin(_rank: int, _world: int, plan: Plan) -> Twin:
    return twin(plan)


def reference_rank(_rank: int, _world: int, source: Source, plan: Plan, steps: int = STEPS) -> VerifyRun:
    return reference(source, plan, steps)


def bounds_rank(_rank: int, _world: int, source: Source, plan: Plan, known: VerifyRun, steps: int = STEPS) -> Bounds:
    return bounds_of(source, plan, known, steps)
