"""The class that an adapted layer gets. It stays the object the model knows, so that paths, hooks, shared layers and
`find_blocks` see the model they saw before:

    base(x) + (x Aᵀ Bᵀ) · scale        A: rank × in, B: out × rank, both fp32 where the base is bf16 or fp16

Results, gradients and updates are those of peft in eager mode, to the bit. Over a packed base, forward and backward each
unpack the weight into a temporary of the compute dtype.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.trace.adapters import functions
from foretell.trace.adapters.formats import pack, unpack
from foretell.trace.adapters.functions import (
    adapted_product,
    autocast_dtype,
    dora_product,
    low_rank_product,
    no_autocast,
    packed_product,
)
from foretell.trace.recipe import Adapters


class AdaptedLinear(nn.Module):
    """Added before the class of a linear layer: its result plus that of the adapter."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude: nn.Parameter
    lora_adapter: Adapters
    lora_scales: tuple[float, float]
    """The adapter's scale, as what the small product is multiplied by and what the wide one is."""

    def forward(self, x: Tensor) -> Tensor:
        if self.lora_in_pieces(x):
            return self.lora_whole(x)
        result = self.lora_base(x)
        dtype = result.dtype
        return (result + self.lora_update(x, result)).to(dtype)

    def lora_in_pieces(self, x: Tensor) -> bool:
        """Whether a copy of what goes in or comes out, in the dtype of the adapter, is too large to be made as a whole."""
        a, how = self.lora_A, self.lora_adapter
        rows = x.numel() // max(1, x.shape[-1])
        if rows * max(a.shape[1], self.lora_B.shape[0]) * a.dtype.itemsize <= functions.PIECE_BYTES or a.dtype == x.dtype:
            return False
        if how.kind not in ("lora", "rslora") or (how.dropout and self.training) or autocast_dtype(x) is not None:
            return False
        return _below(type(self)) is nn.Linear and (self.bias is None or not self.bias.requires_grad) and self.lora_held(x) is not None

    def lora_held(self, x: Tensor) -> tuple[Any, ...] | None:
        """The frozen weight as `adapted_product` takes it; None where it is none."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        return (weight, None, None, None, (), "") if not weight.requires_grad and weight.dtype == x.dtype else None

    def lora_whole(self, x: Tensor, round_first: bool = False) -> Tensor:
        """Base and adapter at once, in pieces."""
        adapter = (self.lora_A, self.lora_B, *self.lora_scales, round_first)
        return adapted_product(x, *adapter, self.bias, *(self.lora_held(x) or ()))  # type: ignore[arg-type]

    def lora_base(self, x: Tensor) -> Tensor:
        """What the layer computed before."""
        found: Tensor = super().forward(x)
        return found

    def lora_update(self, x: Tensor, result: Tensor) -> Tensor:
        """What the adapter adds to `result`."""
        how, dtype = self.lora_adapter, autocast_dtype(x) or self.lora_A.dtype
        dropped = F.dropout(self.lora_input(x), how.dropout, self.training) if how.dropout and self.training else x
        if how.kind in ("lora", "rslora"):
            return low_rank_product(dropped, self.lora_A, self.lora_B, *self.lora_scaling(dtype), dtype)
        wide = self.lora_input(x).dtype
        bias = getattr(self, "bias", None)
        if dropped is not x:  # the base takes what the adapter takes
            result, bias = F.linear(dropped, self.lora_rows().to(wide)), None
        norm = self.lora_norms(wide)
        return dora_product(dropped, result, bias, self.lora_A, self.lora_B, self.lora_magnitude, norm, how.scale, dtype)

    def lora_scaling(self, dtype: torch.dtype) -> tuple[float, float]:
        """`lora_scales`; at the wide product where a compiler fuses it with what follows, and in fp16, whose exponents are few."""
        wide = dtype is torch.float16 or torch.compiler.is_compiling()
        return (1.0, self.lora_adapter.scale) if wide else self.lora_scales

    def lora_input(self, x: Tensor) -> Tensor:
        return x.to(self.lora_A.dtype)

    def lora_rows(self) -> Tensor:
        """The frozen weight with a row for every output."""
        weight: Tensor = self.weight  # type: ignore[assignment]
        return weight.t() if is_conv1d(type(self)) else weight

    @torch.no_grad()
    def lora_norms(self, dtype: torch.dtype) -> Tensor:
        """The length of every row of the updated weight, which gradients do not pass through."""
        a, b, scale, weight = self.lora_A, self.lora_B, self.lora_adapter.scale, self.lora_rows()
        if self.lora_adapter.kind == "dora":
            change = F.linear(F.linear(torch.eye(a.shape[1], device=a.device, dtype=a.dtype), a), b).T.to(dtype)
            return torch.linalg.norm(weight.to(dtype) + scale * change, dim=1).to(dtype)
        with no_autocast(weight):
            length = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
            across = ((weight @ a.to(weight.dtype).T).float() * b).sum(1)
            own = (b @ (a @ a.T).to(b.dtype) * b).sum(1)
            return (length.square() + 2 * scale * across + scale**2 * own).clamp(min=0).sqrt()


class PackedLinear(AdaptedLinear):
    """The same over a packed base weight. Reading `weight` gives an unpacked copy."""

    base_codes: nn.Parameter
    base_scales: Tensor
    base_nested: Tensor
    base_shape: tuple[int, int]
    base_dtype: torch.dtype
    """Of the weight before it was packed."""
    base_kind: str
    """One of BASE_FORMATS."""

    @property
    def weight(self) -> Tensor:
        weight = unpack(self.base_codes, self.base_scales, self.base_nested, self.base_shape, self.base_dtype, self.base_kind)
        return weight.t() if is_conv1d(type(self)) else weight

    def forward(self, x: Tensor) -> Tensor:
        """In the order in which peft adds to what bitsandbytes computes: rounded first, added then."""
        if self.lora_in_pieces(x):
            return self.lora_whole(x, round_first=True)
        result = self.lora_base(x)
        if autocast_dtype(x) is not None and self.lora_adapter.kind in ("lora", "rslora"):
            return result + self.lora_update(x, result)
        if self.lora_adapter.kind in ("lora", "rslora"):
            return result + self.lora_update(x, result).to(result.dtype)
        return (result + self.lora_update(x, result)).to(result.dtype)

    def lora_held(self, x: Tensor) -> tuple[Any, ...] | None:
        return None, self.base_codes, self.base_scales, self.base_nested, self.base_shape, self.base_kind

    def lora_base(self, x: Tensor) -> Tensor:
        below = _below(type(self))
        if below is not nn.Linear and below.__name__ != "Conv1D":  # a user's own forward may do more than a product
            return super().lora_base(x)
        given, dtype = x.dtype, autocast_dtype(x) or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        packed = (self.base_codes, self.base_scales, self.base_nested, self.base_shape, self.base_kind)
        return packed_product(x.to(dtype), *packed, bias).to(given)


# ---------------------------------------------------------------- putting it on


def _below(kind: type) -> type:
    """The class that a layer had, as far as its forward goes."""
    return next(one for one in kind.__mro__ if "forward" in vars(one) and not issubclass(one, AdaptedLinear))


def is_conv1d(kind: type) -> bool:
    """Whether it is transformers' `Conv1D`, GPT-2's linear layer with a transposed weight."""
    return any(base.__name__ == "Conv1D" for base in kind.__mro__)


def sizes_of(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    shape = layer.base_shape if isinstance(layer, PackedLinear) else layer.weight.shape
    first, second = (int(size) for size in shape)
    return (second, first) if is_conv1d(type(layer)) and not isinstance(layer, PackedLinear) else (first, second)


@functools.cache
def _adapted(kind: type, packed: bool) -> type:
    return type(f"Lora{kind.__name__}", (PackedLinear if packed else AdaptedLinear, kind), {})


def add_adapter(layer: Any, adapters: Adapters, *, packed: bool) -> None:
    """Give a linear layer its adapter, which changes nothing before it is trained."""
    kind: type = type(layer)
    like = layer.base_codes if packed else layer.weight
    out_features, in_features = layer.base_shape if packed else sizes_of(layer)
    dtype = torch.promote_types(layer.base_dtype if packed else like.dtype, torch.float32)
    layer.lora_A = nn.Parameter(like.new_empty((adapters.rank, in_features), dtype=dtype))
    layer.lora_B = nn.Parameter(like.new_zeros((out_features, adapters.rank), dtype=dtype))
    nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.lora_adapter = adapters
    exact = math.frexp(adapters.scale)[0] == 0.5  # a power of two, which changes no digit wherever it is applied
    layer.lora_scales = (adapters.scale, 1.0) if exact else (1.0, adapters.scale)
    layer.__class__ = _adapted(kind, packed)
    if adapters.kind.startswith("dora"):
        with torch.no_grad():
            lengths = torch.linalg.vector_norm(layer.lora_rows(), dim=1, dtype=dtype)
        layer.lora_magnitude = nn.Parameter(lengths)


def pack_base(path: str, layer: Any, kind: str, packed: dict[tuple[int, str], Any]) -> None:
    """Hold the weight of a layer in another format. `packed` knows those that are packed already, by the weight they were."""
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ModelError(
            f"the weight of '{path}' is computed from other parameters and cannot be held in {kind}",
            "remove its parametrization, or leave --nf4 and --base out",
        )
    plain = weight.detach().t().contiguous() if is_conv1d(type(layer)) else weight.detach()
    key = (id(weight), kind)
    if key not in packed:
        codes, scales, nested = pack(plain, kind)
        held = nn.Parameter(scales, requires_grad=False) if scales.numel() else scales
        packed[key] = (weight, nn.Parameter(codes, requires_grad=False), held, nested)
    del layer._parameters["weight"]
    _, layer.base_codes, scales, nested = packed[key]
    if isinstance(scales, nn.Parameter):
        layer.base_scales = scales
    else:
        layer.register_buffer("base_scales", scales, persistent=False)
    layer.register_buffer("base_nested", nested, persistent=False)
    layer.base_shape, layer.base_dtype, layer.base_kind = tuple(plain.shape), weight.dtype, kind
