"""Predicted against published speed and memory of training runs: one table a source, one object a row.

    python benchmarks/published.py                    the table kept beside the script
    python benchmarks/published.py --csv FILE.csv     another table of the same columns
    python benchmarks/published.py --json OUT.json    predictions, sources, overall, skipped
    python benchmarks/published.py --rows             also one line a run
    python benchmarks/published.py --left-out         each source again without the constants it alone informs
    python benchmarks/published.py --calibrate        with --left-out: bands from the rows that were left out
    python benchmarks/published.py --save             also writes benchmarks/results/published.jsonl

Each row becomes a model of the zoo with its dimensions, a plan and a cluster, and is predicted as any plan is: short stacks
are traced (`published_traces`), lowered, priced and simulated (`benchmarks.foreign.step`). What differs between software
stacks is data with a source (`benchmarks/foreign/stacks`): at most three fitted constants each, none of which belongs
to a row, a model or a source. Plans for other software say "not runnable here". Rows are scored when they are eligible as
the notes to the table say; others are predicted where a framework's defaults can fill the gaps, and marked.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from math import log, sqrt
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import published_bands as bands  # noqa: E402
import published_rows as rows  # noqa: E402
from published_plans import plan_of  # noqa: E402
from published_traces import Traces, Untraceable, asked, depths_of  # noqa: E402

from benchmarks.foreign.memory import foreign_memory  # noqa: E402
from benchmarks.foreign.step import predict_foreign  # noqa: E402
from foretell.errors import ForetellError  # noqa: E402
from foretell.hardware.lookup import find_profile  # noqa: E402
from foretell.price import analytic  # noqa: E402
from foretell.price.speeds import Options  # noqa: E402

RUNS = HERE / "data" / "published_runs.csv"
WIDTHS = HERE / "data" / "published_bands.json"
RESULTS = HERE / "results" / "published.jsonl"
LEFT_OUT = RESULTS.with_name("published_left_out.jsonl")
SCHEMA_VERSION = 1
NOT_SCORED = {"bsv100": "the same run took 129, 125 and 225 s on three days"}
FITTED = ("foundry", "titan2412", "torchao", "bsa100", "bloom", "bs1b3", "sc21", "seqsel")
"""Sources that inform a constant."""
GROUPS = {"sc21": ("sc21",), "seqsel": ("seqsel",), "titan": ("titan",), "foundry": ("foundry",)}
"""Sources with a bar of their own, by the start of their name."""
COMMON = ("ampere", "hopper", "volta")


# ---------------------------------------------------------------- rows


class Predictor:
    """Rows to objects, with traces shared."""

    def __init__(self, widths: dict[str, float], told: Any = lambda _: None) -> None:
        self.traces, self.widths = Traces(told), widths
        self.options = Options(profile_of=functools.cache(find_profile))

    def predict(self, row: rows.Row) -> dict[str, Any]:
        """One object: what was published, what is predicted, and between what."""
        run = row.run
        device = row.cluster.device
        traces = {depth: self.traces.of(asked(run, device, depth)) for depth in depths_of(run)}
        how = plan_of(run, device.name)
        step = predict_foreign(traces, how, row.cluster, self.options)
        guess, kind = rows.predicted(row, step.seconds), kind_of(row)
        wide = bands.width(self.widths, kind)
        found: dict[str, Any] = {
            "id": row.id, "source": row.source, "quantity": row.quantity, "published": row.published,
            "predicted": short(guess), "low": short(guess / wide), "high": short(guess * wide),
            "error_percent": round(100 * (guess / row.published - 1), 2), "eligible": row.eligible,
            "scored": row.eligible and row.source not in NOT_SCORED, "fitted": row.source.startswith(FITTED),
            "evidence": kind, "stack": run.stack.name, "runnable": run.stack.native, "mark": how.mark,
            "assumed": list(row.assumed), "step_seconds": short(step.seconds), "bubble": round(step.bubble, 4),
            "unhidden_traffic_seconds": short(step.exposed_seconds),
        }  # fmt: skip
        if row.memory:
            unit = 2**30 if run.stack.reports == "reserved" else 1e9
            held = foreign_memory(traces, how, row.cluster, self.options).reported(run.stack.reports) / unit
            found["memory"] = {
                "published": row.memory, "predicted": round(held, 2), "sense": run.stack.reports,
                "error_percent": round(100 * (held / row.memory - 1), 2),
            }  # fmt: skip
        return found

    def compare(self, cells: Iterable[rows.Cells]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Predictions, and rows left out with the reason."""
        found, skipped = [], []
        for row in cells:
            try:
                found.append(self.predict(rows.read_row(row)))
            except (rows.LeftOut, Untraceable, ForetellError) as why:
                skipped.append({"id": row.get("id", ""), "reason": str(why), "eligible": rows.eligible(row)})
        return found, skipped


