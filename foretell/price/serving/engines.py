"""Other serving engines: `engines.toml`, one entry for an engine and the versions that are alike.

What a table of releases can say is a limit or a choice (tokens of a step, who goes first, launches replayed); what it cannot, the seconds that
an engine's host and kernels take beyond ours, is one constant for each entry, fitted to published runs and named as such.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import InternalError, UnknownName
from foretell.hardware.types import Device

OWN = "foretell"


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """An engine and versions of it that are alike."""

    name: str
    """As users write it."""
    versions: tuple[str, ...]
    """Beginnings of version strings, the newest entry of an engine also for all others."""
    backend: str = ""
    """Of devices that it is built for, where that is an entry of its own."""
    running: int
    """Sequences at a time."""
    tokens: int
    """That a step computes."""
    prompts_first: bool = False
    """Waiting prompts go whole, in steps of their own, before others generate."""
    reserves: bool = False
    """A request starts where there are pages for all of its answer too."""
    graphs: bool = True
    """Launches are replayed where a step only generates."""
    overlapped: bool = False
    """The host prepares the next step while one computes."""
    memory_share: float = 0.9
    """Of a device's memory, that weights, pages and a step may take."""
    held_bytes: int = 2**30
    """Of that, for graphs and libraries; what the largest step computes comes on top."""
    share_of_free: bool = False
    """The share is of what weights leave, not of all memory."""
    experts_apart: bool = False
    """Ranks of a mixture of experts hold whole attention, each for its own sequences, and a part of the experts."""
    kv: str = ""
    """Format of keys and values where weights are in 8 bits or less; empty: the model's."""
    host_seconds: float
    """Of a step: scheduling, inputs, sampling, answers."""
    host_sequence_seconds: float = 0.0
    """For each sequence in it, besides."""
    launch_seconds: float = 0.0
    """Of each kernel that the host launches one by one: steps with prompts, and all where nothing is replayed."""
    expert_compile_seconds: float = 0.0
    """Kernels of experts are compiled when a size of step first comes that no replayed one has: a server just started waits for that."""
    slower: float = 1.0
    """Device seconds over those that our laws of kernels give."""
    peak_share: float = 1.0
    """Of the device's peak, that products compute at most at."""
    spread_heads: bool = False
    """Attention over pages reads keys and values anew for each head of queries."""
    shared_seconds: float = 0.0
    """Beyond its messages, of a step on several devices."""
    fitted: str = ""
    """The one constant that may be fitted to published runs; empty: none."""
    fitted_on: str = ""
    """The runs that it was fitted to; empty: it is assumed."""
    source: str
    """Of limits and choices."""

    def with_fitted(self, value: float) -> EngineProfile:
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return EngineProfile(**{**given, self.fitted: value})


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(resources.files("foretell.price.serving").joinpath("engines.toml").read_text(encoding="utf-8"))


def host_factor(device: Device) -> float:
    """Seconds of a host beside those of an H100's machine: CPUs are of the time of their GPUs."""
    found: dict[str, float] = _table()["hosts"]
    return found.get(device.name, found.get(".".join(map(str, device.compute_capability or ())), 1.0))


@cache
def engines() -> tuple[EngineProfile, ...]:
    """All entries, those of an engine from its newest to its oldest."""
    found = tuple(EngineProfile(**{**row, "versions": tuple(row["versions"])}) for row in _table()["engine"])
    wrong = [one.name for one in found if one.fitted and one.fitted not in {item.name for item in fields(EngineProfile)}]
    if wrong:
        raise InternalError(f"engines.toml: {', '.join(wrong)} fit a constant that there is not")
    return found


def names() -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in engines()))


def engine(name: str, version: str = "", backend: str = "cuda") -> EngineProfile:
    """The entry of an engine for a version; without one, or with one that none is known of, the newest."""
    mine = [one for one in engines() if one.name == name]
    if not mine:
        raise UnknownName("engine", name, (OWN, *names()), f"known: {', '.join((OWN, *names()))}")
    plain = version.strip().lower().removeprefix("v")
    told = [((len(start), one.backend == backend), one) for one in mine if one.backend in ("", backend) for start in one.versions
            if plain.startswith(start) and (plain or not start)]  # fmt: skip
    return max(told, key=lambda pair: pair[0])[1] if told else mine[0]
