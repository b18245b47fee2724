"""Settings of one server for a load: how many sequences and tokens a step has, pages, shared prompts, graphs.

    running × tokens        all powers of two that the load could use
      ▼ simulated           the load, request by request, on the seconds of `price`
    page, share, graphs     varied around the best
      ▼
    ranked                  by tokens a second of answers that keep the limits; where these are equal, by how long an answer takes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretell.lower.serving import StepShape
from foretell.plan.types import ServeLayout
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.pages import Pages
from foretell.simulate.serving.records import Limit, Served
from foretell.simulate.serving.run import simulated
from foretell.simulate.serving.scheduler import Scheduler, StepLimits

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PAGES = (8, 16, 32, 64)
"""Tokens of a page."""
EQUAL = 0.02
"""Share of the best rate within which settings count as equally fast."""
COMPARED, LEAST_WINDOW = 300, 0.1
"""Requests, about, that settings are compared by; seconds of arrivals that are tried for how many that takes."""
LOOKED = 3
"""Of the best, around which page, share and graphs are varied."""
TUNED = ("running", "tokens", "page", "pages", "share", "graphs")
"""Fields of a layout that are searched."""


@dataclass(frozen=True, kw_only=True)
class ServeFigures:
    """What a load gets, predicted or measured."""

    tokens_per_second: float
    """Generated."""
    inside: float
    """Share of requests that keep the limits; those without an answer do not."""
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    answer_seconds: float
    """Of an answer of mean length among the slow ones (p95): to its first token, and all others."""

    @property
    def good(self) -> float:
        """Tokens a second of answers that keep the limits."""
        return self.tokens_per_second * self.inside

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "good_tokens_per_second": self.good}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServeFigures:
        return cls(**{name: float(data[name]) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class SettingsPoint:
    """Settings and what is predicted of them."""

    layout: ServeLayout
    figures: ServeFigures
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class SettingsQuestion:
    """What settings are wanted for."""

    load: Load
    limit: Limit
    seconds: float
    """Of arrivals."""
    base: ServeLayout
    """What is not searched."""
    price: Callable[[ServeLayout], Callable[[StepShape], float]]
    """Settings → seconds of their steps."""
    most_pages: Callable[[ServeLayout], int]
    """That fit beside the largest step."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Of `TUNED`, as given."""
    graphs: bool = False
    """Steps may be replayed here."""
    ahead: bool = False
    """A step is decided while the one before is computed."""


def key_of(layout: ServeLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in TUNED}


def figures_of(served: Served, limit: Limit, output: float, arrivals: float = 0.0) -> ServeFigures:
    """Of a run by the clock, over the time of arrivals (0: users wait for answers), or of answers where these take longer."""
    inside = served.inside(limit) if served.answers and not served.gave_up else 0.0
    ends = [one.last for one in served.answers] or [0.0]
    seconds = max(arrivals, max(ends) - (min(ends) if arrivals else 0.0), 1e-9)
    return ServeFigures(
        tokens_per_second=sum(one.output for one in served.answers) / seconds, inside=inside, ttft_p50=served.ttft(0.5), ttft_p95=served.ttft(0.95),
        tpot_p50=served.tpot(0.5), tpot_p95=served.tpot(0.95), answer_seconds=served.ttft(0.95) + served.tpot(0.95) * max(0.0, output - 1),
    )  # fmt: skip


def best_of(some: Sequence[tuple[Any, ServeFigures]]) -> list[tuple[Any, ServeFigures]]:
    """The best first: the highest rate; of those that are as fast, the shortest answers."""
    left, found = sorted(some, key=lambda one: -one[1].good), []
    while left:
        near = [one for one in left if one[1].good >= (1 - EQUAL) * left[0][1].good]
        best = min(near, key=lambda one: (round(one[1].answer_seconds, 9), -one[1].good))
        found.append(best)
        left.remove(best)
    return found


def predicted(question: SettingsQuestion, layout: ServeLayout) -> SettingsPoint:
    """The load with some settings, on predicted steps."""
    limits = StepLimits(running=layout.running, tokens=max(layout.tokens, layout.running), ahead=question.ahead)
    scheduler = Scheduler(Pages(layout.pages, layout.page), limits)
    arrivals = question.seconds if question.load.kind == "rate" else question.load.seconds if question.load.kind == "trace" else 0.0
    served = simulated(question.load, scheduler, question.price(layout), question.seconds, share=layout.share)
    return SettingsPoint(layout=layout, figures=figures_of(served, question.limit, question.load.mean[1], arrivals), preemptions=served.preemptions)


