"""YAML and TOML as far as exports need them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def yaml(value: Any, indent: int = 0) -> str:
    """Block style; strings in double quotes, texts of several lines as they are."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        return "".join(f"{pad}{key}:{_after_key(item, indent)}" for key, item in value.items())
    if isinstance(value, list):
        return "".join(_item(item, indent) for item in value)
    return f"{pad}{_scalar(value)}\n"


def _after_key(value: Any, indent: int) -> str:
    if isinstance(value, Mapping | list) and value:
        return "\n" + yaml(value, indent + 1)
    if isinstance(value, str) and "\n" in value:
        pad = "  " * (indent + 1)
        return " |\n" + "".join(f"{pad}{line}".rstrip() + "\n" for line in value.rstrip("\n").split("\n"))
    return f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        lines = yaml(value, indent + 1)
        return f"{pad}- {lines[len(pad) + 2 :]}"
    if isinstance(value, str) and "\n" in value:
        return f"{pad}-{_after_key(value, indent)}"
    return f"{pad}- {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "{}" if isinstance(value, Mapping) else "[]"
    return json.dumps(value, ensure_ascii=False)


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values and lists of them."""
    parts = []
    for name, values in tables.items():
        if values:
            parts.append(f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return "\n".join(parts)
