"""Settings of a server: the search beside trying everything, what is fixed stays, and which of equals is the best."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from foretell.lower.serving import StepShape
from foretell.plan.types import ServeLayout
from foretell.search.serving.settings import (
    PAGES,
    RUNNING,
    TOKENS,
    ServeFigures,
    SettingsQuestion,
    best_of,
    different,
    neighbours,
    predicted,
    search,
    with_pages,
)
from foretell.simulate.serving.load import load_of
from foretell.simulate.serving.records import Limit


def seconds(shape: StepShape) -> float:
    """Long steps that many share; prompts cost by their tokens."""
    return 0.01 + 2e-4 * shape.generating + 1e-4 * sum(count for _, count in shape.chunks)


def question(load: str = "users=12, in=30..90, out=8..40", room: int = 10**6, limit: Limit | None = None, **more: Any) -> SettingsQuestion:
    return SettingsQuestion(
        load=load_of(load), limit=limit or Limit(), seconds=4.0, base=ServeLayout(), price=lambda layout: seconds,
        most_pages=lambda layout: room // layout.page, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("load", "room", "limit"),
    [("users=12, in=30..90, out=8..40", 10**6, None), ("users=12, in=30..90, out=8..40", 400, None), ("all=20, in=64, out=16", 10**6, None),
     ("users=12, in=200, out=20", 10**6, Limit(tpot=0.022))],
)  # fmt: skip
def test_the_best_is_the_best_of_all_that_there_is(load: str, room: int, limit: Limit | None) -> None:
    """Every sequences × tokens × page of the tables, simulated: none has more tokens a second inside the limits."""
    asked = question(load, room, limit)
    found = search(asked)
    most = 0.0
    for running, tokens, page in itertools.product(RUNNING, TOKENS, PAGES):
        layout = with_pages(asked, replace(asked.base, running=running, tokens=tokens, page=page)) if tokens >= running else None
        if layout is not None:
            most = max(most, predicted(asked, layout).figures.good)
    assert found[0].figures.good >= 0.98 * most, "within what counts as equal"


def test_what_is_fixed_stays() -> None:
    for one in search(question(fixed={"running": 4, "page": 8, "pages": 99})):
        assert (one.layout.running, one.layout.page, one.layout.pages) == (4, 8, 99)


def test_pages_are_no_more_than_fit_and_no_more_than_help() -> None:
    wide = with_pages(question(), ServeLayout(running=4, page=16))
    assert wide is not None and wide.pages == 4 * -(-130 // 16)
    tight = with_pages(question(room=200), ServeLayout(running=4, page=16))
    assert tight is not None and tight.pages == 12
    assert with_pages(question(room=100), ServeLayout(running=4, page=16)) is None, "the longest request does not fit"


def test_shared_beginnings_help_and_are_found() -> None:
    best = search(question("users=8, in=200, out=8, prefix=160"))[0].layout
    assert best.share
    alone = predicted(question("users=8, in=200, out=8, prefix=160"), replace(best, share=False))
    assert alone.figures.good < 0.8 * predicted(question("users=8, in=200, out=8, prefix=160"), best).figures.good


def figures(rate: float, answer: float, inside: float = 1.0) -> ServeFigures:
    return ServeFigures(tokens_per_second=rate, inside=inside, ttft_p50=0, ttft_p95=0, tpot_p50=0, tpot_p95=0, answer_seconds=answer)


def test_of_equally_fast_ones_the_shortest_answers_win() -> None:
    some = [("slow", figures(90, 0.1)), ("fast", figures(100, 2.0)), ("as fast", figures(99, 1.0)), ("fast but late", figures(200, 0.1, 0.2))]
    assert [name for name, _ in best_of(some)] == ["as fast", "fast", "slow", "fast but late"]


def test_neighbours_are_one_change_away_and_those_measured_differ() -> None:
    asked = question(graphs=True)
    layout = search(asked)[0].layout
    for one in neighbours(asked, layout):
        changed = [name for name in ("running", "tokens", "page", "share", "graphs") if getattr(one, name) != getattr(layout, name)]
        assert len(changed) == 1, one
    kinds = [(one.layout.running, one.layout.tokens, one.layout.graphs) for one in different(search(asked), 5)]
    assert len(set(kinds)) == len(kinds) == 5


def test_limits_that_nothing_keeps_leave_no_good_tokens() -> None:
    assert all(one.figures.good == 0 for one in search(question(limit=Limit(ttft=1e-6))))
