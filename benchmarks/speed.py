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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
CASES = {"gpt2": ("H100", 1.0), "llama3-8b": ("H100:8", 4.0), "llama3-405b": ("8x8xH100", 8.0)}


def one(model: str) -> None:
    import torch

    from foretell import api
    from foretell.hardware import parse
    from foretell.trace.capture import capture
    from foretell.trace.deep import capture_deep
    from foretell.trace.file import dumps, loads
    from foretell.trace.load import Source, load
    from foretell.trace.recipe import Recipe

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
    print(json.dumps({
        "model": model, "on": CASES[model][0], "trace_seconds": round(traced - started, 2),
        "fold_and_store_seconds": round(stored - traced, 2), "answer_seconds": round(answered - stored, 2),
        "total_seconds": round(answered - started, 2), "bar_seconds": CASES[model][1],
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
