"""Whether bytes of a tensor hold NaN or infinity. No torch, and numpy only once there are bytes: who supervises a run looks at names alone."""

from __future__ import annotations

import sys
from typing import Any

_PLAIN = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex64": "<f4"}
_EXPONENTS = {"bfloat16": ("u2", 0x7F80), "float8_e5m2": ("u1", 0x7C), "float8_e4m3fn": ("u1", 0x7F)}
"""dtype numpy does not have → how to look at it, and the bits that are all set where it is not finite."""
NONFINITE = "nonfinite"
"""Where a manifest lists tensors that were not finite when the run began, as masks with -inf are: they may stay so."""


def is_finite(content: Any, dtype: str) -> bool:
    """`content` is a buffer of whole items of that dtype, little-endian as files have it; what is no float is always finite."""
    if dtype not in _PLAIN and dtype not in _EXPONENTS:
        return True
    import numpy as np

    if dtype in _PLAIN:
        return bool(np.isfinite(np.frombuffer(content, dtype=_PLAIN[dtype])).all())
    kind, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(content, dtype=kind)
    if sys.byteorder == "big":
        bits = bits.byteswap()
    return not bool(((bits & mask) == mask).any())
