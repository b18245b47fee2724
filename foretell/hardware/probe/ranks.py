"""Under torchrun: collectives by size and every pair of ranks, merged over the nodes into one cluster.

Every rank calls `probe_ranks`; rank 0 gets what was found, the others None. `bytes` of a collective is the larger
buffer of one rank: what all_gather makes, what reduce_scatter takes.
"""

from __future__ import annotations

import datetime
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foretell.errors import UserError
from foretell.hardware import files
from foretell.hardware.links import with_links
from foretell.hardware.probe import journal, machine
from foretell.hardware.profile import About, Profile, journal_path
from foretell.hardware.this_machine import host_tiers
from foretell.hardware.types import Cluster, Device, Link
from foretell.units import KIB, MIB, gib

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = {
    "nccl": tuple(KIB * 4**power for power in range(10)),
    "gloo": tuple(KIB * 4**power for power in range(7)),
}
"""1 KiB to 256 MiB; through sockets and host memory to 4 MiB."""
PAIR_BYTES = {"nccl": 64 * MIB, "gloo": 4 * MIB}
PAIR_MESSAGES = {"nccl": 8, "gloo": 4}
PING_ROUNDS = 20
MOST_PAIRS = 2000
"""More pairs than that are not all measured: the rest get the median of their kind, and a note says so."""
CALL_BUDGET_SECONDS = {"nccl": 20e-3, "gloo": 60e-3}
TIMEOUT = datetime.timedelta(minutes=5)
_SOURCE = "measured by foretell probe"
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the name that this torch prefers."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """What the ranks found."""

    about: About
    cluster: Cluster
    backend: str
    collectives: tuple[dict[str, Any], ...]
    pairs: tuple[dict[str, Any], ...]
    """source, target, bytes_per_second, latency_seconds."""
    notes: tuple[str, ...] = ()


def probe_ranks(
    device: str = "auto", *, force: bool = False, progress: Callable[[str, float], None] = lambda doing, share: None
) -> MeasuredLinks | None:
    """Measure what joins the ranks; all of them call this. A GPU in use is refused unless `force`."""
    kind = machine.choose(device)
    if kind == "cuda" and not force:
        machine.refuse_busy()
    began_here = not dist.is_initialized()
    backend = _join(kind) if began_here else str(dist.get_backend())
    try:
        rank, facts = dist.get_rank(), _facts(kind)
        found, notes = [], []
        wanted = [(op, size) for op in COLLECTIVES for size in SIZES[backend]]
        for number, (op, size) in enumerate(wanted):
            progress(f"{op} of {size} bytes", 0.6 * number / len(wanted))
            row = _collective(op, size, kind, backend)
            if isinstance(row, str):
                notes.append(row)
            else:
                found.append({**row, "nodes": len({fact["node"] for fact in facts})})
        pairs = _all_pairs(kind, backend, progress)
        dist.barrier()
    finally:
        if began_here and dist.is_initialized():
            dist.destroy_process_group()
    if rank:
        return None
    order = sorted(range(len(facts)), key=lambda rank: (facts[rank]["node"], facts[rank]["local"], rank))
    cluster, more = merge([facts[rank] for rank in order], _renumbered(pairs, order))
    return MeasuredLinks(
        about=machine.about(kind), cluster=cluster, backend=backend, collectives=tuple(found),
        pairs=tuple(_renumbered(pairs, order)), notes=(*dict.fromkeys(notes), *more),
    )  # fmt: skip


def write(fabric: MeasuredLinks, out: str | Path) -> Path:
    """The cluster as a hardware file, whole or not at all, and beside it the rows as a journal."""
    target = Path(out)
    entries = [
        *(journal.JournalEntry("collective", 0.0, row) for row in fabric.collectives),
        *(journal.JournalEntry("pair", 0.0, row) for row in fabric.pairs),
        *(journal.JournalEntry("note", 0.0, {"text": text}) for text in fabric.notes),
    ]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        journal.write(journal.packed_path(journal_path(target)), fabric.about, entries)
        files.save(fabric.cluster, target)
    except OSError as error:
        raise UserError(
            f"the cluster could not be written to '{target}': {error.strerror}", "give --out another place"
        ) from None
    return target


def attached(profile: Profile, fabric: MeasuredLinks) -> Profile:
    """A device's profile with what joins several of it."""
    return replace(profile, collectives=fabric.collectives, links=fabric.cluster.matrix)


# ---------------------------------------------------------------- meeting


