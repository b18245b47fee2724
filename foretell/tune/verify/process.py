"""Processes that run kernels, as the parent sees them: asked with raw bytes, each answer in time, gone whatever they did.

They are forked from a process that has imported torch and never runs a kernel's code (`trace.sandbox.server`), and keep none of
the parent's memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.trace.sandbox.process import TAIL_BYTES
from foretell.trace.sandbox.server import Forked, Server, import_paths
from foretell.tune.verify import wire
from foretell.tune.verify.inside.triton_kernels import installed
from foretell.tune.verify.wire import RawTensor, WireMessage

MODULE = "foretell.tune.verify.inside.child"
_QUIET_SECONDS = 1.0
_INTERPRETED = "TRITON_INTERPRET"


@dataclass(frozen=True, kw_only=True)
class KernelLimits:
    """What a process that runs a kernel may take."""

    seconds: float = 60.0
    """For one answer."""
    start_seconds: float = 120.0
    """To load a file, which may compile."""
    address_bytes: int = 16 << 30
    """Of virtual memory, on a CPU; a GPU's driver reserves far more than it uses."""
    file_bytes: int = 1 << 30
    files: int = 512
    memory_share: float = 0.5
    """Of a GPU's memory."""
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class KernelSetting:
    """Where processes run."""

    device: str = "cpu"
    limits: KernelLimits = field(default_factory=KernelLimits)
    environment: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    """Words before the command: a sanitizer and its options."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


class Lost(Exception):
    """A process that gave no answer: `how` is hang, crash or protocol."""

    def __init__(self, how: str, text: str) -> None:
        self.how, self.text = how, text
        super().__init__(f"{how}: {text}")


class Raised(Exception):
    """The kernel's code raised."""

    def __init__(self, kind: str, text: str, lost: bool) -> None:
        self.kind, self.text, self.lost = kind, text, lost
        super().__init__(f"{kind}: {text}")

    @property
    def out_of_memory(self) -> bool:
        return self.kind in ("MemoryError", "OutOfMemoryError") or "can't allocate memory" in self.text


_turns = threading.Lock()
"""One question to a server at a time: kernels may be verified side by side."""
_servers: dict[str, Server] = {}
"""How Triton runs → a server: what torch imports of Triton by itself is interpreted, or compiled, from then on."""


def _server(environment: Mapping[str, str]) -> Server:
    how = environment.get(_INTERPRETED, "0") if installed() else ""
    known = _servers.get(how)
    if known is not None and (known.owner != os.getpid() or known.process.poll() is not None):
        _servers.pop(how).socket.close()
    if how not in _servers:
        _servers[how] = Server(MODULE, {_INTERPRETED: how} if how else None)
    return _servers[how]


