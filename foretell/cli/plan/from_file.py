"""`foretell plan --from FILE`: the layout of another tool's file, as options of `plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from foretell.cli import common
from foretell.cli.fit import fit
from foretell.errors import UserError
from foretell.options.plan import AXES

HELP = "Cost the plan of a torchtitan, accelerate, DeepSpeed, transformers Trainer or Lightning file; options typed here win."
SEARCHES = ("objective", "margin", "step_law", "deadline", "budget", "state_format", "host", "disk", "point", "explain", "what_if", "exact", "infer")
"""Options of a search among plans: a file has one."""
_SIZES = (*AXES, "global_batch", "micro_batch", "schedule", "precision", "optimizer", "clip", "compile", "seq", "model")


def take_over(path: Path, on: str, options: dict[str, Any], context: typer.Context) -> tuple[str, str, dict[str, Any]]:
    """Put what the file says into the options of `plan`, unless it was typed; the model, where it runs, and what was read."""
    from foretell.export.read import layout, read, words

    params = dict(context.params)
    typed = {name: params[name] for name in params if fit.is_typed(context, name)}
    _check(typed)
    theirs = read(path)
    given = {name: typed[name] for name in _SIZES if name in typed}
    on, said, devices = fit.spread(on, layout.ranks(theirs, given))
    found = fit.in_file(path, lambda: layout.described(theirs, given, devices))
    model = params["model"] or theirs.options.get("model")
    if model is None:
        why = theirs.missing.get("model", "MODEL is missing")
        raise UserError(f"{path} names no model that foretell has: {why}", f"foretell plan MODEL --on {on} --from {path}")
    told = words.content(theirs, path, given, [said] if said else [])
    if not common.wants_json():
        common.emit("\n".join(words.lines(theirs, told)), sys.stderr)
    options |= {"seq": options["seq"] or theirs.options.get("seq"), "precision": found.precision, "described": found}
    options |= {name: value for name in ("optimizer", "clip", "compile") if (value := getattr(found, name)) is not None}
    options |= dict.fromkeys((*AXES, "global_batch", "micro_batch", "schedule"))
    return model, on, told


def _check(typed: Mapping[str, Any]) -> None:
    if common.script_words() is not None:
        raise UserError("--from and a script are given", "name one of them: a script says its layout itself")
    if other := [name for name in SEARCHES if name in typed]:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in other)
        raise UserError(f"{named} beside --from: the file has one plan, and no other is looked for", "leave one of them out")
