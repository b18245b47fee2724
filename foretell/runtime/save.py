"""A simple checkpoint: one folder for a step, one file for a rank, and a manifest that says what must be there.

Files are in the safetensors layout (eight bytes of length, a JSON header, then the tensors' bytes), so that any tool
can open them and nothing is ever unpickled. They are written under a temporary name, synced, and renamed in one move
when every rank is done: a folder that has its name is whole, and the one before it is kept until then.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.errors import FileFormatError, UserError
from foretell.runtime.control import Control
from foretell.units import human_bytes

VERSION = 1
MANIFEST = "manifest.json"
KEEP = 2
"""Whole checkpoints that stay."""
_CHUNK_BYTES = 16 * 2**20
_HEADER_MOST_BYTES = 2**28
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A whole checkpoint."""

    path: Path
    step: int
    about: Mapping[str, Any]
    files: Mapping[str, Mapping[str, int]]

    @property
    def bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class NotSaved:
    """A save that failed: nothing of it is left, and what was saved before is as it was."""

    step: int
    why: str


def save(folder: Path, step: int, state: Mapping[str, Any], about: Mapping[str, Any], control: Control) -> Saved | NotSaved:
    """Write this rank's state as part of step `step`; every rank calls it and gets the same answer."""
    final, partial = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial"
    name = f"rank-{control.ranks.rank:05d}.safetensors"
    told = control.gather(_attempt(lambda: _clear(folder, partial)) if control.ranks.is_first else {})
    if not told[0].get("why"):
        told = control.gather(_attempt(lambda: {"name": name, **write_tree(partial / name, state)}))
    why = next((f"rank {rank}: {said['why']}" for rank, said in enumerate(told) if said.get("why")), None)
    files = {said["name"]: {"bytes": said["bytes"], "crc32": said["crc32"]} for said in told if "name" in said}
    about = {**about, "version": VERSION, "step": step, "world": control.ranks.world, "files": files}
    if control.ranks.is_first:
        done = {"why": why} if why else _attempt(lambda: _commit(partial, final, about))
        if done.get("why"):
            shutil.rmtree(partial, ignore_errors=True)
        why = done.get("why")
    why = control.gather(why)[0]
    return NotSaved(step=step, why=why) if why else Saved(path=final, step=step, about=about, files=files)


def _attempt(work: Any) -> dict[str, Any]:
    """What it gave, or why the disk would not have it."""
    try:
        return work() or {}
    except OSError as error:
        return {"why": f"{error.strerror or error}"}


