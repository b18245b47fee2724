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

from benchmarks.foreign.stacks import Stack, stacks  # noqa: E402
from foretell.price import analytic, machine  # noqa: E402
from foretell.price.network import collectives  # noqa: E402

Without = Callable[[], AbstractContextManager[None]]


@contextmanager
def entry(table: Any, key: str, value: object) -> Iterator[None]:
    """A table of constants with another value, or without one (None); what was made from it is made again."""
    old = table.get(key)
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
    machine._KNOWN.clear()
    try:
        yield
    finally:
        if old is not None:
            table[key] = old
        machine._KNOWN.clear()


@contextmanager
def attribute(module: Any, name: str, value: object) -> Iterator[None]:
    old = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


@contextmanager
def changed_stacks(change: Callable[[Stack], Stack]) -> Iterator[None]:
    with ExitStack() as all_of_them:
        for name, one in dict(stacks()).items():
            all_of_them.enter_context(entry(stacks(), name, change(one)))
        yield


def fitted(**values: float) -> Callable[[Stack], Stack]:
    """Every stack with other fitted constants, where it has them."""
    return lambda one: replace(one, fitted={name: values.get(name, value) for name, value in one.fitted.items()})


@contextmanager
def without_bloom() -> Iterator[None]:
    with (
        changed_stacks(fitted(blocking_seconds=BLOCKING, memory_bound=MEMORY_BOUND["bsa100"])),
        entry(collectives.REACHED, "OPA100", None),
    ):
        yield


@contextmanager
def without_titan() -> Iterator[None]:
    with changed_stacks(lambda one: fitted(ring_loss=0.0, **({"memory_bound": 1.0} if "torchtitan" in one.name else {}))(one)):
        yield


@contextmanager
def without_volta() -> Iterator[None]:
    with (
        entry(analytic.FAMILIES, "volta", analytic.FAMILIES["volta"]._replace(product=0.72, product8=0.72)),
        changed_stacks(fitted(memory_bound=MEMORY_BOUND["bs1b3"])),
    ):
        yield


BLOCKING = 3e-5
"""Assumed where no run says more: a launch and the host's wait for it."""


def without_factor(source: str) -> Without:
    @contextmanager
    def without() -> Iterator[None]:
        with changed_stacks(fitted(memory_bound=MEMORY_BOUND[source])):
            yield

    return without


MEMORY_BOUND = {"sc21": 1.2, "seqsel": 1.5, "bs1b3": 1.2, "bsa100": 1.4}
"""Megatron's factor on memory-bound kernels as the other three sources set it: least mean over sources, in steps of 0.1."""

SOURCES: dict[str, tuple[str, Without]] = {
    "bsa100": ("what a blocking launch adds, the measured network; its share of Megatron's factor", without_bloom),
    "bloom": ("what a blocking launch adds, the measured network; its share of Megatron's factor", without_bloom),
    "titan": ("the loss of ring attention, the factor on memory-bound kernels that are not compiled", without_titan),
    "bs1b3": ("the fitted rate of V100; its share of Megatron's factor", without_volta),
    "sc21": ("its share of Megatron's factor", without_factor("sc21")),
    "seqsel": ("its share of Megatron's factor", without_factor("seqsel")),
}
"""Start of a source's name → what is taken away."""
