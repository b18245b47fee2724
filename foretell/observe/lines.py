"""What is said of a watched script, in single lines; and of one that ran out of memory, in a few."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.observe.group import SPREAD, RankGroup
from foretell.observe.readings import SLOWER, Readings
from foretell.quantities import FITS, NO, Holder
from foretell.report import words
from foretell.runtime.observe import machine_load
from foretell.runtime.observe.machine_load import MachineLoad
from foretell.search.advice.faster import Gain
from foretell.search.advice.script_ways import CheckedChange
from foretell.units import gib, human_bytes

PROBE = "foretell probe"
_PARTS = {"data": "data wait", "forward": "forward", "backward": "backward", "update": "update", "between": "other"}
_HELD = {
    "parameters": "weights", "gradients": "gradients", "optimizer": "optimizer states", "activations": "activations", "logits": "logits",
    "temporaries": "temporaries", "workspace": "library workspace", "inputs": "batch",
}  # fmt: skip
FASTER = 3
"""Gains that are told."""
HOLDERS = 6


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


# ---------------------------------------------------------------------- out of memory


def out_of_memory(
    told: Mapping[str, Any], limit: str, predicted: Mapping[str, Any] | None, categories: Mapping[str, int], holders: Sequence[Holder],
) -> list[str]:  # fmt: skip
    """What held the bytes: as torch measured it, and by module and kind as the followed step holds them at its peak."""
    held, tried, place = told["memory"], told.get("tried"), told["where"]
    at = " in ".join(filter(None, (place.get("module"), place.get("line"))))
    asked = f": {size(tried)} more were asked for" if tried else ""
    lines = [f"OUT OF MEMORY{_on_rank(told)} after {steps(told['steps'])}" + (f", at {at}" if at else "") + asked]
    if "allocated" in held:
        lines.append(f"  measured   {size(held['allocated'])} allocated, {size(held['reserved'])} reserved by torch; {limit}")
    else:
        rest = told.get("rest", 0)
        lines.append(f"  measured   {size(held['rss'])} resident, {size(rest)} of it before the first step and not the model's; {limit}")
    if predicted is None:
        return lines
    total = predicted["allocated_bytes"]
    largest = sorted(categories.items(), key=lambda item: -item[1])
    kinds = [f"{_HELD.get(name, name)} {size(count)}" for name, count in largest if count >= 0.005 * total]
    lines.append(f"  needs      {size(total)} at the peak of a step, as followed: {', '.join(kinds)}")
    for number, one in enumerate(holders[:HOLDERS]):
        kind = _HELD.get(one.category, one.category)
        lines.append(f"  {'held by' if not number else '':<10} {size(one.bytes):>10}  {one.name or 'the script'}: {kind}")
    return lines


def _on_rank(told: Mapping[str, Any]) -> str:
    return f" on rank {told.get('rank', 0)}" if int(told.get("world") or 1) > 1 else ""


def also_out_of_memory(told: Mapping[str, Any]) -> str:
    held = told["memory"]
    amount = f"{size(held['allocated'])} allocated" if "allocated" in held else f"{size(held['rss'])} resident"
    return f"OUT OF MEMORY{_on_rank(told)} too: {amount}"


def remedies(ways: Sequence[CheckedChange], tried: int) -> list[str]:
    """What would have made it fit, each predicted with the change made."""
    if not ways:
        return ["  would fit  no change to the script was found that could be checked"]
    if not ways[0].fits:
        found = [f"  would fit  nothing of {tried} changes that were checked; the nearest:"]
        return found + [f"             {way.change.words}: {size(-way.margin_bytes)} short" for way in ways[:3]]
    lines = []
    for number, way in enumerate(ways):
        sure = "" if way.verdict == FITS else ", tight" if way.verdict != NO else ""
        cost = f" ({way.change.costs})" if way.change.costs else ""
        lines.append(f"  {'would fit' if not number else '':<10} {way.change.words}: {size(way.allocated_bytes)}{sure}{cost}")
    return lines


def faster(gains: Sequence[Gain]) -> list[str]:
    """What would make it faster, each predicted with the change made."""
    return [
        f"  {'faster' if not number else '':<10} {one.speedup:.2f}x  {words.seconds(one.step_seconds)} a step predicted: {one.change} [{one.maths}]"
        + (f"; {one.told_range}" if one.told_range else "")
        for number, one in enumerate(gains[:FASTER])
    ]
