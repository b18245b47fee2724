"""Where replicas that come and go are joined: a round is finished by those that are there.

    replicas      give how far they have come ──┐                       ┌── the mean, in their format: each takes the outer step
                                                └── hub: waits, adds ───┘
    a new one     asks ── what all began the round from, with its hash

A round ends when all replicas that are connected have given theirs; or, once a quorum has, when a grace window is over. One that
was killed, before or in the middle of its message, is left out: nobody starts again. One that comes late, or whose weights have another hash, is
told so and takes the hub's. The hub takes the same outer step as everybody, so that it has the weights that a new replica begins with;
their hash goes with every mean and is compared by who gets it.

The hub is one process, which may be beside a replica. If it ends, replicas cannot be joined any more; what it sends and receives is
as much as that of all replicas together.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.plan.types import Sync
from foretell.runtime.parallel.sync import codes
from foretell.runtime.parallel.sync.frames import Gone, HubChannel, HubMessage
from foretell.runtime.parallel.sync.mean import added
from foretell.runtime.process.secure import Forged

SEED_SECONDS = 60.0
"""The first replica has so long between two pieces of its weights; then another one brings them."""


@dataclass(frozen=True, kw_only=True)
class HubRound:
    """A round that has ended."""

    number: int
    replicas: tuple[int, ...]
    """Whose steps are in it."""
    left_out: int
    """Replicas that were connected, and had not given theirs in time."""
    seconds: float
    """From the first that gave its own."""
    hash: int
    """Of the weights that the next round begins from."""


@dataclass(eq=False)
class _Guest:
    """A replica that is connected."""

    number: int
    given: Tensor | None = None
    """How far it has come, in the round under way."""
    answered: int = -1
    """The round whose mean it waits for, or waited for last."""


@dataclass
class Hub:
    """Serves from `start` to `close`."""

    sync: Sync
    quorum: int = 1
    grace_seconds: float = 10.0
    host: str = "127.0.0.1"
    port: int = 0
    rounds: list[HubRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin: Tensor | None = None
        self.momentum = torch.zeros(0)
        self._cut = torch.zeros(0)
        self._mean, self._hash = b"", 0
        self._guests: dict[int, _Guest] = {}
        self._count = 0
        self._first = 0.0
        self._seeding: int | None = None
        self._change = threading.Condition()
        self._closed = False

    @property
    def number(self) -> int:
        """Of the round under way."""
        return len(self.rounds)

    def start(self) -> tuple[str, int]:
        """Listen; returns the address."""
        self._listener = socket.create_server((self.host, self.port))
        for work in (self._accept, self._close_rounds):
            threading.Thread(target=work, name="foretell-hub", daemon=True).start()
        return self.host, int(self._listener.getsockname()[1])

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._listener.close()

    # ------------------------------------------------------------ replicas

    def _accept(self) -> None:
        while not self._closed:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(link,), name="foretell-hub", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        guest: _Guest | None = None
        with contextlib.closing(link), contextlib.suppress(Gone, Forged, ValueError, KeyError, TypeError, OverflowError):
            channel = HubChannel(link, "hub", opens=True)
            try:
                while not self._closed:
                    message = channel.receive(self._most())
                    if message.kind == "join":
                        guest = self._join(channel, message, guest)
                    elif message.kind == "give" and guest is not None:
                        self._take(channel, message, guest)
                    else:
                        return
            finally:
                self._leave(guest)

    def _most(self) -> int:
        """Bytes of a message that may come: nothing before a replica has joined that says how large its weights are."""
        return 0 if self.begin is None else 4 * self.begin.numel()

    def _join(self, channel: HubChannel, message: HubMessage, guest: _Guest | None) -> _Guest:
        """Give what the round began from; the first replica of all brings it."""
        elements = int(message.said["elements"])
        if elements <= 0 or elements % codes.BLOCK:
            raise Forged(f"a replica has {elements:,} weights, which is no number of blocks")
        with self._change:
            self._count += guest is None
            found = guest or _Guest(self._count)
            while self.begin is None and self._seeding is not None and not self._closed:
                self._change.wait(0.5)
            seeds = self.begin is None
            self._seeding = found.number if seeds else self._seeding
        if seeds:
            try:
                channel.send("seed")
                link = channel.link
                link.settimeout(SEED_SECONDS)
                brought = _floats(channel.receive(4 * elements).content)
                link.settimeout(None)
                if brought.numel() != elements or not bool(brought.isfinite().all()):
                    raise Forged("the first replica brought other weights than it said, or some that are no numbers")
                with self._change:
                    self.begin, self.momentum = brought, torch.zeros_like(brought)
                    self._cut, self._hash = torch.zeros_like(brought), codes.hash_of(brought)
            finally:
                with self._change:
                    self._seeding = None
                    self._change.notify_all()
        with self._change:
            assert self.begin is not None
            if elements != self.begin.numel():
                channel.send("refused", problem=f"it has {elements:,} weights, and the others {self.begin.numel():,}")
                raise Gone("another model")
            found.given, self._guests[found.number] = None, found
            state, number, hash_ = torch.cat([self.begin, self.momentum]), self.number, self._hash
        channel.send("state", _bytes(state), round=number, hash=hash_, number=found.number)
        return found

    def _take(self, channel: HubChannel, message: HubMessage, guest: _Guest) -> None:
        """What a replica gives; it gets the mean when the round ends."""
        with self._change:
            late = int(message.said["round"]) != self.number
            if late or int(message.said["hash"]) != self._hash:
                self._guests.pop(guest.number, None)
                why = "the round was over" if late else "it began from other weights"
            else:
                why = ""
                guest.given, guest.answered = self._plain(message.content), self.number
                self._first = self._first if any(one.given is not None for one in self._others(guest)) else time.monotonic()
                self._change.notify_all()
                while self.number == guest.answered and not self._closed:
                    self._change.wait(0.5)
                mean, hash_, number = self._mean, self._hash, self.number
        if why:
            channel.send("behind", why=why)
            return
        channel.send("mean", mean, round=number, hash=hash_)

    def _others(self, guest: _Guest) -> list[_Guest]:
        return [one for one in self._guests.values() if one is not guest]

    def _leave(self, guest: _Guest | None) -> None:
        if guest is not None:
            with self._change:
                self._guests.pop(guest.number, None)
                self._change.notify_all()

    # ------------------------------------------------------------ rounds

    def _close_rounds(self) -> None:
        with self._change:
            while not self._closed:
                given = [one for one in self._guests.values() if one.given is not None]
                over = time.monotonic() - self._first >= self.grace_seconds
                if len(given) >= self.quorum and (over or len(given) == len(self._guests)):
                    self._end(sorted(given, key=lambda one: one.number))
                self._change.wait(0.05 if given else 0.5)

    def _end(self, given: list[_Guest]) -> None:
        """Average what came, in the order of replicas, and take the outer step."""
        from foretell.runtime.parallel.sync.outer import step_outer

        assert self.begin is not None
        mean = added([one.given for one in given if one.given is not None])
        if self.sync.format == "int8":
            mean += self._cut
            coded = codes.rounded(mean, self._cut)
            self._mean, mean = bytes(coded.numpy().tobytes()), codes.plain(coded)
        else:
            self._mean = _bytes(mean)
        step_outer(self.begin, self.momentum, mean, self.sync)
        self._hash = codes.hash_of(self.begin)
        left_out = len(self._guests) - len(given)
        for one in given:
            one.given = None
        self.rounds.append(HubRound(
            number=self.number, replicas=tuple(one.number for one in given), left_out=left_out,
            seconds=time.monotonic() - self._first, hash=self._hash,
        ))  # fmt: skip
        self._change.notify_all()

    def _plain(self, content: bytearray) -> Tensor:
        assert self.begin is not None
        if len(content) != (codes.bytes_of(self.begin.numel()) if self.sync.format == "int8" else 4 * self.begin.numel()):
            raise Forged("a replica gave a vector of another length")
        vector = codes.plain(torch.frombuffer(content, dtype=torch.int8)) if self.sync.format == "int8" else _floats(content)
        if not bool(vector.isfinite().all()):  # one that is no number would be everybody's
            raise Forged("a replica gave what is no number")
        return vector


def _floats(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.float32).clone()


def _bytes(vector: Tensor) -> bytes:
    return bytes(vector.detach().cpu().numpy().tobytes())
