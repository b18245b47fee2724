"""Seconds of single ops on a device, from what was measured there.

Each family has two estimators: laws, sums of physical terms fitted per op, and boosted trees that learn from features
what the laws leave over. Held-out error decides which is used; both errors are kept in the fitted data. The rows are
dealt into folds; each fold's laws and trees see the other folds alone, give the held-out errors, and together answer.

A few thousand rows of a shared probe say how quick a device is, and little about ops that few of them are. So a family may also
be another probe's, at this device's rates, with trees that correct it; of the two, again, held-out error decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretell.hardware.types import Device
from foretell.price.kernels.elsewhere import Correction, foreign, group_of
from foretell.price.kernels.features import Described, Shape, describe
from foretell.price.kernels.laws import FLOOR_SECONDS, Floats, Law, by_laws, laws_of
from foretell.price.kernels.shapes import short
from foretell.price.kernels.trees import Trees, fit

if TYPE_CHECKING:
    from foretell.hardware.profile import OpRow

__all__ = ["Family", "OpModel", "learn", "short"]

FOLDS = 5
LEAST_ROWS = 40
"""With fewer rows a family has laws alone."""
LONG_SECONDS = 20e-6
LEAST_SECONDS = 1e-9
"""Of an op that launches anything, whatever a spoiled profile says."""
SETTINGS: dict[str, Any] = {"depth": 5, "trees": 120, "rate": 0.1, "feature_share": 0.4, "row_share": 0.6, "min_leaf": 2, "digits": 4}
MANY_ROWS = 3000
MANY: dict[str, Any] = {"depth": 7, "trees": 240, "rate": 0.1, "feature_share": 0.35, "row_share": 0.5}
"""Of families with more rows than that."""
SCALING: dict[str, Any] = {**SETTINGS, "trees": 0}
"""Trees without questions: one factor on another probe's family."""



