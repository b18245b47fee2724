"""Ways to launch a training kernel, few enough to be tried on a GPU at every declared shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from foretell.kernels.kernel import TrainingKernel

Config = dict[str, int]
BACKWARDS = {
    1024: ((4, 4, 1, 1, 0), (4, 8, 1, 1, 0), (4, 8, 0, 0, 0), (8, 4, 1, 1, 0), (2, 8, 0, 1, 0), (4, 12, 0, 1, 0)),
    2048: ((4, 4, 1, 1, 0), (4, 4, 0, 1, 0), (8, 3, 1, 1, 0), (8, 4, 0, 1, 0), (8, 6, 0, 0, 0), (16, 2, 1, 1, 0), (4, 6, 0, 0, 1)),
    4096: ((8, 2, 1, 1, 0), (8, 3, 0, 1, 0), (8, 4, 0, 0, 0), (8, 2, 0, 1, 0), (16, 2, 1, 1, 0), (16, 2, 0, 0, 0), (4, 2, 1, 1, 0),
           (4, 3, 0, 0, 0), (8, 2, 1, 0, 0), (16, 1, 1, 1, 0), (8, 4, 0, 0, 1), (4, 4, 0, 0, 1)),
    8192: ((16, 1, 1, 1, 0), (16, 1, 0, 1, 0), (8, 1, 0, 1, 0), (8, 1, 1, 1, 0), (32, 1, 0, 0, 0), (32, 1, 1, 1, 0), (16, 1, 0, 0, 0),
           (8, 2, 0, 0, 1), (16, 1, 0, 0, 1), (16, 2, 0, 0, 1)),
    16384: ((16, 1, 0, 0, 1), (16, 1, 0, 0, 0), (32, 1, 0, 0, 0), (32, 1, 1, 0, 0), (32, 1, 0, 0, 1), (8, 1, 0, 0, 1)),
}  # fmt: skip
"""Width at most → warps, programs of a multiprocessor, the next row ahead, the weight held, a row read again from the cache."""
FORWARDS = {1024: ((1, 1), (2, 1), (4, 1), (2, 4)), 2048: ((2, 1), (4, 1), (8, 1), (4, 2)), 4096: ((4, 1), (8, 1), (4, 2), (16, 1)),
            8192: ((4, 1), (8, 1), (16, 1), (8, 2)), 16384: ((8, 1), (16, 1), (32, 1))}  # fmt: skip
"""Warps, rows of a program."""


OF_BACKWARD = {"per_sm", "ahead", "hold", "again"}


def of_backward(name: str) -> bool:
    return name.startswith("backward") or name in OF_BACKWARD


def joined(known: Mapping[str, int], fastest_first: Sequence[Mapping[str, int]]) -> Config:
    """The best forward and the best backward in one."""
    found = dict(known)
    for part in (True, False):
        mine = [one for one in fastest_first if all(one[name] == known.get(name) for name in one if of_backward(name) is not part)]
        found |= {name: size for name, size in (mine[0] if mine else {}).items() if of_backward(name) is part}
    return found


def launches_of(kernel: TrainingKernel, shape: Mapping[str, int], known: Mapping[str, int]) -> list[Config]:
    """What is known first, then one part changed at a time: forward and backward are launches of their own."""
    found = [dict(known)]
    for changed in _changes(kernel, shape):
        one = {**known, **changed}
        if one not in found:
            found.append(one)
    return found


def _changes(kernel: TrainingKernel, shape: Mapping[str, int]) -> Iterator[Config]:
    if "norm" in kernel.name:
        width = next((most for most in FORWARDS if shape["width"] <= most), 16384)
        for warps, each in FORWARDS[width]:
            yield {"warps": warps, "each": each}
        for warps, per_sm, ahead, hold, again in BACKWARDS[width]:
            yield {"backward_warps": warps, "per_sm": per_sm, "ahead": ahead, "hold": hold, "again": again}
    elif "glu" in kernel.name:
        for warps, block in product((4, 8), (1024, 2048, 4096)):
            yield {"warps": warps, "block": block}
            yield {"backward_warps": warps, "backward_block": block}
    elif kernel.name == "rotary":
        for warps, block in product((2, 4, 8), (8, 16, 32)):
            yield {"warps": warps, "block": block}
