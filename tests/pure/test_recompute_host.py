"""Blocks that are computed again from inputs in host memory: the bits of plain recompute, the bytes of a real step, and where a search
offers it. Beside it, a search that offers the loss in chunks."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretell import api
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.lower.offload import activations
from foretell.plan import legal
from foretell.plan.blocks import compress
from foretell.plan.recipe import model_of, recipe_of
from foretell.plan.types import Mesh, Plan, Residency
from foretell.runtime.offload import saved
from foretell.runtime.offload.saved import OffloadedActivations
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.search.solve.climb import UNTRIED, Climb
from foretell.search.solve.found import Candidate
from foretell.search.space import layouts as space
from foretell.search.space.constraints import SearchConstraints
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.plan import predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Adapters
from foretell.trace.record import on_cpu as here
from foretell.trace.record.capture import capture
from tests.pure.test_choose import OPTIONS, Here

LEAST = 8192
"""More than the state of random numbers that a CPU keeps for each block computed again."""
TEXT = {"layers": 6, "dim": 64, "heads": 2, "vocab_size": 32, "context": 64}
LLAMA = {"layers": 4, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab_size": 64, "context": 64}
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides={**TEXT, "dropout": 0.1}, micro_batch=4, seq=64),
    "llama": Source(model="llama3-8b", overrides=LLAMA, micro_batch=2, seq=64),
    "t5": Source(model="t5-tiny", micro_batch=4, seq=64,
                 overrides={"layers": 3, "dim": 64, "heads": 2, "head_dim": 32, "ffn": 128, "vocab_size": 32}),
}  # fmt: skip
LORA = {"adapters": Adapters(rank=4), "base": {"adapted": "nf4"}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST", LEAST)
    monkeypatch.setattr(saved, "LEAST", LEAST)


def plan_of(source: Source, mode: str, **more: Any) -> Plan:
    return Plan(**{"model": model_of(source), "hardware": "H200", "precision": "fp32", "clip": 1.0, "micro_batch": source.micro_batch,
                   "blocks": {"*": Residency(mode=mode)}, **more})  # fmt: skip


def plan_for(source: Source, mode: str, blocks: Any, **more: Any) -> Plan:
    return plan_of(source, mode, blocks=compress({path: Residency(mode=mode) for path in blocks}), **more)


# ---------------------------------------------------------------------- run


OTHER = pytest.mark.slow(reason="another model, or more micro-batches, through the same hooks")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gpt", {}), pytest.param("llama", LORA, marks=OTHER), pytest.param("t5", {}, marks=OTHER),
        pytest.param("gpt", {"accumulate": 2, "loss_chunks": 2}, marks=OTHER),
    ],
)  # fmt: skip
def test_losses_and_weights_are_those_of_plain_recompute(name: str, more: dict[str, Any]) -> None:
    source = MODELS[name]
    torch.manual_seed(0)
    first = load(source)
    blocks = here.trace_as_cpu(source, recipe_of(plan_of(source, "keep", blocks={}))).meta["blocks"]
    found = []
    for mode in ("recompute", "recompute-host"):
        workload = replace(first, model=copy.deepcopy(first.model))
        plan = plan_for(source, mode, blocks, **more)
        torch.manual_seed(1)
        job = apply(workload, plan, start(plan), learning_rate=1e-2)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            losses.append(job.train_step([workload.batch] * plan.accumulate).loss)
        if mode == "recompute-host":
            assert job.away is not None and job.away.moved.down > 0
            assert job.away.moved.up + job.away.moved.forwarded == job.away.moved.down
            assert job.away.hosts.live == 0
        found.append([*losses, *(one.detach() for one in job.parameters())])
        job.close()
    assert len(found[0]) > 3 and all(map(torch.equal, *found))


@pytest.mark.parametrize(("name", "kept"), [pytest.param("gpt", 0, marks=OTHER), ("llama", 0), pytest.param("t5", 2, marks=OTHER)])
def test_what_moves_and_what_is_left_is_what_a_run_shows(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kept`: so many of the last blocks are computed again from inputs on the device."""
    source = MODELS[name]
    recipe = recipe_of(plan_of(source, "recompute", clip=None, optimizer="sgd"))
    trace = here.trace_as_cpu(source, recipe)
    blocks = list(trace.meta["blocks"])  # type: ignore[call-overload]
    modes = {path: "recompute-host" if place < len(blocks) - kept else "recompute" for place, path in enumerate(blocks)}
    plan = plan_of(source, "recompute", clip=None, blocks=compress({path: Residency(mode=mode) for path, mode in modes.items()}))
    runs: list[OffloadedActivations] = []

    def moving(model: torch.nn.Module) -> None:
        residencies = {path: Residency(mode=mode) for path, mode in modes.items()}
        found = saved.attach(model, residencies, torch.device("cpu"))
        assert found is not None
        runs.append(found)

    made = here.Step.__init__

    def prepared(step: Any, *given: Any, **how: Any) -> None:
        made(step, *given, **how)
        moving(step.model)

    monkeypatch.setattr(here.Step, "__init__", prepared)
    measured, _ = here.measure_on_cpu(source, recipe, steps=3)
    said = sum(trace.storages[number].nbytes for found in activations.groups_of(trace, plan).values() for number in found)
    assert runs[0].moved.down == 3 * said > 0
    assert activations.host_bytes(trace, plan) == runs[0].hosts.needed
    predicted = peak_live(activations.away(trace, plan, watched=False), ("first_step", "steady_step"))
    assert predicted == measured


