"""Predicted beside measured, line by line: what a run did against what its plan said. No torch.

    compare(plan, measurement)  → Comparison        measurement: the JSON of `runtime.observe.measure.Measurement`
    of_folder(run)              → Comparison        from plan.json and measurement.json of a run folder
    render(comparison, 80)      → text for a terminal
    Comparison.to_json()        → comparison.json, as comparison.schema.json describes it

An error is predicted / measured - 1: with a plus, more was predicted than measured.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.text import Text

from foretell.decode import decode
from foretell.errors import UserError
from foretell.hardware.catalog import GENERIC_CPU, find, find_reported
from foretell.hardware.parse import parse
from foretell.hardware.types import Device
from foretell.notebook import Displayable
from foretell.plan import file as plans
from foretell.plan.text import shell_word
from foretell.plan.types import Plan
from foretell.report import words
from foretell.runtime.observe import machine_load as load
from foretell.runtime.observe import measurement
from foretell.units import GIB, MIB, gib, human_bytes, relative_error

SCHEMA_VERSION = 1
FILE, SCHEMA = "comparison.json", "comparison.schema.json"
SECONDS, BYTES, SHARE, JOULES = "seconds", "bytes", "share", "joules"
ALLOCATED_BAND, RESERVED_BAND = 0.01, 0.03
"""Shares within which a GPU's peaks are expected, where the plan says nothing else; those of `simulate.memory.memory`."""
PROCESS_BYTES = (300 * MIB, 500 * MIB)
"""What a process on a CPU holds besides its tensors, from and to: six models on a Xeon with torch 2.13 held 328 to 485."""
PROCESS_SHARE = 0.15
"""And of its tensors as much again at most: pages that the allocator keeps, scratch of kernels. Assumed."""
NOT_MEASURED = "this run did not measure it"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One quantity, predicted and measured."""

    name: str
    unit: str
    """seconds, bytes, joules, tokens/s or samples/s; share, of a step."""
    predicted: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None
    """Between which the measured value is expected."""
    known: str = ""
    """How the prediction is known: counted, measured or assumed."""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative; of a share, the difference."""
        if self.unit == SHARE:
            return None if self.predicted is None or self.measured is None else self.predicted - self.measured
        return relative_error(self.predicted, self.measured)

    @property
    def inside(self) -> bool | None:
        """Whether the measured value is in its band; None where one of them is not known."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """Where seconds of a step went."""

    name: str
    predicted: float | None
    measured: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How step seconds changed over the run."""

    first_seconds: float
    """Median of the first third of the steps."""
    last_seconds: float
    change: float
    """last / first - 1."""
    low_seconds: float
    high_seconds: float
    """Eight of ten steps lie between."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Displayable):
    """A run held against its plan."""

    model: str
    plan: str
    """In a few words."""
    comparable: bool
    """False where nothing was predicted, or for another kind of device."""
    lines: tuple[Line, ...]
    parts: tuple[StepPart, ...]
    """Where the time of a step went."""
    kinds: Mapping[str, float]
    """Predicted seconds of a step by what the device does, and what it waits for."""
    besides: Mapping[str, float]
    """Measured seconds outside steps: one save, one evaluation."""
    drift: Drift | None
    loss: Mapping[str, float | None]
    """first, last, held_out."""
    steps: int
    skipped_steps: int
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    command: str
    """That repeats the run."""
    started: str
    notes: tuple[str, ...] = ()
    busy: str = ""
    """How busy the machine was while it ran, and who else used it; empty where it was not, or nobody knows."""
    schema_version: int = SCHEMA_VERSION

    @property
    def ok(self) -> bool | None:
        """Whether every measured value is in its band; None where there is nothing to compare."""
        found = [line.inside for line in self.lines if line.inside is not None]
        return all(found) if found and self.comparable else None

    def headline(self) -> str:
        told = {True: "all within its band", False: "not all within its band", None: "nothing to compare"}[self.ok]
        return f"{self.model}, {self.plan}: {told}"

    def rows(self) -> Sequence[tuple[str, str]]:
        return [
            (line.name, f"predicted {amount(line.predicted, line.unit)}, measured {amount(line.measured, line.unit)}")
            for line in self.lines if line.predicted is not None and line.measured is not None
        ]  # fmt: skip

    def line(self, name: str) -> Line | None:
        return next((line for line in self.lines if line.name == name), None)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        data["ok"] = self.ok
        data["lines"] = [{**asdict(line), "error": line.error, "inside": line.inside} for line in self.lines]
        data["parts"], data["notes"] = [asdict(part) for part in self.parts], list(self.notes)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        return decode(cls, data, FILE, "run `foretell compare` again")


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a comparison file."""
    found: dict[str, Any] = json.loads((resources.files("foretell.report") / SCHEMA).read_text(encoding="utf-8"))
    return found


