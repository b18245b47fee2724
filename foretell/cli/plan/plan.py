"""`foretell plan MODEL --on HW`: the best way to run it, and the plan file that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.common import Doing
from foretell.cli.fit import fit
from foretell.cli.fit import table as fit_table
from foretell.cli.plan import from_file
from foretell.cli.plan import table as plan_table
from foretell.errors import UserError
from foretell.units import GIB, MIB, gib

if TYPE_CHECKING:
    from foretell.hardware.types import Cluster
    from foretell.plan.types import Plan
    from foretell.quantities import Run
    from foretell.search.solve.choose import Candidate, Choice
    from foretell.search.space.constraints import SearchConstraints
    from foretell.simulate.plan import PlanCost

SHOWN = 6
"""Plans that lost and are told of."""


def plan(
    context: typer.Context,
    model: str | None = typer.Argument(None, metavar="MODEL | -- python SCRIPT ...", show_default=False,
        help="Zoo name, hf:TYPE, hf:FILE, timm:NAME, torchvision:NAME or FILE.PY:FUNCTION; or -- and your script's command."),
    on: str = typer.Option("auto", "--on", metavar="HW", help="H100, H100:8, 2x8xH100, auto (this machine), cluster.toml; with commas: a table."),
    global_batch: int | None = typer.Option(None, metavar="N", help="Samples per optimizer step over all ranks; default: what runs fastest."),
    seq: int | None = typer.Option(None, metavar="N", help="Tokens per sample; default: the model's usual."),
    image: int | None = typer.Option(None, metavar="N", help="Side of the image in pixels; default: the model's usual."),
    objective: str = typer.Option("throughput", metavar="NAME", help="throughput, latency, cost, energy or smallest (fewest devices)."),
    tp: int | None = typer.Option(None, metavar="N", help="Fix the tensor-parallel size."),
    pp: int | None = typer.Option(None, metavar="N", help="Fix the number of pipeline ranks."),
    dp_shard: int | None = typer.Option(None, metavar="N", help="Fix the FSDP shard count."),
    dp_replicate: int | None = typer.Option(None, metavar="N", help="Fix the number of replicas."),
    cp: int | None = typer.Option(None, metavar="N", help="Fix the context-parallel size."),
    ep: int | None = typer.Option(None, metavar="N", help="Fix the expert-parallel size."),
    schedule: str | None = typer.Option(None, metavar="NAME", help="Fix the pipeline schedule, e.g. 1f1b."),
    micro_batch: int | None = typer.Option(None, metavar="N", help="Fix the micro-batch size."),
    margin: float = typer.Option(0.0, metavar="SHARE", help="Share of each device's memory to leave free, such as 0.1."),
    tokens: str | None = typer.Option(None, metavar="N", help="Total training tokens, e.g. 1T: adds hours, cost and energy of the run."),
    step_law: bool = typer.Option(False, "--step-law", help="Take the batch from the Step Law for --tokens, and say its learning rate."),
    deadline: str | None = typer.Option(None, metavar="TIME", help="For the whole run: 30d, 12h, 90m or seconds."),
    budget: float | None = typer.Option(None, metavar="DOLLARS", help="For the whole run."),
    precision: str | None = typer.Option(None, metavar="NAME", help="fp32, bf16-mixed, fp16-mixed, bf16 or bf16-master; default: by device."),
    hbm: str | None = typer.Option(None, metavar="SIZE", help="GPU memory limit per device: 24GiB, 24GB or 24 (GiB)."),
    host: str | None = typer.Option(None, metavar="SIZE", help="Host memory limit; default: what it is known to have, less a reserve."),
    disk: str | None = typer.Option(None, metavar="SIZE", help="Disk limit for offloading; default: no disk."),
    state_format: str | None = typer.Option(None, metavar="NAME", help="State format with bf16-master: fp32, split, bf16, int8 or split-int8."),
    optimizer: str = typer.Option("adamw-fused", metavar="NAME", help="As `foretell fit` takes it."),
    clip: float = typer.Option(1.0, metavar="X", help="Clip the gradient norm to X; 0: no clipping."),
    compile: str | None = typer.Option(None, metavar="HOW", help="Fix torch.compile: none, blocks or model; default: those measured."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting of the model, such as layers=4; may be repeated."),
    loss: str | None = typer.Option(None, metavar="FILE.PY:FUNCTION", help="Loss of (output, batch); default: the model's own."),
    out: str = typer.Option("plan.json", metavar="FILE", help="Where the plan is written."),
    point: int | None = typer.Option(None, metavar="N", help="Write plan N of the trade-offs instead of the best."),
    explain: bool = typer.Option(False, "--explain", help="Explain the bottleneck, why alternatives were rejected, and what would change it."),
    what_if: bool = typer.Option(False, "--what-if", help="Show what one more device, more memory, faster links or other devices would change."),
    exact: bool | None = typer.Option(None, "--exact/--quick", show_default=False,
                                      help="Cost the best plans op by op, or none of them; default: where that is quick."),
    time_limit: float = fit.TIME_LIMIT,
    patience: float | None = typer.Option(None, metavar="SECONDS", help="Stop the search after this long and take the best so far."),
    infer: bool = typer.Option(False, "--infer", help="Split inference over the devices of HW instead: latency and throughput."),
    from_: Path | None = typer.Option(None, "--from", metavar="FILE", show_default=False, help=from_file.HELP),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    no_cache: bool = typer.Option(False, "--no-cache", help="Ignore the trace cache."),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Find the best plan to train MODEL on HW and write it. Exit 0 found, 1 nothing fits, 2 bad input."""
    from foretell.search.space.caps import size_of
    from foretell.search.space.constraints import SearchConstraints, check
    from foretell.trace.load import model as loading

    if from_ is not None and from_file.DESCRIBED not in context.meta:
        return plan(**from_file.take_over(from_, context))
    words, model = _named(model, context)
    source = loading.Source(model=model, overrides=fit.overrides(settings), seq=seq, image=image, loss=loss)
    loading.check(source)
    if infer:
        return _inferring(replace(source, micro_batch=micro_batch or 1), on, precision, json, not no_cache, time_limit)
    length = fit.amount("--tokens", tokens)
    axes = {"tp": tp, "pp": pp, "dp_shard": dp_shard, "dp_replicate": dp_replicate, "cp": cp, "ep": ep}
    wishes = SearchConstraints(
        global_batch=global_batch, precision=precision, optimizer=optimizer, clip=clip or None,
        compile=(compile,) if compile else (), objective=objective, schedule=schedule, micro_batch=micro_batch, margin=margin,
        tokens=length, deadline_seconds=seconds_of(deadline), budget=budget, hbm=size_of("hbm", hbm), host=size_of("host", host),
        disk=size_of("disk", disk) or 0, state_format=state_format, fixed=_given(axes), described=context.meta.get(from_file.DESCRIBED),
    )  # fmt: skip
    check(wishes)
    _check_out(Path(out), patience, optimizer, clip)
    how = {"exact": exact, "what_if": what_if or explain, "patience": patience or float("inf"), "by_law": step_law, "time_limit": time_limit}
    doing = Doing(f"choosing a plan for {model.removeprefix('script:')}")
    if len(hardware := fit_table.several(on)) > 1:
        return plan_table.answer(
            model.removeprefix("script:"), hardware, lambda one: _choose(source, one, wishes, not no_cache, how, doing, words),
            lambda saved: whole_run(saved, length), objective, doing, json=json,
            plan_of=lambda choice: as_json(choice, "", choice.best.plan if choice.best else None),
        )  # fmt: skip
    choice = common.call(lambda: _choose(source, on, wishes, not no_cache, how, doing, words), doing)
    checked = _rehearsed(source, saved, choice, point) if (saved := _pick(choice, point)) and on == "auto" and words is None else ""
    told = {"explain": explain, "what_if": what_if, "point": point, "whole": whole_run(saved, length), "objective": objective}
    return _told(choice, saved, model.removeprefix("script:"), on, out, checked, json, {**told, "from": context.meta.get(from_file.TOLD)})


