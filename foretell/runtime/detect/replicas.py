"""Silent corruption: weights that ranks hold alike are hashed every so many steps and compared; the odd rank is named.

Ranks that differ along dp_replicate alone hold the same shards. Each sums the bits of its own as whole numbers, which any flipped
bit changes, and sends 32 bytes; the answer is read one step later, so that nobody waits. Only where sums differ are those of every
tensor compared, to name the tensor.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.plan.mesh import coordinates
from foretell.plan.types import Mesh
from foretell.runtime.detect.findings import ODD_REPLICA, RankFinding
from foretell.runtime.detect.hangs import ranks_words
from foretell.runtime.process.control import Control

LEAST_STEPS = 50
"""Between two comparisons, however little they cost."""
MOST_STEPS = 5000
SHARE = 0.001
"""Of the time that hashing may take, half of what is promised; the interval follows."""
_FACTOR = 1_000_003


def bit_sums(tensors: Iterable[Tensor]) -> Tensor:
    """For each tensor the sum of its bits, read as whole numbers, modulo 2^64: one flipped bit always changes it."""
    sums = []
    for tensor in tensors:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
        if not local.numel():
            continue
        raw = local.view(torch.uint8) if local.dtype != torch.bool else local.to(torch.uint8)
        even = raw.numel() - raw.numel() % 8
        aligned = even if raw.data_ptr() % 8 == 0 and raw.storage_offset() % 8 == 0 else 0
        total = raw[:aligned].view(torch.int64).sum() if aligned else torch.zeros((), dtype=torch.int64, device=raw.device)
        sums.append(total + raw[aligned:].sum(dtype=torch.int64) if aligned < raw.numel() else total)
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def combined(sums: Tensor) -> int:
    """One number of many, in which places count."""
    total = 0
    for one in sums.tolist():
        total = (total * _FACTOR + one) & (2**63 - 1)
    return total


def replica_sets(mesh: Mesh) -> list[tuple[int, ...]]:
    """Ranks that hold the same shards: alike in all but dp_replicate."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(mesh.world):
        at = coordinates(mesh, rank)
        found[tuple(place for axis, place in sorted(at.items()) if axis != "dp_replicate")].append(rank)
    return [tuple(ranks) for ranks in found.values() if len(ranks) > 1]


def odd_ranks(sums: Mapping[int, int]) -> tuple[int, ...]:
    """Of ranks that should agree, those that do not with the majority; all of them where there is none."""
    by_sum: dict[int, list[int]] = defaultdict(list)
    for rank, value in sums.items():
        by_sum[value].append(rank)
    if len(by_sum) < 2:
        return ()
    largest = max(by_sum.values(), key=len)
    if 2 * len(largest) <= len(sums):
        return tuple(sorted(sums))
    return tuple(sorted(set(sums) - set(largest)))


def interval_for(cost: float, step: float, share: float = SHARE) -> int:
    """Steps between two comparisons that cost so much."""
    if step <= 0:
        return LEAST_STEPS
    return max(LEAST_STEPS, min(MOST_STEPS, math.ceil(cost / (share * step))))


class ReplicaWatch:
    """Called after every update, on every rank, at the same steps."""

    def __init__(
        self, mesh: Mesh, control: Control, named: Callable[[], Iterable[tuple[str, Tensor]]], step_seconds: Callable[[], float],
        give: Callable[[RankFinding], None] | None, names: Callable[[int], str] = lambda rank: f"rank {rank}",
    ) -> None:  # fmt: skip
        """`give` takes what was found, on the rank that tells; `names` names a rank."""
        self.sets, self.control, self.named, self.step_seconds, self.give, self.names = (
            replica_sets(mesh), control, named, step_seconds, give, names,
        )  # fmt: skip
        self.next = 0
        self.interval = LEAST_STEPS
        self.costs: list[float] = []
        """Seconds of each hashing on this rank."""
        self.different: dict[tuple[int, ...], int] = {}
        """Odd ranks → the step at which they were found first."""
        self._asked: tuple[Any, list[Tensor], int] | None = None

    @property
    def works(self) -> bool:
        return bool(self.sets) and self.control.group is not None

    def stepped(self, step: int) -> None:
        if not self.works:
            return
        if self._asked is not None:
            self._answer()
        if not self.next:
            self.next = step + LEAST_STEPS // 5  # soon, to see what it costs
        if step >= self.next:
            self._ask(step)

    def _ask(self, step: int) -> None:
        began = time.perf_counter()
        value = combined(bit_sums(tensor for _, tensor in self.named()))
        cost = time.perf_counter() - began
        self.costs.append(cost)
        mine = torch.tensor([value, int(1e9 * cost), int(1e9 * self.step_seconds()), step], dtype=torch.int64)
        parts = [torch.zeros_like(mine) for _ in range(self.control.ranks.world)]
        self._asked = dist.all_gather(parts, mine, group=self.control.group, async_op=True), parts, step
        self.next = step + self.interval

    def _answer(self) -> None:
        """What all ranks sent, the same on each: so all go on alike."""
        assert self._asked is not None
        work, parts, step = self._asked
        self._asked = None
        work.wait()
        rows = [part.tolist() for part in parts]
        self.interval = interval_for(max(row[1] for row in rows) / 1e9, max(row[2] for row in rows) / 1e9)
        self.next = step + self.interval
        odd = [(ranks, found) for ranks in self.sets if (found := odd_ranks({rank: rows[rank][0] for rank in ranks}))]
        if any(found not in self.different for _, found in odd):
            self._name(odd, step)

    def _name(self, odd: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], step: int) -> None:
        """Which tensors: every rank takes part."""
        named = [(name, tensor) for name, tensor in self.named() if (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()]
        every = self.control.gather(dict(zip([name for name, _ in named], bit_sums(tensor for _, tensor in named).tolist(), strict=True)))
        for ranks, found in odd:
            if found in self.different:
                continue
            self.different[found] = step
            tensors = [name for name in every[ranks[0]] if len({every[rank].get(name) for rank in ranks}) > 1]
            if self.give is not None:
                self.give(RankFinding(kind=ODD_REPLICA, step=step, ranks=found, text=self._words(ranks, found, tensors, step)))

    def _words(self, ranks: Sequence[int], found: Sequence[int], tensors: Sequence[str], step: int) -> str:
        what = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "") if tensors else "weights"
        whose = " and ".join(self.names(rank) for rank in found)
        if len(found) == len(ranks):
            return (
                f"{ODD_REPLICA}: after step {step} {whose} hold different values of {what}, and nothing tells which is right; "
                "resume from a checkpoint before it, and check the memory of both devices"
            )
        others = ranks_words([rank for rank in ranks if rank not in found])
        verb = "holds" if len(found) == 1 else "hold"
        return (
            f"{ODD_REPLICA}: after step {step} {whose} {verb} other values of {what} than {others}, which agree; "
            "resume from a checkpoint before it, and check the memory of that device"
        )
