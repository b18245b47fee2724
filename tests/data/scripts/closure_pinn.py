"""A physics-informed network: derivatives of the output by autograd, a closure for L-BFGS's line, everything in double precision."""

import math

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
device = torch.device("cuda")


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


net = nn.Sequential(nn.Linear(2, 96), Sine(), nn.Linear(96, 96), Sine(), nn.Linear(96, 96), Sine(), nn.Linear(96, 1)).to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
inside = torch.rand(2048, 2, device=device, requires_grad=True)
edge = torch.cat([torch.rand(256, 1, device=device), torch.zeros(256, 1, device=device)], dim=1)
wanted = torch.sin(math.pi * edge[:, :1])


def physics():
    u = net(inside)
    (du,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), inside, create_graph=True)
    residual = du[:, 1:] - 0.1 * ddu[:, :1]
    return residual.square().mean() + (net(edge) - wanted).square().mean()


def closure():
    optimizer.zero_grad()
    loss = physics()
    loss.backward()
    return loss.detach()


for step in range(1000):
    loss = optimizer.step(closure)
    if step % 100 == 0:
        print(step, loss.item())
