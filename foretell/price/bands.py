"""Bands of step time: the factors on a prediction between which nine of ten measured steps are expected.

They are conformal and kept as data (`bands.json`, written by `benchmarks/bands.py --write`). For every kind of evidence it holds
quantiles of log(measured / predicted) over rows of model families, every family counting alike, in units of a scale: larger where
the device waits for the host, where irregular ops or ops that go by data take long and where products are in fp32. Where there are
no measurements of a kind it says `assumed`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("bands.json")
LEVEL = 0.9
"""Share of measured steps that a band is to hold."""
LEAST = 0.02
"""A band reaches at least this far to either side of the prediction."""
HOST_BOUND = 0.25
"""Share of a step in which the device waits for the host above which the host is the bottleneck."""
TYPICAL_HOST_SHARE = 0.5
"""The same of a step that is known to be host-bound and no more."""
MOST_GUESSED = 0.05
"""Share of a step in ops that were never measured above which the whole counts as assumed."""
OWN, CATALOGUE, UNFAMILIAR, CPU = "own profile", "catalogue", "unfamiliar", "cpu"
"""How a device is known: by its own profile; by its rates, beside efficiencies of its generation that published runs confirm or
that few of them speak of; as a CPU."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a band depends on."""

    device: str = OWN
    alone: bool = True
    """One rank: no messages are part of the step."""
    paced: bool = False
    """Of a CPU: how fast it is just now was measured beside the step."""
    compiled: bool = False
    data_dependent: bool = False
    """Sizes of tensors depend on values."""
    fp32: bool = False
    """Everything is computed in fp32."""
    host_share: float = 0.0
    """Of the step: the device waits for the host."""
    irregular_share: float = 0.0
    """Of the step: ops whose seconds neither FLOPs nor bytes tell (price/kernels/irregular.py)."""
    scattered_share: float = 0.0
    """Of the step: ops that read and add where data say, and products of experts (price/kernels/memory_bound.py)."""
    guessed_share: float = 0.0
    """Of the step: ops that the device's profile was measured without."""
    widening: float = 1.0
    """How much further the band reaches: above one for a release of torch that was not checked (trace/cuda/versions.py)."""

    @property
    def kind(self) -> str:
        """The entry of `bands.json`."""
        if self.device == CPU:
            return "cpu ranks" if not self.alone else "cpu paced" if self.paced else CPU
        if self.device in (CATALOGUE, UNFAMILIAR):
            return self.device
        if not self.alone:
            return "ranks"
        if self.guessed_share > MOST_GUESSED:
            return "guessed"
        if self.compiled:
            return "compiled"
        if self.data_dependent:
            return "data-dependent"
        return "host-bound" if self.host_share > HOST_BOUND else "device-bound"

    @property
    def features(self) -> dict[str, float]:
        """What the scale of a band may grow with."""
        return {"host": self.host_share, "irregular": self.irregular_share, "scattered": self.scattered_share, "fp32": float(self.fp32)}


@dataclass(frozen=True, kw_only=True)
class Band:
    """One kind of evidence: quantiles of log(measured / predicted) in units of the scale."""

    low: float
    high: float
    slopes: Mapping[str, float] = field(default_factory=dict)
    """Feature → how much the scale, one without it, grows by a whole unit of it."""
    rows: int = 0
    families: int = 0
    evidence: str = "assumed"

    def factors(self, features: Mapping[str, float]) -> tuple[float, float]:
        scale = scale_of(self.slopes, features)
        return min(math.exp(self.low * scale), 1 - LEAST), max(math.exp(self.high * scale), 1 + LEAST)


def scale_of(slopes: Mapping[str, float], features: Mapping[str, float]) -> float:
    """How far residuals spread beside those of a step with no such features."""
    return 1.0 + sum(slope * features.get(name, 0.0) for name, slope in slopes.items())


@functools.cache
def known() -> Mapping[str, Band]:
    """Kind of evidence → its band."""
    kinds = json.loads(FILE.read_text(encoding="utf-8"))["kinds"]
    return {name: Band(**entry) for name, entry in kinds.items()}


def factors(seen: Evidence) -> tuple[float, float]:
    """Between which factors of its predicted seconds a step is expected."""
    low, high = known()[seen.kind].factors(seen.features)
    return low**seen.widening, high**seen.widening


def by_bottleneck(device: str) -> dict[str, tuple[float, float]]:
    """What binds → factors, for estimates that know no more of a step than that."""
    found = {
        "": Evidence(device=device), "host": Evidence(device=device, host_share=TYPICAL_HOST_SHARE), "network": Evidence(device=device, alone=False),
    }  # fmt: skip
    return {binds: factors(seen) for binds, seen in found.items()}