def _told(choice: Choice, saved: Plan | None, model: str, on: str, out: str, checked: str, json: bool, told: dict[str, Any]) -> int:
    """Write the plan, and say what it is."""
    theirs = told.pop("from")
    _written(saved, choice, out)
    whole = told["whole"]
    if json:
        more = {"from": theirs} if theirs else {}
        common.emit_json({**as_json(choice, out, saved), "run": None if whole is None else asdict(whole), "checked": checked or None, **more})
    else:
        text = screen(choice, model, on, out, **told)
        common.emit(f"{text}\nChecked: {checked}." if checked else text)
    return common.YES if choice.best is not None else common.NO_OR_FAILED


def _inferring(source: Any, on: str, precision: str | None, json: bool, cache: bool, time_limit: float) -> int:
    from foretell.cli.plan.infer import infer_command

    return infer_command(source, on, precision=precision, json=json, cache=cache, time_limit=time_limit)


def whole_run(saved: Plan | None, tokens: float | None) -> Run | None:
    """Time, money and energy of a run of so many tokens with the plan that is written."""
    if tokens is None or saved is None:
        return None
    said = saved.predicted
    if "samples_per_step" in said:
        raise UserError("the run is given in tokens, but this model's batch has none", "leave out --tokens")
    from foretell.price.energy import planned_run

    return planned_run(tokens, "tokens", said, saved.mesh.world)


