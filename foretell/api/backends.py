"""What a step is traced as and timed by on each kind of device: CUDA and ROCm as they are, a CPU, and GPUs that nobody measured.

    backend      traced as                                           memory                              seconds
    cuda, rocm   its compute capability's kernels                    caching allocator, replayed         profile, or catalogue
    cpu          CPU kernels                                         live tensors and a process in RAM   its profile, or another CPU's
    mps, xpu     CUDA's ops, attention written out (no fused one)    as on CUDA                          catalogue
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foretell.errors import UserError
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile
from foretell.hardware.this_machine import READ_HERE, cpu_name
from foretell.plan.precision import low, missing
from foretell.trace.recipe import COMPUTES, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretell.hardware import Cluster

PLAIN = (0, 0)
"""Capability of a device without fused attention: scores and weights of every head are tensors."""
UNMEASURED = {"mps": "MPS", "xpu": "XPU"}
COMPILES = ("cuda", "rocm")


def capability(cluster: Cluster) -> tuple[int, int] | None:
    """As what a step is traced; None: a CPU."""
    device = cluster.device
    if device.backend == "cpu":
        return None
    return PLAIN if device.backend in UNMEASURED else device.compute_capability or (9, 0)


def profile_of(cluster: Cluster) -> Callable[[str], Profile | None]:
    """Device name → its profile. That of another CPU is carried over: its efficiencies, at the rates of this one."""
    if cluster.device.backend != "cpu":
        return find_profile
    here = cpu_name() if READ_HERE in cluster.device.sources.get("memory_bytes", "") else ""

    def found(name: str) -> Profile | None:
        profile = find_profile(name, reported_as=here or None)
        if profile is None or (here and profile.reported_as == here and profile.cores in (None, cluster.device.sm_count)):
            return profile
        return replace(profile, device=f"another CPU ({profile.reported_as}, {profile.cores} cores)")

    return found


def refuse_compile(cluster: Cluster) -> None:
    """Raise where it is not known what torch.compile makes for a device."""
    device = cluster.device
    if device.backend not in COMPILES:
        raise UserError(f"what torch.compile makes for {device.name} ({device.backend}) is not predicted yet", "leave out --compile")


def assumptions(cluster: Cluster, expandable: bool, choices: str) -> str:
    """What the answer takes for granted of allocator and kernels; `choices` are CUDA's."""
    backend = cluster.device.backend
    if backend == "cpu":
        return "tensors in RAM beside one process, without the scratch of CPU kernels"
    if backend in UNMEASURED:
        return f"{UNMEASURED[backend]}: CUDA's allocator, attention without a fused kernel; assumed, never measured on such a device"
    return f"allocator: {'expandable segments' if expandable else 'default'}; {choices}"


def why_not_bf16(recipe: Recipe, cluster: Cluster) -> list[str]:
    """A sentence where the device decided it."""
    lacking = missing("bfloat16", cluster)
    if not lacking or COMPUTES[recipe.precision] == "bfloat16":
        return []
    has = "float16 units and no bfloat16 ones" if low(cluster) == "float16" else "no units for 16-bit formats"
    return [f"precision follows the device: {lacking} has {has}"]
