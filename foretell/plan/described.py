"""A layout as another tool's file describes it: what of a plan it fixes, and what it leaves open. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import UserError
from foretell.plan.types import LOOPED, Mesh, Pipeline, Residency, Split

RESIDENCIES = {"none": "keep", "full": "recompute", "selective": "selective"}
"""What `--recompute` calls a residency of all blocks."""


@dataclass(frozen=True, kw_only=True)
class DescribedLayout:
    """A plan but for its model and its hardware. None: the file does not say."""

    mesh: Mesh
    micro_batch: int | None = None
    accumulate: int | None = None
    global_batch: int | None = None
    """Where the micro-batch is open."""
    precision: str | None = None
    optimizer: str | None = None
    clip: float | None = None
    """0: no clipping."""
    recompute: str | int | None = None
    """none, full, selective; or every how many blocks one is recomputed."""
    reshard: bool = True
    compile: str | None = None
    schedule: str = "1f1b"
    cuts: tuple[str, ...] | None = None
    """Block that begins each stage after the first; None: `pipeline` spreads the blocks."""
    per_stage: int | None = None
    """Blocks of one stage, with what runs before and after all of them counted as `ends` blocks; None: 1 stage on each rank, 2 if looped."""
    ends: tuple[int, int] = (1, 1)
    split_loss: bool = True

    def residency(self, blocks: Sequence[str]) -> dict[str, Residency] | None:
        """Of every block; None where it is open."""
        if self.recompute is None:
            return None
        if isinstance(self.recompute, str):
            return dict.fromkeys(blocks, Residency(mode=RESIDENCIES[self.recompute]))
        every = max(1, self.recompute)
        return {block: Residency(mode="keep" if number % every else "recompute") for number, block in enumerate(blocks, 1)}

    def split(self) -> Split | None:
        """None: as a plan without a word on it is split."""
        return None if self.mesh.tp == 1 or self.split_loss else Split(loss=False)

    def pipeline(self, blocks: Sequence[str]) -> Pipeline | None:
        """Stages and their cuts; blocks are spread evenly where the file names no cuts."""
        if self.mesh.pp == 1:
            return None
        if self.cuts is not None:
            return Pipeline(schedule=self.schedule, cuts=self.cuts)
        before, after = self.ends
        whole = len(blocks) + before + after
        stages = self.mesh.pp * (2 if self.schedule in LOOPED else 1) if self.per_stage is None else -(-whole // self.per_stage)
        if stages % self.mesh.pp or whole // stages < max(before, after, 1):
            raise UserError(f"{len(blocks)} blocks cannot be spread over {stages} stages of {self.mesh.pp} ranks", "fewer stages")
        sizes = [whole // stages + (stage < whole % stages) for stage in range(stages)]
        starts = [sum(sizes[:stage]) - before for stage in range(1, stages)]
        if sorted({0, *starts}) != [0, *starts] or starts[-1] >= len(blocks):
            raise UserError(f"a stage of {stages} would have no block of {len(blocks)}", "fewer stages")
        return Pipeline(schedule=self.schedule, cuts=tuple(blocks[start] for start in starts))
