"""Devices and clusters as plain data: frozen, keyword-only, JSON-serialisable, no torch.

Every figure of a `Device` has an entry in `sources`; a source that begins with "assumed" is
a guess, and the answer built on it must say so. Fields added later have defaults, so that
files written before stay readable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from foretell.errors import UserError
from foretell.units import MIB, gib, parse_bytes

Backend = Literal["cuda", "rocm", "xpu", "mps", "cpu"]
Provenance = Literal["measured", "assumed"]
Level = Literal["device", "intra", "inter"]

BACKENDS: tuple[Backend, ...] = ("cuda", "rocm", "xpu", "mps", "cpu")
PROVENANCES: tuple[Provenance, ...] = ("measured", "assumed")
INTRA_KINDS = ("nvlink", "xgmi", "pcie", "memory")
HOST_KINDS = ("pcie", "c2c", "xgmi", "memory")
INTER_KINDS = ("infiniband", "roce", "ethernet", "slingshot", "efa", "omnipath")
LINK_KINDS = tuple(dict.fromkeys((*INTRA_KINDS, *HOST_KINDS, *INTER_KINDS)))
TIER_NAMES = ("hbm", "host", "disk")
ASSUMED = "assumed"
_SMALLEST_CAP = 64 * MIB
_TOO_MANY = 2**60

PEAK_DTYPES = (
    "float64", "float32", "tf32", "float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fn_x2", "int8",
)  # fmt: skip
"""Names under which a peak rate may be given: torch dtypes, and `tf32` for float32 on tensor cores."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator as PyTorch sees it (of a two-die module: one die)."""

    name: str
    vendor: str
    backend: Backend
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    """What `torch.cuda.get_device_properties().total_memory` reports: less than the box says."""
    memory_nominal_bytes: int
    memory_bandwidth_bytes_per_second: float
    peak_flops_per_second: Mapping[str, float]
    """By dtype, dense, no sparsity. A dtype that is absent has no fast path; see `peak`."""
    l2_bytes: int | None
    sm_count: int
    """Streaming multiprocessors, compute units or cores."""
    tdp_watts: float | None
    usual_per_node: int = 8
    verified: bool = False
    """Whether torch was asked on such a device, here, for the figures it reports itself."""
    launch_overhead_seconds: float | None = None
    """From one kernel's start to the next's when they do nothing; assumed unless probed."""
    price_per_hour: float | None = None
    """US dollars per device-hour where the user gives it; see `prices.price_per_hour`."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse(f"device '{self.name}'", _device_complaints(self))

    @property
    def torch_type(self) -> str:
        """As torch names it: AMD's devices are `cuda` to it."""
        return "cuda" if self.backend == "rocm" else self.backend

    def peak(self, dtype: str) -> float:
        """Peak rate for `dtype`; a dtype without a fast path runs at the float32 rate."""
        return self.peak_flops_per_second.get(dtype, self.peak_flops_per_second["float32"])

    def assumed(self, field_name: str) -> bool:
        """Whether a figure is a guess rather than a report, a datasheet or a measurement."""
        return self.sources.get(field_name, ASSUMED).startswith(ASSUMED)

    def with_memory(self, memory_bytes: int, source: str) -> Device:
        """The same device with another usable memory, and where that figure comes from."""
        return replace(self, memory_bytes=memory_bytes, sources={**self.sources, "memory_bytes": source})

    def to_dict(self) -> dict[str, Any]:
        return {
            **{item.name: getattr(self, item.name) for item in fields(self)},
            "compute_capability": list(self.compute_capability) if self.compute_capability else None,
            "peak_flops_per_second": dict(self.peak_flops_per_second),
            "sources": dict(self.sources),
        }


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way bytes travel between devices, or between a device and its host."""

    name: str
    """NVLink4, PCIe5x16, IB400, RoCE100, Eth25, Slingshot200, ..."""
    kind: str
    """nvlink, xgmi, c2c, pcie, memory, infiniband, roce, ethernet, slingshot, efa or omnipath."""
    bytes_per_second: float
    """Nominal, one direction, of one device (of one network card for links between nodes)."""
    latency_seconds: float
    """Of one message between two devices."""
    multicast: bool = False
    """Whether the switch adds and copies (NVLink SHARP)."""
    pair_bytes_per_second: float | None = None
    """Between two devices alone where that is less: a mesh without a switch. None: the full rate."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse(f"link '{self.name}'", _link_complaints(self))

    @property
    def between_two(self) -> float:
        """Bytes per second, one direction, when only two devices talk."""
        return self.bytes_per_second if self.pair_bytes_per_second is None else self.pair_bytes_per_second

    def assumed(self, field_name: str) -> bool:
        """Whether a figure is a guess rather than a specification or a measurement."""
        return self.sources.get(field_name, ASSUMED).startswith(ASSUMED)

    def to_dict(self) -> dict[str, Any]:
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "sources": dict(self.sources)}


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A level of memory: hbm, host or disk."""

    name: str
    bytes: int
    """Of one device for hbm, of one node for host and disk."""
    read_bytes_per_second: float
    write_bytes_per_second: float
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse(f"tier '{self.name}'", _tier_complaints(self))

    def to_dict(self) -> dict[str, Any]:
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "sources": dict(self.sources)}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal devices, or, with `groups`, unlike groups of them side by side.

    Ranks are numbered node by node, and group by group.
    """

    device: Device
    """With `groups`: the device with the least memory, since that one decides whether a model fits."""
    nodes: int = 1
    devices_per_node: int = 1
    """With `groups`: of the largest node."""
    link: str | None = None
    """What was written after '@', such as `4xIB200`."""
    notes: tuple[str, ...] = ()
    """Sentences to print with every answer, such as "H100 means H100-SXM-80GB (79.1 GiB)"."""
    intra: Link | None = None
    """Between the devices of a node (or of a rack that one switch joins: `devices_per_domain`)."""
    inter: Link | None = None
    """Between nodes: nominal rate of one network card. With `groups`: between groups."""
    cards_per_node: int = 1
    """Network cards of a node; all its devices share them."""
    devices_per_domain: int | None = None
    """Devices that `intra` joins where that is more than a node (72 in an NVL72 rack). None: a node."""
    host_link: Link | None = None
    """Between one device and its host."""
    tiers: tuple[Tier, ...] = ()
    """Memory levels that are known; see `tier`."""
    groups: tuple[Cluster, ...] = ()
    matrix: tuple[tuple[float, ...], ...] | None = None
    """Measured bytes per second from rank (row) to rank (column); the diagonal means nothing."""
    region: str | None = None
    """Where it stands, for the carbon of its electricity; a name of `catalog/carbon.toml`."""
    carbon_g_per_kwh: float | None = None
    """Grams of CO2 per kWh where the user gives it outright."""
    nodes_per_leaf: int | None = None
    """Nodes whose cards meet in one switch; where every card of a node has a rail of its own, the nodes that a rail's switch joins.
    None: all of them."""
    oversubscription: float = 1.0
    """How many times more such a switch takes in from its nodes than it passes on to others."""
    join_cards: int | None = None
    """With `groups`: cards of a node for `inter`. None: the groups' own cards where those are of its kind, else one."""

    def __post_init__(self) -> None:
        _refuse("cluster", _cluster_complaints(self))

    @classmethod
    def side_by_side(cls, groups: tuple[Cluster, ...], inter: Link | None = None, **more: Any) -> Cluster:
        """Unlike groups as one cluster, joined by `inter` (by default the slowest of their own networks, where those are
        of one kind; see `links.joined` for what is assumed where they are not).

        Their notes are told with those given in `more`, which are further fields.
        """
        if not groups:
            raise UserError("a cluster of groups has no group", "give at least one group")
        known = [group.inter for group in groups if group.inter is not None]
        alike = len(known) == len(groups) and len({link.kind for link in known}) == 1
        slowest = min(known, key=lambda link: link.bytes_per_second) if alike else None
        fixed = {
            "device": min((group.device for group in groups), key=lambda device: device.memory_bytes),
            "nodes": sum(group.nodes for group in groups),
            "devices_per_node": max(group.devices_per_node for group in groups),
            "cards_per_node": min(group.cards_per_node for group in groups),
            "notes": tuple(
                dict.fromkeys([*more.get("notes", ()), *(note for group in groups for note in group.notes)])
            ),
        }
        return cls(groups=groups, inter=inter or slowest, **{**more, **fixed})

    @property
    def count(self) -> int:
        if self.groups:
            return sum(group.count for group in self.groups)
        return self.nodes * self.devices_per_node

    @property
    def per_device_network_bytes_per_second(self) -> float | None:
        """One device's share of its node's cards, one direction; with groups the smallest; None if unknown."""
        if self.inter is None:
            return None
        if not self.groups:
            return self.cards_per_node * self.inter.bytes_per_second / self.devices_per_node
        rate = self.inter.bytes_per_second
        return min(self._cards_to_others(group) * rate / group.devices_per_node for group in self.groups)

    def _cards_to_others(self, group: Cluster) -> int:
        """Cards of a group's node that reach other groups."""
        if self.join_cards is not None:
            return self.join_cards
        own = group.inter is None or (self.inter is not None and group.inter.kind == self.inter.kind)
        return group.cards_per_node if own else 1

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """The groups, or the cluster itself: equal nodes of equal devices each."""
        return self.groups or (self,)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The unlike devices, each once, in the order of their ranks."""
        return tuple({group.device.name: group.device for group in self.parts}.values())

    def part_of(self, rank: int) -> Cluster:
        """The group of equal nodes that a rank is in."""
        return self.parts[self.domain_of(rank)[0]]

    def boundary(self, ranks: Iterable[int]) -> str:
        """What a group of ranks must not be split by, in words; empty where one fabric joins them all.

        Groups are one fabric where their own networks and what joins them are of one kind that is not Ethernet.
        """
        touched = sorted({self.domain_of(rank)[0] for rank in set(ranks)})
        if len(touched) < 2:
            return ""
        names = " and ".join(dict.fromkeys(self.groups[index].device.name for index in touched))
        if self.inter is None:
            return f"nothing joins the groups of {names}"
        kinds = {link.kind for index in touched if (link := self.groups[index].inter) is not None}
        if self.inter.kind == "ethernet" and kinds != {"ethernet"}:
            return f"only {self.inter.name} joins the groups of {names}"
        if kinds - {self.inter.kind}:
            own = " beside ".join(sorted(kinds))
            return f"the groups of {names} have {own}, which do not reach each other"
        return ""

    def tier(self, name: str) -> Tier | None:
        """A memory level by name; `hbm` is the device's own memory unless given; None where unknown."""
        found = next((tier for tier in self.tiers if tier.name == name), None)
        if found is not None or name != "hbm":
            return found
        rate, source = self.device.memory_bandwidth_bytes_per_second, self.device.sources
        sources = {
            "bytes": source.get("memory_bytes", ASSUMED),
            "read_bytes_per_second": source.get("memory_bandwidth_bytes_per_second", ASSUMED),
        }
        size = self.device.memory_bytes
        return Tier(name="hbm", bytes=size, read_bytes_per_second=rate, write_bytes_per_second=rate, sources=sources)

    def domain_of(self, rank: int) -> tuple[int, int]:
        """Which group, and which domain of it that `intra` joins, a rank belongs to."""
        if not 0 <= rank < self.count:
            raise UserError(f"rank {rank} is not in a cluster of {self.count}", f"ranks run from 0 to {self.count - 1}")
        if not self.groups:
            return 0, rank // (self.devices_per_domain or self.devices_per_node)
        for index, group in enumerate(self.groups):
            if rank < group.count:
                return index, group.domain_of(rank)[1]
            rank -= group.count
        raise AssertionError("count is the sum of the groups")

    def level(self, ranks: Iterable[int]) -> Level:
        """How far a group of ranks reaches: one device, `intra`, or `inter`."""
        members = set(ranks)
        if len(members) < 2:
            return "device"
        return "intra" if len({self.domain_of(rank) for rank in members}) == 1 else "inter"

    def spread(self, ranks: Iterable[int]) -> tuple[int, int]:
        """How many domains a group of ranks touches, and the most ranks it has in one."""
        counts = Counter(self.domain_of(rank) for rank in set(ranks))
        return len(counts), max(counts.values(), default=0)

    def capped(self, amount: str, asked: str) -> Cluster:
        """The same cluster with no more than `amount` of memory used on each device."""
        device = self.device
        try:
            cap = parse_bytes(amount)
        except (UserError, OverflowError):
            raise UserError(f"memory={amount} in '{asked}' is not an amount", "write it like memory=60GiB") from None
        if cap < _SMALLEST_CAP:
            raise UserError(f"memory={amount} in '{asked}' is {cap} bytes", "add a unit, like memory=60GiB")
        if cap > device.memory_bytes:
            raise UserError(
                f"memory={amount} in '{asked}' is more than the {gib(device.memory_bytes)} that {device.name} offers",
                "memory= can only lower it; describe another device in a hardware file",
            )
        note = f"memory of each {device.name} is capped at {gib(cap)} of {gib(device.memory_bytes)}"
        source = f"cap given by the user ({amount})"
        smaller = device.with_memory(cap, source)
        groups = tuple(replace(group, device=group.device.with_memory(cap, source)) for group in self.groups)
        return replace(self, device=smaller, groups=groups, notes=(*self.notes, note))

    def to_dict(self) -> dict[str, Any]:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **plain,
            **{name: plain[name] and plain[name].to_dict() for name in ("device", "intra", "inter", "host_link")},
            "notes": list(self.notes),
            "tiers": [tier.to_dict() for tier in self.tiers],
            "groups": [group.to_dict() for group in self.groups],
            "matrix": [list(row) for row in self.matrix] if self.matrix else None,
        }


