"""What short stacks of blocks cost, kept on disk: a search for the same model and devices lowers and simulates none again.

An entry of the cache holds all of one model on one cluster: key → seconds, or bytes, as JSON has them. It depends on what
the traces depend on, on the devices and on their measured profile.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.trace import cache as store

KIND = "costs"
MOST = 20_000
"""Costs that an entry holds; with more it begins anew."""


@dataclass
class Costs:
    """Costs by key; in memory alone where nothing says where to keep them."""

    name: str = ""
    """Of the entry."""
    files: Mapping[str, str] = field(default_factory=dict)
    """User file → its hash."""
    known: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """Whether some are not on disk."""

    def of(self, key: object, made: Callable[[], Any]) -> Any:
        """What was kept, or is made now: of dicts, lists and numbers."""
        name = repr(key)
        if name not in self.known:
            self.known[name], self.fresh = made(), True
        return self.known[name]

    def keep(self) -> None:
        if self.name and self.fresh:
            store.write(KIND, self.name, {"costs": self.known if len(self.known) <= MOST else {}}, self.files)
            self.fresh = False


@dataclass(frozen=True)
class Kept:
    """Costs under one plan."""

    costs: Costs
    plan: str

    def of(self, key: object, made: Callable[[], Any]) -> Any:
        return self.costs.of((self.plan, key), made)


def kept(question: Mapping[str, Any], cluster: Cluster, profile: Profile | None, files: Mapping[str, str]) -> Costs:
    """The costs of a model, by what its traces are asked for, on a cluster."""
    stamp = hashlib.sha256(pickle.dumps(profile)).hexdigest()
    name = store.key_of({KIND: question, "cluster": repr(cluster), "profile": stamp})
    return Costs(name, files, store.read(KIND, name, _parsed) or {})


def _parsed(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = entry["costs"]
    if not isinstance(found, dict):
        raise TypeError("costs are no table")
    return found
