"""Inference over several devices: `foretell plan MODEL --infer --on edge.json`, and `foretell fit --infer` where one holds no copy."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.errors import UserError
from foretell.quantities import FITS, NO, TIGHT
from foretell.trace.sandbox.process import TIME_LIMIT

if TYPE_CHECKING:
    from foretell.api.splits import SplitRun
    from foretell.quantities import Prediction
    from foretell.search.inference.split import InferenceSplit
    from foretell.search.inference.units import InferPlan
    from foretell.trace.load.model import Source

OVER = ("tcp", "gloo")
SHOWN = 8
"""Splits of the front that are told of; `--json` has all."""
NOT_COUNTED = "one forward of the samples given; the key-value cache of generation is not counted: it needs what is left"
PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "bf16-mixed": "bf16-autocast", "fp16-mixed": "fp16-autocast"}
"""As plans name them → as traces do."""


def infer_command(
    source: Source, on: str, *, precision: str | None = None, json: bool = False, cache: bool = True,
    time_limit: float = TIME_LIMIT, over: str | None = None, requests: int = 100,
) -> int:  # fmt: skip
    """Print the front of splits, and run the one with most requests a second `over` what is named. Exit 0 found, 1 nothing fits, 2 bad input."""
    if over is not None and (over not in OVER or requests < 1):
        raise UserError(f"--run {over} --requests {requests}", f"--run {' or '.join(OVER)}, at least one request")
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"--precision {precision!r} is not known", f"one of {', '.join(PRECISIONS)}")
    way = precision and PRECISIONS[precision]
    found = common.call(lambda: split(source, on, way, cache, time_limit, over or OVER[0]), f"splitting {source.model}")
    run = _run(source, on, found, precision, over, requests) if over is not None and found.front else None
    if json:
        common.emit_json({**as_json(found), **({} if run is None else {"run": run.to_json()})})
    else:
        common.emit("\n".join([screen(found, source.model, on), *([] if run is None else ["", *_run_lines(run)])]))
    return common.YES if found.front else common.NO_OR_FAILED


def _run(source: Source, on: str, found: InferPlan, precision: str | None, over: str, requests: int) -> SplitRun:
    from foretell.api.splits import run_split
    from foretell.hardware import parse
    from foretell.plan.precision import for_inference

    way = PRECISIONS[precision] if precision is not None else for_inference(parse(on))
    if "autocast" in way:
        raise UserError(f"--precision {precision} with --run: stages compute in the dtype of their weights", "fp32, bf16 or fp16")
    return common.call(lambda: run_split(source, on, found, way, over, requests), f"running {source.model} in stages")


def _run_lines(run: SplitRun) -> list[str]:
    from foretell.report.words import seconds
    from foretell.units import human_bytes

    equal = "bit for bit the whole model's" if not run.off else f"the whole model's up to {run.off:.1g}"
    other = "" if run.best_is_run else "; the best of the front begins a part between modules, and is not run"
    rows = [
        ("latency", seconds(run.predicted_latency_seconds), seconds(run.latency_seconds), run.predicted_latency_seconds / run.latency_seconds - 1),
        ("requests/s", f"{run.predicted_per_second:,.3g}", f"{run.per_second:,.3g}", run.predicted_per_second / run.per_second - 1),
    ]
    return [
        f"run over {run.over}: {len(run.devices)} stages on {', '.join(run.devices)}, cut at {', '.join(run.cuts)}; "
        f"{', '.join(map(human_bytes, run.sends_bytes))} a request between them{other}",
        f"answers  {equal}",
        f"{'':<12}{'predicted':>11}{'measured':>11}",
        *(f"{name:<12}{one:>11}{other:>11}{off:>+8.0%}" for name, one, other, off in rows),
        f"alone, the stages take {', '.join(map(seconds, run.stage_seconds))} here: "
        f"{1 / max(run.stage_seconds):,.3g} requests/s if none slows another",
    ]


def split(source: Source, on: str, precision: str | None, cache: bool, time_limit: float, over: str = OVER[0]) -> InferPlan:
    """Splits of a model over the devices of `on`; precision as traces name it. `over`: what stages on one machine's CPU talk over."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.plan.precision import for_inference, missing
    from foretell.search.inference.units import infer_plan
    from foretell.trace.recipe import COMPUTES

    cluster = parse(on)
    way = precision or for_inference(cluster)
    lacking = missing(COMPUTES[way], cluster)
    if lacking:
        raise UserError(f"--precision {precision}: {lacking} has no {COMPUTES[way]} units", f"--precision {for_inference(cluster)}")
    return infer_plan(source, cluster, precision=way, profile_of=find_profile, cache=cache, time_limit=time_limit, over=over)


def fit_command(alone: Prediction, on: str, options: Mapping[str, Any], json: bool) -> int:
    """What `fit --infer` answers where no single device holds the model: a split over all of them."""
    from foretell.report import schema
    from foretell.trace.load.model import Source

    model = str(alone.model["source"])
    asked = {name: options[name] for name in ("overrides", "micro_batch", "seq", "image", "loss")}
    source = Source(model=model, **{name: value for name, value in asked.items() if value is not None})
    precision = str(alone.model["recipe"]["precision"])
    found = common.call(lambda: split(source, on, precision, options["cache"], options["time_limit"]), f"splitting {model}")
    verdict = _verdict(found)
    if json:
        common.emit_json({**as_json(found), "verdict": verdict, "one_device": schema.answer(alone)})
    elif not found.front:
        common.emit_screen(alone, common.typed())
        common.emit(f"split      no split over the {len(found.devices)} devices fits either")
    else:
        common.emit("\n".join(_fit_lines(alone, found, verdict)))
    return common.NO_OR_FAILED if verdict == NO else common.YES


