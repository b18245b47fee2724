"""foretell-diff.toml: models and scripts, hardware and bounds, so that a workflow needs one command.

    on = "H100"                         # or a list; a model may have its own

    [bounds]
    memory = "+2%"

    [[model]]
    model = "models/gpt.py:build"
    micro-batch = 4                     # any option of `foretell fit`, by its name
    set = { width = 2048 }

    [[script]]
    command = "python train.py --batch-size 64"
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.cli.diff import ask
from foretell.errors import FileFormatError, UserError
from foretell.report.diff.bounds import BOUNDED, GrowthBound, all_of

if TYPE_CHECKING:
    from foretell.api.diffs import DiffQuestion

NAME = "foretell-diff.toml"
_TOP = ("on", "bounds", "model", "script")


def read(path: Path) -> dict[str, Any]:
    """The file, checked as far as its own words go."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}", "write it (docs/diff.md), or name a model: foretell diff BASE file.py:function --on HW") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not TOML: {error}", "mend that line") from None
    for key in found:
        if key not in _TOP:
            raise FileFormatError(f"{path} has '{key}', which is not one of its names", f"it takes {', '.join(_TOP)}")
    for key in ("model", "script"):
        if not isinstance(found.get(key, []), list) or not all(isinstance(one, dict) for one in found.get(key, [])):
            raise FileFormatError(f"{path}: '{key}' is not a list of tables", f"write each under [[{key}]]")
    if not found.get("model") and not found.get("script"):
        raise FileFormatError(f"{path} names no model and no script", '[[model]] with model = "file.py:function", or [[script]] with command = "..."')
    return found


def bounds_of(path: Path, content: Mapping[str, Any], typed: Mapping[str, str | None]) -> dict[str, GrowthBound]:
    """The bounds of all: as typed, else as the file says, else the usual."""
    return all_of(typed, _bounds(path, content, None))


def _bounds(path: Path, content: Mapping[str, Any], base: Mapping[str, GrowthBound] | None) -> dict[str, GrowthBound]:
    given = content.get("bounds", {})
    if not isinstance(given, dict) or not all(name in BOUNDED and isinstance(text, str) for name, text in given.items()):
        raise FileFormatError(f"{path}: bounds are {given!r}", f'write them like memory = "+2%"; names are {", ".join(BOUNDED)}')
    return all_of(given, base, where=f"{path}: the bound")


def questions(path: Path, content: Mapping[str, Any], on: str | None, bounds: Mapping[str, GrowthBound]) -> list[DiffQuestion]:
    """All that the file asks; `on` from the command line comes before its own."""
    found: list[DiffQuestion] = []
    for kind, key in (("model", "model"), ("script", "command")):
        for one in content.get(kind, []):
            what = one.get(key)
            if isinstance(what, list) and kind == "script" and all(isinstance(word, str) for word in what):
                script = tuple(what)
            elif isinstance(what, str) and what.strip():
                script = tuple(shlex.split(what)) if kind == "script" else ()
            else:
                example = "python train.py" if kind == "script" else "file.py:function"
                raise FileFormatError(f"{path}: a [[{kind}]] has no '{key}'", f'{key} = "{example}"')
            hardware = on or _hardware(path, one.get("on", content.get("on")))
            words = [word for name, value in one.items() if name not in (key, "on", "bounds") for word in _words(name, value)]
            own = _bounds(path, one, bounds) if "bounds" in one else None
            found += ask.questions("" if script else str(what), script, hardware, words, own)
    return found


def _hardware(path: Path, said: Any) -> str:
    if isinstance(said, list) and said and all(isinstance(one, str) for one in said):
        return ",".join(said)
    if isinstance(said, str) and said.strip():
        return said
    raise FileFormatError(f"{path} says no hardware", 'on = "H100", or --on H100')


def _words(name: str, value: Any) -> list[str]:
    """An option as it would be typed."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [option] if value else []
    if isinstance(value, dict):
        pairs = (f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in value.items())
        return [word for pair in pairs for word in (option, pair)]
    if isinstance(value, list):
        return [word for one in value for word in (option, str(one))]
    return [option, str(value)]
