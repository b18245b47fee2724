"""Really run one configuration, in the process that is asked: seconds of a step and peaks of memory.

A GPU row is run twice, each time in a fresh process: freely, for bytes and seconds; and, where it has one, under its limit
of memory (`torch.cuda.set_per_process_memory_fraction`), where PyTorch says whether it gets through.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretell.prove.types import Config
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.step import Step

WARM, TIMED_SECONDS, LEAST_STEPS, MOST_STEPS = 3, 1.2, 6, 60
"""Steps before the clock starts; steps that are timed: as many as fit into the seconds, between least and most."""
LIMITED_STEPS = 3
GATE_SECONDS = 300.0
LOCK = Path(tempfile.gettempdir()) / "foretell-gpu.lock"


# ---------------------------------------------------------------------------------------------- on a GPU


def look() -> dict[str, Any]:
    """The device of this machine, asked in a process that does nothing else with it."""
    from foretell.hardware import parse

    cluster = parse("auto")
    found = {"device": cluster.device.name, "backend": cluster.device.backend, "memory_bytes": cluster.device.memory_bytes}
    if cluster.device.backend == "cpu":
        from foretell.hardware.probe.machine import cpu_name

        return {**found, "reported_as": cpu_name(), "torch": torch.__version__}
    return {**found, "reported_as": torch.cuda.get_device_name(0), "torch": torch.__version__}


def freely(said: Mapping[str, Any], gate: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Seconds and peaks of a step with all the device's memory."""
    config = Config.from_json(said)
    one = _built(config)
    one()
    torch.cuda.synchronize()
    gate()
    with _alone():
        for _ in range(WARM):
            one()
        torch.cuda.synchronize()
        if config.compile != "none":  # compiling itself takes memory
            torch.cuda.reset_peak_memory_stats()
        found = _timed(one)
        free, total = torch.cuda.mem_get_info()
    return {
        **found, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        **({"device": total - free} if config.compile == "none" else {}),
    }  # fmt: skip


def limited(said: Mapping[str, Any], limit_bytes: int) -> dict[str, Any]:
    """Whether some steps, the first of which makes optimizer state, get through under a limit."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    try:
        one = _built(Config.from_json(said))
        for _ in range(LIMITED_STEPS):
            one()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {"ran": False, "why": str(error)[:160]}
    except RuntimeError as error:  # libraries that are refused memory say so in their own words
        if not any(word in str(error).lower() for word in ("out of memory", "alloc_failed", "not_enough")):
            raise
        return {"ran": False, "why": str(error)[:160]}
    return {"ran": True, "reserved": torch.cuda.max_memory_reserved()}


def _built(config: Config) -> Callable[[], None]:
    return built(config.source(), config.recipe())


def built(source: Source, recipe: Recipe) -> Callable[[], None]:
    """One step on the GPU: weights are small random numbers, moved as `.to(device)` would move them."""
    if recipe.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    with _no_initialisation():
        step = Step(load(source), recipe, device_type="cuda")

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            return torch.empty_like(tensor, device="cuda").normal_(0, 0.02)
        return tensor.to("cuda")

    step.model._apply(move)
    given = step.workload
    batch = torch.utils._pytree.tree_map(lambda t: t.to("cuda") if isinstance(t, torch.Tensor) else t, given.batch)
    step.workload = replace(given, batch=batch)
    step.create_optimizer()
    if recipe.compile == "blocks":
        for path in find_blocks(step.model):
            step.model.get_submodule(path).compile()
    elif recipe.compile != "none":
        step.model.compile(mode="reduce-overhead" if recipe.compile == "graphs" else None)
    return _one(step)


def _one(step: Step) -> Callable[[], None]:
    def one() -> None:
        for _ in range(step.recipe.accumulate):
            step.micro_batch()
        step.update()
        step.zero_grad()

    return one


@contextmanager
def _no_initialisation() -> Iterator[None]:
    """Large models are built on the host without touching their memory."""
    kept = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
    for name in kept:
        setattr(torch.Tensor, name, lambda tensor, *args, **kwargs: tensor)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.Tensor, name, function)


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time is timed; others may import, build and compile meanwhile."""
    with LOCK.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _timed(one: Callable[[], None]) -> dict[str, Any]:
    """Median seconds of steps as a training loop runs them: the host may run ahead, the last step is waited for."""
    began = time.perf_counter()
    one()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    count = max(LEAST_STEPS, min(MOST_STEPS, int(TIMED_SECONDS / first)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        one()
        mark.record()
    marks[-1].synchronize()
    each = sorted(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks))
    return {
        "seconds": statistics.median(each), "p10": each[count // 10], "p90": each[(9 * count) // 10 - (count % 10 == 0)],
        "steps": count,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- on a CPU


def on_cpu(said: Mapping[str, Any], pacers: Sequence[str]) -> dict[str, Any]:
    """Peak bytes of tensors and median seconds of a step on this CPU, and of other models just before and after it."""
    from foretell.trace.record.on_cpu import measure_on_cpu, seconds_on_cpu

    config = Config.from_json(said)
    before = _pace(pacers)
    seconds = seconds_on_cpu(config.source(), config.recipe(), least=1.0, steps=11, most=8.0)
    after = _pace(pacers)
    paced = {name: (before[name] + after[name]) / 2 for name in pacers}
    return {"allocated": measure_on_cpu(config.source(), config.recipe())[0], "seconds": seconds, "pacers": paced}


def _pace(models: Sequence[str]) -> dict[str, float]:
    from foretell.trace.record.on_cpu import seconds_on_cpu

    recipe = Recipe(precision="fp32")
    return {name: seconds_on_cpu(Source(model=name, micro_batch=2), recipe, least=0.15, steps=8, most=2.0) for name in models}


# ---------------------------------------------------------------------------------------------- a process of its own


def main(asked: Path) -> None:
    """A compiled configuration: built and compiled beside others, timed when all are ready."""

    def gate() -> None:
        asked.with_suffix(".ready").touch()
        began = time.monotonic()
        while time.monotonic() - began < GATE_SECONDS and not (asked.parent / "go").exists():
            time.sleep(0.1)

    try:
        found = freely(json.loads(asked.read_text()), gate)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    asked.with_suffix(".json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
