"""What the files of a checkpoint say, written once and read with distrust. No torch, and never a pickle.

    step-00000100/
      manifest.json            what must be there: files with sizes and checksums, tensors with shapes, how it was run
      rank-00000.safetensors   8 bytes of length, a JSON header, then bytes of tensors; others can open it too

The manifest begins with a digest of the rest of itself, and has a checksum of every header. A header has a checksum of
every 8 MiB of every tensor in its file. So no bit of a checkpoint is without a check. All files carry the generation of
the save they belong to: files of two saves of the same step do not go together.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from foretell.checkpoint import about
from foretell.checkpoint.boxes import Box, Shape, whole
from foretell.decode import json_of
from foretell.errors import FileFormatError, UserError
from foretell.units import DTYPE_BYTES

VERSION = 2
KIND = "foretell checkpoint"
MANIFEST = "manifest.json"
CHUNK_BYTES = 8 * 2**20
"""A checksum is of so many bytes of a tensor."""
MOST_MANIFEST_BYTES = MOST_HEADER_BYTES = 2**29
MOST_DIMS = 64
OWN = "rank"
"""First word of the keys of what a rank keeps for itself."""
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""dtype → its name in safetensors files."""
NAMES = {code: name for name, code in CODES.items()}
_FILE = re.compile(r"rank-[0-9]{5,9}\.safetensors")


class Damaged(FileFormatError):
    """A checkpoint, or a file of it, that is not as it was written; an older one may be."""


class TensorMeta(NamedTuple):
    """A whole tensor."""

    shape: Shape
    dtype: str

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "scalar"
        return size if self.dtype == "float32" else f"{size} {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint."""

    bytes: int
    header_bytes: int
    header_crc32: int
    crc32: int
    """Of the checksums of its tensors: equal where weights, optimizer state and buffers are."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint."""

    generation: str
    step: int
    world: int
    files: Mapping[str, CheckpointFile]
    tensors: Mapping[str, TensorMeta]
    """`model/NAME` and `optimizer/NAME/KEY` → the whole tensor."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """plan, data, schedule, optimizer, versions, date."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A box of a tensor in a file."""

    key: str
    name: str
    """Of the whole tensor; empty where the rank keeps it for itself."""
    dtype: str
    shape: Shape
    """Of the whole."""
    box: Box
    start: int
    """Where its bytes begin, after the header."""
    end: int
    crc32: tuple[int, ...] = ()
    """Of every CHUNK_BYTES of it."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one rank wrote."""

    rank: int
    generation: str
    step: int
    entries: tuple[FileEntry, ...]
    own: Any = None
    """Outline of what the rank keeps for itself; see `tree`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Plain values of the optimizer."""


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def itemsize(dtype: str) -> int:
    return DTYPE_BYTES[dtype]


def entry_key(name: str, shape: Shape, box: Box) -> str:
    return name if box == whole(shape) else f"{name}[{box}]"


def chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


# --- headers ---------------------------------------------------------------------------------------------------------


def dump_header(header: Header) -> bytes:
    """Always as long for the same entries, whatever their checksums are."""
    listed: dict[str, Any] = {}
    boxes: dict[str, Any] = {}
    for entry in header.entries:
        sums = "".join(f"{value:08x}" for value in entry.crc32) or "0" * (8 * chunks(entry.end - entry.start))
        listed[entry.key] = _listed(entry.dtype, entry.box, entry.start, entry.end)
        boxes[entry.key] = [entry.name, entry.dtype, entry.shape, entry.box.offset, entry.box.size, sums]
    kept = {
        "kind": KIND, "version": str(VERSION), "generation": header.generation, "rank": str(header.rank),
        "step": str(header.step), "boxes": _text(boxes), "own": _text(header.own), "extra": _text(header.extra),
    }  # fmt: skip
    head = _text({"__metadata__": kept, **listed}).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def _listed(dtype: str, box: Box, start: int, end: int) -> dict[str, Any]:
    """A tensor as other readers of safetensors see it; bytes where they do not know its dtype."""
    plain = dtype in CODES
    return {"dtype": CODES[dtype] if plain else "U8", "shape": list(box.size) if plain else [end - start], "data_offsets": [start, end]}


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def parse_header(raw: bytes, where: str, data_bytes: int) -> Header:
    """`raw` is the length and the header; `data_bytes` what follows. Damage is named with `where`."""
    try:
        if int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise ValueError("its length is not what it says")
        found = _loads(raw[8:])
        kept = found.pop("__metadata__")
        if not all(isinstance(kept[name], str) for name in _KEPT) or kept["kind"] != KIND or kept["version"] != str(VERSION):
            raise ValueError("it is of another version or of another form")
        entries = [_entry(key, about, found[key]) for key, about in _loads(kept["boxes"]).items()]
        if len(entries) != len(found):
            raise ValueError("it lists other tensors than it has")
        at = 0
        for entry in sorted(entries, key=lambda entry: entry.start):
            if entry.start != at:
                raise ValueError(f"{entry.key} does not begin where the one before ends")
            at = entry.end
        if at != data_bytes:
            raise ValueError(f"its tensors have {at} bytes and there are {data_bytes}")
        own, extra = _loads(kept["own"]), _loads(kept["extra"])
        _check_own(own, {entry.key: entry for entry in entries if not entry.name})
        return Header(
            rank=_digits(kept["rank"]), generation=_generation(kept["generation"]), step=_digits(kept["step"]),
            entries=tuple(entries), own=own, extra=extra,
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"the header of {where} cannot be read: {_why(error)}", OLDER) from error


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return "it is of another form" if isinstance(error, TypeError | AttributeError) else str(error)


