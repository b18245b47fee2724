"""Which layouts of a server there are on some devices, and a quick estimate of each: what it could answer in a steady state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.serving import StepShape
from foretell.lower.serving_formats import known_weights
from foretell.lower.serving_formats import refusal as format_refusal
from foretell.lower.serving_ranks import blocks_of, heads
from foretell.lower.serving_ranks import refusal as heads_refusal
from foretell.plan.types import KV_FORMATS, WEIGHT_FORMATS, ServeLayout
from foretell.price.speeds import Options
from foretell.simulate.serving.layout import LayoutCosts
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.records import Limit
from foretell.trace.recipe import Recipe
from foretell.trace.types import PARAMETER, Trace

GOALS = ("throughput", "latency", "cost", "devices")
MANY = (1, 8, 32, 64, 128, 192, 256, 384, 512)
"""Sequences that generate at a time, that are looked at."""
RUNNING, TOKENS = 256, 2048
"""Limits that memory is first looked at with."""


@dataclass(frozen=True, kw_only=True)
class ServeQuestion:
    """What is to be served where, for which load, and how well."""

    trace: Trace
    recipe: Recipe
    cluster: Cluster
    options: Options
    load: Load
    limit: Limit
    goal: str = "throughput"
    may: tuple[str, ...] = ()
    """What answers may lose exactness for: weight formats, and `kv-fp8`, `kv-int8`."""
    fixed: Mapping[str, int] = field(default_factory=dict)
    """replicas, tp, pp, page, running, tokens → as given."""
    graphs: bool = True
    invariant: bool = False
    """Answers whose bits depend on nothing else that is served; of one device each."""
    patience: float = 60.0
    """Seconds after which no further layout is looked at."""


@dataclass
class ServeCandidate:
    """A layout, and what it could do."""

    layout: ServeLayout
    costs: LayoutCosts
    rate: float = 0.0
    """Requests a second of all replicas with tokens inside their limit, in a steady state."""
    tpot: float = 0.0
    """Seconds a token at the load; above the limit where it does not keep up."""
    prompt_seconds: float = 0.0
    """A mean prompt's own, with nobody beside it."""

    @property
    def devices(self) -> int:
        return self.layout.devices


@dataclass(frozen=True, kw_only=True)
class Ruled:
    """A layout that cannot be, and why."""

    layout: ServeLayout
    why: str


def formats(question: ServeQuestion) -> list[tuple[str, str]]:
    """Of weights and of keys and values, that may be used and have a kernel there."""
    weights = ["bf16", *(one for one in WEIGHT_FORMATS if one != "bf16" and one in question.may)]
    kept = ["bf16", *(one for one in KV_FORMATS if one != "bf16" and f"kv-{one}" in question.may)]
    found = [pair for pair in itertools.product(weights, kept) if format_refusal(question.cluster.device, *pair) is None]
    asked = [one for one in question.may if format_refusal(question.cluster.device, *_pair(one)) is not None]
    if asked and len(found) == 1:
        refused = format_refusal(question.cluster.device, *_pair(asked[0]))
        assert refused is not None
        raise refused
    return found


def _pair(name: str) -> tuple[str, str]:
    return ("bf16", name.removeprefix("kv-")) if name.startswith("kv-") else (name, "bf16")


