"""Predicted against published serving runs of other engines: latencies and throughput, one object a row and quantity.

    python benchmarks/serve_published.py --csv FILE.csv                   a table of the columns that docs/serve.md names
    python benchmarks/serve_published.py --csv FILE.csv --json OUT.json   rows, sources, engines, overall, and what was left out and why
    python benchmarks/serve_published.py --csv FILE.csv --left-out        each source without the constants that it alone informs
    python benchmarks/serve_published.py --csv FILE.csv --fit             the one constant of each engine entry, from all but sealed sources

A row is a model by its public sizes, traced as two short stacks, lowered as its engine runs it, priced, and served by the scheduler with
that engine's limits. Nothing is fitted to sealed rows: one in five of each source by the hash of its id, and all of the sources below a hundred
rows whose names' hashes come first.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from serve_rows import QUANTITIES, LeftOut, ServingRow, read  # noqa: E402

from foretell.api import backends  # noqa: E402
from foretell.errors import ForetellError  # noqa: E402
from foretell.hardware.lookup import find_profile  # noqa: E402
from foretell.lower.serving import ROWS, TOKENS, StepShape  # noqa: E402
from foretell.price.serving.engines import EngineProfile, engines  # noqa: E402
from foretell.price.speeds import Options  # noqa: E402
from foretell.search.traces.child import answer  # noqa: E402
from foretell.simulate.serving.engines import EngineCosts, EngineDevice  # noqa: E402
from foretell.simulate.serving.records import Served  # noqa: E402
from foretell.simulate.serving.run import simulated  # noqa: E402
from foretell.trace.load.model import Source  # noqa: E402
from foretell.trace.recipe import Recipe  # noqa: E402
from foretell.trace.sandbox.child import request  # noqa: E402
from foretell.trace.store import traces as stored  # noqa: E402
from foretell.trace.types import Trace  # noqa: E402

SCHEMA_VERSION = 1
DEPTHS = (2, 4)
"""Layers of the short stacks."""
BANDS = HERE / "data" / "serving_bands.json"
SEALED_SHARE = 0.2
SMALL = 100
"""Rows below which a source may be sealed whole."""
TRIES = 4
"""Rounds of a fit, each of which looks at the values beside the best so far."""
STEPS = {"host_seconds": 2.0, "host_sequence_seconds": 2.0, "slower": 1.2, "peak_share": 1.3}
"""Factor between them at first; where neither is better its root."""
BETTER = 0.01
"""Part of an error that another value must save: where rows say nothing a constant stays as it is."""
FITTED_ROWS = 60
"""Of a source and an entry, that a constant is fitted to: drawn by hash."""
LEAST_ROWS = 8
"""Below which a constant stays as it is."""
LEFT_OUT_ROWS = 120
"""Of a source, that are predicted without it."""
ROUNDS = 6
"""That each user of a closed loop asks, where the row does not say how many requests there were."""
RECIPE = Recipe(mode="infer", precision="bf16", packed=(TOKENS, ROWS))
LATEST = 1e7
"""Seconds: no row takes as long."""
Entry = tuple[str, tuple[str, ...], str]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sealed_sources(names: Iterable[str]) -> set[str]:
    """Of small sources the fifth whose names' hashes come first."""
    row = sorted((name for name, count in Counter(names).items() if count < SMALL), key=_hash)
    return set(row[: round(SEALED_SHARE * len(row))])


def sealed_row(number: str) -> bool:
    return int(_hash(f"sealed {number}")[:8], 16) < SEALED_SHARE * 2**32


