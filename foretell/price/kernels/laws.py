"""Laws: seconds as a sum of terms, each counted so and so often, fitted to measured rows.

A law is a few numbers of at least zero and therefore goes on beyond what was measured, as trees cannot. Laws are nested:
one of the whole family, one of each kind drawn towards it, one of each key drawn towards its kind's, so that a term that
never occurred under a key counts as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foretell.price.kernels.shapes import Described

Floats = NDArray[np.float64]
Law = Mapping[str, float]

PULL = 1.5
"""So many rows draw a law towards the wider one."""
LEAST_KIND, LEAST_KEY = 12, 4
ROUNDS = 6
FAINT = 0.05
"""A term that hardly shows under a key is drawn by this much of its weight in the family."""
MOST: Law = dict.fromkeys(("read", "written", "swapped", "strided", "last", "spread"), 32.0)
"""A byte that is moved alone moves a sector of the memory, of 32 bytes. A few small tensors would give a byte what a launch takes."""
NEAR = 0.1
"""Relative errors below this count by their squares, above by their size."""
UNSEEN: Law = {"masked": 1.0}
"""Terms that count as their own seconds say until a row has shown otherwise: every byte of a mask is read for each head."""
OLDER: Mapping[str, str] = {"channel": "lane"}
"""Term → what it was called in profiles that do not know it."""
OLDER_KINDS: Mapping[str, str] = {":bundle:": ":patch:"}
LONG_SECONDS = 20e-6
FLOOR_SECONDS = 5e-7
_BESIDE = UNSEEN.keys() | OLDER.keys()


def laws_of(rows: Sequence[Described], seconds: Floats) -> dict[str, dict[str, float]]:
    """Law of the family under "", of kinds under "*kind", of keys under their names."""
    terms = sorted({name for row in rows for name in row.terms})
    table, highest = _table(rows, terms), np.array([MOST.get(term, np.inf) for term in terms])
    found: dict[str, Floats] = {"": _fit(table, seconds, np.ones(len(terms)), highest, None)}
    scale = (table / seconds[:, None]) ** 2
    for prefix, least, names in (("*", LEAST_KIND, [r.kind for r in rows]), ("", LEAST_KEY, [r.key for r in rows])):
        order: dict[str, list[int]] = {}
        for position, name in enumerate(names):
            order.setdefault(name, []).append(position)
        for name, positions in order.items():
            if len(positions) < least:
                continue
            parent = found[""] if prefix else found.get("*" + rows[positions[0]].kind, found[""])
            found[prefix + name] = _fit(table[positions], seconds[positions], parent, highest, scale.mean(axis=0))
    return {
        name: {term: float(f"{c:.4g}") for term, c in zip(terms, law, strict=True) if c or term in _BESIDE} for name, law in found.items()
    }


def by_laws(rows: Sequence[Described], laws: Mapping[str, Law]) -> Floats:
    """Seconds of ops by the laws of their keys, of what a key begins with (as older profiles have it), of their kinds, or of
    the family."""
    out = np.empty(len(rows))
    for position, row in enumerate(rows):
        law = _law(row, laws)
        get = law.get
        out[position] = sum([value * get(name, 0.0) for name, value in row.terms.items()])
        for name in _BESIDE & row.terms.keys() - law.keys():
            out[position] += (UNSEEN.get(name) or get(OLDER.get(name, ""), 0.0)) * row.terms[name]
    return np.maximum(out, FLOOR_SECONDS)


def _law(row: Described, laws: Mapping[str, Law]) -> Law:
    """Of the longest beginning of a key that has one, of its kind, or of the family; as an older profile calls it where it has none."""
    key = row.key
    while key not in laws and ":" in key:
        key = key.rpartition(":")[0]
    found = laws.get(key) or laws.get("*" + row.kind)
    for name, older in OLDER_KINDS.items():
        found = found or laws.get(row.key.replace(name, older)) or laws.get("*" + row.kind.replace(name, older))
    return found or laws[""]


def _table(rows: Sequence[Described], terms: Sequence[str]) -> Floats:
    return np.array([[row.terms.get(name, 0.0) for name in terms] for row in rows])


def _fit(table: Floats, seconds: Floats, parent: Floats, highest: Floats, wider: Floats | None) -> Floats:
    """Coefficients of at least zero and at most `highest` with the least relative errors, drawn towards `parent`."""
    law = parent
    long = 1 + 3 * np.minimum(1, seconds / LONG_SECONDS)
    for turn in range(ROUNDS):
        now = np.clip(table @ law, 0.02 * seconds, 50 * seconds) if turn else seconds
        middle = np.sqrt(now * seconds)  # too much and too little count alike
        weight = long / np.maximum(NEAR, np.abs(now - seconds) / middle)
        weight /= weight.mean()
        a = table / middle[:, None]
        gram, goal = a.T @ (a * weight[:, None]), a.T @ (weight * seconds / middle)
        own = (a**2).mean(axis=0)
        pull = 1e-15 + (1e-6 * own if wider is None else PULL * np.maximum(own, FAINT * wider))
        gram[np.diag_indices_from(gram)] += pull
        law = _bounded(gram, goal + pull * parent, highest)
    share = len(table) / (len(table) + PULL)
    ratio = float(np.median(table @ law / seconds))
    return np.minimum(law / ratio**share, highest) if ratio > 0 else law


def _bounded(gram: Floats, goal: Floats, highest: Floats) -> Floats:
    """The minimum with no coefficient above `highest`: those that want more get that, and the others are found beside them."""
    most = np.zeros(len(goal), dtype=bool)
    while True:
        rest, found = ~most, np.where(most, highest, 0.0)
        found[rest] = _least_squares(gram[np.ix_(rest, rest)], goal[rest] - gram[np.ix_(rest, most)] @ highest[most])
        over = rest & (found > highest)
        if not over.any():
            return found
        most |= over


def _least_squares(gram: Floats, goal: Floats) -> Floats:
    """The minimum of x·gram·x / 2 - goal·x with no coefficient below zero, by active sets."""
    size = np.sqrt(gram.diagonal())
    gram, goal = gram / np.outer(size, size), goal / size
    x, free = np.zeros(len(goal)), np.zeros(len(goal), dtype=bool)
    for _ in range(3 * len(goal)):
        slope = np.where(free, -np.inf, goal - gram @ x)
        if slope.max() <= 1e-9 * np.abs(goal).max():
            break
        free[slope.argmax()] = True
        while True:
            some = np.flatnonzero(free)
            found = np.linalg.solve(gram[np.ix_(some, some)], goal[some])
            if found.min() > 0:
                break
            below = found <= 0
            step = (x[some][below] / np.maximum(x[some][below] - found[below], 1e-300)).min()
            x[some] += step * (found - x[some])
            free[some[below & (x[some] <= 1e-12)]] = False
            free[some[x[some] <= 0]] = False
            x[~free] = 0.0
            if not free.any():
                return x / size
        x[:] = 0.0
        x[some] = found
    return x / size
