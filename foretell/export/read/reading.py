"""One file being read: every setting of it ends as taken, as ignored with the reason, as one foretell cannot say, or as unknown."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from foretell.errors import FileFormatError
from foretell.export.read.load import leaves

LARGEST = 10**9
"""Of any count."""
OFF = (None, False, "", "none", "no", "disabled", "false", 0)
AUTO = "auto: filled in when the run starts"


class Tables(NamedTuple):
    """What a reader knows of its tool's settings. A name may end in `*`."""

    taken: Mapping[str, str]
    """Setting → option of `fit` and `plan`, as the documentation has it."""
    ignored: Mapping[str, str]
    """Setting → why it changes nothing that is predicted."""
    cannot: Mapping[str, str]
    """Setting → why foretell cannot say it; where it is off, it is ignored."""
    missing: Mapping[str, str]
    """Option → who says it instead: no such file does."""


@dataclass
class ToolConfig:
    """What a file of another tool says."""

    tool: str
    options: dict[str, Any] = field(default_factory=dict)
    """By the names of options of `fit` and `plan`; what else a plan holds by the names of `plan.described`."""
    mesh: dict[str, int] = field(default_factory=dict)
    """Axis → degree, as far as the file says; -1: the rest of the ranks."""
    world: int | None = None
    """Ranks, where the file says."""
    taken: dict[str, str] = field(default_factory=dict)
    """Setting → what it became."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Setting → why it changes nothing that is predicted."""
    cannot: dict[str, str] = field(default_factory=dict)
    """Setting → why foretell cannot say it."""
    unknown: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    """What the tool does by default where the file says nothing."""
    missing: dict[str, str] = field(default_factory=dict)
    """Option → who says it instead."""
    demands: dict[str, str] = field(default_factory=dict)
    """Option → why it has to be typed: the file asks for something foretell has no figure for."""


