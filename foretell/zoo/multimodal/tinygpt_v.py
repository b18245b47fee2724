"""TinyGPT-V (Yuan et al., 2023, "TinyGPT-V: Efficient Multimodal Large Language Model via Small Backbones").

Kept: a frozen ViT (EVA ViT-g) sees the image; a frozen Q-Former's learned queries read it through cross-attention in every second
layer; two linear projections, the trained part, bring the queries to the width of a frozen Phi-2 decoder, whose blocks do
attention and MLP side by side on one norm, with part of each head rotated. As the paper adds for training a small decoder:
a norm on queries and keys, an RMSNorm on the block's sum, and LoRA adapters on queries, keys and values.

`phase` says what is trained: "align" the projections and the added norms, with the adapters switched off; "adapt" the
adapters too. Whatever is frozen has no gradient and no optimizer state; the frozen encoder keeps nothing for backward, the
frozen decoder keeps what the gradient of its input needs. Left out: the words around the image, the four data stages beyond
these two, relative positions of the ViT for larger images. The defaults are the paper's sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.language.llama import Rotary
from foretell.zoo.vision import vit

PHASES = ("align", "adapt")


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained product of two thin ones, which starts at zero."""

    def __init__(self, dim_in: int, dim_out: int, rank: int, on: bool) -> None:
        super().__init__()
        self.on = on
        self.base = nn.Linear(dim_in, dim_out)
        self.lora_down = nn.Linear(dim_in, rank, bias=False)
        self.lora_up = nn.Linear(rank, dim_out, bias=False)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = 16 / rank

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.lora_up(self.lora_down(x)) * self.scale if self.on else y


class PhiBlock(nn.Module):
    """Attention and MLP side by side, as in Phi-2, with the norms that TinyGPT-V adds."""

    def __init__(self, dim: int, heads: int, rotated: int, rank: int, adapt: bool) -> None:
        super().__init__()
        self.heads, self.rotated = heads, rotated
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (LoraLinear(dim, dim, rank, adapt) for _ in range(3))
        self.added_norm_q = nn.LayerNorm(dim // heads)
        self.added_norm_k = nn.LayerNorm(dim // heads)
        self.out = nn.Linear(dim, dim)
        self.mlp = vit.Mlp(dim, 4 * dim, approximate="tanh")
        self.added_norm_sum = nn.RMSNorm(dim, eps=1e-5)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.split((self.rotated, x.shape[-1] - self.rotated), dim=-1)
        return torch.cat([Rotary.rotate(turned, cos, sin), rest], dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, dim = x.shape
        y = self.norm(x)
        q, k, v = (project(y).view(b, t, self.heads, -1).transpose(1, 2) for project in (self.q, self.k, self.v))
        q, k = self.rotate(self.added_norm_q(q), cos, sin), self.rotate(self.added_norm_k(k), cos, sin)
        heads = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return x + self.added_norm_sum(self.out(heads.transpose(1, 2).reshape(b, t, dim)) + self.mlp(y))


class QLayer(nn.Module):
    """Post-norm layer of the Q-Former: self-attention of the queries, in every second layer a look at the image, MLP."""

    def __init__(self, dim: int, heads: int, seen: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn = vit.Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim) if seen else None
        self.kv = nn.Linear(seen, 2 * dim) if seen else None
        self.out = nn.Linear(dim, dim) if seen else None
        self.norm2 = nn.LayerNorm(dim) if seen else None
        self.mlp = vit.Mlp(dim, 4 * dim)
        self.norm3 = nn.LayerNorm(dim)

    def look(self, x: Tensor, image: Tensor) -> Tensor:
        assert self.q is not None
        assert self.kv is not None
        assert self.out is not None
        b, n, dim = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = self.kv(image).view(b, image.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, dim))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        if self.norm2 is not None:
            x = self.norm2(x + self.look(x, image))
        return self.norm3(x + self.mlp(x))


class Eye(nn.Module):
    """Frozen ViT and Q-Former: an image becomes a few query tokens."""

    def __init__(
        self, image: int, patch: int, vision: tuple[int, int, int, int], former: tuple[int, int, int], queries: int
    ) -> None:
        super().__init__()
        dim, depth, heads, hidden = vision
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(vit.Block(dim, heads) for _ in range(depth))
        for block in self.blocks:
            block.mlp = vit.Mlp(dim, hidden)
        self.norm = nn.LayerNorm(dim)
        width, layers, query_heads = former
        self.queries = nn.Parameter(torch.empty(1, queries, width))
        nn.init.normal_(self.queries, std=0.02)
        self.former = nn.ModuleList(QLayer(width, query_heads, dim if layer % 2 == 0 else 0) for layer in range(layers))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        image, x = self.norm(x), self.queries.expand(x.shape[0], -1, -1)
        for layer in self.former:
            x = layer(x, image)
        return x


class TinyGPTV(nn.Module):
    def __init__(
        self, eye: Eye, image: int, middle: int, vocab_size: int, context: int, decoder: tuple[int, int, int], rank: int, phase: str
    ) -> None:
        super().__init__()
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
        layers, dim, heads = decoder
        self.image, self.vocab_size, self.context = image, vocab_size, context
        self.eye = eye
        self.project1 = nn.Linear(eye.queries.shape[-1], middle)
        self.project2 = nn.Linear(middle, dim)
        self.tokens = nn.Embedding(vocab_size, dim)
        rotated = int(0.4 * dim / heads) // 2 * 2
        self.rotary = Rotary(rotated, 1e4)
        self.blocks = nn.ModuleList(PhiBlock(dim, heads, rotated, rank, phase == "adapt") for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        for name, parameter in self.named_parameters():
            adapter = ".lora_" in name
            parameter.requires_grad_(name.startswith("project") or "added_norm" in name or (adapter and phase == "adapt"))

    def forward(self, images: Tensor, input_ids: Tensor) -> Tensor:
        seen = self.project2(self.project1(self.eye(images)))
        words = self.tokens(input_ids)
        x = torch.cat([seen.to(words.dtype), words], dim=1)
        cos, sin = self.rotary(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x[:, -input_ids.shape[1] :]))


def build(
    *,
    image: int = 224,
    patch: int = 14,
    vision_dim: int = 1408,
    vision_depth: int = 39,
    vision_heads: int = 16,
    vision_hidden: int = 6144,
    former_dim: int = 768,
    former_layers: int = 12,
    former_heads: int = 12,
    queries: int = 32,
    middle: int = 4096,
    vocab_size: int = 51200,
    context: int = 256,
    layers: int = 32,
    dim: int = 2560,
    heads: int = 32,
    rank: int = 64,
    phase: str = "align",
) -> nn.Module:
    vision, former = (vision_dim, vision_depth, vision_heads, vision_hidden), (former_dim, former_layers, former_heads)
    eye = Eye(image, patch, vision, former, queries)
    return TinyGPTV(eye, image, middle, vocab_size, context, (layers, dim, heads), rank, phase)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a text."""
    tokens = torch.randint(0, model.vocab_size, (micro_batch, (seq or model.context) + 1))
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "input_ids": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(output.float().flatten(0, 1), batch["targets"].flatten())
