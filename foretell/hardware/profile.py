"""What `foretell probe` found on a machine, as plain data: a profile file, and the rows it was fitted to.

    load(path, device="H200-SXM-141GB", torch_version="2.11.0")  → Profile, or an error that names both sides
    save(profile, path)
    find_profile("H200-SXM-141GB")                               → the user's own, else the one that travels with foretell

A profile file is JSON (`.json`, or `.json.gz`). The rows stay in a journal beside it: see `probe.journal`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from foretell.decode import Mismatch, decode
from foretell.errors import FileFormatError, UserError
from foretell.files import write_atomically
from foretell.trace.store import cache
from foretell.trace.types import TensorSpec

KIND, SCHEMA = "foretell-profile", 1
MODES = ("quick", "full", "share")
JSON_ENDS = (".json", ".json.gz")
_REMEDY = "measure it anew with `foretell probe`"


class OpRow(NamedTuple):
    """One op as a trace would describe it, and what it cost."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: tuple[Any, ...]
    seconds: float
    spread: float
    host_seconds: float

    def to_list(self) -> list[Any]:
        return [
            self.name, [[s.dtype, *s.shape] for s in self.inputs], [[s.dtype, *s.shape] for s in self.outputs],
            list(self.attrs), _short(self.seconds), round(self.spread, 3), _short(self.host_seconds),
        ]  # fmt: skip

    @classmethod
    def from_list(cls, row: list[Any]) -> OpRow:
        name, inputs, outputs, attrs, seconds, spread, host = row
        return cls(name, _specs(inputs), _specs(outputs), tuple(attrs), seconds, spread, host)


def _specs(rows: list[list[Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(tuple(shape), dtype) for dtype, *shape in rows)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True, kw_only=True)
class About:
    """Which machine, with which software, and when."""

    device: str
    """Name in the catalogue."""
    reported_as: str
    """What torch calls the GPU; for a CPU, what the processor calls itself."""
    backend: str
    torch: str
    python: str
    host_cpu: str
    date: str
    """UTC, as ISO 8601."""
    driver: str | None = None
    cores: int | None = None
    """Physical cores that the process might use."""
    threads: int | None = None
    """Threads torch used on the host."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The device as it was known when rows were measured: fields of `Device`."""


@dataclass(frozen=True, kw_only=True)
class Profile(About):
    """Everything measured of one device, and what was fitted to it. Opaque parts belong to the room named."""

    mode: str
    missing: tuple[str, ...] = ()
    """What was not measured, and why; empty when all was."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the measurement."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    """sm_before_mhz, sm_after_mhz, sm_max_mhz, memory_max_mhz, power_limit_watts."""
    launch: Mapping[str, float] = field(default_factory=dict)
    """device_seconds from one empty kernel's start to the next's; host_seconds to ask for one."""
    ops: Mapping[str, Any] = field(default_factory=dict)
    """Fitted by `price.kernels.ops`."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Fitted by `price.host`."""
    fitted: Mapping[str, Any] = field(default_factory=dict)
    """What else was fitted by `cost`: the power model, the factor of ops inside a step."""
    power: tuple[Mapping[str, Any], ...] = ()
    """Load points: name, watts, clock_mhz, seconds of one call, rate in work per second, unit of work."""
    copies: tuple[Mapping[str, Any], ...] = ()
    """name (h2d-pinned, d2h-pageable, duplex, pin, host-copy, disk-read, ...), bytes moved, seconds; of AdamW on the host
    (adamw, adamw-beside: while copies go both ways) also elements."""
    levels: tuple[Mapping[str, Any], ...] = ()
    """Copies inside the device's memory: working_set_bytes, bytes_per_second read and written."""
    latency: tuple[Mapping[str, Any], ...] = ()
    """Pointer chases: working_set_bytes, seconds of one load that waits for the one before."""
    rates: tuple[Mapping[str, Any], ...] = ()
    """The best square product by dtype: dtype, side, seconds."""
    collectives: tuple[Mapping[str, Any], ...] = ()
    """op, bytes on one rank, ranks, nodes, backend, seconds."""
    links: tuple[tuple[float, ...], ...] | None = None
    """Bytes per second from rank (row) to rank (column)."""
    accuracy: Mapping[str, Any] = field(default_factory=dict)
    """Held-out errors of what was fitted."""
    elsewhere: Mapping[str, Any] = field(default_factory=dict)
    """Kernels of this device from public tables (`silicon.Elsewhere`); all else is another device's, its `basis`."""

    shared: Mapping[str, Any] = field(default_factory=dict)
    """Of a profile that others measured (`share`): words on where it comes from, low and high factors between its files, a
    contradiction among them, how many files."""

    @property
    def partial(self) -> bool:
        return bool(self.missing)

    def to_dict(self) -> dict[str, Any]:
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"kind": KIND, "schema": SCHEMA, "partial": self.partial, **plain}


