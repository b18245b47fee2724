"""What short stacks of blocks cost, and plans op by op, kept on disk: a search for the same model and devices lowers and simulates
none again.

An entry of the cache holds all of one model on one cluster: key → seconds, or bytes, as JSON has them. It depends on what
the traces depend on, on the devices and on their measured profile.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from math import fsum, isfinite
from typing import Any

from foretell.decode import value_of
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.plan.types import Plan
from foretell.quantities import Time
from foretell.simulate.parts import PlanCost, RankCost
from foretell.trace.store import cache as store

KIND = "costs"
MOST = 20_000
"""Costs that an entry holds; with more it begins anew."""
Values = dict[str, float]
Deep = tuple[Values, list[Values]]
"""Of a walked stack, and of one block more of each of its runs."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What a plan costs op by op: all of `PlanCost` but the plan itself, what its ranks run and when."""

    ranks: tuple[RankCost, ...]
    time: Time | None
    unit: str
    per_step: int
    bubble: float
    model_flops: int
    recompute_flops: int
    watts: float | None
    notes: tuple[str, ...]
    told: tuple[str, ...]
    """By the traces that it was costed from, and those read before."""
    kept_spans: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, cost: PlanCost, told: Sequence[str]) -> Exact:
        same = {one.name: getattr(cost, one.name) for one in fields(cls) if one.name not in ("told", "kept_spans")}
        return cls(**same, told=tuple(told), kept_spans=cost.spans())

    def cost(self, plan: Plan) -> PlanCost:
        return PlanCost(plan=plan, **{one.name: getattr(self, one.name) for one in fields(self) if one.name != "told"})


@dataclass(frozen=True)
class Known:
    """Key → costs."""

    steps: dict[str, Deep] = field(default_factory=dict)
    events: dict[str, dict[str, Deep]] = field(default_factory=dict)
    sizes: dict[str, Deep] = field(default_factory=dict)
    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    plans: dict[str, Exact] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, vars(self).values()))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "plans": {key: asdict(one) for key, one in self.plans.items()}}


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

    def knows(self, table: str, key: object) -> bool:
        return repr(key) in getattr(self.known, table)

    def keep(self) -> None:
        if self.name and self.fresh:
            store.write(KIND, self.name, (self.known if len(self.known) <= MOST else Known()).to_json(), self.files)
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
    """Tens of thousands of numbers: each table by its own shape, which takes a tenth of what reading any dataclass does."""
    return Known(
        steps={str(key): _deep(one) for key, one in entry["steps"].items()},
        events={str(key): {str(name): _deep(one) for name, one in of.items()} for key, of in entry["events"].items()},
        sizes={str(key): _deep(one) for key, one in entry["sizes"].items()},
        peaks={str(key): _peak(one) for key, one in entry["peaks"].items()},
        plans={str(key): value_of(Exact, one) for key, one in entry["plans"].items()},
    )


def _deep(found: Sequence[Any]) -> Deep:
    values, more = found
    if not isfinite(fsum(chain(values.values(), *[one.values() for one in more]))):
        raise ValueError("a cost is no finite number")
    return values, more


def _peak(found: Sequence[Any]) -> tuple[int, int]:
    reserved, allocated = found
    if type(reserved) is not int or type(allocated) is not int:
        raise ValueError("bytes are no whole numbers")
    return reserved, allocated
