"""A sheet for a model and a cluster: its traces asked for as they are needed, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable

from foretell.plan.precision import in_plan
from foretell.plan.types import Mesh, Plan
from foretell.search.block_costs.ops import PieceSource as Pieces
from foretell.search.block_costs.residency import KEEP
from foretell.search.traces.needed import PAIR, Traces


class Sources:
    """Keep traces of one model at two micro-batches, for each precision of a recipe and length of a sample."""

    def __init__(self, traces: Traces, base: Plan) -> None:
        self.traces, self.base = traces, base
        self.known: dict[tuple[str, int | None], Pieces] = {}

    def __call__(self, recipe: str, tp: int) -> Pieces:
        """Raises KeyError for a split model: it is derived from the whole one."""
        if tp > 1:
            raise KeyError(tp)
        return self._of(recipe, None)

    def shorter(self, length: int | None) -> Callable[[str], Pieces]:
        """Precision of a recipe → the traces of samples half as long as `length`."""
        return lambda recipe: self._of(recipe, (length or 0) // 2)

    def _of(self, recipe: str, seq: int | None) -> Pieces:
        if (recipe, seq) not in self.known:
            self.known[recipe, seq] = self._traced(recipe, seq)
        return self.known[recipe, seq]

    def _traced(self, recipe: str, seq: int | None) -> Pieces:
        mesh = Mesh(dp_shard=2) if recipe.startswith("fsdp") else Mesh()
        model = {**self.base.model, **({"seq": seq} if seq else {})}
        plans = [self.base.with_(mesh=mesh, model=model, precision=in_plan(recipe), micro_batch=size) for size in PAIR]
        self.traces.prepare([(plan, KEEP) for plan in plans])
        small, large = (self.traces.of(plan, [KEEP])[KEEP] for plan in plans)
        return Pieces(small, large, PAIR)
