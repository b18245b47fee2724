"""Small words between ranks, beside the model's own collectives: who failed, who was asked to stop.

They go through a gloo group of their own, so that they neither wait for the device nor mix with what the model sends.
What travels is JSON, signed where the ranks have a token (`secure`), never pickled objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foretell.errors import UserError
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.process import secure
from foretell.runtime.process.blame import TIMEOUT_SECONDS

ASK_SECONDS = 0.1
"""How often ranks ask each other whether to stop, about."""
_ASK_MOST_STEPS = 100
_TRANSPORTS = ("/gloo/", "gloo::", "[gloo]", "ProcessGroup", "NCCL", "TCPStore")
"""In messages of collectives that failed."""

Made = TypeVar("Made")


def is_collective(error: BaseException) -> bool:
    """Whether it is torch.distributed that failed, most likely because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORTS)


class Control:
    """What ranks tell each other; a world of one talks to itself, and so does one whose others are stand-ins."""

    def __init__(self, ranks: Ranks, *, timeout_s: float = TIMEOUT_SECONDS) -> None:
        self.ranks = ranks
        self.group: Any = None
        if ranks.world > 1 and not ranks.alone:
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.ask_seconds = ASK_SECONDS
        self._asked: tuple[Any, torch.Tensor] | None = None
        self._next = self._gathers = 0
        self.wish = self.granted = 0
        """A number that any rank may raise at any time, and the largest, which all ranks have learned after the same step."""

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        if self.group is None:
            return [value]
        self._gathers += 1
        about = f"gather {self._gathers} in {self.group.group_name} of rank "
        content = torch.frombuffer(bytearray(secure.seal(json.dumps(value).encode(), f"{about}{self.ranks.rank}")), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.world)]
        dist.all_gather(sizes, torch.tensor([content.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        if not 0 < longest <= secure.MOST_BYTES:
            raise secure.Forged(f"a message between ranks is to have {longest:,} bytes")
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks.world)]
        dist.all_gather(parts, padded, group=self.group)
        said = [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]
        return [json.loads(secure.unseal(one, f"{about}{rank}")) for rank, one in enumerate(said)]

    def together(self, work: Callable[[], Made]) -> Made:
        """Do it on every rank; where it is the user's to mend on any of them, all raise that."""
        made: Made | None = None
        failed: UserError | None = None
        try:
            made = work()
        except UserError as error:
            failed = error
        told = self.gather([failed.problem, failed.remedy, failed.detail] if failed else None)
        if failed is not None:
            raise failed
        for rank, said in enumerate(told):
            if said is not None:
                raise UserError(f"rank {rank}: {said[0]}", said[1], said[2])
        return made  # type: ignore[return-value]

    def first(self, work: Callable[[], Made]) -> Made:
        """Do it on rank 0 alone; everybody gets what it gave (as JSON can say it), or its error."""
        own = self.together(lambda: work() if self.ranks.is_first else None)
        found: Made = self.gather(own if self.ranks.is_first else None)[0]
        return found

    def should_stop(self, step: int, asked: bool, step_seconds: float) -> bool:
        """Whether any rank was asked to stop, told to all ranks at the same step.

        The question is put now and the answer read when the next is due, so that nobody waits for it.
        """
        if self.group is None:
            return asked
        if step < self._next:
            return False
        stop = False
        pause = 1
        if self._asked is not None:
            work, said = self._asked
            work.wait()
            stop, pause, self.granted = bool(said[0]), int(said[1]), int(said[2])
        wanted = int(min(_ASK_MOST_STEPS, max(1, self.ask_seconds / step_seconds))) if step_seconds > 0 else 1
        said = torch.tensor([int(asked), wanted, self.wish], dtype=torch.int64)
        self._asked = dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group, async_op=True), said
        self._next = step + pause
        return stop

    def finish(self) -> None:
        """Read what is still under way."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None
