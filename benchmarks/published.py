"""Predicted against published speed and memory of training runs: one table a source, one object a row.

    python benchmarks/published.py                    the table kept beside the script
    python benchmarks/published.py --csv FILE.csv     another table of the same columns
    python benchmarks/published.py --json OUT.json    predictions, sources, overall, skipped
    python benchmarks/published.py --rows             also one line a run
    python benchmarks/published.py --left-out         each source again without the constants it alone informs
    python benchmarks/published.py --save             also writes benchmarks/results/published.jsonl

`published_rows` reads rows; `foretell.cost.transformer*` counts and prices a step. Constants are data by device
(`cost.analytic`), by link (`cost.collectives`) and by software stack (`cost.stack`): none belongs to a row, a model or
a source. Rows are scored when they are eligible as the notes to the table say; others are predicted where a
framework's defaults can fill the gaps, and marked.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from math import sqrt
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import published_rows as rows  # noqa: E402

from foretell.cost import analytic, transformer_memory, transformer_time  # noqa: E402

RUNS = HERE / "data" / "published_runs.csv"
RESULTS = HERE / "results" / "published.jsonl"
LEFT_OUT = RESULTS.with_name("published_left_out.jsonl")
SCHEMA_VERSION = 1
NOT_SCORED = {"bsv100": "the same run took 129, 125 and 225 s on three days"}
FITTED = ("foundry", "llmc", "titan2408", "titan2412", "torchao", "bsa100", "bs1b3")
GROUPS = {"sc21": ("sc21",), "seqsel": ("seqsel",), "titan": ("titan",), "foundry": ("foundry",)}
"""Sources with a bar of their own, by the start of their name."""

PLAIN, SPLIT, RARE, GUESSED = 0.09, 0.10, 0.15, 0.30
"""Half-widths of the 90 % band: data parallel alone; tensor, pipeline or context parallel; devices or stacks that few
published runs speak of; rows with cells that were filled in. Chosen by hand with all rows in view."""
COMMON = ("ampere", "hopper", "volta")


# ---------------------------------------------------------------- rows


def predict(row: rows.Row) -> dict[str, Any]:
    """One object: what was published, what is predicted, and between what."""
    step = transformer_time.step(row.run, row.cluster)
    guess = rows.predicted(row, step.seconds)
    wide = band(row)
    found: dict[str, Any] = {
        "id": row.id, "source": row.source, "quantity": row.quantity, "published": row.published,
        "predicted": short(guess), "low": short(guess / (1 + wide)), "high": short(guess * (1 + wide)),
        "error_percent": round(100 * (guess / row.published - 1), 2), "eligible": row.eligible,
        "scored": row.eligible and row.source not in NOT_SCORED, "fitted": fitted(row.id), "stack": row.run.stack.name,
        "assumed": list(row.assumed), "step_seconds": short(step.seconds), "bubble": round(step.bubble, 4),
        "unhidden_traffic_seconds": short(step.gradients),
    }  # fmt: skip
    if row.memory:
        unit = 2**30 if row.run.stack.reports == "reserved" else 1e9
        held = transformer_memory.reported(row.run, row.cluster.device) / unit
        found["memory"] = {
            "published": row.memory, "predicted": round(held, 2), "sense": row.run.stack.reports,
            "error_percent": round(100 * (held / row.memory - 1), 2),
        }  # fmt: skip
    return found


def band(row: rows.Row) -> float:
    """Half-width of the band, as a part of the prediction."""
    if row.assumed:
        return GUESSED
    run, device = row.run, row.cluster.device
    if analytic.family(device) not in COMMON or run.offload.lower() not in ("none", "") or run.experts:
        return RARE
    return SPLIT if max(run.tp, run.pp, run.cp) > 1 else PLAIN


def compare(cells: Iterable[rows.Cells]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Predictions, and rows left out with the reason."""
    found, skipped = [], []
    for row in cells:
        try:
            found.append(predict(rows.read_row(row)))
        except rows.LeftOut as why:
            skipped.append({"id": row.get("id", ""), "reason": str(why), "eligible": rows.eligible(row)})
    return found, skipped


def short(value: float) -> float:
    return float(f"{value:.5g}")


