"""The mean of a vector over replicas, which all of them get to the same bit.

    parts      replica r gets part r of everybody's vector, adds them in the order of ranks, divides       one exchange
    mean       replica r sends its part of the mean to everybody                                          another

In 8 bits every vector is rounded before it is sent, and so is each part of the mean. What rounding cuts off is kept by who did it and
added to what it sends in the next round, so that nothing is lost for good (error feedback). With the first exchange goes a hash of the
weights that the round began from: replicas that differ are noticed one round later, and nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.parallel.sync import codes


class ReplicaExchange(Protocol):
    """Every replica gives a part to each, and gets one from each."""

    replicas: int
    place: int

    def __call__(self, given: Tensor) -> Tensor:
        """Rows to send, one to each replica → rows that came, in their order."""


class GroupExchange:
    """Over a process group."""

    def __init__(self, group: Any, replicas: int, place: int) -> None:
        self.group, self.replicas, self.place = group, replicas, place

    def __call__(self, given: Tensor) -> Tensor:
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given, group=self.group)
        return got


class Mean:
    """Of one replica; what 8 bits leave out is kept from call to call."""

    def __init__(self, exchange: ReplicaExchange, elements: int, format: str, device: torch.device) -> None:
        self.exchange, self.format = exchange, format
        self.part = elements // exchange.replicas
        self.cuts: dict[str, Tensor] = {}
        if format == "int8":
            self.cuts = {"cut": torch.zeros(elements, device=device), "cut_of_part": torch.zeros(self.part, device=device)}

    def __call__(self, vector: Tensor, tag: Tensor) -> Tensor:
        """The mean of what replicas give; `vector` is not needed afterwards. `tag` is a whole number that must be the same on all."""
        return self._of_floats(vector, tag) if self.format == "fp32" else self._of_codes(vector, tag)

    def _of_floats(self, vector: Tensor, tag: Tensor) -> Tensor:
        mean = added(self._sent(vector.view(self.exchange.replicas, -1), tag))
        return self.exchange(mean.repeat(self.exchange.replicas, 1)).view(-1)

    def _sent(self, rows: Tensor, tag: Tensor) -> Tensor:
        """Rows that came, each with a tag that is as one's own."""
        marked = tag.view(rows.dtype).expand(len(rows), -1)
        got = self.exchange(torch.cat([rows, marked], dim=1))
        tags = got[:, rows.shape[1] :].contiguous().view(torch.int64).view(-1).tolist()
        if odd := [place for place, one in enumerate(tags) if one != int(tag)]:
            problem = f"replica {odd[0]} began the round from other weights than replica {self.exchange.place}"
            raise UserError(problem, "resume from a checkpoint before it, and check the memory and the network of both")
        return got[:, : rows.shape[1]]

    def _of_codes(self, vector: Tensor, tag: Tensor) -> Tensor:
        vector += self.cuts["cut"]
        sent = self._rows(vector, self.cuts["cut"])
        mean = added([codes.plain(row) for row in self._sent(sent, tag)])
        mean += self.cuts["cut_of_part"]
        own = codes.rounded(mean, self.cuts["cut_of_part"])
        return torch.cat([codes.plain(row) for row in self.exchange(own.repeat(self.exchange.replicas, 1))])

    def _rows(self, vector: Tensor, cut: Tensor) -> Tensor:
        """A row of codes and scales for each part."""
        parts = zip(vector.view(-1, self.part), cut.view(-1, self.part), strict=True)
        return torch.stack([codes.rounded(part, left) for part, left in parts])


def added(rows: Sequence[Tensor] | Tensor) -> Tensor:
    """The mean of rows, added in their order: the same bits wherever it is computed."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(len(rows))
