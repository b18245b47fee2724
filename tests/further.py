"""Parameters that `make test` runs, and further ones of their kind, which are slow."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def further(cases: Iterable[Any], quick: Container[Any], reason: str) -> list[Any]:
    """All cases as parameters. Those that `quick` does not have are slow; `reason` says what shows the same meanwhile."""
    slow = pytest.mark.slow(reason=reason)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else slow) for case in cases]


def one_in(number: int, cases: Iterable[Any], reason: str) -> list[Any]:
    """The same where cases differ by chance alone: every so many of them stay, the first one among them."""
    found = list(cases)
    return [one for place, case in enumerate(found) for one in further([case], () if place % number else (case,), reason)]
