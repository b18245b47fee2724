"""`foretell serve bench URL`: what clients of a server wait for, and where it is saturated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.cli.serve.asked import limits
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.serve.bench.figures import BenchPoint
    from foretell.serve.bench.sweep import BenchResult

LATE = 0.05
HALF = 0.5
"""Of what the client alone can do: beyond it, the client is measured too."""


def bench(
    url: str = typer.Argument(..., metavar="URL", show_default=False, help="Up to /v1: http://127.0.0.1:8000/v1."),
    load: str = typer.Option("rate=1, in=128, out=64", "--load", metavar="LOAD",
        help='"rate=8, in=1024±512, out=256±128", users=32, all=100, or a .csv of requests.'),
    rates: str | None = typer.Option(None, "--rates", metavar="N,N|auto", show_default=False,
        help="Requests a second to try one after the other; auto: until the server is saturated."),
    users: str | None = typer.Option(None, "--users", metavar="N,N|auto", show_default=False, help="The same with users who wait for their answers."),
    seconds: float = typer.Option(30.0, "--seconds", help="Of arrivals, for each load."),
    repeats: int = typer.Option(1, "--repeats", metavar="N", help="Of each load, with other arrivals: the median is told, and the spread."),
    slo: str | None = typer.Option(None, "--slo", metavar="LIMITS", show_default=False, help="ttft=500ms,tpot=40ms: goodput is what keeps them."),
    model: str | None = typer.Option(None, "--model", metavar="NAME", show_default=False, help="Default: the first that the server lists."),
    text: bool = typer.Option(False, "--text", help="Prompts of letters, for servers that take no token numbers: prompts have about as many tokens."),
    timeout: float = typer.Option(600.0, "--timeout", metavar="SECONDS", help="For one answer."),
    out: Path | None = typer.Option(None, "--out", metavar="FILE.json", show_default=False, help="Write all figures there, for foretell report."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Measure a server of OpenAI's interface under load: time to first token, between tokens, throughput, saturation.

    foretell serve bench http://127.0.0.1:8000/v1 --load "rate=1, in=512, out=128" --rates 1,2,4,8 --slo ttft=1s

    Arrivals are drawn by a fixed seed (seed=N in the load). Exit 0 if all requests were answered or told to come back, else 1.
    """
    from dataclasses import replace
    from json import dumps

    from foretell.serve.bench.client import endpoint_of
    from foretell.serve.bench.sweep import BenchAsked, measured
    from foretell.simulate.serving.load import load_of

    if not 0 < seconds < 1e6 or not 1 <= repeats <= 100 or not 0 < timeout < 1e6:
        raise UserError(f"--seconds {seconds:g}, --repeats {repeats}, --timeout {timeout:g}", "seconds above zero, 1 to 100 repeats")
    if rates is not None and users is not None:
        raise UserError("--rates and --users are given", "one of them")
    wanted, kind, listed = load_of(load), "rate" if rates is not None else "users", rates if rates is not None else users
    if listed is not None and wanted.kind != kind and wanted.kind != "trace":
        wanted = replace(wanted, kind=kind, amount=1.0)
    amounts = () if listed in (None, "auto") else _amounts(listed or "", whole=kind == "users")
    if wanted.kind == "trace" and listed is not None and (kind == "users" or not amounts):
        raise UserError(f"--{kind} {listed} for recorded requests", "--rates N,N: they are quickened to these")
    asked = BenchAsked(
        endpoint=endpoint_of(url), load=wanted, amounts=amounts, search=listed == "auto", seconds=seconds, repeats=repeats, limit=limits(slo),
        model=model, text=text, timeout=timeout,
    )  # fmt: skip
    if out is not None and (out.is_dir() or out.suffix != ".json" or not out.absolute().parent.is_dir()):
        raise UserError(f"--out {str(out)!r} is no file that could be written", "name a .json in a folder that is there")
    doing = common.Doing(f"measuring {asked.endpoint}")
    with common.progress(doing):
        found = measured(asked, doing.tell)
    if out is not None:
        from foretell.files import write_atomically
        from foretell.report.schema import plain

        write_atomically(out, dumps({"bench": plain(found.to_json())}, indent=1) + "\n")
    if json:
        common.emit_json({"bench": found.to_json()})
    else:
        common.emit("\n".join(_lines(found, slo)))
    return int(any(run.failed for point in found.points for run in point.runs))


