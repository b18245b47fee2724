"""Steps that take longer than predicted: the planner is asked again with the machine as measured, and a run goes over to a better plan."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan, Residency
from foretell.runtime.observe.measure import LONG_STEPS, PredictedPace, StepReading, Tally
from foretell.runtime.process.supervise.elastic import Elastic
from foretell.search.as_measured import LEAST_GAIN, SlowStep, replanned
from foretell.search.profiles.learn import predictor
from tests.cpu_dist.test_elastic import command
from tests.cpu_dist.test_supervise import rows
from tests.cpu_dist.train_cases import PLAN, TEXT, losses, ten_steps

SMALL = {"layers": 4, "dim": 64, "heads": 2, "context": 64, "vocab_size": 256, "dropout": 0.0}


def recomputed(**changes: Any) -> Plan:
    """A plan that computes all blocks again although nothing makes it."""
    model = {"model": "gpt-tiny", "overrides": SMALL, "seq": 64}
    return PLAN.with_(model=model, blocks={"blocks.*": Residency(mode="recompute")}, **changes)


def test_the_machine_as_measured_has_a_better_plan_or_none() -> None:
    plan, cluster = recomputed(), parse("CPU")
    profile = find_profile("CPU")
    assert profile is not None
    predicted = predictor(plan, cluster)(profile).step_seconds
    found = replanned(plan, SlowStep(seconds=3 * predicted), (1,))
    assert found.plan is not None and not found.plan.blocks and (found.plan.micro_batch, found.plan.global_batch) == (2, 4)
    assert found.now_seconds == pytest.approx(3 * predicted, rel=0.2) and found.best_seconds is not None
    assert found.best_seconds < (1 - LEAST_GAIN) * found.now_seconds and "ms are predicted instead of" in found.words(3 * predicted)
    kept = replanned(found.plan, SlowStep(seconds=3 * predicted), (1,))
    assert kept.plan is None and "no plan is predicted to be 5% quicker" in kept.why


@pytest.mark.slow(reason="one machine whose work is slow is above; a larger model that waits for messages takes a minute")
def test_links_that_are_slow_are_told_from_work_that_is() -> None:
    """Eight devices, half of whose step is messages: between nodes less is sent by replicas of four shards."""
    plan = PLAN.with_(model={"model": "gpt2", "seq": 512}, hardware="2x4xH100@IB400", mesh=Mesh(dp_shard=8), precision="bf16-mixed",
                      micro_batch=4, accumulate=1)  # fmt: skip
    cluster = parse(plan.hardware)
    profile = find_profile(cluster.device.name)
    assert profile is not None
    predicted = predictor(plan, cluster)(profile).step_seconds
    found = replanned(plan, SlowStep(seconds=2 * predicted, message_seconds=predicted), (8,))
    assert found.messages > 4 * found.work and found.now_seconds == pytest.approx(2 * predicted, rel=0.2)
    assert found.plan is not None and found.plan.mesh == Mesh(dp_replicate=2, dp_shard=4) and found.plan.global_batch == 32
    alone = replanned(plan, SlowStep(seconds=2 * predicted), (8,))
    assert alone.messages == 1 and alone.work > 1.5 and alone.plan is None


def test_a_step_is_slow_when_it_was_slow_twice() -> None:
    tally, pace, told = Tally(), PredictedPace(), []
    for step in range(1, 5 * LONG_STEPS + 1):
        seconds = 1.0 if step <= LONG_STEPS or step > 4 * LONG_STEPS else 1.3
        known = {"backward_seconds": seconds, "update_seconds": 0.0, "between_seconds": 0.0}
        tally.add(StepReading(step=step, loss=1.0, grad_norm=None, seconds=seconds, **known))
        if (found := pace.look(tally, 1.0)) is not None:
            told.append((step, found))
    assert told == [(3 * LONG_STEPS, 1.3), (4 * LONG_STEPS, 1.3)]
    assert PredictedPace().look(tally, None) is None


def test_it_is_asked_once_under_a_plan(tmp_path: Path) -> None:
    asked: list[float] = []
    said: list[str] = []

    def none(plan: Plan, seconds: float, messages: float) -> tuple[None, str, dict[str, float | None]]:
        asked.append(seconds)
        return None, "none is better", {"now_seconds": 0.1}

    with Elastic(recomputed(), None, tmp_path, said.append, better=none) as elastic:
        elastic.slower(0.25)
        deadline = time.monotonic() + 10
        while not asked:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        elastic.slower(0.3)
        time.sleep(1.3)
    assert asked == [0.25] and elastic.next is None and said == ["steps take 250 ms, longer than predicted: none is better"]
    (row,) = rows(tmp_path)
    assert (row["event"], row["seconds"], row["now_seconds"]) == ("not replanned", 0.25, 0.1)


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plans.write(recomputed(), tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    assert main(["run", "plan.json", "--device", "cpu", "--replan", "--no-save"]) == 2
    assert "--replan goes on from checkpoints, and --no-save has none" in capsys.readouterr().err


@pytest.mark.slow(reason="the pieces are above; here a run goes over, which takes two hundred steps and a start")
def test_a_run_goes_over_to_a_better_plan(ranks: Any, tmp_path: Path) -> None:
    """What its plan predicts is a millisecond. Blocks are kept from then on, and losses are those of a run that recomputed to its end."""
    said = {"step_seconds": 1e-3, "low_seconds": 1e-3, "high_seconds": 1.1e-3}
    steps, plan = 900, recomputed(predicted=said)
    plans.write(plan, tmp_path / "plan.json")
    child = command(tmp_path, steps, "--replan", "--data", str(TEXT), "--no-standby")
    told, words = child.communicate(timeout=400)
    assert child.returncode == 0, words
    (row,) = rows(tmp_path / "run")[:1]
    assert row["event"] == "replanned" and row["before"] == row["ranks"] == 1 and row["best_seconds"] < 0.95 * row["now_seconds"]
    assert "another plan, since steps take" in words and "done" in told
    kept = plans.read(tmp_path / "run" / "plan.json")
    assert not kept.blocks and kept.predicted["step_seconds"] == pytest.approx(row["best_seconds"])
    until = row["checkpoint"] + 20
    ranks(1).run(ten_steps, str(tmp_path / "twin"), plan, {"steps": until, "schedule_steps": steps, "lr": 1e-3, "schedule": "constant", "warmup": 0,
                                                           "data": str(TEXT)}, False)  # fmt: skip
    found, twin = dict(losses(tmp_path / "run")), dict(losses(tmp_path / "twin"))
    assert [found[step] for step in twin] == pytest.approx(list(twin.values()), rel=1e-6)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, steps + 1))
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["steps"] == steps
