"""Which device each rank is on: against all orders where those can be counted, against planted ones elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan import file as plans
from foretell.plan.mesh import groups
from foretell.plan.types import Mesh, Plan
from foretell.search.heterogeneous.place import (
    AS_IT_IS,
    EXACT,
    START_SECONDS,
    Traffic,
    place,
    place_plan,
    rates_of,
    traffic_of,
)
from foretell.simulate.parts import Collective
from tests.further import further, one_in

Matrix = list[list[float]]

TP = Traffic(axis="tp", operation="all_reduce", nbytes=1e8, times=64)
SHARD = Traffic(axis="dp_shard", operation="all_gather", nbytes=4e8, times=3)
STAGES = Traffic(axis="pp", operation="p2p", nbytes=1e7, times=16)


def seconds(mesh: Mesh, traffic: Sequence[Traffic], rates: Matrix, order: Sequence[int]) -> float:
    """What an order costs, said again: per axis the slowest group, in which the slowest pair decides."""
    total = 0.0
    kinds = {(one.axis, one.operation == "p2p") for one in traffic if getattr(mesh, one.axis) > 1}
    for axis, neighbours in kinds:
        worst = 0.0
        for group in groups(mesh, axis):
            size = len(group)
            pairs = [(i, i + 1) for i in range(size - 1)] if neighbours else [(i, j) for i in range(size) for j in range(i)]
            rate = min(
                min(rates[order[group[i]]][order[group[j]]], rates[order[group[j]]][order[group[i]]]) for i, j in pairs
            )
            cost = 0.0
            for one in traffic:
                if (one.axis, one.operation == "p2p") == (axis, neighbours):
                    share = {"p2p": 1.0, "all_reduce": 2 * (size - 1) / size}.get(one.operation, (size - 1) / size)
                    cost += one.times * (START_SECONDS + share * one.nbytes / rate)
            worst = max(worst, cost)
        total += worst
    return total


def drawn(devices: int, seed: int) -> Matrix:
    draw = random.Random(seed)
    return [[draw.choice([1e9, 1e10, 2e10, 3e11]) * draw.uniform(0.8, 1) for _ in range(devices)] for _ in range(devices)]


def nodes(devices: int, per_node: int, *, shuffled: int | None = None) -> Matrix:
    """Quick inside a node, slow between; with the devices' numbers shuffled, so that only the rates tell the nodes."""
    where = [device // per_node for device in range(devices)]
    if shuffled is not None:
        random.Random(shuffled).shuffle(where)
    return [[3e11 if where[a] == where[b] else 2e10 for b in range(devices)] for a in range(devices)]


MESHES = [Mesh(tp=2, dp_shard=3), Mesh(pp=2, dp_shard=3), Mesh(pp=3, tp=2), Mesh(tp=5), Mesh(pp=2, tp=2), Mesh(pp=6)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("seed", one_in(4, range(4), "other numbers in the same meshes"))
def test_equals_the_best_of_all_orders(mesh: Mesh, seed: int) -> None:
    rates, traffic = drawn(mesh.world, seed), (TP, SHARD, STAGES)
    best = min(seconds(mesh, traffic, rates, order) for order in permutations(range(mesh.world)))
    found = place(mesh, traffic, rates, seed=seed)
    assert found.how == EXACT and sorted(found.order) == list(range(mesh.world))
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert seconds(mesh, traffic, rates, found.order) == pytest.approx(best, rel=1e-9)
    assert found.seconds_before == pytest.approx(seconds(mesh, traffic, rates, range(mesh.world)), rel=1e-9)


@pytest.mark.parametrize(
    "mesh", further([Mesh(tp=4, dp_shard=2, pp=2), Mesh(tp=8, dp_shard=4, pp=2), Mesh(tp=8, dp_shard=8, pp=4)], [Mesh(tp=4, dp_shard=2, pp=2)],
                    "more devices, found in the same way"), ids=str,
)  # fmt: skip
def test_nodes_hidden_in_a_matrix_are_found_again(mesh: Mesh) -> None:
    hidden = nodes(mesh.world, mesh.tp, shuffled=3)
    ideal = seconds(mesh, (TP, SHARD, STAGES), nodes(mesh.world, mesh.tp), range(mesh.world))
    found = place(mesh, (TP, SHARD, STAGES), hidden)
    assert found.seconds == pytest.approx(ideal, rel=1e-9) and found.seconds_before > 5 * ideal
    for group in groups(mesh, "tp"):
        assert min(hidden[found.order[a]][found.order[b]] for a in group for b in group if a != b) == 3e11


def test_a_slow_pair_of_nodes_is_not_inside_a_heavy_group() -> None:
    """Four nodes of four; between the first two the cable is bad. Shards span two nodes, stages the other way."""
    rates = nodes(16, 4)
    for a in range(4):
        for b in range(4, 8):
            rates[a][b] = rates[b][a] = 1e9
    mesh, traffic = Mesh(pp=2, dp_shard=8), (SHARD, STAGES)
    found = place(mesh, traffic, rates)
    for group in groups(mesh, "dp_shard"):
        devices = {found.order[rank] // 4 for rank in group}
        assert devices != {0, 1} and len(devices) == 2
    assert found.seconds < found.seconds_before / 5


def test_one_bad_direction_is_enough() -> None:
    rates = nodes(8, 4)
    rates[1][2] = 1e8
    found = place(Mesh(tp=2, dp_replicate=4), (TP,), rates)
    assert all({found.order[a], found.order[b]} != {1, 2} for a, b in groups(Mesh(tp=2, dp_replicate=4), "tp"))


def test_the_same_seed_gives_the_same_order_and_never_a_worse_one() -> None:
    mesh = Mesh(pp=4, dp_shard=4, tp=2)
    for seed in range(2):
        rates = drawn(32, seed)
        one, again = (place(mesh, (TP, SHARD, STAGES), rates, seed=5) for _ in range(2))
        assert one == again and one.seconds <= one.seconds_before


def test_equal_nodes_need_no_order() -> None:
    plan = Plan(model={}, hardware="", mesh=Mesh(dp_shard=2, tp=8))
    same, found = place_plan(plan, parse("2x8xH100@IB400"), (TP, SHARD))
    assert same == plan and found.how == AS_IT_IS


def test_unlike_groups_give_rates_and_a_plan_keeps_its_order(tmp_path: Path) -> None:
    cluster = parse("1x4xH100@4xIB400+1x4xA100@4xRoCE200,join=Eth25")
    rates = rates_of(cluster)
    assert rates[0][3] > rates[4][7] > rates[0][4] == rates[7][0] == pytest.approx(0.8 * 25e9 / 8 / 4)
    plan = Plan(model={"model": "gpt2"}, hardware="x", mesh=Mesh(pp=2, dp_shard=4), placement=tuple(range(8)))
    heavy = Traffic(axis="pp", operation="p2p", nbytes=1e9, times=100)
    placed, found = place_plan(plan, cluster, (heavy, Traffic(axis="dp_shard", operation="all_gather", nbytes=1.0)))
    assert found.changes and placed.placement == found.order
    assert all(found.order[rank] // 4 == found.order[rank + 4] // 4 for rank in range(4))  # stages inside a group
    plans.write(placed, tmp_path / "plan.json")
    assert plans.read(tmp_path / "plan.json") == placed


def test_messages_of_a_costed_plan_are_traffic() -> None:
    told = (
        Collective(name="all_gather", axis="dp_shard", ranks=4, nbytes=100, times=7),
        Collective(name="send", axis="pp", ranks=2, nbytes=50, times=3),
        Collective(name="all_reduce", axis="world", ranks=8, nbytes=8, times=1),
    )
    assert traffic_of(told) == (
        Traffic(axis="dp_shard", operation="all_gather", nbytes=100, times=7),
        Traffic(axis="pp", operation="p2p", nbytes=50, times=3),
    )


def test_what_does_not_match_is_refused() -> None:
    with pytest.raises(UserError, match="do not match"):
        place(Mesh(tp=2), (TP,), [[1.0]])
    with pytest.raises(UserError, match="from device 1 to 0 is 0"):
        place(Mesh(tp=2), (TP,), [[1.0, 1.0], [0.0, 1.0]])
    with pytest.raises(UserError, match="no axis"):
        place(Mesh(tp=2), (Traffic(axis="ep", operation="all_to_all", nbytes=1.0),), [[1.0, 1.0], [1.0, 1.0]])
