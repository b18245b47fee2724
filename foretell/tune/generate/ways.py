"""The ways in which a generator works; each can be left out, to see what it is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from foretell.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Ways:
    """All of them are used unless one is left out."""

    strategy: bool = True
    """One step is decided on before its code is asked for; a step that makes it worse is taken back."""
    judge: bool = True
    """A second role looks at the counters and says what to do next."""
    gym: bool = True
    """What runs the reference's own ops scores 0, however fast; without it only values are compared between rounds."""
    memory: bool = True
    """What worked for this backend before is shown."""
    ranked: bool = True
    """Earlier kernels are shown with their speedups, the best first."""
    audit: bool = True
    """Anything above ten times the reference is verified and measured anew before it counts."""

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(one.name for one in fields(self) if not getattr(self, one.name))


def ways_without(names: Iterable[str]) -> Ways:
    known = [one.name for one in fields(Ways)]
    given = [name.strip() for text in names for name in text.split(",") if name.strip()]
    for name in given:
        if name not in known:
            raise UnknownName("way", name, known, f"known are {', '.join(known)}")
    return Ways(**dict.fromkeys(given, False))
