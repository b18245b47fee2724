"""What scripts that measure the serving engine share: rows that are kept, models of random weights, loads by the wall clock."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from models.serve_shapes import SHAPES, build  # noqa: E402

MODEL = f"{HERE}/models/serve_shapes.py:build"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Rows:
    """What was measured, kept as soon as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, **key: Any) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.known)

    def add(self, **row: Any) -> None:
        self.known.append(row)
        about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "device": device_name()}
        with self.path.open("a") as file:
            file.write(json.dumps({**row, **about}) + "\n")
        print(json.dumps(row), flush=True)


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device_name() -> str:
    return torch.cuda.get_device_name() if on_gpu() else "cpu"


def finished() -> None:
    """What was launched is done."""
    if on_gpu():
        torch.cuda.synchronize()


def freed() -> None:
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def model_of(shape: str, context: int = 8192, dtype: str = "") -> Any:
    """On the GPU, where there is one: random weights are made there."""
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPES[dtype or ("bf16" if on_gpu() else "fp32")])
    try:
        with torch.device("cuda" if on_gpu() else "cpu"):
            return build(shape, context)[0].eval()
    finally:
        torch.set_default_dtype(torch.float32)


def words_of(shape: str) -> int:
    return int(SHAPES[shape]["vocab_size"])


def prompts(count: int, shortest: int, longest: int, words: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(words) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def sealed(path: Path, hardware: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """What was predicted, written down with its date; a file that is there is not written over."""
    if path.exists():
        sys.exit(f"{path} is there: predictions are written down once; give another --out")
    about = {"on": hardware, "date": datetime.now(UTC).isoformat(timespec="seconds"), **more}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_sealed(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


@contextmanager
def no_collections() -> Iterator[None]:
    """Of garbage, while times are taken."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class Asked:
    """One request by the wall clock."""

    came: float
    prompt: int
    times: list[float] = field(default_factory=list)
    """Of its tokens."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.came

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def by_the_clock(engine: Any, load: Any, words: int, seconds: float) -> list[Asked]:
    """Requests come to an engine in this process when the load says so, until all are answered; no HTTP between."""
    from foretell.serve.sampling import Sampling

    draw = random.Random(1)
    coming = load.requests(seconds)
    pending = next(coming, None)
    found: dict[Any, Asked] = {}
    begun = time.perf_counter()

    def ask(at: float, request: Any) -> None:
        made = engine.submit([draw.randrange(words) for _ in range(request.prompt)], Sampling(most=request.output))
        found[made] = Asked(at, request.prompt)

    for _ in range(load.users):
        ask(0.0, pending)
        pending = next(coming)
    while True:
        now = time.perf_counter() - begun
        while not load.users and pending is not None and pending.at <= now:
            ask(pending.at, pending)
            pending = next(coming, None)
        if engine.idle:
            if load.users or pending is None:
                return list(found.values())
            time.sleep(max(0.0, pending.at - (time.perf_counter() - begun)))
            continue
        for event in engine.step():
            at = time.perf_counter() - begun
            found[event.generation].times.append(at)
            if event.ended and load.users and at < seconds:
                ask(at, pending)
                pending = next(coming)
