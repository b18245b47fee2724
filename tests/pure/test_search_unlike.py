"""The search on unlike devices and links: cuts by speed against every cut, placements that gain, none where all is alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan import legal
from foretell.plan.facts import facts_of
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Mesh, Plan
from foretell.search.estimate.depth import Depth
from foretell.search.estimate.plan import Layout, plan_of
from foretell.search.heterogeneous.polish import nearby
from foretell.search.heterogeneous.price import MixedPricer
from foretell.search.solve.find import Finder, SearchResult, find
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.fill import fill
from foretell.search.traces.needed import ModelFacts, Traces
from foretell.simulate.plan import KEEP, Options, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
MADE: dict[Any, Trace] = {}
SMALL = {"layers": 4, "dim": 512, "heads": 8}


class Here(Traces):
    """Traces made in this process: the model is the project's own."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        return {mode: self._made(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        self.facts = ModelFacts({"blocks.0.weight": ((512, 512), "float32")}, ())

    def _at_hand(self, asked: Mapping[str, Any]) -> bool:
        return True

    def _made(self, plan: Plan, mode: str) -> Trace:
        if plan.mesh.tp * plan.mesh.cp * plan.mesh.ep > 1:
            raise UserError("not traced here", "")
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        key = (recipe, plan.micro_batch, plan.model.get("seq"))
        if key not in MADE:
            MADE[key] = capture(lambda: load(source_of(plan)), recipe, capability=self.capability)
        return MADE[key]


def finder(cluster: Cluster, **wishes: Any) -> Finder:
    source = Source(model="gpt-tiny", overrides=SMALL, seq=128)
    made = Finder(source, cluster, "x", SearchConstraints(**wishes), OPTIONS, Here(capability=(9, 0)), lambda _: None, None)
    made.sheet(cluster)
    return made


def search(cluster: Cluster, *, exact: bool | None = None, **wishes: Any) -> SearchResult:
    return find(
        Source(model="gpt-tiny", overrides=SMALL, seq=128), cluster, "x", SearchConstraints(**wishes), options=OPTIONS,
        traces=Here(capability=(9, 0)), exact=exact,
    )  # fmt: skip


def exactly(made: Finder, layout: Layout) -> float:
    plan = plan_of(layout, made.sheet(made.cluster), made.named, "x")
    cost = predict_plan(made.traces.of(plan, [KEEP]), plan, made.cluster, OPTIONS)
    assert cost.time is not None
    return cost.time.step_seconds


@pytest.mark.slow(reason="every cut costed op by op; the parts of the search are tested below and in test_search_stages.py")
def test_cuts_of_two_kinds_of_devices_equal_every_cut_in_every_order() -> None:
    """Costed op by op, stage by stage; and quicker than the cuts that like devices would have."""
    cluster = parse("1xH100+1xA100")
    found = search(cluster, global_batch=32, fixed={"pp": 2}, schedule="1f1b", micro_batch=4)
    assert found.best is not None and found.best.cost is not None
    made, layout = finder(cluster), found.best.point.layout
    count = len(made.sheet(cluster).blocks)
    every = {
        (order, cuts): exactly(made, replace(layout, cuts=cuts, placement=order))
        for order in ((), (1, 0)) for cuts in combinations(range(1, count), 1)
    }  # fmt: skip
    assert found.best.point.seconds == pytest.approx(min(every.values()), rel=1e-9)
    assert max(every.values()) > 1.1 * min(every.values()), "cuts matter here"
    even = fill(replace(layout, cuts=(), modes=(), placement=()), made.pricer(cluster))
    assert even is not None and found.best.point.seconds <= every[(), even.layout.cuts] * (1 + 1e-9)
    assert not legal.complaints(found.best.plan, facts_of(found.best.plan, cluster))


@pytest.mark.slow(reason="every cut costed; two stages do the same above")
def test_three_stages_of_two_kinds_equal_every_cut() -> None:
    cluster = parse("2xH100+1xA100")
    found = search(cluster, global_batch=32, fixed={"pp": 3}, schedule="1f1b", micro_batch=4)
    assert found.best is not None and found.best.cost is not None
    made, layout = finder(cluster), found.best.point.layout
    every = [
        exactly(made, replace(layout, cuts=cuts, placement=order))
        for order in ((), (2, 0, 1)) for cuts in combinations(range(1, SMALL["layers"]), 2)
    ]  # fmt: skip
    assert found.best.point.seconds == pytest.approx(min(every), rel=1e-9)


SWAPPED = pytest.mark.slow(reason="in one stage, or of another pair of devices; two stages of one pair are here")


