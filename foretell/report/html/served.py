"""What a page of serving is made from, by what was written: a server's record, a measurement, a search, tuned settings, a plan. No torch.

    foretell serve --out FOLDER        serve.json, steps.jsonl, requests.jsonl     pages over time; predicted beside measured of a plan
    foretell serve bench --out FILE    {"bench": ...}                              tokens a second against seconds a token
    foretell plan --serve              PLAN, and PLAN.serving.json beside it       the front, pages over time
    foretell tune serve --json         {"tune": ...}                               settings, predicted and measured
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import FileFormatError, UserError

ABOUT, STEPS, REQUESTS = "serve.json", "steps.jsonl", "requests.jsonl"
"""Of a record, as the server writes it."""
SUFFIX = ".serving.json"
"""Beside a plan: what the search for it weighed."""
KEYS = ("bench", "serving", "tune")
MOST_BYTES = 64 * 2**20
SPANS = 300
"""Of time, in a chart."""


@dataclass(frozen=True, kw_only=True)
class ServePointTold:
    """One load or one way to serve it."""

    name: str
    tpot: float
    """Seconds a token."""
    rate: float
    """Tokens a second."""
    ttft: float | None = None
    inside: float | None = None
    note: str = ""
    chosen: bool = False
    measured: bool = False


@dataclass(frozen=True, kw_only=True)
class ServeMoment:
    """The most of a span of time."""

    at: float
    pages: int
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServeLine:
    """A figure, predicted and measured."""

    name: str
    predicted: float | None
    measured: float | None
    seconds: bool = True


@dataclass(frozen=True, kw_only=True)
class ServedSubject:
    """All that a page tells."""

    path: Path
    model: str
    kind: str
    """What was written, in words."""
    about: tuple[str, ...] = ()
    points: tuple[ServePointTold, ...] = ()
    quantile: str = "p50"
    """Of seconds a token."""
    moments: tuple[ServeMoment, ...] = ()
    pages: int = 0
    lines: tuple[ServeLine, ...] = ()
    facts: tuple[tuple[str, float, str], ...] = ()
    """Label, value and unit: s, or of a count."""
    notes: tuple[str, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()


def holds(path: Path) -> bool:
    """Whether it is about serving; whatever else is wrong with it is told by whoever reads it."""
    if path.is_dir():
        return (path / ABOUT).is_file()
    if path.suffix != ".json" or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return False
    try:
        found = json_of(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and (any(isinstance(found.get(key), dict) for key in KEYS) or isinstance(found.get("serve"), dict))


def read(path: Path) -> ServedSubject:
    """Raises UserError where it is broken."""
    try:
        if path.is_dir():
            return _record(path)
        found = json_of(path.read_text(encoding="utf-8"))
        readers = {"bench": _bench, "serving": _search, "tune": _tune}
        key = next((one for one in KEYS if isinstance(found.get(one), dict)), "")
        return _plan(path, found) if not key else readers[key](path, found[key])
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", "give what foretell wrote") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise FileFormatError(f"{path} is no file of serving that foretell wrote ({error!r:.80})", "write it again") from error


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _size(data: Mapping[str, Any], *names: str) -> str:
    words = {"replicas": "replicas", "running": "running", "tokens": "tokens a step", "page": "tokens a page", "pages": "pages"}
    more = [f"{name} {data[name]}" for name in ("tp", "pp") if data.get(name, 1) != 1]
    said = [f"{int(_number(data[name])):,} {words[name]}" for name in names if data.get(name) is not None]
    flags = [words for name, words in (("share", "prompts not shared"), ("graphs", "no graphs")) if data.get(name) is False]
    return ", ".join([*more, *said, *flags])


# ---------------------------------------------------------------------- a server's own record


def _record(folder: Path) -> ServedSubject:
    whole = json_of((folder / ABOUT).read_text(encoding="utf-8"))
    about = whole["serve"]
    rows = list(_rows(folder / STEPS))
    moments = thinned(
        ServeMoment(at=_number(row["at"]), pages=int(row["pages"]), running=int(row["running"]), waiting=int(row["waiting"])) for row in rows
    )
    requests = list(_rows(folder / REQUESTS))
    good = [row for row in requests if row["ended"] in ("length", "stop") and row["out"]]
    tokens = sum(int(row["out"]) for row in good)
    span = max((_number(row["last"]) for row in good), default=0.0) - min((_number(row["at"]) for row in good), default=0.0)
    first = sorted(_number(row["first"]) - _number(row["at"]) for row in good)
    each = sorted((_number(row["last"]) - _number(row["first"])) / (int(row["out"]) - 1) for row in good if row["out"] > 1)
    facts = [("Requests answered", float(len(good)), ""), ("Tokens a second", tokens / span if span > 0 else 0.0, "")]
    facts += [("First token, median", first[len(first) // 2], "s")] if first else []
    facts += [("A token after it, median", each[len(each) // 2], "s")] if each else []
    notes = [f"Cancelled or failed: {len(requests) - len(good):,}."] if len(requests) > len(good) else []
    long = any("every" in row for row in (*rows[-1:], *requests[-1:]))
    notes += ["A long run: of later steps and requests every so many is recorded."] if long else []
    beside = whole.get("beside")
    if beside and beside.get("why_not"):
        notes.append(f"There is no prediction beside these requests: {beside['why_not']}")
    return ServedSubject(
        path=folder, model=str(about["model"]), kind="a server's record",
        about=(f"{about['device']}, {about['dtype']}", _size({**about, "page": about["page_tokens"], "tokens": about["step_tokens"]},
                                                              "running", "tokens", "pages", "page")),
        moments=moments, pages=int(about["pages"]), lines=_beside(beside), facts=tuple(facts), notes=tuple(notes),
        commands=(("Measure a server", "foretell serve bench http://127.0.0.1:8000/v1 --out bench.json"),),
    )  # fmt: skip


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    """Rows of a file; a last one that was cut off is passed over."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json_of(line)
        except ValueError:
            if number + 1 < len(lines):
                raise


