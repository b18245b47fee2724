"""Training kernels beside every baseline: forward and backward at their declared shapes, peak memory, and the floor of this device.

    python benchmarks/kernels.py --out FILE [--only NAME ...] [--sweep] [--configs FILE] [--minutes N] [--rows TOML] [--device cpu]

A row of JSON for each kernel, shape and format as it is done, first shapes of all kernels first; what FILE has already is left out, so a
run that was stopped goes on. `--sweep` first looks for the launch of each shape but for its number of rows, among those of
`benchmarks/kernels_launches.py` or of `--configs` (lines of {"kernel": ..., "config": {...}}). `--rows` writes what FILE has as the table
that decides which kernels are on by default. On a CPU shapes are small, the ops run in plain torch, torch.compile stops before code is
made, and nothing it says is a measurement: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels_baselines import LIGER_NAME, baselines_of
from kernels_launches import joined, launches_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from foretell.kernels import catalog, measured
from foretell.kernels.gated import KERNEL_OF
from foretell.kernels.kernel import TrainingKernel
from foretell.tune.clock.statistics import ratio, turns

PAIRS = 30
SAMPLE_SECONDS = 4e-3
BEYOND = 4 * (60 << 20)
"""Bytes of the inputs that take turns: four times the second-level cache."""
SWEEP_SAMPLES = 7
UNITS = 0.5
"""Of the last place, that an error may have whatever eager's is: what rounding a result alone can do."""
SMALL = {"rows": 64, "tokens": 64, "width": 128, "heads": 4, "kv_heads": 2}
"""Sizes at most in a run on a CPU."""


class Side:
    """Forward and backward of one function, on inputs that take turns."""

    def __init__(self, kernel: TrainingKernel, function: Callable[..., Any], calls: Sequence[tuple[list[Any], list[Tensor]]]) -> None:
        self.function, self.calls, self.at = function, calls, 0
        self.learned = kernel.learned(calls[0][0])

    def once(self) -> list[Tensor]:
        given, ups = self.calls[self.at % len(self.calls)]
        self.at += 1
        made = [one for one in tree_leaves(self.function(*given)) if one.requires_grad or not self.learned]
        return [*made, *(torch.autograd.grad(made, [given[place] for place in self.learned], ups) if self.learned else ())]

    def sample(self, count: int) -> float:
        """Seconds of a call of so many, the CPU's part with them."""
        settle(self.calls[0][0])
        begun = time.perf_counter()
        for _ in range(count):
            self.once()
        settle(self.calls[0][0])
        return (time.perf_counter() - begun) / count


def settle(given: Sequence[Any]) -> None:
    if any(isinstance(one, Tensor) and one.is_cuda for one in given):
        torch.cuda.synchronize()


