"""What is measured: the device, the software around it, its clocks, and whether somebody else is using it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from foretell.errors import UserError
from foretell.hardware.catalog import find_reported
from foretell.hardware.probe import unfamiliar
from foretell.hardware.profile import About
from foretell.hardware.this_machine import cpu_cluster, from_properties, physical_cores
from foretell.hardware.this_machine import cpu_name as cpu_name
from foretell.hardware.types import Device

BUSY_PERCENT = 10
"""Share of time with a kernel running above which a GPU counts as in use."""
BUSY_LOAD = 0.5
"""Processes per core that want to run above which a CPU's measurement is noted as disturbed."""


def choose(asked: str) -> str:
    """`auto`, `cpu` or `cuda` → where torch runs; an error where there is no GPU to be had."""
    if asked not in ("auto", "cpu", "cuda"):
        raise UserError(f"'{asked}' is no device to probe", "give auto, cpu or cuda")
    seen = torch.cuda.is_available()
    if asked == "cuda" and not seen:
        built = (
            "this torch is built without CUDA"
            if not torch.version.cuda and not torch.version.hip
            else "torch sees no GPU"
        )
        raise UserError(
            f"--device cuda: {built}", "foretell probe --device cpu measures the CPU; foretell doctor says more"
        )
    return "cuda" if seen and asked != "cpu" else "cpu"


def device_of(kind: str) -> Device:
    """The device as the catalogue and torch describe it; `cpu` also where there is a GPU beside it."""
    if kind == "cpu":
        return cpu_cluster("it is probed").device
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    return from_properties([card]).device if find_reported(card.name) else unfamiliar.described(card)


def about(kind: str) -> About:
    device = device_of(kind)
    cpu = cpu_name()
    return About(
        device=device.name, reported_as=cpu if kind == "cpu" else torch.cuda.get_device_name(), backend=device.backend,
        torch=str(torch.__version__), python=platform.python_version(), host_cpu=cpu,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        driver=_driver() if kind == "cuda" else None, cores=physical_cores(), threads=torch.get_num_threads(),
        figures=device.to_dict(),
    )  # fmt: skip


# ---------------------------------------------------------------- the driver's view


@contextlib.contextmanager
def nvml() -> Iterator[tuple[Any, Any] | None]:
    """NVML and the handle of the GPU torch would use; None where there is none to ask."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
        handle = _handle(pynvml)
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml, handle
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _handle(pynvml: Any) -> Any:
    """By the identity torch reports once CUDA runs, before that by what CUDA_VISIBLE_DEVICES begins with."""
    if torch.cuda.is_initialized():
        uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
        if uuid:
            with contextlib.suppress(pynvml.NVMLError):
                return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    local = int(os.environ.get("LOCAL_RANK", "0") or 0)
    first = visible[local].strip() if local < len(visible) and visible[local].strip() else str(local)
    return (
        pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(first)
    )


def _driver() -> str | None:
    with nvml() as found:
        if found is None:
            return None
        version = found[0].nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


def clocks(moment: str) -> dict[str, float]:
    """SM clock now (`moment` is before or after), and what it may reach."""
    with nvml() as found:
        if found is None:
            return {}
        pynvml, handle = found
        asked: dict[str, Callable[[], Any]] = {
            f"sm_{moment}_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "sm_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "memory_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM),
            "power_limit_watts": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        }
        read = {}
        for name, ask in asked.items():
            with contextlib.suppress(pynvml.NVMLError):
                read[name] = float(ask())
        return read


# ---------------------------------------------------------------- somebody else


def refuse_busy() -> None:
    """An error that says who is using the GPU, if anybody is. Best asked before CUDA runs in this process."""
    with nvml() as found:
        if found is None:
            return
        others, percent = _processes(*found), _utilisation(*found)
    if not others and percent <= BUSY_PERCENT:
        return
    doing = [f"it is busy {percent} % of the time"] if percent > BUSY_PERCENT else []
    doing += [
        f"process {pid} holds {size / 2**30:.1f} GiB" if size else f"process {pid} uses it" for pid, size in others
    ]
    raise UserError(
        f"the GPU is in use: {', '.join(doing)}; what it measures now would be wrong",
        "wait until it is free, choose another with CUDA_VISIBLE_DEVICES, or measure all the same with --force",
    )


def _processes(pynvml: Any, handle: Any) -> list[tuple[int, int]]:
    """Processes that compute on the GPU, with their bytes, other than this one."""
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return []
    found = [(int(item.pid), int(item.usedGpuMemory or 0)) for item in running if item.pid != os.getpid()]
    mine = torch.cuda.is_initialized() and len(found) == len(running)
    return [] if mine and len(found) == 1 else found  # in a container our own process has another number outside


def _utilisation(pynvml: Any, handle: Any, samples: int = 5) -> int:
    """Percent of time with a kernel running: the middle of a few looks, so that one moment does not decide."""
    seen = []
    for _ in range(samples):
        try:
            seen.append(int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        except pynvml.NVMLError:
            return 0
        time.sleep(0.08)
    return sorted(seen)[len(seen) // 2]


def disturbed() -> str | None:
    """A sentence where other processes want this machine's cores."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
    cores = physical_cores()
    if load <= BUSY_LOAD * cores:
        return None
    return f"other work was going on: {load:.1f} processes wanted the {cores} cores when the probe began"