def _clear(folder: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir()


def _commit(partial: Path, final: Path, about: Mapping[str, Any]) -> None:
    missing = [name for name in about["files"] if not (partial / name).is_file()]
    if missing:
        raise OSError(0, f"{missing[0]} is not in {partial}: the run folder must be one that all machines share")
    with (partial / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump(about, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync(partial)
    if final.exists():  # saved before, damaged since: a whole one would not be written again
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)
    for old in complete(final.parent)[KEEP:]:
        shutil.rmtree(old.path, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> list[Saved]:
    """Checkpoints whose files are all there with the right sizes, the newest first."""
    found = []
    for path in folder.glob("step-*"):
        if not re.fullmatch(r"step-\d+", path.name):
            continue
        try:
            about = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            files = {_plain(name): {"bytes": int(f["bytes"]), "crc32": int(f["crc32"])} for name, f in about["files"].items()}
            whole = all((path / name).stat().st_size == file["bytes"] for name, file in files.items())
            if whole and about["version"] == VERSION:
                found.append(Saved(path=path, step=int(about["step"]), about=about, files=files))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return sorted(found, key=lambda saved: saved.step, reverse=True)


def load(saved: Saved, rank: int) -> dict[str, Any]:
    """This rank's state, every byte of it checked; tensors are on the CPU."""
    name = f"rank-{rank:05d}.safetensors"
    if name not in saved.files:
        raise FileFormatError(f"{saved.path} has no file of rank {rank}", "it was saved by fewer ranks")
    return read_tree(saved.path / name, crc32=saved.files[name]["crc32"])


def _plain(name: str) -> str:
    if not re.fullmatch(r"rank-\d+\.safetensors", name):
        raise ValueError(name)
    return name


# --- one file --------------------------------------------------------------------------------------------------------


def write_tree(path: Path, tree: Mapping[str, Any]) -> dict[str, int]:
    """Nested dicts and lists of tensors and plain values into one file; its bytes and checksum."""
    outline = _Outline(tree)
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(outline.tree)}}
    offset = 0
    for name, tensor in outline.tensors.items():
        size = tensor.numel() * tensor.element_size()
        plain = tensor.dtype in _NAMES
        header[name] = {
            "dtype": _NAMES[tensor.dtype] if plain else "U8", "shape": list(tensor.shape) if plain else [size],
            "data_offsets": [offset, offset + size],
        }  # fmt: skip
        offset += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    _check_room(path, 8 + len(head) + offset)
    with path.open("wb") as stream, ThreadPoolExecutor(1) as pool:
        writer = _Writer(stream, pool)
        writer.write(len(head).to_bytes(8, "little") + head)
        for tensor in outline.tensors.values():
            writer.write(_bytes_of(tensor.detach().to("cpu").contiguous()))
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": writer.bytes, "crc32": writer.crc32}


class _Writer:
    """Writes and, at the same time in another thread, sums up."""

    def __init__(self, stream: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self.stream, self.pool = stream, pool
        self.bytes, self.crc32 = 0, 0

    def write(self, content: Any) -> None:
        view = memoryview(content)
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            summed = self.pool.submit(zlib.crc32, piece, self.crc32)
            try:
                self.stream.write(piece)
            finally:
                self.crc32 = summed.result()
            self.bytes += len(piece)


def _check_room(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise OSError(28, f"the disk is full: {human_bytes(size)} to write and {human_bytes(free)} free")


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


class _Outline:
    """A tree with names in place of tensors, as JSON can say it, and the tensors by name. One that is there twice
    (tied weights) is kept once."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}
        self.tree = self._of(tree, "")

    def _of(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            piece = value.to_local() if isinstance(value, DTensor) else value
            key = (piece.data_ptr(), piece.shape, piece.stride(), piece.dtype) if piece.numel() else name
            name = self._names.setdefault(key, name)
            self.tensors[name] = piece
            return {"$": name, "dtype": str(piece.dtype).removeprefix("torch."), "shape": list(piece.shape)}
        if isinstance(value, Mapping):
            return {"{": [[key, self._of(part, f"{name}/{key}" if name else str(key))] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            parts = [self._of(part, f"{name}/{place}") for place, part in enumerate(value)]
            return {"[" if isinstance(value, list) else "(": parts}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise FileFormatError(f"a {type(value).__name__} at {name} cannot be saved", "keep tensors and plain values in the state")


def read_tree(path: Path, *, crc32: int) -> dict[str, Any]:
    """What `write_tree` wrote; a byte that has changed is found before anything is given out."""
    damaged = FileFormatError(f"{path} is damaged: its bytes are not those that were written", "an older checkpoint is used")
    tensors: dict[str, Tensor] = {}
    try:
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if length > min(_HEADER_MOST_BYTES, path.stat().st_size):
                raise damaged
            head = stream.read(length)
            summed = zlib.crc32(head, zlib.crc32(prefix))
            header = json.loads(head)
            outline = json.loads(header.pop("__metadata__")["tree"])
            for name, entry in header.items():
                raw = torch.empty(entry["data_offsets"][1] - entry["data_offsets"][0], dtype=torch.uint8)
                view = memoryview(raw.numpy())
                for start in range(0, len(view), _CHUNK_BYTES):
                    piece = view[start : start + _CHUNK_BYTES]
                    if stream.readinto(piece) != len(piece):  # type: ignore[attr-defined]
                        raise damaged
                    summed = zlib.crc32(piece, summed)
                tensors[name] = raw
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise damaged from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", "see that the run folder is readable") from error
    if summed != crc32:
        raise damaged
    made: dict[str, Any] = _filled(outline, tensors)
    return made


def _filled(outline: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(outline, dict):
        return outline
    if "$" in outline:
        raw, dtype = tensors[outline["$"]], getattr(torch, outline["dtype"])
        return raw.view(dtype).reshape(outline["shape"]) if raw.numel() else torch.empty(outline["shape"], dtype=dtype)
    if "{" in outline:
        return {key: _filled(part, tensors) for key, part in outline["{"]}
    parts = [_filled(part, tensors) for part in outline.get("[") or outline.get("(") or ()]
    return parts if "[" in outline else tuple(parts)


def spread(state: Mapping[str, Any], live: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """A loaded job state with its pieces put back in the place they have on the mesh; `live` is the job's own now."""
    model = {name: _like(value, live["model"].get(name)) for name, value in state["model"].items()}
    moments = {
        name: {key: value if key == "step" else _like(value, parameters.get(name)) for key, value in values.items()}
        for name, values in state["optimizer"]["state"].items()
    }
    return {"model": model, "optimizer": {**state["optimizer"], "state": moments}}


def _like(value: Any, own: Any) -> Any:
    """A rank's piece as a part of the whole, where its counterpart is one."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(own.device), own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
