"""`foretell zoo check`: varied modules through every column, rows that fail, and rows that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell import zoo
from foretell.errors import UnknownName, UserError
from foretell.hardware import parse
from foretell.prove import zoo as checks
from foretell.prove import zoo_cpu, zoo_plan, zoo_rows
from foretell.prove.zoo_rows import FAIL, NO, OK, PASS, REASON, CheckRow
from foretell.runtime.check import verify
from foretell.runtime.parallel import shard
from foretell.runtime.process.pool import Pool
from foretell.simulate.pace import Pace, ProfileSeconds
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source
from foretell.trace.record.on_cpu import trace_as_cpu
from foretell.zoo.methods import mf

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checker() -> Iterator[checks.Checker]:
    """Without pacers: seconds are not asked for."""
    pool = Pool()
    try:
        yield checks.Checker(pool, {})
    finally:
        pool.close()


def asked(name: str, *phases: str) -> checks.CheckRequest:
    return checks.CheckRequest(entry=zoo.get(name), phases=phases)


# ---------------------------------------------------------------- whole rows


LONG = pytest.mark.slow(reason="a search and real steps; columns are tested one by one below, and `foretell zoo check --all` has every module")


@pytest.mark.parametrize(
    ("name", "phases", "planned"),
    [
        pytest.param("e2llm-tiny", (), 1, marks=LONG),  # draws random scales in forward
        pytest.param("mf-tiny", (), 1, marks=LONG),  # layers are called by a method that is not forward
        pytest.param("perforated-tiny", ("dendrite",), 1, marks=LONG),
        pytest.param("tnt-tiny", (), 1, marks=LONG),  # with a larger batch: weights hold too much of the smallest
    ],
)
def test_a_module_is_traced_predicted_planned_and_run_as_planned(
    checker: checks.Checker, name: str, phases: tuple[str, ...], planned: int
) -> None:
    row = checker.row(asked(name, *phases))
    assert row.failed == () and row.status == REASON, row.reason
    assert row.columns["time"] == "no profile of a CPU is at hand"
    assert row.uncovered == () and row.ops and row.ops > 50
    assert row.memory_error == pytest.approx(0, abs=0.05)
    assert row.plan and row.plan_ranks == planned
    assert row.plain_bytes and row.cap_bytes == row.plain_bytes // 2
    assert row.plan_measured_bytes and row.plan_measured_bytes <= row.cap_bytes
    assert row.plan_predicted_bytes == pytest.approx(row.plan_measured_bytes, rel=0.1)
    assert row.loss_difference is not None and row.loss_difference <= verify.LOSS_BOUND
    assert row.gradient_difference is not None and 0 < row.gradient_difference <= verify.GRADIENT_BOUND
    assert row.columns["plan"] == row.columns["ranks"] == OK
    assert CheckRow.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_phases_in_turn_hold_more_than_each(checker: checks.Checker) -> None:
    phases = zoo.load(zoo.get("perforated-tiny")).PHASES
    row = checker.row(asked("perforated-tiny", *phases))
    assert row.phase == "neuron+dendrite" and row.failed == ()
    assert row.memory_error == pytest.approx(0, abs=0.05)
    alone = [zoo_cpu._peak([zoo_cpu.with_phase(asked("perforated-tiny").source, phase)]) for phase in phases]
    assert row.measured_bytes and row.measured_bytes > max(alone)
    assert row.columns["plan"] == "one phase at a time" and not row.plan


@pytest.mark.slow(reason="that such phases are refused is tested in test_zoo_methods.py, and rows of other reasons here")
def test_phases_with_weights_of_their_own_are_nothing_to_train_in_turn(checker: checks.Checker) -> None:
    row = checker.row(asked("interprior-tiny", "prior", "link"))
    assert row.status == PASS and "other weights" in row.reason and row.ops is None


def test_a_model_that_raises_is_a_row_and_the_next_one_goes_on(checker: checks.Checker) -> None:
    entry = replace(zoo.get("gauss_rbf-tiny"))
    row = checker.row(checks.CheckRequest(entry=entry, phases=("nonsense",)))
    assert row.status == FAIL and row.failed == ("trace",) and "phase" in row.reason
    assert checker.pool.ranks(1).run(_alive) == [1]


def test_a_model_that_takes_its_process_down_is_a_row(checker: checks.Checker) -> None:
    with pytest.raises(checks.Failed) as failed:
        checker._call(1, "trace", _dies)
    assert failed.value.column == "trace" and "died" in failed.value.why
    assert checker.pool.ranks(1).run(_alive) == [1]


def _alive(_rank: int, world: int) -> int:
    return world


def _dies(_rank: int, _world: int) -> None:
    import os

    os._exit(3)


# ---------------------------------------------------------------- columns


def test_a_wrong_prediction_does_not_pass(checker: checks.Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = zoo_cpu.Seen(
        ops=3, uncovered=("aten.new.default",), predicted_bytes=106, measured_bytes=100, predicted_seconds=1.3,
        measured_seconds=1.0, pace=Pace(models=3),
    )  # fmt: skip
    monkeypatch.setattr(checks.Checker, "_call", lambda *_: [seen])
    failures: dict[str, str] = {}
    row = checker._seen(CheckRow(name="x", module="x"), asked("gauss_rbf-tiny"), failures, {})
    assert failures == {"trace": "no rule for aten.new.default", "memory": "+6.0% off", "time": "+30% off"}
    told = zoo_rows.judged(row, failures, {})
    assert told.status == FAIL and [told.columns[name] for name in ("trace", "memory", "time")] == [NO] * 3
    seen = replace(seen, uncovered=(), predicted_bytes=104, predicted_seconds=None)
    monkeypatch.setattr(checks.Checker, "_call", lambda *_: [seen])
    excuses: dict[str, str] = {}
    failures.clear()
    row = checker._seen(row, asked("gauss_rbf-tiny"), failures, excuses)
    assert not failures and zoo_rows.judged(row, {}, excuses).status == REASON


def test_seconds_are_held_at_the_pace_of_others() -> None:
    said = [ProfileSeconds(8e-3, 1e-3), ProfileSeconds(2e-3, 3e-3), ProfileSeconds(4e-3, 2e-3)]
    pacers = {name: (one, 3 * one.ops + 2 * one.host) for name, one in zip("abc", said, strict=True)}
    pacers["gauss_rbf-tiny"] = (ProfileSeconds(1e-3, 1e-3), 90.0)
    seen = zoo_cpu.look(0, 1, Source(model="gauss_rbf-tiny", micro_batch=2), (), pacers)
    assert seen.pace is not None and seen.pace.models == 3 and seen.measured_seconds and seen.predicted_seconds
    assert seen.pace.ops == pytest.approx(3, rel=0.1) and seen.pace.host == pytest.approx(2, rel=0.2)
    trace = trace_as_cpu(Source(model="gauss_rbf-tiny", micro_batch=2), zoo_cpu.RECIPE)
    known = zoo_cpu._machine()
    assert known is not None and seen.predicted_seconds == pytest.approx(seen.pace.seconds(zoo_cpu.said(trace, known)))


def test_ops_without_rules_are_named() -> None:
    trace = trace_as_cpu(Source(model="gauss_rbf-tiny", micro_batch=2), zoo_cpu.RECIPE)
    assert zoo_cpu.uncovered(trace) == ()
    name, program = next(iter(trace.programs.items()))
    at = next(i for i, op in enumerate(program.ops) if op.flops and op.allocates)
    known = replace(program.ops[at], name="aten.a.default")
    for broken in (replace(known, flops=None), replace(known, inputs=(), outputs=())):
        ops = (*program.ops[:at], broken, *program.ops[at + 1 :])
        changed = replace(trace, programs={**trace.programs, name: replace(program, ops=ops)})
        assert zoo_cpu.uncovered(changed) == ("aten.a.default",)


def test_a_cap_leaves_just_the_room_it_says() -> None:
    from foretell.plan.recipe import model_of
    from foretell.plan.types import Plan
    from foretell.simulate.plan import predict_plan

    source = Source(model="gauss_rbf-tiny", micro_batch=2)
    trace = trace_as_cpu(source, zoo_cpu.RECIPE)
    plan = Plan(model=model_of(source), hardware="auto", precision="fp32", micro_batch=2, clip=None)
    need = predict_plan(trace, plan, parse("CPU"), Options()).worst.memory.allocated_bytes
    for room, fits in ((need, True), (need - 64, False)):
        assert predict_plan(trace, plan, zoo_plan.capped(parse("CPU"), room, 1), Options()).fits is fits


@pytest.mark.slow(reason="a search of its own; who holds the bytes is told in test_choose.py")
def test_where_nothing_fits_the_row_says_what_holds_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_plan, "MICRO_BATCHES", (2,))
    traces = zoo_plan.HereTraces(capability=None, cache=False)
    found = zoo_plan.planned(Source(model="scaling-mlp-tiny"), zoo_cpu._cluster(), traces, Options())
    assert found.plan is None and "optimizer" in found.why and "nearest needs" in found.why


def test_traps_are_tested_or_say_why_not() -> None:
    assert checks.trap_of(zoo.get("e2llm-tiny")) == "tested"
    assert checks.trap_of(zoo.get("perforated-tiny")) == "tested"
    assert checks.trap_of(zoo.get("bev-tiny")).startswith("not handled: cameras on streams")
    assert checks.trap_of(zoo.get("gpt-tiny")) == ""


def test_what_one_micro_batch_leaves_to_the_next_is_named() -> None:
    """A model that remembers where it was wrong differs on two ranks; running means of a norm are no such thing."""
    features = {"phase": "features"}
    assert zoo_plan.carried(0, 1, Source(model="pvd_al-tiny", micro_batch=2, overrides=features)) == ["gap"]
    assert zoo_plan.carried(0, 1, Source(model="pvd-tiny", micro_batch=2, overrides=features)) == []
    assert zoo_plan.carried(0, 1, Source(model="perforated-tiny", micro_batch=2)) == []


# ---------------------------------------------------------------- which rows


def test_every_module_with_a_paper_is_checked_in_every_phase() -> None:
    papers = {entry.module for entry in zoo.ENTRIES.values() if entry.paper}
    entries = checks.every()
    assert {entry.module for entry in entries} == papers and all(entry.small for entry in entries)
    rows = checks.asked_of(entries)
    assert len({(row.entry.name, row.phase) for row in rows}) == len(rows)
    assert [row.phase for row in rows if row.entry.module == "lamarr"] == ["discriminator", "generator", "discriminator+generator"]


def test_names_of_modules_and_of_small_entries_are_known() -> None:
    assert checks.small("strip_mlp").name == "strip-mlp-tiny" and checks.small("mf").name == "mf-tiny"
    assert checks.small("gpt-tiny").name == "gpt-tiny"
    with pytest.raises(UserError, match="too large"):
        checks.small("llama3-405b")
    with pytest.raises(UnknownName):
        checks.small("gtp2")


# ---------------------------------------------------------------- kept rows


def test_rows_are_kept_at_once_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Stopping:
        def row(self, one: checks.CheckRequest) -> CheckRow:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(one.entry.name)
            return CheckRow(name=one.entry.name, module=one.entry.module, status=PASS)

    from contextlib import contextmanager

    @contextmanager
    def stand_in(_: Any) -> Iterator[Any]:
        yield Stopping().row

    monkeypatch.setattr(checks, "_checker", stand_in)
    rows = [asked("mf-tiny"), asked("ff-tiny"), asked("e2llm-tiny")]
    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        checks.check(rows, keep=path)
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == ["mf-tiny", "ff-tiny"]
    path.write_text(path.read_text() + '{"name": "e2llm-t')  # cut off
    made.clear()
    found = checks.check(rows, keep=path)
    assert made == ["e2llm-tiny"] and [row.name for row in found] == ["mf-tiny", "ff-tiny", "e2llm-tiny"]
    first, *_, cut, last = path.read_text().splitlines()
    assert json.loads(first)["device"] and json.loads(first)["torch"] == torch.__version__
    assert cut == '{"name": "e2llm-t' and json.loads(last)["name"] == "e2llm-tiny"


def test_a_module_is_as_good_as_its_worst_row() -> None:
    def row(name: str, status: str, predicted: int) -> CheckRow:
        return CheckRow(name=f"{name}-tiny", module=name, status=status, predicted_bytes=predicted, measured_bytes=100)

    rows = [row("a", PASS, 101), row("a", FAIL, 110), row("b", PASS, 98), row("c", REASON, 100), row("c", PASS, 104)]
    total = zoo_rows.summary(rows)
    assert total["modules_by_status"] == {PASS: 1, REASON: 1, FAIL: 1} and total["not_passed"] == ["a", "c"]
    assert total["memory"] == {"modules": 3, "median": pytest.approx(0.04), "worst": pytest.approx(0.10)}
    assert total["time"] is None
    assert zoo_rows.closing(rows) == "1 of 3 modules pass; 1 state a reason; 1 fail; memory median 4.0%, worst +10.0%"


# ---------------------------------------------------------------- what it found: mechanisms


def test_methods_of_a_block_that_a_model_may_call_are_known() -> None:
    assert shard.methods_of(mf.build(pixels=8, dim=8, layers=2, classes=3).blocks[0]) == ["goodness"]
    assert shard.methods_of(nn.GELU()) == []


def test_a_loss_that_is_nothing_but_rounding_is_held_to_rounding() -> None:
    assert verify.losses_apart([1e-9, 1.0], [-3e-8, 1.0]) < verify.LOSS_BOUND
    assert verify.losses_apart([1e-9], [1e-6]) > verify.LOSS_BOUND
    assert verify.losses_apart([2.0], [2.001]) == pytest.approx(5e-4)
