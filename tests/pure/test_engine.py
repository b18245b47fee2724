"""The one loop of every search: in order, without what cannot win, ended early with what it has; and what is chosen of what was found."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest

from foretell.search.solve.engine import best_of, each_kind, search


class Numbers:
    """Numbers with a bound below each: the least is looked for."""

    def __init__(self, values: list[float], bounds: list[float], at: Callable[[int], None] = lambda _: None) -> None:
        self.values, self.bounds, self.at = values, bounds, at
        self.found: list[float] = []
        self.costed = 0

    def candidates(self) -> Iterator[int]:
        yield from sorted(range(len(self.values)), key=lambda number: self.bounds[number])
        if self.found and min(self.found) > 1:  # half of the best, once that is known
            self.values.append(min(self.found) / 2)
            self.bounds.append(0.0)
            yield len(self.values) - 1

    def hopeless(self, one: int) -> bool:
        return bool(self.found) and self.bounds[one] >= min(self.found)

    def cost(self, one: int) -> None:
        self.costed += 1
        self.at(self.costed)
        self.found.append(self.values[one])


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_bound_loses_nothing_and_later_candidates_follow_from_what_was_found(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.uniform(1, 9) for _ in range(50)]
    space = Numbers(list(values), [value * draw.uniform(0.7, 1.0) for value in values])
    assert search(space) == ""
    assert min(space.found) == min(values) / 2 and space.costed < len(values)


def test_every_search_ends_early_in_the_same_ways() -> None:
    def interrupt(costed: int) -> None:
        if costed == 4:
            raise KeyboardInterrupt

    plain, values = [0.0] * 50, [float(number) for number in range(50, 0, -1)]
    space = Numbers(list(values), list(plain), interrupt)
    assert search(space) == "interrupted" and space.found == values[:3]
    space = Numbers(list(values), list(plain))
    assert search(space, most=7) == "7 plans were costed" and space.found == values[:7]
    space = Numbers(list(values), list(plain), lambda _: time.sleep(0.02))
    assert search(space, patience=0.05) == "0 seconds were over" and 1 <= len(space.found) < 10


def test_of_those_alike_the_simplest_is_best() -> None:
    pairs = list(itertools.product((1.0, 1.005, 1.02), range(3)))
    for some in itertools.combinations(pairs, 4):
        least = min(score for score, _ in some)
        near = [one for one in some if one[0] <= least * 1.01]
        assert best_of(some, lambda one: one[:1], lambda one: one[1], 0.01) == min(near, key=lambda one: (one[1], one[0]))
    assert best_of([], lambda one: one, lambda one: one, 0.01) is None
    assert best_of([(0.0, 2), (0.0, 1)], lambda one: one[:1], lambda one: one[1], 0.01) == (0.0, 1)


def test_of_every_kind_the_first_stays() -> None:
    assert each_kind(["aa", "b", "ab", "c", "bb"], lambda word: word[0]) == ["aa", "b", "c"]
