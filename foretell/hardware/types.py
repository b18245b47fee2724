"""Devices and clusters as plain data: frozen, keyword-only, JSON-serialisable, no torch.

Every figure of a `Device` has an entry in `sources`; a source that begins with "assumed" is
a guess, and the answer built on it must say so. Links and tiers will be further fields with
defaults, so that files written today stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from foretell.errors import UserError
from foretell.units import MIB, gib, parse_bytes

Backend = Literal["cuda", "rocm", "mps", "cpu"]
Provenance = Literal["measured", "assumed"]

BACKENDS: tuple[Backend, ...] = ("cuda", "rocm", "mps", "cpu")
PROVENANCES: tuple[Provenance, ...] = ("measured", "assumed")
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
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        complaint = _complaint(self)
        if complaint:
            raise UserError(f"device '{self.name}': {complaint}", "correct the hardware file")

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
class Cluster:
    """Equal nodes of equal devices."""

    device: Device
    nodes: int = 1
    devices_per_node: int = 1
    link: str | None = None
    """What was written after '@', unchecked: links come later."""
    notes: tuple[str, ...] = ()
    """Sentences to print with every answer, such as "H100 means H100-SXM-80GB (79.1 GiB)"."""

    def __post_init__(self) -> None:
        for name, value in (("nodes", self.nodes), ("devices_per_node", self.devices_per_node)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}", "give a whole number of at least 1")

    @property
    def count(self) -> int:
        return self.nodes * self.devices_per_node

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
        smaller = device.with_memory(cap, f"cap given by the user ({amount})")
        return replace(self, device=smaller, notes=(*self.notes, note))

    def to_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "link": self.link,
            "notes": list(self.notes),
            "device": self.device.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Device memory that is taken before and beside the model, in bytes per device."""

    context_bytes: int
    cublas_workspace_bytes: int
    """Per handle and stream, inside the caching allocator."""
    nccl_bytes: int
    """Communicators and buffers when several devices work together on one node."""
    nccl_across_nodes_bytes: int
    """The same when they span nodes."""
    provenance: Mapping[str, Provenance]
    """Field name → how it is known."""
    sources: Mapping[str, str]

    def nccl_for(self, cluster: Cluster) -> int:
        if cluster.count == 1:
            return 0
        return self.nccl_bytes if cluster.nodes == 1 else self.nccl_across_nodes_bytes

    def to_dict(self) -> dict[str, Any]:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "provenance": dict(self.provenance), "sources": dict(self.sources)}


def _complaint(device: Device) -> str:
    """What is wrong with a device's figures, naming the field; empty when nothing is."""
    if device.backend not in BACKENDS:
        return f"backend is '{device.backend}', not one of {', '.join(BACKENDS)}"
    for name in ("memory_bytes", "memory_nominal_bytes", "sm_count", "usual_per_node", "l2_bytes"):
        value = getattr(device, name)
        if not (name == "l2_bytes" and value is None) and (type(value) is not int or not 0 < value < _TOO_MANY):
            return f"{name} is {value!r}, not a whole number above 0"
    for name in ("memory_bandwidth_bytes_per_second", "tdp_watts"):
        value = getattr(device, name)
        if not (name == "tdp_watts" and value is None) and not _positive(value):
            return f"{name} is {value!r}, not a number above 0"
    if device.memory_bytes > device.memory_nominal_bytes:
        return (
            f"memory_bytes ({gib(device.memory_bytes)}) is above "
            f"memory_nominal_bytes ({gib(device.memory_nominal_bytes)})"
        )
    for dtype, rate in device.peak_flops_per_second.items():
        if dtype not in PEAK_DTYPES or not _positive(rate):
            return f"peak_flops_per_second has {dtype!r}: {rate!r}; known dtypes: {', '.join(PEAK_DTYPES)}"
    return "" if "float32" in device.peak_flops_per_second else "peak_flops_per_second lacks float32"


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
