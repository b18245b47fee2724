"""Two runs side by side: what differs between them, and whether their figures differ by more than each varies by itself. No torch.

    of_folders(a, b)     → TwoRuns        from plan.json, measurement.json, settings.json and log.jsonl of each
    render(found, 80)    → text for a terminal
    TwoRuns.to_json()    → `foretell compare RUN_A RUN_B --json`

A difference is B / A - 1: with a plus, the second run has more. The spread of a run is that of the medians of ten equal stretches
of it, so that it holds a slow drift and no single slow step. Two figures differ where their spreads have nothing in common.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from foretell.errors import UserError
from foretell.notebook import Displayable
from foretell.plan import file as plans
from foretell.plan.text import shortened
from foretell.plan.types import Plan
from foretell.report.comparison import (
    ASCII,
    BYTES,
    GUTTER,
    JOULES,
    SECONDS,
    SHARE,
    amount,
    measured_of,
    notes_of,
    wrapped,
)
from foretell.runtime.observe import machine_load as load
from foretell.runtime.observe.measurement import nearest
from foretell.runtime.train import log
from foretell.runtime.train.folder import read_settings
from foretell.units import relative_error

SCHEMA_VERSION = 1
LEAST = 3
"""Stretches that make a spread; of a shorter run it is that of eight of ten steps."""
LAST = 0.1
"""Share of a run's steps over which the spread of its last loss is taken, at least `LEAST_LOSSES`."""
LEAST_LOSSES = 5
LOSS = "loss"
SHOWN = 14
"""Differences of settings that a screen tells; `--json` has them all."""
_PLAN_TOLD, _MODEL_TOLD = ("predicted", "notes", "version", "model"), ("digest", "shapes", "blocks", "parameters")
"""Of a plan and its model: what changes nothing in how it runs, or follows from the rest."""
_PHASES = (("backward", "forward and backward"), ("update", "update"), ("between", "between steps"), ("data", "fetching data"))


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the runs."""

    name: str
    model: str
    plan: str
    """In a few words."""
    started: str
    steps: int
    notes: tuple[str, ...] = ()
    """What a reader should know of it: a busy machine, few steps."""


@dataclass(frozen=True, kw_only=True)
class SettingDifference:
    """Something the runs were given that is not the same."""

    what: str
    """model, plan, settings, hardware or versions."""
    field: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity, measured in both runs."""

    name: str
    unit: str
    """seconds, bytes, joules, share, tokens/s or samples/s; loss."""
    a: float | None
    b: float | None
    a_spread: tuple[float, float] | None = None
    b_spread: tuple[float, float] | None = None
    """From and to; None where a run measures it once."""
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Relative; of a share and a loss, the difference."""
        if self.a is None or self.b is None or self.note == OTHER_UNIT:
            return None
        return self.b - self.a if self.unit in (SHARE, LOSS) else relative_error(self.b, self.a)

    @property
    def outside(self) -> bool | None:
        """Whether it is more than the runs vary by themselves; None where that is not known."""
        if self.difference is None or self.a_spread is None or self.b_spread is None:
            return None
        return self.a_spread[1] < self.b_spread[0] or self.b_spread[1] < self.a_spread[0]


OTHER_UNIT = "not the same unit"


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoRuns(Displayable):
    """Two runs, held against each other."""

    a: Side
    b: Side
    same_model: bool
    settings_known: bool
    """False where one of them is of a watched script."""
    differs: tuple[SettingDifference, ...]
    lines: tuple[Pair, ...]
    parts: tuple[Pair, ...]
    """Where the seconds of a step went."""
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def alike(self) -> bool:
        """Whether no figure is outside the runs' own spread."""
        return not any(line.outside for line in self.lines)

    def headline(self) -> str:
        return f"{self.a.name} and {self.b.name}: {'alike' if self.alike else 'they differ by more than each varies by itself'}"

    def rows(self) -> Sequence[tuple[str, str]]:
        return [(one.name, f"{amount(one.a, one.unit)}, {amount(one.b, one.unit)}") for one in self.lines]

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for name in ("lines", "parts"):
            data[name] = [{**asdict(one), "difference": one.difference, "outside": one.outside} for one in getattr(self, name)]
        return {**data, "alike": self.alike}


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _RunFiles:
    """What the files of a run say."""

    path: Path
    plan: Plan
    measured: Mapping[str, Any]
    settings: Mapping[str, Any] | None
    """None of a script that was watched: it has its own."""
    losses: tuple[float, ...]


