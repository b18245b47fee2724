"""Why this plan: what holds it back, where each other one loses, and what other hardware would change.

`Again` searches once more for other hardware or other wishes; every row of the what-if table comes from such a search, none
from a rule of thumb. What would help where nothing fits is in `relax`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from foretell.hardware import parse
from foretell.hardware.types import Cluster, Link
from foretell.search.estimate.plan import Layout
from foretell.search.solve.front import Point
from foretell.search.space.constraints import SearchConstraints
from foretell.search.space.preferences import ALIKE, lost_though_as_fast
from foretell.units import GIB, gib

OTHERS = {"cuda": ("A100", "H100", "H200", "B200"), "rocm": ("MI300X", "MI355X", "H200")}
"""Backend → other devices that a what-if looks at."""
MORE_MEMORY, FASTER = 1.5, 2.0

REASONS = {
    "compute": "its matmuls are slower", "attention": "attention takes longer", "memory": "it moves more bytes",
    "recompute": "it computes blocks twice", "bubble": "ranks wait for each other", "host": "it waits for the host",
    "update": "the optimizer has more to do on each rank",
}  # fmt: skip
_AXES = {
    "tp": "tensor ranks", "dp_shard": "shards", "dp_replicate": "replicas", "pp": "stages", "cp": "ranks that share a sample",
    "ep": "ranks that share experts",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """One change, and the best plan with it."""

    change: str
    """one more node, 50 % more memory, ..."""
    point: Point | None
    """None where nothing fits, or nothing uses it."""
    faster: float | None = None
    """Tokens a second against the best plan as things are: 0.1 is a tenth more."""
    cheaper: float | None = None
    """Dollars a token less, as a share; None where no price is known."""
    words: str = ""

    def to_json(self) -> dict[str, Any]:
        point = self.point
        return {
            "change": self.change, "plan": told(point.layout) if point else None, "faster": self.faster,
            "cheaper": self.cheaper, "seconds": point.seconds if point else None,
            "memory_bytes": point.memory_bytes if point else None, "words": self.words,
        }  # fmt: skip


Again = Callable[[Cluster, SearchConstraints], Point | None]
"""The best plan for other hardware or other wishes."""


# ---------------------------------------------------------------------- words


def told(layout: Layout) -> str:
    """A layout in a few words."""
    mesh = layout.mesh
    axes = [f"{axis} {getattr(mesh, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if getattr(mesh, axis) > 1]
    words = [" × ".join(axes) or "one device", f"micro-batch {layout.micro_batch}"]
    words += [f"accumulate {layout.accumulate}"] if layout.accumulate > 1 else []
    words += [layout.precision] if layout.precision != "bf16-mixed" else []
    words += _treated(layout.modes)
    if mesh.pp > 1:
        words.append(f"{mesh.pp * layout.interleave} stages, {layout.schedule}")
    words += [f"compile {layout.compile}"] if layout.compile != "none" else []
    if layout.reshard is not True and mesh.dp_shard * mesh.cp > 1:
        words.append(f"reshard_after_forward={layout.reshard}")
    return ", ".join(words)


def _treated(modes: Iterable[str]) -> Iterator[str]:
    seen = list(modes)
    for mode, words in (("selective", "selectively"), ("recompute", "")):
        count = seen.count(mode)
        if count:
            which = "all blocks" if count == len(seen) else f"{count} of {len(seen)} blocks"
            yield f"recompute {which} {words}".rstrip()


def binds(point: Point) -> tuple[str, ...]:
    """What holds a plan back, the most first, and how much memory is left."""
    parts = {name: seconds for name, seconds in _apart(point).items() if seconds > 0}
    total = sum(parts.values()) or 1.0
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    found = [f"{_part(name)} {seconds / total:.0%} of the step" for name, seconds in ordered[:4] if seconds > 0.03 * total]
    left = point.capacity_bytes - point.memory_bytes
    stages = point.quick.stage_memory
    where = f", rank {stages.index(max(stages))} of the pipeline has least" if len(stages) > 1 else ""
    return (*found, f"memory: {gib(left)} of {gib(point.capacity_bytes)} left on each device{where}"
            + (": tight" if point.tight else ""))  # fmt: skip


def _apart(point: Point) -> dict[str, float]:
    """Parts of a step that add up: what is computed again is part of the products and of the rest."""
    parts = dict(point.quick.parts)
    again = parts.get("recompute", 0.0)
    main = parts.get("compute", 0.0) + parts.get("attention", 0.0) + parts.get("memory", 0.0)
    for name in ("compute", "attention", "memory"):
        if name in parts and main > 0:
            parts[name] -= again * parts[name] / main
    return parts


def _part(name: str) -> str:
    axis, _, kind = name.rpartition(" ")
    if kind == "communication" and axis:
        return f"messages between {_AXES.get(axis, axis)}"
    known = {"compute": "products", "memory": "moving bytes in the device's memory", "recompute": "computing again",
             "bubble": "waiting for other stages", "host": "waiting for the host", "update": "the optimizer",
             "communication": "messages"}  # fmt: skip
    return known.get(kind, name)


def why_lost(best: Point, other: Point, objective: str = "throughput") -> str:
    """Where a plan loses against the best, for each token."""
    slower = 1 - other.per_second / best.per_second
    if objective == "smallest" and other.devices > best.devices:
        return f"takes {other.devices} devices instead of {best.devices}"
    if objective in ("cost", "energy"):
        ours, theirs = (p.dollars if objective == "cost" else p.joules for p in (best, other))
        if ours and theirs:
            more = (theirs / other.per_step) / (ours / best.per_step) - 1
            if more > ALIKE / 2:
                return f"{more:.0%} {'dearer' if objective == 'cost' else 'more energy'}"
    if objective == "latency" and other.seconds > best.seconds * (1 + ALIKE / 2):
        return f"a step takes {other.seconds / best.seconds - 1:.0%} longer"
    if slower < ALIKE / 2:
        batch = other.layout.global_batch / best.layout.global_batch
        return lost_though_as_fast(max(0.0, -slower), tight=other.tight and not best.tight, batch=batch)
    theirs_, ours_ = _apart(other), _apart(best)
    parts = {
        name: theirs_.get(name, 0.0) / other.per_step - ours_.get(name, 0.0) / best.per_step
        for name in {*theirs_, *ours_}
    }
    name = max(parts, key=lambda key: parts[key], default="compute")
    return f"{slower:.0%} slower: {_reason(name)}"


def _reason(name: str) -> str:
    axis, _, kind = name.rpartition(" ")
    if kind == "communication":
        return f"it waits for messages between {_AXES.get(axis, axis)}" if axis else "it waits for messages"
    return REASONS.get(kind, name)


# ---------------------------------------------------------------------- what if


def what_ifs(cluster: Cluster, wishes: SearchConstraints, best: Point, again: Again) -> tuple[WhatIf, ...]:
    """One more device or node, more memory, faster links, other devices: the best plan with each."""
    return tuple(_tried(change, other, wishes, best, again) for change, other in changes(cluster))


def _tried(change: str, cluster: Cluster, wishes: SearchConstraints, best: Point, again: Again) -> WhatIf:
    point = again(cluster, wishes)
    if point is None:
        count = cluster.count
        words = f"no plan uses {count} devices evenly" if count != best.devices else "nothing fits"
        return WhatIf(change=change, point=None, words=words)
    faster = point.per_second / best.per_second - 1
    if cluster.count > best.devices and faster < 0:
        return WhatIf(change=change, point=best, faster=0.0, cheaper=0.0, words=f"no gain: {told(point.layout)} at best")
    cheaper = None
    if point.dollars and best.dollars:
        cheaper = 1 - (point.dollars / point.per_step) / (best.dollars / best.per_step)
    same = replace(point.layout, modes=()) == replace(best.layout, modes=())
    words = "hardly a change" if abs(faster) < ALIKE else f"{abs(faster):.0%} {'faster' if faster > 0 else 'slower'}"
    words += "" if same and point.layout.modes == best.layout.modes else f": {told(point.layout)}"
    return WhatIf(change=change, point=point, faster=faster, cheaper=cheaper, words=words)


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Other hardware near this."""
    if cluster.groups:
        return
    name, count = cluster.device.name, cluster.count
    if cluster.nodes > 1:
        yield f"one more node ({count + cluster.devices_per_node} devices)", sized(cluster, nodes=cluster.nodes + 1)
    else:
        yield f"one more device ({count + 1})", sized(cluster, each=cluster.devices_per_node + 1)
    yield f"twice the devices ({2 * count})", doubled(cluster)
    yield f"{MORE_MEMORY - 1:.0%} more memory on each device", with_memory(cluster, MORE_MEMORY)
    if count > 1 and cluster.intra is not None:
        yield "links inside a node twice as fast", replace(cluster, intra=_faster(cluster.intra), matrix=None)
    if cluster.nodes > 1 and cluster.inter is not None:
        yield "links between nodes twice as fast", replace(cluster, inter=_faster(cluster.inter), matrix=None)
    for other in OTHERS.get(cluster.device.backend, ()):
        found = as_other(cluster, other)
        if found is not None and found.device.name != name:
            yield f"{found.device.name} instead of {name}", found


