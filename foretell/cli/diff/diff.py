"""`foretell diff BASE [HEAD] --on HW MODEL`: a gate for pull requests, without a GPU."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from foretell.cli import common
from foretell.cli.diff import ask, file
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.api.diffs import DiffQuestion
    from foretell.report.diff.bounds import GrowthBound
    from foretell.report.diff.judge import RevisionDiff

STDOUT = "-"
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["-h", "--help"]}
_USAGE = "foretell diff BASE [HEAD] --on H100 file.py:function, or ... -- python train.py"


class DiffCommand(TyperCommand):
    """`--markdown` may stand alone; its usage says what the words are."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path, "BASE [HEAD] --on HW [MODEL | -- COMMAND]")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = []
        for place, word in enumerate(args):
            words.append(word)
            follows = args[place + 1] if place + 1 < len(args) else STDOUT
            if word == "--markdown" and follows.startswith("-") and "--" not in args[:place]:
                words += [] if follows == STDOUT and place + 1 < len(args) else [STDOUT]
        return super().parse_args(ctx, words)


def diff(
    words: list[str] = typer.Argument(None, hidden=True),
    on: str | None = typer.Option(None, "--on", metavar="HW", show_default=False, help="Hardware, as `foretell fit` has it."),
    model: list[str] = typer.Option([], "--model", metavar="MODEL", help="file.py:function in the repository; may be repeated."),
    config: Path | None = typer.Option(None, "--config", metavar="FILE", show_default=False,
                                       help="All that, from a file; foretell-diff.toml."),
    max_memory: str | None = typer.Option(None, metavar="GROWTH", help="Of peak memory: +2% (the default), +200MiB, none."),
    max_step: str | None = typer.Option(None, metavar="GROWTH", help="Of step time: +5% (the default), +3ms, none."),
    max_parameters: str | None = typer.Option(None, metavar="GROWTH", help="Of parameters: +0% (the default), +1M, none."),
    markdown: str | None = typer.Option(None, metavar="[FILE]", show_default=False, help="Write it for a pull request."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of a failure."),
) -> int:  # fmt: skip
    """Fail when peak memory, step time or parameters grow between two git revisions. No GPU needed.

    HEAD left out, or '.': the working tree. Options of `foretell fit` are taken too. Exit 0 within the bounds, 1 grown, 2 HEAD cannot be traced.

    \b
    foretell diff main HEAD --on H100 models/gpt.py:build --micro-batch 4
    foretell diff main --on H100 --max-step +3ms -- python train.py --batch-size 64
    """
    if json and markdown == STDOUT:
        raise UserError("--json and --markdown both print", "give --markdown a file")
    if markdown not in (None, STDOUT):
        _check_writable(Path(str(markdown)))
    base, head, models, options = _words(words or [], model)
    typed = {"memory": max_memory, "step": max_step, "parameters": max_parameters}
    script = common.script_words() or ()
    place = config if config or models or common.script_words() is not None else _found_file()
    with contextlib.chdir(place.absolute().parent) if place and place.absolute().parent.is_dir() else contextlib.nullcontext():
        questions, bounds = _asked(place, models, tuple(script), on, options, typed, named=config is not None)
        found = _compared(questions, base, head, bounds)
    return _told(found, json, markdown)


def _check_writable(path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--markdown {str(path)!r} is no file that can be written", "name one in a folder that exists, after the revisions")


def _words(words: list[str], models: list[str]) -> tuple[str, str, list[str], list[str]]:
    """The revisions, the models and what is left for `fit`."""
    plain, options = ask.split(words)
    revisions = [word for word in plain if not ask.is_model(word)]
    if not revisions:
        raise UserError("no BASE is given", _USAGE)
    if len(revisions) > 2:
        raise UserError(f"{len(revisions)} revisions are given ({', '.join(revisions)}), and two are compared", _USAGE)
    return revisions[0], revisions[1] if len(revisions) > 1 else ".", [*models, *(word for word in plain if ask.is_model(word))], options


def _found_file() -> Path | None:
    """foretell-diff.toml of this folder, or at the root of the repository."""
    from foretell.api.revisions import repository

    places = (Path(file.NAME), repository().root / file.NAME)
    return next((path for path in places if path.is_file()), None)


def _asked(
    place: Path | None, models: list[str], script: tuple[str, ...], on: str | None, options: list[str], typed: dict[str, str | None], *, named: bool
) -> tuple[list[DiffQuestion], dict[str, GrowthBound]]:
    from foretell.report.diff.bounds import all_of

    if place is not None:
        if models or script or options:
            other = "options of fit" if options and not (models or script) else "a model or a script"
            raise UserError(f"{other} beside {place.name}", "write it into that file, or name the model here" if not named else "give one of them")
        content = file.read(place.absolute())
        bounds = file.bounds_of(place, content, typed)
        return file.questions(place, content, on, bounds), bounds
    if models and script:
        raise UserError(f"a model ({models[0]}) and a script are given", f"name one of them, or both in {file.NAME}")
    if not models and not script:
        raise UserError("no model is named, and there is no foretell-diff.toml", _USAGE)
    if not on:
        raise UserError("no hardware is given", "add --on H100")
    bounds = all_of(typed)
    asked = [("", script)] if script else [(model, ()) for model in models]
    return [one for model, command in asked for one in ask.questions(model, command, on, options)], bounds


def _compared(questions: list[DiffQuestion], base: str, head: str, bounds: dict[str, GrowthBound]) -> RevisionDiff:
    doing = common.Doing("comparing")

    def work() -> RevisionDiff:
        from foretell import api

        return api.diff(questions, base=base, head=head, bounds=bounds, progress=doing.tell)

    return common.call(work, doing)


def _told(found: RevisionDiff, json: bool, markdown: str | None) -> int:
    from foretell.report.diff import markdown as page

    written = page.render(found, _command()) if markdown is not None else ""
    if markdown not in (None, STDOUT):
        from foretell.files import write_atomically

        write_atomically(Path(str(markdown)), written)
    if json:
        common.emit_json({"diff": found.to_json()})
    elif markdown == STDOUT:
        common.emit(written.rstrip("\n"))
    else:
        from foretell.report.terminal import diff as screen

        common.emit(screen.render(found, common.width(), ascii_only=common.ascii_only(sys.stdout)))
    return found.status


def _command() -> str:
    """What was typed, to repeat it by hand."""
    from foretell.report.command import without

    words = [word for word in common.typed()[1:] if word not in ("--json", "--debug")]
    if "--markdown" in words:
        place = words.index("--markdown")
        alone = place + 1 == len(words) or words[place + 1].startswith("-")
        words = without(words, "--markdown", has_value=not alone)
    return shlex.join(["foretell", "diff", *(word for word in words if not word.startswith("--markdown="))])
