"""How busy the machine was while something ran, and who else used it. No torch.

    meter = Meter()        before the first step
    meter.look()           now and then: the load average
    meter.read()  → Load   since the start: load average, cores of this run and of others, other processes on its GPUs
    words(load, delayed)   a sentence, where the machine was busy

The run's own processes are one process and all its descendants; everything else on the machine is others'. Where Linux does not tell
(no /proc), only the load average is known. `runtime/observe/process_state.delayed` is the other half: how long a thread waited for a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.decode import value_of
from foretell.runtime.process import proc
from foretell.units import human_bytes

LOOK_SECONDS = 2.0
"""Between two readings of the load average."""
LEAST_SECONDS = 0.5
"""Over which shares of the cores are told: clocks of processes move in hundredths of a second."""
BUSY_SHARE = 0.2
"""Of the machine's cores in use by others, from which on it counts as busy."""
BUSY_LOAD = 0.5
"""Processes that are ready to run besides the run's own, for each core."""
DELAYED = 0.1
"""Share of the time that a run waited for a core, from which on it is told."""
SCAN_TIMES = 200
"""As long as looking through all processes takes, it is not done again: half a percent of the time."""
NAMED = 3
"""Names of other processes that are told."""
LEAST_CORES = 0.05
_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""Of the first line of /proc/stat: user, nice, system, irq, softirq."""
_STEAL_FIELD = 7
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, kw_only=True)
class Other:
    """Processes of one name that are not the run's."""

    name: str
    processes: int
    cores: float
    """In use, on average."""


@dataclass(frozen=True, kw_only=True)
class OnGpu:
    """Another process on a GPU that the run uses."""

    device: int
    name: str
    bytes: int | None
    """Of the GPU's memory; None where the driver does not tell."""


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """Of the machine, while a run was on it."""

    cores: int
    load_average: float | None = None
    """Processes that run or are ready to: the mean of readings of the last minute's average, of all users."""
    own_cores: float | None = None
    other_cores: float | None = None
    """In use by everything that is not the run, on average."""
    stolen_cores: float | None = None
    """That a virtual machine was not given by its host."""
    others: tuple[Other, ...] = ()
    """Those that used most."""
    gpu_others: tuple[OnGpu, ...] | None = None
    """None where the driver was not asked, or does not name this run's own processes."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_json(data: Any) -> MachineLoad | None:
    """From a measurement; None where it has none."""
    return None if data is None else value_of(MachineLoad, data, "load")


# --- reading ---------------------------------------------------------------------------------------------------------


class LoadMeter:
    """Of a process and all its descendants, from now on; `root` is that process, this one unless told."""

    def __init__(self, root: int | None = None, *, gpus: bool = False, now: Callable[[], float] = time.monotonic) -> None:
        self.root, self.gpus, self._now = root or os.getpid(), gpus, now
        self._averages: list[float] = []
        self._looked = float("-inf")
        self._began = now()
        self._busy, self._stolen = _machine()
        self._own = proc.work(self.root)
        self._each = _processes()
        self._found: tuple[Other, ...] = ()
        self._scanned, self._cost = float("-inf"), 0.0
        self.look()

    def look(self) -> bool:
        """Read the load average, if the last time is long enough ago."""
        now = self._now()
        if now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        with contextlib.suppress(OSError, AttributeError):
            self._averages.append(os.getloadavg()[0])
        return True

    def glance(self) -> MachineLoad:
        """The load average and the run's own cores: what takes no time to read."""
        own, seconds = proc.work(self.root), self._now() - self._began
        mine = max(0.0, own[0] - self._own[0]) / seconds if own and self._own and seconds >= LEAST_SECONDS else None
        return MachineLoad(cores=os.cpu_count() or 1, load_average=self._averages[-1] if self._averages else None, own_cores=mine)

    def read(self) -> MachineLoad:
        self._looked = float("-inf")
        self.look()
        cores, seconds = os.cpu_count() or 1, self._now() - self._began
        average = sum(self._averages) / len(self._averages) if self._averages else None
        gpu = gpu_others(_tree(self.root)) if self.gpus else None
        busy, stolen = _machine()
        own = proc.work(self.root)
        if None in (busy, stolen, self._busy, self._stolen, own, self._own) or seconds < LEAST_SECONDS:
            return MachineLoad(cores=cores, load_average=average, gpu_others=gpu)
        assert busy is not None and stolen is not None and self._busy is not None and self._stolen is not None and own and self._own
        mine = max(0.0, own[0] - self._own[0])
        return MachineLoad(
            cores=cores, load_average=average, own_cores=mine / seconds, other_cores=max(0.0, busy - self._busy - mine) / seconds,
            stolen_cores=max(0.0, stolen - self._stolen) / seconds, others=self._others(seconds), gpu_others=gpu,
        )  # fmt: skip

    def _others(self, seconds: float) -> tuple[Other, ...]:
        """The last that were looked for: all processes of a large machine take a while, and a run is not to wait for that."""
        now = self._now()
        if now - self._scanned >= SCAN_TIMES * self._cost:
            self._found, self._scanned = self._scan(seconds), now
            self._cost = self._now() - now
        return self._found

    def _scan(self, seconds: float) -> tuple[Other, ...]:
        """By name, those that used most first; without the run's own and those it was started by."""
        own = _tree(self.root) | _ancestors(self.root)
        found: dict[str, tuple[int, float]] = {}
        for pid, (name, used) in _processes().items():
            if pid in own:
                continue
            count, total = found.get(name, (0, 0.0))
            found[name] = (count + 1, total + max(0.0, used - self._each.get(pid, ("", 0.0))[1]))
        made = [Other(name=name, processes=count, cores=used / seconds) for name, (count, used) in found.items()]
        return tuple(sorted((one for one in made if one.cores >= LEAST_CORES), key=lambda one: -one.cores)[:NAMED])


