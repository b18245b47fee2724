"""Your own samples"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import default_collate

from foretell.eject.pieces.model import own_data
from foretell.eject.pieces.order import key_of, shuffled


def collated(samples: list[Any]) -> Any:
    made = default_collate(samples)
    return tuple(made) if isinstance(made, list) else made


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What a sample draws depends on the sample alone, and the run draws on as if it had not."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    random.seed(seed & 0xFFFFFFFFFFFFFFFF)
    torch.random.default_generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
    if numpy:
        numpy.random.seed(seed & 0xFFFFFFFF)
    yield
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    if numpy:
        numpy.random.set_state(kept[2])


class OwnSamples:  # if: indexed
    """What data("train") gives, by index."""

    def __init__(self, seed: int) -> None:
        self.made, self.seed = own_data(), seed

    def batch(self, numbers: list[int]) -> Any:
        samples = []
        for number in numbers:
            epoch, position = divmod(number, len(self.made))
            index = shuffled(position, len(self.made), self.seed, epoch)
            with seeded(key_of(self.seed, epoch) ^ (index * 0x9E3779B97F4A7C15)):
                samples.append(self.made[index])
        return collated(samples)


class OwnStream:  # if: stream
    """What data("train") gives, once and in its own order. Every rank reads all of it and keeps its part."""

    def __init__(self) -> None:
        self.items, self.at = iter(own_data()), 0

    def batch(self, numbers: list[int]) -> Any:
        samples = []
        for number in numbers:
            samples.append(next(itertools.islice(self.items, number - self.at, None)))
            self.at = number + 1
        return collated(samples)
