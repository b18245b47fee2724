"""How much further an answer may be off because of what its trace takes for granted."""

from __future__ import annotations

from collections.abc import Mapping

from foretell.trace.cuda.versions import widening

EVENLY = "are taken to be spread evenly"
ONE_DRAW = "is one of many possible draws"
IN_THE_MIDDLE = "are taken to be in the middle"
UNEVEN_FACTOR = 4.0
"""How much further bands of memory reach where sizes hang on choices or draws that data makes: experts and clusters are seldom chosen
evenly. Assumed; user files with such sizes were met to 4 % on a CPU."""


def uneven(meta: Mapping[str, object]) -> bool:
    """Whether a size was taken to be what chance makes of it in the mean, so that data may make it larger."""
    told = meta.get("assumed")
    return isinstance(told, (list, tuple)) and any(str(one).endswith((EVENLY, ONE_DRAW, IN_THE_MIDDLE)) for one in told)


def memory_widening(meta: Mapping[str, object]) -> float:
    """Factor on the bands of memory, and on what has to be left free for "it fits" to be said."""
    return max(widening(meta), UNEVEN_FACTOR if uneven(meta) else 1.0)