def _refuse(what: str, complaints: list[str]) -> None:
    """One error that names every field that is wrong."""
    if complaints:
        raise UserError(f"{what}: {'; '.join(complaints)}", "correct the hardware file")


def _device_complaints(device: Device) -> list[str]:
    found = []
    if device.backend not in BACKENDS:
        found.append(f"backend is '{device.backend}', not one of {', '.join(BACKENDS)}")
    whole = ("memory_bytes", "memory_nominal_bytes", "sm_count", "usual_per_node", "l2_bytes")
    found += _not_whole(device, whole, optional=("l2_bytes",))
    optional = ("tdp_watts", "launch_overhead_seconds")
    found += _not_positive(device, ("memory_bandwidth_bytes_per_second", *optional), optional)
    found += _negative(device, "price_per_hour")
    if not found and device.memory_bytes > device.memory_nominal_bytes:
        usable, nominal = gib(device.memory_bytes), gib(device.memory_nominal_bytes)
        found.append(f"memory_bytes ({usable}) is above memory_nominal_bytes ({nominal})")
    for dtype, rate in device.peak_flops_per_second.items():
        if dtype not in PEAK_DTYPES or not _positive(rate):
            found.append(f"peak_flops_per_second has {dtype!r}: {rate!r}; known dtypes: {', '.join(PEAK_DTYPES)}")
    if "float32" not in device.peak_flops_per_second:
        found.append("peak_flops_per_second lacks float32")
    return found


