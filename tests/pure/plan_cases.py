"""The plan that tests of plans change, and its blocks."""

from __future__ import annotations

from typing import Any

from foretell.plan.types import Plan, Residency

RECOMPUTE, SELECTIVE = Residency(mode="recompute"), Residency(mode="selective")
TWELVE = tuple(f"blocks.{number}" for number in range(12))
GPT = {"model": "gpt2", "seq": 1024, "blocks": ["blocks.0-11"]}
SEEDS = range(60)


def plan(**changes: Any) -> Plan:
    return Plan(**{"model": GPT, "hardware": "8xH100", **changes})
