"""`foretell serve MODEL --on HW`: what serving would cost, without serving."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from foretell.cli import common
from foretell.errors import UserError
from foretell.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from foretell.api.serving import LoadTold, ServingForecast
    from foretell.simulate.serving.run import Limit


def told(
    model: str, on: str, override: Sequence[str], dtype: str, sizes: Mapping[str, int], *, load: str | None, slo: str | None,
    graphs: bool, json: bool,
) -> int:  # fmt: skip
    """Print it; 1 where it does not fit."""
    from foretell.api.serving import ServingAsked, forecast
    from foretell.options import words
    from foretell.quantities import NO
    from foretell.simulate.serving.load import load_of

    if slo is not None and load is None:
        raise UserError("--slo limits a load, and none is given", 'add --load "rate=8, in=1024, out=256"')
    asked = ServingAsked(
        model=model, hardware=on, overrides=words.overrides(override), precision=dtype, graphs=graphs,
        load=None if load is None else load_of(load), limit=_limits(slo), **sizes,
    )  # fmt: skip
    with common.progress(f"predicting {model} on {on}"):
        found = forecast(asked)
    if json:
        common.emit_json({"forecast": found.to_json()})
    else:
        common.emit("\n".join(_lines(found, load, slo)))
    return int(found.verdict == NO)


def _limits(slo: str | None) -> Limit:
    from foretell.simulate.serving.run import Limit

    found: dict[str, float] = {}
    for part in filter(None, (one.strip() for one in (slo or "").split(","))):
        match = re.fullmatch(r"(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)", part)
        if match is None or match[1] in found or not float(match[2]):
            raise UserError(f"--slo {slo}: '{part}' is no limit", "write ttft=500ms,tpot=40ms, or one of them")
        found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Limit(**found)


def _lines(found: ServingForecast, load: str | None, slo: str | None) -> list[str]:
    way = "launches replayed" if found.graphs else "eager"
    lines = [
        f"{found.verdict.upper()}  {found.model} on {found.device}, {found.precision}, {way}: "
        f"{human_bytes(found.device_bytes)} of {human_bytes(found.capacity_bytes)}",
        f"memory    weights {human_bytes(found.weights_bytes)}  pages {human_bytes(found.pages_bytes)} ({found.pages} of {found.page_tokens} tokens, "
        f"{human_bytes(found.token_bytes)} a token)",
        f"          largest step {human_bytes(found.step_bytes)} ({found.running} sequences, {found.step_tokens} tokens)  "
        f"context {human_bytes(found.context_bytes)}",
        f"room      {found.pages * found.page_tokens:,} tokens at once, of one request as far as the model's own positions reach",
    ]
    for one in found.steps:
        what = f"{one.generating} generate at {one.context:,} tokens" if one.generating else f"{one.prompt:,} tokens of a prompt"
        bound = "" if found.graphs or one.host_seconds < one.device_seconds else ", waits for the host"
        lines.append(f"step      {human_seconds(one.seconds):>8}  {what} (device {human_seconds(one.device_seconds)}{bound})")
    if found.load is not None:
        lines += _load_lines(found.load, load or "", slo)
    if found.capacity_rate is not None:
        kept = f"{found.capacity_rate:.3g} requests a second keep {slo} (95 % of them)"
        rate = kept if found.capacity_rate else f"not even single requests keep {slo}"
        lines.append(f"capacity  {rate}")
    if found.dollars_per_million is not None:
        lines.append(f"cost      ${found.dollars_per_million:,.2f} per million generated tokens at this load")
    return [*lines, *(f"assumed   - {one}" for one in found.assumptions)]


def _load_lines(load: LoadTold, text: str, slo: str | None) -> list[str]:
    def three(of: Mapping[str, float]) -> str:
        return "  ".join(f"{name} {human_seconds(value)}" for name, value in of.items())

    lines = [
        f"load      {text}: {load.requests} answered, {load.refused} too long; {load.output_tokens_per_second:,.0f} tokens/s generated, "
        f"{load.total_tokens_per_second:,.0f} with prompts",
        f"          to the first token {three(load.ttft_seconds)}",
        f"          a token after it   {three(load.tpot_seconds)}",
        f"          between two tokens {three(load.gap_seconds)}",
        f"          at most {load.running_most} running, {load.waiting_most} waiting, {load.pages_most} pages; {load.preemptions} preempted",
    ]
    if load.overloaded:
        lines.append("          requests come faster than they are answered: times grow as long as that lasts")
    return lines + ([f"          {load.inside:.0%} keep {slo}"] if slo else [])
