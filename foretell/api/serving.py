"""What serving a model would cost on a device, under a load: the engine's own scheduler on predicted steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.api import backends
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.prices import price_per_hour
from foretell.lower.serving import ROWS, TOKENS, StepShape
from foretell.plan.precision import for_inference
from foretell.price.speeds import Options
from foretell.quantities import NO
from foretell.simulate.serving.cost import StepCosts
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.run import Limit, Served, capacity, simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits
from foretell.trace.load.model import Source, check
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.store.traces import traced

PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
SHOWN = (1, 8, 32, 128)
"""Sequences that generate, of which steps are told."""
POSITIONS = "requests longer than the model's own positions are counted as served; the engine refuses them"
NOTE = "attention over pages as vLLM's kernels take (public tables, 11 to 22 % off in the median); this engine's own steps were not measured on a GPU"


@dataclass(frozen=True, kw_only=True)
class StepTold:
    """One step, predicted whole."""

    generating: int
    prompt: int
    """Tokens of a prompt in it."""
    context: int
    seconds: float
    device_seconds: float
    host_seconds: float


@dataclass(frozen=True, kw_only=True)
class LoadTold:
    """What a load gets."""

    requests: int
    refused: int
    ttft_seconds: Mapping[str, float]
    """p50, p95, p99."""
    tpot_seconds: Mapping[str, float]
    gap_seconds: Mapping[str, float]
    output_tokens_per_second: float
    total_tokens_per_second: float
    pages_most: int
    running_most: int
    waiting_most: int
    preemptions: int
    inside: float
    """Share of requests that keep the limits."""
    overloaded: bool
    """Requests came faster than they were answered."""


@dataclass(frozen=True, kw_only=True)
class ServingForecast:
    """An answer."""

    model: str
    device: str
    precision: str
    graphs: bool
    verdict: str
    capacity_bytes: int
    weights_bytes: int
    pages_bytes: int
    token_bytes: int
    """Keys and values of one token."""
    step_bytes: int
    """Beside these in the largest step: activations, logits, workspaces, and what the allocator holds of them."""
    context_bytes: int
    device_bytes: int
    pages: int
    page_tokens: int
    running: int
    step_tokens: int
    steps: tuple[StepTold, ...]
    load: LoadTold | None
    capacity_rate: float | None
    """Requests a second of which 95 % keep the limits; None: not even single ones, or not asked for."""
    dollars_per_million: float | None
    """Of generated tokens, at the load."""
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ServingAsked:
    """What is to be served, on what, and how."""

    model: str
    hardware: str
    overrides: Mapping[str, Any]
    precision: str = "auto"
    pages: int = 1024
    size: int = 16
    running: int = 64
    tokens: int = 512
    graphs: bool = False
    load: Load | None = None
    limit: Limit = field(default_factory=Limit)
    seconds: float = 60.0
    """Of arrivals that are simulated."""


def forecast(asked: ServingAsked) -> ServingForecast:
    """Memory of the largest step beside all pages, seconds of steps, what a load gets, and the highest rate within limits."""
    cluster = parse(asked.hardware)
    if cluster.count > 1:
        raise UserError(f"{asked.hardware} has {cluster.count} devices, and serving is predicted for one", f"--on {cluster.device.name}")
    if cluster.device.backend == "cpu":
        problem = f"{cluster.device.name} is a CPU, where this engine's steps are not predicted"
        raise UserError(problem, "a GPU, such as --on H100; or serve there and measure")
    if asked.precision not in ("auto", *PRECISIONS):
        raise UserError(f"--dtype {asked.precision}", f"auto, {', '.join(PRECISIONS)}")
    precision = for_inference(cluster) if asked.precision == "auto" else PRECISIONS[asked.precision]
    recipe = Recipe(mode="infer", precision=precision, packed=(TOKENS, ROWS))
    source = Source(model=asked.model, overrides=dict(asked.overrides))
    check(source)
    trace, entry = traced(request(source, recipe, backends.capability(cluster) or (), {}))
    costs = StepCosts(trace, recipe, cluster, Options(profile_of=find_profile), cached=asked.pages * asked.size, graphs=asked.graphs)
    tokens = max(asked.tokens, asked.running)
    largest = costs.whole(StepShape(asked.running - 1, asked.pages * asked.size, ((0, tokens - asked.running + 1),), asked.running))
    memory = largest.worst.memory
    pages_bytes = costs.token_bytes * costs.cached

    def made() -> Scheduler:
        return Scheduler(Pages(asked.pages, asked.size), StepLimits(running=asked.running, tokens=tokens))

    told, rate, dollars = None, None, None
    if asked.load is not None and largest.worst.verdict != NO:
        served = simulated(asked.load, made(), costs.seconds, asked.seconds, most_waiting=100_000)
        told = _told(served, asked.limit)
        price, _ = price_per_hour(cluster.device)
        dollars = None if price is None or not told.output_tokens_per_second else price / 3600 / told.output_tokens_per_second * 1e6
        if asked.limit != Limit() and not asked.load.users:
            found = capacity(asked.load, made, costs.seconds, asked.limit, asked.seconds)
            rate = found[0] if found is not None else 0.0
    return ServingForecast(
        model=asked.model, device=cluster.device.name, precision=precision, graphs=asked.graphs, verdict=largest.worst.verdict,
        capacity_bytes=memory.capacity_bytes, weights_bytes=costs.weights_bytes, pages_bytes=pages_bytes, token_bytes=costs.token_bytes,
        step_bytes=memory.reserved_bytes - costs.weights_bytes - pages_bytes, context_bytes=memory.device_bytes - memory.reserved_bytes,
        device_bytes=memory.device_bytes, pages=asked.pages, page_tokens=asked.size, running=asked.running, step_tokens=tokens,
        steps=_steps(costs, asked, tokens), load=told, capacity_rate=rate, dollars_per_million=dollars,
        assumptions=(*entry.notes, NOTE, POSITIONS, *(("CUDA graphs: the host's launches are left out",) if asked.graphs else ())),
    )  # fmt: skip


def _steps(costs: StepCosts, asked: ServingAsked, tokens: int) -> tuple[StepTold, ...]:
    context = round(asked.load.prompt.mean + asked.load.output.mean / 2) if asked.load is not None and asked.load.kind != "trace" else 1024
    found = []
    for many in (one for one in (*(one for one in SHOWN if one < asked.running), asked.running)):
        time = costs.whole(StepShape(many, many * context, (), many)).time
        assert time is not None
        seconds = time.device_seconds if asked.graphs else time.step_seconds
        found.append(StepTold(generating=many, prompt=0, context=context, seconds=seconds, device_seconds=time.device_seconds,
                              host_seconds=time.host_seconds))  # fmt: skip
    time = costs.whole(StepShape(0, 0, ((0, tokens),), 1)).time
    assert time is not None
    seconds = time.device_seconds if asked.graphs else time.step_seconds
    found.append(StepTold(generating=0, prompt=tokens, context=tokens, seconds=seconds, device_seconds=time.device_seconds,
                          host_seconds=time.host_seconds))  # fmt: skip
    return tuple(found)


def _told(served: Served, limit: Limit) -> LoadTold:
    def at(quantile: Any) -> dict[str, float]:
        return {f"p{round(share * 100)}": quantile(share) for share in (0.5, 0.95, 0.99)}

    return LoadTold(
        requests=len(served.answers), refused=served.refused, ttft_seconds=at(served.ttft), tpot_seconds=at(served.tpot), gap_seconds=at(served.gap),
        output_tokens_per_second=served.output_rate, total_tokens_per_second=served.total_rate, pages_most=served.pages_most,
        running_most=served.running_most, waiting_most=served.waiting_most, preemptions=served.preemptions, inside=served.inside(limit),
        overloaded=served.gave_up or served.waiting_most > 4 * served.running_most + 64,
    )  # fmt: skip