def inputs(kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> list[tuple[list[Any], list[Tensor]]]:
    """Arguments and the gradients of results, often enough to be beyond the cache."""
    found: list[tuple[list[Any], list[Tensor]]] = []
    size = 0
    while len(found) < 2 or (device.type == "cuda" and size < BEYOND and len(found) < 64):
        given = list(kernel.draw(shape, dtype, device))
        for place in kernel.learned(given):
            given[place].requires_grad_()
        made = [one for one in tree_leaves(kernel.call(*given)) if one.requires_grad]
        found.append((given, [torch.randn_like(one) for one in made]))
        size += sum(one.nbytes for one in (*given, *found[-1][1]) if isinstance(one, Tensor))
        del made
    return found


# ---------------------------------------------------------------- right before fast


def wrong_by(kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> float:
    """Error over what is allowed, of the worst result or gradient, at few rows of the same width: above 1 it is wrong."""
    few = {name: min(size, 64) if name in ("rows", "tokens") else size for name, size in shape.items()}
    torch.manual_seed(0)
    given = list(kernel.draw(few, dtype, device))
    generator = torch.Generator(device).manual_seed(1)

    def results(function: Callable[..., Any], wide: torch.dtype) -> list[Tensor]:
        some = [one.detach().to(wide) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given]
        for place in kernel.learned(some):
            some[place].requires_grad_()
        made = [one for one in tree_leaves(function(*some)) if one.requires_grad]
        generator.manual_seed(1)
        ups = [torch.randn(one.shape, generator=generator, device=device, dtype=torch.float64).to(dtype).to(wide) for one in made]
        return [*made, *torch.autograd.grad(made, [some[place] for place in kernel.learned(some)], ups)]

    wanted, eager, found = results(kernel.reference, torch.float64), results(kernel.reference, dtype), results(kernel.call, dtype)

    def error(one: Tensor, oracle: Tensor) -> float:
        return ((one.double() - oracle).norm() / oracle.norm()).item()

    return max(
        error(mine, oracle) / (kernel.error_ratio * error(own, oracle) + UNITS * torch.finfo(dtype).eps)
        for mine, own, oracle in zip(found, eager, wanted, strict=True)
    )


# ---------------------------------------------------------------- time, memory, floor


def calls_for(side: Side, device: torch.device) -> int:
    for _ in range(3):
        side.once()
    return 1 if device.type == "cpu" else max(1, min(200, int(SAMPLE_SECONDS / side.sample(3)) + 1))


def beside(mine: Side, other: Side, pairs: int, device: torch.device) -> dict[str, float]:
    """Times of both in turns: a b b a."""
    count = max(calls_for(mine, device), calls_for(other, device))
    times: tuple[list[float], list[float]] = ([], [])
    for which in turns(pairs):
        times[which].append((mine if which else other).sample(count))
    found = ratio(times[0], times[1])
    return {"seconds": median(times[1]), "baseline_seconds": median(times[0]), "speedup": found.speedup, "low": found.low, "high": found.high}


def peak_of(side: Side, device: torch.device) -> int:
    """Bytes beyond the inputs and the gradients of results that one forward and backward takes at most."""
    if device.type != "cuda":
        return 0
    side.once()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = side.once()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


def peak_in_place(kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> int | None:
    """Of a gate whose gradients take the places of what it was given; its inputs are spent."""
    if kernel not in KERNEL_OF.values():
        return None
    calls = inputs(kernel, shape, dtype, device)
    return peak_of(Side(kernel, lambda *given: kernel.call(*given, True), calls), device)


def copied_bytes_per_second(device: torch.device) -> float:
    """What moving a gibibyte reaches here, reading and writing counted."""
    source = torch.empty((1 << 30) if device.type == "cuda" else 1 << 22, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        settle([source])
        begun = time.perf_counter()
        target.copy_(source)
        settle([source])
        times.append(time.perf_counter() - begun)
    return 2 * source.numel() / median(times[2:])


# ---------------------------------------------------------------- launches


Calls = Sequence[tuple[list[Any], list[Tensor]]]


def best_launches(
    kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, device: torch.device, known: Mapping[str, int],
    more: Sequence[Mapping[str, int]],
) -> list[dict[str, Any]]:  # fmt: skip
    """Fastest first: those that were given, or those that are listed and then the best forward with the best backward."""
    calls = inputs(kernel, shape, dtype, device)
    found = swept(kernel, calls, device, more or launches_of(kernel, shape, known))
    if not more:
        both = joined(known, [one["config"] for one in found if one["seconds"]])
        if both not in [one["config"] for one in found]:
            found += swept(kernel, calls, device, [both])
    return sorted(found, key=lambda one: one["seconds"] or 1e9)


def swept(kernel: TrainingKernel, calls: Calls, device: torch.device, configs: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Every launch with its seconds, fastest first; one that cannot be launched says why."""
    found: list[dict[str, Any]] = []
    for config in configs:
        with measured.trying(kernel.name, config):
            side = Side(kernel, kernel.call, calls)
            try:
                count = calls_for(side, device)
                found.append({"config": dict(config), "seconds": median(side.sample(count) for _ in range(SWEEP_SAMPLES))})
            except Exception as error:
                found.append({"config": dict(config), "seconds": None, "problem": f"{type(error).__name__}: {error}"[:200]})
    return sorted(found, key=lambda one: one["seconds"] or 1e9)


# ---------------------------------------------------------------- rows


def row_of(
    kernel: TrainingKernel, shape: Mapping[str, int], dtype: torch.dtype, given: argparse.Namespace, more: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    device = torch.device(given.device)
    name = str(dtype).removeprefix("torch.")
    row: dict[str, Any] = {"kernel": kernel.name, "device": measured.device_name(device), "dtype": name, "shape": dict(shape), **about()}
    known = dict(measured.config(kernel, shape, device))
    tried = [{"config": known}]
    before = launch_before(row, read(given.out))
    if before:
        tried = [{"config": before}]
    elif given.sweep:
        row["swept"] = best_launches(kernel, shape, dtype, device, known, more)
        tried = [one for one in row["swept"] if one["seconds"]]
    for one in tried:
        row["config"] = {**known, **one["config"]}
        with measured.trying(kernel.name, row["config"]):
            row["wrong_by"] = wrong_by(kernel, shape, dtype, device)
        if row["wrong_by"] <= 1:
            break
    else:
        return {**row, "problem": "wrong"}
    row["floor_seconds"] = kernel.floor_bytes(shape, dtype.itemsize) / given.bandwidth
    calls = inputs(kernel, shape, dtype, device)
    row["baselines"] = {}
    with measured.trying(kernel.name, row["config"]):
        mine = Side(kernel, kernel.call, calls)
        row["peak_bytes"], row["peak_bytes_in_place"] = peak_of(mine, device), peak_in_place(kernel, shape, dtype, device)
        for label, make in baselines_of(kernel, compile=not given.no_compile, on_cpu=device.type == "cpu"):
            torch._dynamo.reset()
            try:
                other = Side(kernel, make(), inputs(kernel, shape, dtype, device) if label == LIGER_NAME else calls)
                row["baselines"][label] = {**beside(mine, other, given.pairs, device), "peak_bytes": peak_of(other, device)}
            except Exception as error:  # a baseline that does not run here is none
                row["baselines"][label] = {"problem": f"{type(error).__name__}: {error}"[:300]}
    ran = {label: one for label, one in row["baselines"].items() if "speedup" in one}
    if not ran:
        return {**row, "problem": "no baseline ran"}
    row |= state_of(device)
    best = min(ran, key=lambda label: ran[label]["speedup"])
    return {**row, "best": best, **{key: ran[best][key] for key in ("seconds", "baseline_seconds", "speedup", "low", "high")}}


def launch_before(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """That of a row that differs only in how many rows or tokens it has: more of the same programs."""

    def rest(one: Mapping[str, Any]) -> tuple[Any, ...]:
        sizes = {name: size for name, size in one["shape"].items() if name not in ("rows", "tokens")}
        return one["kernel"], one["device"], one["dtype"], sizes

    return next((dict(one["config"]) for one in rows if "swept" in one and "problem" not in one and rest(one) == rest(row)), None)


def state_of(device: torch.device) -> dict[str, int]:
    """What the device is at: read and never set."""
    if device.type != "cuda":
        return {}
    try:
        return {"megahertz": torch.cuda.clock_rate(), "celsius": torch.cuda.temperature(), "watts": torch.cuda.power_draw() // 1000}
    except Exception:  # whatever the driver's library says where it is not there
        return {}


def about() -> dict[str, str]:
    try:
        triton = __import__("triton").__version__
    except ImportError:
        triton = ""
    return {"torch": torch.__version__, "triton": triton, "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": os.environ.get("COMMIT", "")}


def key_of(kernel: str, dtype: str, shape: Mapping[str, int]) -> str:
    return json.dumps([kernel, dtype, dict(sorted(shape.items()))])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def asked(given: argparse.Namespace) -> Iterator[tuple[TrainingKernel, Mapping[str, int], torch.dtype]]:
    """First shapes of all kernels first, so that a run that is stopped has them."""
    some = [one for name, one in catalog.KERNELS.items() if not given.only or name in given.only]
    for place in range(max(len(one.measured_at) for one in some)):
        for kernel in some:
            for dtype in given.dtypes:
                if place < len(kernel.measured_at):
                    shape = kernel.measured_at[place]
                    if given.device == "cpu":
                        shape = {name: min(size, SMALL.get(name, 64)) for name, size in shape.items()}
                    yield kernel, shape, getattr(torch, dtype)


# ---------------------------------------------------------------- tables


def line_of(row: Mapping[str, Any]) -> str:
    where = " × ".join(str(size) for size in row["shape"].values())
    head = f"{row['kernel']:<16} {where:<18} {row['dtype']:<9}"
    if "problem" in row:
        return f"{head} {row['problem']}"
    others = "  ".join(f"{label} {one['baseline_seconds'] * 1e6:,.0f}" for label, one in row["baselines"].items() if "speedup" in one)
    memory = f"{row['peak_bytes'] / 2**20:,.0f} MiB" + (f" ({row['peak_bytes_in_place'] / 2**20:,.0f})" if row["peak_bytes_in_place"] else "")
    return (
        f"{head} {row['seconds'] * 1e6:,.0f} µs  floor {row['floor_seconds'] * 1e6:,.0f}  {row['speedup']:.3f}× "
        f"({row['low']:.3f} to {row['high']:.3f}) beside {row['best']}  {memory}  [{others}]"
    )


def toml_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table that `kernels/measured.py` reads."""

    def value(one: Any) -> str:
        if isinstance(one, Mapping):
            return "{ " + ", ".join(f"{name} = {size}" for name, size in one.items()) + " }"
        return json.dumps(one, ensure_ascii=False)

    lines = ["# Forward and backward of each kernel at its declared shapes, written by `benchmarks/kernels.py --rows`."]
    for row in rows:
        if "problem" in row:
            continue
        kept = {
            "kernel": row["kernel"], "device": row["device"], "dtype": row["dtype"], "shape": row["shape"], "config": row["config"],
            "seconds": row["seconds"], "floor_seconds": row["floor_seconds"],
            "baseline": row["best"], "baseline_seconds": row["baseline_seconds"], "speedup": row["speedup"],
            "low": row["low"], "high": row["high"], "peak_bytes": row["peak_bytes"],
            "baseline_peak_bytes": row["baselines"][row["best"]]["peak_bytes"],
            "source": f"torch {row['torch']}, Triton {row['triton'] or 'none'}, {row['date']}",
        }  # fmt: skip
        lines += ["", "[[row]]", *(f"{name} = {value(one)}" for name, one in kept.items())]
    return "\n".join(lines) + "\n"


def say_what_is_on(path: Path) -> None:
    found = measured.read(path)
    for kernel in catalog.KERNELS.values():
        for device, dtype in sorted({(one.device, one.dtype) for one in found if one.kernel == kernel.name}):
            on = [bucket.name for bucket in measured.on_by_default(kernel, device, getattr(torch, dtype), found)]
            print(f"{kernel.name:<16} {dtype:<9} {device}: {'on: ' + '; '.join(on) if on else 'off'}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="kernels")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no row after so many")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rows", type=Path, help="write the table of what is on, from all of FILE, and end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    for name in given.only:
        catalog.find(name)
    return given


def main() -> None:
    given = options()
    if given.rows:
        given.rows.write_text(toml_of(read(given.out)), encoding="utf-8")
        return say_what_is_on(given.rows)
    configs = [json.loads(line) for line in given.configs.read_text().splitlines() if line] if given.configs else []
    known = {key_of(row["kernel"], row["dtype"], row["shape"]) for row in read(given.out)}
    given.bandwidth = copied_bytes_per_second(torch.device(given.device))
    print(f"a copy moves {given.bandwidth / 1e12:.2f} TB/s", flush=True)
    begun = time.perf_counter()
    for kernel, shape, dtype in asked(given):
        key = key_of(kernel.name, str(dtype).removeprefix("torch."), shape)
        if key in known:
            continue
        if given.minutes and time.perf_counter() - begun > 60 * given.minutes:
            print("the minutes are over")
            return None
        mine = [one["config"] for one in configs if one["kernel"] == kernel.name]
        at = time.perf_counter()
        try:
            row = row_of(kernel, shape, dtype, given, mine)
        except Exception as error:
            row = {"kernel": kernel.name, "device": given.device, "dtype": str(dtype).removeprefix("torch."), "shape": dict(shape),
                   "problem": f"{type(error).__name__}: {error}"[:400], **about()}  # fmt: skip
        row |= {"bandwidth": given.bandwidth, "took_seconds": round(time.perf_counter() - at, 1)}
        known.add(key)
        with given.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(line_of(row), flush=True)
        gc.collect()
        if given.device != "cpu":
            torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
