"""A server over several ranks, in formats of fewer bits: bytes of each rank, seconds of a round.

    one rank           StepCosts of the whole model
    tp                 of a rank's share, with its messages (lower.serving_ranks)
    pp                 of each stage; a round is one token of every sequence

A round of pp stages: sequences go in as many micro-batches as there are stages, one behind the other. Each takes the stages in turn, which
is what a single sequence waits for; and no stage is quicker than all micro-batches that it computes. The longer of both is the round.
Replicas are servers of their own, each with its share of the requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.lower.serving import TOKENS, StepShape, kept_bytes, kv_bytes, latent, served_step
from foretell.lower.serving_formats import HeldKv, formatted, known_kv, known_weights, refusal, repriced
from foretell.lower.serving_ranks import blocks_of, sent_bytes, stage_share, tensor_share
from foretell.lower.serving_ranks import refusal as heads_refusal
from foretell.lower.siblings import joined
from foretell.plan.types import Mesh, Plan, ServeLayout
from foretell.price.energy import load_of
from foretell.price.network.collectives import P2P, collective
from foretell.price.speeds import Options, Speeds, comm_time_over, fabrics_of
from foretell.price.time import op_prices
from foretell.quantities import FITS, NO, TIGHT, Memory
from foretell.simulate.memory.memory import TIGHT_SHARE, MemoryOutcome
from foretell.simulate.parts import memory_of
from foretell.simulate.serving.cost import StepCosts
from foretell.simulate.serving.invariant import SAMPLED, FixedShape, fixed_shapes, fixed_sizes
from foretell.simulate.serving.replays import DRAWN, DRAWN_BYTES, mixed_sizes, replayed
from foretell.simulate.time.step import plan_time
from foretell.trace.recipe import Recipe
from foretell.trace.types import BUFFER, LOGITS, PARAMETER, Op, Program, Ref, Storage, TensorSpec, Trace
from foretell.units import DTYPE_BYTES

SAMPLER = "foretell.sampler"
SLACK = 64 << 20
"""Bytes that are left besides: the largest step moves by a little with the pages."""
_WORST = (FITS, TIGHT, NO)


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """The largest step on the rank with least to spare."""

    verdict: str
    memory: Memory
    weights_bytes: int
    pages_bytes: int
    logits_bytes: int
    sampler_bytes: int
    """Copies of the logits of as many rows as are drawn at a time: beside the step's activations only as far as these are gone by then."""

    @property
    def step_bytes(self) -> int:
        """Activations, logits, the sampler, workspaces, and what the allocator holds of them."""
        return self.memory.reserved_bytes - self.weights_bytes - self.pages_bytes

    @property
    def context_bytes(self) -> int:
        return self.memory.device_bytes - self.memory.reserved_bytes


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, predicted whole."""

    seconds: float
    device_seconds: float
    host_seconds: float
    message_seconds: float
    watts: float | None


class LayoutShares(NamedTuple):
    """What layouts of one model have in common."""

    traces: dict[int, Trace]
    """tp → a rank's share."""
    pieces: dict[tuple[object, ...], tuple[float, float]]
    """Of few blocks → their seconds (cost)."""


