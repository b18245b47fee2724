"""What leaves a device when not all of it fits: optimizer states, then weights, and what is recomputed besides.

    micro-batch × recompute            cells; where everything fits on the device, nothing is moved
      ▼ fewest states away             from the last blocks backwards, `rest` last of all: bytes fall with every block
      ▼ if that is not enough          weights of the last blocks; on the disk what the host has no room for
      ▼ of the best cell               blocks kept again as far as there is room, the CPU's share of the updates

Gradients of the last blocks come first and their weights are needed last, so their states have most time to come and go.
A cell cannot be quicker than with everything on the device: cells whose bound loses are left out, and nothing else is (`engine`).
Every plan is costed by `predict_plan`, whose verdict alone says that it fits. Several devices share the parameters, all of them
or those of each machine; then only states move, and what is on the host is there once for every rank of a machine.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.blocks import TraceMismatch, blocks_of
from foretell.lower.offload.states import AT_HAND, StateUnit, disk_bytes, host_bytes, units_of
from foretell.lower.steps import repeated
from foretell.plan import legal, paths
from foretell.plan.blocks import compress
from foretell.plan.precision import moving_states
from foretell.plan.recipe import model_of
from foretell.plan.states import DISK, HOST, bytes_of, form_of, width_of_weights
from foretell.plan.types import AWAY, MODES, REST, TIERS, Mesh, Plan, Residency, computed
from foretell.price import offload
from foretell.price.speeds import profile_for
from foretell.quantities import TIGHT
from foretell.search.block_costs import residency as sheet_modes
from foretell.search.offload.found import Spilled, Tried, fewest
from foretell.search.solve import engine
from foretell.search.solve.choice import told
from foretell.search.solve.question import Question
from foretell.search.space.caps import host_of, unknown_host
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.layouts import micro_batches
from foretell.search.space.preferences import MOST_PLANS, weighed
from foretell.simulate.plan import KEEP, Options, PlanCost, modes_of, predict_plan, sharded
from foretell.trace.types import Trace
from foretell.units import gib

NEAR = (-0.1, -0.05, 0.05, 0.1)
"""Around the share of updates that keeps CPU and link busy equally long."""


def _key(plan: Plan) -> Any:
    return plan.micro_batch, plan.accumulate, repr(plan.blocks), repr(plan.states), repr(plan.weights), plan.cpu_share


Cell = tuple[int, int, str]
"""Micro-batch, how many make a step, residency of the blocks."""


class OffloadTry(NamedTuple):
    """Something to try."""

    bound: float
    """A score that it does not beat."""
    made: Callable[[], Tried | None]
    """The plan it comes to; None where none fits or it gains nothing."""


# ---------------------------------------------------------------------- the search


@dataclass
class Spill(Question):
    """One question, and how its devices share the model."""

    mesh: Mesh = field(default_factory=Mesh)

    known: dict[Any, Tried] = field(default_factory=dict)
    weighed: dict[Any, PlanCost] = field(default_factory=dict)
    found: list[Tried] = field(default_factory=list)
    _traces: dict[tuple[int, str], Trace] = field(default_factory=dict)
    _ranks: dict[int, Trace] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    remarks: list[str] = field(default_factory=list)
    lacking: set[str] = field(default_factory=set)
    """Residencies that cannot be costed."""

    def __post_init__(self) -> None:
        device, margin = self.cluster.device, self.wishes.margin
        if margin:
            smaller = device.with_memory(int(device.memory_bytes * (1 - margin)), f"less --margin {margin:g}")
            self.cluster = replace(self.cluster, device=smaller)
        self.host = host_of(self.cluster, self.wishes)
        profile = profile_for(self.cluster, self.options.profile_of)
        self.neighbours = offload.neighbours(self.mesh, self.cluster)
        self.rates = offload.rates(profile, device, self.neighbours) if profile is not None else None

    def answer(self, patience: float = float("inf")) -> Spilled:
        """Search."""
        self._begin(self.batches()[0])
        ended = engine.search(self, patience=patience, most=MOST_PLANS)
        best = self._best()
        if best is None and ended == "interrupted":
            raise KeyboardInterrupt
        self.remarks += [f"the search was ended early: {ended}"] if ended else []
        if best is None and self.host is None:
            raise unknown_host(self.cluster)
        return self._told(best) if best is not None else self._nothing()

    def candidates(self) -> Iterator[OffloadTry]:
        """Cells; then of the best one with fewer blocks treated, and with the CPU's share of the updates."""
        yield from self._climbed()
        for around in (self._brimful, self._shared):
            best = self._best()
            if best is not None:
                yield from around(best)

    def hopeless(self, one: OffloadTry) -> bool:
        best = self._best()
        return best is not None and one.bound >= self.score(best)

    def cost(self, one: OffloadTry) -> None:
        found = one.made()
        if found is not None and found.fits:
            self.found.append(found)

    def thriftiest(self) -> Tried:
        """The plan that needs least of a device: one sample at a time, every block recomputed, all away that can be.

        Where that fits, so does what a search finds; what it needs of the host is the most that any plan does.
        """
        wanted, given, data = self.wishes.global_batch, self.wishes.micro_batch, self.mesh.data
        micro = given or 1
        batch = (micro, wanted // data // micro if wanted else 1)
        self._begin(batch)
        cell = (*batch, next(mode for mode in reversed(self.modes) if mode not in self.lacking and mode not in AWAY))
        found = self.priced(self.plan(cell, self.most))
        return self.priced(self.plan(cell, self.most, weights=self.streamable)) if self.streamable and not found.cost.fits else found

    def _climbed(self) -> Iterator[OffloadTry]:
        """Larger and larger micro-batches, until one cannot fit or, where the batch is free, gains nothing."""
        batches, before = self.batches(), None
        possible = itertools.takewhile(lambda batch: self._possible(*batch), batches)
        for micro, accumulate in possible if self.wishes.global_batch is None else reversed(list(possible)):
            yield from self._cells(micro, accumulate)
            best = self._best()
            if self.wishes.global_batch is None and best is before:
                break
            before = best
        if self._best() is None and batches[0][0] == 2:  # half of that may
            yield from self._cells(1, 2 * batches[0][1] if self.wishes.global_batch else 1)

    def batches(self) -> list[tuple[int, int]]:
        """Micro-batches and how many of them make a step, smallest first; two before one, since larger ones are derived
        from two and four anyway."""
        found, given, data = micro_batches(self.wishes, self.mesh), self.wishes.micro_batch, self.mesh.data
        if not found:
            told = f" in micro-batches of {given}" if given is not None else ""
            problem = f"{self.wishes.global_batch} samples cannot be shared by {data} devices{told}"
            raise UserError(problem, f"a --global-batch that is a multiple of {data * (given or 1)}")
        return found[1:] or found

    def _begin(self, batch: tuple[int, int]) -> None:
        """Learn what the model is, and refuse what cannot be moved."""
        base = Plan(model=model_of(self.source), hardware=self.hardware, micro_batch=batch[0], mesh=self.mesh, **self._fixed())
        trace = self.traces.of(base, [KEEP])[KEEP]
        self.blocks = blocks_of(trace)
        self.lacking |= {*sheet_modes.MODES} - {*sheet_modes.modes_of(trace)}
        self.named, self.rules = self.about(self.blocks), self.facts(self.blocks)
        legal.check(self.plan((*batch, KEEP), self.most), self.rules)

    def _fixed(self) -> dict[str, Any]:
        wishes = self.wishes
        return {
            "precision": wishes.precision or moving_states(self.cluster), "optimizer": wishes.optimizer, "clip": wishes.clip,
            "state_format": wishes.state_format or "fp32", "compile": next(iter(wishes.compile), "none"),
        }  # fmt: skip

    # ------------------------------------------------------------------ plans

    @property
    def most(self) -> int:
        """Units whose states can leave: blocks, and what is in none."""
        return len(self.blocks) + 1

    @property
    def streamable(self) -> int:
        """Blocks whose weights can leave."""
        return len(self.blocks) if self.mesh.world == 1 else 0

    @property
    def modes(self) -> tuple[str, ...]:
        """What may become of activations, the quickest first; moved ones where plans have that."""
        return tuple(mode for mode in (KEEP, "selective", HOST, "recompute") if mode in MODES) if self.blocks else (KEEP,)

    def plan(
        self, cell: Cell, states: int = 0, *, weights: int = 0, on_disk: int = 0, kept: int = 0, share: float = 0.0
    ) -> Plan:
        """A plan with so many units' states away, the last `on_disk` of them on the disk, the weights of the last blocks
        away, and the last `kept` blocks not treated as the cell has it."""
        micro, accumulate, mode = cell
        blocks = self.blocks
        away = [*reversed(blocks), REST][:states]
        tiers = {path: DISK if number < on_disk else HOST for number, path in enumerate(away)}
        treated = blocks[: len(blocks) - kept] if mode != KEEP else ()
        named = {path: Residency(mode=tiers[path]) for path in blocks if path in tiers}
        found = {pattern: one.mode for pattern, one in compress(named).items()}
        found |= {REST: tiers[REST]} if REST in tiers else {}
        streamed = paths.fold(dict.fromkeys(blocks[-weights:], HOST)) if weights else {}
        return Plan(
            model=self.named, hardware=self.hardware, micro_batch=micro, accumulate=accumulate, states=found, cpu_share=share,
            mesh=self.mesh, blocks=compress(dict.fromkeys(treated, Residency(mode=mode))), weights=streamed, **self._fixed(),
        )  # fmt: skip

    def priced(self, plan: Plan) -> Tried:
        """What it costs, op by op; asked once."""
        key = _key(plan)
        if key not in self.known:
            traces, found = self._predicted(plan, self.options)
            self.known[key] = self._counted(plan, found, next(iter(traces.values())))
        return self.known[key]

    def bytes(self, plan: Plan) -> PlanCost:
        """The same without seconds, in half the time: does it fit on the device?"""
        key = _key(plan)
        if key in self.known:
            return self.known[key].cost
        if any(one.mode in AWAY for one in plan.blocks.values()):
            return self.priced(plan).cost
        if key not in self.weighed:
            _, self.weighed[key] = self._predicted(plan, replace(self.options, profile_of=lambda _: None))
        return self.weighed[key]

    @property
    def costed(self) -> int:
        return len(self.known.keys() | self.weighed.keys())

    def _predicted(self, plan: Plan, how: Options) -> tuple[dict[str, Trace], PlanCost]:
        self.progress(f"costing plan {self.costed + 1}: {told(plan)}")
        modes = {computed(mode) for mode in modes_of(plan, self.blocks).values()} or {KEEP}
        traces = {mode: self._trace(plan, mode) for mode in (modes if len(modes) == 1 else {KEEP, *modes})}
        return traces, predict_plan(traces, plan, self.cluster, how)

    def _trace(self, plan: Plan, mode: str) -> Trace:
        """Of one micro-batch, with what later ones of a step do."""
        key = (plan.micro_batch, mode)
        if key not in self._traces:
            trace = self.traces.of(plan, [mode])[mode]
            more = repeated(trace, 2) if plan.accumulate > 1 else trace
            self._traces[key] = replace(more, schedule=trace.schedule, resident=trace.resident)
        return self._traces[key]

    def _rank(self, trace: Trace) -> Trace:
        """One rank's part of the parameters."""
        key = id(trace)
        if key not in self._ranks:
            self._ranks[key] = sharded(trace, self._plain) if self.mesh.world > 1 else trace
        return self._ranks[key]

    @property
    def _plain(self) -> Plan:
        return Plan(model={}, hardware=self.hardware, mesh=self.mesh, **self._fixed())

    def _units(self, plan: Plan, mode: str) -> tuple[StateUnit, ...]:
        return units_of(self._rank(self._trace(plan, computed(mode))), plan)

    def _counted(self, plan: Plan, cost: PlanCost, trace: Trace) -> Tried:
        mine = self._rank(trace)
        on_host, on_disk = host_bytes(mine, plan), disk_bytes(mine, plan)
        over, needed, room = "", cost.worst.memory.host_bytes * self.neighbours, self.host or 0
        if (on_host or AWAY[0] in {one.mode for one in plan.blocks.values()}) and needed > room:
            over = f"{gib(needed)} of host memory, and {gib(room)} may be used"
        elif on_disk > self.wishes.disk:
            over = f"{gib(on_disk)} on the disk, and {gib(self.wishes.disk)} may be used"
        else:
            over = next(map(str, legal.complaints(plan, self.rules)), "")
        return Tried(plan=plan, cost=cost, moved_bytes=on_host + on_disk, host_bytes=needed, over=over)

    # ------------------------------------------------------------------ cells

    def _possible(self, micro: int, accumulate: int) -> bool:
        """Whether the thriftiest plan of a micro-batch fits: all that can be away is away, all blocks recomputed."""
        cell = (micro, accumulate, self.modes[-1])
        if self.bytes(self.plan(cell)).fits:
            return True
        if self.host is None:
            return False
        most = self.streamable
        return self.bytes(self.plan(cell, self.most)).fits or (most > 0 and self.bytes(self.plan(cell, self.most, weights=most)).fits)

    def _cells(self, micro: int, accumulate: int) -> Iterator[OffloadTry]:
        """Every residency of a micro-batch, by its bound: everything on the device."""
        cells = [(micro, accumulate, mode) for mode in self.modes if self._costs((micro, accumulate, mode))]
        self.traces.prepare([(self.plan(cell), computed(cell[2])) for cell in cells])
        for bound, cell in sorted((self.score(self.priced(self.plan(cell)), bound=True), cell) for cell in cells):
            yield OffloadTry(bound, functools.partial(self._least_moved, cell))

    def _least_moved(self, cell: Cell) -> Tried | None:
        here = self.priced(self.plan(cell))
        return here if here.fits else self._settled(cell)

    def _costs(self, cell: Cell) -> bool:
        """Whether moved activations can be costed: those that cannot are left out."""
        if cell[2] in AWAY and cell[2] not in self.lacking:
            try:
                self.priced(self.plan(cell))
            except (UserError, KeyError):
                self.lacking.add(cell[2])
        return cell[2] not in self.lacking

    def _settled(self, cell: Cell) -> Tried | None:
        """The plan of a cell that moves least; None where none fits."""
        if self.host is None:
            return None
        everything = self.priced(self.plan(cell, self.most))
        if not everything.cost.fits:  # moving weights besides cannot be quicker than that
            best = self._best()
            return self._streamed(cell, everything) if best is None or self.score(everything) < self.score(best) else None
        count = fewest(self.most, lambda number: self.bytes(self.plan(cell, number)).fits, self._guess(cell, everything))
        assert count is not None
        found = self.priced(self.plan(cell, count))
        return found if found.fits else self._on_disk(cell, count)

    def _guess(self, cell: Cell, everything: Tried) -> int:
        """So many units may have to go, by the bytes that are left when all have gone."""
        room = everything.cost.worst.memory.margin_bytes - 0.06 * self.cluster.device.memory_bytes
        each = bytes_of(form_of(everything.plan), width_of_weights(everything.plan))
        left = self.most
        for unit in self._units(everything.plan, cell[2]):
            room -= unit.elements * each
            if room < 0:
                break
            left -= 1
        return left

    def _streamed(self, cell: Cell, everything: Tried) -> Tried | None:
        """All states away, and the weights of the fewest last blocks, where plans can say so."""
        if not self.streamable:
            return None
        each = 2 * width_of_weights(everything.plan)  # and gradients
        held = [unit.elements * each for unit in self._units(everything.plan, cell[2]) if unit.path]
        guess = AT_HAND + round(everything.short / max(1, max(held, default=1)))
        count = fewest(len(self.blocks), lambda number: self.bytes(self.plan(cell, self.most, weights=number)).fits, guess)
        if count is None:
            return None
        found = self.priced(self.plan(cell, self.most, weights=count))
        return found if found.fits else None

    def _on_disk(self, cell: Cell, states: int) -> Tried | None:
        """What the host has no room for on the disk: of the last blocks, which have most time."""
        if not self.wishes.disk or DISK not in TIERS or self.mesh.world > 1:
            return None
        count = fewest(states, lambda number: "host" not in self.priced(self.plan(cell, states, on_disk=number)).over)
        found = self.priced(self.plan(cell, states, on_disk=count)) if count is not None else None
        return found if found is not None and found.fits else None

    # ------------------------------------------------------------------ the best

    def score(self, one: Tried, *, bound: bool = False) -> float:
        """What to make least: seconds a sample; `bound`: of anything with this micro-batch and residency."""
        time, plan = one.cost.time, one.plan
        seconds = time.step_seconds if time is not None else 1 + one.moved_bytes / 2**40 + len(plan.blocks)
        free = plan.global_batch if self.wishes.global_batch is None else 1
        tight, moved = (False, False) if bound else (one.cost.verdict == TIGHT, one.moves)
        return weighed(seconds / plan.global_batch, batch=free, tight=tight, moved=moved)

    def _best(self) -> Tried | None:
        return min((one for one in self.found if one.fits), key=self.score, default=None)

    def _brimful(self, best: Tried) -> Iterator[OffloadTry]:
        """Blocks that need not be recomputed, as far as there is room; and with a few more states away, if that gains."""
        modes = {one.mode for one in best.plan.blocks.values()}
        if len(modes) != 1 or best.plan.weights or DISK in best.plan.states.values():
            return
        cell, states, more = (best.plan.micro_batch, best.plan.accumulate, modes.pop()), self._away(best.plan), 0
        while states + more <= self.most:
            yield OffloadTry(0.0, functools.partial(self._least_treated, cell, states + more))
            if self._best() is best:
                break
            best, more = self._best() or best, more * 2 or 1

    def _least_treated(self, cell: Cell, states: int) -> Tried | None:
        count = len(self.blocks)

        def plan(treated: int) -> Plan:
            return self.plan(cell, states, kept=count - treated)

        try:
            treated = fewest(count, lambda number: self.bytes(plan(number)).fits, count)
        except TraceMismatch:  # no mixture of these can be vouched for
            return None
        found = self.priced(plan(treated)) if treated is not None else None
        best = self._best()
        return found if found is not None and (best is None or self.score(found) < self.score(best)) else None

    def _away(self, plan: Plan) -> int:
        names = [name for pattern in plan.states if pattern != REST for name in paths.unfold(pattern)]
        return len(names) + (REST in plan.states)

    def _shared(self, best: Tried) -> Iterator[OffloadTry]:
        """With the CPU updating some of the states, where its speed is known."""
        plan, rates = best.plan, self.rates
        if plan.states and rates is not None and rates.cpu is None:
            self.remarks.append("updates by the CPU were not tried: nobody measured their speed on such a machine")
        whole = form_of(plan) == "master" and HOST in plan.states.values()  # as it was measured
        if not whole or rates is None or rates.cpu is None:
            return
        middle = rates.balance(bytes_of(form_of(plan), width_of_weights(plan)))
        shares = {round(min(1.0, max(0.0, middle + near)), 2) for near in (0.0, *NEAR)} - {0.0}
        for share in sorted(shares):
            yield OffloadTry(0.0, functools.partial(self.priced, plan.with_(cpu_share=share)))

    # ------------------------------------------------------------------ the answer

    def _told(self, best: Tried) -> Spilled:
        plan = best.plan
        bare = plan.with_(states={}, weights={}, cpu_share=0.0)
        resident = self.priced(bare)
        kept = self.priced(bare.with_(blocks={})) if plan.blocks else None
        rates = self.rates
        link = None
        if rates is not None and best.moved_bytes:
            link = offload.beside(self._units(plan, next(iter({one.mode for one in plan.blocks.values()}), KEEP)), plan, rates)
        others = sorted((one for one in self.found if one is not best), key=self.score)
        return Spilled(
            best=best, resident=resident, kept=kept, tried=tuple(others), link_seconds=link,
            link_rate=min(rates.up, rates.down) if rates is not None else None, host=self.host, costed=self.costed,
            notes=(*self.traces.notes, *self.remarks),
        )  # fmt: skip

    def _nothing(self) -> Spilled:
        cell = (*self.batches()[0], self.modes[-1])
        for weights in {0, self.streamable}:
            self.priced(self.plan(cell, self.most, weights=weights))
        tried = list(self.known.values())
        nearest = min(tried, key=lambda one: (one.short, bool(one.over), one.cost.worst.memory.host_bytes))
        infeasible = nearest.cost.infeasible(self.cluster.device.name)
        return Spilled(
            best=None, nearest=nearest, tried=tuple(tried), infeasible=infeasible, host=self.host, costed=self.costed,
            notes=tuple(self.traces.notes),
        )  # fmt: skip


def meshes(cluster: Cluster, wishes: SearchConstraints) -> list[Mesh]:
    """How devices may share a model whose states move: all of them together, or those of each machine; none where wishes or
    unlike devices leave neither."""
    fixed, count = wishes.fixed, cluster.count
    if cluster.groups or any(fixed.get(axis, 1) > 1 for axis in ("tp", "pp", "cp", "ep")):
        return []
    replicas = sorted({1, cluster.nodes})
    if fixed.keys() & {"dp_replicate", "dp_shard"}:
        replicas = [fixed.get("dp_replicate") or count // fixed["dp_shard"]]
    found = [Mesh(dp_replicate=number, dp_shard=count // number) for number in replicas]
    return [mesh for mesh in found if mesh.world == count and fixed.get("dp_shard", mesh.dp_shard) == mesh.dp_shard]


def spill(question: Question, patience: float = float("inf")) -> Spilled:
    """The best plan, with what does not fit on a device elsewhere."""
    searches = [question.into(Spill, mesh=mesh) for mesh in meshes(question.cluster, question.wishes)]
    found = [(search, search.answer(patience)) for search in searches]
    assert found, "nobody asks where nothing may be moved"
    fits = [(search.score(one.best), number) for number, (search, one) in enumerate(found) if one.best is not None]
    return found[min(fits)[1] if fits else 0][1]
