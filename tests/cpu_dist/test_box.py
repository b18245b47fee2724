"""A rank in a box: it runs, asks of the others what a real rank asks of them, and its stand-ins take their time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.box.group import opened
from foretell.runtime.box.run import BoxRequest, BoxSteps, rehearse
from foretell.runtime.box.script import BoxScript
from foretell.search.boxed import expect, scripts
from foretell.trace.load.model import Source
from tests.cpu_dist.beside_one import Ranks

TEXT = {"layers": 4, "dim": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab_size": 64, "context": 16}
LLAMA = Source(model="llama-tiny", overrides=TEXT, seq=16, micro_batch=1)
MOE = Source(model="mixtral-8x7b", overrides={**TEXT, "layers": 1}, seq=16, micro_batch=1)


def planned(mesh: Mesh, source: Source = LLAMA, **more: Any) -> Plan:
    return Plan(model=model_of(source), hardware=f"cpu:{mesh.world}", mesh=mesh, precision="fp32", **more)


def piped(schedule: str, stages: int) -> Plan:
    cuts = tuple(f"blocks.{number * 4 // stages}" for number in range(1, stages))
    return planned(Mesh(pp=2), pipeline=Pipeline(schedule=schedule, cuts=cuts), accumulate=4)


PLANS = {
    "fsdp 8": (planned(Mesh(dp_shard=8), accumulate=2), 5),
    "hsdp 2x4": (planned(Mesh(dp_replicate=2, dp_shard=4)), 3),
    "tp 2": (planned(Mesh(tp=2)), 1),
    "1f1b": (piped("1f1b", 2), 0),
    "interleaved": (piped("interleaved-1f1b", 4), 1),
    "zero-bubble": (piped("zero-bubble", 4), 0),
    "cp 2": (planned(Mesh(cp=2)), 1),
    "ep 2": (planned(Mesh(dp_shard=2, ep=2), MOE), 0),
}

NEEDED = {
    "fsdp 8": {"all_gather", "reduce_scatter", "all_reduce"}, "hsdp 2x4": {"all_gather", "reduce_scatter", "all_reduce"},
    "tp 2": {"all_gather", "reduce_scatter"}, "1f1b": {"send", "receive"}, "interleaved": {"send", "receive"},
    "zero-bubble": {"send", "receive"}, "cp 2": {"all_gather", "reduce_scatter"}, "ep 2": {"all_to_all", "all_reduce"},
}  # fmt: skip

# ---------------------------------------------------------------- messages


KINDS = {
    "_allgather_base_": "all_gather", "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "broadcast_": "broadcast",
    "send": "send", "recv_": "receive", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
"""Ops by which PyTorch asks other ranks for something → the word of a box."""


class Asks(TorchDispatchMode):
    """Kind and bytes of the larger buffer of every message of a rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = str(func).split(".")[:2]
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if space in ("c10d", "_c10d_functional") and name in KINDS:
            self.seen.append((KINDS[name], max(leaf.nbytes for leaf in tree_leaves((args, output)) if isinstance(leaf, Tensor))))
        return output


def asked(rank: int, world: int, plan: Plan) -> list[tuple[str, int]]:
    """Of the second step of a real run: the first one of a pipeline learns what is sent."""
    steps = BoxSteps(plan, BoxRequest(rank=rank, device="cpu"), None)
    steps.timed(0, 1)
    with Asks() as asks:
        steps.timed(0, 1)
    steps.job.close()
    return asks.seen


def boxed(plan: Plan, rank: int) -> list[tuple[str, int]]:
    with opened(BoxScript(), torch.device("cpu"), rank, plan.mesh.world) as box:
        steps = BoxSteps(plan, BoxRequest(rank=rank, device="cpu"), box)
        steps.timed(0, 1)
        with box.recorded() as messages:
            steps.timed(0, 1)
        steps.job.close()
    return [(one.operation, one.nbytes) for one in messages]


ALIKE = pytest.mark.slow(reason="eight shards ask as four of two replicas do, other schedules as 1f1b")
LONG = ("fsdp 8", "interleaved", "zero-bubble")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ALIKE if name in LONG else ()) for name in PLANS])
def test_a_box_asks_for_what_a_rank_asks_for(name: str, ranks: Ranks) -> None:
    plan, rank = PLANS[name]
    found = boxed(plan, rank)
    assert not dist.is_initialized() and len({nbytes for _, nbytes in found}) > 1
    assert NEEDED[name] <= {kind for kind, _ in found}
    assert found == ranks(plan.mesh.world).run(asked, plan)[rank]


# ---------------------------------------------------------------- time


def test_stand_ins_take_the_seconds_they_are_told() -> None:
    plan = planned(Mesh(dp_shard=64))
    found = rehearse(plan, BoxScript(seconds=lambda *_: 0.02), BoxScript(free=True), BoxRequest(rank=40, device="cpu", steps=2, warmup=1))
    assert found.messages >= 10 and found.message_seconds == pytest.approx(0.02 * found.messages)
    assert min(found.steps) >= found.message_seconds, "they follow each other"
    assert found.free_seconds is not None and found.exposed_seconds is not None
    assert found.step_seconds - found.free_seconds == pytest.approx(found.exposed_seconds) and found.finite


@pytest.mark.parametrize("name", ["1f1b", pytest.param("ep 2", marks=pytest.mark.slow(reason="the same sum of other messages"))])
def test_messages_take_at_least_what_the_model_says(name: str) -> None:
    plan, rank = PLANS[name]
    usual, free = scripts(plan, rank, expected := expect(plan, rank))
    found = rehearse(plan, usual, free, BoxRequest(rank=rank, device="cpu", steps=1, warmup=1))
    assert expected.step_seconds is not None and 0 < expected.free_seconds < expected.step_seconds  # type: ignore[operator]
    waits = [delay for chains in expected.arrivals.receives.values() for delay in chains if delay is not None]
    assert found.step_seconds >= max([*waits, found.message_seconds if not waits else 0.0])
    assert set(expected.uses) >= {"parameters"} and expected.bands["allocated_bytes"][0] <= expected.allocated_bytes


def test_a_rank_that_fails_leaves_no_group_behind() -> None:
    plan = planned(Mesh(dp_shard=4))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            rehearse(plan, BoxScript(), BoxScript(free=True), BoxRequest(device="cpu"), say=_interrupt)
        assert not dist.is_initialized()


def _interrupt(text: str) -> None:
    if text.startswith("step"):
        raise KeyboardInterrupt
