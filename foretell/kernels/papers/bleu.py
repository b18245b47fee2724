"""BLEU of each sentence of a batch, from token ids, on the device where they are.

TensorBLEU (Filipek 2025, "TensorBLEU: Vectorized GPU-based BLEU Score Implementation for Per-Sentence In-Training Evaluation").

    tokens of a row  │ hypothesis │ reference 1 │ reference 2 │ ...
    n-gram ids       rank of (id of the (n-1)-gram that begins here, id of the token that ends it) among those of the row

An id is a dense rank within its row, found by sorting: no two n-grams share one, and memory grows with tokens, not with the
vocabulary. Scores equal those of NLTK's `sentence_bleu`, its seven smoothing methods included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foretell.errors import UserError

UNIFORM = (0.25, 0.25, 0.25, 0.25)
SMOOTHING = ("none", "epsilon", "add-one", "geometric", "length", "average", "interpolate", "length-average")
"""NLTK's methods 0 to 7, in this order (Chen and Cherry 2014)."""
TOKENS_AT_ONCE = 1 << 24
"""Rows are taken in pieces of so many tokens: about 100 bytes each."""
AVERAGED_ORDER = 5
"""Precision that `average` reads beyond those that are weighted."""


def sentence_bleu(
    hypotheses: Tensor, references: Tensor, lengths: Tensor | None = None, reference_lengths: Tensor | None = None, *,
    weights: Sequence[float] = UNIFORM, smoothing: str = "none", epsilon: float = 0.1, alpha: float = 5.0, k: float = 5.0,
    reweigh: bool = False, tokens_at_once: int = TOKENS_AT_ONCE,
) -> Tensor:  # fmt: skip
    """(batch,) in fp64, of `hypotheses` (batch, tokens) and `references` (batch, references, tokens).

    What lies beyond `lengths` (batch,) and `reference_lengths` (batch, references) is padding; a length below 0 says that there is
    no such reference. `reweigh` spreads uniform weights over the tokens of a hypothesis shorter than four. With `interpolate` a
    sentence without a common 3-gram is NaN: the method is not defined there.
    """
    if references.dim() == 2:
        references = references.unsqueeze(1)
        reference_lengths = None if reference_lengths is None else reference_lengths.view(-1, 1)
    _check(hypotheses, references, lengths, reference_lengths, weights, smoothing)
    rows, device = hypotheses.shape[0], hypotheses.device
    if lengths is None:
        lengths = torch.full((rows,), hypotheses.shape[1], device=device)
    if reference_lengths is None:
        reference_lengths = torch.full(references.shape[:2], references.shape[2], device=device)
    order = len(weights)
    counted = max(order, AVERAGED_ORDER) if "average" in smoothing else order
    matches, totals = ngram_matches(hypotheses, references, lengths, reference_lengths, counted, tokens_at_once)
    precision = _smoothed(matches, totals, lengths, order, SMOOTHING.index(smoothing), epsilon, alpha, k)
    weight = torch.tensor(weights, dtype=torch.float64, device=device).expand(rows, -1)
    if reweigh and tuple(weights) == UNIFORM:
        few, place = lengths.clamp(min=1).double()[:, None], torch.arange(order, device=device)
        weight = torch.where(few < order, torch.where(place < few, 1.0 / few, 0.0), weight)
    logs = torch.where(precision > 0, precision, 1.0).log()  # an order without a precision has no part in the mean; NaN stays
    logs = torch.where(precision.isnan(), precision, logs)
    score = _brevity(lengths, reference_lengths) * (weight * logs).sum(1).exp()
    return torch.where(matches[:, 0] > 0, score, 0.0)


