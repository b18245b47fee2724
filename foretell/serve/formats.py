"""Weights and keys and values in fewer bits on plain PyTorch: turned back where they are used. What a CPU runs, and the reference of kernels.

    weights of blocks   int8, fp8: a scale for every output         int4: a scale and a zero point for each 128 numbers, two numbers a byte
    keys and values     int8: a scale for every token and head      fp8: as it is

A module's `weight` stays a tensor in the model's dtype for whoever reads it; what is held is a parametrization of it. Tables and the output
layer stay as they are, as in the forecast (lower.serving_formats).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foretell.lower.serving_formats import known_kv, known_weights
from foretell.trace.serving.packed import Cached

GROUP = 128
"""Numbers of one scale in int4."""
FP8, FP8_MOST = torch.float8_e4m3fn, 448.0
KV_AGREES = {"bf16": 0.0, "int8": 3e-2, "fp8": 1e-1}
"""Of the largest logit: how far rounding keys and values may take it."""


class HeldWeight(nn.Module):
    """One weight: numbers of few bits and their scales, and back."""

    def __init__(self, name: str, dtype: torch.dtype, inner: int) -> None:
        super().__init__()
        self.name, self.dtype, self.inner = name, dtype, inner
        self.sizes: tuple[int, ...] = ()

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        rows = weight.detach().transpose(self.inner, -1).float()
        self.sizes = tuple(rows.shape)
        if self.name == "int4":
            return _fours(rows, weight.dtype)
        most = 127.0 if self.name == "int8" else FP8_MOST
        scale = (rows.abs().amax(-1, keepdim=True) / most).to(weight.dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        numbers = (rows / scale.float()).clamp(-most, most)
        return numbers.round().to(torch.int8) if self.name == "int8" else numbers.to(FP8), scale

    def forward(self, held: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        if zero is None:
            rows = held.to(self.dtype) * scale
        else:
            both = torch.stack((held & 15, held >> 4), -1).flatten(-2).to(self.dtype)
            groups = both.unflatten(-1, (-1, GROUP))
            rows = ((groups - zero.to(self.dtype)[..., None]) * scale.to(self.dtype)[..., None]).flatten(-2)[..., : self.sizes[-1]]
        return rows.transpose(self.inner, -1)


def _fours(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers of 0 to 15 a byte; of each group its scale and the number that stands for 0."""
    size = rows.shape[-1]
    padded = nn.functional.pad(rows, (0, -size % GROUP))
    groups = padded.unflatten(-1, (-1, GROUP))
    kind = torch.float16 if dtype == torch.float32 else dtype
    low, high = groups.amin(-1).clamp_max(0.0), groups.amax(-1).clamp_min(0.0)
    scale = ((high - low) / 15).clamp_min(1e-7).to(kind)
    zero = (-low / scale.float()).round().clamp(0, 15)
    numbers = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4, scale, zero.to(kind)


def narrowed(model: nn.Module, name: str) -> nn.Module:
    """The model with the weights of its blocks' products in another format, one after the other; one that two modules share stays as it is."""
    known_weights(name)
    if name == "bf16":
        return model
    owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    for path, module in list(model.named_modules()):
        if not any(part.isdigit() for part in path.split(".")) or isinstance(module, nn.Embedding):
            continue
        inner = 0 if type(module).__name__ == "Conv1D" else -1  # of transformers: a product the other way round
        for key, weight in list(module.named_parameters(recurse=False)):
            if 2 <= weight.dim() <= 3 and weight.is_floating_point() and owners[id(weight)] == 1:
                weight.requires_grad_(False)
                parametrize.register_parametrization(module, key, HeldWeight(name, weight.dtype, inner), unsafe=True)
    return model


class KvPool:
    """Keys and values of all layers, page by page."""

    def __init__(
        self, layers: Sequence[Cached], pages: int, size: int, dtype: torch.dtype, device: torch.device, kv: str = "bf16"
    ) -> None:
        known_kv(kv)
        self.size, self.layers, self.kv = size, layers, kv
        slots = pages * size
        kind = {"int8": torch.int8, "fp8": FP8}.get(kv, dtype)
        self.keys = [torch.zeros(slots, one.heads, one.key, dtype=kind, device=device) for one in layers]
        self.values = [torch.zeros(slots, one.heads, one.value, dtype=kind, device=device) for one in layers]
        many = 2 * len(layers) if kv == "int8" else 0
        self.scales = [torch.zeros(slots, layers[number // 2].heads, dtype=torch.float16, device=device) for number in range(many)]
        """Of keys and of values of each layer in turn, where there are any."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (*self.keys, *self.values, *self.scales))

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        for place, (held, given) in enumerate(((self.keys[layer], key), (self.values[layer], value))):
            if self.kv == "int8":
                scale = (given.float().abs().amax(-1) / 127).clamp(2.0**-24, 65504).half()
                self.scales[2 * layer + place].index_copy_(0, slots, scale)
                given = (given.float() / scale.float()[..., None]).round().clamp(-127, 127)
            elif self.kv == "fp8":
                given = given.clamp(-FP8_MOST, FP8_MOST)
            _bytes(held).index_copy_(0, slots, _bytes(given.to(held.dtype)))

    def read(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = []
        for place, held in enumerate((self.keys[layer], self.values[layer])):
            rows = _bytes(held).index_select(0, slots).view(held.dtype).to(dtype)
            if self.kv == "int8":
                rows = rows * self.scales[2 * layer + place].index_select(0, slots).to(dtype)[..., None]
            found.append(rows)
        return found[0], found[1]


def _bytes(tensor: Tensor) -> Tensor:
    """Kinds that cannot be indexed, as numbers of their size."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def pool_bytes(layers: Sequence[Cached], kv: str, dtype: torch.dtype) -> int:
    """Of a token."""
    each = {"int8": 1, "fp8": 1}.get(kv, dtype.itemsize)
    return sum(math.prod((one.heads, (one.key + one.value) * each + (4 if kv == "int8" else 0))) for one in layers)
