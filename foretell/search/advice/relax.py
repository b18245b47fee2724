"""What would fit where nothing does: each change is searched for to the end, as the command it is told as would be.

A quick search (`Again`) leaves out what does not fit by far; the whole one (`Sure`) decides. Of other devices and of
more devices the first that will do is told: the fewest, and the least memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.larger import larger
from foretell.hardware.types import Cluster
from foretell.search.solve.explain import OTHERS, Again, as_other, told
from foretell.search.space.constraints import SearchConstraints, flag
from foretell.units import gib, human_bytes

if TYPE_CHECKING:
    from foretell.search.solve.found import Finalist

TIMES = (2, 3, 4, 6, 8, 16, 32)
"""Times as many devices at which a model that does not fit is tried."""
SECONDS = 30.0
"""After which no further change is searched for."""

Sure = Callable[[Cluster, str, SearchConstraints], "Finalist | None"]
"""The best plan for other hardware or other wishes, found as `foretell plan` finds it."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A change with which something fits, and the plan that does."""

    change: str
    plan: str
    """In words."""
    verdict: str
    memory_bytes: int
    capacity_bytes: int
    seconds: float | None = None
    flag: str = ""
    """Options to add to the command; empty where only others are left out, or where no command can say it."""
    drops: tuple[str, ...] = ()
    """Options to leave out."""

    def to_json(self) -> dict[str, Any]:
        return {
            "change": self.change, "plan": self.plan, "verdict": self.verdict, "memory_bytes": self.memory_bytes,
            "capacity_bytes": self.capacity_bytes, "seconds": self.seconds, "flag": self.flag, "drops": list(self.drops),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RelaxOption:
    """Something to search for."""

    words: str
    cluster: Cluster
    hardware: str
    wishes: SearchConstraints
    flag: str = ""
    drops: tuple[str, ...] = ()


def relaxations(
    cluster: Cluster, hardware: str, wishes: SearchConstraints, again: Again, sure: Sure, *, seconds: float = SECONDS
) -> tuple[tuple[Relaxation, ...], int]:
    """The nearest changes with which something fits, and how many were tried."""
    found: list[Relaxation] = []
    tried, began = 0, time.monotonic()
    for changes, one_is_enough in (
        (_fewer_limits(cluster, hardware, wishes), False), (_other_devices(cluster, wishes), True),
        (_more_devices(cluster, hardware, wishes), True),
    ):  # fmt: skip
        for change in changes:
            if tried and time.monotonic() - began > seconds:
                return tuple(found), tried
            tried += 1
            best = sure(change.cluster, change.hardware, change.wishes) if again(change.cluster, change.wishes) else None
            if best is not None:
                point = best.point
                found.append(Relaxation(
                    change=change.words, plan=told(point.layout), verdict=best.verdict, memory_bytes=int(point.memory_bytes),
                    capacity_bytes=int(point.capacity_bytes), seconds=point.seconds, flag=change.flag, drops=change.drops,
                ))  # fmt: skip
                if one_is_enough:
                    break
    return tuple(found), tried


def _fewer_limits(cluster: Cluster, hardware: str, wishes: SearchConstraints) -> Iterator[RelaxOption]:
    """Without one of the user's limits."""

    def without(option: str, other: SearchConstraints, words: str = "") -> RelaxOption:
        return RelaxOption(words=words or f"without {option}", cluster=cluster, hardware=hardware, wishes=other, drops=(option,))

    for axis in wishes.fixed:
        rest = {name: degree for name, degree in wishes.fixed.items() if name != axis}
        yield without(f"--{flag(axis)}", replace(wishes, fixed=rest))
    if wishes.meshes:
        yield RelaxOption(words="another mesh", cluster=cluster, hardware=hardware, wishes=replace(wishes, meshes=()))
    if wishes.schedule is not None:
        yield without("--schedule", replace(wishes, schedule=None))
    if wishes.micro_batch is not None and wishes.micro_batch > 1:
        yield without("--micro-batch", replace(wishes, micro_batch=None))
    if wishes.margin:
        yield without("--margin", replace(wishes, margin=0.0))
    if wishes.deadline_seconds is not None:
        yield without("--deadline", replace(wishes, deadline_seconds=None), "a later --deadline")
    if wishes.budget is not None:
        yield without("--budget", replace(wishes, budget=None), "a larger --budget")
    if wishes.hbm is not None and not cluster.groups:
        whole = _uncapped(hardware)
        try:
            yield RelaxOption(words="without --hbm", cluster=parse(whole), hardware=whole, wishes=replace(wishes, hbm=None), drops=("--hbm",))
        except UserError:
            return


def _uncapped(hardware: str) -> str:
    """What `--on` said before `--hbm` was put behind it."""
    return hardware.rpartition(",memory=")[0] or hardware


def _other_devices(cluster: Cluster, wishes: SearchConstraints) -> Iterator[RelaxOption]:
    """As many devices with more memory, the least first."""
    if cluster.groups:
        return
    known = [as_other(cluster, name) for name in OTHERS.get(cluster.device.backend, ())]
    for other in sorted((one for one in known if one is not None), key=lambda one: one.device.memory_bytes):
        if other.device.memory_bytes > cluster.device.memory_bytes * 1.05:
            counts = f"{other.nodes}x{other.devices_per_node}x" if other.nodes > 1 else f"{other.count}x" if other.count > 1 else ""
            link = f"@{cluster.link}" if cluster.link and other.nodes > 1 else ""
            spec = f"{counts}{other.device.name}{link}"
            yield RelaxOption(
                words=f"{other.device.name} ({gib(other.device.memory_bytes)})", cluster=other, hardware=spec,
                wishes=replace(wishes, hbm=None), flag=f"--on {spec}", drops=("--hbm",) if wishes.hbm is not None else (),
            )  # fmt: skip


def _more_devices(cluster: Cluster, hardware: str, wishes: SearchConstraints) -> Iterator[RelaxOption]:
    for times in TIMES if not cluster.groups else ():
        spec = larger(hardware, times)
        if spec is None:
            return
        typed = spec if wishes.hbm is None else _uncapped(spec)
        more = parse(spec)
        yield RelaxOption(
            words=f"{more.count} devices", cluster=more, hardware=spec, wishes=replace(wishes, ranks=()), flag=f"--on {typed}"
        )


def needs(short: float, relaxed: Sequence[Relaxation], tried: int) -> str:
    """`needs 3.1 GiB more on each device: 12 devices (dp_shard 12, micro-batch 1)`."""
    tail = f": {alternatives(relaxed)}" if relaxed else f"; nothing tried here fits: {tried} {'way' if tried == 1 else 'ways'} tried"
    return f"needs {human_bytes(int(short))} more on each device{tail}"


def alternatives(relaxed: Iterable[Relaxation]) -> str:
    return ", or ".join(f"{one.change} ({one.plan})" for one in relaxed)
