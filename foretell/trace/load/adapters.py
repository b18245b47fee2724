"""LoRA adapters on the linear layers of a model, over a frozen base that may be held in 4-bit NormalFloat.

A layer is adapted in place: it stays the object the model knows and gets a class that adds the adapter,

    base(x) + (x Aᵀ Bᵀ) · scale        A: rank × in, B: out × rank, both fp32 where the base is bf16 or fp16

so that paths, hooks, shared layers and `find_blocks` see the model they saw before. The ops are those of
peft in eager mode with its defaults, without dropout.

NF4 is bitsandbytes' with its defaults (blocks of 64, no double quantisation): half a byte per weight and one fp32
per 64 weights, 4.5 bits in all. The 16-entry table, 64 bytes a layer in bitsandbytes, is not kept per layer. Forward
and backward each dequantise the weight into a temporary of the compute dtype; only the packed weight is saved.
bitsandbytes does so up to 0.49; later ones fuse the forward of small inputs (up to 1536 tokens) into one kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.trace.fold.blocks import find_blocks

ALPHA = 8
"""peft's default `lora_alpha`; the scale of an adapter is ALPHA / rank."""
BLOCK = 64
"""Weights that share one scale in NF4."""


def adapt(model: nn.Module, rank: int, nf4: bool) -> None:
    """Put adapters of this rank on the linear layers inside the blocks and freeze everything else.

    Without blocks, every linear layer but the output head is adapted. With `nf4` the weights of adapted layers are
    quantised; a weight that two layers share is quantised once.
    """
    layers = _linear_layers(model)
    if not layers:
        raise ModelError(
            f"LoRA finds no linear layer to adapt in {type(model).__name__}",
            "LoRA adapts nn.Linear layers inside the repeated blocks; drop --lora, or train a part with --freeze",
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    quantised: dict[int, tuple[nn.Parameter, nn.Parameter, Tensor]] = {}
    for path, layer in layers.items():
        _add_adapter(layer, rank)
        if nf4:
            _quantise_base(path, layer, quantised)
        layer.__class__ = _adapted(type(layer), nf4)  # type: ignore[arg-type]


# ---------------------------------------------------------------- which layers


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers to adapt by path, each once.

    The output projection of `nn.MultiheadAttention` is left out: its weight is read, the layer is never called.
    """
    blocks = tuple(f"{path}." for path in find_blocks(model))
    skipped = {id(module.out_proj) for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_linear = isinstance(module, nn.Linear) or _is_conv1d(type(module))
        reached = not blocks or path.startswith(blocks)
        if is_linear and reached and id(module) not in skipped and not isinstance(module, LoraLinear):
            found.setdefault(id(module), (path, module))
    if not blocks and len(found) > 1:
        head = id(_output_head(model))
        del found[head if head in found else list(found)[-1]]
    return dict(found.values())


def _output_head(model: nn.Module) -> Any:
    """What a transformers model calls its head; None for others, whose last linear layer is taken for one."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _is_conv1d(kind: type) -> bool:
    """Whether it is transformers' `Conv1D`, GPT-2's linear layer with a transposed weight."""
    return any(base.__name__ == "Conv1D" for base in kind.__mro__)


# ---------------------------------------------------------------- the adapted layer


class LoraLinear(nn.Module):
    """Added before the class of a linear layer: its result plus that of the adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        dtype = result.dtype
        x = x.to(self.lora_A.dtype)
        result = result + self.lora_branch(x)
        return result.to(dtype)

    def lora_branch(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.lora_scale


class Nf4LoraLinear(LoraLinear):
    """The same over a packed base weight. Reading `weight` gives a dequantised copy."""

    nf4_packed: nn.Parameter
    nf4_absmax: Tensor
    nf4_shape: tuple[int, int]
    nf4_dtype: torch.dtype

    @property
    def weight(self) -> Tensor:
        weight = nf4_dequantize(self.nf4_packed, self.nf4_absmax, self.nf4_shape, self.nf4_dtype)
        return weight.t() if _is_conv1d(type(self)) else weight

    def forward(self, x: Tensor) -> Tensor:
        """What peft's and bitsandbytes' `Linear4bit` do, down to peft's clone of the base result."""
        result = self.nf4_base(x).clone()
        if _autocast_dtype(x) is not None:
            return result + self.lora_branch(x)
        x = x.to(self.lora_A.dtype)
        return result + self.lora_branch(x).to(result.dtype)

    def nf4_base(self, x: Tensor) -> Tensor:
        below = next(kind for kind in type(self).__mro__[3:] if "forward" in vars(kind))
        if below is not nn.Linear and below.__name__ != "Conv1D":  # a user's own forward may do more than a product
            return super(LoraLinear, self).forward(x)
        given, dtype = x.dtype, _autocast_dtype(x) or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Nf4Matmul.apply(x.to(dtype), self.nf4_packed, self.nf4_absmax, self.nf4_shape, bias).to(given)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


@functools.cache
def _adapted(kind: type, nf4: bool) -> type:
    return type(f"Lora{kind.__name__}", (Nf4LoraLinear if nf4 else LoraLinear, kind), {})


def _add_adapter(layer: Any, rank: int) -> None:
    weight = layer.weight
    out_features, in_features = reversed(weight.shape) if _is_conv1d(type(layer)) else weight.shape
    dtype = torch.promote_types(weight.dtype, torch.float32)
    layer.lora_A = nn.Parameter(weight.new_empty((rank, in_features), dtype=dtype))
    layer.lora_B = nn.Parameter(weight.new_zeros((out_features, rank), dtype=dtype))
    nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.lora_scale = ALPHA / rank


def _quantise_base(path: str, layer: Any, quantised: dict[int, tuple[nn.Parameter, nn.Parameter, Tensor]]) -> None:
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ModelError(
            f"the weight of '{path}' is computed from other parameters and cannot be held in 4 bits",
            "remove its parametrization, or leave out --nf4",
        )
    plain = weight.detach().t().contiguous() if _is_conv1d(type(layer)) else weight.detach()
    if id(weight) not in quantised:
        packed, absmax = nf4_quantize(plain)
        quantised[id(weight)] = (weight, nn.Parameter(packed, requires_grad=False), absmax)
    del layer._parameters["weight"]
    _, layer.nf4_packed, absmax = quantised[id(weight)]
    layer.register_buffer("nf4_absmax", absmax)
    layer.nf4_shape, layer.nf4_dtype = tuple(plain.shape), weight.dtype


def packed_away(model: nn.Module) -> int:
    """How many more weights a model has than its parameters have elements: in 4 bits two share one."""
    layers = {id(layer.nf4_packed): layer for layer in model.modules() if isinstance(layer, Nf4LoraLinear)}
    return sum(math.prod(layer.nf4_shape) - layer.nf4_packed.numel() for layer in layers.values())


# ---------------------------------------------------------------- NF4


@functools.cache
def nf4_codebook() -> tuple[float, ...]:
    """The 16 values of NF4, ascending: quantiles of a normal distribution, 7 below zero, zero and 8 above, up to ±1."""
    end = 1 - (1 / 32 + 1 / 30) / 2

    def quantiles(count: int) -> list[float]:  # above zero, outermost first, evenly spaced in probability
        return [NormalDist().inv_cdf(end + (0.5 - end) * step / count) for step in range(count)]

    largest = quantiles(8)[0]
    values = [*quantiles(8), 0.0, *(-value for value in quantiles(7))]
    return tuple(sorted(value / largest for value in values))


@torch.library.custom_op("foretell::nf4_quantize", mutates_args=(), schema="(Tensor weight) -> (Tensor, Tensor)")
def nf4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two weights per byte, the first in the high half, and the largest magnitude of each block of 64."""
    values = F.pad(weight.float().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    absmax = values.abs().amax(dim=1)
    code = torch.tensor(nf4_codebook(), device=weight.device)
    scaled = values / torch.where(absmax > 0, absmax, 1.0)[:, None]
    nearest = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8).flatten()
    return ((nearest[::2] << 4) | nearest[1::2])[: (weight.numel() + 1) // 2].clone(), absmax


@nf4_quantize.register_fake
def _(weight: Tensor) -> tuple[Tensor, Tensor]:
    count = weight.numel()
    packed = weight.new_empty(((count + 1) // 2,), dtype=torch.uint8)
    return packed, weight.new_empty(((count + BLOCK - 1) // BLOCK,), dtype=torch.float32)


@torch.library.custom_op(
    "foretell::nf4_dequantize", mutates_args=(),
    schema="(Tensor packed, Tensor absmax, SymInt[] shape, ScalarType dtype) -> Tensor",
)  # fmt: skip
def nf4_dequantize(packed: Tensor, absmax: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The full weight, computed in fp32 and rounded to `dtype`."""
    code = torch.tensor(nf4_codebook(), device=packed.device)
    values = code[torch.stack((packed >> 4, packed & 15), dim=-1).flatten().int()]
    scaled = F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK) * absmax[:, None]
    return scaled.flatten()[: math.prod(shape)].reshape(shape).to(dtype, copy=True)


@nf4_dequantize.register_fake
def _(packed: Tensor, absmax: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


class _Nf4Matmul(torch.autograd.Function):
    """x Wᵀ + bias for a packed W; saves W packed, never x, which no gradient of a frozen weight needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, absmax: Tensor, shape: Sequence[int], bias: Tensor | None) -> Any:
        ctx.save_for_backward(packed, absmax)
        ctx.shape = shape
        return F.linear(x, nf4_dequantize(packed, absmax, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        packed, absmax = ctx.saved_tensors
        return gradient @ nf4_dequantize(packed, absmax, ctx.shape, gradient.dtype), None, None, None, None
