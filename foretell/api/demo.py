"""The demo: probe this machine, plan for it, and say how fast it is now; `foretell run demo` runs what was planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.api.machine import probe_machine
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe

if TYPE_CHECKING:
    from foretell.hardware.profile import Profile
    from foretell.plan.types import Plan
    from foretell.price.time import Machine
    from foretell.search.solve.choose import Choice

def _machine_here() -> Machine | None:
    """This CPU as its own profile describes it, or that of one like it."""
    from foretell.hardware.probe.machine import cpu_name, device_of
    from foretell.price.machine import machine

    device = device_of("cpu")
    return machine(device, find_profile(device.name, reported_as=cpu_name()))


def _pace(sources: Sequence[Source], recipe: Recipe, known: Machine, steps: int = 13, most: float = float("inf")) -> float:
    """How many times as long as its profile says this CPU takes now, by really running steps of these models."""
    from foretell.price.speeds import alone
    from foretell.simulate.time.step import plan_time
    from foretell.trace.record.on_cpu import seconds_on_cpu, trace_as_cpu

    said = sum(plan_time(trace_as_cpu(source, recipe), alone(known))[0].step_seconds for source in sources)
    return sum(seconds_on_cpu(source, recipe, least=1.0, steps=steps, most=most) for source in sources) / said


def _pace_words(pace: float, models: int) -> str:
    return f"this CPU now takes {pace:.2f} times as long as its profile says, by {models} other small models"


DEMO_MODEL = "gpt-10m"
DEMO_BATCH = {"cpu": 8, "cuda": 64}
"""Samples of a step."""
_WIDE: Mapping[str, Any] = {"dim": 384, "heads": 6, "layers": 2, "context": 256}
DEMO_PACERS = (
    Source(model="llama-tiny", overrides={**_WIDE, "kv_heads": 6, "ffn": 1024}, micro_batch=4, seq=256),
    Source(model="bert-tiny", overrides={**_WIDE, "dropout": 0.0}, micro_batch=4, seq=256),
    Source(model="vit-tiny", overrides={"dim": 384, "heads": 6, "depth": 2, "image": 128}, micro_batch=4),
)
"""Other models with products of the size that the demo's has, since small ones say little about large ones."""
LEAST_REFERENCES = 4
"""Reference steps that a probe must have had time for, if it is to be kept."""
PACING_SECONDS = 12.0
"""That they may take, on a slow or busy machine."""
PACED_BAND = (1 / 1.25, 1 / 0.75)
"""A CPU that was paced just before is expected within a quarter of the prediction."""


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """What the demo is about to run, and why."""

    choice: Choice
    plan: Plan
    """The best, with all that a comparison needs."""


def demo_profile(progress: Callable[[str, float], None] = lambda doing, share: None) -> tuple[Profile | None, Path | None]:
    """What is known of this machine, measured first if need be: the profile, and its path if it was written now.

    A CPU is probed unless it was; a GPU unless there is a profile of one like it. A probe that other programs disturbed
    too much is not kept: the profile of a CPU like it, paced, says more.
    """
    from foretell.hardware.probe import machine
    from foretell.hardware.profile import own_path

    kind = machine.choose("auto")
    about = machine.about(kind)
    known = find_profile(about.device, reported_as=about.reported_as)
    same = known is not None and known.reported_as == about.reported_as
    if same and (kind == "cuda" or own_path(about).exists()):
        return known, None
    profile, path = probe_machine(kind, "quick", progress=progress)[1:]
    if kind == "cpu" and (not profile.ops or profile.host.get("references", 0) < LEAST_REFERENCES):
        path.unlink()
        return known, None
    return profile, path


def demo_pace() -> tuple[float, str] | None:
    """Factor and words of this CPU's pace now; None on a GPU, whose speed does not depend on who else is there."""
    from foretell.hardware.probe import machine

    known = _machine_here() if machine.choose("auto") == "cpu" else None
    if known is None:
        return None
    pace = _pace(DEMO_PACERS, Recipe(precision="fp32"), known, steps=8, most=PACING_SECONDS / len(DEMO_PACERS))
    return pace, _pace_words(pace, len(DEMO_PACERS))


def demo_plan() -> DemoPlan:
    """Trace the demo's model, cost plans for this machine, and choose."""
    from foretell.hardware.probe.machine import cpu_name
    from foretell.search.solve.choose import SearchConstraints as Asked
    from foretell.search.solve.choose import choose
    from foretell.simulate.plan import Options

    cluster = parse("auto")
    on_cpu = cluster.device.backend == "cpu"
    options = Options(profile_of=lambda name: find_profile(name, reported_as=cpu_name() if on_cpu else None))
    wishes = Asked(global_batch=DEMO_BATCH["cpu" if on_cpu else "cuda"], compile=("none",))
    choice = choose(Source(model=DEMO_MODEL), cluster, "auto", wishes, options=options)
    best, cost = choice.plan, choice.best.cost if choice.best else None
    assert cost is not None
    said: dict[str, Any] = {
        **best.predicted, "device": cluster.device.name, "bands": dict(cost.worst.memory.bands),
    }  # fmt: skip
    return DemoPlan(choice=choice, plan=best.with_(predicted=said))


def paced(plan: Plan, pace: float) -> Plan:
    """A plan with its seconds for a CPU that takes so many times as long as its profile says."""
    said = dict(plan.predicted)
    if "step_seconds" not in said:
        return plan
    for name in ("step_seconds", "low_seconds", "high_seconds"):
        said[name] *= pace
    for name in {"breakdown", "phases", "spans"} & said.keys():
        said[name] = {what: seconds * pace for what, seconds in said[name].items()}
    for name in ("tokens_per_second", "samples_per_second"):
        said |= {name: said[name] / pace} if said.get(name) else {}
    if plan.mesh.world == 1:
        said["low_seconds"], said["high_seconds"] = (said["step_seconds"] * factor for factor in PACED_BAND)
    return plan.with_(predicted={**said, "pace": pace})
