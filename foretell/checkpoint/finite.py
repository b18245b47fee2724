"""Whether bytes of a tensor hold NaN or infinity. No torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

_PLAIN = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "complex64": np.float32}
_EXPONENTS = {"bfloat16": (np.uint16, 0x7F80), "float8_e5m2": (np.uint8, 0x7C), "float8_e4m3fn": (np.uint8, 0x7F)}
"""dtype numpy does not have → how to look at it, and the bits that are all set where it is not finite."""
NONFINITE = "nonfinite"
"""Where a manifest lists tensors that were not finite when the run began, as masks with -inf are: they may stay so."""


def is_finite(content: Any, dtype: str) -> bool:
    """`content` is a buffer of whole items of that dtype, little-endian as files have it; what is no float is always finite."""
    if dtype in _PLAIN:
        values = np.frombuffer(content, dtype=np.dtype(_PLAIN[dtype]).newbyteorder("<"))
        return bool(np.isfinite(values).all())
    if dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(content, dtype=kind)
    if sys.byteorder == "big":
        bits = bits.byteswap()
    return not bool(((bits & mask) == mask).any())
