"""Draw the questions of a blind round of benchmarks/advice_gpu.py: other models than its first, with settings by a public seed.

A question depends on the seed, its model and nothing else; the seed also says in which order models come. Batches are such that the
step, every change to it and what compiles fit one device together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.prove.dice import Dice

SEED = "2026-11-18 advice"
COUNT = 28
PRECISIONS = {"bf16-autocast": 0.6, "fp32": 0.4}
OPTIMIZERS = {"adamw": 0.5, "adamw-fused": 0.3, "momentum": 0.2}
ZOO: Mapping[str, tuple[int, int]] = {
    "t5-base": (4, 16), "dit-regional": (4, 32), "asd": (4, 32), "hummingbird": (2, 16), "monocoder": (2, 8), "fno2d": (8, 48),
    "raftmlp-s": (16, 128), "strip-mlp": (16, 128), "pansharpen": (4, 32), "wildlife": (8, 64), "context-split": (8, 64),
    "rpcanet": (4, 32), "polar_mae": (4, 32),
    "pde-unet": (4, 32), "convnext-tiny": (16, 128), "gpt-10m": (8, 64), "geo": (8, 64), "allshowers": (8, 64),
}  # fmt: skip
"""Model → samples in a micro-batch, from and to."""
_HF = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
LANGUAGE: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "qwen2": (_HF, {"vocab_size": 65_000, "num_key_value_heads": 4}), "mistral": (_HF, {"num_key_value_heads": 4}),
    "gemma2": (_HF, {"vocab_size": 64_000, "num_key_value_heads": 4, "head_dim": 64}), "gpt_neox": (_HF, {}), "phi": (_HF, {}), "olmo2": (_HF, {}),
    "bloom": (("n_layer", "hidden_size", "n_head"), {"vocab_size": 50_257}), "falcon": (_HF[:3], {"vocab_size": 65_024}),
    "distilbert": (("n_layers", "dim", "n_heads", "hidden_dim"), {}), "electra": (_HF, {}), "mpnet": (_HF, {}),
    "deberta-v2": (_HF, {"vocab_size": 32_000}),
}  # fmt: skip
"""Type of transformers → its settings for layers, width, heads and inner width; others that it is drawn with."""
STACKS = ((4, 512, 8), (6, 768, 12), (8, 1024, 16), (4, 2048, 16))
PICTURES = ("vit", "dinov2", "swin", "convnextv2", "resnet", "beit")


def drawn(seed: str) -> dict[str, dict[str, Any]]:
    """Name of a question → what `advise` is asked, a model each."""
    every = [(name, _zoo) for name in ZOO] + [(f"hf:{name}", _language) for name in LANGUAGE] + [(f"hf:{name}", _picture) for name in PICTURES]
    every.sort(key=lambda one: Dice(f"{seed}/order/{one[0]}").share())
    found = {}
    for model, draw in every[:COUNT]:
        dice = Dice(f"{seed}/{model}")
        common = {"model": model, "precision": dice.weighted(PRECISIONS), "optimizer": dice.weighted(OPTIMIZERS)}
        found[model.replace("hf:", "hf-")] = {**common, **draw(model, dice)}
    return found


def _zoo(model: str, dice: Dice) -> dict[str, Any]:
    return {"micro_batch": int(dice.times(*ZOO[model]))}


def _language(model: str, dice: Dice) -> dict[str, Any]:
    names, fixed = LANGUAGE[model.removeprefix("hf:")]
    layers, width, heads = dice.pick(STACKS)
    overrides = dict(zip(names, (layers, width, heads, 4 * width), strict=False)) | dict(fixed)
    more = {"recompute": "full"} if dice.share() < 0.15 else {"accumulate": 4} if dice.share() < 0.1 else {}
    return {"micro_batch": int(dice.times(1, 16)), "seq": dice.pick((128, 256, 512, 1024)), "overrides": overrides, **more}


def _picture(model: str, dice: Dice) -> dict[str, Any]:
    return {"micro_batch": int(dice.times(8, 96)), "image": 224}