# ---------------------------------------------------------------------- plans


@pytest.mark.parametrize(("changes", "field"), [
    ({"mesh": Mesh(pp=2)}, "blocks['*']"), ({"mesh": Mesh(tp=2)}, "blocks['*']"), ({"compile": "blocks"}, "compile"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], field: str) -> None:
    assert field in {one.field for one in legal.complaints(plan_of(MODELS["gpt"], "recompute-host", **changes))}
    assert not legal.complaints(plan_of(MODELS["gpt"], "recompute-host", mesh=Mesh(dp_shard=2)))


def test_fit_predicts_it_by_name() -> None:
    given: dict[str, Any] = {"hardware": "H200", "overrides": {**TEXT, "context": 8192, "dim": 256}, "seq": 8192, "advice_seconds": 0}
    full, host = (api.fit("gpt-tiny", **given, recompute=how) for how in ("full", "host"))
    inputs = 8192 * 256 * 4
    assert full.memory.allocated_bytes - host.memory.allocated_bytes >= 3 * inputs
    assert host.memory.host_bytes - full.memory.host_bytes == 6 * inputs
    assert host.plan["blocks"] == {"blocks.0-5": "recompute-host"}
    with pytest.raises(UserError, match="compiled code"):
        api.fit("gpt-tiny", **given, recompute="host", compile=True)
    with pytest.raises(UserError, match="host and device are one"):
        api.fit("gpt-tiny", **{**given, "hardware": "CPU"}, recompute="host")


# ---------------------------------------------------------------------- searched for

SEARCHED = {
    "deep": Source(model="gpt-tiny", seq=32768, overrides={"layers": 20, "dim": 256, "heads": 4, "vocab_size": 64, "context": 32768}),
    "wordy": Source(model="gpt-tiny", seq=8192, overrides={"layers": 2, "dim": 64, "heads": 2, "vocab_size": 50_000, "context": 8192}),
}  # fmt: skip


def climbed(name: str, memory_bytes: int, **wishes: Any) -> Climb:
    cluster = parse("H200")
    cluster = replace(cluster, device=cluster.device.with_memory(memory_bytes, "a limit for this test"))
    asked = SearchConstraints(**{"global_batch": 1, "compile": ("none",), **wishes})
    found = Climb(SEARCHED[name], cluster, "H200", asked, OPTIONS, Here(capability=(9, 0)), lambda _: None)
    found.answer()
    return found


@functools.cache
def needed(name: str, mode: str, chunks: int = 1) -> int:
    """Bytes of a device with which the plan fits."""
    source = SEARCHED[name]
    plan = plan_of(source, mode, precision="bf16-mixed", loss_chunks=chunks, blocks={})
    trace = capture(lambda: load(source), recipe_of(plan, mode))
    if mode != "keep":
        plan = plan_for(source, mode, trace.meta["blocks"], precision="bf16-mixed", loss_chunks=chunks)
    return predict_plan({mode: trace}, plan, parse("H200"), OPTIONS).worst.memory.device_bytes


def modes_of(one: Candidate) -> set[str]:
    return {residency.mode for residency in one.plan.blocks.values()}


@pytest.mark.slow(reason="a long search; that a search offers such blocks is shown by the loss in chunks below")
def test_it_is_offered_where_nothing_else_fits() -> None:
    again, host = (needed("deep", mode) for mode in ("recompute", "recompute-host"))
    between = (again + host) // 2
    assert again - host > 200 * 2**20
    found = climbed("deep", between, host=8 << 30)
    best = found._best()
    assert best is not None and modes_of(best) == {"recompute-host"}
    assert not any(one.fits for one in found.found if modes_of(one) != {"recompute-host"})
    roomy = climbed("deep", 2 * again, host=8 << 30)
    assert roomy._best() is not None and not any("recompute-host" in modes_of(one) for one in roomy.found)


@pytest.mark.slow(reason="three long searches; a host that is too small or unknown is said in test_spill.py")
def test_it_is_not_offered_without_room_on_the_host_nor_compiled() -> None:
    between = (needed("deep", "recompute") + needed("deep", "recompute-host")) // 2
    small = climbed("deep", between, host=1 << 30)
    assert small._best() is None and any("of host memory" in one.why for one in small.found)
    unknown = climbed("deep", between)
    assert unknown._best() is None and UNTRIED in unknown.remarks
    compiled = climbed("deep", between, host=8 << 30, compile=("model",))
    assert not any("recompute-host" in modes_of(one) for one in compiled.found)


def test_a_loss_in_chunks_is_offered_where_logits_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "LARGEST_MICRO_BATCH", 1)
    plain, chunked = (needed("wordy", "keep", chunks) for chunks in (1, 16))
    assert plain - chunked > 2 * 2**30
    found = climbed("wordy", chunked + (plain - chunked) // 8)
    best = found._best()
    assert best is not None and best.plan.loss_chunks > 1
    assert all(one.plan.loss_chunks == 1 for one in climbed("wordy", chunked + (plain - chunked) // 8, loss_chunks=1).found)


@pytest.mark.slow(reason="a second search; one without a compiled model is above")
def test_chunks_are_not_tried_with_a_compiled_model() -> None:
    plain, chunked = (needed("wordy", "keep", chunks) for chunks in (1, 16))
    compiled = climbed("wordy", chunked + (plain - chunked) // 8, compile=("model",))
    assert compiled.found and all(one.plan.loss_chunks == 1 for one in compiled.found)