def _link_complaints(link: Link) -> list[str]:
    found = []
    if link.kind not in LINK_KINDS:
        found.append(f"kind is {link.kind!r}, not one of {', '.join(LINK_KINDS)}")
    optional = ("pair_bytes_per_second",)
    found += _not_positive(link, ("bytes_per_second", "latency_seconds", *optional), optional)
    if not found and link.pair_bytes_per_second is not None and link.pair_bytes_per_second > link.bytes_per_second:
        found.append("pair_bytes_per_second is above bytes_per_second")
    if not isinstance(link.multicast, bool):
        found.append(f"multicast is {link.multicast!r}, not true or false")
    return found


def _tier_complaints(tier: Tier) -> list[str]:
    found = [] if tier.name in TIER_NAMES else [f"name is {tier.name!r}, not one of {', '.join(TIER_NAMES)}"]
    found += _not_whole(tier, ("bytes",))
    return found + _not_positive(tier, ("read_bytes_per_second", "write_bytes_per_second"))


def _cluster_complaints(cluster: Cluster) -> list[str]:
    found = _not_whole(cluster, ("nodes", "devices_per_node", "cards_per_node"))
    if found:
        return found
    domain, per_node = cluster.devices_per_domain, cluster.devices_per_node
    if domain is not None and (type(domain) is not int or domain < 1 or domain % per_node):
        found.append(f"devices_per_domain is {domain!r}, not a multiple of devices_per_node ({per_node})")
    for name, kinds in (("intra", INTRA_KINDS), ("inter", INTER_KINDS), ("host_link", HOST_KINDS)):
        link = getattr(cluster, name)
        if link is not None and link.kind not in kinds:
            found.append(f"{name} is {link.name}, of kind '{link.kind}', not one of {', '.join(kinds)}")
    names = [tier.name for tier in cluster.tiers]
    if len(set(names)) != len(names):
        found.append(f"tiers has {', '.join(names)}: each at most once")
    found += _negative(cluster, "carbon_g_per_kwh") + _leaf_complaints(cluster)
    if any(group.groups for group in cluster.groups):
        found.append("groups has groups inside; list all of them side by side")
    return found + _vendor_complaints(cluster) + _join_complaints(cluster) + _matrix_complaints(cluster)


