"""Corrections that a run teaches: how much longer ops and the host take on this machine than its profile says.

A run has one sure number, the seconds of its step; where a few of its steps were watched, also how they divide among
products, ops that move bytes, and the host. What binds the step is corrected, and nothing else: a step that waits for
its host says little about the device. A factor is learned only from a run that was calm enough, is bounded, and is
written into a copy that is the user's own.

    time predicted, run measured ─► learn ─► factors: compute, memory, host ─► corrected profile ─► next prediction
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foretell.hardware.profile import Profile
from foretell.price.host import START, HostModel
from foretell.price.kernels.features import FREE, RULES
from foretell.price.time import COMPUTE_KINDS
from foretell.quantities import Time

COMPUTE, MEMORY, HOST = "compute", "memory", "host"
KINDS = (COMPUTE, MEMORY, HOST)
LEAST_STEPS = 20
"""Steps that a run must have had besides its first ones."""
MOST_SPREAD = 0.25
"""Between the quickest and the slowest tenth of steps, as a share of the median."""
MOST_DRIFT = 0.10
"""Between the first and the last third of a run."""
LEAST_ERROR = 0.01
"""What is nearer than this needs no correction."""
LEAST_SHARE = 0.05
"""Share of a step below which a kind is left as it is: its seconds are lost in the others' noise."""
MOST_OFF = 3.0
"""A step that is further off than this factor, either way, has something else the matter."""
BOUNDS = (0.5, 2.0)
"""Of one run's factors."""
WHOLE_BOUNDS = (0.2, 5.0)
"""Of the factors of ops inside a step, after all corrections."""
BUSY = 0.85
"""Share of a step in which a device must really have computed, where it is to be corrected."""
ROUNDS = 4
KEPT = 20
"""Corrections that a profile remembers."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What of a run says something about its machine."""

    name: str
    step_seconds: float
    steps: int
    spread: float
    """(p90 - p10) / median of its steps."""
    drift: float
    """Last third of the steps against the first, as a share."""
    ranks: int = 1
    shares: Mapping[str, float] | None = None
    """compute, memory, host → share of a step, where steps were watched op by op."""

    @classmethod
    def of(cls, measured: Mapping[str, Any], name: str, ranks: int, shares: Mapping[str, float] | None = None) -> MeasuredRun:
        """From the JSON of a measurement."""
        seconds = float(measured["step_seconds"])
        return cls(
            name=name, step_seconds=seconds, steps=int(measured["steps"]), ranks=ranks, shares=shares,
            spread=(float(measured["p90_seconds"]) - float(measured["p10_seconds"])) / seconds if seconds else 0.0,
            drift=drift(measured["stretches"]),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Factors on what the profile says, or why there are none."""

    factors: Mapping[str, float]
    """compute, memory, host → how much longer it takes than the profile says."""
    why: str = ""


def drift(stretches: Sequence[float]) -> float:
    """The last third of a run against its first, as a share; 0 where there are no thirds."""
    third = len(stretches) // 3
    if not third:
        return 0.0
    before = median(stretches[:third])
    return median(stretches[-third:]) / before - 1 if before else 0.0


def kind_of(op: str) -> str:
    """`aten::addmm` → compute, `aten::add` → memory, `aten::view` and what is no op → host."""
    library, _, name = op.partition("::")
    if library != "aten" or name in FREE:
        return HOST
    return COMPUTE if name in RULES or name in _INSIDE else MEMORY


_INSIDE = frozenset({
    "mkldnn_convolution", "slow_conv2d_forward", "_convolution", "cudnn_convolution", "_flash_attention_forward",
    "_flash_attention_backward", "_efficient_attention_forward", "_efficient_attention_backward", "_slow_conv2d_forward",
    "_slow_conv2d_backward", "mkldnn_linear", "thnn_conv2d",
})  # fmt: skip
"""Ops that the profiler sees inside those that compute."""


# ---------------------------------------------------------------- learning


def learn(time: Time, run: MeasuredRun, *, serial: bool) -> Lesson:
    """What a run says of the machine that `time` was predicted for; `serial`: the host itself computes, as a CPU does."""
    why = too_wild(run) or _bound_otherwise(time, run, serial)
    if why:
        return Lesson(factors={}, why=why)
    ratio = run.step_seconds / time.step_seconds
    if not 1 / MOST_OFF < ratio < MOST_OFF:
        return Lesson(factors={}, why=f"the step took {ratio:.3g} times as long as predicted, which is no matter of a profile")
    error = ratio - 1
    if abs(error) < LEAST_ERROR:
        return Lesson(factors={}, why=f"the step is within {LEAST_ERROR:.0%} of what was predicted: nothing to correct")
    parts = _parts(time)
    if not serial and time.binds == HOST:
        return Lesson(factors={HOST: bounded(run.step_seconds / time.step_seconds)})
    kinds = KINDS if serial else (COMPUTE, MEMORY)
    kept = [kind for kind in kinds if parts[kind] >= LEAST_SHARE * time.step_seconds]
    left = run.step_seconds - (time.step_seconds - sum(parts[kind] for kind in kept))
    if left <= 0 or not kept:
        return Lesson(factors={}, why="the step is shorter than what binds it does not explain")
    shares = {kind: (run.shares or {}).get(kind, 0.0) for kind in kept}
    if min(shares.values()) <= 0:
        shares = {kind: parts[kind] for kind in kept}  # not watched: all alike
    total = sum(shares.values())
    return Lesson(factors={kind: bounded(left * shares[kind] / total / parts[kind]) for kind in kept})


def too_wild(run: MeasuredRun) -> str:
    """Why a run says nothing about its machine; empty where it does."""
    if run.ranks > 1:
        return f"{run.ranks} ranks wait for each other: only a run of one says what a device takes"
    if run.steps < LEAST_STEPS:
        return f"{run.steps} steps were measured and {LEAST_STEPS} are needed"
    if run.spread > MOST_SPREAD:
        return f"steps differ by {run.spread:.0%} of their median, more than {MOST_SPREAD:.0%}: something else used the machine"
    if abs(run.drift) > MOST_DRIFT:
        return f"the last third of the run took {run.drift:+.0%} against the first, more than {MOST_DRIFT:.0%}"
    return ""


def _bound_otherwise(time: Time, run: MeasuredRun, serial: bool) -> str:
    if time.binds == "network" or time.exposed_communication_seconds > LEAST_SHARE * time.step_seconds:
        return "the step waits for communication, which has no factor"
    if serial or run.shares is None:
        return ""
    busy = run.shares.get(COMPUTE, 0.0) + run.shares.get(MEMORY, 0.0)
    if (time.binds == HOST) == (busy >= BUSY):
        said = "its host" if time.binds == HOST else f"the device's {time.binds}"
        return f"the step was predicted to be bound by {said}, and the device was busy for {busy:.0%} of it"
    return ""


def _parts(time: Time) -> dict[str, float]:
    products = sum(seconds for kind, seconds in time.breakdown.items() if kind in COMPUTE_KINDS)
    return {
        COMPUTE: products, MEMORY: time.breakdown.get("memory", 0.0), HOST: time.breakdown.get("waiting_for_host", 0.0),
    }  # fmt: skip


def bounded(factor: float, bounds: tuple[float, float] = BOUNDS) -> float:
    return min(max(factor, bounds[0]), bounds[1])


@dataclass(frozen=True, kw_only=True)
class ProfileCorrection:
    """A corrected profile, and the factors that made it."""

    profile: Profile
    factors: Mapping[str, float]


def teach(profile: Profile, predict: Callable[[Profile], Time], run: MeasuredRun, *, serial: bool, date: str) -> ProfileCorrection | str:
    """The profile corrected by a run, in a few rounds, since a step is no plain sum; or why it is left as it is."""
    factors: dict[str, float] = {}
    time, best = predict(profile), None
    least = abs(time.step_seconds / run.step_seconds - 1)
    why = ""
    for _ in range(ROUNDS):
        lesson = learn(time, run, serial=serial)
        if not lesson.factors:
            why = lesson.why
            break
        factors = {kind: bounded(factors.get(kind, 1.0) * lesson.factors.get(kind, 1.0)) for kind in {*factors, *lesson.factors}}
        tried = corrected(profile, factors, run=run.name, date=date)
        time = predict(tried)
        error = abs(time.step_seconds / run.step_seconds - 1)
        if error >= least:
            break
        best, least = ProfileCorrection(profile=tried, factors=dict(factors)), error
    return best or why or "no correction brings the prediction closer"


# ---------------------------------------------------------------- writing down


def corrected(profile: Profile, factors: Mapping[str, float], *, run: str, date: str) -> Profile:
    """The profile with these factors on it, and a record of them; `date` is ISO 8601."""
    in_step = {kind: float(profile.fitted.get("in_step", {}).get(kind, 1.0)) for kind in (COMPUTE, MEMORY)}
    after = {kind: round(bounded(value * factors.get(kind, 1.0), WHOLE_BOUNDS), 4) for kind, value in in_step.items()}
    host = _slowed(profile.host, factors[HOST]) if HOST in factors else profile.host
    changes: dict[str, dict[str, float]] = {
        kind: {"before": in_step[kind], "after": after[kind]} for kind in (COMPUTE, MEMORY) if kind in factors
    }
    if HOST in factors:
        changes[HOST] = {"before": 1.0, "after": round(factors[HOST], 4)}
    record = {"date": date, "run": run, "changes": changes}
    known = [*profile.fitted.get("corrections", ()), record][-KEPT:]
    told = f"corrected on {date[:10]} by the run {run}: {', '.join(_told(kind, one) for kind, one in changes.items())}"
    return replace(
        profile, host=host, fitted={**profile.fitted, "in_step": after, "corrections": known},
        notes=(*profile.notes, told)[-KEPT:],
    )  # fmt: skip


def _told(kind: str, change: Mapping[str, float]) -> str:
    if kind == HOST:
        return f"the host takes {change['after']:.3g} times as long as before"
    words = "products and attention" if kind == COMPUTE else "ops that move bytes"
    return f"{words} take {change['after']:.3g} times as long in a step as alone, before {change['before']:.3g}"


def _slowed(host: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A host model that takes so many times as long; `call` is a share of the calls, which are slowed themselves."""
    known = dict(host) if host else HostModel(dict(START), {}).to_dict()

    def slower(values: Mapping[str, float]) -> dict[str, float]:
        return {name: value if name == "call" and values is known["weights"] else value * factor for name, value in values.items()}

    calls = known["calls"] or {"": 10e-6}
    return {
        **known, "weights": slower(known["weights"]), "calls": slower(calls), "turns": slower(known.get("turns", {})),
    }  # fmt: skip
