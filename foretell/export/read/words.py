"""What was read from a file, in words: for the screen, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell.export.read.reading import Tables, ToolConfig
from foretell.plan.text import plain

SHOWN = 6
"""Settings that one line names; JSON has all of them."""
LABELS = {"taken": "taken", "typed": "typed", "assumed": "default", "missing": "not there", "ignored": "ignored", "cannot": "not predicted",
          "unknown": "unknown"}  # fmt: skip


def content(config: ToolConfig, file: Path, typed: Mapping[str, Any], more: Sequence[str] = ()) -> dict[str, Any]:
    """Every setting of the file, under what became of it; `more` was taken besides."""
    both = {name: value for name, value in typed.items() if value is not None and (name in config.options or name in config.mesh)}
    wins = [f"{_option(name)} {value}: typed, and the file says {_theirs(config, name)}" for name, value in both.items()]
    said = {**config.options, **typed}
    return {
        "file": str(file), "tool": config.tool, "taken": [*(f"{path} {how}" for path, how in config.taken.items()), *more],
        "typed": wins, "assumed": list(config.assumed),
        "missing": [f"{option}: {who}" for option, who in config.missing.items() if said.get(option) is None],
        "ignored": [f"{path}: {why}" for path, why in config.ignored.items()],
        "cannot": [f"{path}: {why}" for path, why in config.cannot.items()], "unknown": list(config.unknown),
    }  # fmt: skip


def _option(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


def _theirs(config: ToolConfig, name: str) -> Any:
    return config.options[name] if name in config.options else "the rest of the ranks" if config.mesh[name] == -1 else config.mesh[name]


def lines(config: ToolConfig, told: Mapping[str, Any]) -> list[str]:
    """The same for people: settings with one reason on one line."""
    grouped = {"ignored": _grouped(config.ignored), "cannot": _grouped(config.cannot), "unknown": [_some(config.unknown)] if config.unknown else []}
    found = [f"{told['file']} ({config.tool})"]
    for kind, label in LABELS.items():
        found += [f"  {label:<13}  {line}" for line in grouped.get(kind, told.get(kind, ()))]
    return [plain(line) for line in found]


def _grouped(kind: Mapping[str, str]) -> list[str]:
    return [f"{_some(paths)}: {why}" for why, paths in _by_reason(kind).items()]


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(f"{path:.80}" for path in paths[:SHOWN]) + more


def table(tables: Tables) -> list[str]:
    """What a reader knows, as Markdown."""
    found = ["| setting | option |", "| --- | --- |", *(f"| {_cells(keys)} | {said} |" for said, keys in _by_reason(tables.taken).items())]
    found += ["", "| setting | not predicted |", "| --- | --- |", *(f"| {_cells(keys)} | {why} |" for why, keys in _by_reason(tables.cannot).items())]
    found += ["", "| setting | ignored |", "| --- | --- |", *(f"| {_cells(keys)} | {why} |" for why, keys in _by_reason(tables.ignored).items())]
    return [*found, "", "| not in the file | who says it |", "| --- | --- |", *(f"| {option} | {who} |" for option, who in tables.missing.items())]


def _by_reason(kind: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, why in kind.items():
        found.setdefault(why, []).append(key)
    return found


def _cells(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
