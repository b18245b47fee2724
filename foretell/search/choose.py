"""The best plan for a model on given hardware, and why not others.

Devices whose speed is known are searched by `search.find`. A CPU, a device of which nothing is known, and a model whose
step is not made of straight lines are climbed: some fifty plans, each costed op by op.

    meshes ─► precision ─► micro-batch × accumulation ─► residency ─► compile, reshard
      each a generator of plans from a plan; what is not legal is dropped with the reason

For every mesh the micro-batch is doubled until it does not fit; from there on blocks are recomputed, selectively and
then whole, since at a micro-batch that fits without, recomputing only costs. Tensor and pipeline axes are tried where
data parallelism alone does not fit, waits for its messages, or cannot share the batch. The best is the plan with most
tokens (or samples) a second; of plans within one percent of it the simplest is taken. Nothing is run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of
from foretell.plan import legal
from foretell.plan.blocks import compress, cuts_by_cost
from foretell.plan.precision import default
from foretell.plan.recipe import model_of
from foretell.plan.types import MASTER, Mesh, Pipeline, Plan, Residency
from foretell.quantities import TIGHT, Infeasible
from foretell.search.choice import Candidate as Candidate
from foretell.search.choice import Choice as Choice
from foretell.search.choice import explained, kind_of
from foretell.search.choice import told as told
from foretell.search.choice import why_slower as why_slower
from foretell.search.costing import Progress, Question
from foretell.search.find import Finalist, Found, Unsuited, find
from foretell.search.law import Advice, advice
from foretell.search.law import check as check_law
from foretell.search.moved import or_moved, spilled
from foretell.search.preferences import ALIKE, FILL, LARGEST_MICRO_BATCH, LESS_IF_TIGHT, WORTH
from foretell.search.reasons import of_candidates
from foretell.search.sheet_modes import MODES, modes_of
from foretell.search.space_wishes import Wishes as Wishes
from foretell.search.space_wishes import check as check_wishes
from foretell.search.traces import Traces
from foretell.simulate.parts import sequence_length
from foretell.simulate.plan import KEEP, Options, PlanCost, predict_plan
from foretell.trace.load import Source
from foretell.trace.load import check as check_source
from foretell.trace.process import TIME_LIMIT
from foretell.trace.types import Trace

LIMIT = 50
"""Plans that are costed."""
ALIKE_ON_CPU = 0.05
"""A CPU's speed comes and goes by more than one percent."""
WAITS = 0.1
"""Share of the step that data parallelism may wait for its messages before other axes are tried."""


def choose(
    source: Source, cluster: Cluster, hardware: str, wishes: Wishes | None = None, *, options: Options | None = None,
    hints: Mapping[str, float] | None = None, cache: bool = True, progress: Progress = lambda _: None,
    exact: bool | None = True, what_if: bool = False, patience: float = float("inf"), by_law: bool = False,
    traces: Traces | None = None, time_limit: float = TIME_LIMIT,
) -> Choice:  # fmt: skip
    """The best plan for a model on hardware; `hardware` is how the user wrote it.

    `exact`: whether the best is costed op by op in any case (True), where that is quick (None), or not (False).
    `by_law`: where no batch is asked for, the Step Law's for `wishes.tokens` is taken. `traces`: those at hand.
    `time_limit`: seconds that tracing one step may take.
    """
    check_source(source)
    asked, device = wishes or Wishes(), cluster.device
    check_wishes(asked, cluster)
    check_law(by_law, asked.tokens)
    on_cpu = device.backend == "cpu"
    capability = None if on_cpu else device.compute_capability or (9, 0)
    traces = traces or Traces(
        capability=capability, hints=dict(hints or {}), cache=cache, progress=progress, time_limit=time_limit
    )
    how = options or Options()
    how = replace(how, profile_of=functools.cache(how.profile_of))
    remarks: tuple[str, ...] = ()
    question = Question(source, cluster, hardware, asked, how, traces, progress)
    if asked.precision == MASTER:
        if by_law:
            raise UserError(f"--step-law is not taken with --precision {MASTER}", "give --global-batch")
        return spilled(question)
    if not on_cpu:
        try:
            found = as_choice(find(
                source, cluster, hardware, asked, options=how, progress=progress, exact=exact, what_if=what_if,
                patience=patience, traces=traces, by_law=by_law,
            ))  # fmt: skip
            return found if found.best is not None else or_moved(found, question)
        except Unsuited as error:
            remarks = (f"plans were tried one by one: {error}",)
    for axis in ("cp", "ep"):
        if asked.fixed.get(axis, 1) > 1:
            raise UserError(f"--{axis} {asked.fixed[axis]}: here plans are tried one by one, and none has {axis}", f"leave --{axis} out")
    search = _Search(source, cluster, hardware, asked, how, traces, progress)
    law = search.law(by_law) if asked.tokens is not None else None
    for mesh in search.meshes():
        search.explore(mesh)
    for mesh in search.deeper_meshes():
        search.explore(mesh)
    found = search.choice()
    return _with_law(replace(found, notes=(*found.notes, *remarks)), law)


