"""Does foretell hold for every module of the zoo? Each small entry is traced, predicted, run, planned and run as planned.

    trace    forward, backward and update on fake tensors; every op has rules for FLOPs and bytes
    memory   predicted beside measured peak
    time     predicted beside measured seconds of a step; a CPU's pace, of ops and of the host around them, is taken once, by other models
    plan     the search is asked for half the memory of the plain step; what it finds is really run and must stay below
    ranks    losses and gradients on two gloo ranks beside one process
    trap     what the entry says that a planner gets wrong: tested, or open and why

Rows are worked on by two long-lived workers, since models may crash; a row that does says so, and the others go on.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import foretell.zoo as zoo
from foretell.errors import ForetellError, UnknownName, UserError
from foretell.plan.types import Mesh, Plan
from foretell.prove import zoo_cpu, zoo_plan, zoo_rows
from foretell.prove.zoo_cpu import SAMPLES, Pacers, Seen, with_phase
from foretell.prove.zoo_plan import PARTS, STEPS, Planned, RankResult, first_line, run_plan
from foretell.prove.zoo_rows import MEMORY_BAR, NONE, OK, TIME_BAR, CheckRow
from foretell.runtime.check import verify
from foretell.runtime.process.pool import Pool, RankFailure
from foretell.trace.load.model import Source

LIMIT_SECONDS = 300.0
"""For one piece of a row."""
Progress = Callable[[str], None]
WHY_BOUND = "sums in another order"
"""Why losses and gradients of a plan may differ from the plain run's by 1e-4 of themselves."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """One row to be made."""

    entry: zoo.Entry
    phases: tuple[str, ...] = ()
    """Several: in turn."""

    @property
    def phase(self) -> str:
        return "+".join(self.phases)

    @property
    def source(self) -> Source:
        return Source(model=self.entry.name, micro_batch=SAMPLES)


def every() -> list[zoo.Entry]:
    """A small entry of every module that has a paper; of a module with several, each that another paper or task names."""
    found: dict[tuple[str, str, str], zoo.Entry] = {}
    for entry in zoo.ENTRIES.values():
        if entry.paper and entry.small:
            found.setdefault((entry.module, entry.paper, entry.task), entry)
    return list(found.values())


def small(name: str) -> zoo.Entry:
    """The entry of that name, if it is one that can really be run here; a module's name stands for its small entry."""
    modules = {entry.module: entry for entry in reversed(zoo.ENTRIES.values()) if entry.small}
    if name not in zoo.ENTRIES and name not in modules:
        raise UnknownName("model", name, [*zoo.ENTRIES, *modules], "see `foretell zoo`")
    entry = zoo.ENTRIES.get(name, modules.get(name))
    if entry is None or not entry.small:
        entry = modules.get(name, entry)
    assert entry is not None
    if not entry.small:
        others = [other.name for other in zoo.ENTRIES.values() if other.module == entry.module and other.small]
        raise UserError(f"{name} is too large to really run here", f"check its small variant: {', '.join(others)}")
    return entry


def asked_of(entries: Sequence[zoo.Entry]) -> list[CheckRequest]:
    """A row for each entry and phase, and one for its phases in turn."""
    found = []
    for entry in entries:
        phases = tuple(getattr(zoo.load(entry), "PHASES", ()))
        found += [CheckRequest(entry=entry, phases=(phase,)) for phase in phases] or [CheckRequest(entry=entry)]
        found += [CheckRequest(entry=entry, phases=phases)] if len(phases) > 1 else []
    return found


def about(device: str) -> dict[str, Any]:
    """What every row of this run says of its circumstances."""
    import torch

    return {"device": device, "torch": str(torch.__version__), "date": time.strftime("%Y-%m-%d"), "commit": commit()}


def commit() -> str:
    """Of the code that ran, where it lies in a repository; + where files of the package are not as committed."""
    here = Path(__file__).resolve().parents[1]
    try:
        done = [subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False)
                for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "."))]  # fmt: skip
    except OSError:
        return ""
    return "" if done[0].returncode else done[0].stdout.strip() + ("+" if done[1].stdout.strip() else "")


# ---------------------------------------------------------------------------------------------- all rows


