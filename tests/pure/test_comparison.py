"""Predicted beside measured: figures by hand, files, and what a profile learns from a run on a machine that is known."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell.cli import main
from foretell.errors import FileFormatError, UserError
from foretell.hardware import parse
from foretell.hardware import profile as profiles
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile, load
from foretell.plan import file as plans
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Plan
from foretell.price.calibrate import corrections
from foretell.price.calibrate.corrections import MeasuredRun, kind_of, learn, teach
from foretell.quantities import Time
from foretell.report import comparison
from foretell.report.comparison import Comparison, compare, render
from foretell.report.html import figures as html_figures
from foretell.runtime.observe.measure import StepReading
from foretell.runtime.train import log
from foretell.simulate.plan import Options, predict_plan
from foretell.trace.types import Trace

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 2**20, 2**30
PREDICTED = {
    "verdict": "fits", "step_seconds": 0.2, "low_seconds": 0.18, "high_seconds": 0.25, "tokens_per_second": 5120.0,
    "tokens_per_step": 1024, "memory_bytes": 2 * GIB, "allocated_bytes": 1000 * MIB, "reserved_bytes": 1200 * MIB,
    "binds": "compute", "breakdown": {"gemm": 0.12, "memory": 0.06, "waiting_for_host": 0.02},
    "provenance": {"time": "measured", "memory": "counted: x"},
    "phases": {"forward": 0.05, "backward": 0.1, "update": 0.03},
}  # fmt: skip
MEASURED: dict[str, Any] = {
    "steps": 95, "skipped_steps": 5, "step_seconds": 0.25, "p10_seconds": 0.24, "p90_seconds": 0.27, "mean_seconds": 0.251,
    "unit": "tokens", "per_step": 1024, "per_second": 4096.0, "overhead": 0.008,
    "phases": {"backward": 0.2, "update": 0.04, "between": 0.002, "data": 0.001},
    "stretches": [0.20, 0.22, 0.21, 0.25, 0.25, 0.25, 0.25, 0.26, 0.28, 0.27], "allocated_bytes": 1005 * MIB,
    "reserved_bytes": 1300 * MIB, "host_bytes": 1500 * MIB, "by_rank": [], "mfu": None, "first_loss": 5.5, "last_loss": 3.1,
    "eval_loss": 3.2, "save_seconds": 0.5, "eval_seconds": None, "hardware": {"device": "NVIDIA H200", "kind": "cuda", "count": 1},
    "versions": {"torch": "2.11.0", "python": "3.11.7", "foretell": "0.1.0"}, "command": "foretell run plan.json --steps 100",
    "started": "2026-01-01T00:00:00Z", "wall_seconds": 26.0,
}  # fmt: skip
CPU = {"device": "A CPU", "kind": "cpu", "count": 1, "threads": 2}
PLAN = Plan(model={"model": "gpt-tiny"}, hardware="H200", micro_batch=4, accumulate=2, predicted=PREDICTED)


def folder(at: Path, plan: Plan = PLAN, **changes: Any) -> Path:
    at.mkdir()
    plans.write(plan, at / "plan.json")
    (at / "measurement.json").write_text(json.dumps({**MEASURED, **changes}))
    return at


# ---------------------------------------------------------------- lines


def test_errors_and_bands_by_hand() -> None:
    found = compare(PLAN, MEASURED)
    step, rate, allocated, reserved, device = found.lines
    assert step.error == pytest.approx(-0.2) and step.inside is True, "0.25 s is the upper end of the band"
    assert rate.error == pytest.approx(0.25) and (rate.low, rate.high) == (1024 / 0.25, 1024 / 0.18) and rate.inside is True
    assert allocated.error == pytest.approx(1000 / 1005 - 1) and allocated.inside is True, "within 1 %"
    assert reserved.inside is False, "1300 MiB is beyond 3 % of 1200"
    assert device.measured is None and device.inside is None and device.note == comparison.NOT_MEASURED
    assert found.ok is False and found.comparable
    better = compare(PLAN, {**MEASURED, "reserved_bytes": 1210 * MIB})
    assert better.ok is True
    assert compare(PLAN, {**MEASURED, "reserved_bytes": 1210 * MIB, "step_seconds": 0.2501}).ok is False


def test_an_error_has_one_sign_in_the_table_the_chart_the_json_and_the_live_line() -> None:
    """predicted / measured - 1, whoever tells it; a step that takes 2.74 times as long was predicted 64 % too short."""
    predicted, measured = 0.2, 0.548
    found = compare(PLAN, {**MEASURED, "step_seconds": measured})
    step = found.lines[0]
    wanted = predicted / measured - 1
    assert step.predicted == predicted and step.error == pytest.approx(wanted) == pytest.approx(-0.635, abs=1e-3)
    assert found.to_json()["lines"][0]["error"] == pytest.approx(wanted)
    assert "-63.5 %" in render(found).plain
    chart = html_figures._bands(found.lines)
    assert chart is not None
    row = chart.data["rows"][0]
    assert row["error"] == pytest.approx(wanted) and "error −64 %" in row["told"]
    assert (row["low"] <= row["error"] <= row["high"]) is step.inside
    reading = StepReading(step=1, loss=1.0, grad_norm=None, seconds=measured, backward_seconds=0.4, update_seconds=0.1, between_seconds=0.0)
    assert log.line(reading, 9, rate=1.0, unit="samples", predicted_seconds=predicted).endswith("predicted 200 ms (-63.5 %)")


def test_bands_of_the_plan_come_before_usual_ones() -> None:
    said = {**PREDICTED, "bands": {"reserved_bytes": [1100 * MIB, 1400 * MIB], "device_bytes": [1.9 * GIB, 2.1 * GIB]}}
    found = compare(PLAN.with_(predicted=said), {**MEASURED, "device_bytes": 2 * GIB})
    assert [found.line(name).inside for name in ("reserved", "device")] == [True, True]  # type: ignore[union-attr]
    assert found.ok is True


def test_a_cpu_is_held_against_its_process() -> None:
    plan = PLAN.with_(hardware="CPU")
    found = compare(plan, {**MEASURED, "hardware": CPU, "allocated_bytes": None, "reserved_bytes": None})
    assert [line.name for line in found.lines] == ["step", "throughput", "process"]
    line = found.lines[-1]
    assert (line.predicted, line.measured) == (2 * GIB, 1500 * MIB)
    assert (line.low, line.high) == (1300 * MIB, pytest.approx(1650 * MIB)) and line.inside is True


def test_where_the_time_went_and_how_it_drifted() -> None:
    found = compare(PLAN, MEASURED)
    parts = {part.name: (part.predicted, part.measured) for part in found.parts}
    assert parts["forward and backward"] == (pytest.approx(0.15), 0.2) and parts["update"] == (0.03, 0.04)
    assert parts["between steps"] == (None, 0.002) and parts["waiting for the host"] == (0.02, None)
    assert found.drift is not None
    assert (found.drift.first_seconds, found.drift.last_seconds) == (0.21, 0.27), "medians of three stretches of ten"
    assert found.drift.change == pytest.approx(0.27 / 0.21 - 1)
    assert compare(PLAN, {**MEASURED, "stretches": [0.2, 0.2]}).drift is None
    assert found.besides == {"save": 0.5} and found.loss == {"first": 5.5, "last": 3.1, "held_out": 3.2}


@pytest.mark.parametrize(
    ("plan", "hardware", "word"),
    [
        (PLAN.with_(predicted={}), MEASURED["hardware"], "nothing was predicted"),
        (PLAN, CPU, "H200-SXM-141GB, and it ran on A CPU"),
        (PLAN.with_(hardware="CPU"), MEASURED["hardware"], "CPU, and it ran on NVIDIA H200"),
        (PLAN.with_(hardware="8xH100"), MEASURED["hardware"], "H100-SXM-80GB, and it ran on NVIDIA H200"),
        (PLAN.with_(hardware="auto", predicted={**PREDICTED, "device": "H100"}), MEASURED["hardware"], "H100-SXM-80GB"),
    ],
)
def test_what_cannot_be_compared_says_why(plan: Plan, hardware: Any, word: str) -> None:
    found = compare(plan, {**MEASURED, "hardware": hardware})
    assert found.ok is None and not found.comparable and word in found.notes[0]
    assert all(line.predicted is None and line.inside is None for line in found.lines)
    assert "inside" not in render(found).plain


def test_a_plan_for_this_machine_is_compared_wherever_it_ran() -> None:
    assert compare(PLAN.with_(hardware="auto"), MEASURED).comparable
    assert compare(PLAN.with_(hardware="auto"), {**MEASURED, "hardware": CPU}).comparable
    assert compare(PLAN.with_(hardware="gone.toml"), MEASURED).comparable


def test_joules_stand_beside_the_prediction_where_they_were_counted() -> None:
    assert compare(PLAN, MEASURED).line("energy") is None
    found = compare(PLAN.with_(predicted={**PREDICTED, "joules_per_step": 60.0}), {**MEASURED, "joules_per_step": 50.0})
    line = found.line("energy")
    assert line is not None and line.error == pytest.approx(0.2) and line.inside is None
    jsonschema.validate(json.loads(json.dumps(found.to_json())), comparison.schema())
    assert "energy" in render(found, 80).plain and "50.0 J" in render(found, 80).plain


# ---------------------------------------------------------------- files and pages


def test_the_file_keeps_to_its_schema_and_comes_back_whole() -> None:
    for plan, measured in ((PLAN, MEASURED), (PLAN.with_(predicted={}), {**MEASURED, "hardware": CPU, "stretches": []})):
        found = compare(plan, measured)
        content = json.loads(json.dumps(found.to_json()))
        jsonschema.validate(content, comparison.schema())
        assert Comparison.from_json(content) == found
        assert Comparison.from_json({**content, "later": 1}) == found


def test_the_schema_notices_every_lost_name() -> None:
    content = json.loads(json.dumps(compare(PLAN, MEASURED).to_json()))
    places: list[Callable[[dict[str, Any]], dict[str, Any]]] = [
        lambda data: data, lambda data: data["lines"][0], lambda data: data["parts"][0], lambda data: data["drift"],
    ]  # fmt: skip
    for place in places:
        for name in place(content):
            less = copy.deepcopy(content)
            del place(less)[name]
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(less, comparison.schema())


def test_the_page_says_both_numbers_and_fits_its_width() -> None:
    text = render(compare(PLAN, MEASURED), 80).plain
    for words in ("200 ms", "180 – 250 ms", "-20.0 %", "inside", "OUTSIDE", "tokens/s", "not measured", "+28.6%", "5.5000 → 3.1000",
                  "NVIDIA H200, 1 rank", "torch 2.11.0", "products 60 %", "again       foretell run plan.json"):  # fmt: skip
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 80
    assert render(compare(PLAN, MEASURED), ascii_only=True).plain.isascii()


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run folder"):
        comparison.of_folder(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no run folder: it has no plan\.json"):
        comparison.of_folder(tmp_path)
    plans.write(PLAN, tmp_path / "plan.json")
    with pytest.raises(UserError, match="has not ended"):
        comparison.of_folder(tmp_path)
    run = folder(tmp_path / "run")
    (run / "measurement.json").write_text('{"steps": ')
    with pytest.raises(FileFormatError, match=r"measurement\.json"):
        comparison.of_folder(run)
    (run / "measurement.json").write_text(json.dumps({"steps": 3, "hardware": {}}))
    with pytest.raises(FileFormatError, match="skipped_steps is missing"):
        comparison.of_folder(run)


def test_the_command_answers_with_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = folder(tmp_path / "bad"), folder(tmp_path / "good", reserved_bytes=1210 * MIB)
    none = folder(tmp_path / "none", PLAN.with_(predicted={}))
    assert [main(["compare", str(run)]) for run in (good, bad, none)] == [0, 1, 0]
    assert "OUTSIDE" in capsys.readouterr().out
    assert main(["compare", str(good), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found["comparison"], comparison.schema())
    assert found["comparison"]["ok"] is True and "profile" not in found
    assert main(["compare", str(tmp_path / "nowhere")]) == 2


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    code = f"import sys; from foretell.cli import main; main(['compare', {str(run)!r}]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- corrections: a machine whose truth is known

CALM = {"steps": 60, "spread": 0.05, "drift": 0.01}


@cache
def traced(model: str, micro_batch: int, gpu: bool) -> tuple[Plan, Trace]:
    from foretell.trace.load.model import load as load_model
    from foretell.trace.record.capture import capture

    overrides = {"layers": 2} if model == "gpt2" else {}
    plan = Plan(
        model={"model": model, "overrides": overrides}, hardware="H200" if gpu else "CPU", micro_batch=micro_batch,
        precision="bf16-mixed" if gpu else "fp32",
    )  # fmt: skip
    return plan, capture(partial(load_model, source_of(plan)), recipe_of(plan), capability=(9, 0) if gpu else None)


def predictor(model: str, micro_batch: int, *, gpu: bool) -> Callable[[Profile], Time]:
    plan, trace = traced(model, micro_batch, gpu)
    cluster = parse(plan.hardware)

    def predict(profile: Profile) -> Time:
        found = predict_plan(trace, plan, cluster, Options(profile_of=lambda _: profile)).time
        assert found is not None
        return found

    return predict


def truth(profile: Profile, compute: float = 1.0, memory: float = 1.0, host: float = 1.0) -> Profile:
    """The same machine, but slower by these factors: made by hand, not with the code under test."""
    before = {"compute": 1.0, "memory": 1.0, **profile.fitted["in_step"]}
    weights = {name: value * (1 if name == "call" else host) for name, value in profile.host["weights"].items()}
    calls = {name: value * host for name, value in profile.host["calls"].items()}
    return replace(
        profile, fitted={**profile.fitted, "in_step": {"compute": before["compute"] * compute, "memory": before["memory"] * memory}},
        host={**profile.host, "weights": weights, "calls": calls}, date="2000-01-01",
    )  # fmt: skip


def shares(time: Time) -> dict[str, float]:
    parts = corrections._parts(time)
    return {kind: parts[kind] / time.step_seconds for kind in parts}


def shipped(name: str) -> Profile:
    return load(ROOT / "foretell" / "hardware" / "profiles" / f"{name}.json")


def test_a_cpu_learns_how_slow_it_really_is() -> None:
    known, predict = shipped("CPU"), predictor("gpt-tiny", 2, gpu=False)
    real = truth(known, compute=1.3, memory=0.8, host=1.5)
    measured = predict(real)
    run = MeasuredRun(name="a", step_seconds=measured.step_seconds, shares=shares(measured), **CALM)
    found = teach(known, predict, run, serial=True, date="2026-01-02T03:04:05+00:00")
    assert not isinstance(found, str)
    assert dict(found.factors) == pytest.approx({"compute": 1.3, "memory": 0.8, "host": 1.5}, rel=0.02)
    assert predict(found.profile).step_seconds == pytest.approx(measured.step_seconds, rel=0.01)
    other = predictor("llama-tiny", 2, gpu=False)
    assert other(found.profile).step_seconds == pytest.approx(other(real).step_seconds, rel=0.02), "other models gain too"
    note = found.profile.notes[-1]
    assert "2026-01-02" in note and "run a" in note and len(found.profile.notes) == len(known.notes) + 1
    changes = found.profile.fitted["corrections"][-1]["changes"]
    assert changes["compute"]["after"] == pytest.approx(1.3 * changes["compute"]["before"], rel=0.02)
    assert teach(found.profile, predict, run, serial=True, date="x") == "the step is within 1% of what was predicted: nothing to correct"


def test_without_a_look_at_single_ops_all_kinds_move_alike() -> None:
    known, predict = shipped("CPU"), predictor("gpt-tiny", 2, gpu=False)
    seconds = predict(truth(known, compute=1.3, memory=1.3, host=1.3)).step_seconds
    found = teach(known, predict, MeasuredRun(name="a", step_seconds=seconds, **CALM), serial=True, date="x")
    assert not isinstance(found, str)
    assert dict(found.factors) == pytest.approx({"compute": 1.3, "memory": 1.3, "host": 1.3}, rel=0.01)


@pytest.mark.slow(reason="two runs of a GPU; one of a CPU teaches above")
def test_a_busy_gpu_teaches_about_its_ops_and_a_waiting_one_about_its_host() -> None:
    known, busy, waiting = shipped("H200-SXM-141GB"), predictor("gpt2", 16, gpu=True), predictor("gpt-tiny", 2, gpu=True)
    assert busy(known).binds in ("compute", "memory bandwidth") and waiting(known).binds == "host"
    measured = busy(truth(known, compute=1.2, memory=1.1))
    run = MeasuredRun(name="a", step_seconds=measured.step_seconds, shares=shares(measured), **CALM)
    found = teach(known, busy, run, serial=False, date="x")
    assert not isinstance(found, str) and set(found.factors) == {"compute", "memory"}
    assert dict(found.factors) == pytest.approx({"compute": 1.2, "memory": 1.1}, rel=0.03)
    assert found.profile.host == known.host
    slow = waiting(truth(known, host=1.4))
    lesson = teach(known, waiting, MeasuredRun(name="b", step_seconds=slow.step_seconds, **CALM), serial=False, date="x")
    assert not isinstance(lesson, str) and dict(lesson.factors) == pytest.approx({"host": 1.4}, rel=0.03)
    assert lesson.profile.fitted["in_step"] == known.fitted["in_step"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ranks": 2}, "2 ranks wait for each other"), ({"steps": 12}, "12 steps were measured"), ({"spread": 0.4}, "differ by 40%"),
        ({"drift": -0.2}, "-20% against the first"), ({"step_seconds": 100.0}, "no matter of a profile"),
        ({"shares": {"compute": 0.3, "memory": 0.2, "host": 0.5}}, "busy for 50% of it"),
    ],
)  # fmt: skip
def test_a_run_that_proves_nothing_teaches_nothing(change: dict[str, Any], why: str) -> None:
    time = predictor("gpt2", 16, gpu=True)(shipped("H200-SXM-141GB"))
    run = MeasuredRun(**{"name": "a", "step_seconds": 1.2 * time.step_seconds, **CALM, **change})
    lesson = learn(time, run, serial=False)
    assert lesson.factors == {} and why in lesson.why
    assert learn(time, MeasuredRun(name="a", step_seconds=1.2 * time.step_seconds, **CALM), serial=False).factors


def test_factors_are_bounded() -> None:
    known, predict = shipped("CPU"), predictor("gpt-tiny", 2, gpu=False)
    found = teach(known, predict, MeasuredRun(name="a", step_seconds=2.8 * predict(known).step_seconds, **CALM), serial=True, date="x")
    assert not isinstance(found, str) and max(found.factors.values()) == 2.0


def test_kinds_of_ops() -> None:
    known = {
        "compute": ("aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::convolution_backward"),
        "memory": ("aten::add_", "aten::_fused_adamw_"), "host": ("aten::view", "Optimizer.step#AdamW.step", "cudaLaunchKernel"),
    }  # fmt: skip
    assert {kind: {kind_of(name) for name in names} for kind, names in known.items()} == {kind: {kind} for kind in known}


def test_shares_of_watched_steps_by_hand() -> None:
    from types import SimpleNamespace as Row

    import torch

    from foretell.runtime.observe.kinds import of_device, of_host

    rows = [("aten::mm", 0.5), ("aten::add", 0.2), ("aten::view", 0.1), ("Optimizer.step", 0.1)]
    assert of_host(rows, 1.0, 0.9) == pytest.approx({"compute": 0.5, "memory": 0.2, "host": 0.3})
    assert of_host(rows, 1.0, 0.5) is None, "a step that watching doubles is no longer the step"
    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    seen = [
        Row(key="gemm kernel", device_type=gpu, self_device_time_total=6e5), Row(key="add kernel", device_type=gpu, self_device_time_total=3e5),
        Row(key="Optimizer.step", device_type=gpu, self_device_time_total=9e5, is_user_annotation=True),
        Row(key="aten::mm", device_type=cpu, self_device_time_total=6e5), Row(key="aten::add", device_type=cpu, self_device_time_total=3e5),
    ]  # fmt: skip
    assert of_device(seen, 1.0) == pytest.approx({"compute": 0.6, "memory": 0.3, "host": 0.1})
    assert of_device(seen, 0.5) is None, "kernels longer than the step"


# ---------------------------------------------------------------- the user's own profile


def test_a_run_corrects_the_user_s_own_profile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from foretell.hardware.probe.machine import about
    from foretell.search.profiles.learn import predictor as of_plan

    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    here = about("cpu")
    names = ("reported_as", "cores", "threads")
    own = replace(shipped("CPU"), **{name: getattr(here, name) for name in names})
    path = profiles.save(own, profiles.own_path(own))
    travels = (ROOT / "foretell" / "hardware" / "profiles" / "CPU.json").read_bytes()
    plan = Plan(model={"model": "gpt-tiny"}, hardware="CPU", micro_batch=2, precision="fp32", predicted=PREDICTED)
    time = of_plan(plan, parse("CPU"))
    slow = time(truth(own, compute=1.3, memory=1.3, host=1.3)).step_seconds
    hardware = {"device": here.reported_as, "kind": "cpu", "count": 1, "threads": here.threads}
    measured = {"step_seconds": slow, "p10_seconds": 0.98 * slow, "p90_seconds": 1.02 * slow, "stretches": [slow] * 10}
    run = folder(tmp_path / "run", plan, hardware=hardware, **measured)
    before = abs(time(own).step_seconds / slow - 1)

    main(["compare", str(run), "--update-profile", "--json", "--device", "cpu"])
    told = json.loads(capsys.readouterr().out)["profile"]
    assert told["updated"] and told["file"] == str(path)
    found = find_profile("CPU", reported_as=here.reported_as)
    assert found is not None and "corrected" in found.notes[-1] and "run" in found.notes[-1]
    after = abs(time(found).step_seconds / slow - 1)
    assert after < 0.5 * before, (before, after)
    assert told["after_seconds"] == pytest.approx(time(found).step_seconds)
    assert (ROOT / "foretell" / "hardware" / "profiles" / "CPU.json").read_bytes() == travels

    kept = path.read_bytes()
    shutil.copytree(run, tmp_path / "wild")
    wild = {**json.loads((run / "measurement.json").read_text()), "p90_seconds": 2 * slow}
    (tmp_path / "wild" / "measurement.json").write_text(json.dumps(wild))
    main(["compare", str(tmp_path / "wild"), "--update-profile", "--device", "cpu"])
    assert "left as it is: steps differ" in capsys.readouterr().out and path.read_bytes() == kept


def test_a_shipped_profile_is_copied_and_a_foreign_one_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.search.profiles.learn import profile_of

    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    found, why = profile_of({"device": "NVIDIA H200", "kind": "cuda"}, parse("H200"))
    assert found is not None and not why and profiles.own_path(found).parent == tmp_path / "profiles"
    for hardware, cluster, word in (
        ({"device": "NVIDIA H100 80GB HBM3", "kind": "cuda"}, "H100", "no profile of NVIDIA H100"),
        ({"device": "Some CPU", "kind": "cpu"}, "CPU", "no profile of Some CPU"), ({"device": "Some CPU", "kind": "cpu"}, "H200", "the run was on"),
    ):  # fmt: skip
        found, why = profile_of(hardware, parse(cluster))
        assert found is None and word in why
