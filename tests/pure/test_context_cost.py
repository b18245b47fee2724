"""What sharing the positions of a sample costs: every byte and message of a plan that is really applied in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.blocks import blocks_of
from foretell.lower.context import all_ranks, flops_of, work_of_all
from foretell.lower.pipeline.rank import rank_traces
from foretell.lower.steps import repeated
from foretell.plan.blocks import even_cuts
from foretell.plan.mesh import rank_at
from foretell.plan.recipe import recipe_of
from foretell.plan.types import Mesh, Pipeline, Plan, Split
from foretell.search.traces.split import capture_split
from foretell.simulate.plan import Options, predict_plan, sharded
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace
from tests.pure import dry
from tests.pure.test_plan_cost import agrees, plan, workload


def shared(build: Callable[[], Workload], asked: Plan, mode: str = "keep", **more: Any) -> Trace:
    wish = asked.split or Split()
    recipe = replace(recipe_of(asked, mode), accumulate=1)
    given = {"sequence": wish.sequence, "loss": wish.loss, "capability": None, "context": asked.mesh.cp, **more}
    return capture_split(build, recipe, asked.mesh.tp, **given)[0]


@pytest.mark.parametrize(
    ("name", "mesh", "more"),
    [
        pytest.param("gpt-tiny", Mesh(cp=4), {"precision": "fp32"}, marks=pytest.mark.slow(reason="cp alone; it is there with tp and with pp")),
        pytest.param("llama-tiny", Mesh(cp=2, dp_shard=2, dp_replicate=2), {"accumulate": 2}, marks=pytest.mark.slow(reason="as without positions")),
        ("gpt-tiny", Mesh(cp=2, tp=2), {}),
    ],
)
def test_every_byte_and_message_of_shared_positions(name: str, mesh: Mesh, more: dict[str, Any]) -> None:
    asked, build = plan(name, mesh=mesh, **more), workload(name, layers=3 if mesh.dp_shard > 1 else 2)
    seen = dry.run(build, asked, rank_at(mesh, cp=mesh.cp - 1))
    assert not seen.left
    agrees(seen, sharded(repeated(shared(build, asked), asked.accumulate), asked))


@pytest.mark.slow(reason="pipelines and shared positions are each compared elsewhere; ranks run both in test_context.py")
def test_shared_positions_in_a_pipeline() -> None:
    build = workload("llama-tiny", layers=2)
    asked = plan("llama-tiny", mesh=Mesh(pp=2, cp=2), accumulate=4, precision="fp32")
    trace = shared(build, asked)
    asked = asked.with_(pipeline=Pipeline(schedule="1f1b", cuts=even_cuts(blocks_of(trace), 2)))
    for rank in rank_traces(trace, asked):
        agrees(dry.run(build, asked, rank_at(asked.mesh, pp=rank.rank, cp=1)), rank.trace)


@pytest.mark.slow(reason="two traces; every byte and message is compared above")
def test_the_work_of_all_ranks_is_that_of_one_device() -> None:
    """Kernels of a GPU skip what a causal mask hides. What is left are the tables of positions, which all ranks make."""
    build, asked = workload("llama-tiny", layers=2), plan("llama-tiny", mesh=Mesh(cp=4), precision="bf16")
    first, last = (shared(build, asked, capability=(9, 0), context_rank=rank) for rank in (0, 3))
    alone = capture(build, replace(recipe_of(asked, "keep"), accumulate=1))
    assert flops_of(first) < flops_of(last)
    assert work_of_all(first, last, 4) * flops_of(last) == pytest.approx(flops_of(alone), rel=1e-4)
    assert all_ranks(alone, 4) == 4


@pytest.mark.slow(reason="two traces of long samples; bytes of shared positions are compared above")
def test_longer_samples_fit_where_their_positions_are_shared() -> None:
    """Keys and values go over the axis in every block; activations shrink with the number of ranks."""
    found = {}
    for ranks in (1, 2, 4):
        asked = plan("llama-tiny", mesh=Mesh(cp=ranks), micro_batch=2)
        build = workload("llama-tiny", 8, layers=2)
        recipe = replace(recipe_of(asked, "keep"), accumulate=1)
        trace = shared(build, asked, capability=(9, 0)) if ranks > 1 else capture(build, recipe)
        found[ranks] = predict_plan(trace, asked, parse("H100:8"), Options(profile_of=find_profile))
    assert found[4].worst.memory.allocated_bytes < found[2].worst.memory.allocated_bytes < found[1].worst.memory.allocated_bytes
    assert found[1].per_step == found[2].per_step == found[4].per_step
    talk = [one for one in found[2].ranks[0].collectives if one.axis == "cp"]
    heads = 8 * 128 * 2 * 32 * 2  # samples × positions × key-value heads × head size × bytes of bf16
    assert {(one.name, one.ranks, one.nbytes): one.times for one in talk} == {
        ("all_gather", 2, heads): 4, ("reduce_scatter", 2, heads): 4, ("all_reduce", 2, 4): 2,
    }  # fmt: skip
