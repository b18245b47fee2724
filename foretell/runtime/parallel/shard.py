"""Data parallelism with PyTorch's `fully_shard`: every block a unit of its own, then the root.

dp_shard alone shards (FSDP2), with dp_replicate it is hybrid (HSDP), and dp_replicate alone is hybrid over shards of
one: nothing is gathered, gradients are averaged over the replicas block by block while backward goes on.

A unit's gradients are reduce-scattered after every micro-batch, so that no rank ever holds more than one unit of
whole gradients, and averaged over replicas only after the last one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from foretell.plan.precision import MIXED, computes_in
from foretell.plan.types import MASTER, Plan
from foretell.runtime.parallel.ranks import Ranks


def shard(
    model: nn.Module, paths: Iterable[str], plan: Plan, ranks: Ranks, experts: Iterable[str] = ()
) -> None:
    """Shard a model, or one stage of it, in place; `paths` are the blocks it has, `experts` modules whose weights are
    spread over ranks already: each is a unit of its own, over the ranks that hold the same of it."""
    mesh = ranks.data_mesh
    if mesh is None:
        return
    policy = policy_of(plan.precision)
    alike = ranks.expert_mesh
    for path in experts:
        assert alike is not None
        again = plan.reshard if isinstance(plan.reshard, bool) else True
        inside = functools.partial(_inside, ranks=alike.size(-1))
        fully_shard(
            model.get_submodule(path), mesh=alike, mp_policy=policy, reshard_after_forward=again, shard_placement_fn=inside
        )
    for unit in units(model, paths):
        named = methods_of(unit[0]) if len(unit) == 1 else ()
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshard)
        for name in named:
            _gather_for(unit[0], name)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def methods_of(block: nn.Module) -> list[str]:
    """Methods of a block's own besides `forward` that a model may call."""
    own = [kind for kind in type(block).__mro__ if not issubclass(nn.Module, kind)]
    found = {name for kind in own for name, value in vars(kind).items() if inspect.isfunction(value)}
    return sorted(name for name in found if not name.startswith("_") and not hasattr(nn.Module, name) and name != "forward")


def _gather_for(block: nn.Module, name: str) -> None:
    """Have a block's parameters gathered for a method that is called from outside, as they are for `forward`; from inside
    the block's own code they are there already."""
    plain, inside = getattr(block, name), [0]

    def enter(*_: Any) -> None:
        inside[0] += 1

    def leave(*_: Any) -> None:
        inside[0] -= 1

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave, always_call=True)
    register_fsdp_forward_method(block, name)
    gathering = getattr(block, name)

    @functools.wraps(plain)
    def called(*args: Any, **kwargs: Any) -> Any:
        if inside[0]:
            return plain(*args, **kwargs)
        inside[0] += 1
        try:
            return gathering(*args, **kwargs)
        finally:
            inside[0] -= 1

    setattr(block, name, called)


def _inside(parameter: nn.Parameter, ranks: int) -> Shard:
    """Along which dimension the ranks that hold the same experts share them: not that of the experts, if it can be."""
    whole = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % ranks == 0]
    return Shard(whole[0] if whole else 0)


def policy_of(precision: str) -> MixedPrecisionPolicy:
    """bf16-mixed and fp16-mixed compute in that and sum gradients in fp32; bf16-master has weights in bf16 and sums in fp32 too, rounded
    once; otherwise everything is in the dtype of the weights."""
    if precision in MIXED:
        return MixedPrecisionPolicy(param_dtype=getattr(torch, computes_in(precision)), reduce_dtype=torch.float32)
    if precision == MASTER:
        return MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def units(model: nn.Module, paths: Iterable[str]) -> list[list[nn.Module]]:
    """Blocks to gather together: one each; blocks that share a parameter are one unit, and a block that shares one
    with the rest of the model is left to the root, which has its parameters whole throughout forward."""
    blocks: dict[int, nn.Module] = {}
    for path in paths:
        block = model.get_submodule(path)
        blocks[id(block)] = block
    owners: dict[nn.Parameter, set[int]] = {}
    for key, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(key)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outside = {p for module in model.modules() if id(module) not in inside for p in module.parameters(recurse=False)}
    groups: list[set[int]] = []
    for keys in ({key} for key in blocks):
        joined = set(keys)
        for shared in owners.values():
            if shared & joined:
                joined |= shared
        rest = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                rest.append(group)
        groups = [*rest, joined]
    left = {key for parameter in outside & owners.keys() for key in owners[parameter]}
    return [[blocks[key] for key in blocks if key in group] for group in groups if not group & left]


def reduce_over_replicas(parts: Iterable[nn.Module], yes: bool) -> None:
    """Whether the next backward averages gradients over dp_replicate, or keeps the sum for a later one."""
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_requires_all_reduce(yes)


def gathered_early(model: nn.Module, paths: Sequence[str]) -> frozenset[str]:
    """Blocks whose weights are gathered before they are called: with the root's, or with those of another block."""
    alone = {id(unit[0]) for unit in units(model, paths) if len(unit) == 1}
    return frozenset(path for path in paths if id(model.get_submodule(path)) not in alone)


def holds_gathers(model: nn.Module) -> Callable[[torch.cuda.Event | None], None]:
    """What makes all further gathers wait for an event. Weights of a block are read on streams of FSDP2's own, which wait
    for the compute stream when the model is called, and not again when a block is."""

    def hold(event: torch.cuda.Event | None) -> None:
        if event is None:
            return
        context = getattr(model._get_fsdp_state(), "_comm_ctx", None) if isinstance(model, FSDPModule) else None
        streams = [getattr(context, name, None) for name in ("all_gather_copy_in_stream", "all_gather_stream")]
        for stream in streams:
            if stream is None:  # not as PyTorch 2.11 to 2.13 have it: the host waits, which is slower and as safe
                event.synchronize()
            else:
                stream.wait_event(event)

    return hold


def reshard(parts: Iterable[nn.Module]) -> None:
    """Give back parameters that a forward without a backward has left whole."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
