"""What benchmarks/zoo.py runs: one configuration of the zoo really trained, in a process of its own.

Models are built on the host as their modules say, large random weights excepted, which are drawn on the device. Building
takes no lock; moving to the device and warming up may go side by side; the timed steps have the device alone.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

LOCK = Path(tempfile.gettempdir()) / "foretell-zoo-gpu.lock"
LARGE = 2**20
"""Numbers in a tensor that is drawn on the device."""
BUILD_SECONDS, RUN_SECONDS = 75, 45
"""Limits of one configuration: until it is warm, and while it has the device alone."""
TIMED_STEPS, TIMED_SECONDS = 12, 0.4
MOST_OPS, MOST_WATCHED = 60_000, 25_000
"""A step of more ops is not profiled, or not watched op by op: that takes longer than everything else."""
SCRATCH = 2**20
"""Bytes that an op takes for itself and that are worth a line."""


@contextmanager
def door(alone: bool) -> Iterator[None]:
    """Warm-ups share the device, timed steps do not."""
    with LOCK.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def limit(seconds: int, doing: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"{doing} took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class LaterDraws:
    """Large tensors are not drawn on the host; `here` draws them where they go."""

    def __enter__(self) -> LaterDraws:
        import torch

        self.plain = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
        self.waiting: dict[Any, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}
        for name in self.plain:
            setattr(torch.Tensor, name, self._later(name))
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        for name, function in self.plain.items():
            setattr(torch.Tensor, name, function)

    def _later(self, name: str) -> Callable[..., Any]:
        def draw(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() < LARGE:
                return self.plain[name](tensor, *args, **kwargs)
            self.waiting[self._mark(tensor)] = (name, args, kwargs)
            return tensor

        return draw

    @staticmethod
    def _mark(tensor: Any) -> Any:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype

    def here(self, tensor: Any, device: str, cast: bool) -> Any:
        """The tensor on the device. With `cast` its dtype was changed since it was made, so that its draw is not known."""
        import torch

        known = self.waiting.get(self._mark(tensor)) if tensor.numel() >= LARGE else None
        if known is None and cast and tensor.numel() >= LARGE and isinstance(tensor, torch.nn.Parameter):
            known = ("normal_", (0.0, 0.02), {})
        if known is None or tensor.device.type != "cpu":
            return tensor.to(device)
        name, args, kwargs = known
        return self.plain[name](torch.empty_like(tensor, device=device, requires_grad=False), *args, **kwargs)


def built(config: dict[str, Any], device: str) -> tuple[list[Any], LaterDraws]:
    """A step for each phase, on the host, and the draws that wait for the device."""
    import torch
    from memory import parts

    from foretell.trace.load.model import load
    from foretell.trace.record.step import Step

    torch.manual_seed(0)
    source, recipe = parts(config)
    phases = str(config["overrides"].get("phase", "")).split("+")
    sources = [source] if len(phases) == 1 else [replace(source, overrides={**source.overrides, "phase": p}) for p in phases]
    with LaterDraws() as draws:
        steps = [Step(load(each), recipe, device_type=device) for each in sources]
    return steps, draws


def placed(steps: list[Any], draws: LaterDraws, device: str, cast: bool) -> None:
    """Move the first step's model and batch, let the others share its weights, make an optimizer for each."""
    import torch
    from torch import nn

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    first = steps[0].model
    first._apply(lambda tensor: draws.here(tensor, device, cast))
    batch = torch.utils._pytree.tree_map(moved, steps[0].workload.batch)
    for step in steps:
        if step is not steps[0]:
            _share(step.model, first, nn.Parameter)
        alike = _looks(step.workload.batch) == _looks(steps[0].workload.batch)
        own = batch if alike else torch.utils._pytree.tree_map(moved, step.workload.batch)
        step.workload = replace(step.workload, batch=own)
        step.create_optimizer()


def _share(model: Any, first: Any, parameter: Any) -> None:
    """Let a model have the weights and buffers of another of the same build; what it trains stays its own choice."""
    for own, other in zip(model.modules(), first.modules(), strict=True):
        for key, p in own._parameters.items():
            if p is not None:
                own._parameters[key] = parameter(other._parameters[key].detach(), p.requires_grad)
        own._buffers = other._buffers


def _looks(batch: Any) -> list[Any]:
    import torch

    return [(tuple(t.shape), t.dtype) for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]


def round_of(steps: list[Any]) -> Callable[[], None]:
    def one() -> None:
        for step in steps:
            for _ in range(step.recipe.accumulate):
                step.micro_batch()
            step.update()
            step.zero_grad()

    return one


