"""What benchmarks/kernels_papers.py compares: of each kernel its cases, on a device, at full or small size."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Case:
    """One size of one kernel."""

    name: str
    ours: Callable[[], Any]
    others: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    """Of ours, against the reference."""
    facts: Callable[[], dict[str, Any]] | None = None


# ---------------------------------------------------------------- BLEU


def _bleu_plain(hypothesis: list[int], references: list[list[int]]) -> float:
    """As a Python program counts it, where NLTK is not installed; 0 where an order has no match."""
    logs = 0.0
    for n in range(1, 5):
        counts = [collections.Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (hypothesis, *references)]
        hits = sum(min(number, max(one[gram] for one in counts[1:])) for gram, number in counts[0].items())
        logs += math.log(max(hits, 1e-300) / max(1, len(hypothesis) - n + 1)) / 4
    closest = min((abs(len(one) - len(hypothesis)), len(one)) for one in references)[1]
    return math.exp(logs) * (1.0 if len(hypothesis) > closest else math.exp(1 - closest / len(hypothesis)))


def bleu(device: str, small: bool) -> Iterator[Case]:
    from foretell.kernels.papers.bleu import sentence_bleu

    try:
        from nltk.translate.bleu_score import sentence_bleu as other

        name = "nltk"
    except ImportError:
        name, other = "python", lambda references, hypothesis: _bleu_plain(hypothesis, references)
    sizes = [(8, 64, 1)] if small else [(256, 1024, 1), (256, 1024, 4), (32, 256, 1), (1024, 1024, 1)]
    for batch, tokens, count in sizes:
        draw = random.Random(0)
        refs = [[[min(int(draw.expovariate(0.02)), 50_256) for _ in range(tokens)] for _ in range(count)] for _ in range(batch)]
        hyps = [[token if draw.random() < 0.8 else draw.randrange(50_257) for token in some[0]] for some in refs]
        given = torch.tensor(hyps, device=device), torch.tensor(refs, device=device)

        def plain(hyps: Any = hyps, refs: Any = refs) -> list[float]:
            return [float(other(some, hyp)) for hyp, some in zip(hyps, refs, strict=True)]

        def ours(given: Any = given) -> list[float]:
            return sentence_bleu(*given).tolist()

        def error(ours: Any = ours, plain: Any = plain) -> float:
            return max(abs(a - b) for a, b in zip(ours(), plain(), strict=True))

        yield Case(f"{batch}x{tokens}x{count}", ours, {name: plain}, error)


KERNELS: dict[str, Callable[[str, bool], Iterator[Case]]] = {"bleu": bleu}
