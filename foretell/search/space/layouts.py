"""Which plans there are: generators, each from a layout to layouts, put one behind the other.

    worlds ─► meshes ─► batches ─► schedules ─► compiles ─► reshards            `every`
              tensor axis inside a node; context; pipeline; data axes: sharded inside a level, replicated across it; experts

A layout here has no cuts and no residency yet: `search.fill` finds these exactly for each. What no plan may say is not
generated; a test holds all that is against `plan.legal`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd

from foretell.hardware.types import Cluster
from foretell.plan.facts import too_old_to_compile
from foretell.plan.legal import SPLIT_BACKWARD, micro_batches_allowed
from foretell.plan.precision import worth_trying
from foretell.plan.types import Mesh
from foretell.search.estimate.plan import Layout
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.preferences import FILL, LARGEST_MICRO_BATCH

FEW = 8
"""Devices up to which plans that leave some idle are tried, whatever is asked for."""
MOST_STAGES = 64
"""Ranks of a pipeline."""
LOOPS = (2, 3, 4, 6, 8)
"""Stages on each rank of a looped schedule."""
MOST_SHARDS = 8
"""Ways to divide the data ranks into shards and replicas, for each number of them."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What plans are made for."""

    cluster: Cluster
    blocks: int
    wishes: SearchConstraints
    tensor: tuple[int, ...] = (1,)
    """Degrees of tensor parallelism that the model can be split into."""
    context: tuple[int, ...] = (1,)
    """Ranks that may share the positions of a sample."""
    experts: tuple[int, ...] = (1,)
    """Ranks that may share the experts of a layer."""
    tied_inside: bool = False
    """Whether some block uses one weight twice, which a backward in two passes does not allow."""

    @property
    def inside(self) -> int:
        """Devices that the fast links join."""
        return min(self.cluster.count, self.cluster.devices_per_domain or self.cluster.devices_per_node)


Generator = Callable[[Room, Layout], Iterable[Layout]]


def every(room: Room, *generators: Generator) -> Iterator[Layout]:
    """All layouts: those of the first generator, each taken further by the next."""
    asked = room.wishes.precision
    layouts: Iterable[Layout] = [
        Layout(mesh=Mesh(), micro_batch=1, precision=precision) for precision in ((asked,) if asked else worth_trying(room.cluster))
    ]
    for generator in generators or (meshes, batches, schedules):
        layouts = chain.from_iterable(map(lambda layout, g=generator: g(room, layout), layouts))  # type: ignore[misc]
    return iter(layouts)


# ---------------------------------------------------------------------- meshes


def worlds(room: Room) -> tuple[int, ...]:
    """Numbers of devices to use: all of them, unless fewer may serve as well. A small model may be faster on fewer."""
    count, wishes = room.cluster.count, room.wishes
    if wishes.ranks:
        return wishes.ranks
    if not wishes.any_size:
        return tuple(divisors(count)) if count <= FEW and not wishes.fixed and not room.cluster.groups else (count,)
    node, nodes = room.cluster.devices_per_node, room.cluster.nodes
    fewest = wishes.objective == "smallest"  # then every number of devices of a node counts, and every number of a few nodes
    inside = (list(range(1, node + 1)) if fewest else divisors(node)) if not room.cluster.groups else []
    several = [node * size for size in range(2, nodes + 1) if size & (size - 1) == 0 or nodes % size == 0 or (fewest and size <= FEW)]
    return tuple(sorted({*inside, *several, count}))


