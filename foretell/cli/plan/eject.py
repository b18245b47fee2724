"""`foretell plan eject PLAN`: the plan as a training script that needs torch and nothing of foretell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.errors import FileFormatError, UserError

if TYPE_CHECKING:
    from foretell.eject.patch import Patch
    from foretell.eject.script import Ejected
    from foretell.plan.types import Plan


def eject(
    plan: Path = typer.Argument(..., metavar="PLAN|RUN", show_default=False,
        help="A plan file, or a run folder: its data, steps and rate become the script's defaults."),
    out: Path | None = typer.Option(None, metavar="FILE.py", show_default=False,
                                    help="Default: train_MODEL.py here; of a script's plan the terminal, or FILE.patch."),
    force: bool = typer.Option(False, "--force", help="Write over a file that is there."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Write a readable script that trains as the plan says and gives the same losses; run it with python or torchrun.

    Of a plan for a script of your own, print the change to that script instead: a diff for `patch -p0`.
    """
    from foretell.plan import file
    from foretell.trace.load.model import is_script

    found = file.read_training(plan / "plan.json" if plan.is_dir() else plan)
    if is_script(str(found.model.get("model", ""))):
        return _of_a_script(found, plan, out, force, json)
    target = out or Path(f"train_{_word(str(found.model.get('model', 'model')))}.py")
    check_target(target, force=force, suffix=".py")
    made = common.call(lambda: _ejected(found, target, plan), f"writing a script for {plan}")
    write(target, made.text)
    if json:
        return common.emit_json({"eject": {"file": str(target), "command": made.command, "notes": list(made.notes)}})
    common.emit("\n".join([f"Written to {target}", f"Start it     {made.command}", *(f"Note         {note}" for note in made.notes)]))
    return common.YES


def _of_a_script(plan: Plan, path: Path, out: Path | None, force: bool, json: bool) -> int:
    """The change to a script that its plan is for, on stdout or in a file; `patch` passes over the lines before it."""
    if out is not None:
        check_target(out, force=force, suffix=".patch")
    made = common.call(lambda: _patched(plan), f"writing what to change for {path}")
    if out is not None:
        write(out, made.diff)
    if json:
        told = {"diff": made.diff, "instructions": list(made.instructions), "command": made.command, "notes": list(made.notes)}
        return common.emit_json({"eject": {"file": str(out) if out else None, **told}})
    head = [f"Start it     {made.command}", *(f"By hand      {one}" for one in made.instructions), *(f"Note         {one}" for one in made.notes)]
    if not made.diff and not made.instructions:
        head.insert(0, "Nothing is to be changed: the script does what the plan says.")
    common.emit("\n".join([*head, *([f"Written to {out}"] if out else ["", made.diff.rstrip("\n")])]).rstrip())
    return common.YES


def _patched(plan: Plan) -> Patch:
    from foretell.eject.patch import patch

    return patch(plan)


def _ejected(plan: Plan, target: Path, path: Path) -> Ejected:
    from foretell.eject.script import eject
    from foretell.runtime.train.folder import read_settings

    settings = read_settings(path) if path.is_dir() else None
    if path.is_dir() and settings is None:
        raise FileFormatError(f"{path} has no settings.json", "give the plan file itself")
    return eject(plan, target, settings)


def _word(model: str) -> str:
    """`hf:llama` → hf_llama, `path/own.py:net` → own_net."""
    name = model.rpartition("/")[2].replace(".py", "")
    return re.sub(r"\W+", "_", name).strip("_") or "model"


def check_target(path: Path, *, force: bool, suffix: str = "") -> None:
    """Before the work: a file that is there stays unless it is meant to go."""
    if path.is_dir():
        raise UserError(f"{path} is a folder", f"name a file in it, such as {path / ('train' + suffix)}")
    if suffix and path.suffix != suffix:
        raise UserError(f"--out {path} does not end in {suffix}", f"give {path.name}{suffix}")
    if path.exists() and not force:
        raise UserError(f"{path} is there already", "give --force to write over it, or another --out")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", "make it, or name another --out")


def write(path: Path, text: str) -> None:
    from foretell.files import write_atomically

    try:
        write_atomically(path, text, parents=False)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "give another --out") from error
