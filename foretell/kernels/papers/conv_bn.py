"""Convolutions with the normalisation behind them folded in while statistics are frozen, as in fine-tuning.

You et al. 2023, "Efficient ConvBN Blocks for Transfer Learning and Beyond" (Tune mode). In evaluation mode y = γ·(conv(x) - μ)/σ + β is
one convolution with weight w·γ/σ and bias β + (b - μ)·γ/σ: outputs and gradients are those of evaluation mode, the convolution's own
output is neither made nor kept. The fold is done anew in each forward, from parameters that are trained on.

    tuned = tune(model); print(tuned); tuned.revert()

Opt-in: it serves where BatchNorm is in evaluation mode. In training mode, whose statistics are those of the batch, both modules run as
they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from foretell.errors import UserError
from foretell.kernels.papers.forwards import SwappedForwards, replaced

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def conv_bn(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, x: Tensor) -> Tensor:
    """norm(conv(x)) by frozen statistics, in one convolution."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    shift = shift * scale if norm.bias is None else shift * scale + norm.bias
    weight = conv.weight * scale.view(-1, *(1,) * (conv.weight.dim() - 1))
    return conv._conv_forward(x, weight.to(conv.weight.dtype), shift.to(conv.weight.dtype))


@dataclass(frozen=True, kw_only=True)
class Tuned(SwappedForwards):
    """What `tune` did."""

    pairs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{conv} + {norm}: one convolution" for conv, norm in self.pairs] + [f"{path}: left, {why}" for path, why in self.left]
        return "\n".join(lines) or "no convolution has a BatchNorm behind it"


@dataclass(frozen=True, eq=False)
class FoldedConv:
    """A convolution's forward. An object and no closure: in a copy of the model it has the copy's BatchNorm."""

    conv: Any
    norm: Any

    def __call__(self, x: Tensor) -> Tensor:
        return type(self.conv).forward(self.conv, x) if self.norm.training else conv_bn(self.conv, self.norm, x)


@dataclass(frozen=True, eq=False)
class FoldedNorm:
    """The forward of the BatchNorm that it has taken in."""

    norm: Any

    def __call__(self, x: Tensor) -> Tensor:
        return type(self.norm).forward(self.norm, x) if self.norm.training else x


def tune(model: nn.Module) -> Tuned:
    """Fold each BatchNorm whose input is one convolution's output, which nothing else reads. The forward must be traceable."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception as error:
        raise UserError(f"the forward of {type(model).__name__} cannot be traced ({str(error).splitlines()[0]})", "tune its backbone") from error
    modules = dict(model.named_modules())
    calls: dict[nn.Module, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[modules[node.target]] = calls.get(modules[node.target], 0) + 1
    pairs, left, put = [], [], []
    for node in graph.nodes:
        if node.op != "call_module" or type(modules[node.target]) not in NORMS:
            continue
        norm = modules[node.target]
        before = node.args[0] if node.args else None
        conv = modules[before.target] if isinstance(before, fx.Node) and before.op == "call_module" else None
        why = _why_not(conv, norm, before, calls)
        if why or conv is None or before is None:
            left.append((node.target, why))
            continue
        pairs.append((before.target, node.target))
        conv.forward, norm.forward = FoldedConv(conv, norm), FoldedNorm(norm)
        put += [(before.target, conv, conv.forward), (node.target, norm, norm.forward)]
    return Tuned(pairs=tuple(pairs), left=tuple(left), modules=tuple(put))


def _why_not(conv: nn.Module | None, norm: nn.Module, before: fx.Node | None, calls: dict[nn.Module, int]) -> str:
    if conv is None or before is None or type(conv) not in CONVS:
        return "its input is no convolution's output"
    if norm.running_mean is None:
        return "it has no running statistics"
    if len(before.users) > 1:
        return "the convolution's output is read by others too"
    if calls[conv] > 1 or calls[norm] > 1:
        return "a module is called more than once"
    if any(replaced(one) for one in (conv, norm)):
        return "a forward was replaced already"
    if any(one._forward_hooks or one._forward_pre_hooks or one._backward_hooks for one in (conv, norm)):
        return "hooks look at what is between"
    return ""

