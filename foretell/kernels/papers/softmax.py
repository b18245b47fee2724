"""Softmax that reads its input twice and not three times, for rows that no cache holds.

Dukhan and Ablavatski 2020, "Two-Pass Softmax Algorithm". No maximum is looked for first: each exponential is kept as a mantissa and a power
of two, e^x = m · 2^n with 1/√2 < m < √2, and so is their sum, which can then neither overflow nor vanish.

    first pass     (m, n) of the row: sums at the larger exponent, moved there by exact powers of two
    second pass    y = m_i · 2^(n_i - n) / m

Rows that fit into a GPU's registers are better served by torch.compile, which reads them once; so are all rows on a CPU, where this is the
reference in plain torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foretell.kernels.kernel import define, wider

COLUMNS = 4096
"""Of a row at once."""
LN2 = (0.6875, 0.005645751953125, 1.4286068203094172e-06)
"""Their sum is ln 2; n times the first and the second is exact in float32 while n is below 2¹⁶."""
LEAST = -65536.0
"""Exponent of what is nothing."""


def pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissa and exponent of e^x."""
    n = torch.floor(x * (1 / math.log(2)) + 0.5).clamp(min=LEAST)
    rest = x - n * LN2[0] - n * LN2[1] - n * LN2[2]
    return torch.where(n == LEAST, 0.0, torch.exp(rest)), n


def plain(x: Tensor) -> Tensor:
    wide = x.to(wider(x.dtype))
    m, n = torch.zeros_like(wide[..., :1]), torch.full_like(wide[..., :1], LEAST)
    for part in wide.split(COLUMNS, -1):
        some, exponents = pairs(part)
        higher = torch.maximum(n, exponents.amax(-1, keepdim=True))
        m = torch.ldexp(m, n - higher) + torch.ldexp(some, exponents - higher).sum(-1, keepdim=True)
        n = higher
    parts = []
    for part in wide.split(COLUMNS, -1):
        some, exponents = pairs(part)
        parts.append((torch.ldexp(some, exponents - n) / m).to(x.dtype))
    return torch.cat(parts, -1) if parts else torch.empty_like(x)


_softmax = define("two_pass_softmax", "(Tensor x) -> Tensor", plain=plain, triton="softmax.two_pass", fake=torch.empty_like)


def _gradient(ctx: Any, up: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data(up, y, -1, y.dtype)


torch.library.register_autograd(
    "foretell_kernels::two_pass_softmax", _gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)  # fmt: skip


def two_pass_softmax(x: Tensor) -> Tensor:
    """Softmax along the last dimension."""
    return _softmax(x.contiguous())
