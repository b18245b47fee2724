"""accelerate with a scheduler, accumulation and bf16; the model is a vision transformer of one's own."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width=192, depth=3, classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.place = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(Block(width, 6) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    set_seed(1)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, mixed_precision="bf16")
    model = ViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(256, 3, 64, 64), torch.randint(0, 10, (256,)))
    loader = DataLoader(data, args.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(epoch, loss.item())
    accelerator.wait_for_everyone()
    accelerator.save_state("state")


if __name__ == "__main__":
    main()
