"""Stages of a pipeline in a box: their messages have names, so that each comes when the simulated ranks would send it."""

from __future__ import annotations

from typing import Any

from foretell.plan.types import Plan
from foretell.runtime.box.group import BoxState
from foretell.runtime.parallel.pipeline.dry_run import crossing_of
from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.parallel.pipeline.stages import PlainStage
from foretell.simulate.arrivals import name_of
from foretell.trace.load.model import Source


def boxed_stage(box: BoxState) -> type[PlainStage]:
    """The kind of stage that tells a box what it sends and receives."""

    class BoxedStage(PlainStage):
        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
            return _named(super().get_fwd_send_ops(fwd_chunk_id), name_of("F", self.stage_index, fwd_chunk_id))

        def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
            return _named(super().get_fwd_recv_ops(fwd_chunk_id), name_of("F", self.stage_index - 1, fwd_chunk_id))

        def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
            return _named(super().get_bwd_send_ops(bwd_chunk_id), name_of("B", self.stage_index, bwd_chunk_id))

        def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
            return _named(super().get_bwd_recv_ops(bwd_chunk_id), name_of("B", self.stage_index + 1, bwd_chunk_id))

    def _named(ops: list[Any], name: str) -> list[Any]:
        for op in ops:
            box.name(op.tensor, name)
        return ops

    return BoxedStage


def forms_of(source: Source, plan: Plan) -> tuple[tuple[BoundaryTensor, ...], ...]:
    """What every stage receives for a micro-batch: on a rank that has some of the positions, those alone."""
    found = crossing_of(source, plan)
    ranks = plan.mesh.cp
    if ranks == 1:
        return found
    return tuple(tuple(BoundaryTensor(_part(form.shape, ranks), form.dtype) for form in forms) for forms in found)


def _part(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    return (shape[0], shape[1] // ranks, *shape[2:]) if len(shape) > 1 else shape

