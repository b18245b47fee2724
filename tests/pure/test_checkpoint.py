"""Checkpoints in one process: what is written is read back under any cut, no flipped bit goes unseen, and writing that fails
harms nothing."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.checkpoint import format as layout
from foretell.checkpoint import read, saver, store, write
from foretell.checkpoint.boxes import Box, TensorSpread, local_shape, parts, uncovered, whole
from foretell.checkpoint.format import Damaged, read_manifest
from foretell.checkpoint.read import Reader, Want
from foretell.checkpoint.saver import NotSaved, SavedCheckpoint, Saver
from foretell.checkpoint.write import TensorPiece
from foretell.runtime.train import log
from tests.pure.checkpoint_cases import Threads, cuts_of, save, saved_in, some_tensors

# ---------------------------------------------------------------- boxes


def _cut_by_hand(tensor: Tensor, cut: TensorSpread) -> Tensor:
    """What one cut leaves, with torch's own split and chunk."""
    if not cut.segments:
        chunks = tensor.chunk(cut.ranks, dim=cut.dim)
        return chunks[cut.rank] if cut.rank < len(chunks) else tensor.narrow(cut.dim, 0, 0)
    shares = [segment.chunk(cut.ranks, dim=cut.dim)[cut.rank] for segment in tensor.split(list(cut.segments), dim=cut.dim)]
    return torch.cat(shares, dim=cut.dim)