def kind_of(row: rows.Row) -> str:
    """What kind of evidence there is for rows like this one."""
    run = row.run
    rare = analytic.family(row.cluster.device) not in COMMON or run.offload.lower() not in ("none", "")
    return bands.kind_of(
        assumed=bool(row.assumed), rare=rare or bool(run.experts) or bool(run.float8), split=max(run.tp, run.pp, run.cp) > 1
    )


def known_widths() -> dict[str, float]:
    return dict(json.loads(WIDTHS.read_text(encoding="utf-8"))["widths"]) if WIDTHS.exists() else {}


def short(value: float) -> float:
    return float(f"{value:.5g}")


# ---------------------------------------------------------------- scores


def mape(found: Iterable[dict[str, Any]]) -> float:
    errors = [abs(one["error_percent"]) for one in found]
    return sum(errors) / len(errors) if errors else 0.0


def kendall(first: list[float], second: list[float]) -> float | None:
    """Tau-b of two lists; None where one of them does not vary."""
    agree = pairs_first = pairs_second = 0
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        for c, d in zip(first[:i], second[:i], strict=True):
            one, two = (a > c) - (a < c), (b > d) - (b < d)
            agree, pairs_first, pairs_second = agree + one * two, pairs_first + abs(one), pairs_second + abs(two)
    return agree / sqrt(pairs_first * pairs_second) if pairs_first and pairs_second else None


