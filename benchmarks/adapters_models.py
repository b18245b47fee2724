"""Adapters on models that see or make images, under a limit of memory: planned with no GPU visible, then run as planned under that limit.

    python benchmarks/adapters_models.py predict            no GPU needed; writes data/adapters_models_predicted.json
    python benchmarks/adapters_models.py measure            on the GPU of the cases; adds rows to results/adapters_models.jsonl
    python benchmarks/adapters_models.py predict --small    tiny shapes, then `measure --small` on this machine's CPU
    python benchmarks/adapters_models.py measure --only flux --steps 5

Every linear layer of the blocks is held in NF4 and has an adapter; what the papers train beside it is trained whole. The limit
counts what is reserved and the context: PyTorch's allocator may reserve the limit less the predicted context, and a step that
wants more fails. Weights are random numbers on the GPU, in the order and the places in which a run puts them (packed.py). Each
case has a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import packed  # noqa: E402

PREDICTED, ROWS = HERE / "data" / "adapters_models_predicted.json", HERE / "results" / "adapters_models.jsonl"
HOST = 64 * 2**30
STEPS, WARM_UP = 8, 2
ADDED = ("project1", "project2", "added_norm_q", "added_norm_k", "added_norm_sum")
"""What TinyGPT-V trains beside its adapters."""
COMMON = {"hardware": "H200", "precision": "bf16", "lora": 16, "host": HOST}
CASES: dict[str, dict[str, Any]] = {
    "tinygpt-v in 8 GB": {
        **COMMON, "model": "tinygpt_v", "hbm": 8 * 10**9, "global_batch": 4, "base": ("nf4",), "lora_train": ADDED,
        "overrides": {"phase": "align"},
    },
    "flux-shaped DiT, 12B, in 12 GB": {**COMMON, "model": "dit-regional", "hbm": 12 * 10**9, "global_batch": 1, "base": ("nf4-double",)},
    "minicpm-v with images in 24 GB": {
        **COMMON, "model": "minicpm_v", "hbm": 24 * 10**9, "global_batch": 1, "base": ("nf4",), "lora_train": ("resampler",),
    },
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    name: {**asked, "model": f"{asked['model']}-tiny", "hbm": 2 * 10**9, "lora": 4, "compile": "none"} for name, asked in CASES.items()
}


def predict(cases: dict[str, dict[str, Any]], only: str) -> dict[str, Any]:
    """The plan of each case, or what is missing."""
    from foretell import api
    from foretell.plan import file

    found = {}
    for name, asked in cases.items():
        if only not in name:
            continue
        began = time.monotonic()
        answer = api.plan(**asked)
        plan = file.to_json(answer.plan) if answer.plan is not None else None
        found[name] = {"date": datetime.date.today().isoformat(), "limit_bytes": asked["hbm"], "why": answer.why, "plan": plan}
        print(f"{name}: {answer.headline()} ({time.monotonic() - began:.0f} s)", flush=True)
    return found


def measure(name: str, known: dict[str, Any], steps: int) -> dict[str, Any]:
    """Steps of one case, as planned, in this process."""
    import torch

    from foretell.plan import file
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start

    began, cuda = time.perf_counter(), torch.cuda.is_available()
    plan = file.from_json(known["plan"])
    said = plan.predicted
    if cuda:
        packed.limit_reserved(known["limit_bytes"] - (said["memory_bytes"] - said["reserved_bytes"]))
    taken: list[tuple[float, float]] = []
    job, error = None, ""
    try:
        workload = packed.packed_model(plan, torch.device("cuda", 0) if cuda else torch.device("cpu"))
        built = time.perf_counter() - began
        print(f"{name}: built in {built:.1f} s", flush=True)
        job = apply(workload, plan, start(plan), learning_rate=1e-4, adapted=True)
        taken.extend(packed.timed(job, [workload.batch] * plan.accumulate, steps, name))
    except torch.OutOfMemoryError as problem:
        error = str(problem)[:300]
    seconds = [each for each, _ in taken]
    return {
        "case": name, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "sealed": known["date"],
        "device": torch.cuda.get_device_name() if cuda else "cpu", "limit_bytes": known["limit_bytes"],
        "blocks": {path: one.mode for path, one in plan.blocks.items()}, "compile": plan.compile, "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate, "done": len(taken) == steps, "error": error,
        "predicted": {key: said.get(key) for key in ("allocated_bytes", "reserved_bytes", "step_seconds", "low_seconds", "high_seconds")},
        "measured": {
            **packed.peaks(job), "step_seconds": statistics.median(seconds[WARM_UP:] or seconds or [0.0]), "seconds": seconds,
            "losses": [round(loss, 4) for _, loss in taken], "whole_seconds": round(time.perf_counter() - began, 1),
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", default="", metavar="NAME", help="cases that have this in their name")
    parser.add_argument("--seconds", type=float, default=150.0, help="longest time of a case")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "adapters_models_small.json" if options.small else PREDICTED
    if options.what == "predict":
        known = json.loads(place.read_text()) if place.exists() and options.only else {}
        place.write_text(json.dumps(known | predict(SMALL if options.small else CASES, options.only), indent=1) + "\n")
        return
    for name, known in json.loads(place.read_text()).items():
        if options.only not in name:
            continue
        if known["plan"] is None:
            _write({"case": name, "done": False, "error": known["why"]}, options.small)
        elif options.here:
            _write(measure(name, known, options.steps), options.small)
        else:
            words = [sys.executable, __file__, "measure", "--here", "--only", name, "--steps", str(options.steps)]
            try:
                env = {**os.environ, "PYTHONUNBUFFERED": "1"}
                subprocess.run(words + ["--small"] * options.small, check=False, timeout=options.seconds, env=env)
            except subprocess.TimeoutExpired:
                print(f"{name} took longer than it may", flush=True)


def _write(row: dict[str, Any], small: bool) -> None:
    print(json.dumps(row), flush=True)
    if not small:
        with ROWS.open("a") as rows:
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
