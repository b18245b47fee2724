"""How the calls of a forward use its parameters: under which keys they go, which are weights of layers and which are tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from foretell.plan.tensor.products import WEIGHTED
from foretell.plan.tensor.rules import base_name
from foretell.trace.flow.calls import Flow, SliceKey, ValueRef

PRODUCTS = ("mm", "bmm", "matmul", "_grouped_mm", "grouped_mm")


def collapsed(name: str, keep: int = 0) -> str:
    """A path with every number after the first `keep` written as `*`."""
    parts, seen = name.split("."), 0
    for index, text in enumerate(parts):
        if text.isdigit():
            seen += 1
            parts[index] = text if seen <= keep else "*"
    return ".".join(parts)


def parameter_keys(flow: Flow) -> dict[int, str]:
    """Value of a parameter → what it goes by here: parameters of one shape, in blocks of any number, are one."""
    keep = dict.fromkeys(flow.parameters, 0)
    while True:
        shapes: dict[str, set[tuple[int, ...]]] = {}
        found = {value: collapsed(names[0], keep[value]) for value, names in flow.parameters.items()}
        for value, key in found.items():
            shapes.setdefault(key, set()).add(flow.values[value].shape)
        differ = [value for value, key in found.items() if len(shapes[key]) > 1]
        if not differ:
            return found
        for value in differ:
            keep[value] += 1


class Use(NamedTuple):
    """How a call uses a weight."""

    out: int
    """Its dimension that becomes one of the answer."""
    into: int
    """Its dimension that is summed over, or of which rows are taken."""
    table: bool = False


def layer_use(name: str, position: int, dims: int) -> Use | None:
    """Of a weight that stands at this position of a call."""
    if (name, position) in (("linear", 1), ("low_rank_product", 2), ("adapted_product", 2), ("adapted_product", 7)):
        return Use(0, 1)
    if name == "embedding" and position == 1:
        return Use(1, 0, True)
    if (name in ("addmm", "baddbmm") and position == 2) or (name in PRODUCTS and position == 1):
        return Use(dims - 1, dims - 2)
    if name in PRODUCTS and position == 0 and not name.endswith("grouped_mm"):
        return Use(dims - 2, dims - 1)
    return None


def parameter_sizes(flow: Flow) -> dict[str, tuple[int, ...]]:
    return {key: flow.values[value].shape for value, key in parameter_keys(flow).items()}


def weight_uses(flow: Flow) -> dict[str, Use]:
    """Parameter → how it is used, for those that are weights of layers; of a table that is one too, as a table."""
    keys = parameter_keys(flow)
    found: dict[str, Use] = {}
    for call in flow.calls:
        name = base_name(call.name)[0]
        for position, value in enumerate(call.args if name in WEIGHTED else ()):
            if isinstance(value, ValueRef) and value.value in keys:
                use = layer_use(name, position, len(flow.values[value.value].shape))
                key = keys[value.value]
                if use is not None and (use.table or key not in found):
                    found[key] = use
    return found


def lookup_tables(flow: Flow, keys: Mapping[int, str]) -> set[str]:
    """Parameters whose only use is to be looked up."""
    found: dict[str, set[bool]] = {}
    for call in flow.calls:
        for value in refs_of(call.args, call.kwargs):
            if value in keys:
                found.setdefault(keys[value], set()).add(call.name == "embedding")
    return {key for key, uses in found.items() if uses == {True}}


def refs_of(*values: Any) -> list[int]:
    found: list[int] = []
    for value in values:
        if isinstance(value, ValueRef):
            found.append(value.value)
        elif isinstance(value, (tuple, list)) and not isinstance(value, SliceKey):
            found += refs_of(*value)
        elif isinstance(value, Mapping):
            found += refs_of(*value.values())
    return found