def _with_law(found: Choice, law: Advice | None) -> Choice:
    """What the law says, with the batch that is used, in the plan's notes too."""
    if law is None or found.best is None:
        return replace(found, law=law)
    plan = found.best.plan
    law = replace(law, used=plan.global_batch)
    notes = (*plan.notes, *(f"Step Law: {line}" for line in law.lines()))
    return replace(found, law=law, best=replace(found.best, plan=plan.with_(notes=notes)))


def as_choice(found: Found) -> Choice:
    """What a search found, as callers of `choose` know it."""

    def one(finalist: Finalist) -> Candidate:
        return Candidate(plan=finalist.plan, cost=finalist.cost, why=finalist.why)

    nearest = [replace(one(found.nearest), why=found.needs)] if found.nearest is not None else []
    return Choice(
        best=one(found.best) if found.best is not None else None, runners_up=tuple(map(one, found.runners_up)),
        dropped=(*nearest, *map(one, found.dropped)), infeasible=found.infeasible, costed=found.costed, notes=found.notes,
        found=found, law=found.law, reasons=found.reasons, relaxations=found.relaxations, tried=found.tried,
    )  # fmt: skip


@dataclass
class _Search(Question):
    found: list[Candidate] = field(default_factory=list)
    costed: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    """Block → FLOPs of a micro-batch; "" and "after" for what comes before and after the blocks."""
    remarks: list[str] = field(default_factory=list)
    modes: tuple[str, ...] = MODES
    """Residencies that the model's blocks can be in."""

    def law(self, followed: bool) -> Advice | None:
        """What the Step Law says of the run; its batch becomes a wish where that was asked for."""
        wishes = self.wishes
        assert wishes.tokens is not None
        plan = Plan(model=model_of(self.source), hardware=self.hardware, precision=wishes.precision or "fp32",
                    optimizer=wishes.optimizer, clip=wishes.clip)  # fmt: skip
        trace = self.traces.of(plan, [KEEP])[KEEP]
        self._learn(trace)
        found = advice(
            self.traces.facts.shapes, self.blocks, wishes.tokens, sequence_length(trace, plan.micro_batch),
            devices=self.cluster.count, fixed=wishes.fixed, micro_batch=wishes.micro_batch, global_batch=wishes.global_batch,
            followed=followed,
        )  # fmt: skip
        if found is not None and found.followed:
            self.wishes = replace(wishes, global_batch=found.chosen)
        return found

    # ------------------------------------------------------------------ generators

    @property
    def on_cpu(self) -> bool:
        return self.cluster.device.backend == "cpu"

    def meshes(self) -> Iterator[Mesh]:
        """Ways to lay out the ranks, the plainest first."""
        if self.wishes.meshes:
            yield from self.wishes.meshes
            return
        count = self.cluster.count
        ranks = self.wishes.ranks or ((1, 2) if self.on_cpu and self.cluster.device.sm_count > 1 else (count,))
        for world in ranks:
            if world == 1:
                yield Mesh()
                continue
            yield Mesh(dp_shard=world)
            yield Mesh(dp_replicate=world)
            nodes, per_node = self.cluster.nodes, self.cluster.devices_per_node
            if nodes > 1 and world == count:
                yield Mesh(dp_replicate=nodes, dp_shard=per_node)

    def deeper_meshes(self) -> Iterator[Mesh]:
        """With a tensor axis inside a node, with pipeline stages, and with both across nodes."""
        count, per_node = self.cluster.count, self.cluster.devices_per_node
        if self.wishes.meshes or self.on_cpu or count == 1:
            return
        why = self._why_deeper()
        if not why:
            self.remarks.append("tensor and pipeline parallelism were not tried: data parallelism fits and hardly waits")
            return
        for tensor in (2, 8, 4):
            if per_node % tensor == 0 and count % tensor == 0:
                yield Mesh(tp=tensor, dp_shard=count // tensor)
        for stages in (2, 4, 8):
            if count % stages == 0 and stages <= len(self.blocks):
                yield Mesh(pp=stages, dp_shard=count // stages)
        if self.cluster.nodes > 1 and per_node <= 8 and self.cluster.nodes <= len(self.blocks):
            yield Mesh(pp=self.cluster.nodes, tp=per_node)

    def _why_deeper(self) -> bool:
        best = max((one for one in self.found if one.fits), key=_speed, default=None)
        if best is None or best.cost is None or best.cost.time is None:
            return True
        time = best.cost.time
        return best.plan.mesh.data < self.cluster.count or time.exposed_communication_seconds > WAITS * time.step_seconds

    def batches(self, mesh: Mesh) -> Iterator[tuple[int, int]]:
        """Micro-batches and how many of them make a step, smallest first; a pipeline wants several."""
        wanted, fixed = self.wishes.global_batch, self.wishes.micro_batch
        each = LARGEST_MICRO_BATCH if wanted is None else wanted // mesh.data
        if wanted is not None and each * mesh.data != wanted:
            return
        micro = fixed or (max(1, self.source.micro_batch) if wanted is None else 1)
        while micro <= (fixed or min(each, LARGEST_MICRO_BATCH)):
            if wanted is None:
                yield micro, 1 if mesh.pp == 1 else FILL * mesh.pp
            elif each % micro == 0 and each // micro >= mesh.pp:
                yield micro, each // micro
            micro *= 2

    def compiles(self, mesh: Mesh) -> tuple[str, ...]:
        if self.wishes.compile:
            return self.wishes.compile
        return ("none",) if self.on_cpu or mesh.world > 1 else ("none", "model")

    def reshards(self, mesh: Mesh) -> tuple[bool, ...]:
        return (True, False) if mesh.dp_shard > 1 else (True,)

    # ------------------------------------------------------------------ exploring

    def explore(self, mesh: Mesh) -> None:
        """Cost plans of one mesh: larger and larger micro-batches, then with recomputation."""
        base = Plan(
            model=self.about or model_of(self.source), hardware=self.hardware, mesh=mesh,
            precision=self.wishes.precision or default(self.cluster),
            optimizer=self.wishes.optimizer, clip=self.wishes.clip, pipeline=self._pipeline(mesh),
        )  # fmt: skip
        batches = list(self.batches(mesh))
        if not batches:
            if not self.about:
                self._learn(self.traces.of(base, [KEEP])[KEEP])
            shared = f"{mesh.data} data ranks" + (f" and {mesh.pp} stages" if mesh.pp > 1 else "")
            self.found.append(Candidate(plan=base, why=f"{self.wishes.global_batch} samples cannot be shared by {shared}"))
            return
        if mesh.tp == 1:
            self.traces.prepare([(base.with_(micro_batch=micro), KEEP) for micro, _ in batches[:3]])
        for compile in self.compiles(mesh):
            self._climb(base.with_(compile=compile), batches[self._reached(mesh, batches) :])
        best = max((one for one in self.found if one.fits and one.plan.mesh == mesh), key=_speed, default=None)
        if best is not None:
            mode = next((residency.mode for residency in best.plan.blocks.values()), KEEP)
            for reshard in self.reshards(mesh)[1:]:
                self.consider(best.plan.with_(reshard=reshard, predicted={}), mode)

    def _pipeline(self, mesh: Mesh) -> Pipeline | None:
        """Stages of equal work, what comes before and after the blocks included."""
        if mesh.pp == 1:
            return None
        before, after = self.weights.get("", 0.0), self.weights.get("after", 0.0)
        cuts = cuts_by_cost({block: self.weights[block] for block in self.blocks}, mesh.pp, before=before, after=after)
        return Pipeline(schedule="1f1b", cuts=cuts)

    def _reached(self, mesh: Mesh, batches: Sequence[tuple[int, int]]) -> int:
        """Where to begin with another way to compile: a little below the best so far."""
        best = max((one for one in self.found if one.fits and one.plan.mesh == mesh), key=_speed, default=None)
        if best is None:
            return 0
        return max(0, batches.index((best.plan.micro_batch, best.plan.accumulate)) - 2)

    def _climb(self, base: Plan, batches: Sequence[tuple[int, int]]) -> None:
        start = 0
        for mode in MODES:
            if mode not in self.modes:
                continue
            fitted, cost = start, None
            while fitted < len(batches) and self.costed < LIMIT:
                micro, accumulate = batches[fitted]
                cost = self.consider(base.with_(micro_batch=micro, accumulate=accumulate), mode)
                if cost is None or not cost.fits or self._past_the_best(cost):
                    break
                fitted += 1
            if fitted == len(batches) or not self.blocks or cost is None:
                return
            if fitted < len(batches) and self.found[-1].fits:
                return  # larger micro-batches fit, and gain nothing
            start = fitted
            micro = batches[fitted][0]
            self.traces.prepare([(base.with_(micro_batch=micro), other) for other in self.modes[1:]])

    def _past_the_best(self, cost: PlanCost) -> bool:
        """Whether the last doubling of the micro-batch did not make the plan faster."""
        alike = [
            one for one in self.found[:-1]
            if one.fits and one.plan.mesh == cost.plan.mesh and one.plan.compile == cost.plan.compile
            and one.plan.micro_batch * 2 == cost.plan.micro_batch and one.plan.blocks == cost.plan.blocks
        ]  # fmt: skip
        if not alike or alike[-1].cost is None or cost.per_second is None:
            return False
        before = alike[-1].cost.per_second or 0.0
        return cost.per_second < before * (1 + WORTH)

    def consider(self, plan: Plan, mode: str = KEEP) -> PlanCost | None:
        """Cost one plan with all its blocks in a residency; None where it is not legal."""
        try:
            traces = self.traces.of(plan, [mode])
        except UserError as error:
            if plan.mesh.tp == 1:
                raise
            self.found.append(Candidate(plan=plan, why=error.problem))  # the model cannot be split so
            return None
        if not self.about:
            self._learn(traces[mode])
        if not plan.blocks and mode != KEEP:
            plan = plan.with_(blocks=compress(dict.fromkeys(self.blocks, Residency(mode=mode))))
        plan = plan.with_(model=self.about)
        wrong = legal.complaints(plan, self._facts())
        if wrong:
            self.found.append(Candidate(plan=plan, why=str(wrong[0])))
            return None
        self.progress(f"costing plan {self.costed + 1}: {told(plan)}")
        self.costed += 1
        cost = predict_plan(traces, plan, self.cluster, self.options)
        self.found.append(Candidate(plan=plan.with_(predicted=cost.predicted()), cost=cost))
        return cost

    def _learn(self, trace: Trace) -> None:
        self.blocks, self.modes = blocks_of(trace), modes_of(trace)
        shapes = self.traces.facts.shapes
        self.about = model_of(self.source, blocks=self.blocks, shapes=shapes or None)
        self.weights = work_of(trace)

    def _facts(self) -> legal.Facts:
        facts = legal.with_hardware(legal.Facts(blocks=self.blocks, tied=self.traces.facts.tied), self.cluster)
        if self.on_cpu:
            facts = replace(facts, devices=max(2, self.cluster.device.sm_count), devices_per_node=None)
        return replace(facts, global_batch=self.wishes.global_batch)

    # ------------------------------------------------------------------ choosing

    def choice(self) -> Choice:
        fitting = sorted((one for one in self.found if one.fits), key=_speed, reverse=True)
        dropped = tuple(explained(one) for one in self.found if not one.fits)
        notes = (*self.traces.notes, *self.remarks)
        if not fitting:
            return Choice(
                best=None, dropped=dropped, infeasible=self._nearest(), costed=self.costed, notes=notes, reasons=of_candidates(dropped)
            )
        alike = ALIKE_ON_CPU if self.on_cpu else ALIKE
        best = min((one for one in fitting if _speed(one) >= (1 - alike) * _speed(fitting[0])), key=_effort)
        losers: dict[Any, Candidate] = {}
        for one in fitting:
            if one is not best:
                losers.setdefault(kind_of(one.plan), replace(one, why=why_slower(best, one)))
        losers.pop(kind_of(best.plan), None)
        return Choice(best=best, runners_up=tuple(losers.values()), dropped=dropped, costed=self.costed, notes=notes)

    def _nearest(self) -> Infeasible | None:
        costs = [one.cost for one in self.found if one.cost is not None]
        if not costs:
            return None
        nearest = max(costs, key=lambda cost: cost.worst.memory.margin_bytes)
        return nearest.infeasible(self.cluster.device.name)


def work_of(trace: Trace) -> dict[str, float]:
    """FLOPs of every block in a micro-batch, and of what runs before (empty name) and after them (`after`)."""
    blocks = blocks_of(trace)
    ops = trace.programs["micro_first"].ops
    found = dict.fromkeys(("", *blocks, "after"), 0.0)
    seen = False
    for op, block in zip(ops, block_of(ops, blocks), strict=True):
        seen = seen or bool(block)
        late = op.phase != "forward" or seen
        found[block or ("after" if late else "")] += op.flops or 0
    return found


def _speed(one: Candidate) -> float:
    assert one.cost is not None
    speed = one.cost.per_second
    if speed is None:  # no profile: the less memory and talk, the better
        speed = one.plan.global_batch / (1 + len(one.plan.blocks)) / (1 + 0.01 * one.plan.mesh.world)
    return speed * (1 - LESS_IF_TIGHT if one.cost.verdict == TIGHT else 1)


def _effort(one: Candidate) -> tuple[Any, ...]:
    """How much there is to a plan: ranks and axes, compiling, recomputing, accumulation, large micro-batches."""
    mesh, plan = one.plan.mesh, one.plan
    axes = sum(degree > 1 for degree in (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.pp))
    return mesh.world, axes, plan.compile != "none", bool(plan.blocks), plan.reshard is not True, plan.accumulate, plan.micro_batch
