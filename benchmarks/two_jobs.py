"""Two trainings on one GPU, each a process of its own: predicted first, then run, alone and side by side.

    python benchmarks/two_jobs.py --out FILE [--limit-seconds 150] [--device cpu]

Rows of JSON: `job` (a prediction alone), `sharing` (time slice and context switch as two kernels that watch the clock see them),
`predicted` (a pair), `measured` (the same pair: device memory, step seconds of each alone and beside the other, and utilisation by NVML).
A pair is predicted twice: with the constants that foretell has, and with those just measured. `--device cpu` goes the same way with
small models and no figures worth keeping.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
warnings.simplefilter("ignore")

import torch  # noqa: E402  (no CUDA here: every job has a process of its own)

from foretell.hardware.probe.cases.steps import parts, step_of  # noqa: E402
from foretell.hardware.probe.machine import nvml  # noqa: E402

USUAL = {"precision": "bf16-autocast", "optimizer": "adamw-fused"}
JOBS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2", "micro_batch": 8, "seq": 1024},
    "resnet50": {"model": "resnet50", "micro_batch": 128},
    "vit": {"model": "vit-b16", "micro_batch": 64},
    "bert": {"model": "bert-base", "micro_batch": 32, "seq": 512},
    "unet": {"model": "unet", "micro_batch": 8},
    "gpt-tiny": {"model": "gpt-tiny", "micro_batch": 2},
    "llama-tiny": {"model": "llama-tiny", "micro_batch": 2},
    "ff": {"model": "ff", "micro_batch": 512},
}
PAIRS = (
    ("gpt2", "gpt2"), ("gpt2", "resnet50"), ("gpt2", "gpt-tiny"), ("gpt-tiny", "llama-tiny"), ("resnet50", "vit"), ("bert", "unet"),
    ("resnet50", "llama-tiny"), ("gpt-tiny", "gpt-tiny"), ("ff", "bert"), ("vit", "ff"),
)  # fmt: skip
TINY = ("gpt-tiny", "llama-tiny")
ALONE_SECONDS, BOTH_SECONDS, LEAD_SECONDS = 1.0, 3.0, 0.3
PAIR_SECONDS = 14.0
"""What a pair takes at most: no further one is begun when less is left."""
IN_FLIGHT = 2
"""Steps that the host is ahead of the device at most."""


# ---------------------------------------------------------------- predictions


def predicted(job: dict[str, Any]) -> Any:
    """What a job costs alone on an H200, by the path that `foretell fit` goes."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.price.speeds import Options
    from foretell.simulate.plan import predict_step
    from foretell.trace.sandbox.child import request
    from foretell.trace.store.traces import traced

    source, recipe = parts({**USUAL, **job})
    cluster = parse("H200")
    trace, _ = traced(request(source, recipe, cluster.device.compute_capability or (9, 0), {}))
    cost = predict_step(trace, recipe, cluster, Options(profile_of=find_profile), micro_batch=source.micro_batch)
    return replace(cost, programs=())


def pair_row(costs: dict[str, Any], pair: tuple[str, str], sharing: Any, constants: str) -> dict[str, Any]:
    from foretell.simulate.beside import together

    found = together([costs[name] for name in pair], sharing)
    return {"kind": "predicted", "pair": list(pair), "constants": constants, **found.to_json()}


# ---------------------------------------------------------------- a job in a process of its own


