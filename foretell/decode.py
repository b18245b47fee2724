"""Frozen dataclasses out of JSON, every field of the type it is declared with.

    decode(Measurement, data, "runs/a/measurement.json", "run the plan again")
        → a Measurement, or: runs/a/measurement.json: hardware.threads is "two" and should be a whole number; run the plan again

Names that the class does not have are passed over, and what is missing and may be null is null, so that files of other
versions are read.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from foretell.errors import FileFormatError

Kind = TypeVar("Kind")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_MOST_FLOAT = int(1.7e308)


class Mismatch(ValueError):
    """A value of another type than the one declared; where, what was found, what should be there."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}" if field else f"it {problem}")


def json_of(text: str | bytes, **options: Any) -> Any:
    """What a text says in JSON; one that is nested too deep to be read is a ValueError as any other fault is."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def decode(kind: type[Kind], data: Any, where: str, remedy: str) -> Kind:
    """A value of `kind`, which is a dataclass or a type as in an annotation; `where` names the file in errors."""
    try:
        return value_of(kind, data)  # type: ignore[no-any-return]
    except Mismatch as error:
        raise FileFormatError(f"{where}: {error}", remedy) from None


def value_of(kind: Any, value: Any, field: str = "") -> Any:
    """The value as its type has it (lists as tuples, objects as dataclasses); raises `Mismatch`."""
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, field)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _one_of(get_args(kind), value, field)
    if origin is tuple:
        return _tuple(get_args(kind), value, field)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(get_args(kind), value, field)
    if origin is not None and issubclass(origin, Sequence):
        (each,) = get_args(kind)
        return list(_tuple((each, ...), value, field))
    if isinstance(value, bool) if kind is bool else _is(value, kind):
        return value
    raise _mismatch(kind, value, field)


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int) and kind in (int, float):  # one that no float can hold would fail later
        return abs(value) < _MOST_FLOAT
    return isinstance(value, kind)


def _dataclass(kind: type[Any], value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise Mismatch(field, f"is {shown(value)} and should be an object")
    hints, given = _hints(kind), {}
    for item in fields(kind):
        if item.name in value:
            given[item.name] = value_of(hints[item.name], value[item.name], _under(field, item.name))
        elif item.default is MISSING and item.default_factory is MISSING:
            if type(None) in get_args(hints[item.name]):
                given[item.name] = None
                continue
            raise Mismatch(_under(field, item.name), "is missing")
    return kind(**given)


_known: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _known:
        _known[kind] = get_type_hints(kind)
    return _known[kind]


def _one_of(kinds: Sequence[Any], value: Any, field: str) -> Any:
    """The first type that takes the value; where none does, what the one of the value's own shape says."""
    deep: Mismatch | None = None
    for kind in kinds:
        try:
            return value_of(kind, value, field)
        except Mismatch as error:
            shaped = isinstance(value, Mapping | list) and not isinstance(kind, type(None)) and kind not in _WORDS
            deep = deep or (error if shaped else None)
    if deep is not None:
        raise deep
    raise Mismatch(field, f"is {shown(value)} and should be {' or '.join(map(_words, kinds))}")


def _tuple(kinds: Sequence[Any], value: Any, field: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch(field, f"is {shown(value)} and should be a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        if _plainly(kinds[0], value):
            return tuple(value)
        return tuple(value_of(kinds[0], item, f"{field}[{place}]") for place, item in enumerate(value))
    if len(value) != len(kinds):
        raise Mismatch(field, f"is {shown(value)} and should be a list of {len(kinds)}")
    return tuple(value_of(kind, item, f"{field}[{place}]") for place, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _mapping(kinds: Sequence[Any], value: Any, field: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch(field, f"is {shown(value)} and should be an object")
    if _plainly(kinds[1], value.values()):
        return dict(value)
    return {name: value_of(kinds[1], item, _under(field, str(name))) for name, item in value.items()}


def _plainly(kind: Any, values: Iterable[Any]) -> bool:
    """Whether all are of one plain type, which is soon seen of many."""
    return kind in (str, float, bool) and {*map(type, values)} <= {kind}


def _mismatch(kind: Any, value: Any, field: str) -> Mismatch:
    return Mismatch(field, f"is {shown(value)} and should be {_words(kind)}")


def _words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    origin = get_origin(kind) or kind
    return "a list" if isinstance(origin, type) and issubclass(origin, tuple | list) else "an object"


def shown(value: Any) -> str:
    """A value in a message: as JSON has it, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _under(field: str, name: str) -> str:
    if not field:
        return name if name.isidentifier() else f"['{name}']"
    return f"{field}.{name}" if name.isidentifier() else f"{field}['{name}']"
