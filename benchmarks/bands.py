"""Bands of step time, calibrated and put to the test: each family of models left out in turn.

    python benchmarks/bands.py            how many measured steps the bands hold, how wide they are, their interval score
    python benchmarks/bands.py --write    calibrate on all rows and write foretell/price/bands.json
    python benchmarks/bands.py --sealed rows.jsonl   the same table for measured rows of sealed/unseen-h200.jsonl

A band is conformal: quantiles of log(measured / predicted) over rows of families that were left out, in units of a scale with few
constants. Every family counts alike, and a new one takes one share more, which lies beyond all others (hierarchical conformal
prediction). Rows of an H200 are those of data/band_rows.jsonl (benchmarks/bands_rows.py); devices of the catalogue and several
ranks rest on published runs, grouped by source; CPUs on rows of the zoo and on gloo plans.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from foretell.price import bands  # noqa: E402

ROWS = HERE / "data" / "band_rows.jsonl"
SLOPES = (0.0, 0.5, 1.0, 2.0, 3.0)
"""Tried for every feature of the scale."""
FEATURES: Mapping[str, tuple[str, ...]] = {
    "host-bound": ("host",), "device-bound": ("host",), "compiled": ("host",), "data-dependent": ("host",),
}  # fmt: skip
FEWEST = 10
"""Families below which a kind has no two quantiles of its own: its rows are taken together with those of kinds like it."""
POOLED = {"data-dependent": ("host-bound", "device-bound"), "guessed": ("host-bound", "device-bound", "data-dependent", "compiled")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step beside its prediction."""

    kind: str
    family: str
    residual: float
    """log(measured / predicted)."""
    features: Mapping[str, float] = field(default_factory=dict)
    before: tuple[float, float] | None = None
    """Logarithms of the factors that were printed before, where they are known."""
    host_bound: bool = False
    name: str = ""


# ---------------------------------------------------------------------------------------------- quantiles


def quantile(scores: Sequence[tuple[str, float]], level: float) -> float:
    """The smallest score that `level` of the weight stays at or below. A family's rows share one part of K + 1; the part
    of the family to come lies beyond all of them, so that with too few families there is no such score: infinity."""
    counts: dict[str, int] = {}
    for family, _ in scores:
        counts[family] = counts.get(family, 0) + 1
    reached, parts = 0.0, len(counts) + 1
    for family, score in sorted(scores, key=lambda pair: pair[1]):
        reached += 1 / (counts[family] * parts)
        if reached >= level - 1e-12:
            return score
    return math.inf


def bounds(rows: Sequence[Row], slopes: Mapping[str, float], level: float = bands.LEVEL) -> tuple[float, float]:
    """Lower and upper quantile in units of the scale: one each where families are enough for both tails, else one for the size."""
    scores = [(row.family, row.residual / bands.scale_of(slopes, row.features)) for row in rows]
    tail = 1 - (1 - level) / 2
    low, high = -quantile([(family, -score) for family, score in scores], tail), quantile(scores, tail)
    if math.isinf(low) or math.isinf(high):
        size = quantile([(family, abs(score)) for family, score in scores], level)
        if math.isinf(size):
            size = max(abs(score) for _, score in scores)
        return -size, size
    return low, high


def calibrated(rows: Sequence[Row], kind: str) -> bands.Band:
    """The band of a kind from its rows, or from those of like kinds too where it has few families."""
    mine = [row for row in rows if row.kind == kind]
    if len({row.family for row in mine}) < FEWEST and kind in POOLED:
        mine = [row for row in rows if row.kind == kind or row.kind in POOLED[kind]]
    names = FEATURES.get(kind, ())
    best: tuple[float, bands.Band] | None = None
    for values in itertools.product(SLOPES, repeat=len(names)):
        slopes = {name: value for name, value in zip(names, values, strict=True) if value}
        low, high = bounds(mine, slopes)
        one = bands.Band(low=low, high=high, slopes=slopes, rows=len(mine), families=len({row.family for row in mine}))
        score = by_family(mine, lambda row, one=one: interval_score(row.residual, logs(one, row)))  # type: ignore[misc]
        if best is None or score < best[0] - 1e-9:
            best = (score, one)
    assert best is not None
    return best[1]


def logs(band: bands.Band, row: Row) -> tuple[float, float]:
    low, high = band.factors(row.features)
    return math.log(low), math.log(high)


