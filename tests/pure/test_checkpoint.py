"""Checkpoints in one process: what is written is read back under any cut, and no harm to a file goes unseen."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretell.checkpoint import format as layout
from foretell.checkpoint import interval, read, saver, store, write
from foretell.checkpoint.boxes import Box, Cut, local_shape, parts, uncovered, whole
from foretell.checkpoint.format import Damaged, dump_manifest, parse_manifest, read_manifest
from foretell.checkpoint.read import Reader, Want
from foretell.checkpoint.saver import NotSaved, Saved, Saver
from foretell.checkpoint.write import Piece
from foretell.cli import main
from foretell.errors import FileFormatError, UserError

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


# ---------------------------------------------------------------- boxes


def _cut_by_hand(tensor: Tensor, cut: Cut) -> Tensor:
    """What one cut leaves, with torch's own split and chunk."""
    if not cut.segments:
        chunks = tensor.chunk(cut.ranks, dim=cut.dim)
        return chunks[cut.rank] if cut.rank < len(chunks) else tensor.narrow(cut.dim, 0, 0)
    shares = [segment.chunk(cut.ranks, dim=cut.dim)[cut.rank] for segment in tensor.split(list(cut.segments), dim=cut.dim)]
    return torch.cat(shares, dim=cut.dim)


def _random_cuts(dice: random.Random, shape: tuple[int, ...], ranks: int) -> list[list[Cut]]:
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
            own = [Cut(dim, t, tp, segments)] if dim is not None and tp > 1 else []
            made.append([*own, Cut(0, d, dp)] if dp > 1 else own)
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
    cuts = [Cut(0, 1, 2, (4, 4, 4)), Cut(0, 1, 2)]
    assert [(part.local, part.whole) for part in parts((12, 5), cuts)] == [
        (Box((0, 0), (1, 5)), Box((7, 0), (1, 5))), (Box((1, 0), (2, 5)), Box((10, 0), (2, 5))),
    ]  # fmt: skip
    assert parts((), []) and parts((), [])[0].whole == Box((), ())
    assert parts((3, 4), [Cut(0, 3, 4)]) == () and local_shape((3, 4), [Cut(0, 3, 4)]) == (0, 4)


# ---------------------------------------------------------------- a few ranks as threads


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


def cuts_of(shape: tuple[int, ...], rank: int, world: int) -> list[Cut]:
    return [Cut(0, rank, world)] if shape and world > 1 else []


def pieces_of(tensors: dict[str, Tensor], rank: int, world: int) -> list[Piece]:
    """Rows over the ranks; what has no rows is written by rank 0."""
    found = []
    for name, tensor in tensors.items():
        if tensor.dim() or rank == 0:
            found += [
                Piece(name=name, shape=tuple(tensor.shape), box=part.whole, tensor=tensor[part.whole.slices()])
                for part in parts(tensor.shape, cuts_of(tuple(tensor.shape), rank, world))
            ]
    return found


def save(
    folder: Path, tensors: dict[str, Tensor], *, world: int = 2, step: int = 5, wait: bool = False, keep: int = 2,
    good: set[Path] | None = None,
) -> list[saver.Done]:  # fmt: skip
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


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layout, store, write, read):
        monkeypatch.setattr(module, "CHUNK_BYTES", 32)


