"""Bands of step time, calibrated and put to the test: each family of models left out in turn.

    python benchmarks/bands.py            how many measured steps the bands hold, how wide they are, their interval score
    python benchmarks/bands.py --write    calibrate on all rows and write foretell/price/bands.json
    python benchmarks/bands.py --sealed   judged by the sealed half of the corpus (benchmarks/corpus.py), which nothing is calibrated on

A band is conformal: quantiles of log(measured / predicted) over rows of families that were left out, in units of a scale with few
constants. Every family counts alike, and a new one takes one share more, which lies beyond all others (hierarchical conformal
prediction). Rows of an H200 are those of data/band_rows.jsonl (benchmarks/bands_rows.py), those of results/unseen.jsonl since they
were judged, and the half of results/corpus.jsonl that is for fitting; devices of the catalogue and several ranks rest on published
runs, grouped by source; CPUs on rows of the zoo and on gloo plans.
"""

from __future__ import annotations

import argparse
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
from unseen_draw import HINTS  # noqa: E402

from foretell.price import bands  # noqa: E402

ROWS, UNSEEN, CORPUS = HERE / "data" / "band_rows.jsonl", HERE / "results" / "unseen.jsonl", HERE / "results" / "corpus.jsonl"
AGAIN, CORPUS_AGAIN = HERE / "data" / "unseen_again.jsonl", HERE / "data" / "corpus_again.jsonl"
"""The sealed configurations as predicted after they were judged (`--again` of benchmarks/unseen.py and benchmarks/corpus.py)."""
SLOPES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Tried for every feature of the scale."""
FEATURES: Mapping[str, tuple[str, ...]] = {
    "device-bound": ("host", "irregular", "scattered", "fp32"), "host-bound": ("irregular", "scattered", "fp32"), "compiled": ("host",),
}  # fmt: skip
"""Kind → what its scale may grow with."""
ASSUMED = {"data-dependent": 1.5, "guessed": 1.5}
"""Kinds of which there are no rows: so many times as wide as all eager rows together. Assumed."""
ENOUGH_FOR_TAILS = 20
"""Families from which on the two sides of a band may differ."""
MOST_UNEVEN = 3.0
"""How many times as far one side may reach as the other."""
EAGER = ("device-bound", "host-bound")
LIKE: Mapping[str, tuple[str, ...]] = {"ranks": ("catalogue",), **dict.fromkeys(ASSUMED, EAGER)}
"""Kinds that are calibrated on the rows of others."""


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


def quantile(scores: Sequence[tuple[str, float]], level: float, to_come: int = 1) -> float:
    """The smallest score that `level` of the weight stays at or below. The rows of each of K families share one part of K + 1; the
    part of the family `to_come` lies beyond all of them, so that with too few families there is no such score: infinity."""
    counts: dict[str, int] = {}
    for family, _ in scores:
        counts[family] = counts.get(family, 0) + 1
    reached, parts = 0.0, len(counts) + to_come
    for family, score in sorted(scores, key=lambda pair: pair[1]):
        reached += 1 / (counts[family] * parts)
        if reached >= level - 1e-12:
            return score
    return math.inf


def bounds(rows: Sequence[Row], slopes: Mapping[str, float], level: float = bands.LEVEL) -> tuple[float, float]:
    """Lower and upper end in units of the scale. Which side reaches how far is the rows' own tails, where families are enough to
    show them; how far both reach is one conformal quantile."""
    scores = [(row.family, row.residual / bands.scale_of(slopes, row.features)) for row in rows]
    below, above = 1.0, 1.0
    if len({family for family, _ in scores}) >= ENOUGH_FOR_TAILS:
        tail = 1 - (1 - level) / 2
        below, above = quantile([(family, -score) for family, score in scores], tail, 0), quantile(scores, tail, 0)
        below, above = max(below, above / MOST_UNEVEN), max(above, below / MOST_UNEVEN)
    sizes = [(family, max(score / above, -score / below)) for family, score in scores]
    size = quantile(sizes, level)
    size = max(size for _, size in sizes) if math.isinf(size) else size
    return -below * size, above * size


def calibrated(rows: Sequence[Row], kind: str) -> bands.Band:
    """The band of a kind: of all scales that are tried, the one with the best interval score."""
    mine = [row for row in rows if row.kind in LIKE.get(kind, (kind,))]
    names, families = FEATURES.get(kind, ()), len({row.family for row in mine})
    best: tuple[float, bands.Band] | None = None
    for values in itertools.product(SLOPES, repeat=len(names)):
        slopes = {name: value for name, value in zip(names, values, strict=True) if value}
        low, high = (ASSUMED.get(kind, 1.0) * end for end in bounds(mine, slopes))
        one = bands.Band(low=low, high=high, slopes=slopes, rows=len(mine), families=families)
        score = sum(weight * interval_score(row.residual, logs(one, row)) for row, weight in weighted(mine))
        if best is None or score < best[0] - 1e-9:
            best = (score, one)
    assert best is not None, f"no rows of {kind}"
    return best[1]


def logs(band: bands.Band, row: Row) -> tuple[float, float]:
    low, high = band.factors(row.features)
    return math.log(low), math.log(high)


def interval_score(value: float, interval: tuple[float, float], level: float = bands.LEVEL) -> float:
    """Width plus 2 / (1 - level) times how far the value lies outside: the smaller the better (Winkler)."""
    low, high = interval
    return high - low + 2 / (1 - level) * (max(0.0, low - value) + max(0.0, value - high))


def weighted(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Rows with weights by which every family counts alike."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.family] = counts.get(row.family, 0) + 1
    return [(row, 1 / (counts[row.family] * len(counts))) for row in rows]


# ---------------------------------------------------------------------------------------------- rows


def h200_rows(path: Path = ROWS) -> Iterator[Row]:
    """Steps of one H200, predicted by its own profile."""
    for row in map(json.loads, path.read_text().splitlines()):
        if "error" not in row:
            yield row_of(row["family"], row, row["predicted"], row["measured"], f"{row['from']} {row['name']}")


def row_of(family: str, config: Mapping[str, Any], predicted: Mapping[str, Any], seconds: float, name: str = "") -> Row:
    whole = predicted["seconds"]
    seen = bands.Evidence(
        compiled=config["mode"] != "eager", data_dependent=bool(predicted.get("sized")), fp32=config["precision"] == "fp32",
        guessed_share=predicted.get("guessed_seconds", 0.0) / whole, host_share=predicted["waiting_for_host_seconds"] / whole,
        irregular_share=predicted["families"].get("rare", 0.0) / whole, scattered_share=predicted.get("scattered_seconds", 0.0) / whole,
    )  # fmt: skip
    return Row(
        kind=seen.kind, family=family, residual=math.log(seconds / whole), features=seen.features, host_bound=seen.host_share > bands.HOST_BOUND,
        before=(math.log(predicted["low"] / whole), math.log(predicted["high"] / whole)), name=name,
    )  # fmt: skip


def published_rows() -> Iterator[Row]:
    """Published runs, the constants that a source alone informs taken away, by source; time, so a rate counts the other way round."""
    for row in map(json.loads, (HERE / "results" / "published_left_out.jsonl").read_text().splitlines()):
        if row["scored"]:
            sign = 1 if row["quantity"] == "step_time_s" else -1
            before = (math.log(row["low"] / row["predicted"]), math.log(row["high"] / row["predicted"]))
            yield Row(
                kind="unfamiliar" if row["evidence"] == "rare" else "catalogue", family=row["source"], name=row["id"],
                residual=sign * math.log(row["published"] / row["predicted"]), before=before if sign > 0 else (-before[1], -before[0]),
            )  # fmt: skip


def cpu_rows() -> Iterator[Row]:
    """Small models of the zoo and scripts on this machine's cores, and plans on gloo ranks that share them."""
    for row in map(json.loads, (HERE.parent / "foretell" / "zoo" / "measured.jsonl").read_text().splitlines()):
        if row["torch"].endswith("cpu") and row.get("measured_seconds") and row.get("predicted_seconds"):
            yield Row(kind="cpu paced", family=row["module"], residual=math.log(row["measured_seconds"] / row["predicted_seconds"]), name=row["name"])
    for row in map(json.loads, (HERE / "results" / "watch.jsonl").read_text().splitlines()):
        if row["part"] == "cpu" and row.get("quiet") and row.get("measured_seconds") and row.get("predicted_seconds") and row["ranks"] == 1:
            yield Row(kind="cpu", family=row["script"], residual=math.log(row["measured_seconds"] / row["predicted_seconds"]), name=row["script"])
    for row in map(json.loads, (HERE / "results" / "plans.jsonl").read_text().splitlines()):
        if row["device_kind"] == "cpu" and row["measured"].get("seconds") and row["plan"]["mesh"]:
            told = row["predicted"]
            yield Row(
                kind="cpu ranks", family=row["case"], residual=math.log(row["measured"]["seconds"] / told["seconds"]), name=row["words"],
                before=(math.log(told["low"] / told["seconds"]), math.log(told["high"] / told["seconds"])),
            )  # fmt: skip


