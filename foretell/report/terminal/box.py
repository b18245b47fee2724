"""One rank of a plan in a box: predicted beside measured. No torch.

    lines_of(predicted, measured, reasons)  → Lines: step, exposed, allocated, reserved
    Boxed.to_json()                         → the answer for programs
    render(boxed, 80)                       → text for a terminal

Exposed communication is what a step takes longer than the same step whose messages take no time, as a share of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.text import Text

from foretell.hardware.catalog import find_reported
from foretell.hardware.types import Cluster
from foretell.report import words
from foretell.report.comparison import ASCII, BYTES, GUTTER, SECONDS, SHARE, Line, table, wrapped
from foretell.units import human_bytes

STAND_INS = "the other ranks were stand-ins: what they send takes the modelled time and is made up, so the loss means nothing"
"""Said of every box with more than one rank."""
ALONE = "the plan has one rank: there was nobody to replace and nothing to send"
_MEMORY = ("allocated", "reserved")


class Shown(Line):
    """A quantity that is shown and not compared: it was predicted for something else."""

    @property
    def error(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Boxed:
    """A rank that was rehearsed."""

    model: str
    plan: str
    """In a few words."""
    hardware: str
    """That the plan, and the prediction, is for."""
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool | None:
        """Whether every measured value is in its band; None where there is nothing to compare."""
        found = [line.inside for line in self.lines if line.inside is not None]
        return all(found) if found else None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model, "plan": self.plan, "hardware": self.hardware, "rank": self.measured["rank"],
            "world": self.measured["world"], "device": self.measured["device"], "ok": self.ok,
            "lines": [{**asdict(line), "error": line.error, "inside": line.inside} for line in self.lines],
            "predicted": dict(self.predicted), "measured": dict(self.measured), "notes": list(self.notes),
        }  # fmt: skip


def lines_of(
    predicted: Mapping[str, Any], bands: Mapping[str, tuple[int, int]], measured: Mapping[str, Any], *, seconds: bool, memory: bool
) -> tuple[Line, ...]:
    """The quantities of a box; `seconds` and `memory`: whether they are compared, or only shown."""
    low, high = (predicted["low_seconds"], predicted["high_seconds"]) if seconds else (None, None)
    times, sizes = Line if seconds else Shown, Line if memory else Shown
    step = times(name="step", unit=SECONDS, predicted=predicted["step_seconds"], measured=measured["step_seconds"], low=low, high=high)
    exposed = times(
        name="exposed", unit=SHARE, predicted=predicted["exposed_share"], measured=measured["exposed_share"],
        note="communication that compute does not hide; it has no band",
    )  # fmt: skip
    peaks = []
    for name in _MEMORY:
        least, most = bands.get(f"{name}_bytes", (None, None)) if memory else (None, None)
        value, found = predicted[f"{name}_bytes"], measured[f"{name}_bytes"]
        peaks.append(sizes(name=name, unit=BYTES, predicted=value, measured=found, low=least, high=most))
    return (step, exposed, *peaks)


def unlike(cluster: Cluster, device: str, kind: str, world: int) -> tuple[str, bool, bool]:
    """Why something is not compared, and whether seconds and memory are."""
    wanted = cluster.device
    if (wanted.backend == "cpu") != (kind == "cpu"):
        return f"the prediction is for {wanted.name} and this is {device}: nothing is compared", False, False
    if kind == "cpu":
        why = "the ranks of the plan would share this machine's cores and one had them all: seconds are not compared"
        return (why, False, False) if world > 1 else ("", True, False)
    found = find_reported(device)
    if found is not None and found.name != wanted.name:
        return f"the prediction is for {wanted.name} and this is {found.name}: nothing is compared", False, False
    return "", True, True


def too_large(rank: int, predicted: Mapping[str, Any], uses: Mapping[str, int], capacity: int) -> str:
    """That a rank does not fit into so many bytes, and what uses them; empty where it does.

    The plan's own verdict counts where this device is no larger than the one the plan is for."""
    need = predicted["device_bytes"]
    if need <= capacity and (predicted["verdict"] != "no" or capacity > predicted["capacity_bytes"]):
        return ""
    most = sorted(((value, name) for name, value in uses.items() if value and name != "spare"), reverse=True)[:4]
    used = ", ".join(f"{name} {human_bytes(value)}" for value, name in most)
    found = f"rank {rank} is predicted to need {human_bytes(need)} and this device has {human_bytes(capacity)}"
    return f"{found}; largest: {used}" if used else found


# --- a page for people -----------------------------------------------------------------------------------------------


def render(boxed: Boxed, width: int = 80, *, ascii_only: bool = False) -> Text:
    found = boxed.measured
    title = f"rank {found['rank']} of {found['world']} in a box: {boxed.model}, {boxed.plan}"
    rows = [Text(line, "bold") for line in wrapped(title, width, 2)]
    rows += [*table(boxed.lines), Text()]
    for line in _about(boxed):
        rows += [Text(part) for part in wrapped(line, width, GUTTER)]
    page = Text("\n").join(rows)
    return Text(page.plain.translate(ASCII)) if ascii_only else page


def _about(boxed: Boxed) -> Iterator[str]:
    found = boxed.measured
    if found["messages"]:
        seconds = words.seconds(found["message_seconds"])
        yield f"{'messages':<{GUTTER}}{found['messages']} in a step, {human_bytes(found['message_bytes'])}, {seconds} one after the other"
    spread = f"{words.seconds(found['low_seconds'])} to {words.seconds(found['high_seconds'])}"
    yield f"{'steps':<{GUTTER}}{len(found['steps'])} measured, {spread}; built in {found['build_seconds']:.0f} s"
    yield f"{'machine':<{GUTTER}}{found['device']}; predicted for {boxed.hardware}"
    for note in boxed.notes:
        yield f"{'note':<{GUTTER}}{note}"
    outside = [line.name for line in boxed.lines if line.inside is False]
    if boxed.ok is not None:
        yield f"{'verdict':<{GUTTER}}" + (f"OUTSIDE the predicted range: {', '.join(outside)}" if outside else "all within the predicted range")
