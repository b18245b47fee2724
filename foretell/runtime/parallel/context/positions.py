"""Context parallelism from outside the model: every rank has some of the positions of every sample.

    record the flow ─► find where positions begin ─► split the batch there ─► the model's own code runs on the parts

The model sees tensors of whole shape, of which this rank has its positions (`tensor_values`). Parameters are whole, and
sharded over the data and context axes together by `fully_shard`, which also sums what each rank learns from its
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from foretell.errors import UserError
from foretell.plan.context import ALONG, ContextSplit, share
from foretell.plan.tensor.types import Setting, Shard
from foretell.runtime.parallel.context.exchange import ContextTeam
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.parallel.tensor import values as tensor_values
from foretell.runtime.parallel.tensor.exchange import part
from foretell.runtime.parallel.tensor.split import gather_for
from foretell.trace.flow.record import record
from foretell.trace.record.step import Batch, Loss, Workload


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """How a model's positions are shared by the ranks of a team."""

    shared: ContextSplit
    team: ContextTeam
    paths: frozenset[Any]
    """Where in a batch the tensors are that positions are taken from."""

    def open(self, batch: Batch) -> Batch:
        """A batch of which the model takes this rank's positions and sees all."""
        leaves, tree = pytree.tree_flatten_with_path(batch)
        missing = self.paths - {path for path, _ in leaves}
        if missing:
            raise UserError(
                f"the batch has no {pytree.keystr(min(missing, key=str))}, from which cp takes its positions",
                "give every batch the form of the first",
            )
        return pytree.tree_unflatten([self._part(x) if path in self.paths else x for path, x in leaves], tree)  # type: ignore[no-any-return]

    def _part(self, x: Tensor) -> Tensor:
        if x.shape[ALONG] % self.team.size:
            raise UserError(
                f"a batch has {x.shape[ALONG]} positions, which do not divide by cp {self.team.size}",
                f"pad it to {-(-x.shape[ALONG] // self.team.size) * self.team.size}, or use another cp",
            )
        place = Shard(ALONG, (x.shape[ALONG],))
        return tensor_values.split(part(x, place, self.team.rank, self.team.size).contiguous(), place, self.team)

    def finish(self, loss: Tensor) -> Tensor:
        """The loss of the whole sample, on every rank."""
        found: Tensor = tensor_values.whole(loss)
        return found

    def send(self, value: Tensor) -> Tensor:
        """What goes to the next stage of a pipeline: this rank's positions, whole along every other axis."""
        if isinstance(value, tensor_values.SplitTensor) and not value._spec.level:
            place = value._spec.place
            if isinstance(place, Shard) and len(place.segments) == 1:
                return tensor_values.whole(tensor_values.laid_bare(value))  # type: ignore[no-any-return]
        return tensor_values.whole(value)  # type: ignore[no-any-return]

    def receive(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What came from the stage before, seen as the whole that it is a part of."""
        if tuple(value.shape) == shape:
            return value
        apart = [dim for dim, (mine, all_) in enumerate(zip(value.shape, shape, strict=True)) if mine != all_]
        if len(apart) != 1 or value.shape[apart[0]] * self.team.size != shape[apart[0]]:
            return value
        return tensor_values.split(value, Shard(apart[0], (shape[apart[0]],)), self.team)


def prepare(model: nn.Module, ranks: Ranks, batch: Batch, loss: Loss | None) -> ContextParallel | None:
    """Find out how a model's positions can be shared over the context axis; None where that has one rank.

    Raises a `UserError` that says why where they cannot be.
    """
    mesh = ranks.submesh(("cp",))
    if mesh is None:
        return None
    batch = _beside(model, batch)
    flow = record(Workload(model, batch, loss))
    shared = share(flow, mesh.size())
    for function in flow.functions:
        gather_for(function)
    team = ContextTeam(mesh, Setting(mesh.size(), sequence=False, context=True))
    return context_of(batch, shared, team)


def _beside(model: nn.Module, batch: Batch) -> Batch:
    """The batch where the parameters are: a model that is moved as it is sharded is still on the host, and the batch is not."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        return batch
    moved: Batch = pytree.tree_map(lambda x: x.to(parameter.device) if isinstance(x, Tensor) else x, batch)
    return moved


def context_of(batch: Batch, shared: ContextSplit, team: ContextTeam) -> ContextParallel:
    """What was found with a batch, for all batches like it."""
    return ContextParallel(shared=shared, team=team, paths=_paths(batch, shared.leaves))


def _paths(batch: Batch, chosen: tuple[int, ...]) -> frozenset[Any]:
    """Where tensors are that `trace.flow.calls` counts in the order they stand, each once."""
    leaves = [(path, x) for path, x in pytree.tree_flatten_with_path(batch)[0] if isinstance(x, Tensor)]
    distinct = list({id(x): x for _, x in leaves}.values())
    wanted = {id(distinct[place]) for place in chosen}
    return frozenset(path for path, x in leaves if id(x) in wanted)
