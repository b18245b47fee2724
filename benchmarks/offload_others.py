"""What a user would pick instead for a model whose states do not fit: fully_shard's CPU offload, DeepSpeed's ZeRO offload.

Ways of benchmarks/offload.py; each takes the same model, without values, and returns a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

Way = Callable[[argparse.Namespace, Any, Any, Any], tuple[Any, dict[str, Any]]]


def data_of(options: argparse.Namespace, device: Any) -> Any:
    import torch

    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, options.words, (options.batch, options.tokens), generator=draw).to(device)


def fsdp2(options: argparse.Namespace, device: Any, model: Any, value_of: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    began = time.perf_counter()
    source = value_of(model, device)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    how = {"mp_policy": mixed, "offload_policy": CPUOffloadPolicy()}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.to_local().data.copy_(source(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = data_of(options, device)

    def step() -> Any:
        loss = model(data, data)
        loss.backward()
        if not options.no_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"start_seconds": time.perf_counter() - began}


def deepspeed(stage: int) -> Way:
    def way(options: argparse.Namespace, device: Any, model: Any, value_of: Any) -> tuple[Any, dict[str, Any]]:
        import deepspeed as ds
        import torch

        began = time.perf_counter()
        source = value_of(model, device)
        for name, _ in list(model.named_parameters()):
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, torch.nn.Parameter(source(name).bfloat16()))
        zero: dict[str, Any] = {
            "stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
            "contiguous_gradients": True,
        }  # fmt: skip
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        config = {
            "train_micro_batch_size_per_gpu": options.batch, "gradient_accumulation_steps": options.accumulate,
            "bf16": {"enabled": True}, "zero_optimization": zero,
            "gradient_clipping": 0.0 if options.no_clip else 1.0, "zero_force_ds_cpu_optimizer": True,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 1e-2}},
        }  # fmt: skip
        engine, *_ = ds.initialize(model=model, config=config, model_parameters=model.parameters())
        data = data_of(options, device)

        def step() -> Any:
            for _ in range(options.accumulate):
                loss = engine(data, data)
                engine.backward(loss)
                engine.step()
            return loss.detach()

        return step, {"start_seconds": time.perf_counter() - began}

    return way


WAYS: dict[str, Way] = {"fsdp2": fsdp2, "ds2": deepspeed(2), "ds3": deepspeed(3)}
