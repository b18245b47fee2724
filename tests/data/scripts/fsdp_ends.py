"""torchrun --nproc-per-node gpu fsdp_ends.py: embedding and head are units of their own, and the last layer stays whole"""
import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_llama import Llama, Tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def apply_fsdp(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32):
    config = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    fully_shard(model.embed, **config, reshard_after_forward=True)
    for number, layer in enumerate(model.layers):
        fully_shard(layer, **config, reshard_after_forward=number < len(model.layers) - 1)
    fully_shard([model.norm, model.head], **config, reshard_after_forward=False)
    fully_shard(model, **config)


class Config:
    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch", type=int, default=8)
        parser.add_argument("--seq", type=int, default=128)
        parser.add_argument("--compile", action="store_true")
        vars(self).update(vars(parser.parse_args()))


if __name__ == "__main__":
    config = Config()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group(backend="nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = Llama(depth=3).to(device)
    apply_fsdp(model, mesh)
    ema = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = Tokens(512, config.seq, 4096)
    loader = DataLoader(data, config.batch, sampler=DistributedSampler(data), drop_last=True)
    model.set_requires_gradient_sync(True)
    for step, batch in enumerate(loader):
        with nullcontext():
            logits = model(batch["inputs"].to(device, non_blocking=True))
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["targets"].to(device).flatten())
            del logits
        loss.backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.001)
        if dist.get_rank() == 0:
            print(step, f"{loss.item():.3f}", f"{total.item():.2f}", torch.cuda.max_memory_allocated() / 2**30)
    dist.destroy_process_group()
