"""Exchanges between the ranks of the tensor axis, each with its own backward.

The gradient of a whole tensor is whole, that of a split one is split alike, that of a partial one is whole. A whole
tensor from which the ranks go on to compute different things gets their gradients summed: it is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from foretell.plan.tensor.types import Partial, Place, Setting, Shard
from foretell.runtime.check import dry_run

_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor


class TensorGroup:
    """The ranks that share every layer, and what they have learned about the calls they make."""

    level = 1
    """Of two teams that share one tensor, the one with the lower level is the outer: the other splits its parts."""

    def __init__(self, mesh: DeviceMesh, setting: Setting) -> None:
        self.mesh, self.setting = mesh, setting
        self.name = mesh.get_group().group_name
        self.size, self.rank = mesh.size(), mesh.get_local_rank()
        self.known: dict[Any, Any] = {}

    # ------------------------------------------------------------ exchanges of plain tensors

    def all_reduce(self, x: Tensor, how: str = "sum") -> Tensor:
        return _wait(_ops.all_reduce(x.contiguous(), how, self.name))

    def all_gather(self, x: Tensor, place: Shard) -> Tensor:
        """The whole of a split tensor."""
        x = x.contiguous()
        parts = _wait(_ops.all_gather_into_tensor(x, self.size, self.name))
        return joined(parts.unflatten(0, (self.size, x.shape[0])).unbind(0), place)

    def reduce_scatter(self, x: Tensor, place: Shard) -> Tensor:
        """This rank's part of the sum over all ranks."""
        parts = torch.cat([part(x, place, rank, self.size) for rank in range(self.size)])
        return _wait(_ops.reduce_scatter_tensor(parts, "sum", self.size, self.name))

    def part(self, x: Tensor, place: Shard) -> Tensor:
        return part(x, place, self.rank, self.size)

    # ------------------------------------------------------------ from one place to another

    def bring(self, x: Tensor, have: Place, want: Place, shares: bool) -> Tensor:
        """A tensor that lies one way, lying another; see `foretell.plan.tensor.exchange`."""
        if want is None:
            if have is None:
                return _Share.apply(x, self) if shares and x.requires_grad else x
            if isinstance(have, Partial):
                whole = _Reduce.apply(x, self)
                return _Share.apply(whole, self) if shares and whole.requires_grad else whole
            return Gather.apply(x, self, have, shares)
        if isinstance(want, Partial):
            whole = self.bring(x, have, None, False)
            return _First.apply(whole, self)
        if have is None:
            return _Slice.apply(x, self, want)
        if isinstance(have, Partial):
            return Scatter.apply(x, self, want)
        return _Slice.apply(Gather.apply(x, self, have, False), self, want)

    @contextmanager
    def own_random(self, device: torch.device) -> Iterator[None]:
        """Random numbers of this rank's own; afterwards all ranks draw the same again."""
        if dry_run.active is not None:
            yield
            return
        seed = int(torch.randint(2**62, ()).item())
        with torch.random.fork_rng(
            [device] if device.type != "cpu" else [], device_type=device.type if device.type != "cpu" else "cuda"
        ):
            torch.manual_seed(seed + self.rank)
            yield


def part(x: Tensor, place: Shard, rank: int, size: int) -> Tensor:
    """One rank's part of a whole tensor."""
    if len(place.segments) == 1:
        each = place.segments[0] // size
        return x.narrow(place.dim, rank * each, each)
    pieces = []
    for piece in x.split(list(place.segments), dim=place.dim):
        each = piece.shape[place.dim] // size
        pieces.append(piece.narrow(place.dim, rank * each, each))
    return torch.cat(pieces, dim=place.dim)


def joined(parts: Sequence[Tensor], place: Shard) -> Tensor:
    """The whole tensor from all ranks' parts."""
    if len(place.segments) == 1:
        return torch.cat(list(parts), dim=place.dim)
    shares = [segment // len(parts) for segment in place.segments]
    pieces = [one.split(shares, dim=place.dim) for one in parts]
    return torch.cat([pieces[rank][index] for index in range(len(shares)) for rank in range(len(parts))], dim=place.dim)


class _Share(torch.autograd.Function):
    """Whole → whole, used differently by the ranks: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.team.all_reduce(grad), None


class _Reduce(torch.autograd.Function):
    """Partial → whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup) -> Tensor:
        return team.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Gather(torch.autograd.Function):
    """Split → whole; shared: gradients are summed and split, else this rank's part of the one that all have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup, place: Shard, shares: bool) -> Tensor:
        ctx.team, ctx.place, ctx.shares = team, place, shares
        return team.all_gather(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.shares:
            return ctx.team.reduce_scatter(grad, ctx.place), None, None, None
        return ctx.team.part(grad, ctx.place), None, None, None


class Scatter(torch.autograd.Function):
    """Partial → split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup, place: Shard) -> Tensor:
        ctx.team, ctx.place = team, place
        return team.reduce_scatter(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.team.all_gather(grad, ctx.place), None, None


class _Slice(torch.autograd.Function):
    """Whole → split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup, place: Shard) -> Tensor:
        ctx.team, ctx.place = team, place
        return team.part(x, place).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.team.all_gather(grad, ctx.place), None, None


class _First(torch.autograd.Function):
    """Whole → partial: the first rank's is the tensor, the others' are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup) -> Tensor:
        return x.view_as(x) if team.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
