"""Evolutionary search over configurations: asked what to measure next, told what was measured. Pure: the same seed and times, the same path.

    first generation   the usual configuration, those known from elsewhere, drawn ones
    later ones         a third steps along one axis from the best, the rest crossed from two good ones and mutated
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from foretell.tune.search.space import Config, ConfigSpace, key_of

POPULATION = 12
"""Of the best, from which parents are chosen."""
GENERATION = 8
_STEP = 0.7
"""Share of mutations that move by one choice; others may go anywhere."""
_DRAWS = 50


class Evolution:
    """One search."""

    def __init__(self, space: ConfigSpace, *, seed: int = 0, known: Iterable[Config] = (), generation: int = GENERATION) -> None:
        self.space, self.generation = space, generation
        self._random = random.Random(seed)
        self._asked: dict[str, Config] = {}
        self._scores: dict[str, float] = {}
        self._first = [space.first, *known]

    @property
    def told_of(self) -> int:
        return len(self._scores)

    @property
    def ranked(self) -> list[tuple[float, Config]]:
        """The best first; what failed is left out."""
        found = [(score, key) for key, score in self._scores.items() if score < math.inf]
        return [(score, self._asked[key]) for score, key in sorted(found)]

    def tell(self, config: Config, seconds: float | None) -> None:
        """None: it is wrong, or does not run."""
        key = key_of(config)
        self._asked.setdefault(key, config)
        self._scores[key] = math.inf if seconds is None else seconds

    def ask(self) -> list[Config]:
        """The next generation, of configurations that were not asked for before; empty when there are none left."""
        found: list[Config] = []
        ranked = self.ranked[:POPULATION]
        for config in self._first:
            self._take(found, config)
        self._first = []
        if ranked:
            near = [one for _, config in ranked[:2] for one in self.space.neighbours(config)]
            self._random.shuffle(near)
            for config in near:
                if len(found) < self.generation // 3 + 1:
                    self._take(found, config)
        for _ in range(_DRAWS * self.generation):
            if len(found) >= self.generation:
                break
            self._take(found, self._child([config for _, config in ranked]))
        if not found:
            self._take_any(found)
        return found

    def _take(self, found: list[Config], config: Config) -> None:
        key = key_of(config)
        if key not in self._asked:
            self._asked[key] = config
            found.append(config)

    def _take_any(self, found: list[Config]) -> None:
        """What is left of a space that is nearly done; of a large one nothing is looked for."""
        if self.space.size <= 1 << 16:
            for config in self.space.all():
                if len(found) < self.generation:
                    self._take(found, config)

    def _child(self, parents: list[Config]) -> Config:
        draw = self._random
        if len(parents) < 2 or draw.random() < 0.1:
            return {axis.name: draw.choice(axis.choices) for axis in self.space.axes}
        mother, father = (min(draw.sample(range(len(parents)), 2)) for _ in range(2))  # of two the better: they are in order
        child = {axis.name: parents[draw.choice((mother, father))][axis.name] for axis in self.space.axes}
        mutated = draw.sample(self.space.axes, 1 + (draw.random() < 0.3)) if len(self.space.axes) > 1 else self.space.axes
        for axis in mutated:
            at = axis.choices.index(child[axis.name])
            near = [one for one in (at - 1, at + 1) if 0 <= one < len(axis.choices)]
            child[axis.name] = axis.choices[draw.choice(near)] if near and draw.random() < _STEP else draw.choice(axis.choices)
        return child
