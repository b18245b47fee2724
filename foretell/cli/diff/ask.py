"""What is asked of two revisions, from words: options that `diff` has not are read by `fit`'s own command, whatever they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli.fit import fit as fit_command
from foretell.cli.fit import table as fit_table
from foretell.cli.options import value_of
from foretell.errors import UserError
from foretell.options import FitOptions
from foretell.options.describe import options_of as options_of_class
from foretell.options.words import MAX

if TYPE_CHECKING:
    from foretell.api.diffs import DiffQuestion
    from foretell.report.diff.bounds import GrowthBound

_OF_A_RUN = ("tokens", "samples", "epochs", "dataset_size", "region", "price", "trace_out", "keep_writes")
"""Options that change nothing of a step, or write files."""


@functools.cache
def _fit() -> Any:
    """`fit` as its own command line has it."""
    import typer

    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command("fit")(fit_command.fit)
    return typer.main.get_command(alone)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words that stand for themselves, and options of `fit` with their values."""
    options = {name: one for one in _fit().params if one.param_type_name == "option" for name in (*one.opts, *one.secondary_opts)}
    plain: list[str] = []
    typed: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            plain.append(word)
            continue
        typed.append(word)
        option = options.get(word.partition("=")[0])
        if option is not None and not option.is_flag and "=" not in word and rest:
            typed.append(rest.pop(0))
    return plain, typed


def is_model(word: str) -> bool:
    """A file of the repository, and not a revision."""
    return word.endswith(".py") or ".py:" in word


def options_of(words: Sequence[str], on: str, *, scripted: bool) -> dict[str, Any]:
    """Options of `fit` as `api.fit` takes them, or `api.fit_script`: those that were typed and no others."""
    from foretell import api

    context = _fit().make_context("foretell fit", ["--on", on, *words])
    source = context.get_parameter_source
    typed = [name for name in context.params if (how := source(name)) is not None and how.name == "COMMANDLINE" and name != "on"]
    takes = inspect.signature(api.fit_script if scripted else api.fit).parameters
    found: dict[str, Any] = {}
    described = {one.name: one for one in options_of_class(FitOptions)}
    for name in typed:
        key = "compile" if name == "compile_how" else name
        about = described.get(name)
        option = about.spelled if about is not None else f"--{name.replace('_', '-')}"
        if key not in takes or name in _OF_A_RUN:
            whose = "a script, which says so itself" if scripted and name not in _OF_A_RUN else "two revisions"
            raise UserError(f"{option} is not for {whose}", "leave it out")
        said = context.params[name]
        found[key] = value_of(about, said) if about is not None else said
        if found[key] == MAX:
            raise UserError(f"{option} max is another size in each revision", "give a number")
    return found


def questions(
    model: str, script: Sequence[str], on: str, words: Sequence[str], bounds: Mapping[str, GrowthBound] | None = None
) -> list[DiffQuestion]:
    """One for each kind of hardware; what is wrong with it is raised before anything is checked out."""
    import shlex

    from foretell.api.diffs import DiffQuestion
    from foretell.hardware import parse

    found = []
    for one in fit_table.several(on):
        if not one.casefold().startswith("auto"):  # only torch knows this machine
            parse(one)
        options = options_of(words, one, scripted=bool(script))
        found.append(DiffQuestion(hardware=one, model=model, script=tuple(script), options=options, told=shlex.join(words), bounds=bounds))
    return found
