"""What short stacks of blocks cost, kept on disk: a search for the same model and devices lowers and simulates none again.

An entry of the cache holds all of one model on one cluster: key → seconds, or bytes, as JSON has them. It depends on what
the traces depend on, on the devices and on their measured profile.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from foretell.decode import value_of
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.trace import cache as store

KIND = "costs"
MOST = 20_000
"""Costs that an entry holds; with more it begins anew."""
Values = dict[str, float]
Deep = tuple[Values, list[Values]]
"""Of a walked stack, and of one block more of each of its runs."""


@dataclass(frozen=True)
class Known:
    """Key → costs."""

    steps: dict[str, Deep] = field(default_factory=dict)
    events: dict[str, dict[str, Deep]] = field(default_factory=dict)
    sizes: dict[str, Deep] = field(default_factory=dict)
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps) + len(self.events) + len(self.sizes) + len(self.peaks)


@dataclass
class Costs:
    """Costs of one model; in memory alone where nothing says where to keep them."""

    name: str = ""
    """Of the entry."""
    files: Mapping[str, str] = field(default_factory=dict)
    """User file → its hash."""
    known: Known = field(default_factory=Known)
    fresh: bool = False
    """Whether some are not on disk."""

    def of(self, table: str, key: object, made: Callable[[], Any]) -> Any:
        """What a table of `Known` has, or is made now."""
        name, found = repr(key), getattr(self.known, table)
        if name not in found:
            found[name], self.fresh = made(), True
        return found[name]

    def keep(self) -> None:
        if self.name and self.fresh:
            store.write(KIND, self.name, asdict(self.known if len(self.known) <= MOST else Known()), self.files)
            self.fresh = False


@dataclass(frozen=True)
class Kept:
    """Costs under one plan."""

    costs: Costs
    plan: str

    def of(self, table: str, key: object, made: Callable[[], Any]) -> Any:
        return self.costs.of(table, (self.plan, key), made)


def kept(question: Mapping[str, Any], cluster: Cluster, profile: Profile | None, files: Mapping[str, str]) -> Costs:
    """The costs of a model, by what its traces are asked for, on a cluster."""
    stamp = hashlib.sha256(pickle.dumps(profile)).hexdigest()
    name = store.key_of({KIND: question, "cluster": repr(cluster), "profile": stamp})
    return Costs(name, files, store.read(KIND, name, _parsed) or Known())


def _parsed(entry: Mapping[str, Any]) -> Known:
    found: Known = value_of(Known, entry)
    if not all(map(isfinite, _numbers(asdict(found)))):
        raise ValueError("a cost is no finite number")
    return found


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
    else:
        yield value
