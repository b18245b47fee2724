"""What benchmarks/plans.py runs: plans for real, through foretell's own runtime, timed."""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WARM = 2
TIMED_SECONDS, LEAST, MOST = 0.8, 3, 12
"""Steps that are timed: as many as fit into these seconds, between least and most."""
WAVE = 8
"""Compiled plans that are compiled side by side; each is timed alone."""
READY_SECONDS, ANSWER_SECONDS = 240, 120


# ---------------------------------------------------------------------------------------------- on a GPU


def run_case(rows: Sequence[dict[str, Any]], keep: Callable[[dict[str, Any], dict[str, Any]], None], until: float) -> None:
    """Plans of one case, one after another in this process."""
    for row in rows:
        if time.monotonic() > until:
            return
        keep(row, attempt(row))


def attempt(row: dict[str, Any], gate: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Seconds and peaks of a plan under its limit, or that it ran out of memory."""
    import torch

    began = time.perf_counter()
    try:
        found = {"ran": True, **_timed(row, gate)}
    except torch.OutOfMemoryError as error:
        found = {"ran": False, "why": str(error)[:160]}
    except Exception as error:  # libraries that are refused memory say so in their own words
        refused = any(word in str(error).lower() for word in ("out of memory", "alloc_failed", "not_enough"))
        found = {"ran": False, "why": str(error)[:160]} if refused else {"error": f"{type(error).__name__}: {error}"[:300]}
    _clear()
    return {**found, "left_bytes": torch.cuda.memory_reserved(), "took_seconds": round(time.perf_counter() - began, 2)}


def _clear() -> None:
    """Nothing of one plan stays for the next."""
    import torch

    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    with suppress(AttributeError):
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _timed(row: dict[str, Any], gate: Callable[[], None]) -> dict[str, Any]:
    import torch
    from steps import gpu_alone

    torch.cuda.set_per_process_memory_fraction(min(1.0, row["cap"] / torch.cuda.get_device_properties(0).total_memory))
    torch.cuda.reset_peak_memory_stats()
    one = _job(row["plan"], "cuda")
    for _ in range(WARM):
        one()
    torch.cuda.synchronize()
    gate()
    with gpu_alone():
        began = time.perf_counter()
        one()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        count = max(LEAST, min(MOST, int(TIMED_SECONDS / first)))
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            one()
            mark.record()
        marks[-1].synchronize()
    each = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
    return {
        "seconds": statistics.median(each), "steps": count, "spread": round((max(each) - min(each)) / statistics.median(each), 4),
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
    }  # fmt: skip


def _job(said: dict[str, Any], kind: str) -> Callable[[], Any]:
    """One optimizer step of a plan as `foretell run` takes it, always on the same batch."""
    import torch

    from foretell.plan import file
    from foretell.plan.recipe import source_of
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start
    from foretell.trace.load.model import load

    plan = file.from_json(said)
    torch.manual_seed(0)
    with torch.device(kind):  # weights are drawn there
        workload = load(source_of(plan))
    job = apply(workload, plan, start(plan, device=kind))
    batches = [workload.batch] * plan.accumulate
    return lambda: job.train_step(batches)


def run_wave(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Compiled plans: compiled side by side in processes of their own, timed one after another when all are ready."""
    folder = Path(tempfile.mkdtemp())
    running = []
    for number, row in enumerate(rows):
        asked = folder / f"{number}.asked"
        asked.write_text(json.dumps(row))
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        command = [sys.executable, str(HERE / "plans.py"), "--one", str(asked)]
        running.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    began = time.monotonic()
    while time.monotonic() - began < READY_SECONDS:
        if all((folder / f"{n}.ready").exists() or p.poll() is not None for n, p in enumerate(running)):
            break
        time.sleep(0.2)
    (folder / "go").touch()
    found = []
    for number, (row, process) in enumerate(zip(rows, running, strict=True)):
        try:
            process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        answer = folder / f"{number}.json"
        found.append((row, json.loads(answer.read_text()) if answer.exists() else {"error": "no answer"}))
    return found


def one(asked: Path) -> None:
    """One compiled plan, in this process."""

    def gate() -> None:
        asked.with_suffix(".ready").touch()
        began = time.monotonic()
        while time.monotonic() - began < READY_SECONDS and not (asked.parent / "go").exists():
            time.sleep(0.1)

    asked.with_suffix(".json").write_text(json.dumps(attempt(json.loads(asked.read_text()), gate)))


# ---------------------------------------------------------------------------------------------- on a CPU


class OnCpu:
    """Plans on gloo ranks of this machine, all of them in turns, so that who else is busy slows all alike."""

    def __init__(self) -> None:
        from foretell.runtime.process.pool import Pool

        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a thread that spins keeps others from the cores
        self.pool = Pool(largest=4, preload=["foretell.runtime.parallel.apply"])

    def attempt(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        from foretell.plan import file
        from foretell.runtime.process.pool import RankFailure

        world = file.from_json(row["plan"]).mesh.world
        try:
            answers = self.pool.ranks(world).run(on_rank, row["plan"], seconds, timeout_s=180)
        except RankFailure as failure:
            return {"error": str(failure).strip().splitlines()[-1][:300]}
        host = sum(answer["host"] for answer in answers)
        return {"ran": host <= row["cap"], "each": answers[0]["each"], "host": host}

    def close(self) -> None:
        self.pool.close()


def on_rank(rank: int, world: int, said: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Seconds of steps and peak resident bytes of one rank; all ranks take as many steps."""
    import torch
    import torch.distributed as dist

    from foretell.runtime.observe.measure import _host_peak

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of earlier plans
    step = _job(said, "cpu")
    step()
    began = time.perf_counter()
    step()
    count = torch.tensor([max(3, min(40, int(seconds / (time.perf_counter() - began))))])
    if world > 1:
        dist.all_reduce(count, dist.ReduceOp.MIN)
    each = []
    for _ in range(int(count)):
        before = time.perf_counter()
        step()
        each.append(time.perf_counter() - before)
    return {"each": each, "host": _host_peak()}
