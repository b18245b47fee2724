"""What serving a model would cost on a device, under a load: the engine's own scheduler on predicted steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretell.api import backends
from foretell.errors import ModelError, UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.prices import price_per_hour
from foretell.hardware.types import Cluster
from foretell.lower.serving import ROWS, TOKENS, StepShape, kv_bytes
from foretell.lower.serving_formats import NOTED
from foretell.plan.precision import for_inference
from foretell.plan.types import ServeLayout
from foretell.price.speeds import Options
from foretell.quantities import NO
from foretell.simulate.serving.invariant import fixed_sizes
from foretell.simulate.serving.layout import LayoutCosts, LayoutShares
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import Limit, Served
from foretell.simulate.serving.run import capacity, simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits
from foretell.trace.load.model import Source, check
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.store.traces import traced
from foretell.trace.types import Trace

PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
SHOWN = (1, 8, 32, 128)
"""Sequences that generate, of which steps are told."""
NOT_YET = "foretell serve does not run"
MLA = "keys and values as latent attention's kernels keep them; foretell serve keeps whole heads, {} a token"
WINDOWS = "layers with a window keep all tokens, as foretell serve does; given back, a sequence of {:,} tokens would need {} instead of {}"
ROUNDS = "pp: micro-batches are equal, and as many in flight as there are stages"
INVARIANT = "invariant: parts of {} rows generate, parts of {} rows compute prompts, padded, {} prompts in one at most"
NOTE = "attention over pages as vLLM's kernels take (public tables, 11 to 22 % off in the median)"


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
    tp: int = 1
    pp: int = 1
    replicas: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    logits_bytes: int = 0
    """In 16 bits, of all sequences; of the step."""
    sampler_bytes: int = 0
    """That sampling may copy at most, once activations are gone; of the step as far as it is above its peak."""
    longest: int = 0
    """Tokens of a request, prompt and answer, that can be served: by pages, and by the model's positions where these are known."""
    context: int | None = None
    """The model's positions."""
    crossover_tokens: int | None = None
    """Of a step, from which on the weight format is slower than 16 bits; None: never, or 16 bits."""
    joules_per_token: float | None = None
    """Of a generated token, at the load."""
    invariant: bool = False
    not_run_yet: tuple[str, ...] = ()
    """What of it `foretell serve` does not do."""
    timeline: tuple[tuple[float, int], ...] = ()
    """Seconds and the most pages that one replica held since the moment before."""
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
    pages: int | None = 1024
    """None: the most that fit."""
    size: int = 16
    running: int = 64
    tokens: int = 512
    graphs: bool = True
    compiled: bool = True
    """Blocks under torch.compile."""
    invariant: bool = False
    """The bits of an answer depend on nothing else that is served."""
    replicas: int = 1
    tp: int = 1
    pp: int = 1
    weights: str = "bf16"
    kv: str = "bf16"
    share: bool = True
    load: Load | None = None
    limit: Limit = field(default_factory=Limit)
    seconds: float | None = None
    """Of arrivals that are simulated; None: of a trace all, of others a minute."""

    @property
    def layout(self) -> ServeLayout:
        return ServeLayout(
            replicas=self.replicas, tp=self.tp, pp=self.pp, weights=self.weights, kv=self.kv, page=self.size, pages=self.pages or 0,
            running=self.running, tokens=max(self.tokens, self.running), share=self.share, graphs=self.graphs,
            compiled=self.compiled, invariant=self.invariant,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model's traced step, and what prices it."""

    name: str
    trace: Trace
    recipe: Recipe
    cluster: Cluster
    notes: tuple[str, ...]
    source: Source

    def costs(self, layout: ServeLayout, shares: LayoutShares | None = None) -> LayoutCosts:
        shares = LayoutShares({}, {}) if shares is None else shares
        return LayoutCosts(self.trace, self.recipe, self.cluster, Options(profile_of=find_profile), layout, shares=shares)

    @property
    def context(self) -> int | None:
        found = self.trace.meta.get("context")
        return found if isinstance(found, int) else None


def served_model(asked: ServingAsked) -> ServedModel:
    """Its step traced as a server calls it; raises what no pages can be kept for."""
    cluster = parse(asked.hardware)
    if cluster.device.backend == "cpu":
        problem = f"{cluster.device.name} is a CPU, where this engine's steps are not predicted"
        raise UserError(problem, "a GPU, such as --on H100; or serve there and measure")
    if asked.precision not in ("auto", *PRECISIONS):
        raise UserError(f"--dtype {asked.precision}", f"auto, {', '.join(PRECISIONS)}")
    precision = for_inference(cluster) if asked.precision == "auto" else PRECISIONS[asked.precision]
    recipe = Recipe(mode="infer", precision=precision, packed=(TOKENS, ROWS))
    source = Source(model=asked.model, overrides=dict(asked.overrides))
    check(source)
    try:
        trace, entry = traced(request(source, recipe, backends.capability(cluster) or (), {}))
    except ModelError as error:
        raise ModelError(f"{asked.model} has no keys and values that pages could hold: {error.problem}", error.remedy) from error
    return ServedModel(name=asked.model, trace=trace, recipe=recipe, cluster=cluster, notes=tuple(entry.notes), source=source)


def scheduler_of(layout: ServeLayout) -> Scheduler:
    tokens = max(layout.tokens, layout.running)
    return Scheduler(Pages(layout.pages, layout.page), StepLimits(running=layout.running, tokens=tokens, ahead=True, invariant=layout.invariant))


def forecast(asked: ServingAsked) -> ServingForecast:
    """Memory of the largest step beside all pages, seconds of steps, what a load gets, and the highest rate within limits."""
    layout, count = asked.layout, parse(asked.hardware).count
    if count > 1 and layout.devices == 1:
        problem = f"{asked.hardware} has {count} devices, and serving is predicted for one"
        raise UserError(problem, f"--tp {count} (or --pp, --replicas), or foretell plan {asked.model} --serve --on {asked.hardware}")
    model = served_model(asked)
    costs = model.costs(layout)
    layout = costs.layout = replace(layout, pages=layout.pages or max(1, costs.most_pages()))
    return answer(model, costs, asked)


def answer(model: ServedModel, costs: LayoutCosts, asked: ServingAsked) -> ServingForecast:
    """The forecast of a layout."""
    layout, device = costs.layout, model.cluster.device
    largest = costs.largest(layout.pages)
    memory = largest.memory
    told, rate, dollars, joules = None, None, None, None
    timeline: tuple[tuple[float, int], ...] = ()
    if asked.load is not None and largest.verdict != NO:
        load = asked.load.shared(layout.replicas)
        load = load if layout.share else replace(load, prefix=0)
        seconds = asked.seconds or load.seconds
        served = simulated(load, scheduler_of(layout), costs.seconds, seconds, most_waiting=100_000)
        told, timeline = load_told(served, asked.limit, layout.replicas), thinned(served)
        price, _ = price_per_hour(device)
        out = told.output_tokens_per_second
        dollars = None if price is None or not out else price * layout.devices / 3600 / out * 1e6
        joules = joules_per_token(costs, served)
        if asked.limit != Limit() and not asked.load.users:
            found = capacity(load, lambda: scheduler_of(layout), costs.seconds, asked.limit, seconds)
            rate = found[0] * layout.replicas if found is not None else 0.0
    positions = model.context
    longest = layout.pages * layout.page
    return ServingForecast(
        model=asked.model, device=device.name, precision=str(model.recipe.precision), graphs=layout.graphs, verdict=largest.verdict,
        capacity_bytes=memory.capacity_bytes, weights_bytes=largest.weights_bytes, pages_bytes=largest.pages_bytes, token_bytes=costs.token_bytes,
        step_bytes=largest.step_bytes, context_bytes=largest.context_bytes, device_bytes=memory.device_bytes, pages=layout.pages,
        page_tokens=layout.page, running=layout.running, step_tokens=layout.tokens, steps=_steps(costs, asked), load=told,
        tp=layout.tp, pp=layout.pp, replicas=layout.replicas, weights=layout.weights, kv=layout.kv, logits_bytes=largest.logits_bytes,
        sampler_bytes=largest.sampler_bytes, longest=longest if positions is None else min(longest, positions), context=positions,
        crossover_tokens=crossover(model, costs), joules_per_token=joules, not_run_yet=layout.not_run_yet, timeline=timeline,
        invariant=layout.invariant,
        capacity_rate=rate, dollars_per_million=dollars, assumptions=assumptions(model, costs, asked.load),
    )  # fmt: skip


def crossover(model: ServedModel, costs: LayoutCosts) -> int | None:
    """Tokens of a step from which on the weight format is slower than 16 bits."""
    if costs.layout.weights == "bf16":
        return None
    return costs.crossover(model.costs(replace(costs.layout, weights="bf16"), costs.shares))


def joules_per_token(costs: LayoutCosts, served: Served) -> float | None:
    """Of generated tokens: of the mean step, on all its devices."""
    if not served.steps or not served.answers:
        return None
    many = max(1, round(sum(running for _, _, running, _ in served.timeline) / len(served.timeline)))
    mean = sum(one.prompt + one.output / 2 for one in served.answers) / len(served.answers)
    watts = costs.whole(StepShape(many, round(many * mean), (), many)).watts
    tokens = sum(one.output for one in served.answers)
    return None if watts is None else watts * costs.layout.tp * costs.layout.pp * served.busy / tokens


def assumptions(model: ServedModel, costs: LayoutCosts, load: Load | None) -> tuple[str, ...]:
    """What an answer rests on."""
    from foretell.units import human_bytes

    layout, found = costs.layout, [*model.notes, NOTE]
    if layout.weights != "bf16" or layout.kv != "bf16":
        names = " and ".join(f"{name} {what}" for name, what in ((layout.weights, "weights"), (layout.kv, "keys and values")) if name != "bf16")
        found.append(f"{names}: {NOTED}")
    if layout.pp > 1:
        found.append(ROUNDS)
    if costs.latent:
        found.append(MLA.format(human_bytes(kv_bytes(model.trace))))
    if costs.windows:
        tokens = 4 * max(costs.windows)
        found.append(WINDOWS.format(tokens, human_bytes(costs.windowed_bytes(tokens)), human_bytes(costs.token_bytes * tokens)))
    longest = 0 if load is None else load.longest
    if model.context is not None and longest > model.context:
        found.append(f"requests above the model's {model.context:,} positions (up to {longest:,}) are counted as served; the engine refuses them")
    if model.context is None:
        found.append("the model does not say how many positions it has: requests are limited by pages alone")
    if layout.invariant:
        found.append(INVARIANT.format(*fixed_sizes(layout.tokens)))
    if layout.graphs:
        found.append("CUDA graphs: the host's launches are left out")
    if layout.tp * layout.pp > 1:
        found.append("tp and pp: foretell serve computes these with plain attention and without graphs yet, slower than this")
    if layout.not_run_yet:
        found.append(f"{NOT_YET} {', '.join(layout.not_run_yet)} yet")
    return tuple(found)


def thinned(served: Served, many: int = 60) -> tuple[tuple[float, int], ...]:
    """Pages over time, the most of each of so many equal spans."""
    if not served.timeline or served.seconds <= 0:
        return ()
    found = [0] * many
    for at, pages, _, _ in served.timeline:
        place = min(many - 1, int(at / served.seconds * many))
        found[place] = max(found[place], pages)
    return tuple((served.seconds * (place + 1) / many, pages) for place, pages in enumerate(found))


def _steps(costs: LayoutCosts, asked: ServingAsked) -> tuple[StepTold, ...]:
    layout = costs.layout
    context = 1024
    if asked.load is not None:
        prompt, output = asked.load.mean
        context = round(prompt + output / 2)
    found = []
    shapes = [(many, 0, StepShape(many, many * context, (), many)) for many in (*(one for one in SHOWN if one < layout.running), layout.running)]
    for many, prompt, shape in (*shapes, (0, layout.tokens, StepShape(0, 0, ((0, layout.tokens),), 1))):
        time = costs.whole(shape)
        found.append(StepTold(generating=many, prompt=prompt, context=prompt or context, seconds=time.seconds, device_seconds=time.device_seconds,
                              host_seconds=time.host_seconds))  # fmt: skip
    return tuple(found)


def load_told(served: Served, limit: Limit, replicas: int = 1) -> LoadTold:
    """Of all replicas, each as the one that was simulated."""

    def at(quantile: Any) -> dict[str, float]:
        return {f"p{round(share * 100)}": quantile(share) for share in (0.5, 0.95, 0.99)}

    return LoadTold(
        requests=len(served.answers) * replicas, refused=served.refused * replicas,
        ttft_seconds=at(served.ttft), tpot_seconds=at(served.tpot), gap_seconds=at(served.gap),
        output_tokens_per_second=served.output_rate * replicas,
        total_tokens_per_second=served.total_rate * replicas, pages_most=served.pages_most,
        running_most=served.running_most, waiting_most=served.waiting_most, preemptions=served.preemptions, inside=served.inside(limit),
        overloaded=served.gave_up or served.waiting_most > 4 * served.running_most + 64,
    )  # fmt: skip
