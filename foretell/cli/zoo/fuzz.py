"""`foretell zoo fuzz`: generated models, each traced, measured and composed; failures become small files."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from foretell.cli import common
from foretell.errors import UserError

USUAL_COUNT = 100
MOST_COUNT = 100_000
USUAL_OPS = 14
MOST_OPS = 60


def fuzz(
    n: int = typer.Option(USUAL_COUNT, "--n", "-n", metavar="N", help="How many models."),
    seed: str = typer.Option("0", "--seed", metavar="TEXT", help="What to draw from; model i of a seed is always the same."),
    out: Path | None = typer.Option(None, "--out", metavar="DIR", show_default=False, help="Rows and files of failures; default runs/fuzz-SEED."),
    ops: int = typer.Option(USUAL_OPS, "--ops", metavar="N", help="Ops of a model, at most; blocks come on top."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Generate models, check that each traces, needs the memory predicted (within 5 %, on this CPU) and computes the same
    through a plan; shrink what fails to a small file.

    Exit 0 where nothing failed, 1 where something did.
    """
    if not 1 <= n <= MOST_COUNT:
        raise UserError(f"--n {n} is no number of models", f"ask for 1 to {MOST_COUNT:,}, such as --n 100")
    if not 1 <= ops <= MOST_OPS:
        raise UserError(f"--ops {ops} is no number of ops", f"ask for 1 to {MOST_OPS}, such as --ops {USUAL_OPS}")
    if not seed.strip() or "/" in seed:
        raise UserError(f"the seed {seed!r} is empty or a path", "give any text without slashes, such as --seed 7")
    folder = out or Path("runs") / f"fuzz-{seed}"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file", "give a folder, or one that is not there yet")
    from foretell.prove.fuzz import campaign

    with common.stdout_aside():
        found = campaign.run(seed, n, ops, folder, progress=_say)
    if sys.stderr.isatty() and common.speaks():
        sys.stderr.write("\r\x1b[K")
    if json:
        content = {**found.summary(), "operators_seen": dict(campaign.operators_seen(found.verdicts)), "rows": str(folder / "rows.jsonl")}
        common.emit_json({"assumptions": ["memory is of tensors: what CPU kernels take for themselves is not counted"], "fuzz": content})
    else:
        common.emit(found.line())
    return common.NO_OR_FAILED if found.failed else common.INTERRUPTED if len(found.verdicts) < n else common.YES


def _say(text: str) -> None:
    """One line on stderr, written over where that is a terminal and no failure."""
    if not common.speaks():
        return
    if sys.stderr.isatty() and not text.startswith("model "):
        sys.stderr.write("\r" + common.encodable(text, sys.stderr)[: common.width() - 1] + "\x1b[K")
        sys.stderr.flush()
    else:
        common.emit(text, sys.stderr)
