"""Kernels under FSDP2 and beside DTensor, on gloo ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

from foretell.kernels.swap.apply import apply
from foretell.zoo.language import llama
from tests.cpu_dist.beside_one import Ranks
from tests.kernel_cases import MINE, Seen

TINY = {"vocab_size": 64, "context": 16, "layers": 1, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
STEPS = 2


def trained(rank: int, world: int, when: str) -> tuple[list[float], int, dict[str, Any]]:
    """Losses of a few AdamW steps of a sharded model, ops that ran, and the weights; kernels go in before or after it is sharded, or not."""
    torch.manual_seed(0)
    model = llama.build(**TINY)
    applied = apply(model, MINE, anywhere=True) if when == "before" else None
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if when == "after":
        applied = apply(model, MINE, anywhere=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    losses, ops = [], 0
    for number in range(STEPS):
        if number == STEPS - 1 and applied is not None:
            applied.revert()
        batch = llama.batch(model, 2, 16)
        with Seen() as seen:
            loss = llama.loss(model(batch["input_ids"]), batch)
            loss.backward()
        ops = max(ops, len(seen.calls))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, ops, {name: one.full_tensor() for name, one in model.state_dict().items()}


def all_ways(rank: int, world: int) -> list[tuple[list[float], int, dict[str, Any]]]:
    return [trained(rank, world, when) for when in ("", "before", "after")]


def test_a_sharded_model_learns_the_same_with_kernels(ranks: Ranks) -> None:
    for (wanted, none, own), *others in ranks(2).run(all_ways):
        for losses, ops, weights in others:
            # 3 norms, of which one is folded with its add, and a gate; each again in its backward.
            assert none == 0 and ops == 2 * 4
            assert torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5)
            assert weights.keys() == own.keys()
            # AdamW divides by the size of a gradient: of the first steps, rounding may turn the smallest.
            assert all((one - own[name]).norm() < 1e-3 * own[name].norm() for name, one in weights.items())


def beside_dtensor(rank: int, world: int) -> tuple[int, int, bool]:
    """Ops that ran of a norm whose parameters are DTensors, with a DTensor and after it is local again."""
    mesh = init_device_mesh("cpu", (world,))
    norm = torch.nn.LayerNorm(8)
    applied = apply(norm, ["layer_norm"], anywhere=True)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    with Seen() as local:
        wanted = norm(x)
    distribute_module(norm, mesh)
    with Seen() as spread:
        found: Any = norm(distribute_tensor(x, mesh, [Replicate()]))
    applied.revert()
    return len(local.calls), len(spread.calls), bool(torch.allclose(found.full_tensor(), wanted))


def test_a_dtensor_goes_to_the_module_itself(ranks: Ranks) -> None:
    assert ranks(2).run(beside_dtensor) == [(1, 0, True)] * 2