_KEPT = ("kind", "version", "generation", "rank", "step", "boxes", "own", "extra")


def _loads(text: str | bytes) -> dict[str, Any]:
    found = json_of(text, object_pairs_hook=about.once)
    if not isinstance(found, dict) or not about.is_shallow(found):
        raise ValueError("it is no object, or nested too deep")
    return found


def _digits(text: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError("a number is none")
    return int(text)


def _generation(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{1,64}", value):
        raise ValueError("its generation is none")
    return value


def _entry(key: str, said: Any, listed: Any) -> FileEntry:
    name, dtype, shape, offset, size, sums = said
    box, full = Box(shape_of(offset), shape_of(size)), shape_of(shape)
    if not isinstance(name, str) or _dtype(dtype) is None or not len(box.offset) == len(box.size) == len(full):
        raise ValueError(f"{key} is of no known form")
    if any(end > most for end, most in zip(box.end, full, strict=True)) or (key != entry_key(name, full, box) if name else box != whole(full)):
        raise ValueError(f"{key} is not where it says")
    start, end = (about.whole(value, f"a place of {key}") for value in listed["data_offsets"])
    if end - start != box.volume * itemsize(dtype) or not re.fullmatch(f"[0-9a-f]{{{8 * chunks(end - start)}}}", sums):
        raise ValueError(f"{key} has another size than it says")
    if listed != _listed(dtype, box, start, end):
        raise ValueError(f"{key} is told in two ways")
    crc32 = tuple(int(sums[at : at + 8], 16) for at in range(0, len(sums), 8))
    return FileEntry(key=key, name=name, dtype=dtype, shape=full, box=box, start=start, end=end, crc32=crc32)


def shape_of(value: Any) -> Shape:
    """Sizes that memory can be asked for, also where one of them is 0."""
    if not isinstance(value, list) or len(value) > MOST_DIMS:
        raise ValueError("a shape is none")
    if any(type(size) is int and size < 0 for size in value):
        raise ValueError("a size is negative")
    found = tuple(about.whole(size, "a size") for size in value)
    if prod(max(1, size) for size in found) > about.LARGEST:
        raise ValueError("a shape is too large")
    return found


def _check_own(outline: Any, entries: Mapping[str, FileEntry]) -> None:
    """Whether an outline is one (see `tree`) and names tensors that are there."""
    if not isinstance(outline, dict) or "{" not in outline:
        raise ValueError("what the rank keeps for itself has no names")
    left = [outline]
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            if isinstance(one, list):
                raise ValueError("a list stands where none can")
        elif "$" in one:
            entry = entries.get(one["$"])
            if entry is None or one != {"$": entry.key, "dtype": entry.dtype, "shape": list(entry.shape)}:
                raise ValueError("a tensor that the rank keeps for itself is not as its outline says")
        else:
            (kind, parts), *more = one.items()
            pairs = kind == "{" and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int) for pair in parts)
            if more or not isinstance(parts, list) or not (pairs or kind in ("[", "(")):
                raise ValueError("what the rank keeps for itself is of no known form")
            left += [part for _, part in parts] if pairs else parts


def data_sum(entries: tuple[FileEntry, ...]) -> int:
    """One checksum of all checksums of a file."""
    ordered = sorted(entries, key=lambda entry: entry.start)
    return zlib.crc32(",".join(f"{value:08x}" for entry in ordered for value in entry.crc32).encode())


# --- the manifest ----------------------------------------------------------------------------------------------------

OLDER = "use an older checkpoint"
_FIRST = b'{\n"blake2b": "'
_DIGEST = 32


