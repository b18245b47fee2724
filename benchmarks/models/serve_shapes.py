"""Decoders as transformers builds them, in the shapes of published ones, of random weights."""

from __future__ import annotations

from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {"kind": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                   "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "llama-1b": {"kind": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "llama-3b": {"kind": "llama", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
                 "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "llama2-7b": {"kind": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 32, "vocab_size": 32000},
    "llama3-8b": {"kind": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "vocab_size": 128256},
    "qwen2-14b": {"kind": "qwen2", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
                  "num_key_value_heads": 8, "vocab_size": 152064},
    "qwen2-32b": {"kind": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
                  "num_key_value_heads": 8, "vocab_size": 152064},
    "tiny": {"kind": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip


def build(shape: str = "llama3-8b", context: int = 32768) -> Any:
    import transformers

    sizes = dict(SHAPES[shape])
    config = transformers.AutoConfig.for_model(
        sizes.pop("kind"), **sizes, max_position_embeddings=context, rope_theta=500000.0, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": torch.zeros(1, 64, dtype=torch.int64)}
