"""HMT (He et al. 2024, "HMT: Hierarchical Memory Transformer for Long Context Language Processing") around a GPT-shaped decoder.

Kept: the text goes through the same decoder segment by segment. For each segment: its first half and a learned prompt give
a summary; the summary recalls, by cross-attention, from the memory embeddings of the last `memories` segments; the segment
is then read between two copies of what was recalled, after the last tokens of the segment before; where the second copy
stands, the decoder's output is the segment's memory embedding. Backward goes through all segments of a text, so what
training keeps grows with their number. Phase "recall" trains so; phase "warm" is the paper's first stage: no recall, the
memory of the segment before is passed on. What is recalled comes from the first half of the segment itself too, so the
model is causal from segment to segment, not from token to token. In inference only the logits of the last segment are
returned, and memory stays the same however long the text. Left out: the pretrained decoder; GPT-2's block stands for it,
without a table of learned positions over the whole text: positions are those inside the segment. In the paper's larger
decoders HMT adds 0.5 to 2 % of parameters.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.gpt import Block

PHASES = ("recall", "warm")


class Recall(nn.Module):
    """One query over the memory embeddings of earlier segments; the values are the memories themselves, as in the paper."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, size, bias=False)
        self.key = nn.Linear(dim, size, bias=False)

    def forward(self, summary: Tensor, memories: list[Tensor]) -> Tensor:
        """(batch, 1, dim), and as many of them as there are memories."""
        kept = torch.cat(memories, dim=1)
        scores = self.query(summary) @ self.key(kept).transpose(1, 2)
        return (scores / math.sqrt(self.key.out_features)).softmax(dim=-1) @ kept


class HMT(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, segment: int, memories: int, overlap: int, layers: int, dim: int, heads: int,
        recall: int, phase: str,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, not {phase!r}")
        self.vocab_size, self.context, self.segment = vocab_size, context, segment
        self.memories, self.overlap, self.phase = memories, overlap, phase
        self.tokens = nn.Embedding(vocab_size, dim)
        self.places = nn.Embedding(1 + overlap + segment + 1, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout=0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.prompt = nn.Parameter(torch.empty(1, 1, dim))
        self.first = nn.Parameter(torch.empty(1, 1, dim))
        self.recall = Recall(dim, recall)
        if phase == "warm":
            for part in (self.recall, self.prompt):
                part.requires_grad_(False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        b, t = input_ids.shape
        if t % self.segment:
            raise ValueError(f"{t} tokens are no whole number of segments of {self.segment}")
        memories = [self.first.expand(b, 1, -1)]
        tail = self.tokens(input_ids[:, :0])
        outputs: list[Tensor] = []
        for ids in input_ids.split(self.segment, dim=1):
            x = self.tokens(ids)
            recalled = self.recalled(x, memories)
            y = self.decode(torch.cat((recalled, tail, x, recalled), dim=1))
            outputs = [*(outputs if self.training else ()), y[:, -1 - self.segment : -1]]
            memories = [*memories, y[:, -1:]][-self.memories :]
            tail = x[:, self.segment - self.overlap :]
        return F.linear(torch.cat(outputs, dim=1), self.tokens.weight)

    def recalled(self, x: Tensor, memories: list[Tensor]) -> Tensor:
        if self.phase == "warm":
            return memories[-1]
        half = torch.cat((x[:, : self.segment // 2], self.prompt.expand(len(x), 1, -1)), dim=1)
        return self.recall(self.decode(half)[:, -1:], memories)

    def decode(self, x: Tensor) -> Tensor:
        """The decoder itself: any stack of blocks would do."""
        x = x + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build(
    *,
    vocab_size: int = 50272,
    context: int = 16384,
    segment: int = 1024,
    memories: int = 300,
    overlap: int = 32,
    layers: int = 24,
    dim: int = 1024,
    heads: int = 16,
    recall: int = 1024,
    phase: str = "recall",
) -> HMT:
    return HMT(vocab_size, context, segment, memories, overlap, layers, dim, heads, recall, phase)


def batch(model: HMT, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Random tokens, each with the one after it as its target."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
