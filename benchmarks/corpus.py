"""A corpus of training steps of many model families on one H200: half of the families to fit laws on, the other half sealed.

    python benchmarks/corpus.py --forecast                 no GPU: draw rows (corpus_draw.py), predict them for an H200 and seal them
    python benchmarks/corpus.py --measure --out rows.jsonl run rows here; those that the file or --done FILE has are left out
    python benchmarks/corpus.py --measure --device cpu --tiny --out rows.jsonl   a few rows, made small, for trying it out
    python benchmarks/corpus.py --measure --workers 1 --keys FILE --out rows.jsonl   these rows again, nothing else running beside them
    python benchmarks/corpus.py --tell --out rows.jsonl    the sealed forecast beside what was measured, both halves apart
    python benchmarks/corpus.py --again new.jsonl          predict the sealed configurations with the code as it is now

The forecast (sealed/corpus-h200.jsonl) starts with a line that holds the SHA-256 of the rows below it; a row says which half its
family is in (`fit` or `sealed`). Eager rows run in a few processes that take one row after another, so that what takes seconds (a
CUDA context, its libraries) is paid once for many: they are built side by side and timed alone. A process whose memory is not
empty after a row, or that met an error of the device, is replaced. Compiled rows come last, each in a process of its own. Every row
is written as soon as it is measured; --limit-seconds starts no row that would not be done in time.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import unseen  # noqa: E402
from bands_rows import family_of  # noqa: E402
from memory import done_keys, key_of, machine  # noqa: E402
from zoo import GIB, rows_of, seal_of  # noqa: E402

SEALED = HERE / "sealed" / "corpus-h200.jsonl"
WORKERS = 4
LONGEST = 75
"""Seconds after which a row that hangs is given up with its process."""
COMPILING = 75
"""Seconds before the limit from which on no compiled row is started."""
TIMED_STEPS = 12
TINY = ("python_lstm", "embedding_bags", "text_cnn", "pooled_graph", "kalman_filter", "maml", "sparse_coding")


# ---------------------------------------------------------------------------------------------- the forecast


def with_halves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from corpus_draw import half_of

    families = [family_of(row["config"]["model"]) for row in rows]
    return [{**row, "family": family, "half": half_of(family)} for row, family in zip(rows, families, strict=True)]


# ---------------------------------------------------------------------------------------------- the measurement


def freshen(cuda: bool) -> bool:
    """Give back what a row has left; whether the process is as good as a new one."""
    import torch

    gc.collect()
    if not cuda or not torch.cuda.is_initialized():
        return True
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() == 0 and torch.cuda.memory_reserved() == 0


def one_row(config: dict[str, Any], device: str) -> dict[str, Any]:
    try:
        return unseen.really(config, device) | reading(device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def reading(device: str) -> dict[str, float]:
    """How quick this host is now: microseconds of a small op that is asked for, and of a turn of a loop in Python; the middle of nine."""
    import torch

    x = torch.zeros(8, device=device)
    ops, turns = [], []
    for _ in range(9):
        begun = time.perf_counter()
        for _ in range(100):
            x.add_(1)
        ops.append((time.perf_counter() - begun) / 100)
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for n in range(5000):
            x.n = n  # type: ignore[attr-defined]
        turns.append((time.perf_counter() - begun) / 5000)
    return {"op_us": round(sorted(ops)[4] * 1e6, 3), "turn_us": round(sorted(turns)[4] * 1e6, 4)}


Do = Callable[[dict[str, Any], str], dict[str, Any]]
"""What is done with a configuration on a device."""


class Worker:
    """A process on cores of its own that runs rows one after another."""

    def __init__(self, slot: int, slots: int, device: str, do: Do = one_row) -> None:
        context = multiprocessing.get_context("fork")
        self.slot, self.slots, self.device = slot, slots, device
        self.pipe, theirs = context.Pipe()
        self.row: dict[str, Any] | None = None
        self.begun = time.monotonic()
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[slot::slots] if len(cores) >= 2 * slots else cores

        def work() -> None:
            import warnings

            warnings.simplefilter("ignore")
            self.pipe.close()
            os.sched_setaffinity(0, mine)
            good = True
            while good:
                try:
                    config = theirs.recv()
                except EOFError:
                    break
                found = do(config, device)
                try:
                    good = freshen(device == "cuda")
                except Exception:  # an error of the device: it comes again whatever is asked
                    good = False
                theirs.send((found, good))
            theirs.close()
            os._exit(0)

        self.process = context.Process(target=work, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def memory(self) -> int:
        return GIB + (self.row["predicted"].get("reserved", unseen.UNKNOWN) if self.row else 0)

    @property
    def late(self) -> bool:
        return self.row is not None and time.monotonic() - self.begun > LONGEST

    def take(self, row: dict[str, Any]) -> None:
        self.row, self.begun = row, time.monotonic()
        self.pipe.send(row["config"])

    def answer(self) -> tuple[dict[str, Any], bool]:
        """What was found, and whether the process can take another row."""
        if not self.pipe.poll():
            return {"error": f"no answer in {LONGEST} s"}, False
        try:
            found, good = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            return {"error": f"the process ended with {self.process.exitcode} and no answer"}, False
        return found, good

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(10)


def measure(
    path: Path, out: Path, device: str, seconds: float, done: list[Path], limit: int, only: str, tiny: bool, keys: Path | None = None,
    slots: int = WORKERS,
) -> None:
    """Eager rows by workers, in the order of the forecast as far as memory lets them run side by side; then the compiled ones."""
    unseen.warm_up()
    _warm_up()
    unseen.TIMED_STEPS = TIMED_STEPS
    begun = time.monotonic()
    known = set().union(*(done_keys(one) for one in (out, *done)))
    rows = [row for row in rows_of(path) if row["key"] not in known and only in row["config"]["model"]]
    if keys is not None:
        asked = json.loads(keys.read_text())
        rows = sorted((row for row in rows if row["key"] in asked), key=lambda row: asked.index(row["key"]))
    eager = [row for row in rows if row["config"]["mode"] == "eager"]
    if tiny:
        eager = [small(row) for row in eager if row["config"]["model"].rpartition(":")[2] in TINY]
    about = machine() | {"forecast": seal_of(path), "on": device}
    left = by_workers(eager[: limit or None], out, about, device, begun, seconds, slots)
    over = seconds - (time.monotonic() - begun) - COMPILING
    if left or tiny or over <= 0 or len(eager) == len(rows):
        print(f"{left} eager and {sum(row['config']['mode'] != 'eager' for row in rows)} compiled rows left", flush=True)
        return
    unseen.measure(path, out, device, over, done, limit, only)


def _warm_up() -> None:
    """What rows import besides, before anything forks."""
    import importlib

    for name in ("cases", "zoo_run"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def by_workers(
    rows: list[dict[str, Any]], out: Path, about: dict[str, str], device: str, begun: float, seconds: float, slots: int = WORKERS,
    do: Do = one_row, keep: Callable[..., None] = unseen._keep,
) -> int:
    """How many rows were left when time was up."""
    slots = slots if device == "cuda" else 1
    workers = [Worker(slot, slots, device, do) for slot in range(slots)]
    rows = list(rows)
    print(f"{len(rows)} eager rows to run", flush=True)
    try:
        while rows or any(worker.row for worker in workers):
            up = time.monotonic() - begun > seconds
            if up and not any(worker.row for worker in workers):
                break
            for worker in workers:
                row = None if up or worker.row else _fitting(rows, workers)
                if row is not None:
                    rows.remove(row)
                    worker.take(row)
            wait([worker.pipe for worker in workers if worker.row], timeout=0.5)
            for worker in list(workers):
                if worker.row and (worker.pipe.poll() or worker.late):
                    found, good = worker.answer()
                    keep(out, worker.row, about, found, time.monotonic() - begun)
                    worker.row = None
                    if not good:
                        worker.stop()
                        workers[workers.index(worker)] = Worker(worker.slot, slots, device, do)
                        for other in workers:  # they may have waited for the device that this one held
                            other.begun = time.monotonic()
    finally:
        for worker in workers:
            worker.stop()
    return len(rows)


def _fitting(rows: list[dict[str, Any]], workers: list[Worker]) -> dict[str, Any] | None:
    """The next row that fits beside those which run; any where none does."""
    free = unseen.MEMORY - sum(worker.memory for worker in workers)
    alone = not any(worker.row for worker in workers)
    for row in rows:
        if alone or row["predicted"].get("reserved", unseen.UNKNOWN) <= free:
            return row
    return None


def small(row: dict[str, Any]) -> dict[str, Any]:
    """A row for trying the measurement out on a CPU."""
    config = {
        **row["config"],
        "micro_batch": 4,
        "seq": row["config"]["seq"] and 64,
        "overrides": {},
        "optimizer": "adamw",
    }
    return {**row, "key": key_of(config), "config": config, "name": "small " + row["name"]}


# ---------------------------------------------------------------------------------------------- the table


def tell(path: Path, out: Path) -> None:
    """unseen.py's table for each half."""
    import tempfile

    from zoo import write_sealed

    seal = seal_of(path)
    for half in ("fit", "sealed"):
        with tempfile.TemporaryDirectory() as folder:
            part, measured = Path(folder) / "part.jsonl", Path(folder) / "measured.jsonl"
            write_sealed(part, [row for row in rows_of(path) if row["half"] == half])
            kept = [{**row, "forecast": seal_of(part)} for row in rows_of(out) if row.get("forecast") == seal]
            measured.write_text("".join(json.dumps(row) + "\n" for row in kept))
            print(f"--- {half}")
            unseen.tell(part, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--forecast", action="store_true", help="draw, predict and seal; no GPU")
    what.add_argument("--measure", action="store_true", help="really run the rows of the forecast")
    what.add_argument("--tell", action="store_true", help="the forecast beside what was measured")
    what.add_argument("--again", type=Path, help="predict the sealed configurations with today's code, into this file")
    parser.add_argument("--forecast-file", type=Path, default=SEALED)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "corpus.jsonl", help="measured rows")
    parser.add_argument(
        "--done", type=Path, action="append", default=[], help="a file of rows that need no measurement"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes side by side; 1: a row is built and timed alone")
    parser.add_argument("--keys", type=Path, help="a JSON list of the keys of the rows to run, in that order")
    parser.add_argument("--model", default="", help="rows whose model has this in its name")
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=1e9,
        help="start no new row after this long; no compiled one 75 s before it",
    )
    parser.add_argument(
        "--journal", type=Path, help="where predictions go one by one, so that a forecast that was stopped resumes"
    )
    parser.add_argument("--limit", type=int, default=0, help="so many rows at most")
    parser.add_argument("--tiny", action="store_true", help="a few rows, made small")
    options = parser.parse_args()
    if options.forecast:
        from corpus_draw import rows

        unseen.forecast(options.forecast_file, options.limit, options.journal, rows, with_halves)
    elif options.again:
        found = with_halves(
            unseen.predicted_rows([row["config"] for row in rows_of(options.forecast_file)], options.journal)
        )
        options.again.write_text("".join(json.dumps(row) + "\n" for row in found))
    elif options.measure:
        measure(
            options.forecast_file,
            options.out,
            options.device,
            options.limit_seconds,
            options.done,
            options.limit,
            options.model,
            options.tiny,
            options.keys,
            options.workers,
        )
    else:
        tell(options.forecast_file, options.out)


if __name__ == "__main__":
    main()