def meshes(question: ServeQuestion) -> Iterator[tuple[int, int, int]]:
    """replicas, tp, pp; those that leave devices idle only where that may be wanted."""
    count, trace, fixed = question.cluster.count, question.trace, question.fixed
    blocks = len(blocks_of(trace).each)
    node = question.cluster.devices_per_domain or question.cluster.devices_per_node
    if question.invariant:
        fixed = {"tp": 1, "pp": 1, **fixed}
    widths = [fixed["tp"]] if "tp" in fixed else [one for one in range(1, min(count, node, heads(trace)[0]) + 1) if one & (one - 1) == 0]
    for tp in widths:
        refused = heads_refusal(trace, tp)
        if refused is not None:
            if "tp" in fixed:
                raise refused
            continue
        depths = [fixed["pp"]] if "pp" in fixed else [one for one in range(1, count // tp + 1) if one & (one - 1) == 0]
        for pp in depths:
            if pp > blocks or tp * pp > count:
                if "pp" in fixed or ("tp" in fixed and tp > count):
                    raise UserError(f"tp {tp} and pp {pp} on {count} devices, of a model of {blocks} blocks", "smaller ones, or more devices")
                continue
            most = count // (tp * pp)
            every = range(1, most + 1) if question.goal in ("cost", "devices") else (most,)
            for replicas in [fixed["replicas"]] if "replicas" in fixed else every:
                if replicas > most:
                    raise UserError(f"{replicas} replicas of tp {tp} and pp {pp} on {count} devices", f"at most {most}")
                yield replicas, tp, pp


def weights_share(trace: Trace, layout: ServeLayout) -> float:
    """Bytes of weights on a device, about: before anything is lowered."""
    whole = sum(one.nbytes for number in trace.resident if (one := trace.storages[number]).role == PARAMETER)
    return whole * known_weights(layout.weights).bits / 16 / (layout.tp * layout.pp)


def quickest(question: ServeQuestion, layout: ServeLayout) -> float:
    """Seconds that no step of it is quicker than: its weights are read once, by each stage in turn."""
    return weights_share(question.trace, layout) * layout.pp / question.cluster.device.memory_bandwidth_bytes_per_second


def candidate(question: ServeQuestion, layout: ServeLayout, costs: LayoutCosts) -> ServeCandidate | Ruled:
    """A layout with as many pages as fit, and its steady state."""
    fixed = question.fixed
    page = fixed.get("page", 16)
    prompt, output = question.load.mean
    running = fixed.get("running", RUNNING)
    for many in (running, *(() if "running" in fixed else (128, 64, 32, 16, 8))):
        tokens = max(fixed.get("tokens", TOKENS if many >= 64 else 512), many)
        layout = costs.layout = replace(layout, page=page, running=many, tokens=tokens)
        pages = costs.about_most_pages()
        if pages * page >= question.load.longest or pages * page >= 8 * (prompt + output):
            break
    if pages * page < prompt + output:
        room = f"there is room for {pages * page:,} tokens, and a request has {prompt + output:,.0f}"
        lacking = "weights and the largest step alone do not fit" if pages < 1 else room
        return Ruled(layout=layout, why=lacking)
    layout = costs.layout = replace(layout, pages=pages)
    found = ServeCandidate(layout, costs)
    steady(question, found)
    return found


def steady(question: ServeQuestion, one: ServeCandidate) -> None:
    """The most requests a second with tokens inside their limit, and seconds a token at the load."""
    layout, costs, load = one.layout, one.costs, question.load
    prompt, output = load.mean
    if layout.share and load.prefix:
        prompt = max(1.0, prompt - load.prefix // layout.page * layout.page)
    context = load.mean[0] + output / 2
    room = layout.pages * layout.page / (load.mean[0] + output / 2)
    wanted = load.rate / layout.replicas
    limit = question.limit.tpot or float("inf")
    one.prompt_seconds = _prompt_seconds(costs, load.mean[0])
    kept = False
    for many in MANY:
        if many > min(layout.running, room) and many > 1:
            break
        pieces = min(layout.tokens - many, round(many * prompt / output)) if output else 0
        chunks = ((0, pieces),) if pieces > 1 else ()
        shape = StepShape(many, round(many * context), chunks, many)
        seconds = costs.seconds(shape)
        rate = many / (seconds * output)
        if chunks and many * prompt / output > pieces:
            rate *= pieces / (many * prompt / output)
        if seconds <= limit or not one.rate:
            one.rate = max(one.rate, rate * layout.replicas if seconds <= limit else 0.0)
        if not kept and rate >= wanted:
            one.tpot, kept = seconds, True
    if not kept:
        one.tpot = float("inf") if wanted else seconds
    if not wanted:  # users who wait for answers
        one.tpot = costs.seconds(StepShape(max(1, round(min(layout.running, load.users / layout.replicas or 1))), round(context), (), 1))


def _prompt_seconds(costs: LayoutCosts, prompt: float) -> float:
    tokens, found, start = costs.layout.tokens, 0.0, 0
    while start < prompt:
        count = min(tokens, round(prompt) - start) or 1
        found += costs.seconds(StepShape(0, 0, ((start, count),), 1))
        start += count
    return found


def order(question: ServeQuestion, some: Sequence[ServeCandidate]) -> list[ServeCandidate]:
    """The most promising first."""
    load, limit = question.load, question.limit

    def keeps(one: ServeCandidate) -> bool:
        ttft = limit.ttft is None or one.prompt_seconds <= limit.ttft
        return ttft and (limit.tpot is None or one.tpot <= limit.tpot) and (not load.rate or one.rate >= load.rate)

    keys = {
        "throughput": lambda one: (-one.rate, one.devices),
        "latency": lambda one: (not keeps(one), one.tpot, one.prompt_seconds),
        "cost": lambda one: (not keeps(one), one.devices / max(1e-12, min(one.rate, load.rate or one.rate)), -one.rate),
        "devices": lambda one: (not keeps(one), one.devices, -one.rate),
    }
    return sorted(some, key=keys[question.goal])
