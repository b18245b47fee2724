"""A plan's model with its adapters over a packed base, made of random numbers on the device itself: no copy of the weights is
ever elsewhere, and parameters lie in the order and the places in which a run puts them. Used by lora_long.py and adapters_models.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any


def packed_model(plan: Any, device: Any) -> Any:
    """The workload of a plan whose adapters are on the model already; its batch is real, on the CPU."""
    import torch

    from foretell.plan.recipe import source_of
    from foretell.trace.load.aside import weights_on_meta
    from foretell.trace.load.model import load
    from foretell.trace.record.step import prepare_weights

    source = source_of(plan)
    with weights_on_meta(0):
        workload = load(source)
    model = workload.model
    prepare_weights(model, "bf16" if plan.precision == "bf16" else "fp32", plan.adapters, tuple(plan.base.items()))
    # Tensors that a constructor computed, such as tables of positions, are real already.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    with torch.no_grad():
        for module in model.modules():
            fill(module)
    return replace(workload, model=model, batch=batch_for(workload, source))


def batch_for(workload: Any, source: Any) -> Any:
    """A batch as the zoo makes it, of real numbers."""
    import torch

    from foretell import zoo
    from foretell.trace.load.model import zoo_sizes

    entry = zoo.get(source.model)
    torch.manual_seed(0)
    return zoo.load(entry).batch(workload.model, source.micro_batch, *zoo_sizes(entry, source))


def fill(module: Any) -> None:
    """Random weights of a usual size: of a packed layer its codes, with scales that fit the number of its inputs."""
    import torch

    from foretell.trace.adapters.layers import PackedLinear

    if isinstance(module, PackedLinear):
        scale = 1.6 / math.sqrt(module.base_shape[1])
        if module.base_scales.shape[1] == 1:
            module.base_scales.random_(0, 256)
            module.base_nested.fill_(scale / 4)
            module.base_nested[-1] = scale
        else:
            module.base_scales.view(torch.float32).fill_(scale)
    for name, parameter in module.named_parameters(recurse=False):
        if name == "base_codes":
            parameter.random_(0, 256)
        elif name == "lora_A":
            torch.nn.init.kaiming_uniform_(parameter, a=5**0.5)
        elif parameter.is_floating_point() and parameter.dim() > 1 and name != "lora_B":
            parameter.normal_(std=0.02)
        elif parameter.is_floating_point():
            parameter.fill_(0.0 if name in ("bias", "lora_B") else 1.0)


def timed(job: Any, micro_batches: list[Any], steps: int, say: str) -> Iterator[tuple[float, float]]:
    """Seconds and loss of each step, as they are done."""
    import torch

    for step in range(steps):
        began = time.perf_counter()
        loss = job.train_step(micro_batches).loss.item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = round(time.perf_counter() - began, 3)
        print(f"  step {step + 1} of {say}: {seconds} s, loss {loss:.4f}", flush=True)
        yield seconds, loss


def limit_reserved(room: int) -> None:
    """Let PyTorch's allocator reserve no more than this."""
    import torch

    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)


def peaks(job: Any) -> dict[str, Any]:
    """What the allocator, the device and the host held at most."""
    import torch

    cuda = torch.cuda.is_available()
    about = torch.cuda.memory_stats() if cuda else {}
    free, whole = torch.cuda.mem_get_info() if cuda else (0, 0)
    away = None if job is None else job.away
    return {
        "allocated_bytes": about.get("allocated_bytes.all.peak", 0), "reserved_bytes": about.get("reserved_bytes.all.peak", 0),
        "retries": about.get("num_alloc_retries", 0), "device_bytes": whole - free,
        "host_bytes": 0 if away is None else away.hosts.needed, "moved": [] if away is None else list(away.moved),
    }  # fmt: skip
