"""What watching costs, inside one process: blocks of steps with the hooks and without them, in turn (`watch.py --part overhead`).

Every script is started under `foretell watch` and stops where its first optimizer is made; once all have, they compute one after the
other, with nothing else going on. Two blocks make a pair, in random order; intervals are those of a bootstrap over pairs. Where the host
is what a step waits for, steps differ by more than the hooks cost: `inside_percent` is the host's time inside of them, timed by itself."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watch import Bench, Case

ROOT = Path(__file__).resolve().parents[1]
RESAMPLES = 4000
READY_SECONDS = 120.0
Pair = tuple[float, float]
"""Seconds of a step with the hooks, and without."""


def overhead(bench: Bench, cases: Sequence[Case]) -> None:
    """All start together on a GPU, where memory is enough for it; on a CPU one by one."""
    together = 1 if bench.cpu else 8
    for first in range(0, len(cases), together):
        some = cases[first : first + together]
        with ThreadPoolExecutor(len(some)) as pool:
            jobs = {case.name: pool.submit(_start, bench, case) for case in some}
            _until(lambda jobs=jobs, some=some: all(_file(bench, case).with_suffix(".ready").exists() or jobs[case.name].done() for case in some))
            for case in some:
                _turn(bench, case, jobs[case.name])


def _file(bench: Bench, case: Case) -> Path:
    return bench.scratch / f"blocks-{case.name}.json"


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + READY_SECONDS
    while not ready() and time.monotonic() < end:
        time.sleep(0.1)


def _start(bench: Bench, case: Case) -> dict[str, Any]:
    paths = os.pathsep.join((str(ROOT / "benchmarks" / "watch_scripts" / "blocks"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    seconds = 4.0 if bench.quick else bench.given.case_seconds
    more = {"BENCH_TIMES": str(_file(bench, case)), "BENCH_SECONDS": str(seconds), "BENCH_SCRIPT": case.script, "PYTHONPATH": paths}
    words = bench.watched(bench.words(case), bench.scratch / f"run-{case.name}", "--predict", "no")
    rc, errors, _ = bench.run(words, 2 * READY_SECONDS + 3 * seconds * 8, **more)
    return {"rc": rc, "stderr": errors}


def _turn(bench: Bench, case: Case, job: Future[dict[str, Any]]) -> None:
    file = _file(bench, case)
    file.with_suffix(".go").touch()
    done = job.result()
    content: dict[str, Any] = {"part": "overhead", "case": case.name, "script": case.script}
    if not file.exists():
        bench.row(**content, failed=done["stderr"][-600:])
        return
    found = json.loads(file.read_text())
    bench.row(**content, **figures(found["blocks"], found["block_steps"], found["inside"]))


def figures(blocks: Sequence[tuple[bool, float]], steps: int, inside: tuple[int, float]) -> dict[str, Any]:
    pairs = pairs_of(blocks)
    if not pairs:
        return {"failed": "the script ended before a pair of blocks did"}
    with_it, without = [a for a, _ in pairs], [b for _, b in pairs]
    seconds = sum(with_it) * steps
    return {
        "pairs": len(pairs), "block_steps": steps, "steps": len(pairs) * 2 * steps,
        "watched_seconds": statistics.median(with_it), "plain_seconds": statistics.median(without),
        "difference_percent": round(_typical(pairs), 3), "interval_percent": interval(pairs, _typical),
        "mean_difference_percent": round(_mean(pairs), 3), "mean_interval_percent": interval(pairs, _mean),
        "inside_percent": round(100 * inside[1] / seconds, 3), "inside_seconds_per_step": inside[1] / (len(pairs) * steps),
    }  # fmt: skip


def pairs_of(blocks: Sequence[tuple[bool, float]]) -> list[Pair]:
    found = []
    for first, second in zip(blocks[::2], blocks[1::2], strict=False):
        found.append((first[1], second[1]) if first[0] else (second[1], first[1]))
    return found


def _typical(pairs: Sequence[Pair]) -> float:
    """Percent; the median of differences within pairs: what a step costs, without what is done once a second."""
    return 100 * statistics.median(a - b for a, b in pairs) / statistics.median(b for _, b in pairs)


def _mean(pairs: Sequence[Pair]) -> float:
    """Percent, of everything: also what a machine does now and then."""
    return 100 * (sum(a for a, _ in pairs) / sum(b for _, b in pairs) - 1)


def interval(pairs: Sequence[Pair], figure: Callable[[Sequence[Pair]], float]) -> list[float]:
    """Of 95 %, over pairs drawn anew."""
    drawn = random.Random(1)
    found = sorted(figure(drawn.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return [round(found[int(share * RESAMPLES)], 3) for share in (0.025, 0.975)]