class Devices:
    """What devices take for a model, made once for each."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, ...], EngineDevice] = {}
        self.options = Options(profile_of=find_profile)

    def of(self, row: ServingRow) -> EngineDevice:
        key = key_of(row)
        if key not in self.made:
            traces = [_traced(row, depth) for depth in DEPTHS]
            self.made[key] = EngineDevice(traces, DEPTHS, row.model.layers, RECIPE, row.cluster, self.options, row.tp, row.weights, kv_of(row),
                                           pp=row.pp, apart=row.apart)  # fmt: skip
        return self.made[key]


HERE_DEVICES = Devices()
"""Of this process."""


def _traced(row: ServingRow, depth: int) -> Trace:
    overrides = {**row.model.set, "num_hidden_layers": depth}
    asked = request(Source(model=f"hf:{row.model.type}", overrides=overrides), RECIPE, backends.capability(row.cluster) or (), {})
    found = stored.known(asked)
    if found is None:
        reply = answer(asked)
        if "error" in reply:
            raise LeftOut(f"its model cannot be traced: {str(reply['error'])[:160]}")
        text = reply.pop("text")
        stored.keep(asked, text, reply)
        found = stored.known(asked)
        assert found is not None
    return found[0]


class Predictions:
    """Rows predicted side by side, those of one device in the same process where that can be."""

    def __init__(self, jobs: int) -> None:
        self.pool = multiprocessing.get_context("fork").Pool(jobs) if jobs > 1 else None

    def of(self, asked: Sequence[tuple[ServingRow, EngineProfile]]) -> list[dict[str, float] | str]:
        """What each row gets, or why nothing."""
        order = sorted(range(len(asked)), key=lambda place: (key_of(asked[place][0]), place))
        some = [asked[place] for place in order]
        found = list(self.pool.imap(_one, some, chunksize=8)) if self.pool else list(map(_one, some))
        back = dict(zip(order, found, strict=True))
        return [back[place] for place in range(len(asked))]


def key_of(row: ServingRow) -> tuple[str, ...]:
    model = row.model
    return model.type, repr(model.set), str(model.layers), row.cluster.device.name, str((row.tp, row.pp, row.apart)), row.weights, kv_of(row)


def kv_of(row: ServingRow) -> str:
    """Format of keys and values."""
    return row.engine.kv if row.weights in ("fp8", "fp4") and "float8_e4m3fn" in row.cluster.device.peak_flops_per_second else ""


def _one(asked: tuple[ServingRow, EngineProfile]) -> dict[str, float] | str:
    try:
        return predict(asked[0], HERE_DEVICES, asked[1])
    except (LeftOut, ForetellError) as error:
        return str(error)[:240]


def predict(row: ServingRow, devices: Devices, profile: EngineProfile) -> dict[str, float]:
    """Every quantity that a row may have, in seconds and tokens a second of the whole system."""
    load, until = row.load, LATEST
    costs = EngineCosts(devices.of(row), profile, cold=True)
    if load.users:
        prompt, output = round(load.prompt.mean), round(load.output.mean)
        few = min(load.users, profile.running)
        each = output * costs.seconds(StepShape(few, few * (prompt + output // 2), (), few)) + costs.seconds(StepShape(0, 0, ((0, prompt),), 1))
        rounds = row.requests / load.users if row.requests else ROUNDS
        until = (min(max(1.0, rounds), ROUNDS) - 1) * each * 1.02
    served = simulated(load, costs.scheduler(), costs.seconds, until)
    if not served.answers or served.refused:
        raise LeftOut(f"{served.refused} requests are longer than all pages that are left beside the weights")
    return _quantities(served, row)


def _quantities(served: Served, row: ServingRow) -> dict[str, float]:
    def of(values: Sequence[float], stat: str) -> float:
        return statistics.median(values) if "p50" in stat or "median" in stat else statistics.fmean(values)

    begun = served.seconds / (served.seconds + row.accepted)
    found = {
        "ttft": row.accepted + of([one.ttft for one in served.answers], row.stat["ttft"]), "output_tok_s": served.output_rate * row.replicas * begun,
        "total_tok_s": served.total_rate * row.replicas * begun,
        "latency": row.accepted + served.seconds * max(1.0, row.requests / len(served.answers)),
    }  # fmt: skip
    longer = [one.tpot for one in served.answers if one.output > 1]
    if longer:
        found["tpot"] = served.gap(0.5) if "ITL" in row.stat["tpot"] else of(longer, row.stat["tpot"])
    return found


# ---------------------------------------------------------------- fitting


def entry_of(profile: EngineProfile) -> Entry:
    return profile.name, profile.versions, profile.backend


def fit(rows: Sequence[ServingRow], predictions: Predictions) -> float | None:
    """The value of an entry's constant at which rows are least off in the median, each source counting alike. Of a rate of arrivals there is nothing
    to learn: throughput is that rate, and times near capacity follow from its last per cent."""
    profile = rows[0].engine
    some = [row for group in _by(rows, lambda row: row.source).values() for row in _few([one for one in group if not _arriving(one)])]
    if len(some) < LEAST_ROWS:
        return None
    known: dict[float, float | None] = {}

    def off(value: float) -> float | None:
        if value not in known:
            logs: dict[str, list[float]] = defaultdict(list)
            for row, found in zip(some, predictions.of([(row, row.engine.with_fitted(value)) for row in some]), strict=True):
                if not isinstance(found, str):
                    logs[row.source] += [
                        abs(math.log(found[name] / row.published[name])) for name in independent(row) if name in found and name != "ttft"
                    ]  # fmt: skip
            medians = [statistics.median(one) for one in logs.values() if one]
            known[value] = statistics.fmean(medians) if medians else None
        return known[value]

    value, step = getattr(profile, profile.fitted), STEPS[profile.fitted]
    if off(value) is None:
        return None
    for _ in range(TRIES):
        beside = [value / step, min(1.0, value * step) if profile.fitted == "peak_share" else value * step]
        best = min(beside, key=lambda one: off(one) or 0.0)
        if (off(best) or 0.0) < (1 - BETTER) * (off(value) or 0.0):
            value = best
        else:
            step = math.sqrt(step)
    return float(f"{value:.3g}")


def _arriving(row: ServingRow) -> bool:
    return any(one.at for one in row.load.recorded)


def _few(rows: Sequence[ServingRow], most: int = FITTED_ROWS) -> list[ServingRow]:
    return sorted(rows, key=lambda row: _hash(row.id))[:most]


def independent(row: ServingRow) -> list[str]:
    """Of throughput and latency of a whole run, which are one fact, the first that was published."""
    whole = [name for name in ("output_tok_s", "total_tok_s", "latency") if name in row.published]
    return [name for name in ("ttft", "tpot") if name in row.published] + whole[:1]


def _by(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def fitted(rows: Sequence[ServingRow], predictions: Predictions, told: Callable[[str], None]) -> dict[Entry, float]:
    found: dict[Entry, float] = {}
    for entry, group in _by([row for row in rows if row.engine.fitted], lambda row: entry_of(row.engine)).items():
        value = fit(group, predictions)
        if value is not None:
            found[entry] = value
            told(f"{entry[0]} {', '.join(entry[1])}: {group[0].engine.fitted} {value:g} ({len(group)} rows)")
    return found


def without(rows: Sequence[ServingRow], source: str, predictions: Predictions, constants: Mapping[Entry, float]) -> dict[Entry, float]:
    """Of each entry that a source's rows have: its constant as other sources would have it. Where none informs it, the usual one of other
    entries."""
    found = {}
    for entry, group in _by([row for row in rows if row.source == source and row.engine.fitted], lambda row: entry_of(row.engine)).items():
        profile = group[0].engine
        others = [row for row in rows if row.source != source and entry_of(row.engine) == entry]
        value = fit(others, predictions) if others else None
        found[entry] = usual(profile, constants) if value is None else value
    return found


# ---------------------------------------------------------------- answers


def answers(
    rows: Sequence[ServingRow], predictions: Predictions, other: Mapping[Entry, float] | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """One object a row and quantity; and rows that were left out."""
    found: list[dict[str, Any]] = []
    why: dict[str, str] = {}
    bands = json.loads(BANDS.read_text(encoding="utf-8"))["bands"] if BANDS.exists() else {}
    known = other or {}
    asked = [(row, row.engine.with_fitted(known[entry]) if (entry := entry_of(row.engine)) in known else row.engine) for row in rows]
    for row, predicted in zip(rows, predictions.of(asked), strict=True):
        if isinstance(predicted, str):
            why[row.id] = predicted
            continue
        versions = [*row.engine.versions, *filter(None, [row.engine.backend])]
        for name in QUANTITIES:
            if name in row.published and name in predicted:
                low, high = bands.get(f"{row.engine.name}/{name}", bands.get(f"any/{name}", (0.5, 2.0)))
                value = predicted[name]
                found.append({
                    "id": row.id, "source": row.source, "engine": row.engine.name, "versions": versions, "quantity": name,
                    "published": row.published[name], "predicted": value, "low": value * low, "high": value * high,
                    "scored": name in independent(row), "known_engine": row.known, "assumed": list(row.assumed),
                })  # fmt: skip
    return found, why


def error(one: Mapping[str, Any]) -> float:
    return abs(one["predicted"] / one["published"] - 1)


def summary(some: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [error(one) for one in some]
    if not errors:
        return {"rows": 0}
    logs = [math.log(one["predicted"] / one["published"]) for one in some]
    inside = statistics.fmean(one["low"] <= one["published"] <= one["high"] for one in some)
    rows = len({one["id"] for one in some})
    return {
        "rows": rows, "figures": len(errors), "median_error": round(statistics.median(errors), 4), "mean_error": round(statistics.fmean(errors), 4),
        "bias": round(math.exp(statistics.median(logs)) - 1, 4), "in_band": round(inside, 4),
    }  # fmt: skip


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Of ranks, ties shared."""
    if len(pairs) < 4:
        return None

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda place: values[place])
        found = [0.0] * len(values)
        start = 0
        while start < len(order):
            end = start
            while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
                end += 1
            for place in order[start : end + 1]:
                found[place] = (start + end) / 2
            start = end + 1
        return found

    first, second = ranks([one for one, _ in pairs]), ranks([one for _, one in pairs])
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(first, second)


