"""Plans that move activations, predicted: beside a real run on this CPU, whose allocator tells what is alive, and by what must hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.lower.offload import activations
from foretell.plan.blocks import compress
from foretell.plan.recipe import model_of
from foretell.plan.types import Plan, Residency
from foretell.price import offload
from foretell.runtime.offload.saved import OffloadedActivations
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.plan import Options, PlanCost, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record import on_cpu as here
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

LEAST = 4096
TEXT = {"layers": 6, "dim": 64, "heads": 2, "vocab_size": 32, "context": 64}
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=4, seq=64),
    "bert": Source(model="bert-tiny", overrides={**TEXT, "vocab_size": 128}, micro_batch=4, seq=64),
    "t5": Source(model="t5-tiny", micro_batch=4, seq=64,
                 overrides={"layers": 3, "dim": 64, "heads": 2, "head_dim": 32, "ffn": 128, "vocab_size": 32}),
    "resnet": Source(model="resnet50", micro_batch=8, image=32,
                     overrides={"depth1": 3, "depth2": 3, "depth3": 1, "depth4": 1, "width": 8, "classes": 5}),
}  # fmt: skip
LARGE = Source(model="gpt2-medium", overrides={"layers": 6, "vocab_size": 4096}, micro_batch=16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST", LEAST)


def plan_of(source: Source, blocks: dict[str, str], **more: Any) -> Plan:
    kept = compress({path: Residency(mode=mode) for path, mode in blocks.items()})
    return Plan(**{"model": model_of(source), "hardware": "H200", "precision": "fp32", "clip": None, "micro_batch": source.micro_batch,
                   "blocks": kept, **more})  # fmt: skip


BETWEEN = pytest.mark.slow(reason="a number of blocks between those of the tests that run")
LINE = pytest.mark.slow(reason="another model of one stack of blocks")


@pytest.mark.parametrize(("name", "kept"), [
    pytest.param("t5", 2, marks=LINE), ("resnet", 1), pytest.param("gpt", 0, marks=LINE),
    pytest.param("gpt", 2, marks=BETWEEN), pytest.param("gpt", 4, marks=BETWEEN), pytest.param("bert", 3, marks=LINE),
])  # fmt: skip
def test_what_moves_and_what_is_left_is_what_a_run_shows(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, recipe = MODELS[name], Recipe(optimizer="sgd", clip=None, precision="fp32")
    trace = here.trace_as_cpu(source, recipe)
    blocks = trace.meta["blocks"]
    assert isinstance(blocks, (list, tuple))
    modes = {path: "host" if place < len(blocks) - kept else "keep" for place, path in enumerate(blocks)}
    plan = plan_of(source, modes)
    runs: list[OffloadedActivations] = []

    def moving(asked: Source) -> Workload:
        workload = load(asked)
        runs.append(OffloadedActivations(workload.model, modes, torch.device("cpu"), least=LEAST))
        return workload

    monkeypatch.setattr(here, "load", moving)
    measured, _ = here.measure_on_cpu(source, recipe, steps=3)
    said = sum(trace.storages[number].nbytes for found in activations.groups_of(trace, plan).values() for number in found)
    assert runs[0].moved.down == 3 * said > 0
    assert activations.host_bytes(trace, plan) == runs[0].hosts.needed
    moved = activations.away(trace, plan, watched=False)
    predicted = peak_live(moved, ("first_step", "steady_step"))
    assert predicted == pytest.approx(measured, rel=0.02)
    if kept < 4:
        assert predicted < 0.9 * peak_live(trace, ("first_step", "steady_step"))


@pytest.fixture(scope="module")
def large() -> dict[str, Trace]:
    def traced(how: str) -> Trace:
        return capture(lambda: load(LARGE), Recipe(precision="bf16-autocast", recompute=how))

    return {"keep": traced("none"), "recompute": traced("full")}


def predicted(traces: dict[str, Trace], blocks: dict[str, str], **more: Any) -> PlanCost:
    asked = plan_of(LARGE, blocks, precision="bf16-mixed", **more)
    return predict_plan(traces, asked, parse("H200"), Options(profile_of=find_profile))


def test_seconds_are_those_of_the_link_where_it_is_slow_and_nothing_where_it_is_not(large: dict[str, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {f"blocks.{place}": "host" for place in range(4)}
    kept = predicted(large, {}).time
    asked = plan_of(LARGE, blocks)
    nbytes = sum(large["keep"].storages[number].nbytes for found in activations.groups_of(large["keep"], asked).values() for number in found)
    found = {}
    for rate in (1e9, 1e15):
        monkeypatch.setattr(offload, "copy_rates", lambda *_, rate=rate: offload.CopyRates(rate, rate))
        found[rate] = predicted(large, blocks).time
    assert kept is not None and found[1e9] is not None and found[1e15] is not None
    assert found[1e15].step_seconds == pytest.approx(kept.step_seconds, rel=0.25)  # what the host does for them is left
    assert found[1e15].breakdown["waiting_for_copies"] < 0.01 * kept.step_seconds
    assert 2 * nbytes / 1e9 < found[1e9].step_seconds + nbytes / 4e9 < 2 * nbytes / 1e9 + 2 * kept.step_seconds + nbytes / 2e9
    assert found[1e9].binds == "link"


def test_bytes_and_seconds_lie_between_keeping_and_computing_again(large: dict[str, Trace]) -> None:
    names = [f"blocks.{place}" for place in range(6)]
    kept, again = predicted(large, {}), predicted(large, dict.fromkeys(names, "recompute"))
    moved = predicted(large, dict.fromkeys(names[:4], "host"))
    mixed = predicted(large, {**dict.fromkeys(names[:2], "host"), **dict.fromkeys(names[2:4], "recompute")})
    for one in (moved, mixed):
        assert again.worst.memory.allocated_bytes < one.worst.memory.allocated_bytes < kept.worst.memory.allocated_bytes
    beside = moved.worst.memory.host_bytes - kept.worst.memory.host_bytes
    assert beside >= kept.worst.memory.allocated_bytes - moved.worst.memory.allocated_bytes > 0.4 * beside


def test_moving_within_one_memory_is_not_predicted(large: dict[str, Trace]) -> None:
    with pytest.raises(UserError, match="host and device are one"):
        predict_plan(large, plan_of(LARGE, {"blocks.0": "host"}), parse("CPU"), Options())
