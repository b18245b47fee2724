"""torchrun --nproc-per-node 2 ranks.py: DistributedDataParallel over whatever is there; a rank may be slow, large or fail."""
import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--hold", type=int, default=0, help="MiB that the last rank holds besides")
parser.add_argument("--end", default="", help="raise, exit or wait in the last rank, after the fourth step")
parser.add_argument("--workers", type=int, default=0)
given = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(given.layers))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.mean(1)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = DDP(Net().to(device))
    data = TensorDataset(torch.randn(given.steps * given.batch_size * world, 256))
    loader = DataLoader(data, batch_size=given.batch_size, sampler=DistributedSampler(data), num_workers=given.workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    last = rank == world - 1
    kept = [torch.ones(given.hold << 18)] if last else []
    for number, (x,) in enumerate(loader):
        loss = model(x.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {number} loss {loss.item():.6f}", flush=True)
        if number == 3 and last and given.end == "raise":
            raise ValueError("as asked")
        if number == 3 and last and given.end == "exit":
            sys.exit(7)
        if number == 3 and given.end == "wait":
            time.sleep(60)
    del kept
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
