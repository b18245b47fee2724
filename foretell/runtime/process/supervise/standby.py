"""A process that has imported what ranks import, and is forked for each of them: a rank is there in milliseconds, not seconds.

    supervisor ── a socket pair: words, environment, a pipe ──►  standby ── fork, twice ──►  the rank
               ◄── its pid ──────────────────────────────────────────┘

The process in between ends at once, so that the rank becomes the supervisor's own child (`reaper.adopt`): it waits for it as for
one that it has started itself, and the rank outlives a standby that is killed. The standby runs no code of the user's and asks
for no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.runtime.process import proc
from foretell.runtime.process.launch import HEARS, RankProcess, end_with_parent, rank_environment, started
from foretell.runtime.process.replica import ROLE, role_of
from foretell.runtime.process.signals import STOPS

MODULES = (
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "foretell.cli.run.run", "foretell.runtime.train.run", "foretell.runtime.parallel.tensor.split", "foretell.runtime.parallel.pipeline.stages",
    "foretell.report.comparison", "foretell.report.html.detail",
)  # fmt: skip
"""What it imports; a name that is not there is left out."""
FEWEST = ("torch", "foretell.cli.run.run", "foretell.runtime.train.run")
"""What every rank imports: of one that is forked from as soon as it can be, and then ended."""
WAIT_SECONDS = 120.0
"""A standby that does not answer for so long is given up: ranks are started without it."""
AGAIN_SECONDS = 10.0
"""The same once it has imported everything."""
_MOST_BYTES = 2**22
"""Of a request."""
_COUNT = 8
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_OWN_ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Standby:
    """The supervisor's end of it: `start` is a `StartRank`."""

    def __init__(self, world: int, *, modules: Sequence[str] = MODULES) -> None:
        self._socket, there = socket.socketpair()
        self._socket.settimeout(WAIT_SECONDS)
        environment = {name: value for name, value in rank_environment(0, world, 0, 0).items() if name not in _OWN_ENVIRONMENT}
        with there:
            module = "foretell.runtime.process.supervise.standby"
            self._words = [sys.executable, "-m", module, str(there.fileno()), str(os.getpid()), *modules]
            self.process = subprocess.Popen(
                self._words, env=environment, stdin=subprocess.DEVNULL, pass_fds=(there.fileno(),), start_new_session=True,
                preexec_fn=end_with_parent(os.getpid(), signal.SIGKILL),
            )  # fmt: skip
        self.works = True
        self._given: list[int] = []

    def start(self, words: Sequence[str], env: Mapping[str, str], pipe: int) -> RankProcess:
        """A rank, `-m foretell WORDS`; from this process where it can, else started as any other."""
        if self.works and words[:2] == ["-m", "foretell"]:
            try:
                self._given.append(self._forked({"words": list(words), "env": dict(env), "cwd": os.getcwd()}, pipe))
                self._socket.settimeout(AGAIN_SECONDS)
                return ForkedRank(self._given[-1])
            except (OSError, ValueError):
                self._give_up()
        return started(words, env, pipe)

    def _give_up(self) -> None:
        """It is ended, and so is a rank that it may have forked without a word: it would stand in another's place."""
        self.works = False
        self.process.kill()
        self.process.wait()
        for pid in proc.children(os.getpid()):
            if pid not in self._given and self._is_of_it(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _is_of_it(self, pid: int) -> bool:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().split(b"\0")[1 : len(self._words)] == [word.encode() for word in self._words[1:]]
        return False

    def _forked(self, call: dict[str, Any], pipe: int) -> int:
        text = json.dumps(call).encode()
        socket.send_fds(self._socket, [len(text).to_bytes(_COUNT, "big")], [pipe])
        self._socket.sendall(text)
        return int.from_bytes(_exactly(self._socket, _COUNT), "big")

    @property
    def lives(self) -> bool:
        return self.works and self.process.poll() is None

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


class ForkedRank:
    """A rank that became a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # not yet this process's child, or somebody else's by now
                if not proc.lives(self.pid):
                    self.returncode = -signal.SIGKILL
            else:
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        more = connection.recv(count - len(content))
        if not more:
            raise ConnectionError("the other side is gone")
        content += more
    return content


# --- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve, and return in each rank that is forked, once it is what it is to be."""
    door, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}  # these are for ranks; it ends with the supervisor
    for name in sys.argv[3:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        try:
            header, handles, _, _ = socket.recv_fds(door, _COUNT, 1)
            size = int.from_bytes(header + (_exactly(door, _COUNT - len(header)) if header else b""), "big")
            if not header or size > _MOST_BYTES:
                os._exit(0)
            call = json.loads(_exactly(door, size))
        except OSError:
            os._exit(0)
        if _forked_twice(door):
            door.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            _become(call, handles[0], owner)
            return
        for handle in handles:
            os.close(handle)


def _forked_twice(door: socket.socket) -> bool:
    """Whether this is the rank."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return False
    os.setsid()
    rank = os.fork()
    if not rank:
        os.setsid()
        return True
    with contextlib.suppress(OSError):
        door.sendall(rank.to_bytes(_COUNT, "big"))
    os._exit(0)


def _become(call: Mapping[str, Any], pipe: int, owner: int) -> None:
    """What `launch.started` would have started."""
    deadline = time.monotonic() + 5.0
    while os.getppid() != owner:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.0005)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    part = role_of(call["env"].get(ROLE, ""))
    prctl(_PR_SET_NAME, (part.name if part is not None else f"rank {call['env'].get('RANK', '')} of foretell").encode())  # as top shows it
    if os.getppid() != owner:
        os._exit(1)
    threads = call["env"].get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdecimal() and threads != os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))  # the run has another number of ranks by now
    os.environ.clear()
    os.environ.update({**call["env"], HEARS: str(pipe)})
    os.chdir(call["cwd"])
    sys.argv = ["foretell", *call["words"][2:]]


if __name__ == "__main__":
    main()
    runpy.run_module("foretell", run_name="__main__", alter_sys=True)
