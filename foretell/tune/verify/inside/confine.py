"""The cage of a process that runs a kernel: namespaces where the kernel of the system gives them, limits, and who ends it.

    forked by the server (its own session)      supervise: kills all when stdin closes or the worker ends
      └─ fork, first of a PID namespace         init: all it leads to dies with it, daemons too
           └─ fork                              the worker: no network, limits on memory, files and core dumps
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x40000 | 0x4000
_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_POLL_MILLISECONDS = 20


def separated() -> tuple[str, ...]:
    """Leave the network and the process tree of everybody else; what of it the system allowed."""
    if sys.platform != "linux":
        return ()
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if library.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_MOUNTS) != 0:
        return ()
    with contextlib.suppress(OSError):
        for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(content)
    return ("pid", "network", "ipc")


def _own_processes() -> None:
    """/proc as this namespace has it: nobody else's environment or memory. Where the system forbids it, it stays as it is."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"none", b"/", None, _PRIVATE, None) == 0:
        library.mount(b"proc", b"/proc", b"proc", 0, None)


def limit(limits: Mapping[str, int]) -> None:
    """Never raised again: soft and hard limits are the same."""
    wanted = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: limits["file_bytes"], resource.RLIMIT_NOFILE: limits["files"]}
    if limits.get("address_bytes"):
        wanted[resource.RLIMIT_AS] = limits["address_bytes"]
    for which, value in wanted.items():
        most = resource.getrlimit(which)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(which, (value, value))


def caged(work: Callable[[], None], told: Callable[[dict[str, Any]], None], limits: Mapping[str, int]) -> None:
    """Run `work` in the innermost process and never return; `told` tells the parent how that ended."""
    kept = separated()
    first = os.fork()
    if first == 0:
        _die_with_parent()
        if kept:
            _own_processes()
        worker = os.fork()
        if worker == 0:
            _die_with_parent()
            _run(work, limits)
        _hold_nothing()
        _, status = os.waitpid(worker, 0)
        os._exit(encoded(status))
    with contextlib.suppress(OSError):
        told({"started": first, "separated": list(kept)})
    os._exit(_watch(first, told))


def _run(work: Callable[[], None], limits: Mapping[str, int]) -> None:
    status = 1
    try:
        limit(limits)
        work()
        status = 0
    except BaseException:
        import traceback

        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(status)


def _watch(first: int, told: Callable[[dict[str, Any]], None]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stdin = select.poll()
    stdin.register(0, select.POLLIN | select.POLLHUP)
    while not stdin.poll(_POLL_MILLISECONDS):
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):
                told({"ended": decoded(os.waitstatus_to_exitcode(status))})
            break
    with contextlib.suppress(OSError):
        os.kill(first, signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
    return 0


def _hold_nothing() -> None:
    """The first process keeps no pipe open but standard error."""
    os.closerange(3, 256)


def encoded(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def decoded(code: int) -> int:
    """As `subprocess` has it: below 0 for a signal."""
    return 128 - code if code > 128 else code


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
