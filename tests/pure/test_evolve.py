"""Evolutionary search against brute force, over landscapes whose best is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from foretell.tune.search.evolve import Evolution
from foretell.tune.search.space import Axis, Config, ConfigSpace, key_of

SPACE = ConfigSpace((
    Axis("rows", (1, 2, 4, 8, 16, 32)), Axis("warps", (1, 2, 4, 8, 16)), Axis("programs", (1, 2, 4, 8, 16)),
    Axis("block", (128, 256, 512, 1024, 2048)), Axis("reuse", (False, True)),
))  # fmt: skip
"""1500 configurations."""
Seconds = Callable[[Config], float | None]


def landscape(seed: int) -> Seconds:
    """Times as kernels have them: a valley in each axis on a log scale, axes that pull at each other, a tenth that does not run."""
    draw = random.Random(seed)
    best = {axis.name: draw.randrange(len(axis.choices)) for axis in SPACE.axes}
    weight = {axis.name: draw.uniform(0.02, 0.5) for axis in SPACE.axes}
    pull = draw.uniform(0.0, 0.3)
    broken = {key_of(config) for config in SPACE.all() if draw.random() < 0.1}

    def seconds(config: Config) -> float | None:
        if key_of(config) in broken:
            return None
        off = {axis.name: axis.choices.index(config[axis.name]) - best[axis.name] for axis in SPACE.axes}
        return math.exp(sum(weight[name] * abs(gap) for name, gap in off.items()) + pull * abs(off["rows"] - off["warps"]) / 2)

    return seconds


def found(seconds: Seconds, measured: int, seed: int = 0) -> tuple[float, list[str]]:
    """The best time after so many measurements, and the path."""
    evolution, path = Evolution(SPACE, seed=seed), []
    while len(path) < measured and (generation := evolution.ask()):
        for config in generation:
            path.append(key_of(config))
            evolution.tell(config, seconds(config))
    return evolution.ranked[0][0], path


def brute(seconds: Seconds) -> float:
    return min(time for config in SPACE.all() if (time := seconds(config)) is not None)


def drawn(seconds: Seconds, measured: int, seed: int) -> float:
    some = random.Random(seed).sample(list(SPACE.all()), measured)
    return min(time for config in some if (time := seconds(config)) is not None)


def test_the_planted_best_is_found_in_a_tenth_of_the_measurements() -> None:
    """On 20 landscapes of 1500 configurations, against all of them; drawing as many at random finds few."""
    seeds = range(20)
    hits = sum(found(landscape(seed), 150)[0] == brute(landscape(seed)) for seed in seeds)
    lucky = sum(drawn(landscape(seed), 150, seed) == brute(landscape(seed)) for seed in seeds)
    assert hits >= 18 and lucky <= 6, (hits, lucky)


def test_the_same_seed_and_times_take_the_same_path() -> None:
    assert found(landscape(3), 60) == found(landscape(3), 60)
    assert found(landscape(3), 60, seed=1)[1] != found(landscape(3), 60)[1]


def test_nothing_is_asked_twice_and_a_small_space_is_done_whole() -> None:
    small = ConfigSpace((Axis("a", (1, 2, 3)), Axis("b", (False, True))))
    evolution, path = Evolution(small), []
    while generation := evolution.ask():
        for config in generation:
            path.append(key_of(config))
            evolution.tell(config, float(config["a"]))
    assert sorted(path) == sorted(map(key_of, small.all()))


def test_what_was_measured_before_is_not_asked_again() -> None:
    evolution = Evolution(SPACE, known=[{**SPACE.first, "rows": 32}])
    evolution.tell(SPACE.first, 1.0)
    first = evolution.ask()
    assert SPACE.first not in first and first[0] == {**SPACE.first, "rows": 32}


def test_failures_are_no_parents() -> None:
    evolution = Evolution(SPACE)
    for config in evolution.ask():
        evolution.tell(config, None)
    assert evolution.ranked == [] and len(evolution.ask()) > 1


@pytest.mark.parametrize("data", [{}, [], None, {"a": 1}, {**SPACE.first, "rows": 3}, {**SPACE.first, "reuse": 1}, {**SPACE.first, "more": 1}])
def test_a_configuration_from_a_file_is_one_of_the_space(data: object) -> None:
    assert SPACE.read(dict(SPACE.first)) == SPACE.first
    with pytest.raises(ValueError, match=r"axes|is '"):
        SPACE.read(data)
