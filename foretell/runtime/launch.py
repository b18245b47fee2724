"""Start a plan's ranks on this machine, with the environment that torchrun gives. No torch in the parent.

Children are in sessions of their own: Ctrl-C reaches the parent, which passes it on once. A parent that is killed takes
its children with it: they get SIGTERM, save and end. A child that dies ends the others in bounded time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from foretell.errors import UserError
from foretell.hardware.this_machine import physical_cores
from foretell.plan.legal import launch as command_for
from foretell.plan.types import Plan

LAUNCHED = "FORETELL_LAUNCHED"
"""Set for ranks that were started here."""
GRACE_SECONDS = 15.0
"""How long the others may take once one has failed."""
_PR_SET_PDEATHSIG = 1
_SPOKEN = (1, 2, 70, 130, 143)
"""Exit statuses of a rank that has said why."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by torchrun, Slurm's wrapper or `launch`."""
    return bool(os.environ.get("WORLD_SIZE")) and bool(os.environ.get("RANK"))


def launched() -> bool:
    return bool(os.environ.get(LAUNCHED))


def check_room(plan: Plan, device: str) -> None:
    """Refuse, with the command to use, a plan for more GPUs than this machine has."""
    world = plan.mesh.world
    there = gpus()
    if device == "cpu" or (device == "auto" and not there) or there >= world:
        return
    raise UserError(
        f"the plan wants {world} GPUs and this machine has {there}",
        f"start it on every machine with `{command_for(plan, max(1, there))}`, or try it with --device cpu",
    )


def gpus() -> int:
    """How many this process may use, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no library: no GPU
        return 0


def launch(words: Sequence[str], world: int) -> tuple[int, str]:
    """Run `python -m foretell WORDS` as so many ranks; the exit status, and what to say if nobody has said it."""
    port = _free_port()
    children: list[subprocess.Popen[bytes]] = []
    signals = _Forward(children)
    before = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(world):
            children.append(_start(words, rank, world, port))
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def _start(words: Sequence[str], rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    threads = max(1, physical_cores() // world)
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHED: "1",
    }  # fmt: skip
    env.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.Popen(
        [sys.executable, "-m", "foretell", *words], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
        preexec_fn=_end_with_parent(os.getpid()),
    )  # fmt: skip


def _end_with_parent(parent: int) -> Callable[[], None] | None:
    """What a child does first: ask the kernel for SIGTERM when its parent ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return ask


class _Forward:
    """Passes a signal on to the ranks; a second one ends them."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self.children, self.times = children, 0

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.times += 1
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number if self.times == 1 else signal.SIGKILL)
        if self.times > 1:
            os._exit(128 + number)


def _wait(children: list[subprocess.Popen[bytes]]) -> tuple[int, str]:
    """Until all have ended; after a failure, not for ever."""
    deadline = float("inf")
    first = -1
    while None in (codes := [child.poll() for child in children]):
        if first < 0 and any(codes):
            first = next(rank for rank, code in enumerate(codes) if code)
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for child in children:
                if child.poll() is None:
                    child.kill()
        time.sleep(0.05)
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return 0, ""
    rank = first if first >= 0 else min(failed, key=lambda rank: codes[rank] or 0)  # a signal before a status
    code = codes[rank] or 0
    if code < 0:
        return 1, f"rank {rank} was ended by signal {-code} ({_signal_name(-code)}); all ranks stopped"
    return (code, "") if code in _SPOKEN else (1, f"rank {rank} ended with exit status {code}; all ranks stopped")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