def of_folders(a: str | Path, b: str | Path) -> TwoRuns:
    """Two run folders, of `foretell run` or `foretell watch`."""
    if Path(a).resolve() == Path(b).resolve():
        raise UserError(f"{a} is given twice", "give two runs, or one to compare it with its plan")
    return compare(_read(Path(a)), _read(Path(b)))


def _read(path: Path) -> _RunFiles:
    measured = measured_of(path)
    settings = read_settings(path)
    rows = log.read(path / log.LOG)
    losses = [row.get("loss") for row in rows if row.get("event") == "step"]
    return _RunFiles(
        path=path, plan=plans.read(path / "plan.json"), measured=measured, settings=settings.to_json() if settings is not None else None,
        losses=tuple(float(one) for one in losses if isinstance(one, int | float) and math.isfinite(one)),
    )  # fmt: skip


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(a: _RunFiles, b: _RunFiles) -> TwoRuns:
    models = [str(run.plan.model.get("model", "")) for run in (a, b)]
    differs = tuple(_differs(a, b))
    return TwoRuns(
        a=_side(a, _names(a, b)[0]), b=_side(b, _names(a, b)[1]), same_model=models[0] == models[1],
        settings_known=a.settings is not None and b.settings is not None, differs=differs,
        lines=tuple(_lines(a, b)), parts=tuple(_parts(a, b)), notes=tuple(_notes(a, b, models)),
    )  # fmt: skip


def _names(a: _RunFiles, b: _RunFiles) -> tuple[str, str]:
    """Names of the folders; their paths where those are the same."""
    return (a.path.resolve().name, b.path.resolve().name) if a.path.resolve().name != b.path.resolve().name else (str(a.path), str(b.path))


def _side(run: _RunFiles, name: str) -> Side:
    from foretell.search.solve.choose import told

    measured = run.measured
    return Side(
        name=name, model=str(run.plan.model.get("model", "")), plan=told(run.plan), started=str(measured["started"]),
        steps=int(measured["steps"]), notes=tuple(filter(None, (load.words_of(measured), *notes_of({}, measured)))),
    )  # fmt: skip


def _differs(a: _RunFiles, b: _RunFiles) -> Iterator[SettingDifference]:
    for what, one, other in (
        ("model", _model(a.plan), _model(b.plan)),
        ("plan", _plan(a.plan), _plan(b.plan)),
        ("hardware", a.measured["hardware"], b.measured["hardware"]),
        ("versions", a.measured["versions"], b.measured["versions"]),
        ("settings", a.settings or {}, b.settings or {}),
    ):
        if what == "settings" and (a.settings is None or b.settings is None):
            continue  # of a watched script they are not known
        mine, theirs = dict(_flat(one)), dict(_flat(other))
        for field in dict.fromkeys((*mine, *theirs)):
            if mine.get(field) != theirs.get(field):
                yield SettingDifference(what=what, field=field, a=mine.get(field), b=theirs.get(field))


def _model(plan: Plan) -> dict[str, Any]:
    """Without what follows from the rest; the parameters tell models of one name apart."""
    found = {name: value for name, value in plan.model.items() if name not in _MODEL_TOLD}
    return {**found, **({"parameters": plan.model["parameters"]} if "parameters" in plan.model else {})}


