"""The plans a search weighed against each other, as a report shows them: a small file beside the plan. No torch.

Beside `plan.json` stands `plan.front.json` (`front_path`), written by whoever searched (`write`):

    {
      "version": 1,
      "costed": 1240,                         optional: plans that were costed
      "currency": "USD",                      optional: of cost_per_step
      "provenance": {"time": "assumed", "memory": "counted", "cost": "...", "energy": "..."},     optional
      "points": [
        {
          "words": "pp 4 × dp_shard 2, micro-batch 1, 1f1b",      the plan in a few words
          "seconds": 1.42,                    of a step; null where it is not known, as every figure below
          "memory_bytes": 61000000000,        on the device of the worst rank
          "cost_per_step": 0.0123,
          "joules_per_step": 5400.0,
          "chosen": true,                     this is the plan of the file beside
          "why": "",                          why it was not chosen: "12 % slower: waits for communication"
          "low_seconds": 1.3, "high_seconds": 1.6,                optional band
          "per_step": 80940, "unit": "tokens",                    optional: what a step gets through
          "on_front": true                    no other plan is better in something and worse in nothing; found anew when read
        }, ...
      ],
      "dropped": [{"words": "tp 16", "why": "crosses nodes"}, ...]          optional: illegal, or does not fit
    }

A list of points alone is read as well. Where points differ in what a step gets through, they are compared for a million
tokens (or samples) instead of a step. `of_choice` makes all this from what `search.solve.choose` returns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretell.decode import json_of
from foretell.errors import FileFormatError, UserError
from foretell.files import write_atomically

if TYPE_CHECKING:
    from foretell.plan.types import Plan
    from foretell.search.solve.choose import Candidate, Choice
    from foretell.search.solve.find import Finalist

VERSION = 1
SUFFIX = ".front.json"
_MOST = 1e30
_AGAIN = "make the plan again with `foretell plan`, or delete the file"


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """One plan that fits."""

    words: str
    seconds: float | None = None
    memory_bytes: float | None = None
    cost_per_step: float | None = None
    joules_per_step: float | None = None
    chosen: bool = False
    why: str = ""
    low_seconds: float | None = None
    high_seconds: float | None = None
    per_step: float | None = None
    unit: str = ""
    on_front: bool = True


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """One plan that is not possible."""

    words: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Plans of one search."""

    points: tuple[FrontPoint, ...]
    dropped: tuple[Dropped, ...] = ()
    costed: int = 0
    currency: str = "USD"
    provenance: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def chosen(self) -> FrontPoint | None:
        return next((point for point in self.points if point.chosen), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_choice(choice: Choice, saved: Plan | None = None) -> Front:
    """What a search weighed; `saved` is the plan that was written, if it is not the best."""
    from foretell.search.solve.choose import told

    chosen = saved if saved is not None else choice.best.plan if choice.best is not None else None
    dropped = tuple(Dropped(words=told(one.plan), why=one.why) for one in choice.dropped)
    found = choice.found
    if found is None:
        candidates = [one for one in (choice.best, *choice.runners_up) if one is not None]
        points = tuple(_candidate(one, one.plan == chosen) for one in candidates)
        return marked(Front(points=points, dropped=dropped, costed=choice.costed))
    best = (found.best,) if found.best is not None else ()
    front = [*best, *(one for one in found.front if not any(one.plan == other.plan for other in best))]
    others = [one for one in found.runners_up if not any(one.plan == other.plan for other in front)]
    unit = next((name for name in ("tokens", "samples") for one in front if f"{name}_per_step" in one.plan.predicted), "")
    asked = "" if found.best is None or found.best.plan == chosen else "the best of the search; another of its plans was asked for"
    points = tuple(_finalist(one if one.plan == chosen or one.why else replace(one, why=asked), one.plan == chosen, unit)
                   for one in (*front, *others))  # fmt: skip
    return marked(Front(points=points, dropped=dropped, costed=found.costed))


def marked(front: Front) -> Front:
    """With `on_front` as the figures have it: another plan that is better in something and worse in nothing takes a plan off."""
    figures = [_figures(point) for point in front.points]
    flags = [not any(_betters(other, mine) for other in figures) for mine in figures]
    return replace(front, points=tuple(replace(point, on_front=flag) for point, flag in zip(front.points, flags, strict=True)))


def _figures(point: FrontPoint) -> tuple[float | None, ...]:
    """Seconds, bytes, money and joules, all but the bytes for each token."""
    unit = point.per_step or 1.0
    each = (None if value is None else value / unit for value in (point.seconds, point.cost_per_step, point.joules_per_step))
    return (*each, point.memory_bytes)


def _betters(one: tuple[float | None, ...], other: tuple[float | None, ...]) -> bool:
    """What is not known of both says nothing."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _finalist(one: Finalist, chosen: bool, unit: str) -> FrontPoint:
    from foretell.search.solve.choose import told

    point, said = one.point, one.plan.predicted
    return FrontPoint(
        words=told(one.plan), seconds=point.seconds, memory_bytes=point.memory_bytes, cost_per_step=point.dollars,
        joules_per_step=point.joules, chosen=chosen, why=one.why, low_seconds=said.get("low_seconds"),
        high_seconds=said.get("high_seconds"), per_step=point.per_step, unit=unit,
    )  # fmt: skip


def _candidate(one: Candidate, chosen: bool) -> FrontPoint:
    from foretell.search.solve.choose import told

    cost = one.cost
    if cost is None:
        return FrontPoint(words=told(one.plan), chosen=chosen, why=one.why)
    time = cost.time
    return FrontPoint(
        words=told(one.plan), chosen=chosen, why=one.why, memory_bytes=cost.worst.memory.device_bytes, per_step=cost.per_step,
        unit=cost.unit, seconds=time.step_seconds if time else None, low_seconds=time.low_seconds if time else None,
        high_seconds=time.high_seconds if time else None,
    )  # fmt: skip


def front_path(plan: str | Path) -> Path:
    """`runs/plan.json` → `runs/plan.front.json`."""
    return Path(plan).with_suffix(SUFFIX)


def write(front: Front, plan: str | Path) -> Path:
    """Write the front beside its plan."""
    path = front_path(plan)
    try:
        write_atomically(path, json.dumps(front.to_json(), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "give another file") from None
    return path


def read(path: Path) -> Front | None:
    """The front in a file; None where there is no such file."""
    try:
        data = json_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", _AGAIN) from None
    return from_json(data, str(path))


def from_json(data: Any, where: str = "the front") -> Front:
    """A front from its JSON; names it does not know are passed over."""
    if isinstance(data, list):
        data = {"points": data}
    if not isinstance(data, Mapping) or not isinstance(data.get("points"), list):
        raise FileFormatError(f"{where} has no list of points", _AGAIN)
    if data.get("version", VERSION) != VERSION:
        raise FileFormatError(f"{where} is of version {data['version']} and this foretell reads version {VERSION}", _AGAIN)
    if not isinstance(data.get("dropped") or [], list):
        raise FileFormatError(f"{where}: dropped is no list", _AGAIN)
    given = _named(Front, data, where)
    points = tuple(_one(FrontPoint, point, f"{where}, point {number}") for number, point in enumerate(data["points"]))
    dropped = tuple(_one(Dropped, one, f"{where}, dropped {number}") for number, one in enumerate(data.get("dropped") or ()))
    return marked(Front(**{**given, "points": points, "dropped": dropped}))


def _texts(value: Any) -> bool:
    return all(isinstance(item, str) for item in value.values())


_Kind = TypeVar("_Kind")
_TEXTS, _FLAGS = ("words", "why", "unit", "currency"), ("chosen", "on_front")


def _one(kind: type[_Kind], data: Any, where: str) -> _Kind:
    if not isinstance(data, Mapping) or not isinstance(data.get("words"), str):
        raise FileFormatError(f"{where} has no words", _AGAIN)
    return kind(**_named(kind, data, where))


def _named(kind: type[Any], data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a kind, each of its own type."""
    found: dict[str, Any] = {}
    for name in (item.name for item in fields(kind)):
        value = data.get(name)
        if value is None or name in ("points", "dropped"):
            continue
        wanted: type[Any] | None = str if name in _TEXTS else bool if name in _FLAGS else Mapping if name == "provenance" else None
        if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, Mapping) and not _texts(value))):
            raise FileFormatError(f"{where}: {name} is {value!r}", _AGAIN)
        if wanted is None and (isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST < value < _MOST):
            raise FileFormatError(f"{where}: {name} is {value!r} and should be a number or null", _AGAIN)
        found[name] = value
    return found
