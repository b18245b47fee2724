"""What public tables say of devices that nobody here has probed: kernels *measured elsewhere*.

    measured_elsewhere("H100-SXM-80GB")   → Elsewhere, or None: what PyTorch itself runs
    other_kernels("H100-SXM-80GB")        → groups of kernels that PyTorch does not have

Written by `benchmarks/silicon_fit.py`, which says where the rows come from. The factors belong to `price.kernels.elsewhere`.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from foretell.files import write_atomically

KIND, SCHEMA = "foretell-elsewhere", 1
PYTORCH, OTHERS = "pytorch", "others"
"""Endings of the files of a device: groups that price a plan, and groups that only other engines run."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A device's measured kernels, as factors on what is carried over from another."""

    device: str
    basis: str
    """The device whose profile is carried over."""
    source: str
    date: str
    stacks: tuple[str, ...]
    """Software that the kernels were measured with."""
    lacks: tuple[str, ...]
    """What was not measured and is carried over as it is."""
    groups: Mapping[str, Any]
    """Group of kernels → its factor (`price.kernels.elsewhere.Correction`)."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def measured_elsewhere(device: str) -> Elsewhere | None:
    return _read(device, PYTORCH)


def other_kernels(device: str) -> Mapping[str, Any]:
    found = _read(device, OTHERS)
    return found.groups if found is not None else {}


def write(found: Elsewhere, which: str) -> None:
    """Keep a device's factors where the package finds them."""
    content = json.dumps({"kind": KIND, "schema": SCHEMA, **found.to_dict()}, separators=(",", ":"), sort_keys=True)
    with resources.as_file(resources.files("foretell.hardware") / "silicon") as place:
        place.mkdir(exist_ok=True)
        write_atomically(place / f"{found.device}.{which}.json.gz", gzip.compress(content.encode(), mtime=0))


@functools.lru_cache(maxsize=16)
def _read(device: str, which: str) -> Elsewhere | None:
    place = resources.files("foretell.hardware") / "silicon" / f"{device}.{which}.json.gz"
    if not place.is_file():
        return None
    data = json.loads(gzip.decompress(place.read_bytes()))
    return Elsewhere(
        device=data["device"], basis=data["basis"], source=data["source"], date=data["date"], stacks=tuple(data["stacks"]),
        lacks=tuple(data["lacks"]), groups=data["groups"],
    )  # fmt: skip
