"""Whether what a trace file holds is of the types a trace has, and whether its parts belong together. No torch.

    fields(data)     before it is unfolded: numbers where numbers belong, indices inside their tables, no endless repeats
    whole(trace)     before it is costed: every storage and program that is spoken of is there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from foretell.trace.types import ROLES, Trace
from foretell.units import DTYPE_BYTES

MOST = 50_000_000
"""Ops, or integers, that a file may unfold to."""
MOST_REPEATS = 1_000_000
"""Of a program in a step."""
_SCALARS = (bool, int, float, str)
_TABLES = ("texts", "paths", "specs", "strides", "patterns", "storage_patterns", "programs", "storages", "resident")
_TEXTS: Callable[[Any], bool] = lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value)  # noqa: E731
_META: dict[str, Callable[[Any], bool]] = {
    "parameters": lambda value: _whole(value), "trainable": lambda value: value is None or _whole(value), "blocks": _TEXTS,
    "assumed": _TEXTS, "experts": _TEXTS, "recipe": lambda value: isinstance(value, dict),
    "batch": lambda value: isinstance(value, list) and all(map(_sized, value)), "tp": lambda value: _whole(value, 1),
    "cp": lambda value: _whole(value, 1), "ep": lambda value: _whole(value, 1), "ranks": lambda value: _whole(value, 1),
    "compiles": lambda value: value in ("model", "blocks", "graphs"),
    "backwards": lambda value: _whole(value, 1), "split_stream": lambda value: isinstance(value, bool),
    "cp_work": lambda value: type(value) in (int, float) and value > 0,
}  # fmt: skip
_NEEDED = ("parameters", "blocks")


def _whole(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _sized(value: Any) -> bool:
    """[dtype, size, size, ...]"""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str) and all(map(_whole, value[1:]))


def _refuse(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


# --- before it is unfolded -------------------------------------------------------------------------------------------


def fields(data: dict[str, Any]) -> None:
    """Raise `ValueError` with the field that is of another type than a trace's."""
    for name in _TABLES:
        _refuse(isinstance(data[name], list), f"{name} is no list")
    for name in ("meta", "schedule"):
        _refuse(isinstance(data[name], dict), f"{name} is no object")
    texts, paths, specs = len(data["texts"]), len(data["paths"]), len(data["specs"])
    _refuse(_TEXTS(data["texts"]), "texts are not all text")
    _refuse(all(_TEXTS(path) and path for path in data["paths"]), "paths are not lists of text")
    for place, spec in enumerate(data["specs"]):
        _refuse(isinstance(spec, list) and bool(spec) and all(map(_whole, spec)) and spec[0] < texts, f"specs[{place}] is {spec!r}")
    for place, strides in enumerate(data["strides"]):
        _integers(strides, f"strides[{place}]")
    for place, pattern in enumerate(data["patterns"]):
        _pattern(pattern, (texts, paths, specs), f"patterns[{place}]")
    for place, row in enumerate(data["storage_patterns"]):
        good = isinstance(row, list) and len(row) == 6 and _whole(row[0]) and row[0] < paths and _storage(row[1:])
        _refuse(good, f"storage_patterns[{place}] is {row!r}")
    _programs(data)


def _pattern(row: Any, tables: tuple[int, int, int], where: str) -> None:
    texts, paths, specs = tables
    _refuse(isinstance(row, list) and len(row) == 9, f"{where} has not nine parts")
    name, inputs, outputs, path, phase, flops, allocates, frees, attrs = row
    good = all(_whole(value) for value in (name, path, phase, allocates, frees)) and max(name, phase) < texts and path < paths
    _refuse(good, f"{where} points outside its tables")
    _refuse(flops is None or _whole(flops), f"{where} has {flops!r} operations")
    _refuse(isinstance(attrs, list) and all(type(value) in _SCALARS for value in attrs), f"{where} has other attributes than values")
    for part in (inputs, outputs):
        _integers(part, where, specs)


def _storage(row: Sequence[Any]) -> bool:
    nbytes, role, saved, host, stream = row
    return _whole(nbytes) and isinstance(role, str) and isinstance(saved, bool) and isinstance(host, bool) and _whole(stream)


