"""Completion in the shell: models, devices and commands under commands, beside the commands and options that typer completes itself.

    foretell fit gp⇥            gpt2 gpt2-medium ...      names of the zoo, Python files, folders
    foretell fit gpt2 --on 8xH⇥ 8xH100 8xH200 ...         devices and their short names, also after a count or a comma
    foretell plan s⇥            show                      see `names`

A shell asks by starting foretell with a variable set; no torch is imported for the answer.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from foretell.cli import names

ASKED = "_FORETELL_COMPLETE"
"""Set by the script that `foretell --install-completion` installs."""
_BEFORE_A_DEVICE = re.compile(r"^(.*,)?(\d+x)*")
Matches = Callable[[str], list[str]]


def zoo_names(start: str) -> list[str]:
    import foretell.zoo as zoo

    return _beginning(zoo.names(), start)


def models(start: str) -> list[str]:
    """Zoo names that begin so, Python files and folders."""
    paths = sorted(glob.glob(f"{glob.escape(start)}*"))
    files = [f"{path}/" if Path(path).is_dir() else path for path in paths if path.endswith(".py") or Path(path).is_dir()]
    return [*zoo_names(start), *(files if start else [one for one in files if one.endswith(".py")])]


def devices(start: str) -> list[str]:
    """Names of devices after what stands before one: `8xH`, `2x8xH`, `A100,H`."""
    from foretell.hardware import catalog

    before = (_BEFORE_A_DEVICE.match(start) or [""])[0]
    known = [name for device in catalog.devices() for name in (*catalog.aliases(device), device.name)]
    return [before + name for name in _beginning(sorted({*known, "auto"}), start[len(before) :])]


def under(command: str) -> Matches:
    """Words that follow a command: those under it, or a model."""
    below = [name.split()[1] for name in names.UNDER.values() if name.split()[0] == command]
    return lambda start: [*_beginning(below, start), *(models(start) if command == "plan" else [])]


def _beginning(known: Iterable[str], start: str) -> list[str]:
    return [name for name in known if name.lower().startswith(start.lower())]


# ---------------------------------------------------------------------- where they are asked for


def install(group: Any) -> None:
    """Every argument and option of every command that takes one of these offers them."""
    for name, command in getattr(group, "commands", {}).items():
        install(command)
        for parameter in command.params:
            if found := _matches(name, parameter):
                _offer(parameter, found)


def _matches(command: str, parameter: Any) -> Matches | None:
    if "--on" in parameter.opts:
        return devices
    if parameter.param_type_name != "argument":
        return None
    first = parameter.name == "model" or command in ("run", "compare")
    if first and any(name.split()[0] == command for name in names.UNDER.values()):
        return under(command)
    if parameter.name == "name" and command in ("hardware", "check", "query"):
        return devices if command == "hardware" else zoo_names
    return models if parameter.name == "model" else None


class Offered(NamedTuple):
    """What typer reads of one match."""

    value: str
    type: str = "plain"
    help: str | None = None


def _offer(parameter: Any, matches: Matches) -> None:
    parameter.shell_complete = lambda context, start: [Offered(one) for one in matches(start)]


# ---------------------------------------------------------------------- two words that are one command


def join_words(environment: MutableMapping[str, str] = os.environ) -> None:
    """What was typed, as the shell says it, with two words that name one command as one."""
    typed, bash = ("COMP_WORDS", True) if "COMP_WORDS" in environment else ("_TYPER_COMPLETE_ARGS", False)
    text = environment.get(typed, "")
    try:
        words = shlex.split(text)
        done = int(environment["COMP_CWORD"]) if bash else len(words) - (not text.endswith(" "))
    except (KeyError, ValueError):  # a quote that is still open
        return
    whole = names.joined(words[1:done])
    if whole == words[1:done]:
        return
    environment[typed] = shlex.join([*words[:1], *whole, *words[done:]]) + (" " if text.endswith(" ") else "")
    if bash:
        environment["COMP_CWORD"] = str(len(whole) + 1)
