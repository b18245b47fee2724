"""Pipeline"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from foretell.eject.pieces.loss import one_loss
from foretell.eject.pieces.scale import SCALER
from foretell.eject.pieces.settings import ACCUMULATE, BLOCKS, CUTS, LAYERS, TIED


def blocks_of(stage: int) -> list[str]:
    starts = [0, *(BLOCKS.index(cut) for cut in CUTS), len(BLOCKS)]
    return BLOCKS[starts[stage] : starts[stage + 1]]


class Leave(BaseException):
    """Carries activations out of the model's forward at the end of a stage."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Next(nn.Module):
    """Stands where the next stage begins."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise Leave(x)


class Absent(nn.Module):
    """Stands where a layer of another stage was. What it gives has the right shape, and nobody uses it."""

    def __init__(self, width: int | None) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x if self.width is None else torch.zeros((), device=x.device).expand(*x.shape, self.width)


class Stage(nn.Module):
    """One stage of the model: its own forward, from the first block of this stage to the first of the next.

    Layers of other stages are gone. What forward computes before the first block of this stage is thrown away:
    that block gets what the stage before has sent.
    """

    def __init__(self, model: nn.Module, index: int, device: torch.device) -> None:
        super().__init__()
        self.model, self.index, self.device = model, index, device
        self.received: Tensor | None = None
        for path in set(BLOCKS) - set(blocks_of(index)):
            model.set_submodule(path, Absent(None))
        for path, (stages, width) in LAYERS.items():
            if index not in stages:
                model.set_submodule(path, Absent(width))
        if index < len(CUTS):
            model.set_submodule(CUTS[index], Next())

    def connect(self) -> None:
        """Last of all, so that this comes before FSDP's own hook."""
        if self.index > 0:
            first = self.model.get_submodule(CUTS[self.index - 1])
            first.register_forward_pre_hook(lambda _, args: (self.received, *args[1:]), prepend=True)

    def forward(self, received: Tensor | None = None, **batch: Tensor) -> Tensor:
        self.received = received
        try:
            return one_loss(self.model, batch, self.device)
        except Leave as leave:
            return leave.value
        finally:
            self.received = None


def given(loss: Tensor, _: Any) -> Tensor:
    """The last stage gives the loss itself."""
    return loss * SCALER.scale  # if: fp16
    return loss  # if: not fp16


def schedule_of(stages: list[Stage], mesh: DeviceMesh, device: torch.device) -> Any:
    """PyTorch's schedule over this rank's stages."""
    count = len(CUTS) + 1
    group = mesh.get_group("pp")
    made = [pipelining.PipelineStage(stage, stage.index, count, device, group=group) for stage in stages]
    return pipelining.ScheduleGPipe(made[0], ACCUMULATE, loss_fn=given, scale_grads=False)  # if: gpipe
    return pipelining.Schedule1F1B(made[0], ACCUMULATE, loss_fn=given, scale_grads=False)  # if: one
    return pipelining.ScheduleInterleaved1F1B(made, ACCUMULATE, loss_fn=given, scale_grads=False)  # if: looped


def add_tied(stages: list[Stage], mesh: DeviceMesh) -> None:  # if: tied
    """The first and the last stage hold a copy each of tied weights: add up their gradients."""
    group = mesh.get_group("pp")
    for stage in stages:
        if stage.index not in (0, len(CUTS)):
            continue
        peer = dist.get_global_rank(group, dist.get_world_size(group) - 1 if stage.index == 0 else 0)
        for name in TIED:
            grad = stage.model.get_parameter(name).grad
            mine = grad.to_local() if isinstance(grad, DTensor) else grad
            theirs = torch.empty_like(mine)
            messages = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            mine += theirs
