"""An out-of-memory error explained: what held the memory when it ran out, and which changes would have fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foretell.observe.lines import size, steps
from foretell.quantities import FITS, NO, Holder
from foretell.search.advice.script_ways import CheckedChange

_HELD = {
    "parameters": "weights", "gradients": "gradients", "optimizer": "optimizer states", "activations": "activations", "logits": "logits",
    "temporaries": "temporaries", "workspace": "library workspace", "inputs": "batch",
}  # fmt: skip
HOLDERS = 6
"""Largest tensors that are told."""


def explained(
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


def on_another_rank(told: Mapping[str, Any]) -> str:
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
