"""A replica that may come and go: it gives how far it has come to the hub, and gets the mean of those that were there."""

from __future__ import annotations

import socket

import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.plan.types import Sync
from foretell.runtime.parallel.sync import codes
from foretell.runtime.parallel.sync.frames import HubChannel

TIMEOUT_SECONDS = 600.0
"""For one message: as long as a round of the slowest replica may take."""


class LeftBehind(Exception):
    """The round went on without this replica: it takes the weights of the others and begins again from there."""


class HubMean:
    """In the place of `mean.Mean`, for any number of replicas."""

    def __init__(self, address: tuple[str, int], elements: int, sync: Sync) -> None:
        self.elements, self.sync = elements, sync
        self.cuts = {"cut": torch.zeros(elements)} if sync.format == "int8" else {}
        self.channel = HubChannel(socket.create_connection(address, timeout=TIMEOUT_SECONDS), "peer", opens=False)
        self.round = 0
        self.number = 0
        self.hash = 0
        """Of the weights that all began the round from, as the hub says."""

    def join(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What the round began from and the outer momentum, checked; of the first replica of all its own weights."""
        self.channel.send("join", elements=self.elements)
        answer = self.channel.receive(8 * self.elements)
        if answer.kind == "seed":
            self.channel.send("brought", weights.numpy().tobytes())
            answer = self.channel.receive(8 * self.elements)
        if answer.kind == "refused":
            raise UserError(f"the replicas did not take this one: {answer.said['problem']}", "give it the plan of the others")
        begin, momentum = torch.frombuffer(answer.content, dtype=torch.float32).clone().split(self.elements)
        self.round, self.number, self.hash = (int(answer.said[name]) for name in ("round", "number", "hash"))
        if codes.hash_of(begin) != self.hash:
            raise UserError("the weights that came from the others are not what they were sent as", "try again; check the memory of both")
        for cut in self.cuts.values():
            cut.zero_()
        return begin, momentum

    def __call__(self, vector: Tensor, tag: Tensor) -> Tensor:
        """The mean; raises `LeftBehind` where the others went on."""
        content = self._coded(vector).numpy().tobytes()
        self.channel.send("give", content, round=self.round, hash=int(tag))
        answer = self.channel.receive(4 * self.elements)
        if answer.kind == "behind":
            raise LeftBehind(str(answer.said["why"]))
        self.round, self.hash = int(answer.said["round"]), int(answer.said["hash"])
        if self.sync.format == "int8":
            return codes.plain(torch.frombuffer(answer.content, dtype=torch.int8))
        return torch.frombuffer(answer.content, dtype=torch.float32).clone()

    def _coded(self, vector: Tensor) -> Tensor:
        if self.sync.format == "fp32":
            return vector
        vector += self.cuts["cut"]
        return codes.rounded(vector, self.cuts["cut"])

    def close(self) -> None:
        self.channel.close()