# --- comparing -------------------------------------------------------------------------------------------------------


def of_folder(run: str | Path) -> Comparison:
    """The comparison of a run folder, made anew from its plan and its measurement."""
    folder = Path(run)
    measured = measured_of(folder)
    return compare(plans.read(folder / "plan.json"), measured)


def measured_of(folder: Path) -> dict[str, Any]:
    """What a run was measured to do; whatever is no run folder, or of a run that has not ended, is refused."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}", "give the folder that `foretell run` or `foretell watch` wrote")
    measured = measurement.read(folder)
    if measured is None and not (folder / "plan.json").is_file():
        raise UserError(f"{folder} is no run folder: it has no plan.json", "give the folder that `foretell run` or `foretell watch` wrote")
    if measured is None:
        raise UserError(f"{folder} has no measurement.json: the run has not ended", f"foretell run {shell_word(folder)} --resume")
    return measured


def compare(plan: Plan, measured: Mapping[str, Any]) -> Comparison:
    """A plan's predictions against what a run of it measured."""
    from foretell.search.solve.choose import told

    predicted, kind = plan.predicted, str(measured["hardware"].get("kind", "cuda"))
    notes = tuple(_unlike(plan, measured))
    comparable = not notes
    said = predicted if comparable else {}
    besides = {"save": measured.get("save_seconds"), "evaluation": measured.get("eval_seconds")}
    return Comparison(
        model=str(plan.model.get("model", "")), plan=told(plan), comparable=comparable,
        lines=(*_speed(said, measured), *_memory(said, measured, kind), *_energy(said, measured)), parts=tuple(_parts(said, measured)),
        kinds=dict(said.get("breakdown") or {}), besides={name: s for name, s in besides.items() if s is not None},
        drift=_drift(measured),
        loss={"first": measured["first_loss"], "last": measured["last_loss"], "held_out": measured.get("eval_loss")},
        steps=int(measured["steps"]), skipped_steps=int(measured["skipped_steps"]), hardware=dict(measured["hardware"]),
        versions=dict(measured["versions"]), command=repeats(str(measured["command"])), started=str(measured["started"]),
        notes=(*notes, *notes_of(said, measured)), busy=load.words_of(measured),
    )  # fmt: skip


def repeats(command: str) -> str:
    """The command of a run without its folder, which holds that run now."""
    try:
        typed = shlex.split(command)
    except ValueError:
        return command
    kept = [word for before, word in pairwise(["", *typed]) if "--out" not in (before, word) and not word.startswith("--out=")]
    return shlex.join(kept) if len(kept) < len(typed) else command


def _unlike(plan: Plan, measured: Mapping[str, Any]) -> Iterator[str]:
    """Why the two cannot be held against each other."""
    if not plan.predicted:
        yield "nothing was predicted for this plan; `foretell plan` makes plans with predictions"
        return
    wanted, ran_on = device_of(plan), str(measured["hardware"].get("device", ""))
    if wanted is None:
        return
    on_cpu = measured["hardware"].get("kind") == "cpu"
    found = find(GENERIC_CPU) if on_cpu else find_reported(ran_on)
    if (wanted.backend == "cpu") != on_cpu or (found is not None and found.name != wanted.name):
        yield f"the plan's predictions are for {wanted.name}, and it ran on {ran_on or 'another device'}: they are not compared"


def device_of(plan: Plan) -> Device | None:
    """What the plan's predictions are for; None where only the machine it was made on knows."""
    name = str(plan.predicted.get("device") or plan.hardware)
    if name.strip().casefold().startswith("auto"):
        return None
    try:
        return parse(name).device
    except UserError:  # a hardware file that is not here, a name of another time
        return None


