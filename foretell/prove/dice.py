"""Random numbers from a public seed, the same on every machine and under every Python."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

Value = TypeVar("Value")


class Dice:
    """A stream of numbers: SHA-256 of the seed and a counter, 53 bits of each."""

    def __init__(self, seed: str) -> None:
        self.seed, self.turn = seed, 0

    def share(self) -> float:
        """From 0 up to, not including, 1."""
        found = hashlib.sha256(f"{self.seed}/{self.turn}".encode()).digest()
        self.turn += 1
        return (int.from_bytes(found[:8], "big") >> 11) / 2**53

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.share()

    def whole(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self.share() * (high - low + 1))

    def times(self, low: float, high: float) -> float:
        """Every factor alike: as often between 1 and 2 as between 50 and 100."""
        return low * math.exp(self.share() * math.log(high / low))

    def pick(self, values: Sequence[Value]) -> Value:
        return values[int(self.share() * len(values))]

    def weighted(self, weights: Mapping[Value, float]) -> Value:
        left = self.share() * sum(weights.values())
        for value, weight in weights.items():
            left -= weight
            if left < 0:
                return value
        return list(weights)[-1]
