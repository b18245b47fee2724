"""GRPO with resample-on-correct, of rStar2-Agent (Shang et al. 2025, "rStar2-Agent: Agentic Reasoning Technical Report"), on a toy.

Kept: a policy that calls a tool in the middle of its answers; more rollouts than needed of every prompt; of the wrong ones
half are kept at random, of the right ones half, the cleaner the likelier (few tool errors, a well-formed answer); rewards
normalised within a prompt; the clipped loss of GRPO with a higher upper bound, over all tokens of the policy's own, without
a KL term; tool output is not trained on. Phase "rollout" is one whole step: generate with a cache of keys and values,
call tools, resample, train on what is kept; in inference it only generates. Phase "update" trains on rollouts that the batch
brings with their old log-probabilities, as later passes over the same rollouts do: there a micro-batch counts rollouts.
The toy: the prompt is `a op b`, and the policy should have it computed. A rollout has `turns` calls of three tokens, each
followed by what the tool says, and one token of answer, so its length is known. The tool computes on tensors; `sandbox`
is the same as a function of text that can do arithmetic and nothing else. Left out: the pretrained 14B model, its data,
the server of tool calls and the scheduler of rollouts. The policy at paper size has Qwen3-14B's shape without its norms
of queries and keys.
"""

from __future__ import annotations

import ast
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary, SwiGLU

PHASES = ("rollout", "update")
OPERATORS = ("+", "-", "*", "//")
PROMPT, CALL = 4, 3
"""Tokens of a prompt (`a op b` and a mark) and of a call."""

Cache = list[tuple[Tensor, Tensor]]


