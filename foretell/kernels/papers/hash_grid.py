"""Positions to features by hashed tables at many resolutions, and the small MLP behind them.

Mubarik et al. 2023, "Hardware Acceleration of Neural Graphics", after Müller et al. 2022 (instant neural graphics primitives). Encoding and
MLP take most of the time of such models; in one launch features are neither written nor read.

    encode(x, table, sides, entries)               features of points in the unit box, (points, levels · features)
    hash_mlp(x, table, sides, entries, layers)     and two linear layers with a ReLU between
    fused = fuse(model)                            into the fields of `zoo/scenes/pvd.py` and modules like them; fused.revert()
    amdahl(share, factor)                          what the whole gains when a share of it takes 1/factor of its time

The backward computes features once more; tables' gradients are added up by atomics on a GPU, so their last bits change between runs.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.kernel import define
from foretell.kernels.papers.forwards import SwappedForwards, replaced

PRIMES = (1, 2_654_435_761, 805_459_861)
CORNERS = 8


def _corners(x: Tensor, sides: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cell, place in it, and first row of each level's table: (levels, points, 3), (levels, points, 3), (levels, 1)."""
    at = (0.5 + 0.5 * x) * sides.to(x.dtype)[:, None, None]
    cell = at.detach().floor()
    return cell.long(), at - cell, (torch.arange(len(sides), device=x.device) * entries)[:, None]


def _corner(number: int, cell: Tensor, part: Tensor, first: Tensor, entries: int) -> tuple[Tensor, Tensor]:
    """Row of the table and weight of one of a cell's corners, (levels, points) each."""
    bits = [number >> axis & 1 for axis in range(3)]
    a, b, c = ((cell[..., axis] + bits[axis]) * PRIMES[axis] for axis in range(3))
    one = [part[..., axis] if bits[axis] else 1 - part[..., axis] for axis in range(3)]
    return (a ^ b ^ c) % entries + first, one[0] * one[1] * one[2]


def plain_encode(x: Tensor, table: Tensor, sides: Tensor, entries: int) -> Tensor:
    """In plain torch, differentiable in positions too."""
    cell, part, first = _corners(x, sides, entries)
    total = x.new_zeros(())
    for number in range(CORNERS):
        row, weight = _corner(number, cell, part, first, entries)
        total = total + weight.unsqueeze(-1) * table[row]
    return total.transpose(0, 1).flatten(1)


def encode_backward(up: Tensor, x: Tensor, table: Tensor, sides: Tensor, entries: int) -> Tensor:
    """Of the table alone."""
    cell, part, first = _corners(x, sides, entries)
    found = torch.zeros_like(table)
    wide = up.unflatten(1, (len(sides), -1)).transpose(0, 1)
    for number in range(CORNERS):
        row, weight = _corner(number, cell, part, first, entries)
        found.index_add_(0, row.flatten(), (weight.unsqueeze(-1) * wide).flatten(0, 1))
    return found


