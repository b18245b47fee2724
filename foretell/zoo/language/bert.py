"""BERT (Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding").

Kept: a post-norm bidirectional encoder trained to restore masked tokens; the masked-language head is a dense layer,
GELU and LayerNorm before a decoder that shares the token embedding; the pooler and the next-sentence head are left
out, and every sequence is full, so that attention needs no padding mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embeddings(nn.Module):
    def __init__(self, vocab_size: int, context: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.segments = nn.Embedding(2, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions) + self.segments(token_type_ids)
        return self.dropout(self.norm(x))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (proj(x).view(b, t, self.heads, -1).transpose(1, 2) for proj in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, dropout)
        self.norm1 = nn.LayerNorm(dim, eps=1e-12)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Head(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.bias = nn.Parameter(torch.empty(vocab_size))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(self.norm(F.gelu(self.dense(x))), embedding, self.bias)


class BERT(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, layers: int, dim: int, heads: int, mask_token: int, dropout: float
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        self.mask_token = mask_token
        self.embeddings = Embeddings(vocab_size, context, dim, dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.head = Head(vocab_size, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids, token_type_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x, self.embeddings.tokens.weight)


def build(
    *,
    vocab_size: int = 30522,
    context: int = 512,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    mask_token: int = 103,
    dropout: float = 0.1,
) -> BERT:
    return BERT(vocab_size, context, layers, dim, heads, mask_token, dropout)


def batch(model: BERT, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Two segments of equal length, 15% of the tokens masked, the first of each sequence always among them."""
    shape = (micro_batch, seq or model.context)
    if shape[1] > model.context:
        raise ValueError(f"seq {shape[1]} is longer than the {model.context} learned positions of the model")
    tokens = torch.randint(0, model.vocab_size, shape)
    position = torch.arange(shape[1]).expand(shape)
    masked = (torch.rand(shape) < 0.15) | (position == 0)
    return {
        "input_ids": torch.where(masked, model.mask_token, tokens),
        "token_type_ids": (position >= shape[1] // 2).long(),
        "targets": torch.where(masked, tokens, -100),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the masked tokens."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)
