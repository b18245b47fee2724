"""What is known of a generation of devices rather than of one: `catalog/generations.toml`.

    generations()["hopper"]        → what large kernels reach of the catalogue's rates, which devices were measured
    attention()["flash-2"]         → by generation, what that kernel reaches
    multiprocessors((9, 0))        → of the largest part of a compute capability
    reference()                    → the device that the laws of kernels were fitted on
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from foretell.hardware.catalog import find, table
from foretell.hardware.types import Device


class Generation(NamedTuple):
    """What large kernels reach on one generation of devices, as parts of the catalogue's figures."""

    product: float
    """Of the peak of the dtype, by a large dense product in a burst."""
    product8: float
    """The same for 8-bit products, of their own peak."""
    stream: float
    """Of the nominal memory bandwidth."""
    launch: float
    """Seconds from one kernel to the next when they do nothing."""
    source: str
    kin: tuple[str, ...] = ()
    """Devices whose kernels were measured, the nearest first."""
    power_limited: tuple[str, ...] = ()
    """Measured devices whose own products wait for power: others with more watts for a FLOP are faster than their tables say,
    not only slower with fewer."""
    hot: bool = False
    """Large products ask for more watts than the boards may draw: as an H200's do, assumed of the others."""
    confirmed: bool = False
    """Published runs of several sources confirm the efficiencies."""


class AttentionPeak(NamedTuple):
    """Part of the 16-bit peak that an attention kernel reaches, forward and backward, on long causal sequences."""

    forward: float
    backward: float
    source: str
    narrow: float = 0.9
    """Factor for heads of 64 channels and less."""


class Multiprocessors(NamedTuple):
    """How many a device has, and how many threads are resident on one."""

    multiprocessors: int
    threads: int


@cache
def generations() -> dict[str, Generation]:
    needed = {"name": str, "product": float, "product8": float, "stream": float, "launch_seconds": float, "source": str}
    rows = table("generation", needed, {"kin": list, "power_limited": list, "hot": bool, "confirmed": bool})
    return {
        row["name"]: Generation(
            row["product"], row["product8"], row["stream"], row["launch_seconds"], row["source"],
            tuple(find(name).name for name in row.get("kin", ())), tuple(find(name).name for name in row.get("power_limited", ())),
            row.get("hot", False), row.get("confirmed", False),
        )
        for row in rows
    }  # fmt: skip


@cache
def attention() -> dict[str, dict[str, AttentionPeak]]:
    """By kernel, then by generation; under two empty names what is assumed of any."""
    found: dict[str, dict[str, AttentionPeak]] = {}
    needed = {"forward": float, "backward": float, "source": str}
    for row in table("attention", needed, {"kernel": str, "generation": str, "narrow": float}):
        peak = AttentionPeak(row["forward"], row["backward"], row["source"], row.get("narrow", 0.9))
        found.setdefault(row.get("kernel", ""), {})[row.get("generation", "")] = peak
    return found


@cache
def nearest() -> dict[str, str]:
    """Backend → the device whose profile is carried over where a generation has none."""
    return {row["backend"]: find(row["device"]).name for row in table("nearest", {"backend": str, "device": str})}


@cache
def reference() -> Device:
    """The device that the laws of kernels were fitted on."""
    return find(nearest()["cuda"])


@cache
def multiprocessors(capability: tuple[int, int]) -> Multiprocessors:
    """Of the largest part of this compute capability, or of the newest one known that is older."""
    rows = table("capability", {"capability": list, "multiprocessors": int, "threads": int})
    known = {(row["capability"][0], row["capability"][1]): Multiprocessors(row["multiprocessors"], row["threads"]) for row in rows}
    older = [one for one in known if one <= tuple(capability)]
    return known[max(older) if older else min(known)]
