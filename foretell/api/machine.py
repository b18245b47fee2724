"""Measuring machines, sharing what was measured, and jobs side by side on one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.hardware import Cluster, parse
from foretell.notebook import Displayable
from foretell.options import ProbeOptions
from foretell.units import gib

if TYPE_CHECKING:
    from foretell.hardware.profile import Measured, Profile
    from foretell.hardware.share.file import SharedProbe
    from foretell.hardware.types import Device
    from foretell.search.profiles.shared import Addition
    from foretell.simulate.beside import Together


@dataclass(frozen=True, kw_only=True, repr=False)
class ProbeAnswer(Displayable):
    """What was measured of this machine, and the profile that predictions rest on from now on."""

    measured: Measured
    profile: Profile
    path: Path

    def to_json(self) -> dict[str, Any]:
        from foretell.hardware.probe.summary import summary

        return {
            **summary(self.measured), "profile": str(self.path), "accuracy": dict(self.profile.accuracy), "torch": self.profile.torch,
            "date": self.profile.date,
        }  # fmt: skip

    def headline(self) -> str:
        found = self.to_json()
        return f"{found['device']}, {found['mode']} probe of {found['rows']:,} ops, kept in {self.path}"

    def rows(self) -> Sequence[tuple[str, str]]:
        found = self.to_json()
        rates = [(f"matrix products, {dtype}", f"{rate / 1e12:,.2f} TFLOP/s") for dtype, rate in found["product_flops_per_second"].items()]
        return [*rates, *((name, f"{rate / 1e9:,.2f} GB/s") for name, rate in found["copy_bytes_per_second"].items())]


def probe(**given: Any) -> ProbeAnswer:
    """Measure this machine: what ops, copies, launches and watts cost here. Predictions then rest on it.

    About half a minute; with `full=True` some minutes, and better predictions.
    """
    from foretell.hardware.probe import under_torchrun

    if under_torchrun():
        raise UserError("probe is called under torchrun", "torchrun -m foretell probe measures what joins the ranks")
    options = ProbeOptions(**given)
    mode = "full" if options.full else "quick"
    out = Path(options.out) if options.out is not None else None
    found = probe_machine(options.device, mode, out=out, resume=options.resume, force=options.force, progress=options.progress)
    return ProbeAnswer(measured=found[0], profile=found[1], path=found[2])


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


@dataclass(frozen=True, repr=False)
class Hardware(Displayable):
    """Devices and what joins them, each figure with its source."""

    cluster: Cluster

    def to_json(self) -> dict[str, Any]:
        return self.cluster.to_dict()

    def headline(self) -> str:
        one, count = self.cluster.device, self.cluster.count
        return f"{count} × {one.name}" if count > 1 else f"{one.name}, {gib(one.memory_bytes)}"

    def rows(self) -> Sequence[tuple[str, str]]:
        one = self.cluster.device
        found = [("memory", gib(one.memory_bytes)), ("memory bandwidth", f"{one.memory_bandwidth_bytes_per_second / 1e9:,.0f} GB/s")]
        links = (("between devices", self.cluster.intra), ("between nodes", self.cluster.inter))
        return [*found, *((name, link.name) for name, link in links if link is not None and self.cluster.count > 1)]


@dataclass(frozen=True, repr=False)
class Listing(Displayable):
    """What is known by name; to be walked over."""

    kind: str
    """devices, models."""
    items: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.items)

    def to_json(self) -> dict[str, Any]:
        return {self.kind: list(self.names)}

    def headline(self) -> str:
        return f"{len(self.items)} {self.kind}: {', '.join(self.names[:6])}, ..."

    def rows(self) -> Sequence[tuple[str, str]]:
        return [(one.name, getattr(one, "summary", "") or gib(one.memory_bytes)) for one in self.items]


def hardware(name: str | None = None) -> Hardware | Listing:
    """The devices known by name; or one, a number of them, this machine (`auto`) or a cluster file, as `--on` takes it."""
    from foretell.hardware import devices
    from foretell.hardware.share import added

    return Listing("devices", (*devices(), *added.devices())) if name is None else Hardware(parse(name, apple=True))


def zoo(name: str | None = None, **wanted: str | None) -> Listing:
    """The models known by name; those of one name or module, or of a `task`, `domain`, `motif`, `level` or `paper`."""
    from foretell.prove.zoo_models import found

    if unknown := wanted.keys() - {"task", "domain", "motif", "level", "paper"}:
        raise TypeError(f"zoo() has no argument {unknown.pop()}; it has name, task, domain, motif, level, paper")
    return Listing("models", tuple(entry for card in found(name, **wanted) for entry in card.entries))


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
