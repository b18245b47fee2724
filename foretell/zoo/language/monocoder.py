"""MonoCoder (Kadosh et al. 2023, "MonoCoder: Domain-Specific Code Language Model for HPC Codes and Tasks"): a small decoder for C code.

Kept: the shape of GPT-NeoX that PolyCoder and MonoCoder share: attention and MLP side by side on one residual, rotary
positions on a quarter of each head, norms with biases, a head of its own; trained on code alone. The code is synthetic: loop
nests with OpenMP pragmas, generated from a seed and cut into lexemes, names and numbers replaced by their order of
appearance. Left out: the corpus and its byte-pair vocabulary, of which only the size is kept, and evaluation. Depth and
width are ours, chosen to give the 0.16B parameters of the paper.
"""

from __future__ import annotations

import math
import random
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary

FIXED = (
    "", "#", "pragma", "omp", "parallel", "for", "reduction", "private", "double", "float", "int", "if", "else", "return",
    "void", "(", ")", "[", "]", "{", "}", ";", ":", ",", "+", "-", "*", "/", "%", "=", "<", ">", "<=", ">=", "==", "!=", "+=",
    "-=", "*=", "++", "--", "&", "&&", "||", "!", "?", ".",
)  # fmt: skip
"""Lexemes with an id of their own; the empty one is what is not known."""
_LEXEME = re.compile(r"[A-Za-z_]\w*|\d+(?:\.\d*)?|[-+*/<>=!&|]{2}|\S")


def encode(source: str, vocab_size: int) -> list[int]:
    """Ids of the lexemes of C code; the rest of the vocabulary is halved between names and numbers."""
    known = {lexeme: number for number, lexeme in enumerate(FIXED)}
    room = (vocab_size - len(FIXED)) // 2
    names: dict[str, int] = {}
    numbers: dict[str, int] = {}
    ids = []
    for lexeme in _LEXEME.findall(source):
        if lexeme in known:
            ids.append(known[lexeme])
        elif lexeme[0].isalpha() or lexeme[0] == "_":
            ids.append(len(FIXED) + names.setdefault(lexeme, len(names)) % room)
        elif lexeme[0].isdigit():
            ids.append(len(FIXED) + room + numbers.setdefault(lexeme, len(numbers)) % room)
        else:
            ids.append(0)
    return ids


def loop_nest(dice: random.Random) -> str:
    """A nest of loops over an array, sometimes a reduction."""
    depth = dice.randint(1, 3)
    indices, arrays = dice.sample("ijklmn", depth), dice.sample(("a", "b", "c", "grid", "x", "y", "sum"), 2)
    place = "".join(f"[{index}]" for index in indices)
    total = dice.random() < 0.3
    pragma = f"#pragma omp parallel for{' reduction(+:total)' if total else ''}"
    ends = [dice.choice(("16", "64", "n", "size")) for _ in indices]
    heads = " ".join(f"for (int {i} = 0; {i} < {end}; {i}++) {{" for i, end in zip(indices, ends, strict=True))
    target = "total" if total else f"{arrays[0]}{place}"
    update = "+=" if total else dice.choice(("+=", "-=", "*="))
    body = f"{target} {update} {arrays[1]}{place} * {dice.randint(1, 9)};"
    return f"{pragma}\n{heads} {body} {'}' * depth}\n"


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, rotated: int) -> None:
        super().__init__()
        self.heads = heads
        self.rotated = rotated
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=-1))
        q, k = (self.turn(y, cos, sin) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first numbers of each head and leave the others."""
        return torch.cat((Rotary.rotate(x[..., : self.rotated], cos, sin), x[..., self.rotated :]), dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, rotated: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, rotated)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x), cos, sin) + self.down(F.gelu(self.up(self.norm2(x))))


class MonoCoder(nn.Module):
    def __init__(self, vocab_size: int, context: int, layers: int, dim: int, heads: int, rotary: float) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context = context
        rotated = max(2, int(dim // heads * rotary) // 2 * 2)
        self.tokens = nn.Embedding(vocab_size, dim)
        self.rotary = Rotary(rotated, 10_000.0)
        self.blocks = nn.ModuleList(Block(dim, heads, rotated) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def build(
    *,
    vocab_size: int = 50304,
    context: int = 2048,
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    rotary: float = 0.25,
) -> MonoCoder:
    return MonoCoder(vocab_size, context, layers, dim, heads, rotary)


def batch(
    model: MonoCoder, micro_batch: int, seq: int | None = None, image: int | None = None, *, seed: int = 0
) -> dict[str, Tensor]:
    """Lexemes of generated loop nests, each with the one after it as its target; the same seed, the same code."""
    length = seq or model.context
    rows = []
    for number in range(micro_batch):
        dice = random.Random(1000 * seed + number)
        source, ids = "", list[int]()
        while len(ids) <= length:
            source += "".join(loop_nest(dice) for _ in range(max(1, length // 40)))
            ids = encode(source, model.vocab_size)
        rows.append(ids[: length + 1])
    tokens = torch.tensor(rows)
    return {"input_ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
