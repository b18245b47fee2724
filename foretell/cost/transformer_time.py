"""Seconds of a training step of a transformer on devices nobody has probed.

    kernels (transformer) ─► price ─► seconds of a layer, with its tensor-, context- and expert-parallel traffic
        no pipeline   blocks and sharded data parallel on one timeline (`streams`)
        pipeline      stages run through the schedule (`transformer_pipeline`), then gradients and the update

Ranks are numbered tensor first, then context, data (experts inside it) and pipeline, as the frameworks do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from foretell.cost import analytic, streams
from foretell.cost import transformer as work
from foretell.cost.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, P2P, REDUCE_SCATTER, collective, copy, fabric
from foretell.cost.stack import Stack
from foretell.cost.stage_schedule import Stage, partition, run_through
from foretell.cost.transformer import Training, Work
from foretell.hardware.types import Cluster, Device

_ALIGNED = 8
_RING = (work.ATTENTION, work.ATTENTION_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, and where its seconds go. Parts overlap, so that they need not add up."""

    seconds: float
    layers: float
    """Of all layers of a device, one micro-batch, with recomputation and traffic inside them."""
    head: float
    update: float
    gradients: float
    """Traffic of gradients and shards that compute does not hide."""
    bubble: float
    """Share of the step in which the busiest rank waits for others."""


# ---------------------------------------------------------------- one kernel


def price(item: Work, device: Device, stack: Stack, *, keys: int = 0) -> float:
    """Seconds of one kernel on a device under a stack. The one place where shapes become seconds."""
    if item.kind == work.STREAM:
        wide = 2 if stack.dtype in ("float32", "tf32") else 1
        return analytic.stream_seconds(item.nbytes * wide, device, launches=item.launches)
    if item.kind in (work.GEMM, work.GEMM8):
        narrow = item.kind == work.GEMM8 and "float8_e4m3fn" in device.peak_flops_per_second
        dtype = "float8_e4m3fn" if narrow else usual_dtype(stack.dtype, device)
        seconds = analytic.gemm_seconds(item.m, item.n, item.k, batch=item.batch, dtype=dtype, device=device)
        return seconds / item.part / (stack.product8 if narrow else 1.0)
    return _attention(item, device, stack, keys or item.m)


def usual_dtype(dtype: str, device: Device) -> str:
    """The dtype, or the nearest one the device has a peak for."""
    known = device.peak_flops_per_second
    return next((name for name in (dtype, "bfloat16", "float16", "float32") if name in known), next(iter(known)))


def _attention(item: Work, device: Device, stack: Stack, keys: int) -> float:
    backward = item.kind == work.ATTENTION_BACKWARD
    if stack.attention != "math":
        return analytic.attention_seconds(
            batch=item.batch, heads=item.n, queries=item.m, keys=keys, head_dim=item.k, device=device,
            kernel=stack.attention, backward=backward,
        )  # fmt: skip
    count = item.batch * item.n
    scores = Work(work.GEMM, item.m, keys, item.k, count)
    values = Work(work.GEMM, item.m, item.k, keys, count)
    each = stack.score_bytes[backward] if softmax_fuses(stack, count, keys) else stack.loose_score_bytes[backward]
    softmax = Work(work.STREAM, nbytes=float(count) * item.m * keys * each, launches=4)
    products = price(scores, device, stack) + price(values, device, stack)
    if item.k % _ALIGNED:
        products /= analytic.UNALIGNED
    return (2 if backward else 1) * products + price(softmax, device, stack)


def softmax_fuses(stack: Stack, count: int, keys: int) -> bool:
    """Whether the framework's one kernel for scale, mask and softmax takes a shape: `count` heads times sequences."""
    return not stack.softmax_keys or (16 < keys <= stack.softmax_keys and keys % 4 == 0 and count % 4 == 0)


# ---------------------------------------------------------------- one layer


class Layer(NamedTuple):
    """Seconds of one layer and one micro-batch on one device, traffic included."""

    forward: float
    inputs: float
    weights: float
    again: float
    kernels: int

    @property
    def backward(self) -> float:
        return self.inputs + self.weights + self.again


def total(works: Iterable[Work], run: Training, device: Device) -> float:
    ring = 1 + run.stack.ring_loss * (run.cp - 1)
    return sum(price(item, device, run.stack, keys=run.seq) * (ring if item.kind in _RING else 1.0) for item in works)


