"""Weights out of a checkpoint, as Hugging Face keeps them: safetensors files of a few gigabytes and an index."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.checkpoint.format import CODES, TensorMeta
from foretell.checkpoint.pretrained import INDEX, buffers_of
from foretell.checkpoint.read import Reader, item_bytes
from foretell.checkpoint.store import SavedCheckpoint, sync
from foretell.checkpoint.tree import dtype_name, dtype_of
from foretell.checkpoint.write import check_room, pwrite
from foretell.errors import FileFormatError, UserError

SHARD_BYTES = 5 * 10**9
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def to_hugging_face(
    saved: SavedCheckpoint, out: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES, config: Mapping[str, Any] | None = None
) -> Written:
    """Write the model's weights under their own names, all of them or nothing. `config` becomes config.json."""
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype} is not one to write weights in", f"give one of {', '.join(DTYPES)}")
    refuse_taken(out)
    reader = Reader(saved)
    buffers = buffers_of(reader)
    listed = {full.removeprefix("model/"): spec for full, spec in reader.tensors.items() if full.startswith("model/")}
    if "__metadata__" in listed:
        raise FileFormatError(f"{saved.path} has a weight that is called __metadata__, which no safetensors file can", "rename it")
    listed |= {name: TensorMeta(tuple(value.shape), dtype_name(value.dtype)) for name, value in buffers.items() if name not in listed}
    listed = {name: _as(spec, dtype) for name, spec in listed.items()}

    def tensor(name: str) -> Tensor:
        value = buffers[name] if name in buffers else reader.whole(f"model/{name}")
        return value.to(dtype_of(listed[name].dtype)).contiguous()

    return written_weights(out, listed, tensor, shard_bytes=shard_bytes, config=config)


def written_weights(
    out: Path, listed: Mapping[str, TensorMeta], tensor: Callable[[str], Tensor], *, shard_bytes: int = SHARD_BYTES,
    config: Mapping[str, Any] | None = None,
) -> Written:  # fmt: skip
    """The weights of a whole model as Hugging Face keeps them."""
    shards = list(_shards(listed, shard_bytes))
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    more: dict[str, Any] = {}
    if len(shards) > 1:
        where = {one: name for name, some in zip(names, shards, strict=True) for one in some}
        more[INDEX] = {"metadata": {"total_size": sum(map(item_bytes, listed.values()))}, "weight_map": dict(sorted(where.items()))}
    if config is not None:
        more["config.json"] = config
    return written_folder(out, {name: {one: listed[one] for one in some} for name, some in zip(names, shards, strict=True)}, tensor, more)


def refuse_taken(out: Path) -> None:
    """Raise where something is at the place of a new folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already", "give a folder that is not there yet")


def written_folder(
    out: Path, files: Mapping[str, Mapping[str, TensorMeta]], tensor: Callable[[str], Tensor], more: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Written:  # fmt: skip
    """A folder of safetensors files, and of JSON beside them: all of it or nothing."""
    refuse_taken(out)
    partial = out.with_name(f".{out.name}.partial")
    specs = [spec for some in files.values() for spec in some.values()]
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        check_room(partial, sum(map(item_bytes, specs)))
        for name, some in files.items():
            _write(partial / name, some, tensor, metadata or {})
        for name, content in more.items():
            _dump(partial / name, content)
        sync(partial)
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{out} cannot be written: {error.strerror or error}", "give another folder") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Written(path=out, files=tuple(files), tensors=len(specs), bytes=sum(map(item_bytes, specs)))


def _as(spec: TensorMeta, dtype: str | None) -> TensorMeta:
    return TensorMeta(spec.shape, dtype) if dtype and dtype_of(spec.dtype).is_floating_point else spec


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _shards(listed: Mapping[str, TensorMeta], most: int) -> Iterator[list[str]]:
    """Names in the order they are in, as many to a file as fit."""
    row: list[str] = []
    size = 0
    for name, spec in listed.items():
        if row and size + item_bytes(spec) > most:
            yield row
            row, size = [], 0
        row.append(name)
        size += item_bytes(spec)
    if row:
        yield row


def _write(path: Path, listed: Mapping[str, TensorMeta], tensor: Callable[[str], Tensor], metadata: Mapping[str, str]) -> None:
    """One file, tensor by tensor: no more than one of them is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    order = sorted(listed, key=lambda name: (-torch.empty(0, dtype=dtype_of(listed[name].dtype)).element_size(), name))
    for name in order:
        spec = listed[name]
        if spec.dtype not in CODES:
            raise UserError(f"{name} is of {spec.dtype}, which safetensors files do not have", f"convert with --dtype {DTYPES[0]}")
        header[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + item_bytes(spec)]}
        at += item_bytes(spec)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        pwrite(handle, len(head).to_bytes(8, "little") + head, 0)
        for name in order:
            value = tensor(name)
            if value.numel():
                raw = value.reshape(-1).view(torch.uint8).numpy()
                pwrite(handle, raw, 8 + len(head) + header[name]["data_offsets"][0])
        os.fsync(handle)
    finally:
        os.close(handle)


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n", encoding="utf-8")