def _plain_mlp(x: Tensor, table: Tensor, sides: Tensor, entries: int, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.addmm(b2, torch.relu(torch.addmm(b1, plain_encode(x, table, sides, entries), w1.t())), w2.t())


_encode = define(
    "hash_encode", "(Tensor x, Tensor table, Tensor sides, int entries) -> Tensor", plain=plain_encode, triton="hash_grid.encode",
    fake=lambda x, table, sides, entries: x.new_empty(x.shape[0], sides.shape[0] * table.shape[1]),
)  # fmt: skip
_encode_back = define(
    "hash_encode_backward", "(Tensor up, Tensor x, Tensor table, Tensor sides, int entries) -> Tensor", plain=encode_backward,
    triton="hash_grid.encode_backward", fake=lambda up, x, table, sides, entries: torch.empty_like(table),
)  # fmt: skip
_mlp = define(
    "hash_mlp", "(Tensor x, Tensor table, Tensor sides, int entries, Tensor w1, Tensor b1, Tensor w2, Tensor b2) -> Tensor", plain=_plain_mlp,
    triton="hash_grid.mlp", fake=lambda x, table, sides, entries, w1, b1, w2, b2: x.new_empty(x.shape[0], w2.shape[0]),
)  # fmt: skip


def _encode_gradient(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
    x, table, sides = ctx.saved_tensors
    return None, _encode_back(up.contiguous(), x, table, sides, ctx.entries), None, None


def _encode_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, sides, ctx.entries = inputs
    ctx.save_for_backward(x, table, sides)


def _mlp_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, table, sides, ctx.entries, w1, b1, w2, _ = inputs
    ctx.save_for_backward(x, table, sides, w1, b1, w2)


def _mlp_gradient(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
    x, table, sides, w1, b1, w2 = ctx.saved_tensors
    features = _encode(x, table, sides, ctx.entries)
    hidden = torch.relu(torch.addmm(b1, features, w1.t()))
    inner = torch.where(hidden > 0, up @ w2, 0.0)
    of_table = _encode_back((inner @ w1).contiguous(), x, table, sides, ctx.entries) if ctx.needs_input_grad[1] else None
    return None, of_table, None, None, inner.t() @ features, inner.sum(0), up.t() @ hidden, up.sum(0)


torch.library.register_autograd("foretell_kernels::hash_encode", _encode_gradient, setup_context=_encode_context)
torch.library.register_autograd("foretell_kernels::hash_mlp", _mlp_gradient, setup_context=_mlp_context)


def encode(x: Tensor, table: Tensor, sides: Tensor, entries: int) -> Tensor:
    """Features of points (n, 3) within ±1 from `table` (levels · entries, features). Positions that want gradients take plain torch."""
    _check(x, table, sides, entries)
    if x.requires_grad and torch.is_grad_enabled():
        return plain_encode(x, table, sides, entries)
    return _encode(x.contiguous(), table.contiguous(), sides, entries)


def hash_mlp(x: Tensor, table: Tensor, sides: Tensor, entries: int, layers: tuple[nn.Linear, nn.Linear]) -> Tensor:
    """Features and two linear layers with a ReLU between, in one launch on a GPU."""
    _check(x, table, sides, entries)
    given = [one for layer in layers for one in (layer.weight, layer.bias)]
    if any(one is None for one in given):
        raise UserError("a linear layer has no bias", "layers with biases")
    if x.requires_grad and torch.is_grad_enabled():
        return _plain_mlp(x, table, sides, entries, *given)
    return _mlp(x.contiguous(), table.contiguous(), sides, entries, *(one.contiguous() for one in given))


def _check(x: Tensor, table: Tensor, sides: Tensor, entries: int) -> None:
    if x.dim() != 2 or x.shape[1] != 3 or table.dim() != 2 or table.shape[0] != sides.numel() * entries:
        raise UserError(
            f"points {tuple(x.shape)}, table {tuple(table.shape)}, {sides.numel()} levels of {entries}",
            "(points, 3) and (levels · entries, features)",
        )


# ---------------------------------------------------------------- into models


def fuse(model: nn.Module) -> SwappedForwards:
    """Swap the forward of hash fields: modules with `table`, `sides`, `entries` and two linear layers `out`, whose forward is tried first."""
    put, left = [], []
    for path, module in model.named_modules():
        if not all(hasattr(module, name) for name in ("table", "sides", "entries", "out")):
            continue
        why = _why_not(module)
        if why:
            left.append((path, why))
            continue
        module.forward = MethodType(_forward, module)
        put.append((path, module, module.forward))
    return SwappedForwards(modules=tuple(put), left=tuple(left))


def _forward(module: Any, x: Tensor) -> Tensor:
    sides = torch.tensor(module.sides, device=x.device)
    return hash_mlp(x, module.table, sides, module.entries, (module.out[0], module.out[2]))


def _why_not(module: Any) -> str:
    if replaced(module):
        return "its forward was replaced already"
    kinds = [type(one) for one in module.out] if isinstance(module.out, nn.Sequential) else []
    if kinds != [nn.Linear, nn.ReLU, nn.Linear]:
        return "its layers are not linear, ReLU, linear"
    points = 2 * torch.rand(64, 3, dtype=module.table.dtype, device=module.table.device) - 1
    with torch.no_grad():
        found, want = _forward(module, points), module(points)
    return "" if torch.allclose(found, want, rtol=1e-3, atol=1e-5) else "it computes something else"


def amdahl(share: float, factor: float) -> float:
    """How much faster a whole is when that share of its time is `factor` times as fast."""
    if not 0 <= share <= 1 or factor <= 0:
        raise UserError(f"a share of {share} made {factor} times as fast", "a share between 0 and 1, and a positive factor")
    return 1 / (1 - share + share / factor)
