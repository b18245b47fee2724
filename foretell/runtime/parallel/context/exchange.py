"""Exchanges between ranks that share the positions of a sample.

Parameters, and all else that is whole, are used by every rank for its own positions, so the gradient a rank has of them
is its share: the shares are summed with those of other samples, by `fully_shard`. Every exchange is differentiated as
the linear map that it is, over all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretell.plan.tensor.types import Partial, Place, Shard
from foretell.runtime.parallel.tensor import values as tensor_values
from foretell.runtime.parallel.tensor.exchange import Gather, Scatter, TensorGroup, part


class ContextTeam(TensorGroup):
    """The ranks that share every sample. Their parts may be split once more, over the tensor axis."""

    level = 0

    def bring(self, x: Tensor, have: Place, want: Place, shares: bool) -> Tensor:
        """A tensor that lies one way, lying another."""
        if have == want:
            return x
        inner = x if isinstance(x, tensor_values.SplitTensor) and x._spec.level != self.level else None
        if inner is None:
            return self._brought(x, have, want)
        at = {place.dim for place in (have, want) if isinstance(place, Shard)}
        under = inner._spec.place
        if isinstance(under, Shard) and under.dim in at:
            return self._brought(tensor_values.whole(x), have, want)
        return tensor_values.split(self._brought(tensor_values.plain(x), have, want), under, inner._team)

    def on_parts(self, call: Callable[..., Tensor | None], *tensors: Tensor) -> Tensor | None:
        """What a call gives for tensors split by heads over the inner team, if they are or there is none; else None."""
        inner = [x for x in tensors if isinstance(x, tensor_values.SplitTensor) and x._spec.level != self.level]
        if not inner:
            return call(*tensors)
        places = [x._spec.place for x in inner]
        if len(inner) < len(tensors) or any(not isinstance(p, Shard) or p.dim != x.dim() - 3 for p, x in zip(places, inner, strict=True)):
            return None
        found = call(*map(tensor_values.plain, tensors))
        return None if found is None else tensor_values.split(found, places[0], inner[0]._team)

    def _brought(self, x: Tensor, have: Place, want: Place) -> Tensor:
        if want is None:
            assert have is not None
            return _Sum.apply(x, self) if isinstance(have, Partial) else Gather.apply(x, self, have, True)
        if isinstance(want, Partial):
            return self.bring(x, have, None, False) / self.size
        if isinstance(have, Partial):
            return Scatter.apply(x, self, want)
        return part(self.bring(x, have, None, False), want, self.rank, self.size)


class _Sum(torch.autograd.Function):
    """Partial → whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: TensorGroup) -> Tensor:
        ctx.team = team
        return team.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.team.all_reduce(grad), None
