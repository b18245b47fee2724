"""BLEU on a device against NLTK's recorded scores and a count by hand."""

from __future__ import annotations

import collections
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.kernels.papers.bleu import SMOOTHING, ngram_matches, sentence_bleu

KEPT = json.loads((Path(__file__).parents[1] / "data" / "bleu_nltk.json").read_text())
"""Texts with their references, and what NLTK 3.10.4 gives for each method, number of weights, and reweighing. `null`: it refuses."""
WEIGHTS = {2: (0.5, 0.5), 4: (0.25,) * 4, 5: (0.4, 0.3, 0.2, 0.05, 0.05)}


def packed(cases: list[Any], shift: int = 0, noise: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Padded with `noise`, which is a token too."""
    most = max(len(refs) for _, refs in cases)
    hyps = torch.full((len(cases), max(len(hyp) for hyp, _ in cases)), noise + shift)
    refs = torch.full((len(cases), most, max(len(ref) for _, some in cases for ref in some)), noise + shift)
    lengths, reference_lengths = torch.tensor([len(hyp) for hyp, _ in cases]), torch.full((len(cases), most), -1)
    for row, (hyp, some) in enumerate(cases):
        hyps[row, : len(hyp)] = torch.tensor(hyp, dtype=torch.long) + shift
        for place, ref in enumerate(some):
            refs[row, place, : len(ref)] = torch.tensor(ref, dtype=torch.long) + shift
            reference_lengths[row, place] = len(ref)
    return hyps, refs, lengths, reference_lengths


@pytest.mark.parametrize("name", KEPT["scores"])
def test_scores_are_nltks(name: str) -> None:
    smoothing, count, reweigh = name.split()
    found = sentence_bleu(*packed(KEPT["cases"]), smoothing=smoothing, weights=WEIGHTS[int(count)], reweigh=reweigh == "1")
    kept = [math.nan if score is None else score for score in KEPT["scores"][name]]
    torch.testing.assert_close(found, torch.tensor(kept, dtype=torch.float64), atol=1e-12, rtol=1e-12, equal_nan=True)
    assert any(0.01 < score < 0.99 for score in kept)


def test_every_method_is_recorded() -> None:
    assert {name.split()[0] for name in KEPT["scores"]} == set(SMOOTHING)


def by_hand(hyp: list[int], refs: list[list[int]], n: int) -> int:
    def count(text: list[int]) -> collections.Counter[tuple[int, ...]]:
        return collections.Counter(tuple(text[at : at + n]) for at in range(len(text) - n + 1))

    each = [count(ref) for ref in refs]
    return sum(min(number, max(one[gram] for one in each)) for gram, number in count(hyp).items())


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
def test_matches_are_counted(kind: torch.dtype) -> None:
    draw = random.Random(1)
    cases = [
        ([draw.randrange(4) for _ in range(draw.randrange(40))], [[draw.randrange(4) for _ in range(draw.randrange(50))] for _ in range(3)])
        for _ in range(20)
    ]
    hyps, refs, lengths, reference_lengths = packed(cases)
    found, totals = ngram_matches(hyps.to(kind), refs.to(kind), lengths, reference_lengths, 6)
    assert found.tolist() == [[by_hand(hyp, some, n) for n in range(1, 7)] for hyp, some in cases]
    assert totals.tolist() == [[max(0, len(hyp) - n + 1) for n in range(1, 7)] for hyp, _ in cases]


def test_long_rows_have_wide_ids() -> None:
    """Beyond 46,340 tokens a pair of ids needs more than 32 bits."""
    torch.manual_seed(0)
    hyp = torch.randint(0, 50_000, (1, 30_000))
    found, _ = ngram_matches(hyp, hyp[:, None], torch.tensor([30_000]), torch.tensor([[30_000]]), 3)
    assert found.tolist() == [[30_000, 29_999, 29_998]]


def test_neither_vocabulary_nor_padding_nor_pieces_change_a_score() -> None:
    plain = sentence_bleu(*packed(KEPT["cases"]), smoothing="length")
    assert torch.equal(plain, sentence_bleu(*packed(KEPT["cases"], shift=2**60), smoothing="length"))
    assert torch.equal(plain, sentence_bleu(*packed(KEPT["cases"], noise=0), smoothing="length"))
    assert torch.equal(plain, sentence_bleu(*packed(KEPT["cases"]), smoothing="length", tokens_at_once=1))


def test_one_reference_and_no_lengths() -> None:
    hyp = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    ref = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 9, 4, 5]])
    assert sentence_bleu(hyp, ref)[0] == 1
    expected = math.exp(sum(math.log(one) for one in (4 / 5, 2 / 4, 0.1 / 3, 0.1 / 2)) / 4)
    assert sentence_bleu(hyp, ref, smoothing="epsilon")[1].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"smoothing": "method1"}, "is not known"), ({"weights": ()}, "0 weights"),
        ({"weights": (0.5, 0.5), "smoothing": "interpolate"}, "2 weights"),
        ({"lengths": torch.tensor([1, 2, 3])}, "lengths are"), ({"references": torch.zeros(3, 1, 4, dtype=torch.long)}, "references"),
        ({"hypotheses": torch.zeros(2, 4)}, "float32"),
    ],
)  # fmt: skip
def test_bad_input(change: dict[str, Any], told: str) -> None:
    given = {"hypotheses": torch.zeros(2, 4, dtype=torch.long), "references": torch.zeros(2, 1, 4, dtype=torch.long), **change}
    with pytest.raises(UserError, match=told):
        sentence_bleu(**given)
