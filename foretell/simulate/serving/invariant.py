"""Steps whose bits hang on no neighbour: tokens in parts of two fixed shapes, those that generate and those of prompts.

    a step   │ 70 generate │ 600 of prompts │
    computed │ 128 rows    │ 512 rows │ 512 rows │        what is larger than its tokens belongs to nobody

Products and norms choose code by the number of rows. Where that number is always the same a token's bits follow from itself and its
own sequence, given that attention divides a sequence by nothing but its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from foretell.lower.serving import StepShape

GENERATED = 128
"""Rows of a part that generates: products of an 8B take 1.1 times as long for them as for one."""
PROMPTED = 512
"""Rows of a part of prompts, at most: fewer read the weights more often."""
SEQUENCES = 32
"""Prompts in a part, at most; rows of it that get logits."""


class FixedSizes(NamedTuple):
    """Rows of the two kinds of parts."""

    generated: int
    prompted: int
    sequences: int


def fixed_sizes(tokens: int) -> FixedSizes:
    """Of an engine whose steps have so many tokens of prompts."""
    return FixedSizes(GENERATED, min(PROMPTED, -(-tokens // 32) * 32), SEQUENCES)


class StepPart(NamedTuple):
    """What is computed at once."""

    generated: bool
    pieces: tuple[tuple[int, int, int], ...]
    """Which of the step's rows, its first token here, how many."""


def step_parts(rows: Iterable[tuple[bool, int]], sizes: FixedSizes) -> list[StepPart]:
    """Of rows by their kind (generated) and tokens: those that generate first, each kind in the order of the step."""
    found: list[StepPart] = []
    given = list(rows)
    for kind, room, most in ((True, sizes.generated, sizes.generated), (False, sizes.prompted, sizes.sequences)):
        pieces: list[tuple[int, int, int]] = []
        left = room
        for number, (generated, count) in enumerate(given):
            first = 0 if generated == kind else count
            while first < count:
                if not left or len(pieces) == most:
                    found.append(StepPart(kind, tuple(pieces)))
                    pieces, left = [], room
                many = min(count - first, left)
                pieces.append((number, first, many))
                first, left = first + many, left - many
        if pieces:
            found.append(StepPart(kind, tuple(pieces)))
    return found


def fixed_shapes(shape: StepShape, sizes: FixedSizes) -> tuple[StepShape, ...]:
    """The parts of a step as they are computed; a token that is nobody's is counted to the last prompt of its part."""
    found = []
    for part in step_parts([(True, shape.generating), *((False, count) for _, count in shape.chunks)], sizes):
        if part.generated:
            many = sum(count for _, _, count in part.pieces)
            found.append(StepShape(sizes.generated, round(shape.attended * many / shape.generating), (), sizes.generated))
            continue
        chunks = [(shape.chunks[number - 1][0] + first, count) for number, first, count in part.pieces]
        before, count = chunks[-1]
        chunks[-1] = before, count + sizes.prompted - sum(count for _, count in chunks)
        found.append(StepShape(0, 0, tuple(chunks), sizes.sequences))
    return tuple(found)
