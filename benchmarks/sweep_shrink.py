"""Small twins of transformers' model types: at most two layers, widths of at most 256, as config.json files.

One rule for all types, tried in steps until transformers builds the model (on the meta device, without memory):

    1. every width and every number of heads of the config and its parts divided by one power of two; two layers;
       four experts; 1,024 words; token ids that no longer exist moved to the end of the vocabulary
    2. the same, but 64 instead of 256 as the widest, for configs whose parts lean on each other
    3. layers, experts and vocabulary only
    4. layers only
    5. the type's own defaults

What a width or a layer is, is told by the name of the setting; lists with one entry for each layer keep their first entry and the
first that differs from it, so that a stack of two kinds of layers keeps both.
"""

from __future__ import annotations

import re
from typing import Any

WIDEST, NARROWER, LAYERS, WORDS, EXPERTS, CHOSEN = 256, 64, 2, 1024, 4, 2
_MAIN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "dim_model", "encoder_hidden_size", "model_dim", "width")
"""What a config calls the width of its stack."""
_IS_WIDTH = re.compile(
    r"(^|_)(hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|dim_model|width|embedding_size|intermediate_size|n_inner|d_ff|ffn_dim|"
    r"mlp_dim|inner_dim|ffn_hidden_size|lora_rank|q_lora_rank|projection_dim|out_channels|hidden_channels|proj_dim|channels_size|"
    r"intermediate_dim|feed_forward_dim|conv_dim|model_dim|lru_width|d_inner|mamba_intermediate)$"
    r"|(hidden_sizes|embed_dims|encoder_hidden_sizes|block_channels|neck_hidden_sizes|intermediate_sizes|stage_mid_channels)$"
)
_IS_INNER = re.compile(r"(intermediate_size|n_inner|d_ff|ffn_dim|mlp_dim|inner_dim|ffn_hidden_size)$")
"""Widths that nothing else leans on: multiples of 16, which grouped products need."""
_NO_WIDTH = re.compile(r"head_dim|rope|time_|state|kernel|rotary|position|max_|num_channels|in_channels|qk_|v_head|nope|latent_dim|codebook|pos_emb")
_IS_HEADS = re.compile(r"(attention_heads|n_heads?|num_heads?|kv_heads|key_value_heads|mamba_n_heads|num_key_heads|num_value_heads|n_groups)$")
_IS_LAYERS = re.compile(
    r"(^|_)(num_hidden_layers|n_layers?|num_layers|layers|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|depth|"
    r"num_blocks|num_hidden_groups|block_layers|num_resnet_layers)$|num_.*_layers$|_layers$"
)
_ARE_LAYERS = re.compile(r"^(depths?|num_blocks|layers_per_block|blocks_per_stage|num_layers|num_conv_blocks|blocks)$")
_IS_EXPERTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
_IS_CHOSEN = re.compile(r"^(num_experts_per_tok|top_k|moe_topk|moe_k|num_experts_per_token|experts_per_token|moe_top_k|num_selected_experts)$")
_NO_LAYERS = re.compile(r"initial|first_k|skip|nextn|mtp|prediction|share|freeze|unfrozen|window_layers|conv_layers|feat_extract|feature")


_STACKS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_BY_LAYER: dict[str, Any] = {"per_layer_config": None, "num_kv_shared_layers": 0, "attention_types": [[["global", "local"], 1]]}
"""Settings by the number of a layer, without which a short stack does."""


def ladder(plain: dict[str, Any]) -> list[dict[str, Any]]:
    """Configs to try, the smallest first."""
    return [
        _shrunken(plain, WIDEST, True), _shrunken(plain, NARROWER, True), _shrunken(plain, None, True), _shrunken(plain, None, False),
        plain,
    ]  # fmt: skip


def _shrunken(plain: dict[str, Any], widest: int | None, all_of_it: bool) -> dict[str, Any]:
    factor = 1
    if widest is not None:
        while max(_main_widths(plain), default=1) > widest * factor:
            factor *= 2
    return _part(plain, factor, all_of_it)


def _main_widths(part: dict[str, Any]) -> list[int]:
    found = [part[key] for key in _MAIN if type(part.get(key)) is int]
    for value in part.values():
        if isinstance(value, dict):
            found += _main_widths(value)
    return found


