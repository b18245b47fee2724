"""The profile of what a probe measured: its reference steps traced, everything else fitted by `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foretell.hardware.generations import nearest
from foretell.hardware.lookup import shipped_profile
from foretell.hardware.profile import Measured, Profile
from foretell.hardware.types import Device
from foretell.trace.record.collection import no_collection

if TYPE_CHECKING:
    from foretell.price.kernels.ops import OpModel


def fit_profile(measured: Measured, device: Device, progress: Callable[[str, float], None] = lambda doing, share: None) -> Profile:
    """The profile of what was measured: ops, host, the step around them, watts. What a shared probe has no time for, the full
    probe of the nearest device says, corrected by what was measured."""
    from foretell.hardware.probe.cases.steps import parts
    from foretell.price.calibrate.fit import calibrate
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    capability = None if device.backend == "cpu" else device.compute_capability or (9, 0)
    steps = []
    with no_collection():
        for place, step in enumerate(measured.steps):
            source, recipe = parts(step["config"])
            progress(f"tracing {source.model}", 0.3 * place / len(measured.steps))
            steps.append((step, capture(partial(load, source), recipe, capability=capability)))
        progress("fitting", 0.3)
        found = calibrate(measured, device, steps, basis_of(device) if measured.mode == "share" else None)
    profile = measured.profile(
        ops=found.ops.to_dict(), host=found.host.to_dict(), fitted=found.fitted(), accuracy=found.accuracy()
    )
    return replace(profile, figures=device.to_dict())


def basis_of(device: Device) -> OpModel | None:
    """What the full probe that travels with foretell says of a device's ops, at its rates."""
    from foretell.price.kernels.ops import OpModel

    fuller = shipped_profile(nearest().get(device.backend, ""))
    return OpModel.from_dict(device, fuller.ops) if fuller is not None else None
