"""Forecast load curves. torchrun --nproc_per_node 8 ddp_forecast.py --window 192"""
import argparse
import logging
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("forecast")


class Curves(Dataset):
    def __init__(self, count, window, horizon, channels, seed):
        draw = torch.Generator().manual_seed(seed)
        self.series = torch.randn(count + window + horizon, channels, generator=draw).cumsum(0)
        self.count, self.window, self.horizon = count, window, horizon

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        piece = self.series[i : i + self.window + self.horizon]
        return {"past": piece[: self.window], "future": piece[self.window :, 0]}


class Dilated(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=dilation, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        value, gate = self.conv(self.norm(x)).chunk(2, dim=1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class Forecaster(nn.Module):
    def __init__(self, channels, width, depth, horizon):
        super().__init__()
        self.lift = nn.Conv1d(channels, width, 1)
        self.blocks = nn.ModuleList(Dilated(width, 2**i) for i in range(depth))
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, horizon)

    def forward(self, past):
        x = self.lift(past.transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        x = x.transpose(1, 2)
        seen, _ = self.attend(x[:, -1:], x, x, need_weights=False)
        return self.head(seen[:, 0])


def average(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def validate(model, loader, device, loss_of):
    model.eval()
    total = torch.zeros((), device=device)
    with torch.inference_mode():
        for batch in loader:
            total += loss_of(model(batch["past"].to(device)), batch["future"].to(device))
    model.train()
    return average(total / max(1, len(loader)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--window", type=int, default=128)
    p.add_argument("--horizon", type=int, default=24)
    p.add_argument("--per-rank", type=int, default=64)
    p.add_argument("--width", type=int, default=192)
    p.add_argument("--clip", type=float, default=0.5)
    p.add_argument("--save", default="checkpoints")
    given = p.parse_args()
    dist.init_process_group(backend="nccl")
    rank, local = dist.get_rank(), int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.manual_seed(1234 + rank)

    train = Curves(4000, given.window, given.horizon, 7, 0)
    held = Curves(500, given.window, given.horizon, 7, 1)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, batch_size=given.per_rank, sampler=sampler, num_workers=2, pin_memory=True)
    held_loader = DataLoader(held, batch_size=given.per_rank, sampler=DistributedSampler(held, shuffle=False))

    net = Forecaster(7, given.width, 6, given.horizon).to(device)
    model = DDP(net, device_ids=[local], output_device=local, bucket_cap_mb=10)
    decayed = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=3e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    loss_of = nn.HuberLoss()
    log.info("%d parameters, %d ranks", sum(p.numel() for p in net.parameters()), dist.get_world_size())
    before = validate(model, held_loader, device, loss_of)
    log.info("before training: %.4f", before)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        began = time.time()
        for step, batch in enumerate(loader):
            past = batch["past"].to(device, non_blocking=True)
            future = batch["future"].to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(past), future)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
            optimizer.step()
            if step % 20 == 0:
                log.info("epoch %d step %d loss %.4f norm %.2f", epoch, step, average(loss), norm)
        score = validate(model, held_loader, device, loss_of)
        plateau.step(score)
        if rank == 0:
            os.makedirs(given.save, exist_ok=True)
            torch.save({"model": net.state_dict(), "score": score}, os.path.join(given.save, f"{epoch}.pt"))
            log.info("epoch %d: %.4f in %.1f s", epoch, score, time.time() - began)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
