"""Models of the corpus that are mostly convolutions: pictures, volumes, videos, sound; and pairs of networks in one loss.

Every function returns a model and one batch.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from model_parts import Built, Residual, WithLoss, conv, labelled, mlp, pictures
from torch import Tensor, nn


class _Volumes(nn.Module):
    """A U-Net over volumes."""

    def __init__(self, base: int, depth: int) -> None:
        super().__init__()
        wide = [base * 2**n for n in range(depth)]
        self.downs = nn.ModuleList(self.block(a, b) for a, b in zip([1, *wide], wide, strict=False))
        self.ups = nn.ModuleList(nn.ConvTranspose3d(2 * a, a, 2, 2) for a in reversed(wide[:-1]))
        self.joins = nn.ModuleList(self.block(2 * a, a) for a in reversed(wide[:-1]))
        self.head = nn.Conv3d(base, 4, 1)

    @staticmethod
    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01), nn.Conv3d(b, b, 3, padding=1),
            nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for n, down in enumerate(self.downs):
            x = down(x if n == 0 else F.max_pool3d(x, 2))
            kept.append(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(kept[:-1]), strict=True):
            x = join(torch.cat([up(x), skip], 1))
        found = self.head(x).float()
        share = found.softmax(1)[:, 1]
        dice = 1 - 2 * (share * (y == 1)).sum() / (share.sum() + (y == 1).sum() + 1)
        return F.cross_entropy(found, y) + dice


def volume_unet(micro_batch: int, image: int = 64, base: int = 24, depth: int = 4) -> Built:
    return _Volumes(base, depth), {
        "x": torch.rand(micro_batch, 1, image, image, image),
        "y": torch.randint(4, (micro_batch, image, image, image)),
    }


class _Heart(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(inner, outer, 9, stride, 4, bias=False),
            nn.BatchNorm1d(outer),
            nn.ReLU(),
            nn.Conv1d(outer, outer, 9, 1, 4, bias=False),
            nn.BatchNorm1d(outer),
        )
        self.skip = nn.Conv1d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def heart_resnet(micro_batch: int, seq: int = 4096, base: int = 64) -> Built:
    """A residual network over twelve-lead signals."""
    net = nn.Sequential(
        _Heart(12, base, 2),
        *(_Heart(base * 2**n, base * 2 ** (n + 1), 2) for n in range(3)),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8 * base, 20),
    )
    return WithLoss(net), labelled(torch.randn(micro_batch, 12, seq), 20)


class _Apart(nn.Module):
    """Voices taken apart by depthwise convolutions of growing reach."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.into, self.out = (
            nn.Conv1d(1, wide, 16, 8, 4, bias=False),
            nn.ConvTranspose1d(wide, 1, 16, 8, 4, bias=False),
        )
        self.blocks = nn.Sequential(*(Residual(
            nn.Conv1d(wide, 2 * wide, 1), nn.PReLU(), nn.GroupNorm(1, 2 * wide),
            nn.Conv1d(2 * wide, 2 * wide, 3, padding=2 ** (n % 8), dilation=2 ** (n % 8), groups=2 * wide),
            nn.PReLU(), nn.GroupNorm(1, 2 * wide), nn.Conv1d(2 * wide, wide, 1)) for n in range(layers)))  # fmt: skip
        self.masks = nn.Conv1d(wide, 2 * wide, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.into(x)
        masks = torch.sigmoid(self.masks(self.blocks(h))).unflatten(1, (2, -1))
        found = torch.stack([self.out(h * masks[:, n]).float() for n in range(2)], 1).squeeze(2)
        scale = (found * y).sum(-1, keepdim=True) / (y * y).sum(-1, keepdim=True)
        return -10 * torch.log10((scale * y).pow(2).sum(-1) / (found - scale * y).pow(2).sum(-1).add(1e-6)).mean()


def voice_separation(micro_batch: int, seq: int = 16_000, wide: int = 128, layers: int = 8) -> Built:
    return _Apart(wide, layers), {"x": torch.randn(micro_batch, 1, seq), "y": torch.randn(micro_batch, 2, seq)}


class _Waves(nn.Module):
    """A U-Net over waves with an LSTM at its bottom."""

    def __init__(self, base: int, depth: int) -> None:
        super().__init__()
        wide = [2, *(base * 2**n for n in range(depth))]
        self.downs = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4, 2), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
            for a, b in itertools.pairwise(wide)
        )
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv1d(b, 2 * b, 1), nn.GLU(1), nn.ConvTranspose1d(b, a, 8, 4, 2))
            for a, b in reversed(list(itertools.pairwise(wide)))
        )
        self.lstm = nn.LSTM(wide[-1], wide[-1] // 2, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            kept.append(x)
        x = self.lstm(x.permute(2, 0, 1))[0].permute(1, 2, 0)
        for up in self.ups:
            x = up(x + kept.pop())
        return x


def wave_unet(micro_batch: int, seq: int = 16_384, base: int = 48, depth: int = 4) -> Built:
    return WithLoss(_Waves(base, depth), "numbers"), {
        "x": torch.randn(micro_batch, 2, seq),
        "y": torch.randn(micro_batch, 2, seq),
    }


class _Vocoder(nn.Module):
    def __init__(self, base: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(80, base, 7, padding=3), nn.Conv1d(base // 16, 1, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(base // 2**n, base // 2 ** (n + 1), 2 * k, k, k // 2) for n, k in enumerate((8, 8, 2, 2))
        )
        self.mixes = nn.ModuleList(
            nn.ModuleList(self.mix(base // 2 ** (n + 1), k) for k in (3, 7, 11)) for n in range(4)
        )

    @staticmethod
    def mix(wide: int, size: int) -> nn.Sequential:
        return nn.Sequential(
            *(
                Residual(nn.LeakyReLU(0.1), nn.Conv1d(wide, wide, size, padding=d * (size // 2), dilation=d))
                for d in (1, 3, 5)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, mixes in zip(self.ups, self.mixes, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(mix(x) for mix in mixes) / len(mixes)  # type: ignore[assignment]
        return torch.tanh(self.last(F.leaky_relu(x)))


def vocoder(micro_batch: int, seq: int = 32, base: int = 256) -> Built:
    """HiFi-GAN's generator."""
    return WithLoss(_Vocoder(base), "numbers"), {
        "x": torch.randn(micro_batch, 80, seq),
        "y": torch.randn(micro_batch, 1, 256 * seq),
    }


class _Codec(nn.Module):
    """Sound through a stack of codebooks, each for what the one before left over."""

    def __init__(self, base: int, books: int) -> None:
        super().__init__()
        wide = [base, 2 * base, 4 * base, 8 * base]
        self.down = nn.Sequential(
            nn.Conv1d(1, base, 7, padding=3),
            *(
                nn.Sequential(Residual(nn.ELU(), nn.Conv1d(a, a, 3, padding=1)), nn.ELU(), nn.Conv1d(a, b, 8, 4, 2))
                for a, b in itertools.pairwise(wide)
            ),
        )
        self.up = nn.Sequential(
            *(
                nn.Sequential(
                    nn.ELU(), nn.ConvTranspose1d(b, a, 8, 4, 2), Residual(nn.ELU(), nn.Conv1d(a, a, 3, padding=1))
                )
                for a, b in reversed(list(itertools.pairwise(wide)))
            ),
            nn.Conv1d(base, 1, 7, padding=3),
        )
        self.books = nn.ModuleList(nn.Embedding(1024, 8 * base) for _ in range(books))

    def forward(self, x: Tensor) -> Tensor:
        code = self.down(x).transpose(1, 2).float()
        left, total, cost = code, torch.zeros_like(code), torch.zeros((), device=x.device)
        for book in self.books:
            apart = (
                (left**2).sum(-1, keepdim=True) - 2 * left @ book.weight.float().T + (book.weight.float() ** 2).sum(-1)
            )
            chosen = book(apart.argmin(-1)).float()
            cost = cost + F.mse_loss(left.detach(), chosen) + 0.25 * F.mse_loss(left, chosen.detach())
            left, total = left - chosen.detach(), total + chosen
        found = self.up((code + (total - code).detach()).transpose(1, 2).to(x.dtype)).float()
        return F.l1_loss(found, x.float()) + cost


def sound_codec(micro_batch: int, seq: int = 16_384, base: int = 32, books: int = 8) -> Built:
    return _Codec(base, books), {"x": torch.randn(micro_batch, 1, seq)}


class _Noise(nn.Module):
    """A U-Net with time embeddings and attention at its lower sizes."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.time, self.first, self.last = (
            mlp(base, 4 * base, 4 * base, act=nn.SiLU),
            nn.Conv2d(3, base, 3, padding=1),
            nn.Conv2d(base, 3, 3, padding=1),
        )
        wide = (base, 2 * base, 4 * base)
        self.downs = nn.ModuleList(
            _Timed(a, b, base, n > 0) for n, (a, b) in enumerate(zip((base, *wide), wide, strict=False))
        )
        self.middle = _Timed(4 * base, 4 * base, base, True)
        self.ups = nn.ModuleList(
            _Timed(a + b, b, base, b > base) for a, b in ((4 * base, 4 * base), (4 * base, 2 * base), (2 * base, base))
        )
        self.register_buffer("waves", torch.exp(torch.linspace(0, -9, base // 2)))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        angle = t.float().unsqueeze(1) * self.waves
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1).to(x.dtype))
        x, kept = self.first(x), []
        for down in self.downs:
            x = down(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for up in self.ups:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], 1), time)
        return F.mse_loss(self.last(x).float(), y.float())


class _Timed(nn.Module):
    def __init__(self, inner: int, outer: int, base: int, looks: bool) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.GroupNorm(8, inner), nn.SiLU(), nn.Conv2d(inner, outer, 3, padding=1)),
            nn.Sequential(nn.GroupNorm(8, outer), nn.SiLU(), nn.Conv2d(outer, outer, 3, padding=1)),
        )
        self.time, self.skip = nn.Linear(4 * base, outer), nn.Conv2d(inner, outer, 1)
        self.norm, self.qkv, self.out = (
            (nn.GroupNorm(8, outer), nn.Conv2d(outer, 3 * outer, 1), nn.Conv2d(outer, outer, 1))
            if looks
            else (None, None, None)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.skip(x) + self.b(self.a(x) + self.time(time)[:, :, None, None])
        if self.norm is None:
            return x
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, 1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(x.shape))


def noise_unet(micro_batch: int, image: int = 32, base: int = 64) -> Built:
    return _Noise(base), {
        "x": pictures(micro_batch, image),
        "t": torch.randint(1000, (micro_batch,)),
        "y": pictures(micro_batch, image),
    }


class _Cycle(nn.Module):
    """Two generators and two critics in one loss."""

    def __init__(self, base: int, blocks: int) -> None:
        super().__init__()
        self.there, self.back = (nn.Sequential(
            nn.Conv2d(3, base, 7, padding=3), nn.InstanceNorm2d(base), nn.ReLU(),
            nn.Conv2d(base, 2 * base, 3, 2, 1), nn.InstanceNorm2d(2 * base), nn.ReLU(),
            *(Residual(nn.Conv2d(2 * base, 2 * base, 3, padding=1), nn.InstanceNorm2d(2 * base), nn.ReLU(),
              nn.Conv2d(2 * base, 2 * base, 3, padding=1)) for _ in range(blocks)),
            nn.ConvTranspose2d(2 * base, base, 4, 2, 1), nn.ReLU(), nn.Conv2d(base, 3, 7, padding=3), nn.Tanh()) for _ in range(2))  # fmt: skip
        self.left, self.right = (
            nn.Sequential(
                nn.Conv2d(3, base, 4, 2, 1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(base, 2 * base, 4, 2, 1),
                nn.LeakyReLU(0.2),
                nn.Conv2d(2 * base, 1, 4),
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.there(x), self.back(y)
        again = F.l1_loss(self.back(a), x) + F.l1_loss(self.there(b), y)
        fooled = (self.right(a) - 1).pow(2).mean() + (self.left(b) - 1).pow(2).mean()
        seen = (
            (self.right(y) - 1).pow(2).mean()
            + self.right(a.detach()).pow(2).mean()
            + (self.left(x) - 1).pow(2).mean()
            + self.left(b.detach()).pow(2).mean()
        )
        return (10 * again + fooled + seen).float()


def cycle_pair(micro_batch: int, image: int = 128, base: int = 48, blocks: int = 6) -> Built:
    return _Cycle(base, blocks), {"x": pictures(micro_batch, image), "y": pictures(micro_batch, image)}


class _Style(nn.Module):
    """Convolutions whose weights every sample scales for itself."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        self.map, self.start = mlp(128, 256, 256, 256, act=nn.LeakyReLU), nn.Parameter(torch.randn(1, wide, 8, 8))
        self.styles, self.weights = (
            nn.ModuleList(nn.Linear(256, wide) for _ in range(layers)),
            nn.ParameterList(nn.Parameter(torch.randn(wide, wide, 3, 3)) for _ in range(layers)),
        )
        self.last = nn.Conv2d(wide, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        style, n = self.map(x), x.shape[0]
        h = self.start.expand(n, -1, -1, -1)
        for k, (scale, weight) in enumerate(zip(self.styles, self.weights, strict=True)):
            own = weight.unsqueeze(0) * scale(style)[:, None, :, None, None]
            own = own * torch.rsqrt(own.pow(2).sum((2, 3, 4), keepdim=True) + 1e-6)
            h = h if k % 2 else F.interpolate(h, scale_factor=2.0, mode="bilinear", align_corners=False)
            h = F.conv2d(h.reshape(1, -1, *h.shape[2:]), own.flatten(0, 1), padding=1, groups=n).view(
                n, -1, *h.shape[2:]
            )
            h = F.leaky_relu(h + 0.1 * torch.randn_like(h[:, :1]), 0.2)
        return self.last(h)


def style_generator(micro_batch: int, wide: int = 128, layers: int = 6) -> Built:
    side = 8 * 2 ** ((layers + 1) // 2)
    return WithLoss(_Style(wide, layers), "numbers"), {
        "x": torch.randn(micro_batch, 128),
        "y": torch.rand(micro_batch, 3, side, side),
    }


def nhwc_resnet(micro_batch: int, image: int = 128, base: int = 64) -> Built:
    """Residual blocks whose tensors have channels last."""
    parts: list[nn.Module] = [conv(3, base, 7, 2)]
    for n in range(3):
        a, b = base * 2**n, base * 2 ** (n + 1)
        parts += [
            Residual(conv(a, a), nn.Conv2d(a, a, 3, padding=1, bias=False), nn.BatchNorm2d(a)),
            nn.ReLU(),
            conv(a, b, 3, 2),
        ]
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * base, 100)).to(
        memory_format=torch.channels_last
    )
    return WithLoss(net), labelled(pictures(micro_batch, image).to(memory_format=torch.channels_last), 100)


def nhwc_mobile(micro_batch: int, image: int = 160, base: int = 32) -> Built:
    """Depthwise convolutions, channels last."""
    parts: list[nn.Module] = [conv(3, base, 3, 2)]
    for n, stride in enumerate((1, 2, 1, 2, 1, 2)):
        a, b = base * 2 ** (n // 2), base * 2 ** ((n + 1) // 2)
        parts += [conv(a, a, 5, stride, a), conv(a, b, 1)]
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * base, 100)).to(
        memory_format=torch.channels_last
    )
    return WithLoss(net), labelled(pictures(micro_batch, image).to(memory_format=torch.channels_last), 100)


def separable_net(micro_batch: int, image: int = 160, wide: int = 192, layers: int = 8) -> Built:
    """Large depthwise kernels between pointwise convolutions."""
    blocks = (
        Residual(
            nn.Conv2d(wide, wide, 9, padding=4, groups=wide),
            nn.BatchNorm2d(wide),
            nn.Conv2d(wide, 2 * wide, 1),
            nn.GELU(),
            nn.Conv2d(2 * wide, wide, 1),
        )
        for _ in range(layers)
    )
    net = nn.Sequential(nn.Conv2d(3, wide, 8, 8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 100))
    return WithLoss(net), labelled(pictures(micro_batch, image), 100)
