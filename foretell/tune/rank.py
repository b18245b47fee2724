"""What a step could gain at most from better kernels, op by op. Pure, no torch.

A group is a run of neighbouring ops of one module and phase that are no products: what one kernel could do at once. It cannot be
faster than the bytes that must go in and out of it, at the device's bandwidth: what is made and dropped inside need not be moved.
How much the step gains when a group takes just that is asked of the same timeline that predicts the step, so that what hides
behind the host or a collective counts for nothing. Products (matmul, attention, convolution) are left to the vendor's kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.lower.fsdp.sharded import COLLECTIVES as TALKING
from foretell.price.host import steady
from foretell.price.kernels.shapes import short
from foretell.price.time import COMPUTE_KINDS, MARKS
from foretell.quantities import COMPUTE, HOST, Task
from foretell.simulate.time.streams import LAUNCH_QUEUE, Makespan
from foretell.trace.types import Op, Trace

NEAR_FLOOR = 1.15
"""Times its floor that a group may take and still have nothing to gain."""
LEAST_GAIN = 0.005
"""Of the step, below which a kernel is not worth its trouble."""
MOST_GROUPS = 40
"""That are simulated: those with the most seconds above their floor."""


@dataclass(frozen=True, kw_only=True)
class OpGroup:
    """Ops that one kernel could do."""

    module: str
    """Indices of repeated blocks folded: `blocks.*.norm`."""
    phase: str
    ops: tuple[str, ...]
    runs: int
    """How often it is done in a step."""
    seconds: float
    """Of a step, all runs together."""
    floor_bytes: int
    floor_seconds: float
    gain_seconds: float
    """By which a step is shorter when all its runs take their floor."""

    @property
    def of_floor(self) -> float:
        return self.seconds / self.floor_seconds if self.floor_seconds else float("inf")


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """A step's groups, the one that could gain most first."""

    step_seconds: float
    products_seconds: float
    """In products, which are left alone."""
    host_seconds: float
    """In which the device waits for the host: kernels do not help there, CUDA graphs and torch.compile do."""
    candidates: tuple[OpGroup, ...]
    left_out: int
    """Groups with less to gain than what is asked."""
    all_gain_seconds: float
    """With every candidate at its floor at once."""
    bandwidth: float

    @property
    def speedup(self) -> float:
        """At most, of all together."""
        return self.step_seconds / max(1e-12, self.step_seconds - self.all_gain_seconds)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _GroupRun:
    """A group as it is met once: positions of its tasks, and the least bytes."""

    key: tuple[str, str, tuple[str, ...]]
    tasks: tuple[int, ...]
    bytes: int


def rank(local: Trace, tasks: Sequence[Task], step_seconds: float, host_seconds: float, bandwidth: float) -> Ranking:
    """Of a rank's lowered step and its tasks in the order of the timeline; `bandwidth` in bytes a second."""
    runs = list(_runs(local, tasks))
    durations = [task.seconds for task in tasks]
    span = Makespan(tasks, queue=LAUNCH_QUEUE)
    base = span.seconds(durations)
    groups: dict[tuple[str, str, tuple[str, ...]], list[_GroupRun]] = {}
    for run in runs:
        groups.setdefault(run.key, []).append(run)
    rows = sorted((_row(key, some, durations, bandwidth) for key, some in groups.items()), key=lambda one: one.floor_seconds - one.seconds)
    found = []
    for row in rows[:MOST_GROUPS]:
        if row.seconds <= NEAR_FLOOR * row.floor_seconds:
            continue
        shorter = _at_floor(durations, groups[row.module, row.phase, row.ops], bandwidth)
        found.append(replace(row, gain_seconds=max(0.0, base - span.seconds(shorter))))
    kept = sorted((one for one in found if one.gain_seconds >= LEAST_GAIN * step_seconds), key=lambda one: -one.gain_seconds)
    together = _at_floor(durations, [run for one in kept for run in groups[one.module, one.phase, one.ops]], bandwidth)
    return Ranking(
        step_seconds=step_seconds, host_seconds=host_seconds, candidates=tuple(kept), left_out=len(groups) - len(kept), bandwidth=bandwidth,
        products_seconds=sum(task.seconds for task in tasks if task.kind in COMPUTE_KINDS),
        all_gain_seconds=max(0.0, base - span.seconds(together)),
    )  # fmt: skip


