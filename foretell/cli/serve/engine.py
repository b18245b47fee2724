"""`foretell serve MODEL --on HW --engine vllm`: what another engine would reach, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foretell.cli import common
from foretell.cli.serve.asked import limits
from foretell.cli.serve.forecast import load_lines
from foretell.errors import UserError
from foretell.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from foretell.api.serving.compared import EngineComparison
    from foretell.api.serving.engines import EngineForecast


def told_engine(
    model: str, on: str, override: Sequence[str], engine: str, weights: str, *, load: str | None, slo: str | None, json: bool
) -> int:
    """Print it; of several, names with commas or `all`, which is fastest."""
    from foretell.api.serving.compared import ALL, compared
    from foretell.api.serving.engines import EngineAsked, forecast_engine
    from foretell.options import words
    from foretell.simulate.serving.load import load_of

    if slo is not None and load is None:
        raise UserError("--slo limits a load, and none is given", 'add --load "rate=8, in=1024, out=256"')
    asked = EngineAsked(
        model=model, hardware=on, engine=engine, overrides=words.overrides(override), weights=weights,
        load=None if load is None else load_of(load), limit=limits(slo),
    )  # fmt: skip
    names = ALL if engine == "all" else tuple(name.strip() for name in engine.split(",") if name.strip())
    if len(names) > 1:
        with common.progress(f"predicting {model} on {on} with {', '.join(names)}"):
            several = compared(asked, names)
        if json:
            common.emit_json({"engines": several.to_json()})
        else:
            common.emit("\n".join(_compared_lines(several, model, on, load or "", slo)))
        return common.YES if several.fastest is not None else common.NO_OR_FAILED
    with common.progress(f"predicting {model} on {on} with {engine}"):
        found = forecast_engine(asked)
    if json:
        common.emit_json({"forecast": found.to_json()})
    else:
        common.emit("\n".join(_lines(found, load, slo)))
    return common.YES


def _compared_lines(found: EngineComparison, model: str, on: str, load: str, slo: str | None) -> list[str]:
    lines = [f"{model} on {on}, {load}", f"{'':<10}{'tokens/s':>10}{'first token p50':>17}{'a token p50':>13}{'requests/s in limits':>22}"]
    for one in found.engines:
        if one.load is None:
            lines.append(f"{one.engine:<10}{one.refused}")
            continue
        kept = "" if one.capacity_rate is None else f"{one.capacity_rate:.3g}"
        ttft, tpot = (human_seconds(of["p50"]) for of in (one.load.ttft_seconds, one.load.tpot_seconds))
        slow = "   comes faster than it is answered" if one.load.overloaded else ""
        lines.append(f"{one.engine:<10}{one.load.output_tokens_per_second:>10,.0f}{ttft:>17}{tpot:>13}{kept:>22}{slow}")
    if found.fastest is not None:
        why = f"by requests that keep {slo}" if found.fastest.capacity_rate is not None else "by tokens a second, then by seconds a token"
        near = f"; within what predictions know (about 10 %): {', '.join(found.close)}" if found.close else ""
        lines.append(f"fastest   {found.fastest.engine}, {why}{near}")
    return lines


def _lines(found: EngineForecast, load: str | None, slo: str | None) -> list[str]:
    devices = found.device if found.tp == 1 else f"{found.tp} x {found.device}"
    lines = [
        f"{found.engine}  {found.model} on {devices}, weights {found.weights}",
        f"memory    weights {human_bytes(found.weights_bytes)} a device, room for {found.pages * found.page_tokens:,} tokens beside them "
        f"({human_bytes(found.token_bytes)} a token)",
        f"limits    {found.running} sequences, {found.step_tokens} tokens a step",
    ]
    for one in found.steps:
        what = f"{one.generating} generate at {one.context:,} tokens" if one.generating else f"{one.prompt:,} tokens of a prompt"
        lines.append(f"step      {human_seconds(one.seconds):>8}  {what} (device {human_seconds(one.device_seconds)})")
    if found.load is not None:
        lines += load_lines(found.load, load or "", slo)
    if found.capacity_rate is not None:
        kept = f"{found.capacity_rate:.3g} requests a second keep {slo} (95 % of them)"
        lines.append(f"capacity  {kept if found.capacity_rate else f'not even single requests keep {slo}'}")
    if found.dollars_per_million is not None:
        lines.append(f"cost      ${found.dollars_per_million:,.2f} per million generated tokens at this load")
    return [*lines, *(f"assumed   - {one}" for one in found.assumptions)]