@dataclass(frozen=True)
class FoldModel:
    """What one fold's rows taught."""

    laws: Mapping[str, Law]
    trees: Trees | None

    def logs(self, described: Sequence[Described], known: Floats | None = None) -> Floats:
        """log(seconds); `known` stands for the laws where another probe's family does."""
        found: Floats = np.log(by_laws(described, self.laws)) if known is None else known
        if self.trees is None:
            return found
        return found + self.trees.predict(matrix(described, found, self.trees.features))

    def to_dict(self) -> dict[str, Any]:
        return {
            "laws": {key: dict(law) for key, law in self.laws.items()},
            "trees": self.trees.to_dict() if self.trees is not None else None,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FoldModel:
        return cls(data["laws"], Trees.from_dict(data["trees"]) if data["trees"] is not None else None)


@dataclass(frozen=True)
class Family:
    """What was learned of one family of ops."""

    parts: tuple[FoldModel, ...]
    accuracy: Mapping[str, float]
    """Held-out errors: rows, plain_median, plain_mean, plain_p90, trees_median, ..., r2."""
    basis: Family | None = None
    """Another probe's, which the trees correct."""

    def logs(self, described: Sequence[Described]) -> Floats:
        """log(seconds) of ops of this family."""
        known = self.basis.logs(described) if self.basis is not None else None
        found: Floats = sum(part.logs(described, known) for part in self.parts) / len(self.parts)  # type: ignore[assignment]
        return found

    def refine(self, described: Sequence[Described]) -> list[float]:
        """Seconds of ops of this family."""
        return [float(value) for value in np.maximum(np.exp(self.logs(described)), LEAST_SECONDS)]

    def to_dict(self) -> dict[str, Any]:
        basis = {"basis": self.basis.to_dict()} if self.basis is not None else {}
        return {
            "parts": [part.to_dict() for part in self.parts],
            "accuracy": {name: round(value, 5) for name, value in self.accuracy.items()}, **basis,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Family:
        basis = Family.from_dict(data["basis"]) if "basis" in data else None
        return cls(tuple(FoldModel.from_dict(one) for one in data["parts"]), dict(data["accuracy"]), basis)


@dataclass(frozen=True)
class OpModel:
    """Seconds of any op on one device."""

    device: Device
    families: Mapping[str, Family]
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Group of kernels measured elsewhere → factor on what the families say."""
    _known: dict[Shape, float] = field(default_factory=dict, compare=False, repr=False)

    def seconds(self, shapes: Iterable[Shape]) -> dict[Shape, float]:
        """Device seconds of each op; 0 for ops that launch nothing."""
        asked = dict.fromkeys(shapes)
        waiting: dict[str, list[tuple[Shape, Described]]] = {}
        for shape in asked:
            if shape in self._known:
                continue
            described = describe(shape, self.device)
            if described is None:
                self._known[shape] = 0.0
            else:
                known = "" if foreign(shape) else described.family
                waiting.setdefault(known, []).append((shape, described))
        for family, pairs in waiting.items():
            learned = self.families.get(family)
            found = learned.refine([d for _, d in pairs]) if learned else [d.base for _, d in pairs]
            self._known.update((shape, value) for (shape, _), value in zip(pairs, found, strict=True))
        if self.corrections:
            self._correct([pair for pairs in waiting.values() for pair in pairs])
        return {shape: self._known[shape] for shape in asked}

    def _correct(self, pairs: Sequence[tuple[Shape, Described]]) -> None:
        """Apply what was measured elsewhere to what was carried over."""
        groups: dict[str, list[tuple[Shape, Described]]] = {}
        for pair in pairs:
            groups.setdefault(group_of(pair[0]), []).append(pair)
        for name, some in groups.items():
            if name in self.corrections:
                logs = [math.log(self._known[shape]) for shape, _ in some]
                factors = self.corrections[name].factors([d for _, d in some], logs)
                self._known.update((shape, self._known[shape] * float(f)) for (shape, _), f in zip(some, factors, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {name: family.to_dict() for name, family in self.families.items()}

    @classmethod
    def from_dict(cls, device: Device, data: Mapping[str, Any], corrections: Mapping[str, Any] | None = None) -> OpModel:
        families = {name: Family.from_dict(one) for name, one in data.items()}
        return cls(device, families, {name: Correction.from_dict(one) for name, one in (corrections or {}).items()})


def matrix(described: Sequence[Described], logs: Floats, features: Sequence[str]) -> Floats:
    """Features as rows, in the order the trees want them: an op's own, its law's seconds, and what its law adds to a
    plain estimate."""
    rows = []
    for d, found in zip(described, logs.tolist(), strict=True):
        get = d.values.get
        rows.append([get(name, 0.0) for name in features[:-2]] + [found, found - math.log(d.base)])
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(features))


# ---------------------------------------------------------------- learning


def learn(
    rows: Sequence[OpRow], device: Device, *, groups: Sequence[object] | None = None, seed: int = 0, basis: OpModel | None = None
) -> OpModel:
    """Fit every family to measured rows; `groups` says which rows were measured together and must be held out together. With a
    `basis`, another probe's families at this device's rates, a family is fitted alone or corrects that one."""
    least = 0.0 if basis is None else FLOOR_SECONDS
    sorted_rows: dict[str, list[tuple[Described, float, object]]] = {}
    for position, row in enumerate(rows):
        described = describe(Shape(row.name, row.inputs, row.outputs, row.attrs), device)
        if described is not None and row.seconds > least:
            group = groups[position] if groups is not None else position
            sorted_rows.setdefault(described.family, []).append((described, row.seconds, group))
    others = basis.families if basis is not None else {}
    found = {name: _family(some, seed, others.get(name)) for name, some in sorted(sorted_rows.items())}
    return OpModel(device, {**others, **found})


class Rows(NamedTuple):
    """Of one family, dealt into folds."""

    described: Sequence[Described]
    seconds: Floats
    fold: NDArray[np.int64]


def _family(rows: list[tuple[Described, float, object]], seed: int, basis: Family | None = None) -> Family:
    described = [d for d, _, _ in rows]
    seconds = np.array([s for _, s, _ in rows])
    group = np.unique([repr(g) for _, _, g in rows], return_inverse=True)[1]
    folds = min(FOLDS, int(group.max()) + 1)
    if folds < 2:
        whole = FoldModel(laws_of(described, seconds), None)
        return basis or Family((whole,), {"rows": float(len(rows))})
    fold = (np.random.default_rng(seed).permutation(int(group.max()) + 1) % folds)[group]
    dealt = Rows(described, seconds, fold)
    found = [_fitted(dealt, seed)]
    if basis is not None:
        found += [_corrected(dealt, seed, basis, settings) for settings in (SCALING, SETTINGS)]
    return min(found, key=lambda one: float(np.abs(one[1]).mean()))[0]


def _fitted(rows: Rows, seed: int) -> tuple[Family, Floats]:
    """By laws, and trees where they are nearer; and log(measured / predicted) of rows held out."""
    described, seconds, fold = rows
    settings = {**SETTINGS, **(MANY if len(seconds) > MANY_ROWS else {})}
    features = (*sorted(described[0].values), "law", "added")
    plain, held, parts = np.empty(len(seconds)), np.empty(len(seconds)), []
    for number in range(int(fold.max()) + 1):
        seen = np.flatnonzero(fold != number)
        laws = laws_of([described[int(i)] for i in seen], seconds[seen])
        logs = np.log(by_laws(described, laws))
        left, trees = np.log(seconds) - logs, None
        out = fold == number
        plain[out] = held[out] = left[out]
        if len(seconds) >= LEAST_ROWS:
            x = matrix(described, logs, features)
            trees = fit(x[seen], left[seen], features, seed=seed + number, weights=_weights(seconds[seen]), **settings)
            held[out] = left[out] - trees.predict(x[out])
        parts.append(FoldModel(laws, trees))
    accuracy = {"rows": float(len(seconds)), **_errors("plain", plain, seconds)}
    if parts[0].trees is not None:
        accuracy |= _errors("trees", held, seconds)
    if accuracy.get("trees_mean", math.inf) >= accuracy["plain_mean"]:
        parts, held = [FoldModel(part.laws, None) for part in parts], plain
    return Family(tuple(parts), accuracy | _explained(held, seconds)), held


def _corrected(rows: Rows, seed: int, basis: Family, settings: Mapping[str, Any]) -> tuple[Family, Floats]:
    """Another probe's family with trees that say how much longer its ops take here; log(measured / predicted) of rows held out."""
    described, seconds, fold = rows
    features = (*sorted(described[0].values), "law", "added")
    logs = basis.logs(described)
    left, x = np.log(seconds) - logs, matrix(described, logs, features)
    held, parts = np.empty(len(seconds)), []
    for number in range(int(fold.max()) + 1):
        seen, out = np.flatnonzero(fold != number), fold == number
        trees = fit(x[seen], left[seen], features, seed=seed + number, weights=_weights(seconds[seen]), **settings)
        held[out] = left[out] - trees.predict(x[out])
        parts.append(FoldModel({}, trees))
    accuracy = {"rows": float(len(seconds)), **_errors("plain", left, seconds), **_errors("trees", held, seconds)}
    return Family(tuple(parts), accuracy | _explained(held, seconds), basis), held


def _weights(seconds: Floats) -> Floats:
    found: Floats = 1 + 2 * np.minimum(1, seconds / LONG_SECONDS)
    return found


def _explained(held: Floats, seconds: Floats) -> dict[str, float]:
    return {"r2": float(1 - np.var(held) / np.var(np.log(seconds))) if np.ptp(seconds) else 0.0}


def _errors(which: str, left: Floats, seconds: Floats) -> dict[str, float]:
    error = np.abs(np.exp(-left) - 1)
    return {
        f"{which}_median": float(np.median(error)), f"{which}_mean": float(error.mean()),
        f"{which}_p90": float(np.quantile(error, 0.9)), f"{which}_by_time": float((error * seconds).sum() / seconds.sum()),
    }  # fmt: skip
