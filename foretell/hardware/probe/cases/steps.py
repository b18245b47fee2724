"""Reference steps: whole steps of small models, in which the host sets the pace on a GPU.

They say what Python, autograd and the dispatcher cost beside the ops themselves. The model that `foretell run demo`
predicts and then runs is left out on a CPU, so that its prediction stays one.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from foretell.hardware.probe.clock import host_clock
from foretell.hardware.probe.machine import nvml
from foretell.hardware.probe.power import PowerMeter
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.step import Step

MICRO_BATCH = 2
LEAST_ENERGY_SECONDS = 0.3
"""The energy counter moves in jumps: what is shorter has no watts."""
_MODELS = (
    "llama-tiny", "resnet-tiny", "bert-tiny", "convnext-micro", "mixtral-tiny", "vit-tiny", "t5-tiny", "dit-tiny",
    "lstm-tiny", "unet-tiny", "ssm-tiny", "graphsage-tiny", "tnt-tiny", "raftmlp-tiny", "scaling-mlp-tiny", "fno-tiny",
)  # fmt: skip
"""A beginning of the list has models of several kinds."""
_DEMO = "gpt-tiny"
_CHECKED = ("tnt-tiny", "raftmlp-tiny", "scaling-mlp-tiny")
"""Models that `foretell zoo check` predicts on a CPU, and so are no references there."""
_BUSY: tuple[dict[str, Any], ...] = (
    {"model": "gpt2", "micro_batch": 8, "seq": 1024}, {"model": "resnet50", "micro_batch": 128},
    {"model": "vit-b16", "micro_batch": 64}, {"model": "bert-base", "micro_batch": 32, "seq": 512},
    {"model": "unet", "micro_batch": 8}, {"model": "llama3-1b", "micro_batch": 2, "seq": 2048},
)  # fmt: skip
"""Steps that keep a large GPU busy: how much longer ops take inside a step, and at which power."""
_HEAVY = _BUSY[-1:]
"""Steps whose model takes as long to build as twenty others."""
_BUSY_MEMORY_BYTES = 60e9
"""A GPU with less memory runs the small models only."""
_MIDDLE: tuple[dict[str, Any], ...] = (
    {"model": "gpt2", "overrides": {"layers": 8, "dim": 512, "heads": 8}, "micro_batch": 1, "seq": 256},
    {"model": "resnet50", "micro_batch": 2},
    {"model": "t5-small", "overrides": {"layers": 4}, "micro_batch": 1, "seq": 64},
    {"model": "bert-base", "overrides": {"layers": 6}, "micro_batch": 1, "seq": 128, "recompute": "full"},
    {"model": "unet", "overrides": {"channels": 32}, "micro_batch": 2},
    {"model": "vit-b16", "overrides": {"depth": 8, "dim": 384, "heads": 6}, "micro_batch": 2},
    {"model": "convnext-base", "overrides": {"n3": 9}, "micro_batch": 1},
    {"model": "dit-b2", "overrides": {"depth": 6, "dim": 384, "heads": 6}, "micro_batch": 2},
    {
        "model": "llama3-1b", "micro_batch": 1, "seq": 256,
        "overrides": {"layers": 8, "dim": 512, "ffn": 1024, "heads": 8, "kv_heads": 2, "vocab_size": 8192},
    },
)  # fmt: skip
"""Deeper than the small ones, and still waiting for the host."""
_SOURCE = ("model", "micro_batch", "seq", "overrides")


def configs(kind: str, large: bool | None = None) -> list[dict[str, Any]]:
    """What is run, the most telling first; `large`: whether the GPU has memory for large models, else torch is asked."""
    if kind == "cpu":
        known = [model for model in _MODELS if model not in _CHECKED]
        trained, asked = ([_config(model, precision="fp32", mode=mode) for model in known] for mode in ("train", "infer"))
        return [*trained[:4], *asked[:2], *trained[4:], *asked[2:]]
    models = (_DEMO, *_MODELS)
    others = [
        _config(_DEMO, optimizer="adamw-foreach"), _config("resnet-tiny", optimizer="momentum"),
        _config(_DEMO, optimizer="adamw-loop"), _config(_DEMO, optimizer="sgd"),
        _config(_DEMO, clip=1.0, accumulate=3), _config(_DEMO, recompute="full"), _config("llama-tiny", recompute="full"),
    ]  # fmt: skip
    pairs = [[_config(model), _config(model, precision="fp32")] for model in models]
    if large is None:
        large = torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > _BUSY_MEMORY_BYTES
    busy = [_config(**given) for given in _BUSY] if large else []
    return [
        *(config for pair in pairs[:3] for config in pair),
        *others[:2],
        *busy[:4],
        *(_config(**given) for given in _MIDDLE),
        *busy[4:],
        *(c for pair in pairs[3:] for c in pair),
        *others[2:],
    ]


def _config(model: str, micro_batch: int = MICRO_BATCH, **recipe: Any) -> dict[str, Any]:
    return {
        "model": model,
        "micro_batch": micro_batch,
        "precision": "bf16-autocast",
        "optimizer": "adamw-fused",
        **recipe,
    }


def run_steps(
    kind: str, done: Collection[str], until: float, least_seconds: float, least_steps: int, *, heavy: bool = True
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Steps of configurations whose name is not yet done: seconds spent, and what was found; `heavy`: those too that take long to build."""
    for config in configs(kind):
        if not heavy and config in [_config(**given) for given in _HEAVY]:
            continue
        began = time.perf_counter()
        if began >= until:
            return
        if name_of(config) in done:
            continue
        found = time_step(config, kind, least_seconds, least_steps, until)
        yield time.perf_counter() - began, {"config": config, **found}


