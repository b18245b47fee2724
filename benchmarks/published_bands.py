"""Bands of published runs: conformal ones, calibrated on rows whose source was left out, by kind of evidence.

A band is `prediction / w .. prediction * w` where w is the 90 % quantile of |log(published / predicted)| over rows of the
same kind, every source counting alike, so that a new source is as likely to be inside as an old one that was left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

LEVEL = 0.9
FEWEST_SOURCES = 3
WHOLE = "all"


def kind_of(*, assumed: bool, rare: bool, split: bool) -> str:
    """guessed: cells were filled in; rare: devices, formats or models that few runs speak of; split; plain."""
    return "guessed" if assumed else "rare" if rare else "split" if split else "plain"


def widths(scores: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Kind of evidence → factor w; `scores` are source, kind and |log error| of rows that were left out."""
    found = list(scores)
    kinds = {kind for _, kind, _ in found}
    by_kind = {kind: [(source, score) for source, one, score in found if one == kind] for kind in kinds}
    by_kind[WHOLE] = [(source, score) for source, _, score in found]
    return {
        kind: round(exp(quantile(rows)), 4) for kind, rows in by_kind.items()
        if kind == WHOLE or len({source for source, _ in rows}) >= FEWEST_SOURCES
    }  # fmt: skip


def quantile(rows: list[tuple[str, float]]) -> float:
    """The conformal quantile with sources weighted alike: a new source takes one share more, which is beyond all others."""
    sources: dict[str, int] = {}
    for source, _ in rows:
        sources[source] = sources.get(source, 0) + 1
    total, reached = len(sources) + 1, 0.0
    for source, score in sorted(rows, key=lambda row: row[1]):
        reached += 1 / sources[source]
        if reached >= LEVEL * total - 1e-9:
            return score
    return max((score for _, score in rows), default=0.4)


def width(known: Mapping[str, float], kind: str) -> float:
    return known.get(kind) or known.get(WHOLE, 1.5)


def left_out_widths(scores: list[tuple[str, str, float]]) -> dict[str, dict[str, float]]:
    """Source → the widths that all other sources give."""
    return {name: widths(row for row in scores if row[0] != name) for name in {source for source, _, _ in scores}}


def told(known: Mapping[str, float]) -> dict[str, Any]:
    return {"level": LEVEL, "widths": dict(sorted(known.items()))}