def _part(part: dict[str, Any], factor: int, all_of_it: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    kept = _kept_layers(part)
    stages = max([LAYERS, *(len(part[key]) for key in ("out_features", "out_indices", "_out_indices") if isinstance(part.get(key), list))])
    stages = max(stages, len(kept))
    deep = next((part[key] for key in _STACKS if type(part.get(key)) is int), None)
    for key, value in part.items():
        if isinstance(value, dict) and ("model_type" in value or key.endswith(("config", "_configs"))):
            made[key] = _part(value, factor, all_of_it)
        else:
            made[key] = _value(key, value, factor, all_of_it, kept)
            if key in _STACKS and type(value) is int:
                made[key] = min(value, stages)
            if key in _BY_LAYER:
                made[key] = _BY_LAYER[key]
                if made[key] is None:
                    made.pop(key)
            elif isinstance(value, list) and deep is not None and deep > LAYERS and len(value) == deep:
                made[key] = [value[at] for at in kept]
            elif key == "out_features" and isinstance(value, list) and any(str(one).startswith("stage") for one in value):
                made[key] = [f"stage{at}" for at in range(stages - len(value) + 1, stages + 1)]
            elif key == "out_indices" and isinstance(value, list) and deep is not None:
                made[key] = list(range(stages - len(value) + 1, stages + 1))
    if isinstance(part.get("stage_names"), list):
        made.pop("stage_names")
    _mend_heads(part, made, factor)
    if all_of_it:
        _mend_words(made)
    return made


def _kept_layers(part: dict[str, Any]) -> list[int]:
    """Which layers of a stack stay: its first, and the first of another kind."""
    for key in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
        kinds = part.get(key)
        if isinstance(kinds, list) and len(kinds) > LAYERS:
            others = [at for at, kind in enumerate(kinds) if kind != kinds[0]] or [1]
            return [0, *others[: 2 if "hybrid" in kinds else 1]]  # layers that share one attention are at least two
    return [0, 1]


def _value(key: str, value: Any, factor: int, all_of_it: bool, kept: list[int]) -> Any:
    if type(value) is int:
        if _IS_LAYERS.search(key) and not _NO_LAYERS.search(key):
            return min(value, LAYERS)
        if all_of_it and _IS_EXPERTS.search(key):
            return min(value, EXPERTS)
        if all_of_it and _IS_CHOSEN.search(key):
            return min(value, CHOSEN)
        if all_of_it and key in ("n_group", "topk_group"):
            return 1
        if _IS_WIDTH.search(key) and not _NO_WIDTH.search(key) and value > 8:
            less = max(8, value // factor)
            return less if factor == 1 or not _IS_INNER.search(key) else -(-less // 16) * 16
        if all_of_it and key in ("vocab_size", "text_vocab_size", "decoder_vocab_size"):
            return min(value, WORDS)
    if isinstance(value, list) and value:
        if _ARE_LAYERS.search(key) and all(type(one) is int for one in value):
            return [min(one, 1) for one in value]
        if _IS_WIDTH.search(key) and all(type(one) is int for one in value):
            return [max(8, one // factor) for one in value]
        if key in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types") and len(value) > LAYERS:
            return [value[at] for at in kept]
    return value


def _mend_heads(part: dict[str, Any], made: dict[str, Any], factor: int) -> None:
    """Heads in the same proportion; as many as divide the width."""
    width = next((made[key] for key in _MAIN if type(made.get(key)) is int), None)
    if factor == 1:
        return
    most = 1
    for key in [key for key, value in part.items() if _IS_HEADS.search(key) and type(value) is int and value > 0]:
        heads = max(1, part[key] // factor)
        while width is not None and width % heads:
            heads -= 1
        made[key] = heads
        most = max(most, heads)
    if type(made.get("mamba_headdim")) is int and type(made.get("n_mamba_heads")) is int and width is not None:
        made["mamba_headdim"] = width * made.get("mamba_expand", 2) // made["n_mamba_heads"]
    for key, value in part.items():
        if _IS_HEADS.search(key) and isinstance(value, list) and all(type(one) is int for one in value):
            made[key] = [max(1, one // factor) for one in value]


def _mend_words(made: dict[str, Any]) -> None:
    """Token ids that no longer exist go to the end of the vocabulary, each to a place of its own."""
    parts = [made, *(value for value in made.values() if isinstance(value, dict))]
    words = min((part["vocab_size"] for part in parts if type(part.get("vocab_size")) is int), default=None)
    if words is None:
        return
    moved: dict[int, int] = {}
    for part in parts:
        for key, value in part.items():
            if key.endswith(("token_id", "token_index", "_token", "token_ids")) and type(value) is int and value >= words:
                part[key] = moved.setdefault(value, words - 1 - len(moved))
            elif key.endswith(("token_id", "token_ids")) and isinstance(value, list):
                part[key] = [moved.setdefault(one, words - 1 - len(moved)) if type(one) is int and one >= words else one for one in value]