def with_pages(question: SettingsQuestion, layout: ServeLayout) -> ServeLayout | None:
    """As many pages as all running sequences could ever hold, or as fit; None where not even the longest request fits."""
    if "pages" in question.fixed:
        return replace(layout, pages=int(question.fixed["pages"]))
    wanted = layout.running * -(-question.load.longest // layout.page)
    if layout.share and question.load.prefix:
        wanted += -(-question.load.longest // layout.page)
    pages = min(wanted, question.most_pages(layout))
    return None if pages * layout.page < question.load.longest else replace(layout, pages=pages)


def search(question: SettingsQuestion, tell: Callable[[str], None] = lambda _: None) -> list[SettingsPoint]:
    """All that were looked at, the best first."""
    found: dict[ServeLayout, SettingsPoint] = {}
    question = replace(question, seconds=_window(question))

    def look(layouts: Iterable[ServeLayout]) -> None:
        for layout in layouts:
            whole = with_pages(question, layout)
            if whole is not None and whole not in found:
                found[whole] = predicted(question, whole)
                tell(f"{len(found)} settings predicted")

    look(grid(question))
    look(layout for one in ranked(found.values())[:LOOKED] for layout in _varied(question, one.layout))
    return ranked(found.values())


def _window(question: SettingsQuestion) -> float:
    """Seconds of arrivals in which some settings answer `COMPARED` requests: quick devices answer many times as many in the same time."""
    layout = next((whole for one in reversed(list(grid(question))) if (whole := with_pages(question, one)) is not None), None)
    seconds = min(question.seconds, LEAST_WINDOW)
    while layout is not None and seconds < question.seconds:
        limits = StepLimits(running=layout.running, tokens=max(layout.tokens, layout.running), ahead=question.ahead)
        served = simulated(question.load, Scheduler(Pages(layout.pages, layout.page), limits), question.price(layout), seconds)
        if len(served.answers) >= COMPARED / 10:
            return min(question.seconds, seconds * COMPARED / len(served.answers))
        seconds *= 4
    return question.seconds


def ranked(points: Iterable[SettingsPoint]) -> list[SettingsPoint]:
    return [point for point, _ in best_of([(one, one.figures) for one in points])]


def grid(question: SettingsQuestion) -> Iterator[ServeLayout]:
    """Sequences and tokens of a step that the load could use."""
    load, fixed = question.load, question.fixed
    most = load.amount if load.kind in ("users", "all") else float("inf")
    prompt, _ = load.mean
    base = replace(question.base, **{name: value for name, value in fixed.items() if name != "pages"})
    for running in [fixed["running"]] if "running" in fixed else RUNNING:
        if "running" not in fixed and running > 1 and running >= 2 * most:
            break
        for tokens in [fixed["tokens"]] if "tokens" in fixed else TOKENS:
            if "tokens" not in fixed and (tokens < running or tokens >= 2 * (running * prompt + running)):
                continue
            yield replace(base, running=running, tokens=tokens)


def _varied(question: SettingsQuestion, layout: ServeLayout) -> Iterator[ServeLayout]:
    """What else is there: pages of other sizes, prompts that share or not, launches replayed or not."""
    fixed = question.fixed
    if "page" not in fixed:
        yield from (replace(layout, page=page) for page in PAGES if page != layout.page)
    if "share" not in fixed and question.load.prefix:
        yield replace(layout, share=not layout.share)
    if "graphs" not in fixed and question.graphs:
        yield replace(layout, graphs=not layout.graphs)


def neighbours(question: SettingsQuestion, layout: ServeLayout) -> Iterator[ServeLayout]:
    """Settings one change away, with their pages."""
    fixed = question.fixed
    others = []
    if "running" not in fixed:
        others += [replace(layout, running=one) for one in (layout.running * 2, layout.running // 2) if 1 <= one <= layout.tokens]
    if "tokens" not in fixed:
        others += [replace(layout, tokens=one) for one in (layout.tokens * 2, layout.tokens // 2) if one >= max(layout.running, TOKENS[0])]
    for one in (*others, *_varied(question, layout)):
        whole = with_pages(question, one)
        if whole is not None and whole != layout:
            yield whole


def different(points: Sequence[SettingsPoint], count: int) -> list[SettingsPoint]:
    """The best, and of those after it ones that differ in more than a page's size: what is measured should tell something."""
    found: list[SettingsPoint] = []
    for one in points:
        if len(found) < count and all(_apart(one.layout, other.layout) for other in found):
            found.append(one)
    return found


def _apart(one: ServeLayout, other: ServeLayout) -> bool:
    return (one.running, one.tokens, one.share, one.graphs) != (other.running, other.tokens, other.share, other.graphs)
