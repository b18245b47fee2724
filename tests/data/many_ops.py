"""Small models of one file, each with ops for which PyTorch chooses by device, by dtype or by release."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64


class Model(nn.Module):
    """A linear layer before and after `body`, so that its input has a gradient and its output a dtype of autocast's."""

    def __init__(self, body: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.before, self.body, self.after = nn.Linear(WIDTH, WIDTH), body, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.body(self.before(x)))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rms, self.layer, self.group = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH), nn.GroupNorm(4, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rms(x) + F.rms_norm(x, (WIDTH,)) + F.rms_norm(x, (WIDTH,), self.rms.weight.to(x.dtype))
        x = self.group(self.layer(x))
        return x + F.normalize(x, dim=-1) + x / x.norm(dim=-1, keepdim=True)


class Attention(nn.Module):
    """Every way in which attention is called in practice: masks, dropout, fewer key heads, no batch, an odd head size."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.odd = nn.Linear(WIDTH, 3 * 4 * 20)
        self.back = nn.Linear(4 * 20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        found = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
            F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True),
            F.scaled_dot_product_attention(q[:, :, :7], k, v).sum(2, keepdim=True).expand_as(q),
            F.scaled_dot_product_attention(q[:, :, -1:], k, v).expand_as(q),
            F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (batch, 4)),
            F.scaled_dot_product_attention(q.float(), k.float(), v.float()),
        ]
        q, k, v = (part.unflatten(-1, (4, 20)).transpose(1, 2) for part in self.odd(x).chunk(3, dim=-1))
        odd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return sum(found).transpose(1, 2).flatten(2) + self.back(odd.transpose(1, 2).flatten(2))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.deep, self.deep_norm = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16, affine=False)
        self.up, self.group = nn.ConvTranspose2d(16, 16, 2, stride=2), nn.GroupNorm(4, 16)
        self.drop, self.head = nn.Dropout2d(0.1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.norm(self.first(x))), 2)
        x = F.gelu(self.deep_norm(self.deep(x))) + x
        x = F.interpolate(self.up(x), scale_factor=2.0, mode="bilinear") + F.interpolate(x, scale_factor=4.0)
        grid = F.affine_grid(torch.zeros(x.shape[0], 2, 3, device=x.device), list(x.shape), align_corners=False)
        x = self.group(F.avg_pool2d(x, 2)) + F.grid_sample(x.float(), grid.float(), align_corners=False)[..., ::2, ::2]
        return self.head(self.drop(F.adaptive_avg_pool2d(x, 1)).flatten(1))


class Pointwise(nn.Module):
    """Ops whose gradients are written down release by release."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.gate = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.clamp(x, -1, 1) + torch.clamp(x, min=self.low) + torch.maximum(x, self.gate) + torch.minimum(x, self.low)
        y = y + torch.fmax(x, self.low) + torch.where(x > 0, x, self.gate) + x.abs() + torch.sigmoid(x) * torch.tanh(x)
        y = y + F.relu(x) + F.gelu(x) + F.silu(x) + F.softplus(x) + F.leaky_relu(x) + F.elu(x) + F.mish(x) + F.hardswish(x)
        y = y + torch.erf(x) + torch.exp(-x) + torch.log1p(x.abs()) + torch.sqrt(x.abs() + 1) + torch.rsqrt(x.square() + 1)
        return y + x.pow(3) + torch.sin(x) + torch.cos(x) + F.dropout(x, 0.1) + torch.atan2(x, self.gate + 2)


class Reductions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        sums = x.cumsum(1) + x.sum(-1, keepdim=True) + x.mean(1, keepdim=True) + x.std(-1, keepdim=True) + x.var(1, keepdim=True)
        peaks = x.amax(-1, keepdim=True) + x.max(1, keepdim=True)[0] + x.logsumexp(-1, keepdim=True) + x.median(-1, keepdim=True)[0]
        soft = x.softmax(-1) + x.log_softmax(1) + x.softmax(-1, dtype=torch.float32).to(x.dtype)
        norms = x.norm(dim=-1, keepdim=True) + torch.linalg.vector_norm(x, ord=1, dim=-1, keepdim=True)
        products = (1 + x.abs()).prod(-1, keepdim=True) + (1 + x.abs() / WIDTH).cumprod(1)
        return sums + peaks + soft + norms + products + torch.einsum("btd,bsd->bts", x, x)[..., :WIDTH].mean(-1, keepdim=True)


class Indexing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(100, WIDTH), nn.EmbeddingBag(100, WIDTH, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        places = torch.arange(length, device=x.device)
        best, where = x.topk(8, dim=-1)
        y = x.gather(-1, where).mean(-1, keepdim=True) + best.sum(-1, keepdim=True) + x.index_select(1, places) + x[:, places.flip(0)]
        y = y + torch.zeros_like(x).scatter_add(-1, where, best) + self.table(where[..., 0]) + self.bag(where.flatten(0, 1)).view_as(x)
        y = y + F.pad(x, (0, 0, 1, 0))[:, :-1] + torch.cat([x, x], -1).unfold(-1, 2, 2).sum(-1) + x.roll(1, 1) + x.flip(1)
        spread = torch.zeros(batch, WIDTH, device=x.device, dtype=x.dtype).index_add(0, where[:, 0, 0] % batch, x[:, 0])
        one = F.one_hot(where[..., 0], WIDTH).to(x.dtype)
        return y + spread[:, None] + one * x + x.sort(-1)[0] + x.masked_fill(x > 1, 0.0) + torch.stack([x, y]).mean(0)


class Losses(nn.Module):
    """Returns its own loss, of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        y = self.before(x).flatten(0, 1)
        other, classes = x.flatten(0, 1), targets.flatten()
        found = F.mse_loss(y, other) + F.l1_loss(y, other) + F.smooth_l1_loss(y, other) + F.huber_loss(y, other)
        found = found + F.cross_entropy(y, classes, label_smoothing=0.1) + F.nll_loss(y.log_softmax(-1), classes)
        found = found + F.binary_cross_entropy_with_logits(y, other.sigmoid()) + F.kl_div(y.log_softmax(-1), other.softmax(-1), reduction="batchmean")
        found = found + (1 - F.cosine_similarity(y, other, dim=-1)).mean() + F.triplet_margin_loss(y, other, other.flip(0))
        return found + F.soft_margin_loss(y, other.sign()) + torch.cdist(y[:32], other[:32]).mean()


def norms() -> nn.Module:
    return Model(Norms())


def attention() -> nn.Module:
    return Model(Attention())


def images() -> nn.Module:
    return Images()


def pointwise() -> nn.Module:
    return Model(Pointwise())


def reductions() -> nn.Module:
    return Model(Reductions())


def indexing() -> nn.Module:
    return Model(Indexing())


def losses() -> nn.Module:
    return Losses()


def encoder() -> nn.Module:
    """PyTorch's own transformer, with its attention module."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
    return Model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def batch(model: nn.Module, micro_batch: int, seq: int | None) -> dict[str, Tensor]:
    if isinstance(model, Images):
        return {"x": torch.randn(micro_batch, 3, 32, 32), "targets": torch.randint(0, 10, (micro_batch,))}
    shape = (micro_batch, seq or 128)
    return {"x": torch.randn(*shape, WIDTH), "targets": torch.randint(0, 10, shape)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    if output.dim() == 0:
        return output
    return F.cross_entropy(output.float().flatten(0, -2), batch["targets"].flatten())