def layer_seconds(run: Training, cluster: Cluster) -> Layer:
    device = cluster.device
    ahead, sent, returned = work.forward(run), *inside_traffic(run, cluster)
    fore = total(ahead, run, device) + sent
    again = 0.0
    if run.recompute == "full":
        again = total(work.forward(run, again=True), run, device) + sent
    elif run.recompute == "selective":
        again = _selective(run, device, sent)
    back = total(work.backward_inputs(run), run, device) + returned
    weights = total(work.backward_weights(run), run, device)
    kernels = sum(item.launches for item in ahead)
    stall = run.stack.stall_seconds
    return Layer(
        fore + stall, back + stall, weights + stall, again + (stall if run.recompute == "full" else 0.0), kernels
    )


def _selective(run: Training, device: Device, sent: float) -> float:
    """What "selective" recomputes, by stack: every second product, every second layer, or attention alone."""
    if run.stack.selective == "ops":
        return total(work.forward(run, saved=True), run, device) + sent / 2
    if run.stack.selective == "layers":
        return (total(work.forward(run, again=True), run, device) + sent) / 2
    return price(work.attention(run), device, run.stack, keys=run.seq) if run.stack.attention == "math" else 0.0


def inside_traffic(run: Training, cluster: Cluster) -> tuple[float, float]:
    """Seconds forward and backward that tensor-, context- and expert-parallel traffic of a layer adds to compute."""
    hidden = run.stack.tensor_hidden
    nbytes = float(run.tokens * run.hidden * run.wide)
    count = 1 if run.experts else 2
    fore = back = 0.0
    if run.tp > 1:
        each = collective(ALL_REDUCE, nbytes, fabric(cluster, run.tp)).seconds
        if run.sequence_parallel:
            group, narrow = fabric(cluster, run.tp), 2 if run.eight_bit and run.stack.gathers_narrow else 1
            each = collective(ALL_GATHER, nbytes / narrow, group).seconds
            each += collective(REDUCE_SCATTER, nbytes, group).seconds
        wait = run.stack.tensor_wait * (run.tp - 1)
        fore, back = (count * (each * (1 - part) + wait) for part in hidden)
    if run.cp > 1:
        group = fabric(cluster, run.cp, stride=run.tp)
        moved = collective(ALL_GATHER, 2.0 * run.kv_width * run.tokens * run.cp * run.wide, group).seconds
        for_it = price(work.attention(run), cluster.device, run.stack, keys=run.seq)
        fore += max(0.0, moved - for_it) + moved * run.stack.context_shown
        back += max(0.0, 2 * moved - 2.5 * for_it) + 2 * moved * run.stack.context_shown
    if run.experts and run.ep > 1:
        group = fabric(cluster, run.ep, stride=run.tp * run.cp)
        routed = 2 * collective(ALL_TO_ALL, nbytes * run.topk, group).seconds * (1 - run.stack.expert_hidden)
        fore, back = fore + routed, back + routed
    return fore, back


# ---------------------------------------------------------------- the step


def step(run: Training, cluster: Cluster) -> Step:
    """One step of training, on a cluster whose device and links are known."""
    layer = layer_seconds(run, cluster)
    if not run.vocab and run.layers == 1:
        seconds = run.micros * (layer.forward + layer.backward)
        return Step(seconds=seconds, layers=seconds, head=0.0, update=0.0, gradients=0.0, bubble=0.0)
    return _on_a_timeline(run, layer, cluster) if run.pp == 1 else _in_stages(run, layer, cluster)


def _heads(run: Training, cluster: Cluster) -> tuple[float, float, float]:
    """Embedding (both passes), head forward, head backward."""
    device = cluster.device
    table = total(work.embedding(run), run, device)
    ends = [total(works, run, device) for works in (work.head_forward(run), work.head_backward(run))]
    if run.tp > 1:
        nbytes = float(run.tokens * run.hidden * run.wide)
        each = collective(ALL_REDUCE, nbytes, fabric(cluster, run.tp)).seconds
        table, ends[1] = table + each, ends[1] + each
    return table, ends[0], ends[1]


def _update(run: Training, held: float, cluster: Cluster) -> float:
    """The optimiser on `held` parameters of a device, before they are sharded."""
    mine = held / (run.sharded if run.shard != "none" else 1)
    if "optim" in run.offload.lower() or "cpu" in run.offload.lower():
        return mine * (HOST_OPTIMIZER_BYTES / HOST_BYTES_PER_SECOND + _over_host_link(cluster))
    return total(work.update(run, mine), run, cluster.device)


HOST_OPTIMIZER_BYTES = 28.0
"""Per parameter of an optimiser on the host: four tensors read, three written, in float32; counted."""
HOST_BYTES_PER_SECOND = 40e9
"""Of one device's share of host memory during such an update; assumed: a few hundred GB/s for eight devices."""


