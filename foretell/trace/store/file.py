"""A trace as a file: JSON with every repeat stored once. Plain data, no torch.

    kind, schema       what this is; another schema is never guessed at
    meta, schedule     as in `Trace`
    texts, paths       names, phases and dtypes; module paths around their integers
    specs              [dtype, size, size, ...]
    patterns           what ops are but for their slots; `storage_patterns` likewise
    strides            how slots move from repetition to repetition
    programs           [key, name, blocks]
    storages           blocks
    resident           integers

A block is [count, items, strides of each item], an item [pattern, slot, slot, ...]; see `fold` for slots. A long
list of integers is itself a list of such blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from foretell.errors import FileFormatError, UserError
from foretell.files import write_atomically
from foretell.trace.fold.repeats import (
    Block,
    FoldedProgram,
    FoldedTrace,
    Pattern,
    StoragePattern,
    fold,
    fold_integers,
    join_path,
    split_op,
    split_storage,
    unfold,
    unfold_integers,
)
from foretell.trace.store.check import fields
from foretell.trace.types import SCHEMA_VERSION, Op, Ref, Storage, TensorSpec, Trace

KIND = "foretell-trace"
_LONG = 32
"""Integers in a row that are worth folding."""
_GZIP = b"\x1f\x8b"
_AGAIN = "trace the model again"
Item = TypeVar("Item")


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace, compressed if the name ends in .gz; a reader sees the old file or the new one, never a part."""
    path = Path(path)
    data = dumps(trace).encode()
    if path.suffix == ".gz":
        import gzip

        data = gzip.compress(data, 6, mtime=0)
    write_atomically(path, data, parents=False)


def load(path: str | Path) -> Trace:
    """The trace in a file; anything wrong with it is one `FileFormatError`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}", "give the path of a trace file") from error
    if data.startswith(_GZIP):
        data = _decompressed(data, str(path))
    return loads(data, str(path))


def dumps(trace: Trace) -> str:
    """A trace as text. `meta` has to be JSON's own kinds of values; tuples in it come back as lists."""
    try:
        return json.dumps(_Writer().document(fold(trace)), allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"the trace cannot be stored: {_line(error)}", "keep to what JSON can hold") from error


def loads(text: str | bytes, name: str = "the trace") -> Trace:
    """The trace in a text that `dumps` wrote; `name` is what errors call it."""
    try:
        data = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        problem = f"{name} is not a trace file: it is no JSON, or cut short ({_line(error)})"
        raise FileFormatError(problem, _AGAIN) from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        found = f"its kind is {kind!r}" if kind is not None else "it has no kind"
        raise FileFormatError(f"{name} is another kind of file: {found}, a trace's is '{KIND}'", "give a trace file")
    if data.get("schema") != SCHEMA_VERSION:
        raise FileFormatError(
            f"{name} has trace schema {data.get('schema')!r}, and this foretell reads {SCHEMA_VERSION}", _AGAIN
        )
    try:
        fields(data)
        return unfold(_Reader(data).trace())
    except KeyError as error:
        raise FileFormatError(f"{name} lacks the field {error}", _AGAIN) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise FileFormatError(f"{name} is damaged ({_line(error)})", _AGAIN) from error


def _decompressed(data: bytes, name: str) -> bytes:
    import gzip
    import zlib

    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{name} is not a trace file, or cut short ({_line(error)})", _AGAIN) from error


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# --- integers --------------------------------------------------------------------------------------------------------


def _packed(numbers: Sequence[int]) -> list[Any]:
    """Integers as they are, or as blocks where that is shorter; a block's own integers likewise."""
    if len(numbers) < _LONG:
        return list(numbers)
    blocks = fold_integers(numbers)
    if sum(3 + 2 * len(block.template) for block in blocks) > len(numbers):
        return list(numbers)
    packed = []
    for block in blocks:
        strides = [stride for (stride,) in block.strides]
        packed.append([block.count, _packed(block.template), *([_packed(strides)] if strides else [])])
    return packed


def _unpacked(numbers: list[Any]) -> tuple[int, ...]:
    if numbers and isinstance(numbers[0], list):
        return unfold_integers(
            Block(_unpacked(template), count, tuple((stride,) for each in strides for stride in _unpacked(each)))
            for count, template, *strides in numbers
        )
    return tuple(numbers)


