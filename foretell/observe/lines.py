"""What is said of a watched script, in single lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.observe.group import SPREAD, RankGroup
from foretell.observe.readings import SLOWER, Readings
from foretell.report import words
from foretell.runtime.observe import machine_load
from foretell.runtime.observe.machine_load import MachineLoad
from foretell.search.advice.faster import Gain
from foretell.units import gib, human_bytes

PROBE = "foretell probe"
_PARTS = {"data": "data wait", "forward": "forward", "backward": "backward", "update": "update", "between": "other"}
FASTER = 3
"""Gains that are told."""


def size(count: float) -> str:
    return gib(count) if count >= 1 << 30 else human_bytes(count)


def steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def beside(readings: Readings, predicted: Mapping[str, Any], why_not: str = "", load: MachineLoad | None = None) -> str:
    """Predicted beside measured after the first steps, in one line."""
    found = [f"step {readings.steps}{_of_ranks(readings)}"]
    seconds = readings.step_seconds
    if seconds is not None:
        found.append(f"{words.seconds(seconds)} a step{_slowest(readings)}{_time(seconds, predicted, readings, why_not)}")
    found += list(_memory(readings, predicted))
    shares = [f"{_PARTS[name]} {words.percent(share)}" for name, share in readings.shares().items() if share >= 0.005]
    found += [", ".join(shares)] if shares else []
    busy = machine_load.words(load, readings.delay_share())
    return "; ".join([*found, busy] if busy else found)


def _of_ranks(readings: Readings) -> str:
    if not isinstance(readings, RankGroup) or readings.world < 2:
        return ""
    if not readings.elsewhere:
        return f" of {readings.world} ranks"
    here = ", ".join(_spans([one.rank for one in readings.ranks]))
    return f" on {'rank' if len(readings.ranks) == 1 else 'ranks'} {here} of {readings.world} (the others run on other nodes)"


def _spans(numbers: Sequence[int]) -> Iterator[str]:
    """0, 1, 2, 5 → 0-2, 5."""
    for _, run in itertools.groupby(enumerate(numbers), lambda one: one[1] - one[0]):
        found = [number for _, number in run]
        yield str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def _slowest(readings: Readings) -> str:
    if not isinstance(readings, RankGroup) or (share := readings.time_spread()) <= SPREAD:
        return ""
    return f" on rank {readings.slowest.rank}, {words.percent(share)} more than on the fastest"


def _time(seconds: float, predicted: Mapping[str, Any], readings: Readings, why_not: str) -> str:
    said = predicted.get("step_seconds")
    if said is None:
        if why_not or not predicted:
            return ""
        return f" (no prediction of time: this {'CPU' if readings.kind == 'cpu' else 'GPU'} was not measured; `{PROBE}` does)"
    low, high = predicted["low_seconds"], predicted["high_seconds"]
    return f", predicted {words.step_span(said, low, high)}, {inside(seconds, low, high)}"


def inside(value: float, low: float, high: float) -> str:
    return "inside" if low <= value <= high else "ABOVE the range" if value > high else "BELOW the range"


def _memory(readings: Readings, predicted: Mapping[str, Any]) -> Iterator[str]:
    peak, bands = readings.peak, predicted.get("bands") or {}
    if peak is None:
        return
    if readings.kind == "cuda":
        said, band, what = predicted.get("allocated_bytes"), bands.get("allocated_bytes"), "allocated at the peak"
    else:
        said, band, what = predicted.get("memory_bytes"), bands.get("device_bytes"), "of RAM at the peak"
    text = f"{size(peak)} {what}"
    if said is not None and band is not None:
        text += f", predicted {size(said)} ({size(band[0])} – {size(band[1])}), {inside(peak, *band)}"
    if isinstance(readings, RankGroup) and (apart := readings.memory_spread())[0] > SPREAD:
        text += f" (rank {readings.largest.rank}; {size(apart[1])} on the least)"
    yield text


def slower(readings: Readings, predicted: Mapping[str, Any], settled: float) -> str | None:
    """A step that takes longer than its band, or without one, than it took."""
    recent = readings.recent()
    if recent is None:
        return None
    high = predicted.get("high_seconds")
    if high is not None and recent > high and recent > 1.05 * settled:
        above = f"above the predicted {words.seconds(high)} at most"
        return f"step {readings.steps}: {words.seconds(recent)} a step now, {above} ({words.seconds(settled)} at first)"
    if recent > SLOWER * settled:
        return f"step {readings.steps}: {words.seconds(recent)} a step now, {words.seconds(settled)} at first"
    return None


def growing(readings: Readings) -> str | None:
    found = readings.leak()
    if found is None:
        return None
    grown, steps = found
    held = "allocated" if readings.kind == "cuda" else "RAM"
    return (
        f"step {readings.steps}: memory grows by {size(grown / steps)} a step: {size(readings.after[-1][1])} {held} after a step now, "
        f"{size(grown)} more than {steps} steps ago; something keeps tensors, such as a list of losses with their graphs"
    )


def waiting(readings: Readings) -> str:
    share, each = readings.data_share(), readings.data_seconds / max(1, readings.steps - 1)
    return (
        f"step {readings.steps}: waits for data {words.percent(share)} of the time, {words.seconds(each)} a step; "
        "try more DataLoader workers (num_workers), or data that is prepared before"
    )


def faster(gains: Sequence[Gain]) -> list[str]:
    """What would make it faster, each predicted with the change made."""
    return [
        f"  {'faster' if not number else '':<10} {one.speedup:.2f}x  {words.seconds(one.step_seconds)} a step predicted: {one.change} [{one.maths}]"
        + (f"; {one.told_range}" if one.told_range else "")
        for number, one in enumerate(gains[:FASTER])
    ]
