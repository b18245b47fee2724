"""Two runs side by side: what differs, against what was changed; figures by hand; and input that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.plan.types import Mesh
from foretell.report import two_runs
from foretell.report.two_runs import TwoRuns
from tests.pure.test_comparison import MEASURED, MIB, PLAN, folder

CALM = [0.25] * 10


def run(at: Path, losses: list[float] | None = None, settings: dict[str, Any] | None = None, plan: Any = PLAN, **changes: Any) -> Path:
    """As `foretell run` leaves it; without settings as `foretell watch` does."""
    made = folder(at, plan, **changes)
    rows = [{"event": "step", "step": number, "loss": loss} for number, loss in enumerate(losses or [], 1)]
    (made / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings is not None:
        (made / "settings.json").write_text(json.dumps(settings))
    return made


def pair(found: TwoRuns, name: str) -> two_runs.Pair:
    return next(one for one in (*found.lines, *found.parts) if one.name == name)


def test_figures_by_hand(tmp_path: Path) -> None:
    a = run(tmp_path / "a", [3.0] * 95 + [3.1] * 5, {"steps": 100}, stretches=[0.24, 0.26] * 5)
    b = run(tmp_path / "b", [2.0] * 100, {"steps": 100}, stretches=[0.27, 0.29] * 5, step_seconds=0.28, per_second=1024 / 0.28,
            allocated_bytes=2010 * MIB, last_loss=2.0, phases={"backward": 0.1, "update": 0.04})  # fmt: skip
    found = two_runs.of_folders(a, b)
    step, rate = pair(found, "step"), pair(found, "throughput")
    assert step.difference == pytest.approx(0.28 / 0.25 - 1) and step.outside is True, "0.26 and 0.27 do not meet"
    assert (step.a_spread, step.b_spread) == ((0.24, 0.26), (0.27, 0.29))
    assert rate.difference == pytest.approx(0.25 / 0.28 - 1) and rate.a_spread == pytest.approx((1024 / 0.26, 1024 / 0.24))
    assert pair(found, "allocated").difference == pytest.approx(1.0) and pair(found, "allocated").outside is None, "measured once"
    loss = pair(found, "loss")
    assert loss.difference == pytest.approx(2.0 - 3.1) and loss.outside is True and loss.a_spread == (3.0, 3.1)
    assert pair(found, "held out").difference == 0 and pair(found, "held out").outside is None
    assert pair(found, "forward and backward").difference == pytest.approx(-0.5) and pair(found, "between steps").b is None
    assert found.same_model and not found.differs and not found.alike
    same = two_runs.of_folders(a, run(tmp_path / "c", [3.05] * 100, {"steps": 100}, stretches=[0.255, 0.3] * 5, step_seconds=0.28))
    assert pair(same, "step").outside is False and pair(same, "loss").outside is False and same.alike


def test_what_differs_is_what_was_changed(tmp_path: Path) -> None:
    a = run(tmp_path / "a", settings={"steps": 100, "lr": 1e-3})
    plan = PLAN.with_(mesh=Mesh(tp=2), compile="model", notes=("made later",), predicted={})
    b = run(tmp_path / "b", settings={"steps": 100, "lr": 2e-3}, plan=plan, versions={**MEASURED["versions"], "torch": "2.13.0"},
            hardware={**MEASURED["hardware"], "device": "NVIDIA H100 80GB HBM3"})  # fmt: skip
    found = {(one.what, one.field): (one.a, one.b) for one in two_runs.of_folders(a, b).differs}
    assert found == {
        ("plan", "mesh.tp"): (None, 2), ("plan", "compile"): ("none", "model"), ("settings", "lr"): (1e-3, 2e-3),
        ("versions", "torch"): ("2.11.0", "2.13.0"), ("hardware", "device"): ("NVIDIA H200", "NVIDIA H100 80GB HBM3"),
    }  # fmt: skip


def test_runs_of_other_models_are_told_and_still_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", stretches=CALM)
    b = run(tmp_path / "b", plan=PLAN.with_(model={"model": "resnet-tiny"}), stretches=CALM, unit="samples", per_step=8, per_second=32.0)
    assert main(["compare", str(a), str(b)]) == 0
    said = capsys.readouterr().out
    assert "two runs: gpt-tiny and resnet-tiny" in said and "different models (gpt-tiny and resnet-tiny)" in " ".join(said.split())
    assert "model model: gpt-tiny → resnet-tiny" in said and "not the same unit" in said and "+0.0 %  within their spread" in said


def test_the_command_and_its_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path / "a", stretches=CALM), run(tmp_path / "b", stretches=[0.5] * 10, step_seconds=0.5, per_second=2048.0, delayed=0.6)
    assert main(["compare", str(a), str(b)]) == 1, "as diff: they are not alike"
    said = capsys.readouterr().out
    assert "+100.0 %  OUTSIDE their spread" in said and "differs     nothing" in said and "B: " in said and "60 %" in said
    assert main(["compare", str(a), str(b), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["runs"]
    assert told == {**json.loads(json.dumps(two_runs.of_folders(a, b).to_json()))} and told["alike"] is False
    step = next(line for line in told["lines"] if line["name"] == "step")
    assert step["difference"] == 1.0 and step["outside"] is True and told["a"]["name"] == "a"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["a", "nothing"], "there is no run folder"), (["a", "."], "is no run folder: it has no plan.json"),
        (["a", "going"], "the run has not ended"),
        (["a", "a/../a"], "is given twice"), (["a", "b", "a"], "3 runs are given"), (["a", "b", "--update-profile"], "learns from one run"),
        (["a", "torn"], "measurement.json"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "going", "torn"):
        run(tmp_path / name)
    (tmp_path / "going" / "measurement.json").unlink()
    (tmp_path / "torn" / "measurement.json").write_text('{"steps": "many"}')
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and not said.out
