"""A regressor learned from measurements: boosted trees whose every level asks one question.

A tree of depth d is d questions, "is feature f above t?", and 2**d leaves: a row's answers, read as
a binary number, name its leaf. The prediction is a base plus one leaf of every tree: a small file of
plain numbers, and array operations alone. Each tree is fitted to what the trees before it leave over;
the best question of a level comes from one histogram over (feature, leaf, bin). Figures are rounded
when a tree is made, so what is stored and what was fitted predict the same.

Importing this module imports numpy, a tenth of a second: import it where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretell.errors import FileFormatError, InternalError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHUNK = 1024  # rows predicted at a time, so that the arrays of one level stay small
DIGITS = 6  # significant digits kept of a threshold
DECIMALS = 9  # of a feature: what is nearer is the same on every CPU, whose logarithms differ in the last bit
FAR = 3.0  # under the Huber loss a row has less say beyond so many median distances (two standard deviations)
MAX_DEPTH = 12
_TINY = 1e-12
_REMEDY = "fit the trees anew"


@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """T trees of depth d over named features; in the number of a leaf the first answer is the highest bit."""

    features: tuple[str, ...]
    base: float
    questions: Ints  # (T, d): number of the feature asked about
    thresholds: Floats  # (T, d): the answer is yes above it
    leaves: Floats  # (T, 2**d): what the tree adds

    def predict(self, x: ArrayLike) -> Floats:
        """One value for every row of `x` (rows × features)."""
        rows = np.round(np.asarray(x, dtype=np.float64), DECIMALS)
        if rows.ndim != 2 or rows.shape[1] != len(self.features):
            raise InternalError(f"trees of {len(self.features)} features were given an array of shape {rows.shape}")
        out, thresholds = np.full(len(rows), self.base), np.round(self.thresholds, DECIMALS)
        trees, width = self.leaves.shape
        for start in range(0, len(rows), CHUNK):
            columns = np.ascontiguousarray(rows[start : start + CHUNK].T)
            leaf = np.zeros((trees, columns.shape[1]), dtype=np.int64)
            for level in range(self.questions.shape[1]):
                leaf += leaf
                leaf += columns[self.questions[:, level]] > thresholds[:, level, None]
            leaf += np.arange(trees)[:, None] * width
            out[start : start + CHUNK] += self.leaves.ravel().take(leaf).sum(axis=0)
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return {
            "features": list(self.features), "base": self.base, "questions": self.questions.tolist(),
            "thresholds": self.thresholds.tolist(), "leaves": self.leaves.tolist(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trees:
        """The trees that `to_dict` wrote; a `FileFormatError` names what is wrong."""
        if not isinstance(data, Mapping):
            raise FileFormatError(f"trees are a table of fields, not a {type(data).__name__}", _REMEDY)
        missing = [name for name in ("features", "base", "questions", "thresholds", "leaves") if name not in data]
        if missing:
            raise FileFormatError(f"the trees lack {', '.join(missing)}", _REMEDY)
        features = data["features"]
        if not isinstance(features, list) or not features or not all(isinstance(name, str) for name in features):
            raise FileFormatError("the trees' features are not a list of names", _REMEDY)
        base = _numbers(data, "base", 0)
        questions, thresholds, leaves = (_numbers(data, name, 2) for name in ("questions", "thresholds", "leaves"))
        trees, depth = questions.shape
        if depth > MAX_DEPTH:
            raise FileFormatError(f"the trees ask {depth} questions each, {MAX_DEPTH} is the most", _REMEDY)
        for name, found, width in (("thresholds", thresholds, depth), ("leaves", leaves, 2**depth)):
            if found.shape != (trees, width):
                need = f"{trees} trees of depth {depth} need {trees} × {width}"
                raise FileFormatError(f"the trees' {name} are {found.shape[0]} × {found.shape[1]}, and {need}", _REMEDY)
        if not np.isin(questions, np.arange(len(features))).all():
            raise FileFormatError(f"the trees' questions are not about features 0 to {len(features) - 1}", _REMEDY)
        asked = questions.astype(np.int64)
        return cls(features=tuple(features), base=float(base), questions=asked, thresholds=thresholds, leaves=leaves)


def _numbers(data: Mapping[str, Any], name: str, axes: int) -> Floats:
    """A field as an array of finite numbers; a table without rows has no columns but one leaf."""
    try:
        found = np.array(data[name])
    except ValueError:
        raise FileFormatError(f"the trees' {name} have rows of unlike length", _REMEDY) from None
    if found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise FileFormatError(f"the trees' {name} hold something that is no finite number", _REMEDY)
    if axes == 2 and found.shape == (0,):
        found = found.reshape(0, 1 if name == "leaves" else 0)
    if found.ndim != axes:
        raise FileFormatError(f"the trees' {name} are nested {found.ndim} deep, not {axes}", _REMEDY)
    return found.astype(np.float64)


# ---------------------------------------------------------------- fitting


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """What `fit` takes by name."""

    depth: int = 6
    trees: int = 400
    rate: float = 0.1
    bins: int = 64
    min_leaf: int = 3  # rows a leaf needs for a value of its own; with fewer it takes its parent's
    l2: float = 1.0  # so many further rows draw a leaf towards its parent
    row_share: float = 0.8  # of all rows, drawn for every tree
    feature_share: float = 0.6  # of all features, drawn for every level
    loss: Literal["huber", "squared"] = "huber"  # huber: rows far off the rest have less say
    digits: int = 6  # significant digits kept of a leaf, relative to the spread of the targets
    patience: int = 40  # trees without a lower validation error, then fitting stops

    def __post_init__(self) -> None:
        sizes = 1 <= self.depth <= MAX_DEPTH and self.trees >= 0 and self.bins >= 2 and self.patience >= 1 and self.digits >= 1
        pulls = self.rate > 0 and self.l2 >= 0 and self.min_leaf >= 1 and self.loss in ("huber", "squared")
        if not (sizes and pulls and 0 < self.row_share <= 1 and 0 < self.feature_share <= 1):
            raise InternalError(f"trees cannot be fitted with {self}")


def fit(
    x: ArrayLike, y: ArrayLike, features: Sequence[str], *, seed: int = 0, weights: ArrayLike | None = None,
    validation: tuple[ArrayLike, ArrayLike] | float | None = None, **settings: Any,
) -> Trees:  # fmt: skip
    """Trees that predict `y` from the rows of `x`, under `TreeSettings` by name; the same seed gives the same trees.

    With `validation`, rows of its own or a share of these, the trees end where its error is least.
    """
    seen, watched = _table(x, y, features, weights), None
    rng = np.random.default_rng(seed)
    if isinstance(validation, tuple):
        watched = _table(*validation, features, None)
    elif validation is not None:
        held = rng.permutation(len(seen)) < round(validation * len(seen))
        if held.all() or not held.any():
            raise InternalError(f"{len(held)} rows cannot give a share of {validation} to validation")
        seen, watched = seen[~held], seen[held]
    return _boosted(seen, watched, tuple(features), TreeSettings(**settings), rng)


def _table(x: ArrayLike, y: ArrayLike, features: Sequence[str], weights: ArrayLike | None) -> Floats:
    """A row's features, its target, and its weight as a multiple of the mean."""
    rows, targets = np.round(np.asarray(x, np.float64), DECIMALS), np.asarray(y, np.float64)
    try:
        table = np.column_stack([rows, targets, np.ones(targets.shape) if weights is None else weights])
    except ValueError as error:
        raise InternalError(f"rows, targets and weights do not match: {error}") from None
    if not len(table) or table.shape[1] != len(features) + 2:
        raise InternalError(f"{len(table)} rows of {table.shape[1] - 2} features, and {len(features)} names")
    if not np.isfinite(table).all() or (table[:, -1] <= 0).any():
        raise InternalError("rows, targets and weights have to be finite, and weights positive")
    table[:, -1] /= table[:, -1].mean()
    return table


