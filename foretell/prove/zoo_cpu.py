"""What is checked of an entry on this CPU by a worker of its own: trace, bytes and seconds, and the plan that is asked for.

Each function is called in a worker of `runtime.process.pool`: a model that crashes takes the worker down and not the check.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretell.hardware import Cluster
from foretell.hardware.lookup import find_profile
from foretell.price.kernels.features import launches
from foretell.prove.zoo_plan import HereTraces, Planned, planned
from foretell.simulate.pace import Pace, ProfileSeconds, pace_of, said
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.types import Op, Trace

if TYPE_CHECKING:
    from foretell.price.time import Machine
    from foretell.trace.record.step import Step

Pacers = Mapping[str, tuple[ProfileSeconds, float]]
"""Model → its seconds by the profile, and measured."""
RECIPE = Recipe(precision="fp32")
SAMPLES = 2
PACERS = (
    "llama-tiny", "bert-tiny", "ssm-tiny", "mixtral-tiny", "t5-tiny", "vit-tiny", "unet-tiny", "dit-tiny", "resnet-tiny", "graphsage-tiny",
)  # fmt: skip
"""Small steps that say how this CPU runs now beside what its profile says: some are products, some wait for Python."""
WARM, BURST, ROUNDS, MOST_SECONDS = 3, 4, 4, 2.0
"""Of a try: steps of a model before those that are timed, at first and one after each other model; timed ones at a time; how often
the models take turns; for how long each at most."""
TRIES = 3
"""That every step is timed, pacers too, with other work between them: the least of all counts, since a core that others share
only takes longer."""
BEAT = ("llama-tiny", "t5-tiny")
"""Pacers that are timed again with every row, since a core may be slower for minutes: by as much as they are slower than at the
beginning, the pace is."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Predicted and measured of a step."""

    ops: int
    uncovered: tuple[str, ...]
    predicted_bytes: int
    measured_bytes: int
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    pace: Pace | None = None


def prepare(_rank: int, _world: int) -> None:
    """Ctrl-C is for whoever asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def look(_rank: int, _world: int, source: Source, phases: tuple[str, ...], pacers: Pacers) -> Seen:
    """Trace, predict and really run: one phase, or several in turn over the same weights."""
    from foretell.simulate.memory.replay import peak_live

    sources = [with_phase(source, phase) for phase in phases] or [source]
    known = _machine() if pacers else None
    beat = [name for name in BEAT if name in pacers and name != source.model]
    tries = [_tries(sources, beat, known)]
    trace = _traced(sources, phases)
    tries.append(_tries(sources, beat, known))
    seen = Seen(
        ops=sum(len(program.ops) for program in trace.programs.values()), uncovered=uncovered(trace),
        predicted_bytes=peak_live(trace, tuple(trace.schedule)), measured_bytes=_peak(sources),
    )  # fmt: skip
    if known is None:
        return seen
    tries.append(_tries(sources, beat, known))
    least = [min(each) for each in zip(*tries, strict=True)]
    pace = pace_without(pacers, source.model).slowed(drift([pacers[name][1] for name in beat], least[len(sources) :]))
    measured = sum(least[: len(sources)])
    return replace(seen, predicted_seconds=pace.seconds(said(trace, known)), measured_seconds=measured, pace=pace)


def _tries(sources: list[Source], beat: list[str], known: Machine | None) -> list[float]:
    """Seconds of a step of each, and of the beat, once more."""
    every = [*sources, *(Source(model=name, micro_batch=SAMPLES) for name in beat)]
    return _timed(every) if known is not None else []


def drift(before: list[float], now: list[float]) -> float:
    """How many times as long the same models take now."""
    return sum(now) / sum(before) if before else 1.0


def plan_for(_rank: int, _world: int, source: Source) -> Planned:
    """The plan for half the memory."""
    options = Options(profile_of=functools.cache(find_profile))
    return planned(source, _cluster(), HereTraces(capability=None, cache=False), options)


def with_phase(source: Source, phase: str) -> Source:
    return replace(source, overrides={**source.overrides, "phase": phase}) if phase else source


# ---------------------------------------------------------------------------------------------- trace


def _traced(sources: list[Source], phases: tuple[str, ...]) -> Trace:
    from foretell.trace.fold.phases import in_turn
    from foretell.trace.record.on_cpu import trace_as_cpu

    traces = [trace_as_cpu(one, RECIPE) for one in sources]
    return in_turn(dict(zip(phases, traces, strict=True))) if len(traces) > 1 else traces[0]


def uncovered(trace: Trace) -> tuple[str, ...]:
    """Ops that compute and have no rule for FLOPs, or of which it is not known what they read and write."""
    blind = {op.name for op in trace.ops() if _computes(op) and not (op.inputs or op.outputs)}
    return tuple(sorted({*trace.ops_without_flop_rule, *blind}))


def _computes(op: Op) -> bool:
    return op.name.startswith("aten.") and (bool(op.allocates) or bool(op.flops)) and launches(op)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- bytes


def _peak(sources: list[Source]) -> int:
    from foretell.trace.record.on_cpu import measure_on_cpu

    return measure_on_cpu(sources[0], RECIPE)[0] if len(sources) == 1 else _peak_in_turn(sources)


def _peak_in_turn(sources: list[Source], rounds: int = 2) -> int:
    """Of steps of all phases in turn over the same weights, each phase with an optimizer of its own."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from foretell.trace.record.collection import no_collection
    from foretell.trace.record.on_cpu import peaks_of, quiet_stderr, run_once

    steps = _sharing(sources)
    tensors = [tensor for step in steps for tensor in (*step.model.parameters(), *step.model.buffers())]
    tensors += [leaf for step in steps for leaf in torch.utils._pytree.tree_leaves(step.workload.batch)]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)}
    with no_collection(), quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for step in steps * rounds:
            run_once(step)
    return int(sum(held.values())) + peaks_of(recorded.profiler.kineto_results.events())[0]


