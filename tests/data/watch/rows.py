"""A stack of cheap layers on many rows: its memory is activations."""
import argparse
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32768)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--chatter", type=int, default=0, help="MiB to print on either stream")
parser.add_argument("--end", default="", help="raise, exit or wait, after the third step")
given = parser.parse_args()
torch.manual_seed(0)
for stream in (sys.stdout, sys.stderr):
    stream.write("chatter\n" * (given.chatter << 17))


class Rows(IterableDataset):
    def __iter__(self):
        for _ in range(given.steps * given.accumulate):
            yield torch.randn(given.batch_size, 64), torch.randn(given.batch_size, 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(torch.sin(torch.sigmoid(self.linear(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(given.layers))
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


device = "cuda" if torch.cuda.is_available() else "cpu"
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
try:
    for number, (x, y) in enumerate(DataLoader(Rows(), batch_size=None)):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device)) / given.accumulate
        loss.backward()
        if (number + 1) % given.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number} loss {loss.item():.6f}", flush=True)
        if number == 3 and given.end == "raise":
            raise ValueError("as asked")
        if number == 3 and given.end == "exit":
            sys.exit(7)
        if number == 3 and given.end == "wait":
            time.sleep(60)
finally:
    print("tidied up", flush=True)
