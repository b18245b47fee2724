"""Draw configurations: families of the zoo at sizes of their own, none of them a model that a profile is fitted on.

Draw number i of a seed depends on the seed, i and the kind of device alone. How much a step computes is drawn first, and
the micro-batch follows from it, so that large models get small batches; whether a step is too long or too large for a
device is for its prediction to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import foretell.zoo as zoo
from foretell.prove.dice import Dice
from foretell.prove.types import Config

LIMIT_SHARES = (0.88, 1.15)
"""Where a limit of memory lies, as a share of the least memory that a step is predicted to need."""
_FULL_SIZE_BYTES = 141e9
_WORK = {"cuda": (0.4e12, 70e12), "cpu": (0.02e9, 3e9)}
"""FLOPs of a step, from and to; on a GPU for one of that much memory, less for smaller ones."""
_MOST_SAMPLES = {"cuda": 512, "cpu": 16}
_NEAR = 0.62
"""How many draws may be run near a limit; those that turn out small, or are compiled, are not."""
_COMPILED = 0.12

Sizes = Mapping[str, int | float | str | bool]


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, and the FLOPs of one training sample, roughly."""

    model: str
    overrides: Sizes
    flops: float
    seq: int | None = None
    image: int | None = None


def draw(seed: str, index: int, kind: str, memory_bytes: int) -> Config:
    """Draw number `index` of a seed for a device of that kind, cuda or cpu, and size."""
    for turn in range(100):
        dice = Dice(f"foretell compare prove 1/{seed}/{kind}/{index}/{turn}")
        family = dice.weighted(FAMILIES)
        shape = _SHAPES[family](dice, kind == "cpu")
        if not known(shape):
            return _config(dice, index, family, shape, kind, memory_bytes)
    raise AssertionError("a hundred draws in a row gave models of the zoo")


REFERENCES: tuple[tuple[str, Sizes], ...] = (
    ("gpt2", {"layers": 8, "dim": 512, "heads": 8}), ("t5-small", {"layers": 4}), ("bert-base", {"layers": 6}),
    ("unet", {"channels": 32}), ("vit-b16", {"depth": 8, "dim": 384, "heads": 6}), ("convnext-base", {"n3": 9}),
    ("dit-b2", {"depth": 6, "dim": 384, "heads": 6}),
    ("llama3-1b", {"layers": 8, "dim": 512, "ffn": 1024, "heads": 8, "kv_heads": 2}),
)  # fmt: skip
"""Models at sizes of their own among the steps that `foretell probe` runs, beside those of the zoo as they are."""
_UNLIKE = ("vocab_size", "context", "dropout", "classes", "image", "tied")
"""Settings that do not make another model."""


def known(shape: ModelShape) -> bool:
    """Whether a model of the zoo, or one that profiles are fitted on, has these very sizes."""
    module = zoo.get(shape.model).module
    mine = {**zoo.get(shape.model).config, **shape.overrides}
    taken = [entry.config for entry in zoo.ENTRIES.values() if entry.module == module]
    taken += [{**zoo.get(model).config, **sizes} for model, sizes in REFERENCES if zoo.get(model).module == module]
    return any(all(sizes[name] == mine.get(name) for name in sizes if name not in _UNLIKE) for sizes in taken)


def _config(dice: Dice, index: int, family: str, shape: ModelShape, kind: str, memory_bytes: int) -> Config:
    on_cpu = kind == "cpu"
    low, high = _WORK[kind]
    work = dice.times(low, high * (1.0 if on_cpu else min(1.0, memory_bytes / _FULL_SIZE_BYTES)))
    precision = "fp32" if on_cpu else dice.weighted(_precisions(family))
    work *= 0.25 if precision == "fp32" and not on_cpu else 1.0
    accumulate = dice.weighted({1: 0.7, 2: 0.12, 3: 0.08, 4: 0.1})
    samples = 1 if family == "graphsage" else max(1, min(_MOST_SAMPLES[kind], round(work / shape.flops / accumulate)))
    recompute = dice.weighted({"none": 0.7, "full": 0.18, "selective": 0.12}) if family in _STACKED else "none"
    config = Config(
        index=index, model=shape.model, overrides=shape.overrides, micro_batch=samples, seq=shape.seq, image=shape.image,
        optimizer=dice.weighted(_OPTIMIZERS), precision=precision, recompute=recompute, accumulate=accumulate,
        clip=1.0 if dice.share() < 0.3 else None,
    )  # fmt: skip
    near, share, compiled = dice.share() < _NEAR, dice.between(*LIMIT_SHARES), dice.share() < _COMPILED
    if on_cpu:
        return config
    if compiled and family in _COMPILES:
        way = dice.pick(("model", "model", "blocks", "graphs") if family in _STACKED else ("model", "model", "graphs"))
        if way == "graphs":  # recorded launches write gradients to one place
            config = replace(config, accumulate=1)
        return replace(config, compile=way, recompute="none", precision="bf16-autocast", optimizer="adamw-fused")
    return replace(config, near=round(share, 4)) if near else config


