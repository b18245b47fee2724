"""Measuring machines, sharing what was measured, and jobs side by side on one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.hardware import Cluster, parse

if TYPE_CHECKING:
    from foretell.hardware.profile import Measured, Profile
    from foretell.hardware.share.file import SharedProbe
    from foretell.hardware.types import Device
    from foretell.search.profiles.shared import Addition
    from foretell.simulate.beside import Together


def probe_machine(
    device: str, mode: str, *, out: Path | None = None, resume: bool = False, force: bool = False,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> tuple[Measured, Profile, Path]:  # fmt: skip
    """Measure this machine, fit what predictions need, and keep the profile; the rows stay in a journal beside it."""
    from foretell.hardware.probe.machine import device_of
    from foretell.hardware.probe.run import probe
    from foretell.hardware.profile import journal_path, own_path, save
    from foretell.search.profiles.fit import fit_profile

    journal = journal_path(out) if out else None
    measured = probe(device, mode, journal=journal, resume=resume, force=force, progress=progress)
    progress("fitting", 0.97)
    profile = fit_profile(measured, device_of("cpu" if measured.about.backend == "cpu" else "cuda"))
    return measured, profile, save(profile, out or own_path(measured.about))


def fit_profile(measured: Measured, device: Device) -> Profile:
    """The profile of what was measured: ops, host, the step around them, watts."""
    from foretell.search.profiles import fit as fit_profile

    return fit_profile.fit_profile(measured, device)


def beside(jobs: Sequence[Mapping[str, Any]], *, hardware: str | Cluster, cache: bool = True) -> Together:
    """What jobs need and take that share one GPU, each a process: every one names its `model`, and options as `fit` has them."""
    from foretell.search.beside import beside as costed

    return costed(jobs, hardware if isinstance(hardware, Cluster) else parse(hardware), cache=cache)


def share_machine(
    device: str, *, out: Path | None = None, resume: bool = False, force: bool = False,
    progress: Callable[[str, float], None] = lambda doing, share: None,
) -> tuple[SharedProbe, Path]:  # fmt: skip
    """Measure this machine within five minutes into one small file for others: anonymous, checked, nothing fitted. `out` is
    named after the device unless given."""
    from foretell.hardware.probe.share import share

    return share(device, out=out, resume=resume, force=force, progress=progress)


def add_shared(paths: Sequence[str | Path], progress: Callable[[str, float], None] = lambda doing, share: None) -> Addition:
    """Check probes that others shared, fit them and keep them beside own profiles: predictions rest on them from then on."""
    from foretell.search.profiles.shared import add

    return add(paths, progress)