def check(
    asked: Sequence[CheckRequest], *, device: str = "cpu", keep: Path | None = None, progress: Progress = lambda _: None
) -> list[CheckRow]:
    """All rows on this CPU or GPU, those that were kept among them."""
    said = about(_device_name(device))
    known = zoo_rows.read(keep) if keep is not None else {}
    found: dict[tuple[str, str], CheckRow] = {}
    for one in asked:
        row = known.get((one.entry.name, one.phase, said["device"]))
        if row is not None:
            found[one.entry.name, one.phase] = row
    left = [one for one in asked if (one.entry.name, one.phase) not in found]
    if found:
        progress(f"{len(found)} of {len(asked)} rows are in {keep} already")
    if left:
        with _checker(progress) if device == "cpu" else _cuda_checker(progress) as row_of:
            for one in left:
                row = replace(row_of(one), **said)
                if keep is not None:
                    zoo_rows.append(keep, row)
                found[one.entry.name, one.phase] = row
                progress(f"{len(found)} of {len(asked)}  {zoo_rows.line(row)}")
    return [found[one.entry.name, one.phase] for one in asked]


def _device_name(device: str) -> str:
    if device == "cpu":
        from foretell.hardware.probe.machine import cpu_name

        return cpu_name()
    from foretell.prove.run import this_device

    here = this_device()
    if here["backend"] == "cpu":
        raise UserError("--device cuda: torch sees no GPU here", "leave --device away for this CPU; `foretell doctor` says more")
    return str(here["device"])


RowOf = Callable[["CheckRequest"], CheckRow]


@contextmanager
def _cuda_checker(progress: Progress) -> Iterator[RowOf]:
    from foretell.hardware import parse
    from foretell.prove.forecast import ForecastRequest as Forecasting
    from foretell.prove.zoo_cuda import CudaChecker

    cluster = parse(_device_name("cuda"))
    progress(f"one row after another on {cluster.device.name}")
    made = CudaChecker(Forecasting(seed="zoo", count=1, cluster=cluster))
    yield lambda one: made.row(one.entry.name, one.entry.module, one.entry.paper, one.phases, trap_of(one.entry))


@contextmanager
def _checker(progress: Progress) -> Iterator[RowOf]:
    pool = Pool()
    try:
        progress("starting two workers, and taking this CPU's pace")
        pool.ranks(2).run(zoo_cpu.prepare)
        pacers: Pacers = pool.ranks(1).run(zoo_cpu.pace_now)[0]
        if pacers:
            progress(zoo_cpu.pace_without(pacers, "").words)
        yield Checker(pool, pacers).row
    finally:
        pool.close()


@dataclass
class Failed(Exception):
    """A column that could not be worked out, in a few words."""

    column: str
    why: str


class Apart(Exception):
    """Phases that have weights of their own, and so are nothing to train in turn."""