@pytest.mark.parametrize("wait", [True, False], ids=["live", "image"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_any_ranks_saved_any_others_read(tmp_path: Path, world: int, wait: bool, small_chunks: None) -> None:
    tensors = some_tensors()
    done = save(tmp_path, tensors, world=world, wait=wait)
    assert all(isinstance(one.result, Saved) for one in done), done
    assert store.problems(saved_in(tmp_path)) == []
    reader = Reader(store.look(saved_in(tmp_path)))
    for name, tensor in tensors.items():
        assert torch.equal(reader.whole(name).view(torch.uint8) if tensor.dim() else reader.whole(name),
                           tensor.view(torch.uint8) if tensor.dim() else tensor), name  # fmt: skip
    for others in (1, 2, 4):
        for rank in range(others):
            for name, tensor in tensors.items():
                for columns in (False, tensor.dim() > 1 and tensor.shape[1] % 2 == 0):
                    cuts = [*([Cut(1, 1, 2, (tensor.shape[1],))] if columns else []), *cuts_of(tuple(tensor.shape), rank, others)]
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
    piece = Piece(name="model/w", shape=(2000, 500), box=whole((2000, 500)), tensor=weight)
    one.begin(1, [piece], {"random": {}, "buffers": {"b": buffer}, "more": {}}, {})
    buffer += 1
    one.before_update()
    weight.zero_()
    one.wait()
    done = one.poll()
    assert done is not None and isinstance(done.result, Saved) and one.poll() is None
    reader = Reader(done.result)
    assert torch.equal(reader.whole("model/w"), before) and torch.equal(reader.own(0)["buffers"]["b"], torch.zeros(10))


def test_memory_that_is_not_there_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "free_memory", lambda: 100)
    done = save(tmp_path, some_tensors())
    assert all(isinstance(one.result, Saved) and one.stall_seconds >= one.seconds for one in done)


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


# ---------------------------------------------------------------- files that are not what they should be


def rewritten(path: Path, **changes: Any) -> None:
    """A manifest with a digest that is right and content that is not."""
    manifest = read_manifest(path)
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, **changes)))


def test_a_file_that_is_missing_cut_longer_or_of_another_rank(tmp_path: Path) -> None:
    save(tmp_path / "a", some_tensors())
    file = saved_in(tmp_path / "a") / "rank-00001.safetensors"
    content = file.read_bytes()
    for change, said in (
        (lambda: file.write_bytes(content[:-1]), "bytes and was written with"),
        (lambda: file.write_bytes(content + b"x"), "bytes and was written with"),
        (lambda: file.write_bytes(b""), "bytes and was written with"),
        (lambda: file.unlink(), "rank-00001.safetensors is missing"),
        (lambda: file.symlink_to("/dev/null"), "bytes and was written with"),
    ):  # fmt: skip
        change()
        assert store.complete(tmp_path / "a") == [] and said in store.problems(saved_in(tmp_path / "a"))[0]
    file.unlink()
    aside = tmp_path / "elsewhere"
    aside.write_bytes(content)
    file.symlink_to(aside)
    assert "rank-00001" in store.problems(saved_in(tmp_path / "a"))[0]


def test_files_of_two_saves_do_not_go_together(tmp_path: Path) -> None:
    """The same step, the same shapes, the same sizes: only the generation tells."""
    save(tmp_path / "a", some_tensors(0))
    save(tmp_path / "b", some_tensors(1))
    name = "rank-00001.safetensors"
    shutil.copy(saved_in(tmp_path / "b") / name, saved_in(tmp_path / "a") / name)
    path = saved_in(tmp_path / "a")
    assert len(store.complete(tmp_path / "a")) == 1
    (problem,) = store.problems(path)
    mine, theirs = (read_manifest(saved_in(tmp_path / one)).generation for one in "ab")
    assert f"{name} belongs to another save ({theirs}, not {mine})" in problem
    with pytest.raises(Damaged, match="belongs to another save"):
        Reader(store.look(path))
    manifest = read_manifest(path)
    rewritten(path, files={**manifest.files, "rank-00000.safetensors": manifest.files[name]})
    assert store.problems(path)


def test_a_manifest_cannot_lead_elsewhere(tmp_path: Path) -> None:
    save(tmp_path / "a", some_tensors(), world=1)
    path = saved_in(tmp_path / "a")
    (file,) = read_manifest(path).files.values()
    shutil.copy(path / "rank-00000.safetensors", tmp_path / "secret")
    for name in ("../../secret", "/etc/passwd", "rank-00000.safetensors/../../../secret", "..", "", "rank-00000.safetensors\0"):
        rewritten(path, files={name: file})
        with pytest.raises(Damaged, match="is not the name of a file of a checkpoint"):
            read_manifest(path)
        assert store.problems(path) and store.complete(tmp_path / "a") == []
        (path / "manifest.json").unlink()
        save(tmp_path / "b", some_tensors(), world=1)
        shutil.rmtree(path)
        saved_in(tmp_path / "b").rename(path)


