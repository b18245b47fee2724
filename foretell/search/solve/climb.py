"""Plans tried one by one, each costed op by op: for a CPU, a device of which nothing is known, and a model whose step is not
made of straight lines.

    meshes ─► precision ─► micro-batch × accumulation ─► residency ─► compile, reshard
      each a generator of plans from a plan; what is not legal is dropped with the reason

For every mesh the micro-batch is doubled until it does not fit; from there on blocks are recomputed, selectively and
then whole, since at a micro-batch that fits without, recomputing only costs. Tensor and pipeline axes are tried where
data parallelism alone does not fit, waits for its messages, or cannot share the batch. The best is the plan with most
tokens (or samples) a second; of plans within one percent of it the simplest is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of
from foretell.plan import legal
from foretell.plan.blocks import compress, cuts_by_cost
from foretell.plan.precision import default
from foretell.plan.recipe import model_of
from foretell.plan.types import AWAY, OWN_KERNEL, Mesh, Pipeline, Plan, Residency
from foretell.price.offload import neighbours
from foretell.quantities import TIGHT
from foretell.search.block_costs.residency import MODES, RECOMPUTE, modes_of
from foretell.search.solve import engine
from foretell.search.solve.choice import Choice, explained, kind_of, told, why_slower
from foretell.search.solve.found import Candidate
from foretell.search.solve.planned_batch import BatchAdvice
from foretell.search.solve.question import Question
from foretell.search.solve.reasons import of_candidates
from foretell.search.space.caps import host_of
from foretell.search.space.layouts import micro_batches
from foretell.search.space.preferences import ALIKE, ALIKE_ON_CPU, LESS_IF_TIGHT, MOST_PLANS, WORTH, chunks_for
from foretell.simulate.parts import sequence_length
from foretell.simulate.plan import KEEP, PlanCost, predict_plan
from foretell.trace.types import Trace
from foretell.units import gib

WAITS = 0.1
"""Share of the step that data parallelism may wait for its messages before other axes are tried."""

MOVED = "recompute-host"
"""The residency that is tried where nothing fits with the others."""
UNTRIED = ("blocks computed again from inputs in host memory were not tried: how much memory the host has is not known; say how much of it "
           "plans may use, such as --host 100GiB")  # fmt: skip

Tried = tuple[Plan, str]
"""A plan, and the residency of all its blocks."""


@dataclass
class Climb(Question):
    """One question, and the plans that were tried for it."""

    found: list[Candidate] = field(default_factory=list)
    costed: int = 0
    named: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    """Block → FLOPs of a micro-batch; "" and "after" for what comes before and after the blocks."""
    remarks: list[str] = field(default_factory=list)
    modes: tuple[str, ...] = MODES
    """Residencies that the model's blocks can be in."""
    chunkable: bool = True
    """Whether the model's loss can be computed in chunks, as far as is known."""

    def answer(self, patience: float = float("inf")) -> Choice:
        for axis in ("cp", "ep"):
            if (degree := self.wishes.fixed.get(axis, 1)) > 1 and not self.wishes.meshes:
                raise UserError(f"--{axis} {degree}: here plans are tried one by one, and none has {axis}", f"leave --{axis} out")
        law = self._lawful() if self.wishes.tokens is not None else None
        ended = engine.search(self, patience=patience, most=MOST_PLANS)
        if ended == "interrupted" and self._best() is None:
            raise KeyboardInterrupt
        self.remarks += [f"the search was ended early: {ended}"] if ended else []
        return _with_law(self.choice(), law)

    def _lawful(self) -> BatchAdvice | None:
        wishes = self.wishes
        plan = Plan(model=model_of(self.source), hardware=self.hardware, precision=wishes.precision or "fp32",
                    optimizer=wishes.optimizer, clip=wishes.clip, state_format=wishes.coded)  # fmt: skip
        trace = self.traces.of(plan, [KEEP])[KEEP]
        self._learn(trace)
        return self.law(self.blocks, sequence_length(trace, plan.micro_batch))

    # ------------------------------------------------------------------ generators

    def candidates(self) -> Iterator[Tried]:
        for meshes in (self.meshes, self.deeper_meshes):
            for mesh in meshes():
                yield from self.of_mesh(mesh)

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
        whole = bool(self.wishes.base) or (self.wishes.adapters is not None and self.wishes.adapters.kind.startswith("dora"))
        for tensor in () if whole else (2, 8, 4):
            if per_node % tensor == 0 and count % tensor == 0:
                yield Mesh(tp=tensor, dp_shard=count // tensor)
        for stages in (2, 4, 8):
            if count % stages == 0 and stages <= len(self.blocks):
                yield Mesh(pp=stages, dp_shard=count // stages)
        if not whole and self.cluster.nodes > 1 and per_node <= 8 and self.cluster.nodes <= len(self.blocks):
            yield Mesh(pp=self.cluster.nodes, tp=per_node)

    def _why_deeper(self) -> bool:
        best = self._best()
        if best is None or best.cost is None or best.cost.time is None:
            return True
        time = best.cost.time
        return best.plan.mesh.data < self.cluster.count or time.exposed_communication_seconds > WAITS * time.step_seconds

    def batches(self, mesh: Mesh) -> list[tuple[int, int]]:
        """Micro-batches and how many of them make a step, from the source's own where the batch is free."""
        if self.wishes.global_batch is None:
            return micro_batches(self.wishes, mesh, max(1, self.source.micro_batch))
        return [(micro, many) for micro, many in micro_batches(self.wishes, mesh) if many >= mesh.pp]

    def compiles(self, mesh: Mesh) -> tuple[str, ...]:
        if self.wishes.compile:
            return self.wishes.compile
        return ("none",) if self.on_cpu or mesh.world > 1 else ("none", "model")

    def reshards(self, mesh: Mesh) -> tuple[bool, ...]:
        return (True, False) if mesh.dp_shard > 1 else (True,)

    # ------------------------------------------------------------------ climbing

    def of_mesh(self, mesh: Mesh) -> Iterator[Tried]:
        """Plans of one mesh: larger and larger micro-batches, then with recomputation."""
        if mesh.pp > 1 and not self.named:
            self._learn(self.traces.of(self._plain(), [KEEP])[KEEP])
        base = Plan(
            model=self.named or model_of(self.source), hardware=self.hardware, mesh=mesh,
            precision=self.wishes.precision or default(self.cluster),
            optimizer=self.wishes.optimizer, clip=self.wishes.clip, pipeline=self._pipeline(mesh),
            adapters=self.wishes.adapters, base=self.wishes.base, state_format=self.wishes.coded, sync=self.wishes.sync,
            kernels=dict.fromkeys(self.wishes.kernels, OWN_KERNEL),
        )  # fmt: skip
        batches = self.batches(mesh)
        if not batches:
            if not self.named:
                self._learn(self.traces.of(base, [KEEP])[KEEP])
            shared = f"{mesh.data} data ranks" + (f" and {mesh.pp} stages" if mesh.pp > 1 else "")
            self.found.append(Candidate(plan=base, why=f"{self.wishes.global_batch} samples cannot be shared by {shared}"))
            return
        if mesh.tp == 1:
            self.traces.prepare([(base.with_(micro_batch=micro), KEEP) for micro, _ in batches[:3]])
        for compile in self.compiles(mesh):
            yield from self._climbed(base.with_(compile=compile), batches[self._reached(mesh, batches) :])
        best = self._best(mesh)
        if best is not None:
            mode = next((residency.mode for residency in best.plan.blocks.values()), KEEP)
            for reshard in self.reshards(mesh)[1:]:
                yield best.plan.with_(reshard=reshard, predicted={}), mode

    def _plain(self) -> Plan:
        """One device's, to learn of the model what stages are made of."""
        return Plan(
            model=model_of(self.source), hardware=self.hardware, precision=self.wishes.precision or default(self.cluster),
            optimizer=self.wishes.optimizer, clip=self.wishes.clip, adapters=self.wishes.adapters, base=self.wishes.base,
            kernels=dict.fromkeys(self.wishes.kernels, OWN_KERNEL),
        )  # fmt: skip

    def _best(self, mesh: Mesh | None = None) -> Candidate | None:
        """The fastest so far, of one mesh or of all."""
        return max((one for one in self.found if one.fits and mesh in (None, one.plan.mesh)), key=self._speed, default=None)

    def _pipeline(self, mesh: Mesh) -> Pipeline | None:
        """Stages of equal work, what comes before and after the blocks included."""
        if mesh.pp == 1:
            return None
        before, after = self.weights.get("", 0.0), self.weights.get("after", 0.0)
        cuts = cuts_by_cost({block: self.weights[block] for block in self.blocks}, mesh.pp, before=before, after=after)
        return Pipeline(schedule="1f1b", cuts=cuts)

    def _reached(self, mesh: Mesh, batches: Sequence[tuple[int, int]]) -> int:
        """Where to begin with another way to compile: a little below the best so far."""
        best = self._best(mesh)
        return 0 if best is None else max(0, batches.index((best.plan.micro_batch, best.plan.accumulate)) - 2)

    def _climbed(self, base: Plan, batches: Sequence[tuple[int, int]]) -> Iterator[Tried]:
        at, chunks = 0, self.wishes.loss_chunks or 1
        for mode in itertools.chain((mode for mode in MODES if mode in self.modes), self._moved(base)):
            while at < len(batches):
                micro, accumulate = batches[at]
                yield base.with_(micro_batch=micro, accumulate=accumulate, loss_chunks=chunks), mode
                last = self.found[-1]
                if last.cost is None and chunks > 1 and self.wishes.loss_chunks is None:
                    chunks, self.chunkable = 1, False
                    break
                if last.cost is None or (last.fits and self._past_the_best(last)):
                    return  # it is not legal, or larger micro-batches gain nothing
                if not last.fits:
                    more = self._chunks(last) if chunks == 1 else 1
                    if more == 1:
                        break
                    chunks = more
                    continue
                at += 1
            if at == len(batches) or not self.blocks:
                return
            self.traces.prepare([(base.with_(micro_batch=batches[at][0], loss_chunks=chunks), other) for other in self.modes[1:]])

    def _moved(self, base: Plan) -> Iterator[str]:
        """Where no plan of this kind fits otherwise: blocks computed again from inputs on the host, if it has room for any."""
        if self.on_cpu or base.compile != "none" or RECOMPUTE not in self.modes or base.mesh.spread != base.mesh.world:
            return
        if any(one.fits for one in self.found):
            return
        if host_of(self.cluster, self.wishes) is not None:
            yield MOVED
        elif UNTRIED not in self.remarks:
            self.remarks.append(UNTRIED)

    def _chunks(self, last: Candidate) -> int:
        """In how many chunks the loss of a plan that does not fit leaves little of its logits; 1 where they are not what is large."""
        plan, cost = last.plan, last.cost
        if cost is None or cost.unit != "tokens" or not self.chunkable or self.wishes.loss_chunks is not None:
            return 1
        if plan.compile not in ("none", "blocks"):
            return 1  # the output layer would be taken out of the compiled model
        memory = cost.worst.memory
        logits, tokens = memory.categories.get("logits", 0), cost.per_step // plan.global_batch * plan.micro_batch
        return chunks_for(logits, tokens, memory.capacity_bytes)

    def _past_the_best(self, last: Candidate) -> bool:
        """Whether the last doubling of the micro-batch did not make the plan faster."""
        plan, speed = last.plan, last.cost.per_second if last.cost is not None else None
        alike = [
            one.cost.per_second for one in self.found[:-1]
            if one.fits and one.cost is not None and one.plan.mesh == plan.mesh and one.plan.compile == plan.compile
            and one.plan.micro_batch * 2 == plan.micro_batch and one.plan.blocks == plan.blocks
        ]  # fmt: skip
        return bool(alike) and speed is not None and speed < (alike[-1] or 0.0) * (1 + WORTH)

    def hopeless(self, one: Tried) -> bool:
        return False  # the generator goes no further than what may gain

    def cost(self, one: Tried) -> None:
        """Cost one plan with all its blocks in a residency, or say why not."""
        plan, mode = one
        try:
            traces = self.traces.of(plan, [mode])
        except UserError as error:
            if plan.mesh.tp == 1 and (plan.loss_chunks == 1 or self.wishes.loss_chunks is not None):
                raise
            self.found.append(Candidate(plan=plan, why=error.problem))  # the model, or its loss, cannot be split so
            return
        if not self.named:
            self._learn(traces[mode])
        if not plan.blocks and mode != KEEP:
            plan = plan.with_(blocks=compress(dict.fromkeys(self.blocks, Residency(mode=mode))))
        plan = plan.with_(model=self.named)
        wrong = legal.complaints(plan, self.facts(self.blocks))
        if wrong:
            self.found.append(Candidate(plan=plan, why=str(wrong[0])))
            return
        self.progress(f"costing plan {self.costed + 1}: {told(plan)}")
        self.costed += 1
        cost = predict_plan(traces, plan, self.cluster, self.options)
        over = self._over_host(plan, cost)
        self.found.append(Candidate(plan=plan, why=over) if over else Candidate(plan=plan.with_(predicted=cost.predicted()), cost=cost))

    def _over_host(self, plan: Plan, cost: PlanCost) -> str:
        """What a plan that moves activations lacks of host memory; empty where it lacks none."""
        room, needed = host_of(self.cluster, self.wishes), cost.worst.memory.host_bytes * neighbours(plan.mesh, self.cluster)
        if room is None or needed <= room or not any(one.mode in AWAY for one in plan.blocks.values()):
            return ""
        return f"{gib(needed)} of host memory, and {gib(room)} may be used"

    def _learn(self, trace: Trace) -> None:
        self.blocks, self.modes = blocks_of(trace), modes_of(trace)
        self.named, self.weights = self.about(self.blocks), work_of(trace)

    # ------------------------------------------------------------------ choosing

    def _speed(self, one: Candidate) -> float:
        assert one.cost is not None
        speed, plan = one.cost.per_second, one.plan
        if speed is None:  # no profile: the less memory and talk, the better; a free batch is no better for more micro-batches
            samples = plan.global_batch / (1 if self.wishes.global_batch else plan.accumulate)
            speed = samples / (1 + len(plan.blocks)) / (1 + 0.01 * plan.mesh.world)
        return speed * (1 - LESS_IF_TIGHT if one.cost.verdict == TIGHT else 1)

    def choice(self) -> Choice:
        fitting = sorted((one for one in self.found if one.fits), key=self._speed, reverse=True)
        dropped = tuple(explained(one) for one in self.found if not one.fits)
        notes = (*self.traces.notes, *self.remarks)
        if not fitting:
            costs = [one.cost for one in self.found if one.cost is not None]
            nearest = max(costs, key=lambda cost: cost.worst.memory.margin_bytes, default=None)
            infeasible = nearest.infeasible(self.cluster.device.name) if nearest is not None else None
            return Choice(
                best=None, dropped=dropped, infeasible=infeasible, costed=self.costed, notes=notes, reasons=of_candidates(dropped)
            )
        alike = ALIKE_ON_CPU if self.on_cpu else ALIKE
        best = engine.best_of(fitting, lambda one: (1 / self._speed(one),), _effort, alike)
        assert best is not None
        losers = engine.each_kind((best, *(one for one in fitting if one is not best)), lambda one: kind_of(one.plan))[1:]
        slower = tuple(replace(one, why=why_slower(best, one, alike)) for one in losers)
        return Choice(best=best, runners_up=slower, dropped=dropped, costed=self.costed, notes=notes)


def _with_law(found: Choice, law: BatchAdvice | None) -> Choice:
    """What the law says, with the batch that is used, in the plan's notes too."""
    if law is None or found.best is None:
        return replace(found, law=law)
    plan = found.best.plan
    law = replace(law, used=plan.global_batch)
    notes = (*plan.notes, *(f"Step Law: {line}" for line in law.lines()))
    return replace(found, law=law, best=replace(found.best, plan=plan.with_(notes=notes)))


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


def _effort(one: Candidate) -> tuple[Any, ...]:
    """How much there is to a plan: ranks and axes, compiling, recomputing, accumulation, large micro-batches."""
    mesh, plan = one.plan.mesh, one.plan
    axes = sum(degree > 1 for degree in (mesh.dp_replicate, mesh.dp_shard, mesh.tp, mesh.pp))
    return mesh.world, axes, plan.compile != "none", bool(plan.blocks), plan.reshard is not True, plan.accumulate, plan.micro_batch
