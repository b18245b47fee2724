"""Learning rate and batch size for a model size and a token budget: the Step Law.

    learning rate = 1.79 · N^-0.713 · D^0.307        batch tokens = 0.58 · D^0.571

N counts parameters inside the blocks (no embedding, no head), D the tokens of the whole training. The constants were
fitted by Li et al. (Predictable Scale, part I, arXiv 2503.04715) to grids of runs with AdamW, a warm-up and a cosine
down to 1e-5. The learning rate is the peak one. Nothing of this was measured here: every answer is "assumed", and
says so where it leaves the range of those runs.

    law = step_law(non_embedding_parameters(shapes, blocks), tokens=100e9)
    batch = round_batch(law.batch_tokens, seq=4096, data_ranks=16, micro_batch=2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log, prod

from foretell.errors import UserError

RATE, RATE_BY_SIZE, RATE_BY_TOKENS = 1.79, -0.713, 0.307
BATCH, BATCH_BY_TOKENS = 0.58, 0.571
SIZES = (60e6, 1.08e9)
"""Parameters of the smallest and the largest model the constants were fitted to."""
TOKENS = (2e9, 100e9)
"""Tokens of the shortest and the longest run."""
SOURCE = "Step Law (Li et al. 2025, arXiv 2503.04715), fitted by its authors; assumed to hold here"
LOOKED_AT = 10_000
"""Numbers of micro-batches on either side of the wanted one among which an allowed one is looked for."""


@dataclass(frozen=True, kw_only=True)
class StepLaw:
    """What the law says of one model and one token budget."""

    parameters: int
    """Without embedding and head."""
    tokens: int
    learning_rate: float
    """The highest of the schedule."""
    batch_tokens: float
    """Tokens of one optimizer step, all ranks together."""
    notes: tuple[str, ...] = ()
    source: str = SOURCE

    @property
    def steps(self) -> int:
        """Optimizer steps until the tokens are used up."""
        return max(1, round(self.tokens / self.batch_tokens))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch that micro-batches of all data ranks make exactly."""

    micro_batch: int
    accumulate: int
    data_ranks: int
    seq: int
    wanted_tokens: float

    @property
    def samples(self) -> int:
        return self.micro_batch * self.accumulate * self.data_ranks

    @property
    def tokens(self) -> int:
        return self.samples * self.seq

    @property
    def off(self) -> float:
        """How far it is from what was wanted, as a share: 0.02 is two percent more."""
        return self.tokens / self.wanted_tokens - 1


def step_law(parameters: float, tokens: float) -> StepLaw:
    """The learning rate and batch that the law gives; `notes` say where it is asked beyond the runs behind it."""
    for name, value in (("parameters", parameters), ("tokens", tokens)):
        if not 0 < value < float("inf"):
            raise UserError(f"the Step Law was asked for {value} {name}", f"give a number of {name} above 0")
    notes = [
        f"{value:.3g} {name} is {'below' if value < low else 'above'} the {low:.2g} to {high:.3g} that the law was fitted to"
        for name, value, (low, high) in (("parameters", parameters, SIZES), ("tokens", tokens, TOKENS))
        if not low <= value <= high
    ]
    return StepLaw(
        parameters=round(parameters), tokens=round(tokens),
        learning_rate=RATE * parameters**RATE_BY_SIZE * tokens**RATE_BY_TOKENS,
        batch_tokens=BATCH * tokens**BATCH_BY_TOKENS, notes=tuple(notes),
    )  # fmt: skip


def round_batch(
    batch_tokens: float, seq: int, *, data_ranks: int = 1, micro_batch: int = 1,
    allowed: Callable[[int], bool] = lambda micro_batches: True,
) -> Batch:  # fmt: skip
    """The batch nearest to `batch_tokens`, by ratio, that micro-batches on every data rank make exactly.

    `allowed` says which numbers of micro-batches a rank may take, such as those that a pipeline's schedule accepts.
    """
    for name, value in (("seq", seq), ("data_ranks", data_ranks), ("micro_batch", micro_batch)):
        if type(value) is not int or value < 1:
            raise UserError(f"{name} is {value!r}", "give a whole number above 0")
    if not 0 < batch_tokens < float("inf"):
        raise UserError(f"a batch of {batch_tokens} tokens was asked for", "give a number above 0")
    wanted = batch_tokens / (seq * data_ranks * micro_batch)
    below = next((n for n in range(floor(wanted), max(0, floor(wanted) - LOOKED_AT), -1) if allowed(n)), None)
    above = next((n for n in range(max(1, ceil(wanted)), ceil(wanted) + LOOKED_AT) if allowed(n)), None)
    near = [n for n in (below, above) if n is not None]
    if not near:
        raise UserError(
            f"no number of micro-batches near {wanted:.0f} is allowed on each of {data_ranks} data ranks",
            "another schedule or fewer data ranks",
        )
    best = min(near, key=lambda n: abs(log(n / wanted)))
    return Batch(micro_batch=micro_batch, accumulate=best, data_ranks=data_ranks, seq=seq, wanted_tokens=batch_tokens)


def non_embedding_parameters(shapes: Mapping[str, Sequence[int]], blocks: Iterable[str]) -> int:
    """Parameters inside the repeated blocks, as the law counts them; without blocks there is no telling, and all count."""
    paths = tuple(f"{block}." for block in blocks)
    inside = [shape for name, shape in shapes.items() if name.startswith(paths)] if paths else list(shapes.values())
    return sum(prod(shape) for shape in inside)
