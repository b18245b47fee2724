"""`foretell plan MODEL --on HW`: the best way to run it, and the plan file that says so."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.common import Doing
from foretell.cli.fit import fit
from foretell.cli.fit import table as fit_table
from foretell.cli.options import taking
from foretell.cli.plan import from_file
from foretell.cli.plan import table as plan_table
from foretell.cli.plan.serve import serve_command
from foretell.cli.serve import asked as serving
from foretell.errors import UserError
from foretell.options import PlanOptions
from foretell.options.plan import MAY

if TYPE_CHECKING:
    from foretell.api.plans import PlanAnswer
    from foretell.plan.types import Plan
    from foretell.quantities import Run
    from foretell.search.solve.choose import Choice
    from foretell.simulate.plan import PlanCost

SHOWN = 6
"""Plans that lost and are told of."""


@taking(PlanOptions)
def plan(
    context: typer.Context,
    model: str | None = typer.Argument(None, metavar="MODEL | -- python SCRIPT ...", show_default=False,
        help="Zoo name, hf:TYPE, hf:FILE, timm:NAME, torchvision:NAME or FILE.PY:FUNCTION; or -- and your script's command."),
    on: str = typer.Option("auto", "--on", metavar="HW", help="H100, H100:8, 2x8xH100, auto (this machine), cluster.toml; with commas: a table."),
    *,
    options: dict[str, Any],
    out: str = typer.Option("plan.json", metavar="FILE", help="Where the plan is written."),
    point: int | None = typer.Option(None, metavar="N", help="Write plan N of the trade-offs instead of the best."),
    explain: bool = typer.Option(False, "--explain", help="Explain the bottleneck, why alternatives were rejected, and what would change it."),
    infer: bool = typer.Option(False, "--infer", help="Split inference over the devices of HW instead: latency and throughput."),
    run: str | None = typer.Option(None, "--run", metavar="tcp|gloo", help="With --infer: run the split on this machine, predicted beside measured."),
    requests: int = typer.Option(100, "--requests", metavar="N", help="With --run: requests to measure."),
    serve: bool = typer.Option(False, "--serve", help="Plan a server for a load instead: replicas, tp, pp, formats, limits of a step."),
    load: str | None = typer.Option(None, "--load", metavar="LOAD", help=serving.LOAD),
    slo: str | None = typer.Option(None, "--slo", metavar="LIMITS", help=serving.SLO),
    goal: str = typer.Option("throughput", "--goal", metavar="NAME", help="With --serve: throughput, latency, cost or devices (fewest)."),
    page: int | None = typer.Option(None, "--page", metavar="N", help="With --serve: fix the tokens of a page."),
    running: int | None = typer.Option(None, "--running", metavar="N", help="With --serve: fix the sequences that are generated at a time."),
    step_tokens: int | None = typer.Option(None, "--step-tokens", metavar="N", help="With --serve: fix the tokens of a step."),
    graphs: bool = typer.Option(True, "--graphs/--no-graphs", help="With --serve: the host's launches are replayed."),
    invariant: bool = typer.Option(False, "--invariant", help=f"With --serve: {serving.INVARIANT}"),
    from_: Path | None = typer.Option(None, "--from", metavar="FILE", show_default=False, help=from_file.HELP),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Find the best plan to train MODEL on HW and write it. Exit 0 found, 1 nothing fits, 2 bad input."""
    from foretell.api.plans import goodput_of_choice, plan_source, whole_run

    theirs: dict[str, Any] | None = None
    if from_ is not None:
        model, on, theirs = from_file.take_over(from_, on, options, context)
    if serve:
        sizes = {"page": page, "running": running, "tokens": step_tokens}
        steps = {"graphs": graphs, "invariant": invariant}
        return serve_command(model, on, options, context, sizes, load=load, slo=slo, goal=goal, steps=steps, out=out, json=json)
    serving.refuse_without(context, "load", "slo", "goal", "page", "running", "step_tokens", "graphs", "invariant")
    only_served = [one for one in options["may"] or () if one not in MAY]
    if only_served:
        raise UserError(f"--may {only_served[0]} is about serving", f"add --serve, or one of {', '.join(MAY)}")
    words, name = _named(model, context)
    asked = PlanOptions(**{**options, "hardware": on})
    source = plan_source(name, asked)
    if infer:
        source = replace(source, micro_batch=asked.micro_batch or 1)
        return _inferring(source, on, asked.precision, json, asked.cache, asked.time_limit, run, requests)
    if run is not None:
        raise UserError(f"--run {run} is about inference, and --infer is not given", "add --infer; foretell run PLAN runs a plan to train")
    _check_out(Path(out))
    shown = name.removeprefix("script:")
    doing = Doing(f"choosing a plan for {shown}")
    options |= {"what_if": asked.what_if or explain, "progress": doing.tell}

    def found_on(one: str) -> PlanAnswer:
        from foretell import api

        return api.plan(words or name, **{**options, "hardware": one})

    hardware = fit_table.several(on)
    if len(hardware) > 1:
        return plan_table.answer(shown, hardware, found_on, asked.objective, doing, json=json)
    answer = common.call(lambda: found_on(on), doing)
    choice = answer.choice
    assert choice is not None
    saved = _pick(choice, point)
    checked = _rehearsed(source, saved, choice, point) if saved and on == "auto" and words is None else ""
    whole = answer.run if saved is answer.plan else whole_run(saved, asked.tokens)
    failing = answer.goodput if saved is answer.plan else goodput_of_choice(choice, saved, asked.mtbf)
    told: dict[str, Any] = {"explain": explain, "what_if": asked.what_if, "point": point, "whole": whole}
    told |= {"objective": asked.objective, "from": theirs, "failing": failing}
    return _told(choice, saved, shown, on, out, checked, json, told)


