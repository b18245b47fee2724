"""How close the memory predictions come: predicted with no GPU visible, then really run on the GPU at hand.

    python benchmarks/memory.py                                  every configuration of configs/memory.jsonl
    python benchmarks/memory.py --configs mine.jsonl             your own list
    python benchmarks/memory.py --predict-only                   no GPU needed
    python benchmarks/memory.py --limits 150                     no wrong "fits": ballast leaves N GiB free
    python benchmarks/memory.py --oplists                        traced op lists against a dispatch trace on the GPU

Rows are appended to a results file one by one and not measured twice, so an interrupted table goes on where it
stopped (delete the file to start over). The keys of a configuration, one JSON object a line:

    model        zoo name, hf:TYPE, timm:NAME, torchvision:NAME or file.py:function
    overrides    settings of the model, as --set (default {})
    micro_batch  samples per forward (1)          seq     tokens per sample (null: the model's usual)
    image        side in pixels (null)            accumulate   micro-batches per step (1)
    optimizer    sgd, momentum, adam, adamw; with -fused, -foreach, -loop (adamw-fused)
    precision    fp32, bf16-autocast, fp16-autocast, bf16 (bf16-autocast)
    recompute    none, full, selective (none)     clip    gradient norm limit (null)
    lora         rank or null                     nf4     true or false
    mode         eager, or compiled: model.compile(), loss and optimizer eager (eager); graphs: with CUDA graphs
                 (mode "reduce-overhead"); blocks: every block for itself

Rows with a `kind` (recurrent, lora, nf4) are not of the standard table and summed up apart from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))
FORKING = threading.Lock()
"""One thread forks at a time: hooks that libraries put around forks do not expect another."""
MODES = ("eager", "compiled", "graphs", "blocks")
DEFAULTS: dict[str, Any] = {
    "model": "", "overrides": {}, "micro_batch": 1, "seq": None, "image": None, "optimizer": "adamw-fused",
    "precision": "bf16-autocast", "recompute": "none", "accumulate": 1, "clip": None, "lora": None, "nf4": False,
    "mode": "eager",
}  # fmt: skip


def read_configs(path: Path) -> list[dict[str, Any]]:
    configs = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        given = json.loads(line)
        unknown = set(given) - set(DEFAULTS)
        if unknown or given.get("mode", "eager") not in MODES:
            sys.exit(f"{path}:{number}: unknown keys {sorted(unknown)}, or a mode not among {', '.join(MODES)}")
        configs.append({**DEFAULTS, **given})
    return configs


def key_of(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def name_of(config: dict[str, Any]) -> str:
    changed = [f"{k}={v}" for k, v in config.items() if k != "model" and v != DEFAULTS[k]]
    return " ".join([config["model"], *changed])


def parts(config: dict[str, Any]) -> tuple[Any, Any]:
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe

    source = Source(**{k: config[k] for k in ("model", "overrides", "micro_batch", "seq", "image")})
    recipe = Recipe(**{k: config[k] for k in ("optimizer", "precision", "recompute", "accumulate", "clip", "lora", "nf4")})
    return source, recipe


def predict(config: dict[str, Any]) -> dict[str, Any]:
    """Peaks predicted on fake tensors; runs in a process that sees no GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from foretell.hardware import overhead, parse
    from foretell.lower.compiling import compiled
    from foretell.simulate.memory.memory import predict_memory
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(config)
    started = time.perf_counter()
    try:
        trace = capture(lambda: load(source), recipe)
        trace = compiled(trace, {"eager": "none", "compiled": "model"}.get(config["mode"], config["mode"]))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    cluster = parse("H200")
    seconds = time.perf_counter() - started
    memory = predict_memory(trace, cluster, overhead(cluster.device, "2.11")).memory
    return {
        "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "device": memory.device_bytes,
        "trace_seconds": round(seconds, 2),
    }  # fmt: skip