def sandbox(expression: str, numbers: int) -> int | None:
    """The value of a short expression of whole numbers, modulo `numbers`; None for all that is not one or has none."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < numbers:
            return node.value
        if isinstance(node, ast.BinOp):
            a, b = value(node.left), value(node.right)
            whats = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b, ast.FloorDiv: a // b if b else None}
            if (found := whats.get(type(node.op))) is not None:
                return found % numbers
        raise ValueError("not arithmetic")

    try:
        return value(ast.parse(expression if len(expression) <= 64 else "", mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def tool(call: Tensor, numbers: int) -> Tensor:
    """What the tool says to calls of three tokens `a op b`, (rows, 3): a number, or the token for an error, (rows, 1)."""
    a, op, b = (token[:, None] for token in call.unbind(dim=1))
    kind = op - numbers
    results = torch.cat((a + b, a - b, a * b, a // b.clamp(min=1)), dim=1) % numbers
    result = results.gather(1, kind.clamp(0, len(OPERATORS) - 1))
    wrong = (a >= numbers) | (b >= numbers) | (kind < 0) | (kind >= len(OPERATORS)) | ((kind == 3) & (b == 0))
    return result.masked_fill(wrong, numbers + len(OPERATORS))


def resample(correct: Tensor, penalty: Tensor) -> Tensor:
    """Which half of the rollouts of each prompt is kept, (prompts, rollouts / 2): half of the right and of the wrong ones.

    Right ones are drawn without return with weights 1 / penalty, wrong ones with equal weights.
    """
    weight = torch.where(correct, 1 / penalty.clamp(min=0.05), 1.0)
    draw = torch.rand_like(weight).clamp(1e-9, 1 - 1e-6)
    key = weight.log() - (-draw.log()).log()
    alike = correct[:, :, None] == correct[:, None, :]
    rank = (alike & (key[:, None, :] > key[:, :, None])).sum(dim=-1)
    right = correct.sum(dim=-1, keepdim=True)
    quota = torch.where(correct, (right + 1) // 2, (correct.shape[1] - right) // 2)
    return (rank < quota).int().argsort(dim=1, descending=True, stable=True)[:, : correct.shape[1] // 2]


def advantages(reward: Tensor) -> Tensor:
    """Rewards, (prompts, rollouts), less their mean over a prompt's rollouts and over their deviation."""
    return (reward - reward.mean(dim=1, keepdim=True)) / (reward.std(dim=1, keepdim=True, correction=0) + 1e-6)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, start: int) -> Tensor:
        """With a cache, x comes after the `start` tokens that are in it, and is added."""
        b, t, _ = x.shape
        q, k, v = (project(x).view(b, t, -1, self.head_dim).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = Rotary.rotate(q, cos, sin), Rotary.rotate(k, cos, sin)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept[:, :, start : start + t] = new
            k, v = (kept[:, :, : start + t] for kept in cache)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, kv_heads)
        self.norm2 = nn.RMSNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, ffn)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None = None, start: int = 0
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, cache, start)
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(
        self, vocab_size: int, context: int, numbers: int, turns: int, group: int, layers: int, dim: int, heads: int,
        kv_heads: int, ffn: int, theta: float, phase: str,
    ) -> None:  # fmt: skip
        super().__init__()
        if phase not in PHASES or group % 2 or numbers + len(OPERATORS) + 2 > vocab_size:
            raise ValueError(f"phase is one of {', '.join(PHASES)}, rollouts come in pairs, tokens fit the vocabulary")
        self.vocab_size, self.context, self.phase = vocab_size, context, phase
        self.numbers, self.turns, self.group = numbers, turns, group
        self.length = PROMPT + turns * (CALL + 1) + 1
        self.kv = (kv_heads, dim // heads)
        self.tokens = nn.Embedding(vocab_size, dim)
        self.rotary = Rotary(dim // heads, theta)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(
        self, tokens: Tensor, answers: Tensor | None = None, old: Tensor | None = None, advantage: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Tensor | None]:  # fmt: skip
        """Log-probabilities of the tokens of rollouts, and what the loss needs besides."""
        if answers is not None:
            rollouts = self.rollouts(tokens, answers)
            if not self.training:
                return rollouts
            tokens, old, advantage, mask = (rollouts[name] for name in ("tokens", "old", "advantage", "mask"))
        logits = self.logits(tokens[:, :-1], *self.rotary(tokens[:, :-1]))
        return {"logp": self.chosen(logits, tokens[:, 1:]), "old": old, "advantage": advantage, "mask": mask}

    def logits(self, tokens: Tensor, cos: Tensor, sin: Tensor, caches: Cache | None = None, start: int = 0) -> Tensor:
        x = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, caches[number] if caches else None, start)
        return self.head(self.norm(x))

    @staticmethod
    def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
        return -F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)

    def calls_tool(self, place: int) -> bool:
        return PROMPT < place + 1 < self.length and (place - PROMPT) % (CALL + 1) == CALL

    @torch.no_grad()
    def rollouts(self, prompts: Tensor, answers: Tensor) -> dict[str, Tensor]:
        tokens, old = self.generate(prompts.repeat_interleave(self.group, dim=0))
        said = [place for place in range(self.length) if self.calls_tool(place)]
        mistakes = (tokens[:, said] == self.numbers + len(OPERATORS)).float().mean(dim=1)
        correct = tokens[:, -1] == answers.repeat_interleave(self.group)
        penalty = mistakes + (tokens[:, -1] >= self.numbers)
        shape = (len(prompts), self.group)
        kept = resample(correct.view(shape), penalty.view(shape))
        reward = correct.float().view(shape).gather(1, kept)
        rows = (kept + self.group * torch.arange(len(prompts), device=kept.device)[:, None]).flatten()
        own = [float(place >= PROMPT and place not in said) for place in range(1, self.length)]
        mask = torch.tensor(own, device=tokens.device).expand(len(rows), -1)
        return {"tokens": tokens[rows], "old": old[rows], "advantage": advantages(reward).flatten(), "mask": mask}

    def generate(self, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Rollouts with their prompts, (rows, length), and the log-probability of every token but the first."""
        rows = len(prompts)
        tokens = torch.cat((prompts, prompts.new_zeros(rows, self.length - PROMPT)), dim=1)
        old = torch.zeros(rows, self.length - 1, device=tokens.device)
        cos, sin = self.rotary(tokens)
        heads, size = self.kv
        empty = self.tokens.weight.new_empty
        caches = [(empty(rows, heads, self.length, size), empty(rows, heads, self.length, size)) for _ in self.blocks]
        logits = self.logits(prompts, cos[:PROMPT], sin[:PROMPT], caches)[:, -1]
        for place in range(PROMPT, self.length):
            if self.calls_tool(place):
                tokens[:, place : place + 1] = tool(tokens[:, place - CALL : place], self.numbers)
            else:
                tokens[:, place : place + 1] = torch.multinomial(logits.float().softmax(dim=-1), 1)
            old[:, place - 1] = self.chosen(logits, tokens[:, place])
            if place + 1 < self.length:
                here = slice(place, place + 1)
                logits = self.logits(tokens[:, here], cos[here], sin[here], caches, place)[:, -1]
        return tokens, old


def build(
    *,
    vocab_size: int = 151936,
    context: int = 12288,
    numbers: int = 10,
    turns: int = 10,
    group: int = 32,
    layers: int = 40,
    dim: int = 5120,
    heads: int = 40,
    kv_heads: int = 8,
    ffn: int = 17408,
    theta: float = 1_000_000.0,
    phase: str = "rollout",
) -> Policy:
    return Policy(vocab_size, context, numbers, turns, group, layers, dim, heads, kv_heads, ffn, theta, phase)


def batch(model: Policy, micro_batch: int, seq: int | None = None, image: int | None = None) -> dict[str, Tensor]:
    """Prompts with their answers; or, to update, rollouts of `seq` tokens."""
    if model.phase == "update":
        length = seq or model.context
        return {
            "tokens": torch.randint(0, model.vocab_size, (micro_batch, length)),
            "old": torch.full((micro_batch, length - 1), -math.log(model.vocab_size)),
            "advantage": torch.linspace(-1, 1, micro_batch + 1)[1:],
            "mask": (torch.arange(1, length) >= PROMPT).float().expand(micro_batch, -1).contiguous(),
        }
    numbers = torch.randint(0, model.numbers, (2, micro_batch, 1))
    operator = torch.randint(0, len(OPERATORS) - 1, (micro_batch, 1)) + model.numbers
    mark = torch.full((micro_batch, 1), model.numbers + len(OPERATORS) + 1)
    tokens = torch.cat((numbers[0], operator, numbers[1], mark), dim=1)
    return {"tokens": tokens, "answers": tool(tokens[:, :CALL], model.numbers)[:, 0]}


def loss(output: dict[str, Tensor], batch: dict[str, Tensor], low: float = 0.2, high: float = 0.28) -> Tensor:
    """Mean over the policy's own tokens of all rollouts; `low` and `high` bound how far the ratio is followed."""
    ratio = (output["logp"] - output["old"]).exp()
    advantage = output["advantage"][:, None]
    followed = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return -(followed * output["mask"]).sum() / output["mask"].sum()
