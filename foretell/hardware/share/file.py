"""A shared probe as bytes: canonical JSON, compressed, with a digest of what it holds; and back, trusting nothing.

    content = write(shared_of(measured, fabric))   → bytes, the same for the same measurements
    shared = read(content, "h200.foretell.json.gz") → Shared, or one FileFormatError that says what was found
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foretell.decode import Mismatch, json_of, shown, value_of
from foretell.errors import FileFormatError, UserError
from foretell.hardware.profile import About, Measured
from foretell.hardware.share.pack import packed, unpacked
from foretell.hardware.types import Device

KIND, SCHEMA = "foretell-shared-probe", 1
MODE = "share"
END = ".foretell.json.gz"
MOST_BYTES = 200_000
"""Of a file that is written."""
MOST_READ_BYTES, MOST_TEXT_BYTES = 1_000_000, 8_000_000
"""Of a file that is read, compressed and not: a small file can unpack to gigabytes."""
MOST_DEPTH = 12
MOST_TEXT = 120
UNITS: Mapping[str, str] = {
    "seconds": "s", "host_seconds": "s", "busy_seconds": "s", "ns": "ns", "host_ns": "ns", "bytes": "B", "bytes_per_second": "B/s",
    "peak_flops_per_second": "FLOP/s", "watts": "W", "clock_mhz": "MHz",
}  # fmt: skip
"""What figures are in; a file says so itself."""
REMEDY = "ask whoever shared it to run `foretell probe --share` again and send that file"
STAGES = ("launch", "levels", "latency", "rates", "copies", "disk", "steps", "ops", "power", "clocks", "ranks")
LATER = ("latency", "rates")
"""Parts that files of the first months do not have: one without them has no such field."""
FIGURES = (
    "name", "vendor", "backend", "compute_capability", "memory_bytes", "memory_nominal_bytes", "memory_bandwidth_bytes_per_second",
    "peak_flops_per_second", "l2_bytes", "sm_count", "tdp_watts", "usual_per_node", "launch_overhead_seconds",
)  # fmt: skip
"""Of a device, what a file says."""
_WORDS = re.compile(r"[A-Za-z0-9 ._,:;+()@%=<>'-]*")
"""The alphabet of texts: no path can be written in it."""
_IDENTITY = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-|GPU-[0-9a-f]{8}|([0-9a-f]{2}:){5}[0-9a-f]{2}|\b\d{1,3}(\.\d{1,3}){3}\b", re.I)
"""UUIDs, GPU identities, addresses of network cards and of machines."""
_STEP = ("config", "seconds", "spread", "host_seconds", "busy_seconds", "steps", "watts")


@dataclass(frozen=True, kw_only=True)
class SharedProbe:
    """What one person measured of one device, as a file has it."""

    measured: Measured
    """Its date is a day; notes are left out, and of what is missing only the stage is told."""
    known: bool
    """Whether the catalogue had the device where it was measured."""
    disturbed: bool = False
    """Other programs wanted the machine's cores."""
    collectives: tuple[Mapping[str, Any], ...] = ()
    links: tuple[tuple[float, ...], ...] | None = None
    seed: int = 1
    digest: str = ""

    @property
    def device(self) -> Device:
        """The device as the file describes it."""
        return device_of(self.measured.about.figures, f"its file, {self.short} of {self.measured.about.date}")

    @property
    def short(self) -> str:
        """A name for the file that its content decides."""
        return self.digest[:12]


def device_of(figures: Mapping[str, Any], source: str) -> Device:
    """A device from the figures of a file, each said to come from there."""
    given: dict[str, Any] = {name: figures.get(name) for name in FIGURES}
    capability = given["compute_capability"]
    given["compute_capability"] = tuple(capability) if capability else None
    sources = dict.fromkeys(FIGURES[4:], f"shared probe: {source}")
    given |= {"verified": True, "sources": sources, "usual_per_node": given["usual_per_node"] or 1}
    return Device(**given)


# ---------------------------------------------------------------- writing


def shared_of(measured: Measured, *, known: bool, seed: int = 1, collectives: Any = (), links: Any = None) -> SharedProbe:
    """What may be shared of measurements: nothing that tells whose machine it was."""
    about = replace(measured.about, date=measured.about.date[:10], figures={name: measured.about.figures.get(name) for name in FIGURES})
    missing = tuple(stage for stage in STAGES if any(text.startswith(f"{stage}:") for text in measured.missing))
    steps = tuple({name: step[name] for name in _STEP if name in step} for step in measured.steps)
    disturbed = any(text.startswith("other work was going on") for text in measured.notes)
    plain = replace(measured, about=about, mode=MODE, missing=missing, notes=(), steps=steps)
    rows = tuple({name: row[name] for name in ("op", "bytes", "ranks", "nodes", "backend", "seconds")} for row in collectives)
    return SharedProbe(measured=plain, known=known, disturbed=disturbed, collectives=rows, links=links, seed=seed)


