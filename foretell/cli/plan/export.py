"""`foretell plan export PLAN --to TOOL`: the plan as files of another tool."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.export.types import Exported


def export(
    plan: Path = typer.Argument(..., metavar="PLAN", show_default=False,
                                help="A plan file; for vllm and sglang what `foretell serve --engine --json` said."),
    to: str = typer.Option(..., "--to", metavar="TOOL", show_default=False,
                           help="accelerate, deepspeed, torchtitan, slurm, k8s or skypilot; vllm or sglang."),
    out: Path | None = typer.Option(None, metavar="DIR", show_default=False, help="Folder for the files; default: MODEL-TOOL."),
    force: bool = typer.Option(False, "--force", help="Write over files that are there."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Write files that TOOL takes, and say what of the plan they do not hold. Exit 2 if TOOL cannot express the plan."""
    made, name = _made(plan, to)
    folder = out or Path(f"{name}-{to}")
    _check(folder, made.files, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}", "give another --out") from error
    files = [str(folder / name) for name in made.files]
    if json:
        return common.emit_json({"export": {"tool": to, "files": files, "command": made.command, "lost": list(made.lost)}})
    lines = [f"Written   {file}" for file in files] + [f"Start it  {made.command}"]
    lines += ["Not included in these files:", *(f"  {line}" for line in made.lost)] if made.lost else []
    common.emit("\n".join(lines))
    return common.YES


def _made(plan: Path, to: str) -> tuple[Exported, str]:
    """The files, and a name for their folder."""
    from foretell.export import export as written
    from foretell.export import serving
    from foretell.export.types import label
    from foretell.plan import file

    if to in serving.TOOLS:
        if not serving.holds(plan):
            raise UserError(f"{to} serves, and {plan} is no forecast of serving", serving.REMEDY)
        return serving.TOOLS[to](serving.read(plan)), "serving"
    found = file.read_training(plan)
    return written(found, to), label(found)


def _check(folder: Path, files: Iterable[str], *, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file", "name a folder")
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise UserError(f"{folder / there[0]} is there already", "give --force to write over it, or another --out")
