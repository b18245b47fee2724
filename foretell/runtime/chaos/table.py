"""Trials as a table: fault → survived, seconds to the next step, samples lost and repeated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foretell.runtime.chaos.campaign import ChaosTrial
from foretell.runtime.chaos.faults import FAULTS

HEAD = ("fault", "survived", "next step: median, worst", "samples lost, repeated", "steps again")
_RIGHT = (False, False, True, True, True)


def rows_by_fault(trials: Sequence[ChaosTrial]) -> list[dict[str, Any]]:
    """One row for each fault, in the order in which they come."""
    found = []
    for name in dict.fromkeys(one.fault for one in trials):
        some = [one for one in trials if one.fault == name and not one.not_tried]
        seconds = [one.seconds for one in some if one.seconds is not None]
        again = [one.steps_again for one in some if one.steps_again is not None]
        found.append({
            "fault": name, "trials": len(some), "survived": sum(one.good for one in some), "by_hand": name in FAULTS and FAULTS[name].by_hand,
            "seconds_median": statistics.median(seconds) if seconds else None, "seconds_worst": max(seconds, default=None),
            "samples_lost": sum(one.lost for one in some), "samples_repeated": sum(one.repeated for one in some),
            "steps_again_worst": max(again, default=None),
            "not_tried": sorted({one.not_tried for one in trials if one.fault == name and one.not_tried}),
            "problems": [why(one) for one in some if not one.good],
        })  # fmt: skip
    return found


def why(one: ChaosTrial) -> str:
    """What was lost in a trial, in a line."""
    if one.problem:
        return _line(one.problem)
    differ = [part for part, same in (("losses", one.losses), ("checkpoint", one.files), ("place in the data", one.data)) if not same]
    parts = [f"{' and '.join(differ)} unlike the twin's"] if differ else []
    return ", ".join(parts + ([f"{one.left} processes left behind"] if one.left else []))


def render(trials: Sequence[ChaosTrial]) -> str:
    """For people."""
    rows = rows_by_fault(trials)
    cells = [HEAD, *(tuple(_cells(row)) for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(HEAD))]
    lines = ["  ".join(f"{text:>{width}}" if right else f"{text:<{width}}" for text, width, right in zip(line, widths, _RIGHT, strict=True)).rstrip()
             for line in cells]  # fmt: skip
    lines += [f"{_line(row['fault'])}: {problem}" for row in rows for problem in row["problems"]]
    lines += [f"{_line(row['fault'])} was not tried: {_line(text)}" for row in rows for text in row["not_tried"]]
    if any(not one.repeatable for one in trials):
        lines.append("two runs that nothing hurts do not compute the same bits here: losses and checksums are not compared, steps and samples are")
    if any(row["by_hand"] for row in rows):
        lines.append("* resumed by hand: with the seconds of a start")
    return "\n".join(lines)


def _line(text: str) -> str:
    """Of a file, so that it may be anything."""
    return " ".join(text.split())


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield _line(row["fault"]) + ("*" if row["by_hand"] else "")
    tried, survived = row["trials"], row["survived"]
    yield "not tried" if not tried else ("yes" if survived == tried else "NO") + (f", {survived} of {tried}" if tried > 1 or survived < tried else "")
    yield f"{row['seconds_median']:.1f} s, {row['seconds_worst']:.1f} s" if row["seconds_median"] is not None else ("no wait" if tried else "-")
    yield f"{row['samples_lost']:,}, {row['samples_repeated']:,}" if tried else "-"
    yield f"{row['steps_again_worst']}" if row["steps_again_worst"] is not None else "-"
