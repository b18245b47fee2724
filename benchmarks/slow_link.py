"""Network namespaces joined by a slow link, on one machine and without rights: what replicas far apart see.

    end 0: tun device, tbf at the rate ──┐                            ┌── end 1: tun device, tbf at the rate
                                         └─ relay: holds each packet ─┘
                                            for the delay, then writes it to the end it is for

`tbf` shapes what leaves an end; the relay is a process in user space that keeps packets for a while, one way. TCP sees both: slow start,
acknowledgements that are late, windows. It runs inside `unshare -rn` (user and network namespaces of its own) and changes nothing
outside. Without `unshare`, `ip`, `tc` or /dev/net/tun there is no such link, and `missing` says which.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DEVICE = "slow0"
INSIDE = "FORETELL_SLOW_LINK"
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000
_NEW_NET = 0x40000000
_PACKET = 65536
_SPIN = 2e-4
"""Seconds that the relay may be late."""


def missing() -> str:
    """What this machine lacks for such a link; empty where nothing."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened"
    tried = subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=20)
    return "" if tried.returncode == 0 else "user namespaces are not allowed"


def enter() -> None:
    """Begin this process anew inside namespaces of its own, unless it is there."""
    if os.environ.get(INSIDE) == "1":
        return
    words = ["unshare", "-rn", "--kill-child", "-f", sys.executable, *sys.argv]
    os.execvpe("unshare", words, {**os.environ, INSIDE: "1"})


def address(end: int) -> str:
    return f"10.9.0.{end + 1}"


@dataclass(kw_only=True)
class SlowLink:
    """Ends that reach each other at a rate, after a delay."""

    ends: int
    bits_per_second: float
    delay_seconds: float
    """One way."""
    _holders: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _relay: int = 0

    def __enter__(self) -> SlowLink:
        fds = [self._end(number) for number in range(self.ends)]
        self._relay = os.fork()
        if self._relay == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                relay(fds, self.delay_seconds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        if self._relay:
            os.kill(self._relay, signal.SIGTERM)
            os.waitpid(self._relay, 0)
        for one in self._holders:
            one.kill()
            one.wait()

    def _end(self, number: int) -> int:
        """A network namespace, held by a process that sleeps, with a device whose other side is the descriptor returned."""
        mine, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); import slow_link;"
            f"slow_link.hold({theirs.fileno()}, {number}, {self.bits_per_second!r})"
        )
        self._holders.append(subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()]))
        theirs.close()
        _, fds, _, _ = socket.recv_fds(mine, 1, 1)
        mine.close()
        return fds[0]

    def start(self, end: int, words: Sequence[str], **more: object) -> subprocess.Popen[bytes]:
        """A command inside an end."""
        inside = ["nsenter", f"--net=/proc/{self._holders[end].pid}/ns/net", "--", *words]
        return subprocess.Popen(inside, **more)  # type: ignore[call-overload, no-any-return]

    def change(self, end: int, bits_per_second: float) -> None:
        """Another rate for what leaves an end."""
        shaped = ["tc", "qdisc", "change", "dev", DEVICE, "root", *_shape(bits_per_second)]
        if self.start(end, shaped).wait():
            raise SystemExit("the rate could not be changed")


def _shape(bits_per_second: float) -> list[str]:
    burst = max(3000, int(bits_per_second / 8 * 0.005))
    return ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "limit", "2000000"]


def hold(sends: int, number: int, bits_per_second: float) -> None:
    """In a process of its own: make the namespace and its device, give the other side away, stay."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NET):
        raise SystemExit(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN | _NO_INFO))
    for words in (
        ["ip", "link", "set", "lo", "up"], ["ip", "addr", "add", f"{address(number)}/24", "dev", DEVICE],
        ["ip", "link", "set", DEVICE, "up", "txqueuelen", "2000"], ["tc", "qdisc", "add", "dev", DEVICE, "root", *_shape(bits_per_second)],
    ):  # fmt: skip
        subprocess.run(words, check=True)
    with socket.socket(fileno=sends) as channel:
        socket.send_fds(channel, [b"!"], [tun])
    os.close(tun)
    signal.pause()


def relay(fds: Sequence[int], delay: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Hold every packet for so many seconds and write it to the end that its address names."""
    for fd in fds:
        os.set_blocking(fd, False)
    held: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = None if not held else max(0.0, held[0][0] - clock() - _SPIN)
        ready, _, _ = select.select(fds, [], [], wait)
        for fd in ready:
            for _ in range(64):
                try:
                    packet = os.read(fd, _PACKET)
                except BlockingIOError:
                    break
                if packet[0] >> 4 == 4:
                    place = packet[19] - 1
                    if 0 <= place < len(fds):
                        held.append((clock() + delay, fds[place], packet))
        now = clock() + _SPIN
        while held and held[0][0] <= now:
            _, fd, packet = held.popleft()
            with contextlib.suppress(OSError):  # full, as a switch may be: TCP sends it again
                os.write(fd, packet)
