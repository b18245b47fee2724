"""The commands and their options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer

from foretell.cli import common, compare, names, report
from foretell.cli.diff import diff
from foretell.cli.fit import advise, fit
from foretell.cli.machine import doctor, hardware, probe
from foretell.cli.plan import eject, export, plan, show
from foretell.cli.run import box, ckpt, demo, run, verify, watch
from foretell.cli.zoo import check as zoo_check
from foretell.cli.zoo import fuzz, prove, zoo
from foretell.cli.zoo import query as zoo_query

_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(**{**_SETTINGS, "add_completion": True})
zoo_app = typer.Typer(**_SETTINGS)
ckpt_app = typer.Typer(**_SETTINGS, no_args_is_help=True, help="Checkpoints: list, verify, show, convert.")


def reading(command: Callable[..., int]) -> Callable[..., int]:
    """A command that runs no code of the user's: it works from files, or says what it would need."""

    @functools.wraps(command)
    def inner(*args: Any, **options: Any) -> int:
        from foretell.trace.sandbox import user_code

        with user_code.refused():
            return command(*args, **options)

    return inner


def _version(asked: bool) -> None:
    if asked:
        print_version(json=common.wants_json())
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version and exit."),
) -> None:
    """Know before you run: does a PyTorch model's training step fit on this hardware? No GPU needed.

    Start with: foretell fit gpt2 --on H100
    """


app.command("fit", short_help="Does MODEL fit on HW? Exit 0 yes, 1 no.")(fit.fit)
app.command("plan", short_help="The best plan to train MODEL on HW; show, export, eject, advise.", epilog=names.below("plan"))(plan.plan)
app.command("run", short_help="Train as a plan says, and measure it; demo, box, ckpt.", epilog=names.below("run"))(run.run)
app.command("watch", short_help="Run your script as it is: predicted beside measured, why memory ran out.")(watch.watch)
app.command("verify", short_help="Does a plan compute what one process computes? Exit 0 yes, 1 no.")(verify.verify)
app.command("compare", short_help="Predicted beside measured of a run, or two runs side by side; prove, diff.", epilog=names.below("compare"))(
    reading(compare.compare)
)
app.command("report", short_help="One HTML page of a run or a plan: charts, tables, how to repeat it.")(reading(report.report))
app.command("probe", short_help="Measure this machine, so that predictions rest on it.")(probe.probe)
app.command("hardware", short_help="List the devices known by name; `hardware NAME` shows one.")(reading(hardware.hardware))
app.add_typer(zoo_app, name="zoo")
zoo_app.callback(invoke_without_command=True, short_help="List the models known by name; check, query, fuzz.")(reading(zoo.listing))
zoo_app.command("check", short_help="Predict, run, plan and run as planned: one model or --all.")(zoo_check.check)
zoo_app.command("query", short_help="Code, settings and measured rows of models by task, domain, ...")(reading(zoo_query.query))
app.command("doctor")(reading(doctor.doctor))

# Under others: see `names`.
app.command("plan show", hidden=True)(reading(show.show))
app.command("plan export", hidden=True)(reading(export.export))
app.command("plan eject", hidden=True)(eject.eject)
app.command("plan advise", hidden=True)(advise.advise)
app.command("run demo", hidden=True)(demo.demo)
app.command("run box", hidden=True)(box.box)
app.add_typer(ckpt_app, name="run ckpt", hidden=True)
for _name, _command in (("list", ckpt.listing), ("verify", ckpt.verify), ("show", ckpt.show), ("convert", ckpt.convert)):
    ckpt_app.command(_name)(reading(_command))
app.command("compare prove", hidden=True)(prove.prove)
app.command("compare diff", hidden=True, cls=diff.DiffCommand, context_settings=diff.SETTINGS)(diff.diff)
app.command("zoo fuzz", hidden=True)(fuzz.fuzz)


@app.command("version", hidden=True)
def print_version(json: bool = typer.Option(False, "--json", help=common.JSON_HELP)) -> int:
    """Show the version of foretell, Python and torch."""
    found = common.versions()
    if json:
        return common.emit_json({})
    common.emit(f"foretell {found['foretell']} (python {found['python']}, torch {found.get('torch', 'not installed')})")
    return 0
