"""`foretell tune serve`: resumed from its table, what it says and writes, and a whole run on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.api.serving import tune as tuning
from foretell.api.serving.tune import TuneAsked, loss, tune
from foretell.cli import main
from foretell.errors import FileFormatError
from foretell.plan import file
from foretell.plan.types import ServeLayout
from foretell.price.serving.measured_steps import NAMES, MeasuredSteps
from foretell.search.serving.settings import ServeFigures, key_of
from foretell.serve.tune.table import MeasuredSettings, TuneTable
from foretell.serve.tune.trial import ServedWhat
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.records import Limit, limit_of

SMALL = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 300, "context": 256}
LOAD = "users=8, in=20..60, out=8..32"
LAW = {"law": {"factors": dict(zip(NAMES, (0.004, 1e-5, 1e-4, 1e-7, 0.0, 1e-5), strict=True)), "off": 0.1, "steps": 500}, "token_bytes": 512}


def asked(path: Path, slo: str = "", **more: Any) -> TuneAsked:
    what = ServedWhat(model="gpt2", overrides=SMALL, device="cpu")
    return TuneAsked(what=what, load=load_of(LOAD), load_text=LOAD, limit=limit_of(slo), slo=slo, table=path, seconds=2.0, **more)


def figures(rate: float, inside: float = 1.0) -> ServeFigures:
    return ServeFigures(tokens_per_second=rate, inside=inside, ttft_p50=0.01, ttft_p95=0.02, tpot_p50=0.004, tpot_p95=0.005, answer_seconds=0.1)


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers may not be started: all must come from the table."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a server was started")

    monkeypatch.setattr(tuning, "measured", refuse)
    monkeypatch.setattr(tuning, "calibrated", refuse)


def filled(one: TuneAsked, rates: dict[int, float], inside: float = 1.0) -> None:
    """A table in which every setting that may be asked for is measured; the rate follows from the running limit."""
    table = TuneTable(one.table, tuning.identity(one))
    table.add_law(LAW)
    here = tuning.this_machine(one, table, lambda _: None)
    for point in tuning.search(here.question):
        for layout in (point.layout, *tuning.neighbours(here.question, point.layout)):
            if table.known(layout) is None:
                table.add(MeasuredSettings(settings=key_of(layout), figures=figures(rates.get(layout.running, 1.0), inside)))
    table.add(MeasuredSettings(settings=key_of(replace(ServeLayout(), graphs=True)), figures=figures(55.0, inside)))


def test_what_was_measured_is_not_measured_again(tmp_path: Path, no_servers: None) -> None:
    one = asked(tmp_path / "table.jsonl")
    filled(one, {8: 100.0, 4: 70.0, 16: 99.0})
    found = tune(one)
    best = found.best
    assert best is not None and best.measured is not None and best.layout.running in (8, 16)
    assert found.resumed > 10 and found.law is not None and found.law.steps == 500 and not found.interrupted
    assert found.usual is not None and loss(best, found.usual) == pytest.approx(1 - 55 / best.measured.good)
    plan = found.plan
    assert plan is not None and plan.serve is not None and plan.serve.running == best.layout.running and plan.serve.load == LOAD
    assert MeasuredSteps.from_json(plan.predicted["serving"]["steps"]) == found.law
    file.write(plan, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json").serve == plan.serve
    assert not TuneTable(one.table, tuning.identity(replace(one, seconds=2.5))).rows, "rows of another question do not count"


@pytest.mark.slow(reason="a trace and a search for a GPU; tuning without it is tried above, the search in test_settings")
def test_settings_of_another_device_are_told_beside(
    tmp_path: Path, no_servers: None, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What is best on an H100 is not in the table: it alone is measured."""
    one = asked(tmp_path / "table.jsonl", carried_from="H100", fixed={"pages": 70})
    table = TuneTable(one.table, tuning.identity(one))
    table.add_law(LAW)

    def measured(_: Any, layout: ServeLayout, *more: Any) -> MeasuredSettings:
        return MeasuredSettings(settings=key_of(layout), figures=figures(80.0 + layout.running))

    monkeypatch.setattr(tuning, "measured", measured)
    found = tune(one)
    assert found.carried is not None and found.carried_from == "H100" and found.carried.layout.pages == 70
    assert loss(found.best, found.carried) is not None and "carried_loss" in found.to_json()


def test_limits_that_nothing_keeps_write_no_plan(tmp_path: Path, no_servers: None) -> None:
    one = asked(tmp_path / "table.jsonl", slo="ttft=1ms")
    filled(one, {8: 100.0}, inside=0.5)
    found = tune(one)
    assert found.plan is None and not found.keeps and found.best is not None


def test_a_table_that_was_cut_off_is_read_and_one_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    table = TuneTable(path, {"a": 1})
    table.add(MeasuredSettings(settings={"running": 2}, figures=figures(3.0)))
    table.add(MeasuredSettings(settings={"running": 4}, figures=None, failed="out of memory"))
    path.write_text(path.read_text() + '{"question": "')
    again = TuneTable(path, {"a": 1})
    assert again.resumed == 2 and [one.failed for one in again.rows.values()] == ["", "out of memory"]
    path.write_text("[1]\n" + path.read_text())
    with pytest.raises(FileFormatError, match="line 1"):
        TuneTable(path, {"a": 1})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gpt2"], "none is given"), (["gpt2", "--load", "rate=x"], "needs one of rate, users, all"),
        (["gpt2", "--load", LOAD, "--slo", "fast"], "is no limit"),
        (["gpt2", "--load", LOAD, "--measure", "0"], "--measure 0"), (["gpt2", "--load", LOAD, "--seconds", "0"], "--seconds 0"),
        (["gpt2", "--load", LOAD, "--out", "/no/such/plan.json"], "/no/such"), (["gpt2", "--load", LOAD, "--init-from", "/no/such"], "/no/such"),
        (["no-such-model", "--load", LOAD, "--device", "cpu"], "no-such-model"), (["gpt2", "--load", LOAD, "--device", "tpu"], "--device tpu"),
        (["gpt2", "--load", LOAD, "--device", "cuda"], "no CUDA device"), (["/no/such.json"], "/no/such.json"),
        (["gpt2", "--load", LOAD, "--device", "cpu", "--carried-from", "H999"], "H999"),
    ],
)  # fmt: skip
def test_bad_words_are_one_line(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["tune", "serve", *words]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not list(tmp_path.iterdir()), said


@pytest.mark.slow(reason="four servers are started one after the other; the rest of the command is tried above from a table")
def test_a_whole_run_measures_and_writes_a_plan_that_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    words = ["tune", "serve", "gpt2", *sizes, "--device", "cpu", "--load", LOAD, "--seconds", "1", "--measure", "3", "--json"]
    words += ["--out", str(tmp_path / "p.json")]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tune"]["points"]) == 3 and found["tune"]["best"]["measured"]["tokens_per_second"] > 10
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["tune"]["resumed"] == 3, "nothing is measured twice"
    assert file.read(tmp_path / "p.json").serve is not None and Limit() == limit_of("")
