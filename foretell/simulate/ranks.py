"""Answers for several ranks of one script: the one that needs most stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foretell.quantities import Prediction
from foretell.units import human_bytes


def largest(answers: Sequence[Prediction], ranks: Sequence[int]) -> Prediction:
    """The answer for the rank that needs most; where ranks differ, that is said."""
    need = {rank: one.memory.device_bytes for rank, one in zip(ranks, answers, strict=False)}
    if len(set(need.values())) == 1:
        return answers[0]
    more, *_, less = sorted(need, key=lambda rank: need[rank], reverse=True)
    said = f"rank {less} needs {human_bytes(need[more] - need[less])} less than rank {more}, of which the numbers are"
    worst = answers[list(need).index(more)]
    return replace(worst, assumptions=(*worst.assumptions, said))
