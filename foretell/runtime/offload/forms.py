"""What an optimizer keeps for each element, and how a run of elements is updated: AdamW in several formats.

| form       | weights | kept beside them                           | bytes | what it changes                        |
| ---------- | ------- | ------------------------------------------ | ----- | -------------------------------------- |
| plain      | any     | both moments in the weights' format        | 8     | nothing                                |
| master     | bf16    | fp32 weights, both moments in fp32         | 12    | nothing: fully_shard's mixed precision |
| split      | bf16    | what rounding cut off, both moments fp32   | 10    | ties are rounded away from zero        |
| half       | bf16    | fp32 weights, both moments in bf16         | 8     | moments have 8 bits of precision       |
| int8       | bf16    | fp32 weights, both moments in 8 bits       | 6.03  | moments are rounded (`codes`)          |
| split-int8 | bf16    | what rounding cut off, moments in 8 bits   | 4.03  | both                                   |

Every update is element by element, or by blocks that are never cut, so that it gives the same bits in whatever runs and on
whatever stream it is done. All forms use `torch._fused_adamw_`, the kernel of `AdamW(fused=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.plan.states import KEPT, bytes_of, count_of
from foretell.trace.moments import codes

FIRST, SECOND, MASTER, REST = "exp_avg", "exp_avg_sq", "master", "rest"
CODE, SCALE = "_code", "_unit"
"""Behind a moment's name: its codes, and the scales of its blocks."""


@dataclass(frozen=True)
class StateFormat:
    """What is kept for each element."""

    name: str
    kept: Mapping[str, torch.dtype]
    weight: torch.dtype
    """Format of the weights that the model computes with, and of their gradients."""

    @property
    def nbytes(self) -> float:
        """Kept for each element."""
        return bytes_of(self.name, self.weight.itemsize)

    @property
    def scratch(self) -> int:
        """Elements of fp32 that updating one element needs: its gradient, its weight where that is not whole, moments in codes."""
        return 0 if not self.wide else 1 + (REST in self.kept) + 2 * self.coded

    @property
    def coded(self) -> bool:
        """Whether moments are codes of whole blocks."""
        return FIRST + CODE in self.kept

    def part(self, name: str, begin: int, elements: int) -> slice:
        """Where the entries for a run of elements are in the array of a name. A run begins at a multiple of `ALIGN`."""
        first = count_of(name, begin)
        return slice(first, first + count_of(name, elements))

    def run(self, name: str, begin: int, elements: int) -> slice:
        """The same for an update, which takes codes by whole blocks: what is behind a parameter's last element counts for nothing."""
        return self.part(name, begin, codes.padded(elements) if name.endswith(CODE) else elements)

    @property
    def wide(self) -> bool:
        """Whether gradients are widened to fp32 before they are used."""
        return self.name != "plain"


def form(name: str, weights: torch.dtype) -> StateFormat:
    """A form by its name, beside weights of a format."""
    kept = {key: weights if dtype == "weight" else getattr(torch, dtype) for key, dtype in KEPT[name].items()}
    return StateFormat(name, kept, weights if name == "plain" else torch.bfloat16)


@dataclass(frozen=True)
class StepSettings:
    """Of one step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True


@dataclass
class ElementRun:
    """A run of one parameter's elements: all tensors are flat and equally long, but for codes and scales (`StateFormat.run`)."""

    weight: Tensor
    grad: Tensor
    kept: Mapping[str, Tensor]
    step: Tensor
    """Updates of the parameter, this one included; on the device of the run."""


