"""A plan's placement, for real: processes become the ranks that the plan puts on them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from foretell.hardware.probe import ranks as probe
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.parallel import ranks as places
from foretell.runtime.process.pool import PoolWorld
from foretell.search.heterogeneous.place import Traffic, place


def start(rank: int, world: int, plan: Plan, port: int) -> list[Any] | None:
    """A process that was started as `rank` of torchrun's variables, with no group yet."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    me = places.start(plan, device="cpu", timeout_s=60)
    every: list[Any] = [None] * me.world
    dist.all_gather_object(every, (rank, me.rank, me.coordinate("pp"), me.coordinate("dp_shard"), os.environ["RANK"]))
    places.stop()
    return every if me.is_first else None


def test_processes_take_the_places_of_the_plan(ranks: Callable[[int], PoolWorld]) -> None:
    order = (2, 0, 3, 1)
    plan = Plan(
        model={"model": "gpt-tiny"}, hardware="CPU", mesh=Mesh(pp=2, dp_shard=2), placement=order, accumulate=2,
        pipeline=Pipeline(cuts=("blocks.1",)), precision="fp32",
    )  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = ranks(4).run(start, plan, port)
    assert [one is not None for one in said] == [process == order[0] for process in range(4)], "the process that is rank 0 speaks"
    for rank, (process, became, stage, shard, told) in enumerate(said[order[0]]):
        assert (process, became, stage, shard, told) == (order[rank], rank, rank // 2, rank % 2, str(rank))


# ---------------------------------------------------------------- a slow link (Pipette)

SLOW_BYTES_PER_SECOND = 4e7
"""What passes between two processes, and is no more than this where the link between them is held back."""
MESSAGES, MESSAGE_BYTES = 6, 1 << 20


def hold_back(me: int, slow: frozenset[int]) -> None:
    """Messages between the two processes of `slow` take as long as on such a link, whoever sends them."""
    plain = dist.batch_isend_irecv

    def limited(messages: list[dist.P2POp]) -> list[Any]:
        works = plain(messages)
        if all({me, message.peer} != slow for message in messages):
            return works
        _wait(works)
        time.sleep(sum(message.tensor.nbytes for message in messages) / SLOW_BYTES_PER_SECOND)
        return []

    dist.batch_isend_irecv = limited


def measured_pairs(rank: int, world: int, slow: frozenset[int]) -> list[dict[str, Any]]:
    plain = dist.batch_isend_irecv
    hold_back(rank, slow)
    try:
        return probe._all_pairs("cpu", "gloo", lambda doing, share: None)
    finally:
        dist.batch_isend_irecv = plain


def passed_on(rank: int, world: int, slow: frozenset[int], order: tuple[int, ...]) -> float:
    """Seconds in which messages go through the stages of a pipeline and back, stage s on process order[s]."""
    plain = dist.batch_isend_irecv
    hold_back(rank, slow)
    message = torch.ones(MESSAGE_BYTES // 4)
    try:
        dist.barrier()
        began = time.perf_counter()
        for ways in (order, order[::-1]):
            place = ways.index(rank)
            for _ in range(MESSAGES):
                if place:
                    _wait(dist.batch_isend_irecv([dist.P2POp(dist.irecv, message, ways[place - 1])]))
                if place < world - 1:
                    _wait(dist.batch_isend_irecv([dist.P2POp(dist.isend, message, ways[place + 1])]))
        dist.barrier()
        return time.perf_counter() - began
    finally:
        dist.batch_isend_irecv = plain


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


@pytest.mark.slow(reason="pairs are measured in test_probe_ranks.py, the order is found in tests/pure/test_place.py and taken above")
def test_stages_keep_off_a_link_that_was_measured_slow(ranks: Callable[[int], PoolWorld]) -> None:
    """Every pair is measured, the plan's order keeps neighbours off the slow one, and messages really pass sooner."""
    slow, mesh = frozenset({1, 2}), Mesh(pp=4)
    pairs = ranks(4).run(measured_pairs, slow)[0]
    rates = [[1e12] * 4 for _ in range(4)]
    for pair in pairs:
        rates[pair["source"]][pair["target"]] = pair["bytes_per_second"]
    slowest = sorted(pairs, key=lambda pair: float(pair["bytes_per_second"]))[:2]
    assert all({pair["source"], pair["target"]} == slow for pair in slowest), "the probe sees which link it is"
    found = place(mesh, [Traffic(axis="pp", operation="p2p", nbytes=MESSAGE_BYTES, times=MESSAGES)], rates)
    assert all({a, b} != slow for a, b in pairwise(found.order)) and found.seconds < found.seconds_before
    naive, placed = (min(max(ranks(4).run(passed_on, slow, order)) for _ in range(2)) for order in ((0, 1, 2, 3), found.order))
    least = 2 * MESSAGES * MESSAGE_BYTES / SLOW_BYTES_PER_SECOND
    assert naive > least > 2 * placed
