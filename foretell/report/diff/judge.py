"""Two predictions of one model, row by row: what was, what is, and whether it grew beyond its bound. No torch.

Predictions are deterministic: the same code gives the same numbers, so every difference comes from the code. The bands of two
predictions of step time are wide and have the same causes; growth is judged by the predicted values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Any

from foretell.quantities import COUNTED, NO, Prediction
from foretell.report.diff.bounds import MEMORY, PARAMETERS, STEP, GrowthBound

SCHEMA_VERSION = 1
SCHEMA = "diff.schema.json"
BYTES, SECONDS, COUNT = "bytes", "seconds", "parameters"
WITHIN, GROWN, NEW, BROKEN, UNCOMPARED = "within", "grown", "new", "broken", "uncompared"
"""Of a model: all in its bounds; beyond one; not there in the base; HEAD cannot be traced; only the base cannot."""


SAME = 1e-9
"""Share of a step that is no difference."""


def schema() -> dict[str, Any]:
    """Of `--json`, under `diff`."""
    found: dict[str, Any] = json.loads((resources.files("foretell.report.diff") / SCHEMA).read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What was compared, as the user calls it."""

    name: str
    """`main`, `HEAD~1`, or `the working tree`."""
    commit: str
    """The whole hash; of the working tree that of HEAD, where there is one."""
    working_tree: bool = False

    @property
    def shown(self) -> str:
        if self.working_tree:
            return self.name
        return self.name if self.commit.startswith(self.name) else f"{self.name} ({self.commit[:8]})"


@dataclass(frozen=True, kw_only=True)
class RevisionAnswer:
    """What a revision said of a model: a prediction, or why there is none."""

    prediction: Prediction | None = None
    missing: bool = False
    """The model's file or function is not there."""
    problem: str = ""
    remedy: str = ""
    detail: str = ""
    parameters: Mapping[str, int] | None = None
    """Elements by parameter name, where that was asked for."""