def _amounts(text: str, *, whole: bool) -> tuple[float, ...]:
    parts = [one.strip() for one in text.split(",")]
    if not all(re.fullmatch(r"\d+" if whole else r"\d+(\.\d+)?", one) and 0 < float(one) < 1e6 for one in parts):
        raise UserError(f"'{text}' is no list of {'users' if whole else 'rates'}", "such as 1,2,4,8, or auto")
    return tuple(sorted({float(one) for one in parts}))


def _lines(found: BenchResult, slo: str | None) -> list[str]:
    top = found.ceiling
    lines = [
        f"{found.model} at {found.url}",
        f"client    {top.requests_per_second:,.0f} requests/s, {top.tokens_per_second:,.0f} tokens/s at most "
        "(measured against a server that answers at once)",
    ]
    searched = len(found.points) > 1
    lines += _table(found, slo) if searched else _point_lines(found.points[0], slo)
    if any(point.middle("output_tokens_per_second") > HALF * top.tokens_per_second for point in found.points):
        lines.append("          ! more than half of what the client alone can do: its own time is in these figures")
    lines += [f"          ! {reason}" for reason in dict.fromkeys(one for point in found.points for run in point.runs for one in run.reasons)]
    if found.saturated is None:
        lines.append(f"saturated below all that was tried: {found.why}")
    elif found.why:
        kind = "users" if found.points[0].closed else "requests a second"
        lines.append(f"saturated above {found.saturated:.3g} {kind}: {found.why}")
    elif searched:
        lines.append(f"not saturated at {found.saturated:.3g}, the highest that was tried")
    return lines


def _table(found: BenchResult, slo: str | None) -> list[str]:
    """A line for each load; times in milliseconds, the median of all runs."""
    kind = "users" if found.points[0].closed else "rate"
    rows = [[kind, "asked", "429", "failed", "answered/s", "tokens/s", "first token", "token after", "gap", "keep"]]
    for point in found.points:
        times = (" ".join(f"{point.middle(name, part) * 1e3:.3g}" for part in ("p50", "p95", "p99")) for name in TIMES)
        low, high = point.spread("output_tokens_per_second")
        spread = f" ±{(high - low) / 2:,.0f}" if len(point.runs) > 1 else ""
        rows.append([
            f"{point.amount:.4g}", *(str(sum(getattr(run, name) for run in point.runs)) for name in ("requests", "busy", "failed")),
            f"{point.middle('answered_per_second'):.3g}", f"{point.middle('output_tokens_per_second'):,.0f}{spread}", *times,
            f"{point.middle('inside'):.0%}",
        ])  # fmt: skip
    kept = rows if slo else [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*kept, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in kept]
    return ["times in ms: p50 p95 p99", *lines]


TIMES = ("ttft_seconds", "tpot_seconds", "gap_seconds")


def _point_lines(point: BenchPoint, slo: str | None) -> list[str]:
    def three(name: str) -> str:
        return "  ".join(f"{part} {_time(point.middle(name, part))}" for part in ("p50", "p95", "p99"))

    run = point.runs[0]
    total: Mapping[str, int] = {name: sum(getattr(one, name) for one in point.runs) for name in ("requests", "busy", "failed")}
    wrong = "".join(f", {total[name]} {words}" for name, words in (("busy", "told to come back (429)"), ("failed", "failed")) if total[name])
    low, high = point.spread("output_tokens_per_second")
    spread = f" ({low:,.0f} to {high:,.0f} of {len(point.runs)} runs)" if len(point.runs) > 1 else ""
    lines = [
        f"load      {point.load}: {total['requests']} requests{wrong}, {point.middle('most_at_once'):.0f} at once at most",
        f"          {point.middle('answered_per_second'):.3g} answered a second; "
        f"{point.middle('output_tokens_per_second'):,.0f} tokens/s generated{spread}, {point.middle('total_tokens_per_second'):,.0f} with prompts",
        f"          to the first token {three('ttft_seconds')}",
        f"          a token after it   {three('tpot_seconds')}",
        f"          between two tokens {three('gap_seconds')}",
    ]
    if slo:
        lines.append(f"          {point.middle('inside'):.0%} keep {slo}: {point.middle('good_per_second'):.3g} a second")
    if run.pieces < 0.9 * run.output_tokens:
        lines.append(f"          ! {run.output_tokens:,} tokens came in {run.pieces:,} pieces: gaps are between pieces")
    if (late := point.middle("late_seconds")) > LATE:
        lines.append(f"          ! requests left up to {_time(late)} late: the client is too slow for this load")
    return lines


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