@dataclass
class LayoutCosts:
    """What steps of one model take under a layout, on one replica."""

    trace: Trace
    """Of an odd number of tokens (lower.serving), of the whole model."""
    recipe: Recipe
    cluster: Cluster
    options: Options
    layout: ServeLayout
    quick: bool = True
    shares: LayoutShares = field(default_factory=lambda: LayoutShares({}, {}))
    """Of layouts that were asked for before."""
    stages: list[StepCosts] = field(init=False)
    cuts: list[int] = field(init=False)
    latent: bool = field(init=False)
    """Keys and values are those of latent attention."""
    sent: int = field(init=False)
    """Bytes a token that a stage gives to the next."""
    _own: list[Trace] = field(init=False)
    _vocabulary: int = field(init=False)
    _pools: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    """Sequences and tokens of a step → bytes that graphs keep."""

    def __post_init__(self) -> None:
        layout, cluster = self.layout, self.cluster
        self._vocabulary = _words(self.trace)
        if layout.devices > cluster.count:
            problem = f"{layout.devices} devices are asked for and {cluster.device.name} is there {cluster.count} times"
            raise UserError(problem, "fewer replicas, a smaller tp or pp, or more devices")
        if layout.invariant and layout.tp * layout.pp > 1:
            raise UserError(f"tp {layout.tp} and pp {layout.pp} with --invariant, which is of one device", "one rank, or several replicas of it")
        refused = heads_refusal(self.trace, layout.tp) or refusal(cluster.device, layout.weights, layout.kv)
        if refused is not None:
            raise refused
        weights, kv = known_weights(layout.weights), known_kv(layout.kv)
        whole = latent(self.trace)
        self.cuts = _cuts(len(blocks_of(whole).each), layout.pp)
        self.latent = "latent" in whole.meta
        if layout.tp not in self.shares.traces:
            self.shares.traces[layout.tp] = tensor_share(whole, layout.tp)
        share = formatted(self.shares.traces[layout.tp], weights)
        spans = [(first, last) for first, last in pairwise(self.cuts)]
        kinds = {(number == 0, number == layout.pp - 1, last - first): (first, last) for number, (first, last) in enumerate(spans)}
        traces = {kind: stage_share(share, *span) for kind, span in kinds.items()}
        self._own = [traces[number == 0, number == layout.pp - 1, last - first] for number, (first, last) in enumerate(spans)]
        self.sent = sent_bytes(self.trace) // TOKENS
        made = {}
        for (first, last, blocks), one in traces.items():
            kind = (layout.tp, layout.weights, layout.kv, layout.graphs, layout.compiled, first, last) if self.quick else ()
            made[first, last, blocks] = StepCosts(
                one, self.recipe, cluster, self.options, cached=layout.page, graphs=layout.graphs, kv_dtype=kv.dtype, quick=self.quick,
                memo=self.shares.pieces, kind=kind,
            )  # fmt: skip
        self.stages = [made[number == 0, number == layout.pp - 1, last - first] for number, (first, last) in enumerate(spans)]
        mesh = Mesh(tp=layout.tp, pp=layout.pp)
        fabrics = fabrics_of(mesh, cluster) if mesh.world > 1 else {}
        self._link = fabrics.get("pp")
        known = self.stages[0].known

        def of_product(op: Op) -> float:
            alone = replace(share, programs={"forward": Program("forward", (op,))}, schedule={"steady_step": (("forward", 1),)})
            return op_prices(alone, replace(known, clocks=None))[id(op)][1]

        reprice = repriced(weights, cluster.device, _remembered(of_product)) if layout.weights != "bf16" else None
        speeds = Speeds(machine=known, comm_time=comm_time_over(fabrics), reprice=reprice, alone=mesh.world == 1)
        for stage in self.stages:
            stage.speeds, stage.step_of = speeds, self._step_of

    def limited(self, layout: ServeLayout) -> LayoutCosts:
        """The same prices under other limits of a step, or other pages."""
        found = copy.copy(self)
        found.layout = layout
        return found

    @property
    def kv(self) -> HeldKv:
        return known_kv(self.layout.kv)

    @property
    def windows(self) -> set[int]:
        """Tokens that layers with a window see."""
        return {layer.window for one in self.stages for layer in one.layers if layer.window}

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token on the rank that holds most of them."""
        return max(kv_bytes(one, self.kv.dtype, self.kv.scale_bytes) for one in self._own)

    @property
    def weights_bytes(self) -> int:
        """On the rank that holds most."""
        return max(map(_weights, self._own))

    def windowed_bytes(self, tokens: int) -> int:
        """Keys and values of a sequence on one rank, where those out of windows are given back."""
        return max(kept_bytes(one, tokens, self.layout.tokens) for one in self._own)

    def _step_of(self, trace: Trace, shape: StepShape, cached: int) -> Trace:
        each = kv_bytes(trace, self.kv.dtype, self.kv.scale_bytes)
        way = "blocks" if self.layout.compiled else "none"
        step = served_step(joined(trace) if self.layout.compiled else trace, shape, cached, token_bytes=each, kv_dtype=self.kv.dtype, way=way)
        return choosing(step, self._vocabulary)

    # ------------------------------------------------------------------ bytes

    def largest(self, pages: int) -> RankStep:
        """The step that takes most, beside so many pages: all sequences generate but one, whose prompt fills the rest."""
        cached = pages * self.layout.page
        ranks = sorted({0, len(self.stages) - 1})  # the first has most blocks
        found = [self._rank(number, shape, cached) for shape in self._largest_shapes(cached) for number in ranks]
        return max(found, key=lambda one: (_WORST.index(one.verdict), one.memory.device_bytes))

    def _largest_shapes(self, cached: int) -> tuple[StepShape, ...]:
        running, tokens = self.layout.running, max(self.layout.tokens, self.layout.running)
        if self.layout.invariant:
            return tuple({one.padded: None for one in self._fixed(StepShape(running, max(cached, running), ((0, tokens),), running))})
        return (StepShape(running - 1, max(cached, running - 1), ((0, tokens - running + 1),), running),)

    def _fixed(self, shape: StepShape) -> tuple[FixedShape, ...]:
        """The parts of a step that is computed in fixed ones."""
        return fixed_shapes(shape, fixed_sizes(max(self.layout.tokens, self.layout.running)))

    def _rank(self, number: int, shape: StepShape, cached: int) -> RankStep:
        trace, last = self._own[number], number == len(self.stages) - 1
        words = _words(trace) if last else 0
        outcome = self._replayed(trace, number, shape, cached)
        pages = cached * kv_bytes(trace, self.kv.dtype, self.kv.scale_bytes)
        return RankStep(
            verdict=outcome.verdict, memory=outcome.memory, weights_bytes=_weights(trace), pages_bytes=pages,
            logits_bytes=shape.samples * words * 2, sampler_bytes=self._drawn(shape) * words * DRAWN_BYTES,
        )  # fmt: skip

    def _replayed(self, trace: Trace, number: int, shape: StepShape, cached: int) -> MemoryOutcome:
        layout = self.layout
        step = self._step_of(trace, shape, cached)
        if number == len(self.stages) - 1:
            step = with_sampler(step, self._drawn(shape), _words(trace))
        if layout.graphs and layout.tp * layout.pp == 1:
            step = with_graphs(step, self._graphs_bytes(trace))
        return self._memory(step)

    def _drawn(self, shape: StepShape) -> int:
        """Rows that a token is drawn for at a time."""
        return SAMPLED if self.layout.invariant else min(shape.samples, DRAWN)

    def _graphs_bytes(self, trace: Trace) -> int:
        """What replayed steps keep beside all others: what the largest of them computes, and logits of every sequence."""
        running, tokens = self.layout.running, max(self.layout.tokens, self.layout.running)
        if (running, tokens) not in self._pools:
            most = max(mixed_sizes(running, tokens), default=running)
            chunks = ((0, most - running + 1),) if most > running else ()
            shapes: tuple[StepShape, ...] = (StepShape(most if not chunks else running - 1, most, chunks, running),)
            rows = running
            if self.layout.invariant:
                shapes = self._largest_shapes(self.layout.page)
                rows += max(shape.samples for shape in shapes)
            steps = [self._step_of(trace, shape, self.layout.page) for shape in shapes]
            held = sum(steps[0].storages[number].nbytes for number in steps[0].resident)
            beside = max(self._memory(step).memory.allocated_bytes for step in steps) - held
            self._pools[running, tokens] = max(0, beside) + rows * _words(trace) * DTYPE_BYTES[next(iter(self.stages[0].layers)).query.dtype]
        return self._pools[running, tokens]

    def _memory(self, step: Trace) -> MemoryOutcome:
        layout = self.layout
        plan = Plan(model={}, hardware=self.cluster.device.name, mesh=Mesh(tp=layout.tp, pp=layout.pp))
        nodes = self.cluster if layout.tp * layout.pp > 1 else replace(self.cluster, nodes=1, devices_per_node=1, groups=(), matrix=None)
        return memory_of(step, plan, nodes, self.options)

    def most_pages(self) -> int:
        """That leave a twentieth of the device free beside weights and the largest step, by the allocator's own replay; 0: not one.
        Pages are one piece of memory for keys and one for values of each layer: reserved as they are."""
        one = self.largest(1)
        return 0 if one.verdict == NO else self._pages_in(one.memory.margin_bytes, one.memory.capacity_bytes)

    def about_most_pages(self) -> int:
        """The same from replays of few blocks, with the weights of the others added. For a search; what it finds is replayed whole."""
        shapes = self._largest_shapes(self.layout.page)
        worst, capacity = 0.0, self.cluster.device.memory_bytes
        for number in sorted({0, len(self.stages) - 1}):
            _, piece = self.stages[number].pieces[-1]
            lacking = _weights(self._own[number]) - _weights(piece)
            worst = max(worst, *(self._replayed(piece, number, shape, self.layout.page).memory.device_bytes + lacking for shape in shapes))
        return 0 if worst >= capacity else self._pages_in(int(capacity - worst), capacity)

    def _pages_in(self, spare: int, capacity: int) -> int:
        return 1 + max(0, int((spare - TIGHT_SHARE * capacity - SLACK) // (self.token_bytes * self.layout.page)))

    # ------------------------------------------------------------------ seconds

    def seconds(self, shape: StepShape) -> float:
        """Of a round: one token of every sequence that generates, and the step's pieces of prompts."""
        layout = self.layout
        if layout.invariant:
            return sum(self.stages[0].seconds(one.shape, (one.tokens, one.rows)) for one in self._fixed(shape))
        if len(self.stages) == 1:
            replays = layout.graphs and layout.tp == 1  # ranks compute steps as they are
            return self.stages[0].seconds(shape, replayed(shape, layout.running, max(layout.tokens, layout.running)) if replays else None)
        parts = max(1, min(self.layout.pp, shape.generating + len(shape.chunks)))
        part = micro_batch(shape, parts)
        each = [one.seconds(part) for one in self.stages]
        return max(sum(each) + self._sends(part.tokens), parts * max(each))

    def _sends(self, tokens: int) -> float:
        if self._link is None:
            return 0.0
        return (len(self.stages) - 1) * collective(P2P, tokens * self.sent, self._link).seconds

    def whole(self, shape: StepShape) -> StepTime:
        """One step op by op, by all stages in turn."""
        if self.layout.invariant:
            return _after_each_other([self._whole(one.padded) for one in self._fixed(shape)])
        return self._whole(shape)

    def _whole(self, shape: StepShape) -> StepTime:
        device = host = messages = seconds = 0.0
        watts: list[float] = []
        for one in self.stages:
            step = self._step_of(one.trace, shape, one.cached)
            assert one.speeds is not None
            time, _ = plan_time(step, one.speeds)
            device, host = device + time.device_seconds, host + time.host_seconds
            messages += time.exposed_communication_seconds
            took = time.device_seconds + time.exposed_communication_seconds
            seconds += took if self.layout.graphs else max(took, time.step_seconds)
            if one.known.power is not None:
                watts.append(one.known.power.watts(load_of(step, self.cluster.device, max(took, seconds), time.device_seconds)))
        sends = self._sends(shape.tokens)
        mean = sum(watts) / len(watts) if watts else None
        return StepTime(seconds=seconds + sends, device_seconds=device, host_seconds=host, message_seconds=messages + sends, watts=mean)

    def crossover(self, plain: LayoutCosts) -> int | None:
        """Tokens of a step from which on it takes longer than with weights in 16 bits; None: up to 8,192 never."""
        return next((tokens for tokens in (*range(1, 9), *range(16, 520, 8), 1024, 2048, 4096, 8192)
                     if self._besides(tokens) > plain._besides(tokens) * (1 + 1e-9)), None)  # fmt: skip

    def _besides(self, tokens: int) -> float:
        return sum(one.besides(tokens, 1)[0] for one in self.stages)


