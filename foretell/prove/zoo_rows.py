"""Rows of `foretell zoo check`: what was predicted, measured and run of one entry, whether it holds, and in words."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.units import human_bytes, relative_error

PASS, REASON, FAIL = "pass", "reason", "fail"
"""All held; something did not, for a reason that is no mistake of the prediction; a mistake."""
OK, NO, NONE = "ok", "no", "-"
COLUMNS = ("trace", "memory", "time", "plan", "ranks", "trap")
MEMORY_BAR, GPU_MEMORY_BAR, TIME_BAR = 0.05, 0.08, 0.25


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One entry in one phase, or in several phases in turn, on one device."""

    name: str
    module: str
    paper: str = ""
    phase: str = ""
    """Empty where the module has none; a+b: in turn."""
    device: str = ""
    torch: str = ""
    date: str = ""
    commit: str = ""
    samples: int = 0
    ops: int | None = None
    uncovered: tuple[str, ...] = ()
    """Ops without a rule for FLOPs or bytes."""
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    predicted_seconds: float | None = None
    """At this device's pace."""
    measured_seconds: float | None = None
    pace: float | None = None
    """How many times as long as its profile says this CPU took for ops, by other models."""
    host_pace: float | None = None
    """The same of what is around ops."""
    pacers: int | None = None
    """How many models said so."""
    global_batch: int | None = None
    """Samples of the step that is planned."""
    plain_bytes: int | None = None
    """Predicted of that step run plainly."""
    cap_bytes: int | None = None
    plan: str = ""
    plan_ranks: int | None = None
    plan_predicted_bytes: int | None = None
    plan_measured_bytes: int | None = None
    loss_difference: float | None = None
    """The largest of a step, relative to the plain run's."""
    ranks: str = ""
    gradient_difference: float | None = None
    """‖Δg‖/‖g‖ of the tensor that is furthest off on two ranks."""
    trap: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column → ok, no, - (nothing to check), or why it could not hold."""
    seconds: float = 0.0
    """That the check took."""
    status: str = ""
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.name, self.phase, self.device

    @property
    def failed(self) -> tuple[str, ...]:
        """Columns that do not hold."""
        return tuple(name for name, said in self.columns.items() if said == NO)

    @property
    def title(self) -> str:
        return f"{self.name} {self.phase}".rstrip()

    @property
    def memory_error(self) -> float | None:
        return relative_error(self.predicted_bytes, self.measured_bytes)

    @property
    def time_error(self) -> float | None:
        return relative_error(self.predicted_seconds, self.measured_seconds)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory_error": self.memory_error, "time_error": self.time_error}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckRow:
        known = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        return cls(**{**known, "uncovered": tuple(known.get("uncovered", ()))})


def judged(row: CheckRow, failures: Mapping[str, str], excuses: Mapping[str, str]) -> CheckRow:
    """The row with its status: columns that failed, and columns that could not hold, each with a few words."""
    columns = {
        name: NO if name in failures else excuses.get(name) or row.columns.get(name, NONE) for name in COLUMNS
    }  # fmt: skip
    told = [f"{name}: {why}" for name, why in {**failures, **excuses}.items()]
    status = FAIL if failures else REASON if excuses else PASS
    return replace(row, columns=columns, status=status, reason="; ".join(told) or row.reason)


# ---------------------------------------------------------------------------------------------- the file


def read(path: Path) -> dict[tuple[str, str, str], CheckRow]:
    """Rows that were kept, the last of each key; a line that was cut off does not count."""
    found: dict[tuple[str, str, str], CheckRow] = {}
    if not path.exists():
        return found
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--keep {path} cannot be read: {error}", "name a file of rows, or a new one") from None
    for line in text.splitlines():
        try:
            row = CheckRow.from_json(json_of(line))
        except (ValueError, TypeError, AttributeError):
            continue
        found[row.key] = row
    return found


def append(path: Path, row: CheckRow) -> None:
    """Write a row at once, behind whatever a stopped run left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if cut else "") + json.dumps(row.to_json()) + "\n")


# ---------------------------------------------------------------------------------------------- all of them


