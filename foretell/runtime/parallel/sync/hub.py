"""Where replicas that come and go are joined: a round is finished by those that are there.

    replicas      give how far they have come ──┐                       ┌── the mean, in their format: each takes the outer step
                                                └── hub: waits, adds ───┘
    a new one     asks ── what all began the round from, with its hash

A round ends when all replicas that began it and are connected have given theirs; or, once a quorum has, when a grace window is over. One that
was killed, before or in the middle of its message, is left out: nobody starts again. One that comes late, or whose weights have another hash, is
told so and takes the hub's. The hub takes the same outer step as everybody, so that it has the weights that a new replica begins with;
their hash goes with every mean and is compared by who gets it.

Every replica has a slot, and every slot its own samples. The hub counts the steps of each slot that are in the weights (`used`): a replica
that was left out, or the one that comes in its place, does those steps next that its slot has not in yet. So each step of a slot is
in the weights once, in its order, or not yet.

The hub is one process, which may be beside a replica. If it ends, replicas cannot be joined any more; what it sends and receives is
as much as that of all replicas together.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretell.plan.types import Sync
from foretell.runtime.parallel.sync import codes
from foretell.runtime.parallel.sync.frames import Gone, HubChannel, HubMessage, hung_up
from foretell.runtime.parallel.sync.mean import added
from foretell.runtime.process.secure import Forged

MOST_TOLD = 2**22
"""Bytes in which a replica tells of its steps."""
START_SECONDS = 120.0
"""The first round begins without replicas that come so long after a quorum."""
SEED_SECONDS = 60.0
"""The first replica has so long between two pieces of its weights; then another one brings them."""


@dataclass(frozen=True, kw_only=True)
class HubRound:
    """A round that has ended."""

    number: int
    replicas: tuple[int, ...]
    """Slots whose steps are in it."""
    joined: tuple[int, ...]
    """Those of them that took the weights of the others since the round before."""
    left_out: tuple[int, ...]
    """Slots of replicas that were connected, and had not given theirs in time."""
    differed: int
    """Replicas that came with other weights than the round began from, and were sent to take those."""
    step: int
    """Of the run, when it ended."""
    steps: int
    """Of the round."""
    used: Mapping[int, int]
    """Slot → its steps that are in the weights now."""
    told: Mapping[int, bytes]
    """Slot → what its replica said of its steps."""
    seconds: float
    """From the first that gave its own."""
    hash: int
    """Of the weights that the next round begins from."""


@dataclass(eq=False)
class _Guest:
    """A replica that is connected."""

    number: int
    """Its slot."""
    told: bytes = b""
    joined: bool = True
    """It took the weights of the others, and no round has ended since."""
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
    expected: int = 0
    """Replicas that the first round waits for; later ones wait for the end of the round under way, unless it has too few. 0: whoever
    comes is in the round under way."""
    steps: int = 0
    """Of the run, after which no round begins; 0: there is no end."""
    rounds: list[HubRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin: Tensor | None = None
        self.momentum = torch.zeros(0)
        self._cut = torch.zeros(0)
        self._mean, self._hash = b"", 0
        self.step = 0
        """Of the run, when the round under way began."""
        self.used: dict[int, int] = {}
        """Slot → its steps that are in the weights."""
        self._guests: dict[int, _Guest] = {}
        """Slot → who is in the round under way."""
        self._waiting: set[int] = set()
        """Slots of those that want to be in the next one."""
        self.absent: set[int] = set()
        """Slots that were left out, and have not been heard of since."""
        self._count = self._differed = 0
        self._first = self._enough = self._since = 0.0
        """When the first of a round gave its own, when a quorum had, and when enough waited for the first round."""
        self._seeding: int | None = None
        self._change = threading.Condition()
        self._closed = False

    @property
    def number(self) -> int:
        """Of the round under way."""
        return len(self.rounds)

    @property
    def over(self) -> bool:
        return bool(self.steps) and self.step >= self.steps

    @property
    def next_steps(self) -> int:
        """Of the round under way: the last one may be shorter."""
        return min(self.sync.every, self.steps - self.step) if self.steps else self.sync.every

    def take(self, begin: Tensor, momentum: Tensor, cut: Tensor, *, step: int = 0, used: Mapping[int, int] | None = None) -> None:
        """What the first round begins from, kept in these tensors: no replica is asked for it."""
        self.begin, self.momentum, self._cut = begin, momentum, cut
        self._hash, self.step, self.used = codes.hash_of(begin), step, dict(used or {})

    def start(self, *, closes: bool = True) -> tuple[str, int]:
        """Listen; returns the address. Without `closes` whoever calls `turn` ends rounds."""
        self._listener = socket.create_server((self.host, self.port))
        for work in (self._accept, *([self._close_rounds] if closes else [])):
            threading.Thread(target=work, name="foretell-hub", daemon=True).start()
        return self.host, int(self._listener.getsockname()[1])

    @property
    def empty(self) -> bool:
        """Whether no replica is in the round under way."""
        return not self._guests

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
                    elif message.kind == "told" and guest is not None:
                        guest.told = bytes(message.content)
                    elif message.kind == "give" and guest is not None:
                        self._take(channel, message, guest)
                    else:
                        return
            finally:
                self._leave(guest)

    def _most(self) -> int:
        """Bytes of a message that may come: nothing before a replica has joined that says how large its weights are."""
        return 0 if self.begin is None else max(MOST_TOLD, 4 * self.begin.numel())

    def _join(self, channel: HubChannel, message: HubMessage, guest: _Guest | None) -> _Guest:
        """Give what a round begins from, when it does; the first replica of all brings it where nobody has."""
        elements, slot = int(message.said["elements"]), int(message.said.get("slot", -1))
        if elements <= 0 or elements % codes.BLOCK or (self.expected and not 0 <= slot < self.expected):
            raise Forged(f"a replica has {elements:,} weights and the slot {slot}, which is none here")
        with self._change:
            self._count += guest is None and slot < 0
            self.absent.discard(slot)
            found = guest or _Guest(slot if slot >= 0 else self._count)
            while self.begin is None and self._seeding is not None and not self._closed:
                self._change.wait(0.5)
            seeds = self.begin is None
            self._seeding = found.number if seeds else self._seeding
        if seeds:
            self._seeded(channel, elements)
        with self._change:
            assert self.begin is not None
            if elements != self.begin.numel():
                channel.send("refused", problem=f"it has {elements:,} weights, and the others {self.begin.numel():,}")
                raise Gone("another model")
            self._admit(channel, found)
            state, about = torch.cat([self.begin, self.momentum]), self._about(found)
        channel.send("state", _bytes(state), number=found.number, **about)
        return found

    def _seeded(self, channel: HubChannel, elements: int) -> None:
        """What the first replica brings."""
        try:
            channel.send("seed")
            channel.link.settimeout(SEED_SECONDS)
            brought = _floats(channel.receive(4 * elements).content)
            channel.link.settimeout(None)
            if brought.numel() != elements or not bool(brought.isfinite().all()):
                raise Forged("the first replica brought other weights than it said, or some that are no numbers")
            with self._change:
                self.take(brought, torch.zeros_like(brought), torch.zeros_like(brought))
        finally:
            with self._change:
                self._seeding = None
                self._change.notify_all()

    def _admit(self, channel: HubChannel, guest: _Guest) -> None:
        """Into the round under way where that may be, otherwise into the next one."""
        if self.expected and not self.over:
            self._waiting.add(guest.number)
            self._since = time.monotonic() if len(self._waiting) == self.quorum else self._since
            self._change.notify_all()
            while guest.number in self._waiting and not self.over and not self._closed:
                self._open()
                self._change.wait(0.5)
                if guest.number in self._waiting and hung_up(channel.link):
                    self._waiting.discard(guest.number)
                    raise Gone("it left while it waited")
        if self._closed:
            raise Gone("the hub is closed")
        guest.given, guest.joined, self._guests[guest.number] = None, True, guest

    def _open(self) -> None:
        """Let those in that wait: all of them at the beginning; while a round is under way, where too few are in it."""
        if self.rounds or self._guests:
            may = [slot for slot in self._waiting if slot not in self._guests] if len(self._guests) < self.quorum else []
        else:
            late = len(self._waiting) >= self.quorum and time.monotonic() - self._since > START_SECONDS
            may = list(self._waiting) if late or len(self._waiting) >= self.expected else []
        if may:
            self._waiting.difference_update(may)
            self._change.notify_all()

    def _about(self, guest: _Guest) -> dict[str, Any]:
        """Of the round that a replica is in from now on."""
        return {"round": self.number, "hash": self._hash, "step": self.step, "steps": 0 if self.over else self.next_steps,
                "used": self.used.get(guest.number, 0), "everyone": [self.used.get(slot, 0) for slot in range(self.expected)]}  # fmt: skip

    def _take(self, channel: HubChannel, message: HubMessage, guest: _Guest) -> None:
        """What a replica gives; it gets the mean when the round ends."""
        with self._change:
            late = int(message.said["round"]) != self.number or self._guests.get(guest.number) is not guest
            if late or int(message.said["hash"]) != self._hash:
                if self._guests.get(guest.number) is guest:
                    self._guests.pop(guest.number)
                self.absent.discard(guest.number)
                self._differed += not late
                why = "the round was over" if late else "it began from other weights"
                self._change.notify_all()
            else:
                why = ""
                guest.given, guest.answered = self._plain(message.content), self.number
                gave = sum(one.given is not None for one in self._guests.values())
                now = time.monotonic()
                self._first, self._enough = now if gave == 1 else self._first, now if gave <= self.quorum else self._enough
                self._change.notify_all()
                while self.number == guest.answered and not self._closed:
                    self._change.wait(0.5)
                if self.number == guest.answered:
                    raise Gone("the hub is closed")
                mean, about = self._mean, self._about(guest)
        if why:
            channel.send("behind", why=why)
            return
        channel.send("mean", mean, **about)

    def _leave(self, guest: _Guest | None) -> None:
        """What it gave counts; one that has not given any more is waited for no longer."""
        if guest is not None:
            with self._change:
                if self._guests.get(guest.number) is guest:
                    self._guests.pop(guest.number)
                self._change.notify_all()

    # ------------------------------------------------------------ rounds

    def _close_rounds(self) -> None:
        while not self._closed:
            self.turn()

    def turn(self) -> HubRound | None:
        """Wait a little for the end of the round under way; what it was, where it ended."""
        with self._change:
            given = [one for one in self._guests.values() if one.given is not None]
            over = time.monotonic() - self._enough >= self.grace_seconds
            if len(given) >= self.quorum and (over or len(given) == len(self._guests)) and not self._closed:
                return self._end(sorted(given, key=lambda one: one.number))
            self._change.wait(0.05 if given else 0.5)
        return None

    def _end(self, given: list[_Guest]) -> HubRound:
        """Average what came, in the order of replicas, and take the outer step. Whoever was left out is waited for no longer: it joins
        again when it comes."""
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
        left_out = tuple(sorted(set(self._guests) - {one.number for one in given}))
        steps, number = self.next_steps, self.number
        joined = tuple(one.number for one in given if one.joined)
        for one in given:
            one.given, one.joined = None, False
            self.used[one.number] = self.used.get(one.number, 0) + steps
        self.step += steps
        self.rounds.append(HubRound(
            number=number, replicas=tuple(one.number for one in given), joined=joined, left_out=left_out, differed=self._differed, steps=steps,
            seconds=time.monotonic() - self._first,
            hash=self._hash, step=self.step, used=dict(self.used), told={one.number: one.told for one in given},
        ))  # fmt: skip
        self._differed = 0
        self.absent.update(left_out)
        self._guests = {one.number: one for one in given}
        self._waiting.clear()
        self._change.notify_all()
        return self.rounds[-1]

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