def score(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one source."""
    errors = [one["error_percent"] for one in found]
    worst = max(found, key=lambda one: abs(one["error_percent"]))
    remembered = [one["memory"] for one in found if "memory" in one]
    tau = kendall([one["published"] for one in found], [one["predicted"] for one in found]) if len(found) > 1 else None
    return {
        "rows": len(found), "eligible": sum(one["eligible"] for one in found), "mape_percent": round(mape(found), 2),
        "bias_percent": round(sum(errors) / len(errors), 2), "kendall_tau": None if tau is None else round(tau, 3),
        "worst": {"id": worst["id"], "error_percent": worst["error_percent"]},
        "band_coverage_percent": round(100 * covered(found), 1),
        "memory": {"rows": len(remembered), "mape_percent": round(mape(remembered), 2)} if remembered else None,
    }  # fmt: skip


def covered(found: list[dict[str, Any]]) -> float:
    return sum(one["low"] <= one["published"] <= one["high"] for one in found) / len(found) if found else 0.0


def by_source(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [one for one in found if one["source"] == name] for name in sorted({one["source"] for one in found})}


def overall(found: list[dict[str, Any]], skipped: list[dict[str, Any]]) -> dict[str, Any]:
    """Over eligible, scored rows: the mean over sources, medians, bands, memory."""
    scored = [one for one in found if one["scored"]]
    means = [mape(mine) for mine in by_source(scored).values()]
    remembered = [one["memory"] for one in scored if "memory" in one]
    missed = sum(one["eligible"] for one in skipped)
    eligible = sum(one["eligible"] for one in found)
    return {
        "rows": len(scored), "sources": len(means), "eligible": eligible + missed, "predicted_eligible": eligible,
        "mape_percent_mean_over_sources": round(statistics.fmean(means), 2) if means else None,
        "mape_percent": round(mape(scored), 2),
        "median_error_percent": round(statistics.median([abs(one["error_percent"]) for one in scored]), 2)
        if scored else None,
        "band_coverage_percent": round(100 * covered(scored), 1),
        "groups": {
            name: round(mape(one for one in scored if one["source"].startswith(starts)), 2)
            for name, starts in GROUPS.items()
        },
        "memory": {"rows": len(remembered), "mape_percent": round(mape(remembered), 2)},
        "not_scored": NOT_SCORED,
    }  # fmt: skip


# ---------------------------------------------------------------- output


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "source      rows  eligible    MAPE    bias    tau  in band  memory  worst"
    for name, mine in by_source(found).items():
        one = score(mine)
        tau = "    –" if one["kendall_tau"] is None else f"{one['kendall_tau']:5.2f}"
        memory = "     –" if one["memory"] is None else f"{one['memory']['mape_percent']:5.1f}%"
        yield (
            f"{name:10} {one['rows']:5} {one['eligible']:9} {one['mape_percent']:6.1f}% "
            f"{one['bias_percent']:+6.1f}%  {tau}  {one['band_coverage_percent']:6.0f}%  {memory}  "
            f"{one['worst']['id']} {one['worst']['error_percent']:+.0f}%"
        )


def summary(whole: dict[str, Any]) -> Iterator[str]:
    yield (
        f"eligible   {whole['predicted_eligible']} of {whole['eligible']} predicted; scored {whole['rows']} rows of "
        f"{whole['sources']} sources: mean over sources {whole['mape_percent_mean_over_sources']} %, median "
        f"{whole['median_error_percent']} %, over rows {whole['mape_percent']} %"
    )
    yield "           " + ", ".join(f"{name} {value} %" for name, value in whole["groups"].items())
    yield (
        f"           90 % band holds {whole['band_coverage_percent']} %; memory {whole['memory']['mape_percent']} % "
        f"over {whole['memory']['rows']} rows"
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]


def left_out(predictor: Predictor, cells: list[dict[str, str]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows once more, each source without the constants that it alone informs, in bands that the others give."""
    import published_left_out

    again = {one["id"]: {**one, "without": ""} for one in found}
    for name, (why, without) in published_left_out.SOURCES.items():
        mine = [row for row in cells if rows.source_of(row).startswith(name)]
        with without():
            again |= {one["id"]: {**one, "without": why} for one in predictor.compare(mine)[0]}
    each = list(again.values())
    wide = bands.left_out_widths(scores_of(each))
    for one in each:
        width = bands.width(wide.get(one["source"], bands.widths(scores_of(each))), one["evidence"])
        one |= {"low": short(one["predicted"] / width), "high": short(one["predicted"] * width)}
    return each


def scores_of(found: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """What bands are calibrated on: source, kind of evidence, |log error|."""
    known = [one for one in found if one["source"] not in NOT_SCORED]
    return [(one["source"], one["evidence"], abs(log(one["predicted"] / one["published"]))) for one in known]


def told_left_out(each: list[dict[str, Any]], skipped: list[dict[str, Any]]) -> Iterator[str]:
    scored = [one for one in each if one["scored"]]
    for name, mine in by_source(scored).items():
        without = mine[0]["without"] or "nothing"
        yield f"{name:10} {len(mine):5} rows  MAPE {mape(mine):5.1f} %  in band {100 * covered(mine):4.0f} %  without {without}"
    whole = overall(each, skipped)
    yield (
        f"each source left out: mean over sources {whole['mape_percent_mean_over_sources']} %, median "
        f"{whole['median_error_percent']} %, 90 % band holds {whole['band_coverage_percent']} %"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", "--runs", type=Path, default=RUNS, help="table of published runs")
    parser.add_argument("--json", type=Path, help="write predictions and scores here")
    parser.add_argument("--rows", action="store_true", help="one line a run")
    parser.add_argument("--left-out", action="store_true", help="score sources without the constants they alone inform")
    parser.add_argument("--calibrate", action="store_true", help=f"with --left-out: write {WIDTHS.name}")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}; with --left-out {LEFT_OUT.name} too")
    given = parser.parse_args()
    if not given.csv.exists():
        parser.error(f"{given.csv} is not there; give the table with --csv")
    cells = read(given.csv)
    if not cells or "id" not in cells[0]:
        parser.error(f"{given.csv} has no rows with a column 'id'; give a table of the same columns")
    started = time.perf_counter()
    predictor = Predictor(known_widths(), told=lambda text: print(f"\r{text}", end="", file=sys.stderr, flush=True))
    found, skipped = predictor.compare(cells)
    whole = overall(found, skipped)
    whole["seconds"], whole["traces"] = round(time.perf_counter() - started, 1), len(predictor.traces.used)
    whole["new_traces"] = predictor.traces.made
    for one in found if given.rows else ():
        print(f"{one['id']:22} {one['quantity']:22} {one['published']:10.5g} {one['predicted']:10.5g} "
              f"{one['error_percent']:+7.1f}%")  # fmt: skip
    print("\n".join([*table(found), *summary(whole)]))
    reasons: dict[str, int] = {}
    for one in skipped:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for why, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"  left out {count:4}: {why}")
    print(f"{len(found)} rows in {whole['seconds']} s from {whole['traces']} traces, {whole['new_traces']} of them new")
    each = left_out(predictor, cells, found) if given.left_out else []
    if each:
        print("\n".join(told_left_out(each, skipped)))
    if each and given.calibrate:
        WIDTHS.write_text(json.dumps(bands.told(bands.widths(scores_of(each))), indent=1) + "\n", encoding="utf-8")
    if given.json:
        scores = {name: score(mine) for name, mine in by_source(found).items()}
        body = {"schema_version": SCHEMA_VERSION, "predictions": found, "sources": scores, "overall": whole,
                "skipped": skipped}  # fmt: skip
        given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    if given.save:
        RESULTS.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    if given.save and each:
        LEFT_OUT.write_text("".join(json.dumps(one) + "\n" for one in each), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
