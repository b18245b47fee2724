"""Hold a trace of the CPU step against a real run on this machine's CPU."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.collection import no_collection
from foretell.trace.record.memos import forgetting
from foretell.trace.record.step import Step
from foretell.trace.types import Trace


def trace_as_cpu(source: Source, recipe: Recipe) -> Trace:
    with forgetting():
        return capture(lambda: load(source), recipe, capability=None)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """The profiler's library writes its own start and stop to the process's stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@functools.cache
def _is_kernel(event: str) -> bool:
    """Whether a trace has one op for this event: what such an op takes and gives back while it runs is its kernel's own, and
    the prediction is of tensors. Ops that PyTorch puts together from others (`linear`, `matmul`) are those others in a trace."""
    space, _, name = event.partition("::")
    if space == "foretell":
        return True
    packet = getattr(torch.ops.aten, name, None) if space == "aten" and name else None
    if packet is None:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    overloads = [f"{event}.{one}".removesuffix(".default") for one in packet.overloads() if not one.endswith("out")]
    known = [one for one in overloads if torch._C._dispatch_has_kernel(one) and "Dimname" not in one and "names" not in one]
    return any(not has_kernel(one, "CompositeImplicitAutograd") for one in known)


def measure_on_cpu(source: Source, recipe: Recipe, steps: int = 2) -> tuple[int, int]:
    """Peak bytes of a real run, without and with the scratch of kernels, from the allocator's own record."""
    torch.manual_seed(0)
    workload = load(source)
    step = Step(workload, recipe, device_type="cpu")
    if recipe.mode == "train":
        step.create_optimizer()
    resident = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for tensor in (
            *workload.model.parameters(),
            *workload.model.buffers(),
            *torch.utils._pytree.tree_leaves(step.workload.batch),
        )
        if isinstance(tensor, torch.Tensor)
        for part in ((tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,))
    }
    with no_collection(), quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for _ in range(steps if recipe.mode == "train" else 1):
            run_once(step)
    record = recorded.profiler.kineto_results
    kept, whole = peaks_of(record.events(), _not_ours(record.experimental_event_tree()))
    at_start = sum(resident.values())
    return at_start + kept, at_start + whole


def run_once(step: Step) -> None:
    if step.recipe.mode == "infer":
        step.evaluate()
        return
    for _ in range(step.recipe.accumulate):
        step.micro_batch()
    step.update()
    step.zero_grad()


def seconds_on_cpu(
    source: Source, recipe: Recipe, least: float = 2.0, steps: int = 13, most: float = float("inf")
) -> float:
    """Median seconds of a real step on this CPU, once warm: of so many steps and seconds at least; after `most` seconds,
    of as many as there are."""
    torch.manual_seed(0)
    step = Step(load(source), recipe, device_type="cpu")
    if recipe.mode == "train":
        step.create_optimizer()
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < steps or (time.perf_counter() - begun < least and len(found) < 400):
        before = time.perf_counter()
        if before - begun > most and len(found) > 4:
            break
        run_once(step)
        found.append(time.perf_counter() - before)
    return statistics.median(found[3:])


def _not_ours(tree: Iterable[Any]) -> set[int]:
    """When memory was given back that was not taken in this record: PyTorch remembers the sizes of an earlier record's blocks by
    their address, and tells them of whatever lies there later."""
    found, queue = [], list(tree)
    while queue:
        event = queue.pop()
        queue += event.children
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation):
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    ours: set[int] = set()
    strange = set()
    for when, pointer, size in sorted(found):
        if size > 0:
            ours.add(pointer)
        elif pointer in ours:
            ours.remove(pointer)
        else:
            strange.add(when)
    return strange


def peaks_of(events: Iterable[Any], not_ours: Container[int] = ()) -> tuple[int, int]:
    """Highest live bytes between kernels, and with what kernels take for themselves while they run."""
    live = kept = whole = 0
    ends: int | None = None
    ordered = sorted(events, key=lambda event: event.start_ns())
    for position, event in enumerate(ordered):
        if ends is not None and ends < event.start_ns():
            ends = None
            kept = max(kept, live)
        if event.name() == "[memory]" and event.device_type() == torch._C._autograd.DeviceType.CPU:
            live += event.nbytes() if event.start_ns() not in not_ours else 0
            whole = max(whole, live)
            kept = kept if ends is not None else max(kept, live)
        elif ends is None and _is_kernel(event.name()) and not _copies_first(ordered, position):
            ends = _end(event)
    return kept, whole


def _copies_first(events: Sequence[Any], position: int) -> bool:
    """Whether an op copies an input and else asks for nothing, as PyTorch does with conjugates: those copies are ops of their
    own in a trace."""
    ends, inner = _end(events[position]), 0
    for place in range(position + 1, len(events)):  # a slice would copy, or count, all of them for each op
        event = events[place]
        if event.start_ns() > ends:
            break
        if event.name() == "[memory]" or event.start_ns() <= inner:
            continue
        if event.name() != "aten::clone":
            return False
        inner = _end(event)
    return inner > 0


def _end(event: Any) -> int:
    return int(event.start_ns() + event.duration_ns())
