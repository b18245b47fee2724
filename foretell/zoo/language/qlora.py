"""QLoRA (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs") of Qwen2-1.5B, in 4 GB of memory, as in
Resource-Aware Arabic LLM Creation (Aryan 2024).

Kept: a Qwen2-shaped decoder (Llama's with biases on queries, keys and values, and a tied head); with a rank, the linear
layers of its blocks hold their frozen weights in 4-bit NormalFloat, blocks of 64 with one fp32 scale each, and are
dequantised at every use, forward and backward; beside each a trained adapter of `rank`. All else is frozen. With rank 0 it
is the plain model, to which foretell's own `--lora` and `--nf4` can be applied. Left out: paged optimizer states, double
quantisation of the scales, the pretrained weights and Arabic data; rank and length are ours. Dequantisation is in plain
ops, whose temporaries a fused kernel would not need.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Llama

BLOCK = 64
"""Weights that share a scale."""


def codebook() -> list[float]:
    """The 16 values of NF4 as published: quantiles of a normal distribution, 7 below zero, zero, 8 above. Computed anew they
    differ in the last bits, and then some codes do."""
    return [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip


def quantise(weight: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights a byte, the first in its high half, and the largest magnitude of every block."""
    blocks = weight.float().view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    scaled = blocks * (1 / largest.clamp(min=1e-38))[:, None]
    nearest = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2).to(torch.uint8).view(-1, 2)
    return (nearest[:, 0] << 4) | nearest[:, 1], largest


def dequantise(packed: Tensor, largest: Tensor, code: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    index = torch.stack((packed >> 4, packed & 15), dim=-1).int()
    return (code[index].view(-1, BLOCK) * largest[:, None]).view(shape).to(dtype)


class FourBitProduct(torch.autograd.Function):
    """x Wᵀ for a W in 4 bits: backward dequantises it again, and x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, largest: Tensor, code: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(packed, largest, code)
        ctx.shape = shape
        return F.linear(x, dequantise(packed, largest, code, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        packed, largest, code = ctx.saved_tensors
        return grad @ dequantise(packed, largest, code, ctx.shape, grad.dtype), None, None, None, None


class QLoraLinear(nn.Module):
    """A linear layer in 4 bits, never trained, and an adapter in fp32, which is."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float = 8.0) -> None:
        super().__init__()
        self.shape = (layer.out_features, layer.in_features)
        self.scale = alpha / rank
        self.register_buffer("code", torch.tensor(codebook()))
        packed, largest = quantise(layer.weight.detach(), self.code)
        self.register_buffer("packed", packed)
        self.register_buffer("largest", largest)
        self.bias = layer.bias
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y = FourBitProduct.apply(x, self.packed, self.largest, self.code, self.shape)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        adapted = F.linear(F.linear(x.to(self.down.dtype), self.down), self.up) * self.scale
        return y + adapted.to(y.dtype)


class Qwen2(Llama):
    def __init__(
        self, vocab_size: int, context: int, layers: int, dim: int, heads: int, kv_heads: int, ffn: int, theta: float,
        rank: int,
    ) -> None:  # fmt: skip
        super().__init__(vocab_size, context, layers, dim, heads, kv_heads, ffn, theta, tied=True, dropout=0.0)
        for block in self.blocks:
            for name in ("q", "k", "v"):
                bare = getattr(block.attention, name)
                setattr(block.attention, name, nn.Linear(bare.in_features, bare.out_features))
        self.reset_parameters()
        if rank:
            self.requires_grad_(False)
            for part in [m for block in self.blocks for m in (block.attention, block.mlp)]:
                for name, layer in list(part.named_children()):
                    setattr(part, name, QLoraLinear(layer, rank))


def build(
    *,
    vocab_size: int = 151936,
    context: int = 512,
    layers: int = 28,
    dim: int = 1536,
    heads: int = 12,
    kv_heads: int = 2,
    ffn: int = 8960,
    theta: float = 1_000_000.0,
    rank: int = 16,
) -> Qwen2:
    return Qwen2(vocab_size, context, layers, dim, heads, kv_heads, ffn, theta, rank)


def batch(model: Qwen2, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
