"""A vector in 8 bits with a scale for every 256 elements, as bytes that travel; the same bits wherever it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from foretell.lower.sync import scales_of
from foretell.trace.recipe import BLOCK

LARGEST = 127


def rounded(exact: Tensor, cut: Tensor) -> Tensor:
    """Codes and scales of a vector of whole blocks; `cut` becomes what they leave out of it."""
    rows = exact.view(-1, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True) / LARGEST
    codes = torch.where(scales > 0, rows / scales, torch.zeros_like(rows)).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    coded = torch.cat([codes.view(-1), scales.view(-1).view(torch.int8)])
    torch.sub(exact, plain(coded), out=cut)
    return coded


def plain(coded: Tensor) -> Tensor:
    """The vector that codes and scales stand for."""
    elements = elements_of(coded.numel())
    codes = coded[:elements].view(-1, BLOCK)
    scales = coded[elements:].clone().view(torch.float32)
    return (codes.float() * scales.view(-1, 1)).view(-1)


def bytes_of(elements: int) -> int:
    return elements + 4 * scales_of(elements)


def hash_of(vector: Tensor) -> int:
    """Of a vector of whole blocks, in 64 bits: every word counts an odd number of times, so that one flipped bit always changes it, and
    nearly always do values that changed places."""
    words = vector.detach().view(torch.int64).view(-1, BLOCK // 2)
    inside, along = (2 * torch.arange(size, device=words.device) + 1 for size in (words.shape[1], words.shape[0]))
    return int(((words * inside).sum(1) * along).sum())


def elements_of(coded: int) -> int:
    return coded * BLOCK // (BLOCK + 4)
