"""The commands and their options. A command's module is imported when that command is asked for, or when all are listed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer

from foretell.cli import common, late, names

_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: the function that it is, and what the list of commands says of it."""

    where: str
    """Module in this package and function: `fit.fit:fit`."""
    reads: bool = False
    """It runs no code of the user's: it works from files, or says what it would need."""
    hidden: bool = False
    """Told under another one: see `names`."""
    says: str = ""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further settings of typer → attribute of the command's module, or text."""


COMMANDS = {
    "fit": Command(where="fit.fit:fit", says="Does MODEL fit on HW? Exit 0 yes, 1 no."),
    "plan": Command(where="plan.plan:plan", says="The best plan to train MODEL on HW; show, export, eject, advise."),
    "run": Command(where="run.run:run", says="Train as a plan says, and measure it; demo, box, supervise, chaos, ckpt."),
    "serve": Command(where="serve.serve:serve", says="MODEL behind OpenAI's HTTP interface: pages, continuous batching, any client; bench."),
    "tune": Command(where="tune.tune:tune", says="Ops of a step by what better kernels could gain; search, verify a kernel; serve."),
    "watch": Command(where="run.watch:watch", says="Run your script as it is: predicted beside measured, why memory ran out."),
    "verify": Command(where="run.verify:verify", says="Does a plan compute what one process computes? Exit 0 yes, 1 no."),
    "compare": Command(where="compare:compare", reads=True, says="Predicted beside measured of a run, or two runs side by side; prove, diff."),
    "report": Command(where="report:report", reads=True, says="One HTML page of a run or a plan: charts, tables, how to repeat it."),
    "probe": Command(where="machine.probe:probe", says="Measure this machine, so that predictions rest on it."),
    "hardware": Command(where="machine.hardware:hardware", reads=True, says="List the devices known by name; `hardware NAME` shows one."),
    "zoo": Command(where="zoo.zoo:listing", reads=True, says="List the models known by name; check, query, fuzz."),
    "doctor": Command(where="machine.doctor:doctor", reads=True),
    "plan show": Command(where="plan.show:show", reads=True, hidden=True),
    "plan export": Command(where="plan.export:export", reads=True, hidden=True),
    "plan eject": Command(where="plan.eject:eject", hidden=True),
    "plan advise": Command(where="fit.advise:advise", hidden=True),
    "run demo": Command(where="run.demo:demo", hidden=True),
    "run box": Command(where="run.box:box", hidden=True),
    "run supervise": Command(where="run.supervise:supervise", hidden=True),
    "run chaos": Command(where="run.chaos:chaos", hidden=True),
    "run ckpt": Command(where="run.ckpt:", reads=True, hidden=True, says="Checkpoints: list, verify, show, convert, merge."),
    "compare prove": Command(where="zoo.prove:prove", hidden=True),
    "compare diff": Command(where="diff.diff:diff", hidden=True, more={"cls": "DiffCommand", "context_settings": "SETTINGS"}),
    "zoo fuzz": Command(where="zoo.fuzz:fuzz", hidden=True),
    "serve bench": Command(where="serve.bench:bench", reads=True, hidden=True),
    "tune search": Command(where="tune.search:search", hidden=True),
    "tune verify": Command(where="tune.verify:verify", hidden=True),
    "tune serve": Command(where="tune.serve:serve", hidden=True),
}
"""In the order of the list."""
_ZOO = {
    "check": Command(where="zoo.check:check", says="Predict, run, plan and run as planned: one model or --all."),
    "query": Command(where="zoo.query:query", reads=True, says="Code, settings and measured rows of models by task, domain, ..."),
}
_CKPT = {name: Command(where=f"run.ckpt:{name}", reads=name != "merge") for name in ("listing", "verify", "show", "convert", "merge")}


def reading(command: Callable[..., int]) -> Callable[..., int]:
    """A command that runs no code of the user's."""

    @functools.wraps(command)
    def inner(*args: Any, **options: Any) -> int:
        from foretell.trace.sandbox import user_code

        with user_code.refused():
            return command(*args, **options)

    return inner


def made(only: str = "") -> typer.Typer:
    """All commands, or one of them and those below it."""
    late.install()
    app = typer.Typer(**{**_SETTINGS, "add_completion": True})
    app.callback()(root)
    for name, one in COMMANDS.items():
        if only in ("", name):
            _add(app, name, one)
    if not only:
        app.command("version", hidden=True)(print_version)
    return app


def _add(app: typer.Typer, name: str, one: Command) -> None:
    if name == "zoo":
        below = _group(_ZOO)
        below.callback(invoke_without_command=True, short_help=one.says)(_function(one))
        app.add_typer(below, name=name)
    elif name == "run ckpt":
        app.add_typer(_group(_CKPT, no_args_is_help=True, help=one.says), name=name, hidden=True)
    else:
        module = _module(one)
        more: dict[str, Any] = {key: getattr(module, attribute) for key, attribute in one.more.items()}
        more |= {"short_help": one.says} if one.says else {}
        more |= {"epilog": names.below(name)} if name in ("plan", "run", "serve", "tune", "compare") else {}
        app.command(name, hidden=one.hidden, **more)(_function(one))


def _group(below: Mapping[str, Command], **settings: Any) -> typer.Typer:
    group = typer.Typer(**_SETTINGS, **settings)
    for name, one in below.items():
        group.command("list" if name == "listing" else name, short_help=one.says or None)(_function(one))
    return group


def _module(one: Command) -> Any:
    return importlib.import_module(f"foretell.cli.{one.where.partition(':')[0]}")


def _function(one: Command) -> Callable[..., int]:
    function: Callable[..., int] = getattr(_module(one), one.where.partition(":")[2])
    return reading(function) if one.reads else function


def _version(asked: bool) -> None:
    if asked:
        print_version(json=common.wants_json())
        raise typer.Exit


def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version and exit."),
) -> None:
    """Know before you run: does a PyTorch model's training step fit on this hardware? No GPU needed.

    Start with: foretell fit gpt2 --on H100
    """


def print_version(json: bool = typer.Option(False, "--json", help=common.JSON_HELP)) -> int:
    """Show the version of foretell, Python and torch."""
    found = common.versions()
    if json:
        return common.emit_json({})
    common.emit(f"foretell {found['foretell']} (python {found['python']}, torch {found.get('torch', 'not installed')})")
    return 0
