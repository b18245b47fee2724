"""Switches that pass on less than they take in: crowding against a count of every flow over every switch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.files import load, save
from foretell.price.network.collectives import ALL_GATHER, ALL_TO_ALL, crowding, fabric
from foretell.price.network.collectives import collective as timed


def slowest(nodes: int, apart: int, leaf: int, over: float, flows: list[tuple[int, int]]) -> float:
    """Times longer than cards alone: the most loaded switch's uplinks, every node's card full; `flows` of the first group, and the
    same from each node between its members."""
    out: dict[int, float] = {}
    sent: dict[int, int] = {}
    every = [(a + shift, b + shift) for shift in range(apart) for a, b in flows]
    for a, _ in every:
        sent[a] = sent.get(a, 0) + 1
    for a, b in every:
        if a // leaf != b // leaf:
            out[a // leaf] = out.get(a // leaf, 0.0) + 1 / sent[a]
    return max([1.0, *(load * over / leaf for load in out.values())])


@given(st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8)), st.integers(2, 6), st.sampled_from((1.0, 1.5, 2.0, 4.0)))
def test_crowding_is_what_the_fullest_switch_carries(apart: int, leaf: int, leaves: int, over: float) -> None:
    members = max(2, leaf * leaves // apart)
    if members * apart % leaf:
        return
    cluster = parse(f"{members * apart}x8xH100,leaf={leaf},oversubscription={over}")
    places = [apart * number for number in range(members)]
    ring = [(a, b) for a, b in zip(places, places[1:] + places[:1], strict=True)]
    every = [(a, b) for a, b in itertools.permutations(places, 2)]
    found = crowding(cluster, members, apart)
    assert found[0] == pytest.approx(slowest(members * apart, apart, leaf, over, ring))
    assert found[1] == pytest.approx(slowest(members * apart, apart, leaf, over, every))


def test_rings_inside_a_leaf_and_rings_of_neighbours_are_as_quick_as_ever() -> None:
    plain, crowded = parse("16x8xH100"), parse("16x8xH100,leaf=4,oversubscription=4")
    near = [timed(ALL_GATHER, 2**28, fabric(cluster, 32)).seconds for cluster in (plain, crowded)]
    ring = [timed(ALL_GATHER, 2**28, fabric(cluster, 128)).seconds for cluster in (plain, crowded)]
    assert near[0] == near[1] and ring[0] == ring[1], "one of four nodes of a leaf sends on, as much as the switch passes"
    far = [timed(ALL_GATHER, 2**28, fabric(cluster, 4, stride=32)).seconds for cluster in (plain, crowded)]
    all_to_all = [timed(ALL_TO_ALL, 2**28, fabric(cluster, 128)).seconds for cluster in (plain, crowded)]
    assert far[1] / far[0] == pytest.approx(4, rel=0.02) and all_to_all[1] / all_to_all[0] == pytest.approx(4 * 12 / 15, rel=0.02)


def test_a_file_keeps_it(tmp_path: Path) -> None:
    cluster = parse("16x8xH100,leaf=4,oversubscription=2")
    save(cluster, tmp_path / "c.json")
    assert load(tmp_path / "c.json") == cluster


@pytest.mark.parametrize(("text", "told"), [
    ("4x8xH100,leaf=0", "leaf=0"), ("4x8xH100,leaf=two", "leaf=two"), ("4x8xH100,leaf=2,leaf=2", "leaf twice"),
    ("4x8xH100,leaf=2,oversubscription=0.5", "oversubscription=0.5"), ("4x8xH100,oversubscription=2", "nodes_per_leaf does not say"),
    ("4x8xH100,leafs=2", "leafs"),
])  # fmt: skip
def test_a_slip_is_one_error(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        parse(text)
