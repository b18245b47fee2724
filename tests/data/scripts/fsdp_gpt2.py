"""torchrun --nproc_per_node=8 fsdp_gpt2.py --fp16: a model of transformers, recomputed, two micro-batches"""
import argparse
import dataclasses
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per-device-batch", type=int, default=4)
    parser.add_argument("--grad-accum", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--reshard", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    config = GPT2Config(vocab_size=3000, n_layer=3, n_embd=192, n_head=4, n_positions=128, use_cache=False, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, GPT2Block))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mp_policy=policy, reshard_after_forward=args.reshard)
    fully_shard(model, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ids = torch.randint(0, 3000, (256, 128))
    data = TensorDataset(ids)
    loader = DataLoader(data, batch_size=args.per_device_batch, sampler=DistributedSampler(data))
    model.train()
    step = 0
    for epoch in range(2):
        for n, (ids,) in enumerate(tqdm(loader, disable=rank > 0)):
            ids = ids.to("cuda")
            loss = model(input_ids=ids, labels=ids).loss / args.grad_accum
            loss.backward()
            if (n + 1) % args.grad_accum:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0 and step % 10 == 0:
                tqdm.write(f"step {step}: {loss.item() * args.grad_accum:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
