"""What an optimizer keeps for each element, and how a run of elements is updated: AdamW in several formats.

| form   | weights | kept beside them                         | bytes | what it changes                            |
| ------ | ------- | ---------------------------------------- | ----- | ------------------------------------------ |
| plain  | any     | both moments in the weights' format      | 8     | nothing                                    |
| master | bf16    | fp32 weights, both moments in fp32       | 12    | nothing: fully_shard's mixed precision     |
| split  | bf16    | what rounding cut off, both moments fp32 | 10    | ties are rounded away from zero            |
| half   | bf16    | fp32 weights, both moments in bf16       | 8     | moments have 8 bits of precision           |

Every update is element by element, so that it gives the same bits in whatever runs and on whatever stream it is done. All
forms use `torch._fused_adamw_`, the kernel of `AdamW(fused=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.plan.states import KEPT

FIRST, SECOND, MASTER, REST = "exp_avg", "exp_avg_sq", "master", "rest"


@dataclass(frozen=True)
class Form:
    """What is kept for each element."""

    name: str
    kept: Mapping[str, torch.dtype]
    weight: torch.dtype
    """Format of the weights that the model computes with, and of their gradients."""

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize for dtype in self.kept.values())

    @property
    def scratch(self) -> int:
        """Elements of fp32 that updating one element needs: its gradient, and its weight where that is not whole."""
        return 0 if not self.wide else 2 if REST in self.kept else 1

    @property
    def wide(self) -> bool:
        """Whether gradients are widened to fp32 before they are used."""
        return self.name != "plain"


def form(name: str, weights: torch.dtype) -> Form:
    """A form by its name, beside weights of a format."""
    kept = {key: weights if dtype == "weight" else getattr(torch, dtype) for key, dtype in KEPT[name].items()}
    return Form(name, kept, weights if name == "plain" else torch.bfloat16)


@dataclass(frozen=True)
class Settings:
    """Of one step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True


@dataclass
class Run:
    """A run of one parameter's elements: all tensors are flat and equally long."""

    weight: Tensor
    grad: Tensor
    kept: Mapping[str, Tensor]
    step: Tensor
    """Updates of the parameter, this one included; on the device of the run."""


def update(form: Form, runs: Sequence[Run], wide: Tensor, settings: Settings, *, scale: Tensor | None, skip: Tensor | None) -> None:
    """Update runs. `wide` is scratch of fp32, `Form.scratch` times as long as all runs together; `scale` has one element that
    gradients are multiplied by, `skip` one that is 1 where nothing may change."""
    if not runs:
        return
    if form.name == "plain":
        if scale is not None:
            torch._foreach_mul_([run.grad for run in runs], scale.to(runs[0].grad.dtype).view(()))
        _adamw([run.weight for run in runs], [run.grad for run in runs], runs, settings, skip)
        return
    grads = []
    at = 0
    for run in runs:
        grad = wide[at : at + run.grad.numel()]
        at += run.grad.numel()
        if scale is None:
            grad.copy_(run.grad)
        else:
            torch.mul(run.grad, scale, out=grad)
        grads.append(grad)
    if form.name == "split":
        _split(runs, grads, wide[at:], settings, skip)
        return
    masters = [run.kept[MASTER] for run in runs]
    _adamw(masters, grads, runs, settings, skip)
    for run, master in zip(runs, masters, strict=True):
        run.weight.copy_(master)


def _adamw(weights: list[Tensor], grads: list[Tensor], runs: Sequence[Run], settings: Settings, skip: Tensor | None) -> None:
    first, second = ([run.kept[name] for run in runs] for name in (FIRST, SECOND))
    wide = [moment.float() if moment.dtype != weights[0].dtype else moment for moment in (*first, *second)]
    kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    kernel(
        weights, grads, wide[: len(runs)], wide[len(runs) :], [], [run.step for run in runs],
        lr=settings.lr, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay, eps=settings.eps,
        amsgrad=False, maximize=False, grad_scale=None, found_inf=skip,
    )  # fmt: skip
    for kept, moved in zip((*first, *second), wide, strict=True):
        if kept is not moved:
            kept.copy_(moved)


def _split(runs: Sequence[Run], grads: list[Tensor], wide: Tensor, settings: Settings, skip: Tensor | None) -> None:
    """fp32 weights put together from bf16 and what rounding cut off, updated and taken apart again."""
    masters, at = [], 0
    for run in runs:
        masters.append(joined(run.weight, run.kept[REST], wide[at : at + run.weight.numel()]))
        at += run.weight.numel()
    _adamw(masters, grads, runs, settings, skip)
    for run, master in zip(runs, masters, strict=True):
        take_apart(master, run.weight, run.kept[REST])


def joined(weight: Tensor, rest: Tensor, out: Tensor) -> Tensor:
    """The fp32 values that were taken apart, in `out`."""
    out.view(torch.int32).copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(rest)
    return out


def take_apart(master: Tensor, weight: Tensor, rest: Tensor) -> None:
    """bf16, ties away from zero, and the difference in units of fp32's last place: nothing is lost but `master`, which is
    used up.

    Rounding ties to even would lose something: the values half a step below and above an even one round to it both. The
    difference is the lower half of fp32's bits, read as a number with a sign.
    """
    low, high = master.view(torch.int16)[0::2], master.view(torch.int16)[1::2]
    rest.copy_(low)
    master.view(torch.int32).add_(0x8000)
    weight.view(torch.int16).copy_(high)
