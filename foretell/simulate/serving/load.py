"""What is asked of a server: requests with their lengths, at a rate, from users who wait for their answers, or from a file.

    rate=8, in=1024±512, out=256±128          8 requests a second, as a Poisson process
    users=32, in=2048, out=128..512           32 users, each asks again when it has its answer
    all=256, in=1024, out=128                 all at once
    rate=8, in=1024, out=128, prefix=512      the first 512 tokens of every prompt are the same
    trace.csv                                 columns time (s), in, out; or .jsonl with the same names
"""

from __future__ import annotations

import csv
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foretell.decode import json_of
from foretell.errors import UserError

SECONDS = 60.0
"""Of arrivals that are simulated, where they are drawn."""
KINDS = ("rate", "users", "all")
LEAST = 1
EXAMPLE = 'write it like "rate=8, in=1024±512, out=256±128", "users=32, in=2048, out=128..512" or name a .csv with time, in, out'


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens: fixed, drawn evenly between two, or normally around a mean (never below one)."""

    mean: float
    deviation: float = 0.0
    low: int = 0
    high: int = 0
    """Above zero: drawn evenly from `low` to it."""

    def drawn(self, source: random.Random) -> int:
        if self.high:
            return source.randint(self.low, self.high)
        if not self.deviation:
            return round(self.mean)
        return max(LEAST, round(source.gauss(self.mean, self.deviation)))

    @property
    def most(self) -> int:
        """As long as requests get, but for one in a thousand."""
        return self.high or round(self.mean + 3 * self.deviation)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" if self.high else f"{self.mean:g}" + (f"±{self.deviation:g}" if self.deviation else "")


@dataclass(frozen=True)
class Request:
    """One prompt and the tokens that are wanted."""

    at: float
    """Seconds since the start; of a closed loop, not before."""
    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests to come."""

    kind: str
    """rate, users, all, trace."""
    amount: float = 0.0
    """Requests a second, users, or requests."""
    prompt: Lengths = Lengths(mean=1)
    output: Lengths = Lengths(mean=1)
    recorded: tuple[Request, ...] = ()
    """Of a trace."""
    prefix: int = 0
    """Tokens that all prompts begin with; each is at least one longer."""
    seed: int = 0

    @property
    def users(self) -> int:
        """Who ask again when they have their answer; 0: requests come whether or not others are answered."""
        return int(self.amount) if self.kind == "users" else 0

    def at_rate(self, rate: float) -> Load:
        """The same requests so many a second; a trace quickened or slowed."""
        if self.kind != "trace":
            return replace(self, kind="rate", amount=rate)
        factor = self.rate / rate
        return replace(self, recorded=tuple(Request(one.at * factor, one.prompt, one.output) for one in self.recorded))

    def shared(self, replicas: int) -> Load:
        """What one of several servers gets: of a rate its part, of users and of a trace one in so many."""
        if replicas == 1:
            return self
        if self.kind == "trace":
            return replace(self, recorded=self.recorded[::replicas])
        amount = self.amount / replicas
        return replace(self, amount=amount if self.kind == "rate" else math.ceil(amount))

    @property
    def seconds(self) -> float:
        """Of arrivals that are worth a look, where nobody says how many: of a trace all."""
        return self.recorded[-1].at if self.kind == "trace" else SECONDS

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        if self.kind == "trace":
            return max(one.prompt + one.output for one in self.recorded)
        return max(self.prompt.most, self.prefix + 1) + self.output.most

    @property
    def mean(self) -> tuple[float, float]:
        """Tokens of a prompt and of an answer."""
        if self.kind == "trace":
            many = len(self.recorded)
            return sum(one.prompt for one in self.recorded) / many, sum(one.output for one in self.recorded) / many
        return max(self.prompt.mean, self.prefix + 1), self.output.mean

    @property
    def rate(self) -> float:
        """Requests a second; of a closed loop 0."""
        if self.kind == "trace":
            return (len(self.recorded) - 1) / max(self.recorded[-1].at - self.recorded[0].at, 1e-9)
        return self.amount if self.kind == "rate" else 0.0

    def requests(self, seconds: float) -> Iterator[Request]:
        """In the order they come, those of so many seconds; of a closed loop as many as are asked for, without end."""
        if self.kind == "trace":
            yield from (one for one in self.recorded if one.at <= seconds)
            return
        source = random.Random(self.seed)
        at, count = 0.0, 0
        while self.kind == "users" or (at <= seconds if self.kind == "rate" else count < self.amount):
            if self.kind == "rate":
                at += source.expovariate(self.amount)
                if at > seconds:
                    return
            yield Request(at, max(self.prompt.drawn(source), self.prefix + 1), self.output.drawn(source))
            count += 1

    def __str__(self) -> str:
        if self.kind == "trace":
            return f"{len(self.recorded)} recorded requests, {self.rate:.3g} a second"
        prefix = f", prefix={self.prefix}" if self.prefix else ""
        return f"{self.kind}={self.amount:g}, in={self.prompt}, out={self.output}{prefix}"


