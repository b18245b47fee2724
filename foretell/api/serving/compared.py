"""Several engines for one load on the same devices: which is predicted to serve it fastest, and whether that is more than predictions know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.api.serving.engines import EngineAsked, forecast_engine
from foretell.api.serving.forecast import LoadTold, ServingAsked, forecast
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.lower.serving_formats import WEIGHTS
from foretell.price.serving.engines import OWN, engine
from foretell.quantities import NO

ALL = (OWN, "vllm", "sglang", "trtllm")
ALIKE = 0.02
"""Rates that are as good as equal: then who takes less time for a token is faster."""
KNOWN_TO = 0.1
"""About how far predictions of an engine are off in the median: engines closer than that are not told apart."""


@dataclass(frozen=True, kw_only=True)
class ComparedEngine:
    """One of them; without a load where it cannot serve."""

    engine: str
    load: LoadTold | None
    capacity_rate: float | None
    refused: str = ""

    @property
    def rate(self) -> float:
        """Requests a second within limits where these are given, else tokens a second at the load."""
        return self.capacity_rate if self.capacity_rate is not None else 0.0 if self.load is None else self.load.output_tokens_per_second


@dataclass(frozen=True, kw_only=True)
class EngineComparison:
    """All of them, the fastest first."""

    engines: tuple[ComparedEngine, ...]
    close: tuple[str, ...]
    """Engines that are too near to the fastest to be told from it."""

    @property
    def fastest(self) -> ComparedEngine | None:
        return next((one for one in self.engines if one.load is not None), None)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fastest": None if self.fastest is None else self.fastest.engine}


def compared(asked: EngineAsked, names: Sequence[str]) -> EngineComparison:
    """What each gets at the load of `asked`."""
    if asked.load is None:
        raise UserError("engines are compared by a load, and none is given", 'add --load "rate=8, in=1024, out=256"')
    for name in names:
        if name != OWN:
            engine(name.partition(":")[0])
    found = [_one(replace(asked, engine=name)) for name in dict.fromkeys(names)]
    reasons = {one.refused for one in found}
    if all(one.load is None for one in found) and len(reasons) == 1:
        raise UserError(found[0].refused, "a device, a format or a tp that these engines have")
    best = max(one.rate for one in found)
    row = sorted(found, key=lambda one: (one.load is None, one.rate < (1 - ALIKE) * best, _token(one)))
    near = [one.engine for one in row[1:] if one.load is not None and one.rate > (1 - KNOWN_TO) * row[0].rate
            and _token(one) < (1 + KNOWN_TO) * _token(row[0])]  # fmt: skip
    return EngineComparison(engines=tuple(row), close=tuple(near))


def _token(one: ComparedEngine) -> float:
    return 0.0 if one.load is None else one.load.tpot_seconds["p50"]


def _one(asked: EngineAsked) -> ComparedEngine:
    try:
        if asked.engine != OWN:
            other = forecast_engine(asked)
            return ComparedEngine(engine=asked.engine, load=other.load, capacity_rate=other.capacity_rate)
        if asked.weights not in WEIGHTS:
            raise UserError(f"{OWN} has no weights in {asked.weights}", f"one of {', '.join(WEIGHTS)}")
        ours = forecast(ServingAsked(
            model=asked.model, hardware=asked.hardware, overrides=asked.overrides, pages=None, running=256, tokens=2048, weights=asked.weights,
            tp=parse(asked.hardware).count, load=asked.load, limit=asked.limit, seconds=asked.seconds,
        ))  # fmt: skip
        if ours.verdict == NO:
            raise UserError(f"{asked.model} does not fit on {asked.hardware}", "more devices")
        return ComparedEngine(engine=OWN, load=ours.load, capacity_rate=ours.capacity_rate)
    except UserError as error:
        return ComparedEngine(engine=asked.engine, load=None, capacity_rate=None, refused=error.problem)
