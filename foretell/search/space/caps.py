"""How much of each memory plans may use: what the user says, and what is known where nothing is said."""

from __future__ import annotations

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.plan.states import HOST
from foretell.search.space.constraints import SearchConstraints
from foretell.units import GIB, parse_bytes

RESERVE_SHARE, RESERVE_BYTES = 0.08, 4 * GIB
"""Of the host's memory, at least so much, that plans leave to everything else."""


def size_of(flag: str, text: str | None) -> int | None:
    """`24GiB`, `24GB`, or `24` (GiB) in bytes."""
    if text is None:
        return None
    try:
        found = parse_bytes(f"{text}GiB" if text.strip().replace(".", "", 1).isdigit() else text)
    except (UserError, OverflowError):
        raise UserError(f"--{flag} {text!r} is not an amount of memory", "write it like 24GiB, 24GB or 24 (GiB)") from None
    return found


def host_of(cluster: Cluster, wishes: SearchConstraints) -> int | None:
    """Bytes of host memory that plans may use; None where nobody knows how much there is."""
    if wishes.host is not None:
        return wishes.host
    tier = cluster.tier(HOST)
    return None if tier is None else tier.bytes - max(RESERVE_BYTES, int(tier.bytes * RESERVE_SHARE))


def unknown_host(cluster: Cluster) -> UserError:
    return UserError(
        f"not everything fits on {cluster.device.name}, and how much memory its host has is not known",
        "say how much of it plans may use, such as --host 100GiB",
    )