_OPTIMIZERS = {
    "adamw-fused": 0.42, "adamw": 0.14, "adam-fused": 0.08, "adam": 0.06, "momentum": 0.1, "momentum-fused": 0.06,
    "sgd": 0.08, "adamw-loop": 0.06,
}  # fmt: skip
_PLAIN = {"bf16-autocast": 0.8, "fp32": 0.2}
_STACKED = {"gpt", "llama", "mixtral", "bert", "t5", "vit", "dit", "resnet", "convnext", "tnt", "scaling_mlp"}
_COMPILES = {"gpt", "llama", "bert", "t5", "vit", "dit", "resnet", "convnext", "unet", "scaling_mlp", "raftmlp"}


def _precisions(family: str) -> Mapping[str, float]:
    if family in ("fno", "graphsage", "ssm", "lstm", "mixtral"):
        return _PLAIN
    return {"bf16-autocast": 0.6, "bf16": 0.16, "fp32": 0.14, "fp16-autocast": 0.1}


# ---------------------------------------------------------------------------------------------- families


def _heads(dice: Dice, low: int, high: int, tiny: bool, step: int = 1) -> tuple[int, int]:
    """Number of heads and the width of all; a width below `high` and not far below `low`."""
    each = dice.pick((16, 24, 32, 48) if tiny else (32, 48, 64, 64, 80, 96, 128))
    count = max(step, round(dice.times(low, high) / each / step) * step)
    return count, count * each


def _text(dice: Dice, tiny: bool) -> tuple[int, int]:
    """Tokens of a sample and words of the vocabulary."""
    seq = dice.pick((24, 48, 64, 96, 112) if tiny else (160, 256, 384, 512, 640, 896, 1152, 1536, 2048))
    return seq, dice.pick((256, 384, 768, 1024) if tiny else (8192, 16000, 24576, 32000, 40960, 50304))


def _depth(dice: Dice, tiny: bool, least: int = 3, most: int = 26) -> int:
    return dice.whole(1, 5) if tiny else dice.whole(least, most)


def _stack(layers: int, dim: int, seq: int, vocab: int, per_layer: float) -> float:
    """FLOPs of a training sample of a transformer: three times two a weight and token, attention, the head."""
    return 6.0 * seq * (layers * (per_layer * dim * dim + 2 * seq * dim) + vocab * dim)


def _gpt(dice: Dice, tiny: bool) -> ModelShape:
    seq, vocab = _text(dice, tiny)
    layers = _depth(dice, tiny)
    heads, dim = _heads(dice, 48 if tiny else 320, 224 if tiny else 1900, tiny)
    dropout = dice.pick((0.0, 0.0, 0.0, 0.1))
    over = {"layers": layers, "dim": dim, "heads": heads, "context": seq, "vocab_size": vocab, "dropout": dropout}
    return ModelShape("gpt-tiny" if tiny else "gpt2", over, _stack(layers, dim, seq, vocab, 12), seq=seq)


