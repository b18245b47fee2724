"""Seconds of another engine's steps: the same trace as one of its ranks runs it, priced alike, beside its own host.

    a step = device seconds × its kernels' factor, and the host: before it, or beside it where the engine overlaps the two
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
from foretell.lower.serving import StepShape, kv_bytes
from foretell.lower.serving_split import EngineForm, engine_step, engine_trace, weights_bytes
from foretell.plan.types import Mesh
from foretell.price.machine import machine
from foretell.price.serving.engines import EngineProfile
from foretell.price.serving.weights import format_on, narrow
from foretell.price.speeds import Options, Speeds, comm_time_over, fabrics_of, profile_for
from foretell.simulate.serving.cost import StepCosts
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
    parts: list[StepCosts] = field(init=False)
    _known: dict[StepShape, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        device = self.cluster.device
        found = machine(device, profile_for(self.cluster, self.options.profile_of))
        if found is None:
            raise UserError(f"nothing is known of the speed of {device.name}", "a device of `foretell hardware`, or foretell probe there")
        how = format_on(self.weights, device)
        fabrics = fabrics_of(Mesh(tp=self.tp), self.cluster) if self.tp > 1 else {}
        speeds = Speeds(
            machine=found, comm_time=comm_time_over(fabrics), reprice=narrow(device, how), host_slowdown=0.0, alone=self.tp == 1,
        )  # fmt: skip
        form = EngineForm(tp=self.tp, weights=how, kv=self.kv)
        self.parts = [
            StepCosts(engine_trace(one, form), self.recipe, self.cluster, self.options, cached=PAGE, graphs=True, speeds=speeds, step_of=engine_step)
            for one in self.traces
        ]  # fmt: skip

    def whole(self, figures: Sequence[float]) -> float:
        """Of all layers, from that of each stack."""
        if len(figures) == 1:
            return figures[0]
        (few, many), (low, high) = self.depths, figures
        return low + (high - low) / (many - few) * (self.layers - few)

    def seconds(self, shape: StepShape) -> float:
        if any(count > FINE for _, count in shape.chunks):
            shape = shape._replace(chunks=tuple([(before, alike(count)) for before, count in shape.chunks]))
        if shape not in self._known:
            if len(self._known) > 200_000:
                self._known.clear()
            self._known[shape] = self.whole([one.seconds(shape) for one in self.parts])
        return self._known[shape]

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
    alike: int = 1
    """Sequences that each simulated one stands for: they go through steps side by side, which is quicker to simulate."""

    def seconds(self, shape: StepShape) -> float:
        profile, many = self.profile, self.alike
        if many > 1:
            shape = StepShape(shape.generating * many, shape.attended * many, shape.chunks * many, shape.samples * many)
        busy = self.device.seconds(shape) * profile.slower
        host = profile.host_seconds + profile.host_sequence_seconds * (shape.generating + len(shape.chunks))
        host += profile.shared_seconds if self.device.tp > 1 else 0.0
        return max(busy, host) if profile.overlapped else busy + host

    @property
    def pages(self) -> int:
        """That are left beside weights and a step."""
        profile = self.profile
        room = profile.memory_share * self.device.cluster.device.memory_bytes - profile.held_bytes - self.device.weights_bytes
        return int(room // (PAGE * self.device.token_bytes))

    def scheduler(self, *, running: int | None = None, tokens: int | None = None, pages: int | None = None) -> Scheduler:
        profile = self.profile
        many = profile.running if running is None else running
        count = self.pages if pages is None else pages
        if count < 1:
            need = self.device.weights_bytes / 2**30
            problem = f"weights of {need:.1f} GiB leave no pages on {self.device.cluster.device.name}"
            raise UserError(problem, "more devices (tp), weights of fewer bits")
        many, step, count = (max(1, one // self.alike) for one in (many, profile.tokens if tokens is None else tokens, count))
        limits = StepLimits(running=many, tokens=max(many, step), prompts_first=profile.prompts_first, reserves=profile.reserves)
        return Scheduler(Pages(count, PAGE), limits)
