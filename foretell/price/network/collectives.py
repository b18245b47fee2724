"""Seconds of a collective: by what it does, how large it is, and what joins the devices.

    seconds = latency(algorithm, protocol, ranks, nodes) + bytes on the wire / rate the library reaches

The forms follow what NCCL publishes about its own choice: a ring, a tree, or reduction in the switch (NVLS), each
with up to three protocols: LL (low latency, half the bandwidth), LL128 (NVLink alone) and Simple. Small messages
take the one with the least latency, large ones the one with the most bandwidth, so that efficiency grows with
size as it does in practice. Across nodes one ring visits every node once in and once out over all network cards:
its rate is the lower of what a device and what the cards of a node carry.

The cheapest algorithm is taken and named. Rates of links are nominal; `REACHED` says which part of them a library
reaches, with where that is known from. Inside a node of a device whose collectives are in a public table (`hardware.wires`), the
table answers; the formulas go on from it to more ranks and nodes than it has. Nothing here was measured on several devices by
this project: without a table or a measured matrix of rates the answer says "assumed".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from typing import NamedTuple

from foretell.hardware import wires
from foretell.hardware.reached import RateFraction, by_ring, by_switch, crossing, same_wires
from foretell.hardware.types import Cluster, Link
from foretell.hardware.wires import Wires
from foretell.quantities import ASSUMED, MEASURED

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ALL_TO_ALL, BROADCAST, P2P = "all_to_all", "broadcast", "p2p"
OPERATIONS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST, P2P)
REACHED, SWITCH_REDUCES = by_ring(), by_switch()


class Protocol(NamedTuple):
    """Part of the ring's rate, and seconds of start-up and of one hop, as in NCCL's tuning tables (microseconds)."""

    name: str
    fraction: float
    base: float
    ring_hop: Mapping[str, float]
    tree_hop: Mapping[str, float]


PROTOCOLS = (
    Protocol("LL", 0.5, 6.6, {"nvlink": 0.6, "pcie": 1.0, "net": 2.7}, {"nvlink": 0.6, "pcie": 1.0, "net": 5.0}),
    Protocol("LL128", 0.92, 14.0, {"nvlink": 1.9, "pcie": 2.5, "net": 4.0}, {"nvlink": 1.25, "pcie": 1.9, "net": 8.5}),
    Protocol("Simple", 1.0, 8.4, {"nvlink": 3.4, "pcie": 5.7, "net": 14.0}, {"nvlink": 4.0, "pcie": 4.0, "net": 14.0}),
)
LL_CEILING = 0.30
"""LL carries no more than this part of a link's nominal rate (NCCL: 88 of 300, 141 of 450 GB/s) ..."""
LL_NETWORK_CEILING = 35e9
"""... and this many bytes per second once it crosses nodes."""
NET_OVERHEAD = 1.0
"""Microseconds the host adds to a network step; three times that for Simple."""
LARGE = 64 * 2**20
"""Bytes by which fabrics are compared."""
LARGEST = 512 * 2**20
"""Bytes by which a table's rate is told."""
NVLS_START = 60.0
"""Microseconds before a reduction in the switch runs at full rate: NCCL counts 25, and a public table of eight
GPUs (121 us for 16 MiB, 195 us for 32 MiB) asks for about 35 more."""


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What joins the ranks of one group."""

    local: int
    """Ranks of the group inside one domain: a node, or a rack that one switch joins."""
    domains: int
    intra: Link | None
    inter: Link | None
    network_bytes_per_second: float
    """Nominal, one direction, of the cards that the group's ranks in one domain have for themselves."""
    measured_intra: float | None = None
    measured_inter: float | None = None
    """Bytes per second of one device, where a matrix of rates was measured."""
    table: Wires | None = None
    """Collectives of one node, where somebody has measured them."""
    ring_crowding: float = 1.0
    all_crowding: float = 1.0
    """How many times longer a ring, or an exchange of all with all, takes through switches that pass on less than they take in."""

    @property
    def ranks(self) -> int:
        return self.local * self.domains

    @property
    def provenance(self) -> str:
        shown = self.table is not None and self.table.measured and self.local <= self.table.most(ALL_GATHER)
        known = 0.0 if self.local == 1 or shown else self.measured_intra
        across = self.measured_inter if self.domains > 1 else 0.0
        return ASSUMED if known is None or across is None else MEASURED

    def inside(self) -> float:
        """Bytes per second a ring carries through one device inside a domain."""
        if self.measured_intra is not None:
            return self.measured_intra
        if self.table is not None and (shown := _shown(self.table, self.local)):
            return shown
        if self.intra is None:
            return float("inf")
        return min(reached(self.intra), crossing().get(self.intra.name, float("inf")) if self.local > 2 else float("inf"))

    def across(self) -> float:
        """Bytes per second the group's cards of one domain carry, one direction."""
        if self.measured_inter is not None:
            return self.measured_inter * self.local
        if self.inter is None:
            return float("inf")
        return self.network_bytes_per_second * _part(self.inter).fraction / self.ring_crowding


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How long a collective takes, alone on its links."""

    seconds: float
    algorithm: str
    """ring, tree, nvls, nvls-tree, direct, measured (a table), scaled (tables of such links) or none."""
    protocol: str
    bus_bytes_per_second: float
    """Bytes each link would carry in a ring of this size, over the seconds: nccl-tests' busbw."""
    provenance: str


