"""Operators that generated models are made of. Plain data, no torch.

Declared here: how a call is written, which ranks and arguments are worth trying, and below what indices must stay, which
shapes cannot tell. Not declared: which shapes and arguments are valid together, and the shapes that come out. `rules` finds
that by trying. Calls keep numbers tame (logarithms of positive ones, matrices that can be inverted), so that a loss is finite.
"""

from __future__ import annotations

from typing import Any

from foretell.prove.fuzz.types import OperandSlot, Operator


def _slot(text: str) -> OperandSlot:
    """`f34<expr`: kind, ranks that are tried (all of 1 to 4 unless told), and below what indices stay."""
    word, _, high = text.partition("<")
    return OperandSlot(word[0], tuple(map(int, word[1:])) or (1, 2, 3, 4), high)


def make(kind: str, name: str, call: str, slots: str = "f", **more: Any) -> Operator:
    known = {key: more.pop(key) for key in ("layer", "helper", "weight", "most", "trials") if key in more}
    return Operator(name, kind, call, tuple(_slot(word) for word in slots.split()), more, **known)


_UNARY = {
    "relu": "F.relu({0})", "gelu": "F.gelu({0})", "silu": "F.silu({0})", "tanh": "torch.tanh({0})",
    "sigmoid": "torch.sigmoid({0})", "softplus": "F.softplus({0})", "elu": "F.elu({0})", "mish": "F.mish({0})",
    "leaky_relu": "F.leaky_relu({0}, 0.1)", "hardswish": "F.hardswish({0})", "sin": "torch.sin({0})",
    "cos": "torch.cos({0})", "exp": "torch.exp(-{0}.abs())", "log1p": "torch.log1p({0}.abs())",
    "sqrt": "torch.sqrt({0} * {0} + 1)", "rsqrt": "torch.rsqrt({0} * {0} + 1)", "abs": "{0}.abs()",
    "reciprocal": "1 / (1 + {0} * {0})", "erf": "torch.erf({0})", "clamp": "{0}.clamp(-2, 2)",
    "power": "torch.tanh({0}) ** 3", "log_sigmoid": "F.logsigmoid({0})", "atan": "torch.atan({0})",
    "hardtanh": "F.hardtanh({0})", "expm1": "torch.expm1(torch.tanh({0}))", "softsign": "F.softsign({0})",
    "selu": "F.selu({0})", "softshrink": "F.softshrink({0})", "nan_to_num": "torch.nan_to_num({0})",
    "scaled": "{0} * 0.5 + 0.25", "half_way": "{0}.to(torch.bfloat16).float() * 0.5", "double": "{0}.double().sin().float()",
}  # fmt: skip
_BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / (1 + {1} * {1})",
    "maximum": "torch.maximum({0}, {1})", "minimum": "torch.minimum({0}, {1})", "atan2": "torch.atan2({0}, {1} + 3)",
    "hypot": "torch.hypot({0}, {1} + 3)", "where": "torch.where({0} > 0, {0}, {1})", "logaddexp": "torch.logaddexp({0}, {1})",
    "masked_fill": "({0} + {1}).masked_fill({1} < 0, 0.5)", "lerp": "torch.lerp({0}, {1}, 0.3)",
}  # fmt: skip
FLAG = (False, True)