def _llama(dice: Dice, tiny: bool) -> ModelShape:
    seq, vocab = _text(dice, tiny)
    layers = _depth(dice, tiny, 2, 20)
    group = dice.pick((1, 2, 4))
    heads, dim = _heads(dice, 64 if tiny else 512, 224 if tiny else 2560, tiny, step=group)
    ffn = round(dim * dice.between(2.2, 4.2) / 32) * 32
    over = {
        "layers": layers, "dim": dim, "heads": heads, "kv_heads": heads // group, "ffn": ffn, "context": seq,
        "vocab_size": vocab, "tied": dice.share() < 0.4,
    }  # fmt: skip
    flops = _stack(layers, dim, seq, vocab, 2 + 2 / group + 3 * ffn / dim)
    return ModelShape("llama-tiny" if tiny else "llama3-1b", over, flops, seq=seq)


def _mixtral(dice: Dice, tiny: bool) -> ModelShape:
    seq, vocab = _text(dice, tiny)
    layers = _depth(dice, tiny, 2, 7)
    group = dice.pick((1, 2, 4))
    heads, dim = _heads(dice, 48 if tiny else 384, 128 if tiny else 1536, tiny, step=group)
    ffn = round(dim * dice.between(1.4, 3.4) / 32) * 32
    over = {
        "layers": layers, "dim": dim, "heads": heads, "kv_heads": heads // group, "ffn": ffn, "context": seq,
        "vocab_size": vocab, "experts": dice.pick((3, 4, 6) if tiny else (4, 6, 8, 12)), "top_k": dice.pick((1, 2, 2)),
    }  # fmt: skip
    flops = _stack(layers, dim, seq, vocab, 2 + 2 / group + 3 * 1.25 * int(over["top_k"]) * ffn / dim)
    return ModelShape("mixtral-tiny" if tiny else "mixtral-8x7b", over, flops, seq=seq)


def _bert(dice: Dice, tiny: bool) -> ModelShape:
    seq, vocab = _text(dice, tiny)
    layers = _depth(dice, tiny)
    heads, dim = _heads(dice, 48 if tiny else 256, 192 if tiny else 1400, tiny)
    dropout = 0.0 if tiny else dice.pick((0.0, 0.1))
    over = {"layers": layers, "dim": dim, "heads": heads, "context": seq, "vocab_size": vocab, "dropout": dropout}
    return ModelShape("bert-tiny" if tiny else "bert-base", over, _stack(layers, dim, seq, vocab, 12), seq=seq)


