"""The space of layouts: what is generated is legal, what is found is the best of everything, limits are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan import legal
from foretell.plan.blocks import compress
from foretell.plan.facts import Facts, with_hardware
from foretell.plan.types import Pipeline, Plan, Residency
from foretell.search.estimate.plan import Layout
from foretell.search.solve.front import Point, best_of, point_of, score
from foretell.search.space import layouts as space
from foretell.search.space.constraints import SearchConstraints, check
from foretell.search.space.explore import Explorer
from foretell.search.space.fill import Filled, fill
from tests.pure.synthetic import Made


def room(
    hardware: str, blocks: int = 4, tensor: tuple[int, ...] = (1, 2), context: tuple[int, ...] = (1,), experts: tuple[int, ...] = (1,),
    **wishes: Any,
) -> space.Room:  # fmt: skip
    return space.Room(
        cluster=parse(hardware), blocks=blocks, wishes=SearchConstraints(**wishes), tensor=tensor, context=context, experts=experts
    )


def plan_of(layout: Layout, made: Made, hardware: str) -> Plan:
    cuts = tuple(made.blocks[place] for place in layout.cuts)
    modes = {name: Residency(mode=mode) for name, mode in zip(made.blocks, layout.modes, strict=True)}
    return Plan(
        model={"model": "made", "blocks": list(made.blocks)}, hardware=hardware, mesh=layout.mesh,
        pipeline=Pipeline(schedule=layout.schedule or "1f1b", cuts=cuts) if cuts else None, reshard=layout.reshard,
        micro_batch=layout.micro_batch, accumulate=layout.accumulate, compile=layout.compile, blocks=compress(modes),
    )  # fmt: skip


EVEN = Made(seconds=(1.0,) * 4, held=(6.0,) * 4, state=(24.0,) * 4)
UNEVEN = Made(seconds=(1.0, 2.0, 1.5, 1.0), held=(6.0, 9.0, 8.0, 4.0), state=(24.0, 30.0, 40.0, 20.0), capacity=90.0)


@pytest.mark.parametrize("hardware", ["H100:4", "2x4xH100", "H100"])
def test_every_layout_is_a_legal_plan(hardware: str) -> None:
    made = Made(seconds=(1.0,) * 8, held=(0.5,) * 8, state=(1.0,) * 8)
    here = room(hardware, blocks=8, global_batch=16, compile=("none", "blocks", "model"), context=(1, 2), experts=(1, 2))
    facts = replace(with_hardware(Facts(blocks=made.blocks), parse(hardware)), global_batch=16)
    layouts = list(space.every(here, space.meshes, space.batches, space.schedules, space.compiles, space.reshards))
    assert len(layouts) == len(set(layouts)) and max(layout.mesh.world for layout in layouts) == parse(hardware).count
    for layout in layouts[:: max(1, len(layouts) // 400)]:
        filled = fill(layout, made)
        assert filled is not None and filled.fits
        assert not legal.complaints(plan_of(filled.layout, made, hardware), facts), filled.layout


def test_shards_lie_inside_levels_and_tensors_inside_nodes() -> None:
    found = {layout.mesh for layout in space.every(room("4x8xH100", blocks=8, tensor=(1, 2, 4, 8, 16)), space.meshes)}
    assert {mesh.tp for mesh in found} == {1, 2, 4, 8}
    few = {layout.mesh.world for layout in space.every(room("H100:4", blocks=8), space.meshes)}
    assert few == {1, 2, 4}  # a small model may be faster on fewer
    plain = {(mesh.dp_replicate, mesh.dp_shard) for mesh in found if mesh.tp == mesh.pp == 1}
    assert plain == {(1, 32), (2, 16), (4, 8), (32, 1)}
    assert all(mesh.pp <= 8 and mesh.world == 32 for mesh in found)


def test_ranks_that_share_positions_or_experts() -> None:
    """Positions with every other axis; experts among shards alone."""
    here = room("2x4xH100", blocks=8, tensor=(1, 2), context=(1, 2, 4), experts=(1, 2, 4), ranks=(8,))
    found = {layout.mesh for layout in space.every(here, space.meshes)}
    assert all(mesh.world == 8 for mesh in found)
    assert {(mesh.cp, mesh.tp, mesh.pp) for mesh in found if mesh.cp > 1} == {
        (2, 1, 1), (2, 1, 2), (2, 1, 4), (2, 2, 1), (2, 2, 2), (4, 1, 1), (4, 1, 2), (4, 2, 1),
    }  # fmt: skip
    spread = {(mesh.dp_shard, mesh.ep) for mesh in found if mesh.ep > 1}
    assert spread == {(4, 2), (4, 4), (8, 2), (8, 4)} and all(mesh.tp == mesh.cp == mesh.pp == 1 for mesh in found if mesh.ep > 1)
    fixed = room("2x4xH100", blocks=8, fixed={"cp": 4}, context=(4,), ranks=(8,))
    assert {one.mesh.cp for one in space.every(fixed, space.meshes)} == {4}


def test_fixed_degrees_are_kept() -> None:
    here = room("4x8xH100", blocks=32, tensor=(1, 2, 4, 8), fixed={"tp": 4, "pp": 2}, global_batch=64, schedule="1f1b")
    found = list(space.every(here))
    assert found and {(one.mesh.tp, one.mesh.pp, one.schedule) for one in found} == {(4, 2, "1f1b")}
    three = room("4x8xH100", blocks=32, fixed={"dp_replicate": 4, "dp_shard": 8})
    assert {one.mesh for one in space.every(three, space.meshes)} == {replace(found[0].mesh, tp=1, pp=1, dp_replicate=4, dp_shard=8)}


# ---------------------------------------------------------------------- against trying everything


def everything(made: Made, here: space.Room) -> Point:
    """All meshes, batches, schedules, cuts and residencies, one by one."""
    points = []
    for frame in space.every(here):
        count = len(made.blocks)
        places = combinations(range(1, count), frame.mesh.pp * frame.interleave - 1)
        for cuts in places:
            for modes in product(("keep", "selective", "recompute"), repeat=count):
                layout = replace(frame, cuts=tuple(cuts), modes=modes)
                quick = made.quick(layout)
                if quick.fits:
                    points.append(point_of(Filled(layout=layout, quick=quick), here.cluster, 1))
    return min(points, key=lambda point: score(point, here.wishes))


@pytest.mark.parametrize("made", [
    *(pytest.param(one, marks=pytest.mark.slow(reason="the same devices with less memory are here")) for one in (EVEN, UNEVEN)),
    replace(EVEN, capacity=60.0), replace(UNEVEN, capacity=64.0),
])  # fmt: skip
def test_the_best_is_the_best_of_everything(made: Made) -> None:
    here = room("H100:4", global_batch=4)
    found = Explorer(room=here, pricer=made).run()
    best, wanted = best_of(found.points, here.wishes), everything(made, here)
    assert best is not None and not found.stopped
    first = min(score(point, here.wishes) for point in found.points)
    assert first[0] <= score(wanted, here.wishes)[0] * (1 + 1e-9)
    assert score(best, here.wishes)[0] <= first[0] * 1.01


def test_what_is_left_out_could_not_win() -> None:
    """The order by what is possible at least leaves most of a large space, and the same best is found."""
    made = Made(seconds=(1.0,) * 16, held=(3.0,) * 16, state=(40.0,) * 16)
    here = room("2x8xH100", blocks=16, tensor=(1, 2, 4, 8), global_batch=64)
    explorer = Explorer(room=here, pricer=made)
    found = explorer.run()
    all_of_it = [fill(frame, made) for frame in space.every(here)]
    least = min(one.quick.seconds for one in all_of_it if one is not None and one.fits)
    assert min(point.seconds for point in found.points if point.layout.reshard is True) <= least * (1 + 1e-9)
    assert found.costed < len(all_of_it)


def test_nothing_fits_and_the_nearest_is_told() -> None:
    made = replace(EVEN, capacity=10.0)
    found = Explorer(room=room("H100:4", global_batch=4), pricer=made).run()
    assert not found.points and found.nearest is not None and found.nearest.short > 0
    least = min(one.short for frame in space.every(room("H100:4", global_batch=4)) if (one := fill(frame, made)))
    assert found.nearest.short == pytest.approx(least)


def test_the_smallest_uses_no_more_devices_than_it_must() -> None:
    made = replace(EVEN, capacity=70.0)
    found = Explorer(room=room("H100:8", tensor=(1, 2, 4, 8), global_batch=8, objective="smallest"), pricer=made).run()
    best = best_of(found.points, SearchConstraints(global_batch=8, objective="smallest"))
    assert best is not None and best.devices == 2
    assert not fill(Layout(mesh=replace(best.layout.mesh, tp=1, pp=1, dp_shard=1, dp_replicate=1), micro_batch=1, accumulate=8), made).fits  # type: ignore[union-attr]


def test_a_margin_is_left_free() -> None:
    cluster = parse("H100")
    capacity = float(cluster.device.memory_bytes)
    made = replace(EVEN, capacity=capacity, held=(capacity / 8,) * 4, state=(capacity / 10,) * 4)
    for margin in (0.0, 0.1, 0.3):
        found = Explorer(room=room("H100", global_batch=1, margin=margin), pricer=made).run()
        best = best_of(found.points, SearchConstraints(global_batch=1, margin=margin))
        assert best is not None and best.memory_bytes <= capacity * (1 - margin)


# ---------------------------------------------------------------------- wishes


@pytest.mark.parametrize(
    ("wishes", "hardware", "told"),
    [
        ({"objective": "speed"}, "H100:8", "--objective 'speed' is not known"),
        ({"objective": "througput"}, "H100:8", "--objective 'througput' is not known; try: throughput"),
        ({"objective": "latency"}, "H100:8", "without --global-batch"),
        ({"deadline_seconds": 3600.0}, "H100:8", "--deadline is given without the length of the run"),
        ({"budget": 100.0}, "H100:8", "--budget is given without"),
        ({"fixed": {"tp": 3}}, "H100:8", "groups of 3 ranks"),
        ({"fixed": {"tp": 4, "pp": 4}}, "H100:8", "makes 16 ranks and there are 8 devices"),
        ({"fixed": {"tp": 16}}, "4x8xH100", "does not lie inside a node of 8"),
        ({"fixed": {"dp_replicate": 2, "dp_shard": 2, "tp": 1, "pp": 1}}, "H100:8", "makes 4 ranks and there are 8"),
        ({"fixed": {"cp": 4, "tp": 4}}, "H100:8", "makes 16 ranks and there are 8 devices"),
        ({"fixed": {"ep": 2, "tp": 2}}, "H100:8", "--ep 2 and --tp 2 do not go together"),
        ({"fixed": {"ep": 4, "dp_shard": 6}}, "H100:12", "--ep 4 is no part of --dp-shard 6"),
        ({"fixed": {"pp": 1}, "schedule": "1f1b"}, "H100:8", "--schedule 1f1b and --pp 1"),
        ({"fixed": {"pp": 8}}, "H100:8", "wants 8 stages and the model has 4 blocks"),
        ({"fixed": {"pp": 4}, "schedule": "zero-bubble-v"}, "H100:8", "wants 8 stages and the model has 4 blocks"),
        ({"global_batch": 6, "fixed": {"dp_shard": 4}}, "H100:8", "cannot be shared by the 4 data ranks"),
        ({"global_batch": 6, "micro_batch": 4}, "H100:8", "is no multiple of --micro-batch 4"),
        ({"margin": 1.5}, "H100:8", "--margin is 1.5"),
        ({"global_batch": 0}, "H100:8", "--global-batch is 0"),
        ({"schedule": "1f2b"}, "H100:8", "--schedule '1f2b' is not known"),
    ],
)
def test_what_cannot_be_wished_is_told_in_one_line(wishes: dict[str, Any], hardware: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        check(SearchConstraints(**wishes), parse(hardware), blocks=4)
    line = f"{error.value.problem}; try: {error.value.remedy}"
    assert told in line and "\n" not in line and error.value.remedy


def test_wishes_that_agree_pass() -> None:
    check(SearchConstraints(fixed={"tp": 2, "pp": 2, "dp_shard": 2}, global_batch=8, objective="latency"), parse("H100:8"), blocks=4)
    check(SearchConstraints(objective="smallest", fixed={"tp": 2}), parse("H100:8"), blocks=4)
