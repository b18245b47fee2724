"""How fast the kernels of published papers are beside what they replace, and how far off they are.

    python benchmarks/kernels_papers.py                         every kernel, on the GPU at hand or else on the CPU
    python benchmarks/kernels_papers.py --only bleu recurrent   some of them
    python benchmarks/kernels_papers.py --device cpu --small    a dry run in seconds, with small sizes
    python benchmarks/kernels_papers.py --out FILE              rows are appended here; cases that it has already are left out
    python benchmarks/kernels_papers.py --told                  the rows of the file, one line each

Programs that are compared take turns; a ratio is the median over pairs with the interval that resampling them gives. Each row has what was
compared, seconds of each, the largest error against the reference, and on a GPU the bytes at the peak.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import kernels_papers_cases as cases  # noqa: E402
from kernels_papers_cases import Case  # noqa: E402
from memory import append, done_keys, machine  # noqa: E402

from foretell.tune.clock.statistics import ratio, turns  # noqa: E402

OUT = HERE / "results" / "kernels_papers.jsonl"
FLUSH_BYTES = 256 << 20
"""Written between runs on a GPU, so that no input is in its cache."""
LEAST_PAIRS, MOST_PAIRS = 5, 60


@dataclass
class Clock:
    """Seconds of one call, on whichever device."""

    device: str

    def __post_init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if self.device == "cuda" else None

    def seconds(self, call: Callable[[], Any]) -> float:
        if self.flush is None:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        self.flush.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def peak(self, call: Callable[[], Any]) -> int | None:
        """Bytes above what was there before."""
        if self.flush is None:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def compared(clock: Clock, case: Case, budget: float) -> dict[str, Any]:
    """Seconds of each program and its ratio to ours."""
    row: dict[str, Any] = {"seconds": {}, "speedup": {}, "peak_bytes": {"ours": clock.peak(case.ours)}}
    for _ in range(2):
        first = clock.seconds(case.ours)
    for name, call in case.others.items():
        clock.seconds(call)
        other = clock.seconds(call)
        pairs = max(LEAST_PAIRS, min(MOST_PAIRS, int(budget / (first + other))))
        if other > budget / 2:  # a slow program needs no many pairs to lose
            pairs = 1
        taken: tuple[list[float], list[float]] = ([], [])
        for ours in turns(pairs):
            taken[ours].append(clock.seconds(case.ours if ours else call))
        found = ratio(taken[0], taken[1])
        row["seconds"][name] = sorted(taken[0])[len(taken[0]) // 2]
        row["seconds"]["ours"] = sorted(taken[1])[len(taken[1]) // 2]
        row["speedup"][name] = [round(one, 3) for one in (found.speedup, found.low, found.high)]
        row["peak_bytes"][name] = clock.peak(call)
    if not case.others:
        row["seconds"]["ours"] = first
    return row


def described(row: dict[str, Any]) -> str:
    ratios = ", ".join(f"{value[0]:.2f}x {name}" for name, value in row.get("speedup", {}).items())
    taken = row.get("seconds", {}).get("ours")
    parts = [f"{row['key']:44s}", f"{taken * 1e3:10.3f} ms" if taken else "", ratios, f"error {row['error']:.1e}" if "error" in row else ""]
    more = ", ".join(f"{key} {value}" for key, value in row.get("facts", {}).items())
    return "  ".join(part for part in (*parts, more, row.get("failed", "")) if part)


def run(names: list[str], device: str, small: bool, out: Path | None, budget: float) -> Iterator[dict[str, Any]]:
    about = machine()
    if device == "cpu":
        about["device"] = "cpu"
    known = done_keys(out) if out else set()
    clock = Clock(device)
    for name in names:
        for case in cases.KERNELS[name](device, small):
            key = f"{name}/{case.name}/{device}" + ("/small" if small else "")
            if key in known:
                continue
            row: dict[str, Any] = {"key": key, "kernel": name, "threads": torch.get_num_threads(), **about}
            try:
                if case.error is not None:
                    row["error"] = float(case.error())
                row |= compared(clock, case, budget)
                row["facts"] = case.facts(row["seconds"]) if case.facts else {}
            except Exception as error:  # the next case can still tell something
                row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            if out:
                append(out, row)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(cases.KERNELS), default=list(cases.KERNELS), metavar="KERNEL")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="sizes of a dry run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each comparison")
    parser.add_argument("--told", action="store_true", help="print what the file has")
    options = parser.parse_args()
    if options.told:
        import json

        for line in (options.out or OUT).read_text().splitlines():
            print(described(json.loads(line)))
        return
    for row in run(options.only, options.device, options.small, options.out, options.seconds):
        print(described(row), flush=True)


if __name__ == "__main__":
    main()
