"""The next token of a sequence: the likeliest, or drawn by a seed of the request's own, whatever else is in the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.simulate.serving.replays import DRAWN

MOST_LIKELY = 20
"""Tokens that are told with one that was chosen, at most."""
ALIGNED = 128
"""Logits: rows of a group have a multiple of them, so that sums over each are taken alike."""


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
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LIKELY:
            raise UserError(f"{self.logprobs} log probabilities a token", f"0 to {MOST_LIKELY}")


class ChosenToken(NamedTuple):
    """One that was chosen."""

    id: int
    logprob: float | None = None
    """Before any temperature."""
    likeliest: tuple[tuple[int, float], ...] = ()


class Drawn:
    """Tokens that were chosen, still on their device; `tell` waits for them."""

    def __init__(self, logits: Tensor, asked: Sequence[tuple[Sampling, int]], best: Tensor | None = None, group: int = 0) -> None:
        """A token for each row; with each row how it is chosen, and which token of its answer it is. `best`: the likeliest, if known;
        `group`: so many rows at a time, always, so that the bits of one depend on no other."""
        self.asked = asked
        self.ids = logits.argmax(-1) if best is None else best
        drawn = [place for place, (how, _) in enumerate(asked) if how.temperature > 0]
        if drawn:
            found = torch.cat([_drawn(rows, [asked[place] for place in some])[: len(some)] for some, rows in _grouped(logits, drawn, group)])
            self.ids = self.ids.index_copy(0, torch.tensor(drawn, device=logits.device), found)
        self.told = [place for place, (how, _) in enumerate(asked) if how.logprobs is not None]
        if self.told:
            most = MOST_LIKELY if group else max(asked[place][0].logprobs or 0 for place in self.told)
            each = [self._told(rows, some, min(most, logits.shape[1])) for some, rows in _grouped(logits, self.told, group)]
            self.own, self.likeliest, self.likely = (torch.cat(parts) for parts in zip(*each, strict=True))

    def _told(self, rows: Tensor, places: Sequence[int], most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log probabilities of the tokens chosen, and which are likeliest."""
        logs = rows.float().log_softmax(-1)
        top = logs.topk(most)
        count = len(places)
        return logs[:count].gather(1, self.ids[list(places)][:, None])[:, 0], top.indices[:count], top.values[:count]

    def tell(self, ids: Sequence[int] | None = None) -> list[ChosenToken]:
        """As plain numbers; `ids` where they are known already."""
        found = [ChosenToken(one) for one in (self.ids.tolist() if ids is None else ids)]
        if self.told:
            rows = zip(self.told, self.own.tolist(), self.likeliest.tolist(), self.likely.tolist(), strict=True)
            for place, own, indices, values in rows:
                most = self.asked[place][0].logprobs or 0
                found[place] = ChosenToken(found[place].id, own, tuple(zip(indices[:most], values[:most], strict=True)))
        return found


def choose(logits: Tensor, asked: Sequence[tuple[Sampling, int]], group: int = 0) -> list[ChosenToken]:
    """A token for each row; with each row how it is chosen, and which token of its answer it is. `group` as `Drawn` takes it."""
    return Drawn(logits, asked, group=group).tell()


def _grouped(logits: Tensor, places: Sequence[int], group: int) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Rows at some places, a few at a time; or always as many as a group has, each beginning where memory is aligned alike."""
    wide, most = -(-logits.shape[1] // ALIGNED) * ALIGNED, group or DRAWN
    for first in range(0, len(places), most):
        some = places[first : first + most]
        if not group:
            yield some, logits[list(some)]
            continue
        rows = logits.new_full((group, wide), -math.inf)
        rows[:, : logits.shape[1]] = logits[[*some, *[some[-1]] * (group - len(some))]]
        yield some, rows


def _drawn(logits: Tensor, asked: Sequence[tuple[Sampling, int]]) -> Tensor:
    """By a request's seed and the token's place alone: neighbours in the step change nothing. Rows beyond those asked for are nobody's."""
    words = logits.shape[-1]
    each = [
        (how.temperature, how.top_p, how.top_k or words, int.from_bytes(hashlib.sha256(f"{how.seed}:{place}".encode()).digest()[:7], "big") / 2**56)
        for how, place in (*asked, *[asked[-1]] * (len(logits) - len(asked)))
    ]
    heat, most, best, point = torch.tensor(each, dtype=torch.float64, device=logits.device).T[..., None]
    values, order = (logits.float() / heat.float()).sort(dim=-1, descending=True, stable=True)
    shares = values.softmax(-1)
    gone = (shares.cumsum(-1) - shares) >= most.float()
    gone |= (torch.arange(words, device=logits.device) >= best) | values.isneginf()
    shares = shares.masked_fill(gone, 0.0)
    chosen = (shares.cumsum(-1) <= (point * shares.sum(-1, keepdim=True)).float()).sum(-1, keepdim=True)
    return order.gather(1, chosen.minimum((~gone).sum(-1, keepdim=True) - 1))[:, 0]
