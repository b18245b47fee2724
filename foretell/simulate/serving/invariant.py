"""Steps whose bits depend on no neighbour: tokens in parts of two fixed shapes, those that generate and those of prompts.

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
SAMPLED = 8
"""Rows that a token is drawn for, or whose likeliest are told, at a time."""


class FixedSizes(NamedTuple):
    """Rows of the two kinds of parts."""

    generated: int
    prompted: int
    sequences: int


def fixed_sizes(tokens: int) -> FixedSizes:
    """Of an engine whose steps have so many tokens of prompts."""
    return FixedSizes(GENERATED, min(PROMPTED, -(-tokens // 32) * 32), SEQUENCES)


class FixedPieces(NamedTuple):
    """What is computed at once."""

    generated: bool
    pieces: tuple[tuple[int, int, int], ...]
    """Which of the step's rows, its first token here, how many."""


def step_parts(rows: Iterable[tuple[bool, int]], sizes: FixedSizes) -> list[FixedPieces]:
    """Of rows by their kind (generated) and tokens: those that generate first, each kind in the order of the step."""
    found: list[FixedPieces] = []
    given = list(rows)
    for kind, room, most in ((True, sizes.generated, sizes.generated), (False, sizes.prompted, sizes.sequences)):
        pieces: list[tuple[int, int, int]] = []
        left = room
        for number, (generated, count) in enumerate(given):
            first = 0 if generated == kind else count
            while first < count:
                if not left or len(pieces) == most:
                    found.append(FixedPieces(kind, tuple(pieces)))
                    pieces, left = [], room
                many = min(count - first, left)
                pieces.append((number, first, many))
                first, left = first + many, left - many
        if pieces:
            found.append(FixedPieces(kind, tuple(pieces)))
    return found


class FixedShape(NamedTuple):
    """A part as it costs."""

    shape: StepShape
    """Its tokens that are somebody's."""
    tokens: int
    """All that are computed."""
    rows: int
    """That get logits."""

    @property
    def padded(self) -> StepShape:
        """As a step of its own, whose last tokens attend too."""
        many = self.tokens - self.shape.tokens
        if self.shape.generating:
            return self.shape._replace(generating=self.tokens, attended=self.shape.attended + many, samples=self.rows)
        *chunks, (before, count) = self.shape.chunks
        return self.shape._replace(chunks=(*chunks, (before, count + many)), samples=self.rows)


def fixed_shapes(shape: StepShape, sizes: FixedSizes) -> tuple[FixedShape, ...]:
    """The parts of a step, those that generate with as many tokens to attend to each."""
    found = []
    for part in step_parts([(True, shape.generating), *((False, count) for _, count in shape.chunks)], sizes):
        if part.generated:
            many = sum(count for _, _, count in part.pieces)
            found.append(FixedShape(StepShape(many, round(shape.attended * many / shape.generating), (), many), sizes.generated, sizes.generated))
        else:
            chunks = tuple((shape.chunks[number - 1][0] + first, count) for number, first, count in part.pieces)
            found.append(FixedShape(StepShape(0, 0, chunks, len(chunks)), sizes.prompted, sizes.sequences))
    return tuple(found)
