"""The command line: parse, call, print.

Exit 0 yes, 1 "does not fit" or a failed check, 2 bad input, 70 a bug in foretell, 130 interrupted.
Nothing is imported before it is needed: `foretell --help` answers without torch and without rich.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from foretell.cli import common, names


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit status. Whatever goes wrong is told here and nowhere else."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    words = names.joined(given)
    common.setup(words)
    if (told := names.note(given)) and sys.stderr.isatty() and common.speaks():
        common.emit(told, sys.stderr)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return common.INTERRUPTED
    except Exception as error:
        return common.fail(error)


def _commands(words: Sequence[str]) -> Any:
    """The one that is asked for, else all of them."""
    from foretell.cli import complete
    from foretell.cli.app import COMMANDS

    if complete.ASKED in os.environ:
        found = _made("")
        complete.join_words()
        complete.install(found)
        return found
    return _made(words[0] if words and words[0] in COMMANDS else "")


@functools.cache
def _made(only: str) -> Any:
    """With all of their options: made once in a process that runs several."""
    import typer

    from foretell.cli.app import made

    return typer.main.get_command(made(only))


def _dispatch(words: list[str]) -> int:
    import typer

    from foretell.trace.sandbox import user_code

    user_code.tell_with(common.runs_code_of)
    try:
        status = _commands(words).main(args=common.without_script(words), prog_name="foretell", standalone_mode=False)
    except typer.Abort:
        return common.INTERRUPTED
    return status if isinstance(status, int) else 0
