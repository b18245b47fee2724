"""Weights and keys and values of a server in fewer bits: bytes that are held, and seconds by rule from the 16-bit product's.

Nothing of this was measured; every answer that rests on it says so. The rules, as published kernels of each kind behave:

    read      bytes of the format at the rate at which the 16-bit product of one row reads its weight
    compute   int8, int4: numbers are turned to 16 bits on the way, so that what computes takes `slower` times as long;
              fp8: activations are turned to 8 bits as well, and the product is the device's own, at its own peak
    a product takes the longer of both: it is quicker in a small step and slower above a number of tokens, the crossover
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from foretell.errors import UserError
from foretell.hardware.types import Device
from foretell.lower.serving_ranks import PRODUCTS, blocks_of, short
from foretell.trace.types import PARAMETER, Op, Trace

FP8 = "float8_e4m3fn"
COMPUTES = 4096
"""Rows of a product whose seconds say what rate a device computes at."""
READS = 1.2
"""A product that takes up to so many times what it takes for one row reads its weight, and no more."""
NOTED = "by rule from the bf16 product's seconds: assumed, not measured"


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """How the weights of products in blocks are held."""

    name: str
    bits: float
    """Of a weight, scales of its groups included."""
    slower: float
    """Factor on seconds that a product computes, where numbers are turned to 16 bits in it."""
    own_peak: str = ""
    """Dtype of the device's own product; empty: 16 bits."""
    capability: tuple[int, int] = (7, 0)
    """Of CUDA devices from which on there is a kernel."""


WEIGHTS = {
    "bf16": HeldWeights(name="bf16", bits=16.0, slower=1.0, capability=(0, 0)),
    "fp8": HeldWeights(name="fp8", bits=8.0, slower=1.0, own_peak=FP8, capability=(8, 9)),
    "int8": HeldWeights(name="int8", bits=8.0, slower=1.15, capability=(7, 5)),
    "int4": HeldWeights(name="int4", bits=4.25, slower=1.25, capability=(8, 0)),
}
"""int4: groups of 128 with a scale and a zero point of 16 bits each; int8, fp8: a scale for every output, too few to count."""


@dataclass(frozen=True, kw_only=True)
class HeldKv:
    """How keys and values are held in pages."""

    name: str
    dtype: str
    """As attention reads it; empty: that of the model."""
    scale_bytes: int = 0
    """Of every head and token, keys and values each."""
    capability: tuple[int, int] = (0, 0)


KV = {
    "bf16": HeldKv(name="bf16", dtype=""),
    "fp8": HeldKv(name="fp8", dtype=FP8, capability=(8, 9)),
    "int8": HeldKv(name="int8", dtype="int8", scale_bytes=2, capability=(8, 0)),
}


def known_weights(name: str) -> HeldWeights:
    if name not in WEIGHTS:
        raise UserError(f"weights in {name} are not known", f"one of {', '.join(WEIGHTS)}")
    return WEIGHTS[name]


def known_kv(name: str) -> HeldKv:
    if name not in KV:
        raise UserError(f"keys and values in {name} are not known", f"one of {', '.join(KV)}")
    return KV[name]


def refusal(device: Device, weights: str, kv: str) -> UserError | None:
    """Why a device has no kernel for a format; None where it has one."""
    known_weights(weights), known_kv(kv)
    for what, name, all_of_them in (("weights", weights, WEIGHTS), ("keys and values", kv, KV)):
        there = [one.name for one in all_of_them.values() if _has(device, one)]
        if name not in there:
            return UserError(f"{device.name} has no kernel for {what} in {name}", f"{what} in {' or '.join(there)}, or another device")
    return None


def _has(device: Device, one: HeldWeights | HeldKv) -> bool:
    if one.name == "bf16":
        return True
    if one.name == "fp8":
        return FP8 in device.peak_flops_per_second
    return device.backend == "cuda" and (device.compute_capability or (0, 0)) >= one.capability


# ---------------------------------------------------------------------- bytes


def formatted(trace: Trace, weights: HeldWeights) -> Trace:
    """With what the weights of blocks are held in; what ops read is left as it is, their seconds are a rule."""
    if weights.name == "bf16":
        return trace
    inside = set(block_weights(trace))
    storages = {
        number: one._replace(nbytes=int(one.nbytes * weights.bits / 16)) if number in inside else one for number, one in trace.storages.items()
    }
    return replace(trace, storages=storages, meta={**trace.meta, "weights": weights.name})


def block_weights(trace: Trace) -> Iterator[int]:
    """Parameters that products of the blocks read; table and output layer stay as they are."""
    for ops in blocks_of(trace).each:
        for op in ops:
            name = short(op.name)
            if name in PRODUCTS and trace.storages[op.inputs[PRODUCTS[name] + 1].storage].role == PARAMETER:
                yield op.inputs[PRODUCTS[name] + 1].storage


# ---------------------------------------------------------------------- seconds

Seconds = Callable[[Op], float]
"""Of a 16-bit product."""


def repriced(weights: HeldWeights, device: Device, seconds: Seconds) -> Callable[[Op, str, float], tuple[float, float]]:
    """A rule for `Speeds.reprice`: seconds of products in blocks in this format."""

    def price(op: Op, family: str, alone: float) -> tuple[float, float]:
        name = short(op.name)
        if family != "gemm" or name not in PRODUCTS or not _in_block(op):
            return alone, 1.0
        at = PRODUCTS[name]
        rows = op.inputs[at].spec.shape[-2]
        one, many = seconds(_with_rows(op, at, 1)), seconds(_with_rows(op, at, COMPUTES))
        computes = alone if alone > READS * one else min(alone, many * rows / COMPUTES)
        share = weights.bits / 16
        if weights.own_peak:
            dtype = op.inputs[at].spec.dtype
            computes *= device.peak(dtype) / device.peak(weights.own_peak)
            turned = 1.5 * op.inputs[at].spec.nbytes / device.memory_bandwidth_bytes_per_second
            return max(one * share, computes) + turned, 1.0
        return max(one * share, computes * weights.slower), 1.0

    return price


def _in_block(op: Op) -> bool:
    return any(part.isdigit() for part in op.module.split("."))


def _with_rows(op: Op, at: int, rows: int) -> Op:
    """The same product of another number of rows."""

    def other(ref: Any) -> Any:
        shape = ref.spec.shape
        return ref._replace(spec=ref.spec._replace(shape=(*shape[:-2], rows, shape[-1])))

    inputs = tuple(other(ref) if place == at else ref for place, ref in enumerate(op.inputs))
    return replace(op, inputs=inputs, outputs=(other(op.outputs[0]), *op.outputs[1:]))