def ngram_matches(
    hypotheses: Tensor, references: Tensor, lengths: Tensor, reference_lengths: Tensor, order: int, tokens_at_once: int = TOKENS_AT_ONCE
) -> tuple[Tensor, Tensor]:
    """n-grams of each hypothesis that its references have too, clipped, and all it has: (batch, order) each."""
    tokens = hypotheses.shape[1] + references.shape[1] * references.shape[2]
    rows = max(1, tokens_at_once // max(1, tokens))
    pieces = zip(hypotheses.split(rows), references.split(rows), lengths.split(rows), reference_lengths.split(rows), strict=True)
    found = [_matches(hyp, refs, some, others, order) for hyp, refs, some, others in pieces]
    span = torch.arange(order, device=lengths.device)
    return torch.cat(found), (lengths.clamp(min=0)[:, None] - span).clamp(min=0)


def _matches(hypotheses: Tensor, references: Tensor, lengths: Tensor, reference_lengths: Tensor, order: int) -> Tensor:
    rows, size = hypotheses.shape
    _, count, wide = references.shape
    device = hypotheses.device
    tokens = torch.cat([hypotheses, references.flatten(1).to(hypotheses.dtype)], 1)
    left = torch.cat([
        lengths[:, None] - torch.arange(size, device=device),
        (reference_lengths[..., None] - torch.arange(wide, device=device)).flatten(1),
    ], 1)  # of a text, from each token on  # fmt: skip
    total = tokens.shape[1]
    kind = torch.int32 if tokens.is_cuda and (total + 1) ** 2 < 2**31 else torch.int64
    first = ids = _ranks(tokens).to(kind)
    found = []
    for n in range(1, order + 1):
        if n > 1:
            last = first.roll(1 - n, 1)
            ids = _ranks((ids * (total + 1) + last).masked_fill(left < n, 0)).to(kind)
        there = (left >= n).to(torch.int32)
        texts = ids.long().split([size, *[wide] * count], 1)
        marks = there.split([size, *[wide] * count], 1)
        most = torch.zeros(rows, total, dtype=torch.int32, device=device)
        for text, mark in zip(texts[1:], marks[1:], strict=True):
            most = torch.maximum(most, torch.zeros_like(most).scatter_add_(1, text, mark))
        own = torch.zeros_like(most).scatter_add_(1, texts[0], marks[0])
        found.append(torch.minimum(own, most).sum(1))
    return torch.stack(found, 1)


def _ranks(keys: Tensor) -> Tensor:
    """Of each key among the different keys of its row, from 0 on."""
    ordered, places = keys.sort(1) if keys.is_cuda else _sorted_on_cpu(keys)
    steps = torch.zeros_like(ordered, dtype=torch.int32)
    steps[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return torch.empty_like(steps).scatter_(1, places, steps.cumsum(1, dtype=torch.int32))


def _sorted_on_cpu(keys: Tensor) -> tuple[Tensor, Tensor]:
    """As `sort`, by NumPy's vectorised one: six times as fast. Where there is room, keys carry their places in their lowest bits."""
    bits = max(1, (keys.shape[1] - 1).bit_length())
    if keys.dtype == torch.int64 and keys.numel() and int(keys.amin()) >= 0 and int(keys.amax()) < 2 ** (63 - bits):
        packed = torch.from_numpy(np.sort(((keys << bits) | torch.arange(keys.shape[1])).numpy(), axis=1))
        return packed >> bits, packed & ((1 << bits) - 1)
    places = torch.from_numpy(np.argsort(keys.numpy(), axis=1))
    return keys.gather(1, places), places


def _brevity(lengths: Tensor, reference_lengths: Tensor) -> Tensor:
    """By the reference whose length is nearest, the shorter of two."""
    none = reference_lengths < 0
    far = torch.iinfo(torch.int64).max // 2
    nearest = (reference_lengths - lengths[:, None]).abs().masked_fill(none, far).amin(1, keepdim=True)
    closest = reference_lengths.masked_fill(none | ((reference_lengths - lengths[:, None]).abs() != nearest), far).amin(1).double()
    size = lengths.clamp(min=1).double()
    return torch.where(lengths > closest, 1.0, (1 - closest / size).exp())


def _smoothed(
    matches: Tensor, totals: Tensor, lengths: Tensor, order: int, method: int, epsilon: float, alpha: float, k: float
) -> Tensor:  # fmt: skip
    """Modified precisions (batch, order) by one of NLTK's methods."""
    hits, among = matches.double(), totals.clamp(min=1).double()
    exact = hits / among
    none = hits == 0
    halved = torch.where(none[:, :order], 0.5 ** none[:, :order].cumsum(1).double(), 1.0)  # a zero is worth half the one before
    if method == 0:
        return torch.where(none, sys.float_info.min, exact)
    if method == 1:
        return torch.where(none, epsilon / among, exact)
    if method == 2:
        return torch.cat([exact[:, :1], (hits[:, 1:] + 1) / (among[:, 1:] + 1)], 1)
    if method == 3:
        return torch.where(none, halved / among, exact)
    if method == 6:
        return _interpolated(hits, totals.double(), exact, alpha)
    found = exact[:, :order]
    if method in (4, 7):
        worth = halved * lengths.clamp(min=1).double().log()[:, None] / k
        found = torch.where(none[:, :order] & (lengths > 1)[:, None], worth / among[:, :order], found)
    return found if method == 4 else _averaged(found, exact[:, AVERAGED_ORDER - 1])


def _averaged(exact: Tensor, beyond: Tensor) -> Tensor:
    """Each precision with the mean before it and the precision after it."""
    after = torch.cat([exact[:, 1:], beyond[:, None]], 1)
    mean, found = exact[:, 0] + 1, []
    for n in range(exact.shape[1]):
        mean = (mean + exact[:, n] + after[:, n]) / 3
        found.append(mean)
    return torch.stack(found, 1)


def _interpolated(hits: Tensor, totals: Tensor, exact: Tensor, alpha: float) -> Tensor:
    """From the third on, drawn to what the two precisions before it lead to."""
    found = list(exact.unbind(1))
    for n in range(2, len(found)):
        led = torch.where(found[n - 2] == 0, 0.0, found[n - 1] ** 2 / found[n - 2])
        found[n] = (hits[:, n] + alpha * led) / (totals[:, n] + alpha)
    return torch.where((exact[:, 2] == 0)[:, None], torch.nan, torch.stack(found, 1))


def _check(
    hypotheses: Tensor, references: Tensor, lengths: Tensor | None, reference_lengths: Tensor | None, weights: Sequence[float], smoothing: str
) -> None:  # fmt: skip
    if smoothing not in SMOOTHING:
        raise UserError(f"smoothing '{smoothing}' is not known", f"one of {', '.join(SMOOTHING)}")
    if not weights or (smoothing == "interpolate" and len(weights) < 3):
        raise UserError(f"{len(weights)} weights with smoothing '{smoothing}'", "one weight for each order; 'interpolate' needs three orders")
    if hypotheses.dim() != 2 or references.dim() != 3 or hypotheses.shape[0] != references.shape[0] or not references.shape[1]:
        raise UserError(
            f"hypotheses are {tuple(hypotheses.shape)}, references {tuple(references.shape)}", "(batch, tokens) and (batch, references, tokens)"
        )
    if hypotheses.is_floating_point() or references.is_floating_point():
        raise UserError(f"tokens are {hypotheses.dtype} and {references.dtype}", "integer ids")
    for what, found, wanted in (("lengths", lengths, hypotheses.shape[:1]), ("reference_lengths", reference_lengths, references.shape[:2])):
        if found is not None and found.shape != wanted:
            raise UserError(f"{what} are {tuple(found.shape)} of tokens in {tuple(wanted)}", f"{what} of shape {tuple(wanted)}")