def seconds_of(text: str | None) -> float | None:
    """`30d`, `12h`, `90m`, `45s` or seconds."""
    if text is None:
        return None
    scale = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in scale else (text, "s")
    try:
        return float(number) * scale[unit]
    except ValueError:
        raise UserError(f"--deadline {text!r} is no time", "write 30d, 12h, 90m or seconds") from None


_OF_A_SCRIPT = ("on", "global_batch", "micro_batch", "objective", "dp_shard", "dp_replicate", "tp", "pp", "cp", "ep", "margin", "tokens", "deadline",
                "budget", "precision", "hbm", "out", "point", "explain", "what_if", "exact", "time_limit", "patience", "json", "no_cache",
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


def _choose(
    source: Any, on: str, wishes: SearchConstraints, cache: bool, how: dict[str, Any], doing: Doing, words: list[str] | None = None
) -> Choice:  # fmt: skip
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.search.solve.choose import choose
    from foretell.simulate.plan import Options

    cluster, hardware = capped(parse(on), on, wishes.hbm)
    if on == "auto" and how["exact"] is None:
        how = {**how, "exact": True}  # the device is here: what will run is replayed op by op first
    options = Options(profile_of=find_profile)
    if words is not None:
        from foretell.search.solve.scripted import choose_for

        return choose_for(words, cluster, hardware, wishes, options=options, cache=cache, progress=doing.tell, **how)
    return choose(source, cluster, hardware, wishes, options=options, cache=cache, progress=doing.tell, **how)


def capped(cluster: Cluster, on: str, hbm: int | None) -> tuple[Cluster, str]:
    """The hardware with no more memory than may be used of each device, and how a plan names it."""
    if hbm is None:
        return cluster, on
    offers = cluster.device.memory_bytes
    if not 64 * MIB <= hbm <= offers:
        raise UserError(f"--hbm is {gib(hbm)} and {cluster.device.name} offers {gib(offers)}", f"from 64 MiB to {gib(offers)}")
    amount = f"{hbm // MIB}MiB" if hbm % GIB else f"{hbm // GIB}GiB"
    found = cluster.capped(amount, on)
    return found, on if on.endswith((".toml", ".json")) else f"{on},memory={amount}"


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


def _given(axes: Mapping[str, int | None]) -> dict[str, int]:
    return {axis: degree for axis, degree in axes.items() if degree is not None}


def _check_out(path: Path, patience: float | None, optimizer: str, clip: float) -> None:
    """Before the work, not after it."""
    from foretell.trace.recipe import Recipe

    Recipe(optimizer=optimizer, clip=clip or None)
    if patience is not None and not patience > 0:
        raise UserError(f"--patience is {patience:g}", "give seconds above zero")
    if path.is_dir() or not path.name:
        raise UserError(f"--out {str(path)!r} is a folder", "name a file in it, such as plan.json")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}", "make it, or name another")


# ---------------------------------------------------------------------- telling


def as_json(choice: Choice, out: str, saved: Plan | None) -> dict[str, Any]:
    from foretell.plan.file import to_json
    from foretell.report.terminal import front
    from foretell.search.solve.choose import told

    def one(candidate: Candidate) -> dict[str, Any]:
        said = candidate.cost.predicted() if candidate.cost else candidate.plan.predicted or None
        return {"plan": told(candidate.plan), "why": candidate.why, "predicted": said}

    infeasible = choice.infeasible
    return {
        "plan": to_json(saved) if saved else None,
        "file": out if saved else None,
        "costed": choice.costed,
        "runners_up": [one(candidate) for candidate in choice.runners_up],
        "dropped": [one(candidate) for candidate in choice.dropped],
        "infeasible": None if infeasible is None else {
            "device": infeasible.device, "bytes_short": infeasible.bytes_short,
            "holders": [{"name": h.name, "category": h.category, "bytes": h.bytes} for h in infeasible.holders],
        },
        "reasons": [{"count": one.count, "why": one.why} for one in choice.reasons],
        "assumptions": list(choice.notes),
        "where": list(choice.where),
        "relaxations": [one.to_json() for one in choice.relaxations],
        "ways_tried": choice.tried,
        "step_law": choice.law.to_json() if choice.law is not None else None,
        **(front.content(choice.found) if choice.found is not None else {}),
    }  # fmt: skip


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
    lines += [*run_lines(whole), *law_lines(choice.law), *_notes(choice, "What is where:"), ""]
    if choice.runners_up:
        lines.append("Next best:")
        lines += [f"  {told(one.plan)}: {_speed(one.cost)}; {one.why}" for one in choice.runners_up[:SHOWN] if one.cost]
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
    return [*lines, *sent(cost)]


def _speed(cost: PlanCost | None) -> str:
    if cost is None or cost.per_second is None:
        return "speed unknown"
    return f"{cost.per_second:,.0f} {cost.unit}/s"
