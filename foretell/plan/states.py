"""Optimizer states that are elsewhere: which, in what format, and what travels at a time. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foretell.plan.blocks import expand
from foretell.plan.types import KEEP, MASTER, REST, Plan, Residency
from foretell.trace.recipe import BLOCK

DEVICE, HOST, DISK = "device", "host", "disk"
ALIGN = BLOCK
"""Elements: parameters begin and are cut at multiples of it, so that kernels which take several elements at a time take the
same ones together as without cuts, and give the same bits; and that no block is cut."""
CHUNK = 16 * 2**20
"""Elements that travel together: 64 MB of each fp32 state, which a link moves at its full rate."""
SLOTS = 4
"""Chunks under way at once: one comes, one is updated, one goes, one is late."""
BUFFERS = 6
"""Chunks of states on disk that are in host memory at once: two are read, two are on the device or on the way, two are written."""

_CODES = {"exp_avg_code": "int8", "exp_avg_unit": "float32", "exp_avg_sq_code": "uint8", "exp_avg_sq_unit": "float32"}
KEPT: Mapping[str, Mapping[str, str]] = {
    "plain": {"exp_avg": "weight", "exp_avg_sq": "weight"},
    "master": {"master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"},
    "split": {"rest": "int16", "exp_avg": "float32", "exp_avg_sq": "float32"},
    "half": {"master": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"},
    "int8": {"master": "float32", **_CODES},
    "split-int8": {"rest": "int16", **_CODES},
}
"""Form → what is kept for each element, and in which format; `weight`: that of the weights."""
_EVERY = {"exp_avg_unit": BLOCK, "exp_avg_sq_unit": BLOCK}
"""What is kept for so many elements together."""
_WIDTH = {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}
_FORMS = {"fp32": "master", "split": "split", "bf16": "half", "int8": "int8", "split-int8": "split-int8"}


def form_of(plan: Plan) -> str:
    """How the plan keeps states: `plain` beside weights of their own format."""
    return _FORMS[plan.state_format] if plan.precision == MASTER else "plain"


def width_of_weights(plan: Plan) -> int:
    """Bytes of one weight on the device."""
    return 2 if plan.precision in ("bf16", MASTER) else 4


def count_of(name: str, elements: int) -> int:
    """Entries that are kept under a name for so many elements."""
    return -(-elements // _EVERY.get(name, 1))


def bytes_of(form: str, weight: int) -> float:
    """Bytes kept for each element beside its weight; whole bytes for any multiple of `ALIGN` elements."""
    return sum((weight if dtype == "weight" else _WIDTH[dtype]) / _EVERY.get(name, 1) for name, dtype in KEPT[form].items())


def tiers(plan: Plan, blocks: Sequence[str]) -> dict[str, str]:
    """Where the states of every block are, and under "" those of everything else."""
    return {"": plan.states.get(REST, DEVICE), **_spread({k: v for k, v in plan.states.items() if k != REST}, blocks)}


def streamed(plan: Plan, blocks: Sequence[str]) -> frozenset[str]:
    """Blocks whose weights are on the device only while they are used."""
    return frozenset(path for path, tier in _spread(plan.weights, blocks).items() if tier == HOST)


def _spread(patterns: Mapping[str, str], blocks: Sequence[str]) -> dict[str, str]:
    found = expand({pattern: Residency(mode=tier) for pattern, tier in patterns.items()}, blocks)
    return {path: DEVICE if residency == KEEP else residency.mode for path, residency in found.items()}
