"""How fast a machine is just now beside what its profile says, by steps of other models.

Ops and the host around them slow down apart: clocks and caches are one thing, Python and the dispatcher another. So a pace is
two factors, fitted to the measured steps of a few models by least relative errors, neither below zero, and drawn towards each
other, so that models that are much alike do not drive them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.price.speeds import alone
from foretell.price.time import Machine
from foretell.simulate.time.step import step_tasks
from foretell.trace.types import Trace

PULL = 0.02
"""How strongly the two factors are drawn towards each other; relative to one pacer."""
ROUNDS = 8


@dataclass(frozen=True)
class ProfileSeconds:
    """Seconds of a step by a profile."""

    ops: float
    host: float
    """Around the ops."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How many times as long as its profile says a machine takes."""

    ops: float = 1.0
    host: float = 1.0
    models: int = 0
    """That it was taken from."""

    def seconds(self, said: ProfileSeconds) -> float:
        return self.ops * said.ops + self.host * said.host

    def slowed(self, factor: float) -> Pace:
        """The same machine while everything on it takes so many times as long."""
        return Pace(ops=self.ops * factor, host=self.host * factor, models=self.models)

    @property
    def words(self) -> str:
        return (
            f"this CPU now takes {self.ops:.2f} times as long as its profile says for ops, and {self.host:.2f} times around them, "
            f"by {self.models} other small models"
        )


def said(trace: Trace, machine: Machine) -> ProfileSeconds:
    """What a profile says of a steady step on a machine whose host computes itself."""
    ops = host = 0.0
    for task in step_tasks(trace, alone(machine)):
        ops, host = ops + task.seconds, host + task.host_seconds
    return ProfileSeconds(ops, host)


def pace_of(pacers: Sequence[tuple[ProfileSeconds, float]]) -> Pace:
    """The pace by models whose seconds were predicted and measured."""
    known = [(one, measured) for one, measured in pacers if measured > 0 and one.ops + one.host > 0]
    if not known:
        return Pace()
    common = sorted(measured / (one.ops + one.host) for one, measured in known)[len(known) // 2]
    ops = host = common
    for _ in range(ROUNDS):  # one model that is far off counts by its distance and not by the square of it
        ops, host = _fitted(known, [abs((ops * one.ops + host * one.host) / measured - 1) for one, measured in known])
    return Pace(ops=ops, host=host, models=len(known))


NEAR = 0.05
"""Relative errors below this count by their squares, above by their size."""


def _fitted(known: Sequence[tuple[ProfileSeconds, float]], errors: Sequence[float]) -> tuple[float, float]:
    rows = [(one.ops / measured, one.host / measured, NEAR / max(NEAR, error)) for (one, measured), error in zip(known, errors, strict=True)]
    aa, bb, ab = (sum(w * x * y for x, y, w in picked) for picked in (
        [(a, a, w) for a, _, w in rows], [(b, b, w) for _, b, w in rows], [(a, b, w) for a, b, w in rows]))  # fmt: skip
    left, right = sum(w * a for a, _, w in rows), sum(w * b for _, b, w in rows)
    pull = PULL * (aa * bb) ** 0.5
    whole = left + right
    determinant = (aa + pull) * (bb + pull) - (ab - pull) ** 2
    if determinant > 0:
        ops = (left * (bb + pull) - right * (ab - pull)) / determinant
        host = (right * (aa + pull) - left * (ab - pull)) / determinant
        if ops > 0 and host > 0:
            return ops, host
    one = whole / (aa + bb + 2 * ab)
    return one, one
