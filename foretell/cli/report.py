"""`foretell report RUN|PLAN|FILE`: one HTML page with everything that is known of a run, a plan or a server."""

from __future__ import annotations

from pathlib import Path

import typer

from foretell.cli import common
from foretell.cli.options import TIME_LIMIT


def report(
    path: Path = typer.Argument(..., metavar="RUN|PLAN|FILE", show_default=False,
        help="A run folder or a plan file; of serving, a record (serve --out) or what bench, plan --serve or tune serve wrote."),
    out: Path | None = typer.Option(None, metavar="FILE", show_default=False,
        help="The page; default: report.html in the run folder, PLAN.report.html beside a plan."),
    trace: bool = typer.Option(False, "--trace", help="Trace the model where no trace of it is stored; this runs the model's own file."),
    time_limit: float = TIME_LIMIT,
    open_: bool = typer.Option(False, "--open", help="Show it in the browser."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Write one HTML file that opens anywhere, offline: predicted and measured, memory, time, pipeline, other plans.

    Beside it: the predicted step as a Chrome trace and its memory as a PyTorch snapshot. No code of yours is run unless
    --trace asks for it.
    """
    from foretell import api

    found = common.call(lambda: api.report(path, out, trace=trace, time_limit=time_limit), f"costing the plan of {path}")
    if json:
        common.emit_json({"report": found.to_json()})
    else:
        lines = [f"Written to {found.path}"]
        lines += [f"       and {file}  {what}" for file, what in found.beside]
        lines += [f"Left out   memory over the step, blocks and pipeline: {found.left_out}"] if found.left_out else []
        common.emit("\n".join(lines))
    if open_:
        import webbrowser

        webbrowser.open(found.path.absolute().as_uri())
    return common.YES
