"""A plan's placement, for real: processes become the ranks that the plan puts on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime import ranks as places
from foretell.runtime.pool import World


def start(rank: int, world: int, plan: Plan, port: int) -> list[Any] | None:
    """A process that was started as `rank` of torchrun's variables, with no group yet."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    me = places.start(plan, device="cpu", timeout_s=60)
    every: list[Any] = [None] * me.world
    dist.all_gather_object(every, (rank, me.rank, me.coordinate("pp"), me.coordinate("dp_shard"), os.environ["RANK"]))
    places.stop()
    return every if me.is_first else None


def test_processes_take_the_places_of_the_plan(ranks: Callable[[int], World]) -> None:
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