def sized(cluster: Cluster, *, nodes: int | None = None, each: int | None = None) -> Cluster:
    nodes, each = nodes or cluster.nodes, each or cluster.devices_per_node
    cards = max(cluster.cards_per_node, each) if cluster.cards_per_node >= cluster.devices_per_node else cluster.cards_per_node
    found = replace(cluster, nodes=nodes, devices_per_node=each, matrix=None, cards_per_node=cards)
    if (nodes > 1 and found.inter is None) or (each > 1 and found.intra is None):
        known = parse(f"{nodes}x{each}x{cluster.device.name}")
        found = replace(found, inter=found.inter or known.inter, intra=found.intra or known.intra, cards_per_node=known.cards_per_node)
    return found


def doubled(cluster: Cluster, times: int = 2) -> Cluster:
    """So many times the devices: in the same node up to as many as are usual, then in more nodes."""
    each = cluster.devices_per_node
    if cluster.nodes == 1 and each * times <= max(each, cluster.device.usual_per_node):
        return sized(cluster, each=each * times)
    return sized(cluster, nodes=cluster.nodes * times)


def with_memory(cluster: Cluster, times: float) -> Cluster:
    device = cluster.device
    size = int(device.memory_bytes * times) // GIB * GIB if device.memory_bytes > 4 * GIB else int(device.memory_bytes * times)
    sources = {**device.sources, "memory_bytes": "assumed: what if"}
    larger = replace(device, memory_bytes=size, memory_nominal_bytes=max(size, device.memory_nominal_bytes), sources=sources)
    return replace(cluster, device=larger)