@dataclass
class Checker:
    """Makes rows, one after another, with the workers of one pool."""

    pool: Pool
    pacers: Pacers

    def row(self, asked: CheckRequest) -> CheckRow:
        began = time.monotonic()
        entry = asked.entry
        row = CheckRow(name=entry.name, module=entry.module, paper=entry.paper, phase=asked.phase, samples=SAMPLES, trap=trap_of(entry))
        failures: dict[str, str] = {}
        excuses: dict[str, str] = {}
        try:
            row = self._seen(row, asked, failures, excuses)
            row = self._planned(row, asked, failures, excuses) if len(asked.phases) < 2 else _in_turn(row)
        except Failed as error:
            failures[error.column] = error.why
        except Apart as error:
            row = replace(_in_turn(row), reason=f"{error}: each phase is by itself")
        row = replace(row, columns={**row.columns, "trap": OK if row.trap else NONE})
        return replace(zoo_rows.judged(row, failures, excuses), seconds=time.monotonic() - began)

    # ------------------------------------------------------------ trace, memory, time

    def _seen(self, row: CheckRow, asked: CheckRequest, failures: dict[str, str], excuses: dict[str, str]) -> CheckRow:
        seen: Seen = self._call(1, "trace", zoo_cpu.look, asked.source, asked.phases, self.pacers)[0]
        row = replace(
            row, ops=seen.ops, uncovered=seen.uncovered, predicted_bytes=seen.predicted_bytes,
            measured_bytes=seen.measured_bytes, predicted_seconds=seen.predicted_seconds,
            measured_seconds=seen.measured_seconds, pace=seen.pace.ops if seen.pace else None,
            host_pace=seen.pace.host if seen.pace else None, pacers=seen.pace.models if seen.pace else None,
            columns={"trace": OK, "memory": OK, "time": OK},
        )  # fmt: skip
        if seen.uncovered:
            failures["trace"] = f"no rule for {', '.join(seen.uncovered)}"
        if row.memory_error is None or abs(row.memory_error) > MEMORY_BAR:
            failures["memory"] = f"{row.memory_error or 0:+.1%} off"
        if row.time_error is None:
            excuses["time"] = "no profile of a CPU is at hand"
        elif abs(row.time_error) > TIME_BAR:
            failures["time"] = f"{row.time_error:+.0%} off"
        return row

    # ------------------------------------------------------------ plan and ranks

    def _planned(self, row: CheckRow, asked: CheckRequest, failures: dict[str, str], excuses: dict[str, str]) -> CheckRow:
        source = with_phase(replace(asked.source, micro_batch=1), asked.phase)
        found: Planned = self._call(1, "plan", zoo_cpu.plan_for, source)[0]
        row = replace(row, global_batch=found.global_batch, plain_bytes=found.plain_bytes, cap_bytes=found.cap_bytes)
        if found.plan is None:
            excuses["plan"] = found.why
            plan = Plan(model={"model": source.model, "overrides": dict(source.overrides)}, hardware="auto", precision="fp32",
                        micro_batch=found.global_batch // PARTS, clip=None)  # fmt: skip
        else:
            plan = found.plan
            row = self._run(row, source, found, failures)
        return self._split(row, source, plan, found.global_batch, failures, excuses)

    def _run(self, row: CheckRow, source: Source, found: Planned, failures: dict[str, str]) -> CheckRow:
        """Run the plan: below its cap, and with the losses of the plain run."""
        from foretell.search.solve.choose import told

        assert found.plan is not None
        plan = found.plan
        source = replace(source, micro_batch=plan.micro_batch)
        ran: list[RankResult] = self._call(plan.mesh.world, "plan", run_plan, source, plan)
        plain: verify.VerifyRun = self._call(1, "plan", verify.reference_rank, source, plan, STEPS)[0]
        most = max(one.peak_bytes for one in ran)
        off = max(verify.losses_apart(plain.losses, one.losses) for one in ran)
        if most > found.cap_bytes:
            failures["plan"] = f"it took {most / found.cap_bytes:.1%} of its cap"
        if not off <= verify.LOSS_BOUND:
            failures["plan"] = f"its losses are {off:.1e} off the plain run's"
        return replace(
            row, plan=told(plan), plan_ranks=plan.mesh.world, plan_predicted_bytes=found.predicted_bytes,
            plan_measured_bytes=most, loss_difference=off, columns={**row.columns, "plan": OK},
        )  # fmt: skip

    def _split(
        self, row: CheckRow, source: Source, plan: Plan, samples: int, failures: dict[str, str], excuses: dict[str, str]
    ) -> CheckRow:
        """Two ranks beside one process: as planned where the plan has two, else the same plan with its states sharded."""
        split = plan if plan.mesh.world == 2 else plan.with_(
            mesh=Mesh(dp_shard=2), accumulate=max(1, samples // (2 * plan.micro_batch)), predicted={},
        )  # fmt: skip
        source = replace(source, micro_batch=split.micro_batch)
        known: verify.VerifyRun = self._call(1, "ranks", verify.reference_rank, source, split, STEPS)[0]
        runs: list[verify.VerifyRun] = self._call(2, "ranks", verify.run_rank, source, split, STEPS)
        found = verify.compare(known, verify.merge(runs))
        if not found.good:
            said = f"losses {found.loss:.1e} off, {found.gradient_name} {found.gradient:.1e} (allowed {found.gradient_bound:.0e}: {WHY_BOUND})"
            carried = self._call(1, "ranks", zoo_plan.carried, source)[0]
            if carried and not found.problem:
                excuses["ranks"] = f"{', '.join(carried)} is carried from one micro-batch to the next, and each rank has its own"
            else:
                failures["ranks"] = found.problem or said
        how = "as planned" if plan.mesh.world == 2 else "sharded"
        return replace(
            row, ranks=f"{how}, {max(found.loss, found.gradient):.0e}", gradient_difference=found.gradient,
            columns={**row.columns, "ranks": OK},
        )  # fmt: skip

    def _call(self, ranks: int, column: str, function: Any, *args: Any) -> list[Any]:
        """Ask workers; what they raise, and that they died, is what the column says."""
        try:
            return self.pool.ranks(ranks).run(function, *args, timeout_s=LIMIT_SECONDS)
        except RankFailure as failure:
            first = failure.first
            if isinstance(first, UserError) and "has other weights" in first.problem:
                raise Apart(first.problem) from None
            rank, text = next(iter(failure.errors.items()))
            why = first_line(first) if isinstance(first, ForetellError) else text.strip().splitlines()[-1][:200]
            raise Failed(column, f"rank {rank}: {why}" if ranks > 1 else why) from None


def _in_turn(row: CheckRow) -> CheckRow:
    """Phases in turn are predicted for one device; plans are of one phase."""
    return replace(row, columns={**row.columns, "plan": "one phase at a time", "ranks": "one phase at a time"})


def trap_of(entry: zoo.Entry) -> str:
    """`tested`, or what is not handled and why."""
    _, open_, why = entry.trap.partition("ot handled")
    return f"not handled{why}" if open_ else "tested" if entry.trap else ""