# --- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Turns a folded trace into JSON values; what occurs more than once becomes an index into a table."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[Any, int]] = {
            name: {} for name in ("texts", "paths", "specs", "patterns", "storage_patterns", "strides")
        }

    def document(self, folded: FoldedTrace) -> dict[str, Any]:
        programs = [
            [key, each.name, [self._block(block, split_op, "patterns") for block in each.blocks]]
            for key, each in folded.programs.items()
        ]
        storages = [
            self._block(block, lambda pair: split_storage(*pair), "storage_patterns") for block in folded.storages
        ]
        return {
            "kind": KIND,
            "schema": SCHEMA_VERSION,
            "meta": folded.meta,
            "schedule": folded.schedule,
            **self._written_tables(),
            "programs": programs,
            "storages": storages,
            "resident": _packed(unfold_integers(folded.resident)),
        }

    def _index(self, table: str, value: Any) -> int:
        known = self.tables[table]
        return known.setdefault(value, len(known))

    def _block(self, block: Block[Item], split: Callable[[Item], tuple[Any, tuple[int, ...]]], table: str) -> list[Any]:
        items = []
        for item in block.template:
            pattern, slots = split(item)
            items.append([self._index(table, pattern), *_packed(slots)])
        if not block.strides:
            return [block.count, items]
        return [block.count, items, _packed([self._index("strides", strides) for strides in block.strides])]

    def _written_tables(self) -> dict[str, list[Any]]:
        """The tables, in an order in which each may still add to those after it."""
        patterns = [self._pattern(pattern) for pattern in self.tables["patterns"]]
        of_storages = [
            [self._index("paths", path), *(value for name, value in storage._asdict().items() if name != "module")]
            for path, storage in self.tables["storage_patterns"]
        ]
        specs = [[self._index("texts", spec.dtype), *spec.shape] for spec in self.tables["specs"]]
        return {
            "texts": list(self.tables["texts"]),
            "paths": [list(path) for path in self.tables["paths"]],
            "specs": specs,
            "patterns": patterns,
            "storage_patterns": of_storages,
            "strides": [_packed(strides) for strides in self.tables["strides"]],
        }

    def _pattern(self, pattern: Pattern) -> list[Any]:
        for value in pattern.attrs:
            if type(value) not in (bool, int, float, str) or (isinstance(value, float) and not math.isfinite(value)):
                raise FileFormatError(
                    f"{pattern.name} has the attribute {value!r}, which a trace file cannot hold",
                    "attributes are finite numbers, booleans and strings",
                )
        return [
            self._index("texts", pattern.name),
            _packed([self._index("specs", spec) for spec in pattern.inputs]),
            _packed([self._index("specs", spec) for spec in pattern.outputs]),
            self._index("paths", pattern.path),
            self._index("texts", pattern.phase),
            pattern.flops,
            pattern.allocates,
            pattern.frees,
            list(pattern.attrs),
        ]


# --- reading ---------------------------------------------------------------------------------------------------------


class _Reader:
    """Turns JSON values back into a folded trace; raises what Python raises where they do not belong together."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.texts: list[str] = data["texts"]
        self.paths = [tuple(path) for path in data["paths"]]
        self.specs = [TensorSpec(tuple(shape), self.texts[dtype]) for dtype, *shape in data["specs"]]
        self.strides = [_unpacked(each) for each in data["strides"]]
        self.patterns = [self._pattern(*each) for each in data["patterns"]]
        names = [name for name in Storage._fields if name != "module"]
        self.storage_patterns: list[StoragePattern] = [
            (self.paths[path], Storage(module="", **dict(zip(names, values, strict=True))))
            for path, *values in data["storage_patterns"]
        ]

    def trace(self) -> FoldedTrace:
        data = self.data
        return FoldedTrace(
            programs={
                key: FoldedProgram(name, tuple(self._block(block, self._op) for block in blocks))
                for key, name, blocks in data["programs"]
            },
            schedule={
                name: tuple((program, times) for program, times in runs) for name, runs in data["schedule"].items()
            },
            storages=tuple(self._block(block, self._storage) for block in data["storages"]),
            resident=(Block(_unpacked(data["resident"])),),
            meta=dict(data["meta"]),
        )

    def _pattern(
        self, name: int, inputs: list[Any], outputs: list[Any], path: int, phase: int,
        flops: int | None, allocates: int, frees: int, attrs: list[Any],
    ) -> Pattern:  # fmt: skip
        return Pattern(
            self.texts[name], self._specs(inputs), self._specs(outputs), self.paths[path], self.texts[phase],
            flops, allocates, frees, tuple(attrs),
        )  # fmt: skip

    def _specs(self, indices: list[Any]) -> tuple[TensorSpec, ...]:
        return tuple(self.specs[index] for index in _unpacked(indices))

    def _block(self, block: list[Any], join: Callable[[int, tuple[int, ...]], Item]) -> Block[Item]:
        count, items, *moves = block
        slots = [_unpacked(numbers) for _, *numbers in items]
        template = tuple(join(index, each) for (index, *_), each in zip(items, slots, strict=True))
        strides = tuple(self.strides[index] for each in moves for index in _unpacked(each))
        if count != 1 and [*map(len, strides)] != [*map(len, slots)]:
            raise ValueError("strides do not match the slots they move")
        return Block(template, count, strides)

    def _op(self, index: int, slots: tuple[int, ...]) -> Op:
        return _join_op(self.patterns[index], slots)

    def _storage(self, index: int, slots: tuple[int, ...]) -> tuple[int, Storage]:
        path, storage = self.storage_patterns[index]
        return slots[0], storage._replace(module=join_path(path, slots[1:]))


def _join_op(pattern: Pattern, slots: tuple[int, ...]) -> Op:
    """The op of which `split_op` gave these."""
    sizes = (len(pattern.inputs), len(pattern.outputs), pattern.allocates, pattern.frees, len(pattern.path) - 1)
    if len(slots) != sum(sizes):
        raise ValueError(f"{pattern.name} has {sum(sizes)} slots, and {len(slots)} are there")
    rest = iter(slots)
    inputs, outputs, allocates, frees, numbers = (tuple(islice(rest, size)) for size in sizes)
    return Op(
        pattern.name, tuple(map(Ref, inputs, pattern.inputs)), tuple(map(Ref, outputs, pattern.outputs)),
        join_path(pattern.path, numbers), pattern.phase, pattern.flops, allocates, frees, pattern.attrs,
    )  # fmt: skip
