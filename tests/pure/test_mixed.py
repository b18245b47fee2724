"""Unlike devices in one pipeline: against every cut and every order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations

import pytest

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan import legal
from foretell.plan.facts import facts_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.search.heterogeneous.pipeline import Bytes, Island, SharedBlocks, islands, one_f_one_b, share, share_best
from foretell.units import GIB

SPEED = {"H100-SXM-80GB": 1.0, "A100-SXM-80GB": 0.4, "V100-SXM-16GB": 0.15}


def drawn(seed: int, count: int) -> tuple[list[Bytes], list[float]]:
    draw = random.Random(seed)
    blocks = [Bytes(kept=draw.choice([1, 5, 12, 30]) * GIB, in_flight=draw.randint(0, 2) * GIB) for _ in range(count)]
    return blocks, [draw.choice([1.0, 2.0, 5.0]) * draw.uniform(0.9, 1.1) for _ in range(count)]


def brute(order: Sequence[Island], blocks: list[Bytes], work: list[float]) -> float | None:
    """Every cut; the slowest stage of the best."""
    kinds = [island for island in order for _ in range(island.stages)]
    best = None
    for inner in combinations(range(1, len(blocks)), len(kinds) - 1):
        slowest = 0.0
        for stage, (first, last) in enumerate(pairwise((0, *inner, len(blocks)))):
            held = one_f_one_b(stage, len(kinds))
            size = sum(block.kept + held * block.in_flight for block in blocks[first:last])
            seconds = sum(work[first:last]) / SPEED[kinds[stage].device.name]
            slowest = max(slowest, seconds if size <= kinds[stage].memory_bytes else float("inf"))
        if slowest < float("inf") and (best is None or slowest < best):
            best = slowest
    return best


@pytest.mark.parametrize("seed", range(40))
def test_equals_every_cut(seed: int) -> None:
    blocks, work = drawn(seed, 9)
    cluster = parse(["2xH100+2xA100", "1xV100+2xH100", "2xA100+1xH100+1xV100"][seed % 3])
    order = islands(cluster, 1)
    found = share(order, blocks, lambda kind, block: work[block] / SPEED[kind])
    best = brute(order, blocks, work)
    assert (found.slowest if found else None) == (pytest.approx(best, rel=1e-12) if best is not None else None)
    for stage in found.stages if found else ():
        assert stage.bytes <= stage.memory_bytes and stage.last > stage.first


def test_some_of_those_do_not_fit_and_some_do() -> None:
    """So that the test above tests both."""
    fits = 0
    for seed in range(40):
        blocks, work = drawn(seed, 9)
        cluster = parse(["2xH100+2xA100", "1xV100+2xH100", "2xA100+1xH100+1xV100"][seed % 3])
        fits += brute(islands(cluster, 1), blocks, work) is not None
    assert 5 < fits < 35


@pytest.mark.parametrize("seed", range(6))
def test_equals_every_order_of_islands(seed: int) -> None:
    blocks, work = drawn(seed, 8)
    blocks = [Bytes(kept=block.kept // 8, in_flight=block.in_flight // 2) for block in blocks]
    found = islands(parse("1xV100+2xH100+1xA100"), 1)
    best = share_best(found, blocks, lambda kind, block: work[block] / SPEED[kind], micro_batches=1000)
    every = [brute(order, blocks, work) for order in permutations(found)]
    assert best.slowest == pytest.approx(min(one for one in every if one is not None), rel=1e-3)


def test_quick_devices_get_more_layers_and_a_plan_can_say_so() -> None:
    cluster = parse("1x8xH100+1x8xA100")
    found = islands(cluster, 8)
    shared = share_best(found, [Bytes(GIB // 8, 0)] * 28, lambda kind, _: 1 / SPEED[kind], micro_batches=16)
    layers = {stage.device: stage.last - stage.first for stage in shared.stages}
    assert layers == {"H100-SXM-80GB": 20, "A100-SXM-80GB": 8} and shared.slowest == 20
    model = {"model": "gpt2", "blocks": ["blocks.0-27"]}
    plan = Plan(
        model=model, hardware="x", mesh=Mesh(pp=2, tp=8), accumulate=16, placement=shared.placement,
        pipeline=Pipeline(cuts=tuple(f"blocks.{cut}" for cut in shared.cuts)),
    )  # fmt: skip
    assert legal.complaints(plan, facts_of(plan, cluster)) == ()


def test_an_order_that_is_not_the_clusters_is_a_placement() -> None:
    """Early stages hold more micro-batches: the device with more memory goes first, though it is second in the cluster."""
    found = islands(parse("1x2xV100+1x2xH100"), 2)
    shared = share_best(found, [Bytes(GIB, 3 * GIB)] * 6, lambda kind, _: 1.0, micro_batches=8)
    assert [stage.device[:4] for stage in shared.stages] == ["H100", "V100"]
    assert shared.placement == (2, 3, 0, 1)


def test_what_does_not_fit_says_how_much() -> None:
    found = islands(parse("1xV100+1xH100"), 1)
    with pytest.raises(UserError, match=r"need 800\.0 GiB.*recompute"):
        share_best(found, [Bytes(100 * GIB, 0)] * 8, lambda kind, _: 1.0, micro_batches=8)
    with pytest.raises(UserError, match="every stage needs one"):
        share(found, [Bytes(0, 0)], lambda kind, _: 1.0)
    with pytest.raises(UserError, match=r"12 A100-SXM-80GB do not make whole pipeline stages of 8.*4"):
        islands(parse("1x8xH100+1x12xA100"), 8)


def test_three_hundred_unlike_layers_on_64_mixed_devices() -> None:
    blocks, work = drawn(0, 300)
    blocks = [Bytes(kept=block.kept // 64, in_flight=block.in_flight // 64) for block in blocks]
    shared = share_best(
        islands(parse("2x8xH100+4x8xA100+2x8xV100"), 1), blocks, lambda kind, block: work[block] / SPEED[kind], micro_batches=256
    )
    assert len(shared.stages) == 64
    quick = [stage.last - stage.first for stage in shared.stages if stage.device.startswith("H100")]
    slow = [stage.last - stage.first for stage in shared.stages if stage.device.startswith("V100")]
    assert sum(quick) / len(quick) > 3 * sum(slow) / len(slow)
    assert isinstance(shared, SharedBlocks)
