"""A run and a plan for tests of reports: real traces of a small model, made-up measurements, hostile names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell import zoo
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.blocks import blocks_of
from foretell.plan import file as plans
from foretell.plan.blocks import even_cuts
from foretell.plan.recipe import recipe_of
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.report.html import front as html_front
from foretell.report.html.detail import Detail, of_traces
from foretell.report.html.front import Dropped, Front, FrontPoint
from foretell.runtime.detect.layout import FOLDER, HISTORY
from foretell.simulate.plan import Options
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

HOSTILE = "</script><script>window.harmed=1</script><img src=x onerror=\"window.harmed=1\">'\"&"
ON = {"H100": "8xH100", "CPU": "CPU"}


def _workload(name: str, micro_batch: int) -> Callable[[], Workload]:
    entry = zoo.get(name)
    module = zoo.load(entry)

    def build() -> Workload:
        model = module.build(**entry.config)
        return Workload(model, module.batch(model, micro_batch, entry.seq, entry.image), module.loss)

    return build


@cache
def traces(precision: str, mode: str, on: str, mixed: str) -> Trace:
    """One device's step of gpt-tiny; `mixed` is how bf16 is mixed: that depends on the data axes."""
    plan = Plan(model={"model": "gpt-tiny"}, hardware=ON[on], micro_batch=2, precision=precision,
                mesh=Mesh(dp_shard=2) if mixed == "fsdp" else Mesh())  # fmt: skip
    recipe = replace(recipe_of(plan, mode), accumulate=1, compile=Recipe().compile, shards=1)
    return capture(_workload("gpt-tiny", 2), recipe, capability=None if on == "CPU" else (9, 0))


def plan(on: str = "H100", **changes: Any) -> Plan:
    precision = "fp32" if on == "CPU" else "bf16-mixed"
    given = {"model": {"model": "gpt-tiny"}, "hardware": ON[on], "micro_batch": 2, "precision": precision, **changes}
    return Plan(**given)


def piped(on: str = "H100", **changes: Any) -> Plan:
    """Two stages with five micro-batches."""
    blocks = blocks_of(traces("bf16-mixed", "keep", "H100", ""))
    return plan(on, mesh=Mesh(pp=2), accumulate=5, pipeline=Pipeline(schedule="1f1b", cuts=even_cuts(blocks, 2)), **changes)


_KNOWN: dict[str, Detail] = {}


def detail(asked: Plan, on: str = "H100") -> Detail:
    """A plan costed for its page, once."""
    key = repr((asked, on))
    if key not in _KNOWN:
        _KNOWN[key] = _detail(asked, on)
    return _KNOWN[key]


def _detail(asked: Plan, on: str) -> Detail:
    mixed = "fsdp" if asked.mesh.data > 1 else ""
    modes = {"keep", *(one.mode for one in asked.blocks.values())}
    found = {mode: traces(asked.precision, mode, on, mixed) for mode in modes}
    return of_traces(found, asked, parse(asked.hardware), Options(profile_of=find_profile))


def told(asked: Plan, on: str = "H100") -> tuple[Plan, Detail]:
    """A plan with what is predicted for it, and the detail."""
    found = detail(asked, on)
    blocks = blocks_of(traces("bf16-mixed", "keep", "H100", ""))
    model = {**asked.model, "blocks": list(blocks), "parameters": 800_000}
    return asked.with_(model=model, predicted=found.cost.predicted()), found


RECOMPUTE = {"blocks.0": Residency(mode="recompute")}


def front(hostile: bool = False) -> Front:
    words = HOSTILE if hostile else "pp 2, micro-batch 2"
    return Front(
        costed=42, points=(
            FrontPoint(words=words, seconds=0.02, memory_bytes=3e9, cost_per_step=1e-4, joules_per_step=12.0, chosen=True),
            FrontPoint(words="dp_shard 2", seconds=0.03, memory_bytes=2e9, cost_per_step=2e-4, joules_per_step=9.0, why="50 % slower"),
            FrontPoint(words="one device", seconds=0.05, memory_bytes=4e9, on_front=False, why=words),
        ), dropped=(Dropped(words="tp 3", why="heads do not divide"),),
    )  # fmt: skip


def run_folder(at: Path, asked: Plan, *, steps: int = 30, measured: bool = True, command: str = "foretell run plan.json") -> Path:
    """A run folder as `foretell run` writes it, with a front beside its plan."""
    at.mkdir()
    plans.write(asked, at / "plan.json")
    (at / "settings.json").write_text(json.dumps({"steps": steps, "seed": 0}))
    step = float(asked.predicted.get("step_seconds", 0.1))
    rows: list[dict[str, Any]] = [{"event": "start", "step": 0, "command": command}]
    for number in range(1, steps + 1):
        loss: float | str = 2.0 + 3.0 / number if number != 7 else "nan"
        rows.append({"event": "step", "step": number, "loss": loss, "grad_norm": 1.5, "lr": 3e-4, "seconds": step * (1 + 0.01 * (number % 5))})
    rows.append({"event": "eval", "step": steps, "loss": 2.2, "seconds": 0.5})
    (at / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "step", "st')
    if measured:
        (at / "measurement.json").write_text(json.dumps(_measurement(asked, step, steps, command)))
    return at


def _measurement(asked: Plan, step: float, steps: int, command: str) -> dict[str, Any]:
    said = asked.predicted
    return {
        "steps": steps - 5, "skipped_steps": 5, "step_seconds": step * 1.05, "p10_seconds": step, "p90_seconds": step * 1.1,
        "mean_seconds": step * 1.05, "unit": "tokens", "per_step": 1024, "per_second": 1024 / step / 1.05, "overhead": 0.01,
        "phases": {"backward": step * 0.9, "update": step * 0.1, "between": step * 0.01, "data": step * 0.005},
        "stretches": [step] * 9, "allocated_bytes": said.get("allocated_bytes"), "reserved_bytes": said.get("reserved_bytes"),
        "host_bytes": 10**9, "by_rank": [], "mfu": 0.31, "first_loss": 5.0, "last_loss": 2.1, "eval_loss": 2.2,
        "save_seconds": 0.5, "eval_seconds": 0.2, "hardware": {"device": "NVIDIA H100 80GB HBM3", "kind": "cuda", "count": 2},
        "versions": {"torch": "2.13.0", "python": "3.11.7", "foretell": "0.1.0"}, "command": command,
        "started": "2026-01-31T12:00:00Z", "wall_seconds": 60.0,
    }  # fmt: skip


def with_ranks(run: Path, world: int = 2, parts: int = 8) -> Path:
    """What a run leaves of its ranks: the last of them works longer and longer."""
    (run / FOLDER).mkdir()
    rows = []
    for part in range(parts):
        excess = [0.0] * (world - 1) + [0.002 * part]
        rows.append({"steps": [20 * part + 1, 20 * part + 20], "step_seconds": 0.02, "excess": excess, "mean_excess": excess,
                     "waited": [0.002 * part] * (world - 1) + [0.0], "delayed": [0.0] * world})  # fmt: skip
    (run / FOLDER / HISTORY).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def with_front(run: Path, hostile: bool = False) -> Path:
    html_front.write(front(hostile), run / "plan.json")
    return run