def _told(choice: Choice, saved: Plan | None, model: str, on: str, out: str, checked: str, json: bool, told: dict[str, Any]) -> int:
    """Write the plan, and say what it is."""
    from foretell.api.plans import as_json

    theirs = told.pop("from")
    _written(saved, choice, out)
    whole, failing = told["whole"], told.pop("failing")
    if json:
        more = {"from": theirs} if theirs else {}
        more |= {"run": None if whole is None else asdict(whole), "goodput": None if failing is None else failing.to_json()}
        common.emit_json({**as_json(choice, out, saved), "checked": checked or None, **more})
    else:
        text = screen(choice, model, on, out, **told)
        if failing is not None:
            from foretell.report import goodput
            from foretell.report.words import folded

            found = failing.to_json()
            text = "\n".join([text, *folded([f"Goodput: {', '.join(goodput.pieces(found))}; {', '.join(goodput.sources(found))}."], common.width())])
        common.emit(f"{text}\nChecked: {checked}." if checked else text)
    return common.YES if choice.best is not None else common.NO_OR_FAILED


def _inferring(source: Any, on: str, precision: str | None, json: bool, cache: bool, time_limit: float, over: str | None, requests: int) -> int:
    from foretell.cli.plan.infer import infer_command

    return infer_command(source, on, precision=precision, json=json, cache=cache, time_limit=time_limit, over=over, requests=requests)


_OF_A_SCRIPT = ("on", "global_batch", "micro_batch", "objective", "dp_shard", "dp_replicate", "tp", "pp", "cp", "ep", "margin", "tokens", "deadline",
                "budget", "precision", "hbm", "out", "point", "explain", "what_if", "exact", "time_limit", "patience", "json", "cache",
                "debug")  # fmt: skip
"""Options beside a script: all others the script says itself, or are of what it cannot do."""


def _named(model: str | None, context: typer.Context) -> tuple[list[str] | None, str]:
    """The words of a script, if one is given, and what a source calls it or the model; raises what is typed beside a script."""
    from foretell.trace.script.words import model_of, parse

    words = common.script_words()
    if words is None:
        if model is None:
            raise UserError("no model is named", "foretell plan MODEL --on HW, or foretell plan --on HW -- python train.py ...")
        return None, model
    common.check_beside_script(model, context, _OF_A_SCRIPT, "leave it out; where the script can say it, say it there")
    parse(words)
    return words, model_of(words)


def _rehearsed(source: Any, saved: Plan | None, choice: Choice, point: int | None) -> str:
    """What was tried of a plan whose devices are here."""
    from foretell.search.solve.rehearse import rehearse

    if saved is None:
        return ""
    exact = choice.best is not None and choice.best.cost is not None and point is None
    return common.call(lambda: rehearse(source, saved, exact=exact), "trying the plan with fake tensors")


def _pick(choice: Choice, point: int | None) -> Plan | None:
    """The plan to write."""
    if choice.best is None or point is None:
        return choice.best.plan if choice.best is not None else None
    front = choice.found.front if choice.found is not None else ()
    if not 1 <= point <= len(front):
        raise UserError(f"--point {point}: there are {len(front)} trade-offs", f"1 to {len(front)}" if front else "leave it out")
    return front[point - 1].plan


def _written(saved: Plan | None, choice: Choice, out: str) -> None:
    if saved is None:
        return
    from foretell.plan.file import write
    from foretell.report.html import front as html_front

    write(saved, out)
    html_front.write(html_front.of_choice(choice, saved), out)  # what `foretell report` draws


def _check_out(path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir() or not path.name:
        raise UserError(f"--out {str(path)!r} is a folder", "name a file in it, such as plan.json")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}", "make it, or name another")


# ---------------------------------------------------------------------- telling


def screen(
    choice: Choice, model: str, on: str, out: str, *, explain: bool = False, what_if: bool = False, point: int | None = None,
    whole: Run | None = None, objective: str = "throughput",
) -> str:  # fmt: skip
    """The answer for people, no wider than their screen."""
    from foretell.report.words import folded

    return "\n".join(folded(_lines(choice, model, on, out, explain, what_if, point, whole, objective == "smallest"), common.width()))


