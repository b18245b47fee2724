"""How fast what lives elsewhere comes and goes: states and weights beside a step, activations within it; from measured copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster, Device
from foretell.lower.offload.states import StateUnit
from foretell.plan.states import bytes_of, form_of, width_of_weights
from foretell.plan.types import Mesh, Plan

REACHED = 0.8
"""Of a device's memory bandwidth by an update."""
TOUCHED = {"split": 68, "int8": 368, "split-int8": 422}
"""Form → bytes of device memory that an update moves for each element, counted over its element-wise kernels; others have one. Of
8-bit codes 1.6 times what was counted (230 and 264): fitted to the steps of two rows of an H200; that their roots take so long is assumed."""
DISK_ROWS = ("disk-read", "disk-write", "disk-both")
TOUCHED_USUALLY = 34
"""Bytes of device memory that an update moves for each element: states there and back, the gradient, and fp32 copies."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of moving and updating states."""

    up: float
    down: float
    """Bytes a second each way while both are busy."""
    device: float
    """Bytes of device memory a second."""
    cpu: float | None = None
    """Elements that the CPU updates a second, alone; None where nobody measured it."""
    cpu_beside: float | None = None
    """The same while states move both ways."""
    link_beside: float | None = None
    """Bytes a second each way while the CPU updates."""
    disk: float | None = None
    """Bytes a second that are read from the disk and written again."""

    def together(self, bytes_each: float, share: float) -> Rates:
        """The rates of a step whose CPU updates a share: each is slowed for as long as the other works."""
        if not share or self.cpu is None:
            return self
        beside = self.cpu_beside or self.cpu
        slowed = min(self.up, self.link_beside or self.up)
        link, cpu = min(self.up, self.down), self.cpu
        for _ in range(8):
            moving, updating = (1 - share) * bytes_each / link, share / cpu
            link = _mean(slowed, min(self.up, self.down), min(1.0, updating / moving) if moving else 0.0)
            cpu = _mean(beside, self.cpu, min(1.0, moving / updating))
        return replace(self, up=link, down=link, cpu=cpu)

    def balance(self, bytes_each: float) -> float:
        """The CPU's share with which it and the link are done together; 0 where its speed is not known."""
        beside = self.cpu_beside or self.cpu
        if not beside:
            return 0.0
        link = bytes_each / min(self.up, self.down, self.link_beside or self.up)
        return link / (link + 1 / beside)


def _mean(slow: float, fast: float, share: float) -> float:
    return slow * share + fast * (1 - share)


@dataclass(frozen=True, kw_only=True)
class OffloadBytes:
    """Bytes that each element of a unit takes along."""

    states: float
    weight: int
    cpu_share: float = 0.0
    early: bool = False
    """Nothing is clipped: units are updated as backward leaves them."""
    touched: int = TOUCHED_USUALLY
    """Bytes of device memory that an update moves."""


def neighbours(mesh: Mesh, cluster: Cluster) -> int:
    """Ranks that share a machine: its cores, and its memory."""
    return min(mesh.world, cluster.devices_per_node)


def rates(profile: Profile, device: Device, ranks: int = 1) -> Rates | None:
    """From what the probe measured; None where it did not measure copies both ways at once. So many ranks share a machine's
    cores; each is taken to have its link for itself."""
    rows = {name: _largest(profile, name) for name in ("duplex", "duplex-beside", "adamw", "adamw-beside", *DISK_ROWS)}
    both = rows["duplex"]
    if both is None:
        return None
    each = both["bytes"] / 2 / both["seconds"]
    slowed = rows["duplex-beside"]
    cpu, beside = ((row["elements"] / row["seconds"] / ranks if row else None) for row in (rows["adamw"], rows["adamw-beside"]))
    return Rates(
        up=each, down=each, device=REACHED * device.memory_bandwidth_bytes_per_second, cpu=cpu, cpu_beside=beside,
        link_beside=slowed["bytes"] / 2 / slowed["seconds"] if slowed else None,
        disk=_disk(*(rows[name] for name in DISK_ROWS)),
    )  # fmt: skip


def _disk(read: Mapping[str, Any] | None, write: Mapping[str, Any] | None, both: Mapping[str, Any] | None) -> float | None:
    """Bytes a second that are read and written again: at once as that was measured, else in turn."""
    if both is not None:
        return float(both["bytes"] / 2 / both["seconds"])
    return 1 / (read["seconds"] / read["bytes"] + write["seconds"] / write["bytes"]) if read and write else None


def _largest(profile: Profile, name: str) -> Mapping[str, Any] | None:
    return max((copy for copy in profile.copies if copy["name"] == name), key=lambda copy: copy["bytes"], default=None)


def priced(units: Sequence[StateUnit], plan: Plan, how: Rates) -> bool:
    """Whether all that the plan moves and updates has a measured speed."""
    on_disk = any(unit.away and not unit.on_host for unit in units)
    return (not plan.cpu_share or how.cpu is not None) and (not on_disk or how.disk is not None)


def load_of(plan: Plan) -> OffloadBytes:
    """What an element takes along."""
    width = width_of_weights(plan)
    form = form_of(plan)
    touched = TOUCHED.get(form, TOUCHED_USUALLY)
    return OffloadBytes(states=bytes_of(form, width), weight=width, cpu_share=plan.cpu_share, early=plan.clip is None, touched=touched)


def beside(units: Sequence[StateUnit], plan: Plan, how: Rates) -> float:
    """Seconds a step that the link is busy, the busier way."""
    load = load_of(plan)
    through = sum(unit.elements for unit in units if unit.away) * (1 - load.cpu_share) * load.states
    new = sum(unit.elements for unit in units if unit.away) * load.cpu_share * load.weight
    gone = sum(unit.elements for unit in units if unit.streamed) * load.weight
    return (through + new + gone * 3 * plan.accumulate) / min(how.up, how.down)


# ---------------------------------------------------------------------- activations


@dataclass(frozen=True)
class CopyRates:
    """Bytes a second of one way at a time."""

    down: float
    up: float


def copy_rates(profile: Profile | None, plan: Plan) -> CopyRates | None:
    """From what the probe measured of the link, and of the disk where the plan needs it; None where it did not."""
    modes = {residency.mode for residency in plan.blocks.values()}
    names = [("d2h-pinned", "h2d-pinned"), *([("disk-write", "disk-read")] if "disk" in modes else [])]
    found = [(_rate(profile, down), _rate(profile, up)) for down, up in names]
    downs, ups = [down for down, _ in found if down], [up for _, up in found if up]
    return CopyRates(min(downs), min(ups)) if len(downs) == len(ups) == len(names) else None


def _rate(profile: Profile | None, name: str) -> float | None:
    rows = [copy for copy in profile.copies if copy["name"] == name] if profile is not None else []
    largest = max(rows, key=lambda copy: copy["bytes"], default=None)
    return largest["bytes"] / largest["seconds"] if largest else None
