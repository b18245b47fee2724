"""NeRF: rays, stratified samples, inverse transform sampling with searchsorted."""
import torch
from torch import nn


def encode(x, n):
    return torch.cat([x] + [f(2.0**i * x) for i in range(n) for f in (torch.sin, torch.cos)], -1)


def sample_pdf(bins, weights, n):
    weights = weights + 1e-5
    cdf = torch.cumsum(weights / weights.sum(-1, keepdim=True), -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand(list(cdf.shape[:-1]) + [n]).contiguous()
    inds = torch.searchsorted(cdf.contiguous(), u, right=True)
    below, above = torch.max(torch.zeros_like(inds - 1), inds - 1), torch.min((cdf.shape[-1] - 1) * torch.ones_like(inds), inds)
    g = torch.stack([below, above], -1)
    shape = [g.shape[0], g.shape[1], cdf.shape[-1]]
    cdf_g = torch.gather(cdf.unsqueeze(1).expand(shape), 2, g)
    bins_g = torch.gather(bins.unsqueeze(1).expand(shape), 2, g)
    denom = cdf_g[..., 1] - cdf_g[..., 0]
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    return bins_g[..., 0] + (u - cdf_g[..., 0]) / denom * (bins_g[..., 1] - bins_g[..., 0])


class NeRF(nn.Module):
    def __init__(self, n=10, d=128):
        super().__init__()
        self.n = n
        self.net = nn.Sequential(nn.Linear(3 + 6 * n, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 4))

    def render(self, o, d, z):
        raw = self.net(encode(o[:, None] + d[:, None] * z[..., None], self.n))
        delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-torch.relu(raw[..., 3]) * delta)
        weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return (weights[..., None] * torch.sigmoid(raw[..., :3])).sum(1), weights

    def forward(self, o, d):
        z = torch.linspace(2.0, 6.0, 32).expand(o.size(0), 32)
        mids = 0.5 * (z[:, 1:] + z[:, :-1])
        coarse, weights = self.render(o, d, z)
        fine = sample_pdf(mids, weights[:, 1:-1].detach(), 32)
        z, _ = torch.sort(torch.cat([z, fine], -1), -1)
        rgb, _ = self.render(o, d, z)
        return (rgb**2).mean() + (coarse**2).mean()


def build():
    return NeRF()


def batch(micro_batch):
    return torch.randn(64 * micro_batch, 3), torch.randn(64 * micro_batch, 3)
