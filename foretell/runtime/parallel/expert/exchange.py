"""Rows to the ranks that hold their experts, and back: every row that is sent is received, and none is made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foretell.errors import InternalError, UserError
from foretell.runtime.check import dry_run

_ops = torch.ops._c10d_functional


class Crew:
    """The ranks that share the experts of every layer."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.name = mesh.get_group().group_name
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    def swap(self, x: Tensor, given: list[int] | None = None, taken: list[int] | None = None) -> Tensor:
        """Rows of x to each rank in turn: `given` to each, `taken` from each; without these an equal share."""
        equal = [x.shape[0] // self.size] * self.size
        return _Swap.apply(x, self, taken or equal, given or equal)

    def exchanged(self, x: Tensor, taken: list[int], given: list[int]) -> Tensor:
        return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), taken, given, self.name))


class _Swap(torch.autograd.Function):
    """All to all; gradients go back the way the rows came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crew: Crew, taken: list[int], given: list[int]) -> Tensor:
        ctx.crew, ctx.taken, ctx.given = crew, taken, given
        return crew.exchanged(x, taken, given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.crew.exchanged(grad, ctx.given, ctx.taken), None, None, None


class SharedWeight(torch.autograd.Function):
    """A weight that rows of several data ranks meet: its gradient is the mean over them, as that of other weights is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.ranks, None


class _Unused(torch.autograd.Function):
    """Weights that no row meets in this micro-batch: their gradient is zero, not missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.like = [(w.shape, w.dtype, w.device) for w in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)


@dataclass
class Account:
    """Rows of the last call: counted where they left and where they came."""

    sent: list[int]
    """To each rank."""
    received: list[int]
    """From each rank."""


class Stacked:
    """Experts that take rows of all experts at once, (experts, rows, size): every expert as many."""

    def __init__(self, path: str, crew: Crew, experts: int) -> None:
        self.path, self.crew, self.experts = path, crew, experts
        self.rows: dict[bool, int] = {}
        """Of one expert on one rank, in training and without gradients; the same for all ranks, which is asked once."""
        self.account = Account([], [])

    def run(self, call: Any, weights: list[Tensor], x: Tensor) -> Tensor:
        crew, held = self.crew, self.experts // self.crew.size
        if x.dim() != 3 or x.shape[0] != self.experts:
            raise UserError(f"{self.path} is given {tuple(x.shape)}, not rows for {self.experts} experts", "use ep 1")
        rows = x.shape[1]
        self._agree(rows, x.device)
        taken = crew.swap(x.flatten(0, 1)).view(crew.size, held, rows, -1)
        made = call(taken.transpose(0, 1).reshape(held, crew.size * rows, x.shape[2]))
        back = made.view(held, crew.size, rows, -1).transpose(0, 1).reshape(crew.size * held * rows, -1)
        self.account = Account([held * rows] * crew.size, [held * rows] * crew.size)
        # No view: code that changes it in place must not lose what fully_shard hangs on it.
        return torch.ops.aten._unsafe_view(crew.swap(back), (self.experts, rows, made.shape[-1]))

    def _agree(self, rows: int, device: torch.device) -> None:
        if dry_run.active is not None:
            return
        training = torch.is_grad_enabled()
        known = self.rows.get(training)
        if known == rows:
            return
        if known is not None:
            raise UserError(
                f"{self.path} gets {rows} rows for an expert and had {known} before",
                "give every micro-batch the same shape, or use ep 1",
            )
        mine = torch.full((self.crew.size,), rows, device=device)
        theirs = self.crew.exchanged(mine, [1] * self.crew.size, [1] * self.crew.size).tolist()
        if set(theirs) != {rows}:
            raise UserError(
                f"{self.path} gets {theirs} rows for an expert on the ranks that share it",
                "give all ranks micro-batches of one shape, or use ep 1",
            )
        self.rows[training] = rows


class Routed:
    """Experts that are told for every row which of them it goes to and how much each counts."""

    def __init__(self, path: str, crew: Crew, experts: int) -> None:
        self.path, self.crew, self.experts = path, crew, experts
        self.account = Account([], [])

    def run(self, call: Any, weights: list[Tensor], x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        crew, held = self.crew, self.experts // self.crew.size
        if x.dim() != 2 or index.dim() != 2 or index.shape != share.shape or index.shape[0] != x.shape[0]:
            raise UserError(f"{self.path} is given rows {tuple(x.shape)} and choices {tuple(index.shape)}", "use ep 1")
        choices = index.shape[1]
        order = index.flatten().argsort(stable=True)
        counts = torch.bincount(index.flatten(), minlength=self.experts)
        if counts.numel() > self.experts:
            raise UserError(f"{self.path} is asked for an expert beyond its {self.experts}", "use ep 1")
        arriving = crew.exchanged(counts, [held] * crew.size, [held] * crew.size)
        given, taken = (table.view(crew.size, held).sum(1).tolist() for table in (counts, arriving))
        sent = x.index_select(0, order // choices)
        rows = crew.swap(sent, given, taken)
        which = torch.arange(held, device=x.device).repeat(crew.size).repeat_interleave(arriving)
        if rows.shape[0] != sum(taken) or which.numel() != sum(taken) or sent.shape[0] != sum(given):
            raise InternalError(f"{self.path}: {rows.shape[0]} rows came and {sum(taken)} were announced")
        self.account = Account(given, taken)
        made = call(rows, which[:, None], torch.ones_like(which, dtype=share.dtype)[:, None])
        if not rows.shape[0]:
            made = _Unused.apply(made, *weights)
        back = crew.swap(made, taken, given)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        found = back.index_select(0, place).view(x.shape[0], choices, -1)
        return (found * share[..., None].to(found.dtype)).sum(1)