def _join(kind: str) -> str:
    """Meet the other ranks; the backend they speak through."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not set beside WORLD_SIZE", "start it with `torchrun ... -m foretell probe`"
        )
    if kind == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise UserError(
                f"rank {local} of this node has no GPU of its own: there are {torch.cuda.device_count()}",
                "give torchrun --nproc-per-node as many processes as GPUs",
            )
        torch.cuda.set_device(local)
    backend = "nccl" if kind == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the ranks could not meet: {' '.join(str(error).split())[:200]}", "check torchrun's address and port"
        ) from None
    return backend


def _facts(kind: str) -> list[dict[str, Any]]:
    """What every rank says of itself, in order of rank."""
    own = {
        "host": socket.gethostname(), "node": int(os.environ.get("GROUP_RANK", "-1")),
        "local": int(os.environ.get("LOCAL_RANK", "0")), "kind": kind, "device": machine.device_of(kind).to_dict(),
    }  # fmt: skip
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    kinds = sorted({fact["kind"] for fact in told})
    if len(kinds) > 1:
        raise UserError(
            f"some ranks have a GPU and others none ({', '.join(kinds)})", "give --device cpu to all of them"
        )
    hosts = list(dict.fromkeys(fact["host"] for fact in told))
    for fact in told:
        if fact["node"] < 0:
            fact["node"] = hosts.index(fact["host"])
    return told


# ---------------------------------------------------------------- collectives


def _collective(op: str, size: int, kind: str, backend: str) -> dict[str, Any] | str:
    """Seconds of one collective of one size, of the slowest rank; or why there are none."""
    world = dist.get_world_size()
    count = max(1, size // 4 // world) * world
    whole = torch.ones(count, device=kind)
    part = torch.ones(count // world, device=kind)
    call: Callable[[], Any] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _GATHER(whole, part),
        "reduce_scatter": lambda: _SCATTER(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }[op]
    try:
        call()
        first = _slowest(_timed(call, 1, kind), kind)
        rounds = max(2, min(50, int(CALL_BUDGET_SECONDS[backend] / 3 / first)))
        bursts = [_slowest(_timed(call, rounds, kind), kind) for _ in range(3)]
    except (RuntimeError, NotImplementedError) as error:
        return f"{op} does not work through {backend} here: {' '.join(str(error).split())[:100]}"
    middle = statistics.median(bursts)
    return {
        "op": op, "bytes": 4 * count, "ranks": world, "backend": backend, "seconds": float(f"{middle:.4g}"),
        "spread": round((max(bursts) - min(bursts)) / middle, 3),
    }  # fmt: skip


def _timed(call: Callable[[], Any], rounds: int, kind: str) -> float:
    dist.barrier()
    _wait(kind)
    before = time.perf_counter()
    for _ in range(rounds):
        call()
    _wait(kind)
    return (time.perf_counter() - before) / rounds


def _slowest(seconds: float, kind: str) -> float:
    """The longest of all ranks, so that all of them decide alike."""
    value = torch.tensor([seconds], dtype=torch.float64, device=kind)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- pairs


def _all_pairs(kind: str, backend: str, progress: Callable[[str, float], None]) -> list[dict[str, Any]]:
    """One pair at a time, so that no other is in its way; known to all ranks in the end."""
    own: list[dict[str, Any]] = []
    pairs = pairs_to_measure(dist.get_world_size())
    for number, (source, target) in enumerate(pairs):
        progress(f"rank {source} to rank {target}", 0.6 + 0.4 * number / len(pairs))
        dist.barrier()
        if dist.get_rank() in (source, target):
            found = _pair(source, target, kind, backend)
            own += [found] if found else []
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return [row for rows in told for row in rows]


def pairs_to_measure(world: int) -> list[tuple[int, int]]:
    """Every ordered pair, or as many as there is time for, drawn the same way on every rank."""
    pairs = [(source, target) for source in range(world) for target in range(world) if source != target]
    return pairs if len(pairs) <= MOST_PAIRS else sorted(random.Random(world).sample(pairs, MOST_PAIRS))


def _pair(source: int, target: int, kind: str, backend: str) -> dict[str, Any] | None:
    """Bytes per second from one rank to another and seconds of a small message; the receiver tells."""
    large, small = torch.ones(PAIR_BYTES[backend] // 4, device=kind), torch.ones(2, device=kind)
    receives = dist.get_rank() == target
    other = source if receives else target

    def pass_on(tensor: torch.Tensor, incoming: bool) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv if incoming else dist.isend, tensor, other)]):
            work.wait()
        _wait(kind)

    def ping() -> None:
        pass_on(small, receives)
        pass_on(small, not receives)

    ping()
    before = time.perf_counter()
    for _ in range(PING_ROUNDS):
        ping()
    latency = (time.perf_counter() - before) / PING_ROUNDS / 2
    pass_on(large, receives)
    pass_on(small, receives)
    marks = [time.perf_counter()]
    for _ in range(PAIR_MESSAGES[backend]):
        pass_on(large, receives)
        marks.append(time.perf_counter())
    if not receives:
        return None
    seconds = statistics.median(after - before for before, after in pairwise(marks))
    rate = large.numel() * 4 / max(seconds - latency, seconds / 2)
    return {
        "source": source, "target": target, "bytes_per_second": float(f"{rate:.4g}"),
        "latency_seconds": float(f"{latency:.4g}"),
    }  # fmt: skip


def _renumbered(pairs: list[dict[str, Any]], order: list[int]) -> list[dict[str, Any]]:
    """Ranks as a cluster numbers them: node by node."""
    place = {rank: position for position, rank in enumerate(order)}
    moved = ({**row, "source": place[row["source"]], "target": place[row["target"]]} for row in pairs)
    return sorted(moved, key=lambda row: (row["source"], row["target"]))


# ---------------------------------------------------------------- one cluster


def merge(facts: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> tuple[Cluster, list[str]]:
    """Nodes side by side as one cluster with its matrix of rates; `facts` and `pairs` node by node."""
    nodes = [list(group) for _, group in groupby(facts, key=lambda fact: fact["node"])]
    groups = [list(group) for _, group in groupby(nodes, key=lambda node: (node[0]["device"]["name"], len(node)))]
    node_of = [index for index, node in enumerate(nodes) for _ in node]
    matrix, notes = _matrix(len(facts), pairs, node_of)
    inside = [row for row in pairs if node_of[row["source"]] == node_of[row["target"]]]
    across = [row for row in pairs if node_of[row["source"]] != node_of[row["target"]]]
    parts = []
    for group in groups:
        device, sentence = _device(group[0])
        plain = Cluster(device=device, nodes=len(group), devices_per_node=len(group[0]), tiers=host_tiers(), notes=sentence)
        linked = with_links(plain)
        parts.append(replace(linked, intra=_measured(linked.intra, inside), inter=_measured(linked.inter, across)))
    notes.insert(
        0,
        f"probed with {len(facts)} ranks on {len(nodes)} node{'s' if len(nodes) > 1 else ''}; the matrix of rates is measured",
    )
    if len(parts) == 1:
        return replace(parts[0], matrix=matrix, notes=(*parts[0].notes, *notes)), notes
    return Cluster.side_by_side(tuple(parts), matrix=matrix, notes=tuple(notes)), notes


def _device(node: list[dict[str, Any]]) -> tuple[Device, tuple[str, ...]]:
    """The device of a node's ranks; processes that share a CPU have a share of its memory each."""
    data = dict(node[0]["device"])
    capability = data["compute_capability"]
    device = Device(**{**data, "compute_capability": tuple(capability) if capability else None})
    if device.backend != "cpu" or len(node) == 1:
        return device, ()
    share = device.memory_bytes // len(node)
    device = device.with_memory(share, f"RAM of the machine, shared by {len(node)} ranks")
    return device, (f"{len(node)} ranks share one CPU: {gib(share)} of memory each",)