def test_sizes_that_are_lies_are_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, some_tensors(), world=1)
    path = saved_in(tmp_path)
    manifest = read_manifest(path)
    (name, file), *_ = manifest.files.items()
    rewritten(path, files={name: replace(file, header_bytes=2**40, bytes=2**41)})
    assert "bytes and was written with" in store.problems(path)[0]
    raw = dump_manifest(replace(manifest, files={name: replace(file, header_bytes=file.bytes + 1)}))
    with pytest.raises(Damaged, match="has a header of"):
        parse_manifest(raw, path)
    raw = dump_manifest(replace(manifest, tensors={"model/x": layout.Spec((-1, 5), "float32")}))
    with pytest.raises(Damaged, match="negative"):
        parse_manifest(raw, path)
    rewritten(path, files={name: file}, tensors={**manifest.tensors, "model/more": layout.Spec((1000, 1000), "float32")})
    assert "model/more is not whole: 1000000 of its 1000000 elements are in no file" in store.problems(path)[0]


def test_a_newer_and_an_older_version_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "VERSION", 9)
    save(tmp_path, some_tensors(), world=1)
    monkeypatch.undo()
    for look in (read_manifest, store.look):
        with pytest.raises(FileFormatError, match=r"is of version 9 and this foretell reads version 2; use a newer foretell"):
            look(saved_in(tmp_path))
    (saved_in(tmp_path) / "manifest.json").write_text('{"version": 1, "step": 5, "world": 1, "files": {}}')
    with pytest.raises(FileFormatError, match="version 1, which is no longer read"):
        read_manifest(saved_in(tmp_path))


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


# ---------------------------------------------------------------- nothing is ever run


