"""Whether an output is right: as near to the fp64 oracle as eager is, give or take a factor of two. Pure, on the CPU.

    error of the candidate   rms |candidate - oracle|,  max |candidate - oracle|
    allowed                  twice the same of eager's own output, at least a few units in the last place of the oracle's scale

Errors are never allowed in absolute terms: an output of 1e-6 must be as right in its digits as one of 1e6. Where the oracle is not
finite, or eager is not where the oracle is, the candidate must be as eager is, place by place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretell.tune.verify.wire import RawTensor

TWICE = 2.0
ULPS_RMS, ULPS_MAX = 2.0, 8.0
FEW = 64
"""Elements below which eager's own error is a matter of luck: four times as many units are allowed."""
GROSS = 0.02
"""Share of the oracle's scale from which an error is no rounding."""
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

WRONG, IMPRECISE, NONFINITE, KIND = "values", "accuracy", "nonfinite", "kind"


@dataclass(frozen=True)
class Problem:
    """Why an output is refused."""

    check: str
    text: str


@dataclass(frozen=True)
class Errors:
    """Of one output against the oracle, absolute."""

    rms: float
    most: float


def torch_of(raw: RawTensor) -> Tensor:
    """Its values, as a tensor of the CPU."""
    dtype = getattr(torch, raw.dtype)
    if not raw.numel:
        return torch.empty(raw.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(raw.data), dtype=torch.uint8).view(dtype)
    return flat.as_strided(raw.shape, raw.stride, raw.offset)


def errors(found: Tensor, oracle: Tensor, where: Tensor) -> Errors:
    gap = (found.double() - oracle.double()).abs()[where]
    return Errors(float(gap.square().mean().sqrt()), float(gap.max())) if gap.numel() else Errors(0.0, 0.0)


def problem(
    found: RawTensor | None, oracle: RawTensor | None, eager: RawTensor | None, *, name: str = "output", room: Errors | None = None
) -> tuple[Problem | None, float]:
    """What is wrong with one output, and its error as a multiple of what is allowed; `room` is further error that the inputs'
    own rounding explains."""
    if eager is None or oracle is None:
        extra = found is not None and eager is None and bool(torch_of(found).ne(0).any())
        return (Problem(WRONG, f"{name} is there, and the reference has none") if extra else None), 0.0
    if found is None:
        return Problem(KIND, f"{name} is missing"), 0.0
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return Problem(KIND, f"{name} is {found.dtype}{list(found.shape)}, and the reference's {eager.dtype}{list(eager.shape)}"), 0.0
    mine, theirs, truth = torch_of(found), torch_of(eager), torch_of(oracle)
    if not eager.is_float:
        wrong = int(mine.ne(theirs).sum())
        return (Problem(WRONG, f"{name} differs in {wrong} of {found.numel} places") if wrong else None), 0.0
    if not found.numel:
        return None, 0.0
    finite = theirs.isfinite() & truth.isfinite()
    odd = ~finite & ~theirs.isfinite() & ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    odd |= finite & ~mine.isfinite()
    if bool(odd.any()):
        place = tuple(odd.nonzero()[0].tolist())
        return Problem(NONFINITE, f"{name}{list(place)} is {float(mine[place])}, and the reference's {float(theirs[place])}"), 0.0
    return _judged(name, errors(mine, truth, finite), errors(theirs, truth, finite), _scale(truth, finite), found.dtype, found.numel, room)


def _scale(truth: Tensor, where: Tensor) -> Errors:
    """Root mean square and largest magnitude of the oracle."""
    return errors(torch.zeros_like(truth), truth, where)


def _judged(
    name: str, mine: Errors, eager: Errors, scale: Errors, dtype: str, numel: int, room: Errors | None
) -> tuple[Problem | None, float]:
    few = 4.0 if numel < FEW else 1.0
    epsilon = EPSILON[dtype]
    more = room or Errors(0.0, 0.0)
    rms = max(TWICE * eager.rms, few * ULPS_RMS * epsilon * scale.rms, more.rms)
    most = max(TWICE * eager.most, few * ULPS_MAX * epsilon * scale.most, more.most)
    ratio = max(mine.rms / rms if rms else float(mine.rms > 0) * 1e9, mine.most / most if most else float(mine.most > 0) * 1e9)
    if ratio <= 1.0:
        return None, ratio
    gross = mine.rms > GROSS * scale.rms or mine.most > GROSS * 10 * max(scale.rms, 1e-300)
    told = f"{name} is off by {mine.rms:.1e} rms ({mine.most:.1e} at most); eager by {eager.rms:.1e} ({eager.most:.1e}); scale {scale.rms:.1e}"
    return Problem(WRONG if gross else IMPRECISE, f"{told}; {ratio:.1f} times what is allowed"), ratio


def same_bits(a: RawTensor, b: RawTensor) -> bool:
    """Values, NaN by their bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.data == b.data