def _lines(
    choice: Choice, model: str, on: str, out: str, explain: bool, what_if: bool, point: int | None, whole: Run | None, fewest: bool
) -> list[str]:
    from foretell.report.terminal import front

    found = choice.found
    if found is None:
        return climbed(choice, model, on, out, whole)
    if found.best is None:
        return [*front.nothing_lines(found, choice.reasons, model, on), *_relaxed(choice)]
    used, there = found.best.point.devices, fit.count_of(on)
    told = f", {used} of its {there} devices" if fewest or used < there else ""
    lines = [f"Best of {found.costed} layouts for {model} on {on}{told}, {found.seconds:.1f} s:", *front.best_lines(found)]
    lines += [*front.run_lines(whole), *front.law_lines(choice.law)]
    if len(found.front) > 1:
        lines += ["", *front.front_lines(found)]
    lines += ["", *front.reason_lines(found, explain)]
    if found.what_if and (what_if or explain):
        lines += ["", *front.what_if_lines(found.what_if)]
    lines += [f"note: {note}" for note in choice.notes] if explain else []
    which = f"Plan {point} written" if point else "Written"
    return [*lines, "", f"{which} to {out}.  {_next(out)}"]


def climbed(choice: Choice, model: str, on: str, out: str, whole: Run | None = None) -> list[str]:
    """The answer where plans were tried one by one."""
    from foretell.report.terminal.front import law_lines, no_plan, run_lines
    from foretell.search.solve.choose import told
    from foretell.units import human_bytes

    if choice.best is None:
        lines = [no_plan(choice.reasons, model, on, "1 was" if choice.costed == 1 else f"{choice.costed} were")]
        if choice.infeasible is not None:
            lines.append(f"The nearest is {human_bytes(choice.infeasible.bytes_short)} short on {choice.infeasible.device}; at its peak:")
            lines += [f"  {human_bytes(h.bytes):>10}  {h.category}  {h.name}" for h in choice.infeasible.holders[:SHOWN]]
        lines += [f"  not: {told(one.plan)}: {one.why}" for one in choice.dropped[:SHOWN]]
        return [*lines, *_relaxed(choice)]
    assert choice.best.cost is not None
    lines = [f"Best of {choice.costed} plans for {model} on {on}:", f"  {told(choice.best.plan)}", *_figures(choice.best.cost)]
    lines += [f"  NOTE    {choice.gain}"] if choice.gain else []
    lines += [*run_lines(whole), *law_lines(choice.law), *_notes(choice, "What is where:"), ""]
    if choice.runners_up:
        lines.append("Next best:")
        lines += [f"  {told(one.plan)}: {f'{_speed(one.cost)}; ' if one.cost else ''}{one.why}" for one in choice.runners_up[:SHOWN]]
    if choice.dropped:
        lines.append("Not possible:")
        lines += [f"  {told(one.plan)}: {one.why}" for one in choice.dropped[:SHOWN]]
    return [*lines, "", f"Written to {out}.  {_next(out)}"]


def _next(out: str) -> str:
    from foretell.plan.text import shell_word

    runs = "run" if common.script_words() is None else "plan eject"
    return f"Next:  foretell plan show {shell_word(out)}   foretell {runs} {shell_word(out)}"


def _relaxed(choice: Choice) -> list[str]:
    """Commands that find a plan; those of a script end with its own words."""
    import shlex

    from foretell.report.terminal.front import relaxation_lines

    words = common.script_words()
    script = "" if words is None else f" -- {shlex.join(words)}"
    lines = relaxation_lines(choice.relaxations, choice.tried, _typed())
    return [f"{line}{script}" if line.startswith("  foretell plan") else line for line in lines]


def _typed() -> list[str]:
    """The command up to a script, without what has nothing to do with the answer."""
    return [word for word in common.without_script(common.typed()) if word not in ("--debug", "--no-cache", "--json")]


def _notes(choice: Choice, title: str) -> list[str]:
    """What is elsewhere."""
    return [title, *(f"  {line}" for line in choice.where)] if choice.where else []


def _figures(cost: PlanCost) -> list[str]:
    from foretell.report.terminal.front import sent
    from foretell.report.words import seconds
    from foretell.units import human_bytes

    memory = cost.worst.memory
    spare = memory.margin_bytes / memory.capacity_bytes
    lines = [f"  memory  {human_bytes(memory.device_bytes)} of {human_bytes(memory.capacity_bytes)} ({cost.verdict}, {spare:.0%} to spare)"]
    if cost.verdict == "tight":
        lines.append("  NOTE    memory is tight: what is left is within what the prediction may be off by")
    if cost.time is not None:
        time = cost.time
        lines.append(
            f"  step    {seconds(time.step_seconds)} ({seconds(time.low_seconds)} to {seconds(time.high_seconds)}), "
            f"{_speed(cost)}; bound by {time.binds}; {time.provenance}"
        )
    if cost.rounds is not None:
        from foretell.report.words import rounds

        lines.append(f"  rounds  {rounds(cost.rounds.to_json())}")
    return [*lines, *sent(cost)]


def _speed(cost: PlanCost | None) -> str:
    if cost is None or cost.per_second is None:
        return "speed unknown"
    return f"{cost.per_second:,.0f} {cost.unit}/s"
