"""Models of the corpus that are sequences, attention in its variants, experts, tables and large products.

Every function returns a model and one batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model_parts import Built, Lambda, Residual, Tokens, WithLoss, feed, labelled, mlp, tokens
from torch import Tensor, nn


class _Attention(nn.Module):
    """Self-attention in the way that `kind` says, and a feed-forward layer."""

    def __init__(self, dim: int, heads: int, kind: str, seq: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.feed = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            feed(dim),
        )
        self.heads, self.kind = heads, kind
        at = torch.arange(seq)
        if kind == "window":
            apart = at.unsqueeze(1) - at
            self.register_buffer("mask", (apart >= 0) & (apart < 128))
        elif kind == "bias":
            self.bias = nn.Embedding(2 * seq - 1, heads)
            self.register_buffer("apart", at.unsqueeze(1) - at + seq - 1)
        elif kind == "random":
            self.register_buffer("drawn", torch.randn(dim // heads, 64))
        elif kind == "retention":
            gap = (at.unsqueeze(1) - at).float()
            self.register_buffer("decay", torch.where(gap >= 0, 0.97 ** gap.clamp(min=0), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if self.kind == "window":
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        elif self.kind == "bias":
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + self.bias(self.apart).permute(2, 0, 1)
            found = torch.softmax(scores.float(), -1).to(v.dtype) @ v
        elif self.kind == "random":
            q, k = (torch.exp((one @ self.drawn.to(one.dtype)).clamp(max=5)) for one in (q, k))
            found = (q @ (k.transpose(2, 3) @ v)) / (q @ k.sum(2).unsqueeze(3) + 1e-3)
        elif self.kind == "retention":
            found = ((q @ k.transpose(2, 3)) * self.decay.to(q.dtype)) @ v
            found = F.layer_norm(found, found.shape[-1:])
        else:
            q, k, v = (one.unflatten(2, (-1, 64)) for one in (q, k, v))
            found = F.scaled_dot_product_attention(q, k, v).flatten(2, 3)
        return self.feed(x + self.out(found.transpose(1, 2).reshape(x.shape)))


def _attending(kind: str, micro_batch: int, seq: int, dim: int, layers: int) -> Built:
    return WithLoss(Tokens(16_000, dim, [_Attention(dim, dim // 64, kind, seq) for _ in range(layers)])), tokens(
        16_000, micro_batch, seq
    )


def window_attention(micro_batch: int, seq: int = 512, dim: int = 512, layers: int = 4) -> Built:
    return _attending("window", micro_batch, seq, dim, layers)


def biased_attention(micro_batch: int, seq: int = 256, dim: int = 512, layers: int = 4) -> Built:
    return _attending("bias", micro_batch, seq, dim, layers)


def random_features(micro_batch: int, seq: int = 512, dim: int = 512, layers: int = 4) -> Built:
    return _attending("random", micro_batch, seq, dim, layers)


def retention(micro_batch: int, seq: int = 512, dim: int = 512, layers: int = 4) -> Built:
    return _attending("retention", micro_batch, seq, dim, layers)


def block_attention(micro_batch: int, seq: int = 512, dim: int = 512, layers: int = 4) -> Built:
    return _attending("blocks", micro_batch, seq, dim, layers)


def tiny_layers(micro_batch: int, seq: int = 64, dim: int = 64, layers: int = 24) -> Built:
    """Many layers of almost no work."""
    return _attending("bias", micro_batch, seq, dim, layers)


class _Latents(nn.Module):
    """A few latents look at a long input, then at themselves."""

    def __init__(self, dim: int, latents: int, layers: int) -> None:
        super().__init__()
        self.first, self.latents = nn.Linear(64, dim), nn.Parameter(torch.randn(latents, dim))
        self.reads = nn.ModuleList(nn.MultiheadAttention(dim, dim // 64, batch_first=True) for _ in range(layers))
        self.thinks = nn.ModuleList(nn.MultiheadAttention(dim, dim // 64, batch_first=True) for _ in range(layers))
        self.norms, self.feeds, self.head = (
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers)),
            nn.ModuleList(feed(dim) for _ in range(layers)),
            nn.Linear(dim, 50),
        )

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.first(x), self.latents.expand(x.shape[0], -1, -1)
        for n, (read, think, each) in enumerate(zip(self.reads, self.thinks, self.feeds, strict=True)):
            z = z + read(self.norms[2 * n](z), x, x, need_weights=False)[0]
            h = self.norms[2 * n + 1](z)
            z = each(z + think(h, h, h, need_weights=False)[0])
        return self.head(z.mean(1))


def cross_latents(micro_batch: int, seq: int = 2048, dim: int = 384, latents: int = 128, layers: int = 3) -> Built:
    return WithLoss(_Latents(dim, latents, layers)), labelled(torch.randn(micro_batch, seq, 64), 50)


class _Induced(nn.Module):
    def __init__(self, dim: int, points: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(points, dim))
        self.a, self.b, self.feed = (
            nn.MultiheadAttention(dim, 4, batch_first=True),
            nn.MultiheadAttention(dim, 4, batch_first=True),
            feed(dim, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.points.expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]
        return self.feed(x + self.b(x, h, h, need_weights=False)[0])


def set_transformer(micro_batch: int, seq: int = 500, dim: int = 128, layers: int = 4) -> Built:
    net = nn.Sequential(
        nn.Linear(3, dim), *(_Induced(dim, 32) for _ in range(layers)), Lambda(lambda x: x.mean(1)), nn.Linear(dim, 40)
    )
    return WithLoss(net), labelled(torch.randn(micro_batch, seq, 3), 40)


class _Columns(nn.Module):
    """Every column of a table is a token."""

    def __init__(self, columns: int, dim: int, layers: int) -> None:
        super().__init__()
        self.weight, self.bias, self.kinds = (
            nn.Parameter(torch.randn(columns, dim)),
            nn.Parameter(torch.zeros(columns, dim)),
            nn.Embedding(1000, dim),
        )
        layer = nn.TransformerEncoderLayer(dim, 8, 2 * dim, 0.1, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(dim, 2)

    def forward(self, x: Tensor, kind: Tensor, y: Tensor) -> Tensor:
        every = torch.cat([x.unsqueeze(2) * self.weight + self.bias, self.kinds(kind)], 1)
        return F.cross_entropy(self.head(self.body(every)[:, 0]).float(), y)


def column_transformer(micro_batch: int, columns: int = 24, dim: int = 192, layers: int = 3) -> Built:
    return _Columns(columns, dim, layers), {
        **labelled(torch.randn(micro_batch, columns), 2),
        "kind": torch.randint(1000, (micro_batch, 10)),
    }


class _Sparsemax(nn.Module):
    """Steps over a table, each with a mask from sorted scores, as in TabNet."""

    def __init__(self, columns: int, wide: int, steps: int) -> None:
        super().__init__()
        self.masks = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, columns), nn.BatchNorm1d(columns)) for _ in range(steps)
        )
        self.steps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(columns, 2 * wide), nn.BatchNorm1d(2 * wide), nn.GLU(), nn.Linear(wide, 2 * wide), nn.GLU()
            )
            for _ in range(steps)
        )
        self.first, self.head = nn.Linear(columns, wide), nn.Linear(wide, 7)

    def forward(self, x: Tensor) -> Tensor:
        state, total, free = self.first(x), 0.0, torch.ones_like(x)
        for mask, step in zip(self.masks, self.steps, strict=True):
            z = mask(state).float() * free
            ordered = z.sort(dim=1, descending=True)[0]
            count = torch.arange(1, z.shape[1] + 1, device=z.device)
            inside = 1 + count * ordered > ordered.cumsum(1)
            size = inside.sum(1, keepdim=True)
            limit = ((ordered * inside).sum(1, keepdim=True) - 1) / size
            share = F.relu(z - limit)
            free = free * (1.3 - share)
            state = step(share * x)
            total = total + F.relu(state)
        return self.head(total)


def sparse_table(micro_batch: int, columns: int = 128, wide: int = 64, steps: int = 5) -> Built:
    return WithLoss(_Sparsemax(columns, wide, steps)), labelled(torch.randn(micro_batch, columns), 7)


class _SoftExperts(nn.Module):
    """Slots that are mixtures of all tokens: experts without a choice."""

    def __init__(self, dim: int, experts: int, slots: int) -> None:
        super().__init__()
        self.norm, self.route = nn.LayerNorm(dim), nn.Linear(dim, experts * slots)
        self.up, self.down, self.experts = (
            nn.Parameter(0.02 * torch.randn(experts, dim, 4 * dim)),
            nn.Parameter(0.02 * torch.randn(experts, 4 * dim, dim)),
            experts,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.route(h)
        slots = torch.einsum("bts,btd->bsd", scores.softmax(1).to(h.dtype), h).unflatten(1, (self.experts, -1))
        done = torch.einsum(
            "besf,efd->besd", F.gelu(torch.einsum("besd,edf->besf", slots, self.up)), self.down
        ).flatten(1, 2)
        return x + torch.einsum("bts,bsd->btd", scores.softmax(2).to(done.dtype), done)


def soft_experts(micro_batch: int, seq: int = 256, dim: int = 384, layers: int = 3) -> Built:
    blocks: list[nn.Module] = [
        each for _ in range(layers) for each in (_Attention(dim, dim // 64, "window", seq), _SoftExperts(dim, 16, 16))
    ]
    return WithLoss(Tokens(16_000, dim, blocks)), tokens(16_000, micro_batch, seq)


class _Capacity(nn.Module):
    """Tokens are sorted by expert and put into bins of one size; what is too much is left out."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm, self.route = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.up, self.down, self.experts = (
            nn.Parameter(0.02 * torch.randn(experts, dim, 2 * dim)),
            nn.Parameter(0.02 * torch.randn(experts, 2 * dim, dim)),
            experts,
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = torch.softmax(self.route(flat).float(), -1).topk(2, dim=-1)
        one = F.one_hot(chosen.flatten(), self.experts)
        place = ((one.cumsum(0) - 1) * one).sum(1)
        room = 5 * flat.shape[0] // (2 * self.experts)
        where = torch.where(place < room, chosen.flatten() * room + place, self.experts * room)
        bins = torch.zeros(self.experts * room + 1, flat.shape[1], device=x.device, dtype=flat.dtype).index_copy(
            0, where, flat.repeat_interleave(2, 0)
        )
        done = torch.bmm(
            F.silu(torch.bmm(bins[:-1].view(self.experts, room, -1), self.up.to(bins.dtype))), self.down.to(bins.dtype)
        ).flatten(0, 1)
        done = torch.cat([done, torch.zeros_like(done[:1])])[where] * weight.flatten().unsqueeze(1).to(done.dtype)
        return x + done.view(-1, 2, x.shape[-1]).sum(1).view_as(x).to(x.dtype)


