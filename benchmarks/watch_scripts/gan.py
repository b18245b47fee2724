"""Two optimizers in turn."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--steps", type=int, default=100000)
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


def stack(first, last):
    w = given.width
    inner = [part for _ in range(2) for part in (nn.Linear(w, w), nn.LeakyReLU(0.2))]
    return nn.Sequential(nn.Linear(first, w), nn.LeakyReLU(0.2), *inner, nn.Linear(w, last))


generator, critic = stack(128, 3072).to(device), stack(3072, 1).to(device)
g_step = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_step = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
for number in range(given.steps):
    real, noise = torch.randn(given.batch_size, 3072, device=device), torch.randn(given.batch_size, 128, device=device)
    d_step.zero_grad()
    d_loss = F.softplus(critic(generator(noise).detach())).mean() + F.softplus(-critic(real)).mean()
    d_loss.backward()
    d_step.step()
    g_step.zero_grad()
    g_loss = F.softplus(-critic(generator(noise))).mean()
    g_loss.backward()
    g_step.step()
    if number % 50 == 0:
        print("step", number, g_loss.item(), d_loss.item(), flush=True)
