"""Which blocks of a flow make the same calls, so that what is compiled for one holds for the others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from foretell.trace.flow.calls import Call, Flow, SliceKey, ValueRef


def alike(flow: Flow, paths: Sequence[str]) -> dict[str, str]:
    """Block → the first block whose calls, shapes and parameters are the same; a block that made no call is alone."""
    calls: dict[str, list[Call]] = {path: [] for path in paths}
    for call in flow.calls:
        owner = next((path for path in _prefixes(call.module) if path in calls), None)
        if owner is not None:
            calls[owner].append(call)
    first: dict[Hashable, str] = {}
    found = {}
    for path in paths:
        key = _signature(flow, path, calls[path]) if calls[path] else path
        found[path] = first.setdefault(key, path)
    return found


def _prefixes(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _signature(flow: Flow, path: str, calls: Sequence[Call]) -> Hashable:
    names: dict[int, Hashable] = {}

    def named(value: int) -> Hashable:
        if value not in names:
            own = next((n.removeprefix(path) for n in flow.parameters.get(value, ()) if n.startswith(f"{path}.")), None)
            known = flow.values[value]
            names[value] = (own or len(names), known.shape, known.dtype, known.grad)
        return names[value]

    def frozen(value: Any) -> Hashable:
        if isinstance(value, ValueRef):
            return named(value.value)
        if isinstance(value, tuple) and not isinstance(value, SliceKey):
            return tuple(frozen(item) for item in value)
        if isinstance(value, Mapping):
            return tuple((key, frozen(item)) for key, item in value.items())
        return (type(value).__name__, value)

    return tuple(
        (
            call.name,
            call.module.removeprefix(path),
            frozen(call.args),
            frozen(call.kwargs),
            tuple(map(named, call.outputs)),
        )
        for call in calls
    )
