"""Correct the profile of a machine by a run on it; see `price.calibrate.corrections` for what is learned and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile, own_path, save
from foretell.hardware.this_machine import physical_cores
from foretell.hardware.types import Cluster
from foretell.lower.blocks import KEEP, blocks_of
from foretell.plan.types import Plan, computed
from foretell.price.calibrate import corrections
from foretell.quantities import Time
from foretell.search.traces.needed import Traces
from foretell.simulate.plan import Options, modes_of, predict_plan


@dataclass(frozen=True, kw_only=True)
class Taught:
    """What a run taught the profile of its machine."""

    why: str
    """Why nothing was learned; empty where something was."""
    measured_seconds: float
    before_seconds: float | None = None
    """Predicted for the run's step with the profile as it was."""
    after_seconds: float | None = None
    """And with the corrected one."""
    factors: Mapping[str, float] = field(default_factory=dict)
    profile: Path | None = None
    """Where it was written: always the user's own."""
    note: str = ""


def update_profile(plan: Plan, measured: Mapping[str, Any], run: str, device: str = "auto") -> Taught:
    """Correct the user's own profile by what a run measured (the JSON of its measurement); `run` is its name.

    A shipped profile is copied first and never touched. The plan is predicted anew with the profile as it is now, so
    that doing this twice corrects once; and it is written only where that prediction comes out closer.
    """
    seconds, cluster = float(measured["step_seconds"]), parse(plan.hardware)
    seen = corrections.MeasuredRun.of(measured, run, plan.mesh.world)
    profile, why = profile_of(measured["hardware"], cluster)
    why = why or corrections.too_wild(seen)
    if profile is None or why:
        return Taught(why=why, measured_seconds=seconds)
    from foretell.runtime.observe.kinds import shares

    seen = replace(seen, shares=shares(plan, device=device))
    predict = predictor(plan, cluster)
    before = predict(profile).step_seconds
    now = datetime.now(UTC).isoformat(timespec="seconds")
    found = corrections.teach(profile, predict, seen, serial=cluster.device.backend == "cpu", date=now)
    if isinstance(found, str):
        return Taught(why=found, measured_seconds=seconds, before_seconds=before)
    return Taught(
        why="", measured_seconds=seconds, before_seconds=before, after_seconds=predict(found.profile).step_seconds,
        factors=found.factors, note=found.profile.notes[-1], profile=save(found.profile, own_path(found.profile)),
    )  # fmt: skip


def profile_of(hardware: Mapping[str, Any], cluster: Cluster) -> tuple[Profile | None, str]:
    """The profile of the machine that a run was on, or why there is none to correct."""
    reported, device = str(hardware.get("device", "")), cluster.device
    if (device.backend == "cpu") != (hardware.get("kind") == "cpu"):
        return None, f"the run was on {reported}, and the plan's hardware is {device.name} here"
    profile = find_profile(device.name, reported_as=reported)
    here = profile is not None and profile.reported_as == reported
    if profile is None or not here or (device.backend == "cpu" and profile.cores != physical_cores()):
        return None, f"there is no profile of {reported or device.name} to correct; `foretell probe` measures one"
    threads = hardware.get("threads")
    if threads and profile.threads and threads != profile.threads:
        return None, f"the run used {threads} threads, and the profile was measured with {profile.threads}"
    return profile, ""


def predictor(plan: Plan, cluster: Cluster) -> Callable[[Profile], Time]:
    """The plan's step time as a function of the profile: traced once, costed each time."""
    predict = predictor_on(plan, cluster)
    return lambda profile: predict(profile, cluster)


def predictor_on(plan: Plan, cluster: Cluster) -> Callable[[Profile, Cluster], Time]:
    """The same for clusters of the same devices with other links."""
    device = cluster.device
    traces = Traces(capability=None if device.backend == "cpu" else device.compute_capability or (9, 0))
    kept = traces.of(plan, [KEEP])
    modes = {computed(mode) for mode in modes_of(plan, blocks_of(kept[KEEP])).values()} - {KEEP}
    kept |= traces.of(plan, sorted(modes))

    def time(profile: Profile, on: Cluster) -> Time:
        options = Options(profile_of=lambda name: profile if name == profile.device else None)
        found = predict_plan(kept, plan, on, options).time
        assert found is not None, "a profile with ops prices every plan"
        return found

    return time
