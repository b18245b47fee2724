"""What releases of torch do differently where foretell chooses in CUDA's place: `versions.toml`, with how each is known.

    holds("autocast runs rms_norm in fp32", "2.13.0+cu130")   → True
    checked("2.13.0")                                         → whether foretell was held against that release
    doubt("2.19.1")                                           → a sentence for the answer, or nothing

The installed torch traces, so most differences between releases come by themselves; see the table's head. Plain data, no torch.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("versions.toml")
UNCHECKED_FACTOR = 2.0
"""How much further bands reach for a release that foretell was not held against. Assumed: rules that moved between the known
ones changed the memory of single models by more, and left most as they were."""
DROPOUT_IN_CUDNN = "cudnn attention takes dropout"
RMS_NORM_IN_FP32 = "autocast runs rms_norm in fp32"

_BOUND = re.compile(r"(>=|<)(\d+)\.(\d+)")
Minor = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Release:
    """A minor release that foretell was held against."""

    version: str
    how: str
    """recorded (on a GPU), or dry run."""
    source: str


@dataclass(frozen=True, kw_only=True)
class ReleaseRule:
    """Something that some releases do and others do not."""

    name: str
    versions: str
    """Such as `>=2.12` or `>=2.11,<2.13`."""
    changes: str
    source: str

    def holds(self, version: str) -> bool:
        found = minor(version)
        if found is None:
            return all(sign == ">=" for sign, _ in self.bounds)  # taken for a release to come
        return all(found >= bound if sign == ">=" else found < bound for sign, bound in self.bounds)

    @property
    def bounds(self) -> tuple[tuple[str, Minor], ...]:
        parts = [_BOUND.fullmatch(part.strip()) for part in self.versions.split(",")]
        if None in parts:
            raise ValueError(f"versions of '{self.name}' are no bounds of minor releases: {self.versions}")
        return tuple((part[1], (int(part[2]), int(part[3]))) for part in parts if part is not None)


@functools.cache
def table() -> tuple[tuple[Release, ...], Mapping[str, ReleaseRule]]:
    """Releases from old to new, and rules by name."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    releases = sorted((Release(**row) for row in data["release"]), key=lambda one: minor(one.version) or (0, 0))
    return tuple(releases), {row["name"]: ReleaseRule(**row) for row in data["rule"]}


def holds(name: str, version: str) -> bool:
    """Whether a release does what the rule says."""
    return table()[1][name].holds(version)


def minor(version: str) -> Minor | None:
    """`2.11.0+cu130` → (2, 11); None where that is no version of torch's kind."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return (int(found[1]), int(found[2])) if found else None


def release(version: str) -> Release | None:
    """What is known of a release; None where foretell was not held against it."""
    found = minor(version)
    return next((one for one in table()[0] if minor(one.version) == found), None)


def checked(version: str) -> bool:
    return release(version) is not None


def doubt(version: str) -> str:
    """A sentence for an answer that rests on a release that was not checked; empty for one that was, or that is not said."""
    if not version or checked(version):
        return ""
    first, *_, last = known = [one.version for one in table()[0]]
    found = minor(version)
    newer, older = found is not None and found > (minor(last) or found), found is not None and found < (minor(first) or found)
    which = "is newer than" if newer else "is older than" if older else "is none of"
    return f"torch {version} {which} what foretell was checked with ({known[0]} to {last}): bands are wider"


def choices_of(version: str) -> str:
    """Whose choices an answer rests on, and how well they are known."""
    if not version:
        return "CUDA choices of the torch that traced it"
    known = release(version)
    how = {"recorded": "recorded on a GPU", "dry run": "checked by dry runs, not on a GPU"}[known.how] if known else "not checked"
    return f"CUDA choices of torch {known.version if known else version}, {how}"


def of(meta: Mapping[str, object]) -> str:
    """The release whose choices a trace has; empty where it does not say, as traces made by hand do."""
    versions = meta.get("versions")
    return str(versions.get("torch", "")) if isinstance(versions, Mapping) else ""


def widening(meta: Mapping[str, object]) -> float:
    """Factor on the bands of what is predicted from a trace."""
    found = of(meta)
    return UNCHECKED_FACTOR if found and not checked(found) else 1.0
