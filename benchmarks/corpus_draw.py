"""Draw the training steps of the corpus: what benchmarks/corpus.py forecasts and seals.

Every family is drawn twice, some a third time with torch.compile; a row depends on the seed, the family and its number alone. A
hash of the seed and the family's name says which half a family is in: `fit`, whose measurements laws may be fitted to, or
`sealed`, which they are tried on. Rows of both halves take turns, and every family comes once before any comes twice, so that a
measurement which was cut short has some of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any

from corpus_own import COMPILED_OWN, OWN
from unseen_draw import Family, draw

from foretell.prove.dice import Dice

SEED = "2026-11-17 corpus"
PRECISIONS = {"bf16-autocast": 0.6, "fp32": 0.25, "bf16": 0.15}
HALVES = ("fit", "sealed")
STACKS = (
    (6, 384, 6), (4, 512, 8), (2, 768, 12), (6, 768, 12), (4, 1024, 16), (2, 1536, 12), (4, 1280, 20), (2, 2048, 16), (3, 3072, 24),
)  # fmt: skip
"""Layers, width, heads: few layers, because a step's op count is what its forecast takes time for."""
_HF = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_GPT = ("n_layer", "n_embd", "n_head", "")
_NARROW = ("num_hidden_layers", "hidden_size", "num_attention_heads", "")
_PAIR = ("num_layers", "d_model", "num_heads", "d_ff")
_TEXT, _SHORT = (256, 384, 512, 1024, 2048), (64, 128, 192, 256, 384)
_SOUND = (48_000, 80_000, 160_000)


def _lm(name: str, names: tuple[str, str, str, str] | None = _HF, **more: Any) -> Family:
    known = {"model": f"hf:{name}", "batch": (2, 32), "seq": _TEXT, "names": names, "stacks": STACKS, "largest": len(STACKS)}
    return Family(**{**known, **more})


def _kv(name: str, *settings: str, **more: Any) -> Family:
    """A decoder with fewer heads for keys; `head` where its config takes their width too."""
    return _lm(name, kv="num_key_value_heads", head="head_dim" if "head" in settings else "", **more)


def _moe(name: str, *settings: str, **more: Any) -> Family:
    return _kv(name, *settings, **{"batch": (2, 12), "seq": (256, 512, 1024), "stacks": STACKS[1:5], "largest": 4, **more})


def _encoder(name: str, names: tuple[str, str, str, str] | None = _HF, **more: Any) -> Family:
    return _lm(name, names, **{"batch": (4, 96), "seq": _SHORT, "largest": 7, **more})


def _pair(name: str, **more: Any) -> Family:
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), (2, 4))
    known = {"seq": _SHORT, "batch": (4, 32), "picks": {"d_model": (512, 768, 1024), **layers}}
    return _lm(name, None, **{**known, **more})


def _picture(name: str, low: int = 8, high: int = 192, image: tuple[int, ...] = (), **more: Any) -> Family:
    return Family(**{"model": name, "batch": (low, high), "image": image, **more})