def _leaf_complaints(cluster: Cluster) -> list[str]:
    found, over = _not_whole(cluster, ("nodes_per_leaf",), ("nodes_per_leaf",)), cluster.oversubscription
    if isinstance(over, bool) or not isinstance(over, int | float) or not 1 <= over < 1000:
        return [*found, f"oversubscription is {over!r}, not a number from 1"]
    if over > 1 and cluster.nodes_per_leaf is None:
        found.append(f"oversubscription is {over:g}, and nodes_per_leaf does not say from how many nodes on")
    return found


def _vendor_complaints(cluster: Cluster) -> list[str]:
    """Links that only one vendor's devices have."""
    backend, intra = cluster.device.backend, cluster.intra
    if intra is None or (intra.kind, backend) not in (("nvlink", "rocm"), ("xgmi", "cuda")):
        return []
    return [f"intra is {intra.name}, which {cluster.device.name} does not have"]


def _join_complaints(cluster: Cluster) -> list[str]:
    """Groups whose own cards cannot be what joins them. Ethernet every node has."""
    found, inter = [], cluster.inter
    if cluster.join_cards is not None and (type(cluster.join_cards) is not int or cluster.join_cards < 1):
        found.append(f"join_cards is {cluster.join_cards!r}, not a whole number above 0")
    elif cluster.join_cards is not None and not cluster.groups:
        found.append("join_cards is for groups, and there are none; cards_per_node is for equal nodes")
    for index, group in enumerate(cluster.groups if inter is not None and inter.kind != "ethernet" else (), 1):
        if inter is not None and group.inter is not None and group.inter.kind != inter.kind:
            found.append(
                f"inter is {inter.name}, and group {index} ({group.device.name}) has cards of {group.inter.name}: "
                "give what joins them, such as Eth25"
            )
    return found


def _matrix_complaints(cluster: Cluster) -> list[str]:
    matrix, count = cluster.matrix, cluster.count
    if matrix is None:
        return []
    if len(matrix) != count or any(len(row) != count for row in matrix):
        return [f"matrix is not {count} rows of {count} rates, one for each rank"]
    for source, row in enumerate(matrix):
        for target, rate in enumerate(row):
            if source != target and not _positive(rate):
                return [f"matrix has {rate!r} from rank {source} to {target}, not a number above 0"]
    return []


def _not_whole(value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[str]:
    found = []
    for name in names:
        item = getattr(value, name)
        if not (name in optional and item is None) and (type(item) is not int or not 0 < item < _TOO_MANY):
            found.append(f"{name} is {item!r}, not a whole number above 0")
    return found


def _not_positive(value: object, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[str]:
    found = []
    for name in names:
        item = getattr(value, name)
        if not (name in optional and item is None) and not _positive(item):
            found.append(f"{name} is {item!r}, not a number above 0")
    return found


def _negative(value: object, name: str) -> list[str]:
    item = getattr(value, name)
    fine = item is None or _positive(item) or (item == 0 and not isinstance(item, bool))
    return [] if fine else [f"{name} is {item!r}, not a number of at least 0"]


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
