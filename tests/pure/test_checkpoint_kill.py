"""kill -9 at any moment of a save: the newest checkpoint that can be verified always loads, with what it was saved with."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.checkpoint import store
from foretell.checkpoint.boxes import TensorSpread, parts
from foretell.checkpoint.read import Reader
from foretell.checkpoint.saver import SavedCheckpoint, Saver
from foretell.checkpoint.write import TensorPiece

SHAPE = (64, 700)
WORLD = 2
CALLS = ("pwrite", "fsync", "open", "rename", "mkdir", "close")
"""What a save asks of the operating system, and may not live to see done."""


def _teams() -> list[Any]:
    """Two ranks that are threads."""
    barrier, said = threading.Barrier(WORLD), [None] * WORLD

    def team(rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            said[rank] = value
            barrier.wait(60)
            told = list(said)
            barrier.wait(60)
            return told

        return SimpleNamespace(rank=rank, world=WORLD, gather=gather)

    return [team(rank) for rank in range(WORLD)]


def save(folder: Path, step: int, value: float) -> bool:
    """A checkpoint whose tensors are full of a number."""
    teams, backs, good = _teams(), _teams(), []

    def one(rank: int) -> None:
        mine = Saver(folder, teams[rank], backs[rank])
        (part,) = parts(SHAPE, [TensorSpread(0, rank, WORLD)])
        tensor = torch.full(part.whole.size, value)
        pieces = [TensorPiece(name=f"model/{name}", shape=SHAPE, box=part.whole, tensor=tensor) for name in "abc"]
        mine.begin(step, pieces, {"random": {}, "buffers": {}, "more": {}}, {"plan": {}})
        mine.before_update()
        mine.wait()
        done = mine.poll()
        good.append(done is not None and isinstance(done.result, SavedCheckpoint))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return good == [True] * WORLD


def counted(at: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Count the calls of this process; the one numbered `at` is the last, and if it writes, half of it is written."""
    number, lock = [0], threading.Lock()
    plain = {name: getattr(os, name) for name in CALLS}

    def of(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                number[0] += 1
                if number[0] == at:
                    if name == "pwrite":
                        plain["pwrite"](args[0], memoryview(args[1])[: len(args[1]) // 2], args[2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return plain[name](*args, **kwargs)

        return call

    def undo() -> None:
        for name in CALLS:
            setattr(os, name, plain[name])

    for name in CALLS:
        setattr(os, name, of(name))
    return lambda: number[0], undo


def calls_of_a_save(folder: Path, step: int) -> int:
    count, undo = counted(0)
    try:
        assert save(folder, step, 9.0)
    finally:
        undo()
    return count()


def killed(folder: Path, step: int, value: float, at: int) -> bool:
    """Save in a process of its own that is killed at its call number `at`; whether it was."""
    child = os.fork()
    if not child:
        try:
            counted(at)
            save(folder, step, value)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def newest(folder: Path) -> tuple[int, float]:
    """Step and content of the newest checkpoint of which every byte is right."""
    for saved in store.complete(folder):
        if not store.problems(saved.path):
            found = [Reader(saved).whole(f"model/{name}") for name in "abc"]
            (value,) = {float(v) for tensor in found for v in tensor.unique()}
            return saved.step, value
    raise AssertionError(f"nothing in {folder} can be used")


def survive(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Kill so many saves, each at another moment; how many left the one before and how many the new one."""
    torch.set_num_threads(1)
    dice = random.Random(seed)
    assert save(folder / "dry", 1, 1.0)
    total = {step: calls_of_a_save(folder / "dry", step) for step in (2, 1)}
    found = {"before": 0, "new": 0}
    for turn in range(count):
        place = folder / str(turn)
        assert save(place, 1, 1.0)
        step = 1 if turn % 4 == 3 else 2  # now and then the same step once more, in place of the other
        at = dice.randint(1, total[step])
        assert killed(place, step, 2.0, at), f"call {at} of {total[step]} was never made"
        left = newest(place)
        assert left in ((1, 1.0), (step, 2.0)), left
        found["new" if left == (step, 2.0) else "before"] += 1
        assert save(place, 3, 3.0) and newest(place) == (3, 3.0)
        assert not list(place.glob("*.partial"))
        shutil.rmtree(place)
    return found


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    found = survive(tmp_path, 12, 0)
    assert sum(found.values()) == 12 and found["before"] > 0 and found["new"] > 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_first_save_killed_leaves_nothing_that_looks_like_one(tmp_path: Path) -> None:
    assert killed(tmp_path, 1, 1.0, 9)
    assert store.complete(tmp_path) == [] and store.candidates(tmp_path) == []
    assert save(tmp_path, 2, 2.0) and newest(tmp_path) == (2, 2.0) and not list(tmp_path.glob("*.partial"))