def interval_score(value: float, interval: tuple[float, float], level: float = bands.LEVEL) -> float:
    """Width plus 2 / (1 - level) times how far the value lies outside: the smaller the better (Winkler)."""
    low, high = interval
    return high - low + 2 / (1 - level) * (max(0.0, low - value) + max(0.0, value - high))


def by_family(rows: Sequence[Row], figure: Any) -> float:
    """Mean over families of the mean over their rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.family, []).append(figure(row))
    return statistics.fmean(statistics.fmean(values) for values in found.values())


# ---------------------------------------------------------------------------------------------- rows


def h200_rows(path: Path = ROWS) -> Iterator[Row]:
    """Steps of one H200, predicted by its own profile."""
    for row in map(json.loads, path.read_text().splitlines()):
        if "error" not in row:
            yield row_of(row["family"], row["mode"], row["predicted"], row["measured"], f"{row['from']} {row['name']}")


def row_of(family: str, mode: str, predicted: Mapping[str, Any], seconds: float, name: str = "") -> Row:
    whole = predicted["seconds"]
    seen = bands.Evidence(
        compiled=mode != "eager", data_dependent=bool(predicted["awaited"]), guessed_share=predicted["guessed_seconds"] / whole,
        host_share=predicted["waiting_for_host_seconds"] / whole,
    )  # fmt: skip
    before = (math.log(predicted["low"] / whole), math.log(predicted["high"] / whole))
    return Row(
        kind=seen.kind, family=family, residual=math.log(seconds / whole), features={"host": seen.host_share}, before=before,
        host_bound=seen.host_share > bands.HOST_BOUND, name=name,
    )  # fmt: skip


def published_rows() -> Iterator[Row]:
    """Published runs, the constants that a source alone informs taken away, by source; time, so a rate counts the other way round."""
    with (HERE / "data" / "published_runs.csv").open(newline="") as stream:
        cells = {row["id"]: row for row in csv.DictReader(stream)}
    for row in map(json.loads, (HERE / "results" / "published_left_out.jsonl").read_text().splitlines()):
        if row["scored"]:
            sign = 1 if row["quantity"] == "step_time_s" else -1
            ranks = int(cells[row["id"]]["gpus"] or 1)
            before = (math.log(row["low"] / row["predicted"]), math.log(row["high"] / row["predicted"]))
            yield Row(
                kind="ranks" if ranks > 1 else "catalogue", family=row["source"], residual=sign * math.log(row["published"] / row["predicted"]),
                before=before if sign > 0 else (-before[1], -before[0]), name=row["id"],
            )  # fmt: skip


def cpu_rows() -> Iterator[Row]:
    """Small models of the zoo on this machine's cores, and plans on gloo ranks that share them."""
    for row in map(json.loads, (HERE.parent / "foretell" / "zoo" / "measured.jsonl").read_text().splitlines()):
        if row["torch"].endswith("cpu") and row.get("measured_seconds") and row.get("predicted_seconds"):
            yield Row(kind="cpu", family=row["module"], residual=math.log(row["measured_seconds"] / row["predicted_seconds"]), name=row["name"])
    for row in map(json.loads, (HERE / "results" / "plans.jsonl").read_text().splitlines()):
        if row["device_kind"] == "cpu" and row["measured"].get("seconds") and row["plan"]["mesh"]:
            told = row["predicted"]
            yield Row(
                kind="cpu ranks", family=row["case"], residual=math.log(row["measured"]["seconds"] / told["seconds"]), name=row["words"],
                before=(math.log(told["low"] / told["seconds"]), math.log(told["high"] / told["seconds"])),
            )  # fmt: skip


def sealed_rows(measured: Path) -> list[Row]:
    """Rows of the sealed forecast that were measured; families that no row above has."""
    from bands_rows import family_of
    from unseen import SEALED
    from zoo import measured_of, rows_of, seal_of

    seal_of(SEALED)
    found, kept = measured_of(SEALED, measured), []
    for row in rows_of(SEALED):
        seconds = found.get(row["key"], {}).get("measured", {}).get("seconds")
        if seconds and "seconds" in row["predicted"]:
            kept.append(row_of(family_of(row["config"]["model"]), row["config"]["mode"], row["predicted"], seconds, row["name"]))
    return kept


def every_row() -> list[Row]:
    return [*h200_rows(), *published_rows(), *cpu_rows()]


# ---------------------------------------------------------------------------------------------- the test


