"""Models that everybody knows, and those that the tests lean on."""

from __future__ import annotations

from dataclasses import replace

from foretell.zoo.entry import Entry


def _tagged(task: str, motif: str, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    return tuple(replace(entry, task=task, motif=motif) for entry in entries)


_GPT = (
    Entry("gpt2", "gpt", {"layers": 12, "dim": 768, "heads": 12, "context": 1024}, "text", "GPT-2, 124M", seq=1024),
    Entry(
        "gpt2-medium", "gpt", {"layers": 24, "dim": 1024, "heads": 16, "context": 1024}, "text", "GPT-2 medium, 355M",
        seq=1024,
    ),
    Entry(
        "gpt2-large", "gpt", {"layers": 36, "dim": 1280, "heads": 20, "context": 1024}, "text", "GPT-2 large, 774M",
        seq=1024,
    ),
    Entry(
        "gpt2-xl", "gpt", {"layers": 48, "dim": 1600, "heads": 25, "context": 1024}, "text", "GPT-2 XL, 1.6B", seq=1024
    ),
    Entry(
        "gpt3-6.7b", "gpt", {"layers": 32, "dim": 4096, "heads": 32, "context": 2048}, "text",
        "GPT-3 6.7B, dense attention", seq=2048,
    ),
    Entry(
        "gpt3-13b", "gpt", {"layers": 40, "dim": 5120, "heads": 40, "context": 2048}, "text",
        "GPT-3 13B, dense attention, width 5120", seq=2048,
    ),
    Entry(
        "gpt3-175b", "gpt", {"layers": 96, "dim": 12288, "heads": 96, "context": 2048}, "text",
        "GPT-3 175B, dense attention", seq=2048,
    ),
    Entry(
        "gpt-10m", "gpt", {"vocab_size": 256, "context": 256, "layers": 6, "dim": 384, "heads": 6}, "text",
        "GPT-2 shape for bytes, 10.8M: the model of `foretell run demo`", seq=256,
    ),
    Entry(
        "gpt-tiny", "gpt", {"vocab_size": 512, "context": 128, "layers": 4, "dim": 128, "heads": 4}, "text",
        "GPT-2 shape, 0.9M", seq=128, small=True,
    ),
)  # fmt: skip

_LLAMA = (
    Entry(
        "llama3-1b", "llama", {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "tied": True},
        "text", "Llama 3.2 1B, tied embeddings", seq=4096,
    ),
    Entry(
        "llama3-8b", "llama", {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}, "text",
        "Llama 3 8B", seq=8192,
    ),
    Entry(
        "llama3-70b", "llama", {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}, "text",
        "Llama 3 70B", seq=8192,
    ),
    Entry(
        "llama3-405b", "llama", {"layers": 126, "dim": 16384, "heads": 128, "kv_heads": 8, "ffn": 53248}, "text",
        "Llama 3.1 405B", seq=8192,
    ),
    Entry(
        "llama-tiny", "llama",
        {"vocab_size": 512, "context": 128, "layers": 4, "dim": 128, "heads": 4, "kv_heads": 2, "ffn": 352}, "text",
        "Llama 3 shape, 0.9M", seq=128, small=True,
    ),
)  # fmt: skip

_MIXTRAL = (
    Entry(
        "mixtral-8x7b", "mixtral",
        {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "experts": 8, "top_k": 2}, "text",
        "Mixtral 8x7B, 46.7B, capacity routing", seq=4096,
    ),
    Entry(
        "mixtral-tiny",
        "mixtral",
        {
            "vocab_size": 512,
            "context": 128,
            "layers": 2,
            "dim": 64,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 128,
            "experts": 4,
            "top_k": 2,
        },
        "text",
        "Mixtral shape, 4 experts, 0.3M",
        seq=128,
        small=True,
    ),
)  # fmt: skip

_BERT = (
    Entry("bert-base", "bert", {"layers": 12, "dim": 768, "heads": 12}, "text", "BERT base, masked LM, 110M", seq=512),
    Entry(
        "bert-large", "bert", {"layers": 24, "dim": 1024, "heads": 16}, "text", "BERT large, masked LM, 335M", seq=512
    ),
    Entry(
        "bert-tiny", "bert", {"vocab_size": 512, "context": 128, "layers": 2, "dim": 128, "heads": 4}, "text",
        "BERT shape, masked LM, 0.5M", seq=128, small=True,
    ),
)  # fmt: skip

_T5 = (
    Entry("t5-small", "t5", {"layers": 6, "dim": 512, "heads": 8, "ffn": 2048}, "text", "T5 1.0 small, 61M", seq=512),
    Entry("t5-base", "t5", {"layers": 12, "dim": 768, "heads": 12, "ffn": 3072}, "text", "T5 1.0 base, 223M", seq=512),
    Entry(
        "t5-large", "t5", {"layers": 24, "dim": 1024, "heads": 16, "ffn": 4096}, "text", "T5 1.0 large, 738M", seq=512
    ),
    Entry(
        "t5-tiny", "t5",
        {"vocab_size": 512, "context": 128, "layers": 2, "dim": 64, "heads": 4, "head_dim": 16, "ffn": 256}, "text",
        "T5 shape, 0.3M", seq=128, small=True,
    ),
)  # fmt: skip

_LSTM = (
    Entry(
        "lstm-lm", "lstm", {"vocab_size": 33278, "layers": 3, "embed": 400, "hidden": 1150, "dropout": 0.2}, "text",
        "AWD-LSTM language model on WikiText-2, 34M", seq=70,
    ),
    Entry(
        "lstm-tiny", "lstm",
        {"vocab_size": 512, "context": 64, "layers": 2, "embed": 64, "hidden": 128, "dropout": 0.0}, "text",
        "LSTM language model, 0.2M", seq=64, small=True,
    ),
)  # fmt: skip

_SSM = (
    Entry(
        "mamba-130m", "ssm", {"layers": 24, "dim": 768, "state": 16, "expand": 2, "kernel": 4}, "text",
        "Mamba 130M, scan in plain PyTorch", seq=1024,
    ),
    Entry(
        "ssm-tiny", "ssm", {"vocab_size": 512, "context": 128, "layers": 2, "dim": 64, "state": 8}, "text",
        "Mamba shape, 0.1M", seq=128, small=True,
    ),
)  # fmt: skip

_GRAPHSAGE = (
    Entry(
        "graphsage", "graphsage",
        {"nodes": 200_000, "edges": 2_000_000, "layers": 3, "features": 100, "hidden": 256, "classes": 47}, "graph",
        "GraphSAGE on a whole graph of 200k nodes, 0.2M",
    ),
    Entry(
        "graphsage-tiny", "graphsage",
        {"nodes": 500, "edges": 4_000, "layers": 3, "features": 16, "hidden": 32, "classes": 5}, "graph",
        "GraphSAGE on a graph of 500 nodes", small=True,
    ),
)  # fmt: skip

_VIT = (
    Entry(
        "vit-b16", "vit", {"patch": 16, "dim": 768, "depth": 12, "heads": 12, "classes": 1000, "image": 224}, "image",
        "ViT-B/16, 86M", image=224,
    ),
    Entry(
        "vit-l16", "vit", {"patch": 16, "dim": 1024, "depth": 24, "heads": 16, "classes": 1000, "image": 224}, "image",
        "ViT-L/16, 304M", image=224,
    ),
    Entry(
        "vit-tiny", "vit", {"patch": 8, "dim": 64, "depth": 4, "heads": 4, "classes": 10, "image": 32}, "image",
        "ViT shape, 0.2M", image=32, small=True,
    ),
)  # fmt: skip

_RESNET = (
    Entry(
        "resnet50", "resnet", {"depth1": 3, "depth2": 4, "depth3": 6, "depth4": 3, "width": 64, "classes": 1000},
        "image", "ResNet-50, 26M", image=224,
    ),
    Entry(
        "resnet-tiny", "resnet", {"depth1": 1, "depth2": 1, "depth3": 1, "depth4": 1, "width": 16, "classes": 10},
        "image", "ResNet with one bottleneck a stage", image=64, small=True,
    ),
)  # fmt: skip

_CONVNEXT = (
    Entry(
        "convnext-base", "convnext",
        {"d1": 128, "d2": 256, "d3": 512, "d4": 1024, "n1": 3, "n2": 3, "n3": 27, "n4": 3, "classes": 1000}, "image",
        "ConvNeXt-B, 89M", image=224,
    ),
    Entry(
        "convnext-tiny", "convnext",
        {"d1": 96, "d2": 192, "d3": 384, "d4": 768, "n1": 3, "n2": 3, "n3": 9, "n4": 3, "classes": 1000}, "image",
        "ConvNeXt-T, 29M", image=224,
    ),
    Entry(
        "convnext-micro", "convnext",
        {"d1": 16, "d2": 32, "d3": 64, "d4": 128, "n1": 1, "n2": 1, "n3": 2, "n4": 1, "classes": 10}, "image",
        "ConvNeXt shape, five blocks", image=64, small=True,
    ),
)  # fmt: skip

_UNET = (
    Entry(
        "unet", "unet", {"channels": 64, "levels": 4, "classes": 2, "in_channels": 3}, "image",
        "U-Net segmentation, 31M", image=256,
    ),
    Entry(
        "unet-tiny", "unet", {"channels": 8, "levels": 2, "classes": 2, "in_channels": 3}, "image",
        "U-Net with two levels", image=32, small=True,
    ),
)  # fmt: skip

_DIT = (
    Entry(
        "dit-xl2", "dit",
        {"depth": 28, "dim": 1152, "heads": 16, "patch": 2, "in_channels": 4, "classes": 1000, "image": 32}, "image",
        "DiT-XL/2 on 32x32 latents, 675M", image=32,
    ),
    Entry(
        "dit-b2", "dit",
        {"depth": 12, "dim": 768, "heads": 12, "patch": 2, "in_channels": 4, "classes": 1000, "image": 32}, "image",
        "DiT-B/2 on 32x32 latents, 130M", image=32,
    ),
    Entry(
        "dit-tiny", "dit",
        {"depth": 2, "dim": 64, "heads": 4, "patch": 2, "in_channels": 4, "classes": 10, "image": 16}, "image",
        "DiT shape on 16x16 latents", image=16, small=True,
    ),
)  # fmt: skip

_TNT = (
    Entry(
        "tnt-s",
        "tnt",
        {
            "depth": 12,
            "inner_dim": 24,
            "inner_heads": 4,
            "outer_dim": 384,
            "outer_heads": 6,
            "patch": 16,
            "classes": 1000,
            "image": 224,
        },
        "image",
        "Transformer in Transformer S, 24M",
        image=224,
        paper="TNT",
        task="cls",
        motif="attention inside patches folded into the batch, attention outside",
        trap="inner and outer blocks have costs of their own, and tensor parallelism splits the heads of both",
    ),
    Entry(
        "tnt-tiny",
        "tnt",
        {
            "depth": 2,
            "inner_dim": 8,
            "inner_heads": 2,
            "outer_dim": 64,
            "outer_heads": 4,
            "patch": 16,
            "classes": 10,
            "image": 64,
        },
        "image",
        "Transformer in Transformer, two blocks",
        image=64,
        small=True,
        paper="TNT",
        task="cls",
        motif="attention inside patches folded into the batch, attention outside",
        trap="inner and outer blocks have costs of their own, and tensor parallelism splits the heads of both",
    ),
)  # fmt: skip

_RAFTMLP = (
    Entry(
        "raftmlp-s",
        "raftmlp",
        {
            "dim1": 64,
            "dim2": 128,
            "dim3": 256,
            "dim4": 512,
            "n1": 2,
            "n2": 2,
            "n3": 6,
            "n4": 2,
            "raft": 2,
            "classes": 1000,
            "image": 224,
        },
        "image",
        "RaftMLP-S, about 10M",
        image=224,
        paper="RaftMLP",
        task="cls",
        motif="tokens mixed by rows and columns, weights that depend on the side",
        trap="a plan stays valid at 1.5 times the resolution, and memory follows the pixels; not handled: resized weights, a model has one side",
    ),
    Entry(
        "raftmlp-tiny",
        "raftmlp",
        {
            "dim1": 16,
            "dim2": 32,
            "dim3": 48,
            "dim4": 64,
            "n1": 1,
            "n2": 1,
            "n3": 1,
            "n4": 1,
            "raft": 2,
            "classes": 10,
            "image": 64,
        },
        "image",
        "RaftMLP, one block a level",
        image=64,
        small=True,
        paper="RaftMLP",
        task="cls",
        motif="tokens mixed by rows and columns, weights that depend on the side",
        trap="a plan stays valid at 1.5 times the resolution, and memory follows the pixels; not handled: resized weights, a model has one side",
    ),
)  # fmt: skip

_SCALING_MLP = (
    Entry(
        "scaling-mlp-b12", "scaling_mlp", {"depth": 12, "dim": 1024, "expansion": 4, "classes": 1000, "image": 64},
        "image", "Scaling MLP B-12/Wi-1024, about 114M", image=64, paper="Scaling MLPs", task="cls",
        motif="products of matrices and little else",
        trap="a ladder of four sizes whose memory, FLOPs and energy follow from width and depth",
    ),
    Entry(
        "scaling-mlp-tiny", "scaling_mlp", {"depth": 2, "dim": 64, "expansion": 4, "classes": 10, "image": 32}, "image",
        "Scaling MLP, two blocks", image=32, small=True, paper="Scaling MLPs", task="cls",
        motif="products of matrices and little else",
        trap="a ladder of four sizes whose memory, FLOPs and energy follow from width and depth",
    ),
)  # fmt: skip

_FNO = (
    Entry(
        "fno2d", "fno", {"modes": 16, "width": 64, "depth": 4, "in_channels": 3, "out_channels": 1}, "field",
        "Fourier Neural Operator on a 128x128 field", image=128,
    ),
    Entry(
        "fno-tiny", "fno", {"modes": 4, "width": 16, "depth": 2, "in_channels": 3, "out_channels": 1}, "field",
        "Fourier Neural Operator on a 32x32 field", image=32, small=True,
    ),
)  # fmt: skip

ENTRIES = (
    *_tagged("lm", "causal attention, a head that shares the embedding", _GPT),
    *_tagged("lm", "causal attention with shared keys and values, rotary positions, gated MLP", _LLAMA),
    *_tagged("lm", "mixture of experts, routing by topk and scatter", _MIXTRAL),
    *_tagged("masked", "attention both ways", _BERT),
    *_tagged("lm", "encoder and decoder, a bias on attention scores", _T5),
    *_tagged("lm", "recurrent network", _LSTM),
    *_tagged("lm", "scan, depthwise convolution in time", _SSM),
    *_tagged("cls", "scatter of messages over edges", _GRAPHSAGE),
    *_tagged("cls", "attention over patches", _VIT),
    *_tagged("cls", "convolutions with batch norm", _RESNET),
    *_tagged("cls", "depthwise convolutions, layer norm", _CONVNEXT),
    *_tagged("seg", "convolutions, skips by concatenation", _UNET),
    *_tagged("gen", "attention with norms modulated by time and class", _DIT),
    *_TNT,
    *_RAFTMLP,
    *_SCALING_MLP,
    *_tagged("forecast", "complex FFT", _FNO),
)  # fmt: skip
