"""What the Step Law says of a run that is planned: its batch as samples that devices can share, and in words.

    tokens of the run ─► batch of the law ─► the nearest number of samples that all data ranks share in equal, round parts

Losses change little near the best batch: the released runs nearest to the law lose at most 0.3 % (docs/placement.md).
So a rounder batch is taken where it is at most a tenth away, because it leaves the search more micro-batches to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, prod
from typing import Any

from foretell.errors import UserError
from foretell.search.solve.step_law import StepLaw, non_embedding_parameters, round_batch, step_law

NEAR = 0.1
"""Share of the law's batch that a rounder one may be away."""
FAR = 0.5
"""Share of the law's batch beyond which its learning rate is not for the batch that is used."""
DOUBLINGS = 10


@dataclass(frozen=True, kw_only=True)
class BatchAdvice:
    """The law beside the batch of a plan."""

    law: StepLaw
    length: int
    """Tokens of a sample."""
    chosen: int
    """Samples that the law's batch is as a batch of these devices."""
    followed: bool
    """Whether the plan was asked to take it."""
    used: int | None = None
    """Samples of the plan's step; None where there is no plan."""

    @property
    def off(self) -> float | None:
        """How far the plan's batch is from the law's, as a share: 0.02 is two percent more."""
        return None if self.used is None else self.used * self.length / self.law.batch_tokens - 1

    @property
    def steps(self) -> int:
        """Optimizer steps until the tokens are used up."""
        return max(1, round(self.law.tokens / (self.used * self.length))) if self.used else self.law.steps

    def lines(self) -> tuple[str, ...]:
        """For people: the learning rate, the law's batch beside the one used, and where the law is stretched."""
        law, off = self.law, self.off
        found = [f"learning rate {law.learning_rate:.3g} (foretell run --lr) and a batch of {law.batch_tokens:,.0f} tokens "
                 f"({law.batch_tokens / self.length:,.1f} samples); {law.source}"]  # fmt: skip
        if self.used is not None and off is not None:
            other = "" if self.used == self.chosen else f"; --global-batch {self.chosen} is near the law"
            found.append(
                f"the plan takes {self.used * self.length:,} tokens ({self.used:,} samples, {off:+.1%}), "
                f"{self.steps:,} steps{other}"
            )
            if abs(log(1 + off)) > log(1 + FAR):
                found.append("careful: the law's learning rate belongs to its own batch")
        return (*found, *(f"careful: {note}" for note in law.notes))

    def to_json(self) -> dict[str, Any]:
        law = self.law
        return {
            "learning_rate": law.learning_rate, "batch_tokens": law.batch_tokens, "tokens_per_sample": self.length,
            "batch_samples": self.chosen, "used_samples": self.used, "off": self.off, "followed": self.followed,
            "steps": self.steps, "parameters": law.parameters, "tokens": law.tokens, "beyond_its_runs": list(law.notes),
            "source": law.source, "provenance": "assumed",
        }  # fmt: skip


def check(followed: bool, tokens: float | None) -> None:
    """Raise where the law was asked for and the length of the run is not given."""
    if followed and tokens is None:
        raise UserError("--step-law is given without the length of the run", "add --tokens, such as --tokens 100e9")


def advice(
    shapes: Mapping[str, tuple[Sequence[int], str]], blocks: Iterable[str], tokens: float, length: int | None, *,
    devices: int, fixed: Mapping[str, int], micro_batch: int | None = None, global_batch: int | None = None,
    followed: bool = False,
) -> BatchAdvice | None:  # fmt: skip
    """What the law says of a model and a run; None where nothing can be said and nobody asked for it.

    `shapes` are those of all parameters with their dtypes. With `followed`, `used` is what the law's batch became.
    """
    inside = non_embedding_parameters({name: shape for name, (shape, _) in shapes.items()}, blocks)
    if length is None or not inside:
        if followed:
            why = "samples are no rows of tokens, and the law counts tokens" if length is None else "blocks have no parameters"
            raise UserError(f"--step-law: the model's {why}", "--global-batch N")
        return None
    law = step_law(inside, tokens)
    chosen = batch_for(law.batch_tokens, length, devices, fixed, micro_batch)
    used = chosen if followed and global_batch is None else global_batch
    return BatchAdvice(law=law, length=length, chosen=chosen, followed=followed and global_batch is None, used=used)


def batch_for(
    batch_tokens: float, length: int, devices: int, fixed: Mapping[str, int] | None = None, micro_batch: int | None = None
) -> int:
    """Samples near the law's batch that some number of data ranks share, a power of two of them each where that is near."""
    given = fixed or {}
    wanted = batch_tokens / length
    ranks = _data_ranks(devices, given, wanted)
    found = []
    for doubled in range(DOUBLINGS):
        batch = round_batch(batch_tokens, length, data_ranks=ranks, micro_batch=(micro_batch or 1) << doubled)
        if doubled == 0 or abs(log(batch.samples / wanted)) <= log(1 + NEAR):
            found.append(batch.samples)
    return found[-1]


def _data_ranks(devices: int, fixed: Mapping[str, int], wanted: float) -> int:
    """Data ranks that share the batch: all devices that no other axis takes; fewer where it has fewer samples."""
    data = prod(fixed.get(axis, 1) for axis in ("dp_replicate", "dp_shard"))
    if {"dp_replicate", "dp_shard"} <= fixed.keys():
        return data
    rest = max(1, devices // prod(fixed.get(axis, 1) for axis in ("tp", "cp", "pp")))
    able = [ranks for ranks in range(data, rest + 1, data) if rest % ranks == 0] or [data]
    return max((ranks for ranks in able if ranks <= wanted * (1 + NEAR)), default=able[0])