def scored(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians by source, engine and quantity, and how configurations of a source are ordered by throughput."""
    some = [one for one in found if one["scored"]]
    sources = {}
    for name, group in sorted(_by(some, lambda one: one["source"]).items(), key=lambda pair: -len(pair[1])):
        rates = [(one["published"], one["predicted"]) for one in group if one["quantity"] in ("output_tok_s", "total_tok_s")]
        order = spearman(rates)
        sources[name] = {**summary(group), "spearman": None if order is None else round(order, 4)}
    medians = [one["median_error"] for one in sources.values()]
    return {
        "overall": {**summary(some), "mean_of_source_medians": round(statistics.fmean(medians), 4) if medians else None},
        "sources": sources,
        "engines": {
            " ".join((name, "/".join(versions))): summary(group)
            for (name, versions), group in sorted(_by(some, lambda one: (one["engine"], tuple(one["versions"]))).items())
        },
        "quantities": {name: summary(group) for name, group in sorted(_by(found, lambda one: one["quantity"]).items())},
    }  # fmt: skip


def bands_of(found: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Factors between which nine of ten published figures lie, each source counting alike: by engine and quantity."""
    def between(some: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
        count = Counter(one["source"] for one in some)
        row = sorted((one["published"] / one["predicted"], 1 / count[one["source"]]) for one in some)
        whole, passed, low, high = sum(weight for _, weight in row), 0.0, row[0][0], row[-1][0]
        for ratio, weight in row:
            if passed < 0.05 * whole <= passed + weight:
                low = ratio
            if passed < 0.95 * whole <= passed + weight:
                high = ratio
            passed += weight
        return round(min(low, 0.95), 4), round(max(high, 1.05), 4)

    both = sorted(_by(found, lambda one: (one["engine"], one["quantity"])).items())
    known = {f"{engine}/{name}": between(some) for (engine, name), some in both}
    return known | {f"any/{name}": between(some) for name, some in sorted(_by(found, lambda one: one["quantity"]).items())}


Bands = Mapping[str, tuple[float, float]]


def wider(one: Bands, other: Bands) -> dict[str, tuple[float, float]]:
    """What holds both."""
    both = {name: [some[name] for some in (one, other) if name in some] for name in (*other, *one)}
    return {name: (min(low for low, _ in some), max(high for _, high in some)) for name, some in both.items()}


# ---------------------------------------------------------------- from a shell


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--bands", action="store_true", help="write the bands of rows that are not sealed, each source left out")
    parser.add_argument("--few", type=int, default=0, metavar="N", help="at most N rows of a source, drawn by hash")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    asked = parser.parse_args()
    begun = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", file=sys.stderr, flush=True)

    with asked.csv.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    rows, why = rows_of(lines)
    if asked.few:
        rows = [row for group in _by(rows, lambda row: row.source).values() for row in _few(group, asked.few)]
    names = [str(line.get("source") or "none") for line in lines]
    whole = sealed_sources(names)
    closed = {row.id for row in rows if row.source in whole or sealed_row(row.id)}
    predictions = Predictions(asked.jobs)
    told(f"{len(rows)} of {len(lines)} rows can be asked")
    open_rows = [row for row in rows if row.id not in closed]
    constants = fitted(open_rows, predictions, told) if asked.fit else {}
    found, more = answers(rows, predictions, constants)
    why |= more
    told(f"{len(found)} figures predicted")
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "rows": found, "left_out": [{"id": one, "why": text} for one, text in why.items()],
        "answered": {"rows": len({one["id"] for one in found}), "of": len(lines)}, "sealed_sources": sorted(whole),
        "sealed": scored([one for one in found if one["id"] in closed]), "open": scored([one for one in found if one["id"] not in closed]),
        "all": scored(found),
    }  # fmt: skip
    if asked.left_out or asked.bands:
        alone = _left_out(open_rows, predictions, constants, told)
        result["each_source_left_out"] = scored(alone)
        if asked.bands:
            known = [one for one in found if one["id"] not in closed]
            kept = {"what": "published over predicted: nine of ten figures, both with and without what a source itself informs, each source "
                            "counting alike", "bands": wider(bands_of(alone), bands_of(known))}  # fmt: skip
            BANDS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    show(result, asked.rows)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _left_out(
    rows: Sequence[ServingRow], predictions: Predictions, constants: Mapping[Entry, float], told: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Some rows of each source, by constants that it did not inform."""
    found: list[dict[str, Any]] = []
    for source, group in sorted(_by(rows, lambda row: row.source).items()):
        other = without(rows, source, predictions, constants)
        found += answers(_few(group, LEFT_OUT_ROWS), predictions, {**constants, **other})[0]
        told(f"without {source}: {', '.join(f'{entry[0]} {entry[1][0]} {value:g}' for entry, value in other.items())}")
    return found


def usual(profile: EngineProfile, constants: Mapping[Entry, float]) -> float:
    """A constant that no run informs: the median of the same factor where it is fitted, or of the same seconds of all other entries."""
    kind, others = profile.fitted, [one for one in engines() if entry_of(one) != entry_of(profile)]
    kin = [one for one in others if (one.name != "gpt-fast" if kind.startswith("host") else one.fitted == kind)]
    alike = [constants.get(entry_of(one), getattr(one, kind)) if one.fitted == kind else getattr(one, kind) for one in kin]
    return statistics.median(alike) if alike else 1.0


def rows_of(lines: Sequence[Mapping[str, Any]]) -> tuple[list[ServingRow], dict[str, str]]:
    rows, why = [], {}
    for number, line in enumerate(lines):
        try:
            rows.append(read(line))
        except (LeftOut, ForetellError) as error:
            why[str(line.get("id") or f"line {number + 2}")] = str(error)[:240]
    return rows, why


def show(result: Mapping[str, Any], each: bool) -> None:
    if each:
        for one in result["rows"]:
            off = one["predicted"] / one["published"] - 1
            print(f"{one['id']:<36} {one['quantity']:<13} {one['published']:>12.4g} {one['predicted']:>12.4g} {off:>+8.1%}")
    print(f"{result['answered']['rows']} of {result['answered']['of']} rows answered")
    for reason, count in Counter(one["why"].split(":")[0] for one in result["left_out"]).most_common():
        print(f"  left out {count:>5}  {reason[:120]}")
    for part in ("sealed", "open", "each_source_left_out", "all"):
        if part in result:
            _table(part, result[part])


def _table(title: str, part: Mapping[str, Any]) -> None:
    print(f"\n{title}: {part['overall']}")
    for kind in ("sources", "engines", "quantities"):
        for name, one in part[kind].items():
            order = "" if one.get("spearman") is None else f"  Spearman {one['spearman']:.3f}"
            figures = f"median {one['median_error']:>6.1%}  bias {one['bias']:>+7.1%}  in band {one['in_band']:>4.0%}"
            print(f"  {name[:44]:<44} {one['rows']:>5} rows  {figures}{order}")


if __name__ == "__main__":
    main()
