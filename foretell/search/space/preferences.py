"""What every search prefers: the same for plans searched by blocks, tried one by one, or with part of the model elsewhere."""

from math import log2

LARGEST_MICRO_BATCH = 512
FILL = 4
"""Micro-batches for each rank of a pipeline, where the batch is free: a fifth of the step is then bubble at most."""
ALIKE = 0.01
"""Plans whose scores are within this share of each other count as alike, and the simplest is taken."""
ALIKE_ON_CPU = 0.05
"""A CPU's speed comes and goes by more than one percent."""
MOST_PLANS = 240
"""Plans that one search costs op by op, those that are shown of a search by quick costs aside."""
WORTH = 0.03
"""A doubled batch, where it is free, must gain this much; less is not worth a larger one."""
LESS_IF_TIGHT = 0.03
"""A plan that may run out of memory must be this much better to be preferred."""
LESS_IF_MOVED = 0.05
"""And so must one that moves anything, where another moves nothing."""


def lost_though_as_fast(gain: float, *, tight: bool = False, batch: float = 1.0, alike: float = ALIKE) -> str:
    """Why a plan lost that is as fast as the best, or faster by a share. `batch`: times the best's, where it is free."""
    lead = f"{gain:.1%} faster" if gain >= 0.0005 else "as fast"
    if tight:
        return f"{lead}, but memory is tight, for which it would have to be {LESS_IF_TIGHT:.0%} faster"
    if batch > 1 and gain > 0:
        return f"{lead} with {batch:g} times the batch: a doubled batch has to gain {WORTH:.0%}"
    return f"{lead}, and more complex; plans within {alike:.0%} count as equal" if gain >= 0.0005 else f"{lead}, and more complex"


def weighed(seconds: float, *, batch: int = 1, tight: bool = False, moved: bool = False) -> float:
    """Seconds as a plan's score: `batch` are its samples where they are free."""
    seconds *= (1 + WORTH) ** log2(batch)
    seconds *= 1 + LESS_IF_TIGHT if tight else 1
    return seconds * (1 + LESS_IF_MOVED if moved else 1)
LITTLE = 1 / 32
"""Of a device's memory: what logits of one chunk may take."""
FEWEST_ROWS = 256
"""Of a chunk of logits: products of fewer are slow."""


def chunks_for(logits: int, rows: int, memory: int) -> int:
    """Chunks of so many rows of logits, of each of which no more than a little of a device's memory is alive."""
    chunks = 1
    while logits > chunks * LITTLE * memory and rows >= 2 * chunks * FEWEST_ROWS:
        chunks *= 2
    return chunks
