"""A replica that may come and go: it gives how far it has come to the hub, and gets the mean of those that were there."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foretell.errors import InternalError, UserError
from foretell.plan.types import Sync
from foretell.runtime.parallel.sync import codes
from foretell.runtime.parallel.sync.frames import HubChannel, hung_up
from foretell.runtime.process.replica import ReplicaRole

TIMEOUT_SECONDS = 600.0
"""For a connection."""


class LeftBehind(Exception):
    """The round went on without this replica: it takes the weights of the others and begins again from there."""


class HubMean:
    """In the place of `mean.Mean`, for any number of replicas."""

    def __init__(self, address: tuple[str, int], elements: int, sync: Sync, slot: int = -1) -> None:
        """Without a `slot` the hub gives it one."""
        self.elements, self.sync, self.slot = elements, sync, slot
        self.cuts = {"cut": torch.zeros(elements)} if sync.format == "int8" else {}
        try:
            link = socket.create_connection(address, timeout=TIMEOUT_SECONDS)
        except OSError as error:
            raise UserError(f"nobody joins replicas at {address[0]}:{address[1]}: {error.strerror or error}", "see that its process runs") from error
        self.channel = HubChannel(link, "peer", opens=False)
        link.settimeout(None)  # a round that has too few replicas waits for others
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.round = 0
        self.number = 0
        self.hash = 0
        """Of the weights that all began the round from, as the hub says."""
        self.step = self.steps = self.used = 0
        """Of the run, when the round began; of the round, 0 when the run is over; and those of this slot that are in the weights."""
        self.everyone: list[int] = []
        """The same of every slot, where the hub knows how many there are."""
        self.told = b""
        """What is said of the steps of the round when it is given."""

    def join(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the round began from and the outer momentum, checked; of the first replica of all its own weights."""
        self.channel.send("join", elements=self.elements, slot=self.slot)
        answer = self.channel.receive(8 * self.elements)
        if answer.kind == "seed":
            self.channel.send("brought", weights.numpy().tobytes())
            answer = self.channel.receive(8 * self.elements)
        if answer.kind == "refused":
            raise UserError(f"the replicas did not take this one: {answer.said['problem']}", "give it the plan of the others")
        begin, momentum = torch.frombuffer(answer.content, dtype=torch.float32).clone().split(self.elements)
        self.number = int(answer.said["number"])
        self._place(answer.said)
        if codes.hash_of(begin) != self.hash:
            raise UserError("the weights that came from the others are not what they were sent as", "try again; check the memory of both")
        for cut in self.cuts.values():
            cut.zero_()
        return begin, momentum

    def __call__(self, vector: Tensor, tag: Tensor) -> Tensor:
        """The mean; raises `LeftBehind` where the others went on."""
        content = self._coded(vector).numpy().tobytes()
        if self.told:
            self.channel.send("told", self.told)
        self.channel.send("give", content, round=self.round, hash=int(tag))
        answer = self.channel.receive(4 * self.elements)
        if answer.kind == "behind":
            raise LeftBehind(str(answer.said["why"]))
        self._place(answer.said)
        if self.sync.format == "int8":
            return codes.plain(torch.frombuffer(answer.content, dtype=torch.int8))
        return torch.frombuffer(answer.content, dtype=torch.float32).clone()

    def _place(self, said: Mapping[str, Any]) -> None:
        """Where the run is."""
        self.round, self.hash, self.step, self.steps, self.used = (int(said[name]) for name in ("round", "hash", "step", "steps", "used"))
        self.everyone = [int(used) for used in said["everyone"]]

    def _coded(self, vector: Tensor) -> Tensor:
        vector = vector.cpu()
        if self.sync.format == "fp32":
            return vector
        vector += self.cuts["cut"]
        return codes.rounded(vector, self.cuts["cut"])

    @property
    def hub_lives(self) -> bool:
        return not hung_up(self.channel.link)

    def close(self) -> None:
        self.channel.close()


def joined(replica: ReplicaRole, elements: int, sync: Sync) -> HubMean | HubCut:
    """What a process of a run has that is joined by a hub."""
    return HubCut(elements, sync) if replica.address is None else HubMean(replica.address, elements, sync, replica.slot)


class HubCut:
    """What the hub itself has in the place of an average: what rounding cut off the mean."""

    def __init__(self, elements: int, sync: Sync) -> None:
        self.cut = torch.zeros(elements if sync.format == "int8" else 0)
        self.cuts = {"cut": self.cut} if sync.format == "int8" else {}

    def __call__(self, vector: Tensor, tag: Tensor) -> Tensor:
        raise InternalError("the hub of a run was asked for an average")