_DECODERS = (
    _kv("apertus", fixed={"vocab_size": 65536}), _kv("cohere2", "head", fixed={"vocab_size": 128000}),
    _lm("ctrl", ("n_layer", "n_embd", "n_head", "dff"), fixed={"vocab_size": 100_000, "n_positions": 2048}),
    _kv("diffllama", "head"), _kv("doge", seq=(256, 512, 1024)), _kv("ernie4_5", "head"), _kv("exaone4", fixed={"vocab_size": 102400}),
    _kv("gemma", "head", fixed={"vocab_size": 256000}, batch=(1, 12)), _kv("glm4", "head", fixed={"vocab_size": 151552, "pad_token_id": 0}),
    _lm("gpt_bigcode", ("n_layer", "n_embd", "n_head", "n_inner"), fixed={"n_positions": 2048}), _lm("gpt_neox_japanese", _NARROW),
    _kv("granite", fixed={"vocab_size": 49152}), _kv("helium", "head", fixed={"vocab_size": 48000}), _kv("lfm2"),
    _lm("modernbert-decoder"), _kv("nanochat"), _kv("olmo"), _lm("openai-gpt", _GPT, fixed={"n_positions": 2048}), _kv("phi3"),
    _kv("qwen2", fixed={"vocab_size": 151936}, batch=(1, 16)), _kv("smollm3", fixed={"vocab_size": 128256, "pad_token_id": 0}, batch=(1, 16)),
    _kv("stablelm"), _kv("bitnet", fixed={"vocab_size": 64000}), _kv("mistral", "head", recomputes=True),
    _lm("imagegpt", _GPT, fixed={"vocab_size": 513}, seq=(256, 512, 1024)),
)  # fmt: skip
_EXPERTS = (
    _moe("qwen2_moe", fixed={"vocab_size": 32000, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 1024},
         picks={"num_experts": (8, 16), "moe_intermediate_size": (512, 768)}),
    _moe("ernie4_5_moe", fixed={"vocab_size": 32000, "moe_k": 2}, picks={"moe_num_experts": (8, 16), "moe_intermediate_size": (512, 768)}),
    _moe("gpt_oss", "head", fixed={"vocab_size": 32000, "num_experts_per_tok": 2}, picks={"num_local_experts": (8, 16)}),
    _moe("granitemoeshared", fixed={"num_experts_per_tok": 2, "shared_intermediate_size": 1024}, picks={"num_local_experts": (8, 16)}),
    _moe("flex_olmo", fixed={"vocab_size": 32000, "num_experts_per_tok": 2, "pad_token_id": 0}, picks={"num_experts": (4, 8)}),
    _moe("hunyuan_v1_moe", "head", fixed={"vocab_size": 32000, "moe_topk": 2}, picks={"num_experts": (4, 8)}),
    _moe("minimax_m2", "head", fixed={"vocab_size": 32000, "num_experts_per_tok": 2}, picks={"num_local_experts": (8, 16)}),
    _lm("deepseek_v2", None, batch=(2, 12), seq=(256, 512, 1024), fixed={
        "vocab_size": 32000, "num_experts_per_tok": 2, "num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12,
        "num_key_value_heads": 12, "intermediate_size": 2048, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }, picks={"n_routed_experts": (8, 16), "moe_intermediate_size": (512, 768)}),
    _lm("switch_transformers", None, batch=(2, 12), seq=(128, 256), fixed={"num_layers": 4, "num_decoder_layers": 4, "d_model": 512},
        picks={"num_experts": (4, 8), "d_ff": (1024, 2048)}),
)  # fmt: skip
_STATES = (
    _lm("mamba", ("num_hidden_layers", "hidden_size", "", ""), seq=(64, 128, 256), batch=(2, 16), stacks=((2, 512, 8), (3, 768, 12)), largest=2),
    _lm("mamba2", None, seq=(256, 512), batch=(1, 8), fixed={"num_hidden_layers": 3, "hidden_size": 512, "num_heads": 16, "n_groups": 2}),
    _lm("rwkv", ("num_hidden_layers", "hidden_size", "", ""), seq=(64, 128), batch=(4, 32), stacks=((2, 512, 8), (3, 768, 12)), largest=2),
    _lm("recurrent_gemma", None, seq=(128, 256), batch=(2, 16), picks={"hidden_size": (512, 1024)},
        fixed={"num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 32000}),
    _lm("falcon_h1", None, seq=(256, 512), batch=(1, 8), picks={"hidden_size": (512, 1024)}, fixed={
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000,
        "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_state": 64}),
    _lm("xlstm", None, seq=(128, 256), batch=(2, 16), picks={"hidden_size": (512, 1024)}, fixed={"num_blocks": 3, "num_heads": 4}),
)  # fmt: skip
_ENCODERS = (
    _encoder("deberta"), _encoder("ernie"), _encoder("ibert", largest=4), _encoder("layoutlm"), _encoder("lilt"), _encoder("luke", largest=4),
    _encoder("megatron-bert", recomputes=True), _encoder("nomic_bert", head="head_dim"), _encoder("rembert", fixed={"vocab_size": 250300}, largest=5),
    _encoder("roberta-prelayernorm"), _encoder("roc_bert"), _encoder("tapas"), _encoder("xmod"), _encoder("bros"), _encoder("markuplm"),
    _encoder("xlm", ("n_layers", "emb_dim", "n_heads", "")), _encoder("flaubert", ("n_layers", "emb_dim", "n_heads", "")),
    _encoder("xlm-roberta-xl", fixed={"vocab_size": 128000}), _encoder("eurobert", kv="num_key_value_heads", head="head_dim", largest=5),
    _encoder("jina_embeddings_v3", largest=5), _encoder("reformer", None, seq=(1024,), batch=(2, 12), fixed={"axial_pos_shape": [32, 32]}),
)  # fmt: skip
_PAIRS = (
    _pair("mbart", fixed={"vocab_size": 128000}), _pair("plbart"), _pair("pegasus_x", seq=(512, 1024), batch=(2, 12), fixed={"vocab_size": 32000}),
    _pair("fsmt", fixed={"src_vocab_size": 42024, "tgt_vocab_size": 42024}), _pair("blenderbot-small"), _pair("mvp"),
    _lm("umt5", _PAIR, seq=_SHORT, batch=(2, 24), largest=5, fixed={"vocab_size": 100_000}, head="d_kv"),
    _lm("longt5", _PAIR, seq=(512, 1024), batch=(2, 12), largest=5, head="d_kv"), _pair("led", seq=(1024,), batch=(1, 6)),
)  # fmt: skip
_SENSES = (
    _picture("hf:bit"), _picture("hf:convnextv2"), _picture("hf:data2vec-vision", image=(112, 224)), _picture("hf:deit", image=(112, 224)),
    _picture("hf:dinov2_with_registers", 8, 96, (112, 224)), _picture("hf:dinov3_vit", 16, 256), _picture("hf:dinov3_convnext"),
    _picture("hf:mobilenet_v1", 32, 384), _picture("hf:pvt_v2", 16, 192), _picture("hf:swiftformer", 32, 256), _picture("hf:swinv2", 8, 96, (256,)),
    _picture("hf:textnet", 2, 24, (320, 640)), _picture("hf:vit_mae"), _picture("hf:vit_msn"), _picture("hf:vivit", 1, 6), _picture("hf:dpt", 2, 12),
    _picture("hf:upernet", 2, 16, (256, 384)), _picture("hf:glpn", 2, 24, (256, 384)), _picture("hf:swin2sr", 4, 24), _picture("hf:vitdet", 8, 64),
    _picture("hf:ijepa", 8, 128, (112, 224)), _picture("hf:align", 4, 32, (224, 289), seq=(64,)), _picture("hf:altclip", 8, 48, seq=(77,)),
    _picture("hf:blip", 4, 24, seq=(64,)), _picture("hf:chinese_clip", 16, 128, seq=(52,)), _picture("hf:clipseg", 16, 128, seq=(77,)),
    _picture("hf:groupvit", 16, 128, seq=(77,)), _picture("hf:metaclip_2", 16, 128, seq=(77,)), _picture("hf:owlvit", 2, 12, seq=(16,)),
    _picture("hf:kosmos-2", 1, 6, seq=(256,), fixed={"text_config.layers": 4, "vision_config.num_hidden_layers": 6}),
    _lm("trocr", ("decoder_layers", "d_model", "decoder_attention_heads", "decoder_ffn_dim"), seq=_SHORT, largest=5),
    _lm("git", None, seq=(128, 256), batch=(4, 32)),
    Family(model="hf:sew", batch=(1, 8), seq=_SOUND), Family(model="hf:sew-d", batch=(1, 8), seq=_SOUND),
    Family(model="hf:unispeech-sat", batch=(1, 8), seq=_SOUND), Family(model="hf:data2vec-audio", batch=(1, 8), seq=_SOUND),
    Family(model="hf:wav2vec2-conformer", batch=(1, 8), seq=_SOUND, fixed={"vocab_size": 32, "num_hidden_layers": 6}),
    Family(model="hf:wav2vec2-bert", batch=(2, 12), seq=(500, 1000), fixed={"vocab_size": 32, "num_hidden_layers": 6}),
    Family(model="hf:encodec", batch=(1, 8), seq=(24_000, 48_000)), Family(model="hf:dac", batch=(1, 6), seq=(16_000, 48_000)),
    Family(model="hf:mimi", batch=(1, 8), seq=(24_000, 48_000)), Family(model="hf:univnet", batch=(1, 8), seq=(64, 128)),
    Family(model="hf:speecht5", batch=(2, 16), seq=(128, 256)),
)  # fmt: skip
_TIMM = tuple(
    _picture(f"timm:{name}", low, 2 * high) for name, low, high in (
        ("botnet26t_256", 16, 96), ("halonet26t", 16, 96), ("lambda_resnet26t", 16, 96), ("gernet_m", 16, 128), ("mobileone_s1", 16, 96),
        ("coat_lite_mini", 16, 96), ("convit_small", 16, 96), ("cspdarknet53", 8, 64), ("davit_tiny", 8, 96), ("deit3_small_patch16_224", 16, 128),
        ("dpn68b", 16, 96), ("efficientformer_l1", 16, 128), ("eva02_tiny_patch14_224", 16, 128), ("fasternet_t2", 32, 192),
        ("fastvit_t12", 16, 96), ("hardcorenas_a", 32, 192), ("hgnet_tiny", 16, 128), ("lcnet_100", 64, 384),
        ("mambaout_tiny", 8, 96), ("caformer_s18", 8, 64), ("mobilenetv4_conv_medium", 32, 192), ("mvitv2_tiny", 8, 64), ("nest_tiny", 8, 64),
        ("nextvit_small", 8, 96), ("rdnet_tiny", 8, 96), ("repghostnet_100", 32, 192), ("repvit_m1", 32, 192), ("resnest26d", 16, 96),
        ("nf_resnet50", 16, 96), ("selecsls42b", 16, 128), ("skresnet34", 16, 96), ("starnet_s2", 32, 192), ("swinv2_cr_tiny_224", 8, 64),
        ("tiny_vit_11m_224", 16, 96), ("tresnet_m", 16, 96), ("visformer_small", 16, 128),
        ("vitamin_small_224", 8, 96), ("ese_vovnet39b", 16, 96), ("xception41", 8, 48), ("mixnet_m", 16, 128), ("fbnetc_100", 32, 192),
        ("spnasnet_100", 32, 192), ("gmixer_24_224", 16, 96), ("shvit_s2", 32, 256), ("haloregnetz_b", 16, 96), ("eca_nfnet_l0", 8, 64),
    )
)  # fmt: skip
_VISION = tuple(
    _picture(f"torchvision:{name}", low, 2 * high) for name, low, high in (
        ("resnext50_32x4d", 16, 96), ("wide_resnet50_2", 16, 96),
    )
)  # fmt: skip
FAMILIES: tuple[Family, ...] = (*_DECODERS, *_EXPERTS, *_STATES, *_ENCODERS, *_PAIRS, *_SENSES, *_TIMM, *_VISION, *OWN)
COMPILED = (
    *(f"hf:{name}" for name in ("qwen2", "granite", "phi3", "gpt_bigcode", "olmo", "ernie", "roberta-prelayernorm", "deit", "ijepa", "plbart")),
    *(f"timm:{name}" for name in ("deit3_small_patch16_224", "gmixer_24_224", "visformer_small", "nf_resnet50", "convit_small")),
    "torchvision:resnext50_32x4d", *COMPILED_OWN,
)  # fmt: skip


def half_of(family: str, seed: str = SEED) -> str:
    return HALVES[Dice(f"{seed}/half/{family}").share() >= 0.5]


def rows(seed: str = SEED) -> Iterator[dict[str, Any]]:
    """Configurations with the keys of benchmarks/memory.py."""
    for number in range(2):
        for family in in_turn(FAMILIES, seed):
            yield draw(replace(family, precisions=family.precisions or PRECISIONS), seed, number)
    known = {family.model: family for family in FAMILIES}
    for family in in_turn(tuple(known[name] for name in COMPILED), seed):
        yield {**draw(family, seed, 9), "mode": "compiled", "precision": "bf16-autocast", "optimizer": "adamw-fused", "recompute": "none"}


def in_turn(families: tuple[Family, ...], seed: str) -> list[Family]:
    """In an order that the seed gives, one of each half after the other."""
    from bands_rows import family_of

    mixed = sorted(families, key=lambda family: hashlib.sha256(f"{seed}/order/{family.model}".encode()).digest())
    halves = ([family for family in mixed if half_of(family_of(family.model), seed) == half] for half in HALVES)
    return [family for family in chain.from_iterable(zip_longest(*halves)) if family is not None]
