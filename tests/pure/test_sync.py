"""Replicas that step alone, on paper: what a plan says of them, what is refused, what joining them costs, when a search offers it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foretell
from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.types import Cluster
from foretell.lower.sync import OUTER, ROUND, joined, padded, sent_bytes, trained_elements
from foretell.options.sync import sync_of
from foretell.plan import file, legal
from foretell.plan.types import Mesh, Plan, Sync
from foretell.price.speeds import CARRIED, MESSAGE_SECONDS, Options
from foretell.simulate.parts import collectives
from foretell.simulate.plan import PlanCost, predict_plan
from foretell.simulate.sync import SyncCost, averaged
from foretell.trace.types import OPTIMIZER, Trace

SMALL: dict[str, Any] = {"overrides": {"layers": 2, "dim": 64, "heads": 2, "vocab_size": 256}, "seq": 32}
FAR = "2x1xCPU@50Mbit/100ms"
ROUNDS = Sync(every=50)
QUORUM = Sync(every=9, quorum=2, grace=2.5)


def plan(**changes: Any) -> Plan:
    usual = {"model": {"model": "gpt2"}, "hardware": "2xH100", "mesh": Mesh(dp_replicate=2), "sync": ROUNDS, "precision": "fp32"}
    return Plan(**{**usual, **changes})


# ---------------------------------------------------------------- what a plan says


@pytest.mark.parametrize("sync", [ROUNDS, Sync(every=2, lr=1, momentum=0, nesterov=False), Sync(every=9, format="int8", delay=8), QUORUM])
def test_a_plan_comes_back_from_its_file(sync: Sync, tmp_path: Path) -> None:
    file.write(plan(sync=sync), tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json").sync == sync
    said = json.loads((tmp_path / "plan.json").read_text())["sync"]
    assert said["every"] == sync.every and said["outer"]["lr"] == sync.lr and ("delay" in said) == (sync.delay > 0)


@pytest.mark.parametrize(
    ("said", "problem"),
    [({"every": 1}, "sync.every is 1"), ({"outer": {}}, "sync.every is missing"), ({"every": 9, "outer": {"lr": 0}}, "sync.outer.lr is 0"),
     ({"every": 9, "format": "fp8"}, "sync.format is"), ({"every": 9, "patience": 3}, "sync.patience is not known"),
     ({"every": 9, "grace": -1}, "sync.grace is -1")],
)  # fmt: skip
def test_a_file_that_says_it_wrong_is_refused(said: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        file.from_json({**file.to_json(plan()), "sync": said})


@pytest.mark.parametrize(
    ("changes", "field", "word"),
    [
        ({"mesh": Mesh(dp_shard=2)}, "sync", "dp_replicate is 1"),
        ({"mesh": Mesh(dp_replicate=2, tp=2)}, "sync", "tp is 2"),
        ({"mesh": Mesh(dp_replicate=2, cp=2)}, "sync", "cp is 2"),
        ({"sync": Sync(every=1)}, "sync.every", "above 1"),
        ({"sync": Sync(every=4, delay=4)}, "sync.delay", "ends before"),
        ({"sync": Sync(every=4, lr=0)}, "sync.outer.lr", "learning rate"),
        ({"sync": Sync(every=4, momentum=1.5)}, "sync.outer.momentum", "share"),
        ({"sync": Sync(every=4, format="fp8")}, "sync.format", "not known"),
        ({"sync": Sync(every=4, quorum=3)}, "sync.quorum", "2 replicas"),
        ({"sync": Sync(every=4, quorum=2, delay=1)}, "sync.delay", "beside sync.quorum"),
        ({"sync": Sync(every=4, quorum=2), "mesh": Mesh(dp_replicate=2, dp_shard=2)}, "sync.quorum", "dp_shard is 2"),
        ({"precision": "bf16"}, "precision", "too coarse"),
        ({"precision": "fp16-mixed"}, "precision", "scale of the loss"),
        ({"precision": "bf16-master", "states": {"rest": "host"}}, "sync", "elsewhere"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], field: str, word: str) -> None:
    found = {one.field: one for one in legal.complaints(plan(**changes))}
    assert field in found and word in found[field].problem and found[field].remedy


def test_replicas_and_shards_of_them_are_legal() -> None:
    for mesh in (Mesh(dp_replicate=2), Mesh(dp_replicate=4, dp_shard=2)):
        assert legal.complaints(plan(mesh=mesh)) == ()
    assert plan(mesh=Mesh(dp_replicate=4, dp_shard=2)).together == Mesh(dp_shard=2)
    assert plan(sync=None, mesh=Mesh(dp_replicate=4)).together == Mesh(dp_replicate=4)


def test_options_say_it_and_alone_say_nothing() -> None:
    assert sync_of({}) is None
    assert sync_of({"sync_every": 50, "outer_lr": 0.5, "sync_format": "int8", "sync_delay": 7}) == Sync(every=50, lr=0.5, format="int8", delay=7)
    assert sync_of({"sync_every": 50, "sync_quorum": 2, "sync_grace": 4.0}) == Sync(every=50, quorum=2, grace=4.0)
    with pytest.raises(UserError, match="--sync-grace is given without --sync-quorum"):
        sync_of({"sync_every": 50, "sync_grace": 4.0})
    with pytest.raises(UserError, match="--sync-delay is given beside --sync-quorum"):
        sync_of({"sync_every": 50, "sync_quorum": 2, "sync_delay": 4})
    for given in ({"sync_quorum": 2}, {"sync_every": 9, "sync_quorum": -1}):
        with pytest.raises(UserError):
            sync_of(given)
    for given in ({"outer_lr": 0.5}, {"sync_every": 1}, {"sync_every": 9, "sync_format": "fp8"}, {"sync_every": 9, "sync_delay": 9}):
        with pytest.raises(UserError):
            sync_of(given)


# ---------------------------------------------------------------- links over a wide area


def test_a_link_is_named_by_what_it_carries() -> None:
    link = parse("2x8xH100@50Mbit/100ms").inter
    assert link is not None and (link.bytes_per_second, link.latency_seconds) == (6.25e6, 0.1)
    assumed = parse("2x1xCPU@1.5gbit").inter
    assert assumed is not None and assumed.name == "1.5Gbit/30ms" and assumed.assumed("latency_seconds")
    assert parse("2x8xH100@PCIe4x16+10Mbit/5ms").inter == parse("2x8xH100@10Mbit/5ms").inter
    with pytest.raises(UserError):
        parse("2x8xH100@0Mbit")


# ---------------------------------------------------------------- costs


@pytest.fixture(scope="module")
def trace() -> Trace:
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe
    from foretell.trace.sandbox.child import request
    from foretell.trace.store.traces import traced

    source = Source(model="gpt2", micro_batch=2, **SMALL)
    return traced(request(source, Recipe(precision="fp32", optimizer="adamw-fused", clip=1.0), (), {}), cache=True, time_limit=200)[0]


@pytest.fixture(scope="module")
def cost(trace: Trace) -> Callable[..., PlanCost]:
    from foretell.hardware.lookup import find_profile

    def predicted(on: str | Cluster = FAR, mesh: Mesh = Mesh(dp_replicate=2), **sync: Any) -> PlanCost:  # noqa: B008
        asked = Plan(model={}, hardware=FAR, mesh=mesh, precision="fp32", micro_batch=2, sync=Sync(**sync) if sync else None)
        return predict_plan(trace, asked, parse(on) if isinstance(on, str) else on, Options(profile_of=find_profile))

    return predicted


def rounds(found: PlanCost) -> SyncCost:
    assert found.rounds is not None
    return found.rounds


def test_a_step_sends_nothing_and_a_round_keeps_what_it_needs(trace: Trace, cost: Callable[..., PlanCost]) -> None:
    elements = int(trace.meta["parameters"])  # type: ignore[call-overload]
    assert trained_elements(trace) == elements
    whole = padded(elements, 2)
    assert whole % 512 == 0 and 0 <= whole - elements < 512
    plain, floats, codes = cost(), cost(every=50), cost(every=50, format="int8")
    assert collectives(floats.programs[0]) == () != collectives(plain.programs[0])
    assert rounds(floats).kept_bytes == 8 * whole and rounds(codes).kept_bytes == 8 * whole + 4 * whole + 2 * whole
    assert rounds(floats).sent_bytes == sent_bytes(elements, 2, "fp32") == 4 * whole
    assert rounds(codes).sent_bytes == whole + 4 * whole // 256
    kept = [one for one in floats.programs[0].storages.values() if one.module == OUTER and one.role == OPTIMIZER]
    assert sum(one.nbytes for one in kept) == 8 * whole
    more = floats.worst.memory.allocated_bytes - cost(mesh=Mesh()).worst.memory.allocated_bytes
    assert 8 * whole <= more <= 24 * whole


def test_a_round_takes_what_the_link_takes(trace: Trace, cost: Callable[..., PlanCost]) -> None:
    """Two exchanges: each crosses the link twice, and half of a vector goes to the other replica."""
    found = rounds(cost(every=50))
    half = 4 * padded(trained_elements(trace), 2) / 2
    link = 2 * 0.1 + half / (CARRIED * 6.25e6)
    assert found.message_seconds == pytest.approx(2 * (link + MESSAGE_SECONDS), rel=0.02)
    assert found.hidden_seconds == 0 and found.update_seconds is not None and found.update_seconds < 0.05


def test_the_link_of_a_hub_carries_what_all_replicas_send(trace: Trace, cost: Callable[..., PlanCost]) -> None:
    found = rounds(cost("4x1xCPU@50Mbit/100ms", Mesh(dp_replicate=4), every=50, quorum=3))
    whole = 4 * padded(trained_elements(trace), 4)
    assert found.message_seconds == pytest.approx(2 * (2 * 0.1 + 4 * whole / (CARRIED * 6.25e6) + MESSAGE_SECONDS), rel=0.03)
    assert found.sent_bytes == 4 * padded(trained_elements(trace), 1)


def test_rounds_are_spread_over_steps_and_hidden_behind_them(cost: Callable[..., PlanCost]) -> None:
    alone, often, rare = cost(mesh=Mesh()), cost(every=20), cost(every=500)
    assert alone.time is not None and often.time is not None and rare.time is not None
    step = rounds(rare).alone_seconds
    assert step == pytest.approx(alone.time.step_seconds, rel=0.1)
    assert often.time.step_seconds == pytest.approx(step + (rounds(often).round_seconds or 0) / 20)
    assert sum(rare.time.breakdown.values()) == pytest.approx(rare.time.step_seconds)
    assert (rounds(rare).share or 0) > (rounds(often).share or 0)
    assert rare.per_second == pytest.approx(2 * (alone.per_second or 0) * (rounds(rare).share or 0), rel=0.1)
    hidden = cost(every=500, delay=499)
    assert hidden.time is not None and rounds(hidden).hidden_seconds == pytest.approx(rounds(hidden).message_seconds)
    assert hidden.time.step_seconds < rare.time.step_seconds
    spans = rare.spans()
    assert sum(spans.values()) == pytest.approx(rare.time.step_seconds) and spans["backward"] < step


def test_averaging_costs_nothing_where_nothing_is_known(cost: Callable[..., PlanCost]) -> None:
    time = cost(mesh=Mesh()).time
    assert time is not None
    nothing = SyncCost(
        every=9, alone_seconds=None, message_seconds=None, hidden_seconds=None, update_seconds=None, sent_bytes=1, kept_bytes=1
    )
    assert averaged(time, nothing) is time and nothing.share is None and nothing.to_json() == {"every": 9, "sent_bytes": 1, "kept_bytes": 1}


def test_a_round_is_a_run_of_its_own(trace: Trace) -> None:
    local = joined(trace, plan(sync=Sync(every=9, format="int8")))
    assert local.schedule[ROUND] == ((ROUND, 1),) and local.schedule["steady_step"] == trace.schedule["steady_step"]
    messages = [op for op in local.programs[ROUND].ops if op.name == "foretell.all_to_all"]
    assert len(messages) == 2 and all(op.attrs == ("axis:dp_replicate", "ranks:2") for op in messages)
    alive = set(local.resident)
    for op in local.programs[ROUND].ops:
        alive |= set(op.allocates)
        assert all(ref.storage in alive for ref in op.inputs), op.name
        alive -= set(op.frees)
    assert alive == set(local.resident), "a round leaves nothing behind"


# ---------------------------------------------------------------- screens and search


def test_fit_says_that_training_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "gpt2", "--on", "2x8xH100@1Gbit/30ms", "--sync-every", "100", "--seq", "32", "--set", "layers=2"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "changes training: replicas step alone for 100 steps, then an outer optimizer joins them; a round of 100 steps:" in said
    found = foretell.fit("gpt2", hardware="2x8xH100@1Gbit/30ms", sync_every=100, seq=32, overrides={"layers": 2})
    assert found.rounds["every"] == 100 and found.plan["mesh"] == {"dp_replicate": 2, "dp_shard": 8} and found.plan["sync"]["every"] == 100
    with pytest.raises(UserError, match="one device"):
        foretell.fit("gpt2", hardware="H100", sync_every=100, **SMALL)


def test_a_search_offers_it_where_links_are_slow_and_it_may(tmp_path: Path) -> None:
    slow = "2x1xCPU@50Mbit/100ms"
    plain = foretell.plan("gpt2", hardware=slow, global_batch=256, **SMALL)
    found = foretell.plan("gpt2", hardware=slow, global_batch=256, may=("sync",), **SMALL)
    assert plain.plan is not None and plain.plan.sync is None
    assert found.plan is not None and found.plan.sync is not None and found.choice is not None and found.choice.best is not None
    assert "changes training" in found.choice.gain and "times as many tokens a second" in found.choice.gain
    assert found.choice.runners_up[0].plan.mesh == plain.plan.mesh
    assert found.choice.best.cost is not None and (found.choice.best.cost.per_second or 0) > 1.2 * plain.plan.predicted["tokens_per_second"]
    asked = foretell.plan("gpt2", hardware=slow, global_batch=256, sync_every=7, sync_format="int8", **SMALL)
    assert asked.plan is not None and asked.plan.sync == Sync(every=7, format="int8") and asked.plan.mesh == Mesh(dp_replicate=2)
    assert foretell.load_plan(asked.save(tmp_path / "plan.json")).plan == asked.plan


@pytest.mark.slow(reason="a search that answers as most do; that one offers it elsewhere is above")
def test_a_search_does_not_offer_it_on_fast_links() -> None:
    found = foretell.plan("gpt2", hardware="H100:2", global_batch=8, may=("sync",), compile="none", **SMALL)
    assert found.plan is not None and found.plan.sync is None