def _measured(link: Link | None, pairs: list[dict[str, Any]]) -> Link | None:
    """The link with the latency that was seen; its rate stays nominal, the matrix has the measured ones."""
    if link is None or not pairs:
        return link
    latency = statistics.median(row["latency_seconds"] for row in pairs)
    return replace(link, latency_seconds=latency, sources={**link.sources, "latency_seconds": _SOURCE})


def _matrix(
    count: int, pairs: list[dict[str, Any]], node_of: list[int]
) -> tuple[tuple[tuple[float, ...], ...], list[str]]:
    """Rates from rank to rank; a pair that was not measured has the median of those like it."""
    known = {(row["source"], row["target"]): row["bytes_per_second"] for row in pairs}
    like: dict[bool, list[float]] = {}
    for (source, target), rate in known.items():
        like.setdefault(node_of[source] == node_of[target], []).append(rate)
    usual = {same: statistics.median(rates) for same, rates in like.items()}
    fallback = min(usual.values())

    def cells(source: int) -> Iterator[float]:
        for target in range(count):
            same = node_of[source] == node_of[target]
            yield 0.0 if source == target else known.get((source, target), usual.get(same, fallback))

    wanted = count * (count - 1)
    notes = (
        [f"{len(known)} of {wanted} pairs were measured; the others are assumed to be like them"]
        if len(known) < wanted
        else []
    )
    return tuple(tuple(cells(source)) for source in range(count)), notes
