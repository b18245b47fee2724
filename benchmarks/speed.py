"""How long a trace and an answer take on this machine, imports excluded, and how much memory tracing takes.

    python benchmarks/speed.py            appends a row per model to results/speed.jsonl
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
CASES = {"gpt2": ("H100", 1.0), "llama3-8b": ("H100:8", 4.0), "llama3-405b": ("8x8xH100", 8.0)}


def seconds_of_seconds(trace: Any, recipe: Any, cluster: Any) -> tuple[float, float]:
    """How long the prediction of step time alone takes from a trace at hand: the first time, and again."""
    from foretell.hardware.lookup import find_profile
    from foretell.lower.fsdp.sharded import shard
    from foretell.plan.default import default_plan
    from foretell.price import machine
    from foretell.price.speeds import Options, speeds_of
    from foretell.simulate.time.step import plan_time
    from foretell.trace.record.collection import no_collection

    profile = find_profile("H200-SXM-141GB")
    rank = shard(trace, cluster.count) if cluster.count > 1 else trace
    plan = default_plan(replace(recipe, shards=cluster.count), {}, cluster.device.name)
    machine._KNOWN.clear()
    found = []
    for _ in range(2):
        before = time.perf_counter()
        with no_collection():
            speeds = speeds_of(plan, cluster, Options(profile_of=lambda name: profile))
            assert speeds is not None
            plan_time(rank, speeds)
        found.append(time.perf_counter() - before)
    return found[0], found[1]


def one(model: str) -> None:
    import torch

    import foretell.simulate.whole  # noqa: F401  imports are not counted
    from foretell import api
    from foretell.hardware import parse
    from foretell.trace.fold.deep import capture_deep
    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.capture import capture
    from foretell.trace.store.file import dumps, loads

    cluster = parse(CASES[model][0])
    precision = "fsdp-bf16" if cluster.count > 1 else "bf16-autocast"
    recipe = Recipe(precision=precision, shards=cluster.count)
    capture(lambda: load(Source(model="gpt-tiny")), Recipe())  # imports and warms what every trace uses
    started = time.perf_counter()
    trace = capture_deep(lambda: load(Source(model=model)), recipe)
    traced = time.perf_counter()
    text = dumps(trace)
    stored = time.perf_counter()
    api.predict(loads(text), recipe, cluster, {"micro_batch": 1})
    answered = time.perf_counter()
    again = seconds_of_seconds(loads(text), recipe, cluster)
    print(json.dumps({
        "model": model, "on": CASES[model][0], "trace_seconds": round(traced - started, 2),
        "fold_and_store_seconds": round(stored - traced, 2), "answer_seconds": round(answered - stored, 2),
        "total_seconds": round(answered - started, 2), "bar_seconds": CASES[model][1],
        "time_first_ms": round(1e3 * again[0], 1), "time_again_ms": round(1e3 * again[1], 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "file_bytes": len(text),
        "ops": sum(len(program.ops) for program in trace.programs.values()), "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
    }))  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(sys.argv[1])
    else:
        out = HERE / "results" / "speed.jsonl"
        for name in CASES:
            done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
            row = done.stdout.splitlines()[-1]
            print(row)
            with out.open("a") as stream:
                stream.write(row + "\n")
