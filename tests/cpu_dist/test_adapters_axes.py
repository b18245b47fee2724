"""Adapters where ranks share a model's blocks, positions or tensors: what they compute is what one process computes."""

from __future__ import annotations

import pytest

from foretell.plan.types import Adapters, Mesh, Pipeline, Residency
from foretell.trace.load.model import Source
from tests.cpu_dist.beside_one import Case, Ranks, check, params

TEXT = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}
HF = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=2),
    "llama": Source(model="llama-tiny", overrides={**TEXT, "kv_heads": 2, "ffn": 64}, micro_batch=2),
    "hf": Source(model="hf:qwen2", overrides=HF, micro_batch=2, seq=16),
}
LORA = {"adapters": Adapters(rank=4)}
PIPED = {"pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",)), "accumulate": 2}
CASES = {
    "stages": Case("llama", Mesh(pp=2), {**LORA, **PIPED}),
    "positions": Case("llama", Mesh(cp=2), LORA),
    "stages, nf4": Case("llama", Mesh(pp=2), {**LORA, **PIPED, "base": {"adapted": "nf4"}}),
    "positions, nf4": Case("llama", Mesh(cp=2), {**LORA, "base": {"adapted": "nf4"}}),
    "tensors": Case("llama", Mesh(tp=2), LORA),
}


@pytest.mark.parametrize("name", params(CASES))
def test_ranks_compute_what_one_process_computes(name: str, ranks: Ranks) -> None:
    check(CASES[name], MODELS, ranks)
