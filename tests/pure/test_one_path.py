"""Every command says the same of the same plan, and says what it said before: 52 plans of every kind, in tests/pure/golden.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell import api
from foretell.cli import main
from foretell.hardware import parse as hardware
from foretell.plan import file as plans
from foretell.plan.recipe import recipe_of
from foretell.plan.types import SCHEDULES, Mesh, Plan
from foretell.prove import forecast
from foretell.report import comparison
from foretell.report.html import detail as html_detail
from foretell.search.traces import needed as traces_of_search
from foretell.simulate.plan import PlanCost
from foretell.trace.store import traces as stored
from tests.further import one_in
from tests.pure import golden

KEPT = golden.kept()
COSTS: dict[str, PlanCost] = {}


def cost(name: str) -> PlanCost:
    if name not in COSTS:
        COSTS[name] = golden.CASES[name].cost()
    return COSTS[name]


def fits(name: str) -> bool:
    """Whether `fit` can ask for such a plan: one device, or all of them sharing parameters alike."""
    case = golden.CASES[name]
    plan, cluster = case.plan, case.cluster
    modes = {one.mode for one in plan.blocks.values()}
    return (
        plan.mesh == Mesh(dp_shard=cluster.count) and cluster.device.backend != "cpu" and plan.reshard is True
        and not plan.offloads and modes <= {"recompute", "selective"} and name != "recompute some"
    )  # fmt: skip


FITTING = [name for name in golden.CASES if fits(name)]


KINDS = {json.dumps([golden.CASES[name].plan.mesh.ep > 1, getattr(golden.CASES[name].plan.pipeline, "schedule", "")]): name for name in golden.CASES}
ASKED = {name for number, name in enumerate(golden.CASES) if number % 5 != 4} | {*KINDS.values()}
"""Four of five plans, and one of each schedule and with experts."""


def asked_of(names: Iterable[str]) -> list[Any]:
    """The others are slow; each has a prediction of its own in any case."""
    slow = pytest.mark.slow(reason="a command reads plans of a kind alike, and there are others of each kind")
    return [pytest.param(name, marks=() if name in ASKED else slow) for name in names]


@pytest.mark.parametrize("name", golden.CASES)
def test_a_prediction_moves_only_when_it_is_meant_to(name: str) -> None:
    found = json.loads(json.dumps(golden.told(cost(name))))
    assert not list(golden.differences(KEPT[name], found, name))


def test_there_are_enough_of_every_kind() -> None:
    assert len(ASKED) >= 40 and len(FITTING) >= 16 and set(KEPT) == set(golden.CASES)
    for plans_ in ([case.plan for case in golden.CASES.values()], [golden.CASES[name].plan for name in ASKED]):
        enough(plans_)


def enough(plans_: list[Plan]) -> None:
    for axis in ("dp_shard", "dp_replicate", "tp", "pp", "cp", "ep"):
        assert any(getattr(plan.mesh, axis) > 1 for plan in plans_), axis
    assert {plan.pipeline.schedule for plan in plans_ if plan.pipeline} == set(SCHEDULES)


# ---------------------------------------------------------------- commands


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Traces are those of the golden cases, however they are asked for; the cache is empty."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(traces_of_search.Traces, "_made", golden.Here._made)
    monkeypatch.setattr(stored, "trace_in_child", lambda asked, **_: golden.Here._made(None, [asked])[0])  # type: ignore[arg-type]


def numbers(cost: PlanCost) -> dict[str, Any]:
    """What a plan file says, as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(cost.predicted()))
    return found


@pytest.mark.parametrize("name", one_in(2, FITTING, "another plan that fit can ask for; each is predicted above"))
def test_fit_says_what_the_plan_says(name: str, here: None) -> None:
    case = golden.CASES[name]
    plan, known = case.plan, cost(name)
    recipe = recipe_of(plan)
    answer = api.fit(
        str(plan.model["model"]), hardware=case.on, optimizer=recipe.optimizer, precision=recipe.precision,
        recompute=recipe.recompute, accumulate=plan.accumulate, clip=plan.clip, micro_batch=plan.micro_batch,
        seq=plan.model.get("seq"), image=plan.model.get("image"), overrides=plan.model.get("overrides"), compile=plan.compile,
        advice_seconds=0,
    )  # fmt: skip
    memory, time = known.worst.memory, known.time
    assert answer.verdict == known.verdict
    for what in ("allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes", "capacity_bytes"):
        assert getattr(answer.memory, what) == getattr(memory, what), what
    assert answer.memory.categories == memory.categories and answer.memory.phases == memory.phases
    assert answer.time == time
    assert answer.mfu is not None and answer.mfu.flops_per_step == known.model_flops
    assert answer.throughput is not None and answer.throughput.per_step == known.per_step
    assert answer.energy is not None and answer.energy.joules_per_step == known.joules
    shown = plans.from_json(dict(answer.plan))
    assert {**plan.model, "blocks": shown.model["blocks"]} == shown.model
    assert replace(shown, model=plan.model) == plan


