"""The next token of a sequence: the likeliest, or drawn by a seed of the request's own, whatever else is in the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def choose(logits: Tensor, asked: Sequence[tuple[Sampling, int]]) -> list[ChosenToken]:
    """A token for each row; with each row how it is chosen, and which token of its answer it is."""
    best = logits.argmax(-1)
    drawn = [place for place, (how, _) in enumerate(asked) if how.temperature > 0]
    if drawn:
        best = best.clone()
        for place in drawn:
            best[place] = _drawn(logits[place], *asked[place])
    ids = best.tolist()
    told = [place for place, (how, _) in enumerate(asked) if how.logprobs is not None]
    if not told:
        return [ChosenToken(one) for one in ids]
    logs = logits[told].float().log_softmax(-1).cpu()
    found = [ChosenToken(one) for one in ids]
    for row, place in zip(logs, told, strict=True):
        top = row.topk(asked[place][0].logprobs or 0)
        likeliest = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        found[place] = ChosenToken(ids[place], float(row[ids[place]]), likeliest)
    return found


def _drawn(logits: Tensor, how: Sampling, place: int) -> Tensor:
    """By the request's seed and the token's place alone: neighbours in the step change nothing."""
    scores = logits.float() / how.temperature
    values, order = scores.sort(descending=True, stable=True)
    shares = values.softmax(-1)
    gone = (shares.cumsum(-1) - shares) >= how.top_p
    if how.top_k:
        gone[how.top_k :] = True
    shares = shares.masked_fill(gone, 0.0)
    digest = hashlib.sha256(f"{how.seed}:{place}".encode()).digest()
    point = int.from_bytes(digest[:7], "big") / 2**56 * float(shares.sum())
    chosen = int((shares.cumsum(-1) <= point).sum())
    return order[min(chosen, int((~gone).sum()) - 1)]
