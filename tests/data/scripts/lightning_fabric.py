"""Lightning's Fabric: the loop is one's own; a contrastive model with two views, bf16, accumulation, a compiled part."""

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


class Pairs(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        image = torch.rand(3, 48, 48)
        return image + 0.1 * torch.randn_like(image), image.flip(-1)


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, 2, 1), nn.GroupNorm(8, cout), nn.GELU(), nn.Conv2d(cout, cout, 3, 1, 1), nn.GroupNorm(8, cout), nn.GELU())


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(block(3, width), block(width, 2 * width), block(2 * width, 4 * width))
        self.project = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 64))
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, first, second):
        both = self.project(self.body(torch.cat([first, second])).mean((2, 3)))
        return F.normalize(both, dim=-1).chunk(2)


def contrast(first, second, temperature):
    logits = first @ second.t() / temperature
    target = torch.arange(len(first), device=first.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    seed_everything(1)
    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    fabric.launch()
    with fabric.init_module():
        model = Encoder(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Pairs(), args.batch, shuffle=True, drop_last=True, num_workers=4))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    for epoch in range(2):
        for step, (first, second) in enumerate(bar := tqdm(loader, disable=not fabric.is_global_zero)):
            waiting = (step + 1) % args.accumulate != 0
            with fabric.no_backward_sync(model, enabled=waiting):
                loss = contrast(*model(first, second), model.temperature)
                fabric.backward(loss / args.accumulate)
            if not waiting:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            bar.set_description(f"loss {loss.item():.3f}")
        fabric.save("contrast.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})


if __name__ == "__main__":
    main()
