"""What a verification says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, SKIPPED, NOT_REACHED = "passed", "failed", "skipped", "not reached"
STAGES = (
    "scan", "compile", "smoke", "fuzz", "gradients", "magnitudes", "determinism", "sensitivity", "audit", "sanitizer", "parity",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """One stage."""

    stage: str
    status: str
    text: str = ""
    check: str = ""
    """Which check failed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a kernel computes what its reference does, on what it was tried, and what was not tried."""

    accepted: bool
    candidate: str
    task: str
    stage: str = ""
    """Where it was refused."""
    check: str = ""
    reason: str = ""
    stages: tuple[StageResult, ...] = ()
    calls: int = 0
    worst_error: float = 0.0
    """The largest error seen, as a share of what was allowed: twice eager's own."""
    determinism: str = ""
    """bitwise, seeded or rounding."""
    declined: tuple[str, ...] = ()
    """Variations that it says itself it does not do (NotImplementedError)."""
    compiled: tuple[Mapping[str, Any], ...] = ()
    """Triton kernels compiled for a device: registers, spilled and shared bytes."""
    notes: tuple[str, ...] = ()
    isolation: tuple[str, ...] = ()
    """What of the system the process was kept from."""
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class HarnessOptions:
    """How a kernel is verified."""

    seed: int | None = None
    """None: drawn from the system, so that nobody can know it."""
    scan: bool = True
    gradients: bool = True
    stages: tuple[str, ...] = STAGES
    repeats: int = 40
    """Calls after which nothing may have changed."""
    steps: int = 50
    target: str = "sm_90"
    notes: tuple[str, ...] = field(default=())
