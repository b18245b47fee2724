"""Numbered names, many as one: `blocks.0`, `blocks.1`, `blocks.2` are `blocks.0-2`.

A pattern is a dotted path in which a number may be a range (`0-11`) or any number (`*`). A name that itself looks like
one of these is written with a backslash before it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from itertools import product
from typing import TypeVar

from foretell.errors import UserError

Value = TypeVar("Value", bound=Hashable)
Span = tuple[int, int]
Part = Span | str
Entry = tuple[int, tuple[Part, ...], Value]
"""Where it stood first, its path, and what it stands for."""

LARGEST = 1_000_000
"""Names that one pattern may stand for; more is a typing error."""
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_RANGE = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)")


def fold(values: Mapping[str, Value]) -> dict[str, Value]:
    """The same values under as few patterns as runs of numbers allow, in the order of their first names."""
    entries = [(index, _parts(name), value) for index, (name, value) in enumerate(values.items())]
    deepest = max((len(parts) for _, parts, _ in entries), default=0)
    for place in reversed(range(deepest)):
        entries = _merge(entries, place)
    return {".".join(map(_text, parts)): value for _, parts, value in sorted(entries, key=lambda entry: entry[0])}


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names without values, folded."""
    return tuple(fold(dict.fromkeys(names, True)))


def unfold(pattern: str) -> tuple[str, ...]:
    """Every name a pattern stands for. `*` stands for names that only a model knows, and is refused."""
    choices: list[list[str]] = []
    count = 1
    for part in pattern.split("."):
        span = _span(part)
        if part == "*":
            raise UserError(f"'{pattern}' does not say which numbers it means", "write a range, such as blocks.0-11")
        if span is None:
            choices.append([part.removeprefix("\\")])
            continue
        count *= max(0, span[1] - span[0] + 1)
        if not 0 < count <= LARGEST:
            raise UserError(f"'{pattern}' stands for no sensible number of names", "write the lower number first")
        choices.append([str(number) for number in range(span[0], span[1] + 1)])
    return tuple(".".join(parts) for parts in product(*choices))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is one of those a pattern stands for."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(_fits(want, part) for want, part in zip(wanted, parts, strict=True))


def is_name(pattern: str) -> bool:
    """Whether a pattern stands for one name and is written as that name."""
    return not any(part == "*" or part.startswith("\\") or _RANGE.fullmatch(part) for part in pattern.split("."))


def _fits(want: str, part: str) -> bool:
    number = int(part) if _NUMBER.fullmatch(part) else None
    if want == "*":
        return number is not None
    span = _span(want)
    if span is not None:
        return number is not None and span[0] <= number <= span[1]
    return want.removeprefix("\\") == part


def _span(part: str) -> Span | None:
    """First and last number of a range; a number is a range of one."""
    if _NUMBER.fullmatch(part):
        return int(part), int(part)
    found = _RANGE.fullmatch(part)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _parts(name: str) -> tuple[Part, ...]:
    found: list[Part] = []
    for part in name.split("."):
        if _NUMBER.fullmatch(part):
            found.append((int(part), int(part)))
        else:
            special = part == "*" or part.startswith("\\") or _RANGE.fullmatch(part)
            found.append(f"\\{part}" if special else part)
    return tuple(found)


def _text(part: Part) -> str:
    if isinstance(part, str):
        return part
    first, last = part
    return str(first) if first == last else f"{first}-{last}"


def _merge(entries: list[Entry[Value]], place: int) -> list[Entry[Value]]:
    """Join entries that differ in the number at one place alone, where those numbers follow each other."""
    alike: dict[Hashable, list[tuple[Span, Entry[Value]]]] = defaultdict(list)
    done = []
    for entry in entries:
        _, parts, value = entry
        span = parts[place] if place < len(parts) else ""
        if isinstance(span, str):
            done.append(entry)
        else:
            alike[parts[:place], parts[place + 1 :], value].append((span, entry))
    for members in alike.values():
        runs: list[tuple[int, Span]] = []
        for span, (index, _, _) in sorted(members, key=lambda member: member[0]):
            if runs and runs[-1][1][1] + 1 == span[0]:
                runs[-1] = min(runs[-1][0], index), (runs[-1][1][0], span[1])
            else:
                runs.append((index, span))
        _, parts, value = members[0][1]
        done += [(index, (*parts[:place], span, *parts[place + 1 :]), value) for index, span in runs]
    return done
