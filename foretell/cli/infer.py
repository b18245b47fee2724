"""`foretell plan MODEL --infer --on edge.json`: inference split over unlike devices, and what each split is best at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.errors import UserError
from foretell.trace.process import TIME_LIMIT

if TYPE_CHECKING:
    from foretell.search.infer import Split
    from foretell.search.infer_plan import InferPlan
    from foretell.trace.load import Source

SHOWN = 12
"""Splits of the front that are told of; `--json` has all."""
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-mixed": "bf16-autocast", "fp16-mixed": "fp16-autocast"}
"""As plans name them → as traces do."""


def infer_command(
    source: Source, on: str, *, precision: str | None = None, json: bool = False, cache: bool = True,
    time_limit: float = TIME_LIMIT,
) -> int:  # fmt: skip
    """Print the front of splits. Exit 0 found, 1 nothing fits, 2 bad input."""
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r} is not known", f"one of {', '.join(PRECISIONS)}")

    def work() -> InferPlan:
        from foretell.hardware import parse
        from foretell.hardware.profile import find_profile
        from foretell.plan.precision import for_inference, missing
        from foretell.search.infer_plan import infer_plan
        from foretell.trace.recipe import COMPUTES

        cluster = parse(on)
        way = PRECISIONS[precision] if precision is not None else for_inference(cluster)
        lacking = missing(COMPUTES[way], cluster)
        if lacking:
            raise UserError(f"--precision {precision}: {lacking} has no {COMPUTES[way]} units", f"--precision {for_inference(cluster)}")
        return infer_plan(source, cluster, precision=way, profile_of=find_profile, cache=cache, time_limit=time_limit)

    found = common.call(work, f"splitting {source.model}")
    if json:
        common.emit_json(as_json(found))
    else:
        common.emit(screen(found, source.model, on))
    return common.YES if found.front else common.NO_OR_FAILED


def as_json(found: InferPlan) -> dict[str, Any]:
    def one(split: Split) -> dict[str, Any]:
        return {
            "latency_seconds": split.latency_seconds,
            "requests_per_second": split.per_second,
            "samples_per_second": split.per_second * found.samples,
            "fullest_device": split.fullest,
            "parts": [
                {
                    "device": part.device, "name": part.name, "units": list(found.units[part.first : part.last]),
                    "seconds": part.seconds, "bytes": part.bytes, "receives_bytes": part.receives_bytes,
                    "receives_seconds": part.receives_seconds,
                }
                for part in split.parts
            ],
            "best": _best_at(split, found),
        }  # fmt: skip

    return {
        "infer": {
            "front": [one(split) for split in found.front],
            "devices": list(found.devices),
            "units": list(found.units),
            "samples": found.samples,
            "provenance": found.provenance,
        },
        "assumptions": list(found.notes),
    }


def _best_at(split: Split, found: InferPlan) -> list[str]:
    named = (("latency", found.quickest), ("throughput", found.busiest), ("memory", found.leanest))
    return [name for name, best in named if best == split]


def screen(found: InferPlan, model: str, on: str) -> str:
    """The answer for people."""
    from foretell.report.words import seconds

    if not found.front:
        return "\n".join([f"No split of {model} over {on} fits.", *(f"note: {note}" for note in found.notes)])
    many = "1 split" if len(found.front) == 1 else f"{len(found.front)} splits"
    lines = [f"{model} over {on}: {many} that no other beats in latency, throughput and memory ({found.provenance})", ""]
    rows = [("latency", "requests/s", "fullest", "split", "")]
    for split in _chosen(found):
        parts = "  →  ".join(_part(part.name, found.units[part.first : part.last]) for part in split.parts)
        best = _best_at(split, found)
        rows.append(
            (seconds(split.latency_seconds), f"{split.per_second:,.3g}", f"{split.fullest:.0%}", parts, f"best {', '.join(best)}" if best else "")
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [row[0].rjust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3].ljust(widths[3]), row[4]]
        lines.append("  ".join(cells).rstrip())
    if len(found.front) > SHOWN:
        lines.append(f"... and {len(found.front) - len(rows) + 1} more; --json lists all")
    return "\n".join([*lines, "", *(f"note: {note}" for note in found.notes)]).rstrip()


def _chosen(found: InferPlan) -> list[Split]:
    """The best at something, and evenly of the others, by latency."""
    front = list(found.front)
    if len(front) <= SHOWN:
        return front
    best = [split for split in front if _best_at(split, found)]
    others = [split for split in front if split not in best]
    room = SHOWN - len(best)
    kept = [others[index * len(others) // room] for index in range(room)]
    return [split for split in front if split in best or split in kept]


def _part(device: str, units: tuple[str, ...]) -> str:
    return f"{device}: {units[0]}" if len(units) == 1 else f"{device}: {units[0]} … {units[-1]}"