def _speed(said: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[Line, Line]:
    unit, per_step = str(measured["unit"]), float(measured["per_step"])
    seconds, low, high = (said.get(name) for name in ("step_seconds", "low_seconds", "high_seconds"))
    how = said.get("provenance") or {}
    known = str(how.get("time", "")) if isinstance(how, Mapping) else str(how)
    step = Line(
        name="step", unit=SECONDS, predicted=seconds, measured=float(measured["step_seconds"]), low=low, high=high,
        known=known,
    )  # fmt: skip
    rate = Line(
        name="throughput", unit=f"{unit}/s", predicted=said.get(f"{unit}_per_second") or (per_step / seconds if seconds else None),
        measured=float(measured["per_second"]), low=per_step / high if high else None, high=per_step / low if low else None,
        known=known,
    )  # fmt: skip
    return step, rate


def _memory(said: Mapping[str, Any], measured: Mapping[str, Any], kind: str) -> Iterator[Line]:
    """What the kind of device can measure: a GPU its allocator and the driver, a CPU the process."""
    bands = said.get("bands") or {}
    how = said.get("provenance") or {}
    known = str(how.get("memory", "")).partition(":")[0] if isinstance(how, Mapping) else ""
    if kind == "cpu":
        whole, tensors = said.get("memory_bytes"), said.get("allocated_bytes")
        low, high = bands.get("device_bytes") or _process_band(tensors)
        yield Line(
            name="process", unit=BYTES, predicted=whole, measured=measured.get("host_bytes"), low=low, high=high,
            known="assumed", note="RAM of the largest rank: its tensors, which are counted, and a process around them",
        )  # fmt: skip
        return
    for name, share in (("allocated", ALLOCATED_BAND), ("reserved", RESERVED_BAND)):
        value = said.get(f"{name}_bytes")
        low, high = bands.get(f"{name}_bytes") or ((value * (1 - share), value * (1 + share)) if value else (None, None))
        yield Line(
            name=name, unit=BYTES, predicted=value, measured=measured.get(f"{name}_bytes"), low=low, high=high, known=known,
            note="peak of the worst rank",
        )  # fmt: skip
    device, there = said.get("memory_bytes"), measured.get("device_bytes")
    low, high = bands.get("device_bytes") or (None, None)
    yield Line(
        name="device", unit=BYTES, predicted=device, measured=there, low=low, high=high, known="assumed",
        note="with the context" if there is not None else NOT_MEASURED,
    )  # fmt: skip


def _energy(said: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[Line]:
    """Joules of a step on all devices, where their counters were read."""
    found = measured.get("joules_per_step")
    if found is not None:
        note = "of all devices, by their own counters; the rest of the machine is not in it"
        yield Line(name="energy", unit=JOULES, predicted=said.get("joules_per_step"), measured=found, known="measured", note=note)


def _process_band(tensors: float | None) -> tuple[float | None, float | None]:
    if tensors is None:
        return None, None
    return tensors + PROCESS_BYTES[0], tensors * (1 + PROCESS_SHARE) + PROCESS_BYTES[1]


def _parts(said: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[StepPart]:
    """Seconds of a step, phase by phase. Predicted spans have waits in them; where a plan has phases alone, they are
    seconds in which the device computes."""
    found, spans, phases = measured["phases"], said.get("spans") or {}, said.get("phases") or {}
    computing = sum(seconds for name, seconds in phases.items() if name != "update") if phases else None
    note = "without waits" if phases and not spans else ""
    yield StepPart(
        name="forward and backward", predicted=spans.get("backward", computing), measured=found.get("backward"), note=note
    )
    yield StepPart(name="update", predicted=spans.get("update", phases.get("update")), measured=found.get("update"), note=note)
    data = found.get("data")
    yield StepPart(
        name="between steps", predicted=None, measured=found.get("between"),
        note=f"{words.seconds(data)} to fetch data" if data else "",
    )  # fmt: skip
    own = "the host's own time" if measured["hardware"].get("kind") == "cpu" else "waiting for the host"
    for name, title in (("waiting_for_host", own), ("communication", "communication")):
        seconds = (said.get("breakdown") or {}).get(name)
        if seconds:
            yield StepPart(name=title, predicted=seconds, measured=None, note="in the phases")


def _drift(measured: Mapping[str, Any]) -> Drift | None:
    stretches = [float(value) for value in measured.get("stretches", ())]
    third = len(stretches) // 3
    if not third:
        return None
    first, last = median(stretches[:third]), median(stretches[-third:])
    return Drift(
        first_seconds=first, last_seconds=last, change=last / first - 1 if first else 0.0,
        low_seconds=float(measured["p10_seconds"]), high_seconds=float(measured["p90_seconds"]),
    )  # fmt: skip


def notes_of(said: Mapping[str, Any], measured: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of a run's figures should know."""
    pace = said.get("pace")
    if pace:
        yield f"predicted for a machine that takes {pace:.2f} times as long as its profile says, as measured just before"
    if int(measured["steps"]) < 10:
        yield f"only {measured['steps']} steps were measured: a median of so few says little"


# --- a page for people -----------------------------------------------------------------------------------------------

GUTTER = 12
_KINDS = {"gemm": "products", "waiting_for_host": "host"}
_WORDS = {True: ("inside", "green"), False: ("OUTSIDE", "red"), None: ("", "")}


def render(comparison: Comparison, width: int = 80, *, ascii_only: bool = False) -> Text:
    """The comparison as a table, with where the time went, how it drifted and how to repeat it."""
    rows = [Text(line, "bold") for line in wrapped(f"predicted beside measured: {comparison.model}, {comparison.plan}", width, 2)]
    rows += table(comparison.lines, busy=bool(comparison.busy))
    rows += [Text(line, "yellow") for line in wrapped(comparison.busy, width, 2)] if comparison.busy else []
    rows += [Text()]
    for line in (*_where(comparison), *_about(comparison)):
        rows += [Text(part) for part in wrapped(line, width, GUTTER)]
    rows += [Text(f"{'again':<{GUTTER}}{comparison.command}")] if comparison.command else []
    page = Text("\n").join(rows)
    return Text(page.plain.translate(ASCII)) if ascii_only else page


ASCII = str.maketrans({"–": "-", "→": ">", "×": "x", "µ": "u"})


def wrapped(line: str, width: int, indent: int) -> list[str]:
    """Lines of at most that width, all but the first indented."""
    return textwrap.wrap(line, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, drop_whitespace=True) or [""]


def table(lines: Sequence[Line], *, busy: bool = False) -> list[Text]:
    """Predicted, expected, measured and error, a row for each line; `busy`: so was the machine, and its seconds are no machine's own."""
    cells = [("", "predicted", "expected", "measured", "error")]
    cells += [
        (_name(line), amount(line.predicted, line.unit), _span(line), amount(line.measured, line.unit), _off(line))
        for line in lines
    ]  # fmt: skip
    wide = [max(len(row[column]) for row in cells) for column in range(5)]
    wide[0] = max(wide[0], GUTTER - 2)
    shown = []
    for row, line in zip(cells, (None, *lines), strict=True):
        text = "  ".join(cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, wide, strict=True)))
        word, style = _WORDS[line.inside] if line is not None else ("", "")
        if line is not None and line.measured is None:
            word = "not measured"
        elif line is not None and line.inside is False and busy and line.unit not in (BYTES, SHARE, JOULES):
            word += ", busy"
        shown.append(Text.assemble(text, "  ", (word, style)) if word else Text(text.rstrip()))
    return shown


def _name(line: Line) -> str:
    return line.unit if line.unit not in (SECONDS, BYTES, SHARE, JOULES) else "process RAM" if line.name == "process" else line.name


def _where(comparison: Comparison) -> Iterator[str]:
    parts = [part for part in comparison.parts if part.predicted is not None or part.measured is not None]
    if parts:
        yield f"{'':<{GUTTER}}{'':<22}{'predicted':>10}{'measured':>12}"
    for number, part in enumerate(parts):
        label = "time" if not number else ""
        said = f"{amount(part.predicted, SECONDS):>10}{amount(part.measured, SECONDS):>12}"
        yield f"{label:<{GUTTER}}{part.name:<22}{said}" + (f"  {part.note}" if part.note else "")
    total = sum(comparison.kinds.values())
    if total:
        shares = sorted(comparison.kinds.items(), key=lambda item: -item[1])
        named = [f"{_KINDS.get(name, name)} {words.percent(value / total)}" for name, value in shares if value >= 0.005 * total]
        yield f"{'of which':<{GUTTER}}{'  '.join(named)} as predicted"
    if comparison.besides:
        yield f"{'besides':<{GUTTER}}" + ", ".join(f"{words.seconds(s)} for one {name}" for name, s in comparison.besides.items())


def _about(comparison: Comparison) -> Iterator[str]:
    drift = comparison.drift
    if drift is not None:
        yield (
            f"{'drift':<{GUTTER}}first third {words.seconds(drift.first_seconds)}, last third {words.seconds(drift.last_seconds)} "
            f"({drift.change:+.1%}); eight of ten steps {words.seconds(drift.low_seconds)} to {words.seconds(drift.high_seconds)}"
        )
    loss = comparison.loss
    if loss.get("first") is not None and loss.get("last") is not None:
        held = f", held out {loss['held_out']:.4f}" if loss.get("held_out") is not None else ""
        yield f"{'loss':<{GUTTER}}{loss['first']:.4f} → {loss['last']:.4f}{held}"
    hardware, versions = comparison.hardware, comparison.versions
    count = int(hardware.get("count") or 1)
    ranks = f"{count} ranks" if count > 1 else "1 rank"
    threads = f" of {hardware['threads']} threads" if hardware.get("threads") else ""
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "python", "foretell") if name in versions)
    yield f"{'machine':<{GUTTER}}{hardware.get('device', '')}, {ranks}{threads}; {named}"
    for note in comparison.notes:
        yield f"{'note':<{GUTTER}}{note}"


def amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == BYTES:
        return gib(value) if value >= GIB else human_bytes(value)
    if unit == SHARE:
        return f"{100 * value:.1f} %"
    if unit == JOULES:
        return words.joules(value)
    return words.seconds(value) if unit == SECONDS else words.number(value)


def _span(line: Line) -> str:
    if line.low is None or line.high is None:
        return "-"
    low, high = amount(line.low, line.unit).split(), amount(line.high, line.unit).split()
    return f"{low[0] if low[1:] == high[1:] else ' '.join(low)} – {' '.join(high)}"


def _off(line: Line) -> str:
    return "-" if line.error is None else f"{100 * line.error:+.1f} {'pt' if line.unit == SHARE else '%'}"
