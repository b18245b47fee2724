"""Seconds of a server's steps on this machine, fitted to steps that it computed: what stands for the path where no device is known.

A step takes a part of its own, and more for each token, sequence, token read from pages, pair of tokens of a prompt and row that
samples. None of these makes a step quicker. Relative errors are fitted, since short steps are as many as long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foretell.errors import UserError
from foretell.lower.serving import StepShape

LEAST_STEPS = 30
NAMES = ("step", "token", "sequence", "read", "pair", "sample")


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Seconds of a step, and of each of what it has."""

    factors: tuple[float, ...]
    """In the order of `NAMES`."""
    off: float
    """How far the steps that it was fitted to are from it, in the median."""
    steps: int
    """That it was fitted to."""

    def seconds(self, shape: StepShape) -> float:
        return sum(factor * value for factor, value in zip(self.factors, features(shape), strict=True))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "factors": dict(zip(NAMES, self.factors, strict=True))}

    @classmethod
    def from_json(cls, data: Any) -> MeasuredSteps:
        try:
            return cls(factors=tuple(float(data["factors"][name]) for name in NAMES), off=float(data["off"]), steps=int(data["steps"]))
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(f"seconds of steps are {data!r:.60}", "as foretell tune serve writes them") from error


def features(shape: StepShape) -> list[float]:
    chunked = sum(count for _, count in shape.chunks)
    read = shape.attended + sum(start + count for start, count in shape.chunks)
    pairs = sum(count * (start + count) for start, count in shape.chunks)
    return [1.0, shape.generating + chunked, shape.generating + len(shape.chunks), read, pairs, shape.samples]


def fitted(shapes: Sequence[StepShape], seconds: Sequence[float]) -> MeasuredSteps:
    """The law of some steps; what would make a step quicker is left out, one after the other."""
    if len(shapes) < LEAST_STEPS:
        raise UserError(f"{len(shapes)} steps are too few to tell what a step takes", "a longer --seconds, or more requests")
    rows, took = np.array([features(one) for one in shapes]), np.maximum(np.array(seconds), 1e-7)
    scale = rows.max(axis=0).clip(1e-12)
    kept = list(range(rows.shape[1]))
    weighted = _settled(rows / scale, took)
    while True:
        found = np.linalg.lstsq(weighted[0][:, kept], weighted[1], rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(found.argmin())]
    factors = np.zeros(rows.shape[1])
    factors[kept] = np.maximum(found, 0.0) / scale[kept]
    off = float(np.median(np.abs(rows @ factors / took - 1)))
    return MeasuredSteps(factors=tuple(map(float, factors)), off=off, steps=len(shapes))


def _settled(rows: np.ndarray[Any, Any], took: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows by their relative error; a step that something else held up counts as one twice as long as its like, no more."""
    found = np.linalg.lstsq(rows / took[:, None], np.ones(len(took)), rcond=None)[0]
    usual = np.maximum(rows @ found, np.quantile(took, 0.01))
    took = np.minimum(took, 2 * usual)
    return rows / took[:, None], np.ones(len(took))