def fabric(cluster: Cluster, ranks: int | None = None, *, stride: int = 1) -> Fabric:
    """A group of `ranks` devices, `stride` apart, numbered node by node; every other device works in a like group.

    8 of 64 with stride 1: one node. 8 of 64 with stride 8: one device of every node, sharing the cards with seven
    other such groups.
    """
    size = cluster.count if ranks is None else ranks
    if cluster.groups:
        whole = size * stride
        starts = range(0, cluster.count - whole + 1, whole)
        return slowest(
            among(cluster, range(start + offset, start + whole, stride)) for start in starts for offset in range(stride)
        )
    domain = cluster.devices_per_domain or cluster.devices_per_node
    local = max(1, min(size, domain // min(stride, domain)))
    share = cluster.per_device_network_bytes_per_second or 0.0
    inside, across = _measured(cluster, domain)
    apart = max(1, stride // cluster.devices_per_node) if stride >= domain else max(1, domain // cluster.devices_per_node)
    ring, every = crowding(cluster, ceil(size / local), apart) if across is None else (1.0, 1.0)
    return Fabric(
        local=local, domains=ceil(size / local), intra=cluster.intra, inter=cluster.inter,
        network_bytes_per_second=share * local, measured_intra=inside, measured_inter=across,
        table=_table(cluster, cluster.intra) if inside is None else None, ring_crowding=ring, all_crowding=every,
    )  # fmt: skip


def crowding(cluster: Cluster, members: int, apart: int) -> tuple[float, float]:
    """How many times longer a ring, and an exchange of all with all, of `members` nodes that are `apart` take when nodes between
    them do likewise: a leaf's switch passes on what its cards send over `oversubscription`.

    Of the nodes of a leaf, as many as members are apart send to another leaf in a ring; in an exchange a node sends as much to
    every other one.
    """
    leaf, over = cluster.nodes_per_leaf, cluster.oversubscription
    if leaf is None or members * apart <= leaf:
        return 1.0, 1.0
    near = max(1, leaf // apart)
    return max(1.0, over * min(1.0, apart / leaf)), max(1.0, over * (members - near) / (members - 1))


def among(cluster: Cluster, devices: Iterable[int]) -> Fabric:
    """What joins these devices, wherever they are: the slowest links inside domains, and what lies between domains."""
    members = sorted(set(devices))
    where = {device: cluster.domain_of(device) for device in members}
    domains = len(set(where.values()))
    parts = {index: cluster.parts[index] for index, _ in where.values()}
    across = next(iter(parts.values())) if len(parts) == 1 else cluster
    share = across.per_device_network_bytes_per_second or 0.0
    local = ceil(len(members) / max(1, domains))
    inside = min((part.intra for part in parts.values() if part.intra is not None), key=reached, default=None)
    near = far = None
    if cluster.matrix is not None:
        rates = [(where[a] == where[b], cluster.matrix[a][b]) for a in members for b in members if a != b]
        near = min((rate for same, rate in rates if same), default=None)
        far = min((rate for same, rate in rates if not same), default=None)
        if near is not None and inside is not None:
            near *= inside.bytes_per_second / inside.between_two
    slow = next((part for part in parts.values() if part.intra is inside), None)
    ring = every = 1.0
    if len(parts) == 1 and far is None and domains > 1:
        places = sorted({place for _, place in where.values()})
        each = max(1, (across.devices_per_domain or across.devices_per_node) // across.devices_per_node)
        ring, every = crowding(across, domains, max(1, (places[-1] - places[0]) // (domains - 1)) * each)
    return Fabric(
        local=local, domains=domains, intra=inside, inter=across.inter, network_bytes_per_second=share * local,
        measured_intra=near, measured_inter=far, table=_table(slow, inside) if slow is not None and near is None else None,
        ring_crowding=ring, all_crowding=every,
    )  # fmt: skip


def _table(cluster: Cluster, link: Link | None, without: str = "") -> Wires | None:
    """Collectives of a node: of these devices where they are joined as the measured ones were, of others with such a link, or of
    links of that kind; `without` the table of one device."""
    if link is None:
        return None
    for name in (cluster.device.name, *same_wires().get(link.name, ())):
        found = wires.table(name)
        if found is not None and link.name == found.link and name != without:
            return found if name == cluster.device.name else replace(found, measured=False)
    return wires.like(link.kind, link.bytes_per_second, without)


def without_table(cluster: Cluster, ranks: int, device: str) -> Fabric:
    """A node's group as it would be told if nobody had measured that device's."""
    return replace(fabric(cluster, ranks), table=_table(cluster, cluster.intra, device))


@cache
def _shown(table: Wires, ranks: int) -> float | None:
    """Bytes per second through one device that a large all-gather of a node shows."""
    most = min(ranks, table.most(ALL_GATHER))
    seconds = table.seconds(ALL_GATHER, LARGEST, most) if most > 1 else None
    return LARGEST * (most - 1) / most / seconds if seconds else None


def slowest(fabrics: Iterable[Fabric]) -> Fabric:
    """The one on which a large all-reduce takes longest: every rank waits for that group."""
    distinct = {
        (one.local, one.domains, one.intra and one.intra.name, one.inter and one.inter.name, one.network_bytes_per_second,
         one.measured_intra, one.measured_inter, one.ring_crowding, one.all_crowding): one
        for one in fabrics
    }  # fmt: skip
    return max(distinct.values(), key=lambda group: collective(ALL_REDUCE, LARGE, group).seconds)


def collective(operation: str, nbytes: float, group: Fabric) -> Transfer:
    """The quickest way of one collective. `nbytes` is the larger buffer of one rank: what all_gather makes, what
    reduce_scatter takes; the message for p2p."""
    if operation not in OPERATIONS:
        raise ValueError(f"'{operation}' is no collective; known: {', '.join(OPERATIONS)}")
    if group.ranks < 2 or nbytes <= 0:
        return Transfer(
            seconds=0.0, algorithm="none", protocol="", bus_bytes_per_second=0.0, provenance=group.provenance
        )
    if group.table is not None and group.domains == 1 and (found := _looked_up(operation, nbytes, group, group.table)):
        seconds, known = found
        bus = nbytes * wire_part(operation, group.ranks) / seconds
        how, provenance = ("measured", MEASURED) if known else ("scaled", ASSUMED)
        return Transfer(seconds=seconds, algorithm=how, protocol="", bus_bytes_per_second=bus, provenance=provenance)
    seconds, algorithm, protocol = _quickest(operation, nbytes, group)
    bus = nbytes * wire_part(operation, group.ranks) / seconds
    return Transfer(
        seconds=seconds, algorithm=algorithm, protocol=protocol, bus_bytes_per_second=bus, provenance=group.provenance
    )


def _looked_up(operation: str, nbytes: float, group: Fabric, table: Wires) -> tuple[float, bool] | None:
    """Seconds inside a node by its table, and whether they were measured; beyond its ranks as the formulas go on from there. A
    message to one rank is half of what two exchange with each other."""
    if operation == P2P:
        message = table.seconds(ALL_TO_ALL, 2 * nbytes, 2)
        return None if message is None else (message, False)
    found = table.seconds(operation, nbytes, group.ranks)
    if found is not None:
        return found, table.measured
    most = table.most(operation)
    known = table.seconds(operation, nbytes, most) if most > 1 else None
    if known is None:
        return None
    return known * _quickest(operation, nbytes, group)[0] / _quickest(operation, nbytes, replace(group, local=most))[0], False


def _quickest(operation: str, nbytes: float, group: Fabric) -> tuple[float, str, str]:
    """The best way by the formulas: seconds, algorithm and protocol."""
    if operation == P2P:
        ways = iter([_one_message(nbytes, group)])
    elif operation == ALL_TO_ALL:
        ways = iter([_all_to_all(nbytes, group)])
    else:
        ways = _ways(operation, nbytes, group)
    return min(ways)


def reached(link: Link) -> float:
    """Bytes per second a large ring reaches on a link."""
    return link.bytes_per_second * _part(link).fraction


def _part(link: Link) -> RateFraction:
    return REACHED.get(link.name) or REACHED.get(link.kind) or REACHED[""]


def wire_part(operation: str, ranks: int) -> float:
    """Bytes through each link of a ring, over the buffer's bytes."""
    if operation in (BROADCAST, P2P):
        return 1.0
    return (2.0 if operation == ALL_REDUCE else 1.0) * (ranks - 1) / ranks


def _ways(operation: str, nbytes: float, group: Fabric) -> Iterator[tuple[float, str, str]]:
    inside, across = group.inside(), group.across()
    rate = min(inside if group.local > 1 else float("inf"), across if group.domains > 1 else float("inf"))
    hardware = "nvlink" if group.intra is not None and group.intra.kind in ("nvlink", "xgmi", "c2c") else "pcie"
    ceiling = LL_CEILING * group.intra.bytes_per_second if group.intra is not None else float("inf")
    if group.domains > 1:
        ceiling = min(ceiling, LL_NETWORK_CEILING)
    for protocol in PROTOCOLS:
        if protocol.name == "LL128" and hardware == "pcie":
            continue
        carried = rate * protocol.fraction
        if protocol.name == "LL":
            carried = min(carried, ceiling)
        wire = nbytes * wire_part(operation, group.ranks)
        yield _ring_latency(operation, protocol, group, hardware) + wire / carried, "ring", protocol.name
        if operation == ALL_REDUCE:
            hops = (group.local - 1) * protocol.tree_hop[hardware] + log2(group.domains) * protocol.tree_hop["net"]
            yield (protocol.base + 2 * hops) * 1e-6 + 2 * nbytes / (0.92 * carried), "tree", protocol.name
    if operation == ALL_REDUCE and group.local > 2 and group.intra is not None and group.intra.multicast:
        yield _in_the_switch(nbytes, group, group.intra, across)


def _ring_latency(operation: str, protocol: Protocol, group: Fabric, hardware: str) -> float:
    steps = {ALL_REDUCE: 2 * (group.ranks - 1), BROADCAST: group.ranks}.get(operation, group.ranks - 1)
    between = 0 if group.domains == 1 else (2 if operation == ALL_REDUCE else 1) * (group.domains - 1)
    hop = protocol.ring_hop[hardware]
    if group.domains > 1:
        hop = max(hop, NET_OVERHEAD * (3 if protocol.name == "Simple" else 1))
    network = group.inter.latency_seconds * 1e6 if group.inter is not None else 0.0
    far = max(protocol.ring_hop["net"], network)
    return (protocol.base + (steps - between) * hop + between * far) * 1e-6


def _in_the_switch(nbytes: float, group: Fabric, link: Link, across: float) -> tuple[float, str, str]:
    """Reduce and copy in the switch of each domain; between domains a tree over all cards."""
    part = SWITCH_REDUCES.get(link.name) or [*SWITCH_REDUCES.values()][-1]
    rate = link.bytes_per_second * part.fraction
    if group.measured_intra is not None:
        rate *= group.measured_intra / reached(link)
    start = NVLS_START
    if group.domains > 1:
        rate = min(rate, across / 2)
        start += 2 * log2(group.domains) * PROTOCOLS[-1].tree_hop["net"]
    return start * 1e-6 + nbytes / rate, "nvls" if group.domains == 1 else "nvls-tree", "Simple"


def _all_to_all(nbytes: float, group: Fabric) -> tuple[float, str, str]:
    """Every rank sends a piece to every other: pieces for the own domain and for others travel side by side."""
    inside = nbytes * (group.local - 1) / group.ranks / group.inside()
    outside = nbytes * (group.ranks - group.local) / group.ranks / (group.across() * group.ring_crowding / group.all_crowding / group.local)
    hop = PROTOCOLS[-1].ring_hop["net" if group.domains > 1 else "nvlink"]
    if group.domains > 1 and group.inter is not None:
        hop = max(hop, group.inter.latency_seconds * 1e6)
    start = PROTOCOLS[-1].base + hop + 0.4 * (group.ranks - 1)
    return start * 1e-6 + max(inside, outside), "direct", "Simple"


def _one_message(nbytes: float, group: Fabric) -> tuple[float, str, str]:
    if group.domains > 1:
        rate, latency = group.across() / group.local, group.inter.latency_seconds if group.inter else 0.0
    else:
        link = group.intra
        rate = group.inside() * (link.between_two / link.bytes_per_second if link else 1.0)
        latency = link.latency_seconds if link else 0.0
    return PROTOCOLS[-1].base * 1e-6 + latency + nbytes / rate, "direct", "Simple"


def _measured(cluster: Cluster, domain: int) -> tuple[float | None, float | None]:
    """The slowest measured rates inside a domain and across, of one device; None where there is no matrix."""
    if cluster.matrix is None:
        return None, None
    pairs = [(a, b, rate) for a, row in enumerate(cluster.matrix) for b, rate in enumerate(row) if a != b]
    inside = min((rate for a, b, rate in pairs if a // domain == b // domain), default=None)
    across = min((rate for a, b, rate in pairs if a // domain != b // domain), default=None)
    if inside is not None and cluster.intra is not None:
        inside *= cluster.intra.bytes_per_second / cluster.intra.between_two
    return inside, across
