"""`foretell plan show`: a plan in words and drawn, and whether it may be run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from foretell.cli import common

if TYPE_CHECKING:
    from foretell.hardware import Cluster
    from foretell.plan.facts import Complaint
    from foretell.plan.types import Plan, ServeLayout


def show(
    path: str | None = typer.Argument(None, metavar="PLAN", help="A plan file."),
    schema: bool = typer.Option(False, "--schema", help="Print the schema of plan files, which describes every field."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Explain a plan: who does what, who talks to whom, what was predicted. Exit 1 if it may not be run."""
    from foretell.errors import UserError
    from foretell.plan import file, legal
    from foretell.plan.facts import facts_of
    from foretell.report.terminal import plan as page

    if schema:
        return _schema()
    if path is None:
        raise UserError("no plan is given", "foretell plan show plan.json")
    plan = file.read(path)
    if plan.serve is not None:
        return _of_server(plan, plan.serve, path, json=json)
    cluster, unknown = _cluster(plan.hardware)
    facts = facts_of(plan, cluster)
    complaints = (*unknown, *legal.complaints(plan, facts))
    if json:
        common.emit_json(page.content(plan, complaints))
    else:
        plain = common.ascii_only(sys.stdout)
        common.emit(page.render(plan, complaints, facts, common.width(), path=path, ascii_only=plain))
    return common.NO_OR_FAILED if complaints else common.YES


def _of_server(plan: Plan, serve: ServeLayout, path: str, *, json: bool) -> int:
    from foretell.cli.plan.serve import words
    from foretell.plan import file
    from foretell.plan.text import shell_word

    if json:
        common.emit_json({"plan": file.to_json(plan)})
        return common.YES
    asked = f"{serve.load or 'any load'}{f', {serve.slo}' if serve.slo else ''}"
    lines = [f"{plan.model.get('model')} served on {plan.hardware}: {words(serve)}", f"  {serve.pages:,} pages of each replica; planned for {asked}"]
    later = f"  foretell serve does not run {', '.join(serve.not_run_yet)} yet" if serve.not_run_yet else ""
    common.emit("\n".join([*lines, *([later] if later else []), f"next       foretell serve {shell_word(path)} --on {plan.hardware}"]))
    return common.YES


def _schema() -> int:
    import json

    from foretell.plan import schema

    common.emit(json.dumps(schema.load(), indent=2, ensure_ascii=False))
    return common.YES


def _cluster(hardware: str) -> tuple[Cluster | None, tuple[Complaint, ...]]:
    """What the plan's hardware is, where that is known without a look at this machine; a name nobody knows is wrong.

    A hardware file may be on another machine: without it the plan is shown all the same.
    """
    from foretell.errors import UserError
    from foretell.hardware import parse
    from foretell.plan.facts import Complaint

    named = hardware.strip().casefold()
    if named.startswith("auto"):
        return None, ()
    try:
        return parse(hardware), ()
    except UserError as error:
        if named.endswith((".toml", ".json")):
            return None, ()
        return None, (Complaint(field="hardware", problem=error.problem, remedy=error.remedy),)