SIZED = (*HINTS, "hf:longformer")
"""Models of the sealed forecast whose sizes depend on data; its rows do not say so."""


def unseen_rows(measured: Path = UNSEEN, again: Path | None = None) -> list[Row]:
    """Rows of the sealed forecast that were measured; families that no row above has. `again`: as predicted since."""
    from bands_rows import family_of
    from unseen import SEALED
    from zoo import measured_of, rows_of, seal_of

    seal_of(SEALED)
    found, kept = measured_of(SEALED, measured), []
    later = predicted_since(again) if again is not None else {}
    for row in rows_of(SEALED):
        row = {**row, "predicted": later.get(row["key"], row["predicted"])}
        seconds, model = found.get(row["key"], {}).get("measured", {}).get("seconds"), row["config"]["model"]
        if seconds and "seconds" in row["predicted"]:
            predicted = {**row["predicted"], "sized": model in SIZED}
            kept.append(row_of(family_of(model), row["config"], predicted, seconds, row["name"]))
    return kept


def predicted_since(path: Path) -> dict[str, Any]:
    return {row["key"]: row["predicted"] for row in map(json.loads, path.read_text().splitlines())}


def corpus_rows(half: str) -> list[Row]:
    """Steps of the corpus that were measured, of the families of one half, as predicted now."""
    from corpus import SEALED
    from zoo import measured_of, rows_of, seal_of

    seal_of(SEALED)
    found, later = measured_of(SEALED, CORPUS), predicted_since(CORPUS_AGAIN)
    kept = []
    for row in rows_of(SEALED):
        row = {**row, "predicted": later.get(row["key"], row["predicted"])}
        seconds = found.get(row["key"], {}).get("measured", {}).get("seconds")
        if row["half"] == half and seconds and "seconds" in row["predicted"]:
            kept.append(row_of(row["family"], row["config"], row["predicted"], seconds, row["name"]))
    return kept


