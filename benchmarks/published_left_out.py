"""Constants that one source alone informs, set back to what would stand there without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from foretell.cost import analytic, collectives, stack, transformer_time  # noqa: E402

Without = Callable[[], AbstractContextManager[None]]


@contextmanager
def entry(table: Any, key: str, value: object) -> Iterator[None]:
    """A table of constants with another value, or without one (None)."""
    old = table.get(key)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    try:
        yield
    finally:
        if old is not None:
            table[key] = old


@contextmanager
def attribute(module: Any, name: str, value: object) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


@contextmanager
def stacks(change: Callable[[stack.Stack], stack.Stack]) -> Iterator[None]:
    with ExitStack() as all_of_them:
        for name, one in dict(stack.STACKS).items():
            all_of_them.enter_context(entry(stack.STACKS, name, change(one)))
        yield


@contextmanager
def without_bloom() -> Iterator[None]:
    with (
        stacks(lambda one: replace(one, stall_seconds=0.0, tensor_wait=0.0)),
        entry(collectives.REACHED, "OPA100", None),
    ):
        yield


@contextmanager
def without_titan() -> Iterator[None]:
    with (
        stacks(lambda one: replace(one, ring_loss=0.0)),
        attribute(transformer_time, "NETWORK_DRAG", 1.0),
        entry(analytic.DEVICES, "H100-SXM-96GB", analytic.DEVICES["H100-SXM-80GB"]),
    ):
        yield


@contextmanager
def without_foundry() -> Iterator[None]:
    """FlashAttention 1 as the FlashAttention-2 paper has it on A100, and on Hopper as much quicker as its successor
    is there; the drag that titan and torchao alone would set."""
    known, newer = analytic.KERNELS["flash-2"]["ampere"], analytic.KERNELS["flash-2"]["hopper"]
    older = analytic.Kernel(0.37, 0.30, "FlashAttention-2 paper: 100 to 130 of 312 TFLOP/s", 1.0)
    hopper = analytic.Kernel(
        older.forward * newer.forward / known.forward, older.backward * newer.backward / known.backward, "scaled", 1.0
    )
    with (
        entry(analytic.KERNELS, "flash-1", {"ampere": older, "hopper": hopper}),
        stacks(lambda one: replace(one, drag=0.6)),
    ):
        yield


@contextmanager
def without_torchao() -> Iterator[None]:
    with entry(analytic.DEVICES, "MI300X", None), entry(analytic.DEVICES, analytic.POWER_LIMITED, None):
        yield


@contextmanager
def without_volta() -> Iterator[None]:
    with entry(analytic.FAMILIES, "volta", analytic.FAMILIES["volta"]._replace(product=0.72, product8=0.72)):
        yield


@contextmanager
def without_nanogpt() -> Iterator[None]:
    with stacks(lambda one: replace(one, attention="flash-1") if one.name == "nanogpt" else one):
        yield


SOURCES: dict[str, tuple[str, Without]] = {
    "bsa100": ("blocking launches, waits between ranks, the measured network", without_bloom),
    "bloom": ("blocking launches, waits between ranks, the measured network", without_bloom),
    "titan": ("the loss of ring attention, the lower drag of network rings, the 500 W factor", without_titan),
    "foundry": ("the fitted FlashAttention 1 rates; drag as titan and torchao alone set it", without_foundry),
    "torchao": ("the factors of MI300X and of power-limited B200", without_torchao),
    "bs1b3": ("the fitted rate of V100", without_volta),
    "nanogpt": ("attention spelt out", without_nanogpt),
}
"""Start of a source's name → what is taken away."""
