"""Ranks of a pipeline, one step after the other and as many under way as there are stages; beside one process.

    python benchmarks/serve_ranks.py --turns 5      appends a row to results/serve_ranks.jsonl; wants as many idle cores as ranks

The same requests each time; tokens must be equal. Turns go one after the other, so that a busy moment meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from foretell.serve.engine import ServingEngine  # noqa: E402
from foretell.serve.ranks.controller import RankedRunner, RankLayout, RankProcesses  # noqa: E402
from foretell.serve.ranks.engine import RankedEngine  # noqa: E402
from foretell.serve.sampling import Sampling  # noqa: E402
from foretell.serve.start import Setup, built  # noqa: E402
from foretell.simulate.serving.scheduler import StepLimits  # noqa: E402

RESULTS = HERE / "results" / "serve_ranks.jsonl"
LIMITS = StepLimits(running=16, tokens=64)
PAGES, SIZE = 256, 16


def setup(pp: int) -> dict[str, Any]:
    sizes = {"layers": 8, "dim": 512, "heads": 8, "vocab_size": 300}
    made = Setup(model="gpt2", overrides=sizes, weights=None, tokenizer=None, device="cpu", dtype="auto", pages=PAGES, size=SIZE,
                 running=LIMITS.running, tokens=LIMITS.tokens, share=False, queue=100, seed=0, pp=pp)  # fmt: skip
    return {**asdict(made), "overrides": sizes}


def timed(engine: ServingEngine) -> tuple[float, list[list[int]]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(300) for _ in range(draw.randrange(8, 60))] for _ in range(32)]
    began = time.perf_counter()
    answers = engine.generate(prompts, Sampling(most=40))
    return time.perf_counter() - began, [one.ids for one in answers]


def measured(pp: int, turns: int) -> dict[str, Any]:
    layout = RankLayout(pp=pp)
    processes = RankProcesses(layout, setup(pp))
    try:
        runner = RankedRunner(processes.links, layout, processes.ended)
        alone = ServingEngine(built(setup(1)), pages=PAGES, size=SIZE, limits=LIMITS, share=False)
        seconds: dict[str, list[float]] = {"one process": [], "one step at a time": [], f"{pp} under way": []}
        told: list[list[list[int]]] = []
        for _ in range(turns):
            for name, depth in zip(seconds, (0, 1, pp), strict=True):
                runner.depth = depth
                engine = RankedEngine(runner, pages=PAGES, size=SIZE, limits=LIMITS, share=False) if depth else alone
                took, answers = timed(engine)
                seconds[name].append(took)
                told.append(answers)
        runner.close()
    finally:
        processes.close()
    return {
        "pp": pp, "turns": turns, "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "least_seconds": {name: round(min(values), 3) for name, values in seconds.items()}, "answers_equal": all(one == told[0] for one in told),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    row = measured(asked.pp, asked.turns)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    row |= {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "torch": torch.__version__, "commit": commit.stdout.strip() or "unknown"}
    with asked.out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
