"""WGAN-GP: a gradient of a gradient, and a discriminator's random interpolation."""
import torch
from torch import autograd, nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64 * 49, 1))

    def forward(self, real, fake):
        alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device).expand_as(real)
        mixed = autograd.Variable(alpha * real + (1 - alpha) * fake, requires_grad=True)
        score = self.net(mixed)
        grads = autograd.grad(score, mixed, grad_outputs=torch.ones(score.size()), create_graph=True, retain_graph=True, only_inputs=True)[0]
        penalty = ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        return self.net(fake).mean() - self.net(real).mean() + 10 * penalty


def build():
    return Critic()


def batch(micro_batch):
    return torch.randn(micro_batch, 1, 28, 28), torch.randn(micro_batch, 1, 28, 28)
