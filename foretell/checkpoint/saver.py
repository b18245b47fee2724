"""All ranks' files into one checkpoint, while training goes on.

    begin   all ranks agree on a folder; what forward changes at once (buffers) is copied aside
    copy    weights and optimizer state are copied while the next step goes forward and backward, which leaves them as
            they are; training waits for the rest of this alone, before it updates them. What is on disk, and where memory
            is short what is in host memory, is written from where it is, and training waits for that too
    write   a thread of each rank writes its file with checksums and syncs it
    commit  rank 0 sees that every tensor is there in full, writes the manifest, and gives the folder its name
    check   each rank reads its file back; what is older than the last N good ones goes

Threads talk over a group of their own and never over the model's. One save is under way at a time. Whatever fails, in
any thread of any rank, all ranks learn of it, the folder goes and the checkpoint before stays as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from foretell.checkpoint import store
from foretell.checkpoint.format import (
    MANIFEST,
    CheckpointFile,
    Header,
    Manifest,
    TensorMeta,
    dump_manifest,
    file_name,
    parse_header,
    read_start,
)
from foretell.checkpoint.store import PARTIAL, SavedCheckpoint
from foretell.checkpoint.write import FileLayout, Image, Live, TensorPiece, pwrite, write_file
from foretell.errors import FileFormatError, UserError

KEEP = 2
"""Good checkpoints that stay, unless told otherwise."""
MEMORY_SHARE = 0.8
"""Of the host's free memory: an image that needs more is not made, and training waits while the file is written."""


class SaveGroup(Protocol):
    """The ranks that save together."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank, as JSON can say it."""
        ...


class HostCopies(Protocol):
    """Hosts that share no folder: each has one of its own, with the files of its ranks and copies of those of another."""

    @property
    def leads(self) -> bool:
        """Whether this rank names and removes folders of its host."""
        ...

    def copy(self, folder: Path) -> None:
        """Send this rank's file to where its copy is kept, and write what others send."""
        ...


@dataclass(frozen=True, kw_only=True)
class NotSaved:
    """A save that failed: nothing of it is left, and what was saved before is as it was."""

    step: int
    why: str


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """How a save went."""

    result: SavedCheckpoint | NotSaved
    stall_seconds: float
    """How long training waited."""
    seconds: float
    """From the first word to the folder's name."""
    check_seconds: float = 0.0
    """Reading back, after that."""
    direct_bytes: int = 0
    """That were written from host memory itself, because it had no room for a copy of them: training waited for that."""
    write_seconds: tuple[float, ...] = ()
    """Of each rank, for its own file; empty where it was not saved."""

    @property
    def slowest(self) -> tuple[int, float, float] | None:
        """The rank that wrote longest, its seconds, and the median of the others; None where there are none."""
        if len(self.write_seconds) < 2:
            return None
        rank = max(range(len(self.write_seconds)), key=self.write_seconds.__getitem__)
        return rank, self.write_seconds[rank], median(s for one, s in enumerate(self.write_seconds) if one != rank)


@dataclass(kw_only=True)
class _Under:
    """A save under way."""

    step: int
    generation: str
    partial: Path
    final: Path
    about: Mapping[str, Any]
    layout: FileLayout
    source: Image | Live
    began: float
    stall_seconds: float = 0.0
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when weights may be changed again; on a GPU, when all copies are asked for."""
    device: _Device | None = None
    broken: str = ""
    """Why tensors could not be copied."""
    write_seconds: tuple[float, ...] = ()
    """Of each rank, once all have told."""


class _Device:
    """Copies from a GPU, on a stream of their own: after what was asked for before, before what is asked for later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = next(tensor.device for tensor in tensors if tensor.device.type == "cuda")
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self.done = torch.cuda.Event()