def _machine() -> tuple[float | None, float | None]:
    """CPU seconds of everything since the machine was started, and those that its host gave to others."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = [int(one) for one in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
        return sum(ticks[place] for place in _BUSY_FIELDS) / _TICKS, ticks[_STEAL_FIELD] / _TICKS
    return None, None


def _stat(pid: int) -> tuple[str, list[str]]:
    """Name of a process, and its fields from the state on."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        return before.partition("(")[2], after.split()
    return "", []


def _pids() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def _processes() -> dict[int, tuple[str, float]]:
    """Process → its name and CPU seconds."""
    found = {}
    for pid in _pids():
        name, fields = _stat(pid)
        if len(fields) > 12:
            found[pid] = (name, (int(fields[11]) + int(fields[12])) / _TICKS)
    return found


def _tree(root: int) -> set[int]:
    """A process and its descendants."""
    above = {pid: int(fields[1]) for pid in _pids() if len(fields := _stat(pid)[1]) > 1}
    found = {root}
    while more := {pid for pid, parent in above.items() if parent in found} - found:
        found |= more
    return found


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1 and pid not in found:
        found.add(pid)
        fields = _stat(pid)[1]
        pid = int(fields[1]) if len(fields) > 1 else 0
    return found


def gpu_others(own: Collection[int]) -> tuple[OnGpu, ...] | None:
    """Other processes on the GPUs that processes of `own` are on. None without NVML, and where it does not name them: in a container it
    may have the numbers of the machine around it."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found, seen = [], False
        for device in range(pynvml.nvmlDeviceGetCount()):
            there = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(device))
            if any(one.pid in own for one in there):
                seen = True
                found += [OnGpu(device=device, name=_stat(one.pid)[0] or "a process", bytes=one.usedGpuMemory) for one in there if one.pid not in own]
        return tuple(found) if seen else None
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


# --- words -----------------------------------------------------------------------------------------------------------


def words(load: MachineLoad | None, delayed: float | None = None) -> str:
    """`this machine was busy: load 9.8 on 2 cores, ...`; empty where it was not, or nobody knows."""
    waited = f"this run waited for a core {100 * delayed:.0f} % of the time" if delayed and delayed > DELAYED else ""
    if load is None:
        return f"this machine was busy: {waited}" if waited else ""
    others = (load.other_cores or 0.0) + (load.stolen_cores or 0.0)
    ready = (load.load_average or 0.0) - (load.own_cores or 0.0)
    crowded = others > BUSY_SHARE * load.cores or (ready > BUSY_LOAD * load.cores and (load.other_cores is None or others > LEAST_CORES))
    if not (crowded or waited or load.gpu_others):
        return ""
    if waited and not crowded and not load.gpu_others and load.other_cores is not None:
        return f"this run has more threads than cores: {waited}, and nobody else used the machine's {load.cores}"
    told = [f"load {load.load_average:.1f} on {load.cores} {'core' if load.cores == 1 else 'cores'}"] if load.load_average is not None else []
    if load.other_cores is not None and load.other_cores > LEAST_CORES:
        told.append(f"other processes used {load.other_cores:.1f} of them{_named(load.others)}")
    if load.stolen_cores is not None and load.stolen_cores > LEAST_CORES:
        told.append(f"its host gave {load.stolen_cores:.1f} to other guests")
    told += [waited] if waited else []
    told += [_on_gpus(load.gpu_others)] if load.gpu_others else []
    return f"this machine was busy: {', '.join(told)}"


def _named(others: Sequence[Other]) -> str:
    found = [f"{one.name} {one.cores:.1f}" for one in others]
    return f" ({', '.join(found)})" if found else ""


def _on_gpus(others: Sequence[OnGpu]) -> str:
    held = [one.bytes for one in others if one.bytes]
    names = ", ".join(dict.fromkeys(one.name for one in others))
    what = "1 other process was" if len(others) == 1 else f"{len(others)} other processes were"
    return f"{what} on its GPUs ({names}" + (f", {human_bytes(sum(held))})" if held else ")")


def words_of(measured: Mapping[str, Any]) -> str:
    """The same from a measurement's JSON."""
    return words(of_json(measured.get("load")), measured.get("delayed"))
