"""Blocks"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from foretell.eject.pieces.settings import RECOMPUTE, RESHARD, SELECTIVE

KEPT = {  # if: selective
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute(block: nn.Module, **options: Any) -> None:  # if: full or selective
    """Forget the block's activations after forward and compute them again in backward."""
    forward = block.forward

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = again


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # if: selective
    """Selective recompute: results of matrix products and attention are kept."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def change_blocks(model: nn.Module, paths: Iterable[str]) -> None:  # if: changed
    """Block by block: what is computed again in backward, and what is compiled."""
    for path in paths:
        block = model.get_submodule(path)
        if path in RECOMPUTE:  # if: full
            recompute(block)
        if path in SELECTIVE:  # if: selective
            recompute(block, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products))
        block.forward = torch.compile(block.forward)  # if: compile_blocks


def shard(model: nn.Module, blocks: Iterable[nn.Module | list[nn.Module]], mesh: DeviceMesh) -> None:  # if: data
    """FSDP2: every block is gathered by itself, what is left of the model together."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # if: mixed and not fp16
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)  # if: mixed and fp16
    policy = MixedPrecisionPolicy()  # if: not mixed
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=RESHARD)
    fully_shard(model, mesh=mesh, mp_policy=policy)

