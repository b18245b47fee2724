"""Seconds of another engine's steps: the same trace as one of its ranks runs it, priced alike, beside its own host.

    a step = device seconds × its kernels' factor, and the host: before it, or beside it where the engine overlaps the two
             with prompts no less than the host takes to launch its kernels one by one
    device   lowered for the engine (lower.serving_split), priced and simulated as our own steps are (cost)

A model of equal layers may be given as two short stacks: each further layer costs what lies between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import log2

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.serving import TOKENS, StepShape, kv_bytes
from foretell.lower.serving_split import GROUPED, PRODUCTS, EngineForm, engine_step, engine_trace, weights_bytes
from foretell.plan.types import Mesh
from foretell.price.machine import machine
from foretell.price.serving.engines import EngineProfile, host_factor
from foretell.price.serving.weights import format_on, served
from foretell.price.speeds import Options, Speeds, comm_time_over, fabrics_of, profile_for
from foretell.simulate.serving.cost import StepCosts
from foretell.simulate.serving.layout import micro_batch
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.scheduler import Scheduler, StepLimits
from foretell.trace.recipe import Recipe
from foretell.trace.types import Trace

PAGE = 32
"""Tokens: vLLM has 16, TensorRT-LLM 32 or 64."""
FINE = 32
"""Tokens of a prompt above which lengths are taken to be alike that differ by a few per cent: attention is priced for each by itself."""
STEPS = 12
"""Lengths from one power of two to the next."""


@cache
def alike(count: int) -> int:
    """The nearest of these lengths."""
    return count if count <= FINE else round(2 ** (round(STEPS * log2(count)) / STEPS))


@dataclass
class EngineDevice:
    """What one rank's device does for a model, whatever engine asks: shared by all rows that have it."""

    traces: Sequence[Trace]
    """The model; or two stacks of it."""
    depths: Sequence[int]
    """Layers of each."""
    layers: int
    """Of the model."""
    recipe: Recipe
    cluster: Cluster
    options: Options
    tp: int = 1
    weights: str = "bf16"
    kv: str = ""
    """Format of keys and values; empty: the model's."""
    pp: int = 1
    """Stages, each with as many layers and `tp` ranks."""
    apart: bool = False
    """Ranks have sequences of their own; this is one of them."""
    parts: list[StepCosts] = field(init=False)
    _known: dict[StepShape, tuple[float, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        device = self.cluster.device
        found = machine(device, profile_for(self.cluster, self.options.profile_of))
        if found is None:
            raise UserError(f"nothing is known of the speed of {device.name}", "a device of `foretell hardware`, or foretell probe there")
        how = format_on(self.weights, device)
        fabrics = fabrics_of(Mesh(tp=self.tp), self.cluster) if self.tp > 1 else {}
        speeds = Speeds(
            machine=found, comm_time=comm_time_over(fabrics), reprice=served(device, how, found.slower.get("gemm", 1.0)), host_slowdown=0.0,
            alone=self.tp == 1,
        )  # fmt: skip
        form = EngineForm(tp=self.tp, weights=how, kv=self.kv, apart=self.apart)
        self.parts = [
            StepCosts(engine_trace(one, form), self.recipe, self.cluster, self.options, cached=PAGE, graphs=True, speeds=speeds, step_of=engine_step)
            for one in self.traces
        ]  # fmt: skip

    def whole(self, figures: Sequence[float]) -> float:
        """Of all layers, from that of each stack."""
        if len(figures) == 1:
            return figures[0]
        (few, many), (low, high) = self.depths, figures
        return low + (high - low) / (many - few) * (self.layers / self.pp - few)

    def seconds(self, shape: StepShape) -> float:
        """Of a stage."""
        return sum(self.split(shape))

    def split(self, shape: StepShape) -> tuple[float, float]:
        """Seconds besides attention over pages, and of that."""
        if any(count > FINE for _, count in shape.chunks):
            shape = shape._replace(chunks=tuple([(before, alike(count)) for before, count in shape.chunks]))
        found = self._known.get(shape)
        if found is None:
            if len(self._known) > 20_000:
                self._known.clear()
            generate, prompts = shape._replace(chunks=()), shape._replace(generating=0)
            pages = self.whole([one.attended(generate) for one in self.parts]) if shape.generating else 0.0
            besides = [one.besides(shape.tokens, max(1, shape.samples))[0] + (one.attended(prompts) if shape.chunks else 0.0) for one in self.parts]
            found = self._known[shape] = self.whole(besides), pages
        return found

    @cached_property
    def launches(self) -> float:
        """Kernels of a step."""
        return self.whole([sum(not op.name.startswith("foretell.link") for op in one.trace.ops()) for one in self.parts])

    @cached_property
    def flops(self) -> float:
        """Of products, for each token that is computed."""
        return self.whole([sum(op.flops or 0 for op in one.trace.ops() if op.name in PRODUCTS and op.inputs[0].spec.shape[0] % TOKENS == 0)
                           for one in self.parts]) / TOKENS  # fmt: skip

    @cached_property
    def mixture(self) -> bool:
        """It has experts."""
        return any(op.name == GROUPED for op in self.parts[0].trace.ops())

    @cached_property
    def spread(self) -> float:
        """Heads of queries that read one head of keys."""
        layer = next(iter(self.parts[0].layers))
        return layer.query.shape[1] / layer.key.shape[1]

    @cached_property
    def step_bytes(self) -> int:
        """That the largest product of a step holds for each token."""
        each = [op.outputs[0].spec.nbytes + op.inputs[0].spec.nbytes for op in self.parts[0].trace.ops() if op.name in PRODUCTS]
        return max(one // TOKENS for one in each)

    @cached_property
    def weights_bytes(self) -> int:
        """Of a rank."""
        return int(self.whole([weights_bytes(one.trace) for one in self.parts]))

    @cached_property
    def token_bytes(self) -> int:
        """Keys and values of a token, of a rank."""
        return int(self.whole([kv_bytes(one.trace) for one in self.parts]))


@dataclass(frozen=True)
class EngineCosts:
    """An engine on that device."""

    device: EngineDevice
    profile: EngineProfile
    cold: bool = False
    """The server has just started."""
    _met: set[int] = field(default_factory=set, init=False, compare=False)
    """Sizes of steps that came already, each half as large again as the next smaller."""

    def seconds(self, shape: StepShape) -> float:
        stages = self.device.pp
        if stages == 1:
            return self._stage(shape)
        return stages * self._stage(micro_batch(shape, max(1, min(stages, shape.generating + len(shape.chunks)))))

    def _stage(self, shape: StepShape) -> float:
        """Where stages take turns all are busy at once: each computes its part of the sequences as often as there are stages."""
        profile, device, faster = self.profile, self.device, host_factor(self.device.cluster.device)
        besides, pages = device.split(shape)
        computing = device.flops * shape.tokens / (profile.peak_share * device.cluster.device.peak("bfloat16")) if profile.peak_share < 1 else 0.0
        busy = max(besides * profile.slower, computing) + pages * profile.slower * (device.spread if profile.spread_heads else 1.0)
        if shape.chunks or not profile.graphs:
            busy = max(busy, device.launches * profile.launch_seconds * faster)
        host = profile.host_seconds + profile.host_sequence_seconds * (shape.generating + len(shape.chunks))
        host = host * faster + (profile.shared_seconds if device.tp > 1 else 0.0)
        return (max(busy, host) if profile.overlapped else busy + host) + self._compiled(shape)

    def _compiled(self, shape: StepShape) -> float:
        """What a size of step takes that is the first of its kind."""
        if not self.cold or not self.profile.expert_compile_seconds or not self.device.mixture or shape.tokens <= self.profile.running:
            return 0.0
        size = shape.tokens.bit_length()
        if size in self._met:
            return 0.0
        self._met.add(size)
        return self.profile.expert_compile_seconds

    @property
    def pages(self) -> int:
        """That are left beside weights and a step."""
        profile, device = self.profile, self.device
        memory, weights = device.cluster.device.memory_bytes, device.weights_bytes
        held = profile.held_bytes + profile.tokens * device.step_bytes
        room = profile.memory_share * (memory - held - weights) if profile.share_of_free else profile.memory_share * memory - held - weights
        return int(room // (PAGE * device.token_bytes))

    def scheduler(self, *, running: int | None = None, tokens: int | None = None, pages: int | None = None) -> Scheduler:
        profile = self.profile
        many = profile.running if running is None else running
        count = self.pages if pages is None else pages
        if count < 1:
            need = self.device.weights_bytes / 2**30
            problem = f"weights of {need:.1f} GiB leave no pages on {self.device.cluster.device.name}"
            raise UserError(problem, "more devices (tp), weights of fewer bits")
        step = profile.tokens if tokens is None else tokens
        limits = StepLimits(running=many, tokens=max(many, step), prompts_first=profile.prompts_first, reserves=profile.reserves)
        return Scheduler(Pages(count, PAGE), limits)
