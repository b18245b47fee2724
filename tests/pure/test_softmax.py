"""Softmax in two passes against torch's, at sizes of input where exponentials overflow, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretell.kernels.papers import softmax
from foretell.kernels.papers.softmax import pairs, two_pass_softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_it_is_softmax(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: float, shift: float) -> None:
    monkeypatch.setattr(softmax, "COLUMNS", 64)  # several pieces of a row
    torch.manual_seed(0)
    x = (torch.randn(3, 4, 301, dtype=torch.float64) * size + shift).to(dtype)
    wide = x.double().numpy().astype(np.longdouble)  # torch's own in float64 is 6e-14 off for small shares
    want = np.exp(wide - wide.max(-1, keepdims=True))
    want = torch.from_numpy((want / want.sum(-1, keepdims=True)).astype(np.float64))
    step, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(two_pass_softmax(x).double(), want, rtol=4 * step, atol=step * least if dtype != torch.float16 else step * least / 2)


def test_what_is_minus_infinity_is_nothing() -> None:
    x = torch.randn(2, 10)
    x[:, 3] = -torch.inf
    found = two_pass_softmax(x)
    assert found[:, 3].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found, x.softmax(-1))
    assert two_pass_softmax(torch.full((1, 4), -torch.inf)).isnan().all()
    assert two_pass_softmax(torch.zeros(0, 5)).shape == (0, 5)


def test_pairs_are_exponentials() -> None:
    x = torch.linspace(-700, 700, 1001, dtype=torch.float64)
    m, n = pairs(x)
    torch.testing.assert_close(torch.ldexp(m, n), x.exp(), rtol=1e-13, atol=0)
    assert 0.7 < m.min() < m.max() < 1.42


def test_gradients() -> None:
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(two_pass_softmax, (x,))
    torch.library.opcheck(torch.ops.foretell_kernels.two_pass_softmax.default, (x,))