def _faster(link: Link) -> Link:
    pair = None if link.pair_bytes_per_second is None else link.pair_bytes_per_second * FASTER
    return replace(link, bytes_per_second=link.bytes_per_second * FASTER, pair_bytes_per_second=pair,
                   sources={**link.sources, "bytes_per_second": "assumed: what if"})  # fmt: skip


def as_other(cluster: Cluster, name: str) -> Cluster | None:
    """The same shape with other devices, joined by what is usual for them; between nodes as it is."""
    found = parse(f"{cluster.nodes}x{cluster.devices_per_node}x{name}")
    if cluster.inter is not None and cluster.nodes > 1:
        found = replace(found, inter=cluster.inter, cards_per_node=cluster.cards_per_node)
    return found


# ---------------------------------------------------------------------- how plans differ


def differs(ours: Layout, theirs: Layout) -> tuple[str, ...]:
    """How two layouts differ, field by field, the first against the second."""
    found = []
    for axis in ("tp", "cp", "ep", "pp", "dp_replicate", "dp_shard"):
        a, b = getattr(ours.mesh, axis), getattr(theirs.mesh, axis)
        if a != b:
            found.append(f"{axis} {a} instead of {b}")
    for name, words in (("micro_batch", "micro-batch"), ("schedule", "schedule"), ("interleave", "stages on each rank"),
                        ("compile", "compile"), ("reshard", "reshard")):  # fmt: skip
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            found.append(f"{words} {a} instead of {b}")
    a, b = list(_treated(ours.modes)), list(_treated(theirs.modes))
    if a != b:
        found.append(f"{' and '.join(a) or 'every block kept'} instead of {' and '.join(b) or 'every block kept'}")
    return tuple(found)
