"""Kernels measured elsewhere: how much longer an op takes on a device than the nearest probe's laws say of it.

A public table holds products of one layout and attention forward alone. What it shows is therefore kept as a factor on what is
carried over from a device that was probed, learned from sizes and never from layouts: the factor of `x @ w.T` also serves
`x @ w`, and that of attention's forward its backward. Kernels that PyTorch does not have (an op says so with `kernel:NAME`) are
told relative to a plain estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretell.price.kernels.laws import Floats
from foretell.price.kernels.shapes import Described, Shape, short
from foretell.price.kernels.trees import Trees, fit

SETTINGS: Mapping[str, Any] = {"depth": 6, "trees": 250, "rate": 0.06, "feature_share": 0.4, "row_share": 0.6, "min_leaf": 3, "digits": 4}
LAYOUT = frozenset({
    "left_t", "right_t", "strided", "inner_left", "inner_right", "aligned", "operands", "bias", "width", "half", "tf32", "grouped",
    "eight", "complex", "batch", "backward", "flash", "efficient", "inputs", "dropout",
})  # fmt: skip
"""Features that a table of one layout and one direction cannot teach."""
HELD_OUT = 3
"""Every so many rows are held out to say how well a factor is known."""
SHORT_SECONDS = 20e-6
LEVEL = 0.9
KERNEL = "kernel:"


@dataclass(frozen=True)
class Correction:
    """log(factor) on the carried seconds of one group of ops."""

    trees: Trees
    accuracy: Mapping[str, float]
    """Of rows held out: rows, median, p90, and for nine of ten the low and high factors on a prediction, `short_` below 20 µs."""

    def factors(self, described: Sequence[Described], logs: Sequence[float]) -> Floats:
        found: Floats = np.exp(self.trees.predict(_table(described, logs, self.trees.features)))
        return found

    def band(self, seconds: float) -> tuple[float, float]:
        """Factors on a prediction between which nine of ten measurements lie."""
        which = "short_" if seconds < SHORT_SECONDS else ""
        return self.accuracy[f"{which}low"], self.accuracy[f"{which}high"]

    def to_dict(self) -> dict[str, Any]:
        return {"trees": self.trees.to_dict(), "accuracy": {name: round(value, 4) for name, value in self.accuracy.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Correction:
        return cls(Trees.from_dict(data["trees"]), dict(data["accuracy"]))


def group_of(shape: Shape) -> str:
    """The group of measured kernels that an op belongs to; empty where no table speaks of it."""
    named = next((str(attr).removeprefix(KERNEL) for attr in shape.attrs if str(attr).startswith(KERNEL)), "")
    if named:
        return named
    name = short(shape.name)
    if "flash_attention" in name:
        return "flash-2"
    if name == "_scaled_mm":
        return "8-bit"
    products = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "linear")
    return "16-bit" if name in products and shape.inputs[-1].dtype in ("bfloat16", "float16") else ""


def foreign(shape: Shape) -> bool:
    """Whether PyTorch has no such kernel, so that nothing probed speaks of it."""
    return any(str(attr).startswith(KERNEL) for attr in shape.attrs)


def learn(described: Sequence[Described], carried: Sequence[float], seconds: Sequence[float], seed: int = 0) -> Correction:
    """Fit the factor to a device's rows; a third of them, held out first, says how well it is known."""
    logs, target = np.log(np.array(carried)), np.log(np.array(seconds) / np.array(carried))
    features = (*sorted(described[0].values.keys() - LAYOUT), "law")
    x = _table(described, logs.tolist(), features)
    weights = 1 + 2 * np.minimum(1, np.array(seconds) / SHORT_SECONDS)
    held = np.random.default_rng(seed).permutation(len(target)) % HELD_OUT == 0
    some = fit(x[~held], target[~held], features, seed=seed, weights=weights[~held], **SETTINGS)
    left = target[held] - some.predict(x[held])
    whole = fit(x, target, features, seed=seed, weights=weights, **SETTINGS)
    return Correction(whole, _errors(left, np.array(seconds)[held]))


def _errors(left: Floats, seconds: Floats) -> dict[str, float]:
    """Of log(measured / predicted)."""
    error = np.abs(np.exp(-left) - 1)
    found = {"rows": float(len(left)), "median": float(np.median(error)), "p90": float(np.quantile(error, LEVEL))}
    for name, chosen in (("short_", left[seconds < SHORT_SECONDS]), ("", left[seconds >= SHORT_SECONDS])):
        some = chosen if len(chosen) > 1 / (1 - LEVEL) else left
        for end, level in (("low", (1 - LEVEL) / 2), ("high", (1 + LEVEL) / 2)):
            found[name + end] = math.exp(float(np.quantile(some, level)))
    return found


def _table(described: Sequence[Described], logs: Sequence[float], features: Sequence[str]) -> Floats:
    rows = [[d.values.get(name, 0.0) for name in features[:-1]] + [log] for d, log in zip(described, logs, strict=True)]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(features))