def thinned(moments: Iterable[ServeMoment]) -> tuple[ServeMoment, ...]:
    """Of each of equal spans the most."""
    some = list(moments)
    if len(some) <= SPANS:
        return tuple(some)
    begin, end = some[0].at, some[-1].at
    found: dict[int, ServeMoment] = {}
    for one in some:
        place = min(SPANS - 1, int((one.at - begin) / max(end - begin, 1e-9) * SPANS))
        known = found.get(place)
        if known is not None:
            one = replace(known, **{name: max(getattr(known, name) or 0, getattr(one, name) or 0) for name in ("pages", "running", "waiting")})
        found[place] = one
    return tuple(found[place] for place in sorted(found))


NAMES = (
    ("tokens_per_second", "tokens a second", False), ("inside", "share inside the limits", False), ("ttft_p50", "first token p50", True),
    ("ttft_p95", "first token p95", True), ("tpot_p50", "a token after it p50", True), ("tpot_p95", "a token after it p95", True),
)  # fmt: skip


def _beside(data: Mapping[str, Any] | None) -> tuple[ServeLine, ...]:
    if not data or not data.get("measured"):
        return ()
    one, other = data.get("predicted") or {}, data["measured"]
    return tuple(
        ServeLine(name=words, predicted=_maybe(one.get(name)), measured=_maybe(other.get(name)), seconds=seconds) for name, words, seconds in NAMES
    )


# ---------------------------------------------------------------------- a measurement, a search, tuned settings, a plan