ELEMENTWISE = [
    *[make("unary", name, call, weight=0.35) for name, call in _UNARY.items()],
    *[make("binary", name, call, "f f", weight=1.2) for name, call in _BINARY.items()],
    make("binary", "addcmul", "torch.addcmul({0}, {1}, {2}, value=0.5)", "f f f"),
    make("unary", "glu", "F.glu({0}, {dim})", dim="axis"),
    make("unary", "prelu", "F.prelu({0}, {1})", "f234 p1"),
    make("unary", "softmax", "F.softmax({0}, {dim})", dim="axis", weight=1.5),
    make("unary", "log_softmax", "F.log_softmax({0}, {dim})", dim="axis"),
    make("unary", "normalize", "F.normalize({0}, dim={dim})", dim="axis"),
    make("unary", "clamp_norm", "{0} / (1 + {0}.norm(dim={dim}, keepdim=True))", dim="axis"),
]
REDUCTIONS = [
    *[
        make("reduction", name, call, dim="axis", keep=FLAG, weight=0.5)
        for name, call in {
            "sum": "{0}.sum({dim}, keepdim={keep}) * 0.1", "mean": "{0}.mean({dim}, keepdim={keep})",
            "amax": "{0}.amax({dim}, keepdim={keep})", "amin": "{0}.amin({dim}, keepdim={keep})",
            "prod": "torch.tanh({0}).prod({dim}, keepdim={keep})", "logsumexp": "torch.logsumexp({0}, {dim}, keepdim={keep})",
            "max": "{0}.max({dim}, keepdim={keep}).values", "median": "{0}.median({dim}, keepdim={keep}).values",
            "norm": "torch.linalg.vector_norm({0} + 2, dim={dim}, keepdim={keep})",
            "var": "{0}.var({dim}, unbiased=False, keepdim={keep})", "std": "({0} + {0}.exp().tanh()).std({dim}, unbiased=False, keepdim={keep})",
            "any": "({0} > 1).any({dim}, keepdim={keep}).float() * {0}.mean()",
        }.items()
    ],
    make("reduction", "mean_all", "{0} - {0}.mean()"),
    make("reduction", "var_mean", "torch.var_mean({0}, {dim}, correction=0)", dim="axis"),
    *[
        make("scan", name, call, dim="axis", weight=0.6)
        for name, call in {
            "cumsum": "torch.cumsum({0}, {dim}) * 0.1", "cumprod": "torch.cumprod(torch.sigmoid({0}) + 0.5, {dim})",
            "logcumsumexp": "torch.logcumsumexp({0}, {dim})", "cummax": "torch.cummax({0}, {dim}).values",
        }.items()
    ],
]  # fmt: skip
PRODUCTS = [
    make("product", "matmul", "torch.matmul({0}, {1})", "f f", weight=3),
    make("product", "mm", "torch.mm({0}, {1})", "f2 p2"),
    make("product", "bmm", "torch.bmm({0}, {1})", "f3 f3"),
    make("product", "addmm", "torch.addmm({0}, {1}, {2})", "p12 f2 p2"),
    make("product", "baddbmm", "torch.baddbmm({0}, {1}, {2}, alpha=0.5)", "f3 f3 f3"),
    make("product", "functional_linear", "F.linear({0}, {1}, {2})", "f p2 p1", weight=3),
    make("product", "linear_no_bias", "F.linear({0}, {1})", "f p2"),
    make("product", "bilinear", "F.bilinear({0}, {1}, {2})", "f23 f23 p3", most=1 << 14),
    make("product", "outer", "torch.outer({0}, {1})", "f1 f1"),
    make("product", "dot", "torch.dot({0}, {1}) * {0}", "f1 f1"),
    make("product", "mv", "torch.mv({0}, {1})", "f2 p1"),
    make("product", "tensordot", "torch.tensordot({0}, {1}, dims=1)", "f234 p2"),
    *[
        make("product", f"einsum_{number}", f"torch.einsum('{said}', {{0}}, {{1}})", slots)
        for number, (said, slots) in enumerate(
            [("bij,bjk->bik", "f3 f3"), ("bi,bj->bij", "f2 f2"), ("...i,ji->...j", "f234 p2"), ("bhqd,bhkd->bhqk", "f4 f4"),
             ("bij,ij->bj", "f3 p2"), ("bchw,dc->bdhw", "f4 p2"), ("...i,...i->...", "f f")]
        )
    ],
    make("product", "cdist", "torch.cdist({0}, {1})", "f23 p23", most=1 << 15),
    make("product", "cosine", "F.cosine_similarity({0}, {1}, dim={dim})", "f f", dim="axis"),
]  # fmt: skip
CONVOLUTIONS = [
    make("convolution", "conv1d", "F.conv1d({0}, {1}, {2}, stride={stride}, padding={pad})", "f3 p3 p1", stride=(1, 2), pad=(0, 1), weight=1.5),
    make("convolution", "conv2d", "F.conv2d({0}, {1}, {2}, stride={stride}, padding={pad})", "f4 p4 p1", stride=(1, 2), pad=(0, 1), weight=2),
    make("convolution", "conv2d_groups", "F.conv2d({0}, {1}, padding=1, groups={groups})", "f4 p4", groups=(2, 4)),
    make("convolution", "conv2d_dilated", "F.conv2d({0}, {1}, padding=2, dilation=2)", "f4 p4"),
    make("convolution", "conv_transpose1d", "F.conv_transpose1d({0}, {1}, {2}, stride={stride})", "f3 p3 p1", stride=(1, 2)),
    make("convolution", "conv_transpose2d", "F.conv_transpose2d({0}, {1}, stride={stride}, padding={pad})", "f4 p4", stride=(1, 2), pad=(0, 1)),
    make("convolution", "im2col", "F.unfold({0}, 3, padding=1)", "f4", most=1 << 15),
    make("convolution", "nn_conv2d", "{layer}({0})", "f4", layer="nn.Conv2d({n}, {m}, 3, padding=1)", n="size", m="size", weight=2),
    make("convolution", "nn_conv1d", "{layer}({0})", "f3", layer="nn.Conv1d({n}, {m}, 3, padding=1, padding_mode='circular')", n="size", m="size"),
    make("convolution", "depthwise", "{layer}({0})", "f4", layer="nn.Conv2d({n}, {n}, 3, padding=1, groups={n})", n="size"),
]
NORMS = [
    make("norm", "layer_norm", "F.layer_norm({0}, {1}.shape, {1}, {2})", "f p12 p12", weight=1.5),
    make("norm", "rms_norm", "F.rms_norm({0}, {1}.shape, {1})", "f p1"),
    make("norm", "batch_norm", "F.batch_norm({0}, {1}, {2}, {3}, {4}, training=True)", "f234 u1 u1 p1 p1"),
    make("norm", "batch_norm_plain", "F.batch_norm({0}, None, None, training=True)", "f234"),
    make("norm", "group_norm", "F.group_norm({0}, {groups}, {1}, {2})", "f34 p1 p1", groups=(1, 2, 4)),
    make("norm", "instance_norm", "F.instance_norm({0})", "f34"),
    make("norm", "local_response_norm", "F.local_response_norm({0}, 3)", "f34"),
    make("norm", "nn_layer_norm", "{layer}({0})", "f", layer="nn.LayerNorm({n})", n="size", weight=1.5),
    make("norm", "nn_rms_norm", "{layer}({0})", "f", layer="nn.RMSNorm({n})", n="size"),
    make("norm", "nn_group_norm", "{layer}({0})", "f34", layer="nn.GroupNorm(2, {n})", n="size"),
    make("norm", "nn_batch_norm1d", "{layer}({0})", "f23", layer="nn.BatchNorm1d({n})", n="size"),
    make("norm", "nn_batch_norm2d", "{layer}({0})", "f4", layer="nn.BatchNorm2d({n})", n="size", weight=1.5),
    make("norm", "weight_norm", "{layer}({0})", "f",
        layer="nn.utils.parametrizations.weight_norm(nn.Linear({n}, {m}))", n="size", m="size", weight=0.5),
]
POOLING = [
    make("pooling", "max_pool1d", "F.max_pool1d({0}, {k})", "f3", k=(2, 3)),
    make("pooling", "max_pool2d", "F.max_pool2d({0}, {k}, stride={stride})", "f4", k=(2, 3), stride=(1, 2)),
    make("pooling", "avg_pool1d", "F.avg_pool1d({0}, {k})", "f3", k=(2, 3)),
    make("pooling", "avg_pool2d", "F.avg_pool2d({0}, {k}, stride={stride}, padding=1)", "f4", k=(2, 3), stride=(1, 2)),
    make("pooling", "adaptive_avg_pool1d", "F.adaptive_avg_pool1d({0}, {n})", "f3", n=(1, 4)),
    make("pooling", "adaptive_avg_pool2d", "F.adaptive_avg_pool2d({0}, {n})", "f4", n=(1, 3)),
    make("pooling", "adaptive_max_pool2d", "F.adaptive_max_pool2d({0}, {n})", "f4", n=(1, 2)),
    make("pooling", "lp_pool2d", "F.lp_pool2d({0} + 3, 2, 2)", "f4"),
    make("resize", "nearest", "F.interpolate({0}, scale_factor={scale}, mode='nearest')", "f34", scale=(2,)),
    make("resize", "linear1d", "F.interpolate({0}, size={n}, mode='linear')", "f3", n=(8, 24)),
    make("resize", "bilinear2d", "F.interpolate({0}, scale_factor=2, mode='bilinear', align_corners={align})", "f4", align=FLAG, trials=40),
    make("resize", "bicubic2d", "F.interpolate({0}, size=({n}, {n}), mode='bicubic')", "f4", n=(6, 12), trials=15),
    make("resize", "pixel_shuffle", "F.pixel_shuffle({0}, 2)", "f4"),
    make("resize", "pixel_unshuffle", "F.pixel_unshuffle({0}, 2)", "f4"),
    make("resize", "grid_sample", "F.grid_sample({0}, torch.tanh({1}), align_corners=False, mode='{mode}')",
        "f4 p4", mode=("bilinear", "nearest"), trials=60),
    make("resize", "affine_grid", "F.grid_sample({0}, F.affine_grid({1}, {0}.shape, align_corners=False), align_corners=False)", "f4 p3"),
]
ATTENTION = [
    make("attention", "sdpa", "F.scaled_dot_product_attention({0}, {1}, {2}, is_causal={causal})", "f4 f4 f4", causal=FLAG, weight=1.5),
    make("attention", "sdpa_self", "F.scaled_dot_product_attention({0}, {0}, {0})", "f34", weight=1.5),
    make("attention", "sdpa_mask", "F.scaled_dot_product_attention({0}, {1}, {1}, attn_mask={2})", "f4 f4 p24"),
    make("attention", "heads", "{layer}({0}, {0}, {0}, need_weights=False)[0]", "f3",
        layer="nn.MultiheadAttention({n}, 2, batch_first=True)", n="size"),
    make("attention", "by_hand", "torch.softmax({0} @ {0}.transpose(-1, -2) / 4, -1) @ {0}", "f34"),
    make("attention", "encoder_layer", "{layer}({0})", "f3",
        layer="nn.TransformerEncoderLayer({n}, 2, {m}, batch_first=True)", n="size", m="size", most=1 << 15, trials=40),
    make("recurrent", "lstm", "{layer}({0})[0]", "f3", layer="nn.LSTM({n}, {m}, batch_first=True)", n="size", m="size", most=1 << 15, trials=40),
    make("recurrent", "gru", "{layer}({0})[0]", "f3", layer="nn.GRU({n}, {m})", n="size", m="size", most=1 << 14, trials=40),
    make("recurrent", "rnn", "{layer}({0})[0]", "f3", layer="nn.RNN({n}, {m}, batch_first=True)", n="size", m="size", most=1 << 14, trials=40),
    make("recurrent", "lstm_cell", "{layer}({0})[0]", "f2", layer="nn.LSTMCell({n}, {m})", n="size", m="size"),
    make("product", "nn_linear", "{layer}({0})", "f", layer="nn.Linear({n}, {m})", n="size", m="size", weight=5),
]
INDEXING = [
    make("index", "embedding", "F.embedding({1}, {0})", "p2 i12<s[0][0]", weight=2),
    make("index", "embedding_bag", "F.embedding_bag({1}, {0}, mode='{mode}')", "p2 i2<s[0][0]", mode=("mean", "sum")),
    make("index", "gather", "torch.gather({0}, {dim}, {1})", "f i<s[0][dim]", dim="axis"),
    make("index", "index_select", "torch.index_select({0}, {dim}, {1})", "f i1<s[0][dim]", dim="axis"),
    make("index", "advanced", "{0}[:, {1}]", "f234 i12<s[0][1]"),
    make("index", "pairs", "{0}[{1}, {1}]", "f234 i1<min(s[0][:2])"),
    make("index", "scatter_add", "{0}.scatter_add({dim}, {1}, {2})", "f i<s[0][dim] f", dim="axis"),
    make("index", "scatter_mean", "{0}.scatter_reduce({dim}, {1}, {2}, 'mean')", "f i<s[0][dim] f", dim="axis"),
    make("index", "index_add", "{0}.index_add({dim}, {1}, {2})", "f i1<s[0][dim] f", dim="axis"),
    make("index", "index_put", "{0}.index_put(({1},), {2}, accumulate={add})", "f i1<s[0][0] f", add=FLAG),
    make("index", "index_copy", "{0}.index_copy({dim}, {1}, {2})", "f i1<s[0][dim] f", dim="axis"),
    make("index", "take_along", "torch.take_along_dim({0}, torch.argsort({0}, {dim}), {dim})", dim="axis"),
    make("index", "one_hot", "F.one_hot({0}.argmax(-1), {0}.shape[-1]) * {0}", "f234"),
    make("index", "bucketize", "{1}[torch.bucketize({0}.detach(), torch.linspace(-1, 1, 7)).clamp(max={1}.shape[0] - 1)]", "f p12"),
    make("index", "boolean_where", "torch.where({1}, {0}, 0.5)", "f b"),
    make("sort", "sort", "torch.sort({0}, {dim}).values", dim="axis"),
    make("sort", "topk", "torch.topk({0}, {k}, {dim}).values", dim="axis", k="size"),
    make("sort", "kthvalue", "torch.kthvalue({0}, {k}, {dim}).values", dim="axis", k=(1, 2)),
    make("sort", "flat_topk", "torch.topk({0}.flatten(), {k}).values", k="size"),
]
