"""Loads one after the other, each several times, until the server is saturated; and what the client itself can do."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretell.errors import UserError
from foretell.serve.bench.client import BenchAnswer, Endpoint, ask, models
from foretell.serve.bench.figures import BenchPoint, run_of
from foretell.simulate.serving.load import Load, Request
from foretell.simulate.serving.records import INSIDE, Limit

KEEPS_UP = 0.9
"""Share of the offered requests that must be answered in the time they came in."""
GROWS = 1.05
"""By which twice the load must raise goodput."""
MOST_DOUBLINGS, BISECTIONS = 12, 4
NEAR = 1.2
"""Loads that are kept up with and not, between which no other is tried: arrivals are no more even."""
NULL_REQUESTS, NULL_AT_ONCE = 200, 16
WORDS = (3, 256)
"""Of which tokens of prompts are drawn: any model has them."""


@dataclass(frozen=True, kw_only=True)
class BenchAsked:
    """What is to be measured."""

    endpoint: Endpoint
    load: Load
    amounts: tuple[float, ...] = ()
    """Instead of the load's own."""
    search: bool = False
    """Go on, and between, until saturation is found."""
    seconds: float = 30.0
    """Of arrivals; of users, that they ask again."""
    repeats: int = 1
    limit: Limit = field(default_factory=Limit)
    model: str | None = None
    text: bool = False
    """Prompts are letters, for servers that take no token numbers."""
    timeout: float = 600.0
    extras: bool = True
    """Requests ask for answers of full length and for the server's own count: what is no entry of OpenAI's everywhere."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What the client can do, against a server that answers at once."""

    requests_per_second: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """An answer."""

    url: str
    model: str
    ceiling: Ceiling
    points: tuple[BenchPoint, ...]
    saturated: float | None
    """The highest load that was kept up with, as it came: requests a second, or users; None: not even the least."""
    why: str
    """What was wrong beyond it; empty: nothing, as far as was tried."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measured(asked: BenchAsked, tell: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Measure a server; blocking."""
    return asyncio.run(_measured(asked, tell))


async def _measured(asked: BenchAsked, tell: Callable[[str], None]) -> BenchResult:
    names = [asked.model] if asked.model is not None else await models(asked.endpoint)
    if not names:
        raise UserError(f"{asked.endpoint} has no model", "name it by --model")
    asked = await _warmed(asked, names[0])
    tell("the client alone")
    top = await ceiling(asked)
    points: dict[float, BenchPoint] = {}

    async def tried(amount: float) -> BenchPoint:
        if amount not in points:
            points[amount] = await _point(asked, names[0], amount, tell)
        return points[amount]

    if asked.search:
        await _searched(asked, tried)
    else:
        for amount in asked.amounts or (asked.load.amount or asked.load.rate,):
            await tried(amount)
    found = sorted(points.values(), key=lambda one: one.amount)
    best, why = saturation(found, asked.limit)
    reached = None if best is None else best.amount if best.closed else best.middle("offered_per_second")
    return BenchResult(url=str(asked.endpoint), model=names[0], ceiling=top, points=tuple(found), saturated=reached, why=why)


async def _warmed(asked: BenchAsked, model: str) -> BenchAsked:
    """One request ahead, which is not measured; a server that takes OpenAI's own entries alone gets no others."""
    for one in (asked, replace(asked, extras=False)):
        answer = BenchAnswer(due=0.0, prompt=2, wanted=2)
        await ask(one.endpoint, _body(one, model, Request(0.0, 2, 2), random.Random(0)), answer, time.perf_counter(), one.timeout)
        if answer.status not in (400, 404, 422):
            return one
    raise UserError(f"{asked.endpoint} refuses requests: {answer.failed}", "--text, where it takes no token numbers; or --model NAME")


async def _searched(asked: BenchAsked, tried: Callable[[float], Any]) -> None:
    """Twice the load until the server no longer keeps up, then in the middle between both sides."""
    known: list[BenchPoint] = []
    amount = asked.amounts[0] if asked.amounts else asked.load.amount
    for _ in range(MOST_DOUBLINGS):
        known.append(await tried(amount))
        if saturation(known, asked.limit)[1]:
            break
        amount *= 2
    high = amount
    for _ in range(BISECTIONS):
        best = saturation(known, asked.limit)[0]
        if best is None or high / best.amount < NEAR:
            return
        middle = round((best.amount * high) ** 0.5) if asked.load.kind != "rate" else (best.amount * high) ** 0.5
        if middle in (best.amount, high):
            return
        known = sorted([*known, await tried(middle)], key=lambda one: one.amount)
        above = [one.amount for one in known if one.amount > best.amount]
        now = saturation(known, asked.limit)[0]
        high = middle if now is best else min(one for one in above if now is None or one > now.amount)


def saturation(points: Sequence[BenchPoint], limit: Limit) -> tuple[BenchPoint | None, str]:
    """The highest of rising loads up to which all was well, and what was not beyond it."""
    best: BenchPoint | None = None
    for point in points:
        why = _trouble(point, best, limit)
        if why:
            return best, why
        best = point
    return best, ""


