"""Loads on the engine by the wall clock, and the same by the forecast: times to the first token and between tokens, tokens a second.

    python benchmarks/serve_load.py predict --on H200 --out sealed/serve_load.json            no GPU needed
    python benchmarks/serve_load.py measure sealed/serve_load.json --out results/rows.jsonl   on the GPU; rows that are there are kept
    python benchmarks/serve_load.py compare sealed/serve_load.json results/rows.jsonl

Predicted is the capacity first: the highest rate of which 95 % of the answers keep the limits. Then come runs of 30 s at 0.3 to 0.8 of it,
and 90 s at 0.95 and 1.2 of it, which should and should not keep them. Requests come to the engine in its own process, at the times that the
load's seed draws: no HTTP between. `--configs FILE` takes other cases, [shape, load, seconds, limits] in a list; `--only SHAPE` some of
them; `--shapes tiny` is a dry run. All of them take about 21 minutes of an H200: two leases of 30 minutes with other tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving_runs import (
    MODEL,
    Asked,
    Rows,
    by_the_clock,
    freed,
    model_of,
    no_collections,
    read_sealed,
    sealed,
    words_of,
)

KINDS = (
    ("llama3-8b", "in=512±256, out=128±64", "ttft=300ms,tpot=20ms"), ("llama3-8b", "in=1024±512, out=256±128", "ttft=500ms,tpot=25ms"),
    ("llama-1b", "in=512±256, out=128±64", "ttft=100ms,tpot=8ms"), ("qwen2-14b", "in=512±256, out=128±64", "ttft=500ms,tpot=30ms"),
)  # fmt: skip
"""Shape, lengths, limits."""
TINY = (("tiny", "in=20±8, out=6", "ttft=5s,tpot=1s"),)
SHARES, NEAR = (0.3, 0.45, 0.65, 0.8), (0.95, 1.2)
"""Of the capacity: runs of 30 s, and of 90."""
RUNNING, TOKENS, PAGES, CONTEXT = 128, 512, 16384, 8192
QUANTILES = (0.5, 0.95)
START = 25.0
"""Seconds to build a model and compile it, about."""


def limit_of(text: str) -> Any:
    from foretell.cli.serve.asked import limits

    return limits(text)


def told(first: list[float], each: list[float], tokens: int, seconds: float) -> dict[str, float]:
    from foretell.simulate.serving.records import quantile

    found = {"output_tok_s": round(tokens / seconds, 1)}
    for share in QUANTILES:
        found[f"ttft_p{round(share * 100)}_ms"] = round(quantile(first, share) * 1e3, 2)
        found[f"tpot_p{round(share * 100)}_ms"] = round(quantile(each, share) * 1e3, 3)
    return found


def measured_of(asked: list[Asked], slo: str) -> dict[str, float]:
    limit = limit_of(slo)
    kept = [(limit.ttft is None or one.ttft <= limit.ttft) and (limit.tpot is None or one.tpot <= limit.tpot) for one in asked]
    figures = told([one.ttft for one in asked], [one.tpot for one in asked if len(one.times) > 1], sum(len(one.times) for one in asked),
                   max(one.times[-1] for one in asked))  # fmt: skip
    return {**figures, "requests": len(asked), "inside": round(sum(kept) / len(kept), 4)}


def measure(path: Path, out: Path, only: str) -> None:
    from foretell.serve.engine import ServingEngine, StepLimits
    from foretell.serve.sampling import Sampling
    from foretell.simulate.serving.load import load_of

    rows, cases = Rows(out), [row for row in read_sealed(path) if not only or row["shape"] == only]
    for shape in dict.fromkeys(row["shape"] for row in cases):
        mine = [row for row in cases if row["shape"] == shape and not rows.has(**key_of(row))]
        if not mine:
            continue
        tiny = shape == "tiny"
        limits = StepLimits(running=8 if tiny else RUNNING, tokens=64 if tiny else TOKENS)
        engine = ServingEngine(model_of(shape, CONTEXT), pages=256 if tiny else PAGES, limits=limits, share=False)
        engine.generate([[7] * many for many in ((5, 30) if tiny else (5, 300, 700, 1500))], Sampling(most=4))
        for row in mine:
            with no_collections():
                asked = by_the_clock(engine, load_of(row["load"]), words_of(shape), row["seconds"])
            rows.add(**key_of(row), **measured_of(asked, row["slo"]), preemptions=engine.scheduler.preemptions, notes=engine.runner.notes)
        engine.close()
        del engine
        freed()


def key_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("shape", "load", "seconds", "slo")}


def predict(hardware: str, out: Path, kinds: Any, configs: Path | None) -> None:
    from foretell.api.serving.forecast import ServingAsked, load_told, scheduler_of, served_model
    from foretell.simulate.serving.load import load_of
    from foretell.simulate.serving.run import capacity, simulated

    rows: list[dict[str, Any]] = []

    def costs_of(shape: str) -> Any:
        question = ServingAsked(
            model=MODEL, hardware=hardware, overrides={"shape": shape, "context": CONTEXT}, pages=PAGES, running=RUNNING, tokens=TOKENS, share=False,
        )  # fmt: skip
        return question.layout, served_model(question).costs(question.layout)

    def add(shape: str, load: str, seconds: float, slo: str, layout: Any, costs: Any, **more: Any) -> None:
        found = load_told(simulated(load_of(load), scheduler_of(layout), costs.seconds, seconds), limit_of(slo))
        row = {"shape": shape, "load": load, "seconds": seconds, "slo": slo, **more, "output_tok_s": round(found.output_tokens_per_second, 1)}
        for share in QUANTILES:
            row[f"ttft_p{round(share * 100)}_ms"] = round(found.ttft_seconds[f"p{round(share * 100)}"] * 1e3, 2)
            row[f"tpot_p{round(share * 100)}_ms"] = round(found.tpot_seconds[f"p{round(share * 100)}"] * 1e3, 3)
        rows.append({**row, "inside": round(found.inside, 4)})
        print(rows[-1], flush=True)

    known: dict[str, Any] = {}
    for shape, load, seconds, slo in json.loads(configs.read_text()) if configs else ():
        known[shape] = known.get(shape) or costs_of(shape)
        add(shape, load, seconds, slo, *known[shape])
    for number, (shape, lengths, slo) in enumerate(() if configs else kinds):
        layout, costs = known[shape] = known.get(shape) or costs_of(shape)
        best = capacity(load_of(f"rate=1, {lengths}, seed={number}"), lambda layout=layout: scheduler_of(layout), costs.seconds, limit_of(slo), 90.0)
        assert best is not None
        for share in (*SHARES, *NEAR):
            load = f"rate={best[0] * share:.3g}, {lengths}, seed={number}"
            add(shape, load, 30.0 if share in SHARES else 90.0, slo, layout, costs, share=share, capacity=round(best[0], 3))
    seconds = sum(row["seconds"] + 2 for row in rows) + START * len({row["shape"] for row in rows})
    print(f"{len(rows)} runs, about {seconds:.0f} s on the device", flush=True)
    sealed(out, hardware, rows)


def compare(path: Path, measured: Path) -> None:
    known = {tuple(key_of(row).values()): row for row in read_sealed(path)}
    offs: dict[str, list[float]] = {}
    for row in Rows(measured).known:
        found = known.get(tuple(key_of(row).values()))
        if found is None:
            continue
        share = found.get("share", 0.0)
        print(f"{row['shape']} {row['load']}, {share:g} of the capacity: {row['inside']:.0%} keep {row['slo']} (predicted {found['inside']:.0%})")
        for name in (name for name in found if name.endswith(("_ms", "_s"))):
            off = found[name] / row[name] - 1
            if share not in NEAR:
                offs.setdefault(name, []).append(abs(off))
            print(f"    {name:>13}  predicted {found[name]:10.2f}  measured {row[name]:10.2f}  {off:+.1%}")
        if share in NEAR:
            print(f"    {'ok' if (row['inside'] >= 0.95) == (share < 1) else 'NOT AS PREDICTED'}")
    for name, some in offs.items():
        print(f"{name}: {len(some)} runs, median {statistics.median(some):.1%}, worst {max(some):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "compare"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--on", default="H200")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--shapes", default="")
    parser.add_argument("--only", default="", metavar="SHAPE")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.files[0], asked.out or Path("serve_load.jsonl"), asked.only)
    elif asked.what == "predict":
        kinds = [one for one in (*KINDS, *TINY) if one[0] in asked.shapes.split(",") or (not asked.shapes and one not in TINY)]
        predict(asked.on, asked.out or Path("serve_load.json"), kinds, asked.configs)
    else:
        compare(*asked.files)


if __name__ == "__main__":
    main()