def _over_host_link(cluster: Cluster) -> float:
    """Seconds per parameter: its gradient down in float32 and its new value up in 16 bits."""
    if cluster.host_link is None:
        return 6 / 20e9
    return 6 * copy(1e9, cluster.host_link).seconds / 1e9


# ---------------------------------------------------------------- without a pipeline

NETWORK_DRAG = 0.2
"""Part of a stack's drag that is left where a ring runs over network cards alone: it moves a tenth of the bytes per
second through a device's memory, over fewer cores; assumed."""


def _on_a_timeline(run: Training, layer: Layer, cluster: Cluster) -> Step:
    """A micro-batch alone, each further one at its steady cost, and the update."""
    table, ahead, behind = _heads(run, cluster)
    wire = _Wire(run, cluster, work.layer_parameters(run), work.outside_parameters(run))
    head = table + ahead + behind
    drag = run.stack.drag * (1.0 if wire.group.local > 1 else NETWORK_DRAG)
    lines = [streams.simulate(_tasks(run, layer, head, wire, n), drag={streams.COLLECTIVES: drag}) for n in (1, 2)]
    late = 0.0 if run.stack.reduces_early else wire.late(run.layers)
    update = _update(run, work.parameters(run), cluster)
    each = lines[1].seconds - lines[0].seconds
    last = lines[0].seconds
    seconds = last + (run.micros - 1) * each + update + late
    busy = run.layers * (layer.forward + layer.backward) + head
    return Step(
        seconds=seconds, layers=busy - head, head=head, update=update,
        gradients=late + max(0.0, last - busy), bubble=max(0.0, 1 - run.micros * busy / seconds),
    )  # fmt: skip


def _tasks(run: Training, layer: Layer, head: float, wire: _Wire, micros: int) -> list[streams.Task]:
    """Micro-batches of blocks with their collectives; a gather starts one block ahead of its use, not earlier."""
    plan = _Plan(run.stack.host_seconds)
    for number in range(micros):
        reduces = run.stack.reduces_early and (wire.every_micro or number == micros - 1)
        gathers: dict[int, int] = {}

        def gather(block: int, gathers: dict[int, int] = gathers) -> None:
            if wire.gather and 0 <= block < run.layers and block not in gathers:
                gathers[block] = plan.add("all_gather", streams.COLLECTIVES, wire.gather, plan.computed)

        def compute(kind: str, block: int, cost: float, kernels: int, gathers: dict[int, int] = gathers) -> None:
            before = (gathers[block],) if block in gathers else ()
            plan.computed = (plan.add(kind, streams.COMPUTE, cost, before, kernels),)

        plan.add("all_gather", streams.COLLECTIVES, wire.root, plan.computed)
        gather(0)
        for block in range(run.layers):
            gather(block + 1)
            compute("forward", block, layer.forward + wire.copies, layer.kernels)
        if run.shard == "zero3":
            gathers.clear()
            gather(run.layers - 1)
        compute("head", -1, head, 20)
        for block in reversed(range(run.layers)):
            gather(block - 1)
            compute("backward", block, layer.backward + 2 * wire.copies, 2 * layer.kernels)
            if reduces:
                plan.add("reduce", streams.COLLECTIVES, wire.reduce, plan.computed)
        if reduces:
            plan.add("reduce", streams.COLLECTIVES, wire.root_reduce, plan.computed)
    if run.stack.reduces_early:
        plan.add("all_gather", streams.COLLECTIVES, wire.after(run.layers), (len(plan.tasks) - 1,))
    return plan.tasks


class _Plan:
    def __init__(self, host_seconds: float) -> None:
        self.tasks: list[streams.Task] = []
        self.host_seconds = host_seconds
        self.computed: tuple[int, ...] = ()
        """The last task on the compute stream."""

    def add(self, kind: str, resource: str, seconds: float, after: tuple[int, ...] = (), kernels: int = 1) -> int:
        self.tasks.append(streams.Task(kind, resource, seconds, after, kernels * self.host_seconds, kind))
        return len(self.tasks) - 1