def _random_cuts(dice: random.Random, shape: tuple[int, ...], ranks: int) -> list[list[TensorSpread]]:
    """Cuts of every rank: perhaps a split of segments over some, then chunks of rows over others."""
    tp = dice.choice([1, ranks])
    dp = ranks // tp
    dims = [dim for dim, size in enumerate(shape) if size % tp == 0 and size]
    dim = dice.choice(dims) if dims else None
    segments: tuple[int, ...] = ()
    if dim is not None:
        points = sorted({0, shape[dim], *(tp * dice.randint(0, shape[dim] // tp) for _ in range(2))})
        segments = tuple(b - a for a, b in itertools.pairwise(points))
    made = []
    for t in range(tp):
        for d in range(dp):
            own = [TensorSpread(dim, t, tp, segments)] if dim is not None and tp > 1 else []
            made.append([*own, TensorSpread(0, d, dp)] if dp > 1 else own)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_boxes_are_what_torch_cuts(seed: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.choice([1, 2, 4, 6, 8, 12]) for _ in range(dice.randint(1, 3)))
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    ranks = dice.choice([1, 2, 3, 4])
    boxes = []
    for cuts in _random_cuts(dice, shape, ranks):
        piece = full
        for cut in cuts:
            piece = _cut_by_hand(piece, cut)
        assert local_shape(shape, cuts) == tuple(piece.shape)
        again = torch.full_like(piece, -1)
        for part in parts(shape, cuts):
            again[part.local.slices()] = full[part.whole.slices()]
        assert torch.equal(again, piece)
        boxes += [part.whole for part in parts(shape, cuts)] if len(cuts) or ranks == 1 else []
    if boxes:
        assert uncovered(shape, boxes) == ""
        assert "in no file" in uncovered(shape, boxes[1:])
        assert "twice" in uncovered(shape, [*boxes, boxes[0]])
        assert "not in it" in uncovered(shape, [*boxes[1:], Box(shape, boxes[0].size)])
        moved = Box(tuple(n + 1 for n in boxes[0].offset), boxes[0].size)
        assert uncovered(shape, [*boxes[1:], moved])


def test_what_two_ranks_have_of_a_fused_layer() -> None:
    """[q | k | v] of 4 rows each over two tensor ranks, then over two data ranks."""
    cuts = [TensorSpread(0, 1, 2, (4, 4, 4)), TensorSpread(0, 1, 2)]
    assert [(part.local, part.whole) for part in parts((12, 5), cuts)] == [
        (Box((0, 0), (1, 5)), Box((7, 0), (1, 5))), (Box((1, 0), (2, 5)), Box((10, 0), (2, 5))),
    ]  # fmt: skip
    assert parts((), []) and parts((), [])[0].whole == Box((), ())
    assert parts((3, 4), [TensorSpread(0, 3, 4)]) == () and local_shape((3, 4), [TensorSpread(0, 3, 4)]) == (0, 4)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, store, write, read):
        monkeypatch.setattr(module, "CHUNK_BYTES", 32)


@pytest.mark.parametrize("wait", [True, False], ids=["live", "image"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_any_ranks_saved_any_others_read(tmp_path: Path, world: int, wait: bool, small_chunks: None) -> None:
    tensors = some_tensors()
    done = save(tmp_path, tensors, world=world, wait=wait)
    assert all(isinstance(one.result, SavedCheckpoint) for one in done), done
    assert store.problems(saved_in(tmp_path)) == []
    reader = Reader(store.look(saved_in(tmp_path)))
    for name, tensor in tensors.items():
        assert torch.equal(reader.whole(name).view(torch.uint8) if tensor.dim() else reader.whole(name),
                           tensor.view(torch.uint8) if tensor.dim() else tensor), name  # fmt: skip
    for others in (1, 2, 4):
        for rank in range(others):
            for name, tensor in tensors.items():
                for columns in (False, tensor.dim() > 1 and tensor.shape[1] % 2 == 0):
                    cuts = [*([TensorSpread(1, 1, 2, (tensor.shape[1],))] if columns else []), *cuts_of(tuple(tensor.shape), rank, others)]
                    piece = torch.zeros(local_shape(tensor.shape, cuts), dtype=tensor.dtype)
                    reader.read([Want(name=name, box=p.whole, into=piece[p.local.slices()]) for p in parts(tensor.shape, cuts)])
                    wanted = tensor
                    for cut in cuts:
                        wanted = _cut_by_hand(wanted, cut)
                    assert torch.equal(piece.view(torch.uint8) if piece.dim() else piece,
                                       wanted.contiguous().view(torch.uint8) if piece.dim() else wanted), (name, cuts)  # fmt: skip
    for rank in range(world):
        assert torch.equal(reader.own(rank)["random"]["torch"], torch.arange(rank, rank + 9))
        assert reader.own(rank, only="random")["python"] == [3, [1, 2], None]
    assert not list(tmp_path.glob("*.partial"))


def test_others_can_open_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = some_tensors()
    save(tmp_path, tensors, world=1)
    theirs = safetensors.load_file(saved_in(tmp_path) / "rank-00000.safetensors")
    assert torch.equal(theirs["model/t0.weight"], tensors["model/t0.weight"])
    assert torch.equal(theirs["model/t1.weight"], tensors["model/t1.weight"])


def test_what_changes_while_it_is_written_is_saved_as_it_was(tmp_path: Path) -> None:
    """Weights are held back until they are copied; buffers and random numbers are copied at once."""
    weight, buffer = torch.randn(2000, 500), torch.zeros(10)
    before = weight.clone()
    one = Saver(tmp_path, Threads(1).of(0), Threads(1).of(0))
    piece = TensorPiece(name="model/w", shape=(2000, 500), box=whole((2000, 500)), tensor=weight)
    one.begin(1, [piece], {"random": {}, "buffers": {"b": buffer}, "more": {}}, {})
    buffer += 1
    one.before_update()
    weight.zero_()
    one.wait()
    done = one.poll()
    assert done is not None and isinstance(done.result, SavedCheckpoint) and one.poll() is None
    reader = Reader(done.result)
    assert torch.equal(reader.whole("model/w"), before) and torch.equal(reader.own(0)["buffers"]["b"], torch.zeros(10))


def test_memory_that_is_not_there_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "free_memory", lambda: 0)
    done = save(tmp_path, some_tensors())
    assert all(isinstance(one.result, SavedCheckpoint) and one.stall_seconds >= one.seconds for one in done)


def test_what_cannot_be_saved_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    one = Saver(tmp_path, Threads(1).of(0), Threads(1).of(0))
    one.begin(1, [], {"random": print}, {})
    done = one.poll()
    assert done is not None and isinstance(done.result, NotSaved) and "cannot be saved" in done.result.why
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- flipped bits


def flip_everywhere(path: Path, count: int, seed: int, is_seen: Callable[[Path], str]) -> dict[str, int]:
    """Flip one bit at a time, in manifest, headers and tensors alike; file → how many were seen and named."""
    dice = random.Random(seed)
    manifest = read_manifest(path)
    places = [(path / "manifest.json", 0, (path / "manifest.json").stat().st_size)]
    for name, file in manifest.files.items():
        places += [(path / name, 0, file.header_bytes), (path / name, file.header_bytes, file.bytes)]
    seen: dict[str, int] = {}
    for turn in range(count):
        file, low, high = places[turn % len(places)]
        at, bit = dice.randrange(low, high), 1 << dice.randrange(8)
        with file.open("r+b") as stream:
            stream.seek(at)
            (value,) = stream.read(1)
            stream.seek(at)
            stream.write(bytes([value ^ bit]))
        said = is_seen(path)
        assert file.name in said, f"bit {bit} of byte {at} of {file.name}: {said or 'not seen'}"
        seen[file.name] = seen.get(file.name, 0) + 1
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([value]))
    assert is_seen(path) == ""
    return seen


def test_every_flipped_bit_is_seen_and_its_file_named(tmp_path: Path, small_chunks: None) -> None:
    save(tmp_path, some_tensors())
    seen = flip_everywhere(saved_in(tmp_path), 60, 0, lambda path: "; ".join(store.problems(path)))
    assert sum(seen.values()) == 60 and len(seen) == 3


def test_a_flipped_bit_names_tensor_and_bytes(tmp_path: Path, small_chunks: None) -> None:
    save(tmp_path, some_tensors())
    path = saved_in(tmp_path)
    entry = next(e for e in Reader(store.look(path)).headers[1].entries if e.name == "model/t0.weight")
    file = path / "rank-00001.safetensors"
    at = read_manifest(path).files[file.name].header_bytes + entry.start + 40
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)
    (problem,) = store.problems(path)
    first = at - 40 + 32
    assert problem == f"{file} is damaged: bytes {first} to {first + 31}, of model/t0.weight[4:8,0:6], are not what was written"
    reader = Reader(store.look(path))
    with pytest.raises(Damaged, match=r"rank-00001.* of model/t0\.weight"):
        reader.whole("model/t0.weight")
    assert torch.equal(reader.whole("optimizer/t0.weight/exp_avg"), some_tensors()["optimizer/t0.weight/exp_avg"])


# ---------------------------------------------------------------- writing that fails


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["pwrite", "fsync", "crc"])
@pytest.mark.parametrize("wait", [True, False], ids=["here", "thread"])
def test_an_error_in_any_thread_of_any_rank_is_told_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, what: str, wait: bool, small_chunks: None
) -> None:
    save(tmp_path, some_tensors(0), step=5)
    before = {file.name: file.read_bytes() for file in saved_in(tmp_path).iterdir()}
    count = [0]
    lock = threading.Lock()

    def is_of(handle: int) -> bool:
        return f"rank-{rank:05d}" in os.readlink(f"/proc/self/fd/{handle}") and ".partial" in os.readlink(f"/proc/self/fd/{handle}")

    real_pwrite, real_fsync, real_crc = os.pwrite, os.fsync, write.zlib.crc32

    def pwrite(handle: int, content: Any, offset: int) -> int:
        with lock:
            count[0] += is_of(handle)
            broken = is_of(handle) and count[0] == 7
        if broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_pwrite(handle, content, offset)

    def fsync(handle: int) -> None:
        if is_of(handle):
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(handle)

    def crc(content: Any, *more: int) -> int:
        with lock:
            count[0] += 1
        if count[0] == 9 + rank:
            raise MemoryError("no memory for this")
        return real_crc(content, *more)

    broken = {"pwrite": ("os.pwrite", pwrite), "fsync": ("os.fsync", fsync), "crc": ("", crc)}[what]
    if what == "crc":
        monkeypatch.setattr(write, "zlib", SimpleNamespace(crc32=crc))
    else:
        monkeypatch.setattr(broken[0], broken[1])
    done = save(tmp_path, some_tensors(1), step=10, wait=wait)
    monkeypatch.undo()
    words = {"pwrite": "No space left on device", "fsync": "Input/output error", "crc": "no memory for this"}[what]
    whys = {one.result.why for one in done if isinstance(one.result, NotSaved)}
    assert len(whys) == 1 and words in whys.pop() and all(isinstance(one.result, NotSaved) for one in done)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert {file.name: file.read_bytes() for file in saved_in(tmp_path).iterdir()} == before


