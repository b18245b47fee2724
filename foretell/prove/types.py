"""The values of a sealed forecast. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import foretell.zoo as zoo
from foretell.decode import Mismatch, value_of
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Config:
    """One drawn configuration: a model of the zoo at sizes of its own, and how a step of it is run."""

    index: int
    """Which draw of the seed it is."""
    model: str
    overrides: Mapping[str, int | float | str | bool]
    micro_batch: int
    seq: int | None = None
    image: int | None = None
    optimizer: str = "adamw-fused"
    precision: str = "bf16-autocast"
    recompute: str = "none"
    accumulate: int = 1
    clip: float | None = None
    compile: str = "none"
    near: float | None = None
    """Where it is run under a limit of memory: the limit as a share of the least memory it is predicted to need."""

    def __post_init__(self) -> None:
        if self.model not in zoo.names():  # a forecast is of models that everybody has, never of somebody's file
            raise Mismatch("model", f"is {self.model!r}, which is not in the zoo")

    def source(self) -> Source:
        return Source(
            model=self.model, overrides=dict(self.overrides), micro_batch=self.micro_batch, seq=self.seq, image=self.image
        )

    def recipe(self) -> Recipe:
        return Recipe(
            optimizer=self.optimizer, precision=self.precision, recompute=self.recompute, accumulate=self.accumulate,
            clip=self.clip, compile=self.compile,
        )  # fmt: skip

    def words(self) -> str:
        """The model, its sizes, its batch, and what is unusual about its step."""
        sizes = " ".join(f"{name}={value}" for name, value in self.overrides.items())
        batch = f"{self.micro_batch}×{self.seq}" if self.seq else f"{self.micro_batch}"
        batch += f"×{self.accumulate}" if self.accumulate > 1 else ""
        how = [self.precision, self.optimizer]
        how += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        how += ["clip"] if self.clip is not None else []
        how += [f"compile {self.compile}"] if self.compile != "none" else []
        return f"{self.model} {sizes}, batch {batch}, {', '.join(how)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Config:
        """Raises `decode.Mismatch` where a field is of another type."""
        config: Config = value_of(cls, data)
        return config


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What was predicted of a configuration."""

    config: Config
    bytes: Mapping[str, int] = field(default_factory=dict)
    """allocated, reserved, device; on a CPU allocated alone: tensors alive at once."""
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of the same, and of seconds."""
    seconds: float | None = None
    """Of a step; None where nothing is known of the device's speed."""
    verdict: str = ""
    """On the whole device: fits, tight or no."""
    limit_bytes: int | None = None
    """What the caching allocator may reserve in the run under a limit."""
    limit_verdict: str = ""
    """Under that limit."""
    error: str = ""
    """Why there is no prediction."""

    def __post_init__(self) -> None:
        said = {*self.bytes, *(("seconds",) if self.seconds is not None else ())}
        if not self.error and said - self.bands.keys():
            raise Mismatch("bands", f"lacks {', '.join(sorted(said - self.bands.keys()))}")

    def to_json(self) -> dict[str, Any]:
        return {
            **{item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("config", "bytes", "bands")},
            "config": self.config.to_json(), "bytes": dict(self.bytes),
            "bands": {name: list(band) for name, band in self.bands.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Forecast:
        """Raises `decode.Mismatch` where a field is of another type."""
        found: Forecast = value_of(cls, data)
        return found


@dataclass(frozen=True, kw_only=True)
class Sealed:
    """A forecast that can be shown to be older than its measurements."""

    seed: str
    count: int
    device: str
    """Name in the catalogue; of a CPU, what it reports itself as."""
    backend: str
    memory_bytes: int
    rules: Mapping[str, float]
    """Which draws are passed over: too long a step, too much memory."""
    rows: tuple[Forecast, ...]
    passed_over: tuple[tuple[int, str], ...] = ()
    """Draws that are not among the rows, and why."""
    profile: Mapping[str, str] = field(default_factory=dict)
    """The measured profile that seconds rest on: device, date, SHA-256 of its file."""
    versions: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    """SHA-256 over the files of foretell that the forecast rests on."""
    pacers: Mapping[str, float] = field(default_factory=dict)
    """On a CPU: models that are run beside every row, and their seconds by the profile. Who else uses the machine slows them
    as it slows the row: predicted seconds are for the pace of the profile, and are held at the pace seen beside the row."""
    made: str = ""
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """All but the hash."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            **plain, "rows": [row.to_json() for row in self.rows], "passed_over": [list(pair) for pair in self.passed_over],
            "rules": dict(self.rules), "profile": dict(self.profile), "versions": dict(self.versions),
            "pacers": dict(self.pacers),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sealed:
        """Raises `decode.Mismatch` where a field is of another type."""
        found: Sealed = value_of(cls, data)
        return found