def fitted(name: str) -> bool:
    """Whether constants were scored on the row: those of these sources whose number is even. The form of the model was
    chosen with all rows in view, so that odd rows are no blind test."""
    number = name.rsplit("-", 1)[-1]
    return name.split("-")[0] in FITTED and number.isdigit() and int(number) % 2 == 0


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
    held = [one for one in found if not one["fitted"]]
    remembered = [one["memory"] for one in found if "memory" in one]
    tau = kendall([one["published"] for one in found], [one["predicted"] for one in found]) if len(found) > 1 else None
    return {
        "rows": len(found), "eligible": sum(one["eligible"] for one in found), "mape_percent": round(mape(found), 2),
        "mape_percent_not_fitted": round(mape(held), 2) if held else None,
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
    held = [one for one in scored if not one["fitted"]]
    return {
        "rows": len(scored), "sources": len(means), "eligible": eligible + missed, "predicted_eligible": eligible,
        "mape_percent_mean_over_sources": round(statistics.fmean(means), 2) if means else None,
        "mape_percent": round(mape(scored), 2), "mape_percent_not_fitted": round(mape(held), 2),
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
    yield "source      rows  eligible    MAPE  not fitted    bias    tau  in band  memory  worst"
    for name, mine in by_source(found).items():
        one = score(mine)
        tau = "    –" if one["kendall_tau"] is None else f"{one['kendall_tau']:5.2f}"
        unseen = "     –" if one["mape_percent_not_fitted"] is None else f"{one['mape_percent_not_fitted']:5.1f}%"
        memory = "     –" if one["memory"] is None else f"{one['memory']['mape_percent']:5.1f}%"
        yield (
            f"{name:10} {one['rows']:5} {one['eligible']:9} {one['mape_percent']:6.1f}%  {unseen:>10} "
            f"{one['bias_percent']:+6.1f}%  {tau}  {one['band_coverage_percent']:6.0f}%  {memory}  "
            f"{one['worst']['id']} {one['worst']['error_percent']:+.0f}%"
        )


def summary(whole: dict[str, Any]) -> Iterator[str]:
    yield (
        f"eligible   {whole['predicted_eligible']} of {whole['eligible']} predicted; scored {whole['rows']} rows of "
        f"{whole['sources']} sources: mean over sources {whole['mape_percent_mean_over_sources']} %, median "
        f"{whole['median_error_percent']} %, over rows {whole['mape_percent']} % (not fitted "
        f"{whole['mape_percent_not_fitted']} %)"
    )
    yield "           " + ", ".join(f"{name} {value} %" for name, value in whole["groups"].items())
    yield (
        f"           90 % band holds {whole['band_coverage_percent']} %; memory {whole['memory']['mape_percent']} % "
        f"over {whole['memory']['rows']} rows"
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file)]


def left_out(cells: list[dict[str, str]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each source scored without the constants that it alone informs; those that share all of theirs as they are."""
    import published_left_out

    scored = by_source([one for one in found if one["scored"]])
    rows_out = {name: {"source": name, "rows": len(mine), "mape_percent": mape(mine), "without": ""} for name, mine in scored.items()}
    for name, (why, without) in published_left_out.SOURCES.items():
        mine = [row for row in cells if rows.source_of(row).startswith(name)]
        with without():
            again = by_source([one for one in compare(mine)[0] if one["scored"]])
        rows_out |= {one: {"source": one, "rows": len(some), "mape_percent": mape(some), "without": why} for one, some in again.items()}
    return [{**one, "mape_percent": round(one["mape_percent"], 2)} for one in rows_out.values()]


def told_left_out(each: list[dict[str, Any]]) -> Iterator[str]:
    for one in each:
        yield f"{one['source']:10} {one['rows']:5} rows  MAPE {one['mape_percent']:5.1f} %  without {one['without'] or 'nothing'}"
    mean = statistics.fmean(one["mape_percent"] for one in each)
    yield f"mean over sources, each without what it alone informs: {mean:.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", "--runs", type=Path, default=RUNS, help="table of published runs")
    parser.add_argument("--json", type=Path, help="write predictions and scores here")
    parser.add_argument("--rows", action="store_true", help="one line a run")
    parser.add_argument("--left-out", action="store_true", help="score sources without the constants they alone inform")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}; with --left-out {LEFT_OUT.name} too")
    asked = parser.parse_args()
    if not asked.csv.exists():
        parser.error(f"{asked.csv} is not there; give the table with --csv")
    cells = read(asked.csv)
    if not cells or "id" not in cells[0]:
        parser.error(f"{asked.csv} has no rows with a column 'id'; give a table of the same columns")
    found, skipped = compare(cells)
    whole = overall(found, skipped)
    for one in found if asked.rows else ():
        print(f"{one['id']:22} {one['quantity']:22} {one['published']:10.5g} {one['predicted']:10.5g} "
              f"{one['error_percent']:+7.1f}%")  # fmt: skip
    print("\n".join([*table(found), *summary(whole)]))
    reasons: dict[str, int] = {}
    for one in skipped:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for why, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"  left out {count:4}: {why}")
    each = left_out(cells, found) if asked.left_out else []
    if each:
        print("\n".join(told_left_out(each)))
    if asked.json:
        scores = {name: score(mine) for name, mine in by_source(found).items()}
        body = {"schema_version": SCHEMA_VERSION, "predictions": found, "sources": scores, "overall": whole,
                "skipped": skipped}  # fmt: skip
        asked.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    if asked.save:
        RESULTS.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    if asked.save and each:
        LEFT_OUT.write_text("".join(json.dumps(one) + "\n" for one in each), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