def test_no_room_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    done = save(tmp_path, some_tensors())
    assert all("the disk is full" in one.result.why for one in done if isinstance(one.result, NotSaved))
    assert all(isinstance(one.result, NotSaved) for one in done) and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_or_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    done = save(tmp_path / "file", some_tensors())
    assert all(isinstance(one.result, NotSaved) and "File exists" in one.result.why for one in done)
    done = save(tmp_path / "file" / "deeper", some_tensors())
    assert all(isinstance(one.result, NotSaved) and "Not a directory" in one.result.why for one in done)
    assert (tmp_path / "file").read_text() == "mine"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = save(tmp_path / "a", some_tensors())
    assert all(isinstance(one.result, NotSaved) and one.result.why == "rank 0: Read-only file system" for one in done)


def test_bytes_that_come_back_otherwise_are_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that says it wrote, and did not: found by reading back, and the one before stays."""
    save(tmp_path, some_tensors(), step=1)
    plain = write.write_file

    def lying(path: Path, *args: Any, **kwargs: Any) -> Any:
        done = plain(path, *args, **kwargs)
        with path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            last = stream.read(1)[0]
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last ^ 1]))
        return done

    monkeypatch.setattr(saver, "write_file", lying)
    done = save(tmp_path, some_tensors(), step=2)
    assert all(isinstance(one.result, NotSaved) and "not what was written" in one.result.why for one in done)
    assert [one.step for one in store.complete(tmp_path)] == [1]


def test_a_step_that_is_saved_again_never_leaves_a_moment_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, some_tensors(0))
    seen = []
    plain = Path.rename

    def rename(path: Path, target: Any) -> Path:
        done = plain(path, target)
        seen.append([one.step for one in store.complete(tmp_path)])
        return done

    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path, some_tensors(1))
    monkeypatch.undo()
    assert seen and all(5 in steps for steps in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert torch.equal(Reader(store.complete(tmp_path)[0]).whole("model/t0.weight"), some_tensors(1)["model/t0.weight"])


# ---------------------------------------------------------------- which stay


def test_so_many_good_ones_stay(tmp_path: Path) -> None:
    good: set[Path] = set()
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, some_tensors(), step=step, keep=3, good=good)
    assert [one.step for one in store.complete(tmp_path)] == [5, 4, 3]


def test_one_that_is_not_known_to_be_good_does_not_count(tmp_path: Path) -> None:
    good: set[Path] = set()
    for step in (1, 2):
        save(tmp_path, some_tensors(), step=step, good=good)
    good.discard(saved_in(tmp_path, 2))  # as after a restart that took up step 1
    save(tmp_path, some_tensors(), step=3, good=good)
    assert [one.step for one in store.complete(tmp_path)] == [3, 2, 1]
    save(tmp_path, some_tensors(), step=4, good=good)
    assert [one.step for one in store.complete(tmp_path)] == [4, 3]


def test_the_rank_that_writes_longest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of three on a slow disk; of one process nobody is."""
    real = saver.write_file

    def slow(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == layout.file_name(2):
            time.sleep(1.3)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(saver, "write_file", slow)
    done, words = save(tmp_path, some_tensors(), world=3), log.SaveWords()
    assert all(one.slowest is not None and one.slowest[0] == 2 and one.slowest[1] >= 1.3 > one.slowest[2] for one in done)
    (line,) = words.of(done[0])
    assert line.startswith("rank 2 took 1.") and "look at its disk" in line and words.of(done[0]) == [], "once"
    assert log.slowest_rank(done[0])["slowest_rank"] == 2
    monkeypatch.setattr(saver, "write_file", real)
    (alone,) = save(tmp_path / "alone", some_tensors(), world=1)
    assert alone.slowest is None and log.slowest_rank(alone) == {} and log.SaveWords().of(alone) == []