def dump_manifest(manifest: Manifest) -> bytes:
    content = {
        "kind": KIND, "version": VERSION, "generation": manifest.generation, "step": manifest.step,
        "world": manifest.world, **manifest.about, "files": {name: vars(file) for name, file in manifest.files.items()},
        "tensors": {name: [spec.dtype, *spec.shape] for name, spec in manifest.tensors.items()},
    }  # fmt: skip
    rest = ('",\n' + json.dumps(content, indent=1)[2:] + "\n").encode()
    return _FIRST + _digest(rest) + rest


def _digest(rest: bytes) -> bytes:
    return hashlib.blake2b(rest, digest_size=_DIGEST).hexdigest().encode()


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint must have; raises where that cannot be trusted, without a look at the other files."""
    path = folder / MANIFEST
    try:
        raw = read_file(path, MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        if folder.is_dir():
            raise Damaged(f"{folder} has no {MANIFEST}: it was not finished, or it is no checkpoint", OLDER) from None
        raise UserError(f"there is no checkpoint {folder}", "see `foretell run ckpt list`") from None
    except NotADirectoryError:
        raise UserError(f"{folder} is a file and no checkpoint", "give the folder of a run or of a checkpoint") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}", OLDER) from error
    return parse_manifest(raw, path)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    at = len(_FIRST) + 2 * _DIGEST
    if raw.startswith(_FIRST) and raw[len(_FIRST) : at] != _digest(raw[at:]):
        raise Damaged(f"{path} was changed or cut short: it does not have the digest it says", OLDER)
    content = _content(raw, path)
    version = content.get("version")
    if isinstance(version, int) and version > VERSION and content.get("kind") == KIND:
        raise FileFormatError(
            f"{path} is of version {version} and this foretell reads version {VERSION}", "use a newer foretell"
        )
    if version == 1 and "kind" not in content:
        raise FileFormatError(f"{path} is of version 1, which is no longer read", "use the foretell it was saved with")
    if not raw.startswith(_FIRST) or content.get("kind") != KIND or version != VERSION:
        raise Damaged(f"{path} is no manifest of a checkpoint, or was changed", OLDER)
    try:
        return _manifest(content)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise Damaged(f"{path} cannot be read: {_why(error)}", OLDER) from error


def _content(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(raw, object_pairs_hook=about.once)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise Damaged(f"{path} is cut short or was changed", OLDER)
    return content


def _manifest(content: dict[str, Any]) -> Manifest:
    known = {"blake2b", "kind", "version", "generation", "step", "world", "files", "tensors"}
    files = {name: _file(name, file) for name, file in content["files"].items()}
    world = about.whole(content["world"], "world", least=1)
    if len(files) != world or any(file_name(rank) not in files for rank in range(world)):
        raise ValueError(f"it has {len(files)} files of {world} ranks")
    others = {key: value for key, value in content.items() if key not in known}
    about.check(others, world)
    return Manifest(
        generation=_generation(content["generation"]), step=about.whole(content["step"], "step"), world=world, files=files,
        tensors={name: TensorMeta(shape_of(spec[1:]), _dtype(spec[0])) for name, spec in content["tensors"].items()}, about=others,
    )  # fmt: skip


def _file(name: str, said: Any) -> CheckpointFile:
    if not _FILE.fullmatch(name):
        raise ValueError(f"'{name}' is not the name of a file of a checkpoint")
    sizes = {key: about.whole(said[key], f"{key} of {name}") for key in ("bytes", "header_bytes")}
    sums = {key: about.whole(said[key], f"{key} of {name}", most=2**32 - 1) for key in ("header_crc32", "crc32")}
    if len(said) != 4 or not 0 < sizes["header_bytes"] <= min(sizes["bytes"], MOST_HEADER_BYTES):
        raise ValueError(f"{name} has a header of {sizes['header_bytes']} bytes")
    return CheckpointFile(**sizes, **sums)


def _dtype(name: Any) -> str:
    if not isinstance(name, str) or name not in DTYPE_BYTES:
        raise ValueError(f"dtype {name!a:.60} is not known")
    return name


# --- files that may be anything --------------------------------------------------------------------------------------


def opened(path: Path) -> int:
    """A plain file, open for reading; never a link that leads elsewhere, a pipe or a device."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is not a plain file")
    return handle


def read_start(path: Path, count: int) -> bytes:
    """The first so many bytes of a file."""
    handle = opened(path)
    try:
        return os.pread(handle, count, 0)
    finally:
        os.close(handle)


def read_file(path: Path, most: int) -> bytes:
    handle = opened(path)
    try:
        size = os.fstat(handle).st_size
        if size > most:
            raise OSError(0, f"it has {size} bytes, which is too many")
        with os.fdopen(os.dup(handle), "rb") as stream:
            return stream.read(size)
    finally:
        os.close(handle)
