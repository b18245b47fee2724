"""How collectives and steps of a rank lie in its ring: fixed rows, so that a file that was cut off at any byte can be read. No torch.

    0      header: JSON, padded with zeros       what wrote it, and how many rows there are
    4 KiB  names: JSON lines                     process groups, as the rank meets them
    64 KiB collectives, 64 bytes each            row number n lies at place n % slots
    ...    steps, 64 bytes each
"""

from __future__ import annotations

import struct
from typing import Final

FORMAT: Final = "foretell collectives 1"
HEADER_BYTES, NAMES_BYTES = 4096, 61440
RECORD_SLOTS, STEP_SLOTS = 4096, 1024
ROW_BYTES = 64
RECORD = struct.Struct("<QQqqqQIIHBBBBh")
"""number, sequence, enter, wait, exit, bytes, step, shape, group, op, dtype, phase, flags, peer: nanoseconds of the monotonic clock; an
exit of 0 has not happened."""
TIMES = struct.Struct("<qq")
TIMES_AT = 24
"""Where wait and exit lie in a record."""
STEP = struct.Struct("<QQqqqqqq")
"""number, step, end, whole, waited, data, other, delayed: nanoseconds since the step before ended, but for `end`."""
SIZE = HEADER_BYTES + NAMES_BYTES + ROW_BYTES * (RECORD_SLOTS + STEP_SLOTS)
RECORDS_AT = HEADER_BYTES + NAMES_BYTES
STEPS_AT = RECORDS_AT + ROW_BYTES * RECORD_SLOTS

OPS = (
    "other", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
    "send", "recv", "coalesced",
)  # fmt: skip
SEND, RECV = OPS.index("send"), OPS.index("recv")
ALIKE = frozenset(OPS.index(name) for name in ("all_reduce", "all_gather", "reduce_scatter"))
"""Every rank gives and gets as many bytes as every other."""
DTYPES = (
    "other", "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
PHASES = ("preparing", "data", "step", "log", "evaluation", "save", "end", "failed")
ASYNC, ASIDE = 1, 2
"""Flags: it was asked for without waiting; by another thread than the one that trains."""
FOLDER, SUFFIX = "collectives", ".ring"
HISTORY = "ranks.jsonl"
"""What ranks took, window by window: beside the rings."""


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}{SUFFIX}"
