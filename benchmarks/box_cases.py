"""The cases of benchmarks/box.py: shapes of 1B to 13B models with fewer layers, and a mesh for each."""

from __future__ import annotations

from typing import Any

ONE = {"model": "llama3-1b", "overrides": {"vocab_size": 32000}, "seq": 2048}
EIGHT = {"model": "llama3-8b", "overrides": {"vocab_size": 32000, "layers": 8}, "seq": 4096}
THIRTEEN = {
    "model": "llama3-8b", "seq": 2048,
    "overrides": {"vocab_size": 32000, "layers": 6, "dim": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824},
}  # fmt: skip
MOE = {"model": "mixtral-8x7b", "seq": 2048, "overrides": {"layers": 4, "dim": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632}}
AGAIN, SELECTIVE = {"blocks.*": "recompute"}, {"blocks.*": "selective"}


def piped(schedule: str, stages: int, **mesh: int) -> dict[str, Any]:
    cuts = [f"blocks.{number * 8 // stages}" for number in range(1, stages)]
    return {**EIGHT, "seq": 2048, "mesh": {"pp": 4, **mesh}, "pipeline": {"schedule": schedule, "cuts": cuts}, "accumulate": 8}


CASES: dict[str, dict[str, Any]] = {
    "fsdp-1b-8": {**ONE, "mesh": {"dp_shard": 8}, "micro_batch": 4, "rank": 3},
    "fsdp-8b-8": {**EIGHT, "mesh": {"dp_shard": 8}, "micro_batch": 2},
    "fsdp-8b-32-selective": {**EIGHT, "mesh": {"dp_shard": 32}, "micro_batch": 2, "blocks": SELECTIVE, "rank": 9},
    "fsdp-8b-64": {**EIGHT, "mesh": {"dp_shard": 64}, "rank": 63},
    "fsdp-13b-128-recompute": {**THIRTEEN, "mesh": {"dp_shard": 128}, "micro_batch": 2, "blocks": AGAIN},
    "fsdp-8b-256": {**EIGHT, "mesh": {"dp_shard": 256}, "micro_batch": 2},
    "fsdp-1b-512": {**ONE, "mesh": {"dp_shard": 512}, "micro_batch": 8},
    "fsdp-8b-1024": {**EIGHT, "mesh": {"dp_shard": 1024}, "micro_batch": 2},
    "fsdp-8b-64-kept": {**EIGHT, "mesh": {"dp_shard": 64}, "accumulate": 4, "reshard": False},
    "hsdp-8b-8x8": {**EIGHT, "mesh": {"dp_replicate": 8, "dp_shard": 8}, "micro_batch": 2, "rank": 11},
    "hsdp-1b-16x8": {**ONE, "mesh": {"dp_replicate": 16, "dp_shard": 8}, "micro_batch": 4, "accumulate": 2},
    "hsdp-13b-4x32": {**THIRTEEN, "mesh": {"dp_replicate": 4, "dp_shard": 32}, "micro_batch": 4},
    "replicas-1b-8": {**ONE, "mesh": {"dp_replicate": 8}, "micro_batch": 4},
    "tp2-8b": {**EIGHT, "mesh": {"tp": 2}, "micro_batch": 2, "rank": 1},
    "tp4-8b": {**EIGHT, "mesh": {"tp": 4}, "micro_batch": 2},
    "tp8-13b": {**THIRTEEN, "mesh": {"tp": 8}, "micro_batch": 8, "rank": 7},
    "tp2-fsdp4-8b": {**EIGHT, "mesh": {"tp": 2, "dp_shard": 4}, "micro_batch": 2},
    "tp8-fsdp8-8b": {**EIGHT, "mesh": {"tp": 8, "dp_shard": 8}, "micro_batch": 4},
    "pp4-gpipe": {**piped("gpipe", 4), "rank": 1},
    "pp4-1f1b-first": {**piped("1f1b", 4), "rank": 0},
    "pp4-1f1b-last": {**piped("1f1b", 4), "rank": 3},
    "pp4-interleaved": {**piped("interleaved-1f1b", 8), "rank": 2},
    "pp4-zero-bubble": {**piped("zero-bubble", 8), "rank": 1},
    "pp4-zero-bubble-v": {**piped("zero-bubble-v", 8), "rank": 0},
    "pp4-fsdp8-1f1b": {**piped("1f1b", 4, dp_shard=8), "rank": 9},
    "cp2-fsdp4-8b": {**EIGHT, "seq": 8192, "mesh": {"cp": 2, "dp_shard": 4}, "rank": 1},
    "cp4-1b": {**ONE, "seq": 16384, "mesh": {"cp": 4}, "rank": 3},
    "ep4-fsdp8-moe": {**MOE, "mesh": {"dp_shard": 8, "ep": 4}, "micro_batch": 2},
    "ep8-fsdp16-moe": {**MOE, "mesh": {"dp_shard": 16, "ep": 8}, "micro_batch": 4, "rank": 5},
    "offload-1b-8": {**ONE, "mesh": {"dp_shard": 8}, "micro_batch": 4, "precision": "bf16-master", "states": {"blocks.*": "host"}},
    "offload-8b-32": {**EIGHT, "mesh": {"dp_shard": 32}, "precision": "bf16-master", "states": {"blocks.4-7": "host"}, "blocks": AGAIN},
}  # fmt: skip

TINY = {"vocab_size": 256, "dim": 64, "heads": 8, "kv_heads": 8, "ffn": 128, "context": 64}
"""What a dry run has instead, on a CPU."""


def tiny(case: dict[str, Any]) -> dict[str, Any]:
    """The same case, small enough for a CPU in seconds."""
    layers = 8 if "pipeline" in case or "states" in case else 2
    changed = {**case["overrides"], **TINY, "layers": layers}
    accumulate = min(case.get("accumulate", 1), 8 if "pipeline" in case else 2)
    precision = case.get("precision", "fp32")
    return {**case, "overrides": changed, "seq": 64, "micro_batch": 1, "accumulate": accumulate, "precision": precision}
