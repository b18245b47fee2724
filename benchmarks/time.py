"""How close the predicted seconds come: really run on the GPU at hand, predicted from a trace and the profile.

    python benchmarks/time.py                         measure configs/time.jsonl here, then predict and compare
    python benchmarks/time.py --configs mine.jsonl    your own list (the keys of benchmarks/memory.py; mode eager or compiled)
    python benchmarks/time.py --predict-only          no GPU: predict again what results/time.jsonl holds
    python benchmarks/time.py --probe                 probe the machine first (foretell probe --full)

Measured rows are appended one by one and not measured twice. A compiled configuration is built and compiled beside
others, then timed alone. Seconds are medians of at least 50 steps (10 for steps of 0.3 s and more).
"""

from __future__ import annotations

import argparse
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
WAVE = 8
"""Configurations that compile side by side."""
HOST_BOUND = 0.85
"""A step whose kernels are busy for less than this share of it waits for its host."""


def measure(configs: list[dict[str, Any]], out: Path, seconds: float) -> None:
    import cases
    import memory
    import steps

    started, about = time.monotonic(), memory.machine()
    left = [config for config in configs if memory.key_of(config) not in memory.done_keys(out)]
    cases.warm_up()
    for config in left:
        if config["mode"] != "eager":
            continue
        if time.monotonic() - started > seconds:
            sys.exit("time is up; run again to go on")
        _keep(out, config, about, memory.in_child(lambda c: steps.time_step(c, profile=True), config, timeout=90))
    compiled = [config for config in left if config["mode"] != "eager"]
    for first in range(0, len(compiled), WAVE):
        if time.monotonic() - started > seconds:
            sys.exit("time is up; run again to go on")
        for config, found in _wave(compiled[first : first + WAVE]):
            _keep(out, config, about, found)


def _keep(out: Path, config: dict[str, Any], about: dict[str, str], found: dict[str, Any]) -> None:
    from memory import append, key_of, name_of

    row = {"key": key_of(config), "name": name_of(config), "config": config, "measured": found, **about}
    append(out, row)
    print(row["name"], found.get("error") or f"{1e3 * found['seconds']:.2f} ms", flush=True)


def _wave(configs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Compile side by side in processes of their own; each is timed when all are ready, one after another."""
    folder = Path(tempfile.mkdtemp())
    running = []
    for number, config in enumerate(configs):
        command = [sys.executable, __file__, "--one", json.dumps(config), str(folder / f"{number}")]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    ready = time.monotonic()
    while time.monotonic() - ready < 180:
        if all((folder / f"{n}.ready").exists() or p.poll() is not None for n, p in enumerate(running)):
            break
        time.sleep(0.2)
    (folder / "go").touch()
    found = []
    for number, (config, process) in enumerate(zip(configs, running, strict=True)):
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
        answer = folder / f"{number}.json"
        found.append((config, json.loads(answer.read_text()) if answer.exists() else {"error": "no answer"}))
    return found


def one(config: dict[str, Any], path: Path) -> None:
    """One compiled configuration, in this process."""
    import steps

    def gate() -> None:
        path.with_suffix(".ready").touch()
        begun = time.monotonic()
        while time.monotonic() - begun < 240 and not (path.parent / "go").exists():
            time.sleep(0.1)

    try:
        found = steps.time_step(config, profile=True, gate=gate)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:300]}
    path.with_suffix(".json").write_text(json.dumps(found))


# ---------------------------------------------------------------------------------------------- predictions


def compare(out: Path) -> None:
    """Predict every measured row and write the predictions beside."""
    from memory import predict_all

    rows = [json.loads(line) for line in out.read_text().splitlines() if line.strip()]
    good = [row for row in rows if "seconds" in row.get("measured", {})]
    for row, answer in zip(good, predict_all([row["config"] for row in good], "steps.predict_seconds"), strict=True):
        row["predicted"] = answer
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary(good)


def host_bound(row: dict[str, Any]) -> bool:
    return bool(row["measured"]["kernels"]["busy_us"] / 1e6 < HOST_BOUND * row["measured"]["seconds"])


def summary(rows: list[dict[str, Any]]) -> None:
    rows = [row for row in rows if "seconds" in row.get("predicted", {}) and "seconds" in row["measured"]]
    for row in rows:
        m, p = row["measured"], row["predicted"]
        print(f"{row['name'][:64]:64s} {1e3 * m['seconds']:8.2f} ms {100 * (p['seconds'] / m['seconds'] - 1):+6.1f} % "
              f"{'host' if host_bound(row) else 'device':6s} {p['binds']}")  # fmt: skip
    for name, chosen in (("device-bound", [r for r in rows if not host_bound(r)]), ("host-bound", [r for r in rows if host_bound(r)])):
        _line(name, chosen, lambda r: r["predicted"]["seconds"] / r["measured"]["seconds"])
        _line(f"  plain roofline, {name}", chosen, lambda r: r["predicted"]["roofline_seconds"] / r["measured"]["seconds"])
        _line(f"  PyTorch's RuntimeEstimator, {name}", [r for r in chosen if r.get("runtime_estimator_seconds")],
              lambda r: r["runtime_estimator_seconds"] / r["measured"]["seconds"])  # fmt: skip
    _line("energy", [r for r in rows if r["measured"].get("joules")], lambda r: r["predicted"]["joules"] / r["measured"]["joules"])
    compiled = [r for r in rows if r["config"]["mode"] == "compiled"]
    _line("compiled, allocated", compiled, lambda r: r["predicted"]["allocated"] / r["measured"]["allocated"])
    _line("compiled, reserved", compiled, lambda r: r["predicted"]["reserved"] / r["measured"]["reserved"])
    inside = [r for r in rows if r["predicted"]["low"] <= r["measured"]["seconds"] <= r["predicted"]["high"]]
    width = statistics.median((r["predicted"]["high"] - r["predicted"]["low"]) / r["predicted"]["seconds"] for r in rows)
    print(f"band: holds {len(inside)} of {len(rows)} rows ({100 * len(inside) / len(rows):.0f} %), median width {100 * width:.0f} %")


def _line(name: str, rows: list[dict[str, Any]], ratio: Any) -> None:
    errors = sorted(abs(ratio(row) - 1) for row in rows)
    if errors:
        worst = max((ratio(row) - 1 for row in rows), key=abs)
        print(f"{name:44s} {len(errors):3d} rows  median {100 * statistics.median(errors):6.2f} %  "
              f"p90 {100 * ninety(errors):6.2f} %  worst {100 * worst:+.1f} %")  # fmt: skip


def ninety(values: list[float]) -> float:
    """What nine of ten stay below, between the two nearest values."""
    return statistics.quantiles(values, n=10, method="inclusive")[8] if len(values) > 1 else values[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, default=HERE / "configs" / "time.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "time.jsonl")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--probe", action="store_true", help="run `foretell probe --full` first")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new case after this long")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(json.loads(options.one[0]), Path(options.one[1]))
    from memory import machine, read_configs

    if not options.predict_only:
        if machine()["device"] == "no GPU":
            sys.exit("there is no GPU here to measure on; --predict-only predicts the rows of --out again")
        if options.probe:
            subprocess.run([sys.executable, "-m", "foretell", "probe", "--full"], check=True)
        measure(read_configs(options.configs), options.out, options.seconds)
    compare(options.out)


if __name__ == "__main__":
    main()
