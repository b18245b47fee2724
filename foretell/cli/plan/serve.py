"""`foretell plan MODEL --serve`: the best way to serve a model, and the plan file that says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.serve import asked as serving
from foretell.cli.serve.forecast import graph_lines, memory_lines, step_lines
from foretell.errors import UserError
from foretell.plan.text import shell_word
from foretell.units import human_seconds

if TYPE_CHECKING:
    from foretell.api.serving.plan import ServingPlanAnswer
    from foretell.plan.types import ServeLayout
    from foretell.search.serving.find import ServePoint

_OWN = ("model", "on", "serve", "load", "slo", "goal", "page", "running", "step_tokens", "graphs", "invariant", "overrides", "json", "debug",
        "precision", "out", "tp", "pp", "dp_replicate", "may", "patience", "what_if", "explain", "cache", "time_limit")  # fmt: skip
SHOWN = 6
"""Layouts of the front, and of those ruled out, that are told of."""


def serve_command(
    model: str | None, on: str, options: Mapping[str, Any], context: typer.Context, sizes: Mapping[str, int | None], *, load: str | None,
    slo: str | None, goal: str, steps: Mapping[str, bool], out: str, json: bool,
) -> int:  # fmt: skip
    """Search, write the plan, print why. Exit 0 found, 1 nothing keeps the limits, 2 bad input."""
    from foretell.api.serving.plan import plan_serving
    from foretell.simulate.serving.load import load_of

    if model is None:
        raise UserError("no model is named", 'foretell plan MODEL --serve --on HW --load "rate=8, in=1024, out=256"')
    strange = sorted(name for name in context.params if name not in _OWN and _typed(context, name))
    if strange:
        flag = f"--{strange[0].replace('_', '-')}"
        raise UserError(f"{flag} is of training, and --serve is not", f"leave {flag} out")
    if load is None:
        raise UserError("a server is planned for a load, and none is given", 'add --load "rate=8, in=1024±512, out=256±128", users=32, or a .csv')
    if on == "auto":
        raise UserError("a server is planned for devices that are named", "--on H100, --on 8xH100")
    if options["precision"] not in (None, "fp32", "bf16", "fp16"):
        raise UserError(f"--precision {options['precision']} with --serve", "fp32, bf16 or fp16")
    fixed = {"tp": options["tp"], "pp": options["pp"], "replicas": options["dp_replicate"], **sizes}
    serving.at_least_one(**fixed)
    _check_out(Path(out))
    asked, may = load_of(load), serving.formats(options["may"])

    def work() -> ServingPlanAnswer:
        return plan_serving(
            model, on, asked, load, serving.limits(slo), slo or "", goal=goal, may=may, fixed={k: v for k, v in fixed.items() if v is not None},
            overrides=options["overrides"], precision=options["precision"] or "auto", **steps,
            what_ifs=options["what_if"] or context.params["explain"], patience=options["patience"],
        )  # fmt: skip

    found = common.call(work, f"planning how to serve {model} on {on}")
    if found.plan is not None:
        from json import dumps

        from foretell.files import write_atomically
        from foretell.plan.file import write
        from foretell.report.schema import plain

        write(found.plan, out)
        write_atomically(Path(out).with_suffix(".serving.json"), dumps({"serving": plain(found.to_json())}) + "\n")  # what foretell report draws
    if json:
        common.emit_json({"serving": found.to_json(), "plan": out if found.plan is not None else None})
    else:
        common.emit("\n".join(lines(found, model, on, slo, goal, out)))
    return common.YES if found.plan is not None else common.NO_OR_FAILED


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_out(path: Path) -> None:
    if path.is_dir() or not path.name or not path.absolute().parent.is_dir():
        raise UserError(f"--out {str(path)!r} is no file that could be written", "name a file in a folder that is there, such as plan.json")


# ---------------------------------------------------------------------- telling


def words(layout: ServeLayout) -> str:
    """A layout in a few words."""
    parts = [f"{layout.replicas} replica{'s' * (layout.replicas > 1)}"]
    parts += [f"{name} {size}" for name, size in (("tp", layout.tp), ("pp", layout.pp)) if size > 1]
    formats = [f"{layout.weights} weights"] if layout.weights != "bf16" else []
    formats += [f"{layout.kv} keys and values"] if layout.kv != "bf16" else []
    formats += ["invariant"] if layout.invariant else []
    sizes = f", {layout.running} running, {layout.tokens} tokens a step, pages of {layout.page}"
    return " × ".join(parts) + "".join(f", {one}" for one in formats) + sizes


def figures(one: ServePoint) -> str:
    rate = f"{one.capacity:.3g} requests/s inside the limits" if one.capacity is not None else f"{one.output_rate:,.0f} tokens/s"
    money = "" if one.dollars_per_million is None else f", ${one.dollars_per_million:,.2f} per million tokens"
    return f"{rate}; first token p95 {human_seconds(one.ttft)}, each after it p95 {human_seconds(one.tpot)}{money}"


def lines(found: ServingPlanAnswer, model: str, on: str, slo: str | None, goal: str, out: str) -> list[str]:
    from foretell.search.serving.find import front

    search, best = found.found, found.found.best
    count = len(search.looked) + len(search.ruled)
    if search.nearest is None:
        text = [f"No layout of {model} on {on} fits:"]
        text += [f"  {words(one.layout)}: {one.why}" for one in search.ruled[:SHOWN]]
        return [*text, *_changes(search.what_if), f"next      foretell fit {model} --serve --on {on} says what uses the memory"]
    shown = search.nearest
    if best is None:
        text = [f"No layout of {model} on {on} keeps {slo or 'up'}; the nearest of {count} ({shown.inside:.0%} keep it):"]
    else:
        text = [f"Best of {count} layouts to serve {model} on {on} for {goal}, {search.seconds:.1f} s:"]
    text += [f"  {words(shown.layout)}", f"  {figures(shown)}", ""]
    told = found.forecast
    if told is not None:
        text += [*memory_lines(told), *step_lines(told), *graph_lines(told)]
        if told.joules_per_token is not None:
            text.append(f"energy    {told.joules_per_token:.3g} J a generated token")
        text.append(f"why       {_why(found)}")
    text += ["", "Trade-offs:", *(f"  {figures(one)}  {one.layout.devices} devices: {words(one.layout)}" for one in front(search)[:SHOWN])]
    text += _against(search.points)
    text += [f"  not {words(one.layout)}: {one.why}" for one in search.ruled[:3]]
    text += _changes(search.what_if)
    if told is not None:
        text += [f"assumed   - {one}" for one in told.assumptions]
    if found.plan is None:
        return [*text, "Nothing was written: no layout keeps the limits."]
    return [*text, "", f"Written to {out}.  Next:  foretell serve {shell_word(out)} --on {on}"]


def _why(found: ServingPlanAnswer) -> str:
    """What bounds the best."""
    shown = found.found.nearest
    assert shown is not None
    question, served, layout = found.found.question, shown.served, shown.layout
    if served.preemptions or served.pages_most > 0.95 * layout.pages:
        return f"bound by pages: {served.pages_most:,} of {layout.pages:,} are held at the load, {served.preemptions} preempted"
    if served.running_most >= layout.running:
        return f"bound by --running {layout.running}: as many generate at the load"
    if question.limit.tpot is not None and shown.tpot > 0.7 * question.limit.tpot:
        return f"bound by seconds a token: {human_seconds(shown.tpot)} of {human_seconds(question.limit.tpot)} at the load"
    if question.limit.ttft is not None and shown.ttft > 0.5 * question.limit.ttft:
        return f"bound by the first token: {human_seconds(shown.ttft)} of {human_seconds(question.limit.ttft)} at the load"
    return "nothing is near its limit at this load"


def _against(points: list[ServePoint]) -> list[str]:
    """Why the next best ranks lost, one line of each kind."""
    best, seen, found = points[0], {(points[0].layout.tp, points[0].layout.pp)}, []
    for one in points[1:]:
        kind = (one.layout.tp, one.layout.pp)
        if kind not in seen:
            seen.add(kind)
            less = "" if not best.best_rate else f"{one.best_rate / best.best_rate - 1:+.0%} requests inside the limits, "
            longer = f"each token {one.tpot / best.tpot - 1:+.0%} seconds" if best.tpot else ""
            found.append(f"  lost {words(one.layout)}: {less}{longer}")
    return found[:SHOWN]


def _changes(what_if: list[Any]) -> list[str]:
    if not what_if:
        return []
    text = ["", "What would help, or not:"]
    for one in sorted(what_if, key=lambda one: -(one.rate or 0.0)):
        rate = "does not fit" if one.rate is None else f"{one.rate:.3g} inside the limits" if one.rate else "none inside the limits"
        text.append(f"  {one.change}: {rate}{'' if one.keeps or one.rate is None else ', and this load is not kept'}")
    return text