class Reading:
    """The settings of a file, each asked for by name; what is not asked for is found in the tables, or is unknown."""

    def __init__(self, tool: str, data: Mapping[str, Any], tables: Tables) -> None:
        self.found, self.tables, self.leaves = ToolConfig(tool=tool, missing=dict(tables.missing)), tables, leaves(data)
        known = (*tables.taken, *tables.ignored, *tables.cannot)
        for path, value in self.leaves.items():
            inside = any(key.startswith(f"{path}.") for key in known) and not any(fnmatchcase(path, key) for key in known)
            if inside and value not in (None, {}):
                raise FileFormatError(f"{path} is {_shown(value)}, and should hold settings", "correct the file")

    # ------------------------------------------------------------------ values

    def get(self, path: str) -> Any:
        """A value; None where it is not there, null or auto."""
        assert path in self.tables.taken, path
        if any(key.startswith(f"{path}.") for key in self.leaves):
            raise FileFormatError(f"{path} holds settings, and should be a value", "correct the file")
        value = self.leaves.get(path)
        if path in self.leaves:
            if value == "auto":
                self.cannot(path, AUTO)
                return None
            self.found.taken.setdefault(path, f"{_shown(value)}")
        return value

    def first(self, *paths: str) -> str:
        """The name under which a setting is there; the first where it is not. Two spellings that differ are refused."""
        there = [path for path in paths if self.leaves.get(path) is not None]
        if len({_shown(self.leaves[path]) for path in there}) > 1:
            said = " and ".join(f"{path} {_shown(self.leaves[path])}" for path in there)
            raise FileFormatError(f"{said} contradict each other", "leave one of them out")
        for path in paths:
            self.get(path)
        return there[0] if there else paths[0]

    def whole(self, path: str, least: int = 1) -> int | None:
        value = self.get(path)
        if value is None:
            return None
        try:
            number = int(value) if float(value) < LARGEST else least - 1
            exact = number == float(value)
        except (TypeError, ValueError, OverflowError):
            number, exact = least - 1, False
        if isinstance(value, bool) or number < least or not exact:
            raise FileFormatError(f"{path} is {_shown(value)}, not a whole number of at least {least}", "correct the file")
        return number

    def number(self, path: str) -> float | None:
        """At least 0."""
        value = self.get(path)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not 0 <= number < math.inf:
            raise FileFormatError(f"{path} is {_shown(value)}, not a number of at least 0", "correct the file")
        return number

    def flag(self, path: str) -> bool | None:
        value = self.get(path)
        word = str(value).lower()
        if value is None or word in ("true", "false"):
            return None if value is None else word == "true"
        raise FileFormatError(f"{path} is {_shown(value)}, not true or false", "correct the file")

    def word(self, path: str) -> str | None:
        value = self.get(path)
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
            raise FileFormatError(f"{path} is {_shown(value)}, not a word", "correct the file")
        return None if value is None else str(value)

    def names(self, path: str) -> list[Any]:
        """A list, or words with commas between them."""
        value = self.get(path)
        if value is None or value == "":
            return []
        if isinstance(value, str):
            return [word.strip() for word in value.split(",")]
        if not isinstance(value, Sequence):
            raise FileFormatError(f"{path} is {_shown(value)}, not a list", "correct the file")
        return list(value)

    # ------------------------------------------------------------------ what became of them

    def take(self, option: str, value: Any, path: str = "", why: str = "") -> None:
        """An option; `path` is the setting that says it, nothing: the tool's default, which `why` names."""
        self.found.options[option] = value
        if not path or path not in self.leaves:
            self.found.assumed.append(f"{why or path}: {_named(option, value)}")
        else:
            self._became(path, _named(option, value), why)

    def axis(self, name: str, degree: int, path: str, why: str = "") -> None:
        """A degree of the mesh."""
        self.found.mesh[name] = degree
        told = "the rest of the ranks" if degree == -1 else str(degree)
        if path in self.leaves:
            self._became(path, f"{name} {told}", why)
        else:
            self.found.assumed.append(f"{why or path}: {name} {told}")

    def _became(self, path: str, what: str, why: str) -> None:
        """A setting may say several things."""
        before = self.found.taken.get(path, "")
        start = before if "→" in before else f"{_shown(self.leaves[path])} →"
        self.found.taken[path] = f"{start}{',' if '→' in before else ''} {what}" + (f" ({why})" if why else "")

    def cannot(self, path: str, why: str) -> None:
        self._move(path, self.found.cannot, why)

    def ignore(self, path: str, why: str) -> None:
        self._move(path, self.found.ignored, why)

    def _move(self, path: str, kind: dict[str, str], why: str) -> None:
        if path in self.leaves:
            self.found.taken.pop(path, None)
            kind[path] = why

    def done(self) -> ToolConfig:
        """With every setting that was not asked for."""
        found = self.found
        for path, value in self.leaves.items():
            if path in found.taken or path in found.ignored or path in found.cannot:
                continue
            off = (value.lower() if isinstance(value, str) else value) in (*OFF, [], {})
            cannot, ignored = _match(path, self.tables.cannot), _match(path, self.tables.ignored)
            if cannot is None and ignored is None:
                found.unknown.append(path)
            elif ignored is not None and (cannot is None or len(ignored) > len(cannot)):  # the name that says more
                found.ignored[path] = self.tables.ignored[ignored]
            elif off:
                found.ignored[path] = "off"
            else:
                found.cannot[path] = self.tables.cannot[str(cannot)]
        return found


def _match(path: str, table: Mapping[str, str]) -> str | None:
    """The name in a table that suits a setting best: its own, else the longest."""
    if path in table:
        return path
    return max((key for key in table if "*" in key and fnmatchcase(path, key)), key=len, default=None)


def _named(option: str, value: Any) -> str:
    if option == "model":
        return f"MODEL {value}"
    return f"--{option.replace('_', '-')} {value}" if option in TYPED else f"{option.replace('_', ' ')} {value}"


TYPED = {"seq", "micro_batch", "global_batch", "accumulate", "precision", "optimizer", "clip", "recompute", "compile", "schedule"}
"""Options that can be typed."""


def _shown(value: Any) -> str:
    """Short, also of a list that holds itself, or one thing a million times."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3