def _plan(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plans.to_json(plan).items() if name not in _PLAN_TOLD}


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """`mesh.tp` → 2."""
    for name, part in value.items():
        if isinstance(part, Mapping):
            yield from _flat(part, f"{before}{name}.")
        else:
            yield f"{before}{name}", part


def _lines(a: _RunFiles, b: _RunFiles) -> Iterator[Pair]:
    (spread_a, spread_b), units = (_spread(run.measured) for run in (a, b)), [str(run.measured["unit"]) for run in (a, b)]
    mine, theirs = a.measured, b.measured
    yield Pair(name="step", unit=SECONDS, a=mine["step_seconds"], b=theirs["step_seconds"], a_spread=spread_a, b_spread=spread_b)
    per = [float(run.measured["per_step"]) for run in (a, b)]
    yield Pair(
        name="throughput", unit=f"{units[0]}/s", a=mine["per_second"], b=theirs["per_second"], a_spread=_rate(per[0], spread_a),
        b_spread=_rate(per[1], spread_b), note="" if units[0] == units[1] else OTHER_UNIT,
    )  # fmt: skip
    for field, name in (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved"), ("host_bytes", "process RAM")):
        if mine.get(field) is not None or theirs.get(field) is not None:
            yield Pair(name=name, unit=BYTES, a=mine.get(field), b=theirs.get(field))
    if mine.get("joules_per_step") is not None or theirs.get("joules_per_step") is not None:
        yield Pair(name="energy", unit=JOULES, a=mine.get("joules_per_step"), b=theirs.get("joules_per_step"))
    if mine.get("mfu") or theirs.get("mfu"):
        yield Pair(name="MFU", unit=SHARE, a=mine.get("mfu"), b=theirs.get("mfu"))
    for field, name in (("last_loss", "loss"), ("eval_loss", "held out")):
        if mine.get(field) is not None or theirs.get(field) is not None:
            both = (_losses(a), _losses(b)) if field == "last_loss" else (None, None)
            yield Pair(name=name, unit=LOSS, a=mine.get(field), b=theirs.get(field), a_spread=both[0], b_spread=both[1])


def _spread(measured: Mapping[str, Any]) -> tuple[float, float]:
    found = [float(value) for value in measured.get("stretches", ())]
    if len(found) >= LEAST and int(measured["steps"]) > len(found):
        return min(found), max(found)
    return float(measured["p10_seconds"]), float(measured["p90_seconds"])


def _rate(per_step: float, spread: tuple[float, float]) -> tuple[float, float] | None:
    return (per_step / spread[1], per_step / spread[0]) if spread[0] > 0 else None


def _losses(run: _RunFiles) -> tuple[float, float] | None:
    """Eight of ten losses of the run's last steps."""
    last = sorted(run.losses[-max(LEAST_LOSSES, int(LAST * len(run.losses))) :])
    return (nearest(last, 0.1), nearest(last, 0.9)) if len(last) >= LEAST_LOSSES else None


def _parts(a: _RunFiles, b: _RunFiles) -> Iterator[Pair]:
    for field, name in _PHASES:
        mine, theirs = (run.measured["phases"].get(field) for run in (a, b))
        if mine is not None or theirs is not None:
            yield Pair(name=name, unit=SECONDS, a=mine, b=theirs, note="inside between steps" if field == "data" else "")


def _notes(a: _RunFiles, b: _RunFiles, models: Sequence[str]) -> Iterator[str]:
    if models[0] != models[1]:
        yield f"the runs are of different models ({models[0]} and {models[1]}): the figures are not of the same work"
    per = [run.measured["per_step"] for run in (a, b)]
    unit = a.measured["unit"]
    if per[0] != per[1] and unit == b.measured["unit"]:
        yield f"a step of the first gets through {per[0]:,} {unit}, one of the second through {per[1]:,}: compare {unit}/s"
    lengths = [int(run.measured["steps"]) + int(run.measured["skipped_steps"]) for run in (a, b)]
    if lengths[0] != lengths[1] and a.measured.get("last_loss") is not None and b.measured.get("last_loss") is not None:
        yield f"losses are of step {lengths[0]:,} and of step {lengths[1]:,}"
    if (a.settings is None) != (b.settings is None):
        yield "one of the runs is of a script that was watched: its settings and losses are not known"


# --- a page for people -----------------------------------------------------------------------------------------------

_WORDS = {True: ("OUTSIDE their spread", "yellow"), False: ("within their spread", "green"), None: ("", "")}


def render(found: TwoRuns, width: int = 80, *, ascii_only: bool = False) -> Text:
    """Both runs as one table, with where the time went, what differs and what to keep in mind."""
    model = found.a.model if found.same_model else f"{found.a.model} and {found.b.model}"
    rows = [Text(line, "bold") for line in wrapped(f"two runs: {model}", width, 2)]
    for letter, side in (("A", found.a), ("B", found.b)):
        when = side.started.replace("T", " ").replace("Z", " UTC")
        rows += _wrapped(f"{letter:<{GUTTER}}{side.name}: {side.plan}, {side.steps:,} steps measured, {when}", width)
    rows += [line for row in _differing(found) for line in _wrapped(row, width)]
    rows += [Text(), *_table(found.lines), Text()]
    if found.parts:
        rows += [*_table(found.parts, "time"), Text()]
    for note in found.notes:
        rows += _wrapped(f"{'note':<{GUTTER}}{note}", width)
    for letter, side in (("A", found.a), ("B", found.b)):
        rows += [line for note in side.notes for line in _wrapped(f"{'note':<{GUTTER}}{letter}: {note}", width)]
    while rows and not rows[-1].plain:
        rows.pop()
    page = Text("\n").join(rows)
    return Text(page.plain.translate(ASCII)) if ascii_only else page


def _wrapped(line: str, width: int) -> list[Text]:
    return [Text(part) for part in wrapped(line, width, GUTTER)]


def _table(lines: Sequence[Pair], title: str = "") -> list[Text]:
    cells = [(title, "A", "B", "B to A")]
    cells += [(_name(line), _told(line.a, line.unit), _told(line.b, line.unit), _off(line)) for line in lines]
    wide = [max(len(row[column]) for row in cells) for column in range(4)]
    wide[0] = max(wide[0], GUTTER - 2)
    shown = []
    for row, line in zip(cells, (None, *lines), strict=True):
        text = "  ".join(cell.rjust(w) if n else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, wide, strict=True)))
        word, style = _WORDS[line.outside] if line is not None else ("", "")
        word = word or (line.note if line is not None else "")
        shown.append(Text.assemble(text, "  ", (word, style)) if word else Text(text.rstrip()))
    return shown


def _name(line: Pair) -> str:
    return line.unit if line.name == "throughput" and line.note != OTHER_UNIT else line.name


def _told(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4f}" if unit == LOSS else amount(value, unit)


def _off(line: Pair) -> str:
    if line.difference is None:
        return "-"
    return f"{line.difference:+.4f}" if line.unit == LOSS else f"{100 * line.difference:+.1f} {'pt' if line.unit == SHARE else '%'}"


def _differing(found: TwoRuns) -> Iterator[str]:
    if not found.differs:
        yield f"{'differs':<{GUTTER}}nothing: the same model, plan, hardware{', versions and settings' if found.settings_known else ' and versions'}"
    for number, one in enumerate(found.differs[:SHOWN]):
        yield f"{'' if number else 'differs':<{GUTTER}}{one.what} {shortened(one.field)}: {_value(one.a)} → {_value(one.b)}"
    if len(found.differs) > SHOWN:
        yield f"{'':<{GUTTER}}and {len(found.differs) - SHOWN} more (--json)"


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 40)