def _row(key: tuple[str, str, tuple[str, ...]], runs: Sequence[_GroupRun], durations: Sequence[float], bandwidth: float) -> OpGroup:
    module, phase, ops = key
    size = sum(run.bytes for run in runs)
    seconds = sum(durations[place] for run in runs for place in run.tasks)
    return OpGroup(
        module=module, phase=phase, ops=ops, runs=len(runs), seconds=seconds, floor_bytes=size, floor_seconds=size / bandwidth, gain_seconds=0.0
    )


def _at_floor(durations: Sequence[float], runs: Iterable[_GroupRun], bandwidth: float) -> list[float]:
    """Tasks of these runs as much shorter as takes each run to its floor."""
    found = list(durations)
    for run in runs:
        whole = sum(durations[place] for place in run.tasks)
        share = min(1.0, run.bytes / bandwidth / whole) if whole else 1.0
        for place in run.tasks:
            found[place] = durations[place] * share
    return found


# ---------------------------------------------------------------- ops and their tasks


def _runs(local: Trace, tasks: Sequence[Task]) -> Iterator[_GroupRun]:
    places: dict[tuple[str, str, str], Iterator[int]] = {}
    found: dict[tuple[str, str, str], list[int]] = {}
    for place, task in enumerate(tasks):
        found.setdefault((task.name, task.module, task.phase), []).append(place)
    for key, some in found.items():
        places[key] = iter(some)
    for name, times in steady(local):
        ops = local.programs[name].ops
        for _ in range(times):
            yield from _of_program(ops, tasks, places)


def _of_program(ops: Sequence[Op], tasks: Sequence[Task], places: Mapping[tuple[str, str, str], Iterator[int]]) -> Iterator[_GroupRun]:
    open_ops: list[Op] = []
    open_tasks: list[int] = []
    for op in ops:
        place = _place(op, tasks, places)
        task = tasks[place] if place is not None else None
        ends = op.name in TALKING or (task is not None and task.kind in COMPUTE_KINDS)
        if open_ops and (ends or (op.module, op.phase) != (open_ops[-1].module, open_ops[-1].phase)):
            yield from _closed(open_ops, open_tasks)
            open_ops, open_tasks = [], []
        if not ends and op.name not in MARKS:
            open_ops.append(op)
            open_tasks += [place] if place is not None else []
    yield from _closed(open_ops, open_tasks)


def _place(op: Op, tasks: Sequence[Task], places: Mapping[tuple[str, str, str], Iterator[int]]) -> int | None:
    """The op's own task; None for one that launches nothing (a view)."""
    line = places.get((op.name, op.module, op.phase))
    if line is None:
        return None
    place = next(line, None)
    return place if place is not None and tasks[place].resource in (COMPUTE, HOST) else None


def _closed(ops: Sequence[Op], tasks: Sequence[int]) -> Iterator[_GroupRun]:
    if tasks:
        names = tuple(dict.fromkeys(short(op.name) for op in ops))
        yield _GroupRun((folded(ops[0].module), ops[0].phase, names), tuple(tasks), least_bytes(ops))


def least_bytes(ops: Sequence[Op]) -> int:
    """What goes in from outside, once, and what comes out and stays: storages made and dropped inside are left out."""
    made: set[int] = set()
    read: dict[int, int] = {}
    written: dict[int, int] = {}
    for op in ops:
        made.update(op.allocates)
        for ref in op.inputs:
            if ref.storage not in made and ref.storage not in written:
                read[ref.storage] = max(read.get(ref.storage, 0), ref.spec.nbytes)
        for ref in op.outputs:
            written[ref.storage] = max(written.get(ref.storage, 0), ref.spec.nbytes)
    dropped = {storage for op in ops for storage in op.frees} & made
    moved = {storage for op in ops for ref in op.outputs for storage in [ref.storage] if storage in made or short(op.name).endswith("_")}
    kept = sum(size for storage, size in written.items() if storage not in dropped and storage in moved)
    return sum(read.values()) + kept


def folded(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) or "(no module)"