def name_of(config: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(config.items()))


def time_step(
    config: dict[str, Any], kind: str, least_seconds: float, least_steps: int, until: float = float("inf")
) -> dict[str, Any]:
    """Median seconds of a step as a training loop runs it: the host may run ahead, the last one is waited for. Of one thread on
    a CPU the least: nothing but the machine makes it longer.

    Where steps turn out so long that `until` has passed, three are enough.
    """
    torch.manual_seed(0)
    one = step_of(config, kind)
    one()
    one()
    gc.collect()
    gc.freeze()  # what a probe has gathered so far is not this step's to walk over
    _wait(kind)
    began = time.perf_counter()
    one()
    asked = time.perf_counter() - began
    _wait(kind)
    now = time.perf_counter()
    first = now - began
    wanted = max(least_steps, min(200, int(least_seconds / first) + 1))
    count = max(3, int(min(wanted, max(0.0, until - now) / first)))
    each, watts = _metered(one, count) if kind == "cuda" else (_host(one, count), None)
    gc.unfreeze()
    each.sort()
    middle = statistics.median(each)
    return {
        "seconds": each[0] if kind == "cpu" and torch.get_num_threads() == 1 else middle,
        "spread": round((each[int(0.9 * (count - 1))] - each[int(0.1 * (count - 1))]) / middle, 3),
        "host_seconds": asked, "steps": count, **({"watts": watts} if watts else {}),
    }  # fmt: skip


def parts(config: Mapping[str, Any]) -> tuple[Source, Recipe]:
    """The model and the recipe of a reference step."""
    source = Source(**{key: value for key, value in config.items() if key in _SOURCE})
    return source, Recipe(**{key: value for key, value in config.items() if key not in _SOURCE})


def step_of(config: dict[str, Any], kind: str) -> Any:
    """One call of what is returned is one step, on its device and asked for only: the device may still be at it."""
    source, recipe = parts(config)
    with torch.device(kind):  # weights are drawn there: a large model takes the host half a minute
        made = load(source)
    step = Step(made, recipe, device_type=kind)
    step.model.to(kind)
    given = step.workload
    batch = torch.utils._pytree.tree_map(lambda t: t.to(kind) if isinstance(t, torch.Tensor) else t, given.batch)
    step.workload = replace(given, batch=batch)
    if recipe.mode == "infer":
        return step.evaluate
    step.create_optimizer()

    def one() -> None:
        for _ in range(recipe.accumulate):
            step.micro_batch()
        step.update()
        step.zero_grad()

    return one


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _metered(one: Any, count: int) -> tuple[list[float], float | None]:
    """Seconds of each step, and the watts meanwhile where the driver can tell."""
    with nvml() as driver:
        meter = PowerMeter(*driver) if driver is not None else None
        before, began = meter.joules() if meter else None, time.perf_counter()
        each = _cuda(one, count)
        took, after = time.perf_counter() - began, meter.joules() if meter else None
    if before is None or after is None or took < LEAST_ENERGY_SECONDS:
        return each, None
    return each, round((after - before) / took, 2)


def _cuda(one: Any, count: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        one()
        mark.record()
    marks[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _host(one: Any, count: int) -> list[float]:
    found, now = [], host_clock()
    for _ in range(count):
        before = now()
        one()
        found.append(now() - before)
    return found