def _integers(values: Any, where: str, below: int | None = None) -> int:
    """How many integers a list of them unfolds to; below `below` where that is given."""
    _refuse(isinstance(values, list), f"{where} is no list of integers")
    if values and isinstance(values[0], list):
        return _within(sum(_packed(block, where) for block in values), where)
    good = all(type(value) is int and abs(value) < 2**63 for value in values)
    _refuse(good and (below is None or all(0 <= value < below for value in values)), f"{where} has other numbers than it may")
    return len(values)


def _packed(block: Any, where: str) -> int:
    _refuse(isinstance(block, list) and len(block) in (2, 3) and _whole(block[0], 1), f"{where} has {block!r} for a block")
    width = _integers(block[1], where)
    _refuse(len(block) == 2 or _integers(block[2], where) == width, f"{where} has strides that do not match")
    return _within(block[0] * width, where)


def _within(count: int, where: str) -> int:
    _refuse(count <= MOST, f"{where} repeats {count} times")
    return count


def _programs(data: dict[str, Any]) -> None:
    count = 0
    for place, row in enumerate(data["programs"]):
        good = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[1], str)
        _refuse(good and isinstance(row[2], list), f"programs[{place}] is not a key, a name and blocks")
        for block in row[2]:
            count = _within(count + _block(block, data, "patterns", f"programs[{place}]"), f"programs[{place}]")
    _within(sum(_block(block, data, "storage_patterns", "storages") for block in data["storages"]), "storages")
    _integers(data["resident"], "resident")
    for name, runs in data["schedule"].items():
        good = isinstance(runs, list) and all(isinstance(run, list) and len(run) == 2 for run in runs)
        good = good and all(isinstance(run[0], str) and _whole(run[1]) and run[1] <= MOST_REPEATS for run in runs)
        _refuse(good, f"schedule.{name} is not a list of programs and times")


def _block(block: Any, data: dict[str, Any], table: str, where: str) -> int:
    """How many items a block stands for."""
    _refuse(isinstance(block, list) and len(block) in (2, 3) and _whole(block[0], 1) and isinstance(block[1], list), f"{where} has no block")
    for item in block[1]:
        good = isinstance(item, list) and bool(item) and _whole(item[0]) and item[0] < len(data[table])
        _refuse(good, f"{where} has an item that is none of the {table}")
        _integers(item[1:], where)
    if len(block) == 3:
        _integers(block[2], where, len(data["strides"]))
    return int(block[0]) * len(block[1])


# --- before it is costed ---------------------------------------------------------------------------------------------


def whole(trace: Trace) -> Trace:
    """The trace, if it can be costed; else `ValueError` says what is missing in it."""
    for name in _NEEDED:
        _refuse(name in trace.meta, f"meta.{name} is missing")
    for name, good in _META.items():
        _refuse(name not in trace.meta or good(trace.meta[name]), f"meta.{name} is {trace.meta.get(name)!r}")
    for name, runs in trace.schedule.items():
        _refuse(all(program in trace.programs for program, _ in runs), f"schedule.{name} names a program that is not there")
    _refuse(bool(trace.schedule.keys() & {"steady_step", "evaluation"}), "the schedule has no step")
    _refuse(set(_spoken_of(trace)) <= trace.storages.keys(), "an op uses a storage that is not there")
    specs = {ref.spec for op in trace.ops() for ref in (*op.inputs, *op.outputs)}
    unknown = sorted({spec.dtype for spec in specs} - DTYPE_BYTES.keys())
    _refuse(not unknown, f"there is no dtype {', '.join(unknown)}")
    roles = sorted({storage.role for storage in trace.storages.values()} - ROLES)
    _refuse(not roles, f"no storage is for {', '.join(roles)}")
    return trace


def _spoken_of(trace: Trace) -> Iterator[int]:
    yield from trace.resident
    for op in trace.ops():
        yield from op.allocates
        yield from op.frees
        for ref in op.inputs:
            yield ref[0]
        for ref in op.outputs:
            yield ref[0]
