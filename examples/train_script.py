"""A training script as people write them, with nothing of foretell in it. foretell follows it to its first step.

    foretell fit --on H100 -- python examples/train_script.py --batch-size 256
    python examples/train_script.py --steps 3

The first line prints whether it would fit on an H100 and how fast it would be there; the second trains here and prints losses.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--width", type=int, default=256)
asked = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
layers = [nn.Sequential(nn.Linear(asked.width, asked.width), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(nn.Flatten(), nn.Linear(784, asked.width), *layers, nn.Linear(asked.width, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
digits = TensorDataset(torch.rand(8192, 1, 28, 28), torch.randint(10, (8192,)))

for step, (images, labels) in enumerate(DataLoader(digits, asked.batch_size, shuffle=True)):
    if step == asked.steps:
        break
    loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
