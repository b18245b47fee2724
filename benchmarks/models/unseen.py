"""Plain PyTorch models of families that are in no stored measurement: what benchmarks/unseen.py draws besides libraries' models.

Every function returns a model and one batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Any]]


class WithLoss(nn.Module):
    """A network and what its output is compared with."""

    def __init__(self, net: nn.Module, kind: str) -> None:
        super().__init__()
        self.net, self.kind = net, kind

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.net(x).float()
        if self.kind == "classes":
            return F.cross_entropy(found, y) if found.dim() == 2 else F.cross_entropy(found.flatten(0, 1), y.flatten())
        return F.mse_loss(found, y) if self.kind == "numbers" else F.binary_cross_entropy_with_logits(found.flatten(), y)


def _tokens(vocab: int, micro_batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randint(vocab, (micro_batch, seq)), "y": torch.randint(vocab, (micro_batch, seq))}


# ---------------------------------------------------------------------- points, sound, pictures


class _PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.turn = nn.Conv1d(3, 64, 1), nn.Linear(256, 64 * 64)
        self.look = nn.Sequential(nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, 256, 1), nn.BatchNorm1d(256), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, 1024, 1), nn.BatchNorm1d(1024), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 40))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        turn = self.turn(self.look(x).amax(2)).view(-1, 64, 64)
        return self.head(self.deep(torch.bmm(turn, x)).amax(2))


def pointnet(micro_batch: int, seq: int = 1024) -> Built:
    return WithLoss(_PointNet(), "classes"), {"x": torch.randn(micro_batch, 3, seq), "y": torch.randint(40, (micro_batch,))}


class _WaveNet(nn.Module):
    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, channels)
        self.gates = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2 ** (n % 9)) for n in range(layers))
        self.outs = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, 256, 1), nn.ReLU(), nn.Conv1d(256, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        total = torch.zeros_like(x)
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            step = out(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + step, total + step
        return self.head(total).transpose(1, 2)


def wavenet(micro_batch: int, seq: int = 4096, channels: int = 64, layers: int = 18) -> Built:
    return WithLoss(_WaveNet(channels, layers), "classes"), _tokens(256, micro_batch, seq)


def critic(micro_batch: int, image: int = 64) -> Built:
    """The discriminator of a convolutional GAN."""
    layers: list[nn.Module] = []
    wide, side = 3, image
    while side > 4:
        out = min(1024, 64 if wide == 3 else 2 * wide)
        layers += [nn.Conv2d(wide, out, 4, 2, 1, bias=False), nn.BatchNorm2d(out), nn.LeakyReLU(0.2, inplace=True)]
        wide, side = out, side // 2
    net = nn.Sequential(*layers, nn.Conv2d(wide, 1, side))
    return WithLoss(net, "yes or no"), {"x": torch.randn(micro_batch, 3, image, image), "y": torch.rand(micro_batch)}


class _Vae(nn.Module):
    def __init__(self, side: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.SiLU()) for a, b in ((3, 64), (64, 128), (128, 256)))
        )
        self.side, flat = side // 8, 256 * (side // 8) ** 2
        self.code, self.back = nn.Linear(flat, 2 * 128), nn.Linear(128, flat)
        ups = ((256, 128), (128, 64), (64, 32))
        self.decode = nn.Sequential(
            *(nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.GroupNorm(8, b), nn.SiLU()) for a, b in ups), nn.Conv2d(32, 3, 3, 1, 1)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, spread = self.code(self.encode(x).flatten(1)).float().chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        found = self.decode(self.back(drawn).view(-1, 256, self.side, self.side))
        return F.mse_loss(found.float(), y) - 5e-4 * (1 + spread - mean**2 - spread.exp()).mean()


def conv_vae(micro_batch: int, image: int = 64) -> Built:
    given = torch.rand(micro_batch, 3, image, image)
    return _Vae(image), {"x": given, "y": torch.rand(micro_batch, 3, image, image)}


def video_net(micro_batch: int, image: int = 112) -> Built:
    """Convolutions over space and time, as in C3D."""
    layers: list[nn.Module] = []
    for a, b, pool in ((3, 64, (1, 2, 2)), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(inplace=True), nn.MaxPool3d(pool)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 101))
    return WithLoss(net, "classes"), {"x": torch.randn(micro_batch, 3, 16, image, image), "y": torch.randint(101, (micro_batch,))}


class _Edsr(nn.Module):
    def __init__(self, blocks: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)) for _ in range(blocks)
        )
        self.up = nn.Sequential(nn.Conv2d(channels, 4 * channels, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return self.up(x)


def edsr(micro_batch: int, image: int = 48, blocks: int = 8, channels: int = 64) -> Built:
    """Super-resolution without normalisation."""
    target = torch.rand(micro_batch, 3, 2 * image, 2 * image)
    return WithLoss(_Edsr(blocks, channels), "numbers"), {"x": torch.rand(micro_batch, 3, image, image), "y": target}


# ---------------------------------------------------------------------- tables and numbers


class _Click(nn.Module):
    """Embeddings of many fields, their products, and a tower of linear layers."""

    def __init__(self, dim: int, rows: int, fields: int, pairs: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(fields))
        self.dense = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, dim), nn.ReLU())
        self.pairs = pairs
        self.register_buffer("where", torch.triu_indices(fields + 1, fields + 1, 1))
        wide = dim + fields * (fields + 1) // 2 if pairs else dim * (fields + 1)
        self.tower = nn.Sequential(nn.Linear(wide, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        dense = self.dense(x)
        every = torch.stack([dense, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1)
        if self.pairs:
            products = torch.bmm(every, every.transpose(1, 2))
            score = self.tower(torch.cat([dense, products[:, self.where[0], self.where[1]]], 1))
        else:
            both = 0.5 * (every.sum(1) ** 2 - (every**2).sum(1)).sum(1, keepdim=True)
            score = self.tower(every.flatten(1)) + both
        return F.binary_cross_entropy_with_logits(score.flatten().float(), y)


def click_model(micro_batch: int, dim: int = 64, rows: int = 50_000, fields: int = 26, pairs: bool = True) -> Built:
    ids = torch.randint(rows, (micro_batch, fields))
    return _Click(dim, rows, fields, pairs), {"x": torch.randn(micro_batch, 13), "ids": ids, "y": torch.rand(micro_batch)}


def factorisation(micro_batch: int, dim: int = 48) -> Built:
    return click_model(micro_batch, dim, rows=30_000, fields=20, pairs=False)


class _Spline(nn.Module):
    """A layer whose every edge is a sum of Gaussian bumps, as in Kolmogorov-Arnold networks."""

    def __init__(self, inner: int, outer: int, bumps: int = 8) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, bumps))
        self.norm, self.base, self.bumps = nn.LayerNorm(inner), nn.Linear(inner, outer), nn.Linear(inner * bumps, outer)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.exp(-(((self.norm(x).unsqueeze(-1) - self.grid) * 2) ** 2))
        return self.base(F.silu(x)) + self.bumps(near.flatten(1))


def spline_net(micro_batch: int, width: int = 512) -> Built:
    net = nn.Sequential(_Spline(256, width), _Spline(width, width), _Spline(width, width), _Spline(width, 10))
    return WithLoss(net, "classes"), {"x": torch.randn(micro_batch, 256), "y": torch.randint(10, (micro_batch,))}


class _Sine(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30.0 * self.linear(x))


def siren(micro_batch: int, width: int = 512, layers: int = 5) -> Built:
    """A field of coordinates with sine activations."""
    net = nn.Sequential(_Sine(3, width), *(_Sine(width, width) for _ in range(layers)), nn.Linear(width, 4))
    return WithLoss(net, "numbers"), {"x": torch.rand(micro_batch, 3), "y": torch.rand(micro_batch, 4)}


class _Flow(nn.Module):
    """Affine coupling layers, as in RealNVP."""

    def __init__(self, dim: int, width: int, layers: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(dim // 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, dim))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], device=x.device)
        a, b = x.chunk(2, 1)
        for net in self.nets:
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            a, b, total = b * scale.exp() + shift, a, total + scale.sum(1)
        return (0.5 * (a**2 + b**2).sum(1) - total).mean()


def flow(micro_batch: int, dim: int = 128, width: int = 512, layers: int = 8) -> Built:
    return _Flow(dim, width, layers), {"x": torch.randn(micro_batch, dim)}


class _Highway(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(784, width), nn.Linear(width, 100)
        self.work, self.gate = (nn.ModuleList(nn.Linear(width, width) for _ in range(layers)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for work, gate in zip(self.work, self.gate, strict=True):
            share = torch.sigmoid(gate(x))
            x = torch.lerp(x, F.relu(work(x)), share)
        return self.head(x)


def highway(micro_batch: int, width: int = 1536, layers: int = 6) -> Built:
    return WithLoss(_Highway(width, layers), "classes"), {"x": torch.randn(micro_batch, 784), "y": torch.randint(100, (micro_batch,))}


# ---------------------------------------------------------------------- sequences


class _Causal(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.a, self.b = (nn.utils.parametrizations.weight_norm(nn.Conv1d(channels, channels, 3, dilation=dilation)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu(self.a(F.pad(x, (self.reach, 0))))
        return F.relu(x + F.dropout(F.relu(self.b(F.pad(found, (self.reach, 0)))), 0.1, self.training))


def tcn(micro_batch: int, seq: int = 256, channels: int = 128, layers: int = 8) -> Built:
    """Dilated causal convolutions with weight normalisation."""
    net = nn.Sequential(nn.Conv1d(32, channels, 1), *(_Causal(channels, 2**n) for n in range(layers)), nn.Conv1d(channels, 32, 1))
    return WithLoss(net, "numbers"), {"x": torch.randn(micro_batch, 32, seq), "y": torch.randn(micro_batch, 32, seq)}


class _Tagger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(20_000, 256), nn.GRU(256, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(x))[0])


def gru_tagger(micro_batch: int, seq: int = 64, width: int = 512) -> Built:
    ids = torch.randint(20_000, (micro_batch, seq))
    return WithLoss(_Tagger(width), "classes"), {"x": ids, "y": torch.randint(64, (micro_batch, seq))}


class _TorchEncoder(nn.Module):
    def __init__(self, layers: int, dim: int, seq: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(16_000, dim), nn.Parameter(torch.zeros(seq, dim))
        one = nn.TransformerEncoderLayer(dim, dim // 64, 4 * dim, 0.1, "relu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(one, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, 16_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.place))


def torch_encoder(micro_batch: int, seq: int = 128, layers: int = 4, dim: int = 512) -> Built:
    """torch.nn.TransformerEncoder as it comes."""
    return WithLoss(_TorchEncoder(layers, dim, seq), "classes"), _tokens(16_000, micro_batch, seq)


class _LongConv(nn.Module):
    def __init__(self, dim: int, seq: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.filter = nn.Parameter(torch.randn(dim, seq) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.into(self.norm(x)).transpose(1, 2).chunk(3, 1)
        n = 2 * a.shape[-1]
        mixed = torch.fft.irfft(torch.fft.rfft(a * b, n=n) * torch.fft.rfft(self.filter, n=n), n=n)[..., : a.shape[-1]]
        return x + self.out((mixed * c).transpose(1, 2))


class _Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, vocab: int, dim: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(vocab, dim), nn.ModuleList(blocks), nn.Linear(dim, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def long_conv(micro_batch: int, seq: int = 1024, dim: int = 256, layers: int = 6) -> Built:
    """Gated convolutions as long as the sequence, by FFT."""
    net = _Stack(8000, dim, [_LongConv(dim, seq) for _ in range(layers)])
    return WithLoss(net, "classes"), _tokens(8000, micro_batch, seq)


class _LinearAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = k.transpose(2, 3) @ v
        scale = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        x = x + self.out(((q @ context) / scale).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(x)


def linear_attention(micro_batch: int, seq: int = 512, layers: int = 4, dim: int = 384) -> Built:
    net = _Stack(16_000, dim, [_LinearAttention(dim, dim // 64) for _ in range(layers)])
    return WithLoss(net, "classes"), _tokens(16_000, micro_batch, seq)


class _Memory(nn.Module):
    """Facts are read several times, each time with what was read before."""

    def __init__(self, dim: int, hops: int) -> None:
        super().__init__()
        self.question = nn.Embedding(30_000, dim)
        self.keys, self.values = (nn.ModuleList(nn.Embedding(30_000, dim) for _ in range(hops)) for _ in range(2))
        self.head = nn.Linear(dim, 1000)

    def forward(self, x: Tensor, facts: Tensor, y: Tensor) -> Tensor:
        state = self.question(x).sum(1)
        for key, value in zip(self.keys, self.values, strict=True):
            share = torch.softmax((key(facts).sum(2) * state.unsqueeze(1)).sum(-1), 1)
            state = state + (share.unsqueeze(-1) * value(facts).sum(2)).sum(1)
        return F.cross_entropy(self.head(state).float(), y)


def memory_network(micro_batch: int, seq: int = 32, dim: int = 256, hops: int = 3) -> Built:
    facts = torch.randint(30_000, (micro_batch, 50, seq // 4))
    return _Memory(dim, hops), {"x": torch.randint(30_000, (micro_batch, seq)), "facts": facts, "y": torch.randint(1000, (micro_batch,))}


# ---------------------------------------------------------------------- graphs and experts


class _GraphAttention(nn.Module):
    def __init__(self, inner: int, outer: int, heads: int) -> None:
        super().__init__()
        self.heads, self.outer = heads, outer
        self.linear = nn.Linear(inner, heads * outer, bias=False)
        self.toward, self.away = (nn.Parameter(torch.randn(heads, outer) * 0.02) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.linear(x).view(-1, self.heads, self.outer)
        source, target = edges
        score = F.leaky_relu((h * self.toward).sum(-1)[target] + (h * self.away).sum(-1)[source], 0.2)
        weight = (score - score.max()).exp()
        total = torch.zeros(x.shape[0], self.heads, device=x.device, dtype=weight.dtype).index_add(0, target, weight)
        share = weight / (total[target] + 1e-6)
        found = torch.zeros_like(h).index_add(0, target, h[source] * share.unsqueeze(-1))
        return found.flatten(1)


class _GraphNet(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = _GraphAttention(128, hidden, 8), _GraphAttention(8 * hidden, hidden, 8)
        self.head = nn.Linear(8 * hidden, 40)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        x = F.elu(self.first(x, edges))
        return F.cross_entropy(self.head(F.elu(self.second(x, edges))), y)


def attention_graph(micro_batch: int, nodes: int = 20_000, hidden: int = 32) -> Built:
    """Graph attention by scattered sums, one graph a step."""
    edges = torch.randint(nodes, (2, 10 * nodes * micro_batch))
    return _GraphNet(hidden), {"x": torch.randn(nodes, 128), "edges": edges, "y": torch.randint(40, (nodes,))}


class _ExpertChoice(nn.Module):
    """Every expert takes the tokens it scores highest, so that sizes do not depend on data."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.up, self.down = (nn.Parameter(torch.randn(experts, a, b) * 0.02) for a, b in ((dim, 4 * dim), (4 * dim, dim)))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        scores = torch.softmax(self.router(flat).float(), -1).t()
        weight, chosen = scores.topk(2 * flat.shape[0] // scores.shape[0], dim=1)
        taken = flat[chosen.flatten()].view(*chosen.shape, -1)
        done = torch.bmm(F.gelu(torch.bmm(taken, self.up)), self.down) * weight.unsqueeze(-1).to(flat.dtype)
        mixed = torch.zeros_like(flat, dtype=done.dtype).index_add(0, chosen.flatten(), done.flatten(0, 1))
        return x + mixed.view_as(x)


def expert_choice(micro_batch: int, seq: int = 256, dim: int = 384, layers: int = 4) -> Built:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [_LinearAttention(dim, dim // 64), _ExpertChoice(dim, 8)]
    return WithLoss(_Stack(16_000, dim, blocks), "classes"), _tokens(16_000, micro_batch, seq)


class _TokenChoice(nn.Module):
    """Every token goes to its best expert: how many an expert has is known by the data alone."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = torch.softmax(self.router(flat).float(), -1).max(-1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (where,) = (chosen == number).nonzero(as_tuple=True)
            done = expert(flat[where]) * weight[where].unsqueeze(-1)
            found = found.index_add(0, where, done.to(found.dtype))
        return x + found.view_as(x)


def token_choice(micro_batch: int, seq: int = 256, dim: int = 384, layers: int = 4) -> Built:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [_LinearAttention(dim, dim // 64), _TokenChoice(dim, 4)]
    return WithLoss(_Stack(16_000, dim, blocks), "classes"), _tokens(16_000, micro_batch, seq)


class _MaskedHead(nn.Module):
    """A stack whose head sees the masked tokens alone."""

    def __init__(self, dim: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.body, self.head = _Stack(16_000, dim, blocks), nn.Linear(dim, 16_000)
        self.body.head = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor, mask: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)[mask]).float(), y[mask])


def masked_head(micro_batch: int, seq: int = 256, dim: int = 384, layers: int = 4) -> Built:
    mask = torch.rand(micro_batch, seq) < 0.15
    return _MaskedHead(dim, [_LinearAttention(dim, dim // 64) for _ in range(layers)]), {**_tokens(16_000, micro_batch, seq), "mask": mask}