def content_of(shared: SharedProbe) -> dict[str, Any]:
    """Everything in the file but its digest."""
    measured = shared.measured
    return {
        "kind": KIND, "schema": SCHEMA, "units": dict(UNITS), "seed": shared.seed, "known": shared.known, "disturbed": shared.disturbed,
        "about": asdict(measured.about), "missing": list(measured.missing), "clocks": dict(measured.clocks),
        "launch": dict(measured.launch), "levels": _plain(measured.levels), "copies": _plain(measured.copies), "power": _plain(measured.power),
        "steps": _plain(measured.steps), "collectives": _plain(shared.collectives), "ops": packed(measured.cases),
        "links": [list(row) for row in shared.links] if shared.links else None,
        **{name: _plain(getattr(measured, name)) for name in LATER if getattr(measured, name)},
    }  # fmt: skip


def _plain(rows: tuple[Mapping[str, Any], ...]) -> list[dict[str, Any]]:
    return [{name: _digits(value) for name, value in row.items()} for row in rows]


def _digits(value: Any) -> Any:
    """Six digits are more than a measurement has; fewer bytes."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical({name: value for name, value in content.items() if name != "digest"})).hexdigest()


def write(shared: SharedProbe) -> bytes:
    """The bytes of a file; the same measurements give the same."""
    content = content_of(shared)
    return gzip.compress(canonical({**content, "digest": digest_of(content)}), 9, mtime=0)


# ---------------------------------------------------------------- reading


def load(path: Path) -> SharedProbe:
    """Read a file that somebody else wrote."""
    try:
        if not path.is_file():
            raise UserError(f"'{path}' is no file", "give a file that `foretell probe --share` wrote, or a folder of such files")
        with path.open("rb") as stream:
            content = stream.read(MOST_READ_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "check the path and its permissions") from None
    return read(content, str(path))


def read(content: bytes, path: str) -> SharedProbe:
    """What a file holds, if it holds what it should; `path` is what errors call it. Plausibility is `check`'s."""
    data = _data(content, path)
    if not isinstance(data, dict) or data.get("kind") != KIND:
        found = data.get("kind", "missing") if isinstance(data, dict) else type(data).__name__
        raise FileFormatError(f"'{path}' is no shared probe: its kind is {shown(found)}, not '{KIND}'", REMEDY)
    if data.get("schema") != SCHEMA:
        newer = type(data.get("schema")) is int and data["schema"] > SCHEMA
        remedy = "update foretell: a newer one wrote it" if newer else REMEDY
        raise FileFormatError(f"'{path}' has schema {shown(data.get('schema'))}; this foretell reads {SCHEMA}", remedy)
    try:
        _walk({name: value for name, value in data.items() if name != "units"})
        if data.get("units") != UNITS:
            raise Mismatch("units", f"are {shown(data.get('units'))} and should be {shown(dict(UNITS))}")
        if data.get("digest") != digest_of(data):
            raise Mismatch("digest", "does not match the content: it was changed after it was written, or is damaged")
        return _shared(data)
    except Mismatch as error:
        raise FileFormatError(f"'{path}': {error}", REMEDY) from None


def _data(content: bytes, path: str) -> Any:
    if len(content) > MOST_READ_BYTES:
        raise FileFormatError(f"'{path}' has more than {MOST_READ_BYTES:,} bytes: no shared probe is as large", REMEDY)
    try:
        stream = zlib.decompressobj(wbits=31)
        text = stream.decompress(content, MOST_TEXT_BYTES + 1)
    except zlib.error:
        raise FileFormatError(f"'{path}' is damaged or not compressed by gzip", REMEDY) from None
    if len(text) > MOST_TEXT_BYTES:
        raise FileFormatError(f"'{path}' unpacks to more than {MOST_TEXT_BYTES:,} bytes: no shared probe is as large", REMEDY)
    if not stream.eof:
        raise FileFormatError(f"'{path}' is cut short", "copy or download it again")
    if stream.unused_data:
        raise FileFormatError(f"'{path}' has {len(stream.unused_data):,} bytes after its end", REMEDY)
    try:
        return json_of(text, parse_constant=_no_number)
    except ValueError as error:
        raise FileFormatError(f"'{path}' is no JSON: {' '.join(str(error).split())[:100]}", REMEDY) from None


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no measurement")


