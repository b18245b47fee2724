"""`foretell tune serve MODEL`: the best settings of a server for a load, measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.serve.asked import at_least_one, limits
from foretell.cli.serve.figures import beside_lines
from foretell.errors import UserError
from foretell.plan.text import shell_word
from foretell.units import human_seconds

if TYPE_CHECKING:
    from foretell.api.serving.tune import TuneAnswer, TuneAsked, TunedSettings
    from foretell.plan.types import Plan, ServeLayout

EXAMPLE = 'add --load "users=32, in=512, out=128"'


def serve(
    model: str = typer.Argument(..., metavar="MODEL | PLAN", help="As foretell serve takes it; or a plan to serve, whose load and limits count."),
    load: str | None = typer.Option(
        None, "--load", metavar="LOAD", help='"users=32, in=512, out=128", "rate=8, in=1024±512, out=256±128", all=256, or a .csv of requests.'
    ),
    slo: str | None = typer.Option(None, "--slo", metavar="LIMITS", help="ttft=500ms,tpot=40ms: only answers that keep them count."),
    measure: int = typer.Option(6, "--measure", metavar="N", help="Measure so many settings."),
    seconds: float = typer.Option(20.0, "--seconds", help="Duration of each measurement."),
    repeats: int = typer.Option(1, "--repeats", metavar="N", help="Repeats of each, with other arrivals: the median counts."),
    carried: str | None = typer.Option(
        None, "--carried-from", metavar="HW", help="Also measure here the settings that are best on HW, such as H100: what carrying them over costs."
    ),
    running: int | None = typer.Option(None, "--running", help="Fix the sequences that are generated at a time."),
    tokens: int | None = typer.Option(None, "--tokens", help="Fix the tokens of a step."),
    page: int | None = typer.Option(None, "--page", help="Fix the tokens of a page."),
    pages: int | None = typer.Option(None, "--pages", help="Fix the pages of the KV cache."),
    share: bool | None = typer.Option(None, "--share/--no-share", help="Fix whether prompts that begin alike share pages."),
    graphs: bool | None = typer.Option(None, "--graphs/--no-graphs", help="Fix whether steps are replayed as CUDA graphs."),
    tp: int = typer.Option(1, "--tp", metavar="N", help="Tensor-parallel ranks; not searched."),
    pp: int = typer.Option(1, "--pp", metavar="N", help="Pipeline ranks; not searched."),
    weights: Path | None = typer.Option(None, "--init-from", metavar="PATH", help="Weights; without them random ones are served."),
    override: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="A size of the model, such as layers=4."),
    device: str = typer.Option("auto", "--device", metavar="auto|cpu|cuda", help="Where it runs."),
    dtype: str = typer.Option("auto", "--dtype", metavar="auto|fp32|bf16|fp16", help="Of weights, keys and values."),
    table: Path | None = typer.Option(None, "--table", metavar="FILE", help="Measurements, kept for the next time. [default: OUT.tune.jsonl]"),
    out: Path = typer.Option(Path("serve.plan.json"), "--out", metavar="PLAN", help="The plan with the best settings."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Find the best settings to serve MODEL under a load: search by prediction, then measure the best few on this machine.

    foretell tune serve gpt2 --set layers=4 --load "users=16, in=64, out=64" --carried-from H100

    Each measurement is kept as it ends: Ctrl-C stops, the same command resumes. Exit 0 found, 1 no settings keep the limits.
    """
    from foretell.api.serving.tune import TuneAsked, tune
    from foretell.plan.types import ServeLayout
    from foretell.serve.tune.trial import ServedWhat

    at_least_one(measure=measure, repeats=repeats, running=running, tokens=tokens, page=page, pages=pages, tp=tp, pp=pp)
    if not 0.5 <= seconds < 1e5:
        raise UserError(f"--seconds {seconds:g}", "at least 0.5")
    _check_out(out)
    fixed = {"running": running, "tokens": tokens, "page": page, "pages": pages, "share": share, "graphs": graphs}
    base = ServeLayout(tp=tp, pp=pp)
    overrides: Mapping[str, Any] = {}
    if model.endswith(".json") and not model.startswith("hf:"):
        plan, base = _plan(model)
        overrides, named = plan.model.get("overrides", {}), str(plan.model["model"])
        load, slo = load or base.load or None, slo or base.slo or None
    else:
        named = model
    asked = _asked(named, load, slo, override, overrides, TuneAsked, ServedWhat, weights, device, dtype)
    asked = replace(
        asked, base=base, fixed={name: value for name, value in fixed.items() if value is not None}, most=measure, seconds=seconds, repeats=repeats,
        carried_from=carried, table=table or out.with_suffix(".tune.jsonl"),
    )  # fmt: skip
    doing = common.Doing(f"tuning {named}")
    found = common.call(lambda: tune(asked, doing.tell), doing)
    if found.plan is not None:
        from foretell.plan.file import write

        write(found.plan, out)
    if json:
        common.emit_json({"tune": found.to_json(), "plan": str(out) if found.plan is not None else None, "table": str(asked.table)})
    else:
        common.emit("\n".join(lines(found, asked, out)))
    return common.INTERRUPTED if found.interrupted else common.YES if found.plan is not None else common.NO_OR_FAILED


