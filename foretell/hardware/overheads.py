"""Memory taken beside the model: `overheads.toml`, one row per figure and kind of device.

The most particular row wins: a device before a compute capability before a backend, and
among equals one for this torch version before one for any.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import InternalError
from foretell.hardware.catalog import normalise
from foretell.hardware.types import Cluster, Device, Provenance

FIELDS = ("context_bytes", "cublas_workspace_bytes", "nccl_bytes", "nccl_across_nodes_bytes")


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


def overhead(device: Device, torch_version: str) -> Overhead:
    """The constants for a device under a torch version such as `2.11.0+cu130`."""
    chosen = {name: _best(name, device, torch_version) for name in FIELDS}
    provenance: dict[str, Provenance] = {name: row["provenance"] for name, row in chosen.items()}
    return Overhead(
        context_bytes=chosen["context_bytes"]["bytes"],
        cublas_workspace_bytes=chosen["cublas_workspace_bytes"]["bytes"],
        nccl_bytes=chosen["nccl_bytes"]["bytes"],
        nccl_across_nodes_bytes=chosen["nccl_across_nodes_bytes"]["bytes"],
        provenance=provenance,
        sources={name: row["source"] for name, row in chosen.items()},
    )


@cache
def rows() -> tuple[dict[str, Any], ...]:
    text = (resources.files("foretell.hardware") / "overheads.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["row"])


def _best(name: str, device: Device, torch_version: str) -> dict[str, Any]:
    scored = [(_fit(row, device, torch_version), row) for row in rows() if row["figure"] == name]
    score = max((score for score, _ in scored), default=0)
    best = [row for value, row in scored if value == score]
    if score <= 0 or len(best) != 1:
        raise InternalError(f"overheads.toml has {len(best) if score else 0} best rows of {name} for {device.name}")
    return best[0]


def _fit(row: dict[str, Any], device: Device, torch_version: str) -> int:
    """How particular a row is for this device; 0 when it does not apply."""
    major = device.compute_capability[0] if device.compute_capability else None
    tests = (
        (8, "device", lambda value: normalise(value) == normalise(device.name)),
        (4, "compute_capability_major", lambda value: device.backend == "cuda" and value == major),
        (2, "backend", lambda value: value == device.backend),
        (1, "torch", lambda value: f"{torch_version}.".startswith(f"{value}.")),
    )
    given = [(weight, test(row[key])) for weight, key, test in tests if key in row]
    return sum(weight for weight, _ in given) if all(holds for _, holds in given) else 0
