"""What a template leaves open: named axes with their choices. Pure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Choice = int | float | str | bool
Config = Mapping[str, Choice]


@dataclass(frozen=True)
class Axis:
    """One thing to choose; choices that are near to each other stand side by side."""

    name: str
    choices: tuple[Choice, ...]
    usual: Choice | None = None
    """Tried first; without it the one in the middle."""

    @property
    def first(self) -> Choice:
        return self.usual if self.usual is not None else self.choices[len(self.choices) // 2]


@dataclass(frozen=True)
class ConfigSpace:
    """All configurations of a template."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(len(one.choices) for one in self.axes)

    @property
    def first(self) -> Config:
        return {one.name: one.first for one in self.axes}

    def all(self) -> Iterator[Config]:
        names = [one.name for one in self.axes]
        for choices in itertools.product(*(one.choices for one in self.axes)):
            yield dict(zip(names, choices, strict=True))

    def neighbours(self, config: Config) -> Iterator[Config]:
        """One step along one axis."""
        for axis in self.axes:
            at = axis.choices.index(config[axis.name])
            for near in (at - 1, at + 1):
                if 0 <= near < len(axis.choices):
                    yield {**config, axis.name: axis.choices[near]}

    def read(self, data: Any) -> Config:
        """A configuration from a file; raises ValueError where it is none of this space."""
        if not isinstance(data, Mapping) or set(data) != {one.name for one in self.axes}:
            raise ValueError("it names other axes")
        for axis in self.axes:
            if not any(data[axis.name] == one and type(data[axis.name]) is type(one) for one in axis.choices):
                raise ValueError(f"{axis.name} is {str(data[axis.name])[:40]!r}")
        return {axis.name: data[axis.name] for axis in self.axes}


def key_of(config: Config) -> str:
    return json.dumps(dict(config), sort_keys=True)


def shown(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in config.items())
