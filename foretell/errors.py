"""Every error foretell raises on purpose.

    ForetellError
    ├── UserError            bad input: one line, what was asked, what was found, what to try (exit 2)
    │   ├── UnknownName      a model, device or option nobody knows; lists near names
    │   ├── MissingPackage   an optional package is not installed; names the extra
    │   ├── MissingModel     the file or the function that a model or a script names is not there
    │   ├── ModelError       the user's own code raised while it was built or run
    │   └── FileFormatError  a trace, hardware or plan file is cut short or of another version
    └── InternalError        a promise of foretell's own was broken (exit 70)

"Does not fit" is not an error: it is a returned value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class ForetellError(Exception):
    """Base of everything foretell raises on purpose."""

    exit_code = 70


class UserError(ForetellError):
    """Something in the input can be mended by the user.

    `problem` says what was asked and what was found, `remedy` what to try, `detail` holds
    further lines (a trimmed traceback of the user's own code, say).
    """

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "", detail: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        self.detail = detail
        super().__init__(f"{problem}; {remedy}" if remedy else problem)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels between processes whole, whatever its constructor takes."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[UserError], args: tuple[str, ...], state: dict[str, Any]) -> UserError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class UnknownName(UserError):
    """A name that is in no list, with the nearest names that are."""

    def __init__(self, kind: str, name: str, known: Iterable[str], remedy: str = "") -> None:
        self.kind, self.name = kind, name
        self.near = near_names(name, known)
        hint = f"did you mean {', '.join(self.near)}?" if self.near else ""
        super().__init__(f"unknown {kind} '{name}'", " ".join(part for part in (hint, remedy) if part))


class MissingPackage(UserError):
    """An optional package is needed and is not installed."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed",
            f"pip install 'foretell[{extra}]'",
        )


class MissingModel(UserError):
    """The file, or the function in it, that a model or a script names is not there."""


class ModelError(UserError):
    """The user's own model code raised, aborted or did not match its batch."""

    change: Mapping[str, Any] = {}
    """Options under which the code may run: `{"precision": "fp32"}`."""


class FileFormatError(UserError):
    """A file of foretell's own kind that cannot be read."""


class InternalError(ForetellError):
    """A promise of foretell's own was broken: an internal error, never the user's."""


def near_names(name: str, known: Iterable[str], limit: int = 5) -> list[str]:
    """The known names closest to `name`, nearest first, ignoring case."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=limit, cutoff=0.5)
    close += [low for low in by_lower if low.startswith(name.lower()[:4]) and low not in close]
    return [by_lower[low] for low in close[:limit]]