@pytest.mark.parametrize(
    ("on", "asked"),
    [
        ("H200", {"infer": True}), ("H200", {"freeze": ("blocks.0",)}), ("H200", {"precision": "fsdp-bf16"}),
        ("H100:2", {"precision": "bf16-autocast"}),
    ],
)  # fmt: skip
def test_fit_shows_no_plan_where_running_one_would_be_something_else(on: str, asked: dict[str, Any], here: None) -> None:
    given = {"hardware": on, "seq": 64, "overrides": {"layers": 2}, "advice_seconds": 0}
    assert not api.fit("gpt2", **given, **asked).plan and api.fit("gpt2", **given).plan


@pytest.mark.parametrize("name", asked_of(golden.CASES))
def test_files_and_commands_say_the_same(name: str, here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`show`, `export` and `compare` from the file; `report` predicts it anew. `verify` and `eject` say no such numbers."""
    case, known = golden.CASES[name], cost(name)
    said = numbers(known)
    path = tmp_path / "plan.json"
    plans.write(case.plan.with_(predicted=said), path)
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["predicted"] == said
    assert main(["export", str(path), "--to", "slurm", "--out", str(tmp_path / "job")]) == 0
    assert plans.read(tmp_path / "job" / "plan.json").predicted == said
    lines = compared(plans.read(path), known)
    assert lines["step"] == said["step_seconds"] and lines["throughput"] == said[f"{known.unit}_per_second"]
    shown = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "device": "memory_bytes", "process": "memory_bytes"}
    assert all(lines[line] == said[field] for line, field in shown.items() if line in lines)
    assert numbers(html_detail.of_plan(case.plan).cost) == said


def compared(plan: Plan, known: PlanCost) -> dict[str, float | None]:
    """Line → what `compare` holds a run of the plan against."""
    device = hardware(plan.hardware).device
    ran = {
        "hardware": {"kind": device.backend, "device": device.name}, "unit": known.unit, "per_step": known.per_step, "per_second": 1.0,
        "step_seconds": 1.0, "first_loss": 1.0, "last_loss": 1.0, "steps": 1, "skipped_steps": 0, "versions": {}, "command": "",
        "started": "", "phases": {},
    }  # fmt: skip
    return {line.name: line.predicted for line in comparison.compare(plan, ran).lines}


@pytest.mark.parametrize("name", ["plain", "plain, larger", "plain, A100", "compiled", "accumulated"])
def test_sealed_forecasts_say_the_same(name: str) -> None:
    from foretell.prove.types import Config

    case, known = golden.CASES[name], cost(name)
    plan = case.plan
    recipe = recipe_of(plan)
    config = Config(
        index=0, model=str(plan.model["model"]), overrides=plan.model["overrides"], micro_batch=plan.micro_batch, seq=plan.model["seq"],
        precision=recipe.precision, optimizer=plan.optimizer, accumulate=plan.accumulate, clip=plan.clip, compile=plan.compile,
    )  # fmt: skip
    asked = forecast.ForecastRequest(seed="", count=1, cluster=case.cluster)
    trace = golden.traces(case.cluster.device.compute_capability).of(plan, ["keep"])["keep"]
    found = forecast.predict(config, trace, asked)
    assert not found.error and known.time is not None
    assert found.bytes["allocated"] == known.worst.memory.allocated_bytes and found.bytes["device"] == known.worst.memory.device_bytes
    assert found.seconds == known.time.step_seconds


def test_a_plan_that_is_searched_has_the_numbers_of_its_own_prediction(here: None) -> None:
    from foretell.search.solve.choose import SearchConstraints, choose
    from foretell.trace.load.model import Source

    source = Source(model="gpt2", overrides={"layers": 4}, seq=256)
    choice = choose(source, golden.CASES["fsdp"].cluster, "H100:8", SearchConstraints(global_batch=16, micro_batch=2), options=golden.OPTIONS)
    best = choice.best
    assert best is not None and best.cost is not None
    plan: Plan = choice.plan
    again = numbers(golden.Case("again", "H100:8", plan.with_(predicted={}, notes=())).cost())
    assert numbers(best.cost) == again
    assert {name: plan.predicted[name] for name in again} == again
