"""How a field of an options class says what it is: its help, its flag and how text becomes its value."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option, as the command line and the function have it."""

    name: str = ""
    """Of the field and the function's argument."""
    help: str = ""
    metavar: str | None = None
    """What stands for the value in help: N, NAME, FILE."""
    flag: str = ""
    """As typed: `--set`; empty: `--` and the name."""
    typed: Any = str
    """What the command line reads before `read`: str, int, float, bool, or `list[str]` for a flag that may be repeated."""
    read: Callable[[Any], Any] | None = None
    """What was typed → the value of the field; a function's argument that is text is read so too."""
    negates: bool = False
    """A flag that says no, such as `--no-cache`."""
    cli: bool = True
    """False: for the function alone."""
    shown: str | None = None
    """The default as help shows it, where that is not the value itself."""
    default: Any = None
    annotation: Any = Any

    @property
    def spelled(self) -> str:
        return self.flag or f"--{self.name.replace('_', '-')}"


def option(
    default: Any, help: str, *, metavar: str | None = None, flag: str = "", typed: Any = None, read: Callable[[Any], Any] | None = None,
    negates: bool = False, cli: bool = True, shown: str | None = None,
) -> Any:  # fmt: skip
    """A field that says what it is."""
    about = Option(help=help, metavar=metavar, flag=flag, typed=typed, read=read, negates=negates, cli=cli, shown=shown)
    return dataclasses.field(default=default, metadata={_KEY: about})


def options_of(described: type) -> tuple[Option, ...]:
    """Every option of a class, in its order."""
    names = vars(sys.modules[described.__module__])
    found = []
    for one in dataclasses.fields(described):
        about: Option | None = one.metadata.get(_KEY)
        if about is None:
            continue
        annotation = eval(one.type, names) if isinstance(one.type, str) else one.type  # of options alone: others may name heavy types
        typed = about.typed if about.typed is not None else plain_type(annotation)
        found.append(dataclasses.replace(about, name=one.name, default=one.default, typed=typed, annotation=annotation))
    return tuple(found)


def plain_type(hint: Any) -> Any:
    """Of `int | None`: int."""
    return next(kind for kind in hint.__args__ if kind is not type(None)) if isinstance(hint, UnionType) else hint


def named(options: Any) -> dict[str, Any]:
    """Name → value, not copied."""
    return {one.name: getattr(options, one.name) for one in dataclasses.fields(options)}


def readied(described: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with what is text read as the command line reads it: `tokens="1T"` is a number."""
    known = {one.name: one for one in options_of(described)}
    found = dict(given)
    for name, value in given.items():
        about = known.get(name)
        if about is not None and about.read is not None and isinstance(value, str) and about.typed is str:
            found[name] = about.read(value)
    return found


def flags_of(options: Any, without: Collection[str] = ()) -> list[str]:
    """The words that say the same on the command line; what is as usual is left out."""
    found: list[str] = []
    for one in options_of(type(options)):
        value = getattr(options, one.name)
        if not one.cli or one.name in without or value == one.default:
            continue
        if one.negates or value is True:
            found.append(one.spelled)
        elif isinstance(value, Mapping):
            found += [word for key, item in value.items() for word in (one.spelled, f"{key}={item}")]
        elif one.typed == list[str]:
            found += [word for item in value for word in (one.spelled, str(item))]
        else:
            found += [one.spelled, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return found
