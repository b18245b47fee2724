"""`foretell fit MODEL --serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.cli.serve import asked as serving
from foretell.cli.serve.forecast import capacity_lines, graph_lines, load_lines, memory_lines, step_lines
from foretell.errors import UserError
from foretell.units import human_bytes

if TYPE_CHECKING:
    from foretell.api.serving.room import ServingRoom

_OWN = ("model", "on", "serve", "load", "slo", "pages", "page", "running", "step_tokens", "weights", "kv", "invariant", "overrides", "json", "debug",
        "precision", "verbose")  # fmt: skip
PRECISIONS = ("fp32", "bf16", "fp16")


def room_command(
    model: str | None, on: str, options: Mapping[str, Any], context: typer.Context, sizes: Mapping[str, int | None], *, load: str | None,
    slo: str | None, weights: str, kv: str, invariant: bool, json: bool,
) -> int:  # fmt: skip
    """Print it; 1 where it does not fit."""
    from foretell.api.serving.forecast import ServingAsked
    from foretell.api.serving.room import room
    from foretell.simulate.serving.load import load_of

    if model is None:
        raise UserError("no model is named", "foretell fit MODEL --serve --on HW")
    others = sorted(name for name in context.params if name not in _OWN and _typed(context, name))
    if others:
        flag = f"--{others[0].replace('_', '-')}"
        raise UserError(f"{flag} is of training, and --serve is not", f"leave {flag} out")
    serving.at_least_one(**sizes)
    if slo is not None and load is None:
        raise UserError("--slo limits a load, and none is given", 'add --load "rate=8, in=1024, out=256"')
    precision = options["precision"]
    if precision is not None and precision not in PRECISIONS:
        raise UserError(f"--precision {precision} with --serve", f"one of {', '.join(PRECISIONS)}: weights are in what is computed in")
    running = sizes["running"] or 64
    asked = ServingAsked(
        model=model, hardware=on, overrides=options["overrides"] or {}, precision=precision or "auto", pages=sizes["pages"], size=sizes["page"] or 16,
        running=running, tokens=max(sizes["step_tokens"] or 512, running), graphs=True, weights=weights, kv=kv, invariant=invariant,
        load=None if load is None else load_of(load), limit=serving.limits(slo),
    )  # fmt: skip
    found = common.call(lambda: room(asked), f"predicting {model} on {on}")
    if json:
        common.emit_json({"serving": found.to_json()})
    else:
        common.emit("\n".join(lines(found, load, slo, on)))
    return common.YES if found.fits else common.NO_OR_FAILED


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def lines(found: ServingRoom, load: str | None, slo: str | None, on: str) -> list[str]:
    told = found.forecast
    text = memory_lines(told)
    if not found.fits:
        what, size = found.uses[0]
        text.append(f"lacking   {human_bytes(found.lacking_bytes)}; the most is used by {what}: {human_bytes(size)}")
        for one in found.would_fit:
            later = "" if one.runs_today else " (foretell serve does not run it on a GPU yet)"
            text.append(f"would fit {one.change}: {one.pages:,} pages, {one.at_once} requests at once{later}   {one.flag}")
        return [*text, *([] if found.would_fit else ["would fit nothing that was tried: a larger device, or more of them"])]
    per = ", ".join(f"{many} of {tokens:,} tokens" for tokens, many in found.at_once)
    text.append(f"at once   {per} (--running {told.running}), on each of {told.replicas} replicas" if told.replicas > 1 else
                f"at once   {per} (--running {told.running})")  # fmt: skip
    bound = "the model's positions" if told.context is not None and told.longest == told.context else "its pages"
    text.append(f"longest   {told.longest:,} tokens of a request, prompt and answer: {bound}")
    text += step_lines(told)
    if told.load is not None:
        text += [*load_lines(told.load, load or "", slo), *graph_lines(told), *capacity_lines(told, slo)]
    return [*text, *(f"assumed   - {one}" for one in told.assumptions)]
