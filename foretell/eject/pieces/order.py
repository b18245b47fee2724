"""The order of samples"""

from __future__ import annotations

import hashlib

from foretell.eject.pieces.settings import ACCUMULATE, MICRO_BATCH

WORD = (1 << 64) - 1


def key_of(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little")


def mixed(number: int) -> int:
    """SplitMix64's last step."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


def shuffled(position: int, count: int, seed: int, epoch: int) -> int:
    """Which sample is at a position of an epoch: a permutation of range(count) that is never stored.

    A Feistel network permutes the numbers of 2 * half bits; one that lands beyond count goes again.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [mixed((key_of(seed, epoch) + turn) & WORD) for turn in range(4)]
    while True:
        left, right = position >> half, position & mask
        for key in keys:
            left, right = right, left ^ (mixed((right + key) & WORD) & mask)
        position = (left << half) | right
        if position < count:
            return position


def numbers_of(step: int, data_rank: int, data_ranks: int) -> list[list[int]]:
    """Numbers of a data rank's samples in a step, a list for every micro-batch."""
    first = step * MICRO_BATCH * ACCUMULATE * data_ranks
    starts = [first + (turn * data_ranks + data_rank) * MICRO_BATCH for turn in range(ACCUMULATE)]
    return [list(range(start, start + MICRO_BATCH)) for start in starts]