class Saver:
    """Saves of one run on this rank. `team` is used by the caller's thread, `back` by the writing thread alone."""

    def __init__(
        self, folder: Path, team: SaveGroup, back: SaveGroup, *, keep: int = KEEP, pin: bool = False,
        spare: Callable[[], int | None] | None = None, peers: HostCopies | None = None, room: Callable[[int], None] = lambda _: None,
        reads_back: bool = True,
    ) -> None:  # fmt: skip
        """`spare` tells how many bytes of host memory can be had; None where that is not known. `peers` are there where each host
        has a folder of its own; `room` raises where the folder has no room for so many bytes. Without `reads_back` whoever loads a
        checkpoint is the first to verify it."""
        self.peers, self.room, self.reads_back = peers, room, reads_back
        self.leads = peers.leads if peers is not None else team.rank == 0
        self.folder, self.team, self.back, self.keep, self.pin = folder, team, back, keep, pin
        self.spare = spare or free_memory
        self.good: set[Path] = set()
        """Checkpoints that were read from end to end by this run."""
        self._image: Image | None = None
        self._thread: threading.Thread | None = None
        self._warming: threading.Thread | None = None
        self._done: SaveResult | None = None
        self._under: _Under | None = None
        self._last: _Under | None = None
        """What goes on beside training, until it is told: how long training waits for it is known late."""
        self.stall_seconds = 0.0
        """How long training waited for the last save."""

    # ------------------------------------------------------------ what the training loop calls

    def warm(self, pieces: Sequence[TensorPiece], own: Mapping[str, Any]) -> None:
        """Get memory for images ahead of the first save, aside; tensors will be of these shapes."""
        layout = FileLayout(pieces, own, {})

        def work() -> None:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._image = self._new_image(layout)

        self._warming = threading.Thread(target=work, name="checkpoint-memory", daemon=True)
        self._warming.start()

    def begin(
        self, step: int, pieces: Sequence[TensorPiece], own: Mapping[str, Any], about: Mapping[str, Any], *,
        extra: Mapping[str, Any] | None = None, wait: bool = False,
    ) -> None:  # fmt: skip
        """Save this moment; all ranks call it. With `wait` it is done when this returns, and no image is made."""
        self.wait()
        self._last = None
        began = time.perf_counter()
        made = self._agree(step, pieces, own, extra or {})
        if isinstance(made, NotSaved):
            self._done = SaveResult(result=made, stall_seconds=time.perf_counter() - began, seconds=time.perf_counter() - began)
            return
        generation, layout = made
        name = store.folder_name(step)
        under = _Under(
            step=step, generation=generation, partial=self.folder / f"{name}.{generation[:8]}{PARTIAL}",
            final=self.folder / name, about=about, layout=layout, source=Live(layout), began=began,
        )  # fmt: skip
        image = None if wait else self._image_for(layout)
        if image is None:
            self._work(under)
            assert self._done is not None
            self.stall_seconds = time.perf_counter() - began
            self._done = replace(self._done, stall_seconds=self.stall_seconds)
            return
        under.source, self._under, self._last = image, under, under
        image.take(layout, own=True)
        if any(tensor.device.type == "cuda" for tensor in layout.tensors):
            under.device = _Device(layout.tensors)
            torch.cuda.current_stream(under.device.device).synchronize()  # buffers are small
        under.stall_seconds = time.perf_counter() - began
        self._thread = threading.Thread(target=self._copy_and_work, args=(under, image), name="checkpoint", daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """Wait until weights and optimizer state are copied; to be called before every update of them."""
        under, self._under = self._under, None
        if under is None:
            return
        began = time.perf_counter()
        under.copied.wait()
        if under.device is not None:
            torch.cuda.current_stream(under.device.device).wait_event(under.device.done)
        under.stall_seconds += time.perf_counter() - began
        self.stall_seconds = under.stall_seconds

    def poll(self) -> SaveResult | None:
        """How the last save went, told once and as soon as it is known."""
        if self._thread is not None and self._thread.is_alive():
            return None
        self._thread = None
        done, self._done = self._done, None
        under, self._last = self._last, None
        return replace(done, stall_seconds=under.stall_seconds) if done is not None and under is not None else done

    @property
    def writing(self) -> bool:
        """Whether a save was under way beside training since its end was last asked for."""
        return self._thread is not None

    def wait(self, timeout_s: float | None = None) -> None:
        """Until nothing is under way."""
        for thread in (self._warming, self._thread):
            if thread is not None:
                thread.join(timeout_s)
        self._warming = None

    # ------------------------------------------------------------ begin

    def _agree(
        self, step: int, pieces: Sequence[TensorPiece], own: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> tuple[str, FileLayout] | NotSaved:
        """A folder for all of them, and what this rank puts there."""
        generation, layout = secrets.token_hex(8), None
        said: dict[str, Any] = {"generation": generation}
        try:
            layout = FileLayout(pieces, own, extra)
            self.room(layout.bytes)
            if self.team.rank == 0:
                self._make_folder(f"{store.folder_name(step)}.{generation[:8]}{PARTIAL}")
        except (OSError, UserError, RuntimeError, MemoryError) as error:
            said["why"] = _words(error)
        told = self.team.gather(said)
        why = _first_why(told)
        if why or layout is None:
            if self.team.rank == 0:
                shutil.rmtree(self.folder / f"{store.folder_name(step)}.{generation[:8]}{PARTIAL}", ignore_errors=True)
            return NotSaved(step=step, why=why)
        return str(told[0]["generation"]), layout

    def _make_folder(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        (self.folder / name).mkdir(mode=0o700)

    def _image_for(self, layout: FileLayout) -> Image | None:
        """Memory to copy everything to; None where there is not enough."""
        image, ways = self._image, (layout.elsewhere(host=False), layout.elsewhere(host=True))
        if image is None or image.form != layout.form or image.direct not in ways:
            image = self._image = None
            try:
                self._image = self._new_image(layout)
            except (RuntimeError, MemoryError):
                return None
        return self._image

    def _new_image(self, layout: FileLayout) -> Image | None:
        """An image of everything that has no bytes elsewhere; where that is too large, of what is not in host memory."""
        free = self.spare()
        for host in (False, True):
            direct = layout.elsewhere(host=host)
            size = layout.bytes - sum(layout.entries[number].end - layout.entries[number].start for number in direct)
            taken = 1 << (size - 1).bit_length() if self.pin and size else size  # pinned memory comes in powers of two
            if free is None or taken <= MEMORY_SHARE * free:
                return Image(layout, pin=self.pin, direct=direct)
        return None

    # ------------------------------------------------------------ copy, write, commit, check

    def _copy_and_work(self, under: _Under, image: Image) -> None:
        try:
            if under.device is None:
                image.take(under.layout, own=False)
            else:
                with torch.cuda.stream(under.device.stream):
                    image.take(under.layout, own=False)
                    under.device.done.record()
                if not image.direct:
                    under.copied.set()
                under.device.done.synchronize()
            image.forget(under.layout, direct=False)
            if not image.direct:
                under.copied.set()
        except Exception as error:
            under.broken = _words(error)
        try:
            self._work(under)
        finally:
            image.forget(under.layout, direct=True)
            under.copied.set()

    def _work(self, under: _Under) -> None:
        try:
            result, seconds, check_seconds = self._saved(under)
        except Exception as error:  # whatever it is, it must be told and not die with its thread
            seconds, check_seconds = time.perf_counter() - under.began, 0.0
            result = NotSaved(step=under.step, why=f"rank {self.back.rank}: {_words(error)}")
        direct = under.source.direct if isinstance(under.source, Image) else frozenset()
        sizes = [under.layout.entries[number] for number in direct if under.layout.reads[number] is None]
        self._done = SaveResult(
            result=result, stall_seconds=under.stall_seconds, seconds=seconds, check_seconds=check_seconds,
            direct_bytes=sum(entry.end - entry.start for entry in sizes), write_seconds=under.write_seconds,
        )  # fmt: skip

    def _saved(self, under: _Under) -> tuple[SavedCheckpoint | NotSaved, float, float]:
        name = file_name(self.back.rank)
        own: CheckpointFile | None = None
        said: dict[str, Any] = {}
        try:
            if under.broken:
                raise RuntimeError(under.broken)
            if self.peers is not None:
                under.partial.mkdir(mode=0o700, exist_ok=True)
            began = time.perf_counter()
            own = write_file(
                under.partial / name, under.layout, rank=self.back.rank, step=under.step, generation=under.generation,
                source=under.source, free=under.copied.set,
            )  # fmt: skip
            said = {**vars(own), "seconds": time.perf_counter() - began}
            if self.peers is not None:  # not every host will have every file
                said = said | {"header": read_start(under.partial / name, own.header_bytes).decode("latin-1")}
        except Exception as error:
            said = {"why": _words(error)}
        under.copied.set()
        heard = self.back.gather(said)
        told = [{key: value for key, value in one.items() if key not in ("header", "seconds")} for one in heard]
        headers = [one.get("header", "").encode("latin-1") for one in heard]
        under.write_seconds = tuple(one.get("seconds", 0.0) for one in heard)
        why, manifest, aside = _first_why(told), None, None
        if self.peers is not None and not why:
            why = _first_why(self.back.gather(self._copied(self.peers, under.partial)))
        if self.leads:
            try:
                if not why:
                    manifest, aside = self._commit(under, told, headers)
            except Exception as error:
                why = _words(error)
            if why:
                shutil.rmtree(under.partial, ignore_errors=True)
        why = next(filter(None, self.back.gather(why)), "")
        seconds = time.perf_counter() - under.began
        if why or own is None:
            return NotSaved(step=under.step, why=why), seconds, 0.0
        if manifest is None:
            files = {file_name(rank): CheckpointFile(**one) for rank, one in enumerate(told)}
            manifest = self._draft(under, files)
        saved = SavedCheckpoint(path=under.final, manifest=manifest)
        bad = self._checked(saved, name, aside)
        return NotSaved(step=under.step, why=bad) if bad else saved, seconds, time.perf_counter() - under.began - seconds

    def _draft(self, under: _Under, files: Mapping[str, CheckpointFile]) -> Manifest:
        return Manifest(
            generation=under.generation, step=under.step, world=self.back.world, files=files, tensors={}, about=under.about
        )

    def _copied(self, peers: HostCopies, folder: Path) -> dict[str, str]:
        try:
            peers.copy(folder)
        except Exception as error:
            return {"why": _words(error)}
        return {}

    def _commit(
        self, under: _Under, told: Sequence[Mapping[str, int]], headers: Sequence[bytes]
    ) -> tuple[Manifest, Path | None]:  # fmt: skip
        """Rank 0: everything is there, so it gets its name. What had that name is put aside, and told."""
        draft = self._draft(under, {file_name(rank): CheckpointFile(**one) for rank, one in enumerate(told)})
        written = []
        for name, header in zip(draft.files, headers, strict=True):
            if self.peers is not None and not (under.partial / name).exists():
                written.append(parse_header(header, name, draft.files[name].bytes - draft.files[name].header_bytes))
                continue
            if not (under.partial / name).exists():
                raise OSError(0, f"{name} is not in {under.partial}: the run folder must be one that all machines share")
            written.append(store.read_header(under.partial, name, draft))
        manifest = replace(draft, tensors=_tensors(written), about={**under.about, **_merged(written)})
        lacking = store.missing(manifest, written)
        if lacking:
            raise OSError(0, lacking[0])
        _write_synced(under.partial / MANIFEST, dump_manifest(manifest))
        store.sync(under.partial)
        aside = None
        if under.final.exists():
            aside = under.final.rename(under.final.with_name(f"{under.final.name}-{secrets.token_hex(4)}"))
        under.partial.rename(under.final)
        store.sync(self.folder)
        return manifest, aside

    def _checked(self, saved: SavedCheckpoint, name: str, aside: Path | None) -> str:
        """Read this rank's file back. What is wrong with any rank's; empty where nothing is."""
        found: list[str] = []
        if self.reads_back and (saved.path / name).exists():  # on a slow shared disk the new name may not be known everywhere yet
            found = store.check_file(saved.path, name, saved.manifest)[1]
        why = _first_why(self.back.gather({"why": found[0]} if found else {}))
        if not self.leads:
            return why
        if why:
            store.remove(saved.path)
            return why
        self.good.add(saved.path)
        if aside is not None:
            store.remove(aside)
        for gone in store.prune(self.folder, self.keep, self.good.__contains__):
            self.good.discard(gone)
        return ""


def _tensors(written: Sequence[Header]) -> dict[str, TensorMeta]:
    found: dict[str, TensorMeta] = {}
    for header in written:
        for entry in header.entries:
            if entry.name:
                found.setdefault(entry.name, TensorMeta(entry.shape, entry.dtype))
    return dict(sorted(found.items()))


def _merged(written: Sequence[Header]) -> dict[str, Any]:
    """The optimizer's plain values: groups of equal settings with the names in them, and state that is no tensor."""
    groups: dict[str, tuple[Any, dict[str, None]]] = {}
    state: dict[str, Any] = {}
    for header in written:
        for group in header.extra.get("groups", ()):
            key = json.dumps(group["values"], sort_keys=True)
            groups.setdefault(key, (group["values"], {}))[1].update(dict.fromkeys(group["names"]))
        state.update(header.extra.get("state", {}))
    if not groups:
        return {}
    listed = [{"values": values, "names": sorted(names)} for values, names in groups.values()]
    if len(listed) == 1:
        listed[0].pop("names")  # all of them
    return {"optimizer": {"groups": listed, "state": state}}


def _write_synced(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        pwrite(handle, content, 0)
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_why(told: Sequence[Mapping[str, Any]]) -> str:
    return next((f"rank {rank}: {said['why']}" for rank, said in enumerate(told) if said.get("why")), "")


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return str(error.strerror or error)
    if isinstance(error, UserError | FileFormatError):
        return error.problem
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def free_memory() -> int | None:
    """Bytes of host memory that can be had; None where that is not told."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