def _sharing(sources: list[Source]) -> list[Step]:
    """A step for each phase; weights and buffers are those of the first, and so is a batch of equal shapes."""
    import torch
    from torch import nn

    from foretell.trace.record.step import Step

    made = []
    for source in sources:
        torch.manual_seed(0)
        made.append(load(source))
    first = made[0]
    for position, other in enumerate(made[1:], 1):
        for own, theirs in zip(other.model.modules(), first.model.modules(), strict=True):
            for key, parameter in own._parameters.items():
                shared = theirs._parameters[key]
                if parameter is not None and shared is not None:
                    own._parameters[key] = nn.Parameter(shared.detach(), parameter.requires_grad)
            own._buffers = theirs._buffers
        if _shapes(other.batch) == _shapes(first.batch):
            made[position] = replace(other, batch=first.batch)
    steps = [Step(one, RECIPE, device_type="cpu") for one in made]
    for step in steps:
        step.create_optimizer()
    return steps


def _shapes(batch: Any) -> list[Any]:
    import torch

    leaves = torch.utils._pytree.tree_leaves(batch)
    return [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


# ---------------------------------------------------------------------------------------------- seconds


def pace_now(_rank: int, _world: int) -> Pacers:
    """Seconds of other small models by this CPU's profile and measured now; none without a profile."""
    known = _machine()
    if known is None:
        return {}
    from foretell.trace.record.on_cpu import trace_as_cpu

    sources = {name: Source(model=name, micro_batch=SAMPLES) for name in PACERS}
    tries = [_timed(list(sources.values())) for _ in range(TRIES)]
    least = dict(zip(sources, map(min, zip(*tries, strict=True)), strict=True))
    return {name: (said(trace_as_cpu(source, RECIPE), known), least[name]) for name, source in sources.items()}


def pace_without(pacers: Pacers, name: str) -> Pace:
    """The pace by all of them but the one in question."""
    return pace_of([pair for pacer, pair in pacers.items() if pacer != name])


def _timed(sources: list[Source]) -> list[float]:
    """The least seconds of a step of each on one thread, while it has a core. They take turns, a few steps at a time: who else uses
    the machine slows all of them alike, and counts as little as can be."""
    import torch

    from foretell.trace.record.on_cpu import run_once

    torch.set_num_threads(1)
    steps = [_step(source) for source in sources]
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(ROUNDS):
        for step, seconds in zip(steps, found, strict=True):
            for number in range((1 if turn else WARM) + BURST):
                if turn and sum(seconds) > MOST_SECONDS:
                    break
                before = time.thread_time()
                run_once(step)
                if number >= (1 if turn else WARM):
                    seconds.append(time.thread_time() - before)
    return [min(seconds) for seconds in found]


def _step(source: Source) -> Step:
    import torch

    from foretell.trace.record.step import Step

    torch.manual_seed(0)
    step = Step(load(source), RECIPE, device_type="cpu")
    step.create_optimizer()
    return step


def _cluster() -> Cluster:
    return Cluster(device=_device())


@functools.cache
def _device() -> Any:
    from foretell.hardware.probe.machine import device_of

    return device_of("cpu")


@functools.cache
def _machine() -> Machine | None:
    """One thread of this CPU, as a profile of one thread describes it or a CPU like it; the own one of all threads else."""
    from foretell.hardware.probe.machine import cpu_name
    from foretell.price.machine import machine

    name, reported = _device().name, cpu_name()
    return machine(_device(), find_profile(name, reported_as=reported, threads=1) or find_profile(name, reported_as=reported))
