"""Options as typer reads them, without what most commands do not need.

typer makes an adapter of pydantic's for each of some forty options, given or not; importing pydantic and making them takes a fifth
of the time of an answer that is known already. An option that is not given is None here, and plain words and numbers are read at
once; for anything else the adapter is made, and all is as typer has it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer import core

_NUMBERS = {int: re.compile(r"-?[0-9]{1,15}"), float: re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")}
_LIMITS = ("click_type", "min", "max", "clamp")
_OF_PATHS = {"exists": False, "file_okay": True, "dir_okay": True, "writable": False, "resolve_path": False, "path_type": None}
"""What may be asked of a path besides that it can be read, and what it is where nothing is asked."""
_MAKE = "build_runtime_param"


class Late:
    """What typer asks of an option's adapter, which is made when it is needed."""

    def __init__(self, make: Callable[[Any], Any], descriptor: Any) -> None:
        self._make, self._descriptor = make, descriptor
        info = descriptor.parameter_info
        self._parser = getattr(info, "parser", None)
        self._any_path = all(getattr(info, name, usual) == usual for name, usual in _OF_PATHS.items())
        self._plain: Any = None if any(getattr(info, name, None) not in (None, False) for name in _LIMITS) else descriptor.annotation

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if several:
            if self._plain == list[str] and self._parser is None and isinstance(value, (list, tuple)) and all(map(_is_plain, value)):
                return list(value)
        else:
            if self._parser is not None:
                with contextlib.suppress(Exception):  # what is wrong is told as typer tells it
                    return self._parser(value)
            elif (self._plain is str and _is_plain(value)) or (self._plain is bool and type(value) is bool):
                return value
            elif self._plain is Path and self._any_path and _is_plain(value) and value.isprintable() and _can_be_read(value):
                return Path(value)
            elif self._plain in _NUMBERS:
                if type(value) is self._plain:
                    return value
                if type(value) is str and _NUMBERS[self._plain].fullmatch(value):
                    return self._plain(value)
        return self._make(self._descriptor).coerce(value, param=param, ctx=ctx)


def _is_plain(value: Any) -> bool:
    return type(value) is str and value.isascii()


def _can_be_read(path: str) -> bool:
    """Or is not there, which typer leaves to whoever opens it."""
    return bool(path) and (os.access(path, os.R_OK) or not os.path.lexists(path))


def install() -> None:
    """For the commands of this process; a release of typer that makes no such adapters stays as it is."""
    make = getattr(core, _MAKE, None)
    if make is not None and not hasattr(make, "late"):

        def late(descriptor: Any) -> Any:
            return Late(make, descriptor)

        late.late = True  # type: ignore[attr-defined]
        setattr(core, _MAKE, late)
