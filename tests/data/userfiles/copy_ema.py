"""A small U-Net with an EMA copy held beside it, as diffusion repositories do."""
from copy import deepcopy

import torch
from torch import nn


class EMA:
    def __init__(self, decay):
        self.decay = decay

    @torch.no_grad()
    def step(self, ema, net):
        for e, p in zip(ema.parameters(), net.parameters()):
            e.mul_(self.decay).add_(p.data, alpha=1 - self.decay)


class Denoiser(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.down = nn.Conv2d(1, channels, 3, padding=1, stride=2)
        self.mid = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
        self.up = nn.ConvTranspose2d(channels, 1, 4, 2, 1)
        self.time = nn.Linear(1, channels)

    def forward(self, x, t):
        h = self.down(x) + self.time(t[:, None].float() / 1000)[:, :, None, None]
        return self.up(h + self.mid(h))


class Diffusion(nn.Module):
    def __init__(self, steps=1000):
        super().__init__()
        self.net = Denoiser()
        self.ema = deepcopy(self.net).eval().requires_grad_(False)
        self.average = EMA(0.999)
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alpha_bar", torch.cumprod(1 - betas, dim=0))
        self.steps = steps

    def forward(self, images):
        t = torch.randint(0, self.steps, (images.shape[0],), device=images.device)
        noise = torch.randn_like(images)
        ab = self.alpha_bar[t][:, None, None, None]
        noisy = ab.sqrt() * images + (1 - ab).sqrt() * noise
        self.average.step(self.ema, self.net)
        return nn.functional.mse_loss(self.net(noisy, t), noise)


def build():
    return Diffusion()


def batch(micro_batch):
    return torch.rand(micro_batch, 1, 32, 32) * 2 - 1