@functools.cache
def off(hardware: str, pp: int) -> tuple[float, list[float]]:
    """Quick cost over that op by op of one layout: seconds, and bytes of each rank of the pipeline."""
    cluster = parse(hardware)
    found = search(cluster, global_batch=64, fixed={"pp": pp, "dp_replicate": 1}, exact=False, micro_batch=4, compile=("none",))
    assert found.best is not None
    made, layout = finder(cluster), found.best.point.layout
    plan, pricer = plan_of(layout, made.sheet(cluster), made.named, "x"), made.pricer(cluster, held=Depth.SHORT)
    cost = predict_plan(made.traces.of(plan, [KEEP]), plan, cluster, OPTIONS)
    assert cost.time is not None
    shown = pricer.shown(layout) if isinstance(pricer, MixedPricer) else pricer.quick(layout).stage_memory
    held = [mine / rank.memory.device_bytes for mine, rank in zip(shown, cost.ranks, strict=True)]
    return pricer.quick(layout).seconds / cost.time.step_seconds, held


@pytest.mark.slow(reason="every plan costed op by op; those of like devices are compared in test_quick.py")
@pytest.mark.parametrize(
    ("pp", "hardware"),
    [
        pytest.param(1, "1x2xH100+1x2xA100", marks=SWAPPED), (2, "1x2xH100+1x2xA100-SXM-40GB"),
        pytest.param(1, "1x2xH100+1x2xA100-SXM-40GB", marks=SWAPPED), pytest.param(2, "1x2xH100+1x2xA100", marks=SWAPPED),
    ],
)
def test_quick_costs_of_unlike_devices_are_as_near_as_those_of_like_ones(pp: int, hardware: str) -> None:
    """With the sheet of one kind for all, seconds would be half or double; bytes are against each stage's own device."""
    alike = [off(hardware, pp)[0] for hardware in ("H100:4", "A100:4")]
    seconds, held = off(hardware, pp)
    assert min(alike) - 0.02 <= seconds <= max(alike) + 0.02
    assert all(0.85 < one < 1.15 for one in held)


def test_what_does_not_fit_is_laid_on_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes say enough; its power does not matter either."""
    from foretell.search.estimate import stage

    cluster = parse("1xH100+1xA100")
    pricer = finder(cluster).pricer(cluster)
    monkeypatch.setattr(stage, "simulate", lambda *_, **__: pytest.fail("laid on a timeline"))
    layout = Layout(mesh=Mesh(pp=2), micro_batch=1 << 16, accumulate=4, schedule="1f1b", cuts=(2,))
    assert not pricer.quick(layout).fits
    with pytest.raises(pytest.fail.Exception):
        pricer.quick(replace(layout, micro_batch=1))


def hidden_nodes(count: int) -> Cluster:
    """Two nodes whose devices are numbered in turn: near each other are 0, 2, 4 ... and 1, 3, 5 ..."""
    rates = tuple(
        tuple(0.0 if a == b else 3e11 if a % 2 == b % 2 else 5e8 for b in range(count)) for a in range(count)
    )
    return replace(parse(f"2x{count // 2}xH100"), matrix=rates)


def test_a_measured_matrix_places_ranks_and_the_plan_stays_legal() -> None:
    cluster = hidden_nodes(8)
    found = search(cluster, global_batch=64, fixed={"dp_replicate": 2, "dp_shard": 4})
    assert found.best is not None and found.best.placed is not None
    plan, placed = found.best.plan, found.best.placed
    halves = {frozenset(plan.placement[:4]), frozenset(plan.placement[4:])}
    assert halves == {frozenset((0, 2, 4, 6)), frozenset((1, 3, 5, 7))}
    assert not legal.complaints(plan, facts_of(plan, cluster))
    made = finder(cluster)
    modes = [KEEP]
    then, before = (
        predict_plan(made.traces.of(one, modes), one, cluster, OPTIONS) for one in (plan, plan.with_(placement=()))
    )  # fmt: skip
    assert then.time is not None and before.time is not None
    assert then.time.step_seconds == pytest.approx(placed.seconds) and before.time.step_seconds == pytest.approx(placed.seconds_before)
    assert placed.gain > 0.05 and any("placed on devices" in note and f"{placed.gain:.1%}" in note for note in plan.notes)


def test_like_nodes_are_never_placed() -> None:
    found = search(parse("2x4xH100"), global_batch=64, fixed={"dp_replicate": 2, "dp_shard": 4})
    assert found.best is not None and found.best.placed is None and found.best.plan.placement == ()


@pytest.mark.slow(reason="another search of the same devices")
def test_an_order_that_gains_nothing_is_not_taken() -> None:
    """Rates that are all the same: another order is as good, and the plan says none."""
    flat = tuple(tuple(0.0 if a == b else 1e11 for b in range(4)) for a in range(4))
    found = search(replace(parse("2x2xH100"), matrix=flat), global_batch=32, micro_batch=4)
    assert found.best is not None and found.best.plan.placement == ()


def test_cuts_nearby_move_one_cut_by_one_block_each_way() -> None:
    start = Layout(mesh=Mesh(pp=3), micro_batch=1, cuts=(1, 4))
    found = [one.cuts for one in nearby(start, 6, (3.0, 1.0, 2.0))]
    assert sorted(found) == [(1, 3), (1, 5), (2, 4)] and found[0] in ((1, 5), (2, 4), (1, 3))
