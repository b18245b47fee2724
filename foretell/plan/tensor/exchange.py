"""From one place to another: what is exchanged between the ranks, forward and backward."""

from __future__ import annotations

from foretell.plan.tensor.types import Partial, Place, Shard

GATHER, REDUCE, SCATTER = "all-gather", "all-reduce", "reduce-scatter"


def way(have: Place, want: Place, shares: bool) -> tuple[str, str]:
    """Exchanges in forward and in backward; empty where there is none.

    `shares`: the ranks go on to compute different things from a tensor that is whole, so that its gradient is the sum
    of theirs. The gradient of a split tensor is split alike, that of a partial one is whole.
    """
    if have is want or have == want:
        return "", REDUCE if want is None and shares else ""
    if want is None:
        if isinstance(have, Partial):
            return REDUCE, REDUCE if shares else ""
        return GATHER, SCATTER if shares else ""
    if isinstance(want, Partial):
        return ("", "") if have is None else (GATHER, "")
    if have is None:
        return "", GATHER
    if isinstance(have, Partial):
        return SCATTER, GATHER
    assert isinstance(have, Shard)
    return GATHER, GATHER