def _boosted(
    seen: Floats, watched: Floats | None, features: tuple[str, ...], s: TreeSettings, rng: np.random.Generator
) -> Trees:
    columns, targets, shares = seen[:, :-2].T, seen[:, -2], seen[:, -1]
    cuts = [_cuts(column, s.bins) for column in columns]
    codes = np.stack([np.searchsorted(cut, column) for cut, column in zip(cuts, columns, strict=True)])
    base = _centre(targets, shares, s.loss)
    left = targets - base
    decimals = s.digits - 1 - int(np.floor(np.log10(left.std() or 1.0)))
    kept = s.trees if any(map(len, cuts)) and left.any() else 0
    questions, thresholds = np.zeros((kept, s.depth), np.int64), np.zeros((kept, s.depth))
    leaves = np.zeros((kept, 1 << s.depth))
    if watched is not None:
        ahead = watched[:, -2] - base
        kept, least = 0, _error(ahead, watched[:, -1], s.loss)
    for number in range(len(leaves)):
        say = shares * _trust(left, s.loss)
        asked, bin_numbers, leaf = _grown(codes, np.array([len(cut) for cut in cuts]), say * left, say, s, rng)
        questions[number] = asked
        thresholds[number] = [cuts[feature][at] for feature, at in zip(asked, bin_numbers, strict=True)]
        leaves[number] = np.round(s.rate * _leaf_values(leaf, say * left, say, s), decimals) + 0.0
        left -= leaves[number, leaf]
        if watched is not None:
            answers = watched[:, asked] > thresholds[number]
            ahead -= leaves[number, answers @ (1 << np.arange(s.depth)[::-1])]
            error = _error(ahead, watched[:, -1], s.loss)
            if error < least:
                kept, least = number + 1, error
            elif number + 1 - kept >= s.patience:
                break
    return Trees(
        features=features, base=base, questions=questions[:kept], thresholds=thresholds[:kept], leaves=leaves[:kept]
    )


