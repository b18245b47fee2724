"""Bytes on disk beside the same in memory, in whatever order they are asked for; and what is left when things go wrong."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.offload.memory import stage as stages
from foretell.runtime.offload.memory.arena import ALIGN, Arena, bytes_for
from foretell.runtime.offload.memory.disk import DiskFile
from foretell.runtime.offload.memory.folder import free, in_memory
from foretell.runtime.offload.memory.stage import StagingBuffers
from foretell.units import MIB

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"master": torch.float32, "exp_avg": torch.bfloat16, "rest": torch.int16}
LIMIT = 60.0
"""Seconds after which something that is waited for hangs."""


def shelf(folder: Path, nbytes: int, **more: object) -> DiskFile:
    return DiskFile(nbytes, folder, **{"reserve": 0, "piece": 4 * ALIGN, **more})  # type: ignore[arg-type]


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    """A disk that refuses what lies behind these bytes of a file, for as long as it lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_transfers_at_once_give_what_one_after_the_other_gives(tmp_path: Path, direct: bool, seed: int) -> None:
    """Reads and writes of ranges that overlap, on and off pages, in memory on and off pages, none waited for before the end."""
    draw, size = random.Random(seed), 60 * ALIGN
    expected = torch.zeros(size, dtype=torch.uint8)
    arena = Arena(400 * bytes_for([20 * ALIGN]), register=False)
    asked: list[tuple[Future[None], Tensor, Tensor]] = []
    with shelf(tmp_path, size, direct=direct, threads=3) as store:
        for _ in range(300):
            unit = draw.choice([1, ALIGN])
            nbytes = draw.randrange(1, 16 * ALIGN // unit) * unit
            offset = draw.randrange(0, (size - nbytes) // unit + 1) * unit
            memory = arena.take(17 * ALIGN, torch.uint8)[draw.choice([0, 0, 64]) :][:nbytes]
            if draw.random() < 0.5:
                memory.random_(generator=torch.Generator().manual_seed(draw.getrandbits(32)))
                expected[offset : offset + nbytes] = memory
                asked.append((store.write(offset, memory), memory, memory.clone()))
            else:
                memory.fill_(7)
                asked.append((store.read(offset, memory), memory, expected[offset : offset + nbytes].clone()))
        for future, memory, wanted in asked:
            future.result(LIMIT)
            assert torch.equal(memory, wanted)
        whole = torch.empty(size, dtype=torch.uint8)
        store.read(0, whole).result(LIMIT)
        assert torch.equal(whole, expected)
        assert store.direct <= direct
        store.settle()


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    values = [torch.randn(1000), torch.randn(7, 5).bfloat16(), torch.tensor(3.5), torch.arange(9, dtype=torch.int16), torch.empty(0)]
    with shelf(tmp_path, bytes_for([value.nbytes for value in values])) as store:
        offsets = [store.take(value.nbytes) for value in values]
        assert all(offset % ALIGN == 0 for offset in offsets)
        done = [store.write(offset, value) for offset, value in zip(offsets, values, strict=True)]
        found = [torch.empty_like(value) for value in values]
        done += [store.read(offset, value) for offset, value in zip(offsets, found, strict=True)]
        for one in done:
            one.result(LIMIT)
        assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
        assert store.written_bytes == store.read_bytes == sum(value.nbytes for value in values)
        with pytest.raises(AssertionError, match="has no"):
            store.take(1)
        with pytest.raises(AssertionError, match="not on a shelf"):
            store.write(store.nbytes - 4, values[0])
        with pytest.raises(AssertionError, match="in one piece"):
            store.write(0, values[1].t())
    with pytest.raises(RuntimeError, match="closed"):
        store.read(0, values[0]).result(LIMIT)


def test_a_write_comes_after_what_it_waits_for_and_a_read_after_the_write(tmp_path: Path) -> None:
    value, found, go = torch.zeros(5000), torch.empty(5000), threading.Event()

    def late() -> None:
        go.wait(LIMIT)
        value.fill_(3.0)

    with shelf(tmp_path, value.nbytes) as store:
        written, read = store.write(0, value, after=late), store.read(0, found)
        same_page = store.write(value.nbytes, torch.ones(1))
        assert not written.done() and not read.done() and not same_page.done()
        go.set()
        read.result(LIMIT)
        assert torch.equal(found, torch.full((5000,), 3.0))


# ---------------------------------------------------------------- what is left, and what is said


HELD = 512 * MIB
CHILD = f"""
import sys, torch
from foretell.runtime.offload.memory.disk import DiskFile
shelf = DiskFile({HELD}, sys.argv[1], reserve=0)
data = torch.ones(4 << 20)
shelf.write(0, data).result()
print("written", flush=True)
while True:
    shelf.write(shelf.nbytes // 2, data)
    shelf.write(0, data).result()
"""


def test_kill_9_leaves_nothing_on_disk(tmp_path: Path) -> None:
    if in_memory(tmp_path) or free(tmp_path) < 3 * HELD:
        pytest.skip("needs a disk with some free bytes")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "written\n"
        assert os.listdir(tmp_path) == []
        while_it_runs = free(tmp_path)
    finally:
        child.send_signal(signal.SIGKILL)
        assert child.wait(LIMIT) == -signal.SIGKILL
        child.stdout.close()
    assert os.listdir(tmp_path) == []
    assert free(tmp_path) - while_it_runs > HELD // 2  # others use the disk as well


def test_a_disk_that_is_too_small_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"keeps 953,674.3 GiB on disk in {tmp_path}, and .* are free there.*--disk"):
        DiskFile(1024 * 10**12, tmp_path)
    with pytest.raises(UserError, match="are left to others"):
        DiskFile(ALIGN, tmp_path, reserve=10**16)
    with files_no_larger_than(MIB), pytest.raises(UserError, match=f"4.0 MiB on disk in {tmp_path}.*File too large"):
        DiskFile(4 * MIB, tmp_path, reserve=0)
    with pytest.raises(UserError, match=r"none.*No such file"):
        DiskFile(ALIGN, tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*Not a directory"):
        DiskFile(ALIGN, tmp_path / "file", reserve=0)
    with pytest.raises(UserError, match="no file can be made in /proc"):
        DiskFile(0, "/proc", reserve=-ALIGN)
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_is_said_where_it_is_waited_for_and_no_old_bytes_are_read(tmp_path: Path) -> None:
    data = torch.ones(4 * MIB, dtype=torch.uint8)
    with shelf(tmp_path, 8 * MIB, piece=MIB) as store:
        with files_no_larger_than(6 * MIB + 100):
            store.write(0, data).result(LIMIT)  # alone: what is under way beside one that fails may fail with it
            bad = store.write(4 * MIB, data)
            behind = store.read(4 * MIB, torch.empty_like(data))
            with pytest.raises(UserError, match=f"writing 4.0 MiB of 8.0 MiB on disk in {tmp_path} failed: .* are free there; .*--disk"):
                bad.result(LIMIT)
            with pytest.raises(UserError, match="writing"):
                behind.result(LIMIT)
        with pytest.raises(UserError, match="writing"):
            store.read(4 * MIB, torch.empty_like(data)).result(LIMIT)
        with pytest.raises(UserError, match="writing"):
            store.settle()


def test_a_file_that_was_cut_short_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with shelf(tmp_path, 8 * ALIGN) as store:
        os.ftruncate(store._fd, 3 * ALIGN)
        store.read(0, torch.empty(3 * ALIGN, dtype=torch.uint8)).result(LIMIT)
        with pytest.raises(UserError, match=r"reading .* failed: the disk moved nothing"):
            store.read(0, torch.empty(8 * ALIGN, dtype=torch.uint8)).result(LIMIT)


def test_a_disk_is_told_to_be_slow_only_when_it_is(tmp_path: Path) -> None:
    with shelf(tmp_path, 4 * MIB, piece=MIB) as store:
        data = torch.ones(MIB)
        assert store.slower(1e18, 1e18, least=0) is None  # nothing was moved
        for _ in range(4):
            store.write(0, data).result(LIMIT)
            store.read(0, data).result(LIMIT)
        assert store.slower(1.0, 1.0, least=0) is None
        assert store.slower(1e18, 1e18) is None  # too little to tell
        said = store.slower(1e18, 1e18, least=MIB)
        assert said is not None and "32.0 MiB took" in said and str(tmp_path) in said and "\n" not in said


# ---------------------------------------------------------------- a ring of buffers


@contextmanager
def staged(folder: Path, chunks: dict[object, int], buffers: int) -> Iterator[StagingBuffers]:
    host, disk = stages.needs(chunks, DTYPES, buffers)
    arena = Arena(host, register=False)
    with shelf(folder, disk) as store:
        yield StagingBuffers(store, arena, chunks, DTYPES, buffers)
        assert store._next == store.nbytes and arena._next == arena.nbytes  # exactly what was said


def changed(arrays: dict[str, Tensor], by: int) -> None:
    arrays["master"].mul_(1.5).add_(by)
    arrays["exp_avg"].sub_(by)
    arrays["rest"].add_(by)


@pytest.mark.parametrize(("buffers", "ahead", "wrong"), [(3, 2, 0.0), (3, 5, 0.3), (1, 2, 0.5), (2, 4, 1.0)])
def test_many_chunks_through_a_few_buffers_are_what_they_are_in_memory(tmp_path: Path, buffers: int, ahead: int, wrong: float) -> None:
    """Asked for ahead, further than there are buffers and wrongly too, and changed by whoever the writing waits for."""
    draw = random.Random(buffers)
    chunks: dict[object, int] = {("blocks", number): draw.choice([64, 3000, 8192, 50_000]) for number in range(12)}
    memory = {key: {name: torch.zeros(n, dtype=dtype) for name, dtype in DTYPES.items()} for key, n in chunks.items()}
    order = [draw.choice(list(chunks)) for _ in range(150)]
    with staged(tmp_path, chunks, buffers) as stage:
        for turn, key in enumerate(order):
            found = stage.fetch(key).result(LIMIT)
            for coming in order[turn + 1 : turn + 1 + ahead]:
                stage.ahead(draw.choice(list(chunks)) if draw.random() < wrong else coming)
            assert {name: (a.dtype, a.numel()) for name, a in found.items()} == {n: (d, chunks[key]) for n, d in DTYPES.items()}
            assert all(torch.equal(array, memory[key][name]) for name, array in found.items()), (turn, key)
            if turn % 5 == 4:
                stage.drop(key)
                continue
            changed(memory[key], turn)
            stage.put(key, found, after=lambda found=found, turn=turn: changed(found, turn))
        stage.settle()


def test_chunks_fetched_in_turn_come_in_turn_however_many(tmp_path: Path) -> None:
    chunks: dict[object, int] = dict.fromkeys(range(20), 5000)
    with staged(tmp_path, chunks, 3) as stage:
        for lap in range(4):
            coming = {key: stage.fetch(key) for key in chunks}
            assert all(stage.fetch(key) is future for key, future in coming.items())
            for key, future in coming.items():
                found = future.result(LIMIT)
                assert torch.equal(found["rest"], torch.full((5000,), lap * key, dtype=torch.int16))
                found["rest"].add_(key)
                stage.put(key, found)


def test_what_was_asked_for_ahead_makes_room_and_what_was_fetched_does_not(tmp_path: Path) -> None:
    keys, go = "abc", threading.Event()
    with staged(tmp_path, dict.fromkeys(keys, 3000), 2) as stage:
        for number, key in enumerate(keys):
            found = stage.fetch(key).result(LIMIT)
            found["master"].fill_(number)
            stage.put(key, found).result(LIMIT)
        held = stage.fetch("a").result(LIMIT)
        again = torch.full((3000,), 7.0)
        stage.shelf.write(stage._at["b"], again, after=lambda: go.wait(LIMIT))
        assert stage.ahead("b") and not stage.ahead("c")
        wanted = stage.fetch("c")
        assert not wanted.done()  # the buffer is not free before reading into it has ended
        go.set()
        found = wanted.result(LIMIT)
        stage.settle()
        assert torch.equal(found["master"], torch.full((3000,), 2.0)) and torch.equal(held["master"], torch.zeros(3000))
        stage.put("c", found).result(LIMIT)
        assert stage.ahead("b")
        mine = stage.fetch("b").result(LIMIT)
        waits = stage.fetch("c")
        assert not waits.done() and stage.free == -1 and torch.equal(mine["master"], again)
        stage.drop("a")
        assert torch.equal(waits.result(LIMIT)["master"], torch.full((3000,), 2.0)) and torch.equal(mine["master"], again)
        with pytest.raises(AssertionError, match="not fetched"):
            stage.put("c", mine)


def test_a_chunk_that_waits_for_a_buffer_can_be_given_up(tmp_path: Path) -> None:
    with staged(tmp_path, {"a": 10, "b": 10, "c": 10}, 1) as stage:
        first, second, third = (stage.fetch(key) for key in "abc")
        held = first.result(LIMIT)
        assert stage.free == -2 and not second.done()
        stage.drop("b")
        with pytest.raises(CancelledError):
            second.result(LIMIT)
        with pytest.raises(AssertionError, match="not fetched"):
            stage.put("c", held)
        go = threading.Event()
        stage.drop("a", after=lambda: go.wait(LIMIT))
        assert not third.done()
        go.set()
        stage.put("c", third.result(LIMIT)).result(LIMIT)
        assert stage.free == 1


def test_a_chunk_that_cannot_be_written_ends_everything_that_waits(tmp_path: Path) -> None:
    chunks: dict[object, int] = dict.fromkeys(range(4), MIB)
    with staged(tmp_path, chunks, 2) as stage:
        held = [stage.fetch(0).result(LIMIT), stage.fetch(3).result(LIMIT)]
        waiting = stage.fetch(1), stage.fetch(2)
        with files_no_larger_than(MIB):
            written = stage.put(3, held[1])
            with pytest.raises(UserError, match=r"writing 8.0 MiB of 32.0 MiB on disk"):
                written.result(LIMIT)
        for future in waiting:
            with pytest.raises(UserError, match="writing"):
                future.result(LIMIT)
        with pytest.raises(UserError, match="writing"):
            stage.settle()
        with pytest.raises(UserError, match="writing"):
            stage.put(0, held[0], after=lambda: None).result(LIMIT)


def test_what_fails_before_a_write_is_raised_where_the_write_is_waited_for(tmp_path: Path) -> None:
    def lost() -> None:
        raise RuntimeError("the device is gone")

    with staged(tmp_path, {"a": 10}, 1) as stage:
        with pytest.raises(RuntimeError, match="device is gone"):
            stage.put("a", stage.fetch("a").result(LIMIT), after=lost).result(LIMIT)
        with pytest.raises(RuntimeError, match="device is gone"):
            stage.fetch("a").result(LIMIT)