class Case(NamedTuple):
    """Ops that were measured together: one drawn case of one family."""

    family: str
    number: int
    rows: tuple[OpRow, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe measured, before anything is fitted to it."""

    about: About
    mode: str
    cases: tuple[Case, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    """Reference steps: config, seconds, spread, host_seconds, busy_seconds where known."""
    clocks: Mapping[str, float] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)
    levels: tuple[Mapping[str, Any], ...] = ()
    latency: tuple[Mapping[str, Any], ...] = ()
    rates: tuple[Mapping[str, Any], ...] = ()
    copies: tuple[Mapping[str, Any], ...] = ()
    power: tuple[Mapping[str, Any], ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[OpRow, ...]:
        return tuple(row for case in self.cases for row in case.rows)

    @property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """For every row, which case it was measured in: such rows are held out together."""
        return tuple((case.family, case.number) for case in self.cases for _ in case.rows)

    def profile(
        self,
        *,
        ops: Mapping[str, Any],
        host: Mapping[str, Any] | None = None,
        fitted: Mapping[str, Any] | None = None,
        accuracy: Mapping[str, Any] | None = None,
    ) -> Profile:
        """The profile of these measurements with what was fitted to them."""
        about = {item.name: getattr(self.about, item.name) for item in fields(About)}
        shared = ("mode", "clocks", "launch", "levels", "latency", "rates", "copies", "power", "missing", "notes")
        same = {name: getattr(self, name) for name in shared}
        return Profile(**about, **same, ops=ops, host=host or {}, fitted=fitted or {}, accuracy=accuracy or {})


# ---------------------------------------------------------------- files


def save(profile: Profile, path: str | Path) -> Path:
    """Write a profile, all of it or nothing."""
    target = Path(path)
    content = (json.dumps(profile.to_dict(), separators=(",", ":"), sort_keys=True) + "\n").encode()
    try:
        write_atomically(target, gzip.compress(content, mtime=0) if target.name.endswith(".gz") else content)
    except OSError as error:
        raise UserError(
            f"the profile could not be written to '{target}': {error.strerror}",
            "free some space or give --out another place",
        ) from None
    return target


def load(path: str | Path, *, device: str | None = None, torch_version: str | None = None) -> Profile:
    """Read a profile; refuse one of another device or of another minor version of torch."""
    profile = from_dict(_read(Path(path)), str(path))
    refuse_other(profile, path, device=device, torch_version=torch_version)
    return profile


def refuse_other(profile: Profile, path: str | Path, *, device: str | None, torch_version: str | None) -> None:
    """An error that names both sides, where a profile is not of what is asked for."""
    if device is not None and profile.device != device:
        raise UserError(
            f"'{path}' is a profile of {profile.device} ({profile.reported_as}), and {device} is asked for",
            f"run `foretell probe` on a machine with {device}",
        )
    if torch_version is not None and minor(profile.torch) != minor(torch_version):
        raise UserError(f"'{path}' was measured with torch {profile.torch}, and this is torch {torch_version}", _REMEDY)


def from_dict(data: Any, path: str) -> Profile:
    """A profile from a file's content; `path` is what errors call it."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        found = data.get("kind", "no kind") if isinstance(data, dict) else type(data).__name__
        raise FileFormatError(f"'{path}' is no profile: its kind is {found!r}, not '{KIND}'", _REMEDY)
    if data.get("schema") != SCHEMA:
        raise FileFormatError(
            f"'{path}' is a profile of schema {data.get('schema')!r}; this foretell reads {SCHEMA}", _REMEDY
        )
    lacking = [name for name in _TEXTS if name not in data]
    wrong = [name for name, kind in _KINDS.items() if name in data and not isinstance(data[name], kind)]
    if lacking or wrong:
        problem = "; ".join(
            f"{what}: {', '.join(names)}" for what, names in (("missing", lacking), ("wrong", wrong)) if names
        )
        raise FileFormatError(f"'{path}' is not a whole profile ({problem})", _REMEDY)
    profile = decode(Profile, data, f"'{path}'", _REMEDY)
    for name, kind in _INSIDE.items():
        if getattr(profile, name):
            decode(kind, {name: getattr(profile, name)}, f"'{path}'", _REMEDY)
    return profile


@dataclass(frozen=True, kw_only=True)
class _Part:
    laws: Mapping[str, Mapping[str, float]]
    trees: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class _Family:
    parts: tuple[_Part, ...]
    accuracy: Mapping[str, float]
    basis: _Family | None = None
    """Another probe's, which the parts' trees correct."""

    def __post_init__(self) -> None:
        if not self.parts or (self.basis is None and any("" not in part.laws for part in self.parts)):
            raise Mismatch("ops", "has a family without laws")
        if self.basis is not None and (self.basis.basis is not None or any(part.trees is None for part in self.parts)):
            raise Mismatch("ops", "has a family that corrects nothing, or a correction")


@dataclass(frozen=True, kw_only=True)
class _Host:
    weights: Mapping[str, float]
    calls: Mapping[str, float]
    references: int
    error: float
    turns: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "forward" not in self.weights:
            raise Mismatch("host.weights.forward", "is missing")


@dataclass(frozen=True, kw_only=True)
class _Power:
    weights: Mapping[str, float]
    limit: float
    error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Clocks:
    compute: float
    other: float
    exponent: float

    def __post_init__(self) -> None:
        if not (0 < self.compute < 4 and 0 <= self.other < 1 and 0 < self.exponent < 8):
            raise Mismatch("fitted.clocks", "has shares of the power limit that no device draws")


@dataclass(frozen=True, kw_only=True)
class _Fitted:
    in_step: Mapping[str, float] = field(default_factory=dict)
    clocks: _Clocks | None = None
    power: _Power | None = None
    corrections: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Copy:
    name: str
    bytes: float
    seconds: float
    elements: float | None = None

    def __post_init__(self) -> None:
        if not (self.bytes > 0 and self.seconds > 0 and (self.elements is None or self.elements > 0)):
            raise Mismatch("copies", f"has a row {self.name!r} of nothing")


@dataclass(frozen=True, kw_only=True)
class LevelRow:
    """Bandwidth of one size of working set."""

    working_set_bytes: float
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """Seconds of one dependent load in one size of working set."""

    working_set_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Rate:
    dtype: str
    side: int
    seconds: float

    def __post_init__(self) -> None:
        if not (self.side > 0 and self.seconds > 0):
            raise Mismatch("rates", f"has a product in {self.dtype!r} of nothing")


_INSIDE: Mapping[str, Any] = {
    "ops": dict[str, dict[str, _Family]], "host": dict[str, _Host], "fitted": dict[str, _Fitted],
    "copies": dict[str, tuple[_Copy, ...]], "levels": dict[str, tuple[LevelRow, ...]],
    "latency": dict[str, tuple[LatencyRow, ...]], "rates": dict[str, tuple[_Rate, ...]],
}  # fmt: skip
"""What the rooms that fit a profile read of it: field → an object with that field of this type."""
_TEXTS = ("device", "reported_as", "backend", "torch", "python", "host_cpu", "date", "mode")
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(("clocks", "launch", "ops", "host", "fitted", "accuracy", "figures", "elsewhere", "shared"), dict),
    **dict.fromkeys(("missing", "notes", "power", "copies", "levels", "latency", "rates", "collectives"), list),
}


