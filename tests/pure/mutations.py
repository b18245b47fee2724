"""Ways to spoil a file: wrong types, missing and strange values, cut and flipped bytes. The same seed spoils alike."""

from __future__ import annotations

import copy
import gzip
import json
import math
import random
from collections.abc import Callable
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -10.0, 0.5, 1e308, -1e308, 1e-320, 2**31, 2**63, 10**30, 10**400, float("nan"), float("inf"),
    "", "x", "nan", "0", "-5", "../../etc/passwd", "a\nb", "\u2028\x00", "z" * 3000, [], [[]], [None], [1, 2], ["a"], {}, {"a": 1}, {"": None},
    [[1, [2, [3]]]], {"mode": 5}, "1e999",
)  # fmt: skip
_DEEP = 3000


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, itself included."""
    found = [path]
    if isinstance(value, dict):
        for name, item in value.items():
            found += places(item, (*path, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            found += places(item, (*path, number))
    return found


def spoiled(value: Any, rng: random.Random) -> Any:
    """A JSON value with one thing wrong."""
    known = places(value)
    path = rng.choice(known[1:] or known)
    if not path:
        return rng.choice(STRANGE)
    changed = copy.deepcopy(value)
    holder = changed
    for step in path[:-1]:
        holder = holder[step]
    last, how = path[-1], rng.random()
    if how < 0.62:
        holder[last] = _other(holder[last], rng)
    elif how < 0.80:
        del holder[last]
    elif how < 0.88 and isinstance(holder, dict):
        holder[rng.choice(("unknown", "", "model", f"{last} "))] = holder.pop(last)
    elif how < 0.94 and isinstance(holder, list):
        holder.extend(copy.deepcopy(holder) * rng.choice((1, 20)))
    else:
        holder[last] = rng.choice(([holder[last]], {"value": holder[last]}, str(holder[last])))
    return changed


def _other(value: Any, rng: random.Random) -> Any:
    """A strange value, or the same one bent: negative, huge, cut, of another type."""
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((-value, value * 1e9, value * 0, value + 0.5, str(value), int(value) * 10**20 if math.isfinite(value) else 0))
    if isinstance(value, str) and value and rng.random() < 0.3:
        return rng.choice((value[: len(value) // 2], value * 50, value.upper(), f" {value}", [value]))
    return rng.choice(STRANGE)


def text_of(value: Any) -> bytes:
    """As JSON, with numbers that are none where there are some."""
    return json.dumps(value).encode()


def bytes_spoiled(content: bytes, rng: random.Random) -> bytes:
    """Bytes with something wrong that no program would have written."""
    if not content:
        return b"\x00"
    at, size = rng.randrange(len(content)), rng.randint(1, 40)
    ways: list[Callable[[], bytes]] = [
        lambda: content[:at], lambda: content[:at] + content[at + size :],
        lambda: content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
        lambda: content[:at] + rng.randbytes(size) + content[at:], lambda: b"", lambda: b"\xff\xfe\x00" + content,
        lambda: b"[" * _DEEP, lambda: b'{"a":' * _DEEP, lambda: b"9" * 6000, lambda: content + content, lambda: b"null", lambda: b"\n" * 50,
    ]  # fmt: skip
    return rng.choice(ways)()


def json_spoiled(content: bytes, rng: random.Random) -> bytes:
    """A JSON file with one to three things wrong, or broken as bytes."""
    if rng.random() < 0.12:
        return bytes_spoiled(content, rng)
    value = json.loads(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = spoiled(value, rng)
    return text_of(value)


def lines_spoiled(content: bytes, rng: random.Random) -> bytes:
    """A file of JSON lines with one of them wrong."""
    lines = content.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        lines[at] = json_spoiled(lines[at], rng)
    except ValueError:
        lines[at] = bytes_spoiled(lines[at], rng)
    return b"\n".join(lines)


def packed(inner: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """The same for a compressed file."""

    def spoil(content: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return bytes_spoiled(content, rng)
        return gzip.compress(inner(gzip.decompress(content), rng), 1)

    return spoil


def text_spoiled(content: bytes, rng: random.Random) -> bytes:
    """A text file (TOML, YAML) with a word replaced by a strange one, or broken as bytes."""
    if rng.random() < 0.3:
        return bytes_spoiled(content, rng)
    lines = content.decode().splitlines()
    chosen = [number for number, line in enumerate(lines) if "=" in line or ":" in line] or [0]
    at = rng.choice(chosen)
    sign = "=" if "=" in lines[at] else ":"
    strange = json.dumps(rng.choice(STRANGE))
    lines[at] = rng.choice((f"{lines[at].partition(sign)[0]}{sign} {strange}", "", lines[at] * 2, f"{strange}{sign} 1"))
    return "\n".join(lines).encode()