def _after_each_other(parts: Sequence[StepTime]) -> StepTime:
    seconds = sum(one.seconds for one in parts)
    known = [one.watts * one.seconds for one in parts if one.watts is not None]
    return StepTime(
        seconds=seconds, device_seconds=sum(one.device_seconds for one in parts), host_seconds=sum(one.host_seconds for one in parts),
        message_seconds=sum(one.message_seconds for one in parts), watts=sum(known) / seconds if len(known) == len(parts) and seconds else None,
    )  # fmt: skip


def choosing(step: Trace, words: int) -> Trace:
    """A step that ends with the likeliest token of each row, as every step of the engine does; a stage without logits as it is."""
    program = step.programs["forward"]
    last = next((place for place in range(len(program.ops) - 1, -1, -1) if _is_logits(program.ops[place], words)), None)
    if last is None:
        return step
    logits, number = program.ops[last].outputs[0], max(step.storages) + 1
    rows = logits.spec.nbytes // (words * DTYPE_BYTES[logits.spec.dtype])
    chosen = Op("aten.argmax.default", (logits,), (Ref(number, TensorSpec((rows,), "int64")),), "sampler", "forward", 0, (number,), (number,))
    programs = {**step.programs, "forward": Program("forward", (*program.ops[: last + 1], chosen, *program.ops[last + 1 :]))}
    return replace(step, programs=programs, storages={**step.storages, number: Storage(rows * 8, LOGITS, "sampler")})


