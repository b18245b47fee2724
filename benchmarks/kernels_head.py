"""Output layer with cross entropy, AdamW and mixtures of experts beside what torch has: seconds, peak memory and error.

    python benchmarks/kernels_head.py --out FILE [--only NAME ...] [--configs FILE] [--tuned] [--rounds N]
        [--minutes N] [--device cpu]

A row of JSON for each way of each shape as it is done; what FILE has already is left out, so a run that was stopped goes on. The ways of
a shape take turns, round by round, forwards and backwards, and each is compared with the others pair by pair. `--configs` has lines of
{"kernel": ..., "label": ..., "call": {...}, "launch": {...}}, tried in place of those below. On a CPU shapes are small and
torch.compile makes no code: it shows that the script runs, and nothing it says is a measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from kernels_head_ways import Job, jobs_of

from foretell.kernels import adamw, catalog, linear_cross_entropy, measured, moe
from foretell.tune.clock.statistics import ratio

KERNELS = {one.name: one for one in (linear_cross_entropy.KERNEL, adamw.KERNEL, moe.KERNEL)}
catalog.KERNELS.update({name: one for name, one in KERNELS.items() if name not in catalog.KERNELS})
WARM = 3
ERROR_TIMES, UNITS = 2.0, 4.0
"""An error may be so many times that of the first way, with so many units in the last place at the least."""


@dataclass
class Turn:
    """A way that runs, and its times."""

    label: str
    run: Callable[[], Any]
    launch: Mapping[str, int]
    kernel: str
    seconds: list[float] = field(default_factory=list)

    def once(self) -> Any:
        with measured.trying(self.kernel, self.launch):
            return self.run()


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(turn: Turn, device: torch.device) -> float:
    settle(device)
    begun = time.perf_counter()
    turn.once()
    settle(device)
    return time.perf_counter() - begun


def peak_of(turn: Turn, device: torch.device) -> int:
    """Bytes beyond what was there before; gradients that stay are among them."""
    turn.once()
    if device.type != "cuda":
        return 0
    gc.collect()
    settle(device)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    turn.once()
    settle(device)
    return torch.cuda.max_memory_allocated() - before


def floors(device: torch.device) -> dict[str, float]:
    """What a copy and a large product reach here, now."""
    size = 1 << (30 if device.type == "cuda" else 20)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, n = torch.empty_like(source), 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    found: dict[str, list[float]] = {"copy": [], "product": []}
    for _ in range(8):
        for name, run in (("copy", lambda: target.copy_(source)), ("product", lambda: torch.mm(a, b))):
            found[name].append(timed(Turn(name, run, {}, ""), device))
    return {"bytes_per_second": 2 * size / median(found["copy"][2:]), "flops_per_second": 2 * n**3 / median(found["product"][2:])}


def wrong_by(job: Job) -> dict[str, float]:
    """Error of each way over what is allowed, on a small shape of the same kind: above 1 it is wrong."""
    oracle, found = job.check()
    allowed: list[float] = []
    told: dict[str, float] = {}
    for label, made in found.items():
        if isinstance(made, str):
            continue
        gaps = [float((one.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)) for one, true in zip(made, oracle, strict=True)]
        allowed = allowed or [ERROR_TIMES * gap + UNITS * torch.finfo(job.dtype).eps for gap in gaps]
        told[label] = max(gap / limit for gap, limit in zip(gaps, allowed, strict=True))
    return told


def rows_of(job: Job, given: argparse.Namespace, skip: set[str], ends: float) -> list[dict[str, Any]]:
    """Every way of one shape that has no row yet."""
    device = torch.device(given.device)
    head = {"kernel": job.kernel, "what": job.what, "shape": dict(job.shape), "dtype": str(job.dtype).removeprefix("torch."), **about(given)}
    rows, turns = [], []
    wrong = wrong_by(job)
    for way in job.ways:
        if way.label in skip:
            continue
        try:
            torch._dynamo.reset()
            turn = Turn(way.label, way.make(), way.launch, job.kernel)
            for _ in range(WARM):
                turn.once()
            turns.append((turn, peak_of(turn, device)))
        except Exception as error:  # a way that does not run here is none
            rows.append({**head, "label": way.label, "ours": way.ours, "problem": f"{type(error).__name__}: {error}"[:300]})
        gc.collect()
    for number in range(given.rounds):
        for turn, _ in turns if number % 2 == 0 else turns[::-1]:
            turn.seconds.append(timed(turn, device))
        if time.monotonic() > ends and number >= 2:
            break
    others = [turn for turn, _ in turns if not job.ours(turn.label)]
    for turn, peak in turns:
        best = min((one for one in others if one is not turn), key=lambda one: median(one.seconds), default=None)
        compared = ratio(best.seconds, turn.seconds) if best is not None else None
        rows.append({
            **head, "label": turn.label, "ours": job.ours(turn.label), "launch": dict(turn.launch), "seconds": median(turn.seconds),
            "fastest": min(turn.seconds), "rounds": len(turn.seconds), "peak_bytes": peak, "wrong_by": wrong.get(turn.label.split(" · ")[0]),
            **({"best": best.label, "speedup": compared.speedup, "low": compared.low, "high": compared.high} if compared and best else {}),
        })  # fmt: skip
    return rows


def about(given: argparse.Namespace) -> dict[str, Any]:
    triton = None
    if given.device == "cuda":
        triton = __import__("triton").__version__
    return {"device": measured.device_name(torch.device(given.device)), "torch": torch.__version__, "triton": triton,
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": os.environ.get("COMMIT", "")}  # fmt: skip


def done(path: Path) -> dict[str, set[str]]:
    """Job → labels that have a row."""
    found: dict[str, set[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "label" in row:
            found.setdefault(f"{row['kernel']} {row['what']} {row['shape']}", set()).add(row["label"])
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--only", nargs="*", default=[], choices=sorted(KERNELS))
    asked.add_argument("--configs", type=Path)
    asked.add_argument("--tuned", action="store_true", help="max-autotune-no-cudagraphs too, which takes minutes to compile")
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--minutes", type=float, default=60.0)
    given = asked.parse_args()
    ends, known = time.monotonic() + 60 * given.minutes, done(given.out)
    more = [json.loads(line) for line in given.configs.read_text().splitlines() if line.strip()] if given.configs else []
    device = torch.device(given.device)

    def tell(row: Mapping[str, Any]) -> None:
        with given.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")

    tell({"floors": floors(device), **about(given)})
    for job in jobs_of(device, more, given.tuned):
        if given.only and job.kernel not in given.only:
            continue
        if time.monotonic() > ends:
            print("out of minutes; the same command goes on")
            return
        print(f"{job.kernel} {job.what} {dict(job.shape)}")
        for row in rows_of(job, given, known.get(f"{job.kernel} {job.what} {dict(job.shape)}", set()), ends):
            tell(row)
            said = row.get("problem") or f"{row['seconds'] * 1e3:9.3f} ms {row['peak_bytes'] / 2**30:6.2f} GiB  error {row['wrong_by'] or 0:.2f}"
            print(f"  {row['label']:<44} {said}  {row.get('speedup', 0):.3f}x of {row.get('best', '')}", flush=True)
        job.free()
        gc.collect()


if __name__ == "__main__":
    main()
