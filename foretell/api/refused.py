"""Settings that nobody asked for and a model's code refuses give way to what it takes, and the answer says so.

    fit ─► usual settings ─► refused: 16-bit numbers, one sample under a batch norm ─► with `ModelError.change` ─► answer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from foretell.decode import value_of
from foretell.errors import ModelError
from foretell.trace.store import cache as store


class OnFiles(Protocol):
    """An answer that rests on files of the user's."""

    @property
    def files(self) -> Mapping[str, str]: ...


Found = TypeVar("Found", bound=OnFiles)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What was changed, and why in words."""

    change: dict[str, str | int] = field(default_factory=dict)
    told: tuple[str, ...] = ()


def settled(
    attempt: Callable[[dict[str, Any]], Found], asked: Mapping[str, Any], question: Mapping[str, Any], cache: bool
) -> tuple[Found, dict[str, Any], tuple[str, ...]]:
    """The answer of `attempt`, with what was asked in the end; raises the first refusal where no setting is left to change.

    That a setting is refused is kept, so that the same question is answered at once the next time."""
    key = store.key_of({"refused": question})
    known = (store.read("refused", key, lambda entry: value_of(Settled, entry["settled"])) if cache else None) or Settled()
    first, change, told = None, dict(known.change), list(known.told)
    while True:
        now = {**asked, **change}
        try:
            found = attempt(now)
        except ModelError as error:
            first = first or error
            free = {name: value for name, value in error.change.items() if now[name] is None}
            if not free:
                raise first from None
            change |= free
            told += [f"{name.replace('_', '-')} {value}, since the usual one is refused: {_reason(error)}" for name, value in free.items()]
            continue
        if cache and change != known.change:
            store.write("refused", key, {"settled": asdict(Settled(change=change, told=tuple(told)))}, found.files)
        return found, now, tuple(told)


def _reason(error: ModelError) -> str:
    return error.problem.partition(" failed: ")[2] or error.problem