def summary(rows: Sequence[CheckRow]) -> dict[str, Any]:
    """Counts by row and by module, errors of memory and time by module: a module is as good as its worst row."""
    modules: dict[str, list[CheckRow]] = {}
    for row in rows:
        modules.setdefault(row.module, []).append(row)
    order = (PASS, REASON, FAIL)
    worst = {name: max((row.status for row in own), key=order.index) for name, own in modules.items()}
    return {
        "rows": len(rows), "modules": len(modules),
        "by_status": {status: sum(row.status == status for row in rows) for status in order},
        "modules_by_status": {status: sum(found == status for found in worst.values()) for status in order},
        "not_passed": sorted(name for name, status in worst.items() if status != PASS),
        "memory": _spread([_worst(own, "memory_error") for own in modules.values()]),
        "time": _spread([_worst(own, "time_error") for own in modules.values()]),
        "plans": {
            "found": sum(bool(row.plan) for row in rows), "on_one_device": sum(row.plan_ranks == 1 for row in rows),
            "on_two_devices": sum(row.plan_ranks == 2 for row in rows),
        },
        "seconds": sum(row.seconds for row in rows),
    }  # fmt: skip


def _worst(rows: Iterable[CheckRow], name: str) -> float | None:
    found = [value for row in rows if (value := getattr(row, name)) is not None]
    return max(found, key=abs) if found else None


def _spread(errors: Iterable[float | None]) -> dict[str, float] | None:
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return {"modules": len(known), "median": statistics.median(map(abs, known)), "worst": max(known, key=abs)}


def closing(rows: Sequence[CheckRow]) -> str:
    """One line of all."""
    total = summary(rows)
    words = [f"{total['modules_by_status'][PASS]} of {total['modules']} modules pass"]
    for status, said in ((REASON, "state a reason"), (FAIL, "fail")):
        words += [f"{total['modules_by_status'][status]} {said}"] if total["modules_by_status"][status] else []
    for name in ("memory", "time"):
        spread = total[name]
        words += [f"{name} median {spread['median']:.1%}, worst {spread['worst']:+.1%}"] if spread else []
    return "; ".join(words)


# ---------------------------------------------------------------------------------------------- words


HEADS = ("entry", "ops", "memory", "", "time", "", "at half the memory", "", "2 ranks", "trap", "status")


def table(rows: Sequence[CheckRow]) -> list[str]:
    """All rows for people, then what did not hold and which traps are open."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    wide = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    right = {1, 2, 3, 4, 5, 7}
    lines = [
        "  ".join(cell.rjust(wide[at]) if at in right else cell.ljust(wide[at]) for at, cell in enumerate(line)).rstrip()
        for line in cells
    ]
    said = [f"{row.title}: {row.reason}" for row in rows if row.reason]
    traps: dict[str, str] = {}
    for row in rows:
        if row.trap not in ("", "tested"):
            traps.setdefault(row.module, row.trap)
    lines += ["", *said] if said else []
    lines += ["", *(f"{module}: {trap}" for module, trap in traps.items())] if traps else []
    return [*lines, "", closing(rows)] if rows else lines


def line(row: CheckRow) -> str:
    """One row while others are still to come."""
    parts = [row.title, row.status]
    parts += [f"memory {row.memory_error:+.1%}"] if row.memory_error is not None else []
    parts += [f"time {row.time_error:+.0%}"] if row.time_error is not None else []
    parts += [row.plan] if row.plan else []
    parts += [row.reason] if row.reason else []
    return f"{'  '.join(parts)}  ({row.seconds:.0f} s)"


def _cells(row: CheckRow) -> tuple[str, ...]:
    memory, time = row.memory_error, row.time_error
    held = f"{row.plan_measured_bytes / row.plain_bytes:.0%}" if row.plan_measured_bytes and row.plain_bytes else ""
    return (
        row.title, str(row.ops) if row.ops is not None else NONE,
        human_bytes(row.measured_bytes) if row.measured_bytes else NONE, f"{memory:+.1%}" if memory is not None else "",
        f"{1e3 * row.measured_seconds:.1f} ms" if row.measured_seconds else NONE, f"{time:+.0%}" if time is not None else "",
        row.plan or row.columns.get("plan", NONE), held, row.ranks or NONE,
        "tested" if row.trap == "tested" else "open" if row.trap else NONE, row.status,
    )  # fmt: skip
