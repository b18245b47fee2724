"""Convolutions whose kernel is weighted by a density over its offsets.

Cammarasana and Patanè 2025, "Optimal Weighted Convolution for Classification and Denoising". The weight is multiplied by a fixed density
before it is used: neighbours count by their distance. Nothing is added to what is learned, and ones leave every bit as it was.

    weighed = weigh(model, {3: (0.8,)})     kernels of side 3: 0.8 at the rim, 1 in the middle, in each direction
    print(weighed); weighed.revert()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType

import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.papers.forwards import SwappedForwards, replaced

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def density(sides: Sequence[int], rims: Mapping[int, Sequence[float]]) -> Tensor | None:
    """Of a kernel with these sides: products of what `rims` has for each side, from the rim inwards; None where it has none of them."""
    if not any(side in rims for side in sides):
        return None
    total = torch.ones(())
    for side in sides:
        given = tuple(rims.get(side, (1.0,) * (side // 2)))
        if side % 2 == 0 or len(given) != side // 2:
            raise UserError(f"{len(given)} values for a kernel of side {side}", "odd sides, with a value for each place between rim and middle")
        total = total[..., None] * torch.tensor((*given, 1.0, *given[::-1]))
    return total


def weighted_conv(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor, weights: Tensor) -> Tensor:
    """What `module` computes with its kernels weighted."""
    return module._conv_forward(x, module.weight * weights.to(module.weight), module.bias)


def weigh(model: nn.Module, rims: Mapping[int, Sequence[float]]) -> SwappedForwards:
    """Weight the convolutions of a model by the density of their sides. Modules, parameters and state dict stay what they are."""
    put, left = [], []
    for path, module in model.named_modules():
        if type(module) not in PLAIN:
            continue
        weights = density(module.kernel_size, rims)
        if weights is None:
            left.append((path, f"no density for sides {tuple(module.kernel_size)}"))
        elif replaced(module):
            left.append((path, "its forward was replaced already"))
        else:
            weights = weights.to(module.weight)
            module.forward = MethodType(lambda self, x, weights=weights: weighted_conv(self, x, weights), module)
            put.append((path, module, module.forward))
    return SwappedForwards(modules=tuple(put), left=tuple(left))
