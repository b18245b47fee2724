"""Joules of an epoch: predicted first, then read from the GPU's own counter (NVML) while it trains.

    python benchmarks/joules.py --out FILE [--limit-seconds 150] [--on H200] [--device cpu]

Three ways of training without a global backward (Forward-Forward, Cascaded-Forward, Mono-Forward), each beside its twin under
backpropagation, then two larger models for scale. One row of JSON for each prediction, all of them written before anything runs,
and one for each measurement. An epoch is the data set's images over the batch; batches are synthetic and stay on the device, so
no loading is in it. `--device cpu` goes the same way with small models, and has no joules.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
warnings.simplefilter("ignore")

import torch  # noqa: E402

USUAL = {"precision": "bf16-autocast", "optimizer": "adamw-fused"}
EPOCH = {"ff": 60_000, "cafo": 50_000, "mf": 50_000, "resnet50": 1_281_167, "gpt2": 100_000}
"""Samples: MNIST, CIFAR-10, CIFAR-10, ImageNet; of GPT-2 so many sequences."""
RUNS: tuple[dict[str, Any], ...] = (
    *({"model": f"{name}{twin}", "micro_batch": 512} for name in ("ff", "cafo", "mf") for twin in ("", "-twin")),
    {"model": "resnet50", "micro_batch": 128}, {"model": "gpt2", "micro_batch": 8, "seq": 1024},
)  # fmt: skip
SMALL: tuple[dict[str, Any], ...] = ({"model": "ff-tiny", "micro_batch": 1}, {"model": "ff-twin-tiny", "micro_batch": 1})
HELD_SECONDS, WARM_SECONDS, RUN_SECONDS = 6.0, 1.5, 13.0
"""The counter moves in jumps of a tenth of a second or so: six seconds are read within 2 %."""
IN_FLIGHT = 2


def samples_of(run: dict[str, Any]) -> int:
    return EPOCH[run["model"].split("-")[0]]


def predicted(run: dict[str, Any], on: str) -> dict[str, Any]:
    """By `foretell fit`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import foretell

    found = foretell.fit(
        run["model"], hardware=on, micro_batch=run["micro_batch"], seq=run.get("seq"), epochs=1, dataset_size=samples_of(run), **USUAL
    )
    energy, whole, took = found.energy, found.run, found.time
    if energy is None or whole is None or took is None:
        return {"failed": "no speed or no power of that device is known"}
    return {
        "step_seconds": took.step_seconds, "low_seconds": took.low_seconds, "high_seconds": took.high_seconds, "watts": energy.watts_per_device,
        "busy": took.device_seconds / took.step_seconds, "joules_per_step": energy.joules_per_step, "low_joules": energy.low_joules,
        "high_joules": energy.high_joules, "joules_per_epoch": whole.joules, "steps_per_epoch": whole.steps,
        "allocated_bytes": found.memory.allocated_bytes, "device_bytes": found.memory.device_bytes,
    }  # fmt: skip


def measured(run: dict[str, Any], kind: str, held: float = HELD_SECONDS) -> dict[str, Any]:
    """Steps for some seconds, with the joules that the counter gained meanwhile."""
    from foretell.hardware.probe.cases.steps import step_of
    from foretell.hardware.probe.machine import nvml
    from foretell.hardware.probe.power import PowerMeter

    torch.manual_seed(0)
    step = step_of({**USUAL, **({"precision": "fp32"} if kind == "cpu" else {}), **run}, kind)
    _steps(step, kind, WARM_SECONDS)
    with nvml() as found:
        meter = PowerMeter(*found) if found is not None and kind == "cuda" else None
        before, began = meter.joules() if meter else None, time.perf_counter()
        count = _steps(step, kind, held)
        took, after = time.perf_counter() - began, meter.joules() if meter else None
        clock = meter.clock() if meter else None
    row: dict[str, Any] = {"step_seconds": took / count, "steps": count, "clock_mhz": clock}
    if before is not None and after is not None:
        each = (after - before) / count
        row |= {"joules_per_step": each, "watts": (after - before) / took, "joules_per_epoch": each * -(-samples_of(run) // run["micro_batch"])}
    if kind == "cuda":
        row["allocated_bytes"] = torch.cuda.max_memory_allocated()
    return row


def _steps(step: Any, kind: str, seconds: float) -> int:
    """As a training loop runs them, the host a little ahead; all are done when this returns."""
    end, count, marks = time.perf_counter() + seconds, 0, []
    while time.perf_counter() < end or not count:
        step()
        count += 1
        if kind == "cuda":
            mark = torch.cuda.Event()
            mark.record()
            marks.append(mark)
            if len(marks) > IN_FLIGHT:
                marks.pop(0).synchronize()
    if kind == "cuda":
        torch.cuda.synchronize()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-seconds", type=float, default=150.0)
    parser.add_argument("--on", default="H200")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit_seconds
    runs = RUNS if asked.device == "cuda" else SMALL
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "on": asked.on}
    with asked.out.open("a", encoding="utf-8") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps({**about, **row}) + "\n")
            file.flush()

        with ProcessPoolExecutor(min(len(runs), os.cpu_count() or 2), multiprocessing.get_context("fork")) as pool:
            said = list(pool.map(predicted, runs, [asked.on] * len(runs)))
        for run, told in zip(runs, said, strict=True):
            keep({"kind": "predicted", **run, **told})
        for run, told in zip(runs, said, strict=True):
            if time.monotonic() > end - RUN_SECONDS:
                print("the time is up", flush=True)
                break
            try:
                found = measured(run, asked.device, HELD_SECONDS if asked.device == "cuda" else 0.5)
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            gc.collect()
            if asked.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            keep({"kind": "measured", **run, **found})
            print(shown(run, told, found), flush=True)


def shown(run: dict[str, Any], told: dict[str, Any], found: dict[str, Any]) -> str:
    if "failed" in found or "failed" in told:
        return f"{run['model']:<12} {found.get('failed') or told.get('failed')}"
    step = f"step {1e3 * found['step_seconds']:.2f} ms ({100 * (told['step_seconds'] / found['step_seconds'] - 1):+.1f} %)"
    if "joules_per_epoch" not in found:
        return f"{run['model']:<12} {step}, no counter of joules"
    off = 100 * (told["joules_per_epoch"] / found["joules_per_epoch"] - 1)
    return f"{run['model']:<12} {step}, {found['watts']:.0f} W, {found['joules_per_epoch']:.0f} J an epoch ({off:+.1f} %)"


if __name__ == "__main__":
    main()
