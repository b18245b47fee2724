"""A physics-informed network: derivatives of its output by its input, LBFGS-style closures left out."""
import torch
from torch import nn


class PINN(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        layers = []
        for i in range(4):
            layers += [nn.Linear(2 if i == 0 else d, d), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(d, 1))
        self.nu = nn.Parameter(torch.tensor([0.01], requires_grad=True))

    def forward(self, points):
        x, t = points[:, :1].clone().requires_grad_(True), points[:, 1:].clone().requires_grad_(True)
        u = self.net(torch.cat([x, t], 1))
        ones = torch.ones_like(u)
        u_x = torch.autograd.grad(u, x, ones, create_graph=True)[0]
        u_t = torch.autograd.grad(u, t, ones, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        residual = u_t + u * u_x - self.nu * u_xx
        return residual.pow(2).mean() + u[points[:, 1] < 0.1].pow(2).mean()


def build():
    return PINN()


def batch(micro_batch):
    torch.manual_seed(0)
    return torch.rand(64 * micro_batch, 2)
