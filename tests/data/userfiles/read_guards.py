"""Guards that a healthy run passes: NaN checks, asserts on values, a printed loss."""
import torch
from torch import nn


class Guarded(nn.Module):
    def __init__(self, d=200):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 400), nn.ReLU(), nn.Linear(400, 2 * d))
        self.steps = 0

    def forward(self, x):
        assert not torch.isnan(x).any(), "NaN in the input"
        mean, log_var = self.net(x).chunk(2, dim=-1)
        if torch.isnan(mean).any() or torch.isinf(mean).any():
            raise ValueError("the network diverged")
        if not torch.isfinite(log_var).all():
            log_var = torch.zeros_like(log_var)
        posterior = torch.distributions.Normal(mean, (0.5 * log_var).exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        z = posterior.rsample()
        kl = torch.distributions.kl_divergence(posterior, prior).sum(-1).mean()
        loss = ((z - x) ** 2).mean() + kl
        if loss.item() > 1e6:
            print("large loss")
        self.steps += 1
        if self.steps % 1 == 0:
            print(f"step {self.steps}: loss {loss.item():.4f}, kl {kl.detach().cpu().numpy():.3f}")
        return loss


def build():
    return Guarded()


def batch(micro_batch):
    return torch.randn(micro_batch, 16, 200)
