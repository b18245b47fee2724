"""Optimizer states that are elsewhere: which, in what format, and what travels at a time. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretell.plan.blocks import expand
from foretell.plan.types import KEEP, MASTER, REST, Plan, Residency

DEVICE, HOST = "device", "host"
ALIGN = 64
"""Elements: parameters begin and are cut at multiples of it, so that kernels which take several elements at a time take the
same ones together as without cuts, and give the same bits."""
CHUNK = 16 * 2**20
"""Elements that travel together: 64 MB of each fp32 state, which a link moves at its full rate."""
SLOTS = 4
"""Chunks under way at once: one comes, one is updated, one goes, one is late."""

KEPT: Mapping[str, Mapping[str, str]] = {
    "plain": {"exp_avg": "weight", "exp_avg_sq": "weight"},
    "master": {"master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"},
    "split": {"rest": "int16", "exp_avg": "float32", "exp_avg_sq": "float32"},
    "half": {"master": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"},
}
"""Form → what is kept for each element, and in which format; `weight`: that of the weights."""
_WIDTH = {"float32": 4, "bfloat16": 2, "int16": 2}
_FORMS = {"fp32": "master", "split": "split", "bf16": "half"}


def form_of(plan: Plan) -> str:
    """How the plan keeps states: `plain` beside weights of their own format."""
    return _FORMS[plan.state_format] if plan.precision == MASTER else "plain"


def width_of_weights(plan: Plan) -> int:
    """Bytes of one weight on the device."""
    return 2 if plan.precision in ("bf16", MASTER) else 4


def bytes_of(form: str, weight: int) -> int:
    """Bytes kept for each element beside its weight."""
    return sum(weight if dtype == "weight" else _WIDTH[dtype] for dtype in KEPT[form].values())


def tiers(plan: Plan, blocks: Sequence[str]) -> dict[str, str]:
    """Where the states of every block are, and under "" those of everything else."""
    return {"": plan.states.get(REST, DEVICE), **_spread({k: v for k, v in plan.states.items() if k != REST}, blocks)}


def streamed(plan: Plan, blocks: Sequence[str]) -> frozenset[str]:
    """Blocks whose weights are on the device only while they are used."""
    return frozenset(path for path, tier in _spread(plan.weights, blocks).items() if tier == HOST)


def _spread(patterns: Mapping[str, str], blocks: Sequence[str]) -> dict[str, str]:
    found = expand({pattern: Residency(mode=tier) for pattern, tier in patterns.items()}, blocks)
    return {path: DEVICE if residency == KEEP else residency.mode for path, residency in found.items()}