def _trouble(point: BenchPoint, before: BenchPoint | None, limit: Limit) -> str:
    inside = point.middle("inside")
    if (limit.ttft is not None or limit.tpot is not None) and inside < INSIDE:
        return f"at {point.amount:.3g}, {inside:.0%} keep the limits"
    if not point.closed and point.keeps_up < KEEPS_UP:
        return f"of {point.middle('offered_per_second'):.3g} requests a second {point.middle('answered_per_second'):.3g} are answered"
    if point.closed and before is not None:
        good, less = point.middle("good_per_second"), before.middle("good_per_second")
        if good < less * min(GROWS, 1 + (point.amount / before.amount - 1) / 4):
            return f"from {before.amount:.3g} to {point.amount:.3g}, goodput goes from {less:.3g} to {good:.3g} a second"
    return ""


# ---------------------------------------------------------------------- one load


async def _point(asked: BenchAsked, model: str, amount: float, tell: Callable[[str], None]) -> BenchPoint:
    runs, closed = [], asked.load.kind in ("users", "all")
    load = asked.load if asked.load.kind == "trace" and amount == asked.load.rate else _at(asked.load, amount)
    for number in range(asked.repeats):
        load = replace(load, seed=asked.load.seed + number)
        tell(f"{load}, {number + 1} of {asked.repeats}")
        answers = await sent(asked, model, load)
        arrivals = 0.0 if closed else asked.seconds if load.kind == "rate" else max((one.due for one in answers), default=0.0)
        runs.append(run_of(answers, asked.limit, load.seed, arrivals))
    return BenchPoint(load=str(load), amount=amount, closed=closed, runs=tuple(runs))


def _at(load: Load, amount: float) -> Load:
    return load.at_rate(amount) if load.kind in ("rate", "trace") else replace(load, amount=amount)


async def sent(asked: BenchAsked, model: str, load: Load) -> list[BenchAnswer]:
    """Send all requests of a load, each at its time; their answers."""
    duration = asked.seconds if load.kind == "rate" else float("inf")
    coming, words = load.requests(duration), random.Random(f"words {load.seed}")
    found: list[BenchAnswer] = []
    began = time.perf_counter()

    async def one(request: Request, at: float) -> None:
        answer = BenchAnswer(due=at, prompt=request.prompt, wanted=request.output)
        found.append(answer)
        await ask(asked.endpoint, _body(asked, model, request, words), answer, began, asked.timeout)

    if load.kind == "users":
        await asyncio.gather(*(_user(coming, one, began, asked.seconds) for _ in range(load.users)))
        return found
    tasks = []
    for request in coming:
        at = request.at if load.kind != "all" else 0.0
        wait = at - (time.perf_counter() - began)
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(request, at)))
    await asyncio.gather(*tasks)
    return found


async def _user(coming: Iterator[Request], one: Callable[[Request, float], Any], began: float, seconds: float) -> None:
    """Asks again when it has its answer."""
    while (now := time.perf_counter() - began) < seconds:
        await one(next(coming), now)


def _body(asked: BenchAsked, model: str, request: Request, words: random.Random) -> dict[str, Any]:
    common = random.Random(f"prefix {asked.load.seed}") if asked.load.prefix else words
    tokens = [(common if place < asked.load.prefix else words).randrange(*WORDS) for place in range(request.prompt)]
    prompt: Any = "".join(chr(97 + one % 26) for one in tokens) if asked.text else tokens
    more = {"ignore_eos": True, "stream_options": {"include_usage": True}} if asked.extras else {}
    return {"model": model, "prompt": prompt, "max_tokens": request.output, "temperature": 0, "stream": True, **more}


# ---------------------------------------------------------------------- the client alone


async def ceiling(asked: BenchAsked) -> Ceiling:
    """The same lengths against a server in a process of its own that answers at once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "foretell.serve.bench.null"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert process.stdin is not None and process.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
        where = Endpoint(host="127.0.0.1", port=int(line), path="/v1")
        requests = _some(asked.load, NULL_REQUESTS)
        began, words = time.perf_counter(), random.Random(0)
        tokens = 0

        async def user() -> None:
            nonlocal tokens
            for request in requests:
                answer = BenchAnswer(due=0.0, prompt=request.prompt, wanted=request.output)
                await ask(where, _body(asked, "null", request, words), answer, began, 60.0)
                if answer.failed:
                    raise UserError(f"the client alone: {answer.failed}", "try again; nothing of the server was measured")
                tokens += answer.tokens

        await asyncio.gather(*(user() for _ in range(NULL_AT_ONCE)))
        seconds = time.perf_counter() - began
        return Ceiling(requests_per_second=NULL_REQUESTS / seconds, tokens_per_second=tokens / seconds)
    finally:
        process.kill()
        process.communicate()


def _some(load: Load, count: int) -> Iterator[Request]:
    if load.kind == "trace":
        return iter((load.recorded * (count // len(load.recorded) + 1))[:count])
    return (one for one, _ in zip(replace(load, kind="users").requests(0), range(count), strict=False))