def meshes(room: Room, layout: Layout) -> Iterator[Layout]:
    """Every way to lay ranks out along the axes, the fixed degrees as given."""
    if room.wishes.meshes:
        yield from (replace(layout, mesh=mesh) for mesh in room.wishes.meshes)
        return
    fixed = room.wishes.fixed
    for world in worlds(room):
        for tensor in _given(fixed.get("tp"), [t for t in room.tensor if room.inside % t == 0]):
            for context in _given(fixed.get("cp"), list(room.context)):
                inner = tensor * context
                for stages in _given(fixed.get("pp"), _stages(room, world // inner) if world % inner == 0 else []):
                    if world % (inner * stages):
                        continue
                    for replicas, shards in _data(room, world // (inner * stages), inner):
                        mesh = Mesh(pp=stages, tp=tensor, cp=context, dp_replicate=replicas, dp_shard=shards)
                        yield from (replace(layout, mesh=one) for one in _expert_ways(room, mesh))


def _expert_ways(room: Room, mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with experts spread over some of its shards; not with layers or positions split, nor stages."""
    for ranks in _given(room.wishes.fixed.get("ep"), list(room.experts)):
        if ranks == 1 or (mesh.tp == mesh.cp == mesh.pp == 1 and mesh.dp_shard % ranks == 0):
            yield replace(mesh, ep=ranks)


def _stages(room: Room, rest: int) -> list[int]:
    if room.blocks < 2:
        return [1]
    return [size for size in divisors(rest) if size <= min(room.blocks, MOST_STAGES)]


def _data(room: Room, data: int, inner: int) -> list[tuple[int, int]]:
    """Replicas and shards: all of one kind, or shards inside a node or some nodes and replicas across them; `inner` ranks of
    tensor and context axes lie side by side."""
    fixed = room.wishes.fixed
    if "dp_replicate" in fixed or "dp_shard" in fixed:
        shards = fixed.get("dp_shard") or (data // fixed["dp_replicate"] if data % fixed["dp_replicate"] == 0 else 0)
        replicas = fixed.get("dp_replicate") or (data // shards if shards and data % shards == 0 else 0)
        return [(replicas, shards)] if replicas * shards == data else []
    node = gcd(data, max(1, room.inside // inner))
    sizes = [size for size in divisors(data) if size in (1, data) or size % node == 0]
    if len(sizes) > MOST_SHARDS:  # the ends, and some in between at even ratios
        step = (len(sizes) - 1) / (MOST_SHARDS - 1)
        sizes = sorted({sizes[round(place * step)] for place in range(MOST_SHARDS)} | {node})
    return [(data // size, size) for size in reversed(sizes)]


def _given(value: int | None, otherwise: list[int]) -> list[int]:
    return otherwise if value is None else [value]


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


# ---------------------------------------------------------------------- batches


def batches(room: Room, layout: Layout) -> Iterator[Layout]:
    for micro, accumulate in micro_batches(room.wishes, layout.mesh):
        yield replace(layout, micro_batch=micro, accumulate=accumulate)


def micro_batches(wishes: SearchConstraints, mesh: Mesh, first: int = 1) -> list[tuple[int, int]]:
    """Micro-batches and how many of them make a step, smallest first; where the batch is free, a pipeline wants several."""
    wanted, data = wishes.global_batch, mesh.data
    most = LARGEST_MICRO_BATCH if wanted is None else min(wanted // data, LARGEST_MICRO_BATCH)
    sizes = _given(wishes.micro_batch, [first << power for power in range(most.bit_length()) if first << power <= most])
    if wanted is None:
        return [(size, 1 if mesh.pp == 1 else FILL * mesh.pp) for size in sizes]
    return [(size, wanted // (data * size)) for size in sizes if wanted % (data * size) == 0]


# ---------------------------------------------------------------------- schedules


def schedules(room: Room, layout: Layout) -> Iterator[Layout]:
    """How micro-batches go through the stages; without a pipeline the layout itself."""
    ranks, micro = layout.mesh.pp, layout.accumulate
    if ranks == 1:
        if room.wishes.schedule is None:
            yield layout
        return
    for schedule, loops in _loops(room, ranks):
        if room.wishes.schedule not in (None, schedule) or ranks * loops > room.blocks:
            continue
        if micro_batches_allowed(schedule, ranks, micro) and _worth(schedule, ranks, micro, room.wishes):
            held = layout.mesh.spread > 1 and schedule in SPLIT_BACKWARD
            yield replace(layout, schedule=schedule, interleave=loops, reshard=False if held else layout.reshard)


def _loops(room: Room, ranks: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    yield "gpipe", 1
    yield from (("interleaved-1f1b", loops) for loops in LOOPS)
    if not room.tied_inside:
        yield from (("zero-bubble", loops) for loops in (1, 2))
        yield "zero-bubble-v", 2


def _worth(schedule: str, ranks: int, micro: int, wishes: SearchConstraints) -> bool:
    """gpipe waits as long as 1f1b and holds more: it is for batches that 1f1b does not take, or who asks for it."""
    if schedule == "gpipe" and wishes.schedule is None:
        return micro < ranks
    return not (schedule == "zero-bubble-v" and micro < 2 * ranks)


# ---------------------------------------------------------------------- variants


def bare(layout: Layout) -> Layout:
    """Without cuts, residency and the choices that are varied."""
    held = layout.mesh.spread > 1 and layout.mesh.pp > 1 and layout.schedule in SPLIT_BACKWARD
    return replace(layout, cuts=(), modes=(), reshard=not held)


def compiles(room: Room, layout: Layout) -> Iterator[Layout]:
    """Compiled or not: a whole model on one device or with data ranks, blocks under the other axes."""
    mesh, asked = layout.mesh, room.wishes.compile
    ways = asked or (("none", "model") if mesh.world == 1 and not too_old_to_compile(room.cluster) else ("none",))
    for way in ways:
        if way != "none" and mesh.cp * mesh.ep > 1:
            continue
        whole = way == "model" and (mesh.pp > 1 or mesh.tp > 1)
        split = way != "none" and layout.schedule in SPLIT_BACKWARD and mesh.pp > 1
        if not whole and not split and not (way == "blocks" and not room.blocks):
            yield replace(layout, compile=way)


def reshards(room: Room, layout: Layout) -> Iterator[Layout]:
    """When gathered parameters are given back: after forward, never, or to ranks of the same node."""
    yield layout
    mesh = layout.mesh
    shards = mesh.dp_shard * mesh.cp
    if shards == 1 or layout.reshard is False:
        return
    yield replace(layout, reshard=False)
    node = gcd(shards, max(1, room.inside // mesh.tp))
    if 1 < node < shards and mesh.ep == 1:
        yield replace(layout, reshard=node)
