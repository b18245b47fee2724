"""Memory and single layers of the closed form of a transformer's step, against the papers' own figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.cost import analytic
from foretell.cost import transformer_memory as memory
from foretell.cost import transformer_time as timing
from foretell.cost.stack import STACKS
from foretell.cost.stage_schedule import (
    GPIPE,
    ONE_BY_ONE,
    ZB_2P,
)
from foretell.cost.transformer import Training
from foretell.hardware import catalog, links
from foretell.hardware.types import Cluster

GPT_22B = Training(
    layers=1, hidden=6144, heads=64, kv_heads=64, ffn=24576, vocab=0, seq=2048, gated=False, micro=4, micros=1, world=8,
    per_node=8, tp=8, stack=STACKS["megatron-lm"], precision="fp16",
)  # fmt: skip
ZB_6B = Training(
    layers=30, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=51200, seq=1024, gated=False, micro=3, micros=24,
    world=8, per_node=8, pp=8, stack=STACKS["megatron-lm"], precision="bf16",
)  # fmt: skip


# ---------------------------------------------------------------- single layers


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "forward", "backward"),
    [
        ("none", False, 7.7, 11.9),
        ("full", False, 7.7, 19.5),
        ("selective", False, 7.7, 13.2),
        ("selective", True, 7.2, 13.1),
    ],
)
def test_one_layer_of_a_22b_model(
    recompute: str, sequence_parallel: bool, forward: float, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Milliseconds of one layer on eight A100, as the authors of selective recomputation print them; no constant was set on
    these. At the rate of A100 that the closed form was fitted with; that of long runs in the product is 5 % lower."""
    monkeypatch.setitem(analytic.FAMILIES, "ampere", analytic.FAMILIES["ampere"]._replace(product=0.78))  # type: ignore[arg-type]
    cluster = links.with_links(Cluster(device=catalog.find("A100-80GB"), nodes=1, devices_per_node=8))
    run = replace(GPT_22B, recompute=recompute, sequence_parallel=sequence_parallel)
    found = timing.layer_seconds(run, cluster)
    assert found.forward * 1e3 == pytest.approx(forward, rel=0.08)
    assert found.backward * 1e3 == pytest.approx(backward, rel=0.08)


# ---------------------------------------------------------------- memory


def test_activations_of_a_layer_are_the_papers_formula() -> None:
    """Korthikanti et al.: s b h (34 + 5 a s / h) on one device; (10 + 24/t + 5 a s / h t) over t; all over t with
    sequence parallelism; 2 s b h when only inputs are kept."""
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    one = replace(GPT_22B, tp=1, world=1)
    assert memory.layer_bytes(one) == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.06)
    assert memory.layer_bytes(GPT_22B) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / h / t), rel=0.06)
    split = replace(GPT_22B, sequence_parallel=True)
    assert memory.layer_bytes(split) == pytest.approx(s * b * h * (34 + 5 * a * s / h) / t, rel=0.06)
    assert memory.kept_bytes(replace(one, recompute="full")) == 2 * s * b * h


@pytest.mark.parametrize(
    ("schedule", "chunks", "gigabytes"), [(ONE_BY_ONE, 1, 39), (ONE_BY_ONE, 4, 48), (ZB_2P, 1, 70)]
)
def test_memory_of_the_zero_bubble_paper(schedule: str, chunks: int, gigabytes: float) -> None:
    """Its 6.2B model on eight A100: counted, once its figures are read as what tensors take, without the context."""
    run = replace(ZB_6B, schedule=schedule, chunks=chunks)
    assert memory.reported(run, catalog.find("A100-80GB")) / 1e9 == pytest.approx(gigabytes, rel=0.06)


def test_states_by_sharding() -> None:
    """16 bytes a parameter: whole, in eighths of the optimiser's twelve, or in eighths of all."""
    run = replace(GPT_22B, tp=1, world=8, layers=1)
    parameters = memory.peak(run)[0].states / 16
    assert memory.peak(replace(run, shard="zero1"))[0].states == pytest.approx(parameters * (4 + 12 / 8))
    assert memory.peak(replace(run, shard="zero3"))[0].states == pytest.approx(parameters * 16 / 8)
    assert memory.peak(replace(run, shard="zero1", shard_group=4))[0].states == pytest.approx(parameters * (4 + 12 / 4))


def test_micro_batches_in_flight() -> None:
    run = replace(ZB_6B, micros=24)
    assert [memory.in_flight(run, rank) for rank in (0, 3, 7)] == [8, 5, 1]
    assert memory.in_flight(replace(run, schedule=GPIPE), 0) == 24
    assert memory.in_flight(replace(run, schedule=ZB_2P), 0) == 15
    assert memory.in_flight(replace(run, chunks=2), 0) == (8 + 14 + 1) / 2
