"""How fast the host updates AdamW states, alone and while states move between it and the device.

    adamw           elements a second, gradients widened from bf16 run by run, as `runtime.offload.cpu` does
    adamw-beside    the same while copies go both ways
    duplex-beside   those copies, meanwhile

`python -m foretell.hardware.probe.updates [PROFILE.json]` measures these alone; with a profile, the rows are put into it.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from foretell.files import write_atomically
from foretell.hardware.profile import journal_path, load, save
from foretell.units import MIB

Found = dict[str, Any]
RUN = 4 * 2**20
"""Elements that are updated at a time, by all cores together."""
SPARE = 4
"""Cores left to everything else."""
ELEMENTS = {"quick": 32 * MIB, "full": 128 * MIB}
"""Updated in one round: their states are far larger than any cache."""
ROUNDS = 3
COPY_BYTES = 64 * MIB
TOUCHED = 34
"""Bytes that an element's update reads and writes: three states and the gradient in fp32, and bf16 both ways."""


class _States:
    """fp32 weights and moments, and gradients in bf16 that new weights take the place of."""

    def __init__(self, elements: int) -> None:
        self.master, self.first, self.second = (torch.zeros(elements) for _ in range(3))
        self.staged = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
        self.wide = torch.empty(min(RUN, elements))
        self.step = torch.tensor(1.0)

    def update(self) -> None:
        for begin in range(0, self.master.numel(), RUN):
            part = slice(begin, begin + RUN)
            master, staged = self.master[part], self.staged[part]
            grad = self.wide[: master.numel()]
            grad.copy_(staged)
            torch._fused_adamw_(
                [master], [grad], [self.first[part]], [self.second[part]], [], [self.step], lr=1e-4, beta1=0.9, beta2=0.999,
                weight_decay=1e-2, eps=1e-8, amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
            )  # fmt: skip
            staged.copy_(master)


def updates(kind: str, mode: str) -> Iterator[Found]:
    """Rows for a profile's copies."""
    states = _States(ELEMENTS[mode])
    before = torch.get_num_threads()
    threads = max(1, (os.cpu_count() or 1) - SPARE)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        pool.submit(states.update).result()
        torch.set_num_threads(before)  # the setting is each thread's own, and the default of threads to come
        yield _row("adamw", states, min(pool.submit(_clocked, states.update).result() for _ in range(ROUNDS)))
        if kind == "cuda":
            yield from _beside(states, pool)


def _clocked(work: Callable[[], None], times: int = 1) -> float:
    before = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - before) / times


def _beside(states: _States, pool: ThreadPoolExecutor) -> Iterator[Found]:
    """Copies are kept going for as long as the host updates."""
    up, down = (torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    here, there = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    marks: list[torch.cuda.Event] = []

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            here.copy_(up, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            down.copy_(there, non_blocking=True)
            marks.append(torch.cuda.Event())
            marks[-1].record()

    both()
    torch.cuda.synchronize()
    marks.clear()
    work = pool.submit(_clocked, states.update, ROUNDS)
    began = time.perf_counter()
    copied = 0
    while not work.done():
        both()
        copied += 1
        if len(marks) > 4:
            marks.pop(0).synchronize()
    torch.cuda.synchronize()
    spent = time.perf_counter() - began
    yield _row("adamw-beside", states, work.result())
    yield {"name": "duplex-beside", "bytes": 2 * copied * COPY_BYTES, "seconds": float(f"{spent:.4g}")}


def _row(name: str, states: _States, seconds: float) -> Found:
    elements = states.master.numel()
    return {"name": name, "elements": elements, "bytes": elements * TOUCHED, "seconds": float(f"{seconds:.4g}")}


def attach(path: Path, rows: tuple[Found, ...]) -> list[Path]:
    """Put rows into a profile, and into the journal beside it, in the place of older ones."""
    profile = load(path)
    names = {str(row["name"]) for row in rows}
    kept = tuple(row for row in profile.copies if row["name"] not in names)
    written = [save(replace(profile, copies=(*kept, *rows)), path)]
    journal = journal_path(path).with_suffix(".jsonl.gz")
    if journal.is_file():
        lines = gzip.decompress(journal.read_bytes()).decode().splitlines()
        old = [line for line in lines if not any(f'"name":"{name}"' in line for name in names)]
        new = [json.dumps(["copy", 0.0, row], separators=(",", ":")) for row in rows]
        write_atomically(journal, gzip.compress("".join(f"{line}\n" for line in (*old, *new)).encode(), mtime=0))
        written.append(journal)
    return written


def main(arguments: list[str]) -> None:
    """Measure, tell, and put the rows into a profile if one is named."""
    rows = tuple(updates("cuda" if torch.cuda.is_available() else "cpu", "full"))
    for row in rows:
        rate = row["elements"] / row["seconds"] / 1e9 if "elements" in row else row["bytes"] / 2 / row["seconds"] / 1e9
        what = "G parameters/s" if "elements" in row else "GB/s each way"
        sys.stdout.write(f"{row['name']:<14} {rate:.2f} {what} {json.dumps(row)}\n")
    for path in attach(Path(arguments[0]), rows) if arguments else ():
        sys.stdout.write(f"written to {path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
