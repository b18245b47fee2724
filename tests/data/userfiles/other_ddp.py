"""DistributedDataParallel, set up by the file itself."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def setup():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    return rank


def build():
    rank = setup()
    net = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).to(rank)
    return DDP(net, device_ids=[rank])


def batch(micro_batch):
    return torch.randn(micro_batch, 64, 128)


def loss(output, batch):
    return output.square().mean()
