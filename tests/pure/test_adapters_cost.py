"""What adapters cost where ranks share blocks, positions or tensors: every byte and message of a plan that is really applied in this process."""

from __future__ import annotations

from typing import Any

import pytest

from foretell.lower.blocks import blocks_of
from foretell.lower.pipeline.rank import rank_traces
from foretell.lower.steps import repeated
from foretell.plan.blocks import even_cuts
from foretell.plan.mesh import rank_at
from foretell.plan.types import Adapters, Mesh, Pipeline
from foretell.simulate.plan import sharded
from tests.pure import dry
from tests.pure.test_context_cost import shared
from tests.pure.test_plan_cost import agrees, plan, traced, workload

LORA: dict[str, Any] = {"adapters": Adapters(rank=4)}
NF4: dict[str, Any] = {**LORA, "base": {"adapted": "nf4"}}
BESIDE = pytest.mark.slow(reason="the axis, the precision and the base are each there with others")


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param(Mesh(cp=2), {"precision": "fp32", **LORA}, marks=BESIDE),
        (Mesh(cp=2), {"precision": "bf16", **NF4}),
        pytest.param(Mesh(cp=2), {"precision": "fp32", "adapters": Adapters(kind="dora", rank=4)}, marks=BESIDE),
        pytest.param(Mesh(cp=2, dp_shard=2), {"accumulate": 2, **LORA}, marks=BESIDE),
        (Mesh(tp=2), {"precision": "bf16", **LORA}),
        pytest.param(Mesh(tp=2), {"precision": "fp32", **LORA}, marks=BESIDE),
        pytest.param(Mesh(tp=2, dp_shard=2), {"precision": "fp32", **LORA}, marks=BESIDE),
        pytest.param(Mesh(tp=2, cp=2), {"precision": "fp32", **LORA}, marks=BESIDE),
    ],
)
def test_every_byte_and_message_of_shared_positions_and_layers(mesh: Mesh, more: dict[str, Any]) -> None:
    asked, build = plan("llama-tiny", mesh=mesh, **more), workload("llama-tiny", layers=2)
    seen = dry.run(build, asked, rank_at(mesh, cp=mesh.cp - 1))
    assert not seen.left
    agrees(seen, sharded(repeated(shared(build, asked), asked.accumulate), asked))


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        (Mesh(pp=2), {"precision": "bf16", **NF4}),
        pytest.param(Mesh(pp=2), {"precision": "fp32", "adapters": Adapters(kind="dora", rank=4)}, marks=BESIDE),
        pytest.param(Mesh(pp=2, dp_shard=2), {"precision": "fp32", "reshard": False, **LORA}, marks=BESIDE),
        pytest.param(Mesh(pp=2, cp=2), {"precision": "fp32", **LORA}, marks=BESIDE),
    ],
)
def test_every_byte_and_message_of_every_stage(mesh: Mesh, more: dict[str, Any]) -> None:
    """The last stage that shares positions comes out 10 KB of 4.2 MB too high."""
    build, asked = workload("llama-tiny", layers=2), plan("llama-tiny", mesh=mesh, accumulate=4, **more)
    trace = shared(build, asked) if mesh.cp > 1 else traced(build, asked)
    asked = asked.with_(pipeline=Pipeline(schedule="1f1b", cuts=even_cuts(blocks_of(trace), 2)))
    for rank in rank_traces(trace, asked):
        agrees(dry.run(build, asked, rank_at(mesh, pp=rank.rank, cp=mesh.cp - 1)), rank.trace, above=0.0025 if mesh.cp > 1 else 0.0)
