"""`foretell plan MODEL --on HW`: the best way to run it, and the plan file that says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common, fit
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.cost.plan import PlanCost
    from foretell.search.choose import Candidate, Choice

SHOWN = 6
"""Plans that lost and are told of."""


def plan(
    model: str = typer.Argument(help="Zoo name, hf:TYPE, hf:config.json, timm:NAME, torchvision:NAME or file.py:function.",
                                metavar="MODEL", show_default=False),
    on: str = typer.Option("auto", "--on", metavar="HW", help="H100, H100:8, 2x8xH100, auto (this machine) or cluster.toml."),
    global_batch: int | None = typer.Option(None, metavar="N",
                                            help="Samples of one optimizer step, all ranks together; default: what runs fastest."),
    seq: int | None = typer.Option(None, metavar="N", help="Tokens per sample; default: the model's usual."),
    image: int | None = typer.Option(None, metavar="N", help="Side of the image in pixels; default: the model's usual."),
    precision: str | None = typer.Option(None, metavar="NAME", help="fp32, bf16-mixed or bf16; default: bf16-mixed, on a CPU fp32."),
    optimizer: str = typer.Option("adamw-fused", metavar="NAME", help="As `foretell fit` takes it."),
    clip: float = typer.Option(1.0, metavar="X", help="Clip the gradient norm to X; 0: no clipping."),
    compile: str | None = typer.Option(None, metavar="HOW",
                                       help="Only plans that compile so: none, blocks or model; default: those measured."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE",
        help="Change a setting of the model, such as --set layers=4; may be repeated."),
    loss: str | None = typer.Option(None, metavar="FILE.PY:FUNCTION", help="Loss of (output, batch); default: the model's own."),
    out: str = typer.Option("plan.json", metavar="FILE", help="Where the plan is written."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    no_cache: bool = typer.Option(False, "--no-cache", help="Trace again, and keep no trace."),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Find the best plan to train MODEL on HW and write it. Exit 0 found, 1 nothing fits, 2 bad input."""
    from foretell.plan.types import COMPILES, PRECISIONS
    from foretell.trace.load import Source
    from foretell.trace.load import check as check_source
    from foretell.trace.recipe import Recipe

    source = Source(model=model, overrides=fit.overrides(settings), seq=seq, image=image, loss=loss)
    check_source(source)
    for name, value, known in (("precision", precision, PRECISIONS), ("compile", compile, COMPILES)):
        if value is not None and value not in known:
            raise UserError(f"--{name} {value!r} is not known", f"one of {', '.join(known)}")
    if global_batch is not None and global_batch < 1:
        raise UserError(f"--global-batch is {global_batch}", "give a whole number above zero")
    Recipe(optimizer=optimizer, clip=clip or None)
    _check_out(Path(out))
    wishes = {
        "global_batch": global_batch, "precision": precision, "optimizer": optimizer, "clip": clip or None,
        "compile": (compile,) if compile else (),
    }  # fmt: skip
    choice = common.call(lambda: _choose(source, on, wishes, not no_cache), f"choosing a plan for {model}")
    if choice.best is not None:
        from foretell.plan.file import write

        write(choice.best.plan, out)
    if json:
        common.emit_json(as_json(choice, out))
    else:
        common.emit(screen(choice, model, on, out))
    return common.YES if choice.best is not None else common.NO_OR_FAILED


def _choose(source: Any, on: str, wishes: dict[str, Any], cache: bool) -> Choice:
    from foretell.cost.plan import Options
    from foretell.hardware import parse
    from foretell.hardware.profile import find_profile
    from foretell.search.choose import Wishes, choose

    cluster = parse(on)
    return choose(source, cluster, on, Wishes(**wishes), options=Options(profile_of=find_profile), cache=cache)


def _check_out(path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir() or not path.name:
        raise UserError(f"--out {str(path)!r} is a folder", "name a file in it, such as plan.json")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}", "make it, or name another")


# ---------------------------------------------------------------------- telling


def as_json(choice: Choice, out: str) -> dict[str, Any]:
    from foretell.plan.file import to_json
    from foretell.search.choose import told

    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "plan": told(candidate.plan), "why": candidate.why,
            "predicted": candidate.cost.predicted() if candidate.cost else None,
        }  # fmt: skip

    infeasible = choice.infeasible
    return {
        "plan": to_json(choice.best.plan) if choice.best else None,
        "file": out if choice.best else None,
        "costed": choice.costed,
        "runners_up": [one(candidate) for candidate in choice.runners_up],
        "dropped": [one(candidate) for candidate in choice.dropped],
        "infeasible": None if infeasible is None else {
            "device": infeasible.device, "bytes_short": infeasible.bytes_short,
            "holders": [{"name": h.name, "category": h.category, "bytes": h.bytes} for h in infeasible.holders],
        },
        "assumptions": list(choice.notes),
    }  # fmt: skip


def screen(choice: Choice, model: str, on: str, out: str) -> str:
    """The answer for people."""
    from foretell.search.choose import told
    from foretell.units import human_bytes

    if choice.best is None:
        lines = [f"No plan for {model} on {on} fits; {choice.costed} were costed."]
        if choice.infeasible is not None:
            lines.append(f"The nearest is {human_bytes(choice.infeasible.bytes_short)} short on {choice.infeasible.device}; at its peak:")
            lines += [f"  {human_bytes(h.bytes):>10}  {h.category}  {h.name}" for h in choice.infeasible.holders[:SHOWN]]
        lines += [f"  not: {told(one.plan)}: {one.why}" for one in choice.dropped[:SHOWN]]
        return "\n".join(lines)
    assert choice.best.cost is not None
    lines = [f"Best of {choice.costed} plans for {model} on {on}:", f"  {told(choice.best.plan)}", *_figures(choice.best.cost), ""]
    if choice.runners_up:
        lines.append("Next best:")
        lines += [f"  {told(one.plan)}: {_speed(one.cost)}; {one.why}" for one in choice.runners_up[:SHOWN] if one.cost]
    if choice.dropped:
        lines.append("Not possible:")
        lines += [f"  {told(one.plan)}: {one.why}" for one in choice.dropped[:SHOWN]]
    lines += ["", f"Written to {out}.  Next:  foretell show {out}   foretell run {out}"]
    return "\n".join(lines)


def _figures(cost: PlanCost) -> list[str]:
    from foretell.report.words import seconds
    from foretell.units import human_bytes

    memory = cost.worst.memory
    spare = memory.margin_bytes / memory.capacity_bytes
    lines = [f"  memory  {human_bytes(memory.device_bytes)} of {human_bytes(memory.capacity_bytes)} ({cost.verdict}, {spare:.0%} to spare)"]
    if cost.time is not None:
        time = cost.time
        lines.append(
            f"  step    {seconds(time.step_seconds)} ({seconds(time.low_seconds)} to {seconds(time.high_seconds)}), "
            f"{_speed(cost)}; bound by {time.binds}; {time.provenance}"
        )
    for one in cost.worst.collectives[:SHOWN]:
        lines.append(f"  sends   {one.times} × {one.name} of {human_bytes(one.nbytes)} over {one.axis} ({one.ranks} ranks)")
    return lines


def _speed(cost: PlanCost | None) -> str:
    if cost is None or cost.per_second is None:
        return "speed unknown"
    return f"{cost.per_second:,.0f} {cost.unit}/s"
