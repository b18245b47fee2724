"""PYRA (Xiong et al., 2024, "PYRA: Parallel Yielding Re-Activation for Training-Inference Efficient Task Adaptation").

Kept: a frozen ViT is adapted to a task while it is made cheaper: in every block `merge` tokens are merged into others that are
like them (bipartite soft matching on the attention keys, as in ToMe: every second token looks for its best partner among
the rest, the `merge` best pairs merge, weighted by how many patches a token stands for). Before a pair merges, its source
is re-activated: two small learned vectors of the block yield, in parallel, a weight for every pair and one for every
channel, and their product modulates the source. Trained are these vectors, low-rank adapters on the frozen projections of
queries, keys and values, and the head.

Tokens become fewer from block to block, by `merge` or by half of those there are. The class token never merges. Left out:
distillation variants and other adapters; dropout. The defaults are ViT-B/16 with the paper's high compression, 16 a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision.vit import Mlp


class AdaptedAttention(nn.Module):
    """Self-attention over tokens of unequal weight, with low-rank adapters; also gives the keys, averaged over heads."""

    def __init__(self, dim: int, heads: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.adapter_down = nn.Linear(dim, rank, bias=False)
        self.adapter_up = nn.Linear(rank, 3 * dim, bias=False)
        nn.init.zeros_(self.adapter_up.weight)

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        b, n, dim = x.shape
        qkv = self.qkv(x) + self.adapter_up(self.adapter_down(x))
        q, k, v = qkv.view(b, n, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = sizes.log().transpose(1, 2)[:, None].expand(b, self.heads, n, n)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.proj(y.transpose(1, 2).reshape(b, n, dim)), k.mean(dim=1)


class ReActivation(nn.Module):
    """Modulates the sources of `merge` pairs, (b, merge, dim), by what pair and channel yield; at first it changes nothing."""

    def __init__(self, dim: int, merge: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.of_pair = nn.Parameter(torch.empty(dim, 1))
        self.of_channel = nn.Parameter(torch.zeros(1, merge))
        nn.init.normal_(self.of_pair, std=0.02)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        both = self.norm(source + target)
        pair, channel = both @ self.of_pair, self.of_channel @ both
        return source * (2.0 * torch.sigmoid(pair * channel))


def pairs(keys: Tensor, merge: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which even tokens merge (b, merge, 1), which stay (b, rest, 1), in their order, and with which odd ones the first merge."""
    with torch.no_grad():
        keys = F.normalize(keys, dim=-1)
        likeness = keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)
        likeness[:, 0] = -torch.inf  # the class token
        best, partner = likeness.max(dim=-1)
        order = best.argsort(dim=-1, descending=True)[..., None]
        source, rest = order[:, :merge], order[:, merge:].sort(dim=1).values
        return source, rest, partner[..., None].gather(1, source)


class Block(nn.Module):
    """A frozen Transformer block with trained adapters; fewer tokens leave it than enter."""

    def __init__(self, dim: int, heads: int, rank: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = AdaptedAttention(dim, heads, rank)
        self.reactivate = ReActivation(dim, merge)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        y, keys = self.attn(self.norm1(x), sizes)
        x, sizes = self._merged(x + y, sizes, *pairs(keys, self.merge))
        return x + self.mlp(self.norm2(x)), sizes

    def _merged(self, x: Tensor, sizes: Tensor, source: Tensor, rest: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        even, odd, dim = x[:, ::2], x[:, 1::2], x.shape[2]
        wide = target.expand(-1, -1, dim)
        from_ = self.reactivate(even.gather(1, source.expand(-1, -1, dim)), odd.gather(1, wide))
        weight = sizes[:, ::2].gather(1, source)
        total = sizes[:, 1::2].scatter_add(1, target, weight)
        joined = (odd * sizes[:, 1::2]).scatter_add(1, wide, (from_ * weight).to(x.dtype)) / total
        kept = even.gather(1, rest.expand(-1, -1, dim))
        return torch.cat([kept, joined], dim=1), torch.cat([sizes[:, ::2].gather(1, rest), total], dim=1)


class PYRA(nn.Module):
    def __init__(
        self, patch: int, dim: int, depth: int, heads: int, merge: int, rank: int, classes: int, image: int
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image side {image} is not divisible by the patch side {patch}")
        self.patches = (image // patch) ** 2
        tokens, merges = self.patches + 1, []
        for _ in range(depth):
            merges.append(min(merge, (tokens - 1) // 2))
            tokens -= merges[-1]
        self.image, self.classes = image, classes
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, self.patches + 1, dim))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, rank, fewer) for fewer in merges)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in ("adapter_", "reactivate", "head")))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        sizes = torch.ones_like(x[..., :1])
        for block in self.blocks:
            x, sizes = block(x, sizes)
        return self.head(self.norm(x[:, 0]))


def build(
    *, patch: int = 16, dim: int = 768, depth: int = 12, heads: int = 12, merge: int = 16, rank: int = 8, classes: int = 100,
    image: int = 224,
) -> nn.Module:  # fmt: skip
    return PYRA(patch, dim, depth, heads, merge, rank, classes, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
