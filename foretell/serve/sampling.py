"""The next token of a sequence: the likeliest, or drawn by a seed of the request's own, whatever else is in the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of one request are chosen, and when it ends."""

    most: int = 16
    """Tokens at most."""
    temperature: float = 0.0
    """0: the likeliest, always."""
    top_k: int = 0
    """0: of all."""
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    """Which end the answer, and are not in it."""
    logprobs: int | None = None
    """Likeliest tokens to tell with each, besides the one chosen."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise UserError(f"{self.most} tokens at most", "at least one")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"a temperature of {self.temperature}", "0 for the likeliest token, or above")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(f"top_k {self.top_k}, top_p {self.top_p}", "top_k from 0 (all), top_p above 0 up to 1")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise UserError(f"{self.logprobs} log probabilities a token", "0 to 20")


class ChosenToken(NamedTuple):
    """One that was chosen."""

    id: int
    logprob: float | None = None
    """Before any temperature."""
    likeliest: tuple[tuple[int, float], ...] = ()


class Drawn:
    """Tokens that were chosen, still on their device; `tell` waits for them."""

    def __init__(self, logits: Tensor, asked: Sequence[tuple[Sampling, int]], best: Tensor | None = None) -> None:
        """A token for each row; with each row how it is chosen, and which token of its answer it is. `best`: the likeliest, if known."""
        self.asked = asked
        self.ids = logits.argmax(-1) if best is None else best
        drawn = [place for place, (how, _) in enumerate(asked) if how.temperature > 0]
        if drawn:
            self.ids = self.ids.index_copy(0, torch.tensor(drawn, device=logits.device), _drawn(logits[drawn], [asked[place] for place in drawn]))
        self.told = [place for place, (how, _) in enumerate(asked) if how.logprobs is not None]
        if self.told:
            logs = logits[self.told].float().log_softmax(-1)
            top = logs.topk(max(asked[place][0].logprobs or 0 for place in self.told))
            self.likeliest, self.likely = top.indices, top.values
            self.own = logs.gather(1, self.ids[self.told][:, None])[:, 0]

    def tell(self, ids: Sequence[int] | None = None) -> list[ChosenToken]:
        """As plain numbers; `ids` where they are known already."""
        found = [ChosenToken(one) for one in (self.ids.tolist() if ids is None else ids)]
        if self.told:
            rows = zip(self.told, self.own.tolist(), self.likeliest.tolist(), self.likely.tolist(), strict=True)
            for place, own, indices, values in rows:
                most = self.asked[place][0].logprobs or 0
                found[place] = ChosenToken(found[place].id, own, tuple(zip(indices[:most], values[:most], strict=True)))
        return found


def choose(logits: Tensor, asked: Sequence[tuple[Sampling, int]]) -> list[ChosenToken]:
    """A token for each row; with each row how it is chosen, and which token of its answer it is."""
    return Drawn(logits, asked).tell()


def _drawn(logits: Tensor, asked: Sequence[tuple[Sampling, int]]) -> Tensor:
    """By a request's seed and the token's place alone: neighbours in the step change nothing."""
    words = logits.shape[-1]
    each = [
        (how.temperature, how.top_p, how.top_k or words, int.from_bytes(hashlib.sha256(f"{how.seed}:{place}".encode()).digest()[:7], "big") / 2**56)
        for how, place in asked
    ]
    heat, most, best, point = torch.tensor(each, dtype=torch.float64, device=logits.device).T[..., None]
    values, order = (logits.float() / heat.float()).sort(dim=-1, descending=True, stable=True)
    shares = values.softmax(-1)
    gone = (shares.cumsum(-1) - shares) >= most.float()
    gone |= torch.arange(words, device=logits.device) >= best
    shares = shares.masked_fill(gone, 0.0)
    chosen = (shares.cumsum(-1) <= (point * shares.sum(-1, keepdim=True)).float()).sum(-1, keepdim=True)
    return order.gather(1, chosen.minimum((~gone).sum(-1, keepdim=True) - 1))[:, 0]