def _bench(path: Path, data: Mapping[str, Any]) -> ServedSubject:
    points = []
    for one in data["points"]:
        runs = one["runs"]
        middle = runs[len(runs) // 2] if len(runs) == 1 else sorted(runs, key=lambda run: run["output_tokens_per_second"])[len(runs) // 2]
        points.append(ServePointTold(
            name=f"{'users' if one['closed'] else 'rate'} {_number(one['amount']):g}", tpot=_number(middle["tpot_seconds"]["p50"]),
            rate=_number(middle["output_tokens_per_second"]), ttft=_number(middle["ttft_seconds"]["p50"]), inside=_number(middle["inside"]),
            note=str(one["load"]), measured=True,
        ))  # fmt: skip
    saturated = data.get("saturated")
    kind = "users" if data["points"] and data["points"][0]["closed"] else "requests a second"
    notes = [f"Saturated above {_number(saturated):.3g} {kind}: {data['why']}."] if saturated is not None and data.get("why") else []
    return ServedSubject(
        path=path, model=str(data["model"]), kind="a measured server", about=(str(data["url"]),), points=tuple(points), notes=tuple(notes),
        commands=(("Measure again", f"foretell serve bench {data['url']} --out bench.json"),),
    )  # fmt: skip


def _search(path: Path, data: Mapping[str, Any]) -> ServedSubject:
    """What `plan --serve` weighed, or `fit --serve` or `serve --on` told."""
    told = data.get("forecast") or {}
    best = (data.get("best") or {}).get("layout")
    points = tuple(
        ServePointTold(
            name=_size(one["layout"], "replicas", "running", "tokens"), tpot=_number(one["tpot_p95_seconds"]),
            rate=_number(one["output_tokens_per_second"]), ttft=_number(one["ttft_p95_seconds"]), inside=_maybe(one.get("inside")),
            note="" if one.get("capacity_rate") is None else f"{_number(one['capacity_rate']):.3g} requests a second inside the limits",
            chosen=one["layout"] == best,
        )
        for one in data.get("front") or ()
    )  # fmt: skip
    moments = tuple(ServeMoment(at=_number(at), pages=int(pages)) for at, pages in told.get("timeline") or ())
    ruled = [f"Not {_size(one['layout'], 'replicas')}: {one['why']}" for one in (data.get("ruled_out") or ())[:6]]
    model, device = str(told.get("model", path.name)), str(told.get("device", ""))
    return ServedSubject(
        path=path, model=model, kind="a search for a way to serve", about=(f"on {device}",) if device else (), points=points, quantile="p95",
        moments=moments, pages=int(told.get("pages", 0)), notes=tuple(ruled),
    )  # fmt: skip


def _tune(path: Path, data: Mapping[str, Any]) -> ServedSubject:
    points, best = [], data.get("best") or {}
    for one in data["points"]:
        name, other = _size(one["settings"], "running", "tokens", "page"), one["measured"]
        points.append(ServePointTold(
            name=name, tpot=_number(other["tpot_p50"]), rate=_number(other["tokens_per_second"]), ttft=_number(other["ttft_p50"]),
            inside=_number(other["inside"]), chosen=one == best, measured=True,
            note=f"predicted {_number(one['predicted']['tokens_per_second']):,.0f} tokens a second",
        ))  # fmt: skip
    loss = data.get("carried_loss")
    notes = [] if loss is None else [f"Settings found best on {data['carried_from']} have {_number(loss):.1%} fewer tokens a second here."]
    return ServedSubject(
        path=path, model="settings of a server", kind="settings, measured", points=tuple(points), lines=_beside(best),
        notes=(*notes, *map(str, data.get("notes") or ())),
    )  # fmt: skip


def _plan(path: Path, data: Mapping[str, Any]) -> ServedSubject:
    layout, predicted = data["serve"], (data.get("predicted") or {}).get("serving") or {}
    beside = path.with_suffix(SUFFIX)
    found = read(beside) if beside.is_file() else ServedSubject(path=path, model="", kind="")
    measured = predicted.get("measured")
    figures = {
        "tokens_per_second": predicted.get("output_tokens_per_second"), "inside": predicted.get("inside"),
        "ttft_p95": predicted.get("ttft_p95_seconds"),
        "tpot_p95": predicted.get("tpot_p95_seconds"),
    }  # fmt: skip
    points = found.points
    if not points and figures["tokens_per_second"] and figures["tpot_p95"]:
        points = (ServePointTold(name="the plan", tpot=_number(figures["tpot_p95"]), rate=_number(figures["tokens_per_second"]),
                                 ttft=_maybe(figures["ttft_p95"]), inside=_maybe(figures["inside"]), chosen=True),)  # fmt: skip
    lines = _beside({"predicted": figures, "measured": measured}) if measured else ()
    load = f"load {layout['load']}" if layout.get("load") else ""
    slo = f"limits {layout['slo']}" if layout.get("slo") else ""
    return replace(
        found, path=path, model=str(data["model"]["model"]), kind="a plan to serve", quantile="p95", points=points, lines=lines,
        about=tuple(filter(None, (f"on {data['hardware']}", _size(layout, "replicas", "running", "tokens", "pages", "page"), load, slo))),
        notes=(*found.notes, *map(str, data.get("notes") or ())), commands=(("Serve it", f"foretell serve {path.name}"),),
    )  # fmt: skip