class Trap:
    """Whoever unpickles this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def traps(folder: Path, mark: Path) -> dict[str, Path]:
    """Five ways in which files of weights run code in whoever opens them; each is proven to work on its own reader."""
    made = {}
    for name in ("bin", "pt"):
        made[name] = folder / name / f"pytorch_model.{name}"
        made[name].parent.mkdir(parents=True)
        torch.save({"tokens.weight": Trap(mark)}, made[name])
    made["legacy"] = folder / "legacy" / "model.ckpt"
    made["legacy"].parent.mkdir()
    torch.save({"x": Trap(mark)}, made["legacy"], _use_new_zipfile_serialization=False)
    made["dcp"] = folder / "dcp" / ".metadata"
    made["dcp"].parent.mkdir()
    made["dcp"].write_bytes(pickle.dumps(Trap(mark)))
    (folder / "dcp" / "__0_0.distcp").write_bytes(pickle.dumps(Trap(mark)))
    made["numpy"] = folder / "numpy" / "weights.npy"
    made["numpy"].parent.mkdir()
    np.save(made["numpy"], np.array([Trap(mark)], dtype=object), allow_pickle=True)
    return made


def test_the_traps_work_and_none_of_ours_steps_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.checkpoint.pretrained import offered

    mark = tmp_path / "mark"
    made = traps(tmp_path / "traps", mark)
    for name, path in made.items():
        if name == "dcp":
            pickle.loads(path.read_bytes())
        elif name == "numpy":
            np.load(path, allow_pickle=True)
        else:
            torch.load(path, weights_only=False)
        assert mark.exists(), name
        mark.unlink()
    save(tmp_path / "run" / "checkpoints", some_tensors(), world=1)
    good = saved_in(tmp_path / "run" / "checkpoints")
    for name, path in made.items():
        for given in (path, path.parent):
            with pytest.raises(UserError, match=r"runs code|no \.safetensors file|not a safetensors file"):
                offered(given)
            for words in (["verify"], ["show"], ["list"], ["convert"]):
                main(["ckpt", *words, str(given), *([str(tmp_path / "out")] if words == ["convert"] else [])])
        copy = tmp_path / f"with-{name}" / "checkpoints"
        shutil.copytree(good, copy / good.name)
        shutil.copy(path, copy / good.name / path.name)  # beside good files it is not even looked at
        assert store.problems(copy / good.name) == []
        shutil.copy(path, copy / good.name / "rank-00000.safetensors")  # in place of one it is damage
        assert store.problems(copy / good.name)
        shutil.copy(path, copy / good.name / "manifest.json")
        assert store.problems(copy / good.name) and store.complete(copy) == []
    capsys.readouterr()
    assert not mark.exists()


def test_no_module_of_the_room_can_unpickle() -> None:
    for file in (Path(saver.__file__).parent).glob("*.py"):
        source = file.read_text()
        assert not any(word in source for word in ("import pickle", "torch.load(", "np.load", "eval(", "exec(")), file


# ---------------------------------------------------------------- how often


@pytest.mark.parametrize(("cost", "mtbf"), [(0.3, 3600.0), (60.0, 86400.0), (300.0, 7200.0), (1800.0, 14400.0)])
def test_the_interval_loses_the_least_time(cost: float, mtbf: float) -> None:
    """Held against a search over the exact share that is lost."""
    found = interval.best_interval(cost, mtbf)
    grid = np.geomspace(found / 20, found * 20, 20001)
    best = min(grid, key=lambda seconds: interval.lost_share(float(seconds), cost, mtbf))
    assert found == pytest.approx(best, rel=0.02)
    young = (2 * cost * mtbf) ** 0.5
    assert interval.lost_share(found, cost, mtbf) <= interval.lost_share(young, cost, mtbf) * (1 + 1e-9)


def test_intervals_in_steps_and_times_that_people_write() -> None:
    assert interval.best_interval(100.0, 40.0) == 40.0
    assert interval.steps_between(0.5, 3600.0, 0.1, 10**6) == round(interval.best_interval(0.5, 3600.0) / 0.1)
    assert interval.steps_between(0.5, 3600.0, 1e9, 100) == 1 and interval.steps_between(0.5, 3600.0, 0.0, 100) == 100
    assert [interval.parse_duration(text) for text in ("90s", "30m", "1.5h", "2d")] == [90.0, 1800.0, 5400.0, 172800.0]
    for text in ("4", "h", "-3h", "0h", "4 weeks"):
        with pytest.raises(UserError, match="not a length of time"):
            interval.parse_duration(text)


# ---------------------------------------------------------------- the command


def test_looking_at_checkpoints_needs_no_torch() -> None:
    code = "import sys, foretell.cli.ckpt, foretell.checkpoint.store, foretell.checkpoint.interval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, timeout=60).returncode == 0



def test_the_command_lists_verifies_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    good: set[Path] = set()
    for step in (5, 10):
        save(run / "checkpoints", some_tensors(), step=step, good=good)
    assert main(["ckpt", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000010", "step-00000005"] and "dp_shard 2" in lines[0]
    assert main(["ckpt", "verify", str(run)]) == 0 and "as it was written" in capsys.readouterr().out
    assert main(["ckpt", "show", str(run), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "step        10" in told and "model       10 tensors" in told and "model/t1.weight  12x4 bfloat16" in told
    assert main(["ckpt", "show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["step"] == 10 and found["schema_version"] and "files" in found["checkpoint"]
    file = saved_in(run / "checkpoints", 10) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["ckpt", "verify", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["good"] and "rank-00001.safetensors is damaged" in found["problems"][0]
    assert main(["ckpt", "verify", str(saved_in(run / "checkpoints", 5))]) == 0
    file.unlink()
    assert main(["ckpt", "list", str(run)]) == 0 and "rank-00001.safetensors is missing" in capsys.readouterr().out
    assert main(["ckpt", "list", str(run), "--json"]) == 0
    assert [row.get("step") for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [None, 5]


def test_paths_that_are_no_checkpoint_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["list", str(tmp_path / "file")], "is a file"),
        (["verify", str(tmp_path / "file")], "is a file and no checkpoint"),
        (["verify", str(tmp_path / "nowhere")], "there is no folder"),
        (["show", str(tmp_path / "empty")], "has no checkpoint"),
        (["convert", str(tmp_path / "empty"), str(tmp_path / "x")], "has no checkpoint"),
    ):
        assert main(["ckpt", *words]) == 2
        told = capsys.readouterr().err
        assert said in told and len(told.splitlines()) == 1
