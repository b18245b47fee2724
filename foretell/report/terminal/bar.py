"""Bars: one row of cells, split by what the bytes of a device are held for, or by what the seconds of a step go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.quantities import CATEGORIES, Memory, Time
from foretell.units import GIB, MIB

_LOOKS = {
    "parameters": ("█", "P", "blue"),
    "gradients": ("▓", "G", "cyan"),
    "optimizer": ("▒", "O", "magenta"),
    "activations": ("▚", "A", "yellow"),
    "logits": ("▤", "L", "bright_red"),
    "temporaries": ("▞", "T", "green"),
    "workspace": ("▥", "W", "bright_blue"),
    "inputs": ("▦", "I", "bright_cyan"),
    "gathered": ("▛", "R", "bright_magenta"),
    "communication": ("▩", "N", "bright_green"),
    "other": ("▧", "?", "white"),
    "unused": ("░", "u", "bright_black"),
    "context": ("▨", "c", "bright_black"),
    "safety margin": ("▢", "s", "bright_black"),
    "spare": ("·", ".", "bright_black"),
}
"""Name → the character that shows it, the same in ASCII, its colour. Each reads without colour."""

_TIME_LOOKS = {
    "gemm": ("■", "g", "blue"),
    "attention": ("◆", "a", "cyan"),
    "convolution": ("▣", "v", "bright_blue"),
    "recurrent": ("◈", "r", "bright_cyan"),
    "memory": ("□", "m", "yellow"),
    "communication": ("▸", "n", "magenta"),
    "host": ("○", "h", "bright_red"),
    "other": ("◇", "o", "white"),
}
"""The same for seconds; `host` is waiting for it."""

ASCII = str.maketrans(
    {look[0]: look[1] for look in (*_LOOKS.values(), *_TIME_LOOKS.values())}
    | {"▲": "^", "…": "~", "–": "-", "×": "x", "·": ".", "→": ">", "−": "-", "±": "~", "µ": "u", "€": "E", "£": "L"}
)


@dataclass(frozen=True)
class BarPart:
    """One stretch of the bar."""

    name: str
    bytes: int

    @property
    def mark(self) -> str:
        return _LOOKS.get(self.name, _LOOKS["other"])[0]

    @property
    def style(self) -> str:
        return _LOOKS.get(self.name, _LOOKS["other"])[2]


def parts(memory: Memory) -> list[BarPart]:
    """What the device's memory is taken by, then what is left; empty parts are left out.

    `unused` is what the caching allocator holds without handing it out, `context` what stands beside the allocator, and
    `safety margin` what must stay free where it does not fit: the prediction is that uncertain.
    """
    found = [BarPart(name, memory.categories.get(name, 0)) for name in CATEGORIES]
    known = sum(part.bytes for part in found)
    beside = memory.device_bytes - memory.reserved_bytes
    seen = [phase.device_bytes - phase.reserved_bytes for phase in memory.phases] if memory.margin_bytes < 0 else []
    context = min([beside, *seen])
    found += [
        BarPart("other", memory.allocated_bytes - known),
        BarPart("unused", memory.reserved_bytes - memory.allocated_bytes),
        BarPart("context", context),
        BarPart("safety margin", beside - context),
        BarPart("spare", memory.capacity_bytes - memory.device_bytes),
    ]
    return [part for part in found if part.bytes > 0]


@dataclass(frozen=True)
class TimePart:
    """What a stretch of the step goes to."""

    name: str
    seconds: float

    @property
    def mark(self) -> str:
        return _TIME_LOOKS[self.name][0]

    @property
    def style(self) -> str:
        return _TIME_LOOKS[self.name][2]


def time_parts(time: Time) -> list[TimePart]:
    """What a step's seconds go to, always in the same order; nothing that takes none."""
    found = dict.fromkeys(_TIME_LOOKS, 0.0)
    for name, seconds in time.breakdown.items():
        known = "host" if name == "waiting_for_host" else name
        found[known if known in found else "other"] += max(0.0, seconds)
    return [TimePart(name, seconds) for name, seconds in found.items() if seconds > 0]


def cells(amounts: Sequence[float], width: int) -> list[int]:
    """Whole cells for each amount, in proportion, that sum to `width`: the largest remainders are rounded up."""
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    exact = [amount * width / total for amount in amounts]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(amounts)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: width - sum(counts)]:
        counts[index] += 1
    return counts


def unit(memory: Memory) -> tuple[str, int]:
    """The one unit of bar and legend: GiB, or MiB where everything is small."""
    return ("GiB", GIB) if memory.device_bytes >= GIB else ("MiB", MIB)


def number(amount: int, scale: int) -> str:
    """Three digits or so, without its unit."""
    value = amount / scale
    if 0 < value < 0.01:
        return "<0.01"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}"