class KernelProcess:
    """One of them."""

    def __init__(self, setting: KernelSetting) -> None:
        self.setting = setting
        here, there = socket.socketpair()
        self._connection, self.handle = here, here.fileno()
        status, telling = os.pipe()
        self._status, self._told, self._number = status, b"", 0
        self.first, self.separated = 0, ()
        with there:
            try:
                self._start(there.fileno())
                socket.send_fds(here, [b"s"], [telling])
            finally:
                os.close(telling)
        self.seconds = 0.0
        """Of the last answer, from the question's last byte to the answer's last."""

    def _start(self, handle: int) -> None:
        limits = self.setting.limits
        settings = json.dumps({
            "device": self.setting.device, "threads": limits.threads, "memory_share": limits.memory_share,
            "limits": {**asdict(limits), "address_bytes": 0 if self.setting.on_gpu else limits.address_bytes},
        })  # fmt: skip
        environment = environment_of(self.setting)
        if not self.setting.before:
            with contextlib.suppress(OSError), _turns:
                self.process: Any = Forked(_server(environment).socket, MODULE, handle, [settings], environment)
                return
        os.set_inheritable(handle, True)
        command = [*self.setting.before, sys.executable, "-P", "-m", MODULE, str(handle), settings]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(handle,), start_new_session=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(import_paths())}, bufsize=0,
        )  # fmt: skip

    # --- asking --------------------------------------------------------------------------------------------------------

    def ask(
        self, what: str, content: Mapping[str, Any] | None = None, blobs: Sequence[bytes] = (), seconds: float | None = None
    ) -> WireMessage:
        """The answer; raises `Lost`, and `Raised` where the kernel's code did."""
        self._number += 1
        limit = self.setting.limits.seconds if seconds is None else seconds
        until = time.monotonic() + limit
        try:
            wire.write(self.handle, {"do": what, "number": self._number, **(content or {})}, blobs, until)
            begun = time.perf_counter()
            found = wire.read(self.handle, until)
            self.seconds = time.perf_counter() - begun
        except TimeoutError:
            self.kill()
            raise Lost("hang", f"no answer to '{what}' after {limit:g} s") from None
        except wire.Malformed as error:
            self.kill()
            raise Lost("protocol", f"the answer to '{what}' is no message of the harness: {error}") from None
        except wire.PeerGone:
            raise Lost("crash", self._how_it_ended(what)) from None
        if found.header.get("number") != self._number:
            self.kill()
            raise Lost("protocol", f"an answer to '{what}' that nobody asked for")
        if "error" in found.header:
            raise Raised(str(found.header["error"]), str(found.header.get("text", "")), bool(found.header.get("cuda")))
        return found

    def _how_it_ended(self, what: str) -> str:
        until = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < until and "ended" not in (said := self._status_said()):
            time.sleep(0.01)
        code = said.get("ended")
        tail = self.tail().strip().splitlines()
        last = f": {tail[-1][:200]}" if tail else ""
        if code is None:
            return f"the process ended during '{what}'{last}"
        if code < 0:
            name = signal.Signals(-code).name if -code in iter(signal.Signals) else f"signal {-code}"
            return f"the process crashed during '{what}' ({name}){last}"
        return f"the process left with exit status {code} during '{what}'{last}"

    def _status_said(self) -> dict[str, Any]:
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            self._told += os.read(self._status, 1 << 16)
        found: dict[str, Any] = {}
        for line in self._told.splitlines():
            with contextlib.suppress(ValueError):
                found |= json_of(line)
        return found

    def tail(self) -> str:
        """The end of what it printed."""
        handle = self.process.stdout.fileno()
        os.set_blocking(handle, False)
        found = b""
        with contextlib.suppress(OSError):
            while more := os.read(handle, TAIL_BYTES):
                found = (found + more)[-TAIL_BYTES:]
        return found.decode(errors="replace")

    # --- what can be seen from outside --------------------------------------------------------------------------------

    def tree(self) -> list[int]:
        """Its processes, the worker first; the supervisor and the first of its namespace left out."""
        first = self.first or int(self._status_said().get("started", 0))
        self.first = first
        return _below(first) if first else []

    def threads(self) -> int:
        """Of the worker."""
        tree = self.tree()
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{tree[0]}/task")) if tree else 0
        return 0

    def resident_bytes(self) -> int:
        tree = self.tree()
        with contextlib.suppress(OSError, IndexError, ValueError):
            return int(Path(f"/proc/{tree[0]}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def isolation(self) -> tuple[str, ...]:
        return tuple(self._status_said().get("separated", ()))

    # --- ending --------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """All of it: its supervisor's session, and with the first process of a namespace everything in there."""
        self.tree()
        with contextlib.suppress(OSError):
            if self.first:
                os.kill(self.first, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self._connection.close()
        with contextlib.suppress(OSError):
            os.close(self._status)
        self.process.wait()

    def __enter__(self) -> KernelProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_below(int(child))]
    return found


def environment_of(setting: KernelSetting) -> dict[str, str]:
    """Little of the parent's: nothing in it is a secret's, a seed's or a path's."""
    kept = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CC", "CXX")
    found = {name: os.environ[name] for name in kept if name in os.environ}
    if not setting.on_gpu:
        found |= {"CUDA_VISIBLE_DEVICES": "", _INTERPRETED: "1"}
    threads = str(setting.limits.threads)
    return found | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", **setting.environment}


# ---------------------------------------------------------------- tensors in messages


def packed(inputs: Sequence[RawTensor | Any]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Inputs as specs and bytes."""
    specs = [one.header() if isinstance(one, RawTensor) else {"value": one} for one in inputs]
    return specs, [one.data for one in inputs if isinstance(one, RawTensor)]


def unpacked(specs: Sequence[Mapping[str, Any] | None], blobs: Sequence[bytes]) -> tuple[RawTensor | None, ...]:
    """Raises `Lost` where the bytes are not what the specs say."""
    left = iter(blobs)
    try:
        return tuple(RawTensor.of(spec, next(left)) if spec is not None else None for spec in specs)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise Lost("protocol", f"an answer whose tensors cannot be read: {error}") from None
