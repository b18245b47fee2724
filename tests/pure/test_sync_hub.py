"""Replicas that come and go: a round is finished by those that are there, a new one gets checked weights, hashes stay equal.

Replicas are threads here, and are killed by cutting their connection at a random byte of whatever they say or hear: between messages, in
the middle of one, before the mean has reached them. `benchmarks/diloco_churn.py` does it with processes and SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.plan.types import Sync
from foretell.runtime.parallel.sync import codes, frames
from foretell.runtime.parallel.sync import hub as hubs
from foretell.runtime.parallel.sync.frames import Gone, HubChannel
from foretell.runtime.parallel.sync.hub import Hub
from foretell.runtime.parallel.sync.outer import Outer
from foretell.runtime.parallel.sync.peer import HubMean, LeftBehind
from foretell.runtime.process import launch, secure

SYNC = Sync(every=2, format="int8")


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub(sync=SYNC, grace_seconds=1.0)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every connection of a test is closed after it."""
    made, known = [], socket.create_connection

    def connected(*args: Any, **more: Any) -> socket.socket:
        made.append(known(*args, **more))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", connected)
    yield
    for one in made:
        one.close()


class Replica:
    """A small model that learns a line of its own, and the hash after each round it was in."""

    def __init__(self, address: tuple[str, int], seed: int, sync: Sync = SYNC) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(40, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.draw = torch.Generator().manual_seed(seed)
        self.step, self.hashes = 0, {}  # type: ignore[var-annotated]
        made: list[HubMean] = []

        def averages(elements: int) -> HubMean:
            made.append(HubMean(address, elements, sync))
            return made[0]

        self.outer = Outer(sync, list(self.model.parameters()), 1, averages)
        (self.mean,) = made
        self.join()

    def join(self) -> None:
        self.outer.take_over(*self.mean.join(self.outer.begin))
        assert self.outer.hash() == self.mean.hash

    def round(self) -> None:
        """Its steps, and what joins them; the hash that the hub says is the one here."""
        for _ in range(SYNC.every):
            x = torch.randn(8, 40, generator=self.draw)
            (self.model(x) - x[:, :20].cumsum(1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            try:
                self.outer.stepped(self.step)
            except LeftBehind:
                self.join()
                continue
            for one in self.outer.take_done():
                assert one.hash == self.mean.hash == self.outer.hash()
                self.hashes[self.mean.round] = one.hash

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def in_threads(*works: Any) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def at_once(peers: list[HubMean], moved: list[Tensor]) -> list[Tensor]:
    """What each gets for what it gives."""
    tag = torch.tensor([peers[0].hash])
    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(lambda pair: pair[0](pair[1].clone(), tag), zip(peers, moved, strict=True)))


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_replicas_are_joined_as_one_process_would(format: str) -> None:
    """Two rounds of three replicas, beside the same rounds by hand."""
    sync = Sync(every=2, format=format)
    hub = Hub(sync=sync, grace_seconds=20)
    address = hub.start()
    peers = [HubMean(address, 512, sync) for _ in range(3)]
    torch.manual_seed(0)
    begin = torch.randn(512)
    states = []
    for one in peers:
        states.append(one.join(begin))
    assert all(torch.equal(state[0], begin) and not state[1].any() for state in states)
    outer, cuts, cut_of_mean = nn.Parameter(begin.clone()), [torch.zeros(512) for _ in peers], torch.zeros(512)
    by_hand = torch.optim.SGD([outer], lr=sync.lr, momentum=sync.momentum, nesterov=True)
    for _ in range(2):
        moved = [torch.randn(512) for _ in peers]
        means = at_once(peers, moved)
        if format == "int8":
            moved = [codes.plain(codes.rounded(one + cut, cut)) for one, cut in zip(moved, cuts, strict=True)]
        total = (moved[0] + moved[1] + moved[2]) / 3
        if format == "int8":
            total = codes.plain(codes.rounded(total + cut_of_mean, cut_of_mean))
        assert all(torch.equal(mean, total) for mean in means)
        outer.grad = total.clone()
        by_hand.step()
        assert codes.hash_of(outer.detach()) == peers[0].hash == peers[2].hash == hub.rounds[-1].hash
    assert [one.replicas for one in hub.rounds] == [(1, 2, 3)] * 2
    hub.close()


def test_survivors_finish_a_round_and_one_that_comes_gets_their_weights(hub: Hub) -> None:
    address = hub.start()
    a, b, c = (Replica(address, seed) for seed in range(3))
    in_threads(a.round, b.round, c.round)
    assert hub.rounds[-1].replicas == (1, 2, 3)
    b.mean.close()
    in_threads(a.round, c.round)
    assert hub.rounds[-1].replicas == (1, 3) and torch.equal(a.weights, c.weights)
    d = Replica(address, 9)
    assert torch.equal(d.weights, a.weights) and torch.equal(d.outer.momentum, a.outer.momentum)
    in_threads(a.round, c.round, d.round)
    assert hub.rounds[-1].replicas == (1, 3, 4) and torch.equal(a.weights, d.weights)


def test_a_round_does_not_wait_longer_than_its_grace_window(hub: Hub) -> None:
    """A replica that is stopped is left out; when it comes it takes what the others have."""
    address = hub.start()
    a, b = Replica(address, 0), Replica(address, 1)
    began = time.monotonic()
    in_threads(a.round)
    assert 0.9 < time.monotonic() - began < 10 and hub.rounds[-1].replicas == (1,) and hub.rounds[-1].left_out == (2,)
    b.round()
    assert torch.equal(a.weights, b.weights) and b.hashes == {}
    in_threads(a.round, b.round)
    assert hub.rounds[-1].replicas == (1, 2) and torch.equal(a.weights, b.weights)


def test_a_quorum_is_waited_for() -> None:
    hub = Hub(sync=SYNC, quorum=2, grace_seconds=0.2)
    address = hub.start()
    a = Replica(address, 0)
    thread = threading.Thread(target=a.round)
    thread.start()
    time.sleep(1.0)
    assert hub.rounds == []
    b = Replica(address, 1)
    in_threads(b.round)
    thread.join(10)
    assert hub.rounds[-1].replicas == (1, 2) and torch.equal(a.weights, b.weights)
    hub.close()


def test_weights_that_differ_are_noticed_and_given_up(hub: Hub) -> None:
    address = hub.start()
    a, b = Replica(address, 0), Replica(address, 1)
    word = b.outer.begin.view(torch.int32)
    word[7] ^= 1 << 3
    in_threads(a.round, b.round)
    assert hub.rounds[0].replicas == (1,), "what was flipped is not averaged"
    if b.mean.round < hub.number:  # it came back before the others had ended theirs
        b.round()
    assert torch.equal(a.outer.begin, b.outer.begin) and b.hashes == {}


def test_another_model_is_refused(hub: Hub) -> None:
    address = hub.start()
    Replica(address, 0)
    with pytest.raises(UserError, match="it has 512 weights, and the others 1,024"):
        HubMean(address, 512, SYNC).join(torch.zeros(512))


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_what_is_no_number_is_not_averaged(format: str) -> None:
    """A replica whose steps went wrong is left out, and the others go on."""
    hub = Hub(sync=Sync(every=2, format=format), grace_seconds=5.0)
    address = hub.start()
    good, bad = (HubMean(address, 512, hub.sync) for _ in range(2))
    for one in (good, bad):
        one.join(torch.zeros(512))
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(one, torch.full((512,), value), torch.tensor([one.hash])) for one, value in ((bad, float("nan")), (good, 1.0))]
        with pytest.raises(Gone):
            answers[0].result()
        assert torch.allclose(answers[1].result(), torch.ones(512), rtol=0.01)
    assert hub.rounds[0].replicas == (1,) and bool(hub.begin.isfinite().all())  # type: ignore[union-attr]
    hub.close()


def test_somebody_who_says_a_lot_and_brings_nothing_keeps_nobody_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a terabyte are announced and do not come: no memory is taken for them, and the next replica is the first."""
    monkeypatch.setattr(hubs, "SEED_SECONDS", 0.3)
    address = hub.start()
    bad = HubMean(address, 2**38, Sync(every=2))
    bad.channel.send("join", elements=bad.elements)
    assert bad.channel.receive(0).kind == "seed"
    header = json.dumps({"kind": "brought", "bytes": 4 * bad.elements, "digest": ""}).encode()
    sealed = secure.seal(header, f"replicas {bad.channel._nonce.hex()} peer 1")
    bad.channel.link.sendall(len(sealed).to_bytes(4, "big") + sealed)
    good = HubMean(address, 512, SYNC)
    begin, _ = good.join(torch.ones(512))
    assert torch.equal(begin, torch.ones(512)) and hub.begin is not None and hub.begin.numel() == 512


NONSENSE = (b"[]", b"{}", b"[" * 4000, b'{"kind": 1, "bytes": "x", "digest": 0}', b'{"kind": "join", "bytes": 1e999, "digest": ""}')


@pytest.mark.parametrize("said", NONSENSE)
def test_headers_of_nonsense_are_forged(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubChannel, "__init__", _plain_channel(HubChannel.__init__))
    hub, peer = both()
    sealed = secure.seal(said, f"replicas {peer._nonce.hex()} peer 0")
    peer.link.sendall(len(sealed).to_bytes(4, "big") + sealed)
    with pytest.raises(secure.Forged):
        hub.receive(100)


# ---------------------------------------------------------------- what travels


def test_every_flipped_bit_changes_the_hash() -> None:
    torch.manual_seed(0)
    vector = torch.randn(512)
    known, words = codes.hash_of(vector), vector.view(torch.int32)
    for bit in range(32):
        for place in (0, 1, 255, 511):
            words[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert codes.hash_of(vector) != known
            words[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert codes.hash_of(vector) == known != codes.hash_of(vector.flip(0))


def both() -> tuple[HubChannel, HubChannel]:
    left, right = socket.socketpair()
    found: list[HubChannel] = []
    thread = threading.Thread(target=lambda: found.append(HubChannel(right, "peer", opens=False)))
    thread.start()
    opened = HubChannel(left, "hub", opens=True)
    thread.join()
    return opened, found[0]


def test_messages_are_checked_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HubChannel, "__init__", _plain_channel(HubChannel.__init__))
    hub, peer = both()
    peer.send("give", b"x" * 100, round=3)
    said = hub.receive(100)
    assert (said.kind, said.said, bytes(said.content)) == ("give", {"round": 3}, b"x" * 100)
    peer.send("give", b"x" * 101)
    with pytest.raises(secure.Forged, match="101 bytes"):
        hub.receive(100)
    hub, peer = both()
    peer.link.sendall((frames.MOST_HEADER + 1).to_bytes(4, "big"))
    with pytest.raises(secure.Forged, match="header"):
        hub.receive(100)
    peer.close()
    with pytest.raises(Gone):
        hub.receive(1)


def _plain_channel(made: Any) -> Any:
    """Pairs of sockets have no delay to switch off."""

    def init(self: HubChannel, link: socket.socket, side: str, *, opens: bool) -> None:
        class Link:
            def __getattr__(self, name: str) -> Any:
                return (lambda *_: None) if name == "setsockopt" else getattr(link, name)

        made(self, Link(), side, opens=opens)

    return init


def test_with_a_token_others_are_not_heard(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.setenv(launch.TOKEN, "a" * 32)
    address = hub.start()
    known = Replica(address, 0)
    stranger = HubMean(address, 1024, SYNC)
    stranger.channel._nonce = b"of another connection"  # what is signed for elsewhere is not heard here
    with pytest.raises(Gone):
        stranger.join(torch.zeros(1024))
    assert known.mean.number == 1 and hub.rounds == []


# ---------------------------------------------------------------- kills and joins


class Mortal:
    """A socket that breaks after so many bytes, wherever that is."""

    def __init__(self, link: socket.socket, left: int) -> None:
        self.link, self.left = link, left

    def sendall(self, content: Any) -> None:
        part = memoryview(content)[: self.left]
        self.link.sendall(part)
        self._count(len(content))

    def recv_into(self, into: memoryview) -> int:
        got = self.link.recv_into(into)
        self._count(got)
        return got

    def _count(self, done: int) -> None:
        self.left -= done
        if self.left <= 0:
            self.link.close()
            raise OSError("killed")

    def close(self) -> None:
        self.link.close()


KILLS = 60


def test_replicas_are_killed_and_joined_at_random_points(hub: Hub) -> None:
    """Sixty kills, each at a random byte, with two to four replicas at a time; one of them lives from beginning to end."""
    address, chance = hub.start(), random.Random(0)
    hub.grace_seconds = 5.0
    every: dict[int, set[int]] = {}
    errors: list[BaseException] = []
    lasting: list[int] = []
    stop = threading.Event()

    def note(replica: Replica) -> None:
        for number, one in replica.hashes.items():
            every.setdefault(number, set()).add(one)

    def live(seed: int, bytes_left: int | None) -> None:
        try:
            replica = Replica(address, seed)
            try:
                if bytes_left is None:
                    lasting.append(replica.mean.number)
                else:
                    replica.mean.channel.link = Mortal(replica.mean.channel.link, bytes_left)  # type: ignore[assignment]
                while not stop.is_set():
                    replica.round()
            except Gone:
                pass
            finally:
                note(replica)
                replica.mean.close()
        except Gone:
            pass
        except BaseException as error:
            errors.append(error)

    eldest = threading.Thread(target=live, args=(0, None))
    eldest.start()
    running: list[threading.Thread] = []
    for number in range(KILLS):
        thread = threading.Thread(target=live, args=(number + 1, chance.randrange(1, 12_000)))
        thread.start()
        running.append(thread)
        while len(running) >= chance.choice((1, 2, 3)):
            running = [one for one in running if one.is_alive()]
            time.sleep(0.002)
    for thread in running:
        thread.join(60)
    time.sleep(0.1)
    stop.set()
    eldest.join(30)
    assert not errors, errors[0]
    assert not eldest.is_alive() and len(hub.rounds) >= KILLS
    members = [one.replicas for one in hub.rounds]
    assert {len(one) for one in members} >= {1, 2, 3}, "replicas hardly met: nothing would be shown"
    assert all(len(found) == 1 for found in every.values()), "replicas ended a round with different weights"
    assert all(every[number + 1] == {one.hash} for number, one in enumerate(hub.rounds) if number + 1 in every)
    assert lasting[0] in members[-1] and len({number for one in members for number in one}) > KILLS // 4, "few were ever in a round"


@pytest.mark.parametrize(("elements", "content"), [(4, bytes(16)), (-256, b""), (260, bytes(1040)), (256, bytes(16))])
def test_a_replica_of_an_odd_length_is_sent_away_and_the_hub_serves_the_next(hub: Hub, elements: int, content: bytes) -> None:
    """What it brought is forgotten: kept, it would end the thread that closes rounds for everybody."""
    broken: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: broken.append(str(args.exc_value))
    address = hub.start()
    try:
        with socket.create_connection(address, timeout=10) as link, contextlib.suppress(Gone, secure.Forged):
            channel = HubChannel(link, "peer", opens=False)
            channel.send("join", elements=elements)
            channel.receive(1 << 16)
            channel.send("seed", content)
            pytest.fail(f"it got {channel.receive(1 << 16).kind}")
        assert hub.begin is None
        with socket.create_connection(address, timeout=10) as link:
            channel = HubChannel(link, "peer", opens=False)
            channel.send("join", elements=256)
            assert channel.receive(1 << 16).kind == "seed"
            channel.send("seed", bytes(4 * 256))
            joined = channel.receive(1 << 16)
            assert joined.kind == "state"
            channel.send("give", bytes(codes.bytes_of(256)), round=0, hash=joined.said["hash"])
            assert channel.receive(1 << 16).kind == "mean"
    finally:
        threading.excepthook = before
    assert not broken
