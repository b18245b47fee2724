"""A plain GPT in a plain loop."""
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--vocab", type=int, default=32000)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--fused", action="store_true")
given = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"


class Tokens(Dataset):
    def __len__(self):
        return given.steps * given.batch_size * given.accumulate

    def __getitem__(self, place):
        row = torch.randint(0, given.vocab, (given.length + 1,))
        return row[:-1], row[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(given.vocab, given.width), nn.Embedding(given.length, given.width)
        self.blocks = nn.ModuleList(Block(given.width, max(1, given.width // 64)) for _ in range(given.layers))
        self.norm, self.head = nn.LayerNorm(given.width), nn.Linear(given.width, given.vocab, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if given.checkpoint else block(x)
        return self.head(self.norm(x))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, **({"fused": True} if given.fused else {}))
loader = DataLoader(Tokens(), batch_size=given.batch_size, num_workers=given.workers, pin_memory=device == "cuda")
for number, (x, y) in enumerate(loader):
    x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    with torch.autocast(device, torch.bfloat16, enabled=given.bf16):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / given.accumulate
    loss.backward()
    if (number + 1) % given.accumulate == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if number % 50 == 0:
        print("step", number, loss.item(), flush=True)
