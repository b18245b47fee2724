"""T5 1.0 (Raffel et al. 2019, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer").

Kept: a pre-norm encoder-decoder with bias-free layers and RMSNorm. Positions enter only as a learned bias on the
attention scores, one value per head and bucket of relative distance, computed once per stack and shared by its
blocks. Attention scores are not scaled. The head shares the embedding. Left out: span corruption; texts are random
tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativeBias(nn.Module):
    """Half of the buckets hold one small distance each, the rest grow logarithmically up to max_distance."""

    def __init__(self, heads: int, bidirectional: bool, buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.buckets = buckets
        self.max_distance = max_distance
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of each offset, key position minus query position."""
        buckets = self.buckets
        if self.bidirectional:
            buckets //= 2
            start = torch.where(offset > 0, buckets, 0)
            distance = offset.abs()
        else:
            start = torch.zeros_like(offset)
            distance = (-offset).clamp(min=0)
        exact = buckets // 2
        growth = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        return start + torch.where(distance < exact, distance, far)

    def forward(self, length: int) -> Tensor:
        """Additive attention mask shaped (1, heads, length, length), minus infinity where a decoder looks ahead."""
        position = torch.arange(length, device=self.table.weight.device)
        offset = position[None, :] - position[:, None]
        bias = self.table(self.bucket(offset)).permute(2, 0, 1)[None]
        return bias if self.bidirectional else bias.masked_fill(offset > 0, float("-inf"))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.dropout = dropout
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, heads * head_dim, bias=False)
        self.v = nn.Linear(dim, heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            y.view(y.shape[0], y.shape[1], -1, self.head_dim).transpose(1, 2)
            for y in (self.q(x), self.k(memory), self.v(memory))
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.relu(self.up(x))))


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, head_dim, dropout)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, ffn, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        return x + self.dropout(self.mlp(self.norm2(x)))


class DecoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int, head_dim: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, head_dim, dropout)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.cross = Attention(dim, heads, head_dim, dropout)
        self.norm3 = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, ffn, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, bias))
        x = x + self.dropout(self.cross(self.norm2(x), memory))
        return x + self.dropout(self.mlp(self.norm3(x)))


class Encoder(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, head_dim: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.bias = RelativeBias(heads, bidirectional=True)
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads, head_dim, ffn, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias(x.shape[1])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, bias)
        return self.dropout(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, head_dim: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.bias = RelativeBias(heads, bidirectional=False)
        self.blocks = nn.ModuleList(DecoderBlock(dim, heads, head_dim, ffn, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        bias = self.bias(x.shape[1])
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, memory, bias)
        return self.dropout(self.norm(x))


class T5(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int,
        dim: int,
        heads: int,
        head_dim: int,
        ffn: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.dim = dim
        self.tokens = nn.Embedding(vocab_size, dim)
        self.encoder = Encoder(layers, dim, heads, head_dim, ffn, dropout)
        self.decoder = Decoder(layers, dim, heads, head_dim, ffn, dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The query projections take the scale that attention leaves out."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, RelativeBias):
                nn.init.normal_(module.table.weight, std=self.dim**-0.5)
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.normal_(module.q.weight, std=(self.dim * module.head_dim) ** -0.5)
        nn.init.normal_(self.tokens.weight)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(input_ids))
        x = self.decoder(self.tokens(decoder_input_ids), memory)
        return F.linear(x * self.dim**-0.5, self.tokens.weight)


def build(
    *,
    vocab_size: int = 32128,
    context: int = 512,
    layers: int = 6,
    dim: int = 512,
    heads: int = 8,
    head_dim: int = 64,
    ffn: int = 2048,
    dropout: float = 0.0,
) -> T5:
    return T5(vocab_size, context, layers, dim, heads, head_dim, ffn, dropout)


def batch(model: T5, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """The encoder reads seq tokens, the decoder a quarter of that, close to the paper's 512 and 114."""
    length = seq or model.context
    targets = torch.randint(0, model.vocab_size, (micro_batch, max(1, length // 4)))
    return {
        "input_ids": torch.randint(0, model.vocab_size, (micro_batch, length)),
        "decoder_input_ids": F.pad(targets[:, :-1], (1, 0)),
        "targets": targets,
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
