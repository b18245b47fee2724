"""Chains of pointwise steps as one kernel, for one tensor or for many of different sizes.

Amoros et al. 2025, "The Fused Kernel Library". A chain is a value; from it one Triton kernel is written, which reads each element once and
writes it once (vertical fusion), for all tensors of a batch in one launch (horizontal fusion). Inputs may be views: crops, transposed
images, channels in any place; they are read where they lie.

    normalise = chain("float", ("sub", "mean"), ("div", "std"), ("clamp", -3, 3), "half")
    normalise([image[:, 8:232, 16:240] for image in images], mean=Along(0, mean), std=Along(0, std))

Steps are computed in float32 and rounded at the end; the reference rounds after each step. Gradients come from the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.errors import UnknownName, UserError
from foretell.kernels.kernel import interpreted, launched

CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "uint8": torch.uint8}
STEPS: Mapping[str, tuple[int, Callable[..., Tensor], str]] = {
    "relu": (0, F.relu, "tl.maximum({x}, 0.0)"),
    "gelu": (0, F.gelu, "0.5 * {x} * (1.0 + tl.erf({x} * 0.7071067811865476))"),
    "silu": (0, F.silu, "{x} * tl.sigmoid({x})"),
    "sigmoid": (0, torch.sigmoid, "tl.sigmoid({x})"),
    "tanh": (0, torch.tanh, "2.0 * tl.sigmoid(2.0 * {x}) - 1.0"),
    "exp": (0, torch.exp, "tl.exp({x})"),
    "log": (0, torch.log, "tl.log({x})"),
    "sqrt": (0, torch.sqrt, "tl.sqrt({x})"),
    "rsqrt": (0, torch.rsqrt, "tl.rsqrt({x})"),
    "abs": (0, torch.abs, "tl.abs({x})"),
    "neg": (0, torch.neg, "-{x}"),
    "square": (0, torch.square, "{x} * {x}"),
    "add": (1, torch.add, "{x} + {a}"),
    "sub": (1, torch.sub, "{x} - {a}"),
    "mul": (1, torch.mul, "{x} * {a}"),
    "div": (1, torch.div, "{x} / {a}"),
    "max": (1, lambda x, a: torch.maximum(x, torch.as_tensor(a, dtype=x.dtype, device=x.device)), "tl.maximum({x}, {a})"),
    "min": (1, lambda x, a: torch.minimum(x, torch.as_tensor(a, dtype=x.dtype, device=x.device)), "tl.minimum({x}, {a})"),
    "clamp": (2, torch.clamp, "tl.minimum(tl.maximum({x}, {a}), {b})"),
}
"""Of each step how many operands it has, what it is in torch, and in Triton."""


@dataclass(frozen=True)
class Along:
    """An operand with a value for each place along a dimension of the input."""

    dim: int
    values: Tensor


@dataclass(frozen=True)
class Chain:
    """Steps by name, with numbers or names of operands."""

    steps: tuple[tuple[str, tuple[float | str, ...]], ...]

    def __call__(self, x: Tensor | Sequence[Tensor], **operands: Tensor | Along) -> Any:
        """The chain of one tensor, or of each of several. A tensor as operand has the input's shape, or is one number; in a batch
        operands are numbers or `Along` a dimension."""
        batch = [x] if isinstance(x, Tensor) else list(x)
        self._check(batch, operands, isinstance(x, Tensor))
        if not batch:
            return []
        if batch[0].is_cuda or interpreted():
            wants = any(one.requires_grad for one in (*batch, *_tensors(operands))) and torch.is_grad_enabled()
            found = _differentiable(self, batch, operands) if wants else launched("pointwise.run")(self, batch, operands)
        else:
            found = [self.reference(one, **operands) for one in batch]
        return found[0] if isinstance(x, Tensor) else found

    def reference(self, x: Tensor, **operands: Tensor | Along) -> Tensor:
        """Step by step in plain torch."""
        for name, given in self.steps:
            if name in CASTS:
                x = x.to(CASTS[name])
                continue
            x = STEPS[name][1](x, *(_spread(operands[one], x) if isinstance(one, str) else one for one in given))
        return x

    @property
    def names(self) -> tuple[str, ...]:
        """Of its operands, in order."""
        return tuple(dict.fromkeys(one for _, given in self.steps for one in given if isinstance(one, str)))

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """Of the result."""
        last = next((CASTS[name] for name, _ in reversed(self.steps) if name in CASTS), given)
        return last

    def _check(self, batch: list[Tensor], operands: Mapping[str, Tensor | Along], single: bool) -> None:
        if set(operands) != set(self.names):
            raise UserError(f"operands {sorted(operands)} for a chain of {sorted(self.names)}", "each of them by name")
        if len({(one.dtype, one.device) for one in batch}) > 1:
            raise UserError("tensors of several formats or devices in a batch", "one format, on one device")
        if any(one.dim() > 4 for one in batch):
            raise UserError(f"a tensor of {max(one.dim() for one in batch)} dimensions", "four and less")
        for name, one in operands.items():
            for x in batch:
                if isinstance(one, Along):
                    fits = one.values.dim() == 1 and -x.dim() <= one.dim < x.dim() and one.values.numel() == x.shape[one.dim]
                else:
                    fits = one.numel() == 1 or (single and one.shape == x.shape)
                if not fits:
                    raise UserError(f"operand '{name}' does not fit {tuple(x.shape)}", "a number, the input's shape, or Along(dim, values)")


def chain(*steps: str | tuple[Any, ...]) -> Chain:
    """A chain from names of steps and of formats, with operands where a step has them."""
    found = []
    for step in steps:
        name, *given = (step,) if isinstance(step, str) else step
        if name not in STEPS and name not in CASTS:
            raise UnknownName("step", name, (*STEPS, *CASTS))
        wanted = 0 if name in CASTS else STEPS[name][0]
        if len(given) != wanted:
            raise UserError(f"step '{name}' has {len(given)} operands", f"{wanted}")
        if any(isinstance(one, str) and not one.isidentifier() for one in given):
            raise UserError(f"operands {given} of step '{name}'", "numbers or names")
        found.append((name, tuple(one if isinstance(one, str) else float(one) for one in given)))
    return Chain(tuple(found))


def _spread(operand: Tensor | Along, x: Tensor) -> Tensor:
    if not isinstance(operand, Along):
        return operand
    return operand.values.view(*(-1 if at == operand.dim % x.dim() else 1 for at in range(x.dim())))


def _tensors(operands: Mapping[str, Tensor | Along]) -> list[Tensor]:
    return [one.values if isinstance(one, Along) else one for one in operands.values()]


def _differentiable(steps: Chain, batch: list[Tensor], operands: Mapping[str, Tensor | Along]) -> list[Tensor]:
    return list(_Fused.apply(steps, len(batch), operands, *batch, *_tensors(operands)))


class _Fused(torch.autograd.Function):
    """Forward in one launch; backward by the reference, computed once more."""

    @staticmethod
    def forward(ctx: Any, steps: Chain, count: int, operands: Mapping[str, Tensor | Along], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.steps, ctx.count = steps, count
        ctx.kinds = {name: one.dim if isinstance(one, Along) else None for name, one in operands.items()}
        ctx.save_for_backward(*tensors)
        return tuple(launched("pointwise.run")(steps, list(tensors[:count]), operands))

    @staticmethod
    def backward(ctx: Any, *up: Tensor) -> tuple[Tensor | None, ...]:
        given = [one.detach().requires_grad_(needed) for one, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)]
        operands = {
            name: one if dim is None else Along(dim, one) for (name, dim), one in zip(ctx.kinds.items(), given[ctx.count :], strict=True)
        }  # fmt: skip
        wanted = [one for one in given if one.requires_grad]
        with torch.enable_grad():
            outs = [ctx.steps.reference(one, **operands) for one in given[: ctx.count]]
        found = iter(torch.autograd.grad(outs, wanted, up, allow_unused=True))
        return None, None, None, *(next(found) if one.requires_grad else None for one in given)