def update(form: StateFormat, runs: Sequence[ElementRun], wide: Tensor, settings: StepSettings, *, scale: Tensor | None, skip: Tensor | None) -> None:
    """Update runs. `wide` is scratch of fp32, `StateFormat.scratch` times as long as all runs together; `scale` has one element that
    gradients are multiplied by, `skip` one that is 1 where nothing may change."""
    if not runs:
        return
    if form.name == "plain":
        if scale is not None:
            torch._foreach_mul_([run.grad for run in runs], scale.to(runs[0].grad.dtype).view(()))
        _adamw([run.weight for run in runs], [run.grad for run in runs], runs, settings, skip)
        return
    if form.coded:
        _coded(form, runs, wide, settings, scale, skip)
        return
    grads = []
    at = 0
    for run in runs:
        grads.append(_widened(run.grad, scale, wide[at : at + run.grad.numel()]))
        at += run.grad.numel()
    if form.name == "split":
        _split(runs, grads, wide[at:], settings, skip)
        return
    masters = [run.kept[MASTER] for run in runs]
    _adamw(masters, grads, runs, settings, skip)
    for run, master in zip(runs, masters, strict=True):
        run.weight.copy_(master)


def _widened(grad: Tensor, scale: Tensor | None, out: Tensor) -> Tensor:
    return out.copy_(grad) if scale is None else torch.mul(grad, scale, out=out)


def _adamw(weights: list[Tensor], grads: list[Tensor], runs: Sequence[ElementRun], settings: StepSettings, skip: Tensor | None) -> None:
    first, second = ([run.kept[name] for run in runs] for name in (FIRST, SECOND))
    wide = [moment.float() if moment.dtype != weights[0].dtype else moment for moment in (*first, *second)]
    _kernel(weights, grads, wide[: len(runs)], wide[len(runs) :], [run.step for run in runs], settings, skip)
    for kept, moved in zip((*first, *second), wide, strict=True):
        if kept is not moved:
            kept.copy_(moved)


def _kernel(
    weights: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor], settings: StepSettings,
    skip: Tensor | None,
) -> None:  # fmt: skip
    kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    kernel(
        weights, grads, first, second, [], steps,
        lr=settings.lr, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay, eps=settings.eps,
        amsgrad=False, maximize=False, grad_scale=None, found_inf=skip,
    )  # fmt: skip


def _coded(form: StateFormat, runs: Sequence[ElementRun], wide: Tensor, settings: StepSettings, scale: Tensor | None, skip: Tensor | None) -> None:
    """Moments out of their codes, the update, and into codes again, in `wide` alone; a gradient's place is what coding needs."""
    parts: list[list[Tensor]] = []
    at, cut = 0, REST in form.kept
    for run in runs:
        elements, whole = run.weight.numel(), codes.padded(run.weight.numel())
        spare, first, second, *own = wide[at : at + form.scratch * whole].view(form.scratch, whole)
        at += form.scratch * whole
        codes.decode_first(run.kept[FIRST + CODE], run.kept[FIRST + SCALE], first, spare)
        codes.decode_second(run.kept[SECOND + CODE], run.kept[SECOND + SCALE], second)
        _widened(run.grad, scale, spare[:elements])
        master = joined(run.weight, run.kept[REST], own[0][:elements]) if cut else run.kept[MASTER]
        parts.append([master, spare, first, second])
    masters = [part[0] for part in parts]
    grads, firsts, seconds = ([part[n][: part[0].numel()] for part in parts] for n in (1, 2, 3))
    _kernel(masters, grads, firsts, seconds, [run.step for run in runs], settings, skip)
    keep = skip > 0 if skip is not None else None
    for run, (master, spare, first, second) in zip(runs, parts, strict=True):
        codes.encode_first(first, run.kept[FIRST + CODE], run.kept[FIRST + SCALE], spare, keep)
        codes.encode_second(second, run.kept[SECOND + CODE], run.kept[SECOND + SCALE], spare, keep)
        if cut:
            take_apart(master, run.weight, run.kept[REST])
        else:
            run.weight.copy_(master)


def _split(runs: Sequence[ElementRun], grads: list[Tensor], wide: Tensor, settings: StepSettings, skip: Tensor | None) -> None:
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
