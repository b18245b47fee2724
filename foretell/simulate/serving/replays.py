"""CUDA graphs of an engine: which steps are replayed, and as how large ones. What is larger than the step computes nothing of use.

    generate alone     2, 4, 8, 16, 24, ... sequences
    with prompts       32, 64, 96, ... 512 tokens, and logits of as many rows as sequences may run
    more tokens        not replayed: as they are
"""

from __future__ import annotations

from functools import lru_cache

from foretell.lower.serving import StepShape

MIXED = (32, 64, 96, 128, 192, 256, 384, 512)
"""Tokens; larger steps keep a device busy as they are launched."""
DRAWN = 16
"""Rows that a token is drawn for, or whose likeliest are told, at a time: their copies in fp32 are many."""
DRAWN_BYTES = 52
"""Of each logit of these: in 16 bits and fp32, by temperature, sorted, and their places in 64 bits (22), besides what ATen's sort of few long
rows takes: pairs of places and rows twice, keys, and cub's own (30)."""


@lru_cache(maxsize=64)
def generating_sizes(running: int) -> tuple[int, ...]:
    """Sequences. One alone is padded to two: other code would be compiled for it, whose products of one row read weights slower."""
    most = max(2, running)
    return tuple(sorted({*(one for one in (2, 4) if one < most), *range(8, most, 8), most}))


@lru_cache(maxsize=64)
def mixed_sizes(running: int, tokens: int) -> tuple[int, ...]:
    """Tokens of steps with pieces of prompts, of an engine whose steps have at most so many."""
    return tuple(one for one in MIXED if running <= one <= tokens)


def replayed(shape: StepShape, running: int, tokens: int) -> tuple[int, int]:
    """Tokens and rows with logits that a step computes."""
    if not shape.chunks:
        size = next((one for one in generating_sizes(running) if one >= shape.tokens), shape.tokens)
        return size, size
    size = next((one for one in mixed_sizes(running, tokens) if one >= shape.tokens), 0)
    return (size, running) if size else (shape.tokens, max(1, shape.samples))