def _t5(dice: Dice, tiny: bool) -> ModelShape:
    seq, vocab = _text(dice, tiny)
    layers = _depth(dice, tiny, 3, 16)
    heads, dim = _heads(dice, 48 if tiny else 320, 160 if tiny else 1280, tiny)
    ffn = round(dim * dice.between(2.5, 5.0) / 32) * 32
    over = {
        "layers": layers, "dim": dim, "heads": heads, "head_dim": dim // heads, "ffn": ffn, "context": seq,
        "vocab_size": vocab,
    }  # fmt: skip
    flops = _stack(layers, dim, seq, vocab // 4, 6.0 + 2.5 * ffn / dim)
    return ModelShape("t5-tiny" if tiny else "t5-small", over, flops, seq=seq)


def _lstm(dice: Dice, tiny: bool) -> ModelShape:
    hidden = 16 * dice.whole(3, 14) if tiny else 64 * dice.whole(5, 26)
    embed = 16 * dice.whole(2, 8) if tiny else 32 * dice.whole(6, 24)
    seq = dice.pick((16, 32, 48) if tiny else (48, 96, 128, 192))
    layers, vocab = dice.whole(1, 4), dice.pick((256, 768) if tiny else (10000, 20000, 40000))
    over = {"layers": layers, "hidden": hidden, "embed": embed, "vocab_size": vocab, "context": seq, "dropout": 0.0}
    return ModelShape("lstm-tiny" if tiny else "lstm-lm", over, 6.0 * seq * (layers * 8 * hidden**2 + vocab * embed), seq=seq)


def _ssm(dice: Dice, tiny: bool) -> ModelShape:
    seq = dice.pick((24, 48, 96) if tiny else (128, 256, 384, 640))
    layers, dim = _depth(dice, tiny, 2, 14), 16 * dice.whole(2, 8) if tiny else 64 * dice.whole(5, 15)
    state, vocab = dice.pick((4, 8, 12) if tiny else (8, 12, 16)), dice.pick((256, 768) if tiny else (16000, 50304))
    over = {"layers": layers, "dim": dim, "state": state, "context": seq, "vocab_size": vocab}
    flops = 6.0 * seq * (layers * (6 * dim**2 + 60 * state * dim) + vocab * dim)
    return ModelShape("ssm-tiny" if tiny else "mamba-130m", over, 4 * flops, seq=seq)


def _graphsage(dice: Dice, tiny: bool) -> ModelShape:
    nodes = round(dice.times(200, 4000) if tiny else dice.times(20_000, 600_000))
    hidden = 8 * dice.whole(2, 12) if tiny else 32 * dice.whole(2, 14)
    over = {
        "nodes": nodes, "edges": int(nodes * dice.between(4, 14)), "layers": dice.whole(2, 4),
        "features": 8 * dice.whole(2, 20), "hidden": hidden, "classes": dice.whole(5, 60),
    }  # fmt: skip
    return ModelShape("graphsage-tiny" if tiny else "graphsage", over, 1.0)


def _vit(dice: Dice, tiny: bool) -> ModelShape:
    patch = 8 if tiny else dice.pick((14, 16, 16, 32))
    image = patch * (dice.whole(3, 8) if tiny else dice.pick((10, 12, 14, 16, 20)))
    depth = _depth(dice, tiny)
    heads, dim = _heads(dice, 48 if tiny else 256, 192 if tiny else 1400, tiny)
    over = {"patch": patch, "dim": dim, "depth": depth, "heads": heads, "image": image, "classes": dice.pick((10, 100, 1000))}
    return ModelShape("vit-tiny" if tiny else "vit-b16", over, _stack(depth, dim, (image // patch) ** 2 + 1, 0, 12))


def _dit(dice: Dice, tiny: bool) -> ModelShape:
    image = 2 * (dice.whole(4, 8) if tiny else dice.pick((12, 16, 20, 24)))
    depth = _depth(dice, tiny, 3, 22)
    heads, dim = _heads(dice, 48 if tiny else 256, 128 if tiny else 1200, tiny)
    over = {"depth": depth, "dim": dim, "heads": heads, "patch": 2, "image": image}
    return ModelShape("dit-tiny" if tiny else "dit-b2", over, _stack(depth, dim, (image // 2) ** 2, 0, 18))


def _resnet(dice: Dice, tiny: bool) -> ModelShape:
    depths = [dice.whole(1, 2) if tiny else dice.whole(2, 9) for _ in range(4)]
    width = 8 * dice.whole(1, 4) if tiny else 16 * dice.whole(2, 7)
    image = 32 * (dice.whole(1, 3) if tiny else dice.whole(4, 9))
    over = {**{f"depth{level}": depth for level, depth in enumerate(depths, 1)}, "width": width, "classes": dice.pick((10, 100, 1000))}
    flops = 1.5e9 * sum(depths) * (width / 64) ** 2 * (image / 224) ** 2
    return ModelShape("resnet-tiny" if tiny else "resnet50", over, flops, image=image)


def _convnext(dice: Dice, tiny: bool) -> ModelShape:
    depths = [dice.whole(1, 2) if tiny else dice.whole(2, 4), *(dice.whole(1, 2) if tiny else dice.whole(2, n) for n in (4, 20, 4))]
    width = 8 * dice.whole(1, 4) if tiny else 16 * dice.whole(3, 11)
    image = 32 * (dice.whole(1, 3) if tiny else dice.whole(4, 9))
    over = {f"d{level + 1}": width << level for level in range(4)} | {f"n{level + 1}": n for level, n in enumerate(depths)}
    flops = 2.6e9 * sum(depths) * (width / 128) ** 2 * (image / 224) ** 2
    return ModelShape("convnext-micro" if tiny else "convnext-base", over, flops, image=image)


def _unet(dice: Dice, tiny: bool) -> ModelShape:
    levels = dice.whole(1, 3) if tiny else dice.whole(2, 5)
    channels = 4 * dice.whole(1, 4) if tiny else 8 * dice.whole(3, 12)
    image = (1 << levels) * (dice.whole(3, 8) if tiny else max(2, round(dice.between(96, 384) / (1 << levels))))
    over = {"channels": channels, "levels": levels, "classes": dice.whole(2, 20)}
    flops = 9e10 * levels * (channels / 64) ** 2 * (image / 256) ** 2
    return ModelShape("unet-tiny" if tiny else "unet", over, flops, image=image)


def _tnt(dice: Dice, tiny: bool) -> ModelShape:
    inner_heads, heads = dice.pick((2, 4)), dice.whole(2, 5) if tiny else dice.whole(4, 10)
    each, side = dice.pick((16, 24) if tiny else (48, 64)), dice.whole(3, 5) if tiny else dice.whole(8, 15)
    over = {
        "depth": _depth(dice, tiny, 3, 16), "inner_dim": inner_heads * dice.pick((4, 6) if tiny else (6, 8, 10)),
        "inner_heads": inner_heads, "outer_dim": heads * each, "outer_heads": heads, "image": 16 * side,
    }  # fmt: skip
    return ModelShape("tnt-tiny" if tiny else "tnt-s", over, 2.5 * _stack(int(over["depth"]), heads * each, side * side, 0, 14))


def _raftmlp(dice: Dice, tiny: bool) -> ModelShape:
    width = 8 * dice.whole(1, 3) if tiny else 16 * dice.whole(2, 8)
    depths = [dice.whole(1, 2) if tiny else dice.whole(2, 6) for _ in range(4)]
    image = 32 * (dice.whole(1, 3) if tiny else dice.whole(4, 8))
    over = {f"dim{level + 1}": width << level for level in range(4)} | {f"n{level + 1}": n for level, n in enumerate(depths)}
    flops = 1.0e9 * sum(depths) * (width / 64) ** 2 * (image / 224) ** 2
    return ModelShape("raftmlp-tiny" if tiny else "raftmlp-s", {**over, "image": image}, flops)


def _scaling_mlp(dice: Dice, tiny: bool) -> ModelShape:
    depth, dim = dice.whole(1, 5) if tiny else dice.whole(3, 18), 16 * dice.whole(2, 12) if tiny else 128 * dice.whole(3, 14)
    expansion, image = dice.pick((2, 3, 4)), dice.pick((16, 24, 32) if tiny else (32, 48, 64))
    over = {"depth": depth, "dim": dim, "expansion": expansion, "image": image}
    return ModelShape("scaling-mlp-tiny" if tiny else "scaling-mlp-b12", over, 6.0 * (depth * 2 * expansion * dim**2 + 3 * image**2 * dim))


def _fno(dice: Dice, tiny: bool) -> ModelShape:
    modes = dice.whole(2, 8) if tiny else dice.whole(8, 28)
    image = 2 * modes + 8 * dice.whole(1, 4) if tiny else 16 * dice.whole(5, 14)
    width, depth = 8 * dice.whole(1, 5) if tiny else 16 * dice.whole(2, 7), dice.whole(1, 4) if tiny else dice.whole(2, 6)
    over = {"modes": modes, "width": width, "depth": depth}
    return ModelShape("fno-tiny" if tiny else "fno2d", over, 2e10 * depth * (width / 64) * (image / 128) ** 2, image=image)


_SHAPES: Mapping[str, Callable[[Dice, bool], ModelShape]] = {
    "gpt": _gpt, "llama": _llama, "mixtral": _mixtral, "bert": _bert, "t5": _t5, "lstm": _lstm, "ssm": _ssm,
    "graphsage": _graphsage, "vit": _vit, "dit": _dit, "resnet": _resnet, "convnext": _convnext, "unet": _unet,
    "tnt": _tnt, "raftmlp": _raftmlp, "scaling_mlp": _scaling_mlp, "fno": _fno,
}  # fmt: skip
FAMILIES: Mapping[str, float] = {
    "gpt": 3, "llama": 3, "bert": 2, "vit": 2, "mixtral": 1.5, "t5": 1.5, "dit": 1.5, "resnet": 2, "convnext": 1.5,
    "unet": 1.5, "lstm": 1, "ssm": 1, "graphsage": 1, "tnt": 1, "raftmlp": 1, "scaling_mlp": 1, "fno": 1,
}  # fmt: skip
"""Family → how often it is drawn."""
