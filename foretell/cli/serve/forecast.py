"""`foretell serve MODEL --on HW`: what serving would cost, without serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.cli.serve.asked import limits
from foretell.errors import UserError
from foretell.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from foretell.api.serving.forecast import LoadTold, ServingForecast

BARS = " ▁▂▃▄▅▆▇█"


def told(
    model: str, on: str, override: Sequence[str], dtype: str, sizes: Mapping[str, Any], *, load: str | None, slo: str | None,
    graphs: bool, json: bool,
) -> int:  # fmt: skip
    """Print it; 1 where it does not fit."""
    from foretell.api.serving.forecast import ServingAsked, forecast
    from foretell.options import words
    from foretell.quantities import NO
    from foretell.simulate.serving.load import load_of

    if slo is not None and load is None:
        raise UserError("--slo limits a load, and none is given", 'add --load "rate=8, in=1024, out=256"')
    asked = ServingAsked(
        model=model, hardware=on, overrides=words.overrides(override), precision=dtype, graphs=graphs,
        load=None if load is None else load_of(load), limit=limits(slo), **sizes,
    )  # fmt: skip
    with common.progress(f"predicting {model} on {on}"):
        found = forecast(asked)
    if json:
        common.emit_json({"forecast": found.to_json()})
    else:
        common.emit("\n".join(_lines(found, load, slo)))
    return int(found.verdict == NO)


def _lines(found: ServingForecast, load: str | None, slo: str | None) -> list[str]:
    lines = memory_lines(found)
    lines.append(f"room      {found.pages * found.page_tokens:,} tokens at once; the longest request {found.longest:,}")
    lines += step_lines(found)
    if found.load is not None:
        lines += [*load_lines(found.load, load or "", slo), *graph_lines(found)]
    return [*lines, *capacity_lines(found, slo), *(f"assumed   - {one}" for one in found.assumptions)]


def layout_words(found: ServingForecast) -> str:
    """replicas, ranks and formats, where there is more to say than one device in 16 bits."""
    parts = [f"{found.replicas} replicas" if found.replicas > 1 else ""]
    parts += [f"{name} {size}" for name, size in (("tp", found.tp), ("pp", found.pp)) if size > 1]
    parts += [f"{found.weights} weights" if found.weights != "bf16" else "", f"{found.kv} keys and values" if found.kv != "bf16" else ""]
    return "".join(f", {part}" for part in (*parts, "invariant" if found.invariant else "") if part)


def memory_lines(found: ServingForecast) -> list[str]:
    way = "launches replayed" if found.graphs else "eager"
    devices = found.replicas * found.tp * found.pp
    where = found.device if devices == 1 else f"{devices}x {found.device}"
    each = "" if devices == 1 else " of each"
    logits = f"logits {human_bytes(found.logits_bytes)}, sampler up to {human_bytes(found.sampler_bytes)}" if found.logits_bytes else "no logits"
    return [
        f"{found.verdict.upper()}  {found.model} on {where}, {found.precision}{layout_words(found)}, {way}: "
        f"{human_bytes(found.device_bytes)} of {human_bytes(found.capacity_bytes)}{each}",
        f"memory    weights {human_bytes(found.weights_bytes)}  pages {human_bytes(found.pages_bytes)} ({found.pages} of {found.page_tokens} tokens, "
        f"{human_bytes(found.token_bytes)} a token)",
        f"          largest step {human_bytes(found.step_bytes)} ({found.running} sequences, {found.step_tokens} tokens; {logits})  "
        f"context {human_bytes(found.context_bytes)}",
    ]


def step_lines(found: ServingForecast) -> list[str]:
    lines = []
    for one in found.steps:
        what = f"{one.generating} generate at {one.context:,} tokens" if one.generating else f"{one.prompt:,} tokens of a prompt"
        bound = "" if found.graphs or one.host_seconds < one.device_seconds else ", waits for the host"
        lines.append(f"step      {human_seconds(one.seconds):>8}  {what} (device {human_seconds(one.device_seconds)}{bound})")
    if found.weights != "bf16":
        slower = f"slower than bf16 from {found.crossover_tokens:,} tokens a step on" if found.crossover_tokens else "never slower than bf16"
        lines.append(f"          weights in {found.weights}: {slower} (assumed)")
    return lines


def load_lines(load: LoadTold, text: str, slo: str | None) -> list[str]:
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


def graph_lines(found: ServingForecast) -> list[str]:
    """Pages over time, as a row of bars."""
    if len(found.timeline) < 2 or not found.pages:
        return []
    most = max(pages for _, pages in found.timeline)
    bars = "".join(BARS[min(8, -(-pages * 8 // found.pages))] for _, pages in found.timeline)
    return [f"pages     {bars}  {most / found.pages:.0%} at most, over {human_seconds(found.timeline[-1][0])}"]


def capacity_lines(found: ServingForecast, slo: str | None) -> list[str]:
    lines = []
    if found.capacity_rate is not None:
        kept = f"{found.capacity_rate:.3g} requests a second keep {slo} (95 % of them)"
        lines.append(f"capacity  {kept if found.capacity_rate else f'not even single requests keep {slo}'}")
    if found.dollars_per_million is not None:
        joules = "" if found.joules_per_token is None else f"; {found.joules_per_token:.2g} J a token"
        lines.append(f"cost      ${found.dollars_per_million:,.2f} per million generated tokens at this load{joules}")
    return lines
