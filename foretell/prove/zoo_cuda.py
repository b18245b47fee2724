"""`foretell zoo check --device cuda`: the same columns on the GPU of this machine, each piece in a process of its own.

Predictions are made without the device, as `foretell compare prove` makes them; measurements are its too. The plan for half the memory
is run under `torch.cuda.set_per_process_memory_fraction`, and its losses are held against the plain plan's on the same GPU.
Small entries get many samples, so that what they need is more than workspaces and the allocator's grain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import ForetellError
from foretell.hardware import overhead
from foretell.hardware.types import Cluster
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.prove import forecast, zoo_rows
from foretell.prove.run import in_child
from foretell.prove.types import Config, Forecast
from foretell.prove.zoo_plan import CARE, STEPS, first_line
from foretell.prove.zoo_rows import GPU_MEMORY_BAR, NONE, OK, TIME_BAR, CheckRow
from foretell.runtime.check import verify
from foretell.search.solve.choose import SearchConstraints, choose, told
from foretell.simulate.parts import TORCH
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source

SAMPLES = 256
"""Of a step: with few of them, workspaces that no plan can shrink are most of what a small entry needs."""


@dataclass
class CudaChecker:
    """Makes rows, one after another, on one GPU."""

    asked: forecast.ForecastRequest

    @property
    def cluster(self) -> Cluster:
        return self.asked.cluster

    def row(self, name: str, module: str, paper: str, phases: tuple[str, ...], trap: str) -> CheckRow:
        began = time.monotonic()
        row = CheckRow(name=name, module=module, paper=paper, phase="+".join(phases), samples=SAMPLES, trap=trap)
        failures: dict[str, str] = {}
        excuses: dict[str, str] = {}
        if len(phases) > 1:
            row = replace(row, reason="phases in turn are held against a real run on a CPU")
        else:
            try:
                row = self._seen(row, failures, excuses)
                row = self._planned(row, failures, excuses) if row.predicted_bytes else row
            except ForetellError as error:
                failures["plan" if row.predicted_bytes else "trace"] = first_line(error)
        row = replace(row, columns={**row.columns, "trap": OK if trap else NONE, "ranks": "one GPU: see the check on a CPU"})
        return replace(zoo_rows.judged(row, failures, excuses), seconds=time.monotonic() - began)

    # ------------------------------------------------------------ trace, memory, time

    def _config(self, row: CheckRow) -> Config:
        overrides: dict[str, Any] = {"phase": row.phase} if row.phase else {}
        return Config(index=0, model=row.name, overrides=overrides, micro_batch=SAMPLES, precision="fp32")

    def _seen(self, row: CheckRow, failures: dict[str, str], excuses: dict[str, str]) -> CheckRow:
        config = self._config(row)
        (trace,) = forecast.traces_of([config], self.asked, lambda _: None)
        said = trace if isinstance(trace, Forecast) else forecast.predict(config, trace, self.asked)
        if said.error or isinstance(trace, Forecast):
            failures["trace"] = said.error
            return row
        missing = trace.ops_without_flop_rule
        row = replace(row, ops=sum(len(program.ops) for program in trace.programs.values()), uncovered=missing, columns={"trace": OK})
        if missing:
            failures["trace"] = f"no rule for {', '.join(missing)}"
        found = in_child("freely", config.to_json())
        if "error" in found:
            failures["memory"] = found["error"]
            return row
        row = replace(
            row, predicted_bytes=said.bytes["allocated"], measured_bytes=found["allocated"], predicted_seconds=said.seconds,
            measured_seconds=found["seconds"], columns={**row.columns, "memory": OK, "time": OK},
        )  # fmt: skip
        if abs(row.memory_error or 0.0) > GPU_MEMORY_BAR:
            failures["memory"] = f"{row.memory_error:+.1%} off"
        if row.time_error is None:
            excuses["time"] = f"no profile of {self.cluster.device.name} is at hand"
        elif abs(row.time_error) > TIME_BAR:
            failures["time"] = f"{row.time_error:+.0%} off"
        return row

    # ------------------------------------------------------------ plan

    def plan_for(self, source: Source, samples: int = SAMPLES) -> tuple[int, int, Plan | None, int | None, str]:
        """Reserved bytes of the plain step, the cap, the plan for it with its reserved bytes, or why there is none."""
        options = Options(profile_of=self.asked.profile)
        wishes = SearchConstraints(global_batch=samples, precision="fp32", compile=("none",), clip=None)
        free = choose(source, self.cluster, "auto", replace(wishes, micro_batch=samples), options=options, exact=True)
        if free.best is None or free.best.cost is None:
            return 0, 0, None, None, "the plain step does not fit"
        plain = free.best.cost.worst.memory.reserved_bytes
        cap = plain // 2
        extra = overhead(self.cluster.device, TORCH).context_bytes
        device = self.cluster.device.with_memory(int((1 - CARE) * cap) + extra, "a cap for this check")
        found = choose(source, replace(self.cluster, device=device), "auto", wishes, options=options, exact=True)
        if found.best is not None:
            cost = found.best.cost
            return plain, cap, found.best.plan, cost.worst.memory.reserved_bytes if cost else None, ""
        holders = found.infeasible.holders[:3] if found.infeasible else ()
        return plain, cap, None, None, ", ".join(["no plan fits", *(f"{one.category} {one.name} {one.bytes:,} B" for one in holders)])

    def _planned(self, row: CheckRow, failures: dict[str, str], excuses: dict[str, str]) -> CheckRow:
        source = replace(self._config(row).source(), micro_batch=1)
        plain, cap, plan, predicted, why = self.plan_for(source)
        row = replace(row, global_batch=SAMPLES, plain_bytes=plain or None, cap_bytes=cap or None)
        if plan is None:
            excuses["plan"] = why
            return row
        ran = in_child("foretell.prove.zoo_cuda.run_capped", plans.to_json(plan), cap)
        loose = plan.with_(blocks={}, states={}, weights={}, predicted={})
        known = in_child("foretell.prove.zoo_cuda.run_capped", plans.to_json(loose), None)
        row = replace(row, plan=told(plan), plan_ranks=1, plan_predicted_bytes=predicted, columns={**row.columns, "plan": OK})
        for found in (ran, known):
            if "error" in found:
                failures["plan"] = found["error"]
                return row
        off = verify.losses_apart(known["losses"], ran["losses"])
        if ran["reserved"] > cap:
            failures["plan"] = f"it took {ran['reserved'] / cap:.1%} of its cap"
        if not off <= verify.LOSS_BOUND:
            failures["plan"] = f"its losses are {off:.1e} off the plain run's"
        return replace(row, plan_measured_bytes=ran["reserved"], loss_difference=off)


def run_capped(said: Mapping[str, Any], cap_bytes: int | None, device: str = "cuda", steps: int = STEPS) -> dict[str, Any]:
    """Some steps of a plan with no more than so many bytes for the allocator; losses and peaks."""
    import torch

    from foretell.plan.recipe import source_of
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start

    plan = plans.from_json(said, "the plan")
    on_gpu = device == "cuda"
    if on_gpu and cap_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        ranks = start(plan, device=device)
        job = apply(verify.build(source_of(plan)).summed(), plan, ranks, learning_rate=verify.LEARNING_RATE)
        mine = verify.shared(source_of(plan), plan, ranks, job)
        losses = [job.train_step(mine).loss.item() for _ in range(steps)]
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory under its cap: {str(error)[:120]}"}
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()} if on_gpu else {}
    return {"losses": losses, **found}