def _is_logits(op: Op, words: int) -> bool:
    return bool(op.outputs) and op.outputs[0].spec.shape[-1:] == (words,)


def with_graphs(step: Trace, nbytes: int) -> Trace:
    """A step beside what graphs keep."""
    number = max(step.storages) + 1
    return replace(step, storages={**step.storages, number: Storage(nbytes, BUFFER, "graphs")}, resident=(*step.resident, number))


def with_sampler(step: Trace, rows: int, words: int) -> Trace:
    """A step that ends with what a sampler copies of the logits of so many rows."""
    first = max(step.storages) + 1
    numbers = (first, first + 1)
    storages = {**step.storages, **dict.fromkeys(numbers, Storage(rows * words * DRAWN_BYTES // 2, LOGITS, "sampler"))}
    programs = {}
    for name, program in step.programs.items():
        *before, end = program.ops
        programs[name] = Program(name, (*before, Op(SAMPLER, (), (), "sampler", "forward", 0, numbers, numbers), end))
    return replace(step, storages=storages, programs=programs)


def _words(trace: Trace) -> int:
    """Of the vocabulary, as logits have it: the last shape of the step."""
    last: TensorSpec = next(op.outputs[0].spec for op in reversed(list(trace.ops())) if op.outputs)
    return last.shape[-1]


def _weights(trace: Trace) -> int:
    return sum(one.nbytes for number in trace.resident if (one := trace.storages[number]).role == PARAMETER)


def micro_batch(shape: StepShape, parts: int) -> StepShape:
    """One of equal micro-batches of a round."""
    if parts == 1:
        return shape
    generating = -(-shape.generating // parts)
    attended = round(shape.attended * generating / shape.generating) if shape.generating else 0
    chunks = tuple((start, -(-count // parts)) for start, count in shape.chunks)
    return StepShape(generating, attended, chunks, -(-shape.samples // parts))


def _cuts(blocks: int, stages: int) -> list[int]:
    """Where stages begin, as even as may be; the last, which has the output layer, has none more."""
    if stages > blocks:
        raise UserError(f"pp {stages} and the model has {blocks} blocks", f"pp of at most {blocks}")
    few, more = divmod(blocks, stages)
    sizes = [few + (number < more) for number in range(stages)]
    return [sum(sizes[:number]) for number in range(stages + 1)]


def _remembered(seconds: Callable[[Op], float]) -> Callable[[Op], float]:
    """A price of the same shapes is asked for once."""
    known: dict[Sequence[object], float] = {}

    def price(op: Op) -> float:
        key = (op.name, tuple(ref.spec for ref in op.inputs), op.attrs)
        if key not in known:
            known[key] = seconds(op)
        return known[key]

    return price