def work(config: dict[str, Any], kind: str, pipe: Any) -> None:
    """Build, warm up, then run for as long as is asked, until told to end."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 4))
    torch.manual_seed(0)
    try:
        step = step_of({**USUAL, **config, **({"precision": "fp32"} if kind == "cpu" else {})}, kind)
        for _ in range(4):
            step()
        _wait(kind)
        pipe.send({"ready": True, **_held(kind)})
        while True:
            asked = pipe.recv()
            if asked is None:
                return
            pipe.send({**timed(step, kind, *asked), **_held(kind)})
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def timed(step: Any, kind: str, begin: float, end: float) -> dict[str, Any]:
    """Steps from `begin` to `end` by the common clock; those that ended in the first tenth do not count."""
    while time.monotonic() < begin:
        time.sleep(0.001)
    ends: list[float] = []
    marks: list[Any] = []
    while time.monotonic() < end:
        step()
        if kind == "cpu":
            ends.append(time.monotonic())
            continue
        mark = torch.cuda.Event()
        mark.record()
        marks.append(mark)
        if len(marks) > IN_FLIGHT:
            marks.pop(0).synchronize()
            ends.append(time.monotonic())
    for mark in marks:
        mark.synchronize()
        ends.append(time.monotonic())
    kept = [moment for moment in ends if begin + 0.1 * (end - begin) <= moment <= end]
    if len(kept) < 2:
        return {"steps": len(kept), "step_seconds": None}
    return {"steps": len(kept) - 1, "step_seconds": (kept[-1] - kept[0]) / (len(kept) - 1)}


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def _held(kind: str) -> dict[str, int]:
    if kind == "cpu":
        return {}
    return {"allocated_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


# ---------------------------------------------------------------- a pair


def measured(pair: tuple[str, str], kind: str) -> dict[str, Any]:
    """Both jobs in processes of their own: each alone, then both."""
    context = multiprocessing.get_context("fork")
    before = used_bytes()
    pipes, processes = [], []
    for name in pair:
        mine, theirs = context.Pipe()
        process = context.Process(target=work, args=(JOBS[name], kind, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    row: dict[str, Any] = {"kind": "measured", "pair": list(pair)}
    try:
        for pipe in pipes:
            _heard(pipe, 60)
        alone = [_run([pipe], ALONE_SECONDS) for pipe in pipes]
        both = _run(pipes, BOTH_SECONDS)
        held = used_bytes()
        row |= {
            "alone_seconds": [one["found"][0]["step_seconds"] for one in alone],
            "step_seconds": [one["step_seconds"] for one in both["found"]], "steps": [one["steps"] for one in both["found"]],
            "alone_utilisation": [one["utilisation"] for one in alone], "utilisation": both["utilisation"],
            "reserved_bytes": [one.get("reserved_bytes") for one in both["found"]],
            "device_bytes": held - before if held is not None and before is not None else None, "before_bytes": before,
        }  # fmt: skip
    except (RuntimeError, EOFError) as error:
        row["failed"] = str(error)
    finally:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return row


def _run(pipes: list[Any], seconds: float) -> dict[str, Any]:
    """What jobs did that ran at the same time, and what NVML saw meanwhile."""
    begin = time.monotonic() + LEAD_SECONDS
    for pipe in pipes:
        pipe.send((begin, begin + seconds))
    seen = watched(begin + 0.1 * seconds, begin + seconds)
    return {"found": [_heard(pipe, seconds + 60) for pipe in pipes], "utilisation": seen}


def _heard(pipe: Any, seconds: float) -> dict[str, Any]:
    if not pipe.poll(seconds):
        raise RuntimeError(f"a job did not answer within {seconds:.0f} s")
    found: dict[str, Any] = pipe.recv()
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found


# ---------------------------------------------------------------- what NVML sees


def used_bytes() -> int | None:
    with nvml() as found:
        return int(found[0].nvmlDeviceGetMemoryInfo(found[1]).used) if found is not None else None


def watched(begin: float, end: float) -> dict[str, float | None]:
    """Shares between 0 and 1: kernels running by the plain counter; by GPM, where the device has it, also multiprocessors and memory."""
    with nvml() as found:
        if found is None:
            return {}
        pynvml, handle = found
        while time.monotonic() < begin:
            time.sleep(0.005)
        first, plain = _gpm(pynvml, handle), []
        while time.monotonic() < end - 0.1:
            time.sleep(0.1)
            plain.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        row: dict[str, float | None] = {"gpu": statistics.mean(plain) if plain else None}
        return row | _between(pynvml, first, _gpm(pynvml, handle))


def _gpm(pynvml: Any, handle: Any) -> Any:
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        sample = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(handle, sample)
        return sample
    return None


def _between(pynvml: Any, first: Any, second: Any) -> dict[str, float | None]:
    if first is None or second is None:
        return {}
    names = {
        "graphics": "NVML_GPM_METRIC_GRAPHICS_UTIL", "sm": "NVML_GPM_METRIC_SM_UTIL", "occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
        "tensor": "NVML_GPM_METRIC_ANY_TENSOR_UTIL", "memory": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    }  # fmt: skip
    found: dict[str, float | None] = {}
    with contextlib.suppress(pynvml.NVMLError, AttributeError, TypeError):
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(names)
        asked.sample1, asked.sample2 = first, second
        for place, name in enumerate(names.values()):
            asked.metrics[place].metricId = getattr(pynvml, name)
        pynvml.nvmlGpmMetricsGet(asked)
        for place, name in enumerate(names):
            found[name] = round(float(asked.metrics[place].value) / 100, 4)
    return found


# ---------------------------------------------------------------- how the device is shared


def sharing_rows() -> Iterator[dict[str, Any]]:
    """Two kernels that watch the clock at the same time: how long each has the device, and what lies between."""
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2)
    pipes = []
    for _ in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=_watch, args=(theirs, together), daemon=True)
        process.start()
        pipes.append((mine, process))
    found = []
    for pipe, process in pipes:
        if pipe.poll(60):
            found.append(pipe.recv())
        process.join(5)
        if process.is_alive():
            process.kill()
    wrong = next((one for one in found if isinstance(one, str)), None)
    if wrong or len(found) < 2:
        yield {"kind": "sharing", "failed": wrong or "no answer"}
        return
    yield slices(*found)


def slices(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> dict[str, Any]:
    """Stretches in which each had the device, as (begin, end) in nanoseconds of one clock → slice and switch."""
    begin, end = max(first[0][0], second[0][0]), min(first[-1][1], second[-1][1])
    merged = sorted([(*one, 0) for one in first] + [(*one, 1) for one in second])
    inner = [one for one in merged if one[0] > begin and one[1] < end]
    lengths = [(b - a) / 1e9 for a, b, _ in inner]
    between = [(after[0] - before[1]) / 1e9 for before, after in pairwise(inner) if before[2] != after[2]]
    return {
        "kind": "sharing", "slice_seconds": statistics.median(lengths) if lengths else None,
        "switch_seconds": statistics.median(between) if between else None, "slices": len(lengths), "switches": len(between),
        "slice_spread": [min(lengths), max(lengths)] if lengths else None, "switch_spread": [min(between), max(between)] if between else None,
    }  # fmt: skip


def _watch(pipe: Any, together: Any) -> None:
    """Note every stretch in which this kernel has the device, for 0.6 s from the moment when both are ready."""
    try:
        from two_jobs_kernel import watch

        watch(torch.zeros(2, dtype=torch.int64, device="cuda"), 1000, 20_000)  # compiled
        torch.cuda.synchronize()
        out = torch.zeros(40_000, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        together.wait(45)
        watch(out, 600_000_000, 20_000)
        torch.cuda.synchronize()
        values = [value for value in out.tolist() if value]
        pipe.send([(values[at], values[at + 1]) for at in range(0, len(values) - 1, 2)])
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


# ---------------------------------------------------------------- all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-seconds", type=float, default=150.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    end = time.monotonic() + asked.limit_seconds
    pairs = PAIRS if asked.device == "cuda" else ((TINY[0], TINY[1]), (TINY[0], TINY[0]))
    names = sorted({name for pair in pairs for name in pair})
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    with asked.out.open("a", encoding="utf-8") as file:

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps({**about, **row}) + "\n")
            file.flush()
            print(shown(row), flush=True)

        with ProcessPoolExecutor(min(len(names), os.cpu_count() or 2), multiprocessing.get_context("fork")) as pool:
            costs = dict(zip(names, pool.map(predicted, [JOBS[name] for name in names]), strict=True))
        for name, cost in costs.items():
            memory, took = cost.worst.memory, cost.time
            keep({"kind": "job", "name": name, **JOBS[name], "device_bytes": memory.device_bytes, "reserved_bytes": memory.reserved_bytes,
                  "step_seconds": took.step_seconds, "device_seconds": took.device_seconds})  # fmt: skip
        run(costs, pairs, asked.device, keep, end)


def run(costs: dict[str, Any], pairs: Any, device: str, keep: Any, end: float) -> None:
    """All predictions are kept before the first pair runs."""
    from foretell.simulate.time.beside import Sharing

    for pair in pairs:
        keep(pair_row(costs, pair, None, "foretell's"))
    if device == "cuda":
        for row in sharing_rows():
            keep(row)
            if row.get("slice_seconds") and row.get("switch_seconds"):
                known = Sharing(slice_seconds=row["slice_seconds"], switch_seconds=row["switch_seconds"])
                for pair in pairs:
                    keep(pair_row(costs, pair, known, "measured"))
    for pair in pairs:
        if time.monotonic() > end - PAIR_SECONDS:
            print("the time is up", flush=True)
            return
        row = measured(pair, device)
        keep({**row, **beside_measured(row, costs)})


def beside_measured(row: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """How far the prediction with foretell's constants is off."""
    if "failed" in row:
        return {}
    told = pair_row(costs, tuple(row["pair"]), None, "foretell's")
    off = {"seconds_off": [p / m - 1 if m else None for p, m in zip(told["step_seconds"], row["step_seconds"], strict=True)]}
    return off | ({"bytes_off": told["device_bytes"] / row["device_bytes"] - 1} if row["device_bytes"] else {})


def shown(row: dict[str, Any]) -> str:
    if row["kind"] == "measured" and "failed" not in row:
        off = [f"{100 * one:+.1f} %" for one in row.get("seconds_off", ()) if one is not None]
        steps = [f"{1e3 * one:.1f}" for one in row["step_seconds"] if one]
        alone = [f"{1e3 * one:.1f}" for one in row["alone_seconds"] if one]
        size = f", bytes {100 * row['bytes_off']:+.1f} %" if "bytes_off" in row else ""
        return f"measured  {' + '.join(row['pair']):<24} alone {alone} ms, together {steps} ms, predicted {off}{size}, {row['utilisation']}"
    if row["kind"] == "predicted":
        steps = [f"{1e3 * one:.1f}" for one in row["step_seconds"]]
        return f"predicted {' + '.join(row['pair']):<24} together {steps} ms, {row['device_bytes'] / 2**30:.2f} GiB ({row['constants']})"
    return json.dumps(row)


if __name__ == "__main__":
    main()
