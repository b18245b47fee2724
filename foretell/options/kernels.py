"""Which ops foretell's own kernels do, for `fit` and `plan`: described once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.kernels.names import KERNELS, efficiency, faster_on
from foretell.options import words
from foretell.options.describe import option

if TYPE_CHECKING:
    from foretell.hardware.types import Cluster

AUTO = "auto"


def of_kernels() -> Any:
    return option(
        None, f"Ops that foretell's kernels do: {', '.join(KERNELS)}; or auto: those measured to be faster there; default: none.", metavar="NAMES",
        typed=str, read=words.known_names("--kernels", (*KERNELS, AUTO)),
    )  # fmt: skip


def kernels_of(asked: tuple[str, ...] | None, cluster: Cluster, dtype: str) -> tuple[str, ...]:
    """What the option asks for on these devices, in a format."""
    if not asked:
        return ()
    strange = next((name for name in asked if name not in (*KERNELS, AUTO)), None)
    if strange is not None:
        raise UserError(f"kernel {strange} is not known", f"known: {', '.join((*KERNELS, AUTO))}")
    slow = next((part for part in cluster.devices if part.backend != "cuda"), None)
    named = [name for name in KERNELS if name in asked]
    if slow is not None:
        if named:
            problem = f"--kernels {','.join(named)}: {slow.name} ({slow.backend}) runs none of them"
            raise UserError(problem, "leave out --kernels, or name an NVIDIA GPU")
        return ()
    every = [set(faster_on(device.name, dtype)) for device in cluster.devices] if AUTO in asked else []
    return tuple(name for name in KERNELS if name in asked or (every and all(name in some for some in every)))


def kernels_told(about: Mapping[str, Any], cluster: Cluster, dtype: str) -> list[str]:
    """Lines on kernels: of how many modules they do the work, and whose speed is not known there."""
    found: Mapping[str, int] = about.get("kernels", {})
    if not found:
        return []
    told = [f"{name} of {count} modules" if count else f"{name} of no module" for name, count in found.items()]
    lines = [f"by foretell's kernels: {', '.join(told)}"]
    slow = [name for name in found if found[name] and any(efficiency(name, device.name, dtype, 1) is None for device in cluster.devices)]
    where = " and ".join(device.name for device in cluster.devices)
    return [*lines, f"{', '.join(slow)}: not measured on {where}; assumed as fast as PyTorch's own kernel of the kind"] if slow else lines