def predict_all(configs: list[dict[str, Any]], what: str = "predict", workers: int | None = None) -> list[Any]:
    """Run `what` for every configuration in fresh processes without a GPU."""
    code = (
        "import sys, json; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "import memory, cases\n"
        "import importlib, multiprocessing as mp\n"
        "cases.warm_up()\n"
        "work = json.load(sys.stdin)\n"
        "where, _, what = sys.argv[3].rpartition('.')\n"
        "function = getattr(importlib.import_module(where), what) if where else "
        "getattr(memory, what, None) or getattr(cases, what)\n"
        "with mp.get_context('fork').Pool(int(sys.argv[4]), maxtasksperchild=1) as pool:\n"
        "    print(json.dumps(pool.map(function, work, chunksize=1)))\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    count = str(workers or max(1, (os.cpu_count() or 2) - 1))
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE.parent), str(HERE), what, count],
        input=json.dumps(configs), text=True, stdout=subprocess.PIPE, env=environment, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def in_child(function: Any, config: dict[str, Any], *args: Any, timeout: float = 60, device: Any = None) -> dict[str, Any]:
    """Run on the GPU in a forked process, so that every case starts with a fresh context and allocator.

    With a lock for the device, the function is given one argument more: what it calls before it touches the device, which waits
    until no other case is there. So cases can be built beside each other and run one after the other.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def wait() -> None:
        theirs.send("built")
        theirs.recv()

    def work() -> None:
        try:
            answer = function(config, *args, *([wait] if device else []))
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        theirs.send(answer)
        theirs.close()

    process = context.Process(target=work)
    with FORKING:
        process.start()
    theirs.close()  # so that a crash is seen at once and not at the time limit
    held = False
    try:
        answer = ours.recv() if ours.poll(timeout) else {"error": f"no answer in {timeout} s"}
        if answer == "built":
            held = device.acquire()
            ours.send("go")
            answer = ours.recv() if ours.poll(timeout) else {"error": f"no answer in {timeout} s"}
    except EOFError:
        process.join(10)
        answer = {"error": f"the process ended with {process.exitcode} and no answer"}
    try:
        if "no answer" in answer.get("error", ""):
            process.kill()
        process.join(10)  # its memory is free only then
    finally:
        if held:
            device.release()
    return answer


def machine() -> dict[str, str]:
    """Where and when; asks NVML, because torch must not touch CUDA before the cases fork."""
    import pynvml
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError:
        name = "no GPU"
    return {
        "date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__,
        "commit": os.environ.get("COMMIT") or commit.stdout.strip() or "unknown",
    }  # fmt: skip


def done_keys(path: Path) -> set[str]:
    if not path.exists():
        return set()
    return {json.loads(line).get("key", "") for line in path.read_text().splitlines() if line.strip()}


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


def kind_of(config: dict[str, Any]) -> str | None:
    """Rows that are not of the standard table, and summed up apart from it."""
    if config["nf4"] or config["lora"]:
        return "nf4" if config["nf4"] else "lora"
    return "recurrent" if config["model"].startswith(("lstm", "tests/data/recurrent.py")) else None


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """The standard table, MemTracker beside it, then every other kind of row."""
    good = [row for row in rows if "measured" in row and "predicted" in row and "error" not in row["predicted"]]
    kinds = dict.fromkeys(["", *(row.get("kind", "") for row in good)])
    lines = []
    for kind in kinds:
        chosen = [row for row in good if row.get("kind", "") == kind]
        for what in ("allocated", "reserved", "device"):
            errors = [_error(row, "predicted", what) for row in chosen if what in row["measured"]]
            lines += [f"{kind:9s} {what:10s} {_spread(errors)}"] if errors else []
        tracked = [{**row, "memtracker": dict.fromkeys(row["measured"], row["memtracker"])} for row in chosen if row.get("memtracker")]
        for what in ("allocated", "device") if tracked else ():
            lines.append(f"MemTracker of {what:10s} {_spread([_error(row, 'memtracker', what) for row in tracked])}")
    return "\n".join(lines)


def _error(row: dict[str, Any], said: str, what: str) -> float:
    return 100 * (row[said][what] / row["measured"][what] - 1)


def _spread(errors: list[float]) -> str:
    middle, worst = statistics.median(map(abs, errors)), max(errors, key=abs)
    return f"{len(errors)} rows, median |error| {middle:.2f} %, worst {worst:+.2f} %"


def known_predictions(path: Path | None) -> dict[str, Any]:
    """Predictions made earlier, perhaps on a machine without a GPU: key → numbers."""
    if path is None:
        return {}
    rows = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return {row["key"]: row["predicted"] for row in rows}


def compare(
    configs: list[dict[str, Any]], out: Path, given: Path | None, predict_only: bool, memtracker: bool, seconds: float
) -> None:
    import cases

    started = time.monotonic()
    known = known_predictions(given)
    left = [config for config in configs if key_of(config) not in done_keys(out)]
    print(f"{len(configs)} configurations, {len(left)} to do", flush=True)
    missing = [config for config in left if key_of(config) not in known]
    known |= {key_of(config): answer for config, answer in zip(missing, predict_all(missing), strict=True)} if missing else {}
    about = machine()
    if not predict_only:
        cases.warm_up()
    for config in left:
        if time.monotonic() - started > seconds:
            print("time is up; run again to go on", flush=True)
            break
        predicted = known[key_of(config)]
        kind = kind_of(config)
        row: dict[str, Any] = {"key": key_of(config), "name": name_of(config), "predicted": predicted, **about}
        row |= {"kind": kind} if kind else {}
        if not predict_only:
            row["measured"] = in_child(cases.measure, config)
            if "error" in row["measured"]:
                row["failed"] = row.pop("measured")
            if memtracker and "measured" in row:
                row["memtracker"] = in_child(cases.memtracker, config).get("peak")
        append(out, row)
        print(describe(row), flush=True)
    print(summary(json.loads(line) for line in out.read_text().splitlines()))


def describe(row: dict[str, Any]) -> str:
    predicted, measured = row["predicted"], row.get("measured")
    if "error" in predicted:
        return f"{row['name']}: {predicted['error']}"
    if measured is None:
        return f"{row['name']}: predicted {predicted['allocated'] / 2**20:.0f} MiB; {row.get('failed', '')}"
    errors = "  ".join(
        f"{what} {measured[what] / 2**20:.0f} MiB {100 * (predicted[what] / measured[what] - 1):+.2f} %"
        for what in ("allocated", "reserved", "device")
    )
    return f"{row['name']}: {errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, default=HERE / "configs" / "memory.jsonl")
    parser.add_argument("--out", type=Path, default=None, help="results file (JSON lines)")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--predictions", type=Path, help="use the predictions in this results file")
    parser.add_argument("--memtracker", action="store_true", help="PyTorch's MemTracker on the same configurations")
    parser.add_argument("--limits", type=int, default=0, metavar="N", help="N cases near the limit")
    parser.add_argument("--oplists", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new case after this long")
    options = parser.parse_args()
    configs = read_configs(options.configs)
    if not options.predict_only and machine()["device"] == "no GPU":
        sys.exit("there is no GPU here to measure on; --predict-only makes the predictions")
    if options.limits or options.oplists:
        import cases

        kind = "limits" if options.limits else "oplists"
        out = options.out or HERE / "results" / f"{kind}.jsonl"
        if options.limits:
            cases.run_limits(configs, options.limits, out, options.predictions, options.predict_only, options.seconds)
        else:
            cases.run_oplists(configs, out, options.seconds)
        return
    out = options.out or HERE / "results" / "memory.jsonl"
    compare(configs, out, options.predictions, options.predict_only, options.memtracker, options.seconds)


if __name__ == "__main__":
    main()