def _verdict(found: InferPlan) -> str:
    """By the split with most room."""
    from foretell.simulate.memory.memory import TIGHT_SHARE

    best = found.leanest
    return NO if best is None else TIGHT if best.fullest > 1 - TIGHT_SHARE else FITS


def _fit_lines(alone: Prediction, found: InferPlan, verdict: str) -> list[str]:
    from foretell.report.command import hardware_spec
    from foretell.report.terminal.screen import asked
    from foretell.units import gib

    best, width = found.leanest, common.width()
    assert best is not None
    name, memory = str(alone.model["source"]), alone.memory
    where = f"{verdict.upper()}  {name} on {hardware_spec(alone, ' ')}"
    head = f"{where}: split over {len(best.parts)} devices, {best.fullest:.0%} of the fullest one used"
    one = f"one device alone: {gib(memory.device_bytes).removesuffix(' GiB')} of {gib(memory.capacity_bytes)}"
    lines = [head, *textwrap.wrap(f"{asked(alone)}; {one}", width, initial_indent="  ", subsequent_indent="  "), "", *_table(found)]
    return [*lines, "", *_notes((NOT_COUNTED, *found.notes), width)]


def as_json(found: InferPlan) -> dict[str, Any]:
    def one(way: InferenceSplit) -> dict[str, Any]:
        return {
            "latency_seconds": way.latency_seconds,
            "requests_per_second": way.per_second,
            "samples_per_second": way.per_second * found.samples,
            "fullest_device": way.fullest,
            "parts": [
                {
                    "device": part.device, "name": part.name, "units": list(found.units[part.first : part.last]),
                    "seconds": part.seconds, "bytes": part.bytes, "receives_bytes": part.receives_bytes,
                    "receives_seconds": part.receives_seconds,
                }
                for part in way.parts
            ],
            "best": _best_at(way, found),
        }  # fmt: skip

    return {
        "infer": {
            "front": [one(way) for way in found.front],
            "devices": list(found.devices),
            "units": list(found.units),
            "samples": found.samples,
            "provenance": found.provenance,
        },
        "assumptions": list(found.notes),
    }


def _best_at(split: InferenceSplit, found: InferPlan) -> list[str]:
    named = (("latency", found.quickest), ("throughput", found.busiest), ("memory", found.leanest))
    return [name for name, best in named if best == split]


def screen(found: InferPlan, model: str, on: str) -> str:
    """The answer for people."""
    width = common.width()
    if not found.front:
        return "\n".join([f"No split of {model} over {on} fits.", *_notes(found.notes, width)])
    many = "1 split" if len(found.front) == 1 else f"{len(found.front)} splits"
    head = f"{model} over {on}: {many} that no other beats in latency, throughput and memory ({found.provenance})"
    return "\n".join([*textwrap.wrap(head, width), "", *_table(found), "", *_notes((NOT_COUNTED, *found.notes), width)])


def _table(found: InferPlan) -> list[str]:
    """A row for each split; parts that do not fit beside the figures go on below."""
    from foretell.report.words import seconds

    alike = len(set(found.devices)) == 1
    rows = [("latency", "requests/s", "peak memory", "devices", "blocks on each device, embedding and head counted" if alike else "blocks", "")]
    for one in _chosen(found):
        best = _best_at(one, found)
        rows.append((
            seconds(one.latency_seconds), f"{one.per_second:,.3g}", f"{one.fullest:.0%}", str(len(one.parts)), _parts(one, found, alike),
            f"best {', '.join(best)}" if best else "",
        ))  # fmt: skip
    wide = [max(len(row[column]) for row in rows) for column in range(4)]
    gutter = sum(wide) + 2 * len(wide)
    lines = []
    for row in rows:
        first = "  ".join(cell.rjust(size) for cell, size in zip(row[:4], wide, strict=True))
        words = f"{row[4]}  {row[5]}".rstrip() if row[5] else row[4]
        wrapped = textwrap.wrap(words, max(20, common.width() - gutter), break_on_hyphens=False, break_long_words=False)
        lines += [f"{first}  {wrapped[0]}", *(f"{'':{gutter}}{line}" for line in wrapped[1:])]
    if len(found.front) > SHOWN:
        lines.append(f"{len(found.front) - len(rows) + 1} splits between these: --json lists all")
    return lines


def _parts(one: InferenceSplit, found: InferPlan, alike: bool) -> str:
    """How many units each device runs, or which where devices differ."""
    if alike:
        return " ".join(str(part.last - part.first) for part in one.parts)
    return " → ".join(_part(part.name, found.units[part.first : part.last]) for part in one.parts)


def _notes(notes: Sequence[str], width: int) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(f"note: {note}", width, subsequent_indent="      ")]


def _chosen(found: InferPlan) -> list[InferenceSplit]:
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
