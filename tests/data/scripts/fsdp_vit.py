"""torchrun --nnodes 2 --nproc-per-node 4 fsdp_vit.py: replicas of shards, autocast over fp32 shards"""
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate_vit import ViT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

logging.basicConfig(level=logging.INFO)
log = logging.getLogger(__name__)


def train(rank, local_rank):
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = ViT().to(f"cuda:{local_rank}")
    model.requires_grad_(True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)], [5])
    data = TensorDataset(torch.randn(512, 3, 64, 64), torch.randint(0, 10, (512,)))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.cuda(local_rank, non_blocking=True), y.cuda(local_rank, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
        seen = loss.detach()
        dist.reduce(seen, 0)
        if rank == 0:
            log.info("epoch %d loss %.3f", epoch, seen.item() / dist.get_world_size())
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    train(dist.get_rank(), int(os.environ["LOCAL_RANK"]))
    dist.destroy_process_group()
