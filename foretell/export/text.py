"""YAML and TOML as far as exports need them. Whatever a string holds, it is read back as it was, or with U+FFFD for what
these cannot say, and never as anything but a string."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from foretell.plan.text import quoted

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
"""Keys that need no quotes, but for those below."""
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def yaml(value: Any, indent: int = 0) -> str:
    """Block style; strings in double quotes, plain texts of several lines as they are."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        return "".join(f"{pad}{_key(key)}:{_after_key(item, indent)}" for key, item in value.items())
    if isinstance(value, list):
        return "".join(_item(item, indent) for item in value)
    return f"{pad}{_scalar(value)}\n"


def _key(key: str) -> str:
    return key if _KEY.fullmatch(key) and key.lower() not in _NOT_TEXT else quoted(key)


def _after_key(value: Any, indent: int) -> str:
    if isinstance(value, Mapping | list) and value:
        return "\n" + yaml(value, indent + 1)
    if isinstance(value, str) and _is_block(value):
        pad = "  " * (indent + 1)
        return " |\n" + "".join(f"{pad}{line}\n" if line else "\n" for line in value[:-1].split("\n"))
    return f" {_scalar(value)}\n"


def _is_block(value: str) -> bool:
    """Whether a literal block gives back exactly this: lines that print, whose spaces at either end mean nothing to YAML."""
    lines = value.split("\n")
    one_end = len(lines) > 1 and not lines[-1] and bool(lines[-2])
    return one_end and lines[0][:1] not in ("", " ") and all(line.isprintable() and line == line.rstrip() for line in lines)


def _item(value: Any, indent: int) -> str:
    pad = "  " * indent
    if isinstance(value, Mapping) and value:
        lines = yaml(value, indent + 1)
        return f"{pad}- {lines[len(pad) + 2 :]}"
    if isinstance(value, str) and _is_block(value):
        return f"{pad}-{_after_key(value, indent)}"
    return f"{pad}- {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, Mapping | list):
        return "{}" if isinstance(value, Mapping) else "[]"
    return quoted(value) if isinstance(value, str) else json.dumps(value, allow_nan=False)


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values and lists of them."""
    parts = []
    for name, values in tables.items():
        if values:
            parts.append(f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value, allow_nan=False)
