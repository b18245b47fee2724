"""What another engine would reach with a model on devices, under a load: its limits and constants on the one path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from foretell.api import backends
from foretell.api.serving.forecast import LoadTold, load_told
from foretell.errors import UnknownName, UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.prices import price_per_hour
from foretell.lower.serving import ROWS, TOKENS, StepShape
from foretell.price.serving.engines import EngineProfile, engine
from foretell.price.serving.weights import FORMATS
from foretell.price.speeds import Options
from foretell.simulate.serving.engines import PAGE, EngineCosts, EngineDevice
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.records import Limit
from foretell.simulate.serving.run import capacity, simulated
from foretell.simulate.serving.scheduler import Scheduler
from foretell.trace.load.model import Source, check
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.store.traces import traced

SHOWN = (1, 8, 32, 128)
NARROW = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class EngineAsked:
    """What another engine is to serve, and on what."""

    model: str
    hardware: str
    engine: str
    """A name, or NAME:VERSION."""
    overrides: Mapping[str, Any]
    weights: str = "bf16"
    running: int | None = None
    tokens: int | None = None
    load: Load | None = None
    limit: Limit = field(default_factory=Limit)
    seconds: float = 60.0
    """Of arrivals that are simulated."""


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """One step of an engine."""

    generating: int
    prompt: int
    context: int
    seconds: float
    device_seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineForecast:
    """An answer."""

    model: str
    device: str
    tp: int
    engine: str
    versions: tuple[str, ...]
    weights: str
    weights_bytes: int
    """Of a rank, as what follows."""
    token_bytes: int
    pages: int
    page_tokens: int
    running: int
    step_tokens: int
    memory_share: float
    longest: int
    """Tokens of a request at the load: prompt and answer."""
    steps: tuple[EngineStep, ...]
    load: LoadTold | None
    capacity_rate: float | None
    dollars_per_million: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def forecast_engine(asked: EngineAsked) -> EngineForecast:
    """Pages that are left, seconds of steps, what a load gets and the highest rate within limits. All devices of the hardware are one tp group."""
    cluster = parse(asked.hardware)
    if cluster.device.backend == "cpu":
        raise UserError(f"{cluster.device.name} is a CPU, and engines are predicted on GPUs", "a GPU, such as --on H100")
    if asked.weights not in FORMATS:
        raise UnknownName("format of weights", asked.weights, FORMATS, f"known: {', '.join(FORMATS)}")
    name, _, version = asked.engine.partition(":")
    profile = engine(name, version, cluster.device.backend)
    recipe = Recipe(mode="infer", precision="bf16", packed=(TOKENS, ROWS))
    source = Source(model=asked.model, overrides=dict(asked.overrides))
    check(source)
    trace, entry = traced(request(source, recipe, backends.capability(cluster) or (), {}))
    kv = profile.kv if FORMATS[asked.weights].kernel in ("8-bit", "4-bit") and NARROW in cluster.device.peak_flops_per_second else ""
    device = EngineDevice((trace,), (1,), 1, recipe, cluster, Options(profile_of=find_profile), cluster.count, asked.weights, kv)
    costs = EngineCosts(device, profile)

    def made() -> Scheduler:
        return costs.scheduler(running=asked.running, tokens=asked.tokens)

    limits = made().limits
    told, rate, dollars = None, None, None
    if asked.load is not None:
        served = simulated(asked.load, made(), costs.seconds, asked.seconds)
        told = load_told(served, asked.limit)
        price, _ = price_per_hour(cluster.device)
        if price is not None and told.output_tokens_per_second:
            dollars = price * cluster.count / 3600 / told.output_tokens_per_second * 1e6
        if asked.limit != Limit() and not asked.load.users:
            found = capacity(asked.load, made, costs.seconds, asked.limit, asked.seconds)
            rate = found[0] if found is not None else 0.0
    return EngineForecast(
        model=asked.model, device=cluster.device.name, tp=cluster.count, engine=profile.name, versions=profile.versions, weights=asked.weights,
        weights_bytes=device.weights_bytes, token_bytes=device.token_bytes, pages=costs.pages, page_tokens=PAGE, running=limits.running,
        step_tokens=limits.tokens, memory_share=profile.memory_share, longest=_longest(asked.load), steps=_steps(costs, asked.load, limits.running),
        load=told, capacity_rate=rate, dollars_per_million=dollars, assumptions=(*entry.notes, *_assumed(profile, costs)),
    )  # fmt: skip


def _longest(load: Load | None) -> int:
    if load is None:
        return 0
    if load.recorded:
        return max(one.prompt + one.output for one in load.recorded)
    return load.prompt.most + load.output.most


def _steps(costs: EngineCosts, load: Load | None, running: int) -> tuple[EngineStep, ...]:
    context = round(load.prompt.mean + load.output.mean / 2) if load is not None and not load.recorded else 1024
    shapes = [StepShape(many, many * context, (), many) for many in (*(one for one in SHOWN if one < running), running)]
    prompt = costs.profile.tokens
    return (
        *(EngineStep(generating=one.generating, prompt=0, context=context, seconds=costs.seconds(one), device_seconds=costs.device.seconds(one))
          for one in shapes),
        EngineStep(generating=0, prompt=prompt, context=prompt, seconds=costs.seconds(StepShape(0, 0, ((0, prompt),), 1)),
                   device_seconds=costs.device.seconds(StepShape(0, 0, ((0, prompt),), 1))),
    )  # fmt: skip


def _assumed(profile: EngineProfile, costs: EngineCosts) -> tuple[str, ...]:
    found = [f"{profile.name} {', '.join(one for one in profile.versions if one)}: {profile.source}".replace(" :", ":")]
    if profile.fitted:
        value = getattr(profile, profile.fitted)
        how = f"fitted to published runs ({profile.fitted_on})" if profile.fitted_on else "assumed: no run informed it"
        found.append(f"{profile.fitted} {value:g}: {how}")
    else:
        found.append("no constant of this engine was fitted to any run")
    if costs.device.tp > 1:
        found.append(f"tensor parallel over {costs.device.tp} devices: two all-reduces a layer, by tables or formulas of collectives")
    return tuple(found)