@dataclass(frozen=True, kw_only=True)
class DiffRow:
    """One quantity in both revisions."""

    name: str
    """`peak memory`, `device memory`, `step time`, `device time`, `parameters`."""
    unit: str
    base: float | None
    head: float | None
    provenance: str
    """How it is known: counted, measured or assumed."""
    bound: str = ""
    """Empty where there is none: the row is told and not judged."""
    ok: bool = True
    low: float | None = None
    high: float | None = None
    """The range HEAD's value is expected in."""

    @property
    def change(self) -> float | None:
        """Sums of seconds in another order differ in their last digits: that is none."""
        if self.base is None or self.head is None:
            return None
        found = self.head - self.base
        return 0.0 if self.unit == SECONDS and abs(found) <= SAME * abs(self.head) else found

    @property
    def share(self) -> float | None:
        return self.change / abs(self.base) if self.change is not None and self.base else None


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Something that has another size in HEAD."""

    name: str
    base: int
    head: int
    category: str = ""
    at_most: bool = False
    """`base` is a limit: what is below it is not listed in the base."""

    @property
    def change(self) -> int:
        return self.head - self.base


@dataclass(frozen=True, kw_only=True)
class ModelDiff:
    """One model, or script, on one kind of hardware."""

    model: str
    on: str
    options: str
    """As typed, for people: `--micro-batch 4`."""
    verdict: str
    rows: tuple[DiffRow, ...] = ()
    base_fits: str | None = None
    head_fits: str | None = None
    """fits, tight, no or unknown."""
    base_problem: str = ""
    head_problem: str = ""
    remedy: str = ""
    detail: str = ""
    categories: tuple[Growth, ...] = ()
    tensors: tuple[Growth, ...] = ()
    modules: tuple[Growth, ...] = ()

    @property
    def stops_fitting(self) -> bool:
        return self.head_fits == NO and self.base_fits not in (None, NO)

    @property
    def grown(self) -> tuple[DiffRow, ...]:
        return tuple(row for row in self.rows if not row.ok)


@dataclass(frozen=True, kw_only=True)
class RevisionDiff:
    """All that was asked of two revisions."""

    base: Revision
    head: Revision
    models: tuple[ModelDiff, ...]
    bounds: Mapping[str, GrowthBound]
    notes: tuple[str, ...] = field(default=())

    @property
    def status(self) -> int:
        verdicts = {one.verdict for one in self.models}
        return 2 if BROKEN in verdicts else 1 if GROWN in verdicts else 0

    def to_json(self) -> dict[str, Any]:
        models = []
        for one in self.models:
            rows = [{**asdict(row), "change": row.change, "share": row.share} for row in one.rows]
            models.append({**asdict(one), "rows": rows, "stops_fitting": one.stops_fitting})
        return {
            "schema_version": SCHEMA_VERSION, "ok": self.status == 0, "status": self.status, "base": asdict(self.base), "head": asdict(self.head),
            "bounds": {what: bound.text for what, bound in self.bounds.items()}, "models": models, "notes": list(self.notes),
        }  # fmt: skip


def compared(
    model: str, on: str, options: str, base: RevisionAnswer, head: RevisionAnswer, bounds: Mapping[str, GrowthBound], names: tuple[str, str]
) -> ModelDiff:
    """What two answers say together; `names` are those of the revisions."""
    about: dict[str, Any] = {"model": model, "on": on, "options": options}
    if head.prediction is None:
        gone = head.missing and base.prediction is not None
        remedy = f"{names[0]} has it: if it was removed or renamed, change what is asked for" if gone else head.remedy
        return ModelDiff(**about, verdict=BROKEN, head_problem=head.problem, remedy=remedy, detail=head.detail,
                         base_problem=base.problem, rows=_rows(base.prediction, None, bounds),
                         base_fits=base.prediction.verdict if base.prediction else None)  # fmt: skip
    rows = _rows(base.prediction, head.prediction, bounds)
    if base.prediction is None:
        return ModelDiff(**about, verdict=NEW if base.missing else UNCOMPARED, rows=rows, head_fits=head.prediction.verdict,
                         base_problem=base.problem, remedy="" if base.missing else base.remedy)  # fmt: skip
    found = ModelDiff(
        **about, verdict=WITHIN, rows=rows, base_fits=base.prediction.verdict, head_fits=head.prediction.verdict,
        categories=_categories(base.prediction, head.prediction), tensors=_tensors(base.prediction, head.prediction),
        modules=_modules(base.parameters, head.parameters),
    )  # fmt: skip
    return ModelDiff(**{**vars(found), "verdict": GROWN}) if found.grown or found.stops_fitting else found


def _rows(base: Prediction | None, head: Prediction | None, bounds: Mapping[str, GrowthBound]) -> tuple[DiffRow, ...]:
    said = head or base
    if said is None:
        return ()

    def row(name: str, unit: str, provenance: str, what: str, values: tuple[float | None, float | None], band: Any = None) -> DiffRow:
        bound = bounds[what] if what else GrowthBound(text="")
        old, new = values
        ok = old is None or new is None or bound.allows(old, new)
        low, high = band or (None, None)
        return DiffRow(name=name, unit=unit, base=old, head=new, provenance=provenance, bound=bound.text, ok=ok, low=low, high=high)

    def of(name: str) -> tuple[float | None, float | None]:
        return tuple(getattr(one.memory, name) if one else None for one in (base, head))  # type: ignore[return-value]

    def lasts(name: str) -> tuple[float | None, float | None]:
        return tuple(getattr(one.time, name) if one and one.time else None for one in (base, head))  # type: ignore[return-value]

    speed = word(said.time.provenance) if said.time else "not known for this device"
    memory, time = said.memory, said.time
    known = {name: word(text) for name, text in memory.provenance.items()}
    return (
        row("peak memory", BYTES, known.get("allocated_bytes", ""), MEMORY, of("allocated_bytes"), memory.bands.get("allocated_bytes")),
        row("device memory", BYTES, known.get("device_bytes", ""), "", of("device_bytes"), memory.bands.get("device_bytes")),
        row("step time", SECONDS, speed, STEP, lasts("step_seconds"), (time.low_seconds, time.high_seconds) if time else None),
        row("device time", SECONDS, speed, "", lasts("device_seconds")),
        row("parameters", COUNT, COUNTED, PARAMETERS, (base.parameters if base else None, head.parameters if head else None)),
    )  # fmt: skip


def word(provenance: str) -> str:
    """`counted` of `counted: storages of ...`."""
    return re.split(r"[:,;(]", " ".join(provenance.split()))[0].strip()


def _categories(base: Prediction, head: Prediction) -> tuple[Growth, ...]:
    """Bytes at the peak by what they are for, where they differ; the largest growth first."""
    old, new = base.memory.categories, head.memory.categories
    return _changed(Growth(name=name, base=old.get(name, 0), head=new.get(name, 0)) for name in dict.fromkeys((*new, *old)))


def _tensors(base: Prediction, head: Prediction) -> tuple[Growth, ...]:
    """The largest of HEAD that the base has not, or smaller. What a list that ends early does not name is at most its last."""
    old = {(one.name, one.category): one.bytes for one in base.memory.holders}
    least = min(old.values(), default=0) if sum(old.values()) < sum(base.memory.categories.values()) else 0
    found = (
        Growth(name=one.name, category=one.category, head=one.bytes, base=old.get((one.name, one.category), min(least, one.bytes)),
               at_most=(one.name, one.category) not in old and least > 0)
        for one in head.memory.holders
    )  # fmt: skip
    return tuple(one for one in _changed(found) if one.change > 0)


def _modules(base: Mapping[str, int] | None, head: Mapping[str, int] | None) -> tuple[Growth, ...]:
    """Parameters of modules, repeated ones added up, where they differ."""
    if base is None or head is None:
        return ()
    old, new = _by_module(base), _by_module(head)
    return _changed(Growth(name=name, base=old.get(name, 0), head=new.get(name, 0)) for name in dict.fromkeys((*new, *old)))


def _by_module(parameters: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, count in parameters.items():
        module = path.rpartition(".")[0]
        name = re.sub(r"\.\d+(?=\.|$)", ".*", module) or module or path
        found[name] = found.get(name, 0) + count
    return found


def _changed(found: Iterable[Growth]) -> tuple[Growth, ...]:
    return tuple(sorted((one for one in found if one.change), key=lambda one: -one.change))
