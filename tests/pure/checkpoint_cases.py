"""A few ranks as threads, and what they save."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoint import saver, store
from foretell.checkpoint.boxes import TensorSpread, parts
from foretell.checkpoint.saver import Saver
from foretell.checkpoint.write import TensorPiece

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


class Threads:
    """Ranks that are threads: everybody's word at a barrier, as JSON says it."""

    def __init__(self, world: int) -> None:
        self.barrier, self.said = threading.Barrier(world), [None] * world

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self.said[rank] = json.loads(json.dumps(value))
            self.barrier.wait(30)
            told = list(self.said)
            self.barrier.wait(30)
            return told

        return SimpleNamespace(rank=rank, world=len(self.said), gather=gather)


def together(world: int, work: Callable[[int], Any]) -> list[Any]:
    found: list[Any] = [None] * world
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return found


def some_tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = [(8, 6), (12, 4), (5,), (), (3, 4, 2), (0, 3), (16, 2), (7, 3), (4, 4), (6, 2)]
    made = {}
    for number, (shape, dtype) in enumerate(zip(shapes, DTYPES, strict=True)):
        raw = torch.randint(0, 2 if dtype == torch.bool else 100, shape)
        made[f"model/t{number}.weight"] = raw.to(dtype)
    made["optimizer/t0.weight/exp_avg"] = torch.randn(8, 6)
    return made


def cuts_of(shape: tuple[int, ...], rank: int, world: int) -> list[TensorSpread]:
    return [TensorSpread(0, rank, world)] if shape and world > 1 else []


def pieces_of(tensors: dict[str, Tensor], rank: int, world: int) -> list[TensorPiece]:
    """Rows over the ranks; what has no rows is written by rank 0."""
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() or rank == 0:
            found += [
                TensorPiece(name=name, shape=tuple(tensor.shape), box=part.whole, tensor=tensor[part.whole.slices()])
                for part in parts(tensor.shape, cuts_of(tuple(tensor.shape), rank, world))
            ]
    return found


def save(
    folder: Path, tensors: dict[str, Tensor], *, world: int = 2, step: int = 5, wait: bool = False, keep: int = 2,
    good: set[Path] | None = None,
) -> list[saver.SaveResult]:  # fmt: skip
    teams, backs = Threads(world), Threads(world)

    def one(rank: int) -> Any:
        mine = Saver(folder, teams.of(rank), backs.of(rank), keep=keep)
        if good is not None:
            mine.good = good
        own = {"random": {"torch": torch.arange(rank, rank + 9), "python": [3, [1, 2], None]}, "buffers": {}, "more": {}}
        mine.begin(step, pieces_of(tensors, rank, world), own, {"plan": {"mesh": {"dp_shard": world}}, "data": {}}, wait=wait)
        mine.before_update()
        mine.wait(60)
        return mine.poll()

    return together(world, one)


def saved_in(folder: Path, step: int = 5) -> Path:
    return folder / store.folder_name(step)
