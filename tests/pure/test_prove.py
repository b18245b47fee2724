"""Sealed forecasts: what is drawn, that a seal cannot be bent, and that the report counts what it says it counts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import zoo
from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.probe.cases import steps
from foretell.prove import forecast as forecasts
from foretell.prove import run, seal, tell
from foretell.prove.dice import Dice
from foretell.prove.draw import FAMILIES, draw
from foretell.prove.forecast import PACERS, _Picked
from foretell.prove.types import Config, Forecast, Sealed
from foretell.simulate.memory.replay import peak_live
from foretell.trace.load.model import check, load
from foretell.trace.record.on_cpu import measure_on_cpu

LARGE = 150 << 30


def drawn(count: int, kind: str, seed: str = "test") -> list[Config]:
    return [draw(seed, index, kind, LARGE) for index in range(count)]


# --- drawing ---------------------------------------------------------------------------------------------------------


def test_numbers_follow_from_the_seed_by_a_rule_anyone_can_repeat() -> None:
    dice = Dice("public")
    for turn in range(3):
        first = hashlib.sha256(f"public/{turn}".encode()).hexdigest()[:16]
        assert dice.share() == pytest.approx(int(first, 16) / 2**64, abs=2**-50)


def test_whole_numbers_reach_both_ends_and_weights_are_kept() -> None:
    dice = Dice("ends")
    assert {dice.whole(2, 4) for _ in range(200)} == {2, 3, 4}
    counts = [dice.weighted({"often": 3.0, "seldom": 1.0}) for _ in range(4000)]
    assert counts.count("often") / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_seed_draws_the_same_again_and_another_seed_others() -> None:
    assert drawn(30, "cuda") == drawn(30, "cuda")
    assert drawn(30, "cuda") != drawn(30, "cuda", "other")


def _settings(model: str, overrides: Any) -> tuple[str, tuple[Any, ...]]:
    """What makes two models of a family alike, whatever their words, classes and pictures."""
    entry = zoo.get(model)
    mine = {**entry.config, **dict(overrides or {})}
    skipped = ("vocab_size", "context", "dropout", "classes", "image", "tied")
    return entry.module, tuple(sorted((name, value) for name, value in mine.items() if name not in skipped))


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_draw_is_a_model_that_profiles_are_fitted_on(kind: str) -> None:
    fitted = [*steps.configs(kind), *({"model": model} for model in PACERS)]
    if kind == "cuda":
        fitted += [*steps._BUSY, *steps._MIDDLE]  # on a small GPU some are left out
    known = {_settings(config["model"], config.get("overrides")) for config in fitted}
    mine = [_settings(config.model, config.overrides) for config in drawn(1500, kind)]
    assert not known & set(mine)
    assert {module for module, _ in mine} == set(FAMILIES)


@pytest.mark.parametrize("kind", ["cuda", pytest.param("cpu", marks=pytest.mark.slow(reason="fewer and smaller models, drawn alike"))])
def test_what_is_drawn_can_be_built(kind: str) -> None:
    for config in drawn(30, kind, f"built on {kind}"):
        check(config.source())
        assert config.recipe().accumulate >= 1
        with torch.device("meta"):
            load(replace(config.source(), micro_batch=1))


def test_a_small_device_gets_small_steps() -> None:
    small = [draw("s", index, "cuda", 8 << 30).micro_batch for index in range(60)]
    large = [draw("s", index, "cuda", LARGE).micro_batch for index in range(60)]
    assert all(a <= b for a, b in zip(small, large, strict=True))
    assert sum(small) < 0.5 * sum(large)


# --- choosing rows ---------------------------------------------------------------------------------------------------


def forecast(index: int = 0, **changes: Any) -> Forecast:
    config = Config(index=index, model="gpt2", overrides={"layers": 3}, micro_batch=1, near=0.9)
    usual: dict[str, Any] = {
        "config": config, "bytes": {"allocated": 1000, "reserved": 2000, "device": 3000}, "seconds": 0.1, "verdict": "fits",
        "bands": {"allocated": (990, 1010), "reserved": (1940, 2060), "device": (2800, 3200), "seconds": (0.09, 0.12)},
        "limit_bytes": 1 << 31, "limit_verdict": "fits",
    }  # fmt: skip
    return Forecast(**{**usual, **changes})


def test_half_of_the_rows_are_near_a_limit_and_few_are_compiled() -> None:
    picked = _Picked(20, "cuda")
    for index in range(200):
        row = forecast(index)
        if index % 3:
            way = "model" if index % 5 == 1 else "none"
            row = replace(row, config=replace(row.config, near=None, compile=way), limit_bytes=None, limit_verdict="")
        picked.take(row)
        if picked.full:
            break
    rows = picked.rows()
    assert len(rows) == 20
    assert sum(row.limit_bytes is not None for row in rows) == 10
    assert sum(row.config.compile != "none" for row in rows) == 2
    assert [row.config.index for row in rows] == sorted(row.config.index for row in rows)


# --- the seal --------------------------------------------------------------------------------------------------------


def sealed(*rows: Forecast, **changes: Any) -> Sealed:
    usual: dict[str, Any] = {
        "seed": "s", "count": len(rows), "device": "H200-SXM-141GB", "backend": "cuda", "memory_bytes": LARGE,
        "rules": {"most_seconds": 0.5}, "rows": rows, "passed_over": ((7, "too long"),), "made": "2026-11-15T00:00:00Z",
    }  # fmt: skip
    return Sealed(**{**usual, **changes})


def test_a_sealed_file_reads_back_the_same(tmp_path: Path) -> None:
    whole = sealed(forecast(), forecast(1, error="could not", bytes={}, bands={}, seconds=None))
    found = seal.write(whole, tmp_path / "a.json")
    assert seal.read(tmp_path / "a.json") == (whole, found)
    content = json.loads((tmp_path / "a.json").read_text())
    assert content.pop("sha256") == found
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(plain.encode()).hexdigest() == found


@pytest.mark.parametrize(
    ("was", "becomes"),
    [('"seconds": 0.1', '"seconds": 0.11'), ('"limit_verdict": "fits"', '"limit_verdict": "no"'), ('"seed": "s"', '"seed": "t"'),
     ("[0.09, 0.12]", "[0.09, 0.2]"), ('[7, "too long"]', '[8, "too long"]')],
)  # fmt: skip
def test_a_touched_file_is_refused(tmp_path: Path, was: str, becomes: str) -> None:
    path = tmp_path / "a.json"
    seal.write(sealed(forecast()), path)
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, becomes))
    with pytest.raises(UserError, match=r"seal of .* is broken"):
        seal.read(path)


def test_a_sealed_file_is_not_replaced_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    seal.write(sealed(forecast()), path)
    with pytest.raises(UserError, match="is there already"):
        seal.write(sealed(forecast()), path)
    (tmp_path / "b.json").write_text("[1, 2]")
    for name in ("b.json", "c.json"):
        with pytest.raises(UserError):
            seal.read(tmp_path / name)


def test_another_device_is_refused() -> None:
    here = {"device": "A100-SXM-80GB", "backend": "cuda", "reported_as": "NVIDIA A100"}
    with pytest.raises(UserError, match="the forecast is for H200-SXM-141GB and this is A100"):
        run.check_device(sealed(forecast()), here)
    run.check_device(sealed(forecast()), {**here, "device": "H200-SXM-141GB"})


def test_rows_of_another_seal_and_torn_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.rows.jsonl"
    seen = {"measured": SEEN, "limited": {"ran": True}}
    rows = [{"seal": seal, "position": number, **seen} for number, seal in enumerate(("mine", "other", "mine"))]
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"seal": "mine", "posi')
    assert sorted(run.read_rows(path, "mine")) == [0, 2]


# --- the report ------------------------------------------------------------------------------------------------------

SEEN = {"allocated": 1000, "reserved": 2000, "device": 3000, "seconds": 0.1}


@pytest.mark.parametrize(
    ("row", "found", "kind"),
    [
        (forecast(), {"measured": SEEN, "limited": {"ran": True}}, tell.HELD),
        (forecast(), {"measured": SEEN, "limited": {"ran": False, "why": "CUDA out of memory"}}, tell.WRONG_FIT),
        (forecast(limit_verdict="tight"), {"measured": {"error": "x"}, "limited": {"ran": False}}, tell.WRONG_FIT),
        (forecast(limit_verdict="no"), {"measured": SEEN, "limited": {"ran": False}}, tell.HELD),
        (forecast(limit_verdict="no"), {"measured": SEEN, "limited": {"ran": True}}, tell.CAREFUL),
        (forecast(), {"measured": {**SEEN, "seconds": 0.121}, "limited": {"ran": True}}, tell.MISS),
        (forecast(), {"measured": {**SEEN, "allocated": 989}, "limited": {"ran": True}}, tell.MISS),
        (forecast(), {"measured": {"error": "the process ended with -9"}}, tell.FAILED),
        (forecast(error="cannot be traced"), None, tell.FAILED),
    ],
)
def test_what_a_row_is(row: Forecast, found: dict[str, Any] | None, kind: str) -> None:
    judged = tell.judge(sealed(row), 0, found)
    assert judged is not None
    assert judged.kind == kind


def test_what_is_not_measured_is_not_judged() -> None:
    assert tell.judge(sealed(forecast()), 0, None) is None


def test_wrong_fits_come_first_and_figures_are_right() -> None:
    rows = [forecast(number) for number in range(5)]
    measured = {
        0: {"measured": SEEN, "limited": {"ran": True}},
        1: {"measured": {**SEEN, "seconds": 0.2}, "limited": {"ran": True}},
        2: {"measured": SEEN, "limited": {"ran": False}},
        3: {"measured": {**SEEN, "seconds": 0.125}, "limited": {"ran": True}},
    }
    whole = sealed(*rows)
    found = tell.judged(whole, measured)
    assert [one.position for one in found] == [2, 1, 3, 0]
    total = tell.summary(whole, found)
    assert (total["rows"], total["measured"]) == (5, 4)
    assert total["quantities"]["seconds"]["held"] == 2
    # |predicted / measured - 1| is 0, 50 %, 0, 20 %
    assert total["quantities"]["seconds"]["median_percent"] == pytest.approx(10)
    assert total["quantities"]["seconds"]["worst_percent"] == pytest.approx(-50)
    assert total["limits"] == {"rows": 4, "said_to_fit": 4, "wrong_fits": 1, "refused": 0, "refused_and_ran": 0}
    told = "\n".join(tell.lines(whole, "ab", found))
    assert told.index("ran out of memory: 1") < told.index("outside a band: 2") < told.index("within all bands: 1")
    assert "4 of 5 measured so far" in told


def test_seconds_on_a_cpu_are_held_at_the_pace_of_other_models() -> None:
    row = forecast(bytes={"allocated": 1000}, limit_bytes=None, limit_verdict="")
    whole = sealed(row, backend="cpu", pacers={"a": 0.01, "b": 0.02})
    slow = {"measured": {"allocated": 1000, "seconds": 0.3, "pacers": {"a": 0.03, "b": 0.06}}}
    judged = tell.judge(whole, 0, slow)
    assert judged is not None
    assert (judged.kind, judged.pace) == (tell.HELD, pytest.approx(3))
    assert judged.errors["seconds"] == pytest.approx(0)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seal", "a.json", "--run", "b.json"], "exclude each other"),
        (["--run", "nothing.json"], "there is no file"),
        (["--run", "nothing.json", "--seed", "x"], "leave --seed away"),
        (["-n", "0"], "no number of configurations"),
        (["--seed", " "], "the seed is empty"),
        (["--seconds", "0"], "is no time"),
        (["--on", "H200"], "without --seal"),
        (["--on", "8xH100", "--seal", "a.json"], "rows are run on one"),
        (["--on", "nothing", "--seal", "a.json"], "unknown device 'nothing'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["prove", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("error: ") == 1
    assert "Traceback" not in told


@pytest.mark.slow(reason="a sealed forecast with real runs")
def test_a_forecast_on_this_cpu_is_sealed_run_and_told(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device of this machine is a GPU")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "here.json"
    assert main(["prove", "--seed", "real", "-n", "2", "--seal", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["prove"]
    assert main(["prove", "--run", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["prove"]
    assert found["sha256"] == said["sha256"]
    assert found["summary"]["measured"] == 2
    for row in found["rows"]:  # how long steps take depends on who else is here; what they allocate does not
        assert abs(row["errors"]["allocated"]) < 0.02
        assert row["measured"]["seconds"] > 0
        config = Config.from_json(row["forecast"]["config"])
        assert config == draw("real", config.index, "cpu", said["memory_bytes"])
    before = run.rows_path(path).read_text()
    assert main(["prove", "--run", str(path)]) == 0  # nothing is measured twice
    assert "2 of 2 within the band" in capsys.readouterr().out
    assert run.rows_path(path).read_text() == before


@pytest.mark.slow(reason="a step traced twice; losses one by one are compared in test_zoo_methods.py")
def test_losses_that_run_backward_one_by_one_are_forecast_so() -> None:
    """As `measure` runs them: a layer's activations are gone before the next layer's loss."""
    config = Config(index=0, model="ff-tiny", overrides={}, micro_batch=8, precision="fp32")
    asked = forecasts.ForecastRequest(seed="", count=1, cluster=parse("CPU"))
    (trace,) = forecasts.traces_of([config], asked, lambda _: None)
    assert not isinstance(trace, Forecast)
    measured = measure_on_cpu(config.source(), config.recipe())[0]
    assert peak_live(trace, tuple(trace.schedule)) == pytest.approx(measured, rel=0.05)
