"""What of a model ranks can share besides its layers: positions of a sample, experts of a layer. Asked once, kept on disk.

Both are found from the model itself (`plan.context`, `runtime.parallel.expert.experts`), in the process that traces: only there is torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.decode import value_of
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.trace.record.step import Workload

FEWEST = 2
"""Ranks that it is asked for; more of them only have to divide."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What ranks can share, or why not."""

    positions: int = 0
    """Of a sample; 0 where ranks cannot share them."""
    no_positions: str = ""
    experts: int = 0
    """Of each stack of them; 0 where there is none, or what they cost cannot be predicted."""
    paths: tuple[str, ...] = ()
    """Modules that hold a stack of experts."""
    no_experts: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "paths": list(self.paths)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Shares:
        """Raises `decode.Mismatch` where a field is of another type."""
        shares: Shares = value_of(cls, found)
        return shares


def shares_of(build: Callable[[], Workload]) -> Shares:
    """Look at a model; what stands in the way is an answer, not an error."""
    import torch

    with torch.device("meta"):
        workload = build()
    positions, no_positions = _positions(workload)
    experts, paths, no_experts = _experts(workload)
    return Shares(positions=positions, no_positions=no_positions, experts=experts, paths=paths, no_experts=no_experts)


def _positions(workload: Workload) -> tuple[int, str]:
    from foretell.plan.context import share
    from foretell.trace.flow.record import record

    try:
        return share(record(workload), FEWEST).positions, ""
    except UserError as error:
        return 0, error.problem


def _experts(workload: Workload) -> tuple[int, tuple[str, ...], str]:
    from foretell.runtime.parallel.expert.experts import ROUTED, find

    try:
        found = find(workload.model, FEWEST, trial=False)
    except UserError as error:
        return 0, (), error.problem
    routed = next((one for one in found if one.kind == ROUTED), None)
    if routed is not None:
        return 0, (), f"{routed.path} gives each expert as many rows as choose it, which only a run knows"
    counts = {one.count for one in found}
    if len(counts) > 1:
        return 0, (), "layers have unlike numbers of experts"
    return counts.pop(), tuple(one.path for one in found), ""
