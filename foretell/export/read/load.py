"""The settings in a file, whatever its format: JSON, YAML or TOML. What is wrong with it is one line."""

from __future__ import annotations

import importlib
import json
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, MissingPackage, UserError
from foretell.files import one_line
from foretell.plan.text import plain

LARGEST_BYTES = 4 << 20
DEEPEST = 32
"""Levels of settings inside settings."""
MOST = 20_000
"""Settings of one file; aliases of YAML can name one many times."""
REMEDY = "give a configuration of torchtitan, accelerate, DeepSpeed, transformers' Trainer or Lightning"


def load(path: Path) -> dict[str, Any]:
    """Settings by name."""
    text = _text(path)
    kind = {".json": "JSON", ".toml": "TOML"}.get(path.suffix.lower(), "YAML")
    try:
        data = _json(text) if kind == "JSON" else tomllib.loads(text) if kind == "TOML" else _yaml(text)
    except ModuleNotFoundError:
        raise MissingPackage("PyYAML", f"reading {path}", "yaml") from None
    except RecursionError:
        raise FileFormatError(f"{path} is nested too deeply", "correct it there") from None
    except ValueError as error:
        raise FileFormatError(f"{path} is not {kind}: {_shown(error)}", "correct it there") from None
    if not isinstance(data, dict):
        raise FileFormatError(f"{path} is no configuration: it holds {type(data).__name__}", REMEDY)
    return data


def _text(path: Path) -> str:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is no regular file", REMEDY)
        if found.st_size > LARGEST_BYTES:
            size, most = found.st_size / (1 << 20), LARGEST_BYTES >> 20
            raise FileFormatError(f"{path} has {size:.0f} MiB, and a configuration has less than {most}", REMEDY)
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle; ValueError: no text
        why = getattr(error, "strerror", None) or ("it is no text" if isinstance(error, UnicodeDecodeError) else one_line(error))
        raise UserError(f"{path} cannot be read: {why}", REMEDY) from error


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that is given twice would be dropped silently."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r:.60} is given twice")
        found[key] = value
    return found


def _yaml(text: str) -> Any:
    yaml = importlib.import_module("yaml")

    class Once(yaml.SafeLoader):  # type: ignore[name-defined, misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen if isinstance(key.value, str) and key.value != "<<" else False:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r:.60} is given twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Once)
    except yaml.YAMLError as error:
        raise ValueError(_shown(error)) from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:  # what its own constructors trip over
        raise ValueError(_shown(error)) from None


def _shown(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return plain(f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', 'error')}")
    return plain(one_line(error))[:200]


def leaves(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Path → value of every setting; a list is one value, and so is an empty table."""
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [("", data, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if isinstance(value, Mapping) and (value or not path):
            if depth >= DEEPEST:
                raise FileFormatError(f"its settings are nested more than {DEEPEST} deep", "correct the file")
            for key, item in reversed(list(value.items())):
                name = str(key) if isinstance(key, str) and "." not in key else repr(key)
                waiting.append((f"{path}.{name}" if path else name, item, depth + 1))
        else:
            found[path] = value
        if len(found) + len(waiting) > MOST:
            raise FileFormatError(f"it has more than {MOST:,} settings", "correct the file")
    return found
