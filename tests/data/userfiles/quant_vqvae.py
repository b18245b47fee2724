"""VQ-VAE with an EMA codebook: flags in buffers, one_hot, usage that is read."""
import torch
import torch.nn.functional as F
from torch import nn


class Codebook(nn.Module):
    def __init__(self, n=256, d=32, decay=0.99):
        super().__init__()
        self.decay, self.n = decay, n
        embed = torch.randn(n, d)
        self.register_buffer("embed", embed)
        self.register_buffer("count", torch.zeros(n))
        self.register_buffer("mean", embed.clone())
        self.register_buffer("ready", torch.Tensor([False]))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        if not self.ready:
            self.embed.data.copy_(flat[torch.randperm(flat.size(0))[: self.n]])
            self.ready.data.copy_(torch.Tensor([True]))
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        index = distance.argmin(1)
        hot = F.one_hot(index, self.n).type(flat.dtype)
        quantized = F.embedding(index, self.embed).view_as(x)
        if self.training:
            self.count.data.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
            self.mean.data.mul_(self.decay).add_(hot.t() @ flat.detach(), alpha=1 - self.decay)
            self.embed.data.copy_(self.mean / self.count.clamp(min=1e-5).unsqueeze(1))
            dead = self.count < 0.01
            if torch.any(dead):
                self.embed.data[dead] = flat.detach()[torch.randint(0, flat.size(0), (int(dead.sum().item()),))]
        perplexity = torch.exp(-(hot.mean(0) * (hot.mean(0) + 1e-10).log()).sum())
        return x + (quantized - x).detach(), F.mse_loss(x, quantized.detach()), perplexity


class VQVAE(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.enc, self.dec = nn.Conv2d(3, d, 4, 4), nn.ConvTranspose2d(d, 3, 4, 4)
        self.book = Codebook(d=d)

    def forward(self, images):
        z = self.enc(images).permute(0, 2, 3, 1)
        q, commit, perplexity = self.book(z)
        return F.mse_loss(self.dec(q.permute(0, 3, 1, 2)), images) + 0.25 * commit


def build():
    return VQVAE()


def batch(micro_batch):
    return torch.rand(micro_batch, 3, 64, 64)
