"""`foretell tune serve` beside an exhaustive grid: how far its best is from the best of all settings measured.

    python benchmarks/serve_tune.py                     a tiny model on this CPU: 30 settings, about ten minutes
    python benchmarks/serve_tune.py --device cuda       a 0.5B on the GPU: 24 settings, about half an hour
    python benchmarks/serve_tune.py --only grid         what is there is not measured again; then --only tune, --only compare
    python benchmarks/serve_tune.py --configs FILE      other cases: a list of objects as CASES has them

The grid and the tuner measure by the same means, each into its own table (--folder). At the end both bests are measured again in turn,
since the best of many noisy figures is a lucky one. The row goes to results/serve_tune.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from foretell.api.serving.tune import TuneAsked, tune  # noqa: E402
from foretell.plan.types import ServeLayout  # noqa: E402
from foretell.search.serving.settings import key_of  # noqa: E402
from foretell.serve.tune.table import TuneTable  # noqa: E402
from foretell.serve.tune.trial import ServedWhat, measured  # noqa: E402
from foretell.simulate.serving.load import load_of  # noqa: E402
from foretell.simulate.serving.records import limit_of  # noqa: E402

SMALL = {"layers": 4, "dim": 128, "heads": 4, "vocab_size": 256, "context": 256}
CASES: list[dict[str, Any]] = [
    {"name": "gpt2-tiny", "device": "cpu", "model": "gpt2", "overrides": SMALL, "load": "users=24, in=40..120, out=16..64", "slo": "", "seconds": 6,
     "grid": {"running": [2, 4, 8, 16, 32], "tokens": [64, 128, 512], "page": [16, 64]}, "carried": "H100"},
    {"name": "qwen2-0.5b", "device": "cuda", "model": f"{HERE}/models/serve_shapes.py:build", "overrides": {"shape": "qwen2-0.5b"},
     "load": "users=96, in=512±256, out=128±64", "slo": "", "seconds": 10,
     "grid": {"running": [16, 64, 128, 256], "tokens": [256, 512, 2048], "graphs": [True, False]}, "carried": "A100"},
]  # fmt: skip
AGAIN = 3
RESULTS = HERE / "results" / "serve_tune.jsonl"


def what_of(case: dict[str, Any]) -> ServedWhat:
    return ServedWhat(model=case["model"], overrides=case["overrides"], device=case["device"])


def settings_of(case: dict[str, Any]) -> list[ServeLayout]:
    """All of the grid, with pages for every sequence."""
    names = list(case["grid"])
    longest = load_of(case["load"]).longest
    found = []
    for values in itertools.product(*case["grid"].values()):
        layout = replace(ServeLayout(), **dict(zip(names, values, strict=True)))
        if layout.tokens >= layout.running:
            found.append(replace(layout, pages=layout.running * -(-longest // layout.page)))
    return found


def grid(case: dict[str, Any], folder: Path) -> None:
    table = TuneTable(folder / f"{case['name']}.grid.jsonl", {name: case[name] for name in ("name", "load", "slo", "seconds")})
    some = settings_of(case)
    for number, layout in enumerate(some, 1):
        if table.known(layout) is None:
            row = measured(what_of(case), layout, load_of(case["load"]), limit_of(case["slo"]), case["seconds"])
            table.add(row)
            rate = "failed: " + row.failed if row.figures is None else f"{row.figures.good:,.0f} tokens/s"
            print(f"{number} of {len(some)}  {key_of(layout)}  {rate}", flush=True)


def tuned(case: dict[str, Any], folder: Path) -> Any:
    asked = TuneAsked(
        what=what_of(case), load=load_of(case["load"]), load_text=case["load"], limit=limit_of(case["slo"]), slo=case["slo"],
        table=folder / f"{case['name']}.tune.jsonl", seconds=case["seconds"], carried_from=case.get("carried"),
    )  # fmt: skip
    return tune(asked, lambda text: print(f"tune: {text}", flush=True) if "predicted" not in text else None)


def compare(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Both bests again, in turn."""
    table = TuneTable(folder / f"{case['name']}.grid.jsonl", {name: case[name] for name in ("name", "load", "slo", "seconds")})
    known = [(layout, row.figures) for layout in settings_of(case) if (row := table.known(layout)) is not None and row.figures is not None]
    found = tuned(case, folder)
    best, chosen = max(known, key=lambda one: one[1].good), found.best
    assert chosen is not None and chosen.measured is not None
    again: dict[str, list[float]] = {"grid": [], "tuned": []}
    for number in range(AGAIN):
        load = replace(load_of(case["load"]), seed=101 + number)
        for name, layout in (("grid", best[0]), ("tuned", chosen.layout)):
            row = measured(what_of(case), layout, load, limit_of(case["slo"]), case["seconds"])
            again[name].append(0.0 if row.figures is None else row.figures.good)
    both = {name: statistics.median(values) for name, values in again.items()}
    carried = None if found.carried is None or found.carried.measured is None else found.carried
    import torch

    device = torch.cuda.get_device_name() if case["device"] != "cpu" else "cpu"
    return {
        "case": case["name"], "load": case["load"], "device": device, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat(),
        "grid": len(known), "grid_best": key_of(best[0]), "grid_best_tokens_s": round(best[1].good, 1),
        "grid_worst_tokens_s": round(min(one.good for _, one in known), 1), "tuned": key_of(chosen.layout), "measured_by_tune": len(found.points),
        "tuned_tokens_s": round(chosen.measured.good, 1), "tuned_predicted_tokens_s": round(chosen.predicted.good, 1),
        "again_grid": [round(one, 1) for one in again["grid"]], "again_tuned": [round(one, 1) for one in again["tuned"]],
        "of_best": round(both["tuned"] / both["grid"], 4),
        "usual_tokens_s": None if found.usual is None or found.usual.measured is None else round(found.usual.measured.good, 1),
        "carried_from": found.carried_from, "carried": None if carried is None else key_of(carried.layout),
        "carried_tokens_s": None if carried is None else round(carried.measured.good, 1),
        "cores": os.cpu_count(), "busy": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--only", choices=["grid", "tune", "compare"])
    parser.add_argument("--folder", type=Path, default=Path("serve_tune"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    cases = CASES if asked.configs is None else json.loads(asked.configs.read_text())
    for case in cases:
        if case["device"] != asked.device:
            continue
        began = time.monotonic()
        if asked.only in (None, "grid"):
            grid(case, asked.folder)
        if asked.only == "tune":
            tuned(case, asked.folder)
        if asked.only in (None, "compare"):
            row = compare(case, asked.folder)
            print(json.dumps(row, indent=1))
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{case['name']}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
