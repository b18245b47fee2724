"""The useful share of a run that fails: the formula against failures that are drawn, its inputs from a run folder, where it is told."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.checkpoint.interval import SlowedSteps
from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.report import goodput as told
from foretell.simulate.goodput import (
    FailureCosts,
    KnownSeconds,
    assumed_costs,
    best_interval,
    goodput,
    measured_costs,
    rejoining,
)

SMALL = ["--set", "layers=2", "--set", "dim=64", "--set", "heads=2", "--set", "vocab_size=256", "--seq", "32"]


def costs(step: float = 0.05, checkpoint: float = 0.3, written: float = 0.0, restart: float = 0.0) -> FailureCosts:
    each = {"step": step, "checkpoint": checkpoint, "written": written, "restart": restart}
    return FailureCosts(**{name: KnownSeconds(seconds=seconds, how="measured") for name, seconds in each.items()})


# ---------------------------------------------------------------- the formula


def drawn(found: FailureCosts, mtbf: float, interval: float, wanted: int, rng: random.Random) -> float:
    """The useful share of a run of so many intervals that is played out; a checkpoint counts once it is written."""
    now, saved, next_failure = 0.0, 0, rng.expovariate(1 / mtbf)
    stall, written, restart = found.checkpoint.seconds, found.written.seconds, found.restart.seconds
    began, done = 0.0, 0  # since when ranks train, and intervals that are saved then
    while saved < wanted:
        ends = began + (saved - done + 1) * (interval + stall) + written
        if ends <= next_failure:
            saved, now = saved + 1, ends - written
            continue
        while True:  # a restart may fail too
            again = next_failure + restart
            next_failure += rng.expovariate(1 / mtbf)
            if next_failure >= again:
                break
        began = now = again
        done = saved
    return wanted * interval / now


@pytest.mark.parametrize(
    ("mtbf", "interval", "more"),
    [(60.0, 5.8, {}), (60.0, 5.8, {"restart": 2.0, "written": 0.5}), (60.0, 20.0, {"restart": 5.0}),
     (3600.0, 200.0, {"checkpoint": 10.0, "restart": 90.0})],
)  # fmt: skip
def test_the_share_is_that_of_failures_that_are_drawn(mtbf: float, interval: float, more: dict[str, float]) -> None:
    asked = costs(**more)
    found = goodput(asked, mtbf, interval)
    assert found.share == pytest.approx(drawn(asked, mtbf, found.interval_seconds, 60_000, random.Random(0)), abs=0.006)
    assert found.share + found.checkpoints + found.again + found.restarts == pytest.approx(1) and min(found.checkpoints, found.again) >= 0
    assert found.share <= found.limit


def test_no_interval_is_better_than_the_one_it_takes() -> None:
    asked = costs(step=0.01, restart=2.0)
    best = goodput(asked, 60.0)
    assert best.interval_steps == round(best_interval(0.3, 60.0) / 0.01)
    assert all(goodput(asked, 60.0, best.interval_seconds * factor).share <= best.share + 1e-4 for factor in (0.3, 0.7, 0.9, 1.1, 1.5, 3.0))


def test_extremes_are_shares_too() -> None:
    assert goodput(costs(checkpoint=0.0), 1e9).share == pytest.approx(1, abs=1e-6)
    for asked in (costs(restart=1e6), costs(step=1e6), costs(checkpoint=1e6), costs(written=1e4), costs(0, 0)):
        found = goodput(asked, 1.0)
        shares = (found.share, found.checkpoints, found.again, found.restarts)
        assert all(0 <= one <= 1 and math.isfinite(one) for one in shares) and sum(shares) == pytest.approx(1)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="above zero"):
            goodput(costs(), wrong)


def test_a_speed_that_is_not_known_is_no_number_of_steps() -> None:
    found = goodput(assumed_costs(10**9, parse("H100"), None, 1), 3600.0)
    assert found.interval_steps is None and 0.9 < found.share < 1
    assert "steps" not in " ".join(told.pieces(found.to_json()))


def test_what_is_assumed_says_so_and_what_is_measured_takes_its_place() -> None:
    assumed = assumed_costs(8 * 10**9, parse("8xH100"), 0.5, 8)
    assert assumed.checkpoint.how == assumed.written.how == assumed.restart.how == "assumed"
    assert assumed.written.seconds == pytest.approx(64.0) and assumed.restart.seconds == pytest.approx(79.0), "of a node: eight ranks at 1 GB/s"
    found = measured_costs({"checkpoint": (0.2, 7)}, assumed)
    assert found.checkpoint == KnownSeconds(seconds=0.2, how="measured", why="median of 7") and found.restart == assumed.restart


# ---------------------------------------------------------------- a run folder


def run_folder(at: Path, *, every: int = 10, save_s: float = 0.25, slower: float = 2.0, restarts: tuple[float, ...] = (), **settings: Any) -> Path:
    at.mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 1.0}]
    beside = 0.0
    for step in range(1, 101):
        seconds = 0.1 * (slower if beside > 0 else 1.0)
        beside -= seconds
        rows.append({"event": "step", "step": step, "seconds": seconds, "loss": 0.5})
        if step % every == 0:
            rows.append({"event": "save", "step": step, "seconds": save_s, "stall_seconds": 0.01, "bytes": 1000})
            beside = save_s
    (at / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (at / "settings.json").write_text(json.dumps({"steps": 100, **settings}))
    (at / "faults.jsonl").write_text("".join(json.dumps({"event": "restarted", "seconds": seconds}) + "\n" for seconds in restarts))
    return at


def test_a_run_tells_what_its_checkpoints_and_restarts_cost(tmp_path: Path) -> None:
    run = run_folder(tmp_path, restarts=(2.0, 4.0, 3.0), mtbf=3600.0)
    found = told.figures(run)
    assert found["step"] == (pytest.approx(0.1), 79) and found["written"] == (0.25, 10) and found["restart"] == (3.0, 3)
    assert found["checkpoint"][0] == pytest.approx(0.2 * 9 / 9), "two steps beside each save take twice as long"
    answer = told.of_run(run)
    assert answer is not None and answer.mtbf_seconds == 3600 and answer.costs.restart.how == "measured"
    assert "restart 3.00 s measured (median of 3)" in told.told_of(run)


def test_a_run_that_says_nothing_of_failures_has_no_goodput(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    assert told.of_run(run) is None and told.told_of(run) == ""
    assert told.of_run(run, 60.0) is not None
    (run / "settings.json").write_text("[")
    assert told.told_of(run) == ""
    (run / "settings.json").write_text(json.dumps({"steps": 100, "mtbf": 60.0}))
    assert "restart 2.50 s assumed" in told.told_of(run)
    odd = '{"event": "save", "step": "x", "bytes": 1, "seconds": 1, "stall_seconds": 1}\n'
    for spoiled in ("", "[" * 9999, odd, '{"event": "step", "seconds": 1e400}\n'):
        (run / "log.jsonl").write_text(spoiled)
        assert told.told_of(run) == ""


# ---------------------------------------------------------------- replicas that come and go


def drawn_rounds(turn: float, restart: float, mtbf: float, replicas: int, quorum: int, wanted: int, rng: random.Random) -> float:
    """The share of all replicas' time in rounds that count, played out round by round: each replica fails at random while it trains or
    starts, and is in the first round that begins when it is there; a round without a quorum waits for one."""
    back = [0.0] * replicas  # when each can be in a round that begins
    now, counted = 0.0, 0
    for _ in range(wanted):
        now = max(now, sorted(back)[quorum - 1])
        while True:
            members = [one for one in range(replicas) if back[one] <= now]
            failed = {one: now + at for one in members if (at := rng.expovariate(1 / (replicas * mtbf))) < turn}
            for one, at in failed.items():
                while (again := rng.expovariate(1 / (replicas * mtbf))) < restart:
                    at += again
                back[one] = at + restart
            if len(members) - len(failed) >= quorum:
                break
            assert quorum == replicas, "the others keep what they gave, which is not played here"
            now = max(back)
        counted += len(members) - len(failed)
        now += turn
    return counted * turn / (now * replicas)


@pytest.mark.parametrize(
    ("mtbf", "every", "restart", "replicas", "quorum"),
    [(60.0, 100, 2.5, 8, 4), (60.0, 100, 12.0, 8, 4), (20.0, 400, 3.0, 6, 1), (600.0, 50, 0.0, 3, 2), (60.0, 100, 2.5, 4, 4)],
)
def test_a_failure_costs_one_replica_its_round(mtbf: float, every: int, restart: float, replicas: int, quorum: int) -> None:
    asked = costs(restart=restart)
    found = rejoining(asked, mtbf, replicas=replicas, quorum=quorum, every=every)
    assert found.share == pytest.approx(drawn_rounds(every * 0.05, restart, mtbf, replicas, quorum, 20_000, random.Random(1)), abs=0.006)
    assert found.share + found.again + found.restarts == pytest.approx(1) and min(found.again, found.restarts) >= 0
    assert found.share <= found.limit
    if quorum < replicas:
        everybody = rejoining(asked, mtbf, replicas=replicas, quorum=replicas, every=every)
        assert found.share > everybody.share, "the others do not wait"


def test_fit_tells_the_share_of_replicas_that_come_and_go(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_FASTER_SECONDS", "0")
    words = ["fit", "gpt2", "--on", "4x1xH100@1Gbit/30ms", *SMALL, "--sync-every", "50", "--sync-quorum", "3", "--mtbf", "4h"]
    assert main(words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "useful at a failure of a replica every 4 h" in text and "restart of a replica" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert found["replicas"] == 4 and found["interval_steps"] == 50 and 0.99 < found["share"] < 1


# ---------------------------------------------------------------- where it is told


def test_fit_tells_it_and_says_how_its_inputs_are_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_FASTER_SECONDS", "0")
    assert main(["fit", "gpt2", "--on", "H100", *SMALL, "--mtbf", "4h"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("goodput")]
    assert "% useful at a failure every 4 h" in line
    assert main(["fit", "gpt2", "--on", "H100", *SMALL, "--mtbf", "4h", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert 0.9 < found["share"] < found["limit"] <= 1
    assert {found["costs"][name]["how"] for name in ("checkpoint", "written", "restart")} == {"assumed"}
    assert found["costs"]["step"]["how"] == "predicted"
    assert main(["fit", "gpt2", "--on", "H100", *SMALL, "--mtbf", "soon"]) == 2 and "--mtbf 'soon'" in capsys.readouterr().err
    assert foretell.fit("gpt2", hardware="H100", overrides={"layers": 2}, seq=32).goodput == {}


def test_plan_tells_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "gpt2", "--on", "2xH100", "--global-batch", "4", *SMALL, "--out", str(tmp_path / "plan.json")]
    assert main([*words, "--mtbf", "4h"]) == 0
    assert "Goodput: " in (text := capsys.readouterr().out) and "assumed" in text.partition("Goodput")[2]
    assert main([*words, "--mtbf", "4h", "--json"]) == 0
    assert 0.9 < json.loads(capsys.readouterr().out)["goodput"]["share"] < 1
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["goodput"] is None


def test_a_save_costs_what_steps_beside_it_take_longer() -> None:
    slowed = SlowedSteps()
    for seconds, saving in [(0.1, False)] * 5 + [(0.15, True), (0.15, True)]:
        slowed.step(seconds, saving=saving)
        assert slowed.seconds == 0.0, "it is not done"
    slowed.step(0.1, saving=False)
    assert slowed.seconds == pytest.approx(0.1)
    for seconds, saving in [(0.1, True), (0.1, False)] * 2:
        slowed.step(seconds, saving=saving)
    assert slowed.seconds == 0.0, "two of three saves beside which steps are no slower cost nothing"
    early = SlowedSteps()
    for seconds, saving in [(0.1, False), (9.0, True), (0.1, False)]:
        early.step(seconds, saving=saving)
    assert early.seconds == 0.0, "two steps say nothing of a pace"
