"""Which part a process has in a run whose replicas come and go: one of them, or the hub that joins them. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

ROLE = "FORETELL_REPLICA"
"""Set for such a process: `hub of 3`, or `1 of 3 at 127.0.0.1:5000`."""
HUB = -1


@dataclass(frozen=True, kw_only=True)
class ReplicaRole:
    """A process of such a run."""

    slot: int
    """Of the samples that it trains on; `HUB` for the hub."""
    count: int
    address: tuple[str, int] | None = None
    """Of the hub."""

    @property
    def is_hub(self) -> bool:
        return self.slot == HUB

    @property
    def name(self) -> str:
        """Of the process, as top shows it: 15 characters."""
        return "replica hub" if self.is_hub else f"replica {self.slot}"

    def text(self) -> str:
        who = "hub" if self.is_hub else str(self.slot)
        return f"{who} of {self.count}" + (f" at {self.address[0]}:{self.address[1]}" if self.address else "")


def role() -> ReplicaRole | None:
    """Of this process; None in every other run."""
    return role_of(os.environ.get(ROLE, ""))


def role_of(text: str) -> ReplicaRole | None:
    found = re.fullmatch(r"(hub|[0-9]+) of ([0-9]+)(?: at (.+):([0-9]+))?", text)
    if found is None:
        return None
    who, count, host, port = found.groups()
    return ReplicaRole(slot=HUB if who == "hub" else int(who), count=int(count), address=(host, int(port)) if host else None)
