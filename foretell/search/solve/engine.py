"""One search for every question: candidates, what each is at best, what it costs; then the best of them and the runners-up.

    candidates ─► hopeless? ─► cost, and keep ─► next candidate, which may follow from what was found      `search`
      ▼ finalists costed op by op, where the cost so far was a quick one
      ▼ the best; of those alike the simplest                                                              `best_of`
      ▼ of every other kind the best                                                                       `each_kind`

A question is asked as a space; that is all that differs between them:

    layouts of like and unlike devices, by quick costs            space_explore
    plans tried one by one, op by op: CPUs, unknown devices       climb
    with states, weights or activations elsewhere, op by op       spill
    an inference step split over devices, by units                infer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from foretell.trace.record.collection import no_collection

C = TypeVar("C")
F = TypeVar("F")
Score = Callable[[F], tuple[float, ...]]
"""What to make least: first the first, then the second."""


class Space(Protocol[C]):
    """What is searched."""

    @property
    def costed(self) -> int:
        """Candidates whose cost is known."""

    def candidates(self) -> Iterator[C]:
        """What may be tried, the most promising first; made one by one, so that it may follow from what was found."""

    def hopeless(self, one: C) -> bool:
        """Whether a candidate cannot win, by a bound that is cheaper than its cost."""

    def cost(self, one: C) -> None:
        """Cost a candidate, and keep it if it is of use."""


def search(space: Space[C], *, patience: float = float("inf"), most: int | None = None) -> str:
    """Go through a space; why that ended before its end, empty where it did not.

    `patience`: seconds after which it ends with what it has, as Ctrl-C does; `most`: so many are costed.
    """
    began = time.monotonic()
    try:
        with no_collection():
            for one in space.candidates():
                if space.hopeless(one):
                    continue
                if most is not None and space.costed >= most:
                    return f"{most} plans were costed"
                if time.monotonic() - began > patience:
                    return f"{patience:.0f} seconds were over"
                space.cost(one)
    except KeyboardInterrupt:
        return "interrupted"
    return ""


def best_of(found: Iterable[F], score: Score[F], effort: Callable[[F], Any], alike: float) -> F | None:
    """The best by its score; of those within this share of it, the one with least to it."""
    scores = [(score(one), one) for one in found]
    if not scores:
        return None
    first = min(mark for mark, _ in scores)
    near = [(effort(one), mark, number) for number, (mark, one) in enumerate(scores) if _near(mark, first, alike)]
    return scores[min(near)[2]][1]


def _near(mark: tuple[float, ...], first: tuple[float, ...], alike: float) -> bool:
    return all(mine == least or mine <= least * (1 + alike) for mine, least in zip(mark, first, strict=True))


def each_kind(found: Iterable[F], kind: Callable[[F], Hashable]) -> list[F]:
    """The first of every kind, in their order."""
    kinds: dict[Hashable, F] = {}
    for one in found:
        kinds.setdefault(kind(one), one)
    return list(kinds.values())
