"""Draw training steps of model families that no stored measurement has: what benchmarks/unseen.py forecasts and seals.

Row number i of a seed depends on the seed, the family and i alone. Every family is drawn once; some of
those that compile are drawn a second time with torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from foretell.prove.dice import Dice

SEED = "2026-11-16 bands"
FILE = "benchmarks/models/unseen.py"
PRECISIONS = {"bf16-autocast": 0.74, "fp32": 0.13, "bf16": 0.13}
OPTIMIZERS = {"adamw-fused": 0.55, "adamw": 0.2, "momentum": 0.1, "sgd": 0.08, "adam": 0.07}
RECOMPUTE = {"none": 0.85, "full": 0.15}
COMPILED = (
    "hf:opt", "hf:electra", "hf:gpt_neox", "hf:roberta", "hf:dinov2", "timm:resmlp_24_224", "timm:pit_s_224",
    "torchvision:vgg16_bn", "hf:starcoder2", f"{FILE}:wavenet", f"{FILE}:click_model", f"{FILE}:edsr",
)  # fmt: skip

HINTS = {
    f"{FILE}:token_choice": {"aten.nonzero.default": 0.25}, f"{FILE}:masked_head": {"aten.index.Tensor": 0.15, "aten.nonzero.default": 0.15},
}  # fmt: skip
"""Model → shares that a user would give with --hint, where sizes depend on data."""
STACKS = ((4, 256, 4), (6, 384, 6), (8, 512, 8), (12, 768, 12), (8, 1024, 16), (16, 1024, 16), (6, 1536, 12), (10, 2048, 16))
"""Layers, width, heads."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How rows of a family are drawn."""

    model: str
    batch: tuple[int, int]
    """Samples, from and to, every factor alike."""
    seq: tuple[int, ...] = ()
    image: tuple[int, ...] = ()
    names: tuple[str, str, str, str] | None = None
    """Settings that take layers, width, heads and the inner width of a stack; an empty name is left out."""
    kv: str = ""
    """Setting that takes the number of key and value heads."""
    head: str = ""
    """Setting that takes the width of a head."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    picks: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    stacks: tuple[tuple[int, int, int], ...] = STACKS
    largest: int = len(STACKS)
    """How many of the stacks are not too large."""
    recomputes: bool = False
    autocast: bool = True
    """Runs in bf16, by autocast or as a whole; otherwise fp32."""
    precisions: Mapping[str, float] | None = None
    """Shares of precisions where they are not the usual ones."""


_HF = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_NARROW = ("num_hidden_layers", "hidden_size", "num_attention_heads", "")
_TEXT = (256, 384, 512, 768, 1024, 2048)
_SHORT = (128, 192, 256, 384, 512)


def _lm(name: str, names: tuple[str, str, str, str] = _HF, **more: Any) -> Family:
    return Family(**{"model": f"hf:{name}", "batch": (2, 48), "seq": _TEXT, "names": names, **more})


def _encoder(name: str, names: tuple[str, str, str, str] = _HF, **more: Any) -> Family:
    return Family(**{"model": f"hf:{name}", "batch": (4, 128), "seq": _SHORT, "names": names, "largest": 6, **more})


def _picture(name: str, low: int = 8, high: int = 256, image: tuple[int, ...] = (), **more: Any) -> Family:
    return Family(**{"model": name, "batch": (low, high), "image": image, **more})


def _own(name: str, low: int, high: int, **more: Any) -> Family:
    return Family(**{"model": f"{FILE}:{name}", "batch": (low, high), **more})


_DECODERS = (
    _lm("opt", ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim"), fixed={"word_embed_proj_dim": None}, recomputes=True),
    _lm("bloom", ("n_layer", "hidden_size", "n_head", ""), fixed={"vocab_size": 65536}, largest=6),
    _lm("gpt_neox", recomputes=True), _lm("gptj", ("n_layer", "n_embd", "n_head", ""), fixed={"rotary_dim": 32}),
    _lm("falcon", _NARROW, fixed={"new_decoder_architecture": False}), _lm("phi", recomputes=True),
    _lm("gemma2", kv="num_key_value_heads", head="head_dim", fixed={"vocab_size": 64000}),
    _lm("olmo2", kv="num_key_value_heads"), _lm("starcoder2", kv="num_key_value_heads", fixed={"use_cache": False}),
    _lm("cohere", kv="num_key_value_heads", fixed={"vocab_size": 64000}), _lm("mpt", ("n_layers", "d_model", "n_heads", ""), largest=7),
    _lm("codegen", ("n_layer", "n_embd", "n_head", ""), fixed={"rotary_dim": 32}),
    _lm("xglm", ("num_layers", "d_model", "attention_heads", "ffn_dim"), fixed={"vocab_size": 65536}, largest=6),
    _lm("qwen3", kv="num_key_value_heads", head="head_dim", fixed={"vocab_size": 65536}, recomputes=True),
    _lm("glm", kv="num_key_value_heads", head="head_dim", fixed={"vocab_size": 65536, "pad_token_id": 0}),
    _lm("nemotron", kv="num_key_value_heads", fixed={"vocab_size": 65536}), _lm("persimmon", fixed={"vocab_size": 65536}),
    _lm("biogpt", largest=6), _lm("gemma3_text", kv="num_key_value_heads", head="head_dim", fixed={"vocab_size": 64000}),
    _lm("gpt_neo", ("num_layers", "hidden_size", "num_heads", ""),
        fixed={"attention_types": [[["global"], 8]], "num_layers": 8}, largest=0, picks={"hidden_size": (512, 768, 1024), "num_heads": (8, 16)}),
)  # fmt: skip
_EXPERTS = (
    _lm("qwen3_moe", kv="num_key_value_heads", fixed={"vocab_size": 32000, "num_experts_per_tok": 2},
        picks={"num_experts": (8, 16), "moe_intermediate_size": (512, 768)}, largest=6),
    _lm("olmoe", kv="num_key_value_heads", fixed={"num_experts_per_tok": 2}, picks={"num_experts": (8, 16)}, largest=5),
    _lm("granitemoe", kv="num_key_value_heads", fixed={"num_experts_per_tok": 2}, picks={"num_local_experts": (8, 16)}, largest=5),
    _lm("phimoe", kv="num_key_value_heads", fixed={"vocab_size": 32000}, picks={"num_local_experts": (4, 8)}, largest=5),
    _lm("jetmoe", fixed={"num_hidden_layers": 6}, names=None, picks={"hidden_size": (512, 1024), "intermediate_size": (1024, 2048)}),
    _own("expert_choice", 4, 32, seq=(256, 512), picks={"dim": (384, 512, 768), "layers": (4, 8)}),
    _own("masked_head", 8, 64, seq=(256, 512), picks={"dim": (384, 512, 768), "layers": (4, 8)}),
    _own("token_choice", 4, 32, seq=(256, 512), picks={"dim": (384, 512, 768), "layers": (4, 6)}),
)  # fmt: skip
_ENCODERS = (
    _encoder("roberta", recomputes=True), _encoder("albert", recomputes=True), _encoder("electra"), _encoder("deberta-v2"),
    _encoder("distilbert", ("n_layers", "dim", "n_heads", "hidden_dim")), _encoder("mpnet"),
    _encoder("xlnet", ("n_layer", "d_model", "n_head", "d_inner")),
    _encoder("fnet", ("num_hidden_layers", "hidden_size", "", "intermediate_size"), fixed={"use_tpu_fourier_optimizations": False}, autocast=False),
    _encoder("convbert", largest=5), _encoder("mobilebert", None, largest=0), _encoder("squeezebert", None, largest=0),
    _encoder("nystromformer", fixed={"segment_means_seq_len": 64}, seq=(128, 192, 256, 384)), _encoder("modernbert", fixed={"vocab_size": 50368}),
    _encoder("funnel", None, picks={"d_model": (512, 768)}), _encoder("esm", fixed={"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    _encoder("roformer"), _encoder("longformer", seq=(512, 1024, 2048), batch=(1, 12), largest=4),
    _encoder("big_bird", seq=(1024,), batch=(2, 8), largest=4),
    _encoder("canine", seq=(512, 1024), largest=5), _encoder("perceiver", None, seq=(512, 1024), batch=(2, 16)),
)  # fmt: skip
_PAIRS = (
    _lm("bart", None, seq=_SHORT, batch=(4, 32), picks={"d_model": (512, 768, 1024)}),
    _lm("pegasus", None, seq=_SHORT, batch=(2, 16), picks={"d_model": (512, 1024)}, fixed={"vocab_size": 32000}),
    _lm("marian", None, seq=_SHORT, batch=(4, 32), picks={"d_model": (512, 1024)}),
    _lm("m2m_100", None, seq=_SHORT, batch=(2, 16), fixed={"vocab_size": 64000}),
    _lm("blenderbot", None, seq=(64, 128), batch=(4, 32),
        fixed={"d_model": 1024, "encoder_attention_heads": 16, "decoder_attention_heads": 16, "decoder_layers": 8}),
    _lm("prophetnet", None, seq=(128, 256), batch=(2, 16)),
)  # fmt: skip
_SENSES = (
    _picture("hf:beit", fixed={}), _picture("hf:dinov2", image=(112, 168, 224)), _picture("hf:cvt"), _picture("hf:levit", 32, 256),
    _picture("hf:poolformer"),
    _picture("hf:segformer", 2, 16, (256, 384, 512)), _picture("hf:focalnet"), _picture("hf:pvt"), _picture("hf:hiera", 8, 64),
    _picture("hf:mobilevit", 16, 128),
    _picture("hf:clip", 16, 128), _picture("hf:siglip", 16, 128), _picture("hf:videomae", 2, 12), _picture("hf:timesformer", 1, 6),
    Family(model="hf:wav2vec2", batch=(1, 8), seq=(80_000, 160_000)), Family(model="hf:hubert", batch=(1, 8), seq=(80_000, 160_000)),
    Family(model="hf:wavlm", batch=(1, 8), seq=(80_000, 160_000)), Family(model="hf:whisper", batch=(2, 16), seq=(64, 192)),
    Family(model="hf:audio-spectrogram-transformer", batch=(4, 24)), Family(model="hf:speech_to_text", batch=(4, 24), seq=(512, 1000)),
)  # fmt: skip
_TIMM = tuple(
    _picture(f"timm:{name}", low, 2 * high) for name, low, high in (
        ("regnety_032", 16, 128), ("coatnet_0_rw_224", 8, 96), ("maxvit_tiny_rw_224", 8, 64), ("xcit_small_12_p16_224", 16, 128),
        ("cait_s24_224", 8, 64), ("gmlp_s16_224", 16, 192), ("resmlp_24_224", 16, 192), ("volo_d1_224", 8, 96), ("twins_svt_base", 8, 96),
        ("pit_s_224", 16, 192), ("edgenext_small", 16, 128), ("ghostnet_100", 16, 256), ("repvgg_b1", 16, 128), ("dm_nfnet_f0", 8, 64),
        ("hrnet_w18", 8, 64), ("dla60", 16, 128), ("rexnet_150", 16, 128), ("convmixer_768_32", 4, 32), ("crossvit_small_240", 16, 96),
        ("sequencer2d_s", 8, 64), ("efficientvit_b1", 16, 192), ("res2net50_26w_4s", 16, 96), ("gcvit_tiny", 8, 64), ("inception_next_tiny", 16,
            128),
    )
)  # fmt: skip
_VISION = tuple(
    _picture(f"torchvision:{name}", low, 2 * high) for name, low, high in (
        ("vgg16_bn", 16, 128), ("googlenet", 32, 256), ("squeezenet1_1", 32, 384), ("shufflenet_v2_x1_0", 32, 384), ("mnasnet1_0", 32, 256),
        ("inception_v3", 16, 128), ("alexnet", 64, 512),
    )
)  # fmt: skip
_PLAIN = (
    _own("pointnet", 16, 128, seq=(1024, 2048)), _own("wavenet", 2, 16, seq=(4096, 8192), picks={"channels": (64, 128)}),
    _own("critic", 64, 512, image=(64, 128)), _own("click_model", 2048, 32768, picks={"dim": (32, 64, 128)}),
    _own("tcn", 16, 128, seq=(256, 1024), picks={"channels": (128, 256, 384)}), _own("gru_tagger", 16, 128, seq=(64, 128), autocast=False),
    _own("torch_encoder", 8, 64, seq=(128, 256, 512), picks={"layers": (4, 8), "dim": (512, 768)}), _own("conv_vae", 32, 256, image=(64, 128)),
    _own("video_net", 2, 12, image=(112, 160)), _own("long_conv", 2, 16, seq=(1024, 2048), autocast=False, picks={"dim": (256, 512)}),
    _own("factorisation", 4096, 65536), _own("edsr", 4, 32, image=(48, 96), picks={"blocks": (8, 16), "channels": (64, 128)}),
    _own("attention_graph", 1, 1, autocast=False, picks={"nodes": (20_000, 60_000), "hidden": (32, 64)}),
    _own("spline_net", 256, 4096, autocast=False), _own("siren", 16384, 262144), _own("flow", 256, 8192, picks={"layers": (8, 16)}, autocast=False),
    _own("linear_attention", 2, 24, seq=(512, 1024, 2048), picks={"layers": (4, 8), "dim": (384, 768)}),
    _own("memory_network", 32, 256, seq=(32, 64)), _own("highway", 1024, 16384, picks={"layers": (6, 12)}),
)  # fmt: skip
FAMILIES: tuple[Family, ...] = (*_DECODERS, *_EXPERTS, *_ENCODERS, *_PAIRS, *_SENSES, *_TIMM, *_VISION, *_PLAIN)


def rows(seed: str = SEED) -> Iterator[dict[str, Any]]:
    """Configurations with the keys of benchmarks/memory.py."""
    for family in FAMILIES:
        yield draw(family, seed, 0)
    known = {family.model: family for family in FAMILIES}
    for name in COMPILED:
        yield {**draw(known[name], seed, 9), "mode": "compiled", "precision": "bf16-autocast", "optimizer": "adamw-fused", "recompute": "none"}


def draw(family: Family, seed: str, number: int) -> dict[str, Any]:
    dice = Dice(f"{seed}/{family.model}/{number}")
    over: dict[str, Any] = {**family.fixed, **{name: dice.pick(values) for name, values in family.picks.items()}}
    seq = dice.pick(family.seq) if family.seq else None
    if family.names and family.largest:
        layers, width, heads = family.stacks[dice.whole(0, family.largest - 1)]
        given = zip(family.names, (layers, width, heads, dice.pick((2, 3, 4)) * width), strict=True)
        over |= {name: value for name, value in given if name}
        over |= {family.kv: dice.pick((heads, heads // 2))} if family.kv else {}
        over |= {family.head: width // heads} if family.head else {}
        if "word_embed_proj_dim" in over:
            over["word_embed_proj_dim"] = width
    return {
        "model": family.model, "overrides": over, "micro_batch": round(dice.times(*family.batch)), "seq": seq,
        "image": dice.pick(family.image) if family.image else None,
        "optimizer": dice.weighted(OPTIMIZERS), "precision": dice.weighted(family.precisions or PRECISIONS) if family.autocast else "fp32",
        "recompute": dice.weighted(RECOMPUTE) if family.recomputes else "none",
    }  # fmt: skip