def capacity_experts(micro_batch: int, seq: int = 256, dim: int = 384, layers: int = 3) -> Built:
    blocks: list[nn.Module] = [
        each for _ in range(layers) for each in (_Attention(dim, dim // 64, "window", seq), _Capacity(dim, 8))
    ]
    return WithLoss(Tokens(16_000, dim, blocks)), tokens(16_000, micro_batch, seq)


# ---------------------------------------------------------------------- recurrent layers, mixers, large products


class _Words(nn.Module):
    def __init__(self, dim: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(vocab, dim),
            nn.LSTM(dim, dim, layers, batch_first=True, dropout=0.2),
            nn.Linear(dim, vocab),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def word_lstm(micro_batch: int, seq: int = 64, dim: int = 650, layers: int = 2, vocab: int = 33_000) -> Built:
    return WithLoss(_Words(dim, layers, vocab)), tokens(vocab, micro_batch, seq)


class _Speech(nn.Module):
    """Spectrograms through convolutions and GRUs to letters."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 32, (11, 11), (2, 2), 5),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 11), (2, 1), 5),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20),
        )
        self.gru, self.head = nn.GRU(32 * 20, wide, 3, bidirectional=True, batch_first=True), nn.Linear(2 * wide, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convs(x).flatten(1, 2).transpose(1, 2)
        return self.head(self.gru(h)[0])


def speech_gru(micro_batch: int, seq: int = 400, wide: int = 512) -> Built:
    return WithLoss(_Speech(wide)), {
        "x": torch.randn(micro_batch, 1, 80, seq),
        "y": torch.randint(32, (micro_batch, seq // 2)),
    }


def text_cnn(micro_batch: int, seq: int = 200, dim: int = 300, wide: int = 256) -> Built:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50_000, dim), nn.Linear(5 * wide, 20)
            self.convs = nn.ModuleList(nn.Conv1d(dim, wide, k) for k in (2, 3, 4, 5, 7))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x).transpose(1, 2)
            return self.head(
                F.dropout(torch.cat([F.relu(conv(h)).amax(2) for conv in self.convs], 1), 0.5, self.training)
            )

    return WithLoss(Net()), labelled(torch.randint(50_000, (micro_batch, seq)), 20)


def time_mixer(micro_batch: int, seq: int = 512, channels: int = 64, layers: int = 6) -> Built:
    def block() -> nn.Module:
        over = Residual(
            nn.LayerNorm(channels),
            Lambda(lambda x: x.transpose(1, 2)),
            nn.Linear(seq, seq),
            nn.ReLU(),
            nn.Dropout(0.1),
            Lambda(lambda x: x.transpose(1, 2)),
        )
        return nn.Sequential(
            over,
            Residual(
                nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.ReLU(), nn.Linear(4 * channels, channels)
            ),
        )

    net = nn.Sequential(*(block() for _ in range(layers)), Lambda(lambda x: x.transpose(1, 2)), nn.Linear(seq, 96))
    return WithLoss(net, "numbers"), {
        "x": torch.randn(micro_batch, seq, channels),
        "y": torch.randn(micro_batch, channels, 96),
    }


class _Basis(nn.Module):
    def __init__(self, seq: int, wide: int, blocks: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(seq, wide, wide, wide, seq + 24) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, :24])
        for net in self.nets:
            found = net(x)
            x, total = x - found[:, 24:], total + found[:, :24]
        return total


def basis_forecast(micro_batch: int, seq: int = 168, wide: int = 512, blocks: int = 12) -> Built:
    """N-BEATS."""
    return WithLoss(_Basis(seq, wide, blocks), "numbers"), {
        "x": torch.randn(micro_batch, seq),
        "y": torch.randn(micro_batch, 24),
    }


def wide_products(micro_batch: int, width: int = 8192, layers: int = 3) -> Built:
    """Square products, as large as power allows."""
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers)), nn.Linear(width, 1000)
    )
    return WithLoss(net), labelled(torch.randn(micro_batch, width), 1000)


class _Gated(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = (
            nn.RMSNorm(dim),
            nn.Linear(dim, inner, bias=False),
            nn.Linear(dim, inner, bias=False),
            nn.Linear(inner, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.c(F.silu(self.a(h)) * self.b(h))


def gated_products(micro_batch: int, seq: int = 2048, dim: int = 4096, layers: int = 3) -> Built:
    net = nn.Sequential(*(_Gated(dim, 11_008) for _ in range(layers)), nn.Linear(dim, 32))
    return WithLoss(net), {"x": torch.randn(micro_batch, seq, dim), "y": torch.randint(32, (micro_batch, seq))}


class _Monarch(nn.Module):
    def __init__(self, blocks: int, size: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(0.05 * torch.randn(blocks, size, size)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        blocks, size = self.a.shape[0], self.a.shape[1]
        h = torch.einsum("nbi,bij->nbj", x.view(-1, blocks, size), self.a)
        h = torch.einsum("nbi,bij->nbj", h.transpose(1, 2).reshape(-1, blocks, size), self.b)
        return F.gelu(h.flatten(1))


def block_products(micro_batch: int, blocks: int = 32, size: int = 64, layers: int = 6) -> Built:
    net = nn.Sequential(
        *(Residual(nn.LayerNorm(blocks * size), _Monarch(blocks, size)) for _ in range(layers)),
        nn.Linear(blocks * size, 100),
    )
    return WithLoss(net), labelled(torch.randn(micro_batch, blocks * size), 100)


class _Hyper(nn.Module):
    """A network that writes the weights of another for every sample."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.net, self.wide = mlp(64, 256, 256, 32 * wide + wide * wide + wide * 10), wide

    def forward(self, x: Tensor, task: Tensor, y: Tensor) -> Tensor:
        a, b, c = self.net(task).split((32 * self.wide, self.wide**2, 10 * self.wide), 1)
        h = F.relu(torch.bmm(x, a.view(-1, 32, self.wide).to(x.dtype)))
        h = F.relu(torch.bmm(h, b.view(-1, self.wide, self.wide).to(h.dtype)))
        return F.cross_entropy(torch.bmm(h, c.view(-1, self.wide, 10).to(h.dtype)).float().flatten(0, 1), y.flatten())


def hyper_network(micro_batch: int, seq: int = 64, wide: int = 64) -> Built:
    return _Hyper(wide), {
        "x": torch.randn(micro_batch, seq, 32),
        "task": torch.randn(micro_batch, 64),
        "y": torch.randint(10, (micro_batch, seq)),
    }