class _Wire:
    """Seconds of data-parallel traffic, by what the shards are: for a block and for what stands outside blocks."""

    def __init__(self, run: Training, cluster: Cluster, block: int, root: int) -> None:
        self.run, self.block_parameters, self.root_parameters = run, block, root
        whole, size = run.dp * run.cp, run.sharded
        self.group = fabric(cluster, size if run.shard != "none" else whole, stride=run.tp)
        self.across = fabric(cluster, whole // size, stride=run.tp * size)
        self.size = size
        self.every_micro = run.shard in ("zero2", "zero3")
        self.reduce, self.root_reduce = self.reduced(block), self.reduced(root)
        self.gather = self.root = self.copies = 0.0
        if self.every_micro:
            self.gather, self.root = (self.gathered(count, run.stack.gather_bytes) for count in (block, root))
            if run.stack.shard_copies:
                self.copies = analytic.stream_seconds(block * 5, cluster.device, launches=2)

    def gathered(self, count: float, width: float) -> float:
        return collective(ALL_GATHER, count * width, self.group).seconds

    def reduced(self, count: float) -> float:
        width = self.run.stack.reduce_bytes
        if self.run.shard == "none" or (self.run.shard == "zero1" and self.run.stack.reduces_whole):
            return collective(ALL_REDUCE, count * width, self.group).seconds
        between = collective(ALL_REDUCE, count / self.size * width, self.across)
        return collective(REDUCE_SCATTER, count * width, self.group).seconds + between.seconds

    def after(self, blocks: int) -> float:
        """Gathering the parameters that the ranks updated in shards."""
        if self.run.shard != "zero1":
            return 0.0
        return self.gathered(blocks * self.block_parameters + self.root_parameters, 2)

    def late(self, blocks: int) -> float:
        """Everything at once, after the last backward."""
        return self.reduced(blocks * self.block_parameters + self.root_parameters) + self.after(blocks)


# ---------------------------------------------------------------- with a pipeline


def _in_stages(run: Training, layer: Layer, cluster: Cluster) -> Step:
    count = run.pp * run.chunks
    layers = partition(run.layers, count)
    table, ahead, behind = _heads(run, cluster)
    message, blocking = messages(run, cluster)
    issue = run.stack.host_seconds * layer.kernels
    stages = []
    for index, held in enumerate(layers):
        first, last = index == 0, index == count - 1
        forward = max(held * layer.forward, held * issue) + (table / 3 if first else 0.0) + (ahead if last else 0.0)
        inputs = held * (layer.inputs + layer.again) + (behind / 2 if last else 0.0)
        weights = held * layer.weights + (behind / 2 if last else 0.0) + (table * 2 / 3 if first else 0.0)
        inputs = max(inputs, 2 * held * issue - weights)
        stages.append(Stage(forward + blocking, inputs + blocking, weights))
    through = run_through(stages, message, micros=run.micros, ranks=run.pp, schedule=run.schedule)
    busiest = max(sum(stage.total for stage in stages[rank :: run.pp]) for rank in range(run.pp))
    gradients, update = _at_the_end(run, layers, cluster)
    seconds = through + gradients + update
    return Step(
        seconds=seconds, layers=max(layers) * (layer.forward + layer.backward) * run.chunks,
        head=ahead + behind, update=update, gradients=gradients, bubble=1 - run.micros * busiest / seconds,
    )  # fmt: skip


def messages(run: Training, cluster: Cluster) -> tuple[list[float], float]:
    """Seconds of a message over each boundary between stages, and what both ends lose while it travels."""
    stride = max(1, run.world // run.pp)
    domain = cluster.devices_per_domain or cluster.devices_per_node
    nbytes = run.tokens * run.hidden * run.wide / (run.tp if run.stack.splits_messages else 1)
    near = collective(P2P, nbytes, fabric(cluster, 2, stride=min(stride, max(1, domain // 2)))).seconds
    far = collective(P2P, nbytes, fabric(cluster, 2, stride=domain)).seconds if cluster.nodes > 1 else near
    found = [
        far if (rank % run.pp + 1) * stride // domain != rank % run.pp * stride // domain else near
        for rank in range(run.pp * run.chunks)
    ]
    return found, sum(found) / len(found) * run.stack.message_shown


def _at_the_end(run: Training, layers: list[int], cluster: Cluster) -> tuple[float, float]:
    """Gradients' traffic that backward does not hide, and the update, of the rank that holds most."""
    table = work.outside_parameters(run)
    ends = table if run.stack.tied else table / 2
    found = []
    for rank in range(run.pp):
        held = sum(layers[rank :: run.pp])
        root = ends if rank in (0, run.pp - 1) else 0
        wire = _Wire(run, cluster, work.layer_parameters(run), round(root))
        mine = held * work.layer_parameters(run) + root
        shown = 1 - run.stack.gradients_hidden
        found.append((wire.late(held) * shown, _update(run, mine, cluster)))
    return max(found, key=sum)