def load_of(text: str) -> Load:
    """A load as a user writes it, or the file that is named."""
    if text.endswith((".csv", ".jsonl")):
        return _recorded(Path(text))
    said: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or name not in (*KINDS, "in", "out", "seed", "prefix") or name in said:
            raise UserError(f"a load of '{text}': '{part}' says nothing that is known", EXAMPLE)
        said[name] = value
    kinds = [name for name in KINDS if name in said]
    if len(kinds) != 1 or "in" not in said or "out" not in said:
        raise UserError(f"a load of '{text}' needs one of {', '.join(KINDS)}, and in and out", EXAMPLE)
    amount = _number(said[kinds[0]], text)
    if not 0 < amount < 1e6 or (kinds[0] != "rate" and amount != int(amount)):
        raise UserError(f"a load of '{text}': {kinds[0]} is {said[kinds[0]]}", "above zero; users and all are whole numbers")
    seed, prefix = _number(said.get("seed", "0"), text), _number(said.get("prefix", "0"), text)
    if not 0 <= prefix < 1e8:
        raise UserError(f"a load of '{text}': a prefix of {said['prefix']}", "tokens that all prompts begin with, from 0")
    prompt, output = _lengths(said["in"], text), _lengths(said["out"], text)
    return Load(kind=kinds[0], amount=amount, prompt=prompt, output=output, prefix=int(prefix), seed=int(seed))


def _number(text: str, whole: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if found != found or found in (float("inf"), float("-inf")):
        raise UserError(f"a load of '{whole}': '{text}' is no number", EXAMPLE)
    return found


def _lengths(text: str, whole: str) -> Lengths:
    between = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    around = re.fullmatch(r"(\d+(?:\.\d+)?)(?:(?:±|\+-|\+/-)(\d+(?:\.\d+)?))?", text)
    if between:
        low, high = int(between[1]), int(between[2])
        if not LEAST <= low <= high < 1e8:
            raise UserError(f"a load of '{whole}': lengths from {low} to {high}", "from one token up, the smaller first")
        return Lengths(mean=(low + high) / 2, low=low, high=high)
    if around and LEAST <= float(around[1]) < 1e8:
        return Lengths(mean=float(around[1]), deviation=float(around[2] or 0))
    raise UserError(f"a load of '{whole}': '{text}' is no length in tokens", "write 512, 1024±512 or 128..512")


def _recorded(path: Path) -> Load:
    """A file of requests: their times in seconds, not decreasing, and lengths."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", EXAMPLE) from error
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        rows = [json_of(line) for line in lines] if path.suffix == ".jsonl" else list(csv.DictReader(lines))
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path} is no {path.suffix[1:]}: {error}", EXAMPLE) from error
    found: list[Request] = []
    for number, row in enumerate(rows, 1):
        try:
            one = Request(float(row["time"]), int(row["in"]), int(row["out"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{path}, row {number}: {row!r:.80} has no time, in and out", EXAMPLE) from error
        if not (0 <= one.at < 1e12) or one.prompt < LEAST or one.output < LEAST:
            raise UserError(f"{path}, row {number}: time {one.at}, {one.prompt} tokens in, {one.output} out", "times from 0, at least one token each")
        if found and one.at < found[-1].at:
            raise UserError(f"{path}, row {number}: time {one.at:g} is before the row above, {found[-1].at:g}", "sort the rows by time")
        found.append(one)
    if not found:
        raise UserError(f"{path} has no requests", EXAMPLE)
    return Load(kind="trace", recorded=tuple(found))