def every_row() -> list[Row]:
    return [*h200_rows(), *unseen_rows(again=AGAIN), *corpus_rows("fit"), *published_rows(), *cpu_rows()]


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
    **dict.fromkeys(
        ("device-bound", "host-bound", "compiled"),
        "steps of H200s (benchmarks/data/band_rows.jsonl, benchmarks/results/unseen.jsonl and corpus.jsonl), by family of model",
    ),
    **dict.fromkeys(ASSUMED, "assumed: no rows of this kind; 1.5 times as wide as all eager steps of the H200 together"),
    "catalogue": "published runs on A100 and H100 (benchmarks/results/published_left_out.jsonl), by source; nearly all of many ranks",
    "unfamiliar": "published runs on other devices, in float8 or with experts (the same file), by source; the widest seen",
    "ranks": "no measured runs of several ranks on a device with a profile: published runs, as for the catalogue",
    "cpu": "training scripts under foretell watch on one quiet Xeon (benchmarks/results/watch.jsonl), by script",
    "cpu paced": "small models of the zoo on one Xeon (foretell/zoo/measured.jsonl), by module, at the pace of models run beside them",
    "cpu ranks": "plans on two gloo ranks of one Xeon (benchmarks/results/plans.jsonl), by case",
}


LESS_KNOWN = ("catalogue", "unfamiliar", "ranks")
"""Kinds that are never told more surely than a device with its own profile, though their rows are of fewer kinds of models."""


def shipped(rows: Sequence[Row]) -> dict[str, Any]:
    """What bands.json holds."""
    kinds = {}
    for kind, source in SOURCES.items():
        band = calibrated(rows, kind)
        kinds[kind] = {
            "low": round(band.low, 4), "high": round(band.high, 4), "slopes": dict(band.slopes), "rows": band.rows,
            "families": band.families, "evidence": source,
        }  # fmt: skip
    own = kinds["device-bound"]
    for kind in LESS_KNOWN:
        kinds[kind] |= {"low": min(kinds[kind]["low"], own["low"]), "high": max(kinds[kind]["high"], own["high"])}
    for kind, surer in (("cpu", "cpu paced"), ("cpu ranks", "cpu")):
        kinds[kind] |= {"low": min(kinds[kind]["low"], kinds[surer]["low"]), "high": max(kinds[kind]["high"], kinds[surer]["high"])}
    return {"level": bands.LEVEL, "calibrated": time.strftime("%Y-%m-%d"), "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="calibrate on all rows and write the file that foretell reads")
    parser.add_argument("--sealed", action="store_true", help="what the sealed rows say of bands that were calibrated without them")
    options = parser.parse_args()
    if options.sealed:
        rows, others = corpus_rows("sealed"), every_row()
        known = {kind: calibrated(others, kind) for kind in ON_H200}
        table([(row, logs(known[row.kind], row)) for row in rows])
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