Judged = tuple[Row, tuple[float, float]]
"""A row and the logarithms of its band."""


def left_out(rows: Sequence[Row]) -> Iterator[Judged]:
    """Every row with the band that the rows of all other families give."""
    for family, kind in sorted({(row.family, row.kind) for row in rows}):
        others = [row for row in rows if row.family != family]
        band = calibrated(others, kind)
        yield from ((row, logs(band, row)) for row in rows if row.family == family and row.kind == kind)


def figures(judged: Iterable[Judged]) -> dict[str, float]:
    """Share of rows held, median half-width as a share of the prediction, mean interval score; all rows alike."""
    found = list(judged)
    return {
        "rows": len(found), "families": len({row.family for row, _ in found}),
        "held": statistics.fmean(low <= row.residual <= high for row, (low, high) in found),
        "half_width": statistics.median((math.exp(high) - math.exp(low)) / 2 for _, (low, high) in found),
        "interval_score": statistics.fmean(interval_score(row.residual, band) for row, band in found),
    }  # fmt: skip


def table(judged: Sequence[Judged]) -> None:
    """Bands as they are beside those printed before, by kind and for all."""
    groups = {kind: [one for one in judged if one[0].kind == kind] for kind in sorted({row.kind for row, _ in judged})}
    mine = [one for one in judged if one[0].kind in ON_H200]
    groups |= {"H200, device waits < 25 %": [one for one in mine if not one[0].host_bound]}
    groups |= {"H200, host-bound": [one for one in mine if one[0].host_bound], "H200, all": mine}
    print(f"{'':28s} {'rows':>5s} {'families':>8s} {'held':>7s} {'half-width':>10s} {'interval score':>14s}   before")
    for name, chosen in groups.items():
        if not chosen:
            continue
        now, then = figures(chosen), [(row, row.before) for row, _ in chosen if row.before is not None]
        old = figures(then) if then else None
        said = f"{100 * old['held']:5.1f} %  {100 * old['half_width']:5.1f} %  {old['interval_score']:6.3f}" if old else ""
        print(f"{name:28s} {now['rows']:5.0f} {now['families']:8.0f} {100 * now['held']:5.1f} % {100 * now['half_width']:8.1f} % "
              f"{now['interval_score']:14.3f}   {said}")  # fmt: skip


ON_H200 = ("device-bound", "host-bound", "compiled", "data-dependent", "guessed")
SOURCES = {
    **dict.fromkeys(ON_H200, "steps of one H200 (benchmarks/data/band_rows.jsonl), by family of model"),
    "catalogue": "published runs on devices without a profile (benchmarks/results/published_left_out.jsonl), by source; all of many ranks",
    "ranks": "published runs of several ranks (benchmarks/results/published_left_out.jsonl), by source",
    "cpu": "small models of the zoo on one Xeon (foretell/zoo/measured.jsonl), by module, at the pace of models run beside them",
    "cpu ranks": "plans on two gloo ranks of one Xeon (benchmarks/results/plans.jsonl), by case",
}


def shipped(rows: Sequence[Row]) -> dict[str, Any]:
    """What bands.json holds."""
    kinds = {}
    for kind, source in SOURCES.items():
        band = calibrated(rows, kind)
        kinds[kind] = {
            "low": round(band.low, 4), "high": round(band.high, 4), "slopes": dict(band.slopes), "rows": band.rows,
            "families": band.families, "evidence": source,
        }  # fmt: skip
    return {"level": bands.LEVEL, "calibrated": time.strftime("%Y-%m-%d"), "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="calibrate on all rows and write the file that foretell reads")
    parser.add_argument("--sealed", type=Path, help="measured rows of the sealed forecast; judged by the bands that are shipped")
    options = parser.parse_args()
    if options.sealed:
        rows = sealed_rows(options.sealed)
        table([(row, logs(bands.known()[row.kind], row)) for row in rows])
        errors = [abs(math.exp(-row.residual) - 1) for row in rows]
        print(f"step time: median error {100 * statistics.median(errors):.1f} %, 9 of 10 below "
              f"{100 * statistics.quantiles(errors, n=10, method='inclusive')[8]:.1f} %")  # fmt: skip
        return
    rows = every_row()
    if options.write:
        bands.FILE.write_text(json.dumps(shipped(rows), indent=1) + "\n")
        bands.known.cache_clear()
    table(list(left_out(rows)))


if __name__ == "__main__":
    main()