def really(config: dict[str, Any], device: str, ops: int = 0) -> dict[str, Any]:
    """Peaks of a fresh process, median seconds of a step, how busy the device was, and whether losses are finite."""
    import torch

    cuda = device == "cuda"
    torch.set_num_threads(6 if cuda else 1)
    begun = time.perf_counter()
    with limit(BUILD_SECONDS, "building"):
        steps, draws = built(config, device)
    torch.set_num_threads(2 if cuda else 1)
    found: dict[str, Any] = {"build_seconds": round(time.perf_counter() - begun, 2)}
    one = round_of(steps)
    with door(alone=not cuda):
        begun = time.perf_counter()
        with limit(BUILD_SECONDS, "warming up"):
            placed(steps, draws, device, config["precision"] == "bf16")
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            found["resident"] = torch.cuda.memory_allocated() if cuda else None
            for _ in range(2):
                one()
            wait(cuda)
        found["warm_up_seconds"] = round(time.perf_counter() - begun, 2)
    with door(alone=True), limit(RUN_SECONDS, "running"):
        begun = time.perf_counter()
        found |= timed(one, cuda)
        found["allocated"] = torch.cuda.max_memory_allocated() if cuda else None
        found["reserved"] = torch.cuda.max_memory_reserved() if cuda else None
        found["finite"], found["losses"] = finite(steps)
        record = profiled(one) if cuda and ops <= MOST_OPS else None
        found["alone_seconds"] = round(time.perf_counter() - begun, 2)
    found["kernels"] = kernels(record, found["seconds"]) if record is not None else None
    if cuda and ops <= MOST_WATCHED:
        with door(alone=False), limit(RUN_SECONDS, "watching"):
            found |= watched(one)
    return found


def watched(one: Callable[[], None]) -> dict[str, Any]:
    """Ops of one more step as they are dispatched, counted by name; and those that take memory beside their outputs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: dict[str, int] = {}
    taken: dict[str, list[int]] = {}

    def bytes_now() -> Any:
        return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            torch.cuda.reset_peak_memory_stats()
            before = bytes_now()["current"]
            output = function(*args, **(kwargs or {}))
            after = bytes_now()
            name = str(function)
            counts[name] = counts.get(name, 0) + 1
            beside = after["peak"] - max(before, after["current"])
            if beside >= SCRATCH:
                entry = taken.setdefault(f"{name} {_specs((args, kwargs))} -> {_specs(output)}"[:400], [0, 0])
                entry[0], entry[1] = entry[0] + 1, max(entry[1], beside)
            return output

    with Mode():
        one()
    wait(True)
    return {"ops": counts, "scratch": dict(sorted(taken.items(), key=lambda item: -item[1][1])[:40])}


def _specs(values: Any) -> str:
    """Shapes, dtypes and layouts of tensors, and plain arguments as they are."""
    import torch

    def said(leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return str(leaf)
        dense = "" if leaf.is_contiguous() else f"@{list(leaf.stride())}"
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{dense}"

    return " ".join(said(leaf) for leaf in torch.utils._pytree.tree_leaves(values) if leaf is not None)


def wait(cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.synchronize()


def timed(
    one: Callable[[], None], cuda: bool, least_steps: int = TIMED_STEPS, least_seconds: float = TIMED_SECONDS
) -> dict[str, Any]:
    """Seconds of steps as a training loop runs them: the host may run ahead, the last step is waited for."""
    import torch

    one()
    wait(cuda)
    before = time.perf_counter()
    one()
    asked = time.perf_counter() - before
    wait(cuda)
    first = time.perf_counter() - before
    count = max(10 if first > 0.3 else least_steps, min(200, math.ceil(least_seconds / first)))
    begun = time.perf_counter()
    if cuda:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            one()
            mark.record()
        marks[-1].synchronize()
        each = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    else:
        clock = [begun]
        for _ in range(count):
            one()
            clock.append(time.perf_counter())
        each = [b - a for a, b in itertools.pairwise(clock)]
    wall = time.perf_counter() - begun
    return {
        "seconds": statistics.median(each), "wall_seconds": wall / count, "least": min(each), "most": max(each), "steps": count,
        "alone_step_seconds": first, "host_seconds": asked,
    }  # fmt: skip


def finite(steps: list[Any]) -> tuple[bool, list[float]]:
    """Whether every loss is a number after the steps so far, and the losses."""
    from foretell.trace.record.step import each_loss

    losses = [float(loss.detach()) for step in steps for loss in each_loss(step.workload, step.autocast)]
    return all(math.isfinite(loss) for loss in losses), losses[:8]


def profiled(one: Callable[[], None]) -> Any:
    """The record of one step's kernels; None where the profiler does not work."""
    import torch
    from torch.profiler import ProfilerActivity

    try:
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as record:
            one()
            torch.cuda.synchronize()
    except TimeoutError:
        raise
    except Exception:
        return None
    return record


def kernels(record: Any, seconds: float) -> dict[str, Any] | None:
    """Kernels of the profiled step, the longest by name with count and microseconds; busy share of a step's seconds."""
    import torch

    found: dict[str, list[float]] = {}
    try:
        for event in record.profiler.kineto_results.events():
            if event.device_type() == torch._C._autograd.DeviceType.CUDA:
                entry = found.setdefault(event.name()[:100], [0, 0.0])
                entry[0] += 1
                entry[1] += event.duration_ns() / 1e3
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    busy = sum(us for _, us in found.values())
    top = sorted(found.items(), key=lambda item: -item[1][1])[:25]
    return {
        "busy_us": round(busy, 1), "busy_share": round(busy / 1e6 / seconds, 3), "count": int(sum(n for n, _ in found.values())),
        "top": {name: [int(n), round(us, 1)] for name, (n, us) in top},
    }  # fmt: skip