def _asked(
    model: str, load: str | None, slo: str | None, override: list[str], overrides: Mapping[str, Any], made: type[TuneAsked], what: Any,
    weights: Path | None, device: str, dtype: str,
) -> TuneAsked:  # fmt: skip
    from foretell.options import words
    from foretell.simulate.serving.load import load_of

    if load is None:
        raise UserError("settings are tuned for a load, and none is given", EXAMPLE)
    if weights is not None and not weights.exists():
        raise UserError(f"there is nothing at {weights}", "--init-from PATH: a safetensors file, a folder or a checkpoint")
    served = what(model=model, overrides={**overrides, **words.overrides(override)}, weights=None if weights is None else str(weights),
                  device=device, dtype=dtype)  # fmt: skip
    return made(what=served, load=load_of(load), load_text=load, limit=limits(slo), slo=slo or "", table=Path())


def _plan(path: str) -> tuple[Plan, ServeLayout]:
    from foretell.plan import file

    plan = file.read(path)
    if plan.serve is None:
        raise UserError(f"{path} is a plan to train", "a plan of foretell plan MODEL --serve, or a model")
    if plan.serve.not_run_yet or plan.serve.replicas > 1:
        lacking = ", ".join((*plan.serve.not_run_yet, *(["several replicas"] if plan.serve.replicas > 1 else [])))
        raise UserError(f"{path} has {lacking}, which foretell serve does not run yet", "a plan without them, or the model itself")
    return plan, plan.serve


def _check_out(path: Path) -> None:
    if path.is_dir() or not path.name or not path.absolute().parent.is_dir():
        raise UserError(f"--out {str(path)!r} is no file that could be written", "name a file in a folder that is there, such as serve.plan.json")


# ---------------------------------------------------------------------- what is said


def lines(found: TuneAnswer, asked: TuneAsked, out: Path) -> list[str]:
    from foretell.api.serving.tune import loss, told

    best = found.best
    if best is None or best.measured is None:
        return ["No settings could be measured:", *(f"  {told(one.layout)}: {one.failed}" for one in found.failed)]
    said = f"{len(found.points)} measured" + (f", {found.resumed} of them before" if found.resumed else "")
    head = f"Best of {found.looked} settings to serve {asked.what.model} with {asked.load_text} ({said}):"
    if not found.keeps:
        head = f"No settings keep {asked.slo}; the nearest of {found.looked} ({best.measured.inside:.0%} of requests keep it; {said}):"
    text = [head, f"  {told(best.layout)}", "", *beside_lines(best.predicted, best.measured), "", "Measured, the best first:"]
    text += _rows(found)
    text += [f"  failed: {told(one.layout)}: {one.failed}" for one in found.failed]
    less = loss(best, found.usual)
    if less is not None and found.usual is not best:
        text.append(f"usual     the settings that foretell serve starts with: {_less(less)}")
    less = loss(best, found.carried)
    if found.carried is not None and less is not None:
        text.append(f"carried   {told(found.carried.layout)}, best on {found.carried_from}: {_less(less)} here")
    elif found.carried is not None:
        text.append(f"carried   {told(found.carried.layout)}, best on {found.carried_from}: not to be measured here: {found.carried.failed}")
    if found.law is not None:
        text.append(f"steps     measured here: the law of {found.law.steps:,} steps is {found.law.off:.0%} off in the median")
    text += [f"note      {note}" for note in found.notes]
    if found.interrupted:
        text.append(f"interrupted: what was measured is in {asked.table}; the same command resumes")
    if found.plan is None:
        return [*text, "Nothing was written: no settings keep the limits. Try: longer limits, a lower load, or another device"]
    return [*text, "", f"Written to {out}.  Next:  foretell serve {shell_word(str(out))}"]


def _less(share: float) -> str:
    return f"{share:.1%} fewer tokens a second" if share > 0 else f"{-share:.1%} more tokens a second, of longer answers"


def _rows(found: TuneAnswer) -> list[str]:
    from foretell.api.serving.tune import told

    rows = [("tokens/s", "predicted", "inside", "answer", "settings")]
    for one in found.points:
        assert one.measured is not None
        rows.append((
            f"{one.measured.good:,.0f}", f"{one.predicted.good:,.0f}", f"{one.measured.inside:.0%}", human_seconds(one.measured.answer_seconds),
            told(one.layout) + _role(found, one),
        ))  # fmt: skip
    wide = [max(len(row[place]) for row in rows) for place in range(4)]
    return ["  " + "  ".join(cell.rjust(size) for cell, size in zip(row[:4], wide, strict=True)) + f"  {row[4]}" for row in rows]


def _role(found: TuneAnswer, one: TunedSettings) -> str:
    roles = [name for name, other in (("usual", found.usual), (f"from {found.carried_from}", found.carried)) if other is one]
    return f"  ({', '.join(roles)})" if roles else ""
