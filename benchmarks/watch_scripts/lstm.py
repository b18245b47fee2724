"""A recurrent language model; the batch size is in the source."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH = 256
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--steps", type=int, default=100000)
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Letters(Dataset):
    def __len__(self):
        return given.steps * BATCH

    def __getitem__(self, place):
        row = torch.randint(0, 256, (given.length + 1,))
        return row[:-1], row[1:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, given.width)
        self.core = nn.LSTM(given.width, given.width, 2, batch_first=True)
        self.head = nn.Linear(given.width, 256)

    def forward(self, x):
        return self.head(self.core(self.table(x))[0])


model = Net().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for number, (x, y) in enumerate(DataLoader(Letters(), batch_size=BATCH, num_workers=2)):
    loss = F.cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if number % 50 == 0:
        print("step", number, loss.item(), flush=True)
