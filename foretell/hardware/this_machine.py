"""`auto`: the devices of this machine, as torch reports them. The only place that needs torch."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretell.cores import physical_cores as physical_cores
from foretell.errors import UnknownName, UserError
from foretell.hardware.catalog import GENERIC_CPU, devices, find, find_reported, normalise
from foretell.hardware.links import with_links
from foretell.hardware.types import Cluster, Device, Tier
from foretell.units import gib

_PROBED = "reported by torch on this machine"
READ_HERE = "RAM of this machine"
"""In the source of a CPU's memory that was read, and not taken from the catalogue."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def this_machine(*, apple: bool = False) -> Cluster:
    """This machine's GPUs with their real memory; without any, its CPU and RAM. With `apple`, the GPU of an Apple chip too."""
    try:
        import torch
    except ImportError:
        return cpu_cluster("torch is not installed")
    if not torch.cuda.is_available():
        if apple and torch.backends.mps.is_available():
            return from_chip(cpu_name(), usable_ram(), torch.mps.recommended_max_memory())
        return cpu_cluster("torch sees no GPU")
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return from_properties(cards)


def from_properties(cards: list[Any]) -> Cluster:
    """The cluster that torch's device properties describe."""
    kinds = sorted({card.name for card in cards})
    if len(kinds) > 1:
        raise UserError(
            f"'auto' found unlike GPUs: {', '.join(kinds)}", "choose one kind with CUDA_VISIBLE_DEVICES, or name it"
        )
    known = find_reported(kinds[0])
    if known is None:
        remedy = "describe it in a .toml hardware file and give its path"
        raise UnknownName("GPU", kinds[0], [item.name for item in devices()], remedy)
    smallest = min(cards, key=lambda card: int(card.total_memory))
    memory = int(smallest.total_memory)
    device = replace(
        known,
        memory_bytes=memory,
        memory_nominal_bytes=max(known.memory_nominal_bytes, memory),
        sm_count=int(smallest.multi_processor_count),
        verified=True,
        sources={**known.sources, "memory_bytes": _PROBED, "sm_count": _PROBED},
    )
    l2 = int(getattr(smallest, "L2_cache_size", 0))
    if l2 and known.backend == "cuda":  # on ROCm torch reports one die's share
        device = replace(device, l2_bytes=l2, sources={**device.sources, "l2_bytes": _PROBED})
    note = f"auto found {len(cards)} x {kinds[0]}: {known.name} with {gib(device.memory_bytes)} each, as torch reports"
    return with_links(Cluster(device=device, devices_per_node=len(cards), tiers=host_tiers(), notes=(note,)))


def from_chip(chip: str, ram: int | None, usable: int) -> Cluster:
    """The GPU of an Apple chip (`Apple M2 Pro`): the catalogue's rates, and the memory that Metal recommends here."""
    asked = normalise(chip).removeprefix("apple")
    known = [device for device in devices() if device.backend == "mps" and normalise(device.name.rpartition("-")[0]) == asked]
    if not known:
        remedy = "name one that is near with --on, or describe it in a .toml hardware file and give its path"
        raise UnknownName("Apple chip", chip, [item.name for item in devices() if item.backend == "mps"], remedy)
    nearest = min(known, key=lambda device: abs(device.memory_nominal_bytes - (ram or usable)))
    memory = max(usable, nearest.memory_nominal_bytes if ram is None else ram)
    device = replace(nearest, memory_bytes=usable, memory_nominal_bytes=memory, sources={**nearest.sources, "memory_bytes": _PROBED})
    note = f"auto found {chip}: {nearest.name} with {gib(usable)} of unified memory for its GPU, as torch reports"
    return with_links(Cluster(device=device, notes=(note,)))


def cpu_name() -> str:
    if platform.system() == "Darwin":
        return _sysctl("machdep.cpu.brand_string") or "unknown CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def _sysctl(name: str) -> str:
    """What macOS says of itself; empty where it does not."""
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def cpu_cluster(why: str) -> Cluster:
    generic = find(GENERIC_CPU)
    cores, memory = physical_cores(), usable_ram()
    notes = [f"auto uses the CPU of this machine ({cores} cores), since {why}"]
    if memory is None:
        notes.append(f"the RAM of this machine is unknown and taken as {gib(generic.memory_bytes)}")
        return with_links(Cluster(device=_scaled(generic, cores), notes=tuple(notes)))
    device = _scaled(generic, cores)
    device = replace(device, memory_bytes=memory, memory_nominal_bytes=memory, verified=True)
    device = device.with_memory(memory, f"{READ_HERE}, read here")
    return with_links(Cluster(device=device, tiers=host_tiers(), notes=tuple(notes)))


def host_tiers() -> tuple[Tier, ...]:
    """The RAM beside the devices: its size is read, its rate assumed."""
    memory = usable_ram()
    if memory is None:
        return ()
    rate = find(GENERIC_CPU).memory_bandwidth_bytes_per_second
    assumed = "assumed as a generic CPU's; `foretell probe` measures it"
    sources = {"bytes": "read on this machine", "read_bytes_per_second": assumed, "write_bytes_per_second": assumed}
    return (Tier(name="host", bytes=memory, read_bytes_per_second=rate, write_bytes_per_second=rate, sources=sources),)


def _scaled(generic: Device, cores: int) -> Device:
    share = cores / generic.sm_count
    rates = {dtype: rate * share for dtype, rate in generic.peak_flops_per_second.items()}
    sources = {**generic.sources, "sm_count": "counted on this machine"}
    return replace(generic, sm_count=cores, peak_flops_per_second=rates, sources=sources)


def usable_ram() -> int | None:
    """RAM in bytes, or what the container may use of it."""
    found = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal() and int(limit) > 0:
            found.append(int(limit))
    return min(found) if found else None