def _read(path: Path) -> Any:
    try:
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
    except EOFError:
        raise FileFormatError(f"the profile '{path}' is cut short", _REMEDY) from None
    except OSError as error:
        problem = error.strerror or str(error)
        raise UserError(
            f"cannot read the profile '{path}': {problem}", "check the path, or run `foretell probe`"
        ) from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise FileFormatError(f"the profile '{path}' is cut short or no JSON", _REMEDY) from None


# ---------------------------------------------------------------- where they are


def folder() -> Path:
    """Where the user's own profiles are kept."""
    return cache.folder() / "profiles"


def own_path(about: About) -> Path:
    """Where a probe of this machine is kept; machines that share a home and differ in CPU have files of their own."""
    if about.backend != "cpu":
        return folder() / f"{about.device}.json"
    words = re.sub(r"\([^)]*\)|[^A-Za-z0-9]+", "-", about.reported_as)
    slug = re.sub(r"-+", "-", words).strip("-")
    return folder() / f"{about.device}-{slug}-{about.cores}-cores.json"


def journal_path(profile_path: str | Path) -> Path:
    """Where the rows of a profile are while it is measured; compressed, `.gz` follows."""
    path = Path(profile_path)
    stem = next((path.name.removesuffix(end) for end in reversed(JSON_ENDS) if path.name.endswith(end)), path.name)
    return path.with_name(f"{stem}.rows.jsonl")


def minor(version: str) -> str:
    """`2.11.0+cu130` → `2.11`."""
    return ".".join(version.split("+")[0].split(".")[:2])