def _grown(
    codes: Ints, cuts: Ints, pull: Floats, say: Floats, s: TreeSettings, rng: np.random.Generator
) -> tuple[list[int], list[int], Ints]:
    """The questions of one tree, as features and bin numbers, and the leaf of every row."""
    vary = np.flatnonzero(cuts)
    some = int(np.ceil(s.feature_share * len(vary)))
    sample = np.flatnonzero(rng.random(len(say)) < s.row_share)
    pull, say = np.tile(pull[sample], some), np.tile(say[sample], some)
    asked, bin_numbers, leaf = [], [], np.zeros(codes.shape[1], dtype=np.int64)
    for level in range(s.depth):
        offered = np.sort(rng.choice(vary, some, replace=False))
        gain = _gains(codes[np.ix_(offered, sample)], leaf[sample], (1 << level, cuts.max() + 1), pull, say, s)
        gain[np.arange(cuts.max()) >= cuts[offered, None]] = -np.inf
        which, bin_number = divmod(int(gain.argmax()), int(cuts.max()))
        asked.append(int(offered[which]))
        bin_numbers.append(bin_number)
        leaf = 2 * leaf + (codes[asked[-1]] > bin_number)
    return asked, bin_numbers, leaf


def _gains(codes: Ints, leaf: Ints, shape: tuple[int, int], pull: Floats, say: Floats, s: TreeSettings) -> Floats:
    """(features × thresholds): how much asking this of every leaf lowers the squares; leaves too small do not count."""
    leaves, width = shape
    cell = (codes + leaf * width + np.arange(len(codes))[:, None] * (leaves * width)).ravel()

    def below(values: Floats | None) -> Floats:
        return np.bincount(cell, values, len(codes) * leaves * width).reshape(-1, leaves, width).cumsum(axis=2)

    pulls, says, rows = below(pull), below(say), below(None)
    worth = pulls**2 / (says + s.l2 + _TINY)
    rest = (pulls[..., -1:] - pulls) ** 2 / (says[..., -1:] - says + s.l2 + _TINY)
    enough = (rows >= s.min_leaf) & (rows[..., -1:] - rows >= s.min_leaf)
    gain: Floats = ((worth + rest - worth[..., -1:]) * enough).sum(axis=1)[:, :-1]
    return gain


def _leaf_values(leaf: Ints, pull: Floats, say: Floats, s: TreeSettings) -> Floats:
    """What every leaf has left over, drawn towards its parent's, and that towards its own."""
    sums = [np.bincount(leaf, values, 1 << s.depth) for values in (pull, say, None)]
    values = np.zeros(1)
    for level in range(s.depth + 1):
        pulls, says, rows = (part.reshape(1 << level, -1).sum(axis=1) for part in sums)
        parents = values.repeat(len(pulls) // len(values))
        values = np.where(rows < s.min_leaf, parents, (pulls + s.l2 * parents) / (says + s.l2 + _TINY))
    return values


def _cuts(column: Floats, bins: int) -> Floats:
    """At most `bins` - 1 thresholds between the values of a column, as many rows between each two as can be."""
    values, counts = np.unique(column, return_counts=True)
    at = np.arange(len(values) - 1)
    if len(values) > bins:
        at = np.flatnonzero(np.diff(counts.cumsum()[:-1] * bins // len(column), prepend=0))
    low, high = values[at], values[at + 1]
    middle = np.round([float(f"{value:.{DIGITS}g}") for value in low + (high - low) / 2], DECIMALS)
    # Rounding may leave the gap between two near values; the lower value itself never does.
    return np.where((low <= middle) & (middle < high), middle, low)


def _trust(left: Floats, loss: str) -> Floats:
    """The say of a row: one, or less where it lies far off."""
    far = FAR * float(np.median(np.abs(left))) if loss == "huber" else 0.0
    return far / np.maximum(np.abs(left), far) if far else np.ones(len(left))


def _centre(targets: Floats, shares: Floats, loss: str) -> float:
    """The weighted median, or mean."""
    if loss == "squared":
        return float(np.average(targets, weights=shares))
    order = targets.argsort()
    return float(targets[order][np.searchsorted(shares[order].cumsum(), shares.sum() / 2)])


def _error(left: Floats, shares: Floats, loss: str) -> float:
    return float(np.average(np.abs(left) if loss == "huber" else left**2, weights=shares))