def _walk(data: Any) -> None:
    """Finite numbers, short texts of a narrow alphabet, nothing nested deep; without recursion."""
    left: list[tuple[Any, str, int]] = [(data, "", 0)]
    while left:
        value, where, depth = left.pop()
        if depth > MOST_DEPTH:
            raise Mismatch(where, "is nested too deep")
        if isinstance(value, dict):
            left += ((one, f"{where}.{name}".strip("."), depth + 1) for name, one in value.items())
            left += ((name, f"a name in {where or 'the file'}", depth + 1) for name in value)
        elif isinstance(value, list):
            left += ((one, where, depth + 1) for one in value)
        elif isinstance(value, str):
            _text(value, where)
        elif isinstance(value, float) and not math.isfinite(value):
            raise Mismatch(where, "holds a number that is not finite")


def _text(value: str, where: str) -> None:
    if len(value) > MOST_TEXT or not _WORDS.fullmatch(value):
        raise Mismatch(where, f"is {shown(value)}: a text that a probe does not write")
    if _IDENTITY.search(value) and not where.endswith("torch"):
        raise Mismatch(where, f"is {shown(value)}, which looks like an identity or an address")


@dataclass(frozen=True, kw_only=True)
class _SharedLevel:
    working_set_bytes: float
    bytes_per_second: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _SharedLatency:
    working_set_bytes: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _SharedRate:
    dtype: str
    side: int
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _SharedCopy:
    name: str
    bytes: float
    seconds: float
    elements: float | None = None


@dataclass(frozen=True, kw_only=True)
class _SharedPower:
    name: str
    watts: float
    clock_mhz: float | None = None
    seconds: float | None = None
    rate: float | None = None
    unit: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Step:
    config: Mapping[str, Any]
    seconds: float
    host_seconds: float
    spread: float = 0.0
    busy_seconds: float | None = None
    watts: float | None = None
    steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Collective:
    op: str
    bytes: float
    ranks: int
    nodes: int
    backend: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Content:
    """Types of a file's fields; `ops` is `pack`'s."""

    about: About
    seed: int
    known: bool
    disturbed: bool
    missing: tuple[str, ...]
    clocks: Mapping[str, float]
    launch: Mapping[str, float]
    levels: tuple[_SharedLevel, ...]
    copies: tuple[_SharedCopy, ...]
    power: tuple[_SharedPower, ...]
    steps: tuple[_Step, ...]
    collectives: tuple[_Collective, ...]
    ops: Mapping[str, Any]
    links: tuple[tuple[float, ...], ...] | None = field(default=None)
    latency: tuple[_SharedLatency, ...] = ()
    rates: tuple[_SharedRate, ...] = ()


_ALLOWED = {"kind", "schema", "units", "digest", *(item.name for item in fields(_Content))}


def _shared(data: Mapping[str, Any]) -> SharedProbe:
    unknown = sorted(set(data) - _ALLOWED)
    if unknown:
        raise Mismatch(unknown[0], "is no field of a shared probe")
    content: _Content = value_of(_Content, data)
    strange = sorted((set(data["about"]) - {item.name for item in fields(About)}) | (set(content.about.figures) - set(FIGURES)))
    if strange:
        raise Mismatch(f"about.{strange[0]}", "is no field of a shared probe")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", content.about.date):
        raise Mismatch("about.date", f"is {shown(content.about.date)} and should be a day, like 2026-11-15")
    name, of = content.about.device, content.about.figures.get("name")
    if name != of or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise Mismatch("about.device", f"is {shown(name)}, and its figures are of {shown(of)}")
    measured = Measured(
        about=content.about, mode=MODE, cases=unpacked(content.ops), missing=content.missing, clocks=content.clocks,
        launch=content.launch, **{name: tuple(data[name]) for name in ("steps", "levels", "copies", "power")},
        **{name: tuple(data.get(name, ())) for name in LATER},
    )  # fmt: skip
    found = SharedProbe(
        measured=measured, known=content.known, disturbed=content.disturbed, seed=content.seed, digest=data["digest"],
        collectives=tuple(data["collectives"]), links=content.links,
    )  # fmt: skip
    try:
        assert found.device.name  # a device that cannot be is refused by itself
    except (UserError, TypeError) as error:
        raise Mismatch("about.figures", f"are no device's: {error}") from None
    return found


