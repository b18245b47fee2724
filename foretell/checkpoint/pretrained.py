"""Weights from elsewhere into a fresh model: safetensors files, Hugging Face folders, checkpoints of foretell.

Everything is matched and checked before the first weight is written: a model is loaded whole or left alone. Files that
could run code when they are read are refused, whatever they are called.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.checkpoint import about, store
from foretell.checkpoint.format import MANIFEST, NAMES, OLDER, Damaged, TensorMeta, itemsize, shape_of
from foretell.checkpoint.read import Reader
from foretell.checkpoint.tree import dtype_name, dtype_of
from foretell.errors import FileFormatError, UserError

INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 2**28
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz", ".distcp", ".metadata", ".joblib", ".tar")
_SAFE = "give a .safetensors file, a folder of them, or a checkpoint of foretell"
_SHOWN = 5
_ADAPTER = re.compile(r"\.lora_A(\.weight)?$")


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """What `--init-from` did."""

    path: str
    matched: tuple[str, ...]
    missing: tuple[str, ...]
    """Of the model, in no file: they keep what they were built with, as was asked."""
    left_over: tuple[str, ...]
    """In the files, of no use to the model."""
    built: tuple[str, ...] = ()
    """Buffers in no file: the model makes them itself."""
    cast: Mapping[str, int] = field(default_factory=dict)
    """`bfloat16 to float32` → how many."""
    prefix: str = ""
    """How names differ, in words."""

    def lines(self) -> list[str]:
        found = [f"{len(self.matched)} tensors from {self.path}" + (f" ({self.prefix})" if self.prefix else "")]
        found += [f"  {count} from {how}" for how, count in self.cast.items()]
        for what, names in (("not in it, kept as built", self.missing), ("left over", self.left_over)):
            if names:
                found.append(f"  {len(names)} {what}: {_some(names)}")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "cast": dict(self.cast)}


@dataclass(frozen=True)
class Offer:
    """A tensor that is there to be had; read when asked."""

    spec: TensorMeta
    read: Callable[[], Tensor]


def load_into(model: nn.Module, path: Path, *, may_miss: Sequence[str] = ()) -> InitReport:
    """Put pretrained weights into a model of real tensors. `may_miss`: names, or their beginnings, that need not be there."""
    offers = offered(path)
    wanted = _wanted(model)
    own = {name for group in wanted for name in group.names}
    if any(_ADAPTER.search(name) and name not in own for name in offers):
        raise UserError(f"{path} has adapters and not the weights of a model", "the weights they were trained on; or foretell run ckpt merge, first")
    rename, words = _renaming(offers, [name for group in wanted for name in group.names])
    named: dict[str, str] = {}
    for original in offers:
        named.setdefault(rename(original), original)
    pairs: list[tuple[_TiedNames, list[str]]] = []
    missing: list[str] = []
    built: list[str] = []
    wrong: list[str] = []
    for group in wanted:
        had = [named[name] for name in group.names if name in named]
        if not had:
            optional = not group.is_parameter
            allowed = any(name == one or name.startswith(f"{one.rstrip('.')}.") for name in group.names for one in may_miss)
            (built if optional else missing if allowed else wrong).append(group.names[0])
            continue
        pairs.append((group, had))
    unlike = [text for group, had in pairs for text in _unlike(group, [(name, offers[name].spec) for name in had])]
    _refuse(path, wrong, unlike, matched=len(pairs))
    staged = [(group.tensor, _read(group, had, offers)) for group, had in pairs]
    cast: dict[str, int] = {}
    with torch.no_grad():
        for tensor, value in staged:
            if value.dtype != tensor.dtype:
                how = f"{dtype_name(value.dtype)} to {dtype_name(tensor.dtype)}"
                cast[how] = cast.get(how, 0) + 1
            tensor.copy_(value)
    used = {name for _, had in pairs for name in had}
    path = store.resolve(path) if path.is_dir() and _has_checkpoints(path) else path
    return InitReport(
        path=str(path), matched=tuple(group.names[0] for group, _ in pairs), missing=tuple(missing), built=tuple(built),
        left_over=tuple(name for name in offers if name not in used), cast=cast, prefix=words,
    )  # fmt: skip


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


# --- matching --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TiedNames:
    """A tensor of the model under all its names."""

    names: tuple[str, ...]
    tensor: Tensor
    is_parameter: bool


def _wanted(model: nn.Module) -> list[_TiedNames]:
    groups: dict[int, tuple[list[str], Tensor, bool]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), ([], parameter.detach(), True))[0].append(name)
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            groups.setdefault(id(value), ([], value.detach(), False))[0].append(name)
    return [_TiedNames(tuple(names), tensor, is_parameter) for names, tensor, is_parameter in groups.values()]


def _renaming(offers: Iterable[str], wanted: Sequence[str]) -> tuple[Callable[[str], str], str]:
    """Names as they are, or with one word before them taken away or added: whichever fits most."""
    names, targets = list(offers), set(wanted)
    ways: list[tuple[Callable[[str], str], str]] = [(lambda name: name, "")]
    for first in sorted({name.partition(".")[0] for name in names if "." in name}):
        ways.append((functools.partial(_without, f"{first}."), f"their names without '{first}.'"))
    for first in sorted({name.partition(".")[0] for name in wanted if "." in name}):
        ways.append((functools.partial(operator.add, f"{first}."), f"their names after '{first}.'"))
    return max(ways, key=lambda way: len({way[0](name) for name in names} & targets))


def _without(first: str, name: str) -> str:
    return name.removeprefix(first)


def _unlike(group: _TiedNames, had: Sequence[tuple[str, TensorMeta]]) -> list[str]:
    mine = TensorMeta(tuple(group.tensor.shape), dtype_name(group.tensor.dtype))
    found = []
    for name, spec in had:
        floats = dtype_of(spec.dtype).is_floating_point == group.tensor.is_floating_point()
        if spec.shape != mine.shape or not floats:
            found.append(f"{group.names[0]} is {mine} in the model and {name} is {spec}")
    return found


def _refuse(path: Path, missing: Sequence[str], unlike: Sequence[str], *, matched: int) -> None:
    if not unlike and not missing and matched:
        return
    if not matched:
        raise UserError(f"no tensor of {path} has a name that the model knows, such as {_some(missing[:1])}", "give the weights of this model")
    told = [*unlike, *([f"{len(missing)} tensors of the model are not there: {_some(missing)}"] if missing else [])]
    remedy = "give the weights of this model"
    if missing and not unlike:
        firsts = sorted({name.partition(".")[0] for name in missing})
        remedy += f", or let these begin as they are built with --init-missing {','.join(firsts[:_SHOWN])}"
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    raise UserError(
        f"{path} does not fit the model, nothing was loaded: {'; '.join(told[:_SHOWN])}{more}", remedy,
        "\n".join([*unlike, *missing]) if more or len(missing) > _SHOWN else "",
    )  # fmt: skip


def _read(group: _TiedNames, had: Sequence[str], offers: Mapping[str, Offer]) -> Tensor:
    value = offers[had[0]].read()
    for other in had[1:]:
        if not torch.equal(value, offers[other].read()):
            raise UserError(
                f"{had[0]} and {other} are one tensor in the model and differ in what is to be loaded, nothing was loaded",
                "give weights whose tied tensors are equal",
            )
    return value


# --- what is there ---------------------------------------------------------------------------------------------------


def offered(path: Path) -> dict[str, Offer]:
    """Every tensor of a file or folder by name."""
    if path.is_dir():
        return _of_folder(path)
    if not path.exists():
        raise UserError(f"there is nothing at {path}", _SAFE)
    return _of_file(path)


def _has_checkpoints(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / "checkpoints").is_dir() or bool(store.candidates(path))


def _of_folder(path: Path) -> dict[str, Offer]:
    if _has_checkpoints(path):
        return _of_checkpoint(store.resolve(path))
    files = sorted(path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        files = _indexed(path)
    if not files:
        others = [one.name for one in path.iterdir() if one.suffix in _PICKLES or one.name in _PICKLES]
        if others:
            raise _pickled(path / sorted(others)[0])
        raise UserError(f"{path} has no .safetensors file", _SAFE)
    found: dict[str, Offer] = {}
    for file in files:
        for name, offer in _of_file(file).items():
            if name in found:
                raise FileFormatError(f"{name} is in two files of {path}", "leave one of them")
            found[name] = offer
    return found


def _indexed(path: Path) -> list[Path]:
    """Files that the index names; all of them must be there, and none elsewhere."""
    try:
        listed = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in listed.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{path / INDEX} cannot be read: {error}", "fetch the folder again") from error
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+\.safetensors", name):
            raise FileFormatError(f"{path / INDEX} names '{name}', which is no file of the folder", "fetch the folder again")
        if not (path / name).is_file():
            raise FileFormatError(f"{path / name} is missing: the index names it", "fetch the folder again")
    found = {name for file in names for name in _of_file(path / file)}
    lacking = sorted(set(listed) - found)
    if lacking:
        raise FileFormatError(f"the index of {path} names {_some(lacking)}, which no file has", "fetch the folder again")
    return [path / name for name in names]


def _of_checkpoint(path: Path) -> dict[str, Offer]:
    reader = Reader(store.look(path))
    found = {}
    for full, spec in reader.tensors.items():
        if full.startswith("model/"):
            found[full.removeprefix("model/")] = Offer(spec, lambda full=full: reader.whole(full))  # type: ignore[misc]
    for name, value in buffers_of(reader).items():
        found.setdefault(name, Offer(TensorMeta(tuple(value.shape), dtype_name(value.dtype)), lambda value=value: value))  # type: ignore[misc]
    return found


def buffers_of(reader: Reader) -> dict[str, Tensor]:
    """Buffers of the whole model, each from the first rank that has it."""
    found: dict[str, Tensor] = {}
    for rank in sorted(reader.headers):
        outline = next((part for key, part in reader.headers[rank].own["{"] if key == "buffers"), None)
        if isinstance(outline, dict) and not {name for name, _ in outline.get("{", ())} <= found.keys():
            for name, value in reader.own(rank, only="buffers").items():
                if not isinstance(value, Tensor) or not isinstance(name, str):
                    raise Damaged(f"{reader.saved.path} has a buffer {name} that is no tensor", OLDER)
                found.setdefault(name, value)
    return found


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path} is of a kind that runs code when it is read, and is never loaded",
        "turn it into safetensors where you trust it (safetensors.torch.save_file), then give that",
    )


def _of_file(path: Path) -> dict[str, Offer]:
    """A safetensors file: its header is read, its tensors are mapped."""
    try:
        size, raw = _header_of(path)
    except OSError as error:
        raise FileFormatError(f"{path} cannot be read: {error.strerror or error}", _SAFE) from error
    base = 8 + len(raw)
    try:
        header = json.loads(raw, object_pairs_hook=about.once)
        header.pop("__metadata__", None)
        found = {name: _offer(path, base, size, name, entry) for name, entry in header.items()}
        places = sorted(entry["data_offsets"] for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", _SAFE) from error
    at = 0
    for start, end in places:
        if start != at:
            raise FileFormatError(f"{path} has tensors that overlap, or bytes of none at {at}: it was changed", "fetch it again")
        at = end
    if at != size - base:
        raise FileFormatError(f"{path} has {size - base} bytes of tensors and lists {at}: it is cut short or changed", "fetch it again")
    return found


def metadata_of(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself, as far as it is text; empty where it says nothing that can be read."""
    try:
        said = json.loads(_header_of(path)[1]).get("__metadata__", {})
        return {name: value for name, value in said.items() if isinstance(value, str)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _header_of(path: Path) -> tuple[int, bytes]:
    """The size of a safetensors file, and its header."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a plain file")
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(status.st_size - 8, MOST_HEADER_BYTES):
            if path.suffix in _PICKLES or prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05") or prefix[:6] == b"\x93NUMPY":
                raise _pickled(path)
            raise FileFormatError(f"{path} is not a safetensors file, or cut short", _SAFE)
        return status.st_size, stream.read(length)


def _offer(path: Path, base: int, size: int, name: str, entry: Mapping[str, Any]) -> Offer:
    spec = TensorMeta(shape_of(entry["shape"]), NAMES[entry["dtype"]])
    start, end = (about.whole(value, f"a place of {name}") for value in entry["data_offsets"])
    if end - start != prod(spec.shape) * itemsize(spec.dtype) or base + end > size:
        raise ValueError(f"{name} has another size than it says")

    def read() -> Tensor:
        raw = torch.empty(end - start, dtype=torch.uint8)
        handle = os.open(path, os.O_RDONLY)
        try:
            view, got = memoryview(raw.numpy()), 0
            while got < len(view):
                more = os.preadv(handle, [view[got:]], base + start + got)
                if not more:
                    raise FileFormatError(f"{path} ends within {name}", "fetch it again")
                got += more
        finally:
            os.close(handle)
        return raw.view(dtype_of(spec.dtype)).view(spec.shape) if raw.numel() else torch.empty(spec.shape, dtype=dtype_of(spec.dtype))

    return Offer(spec, read)
