"""A plan for software that foretell predicts and does not run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.foreign.stacks import Stack
from foretell.plan.types import Plan

REPLICAS, ZERO1, ZERO2, ZERO3 = "none", "zero1", "zero2", "zero3"


@dataclass(frozen=True, kw_only=True)
class ForeignPlan:
    """Mesh and sizes as a plan has them, and what its words do not say."""

    plan: Plan
    """Data ranks lie along dp_shard where parameters are sharded, else along dp_replicate."""
    stack: Stack
    layers: int
    layer_alone: bool = False
    """Forward and backward of the layers are asked for, without embedding, head and update."""
    data: str = REPLICAS
    """What data ranks share: nothing, optimizer states (zero1), gradients too (zero2), parameters too (zero3)."""
    group: int = 0
    """Ranks that share one set of states where that is less than all data ranks; 0: all."""
    schedule: str = "1f1b"
    """Of the pipeline, as `schedule` names them."""
    chunks: int = 1
    """Model parts of a pipeline rank."""
    recompute: str = "none"
    """none, full or selective, as the stack means it."""
    float8: str = ""
    """Recipe of 8-bit products; empty without."""
    narrow_gathers: bool = False
    """Shards travel in 8 bits."""
    hides_tensor: bool = False
    topk: int = 1
    ep: int = 1
    """Ranks that share the experts; their traffic is counted from the tokens."""
    tokens: int = 0
    """Of one micro-batch on one rank."""
    hidden: int = 0

    @property
    def dp(self) -> int:
        return self.plan.mesh.data

    @property
    def sharing(self) -> int:
        """Ranks over which optimizer states are spread."""
        return 1 if self.data == REPLICAS else min(self.group or self.dp, self.dp)

    @property
    def sharded_units(self) -> bool:
        """Parameters of each block are gathered and their gradients scattered while others are computed: FSDP, ZeRO-3."""
        by_unit = self.data == ZERO3 or (self.data == ZERO2 and self.stack.by_unit)
        return by_unit and self.plan.mesh.dp_shard * self.plan.mesh.cp > 1

    @property
    def mark(self) -> str:
        """What an answer says besides; empty where PyTorch alone runs the plan."""
        return self.stack.mark
