"""Logarithms of Bessel functions against mpmath in forty digits, and their derivatives against known relations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import pytest
import torch
from torch import Tensor

from foretell.kernels.papers.log_bessel import log_iv, log_kv

ORDERS = (0.0, 1e-3, 0.3, 0.5, 0.999, 1.0, 2.25, 7.7, 14.99, 15.0, 40.0, 100.0)
ARGUMENTS = (1e-12, 1e-3, 0.7, 2.0, 2.01, 12.0, 64.9, 65.1, 500.0, 3000.0)
BAR = 1e-13


KEPT = json.loads((Path(__file__).parents[1] / "data" / "log_bessel.json").read_text())
"""log I and log K at every order and argument, order by order, from forty digits of mpmath."""


def pairs() -> tuple[Tensor, Tensor]:
    v, x = torch.meshgrid(torch.tensor(ORDERS, dtype=torch.float64), torch.tensor(ARGUMENTS, dtype=torch.float64), indexing="ij")
    return v.flatten(), x.flatten()


def exact(name: str, v: float, x: float) -> mpmath.mpf:
    return mpmath.log((mpmath.besseli if name == "I" else mpmath.besselk)(mpmath.mpf(v), mpmath.mpf(x)))


@pytest.mark.parametrize("name", ["I", "K"])
def test_thirteen_digits(name: str) -> None:
    v, x = pairs()
    found, want = (log_iv if name == "I" else log_kv)(v, x), torch.tensor(KEPT[name], dtype=torch.float64)
    assert ((found - want).abs() / want.abs().clamp(min=1)).max() < BAR
    for place in range(0, 31, 5):  # what was kept is what mpmath says
        with mpmath.workdps(40):
            assert float(exact(name, v[place].item(), x[place].item())) == KEPT[name][place]


@pytest.mark.parametrize(("v", "x"), [(1e6, 10.0), (1e6, 1e9), (32768 / 2 - 1, 1e4), (1e150, 1e150), (3.0, 1e300), (1e150, 1e-150), (0.2, 1e-300)])
def test_never_infinite(v: float, x: float) -> None:
    assert math.isfinite(log_iv(v, x)) and math.isfinite(log_kv(v, x))


@pytest.mark.parametrize(("v", "x"), [(500.0, 500.0), (500.0, 3000.0), (16_383.0, 1e4), (1e6, 1e5), (14.5, 1e8), (1e4, 1.0)])
def test_the_wronskian(v: float, x: float) -> None:
    """I_v K_{v+1} + I_{v+1} K_v = 1/x, to what logarithms of that size leave of their differences."""
    one, other = log_iv(v, x) + log_kv(v + 1, x), log_iv(v + 1, x) + log_kv(v, x)
    assert abs(torch.logaddexp(one, other).item() + math.log(x)) <= 4 * 2**-52 * max(1.0, abs(log_iv(v, x).item()), abs(log_kv(v, x).item()))


@pytest.mark.parametrize("v", [1e3, 1e4])
def test_where_log_i_is_near_zero(v: float) -> None:
    """Its two large parts cancel: what is left is as exact as they are."""
    for share in (0.662, 0.6628, 0.664):
        with mpmath.workdps(40):
            want = exact("I", v, share * v)
        assert abs(log_iv(v, share * v).item() - want) <= 1e-15 * v


def test_a_large_order_beside_leading_terms() -> None:
    """Γ(v+1) and (x/2)^v alone, to what the next term of the series leaves."""
    v, x = 1e6, 10.0
    with mpmath.workdps(40):
        want = v * mpmath.log(mpmath.mpf(x) / 2) - mpmath.loggamma(mpmath.mpf(v) + 1) + mpmath.mpf(x) ** 2 / 4 / (v + 1)
        assert abs(log_iv(v, x).item() - want) <= BAR * abs(want)


def test_edges() -> None:
    assert log_iv(torch.tensor([0.0, 2.0]), torch.zeros(2)).tolist() == [0.0, -math.inf]
    assert log_kv(torch.tensor([0.0, 2.0]), torch.zeros(2)).tolist() == [math.inf, math.inf]
    assert log_iv(torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -1.0])).isnan().all()
    assert log_kv(-3.5, 2.5) == log_kv(3.5, 2.5)
    assert log_iv(1.0, math.inf) == math.inf and log_kv(1.0, math.inf) == -math.inf
    assert log_iv(torch.zeros(0, 3), torch.zeros(0, 1)).shape == (0, 3)


def test_derivatives_in_the_argument() -> None:
    """I' = I_{v+1} + v/x·I and K' = -K_{v+1} + v/x·K, where that is not a difference of large numbers."""
    v, x = pairs()
    x.requires_grad_()
    up, = torch.autograd.grad(log_iv(v, x).sum(), x)
    torch.testing.assert_close(up, torch.exp(log_iv(v + 1, x) - log_iv(v, x)) + v / x, rtol=3e-12, atol=0)
    down, = torch.autograd.grad(log_kv(v, x).sum(), x)
    torch.testing.assert_close(down, -torch.exp(log_kv((v - 1).abs(), x) - log_kv(v, x)) - v / x, rtol=3e-12, atol=0)


@pytest.mark.parametrize("name", ["I", "K"])
@pytest.mark.parametrize(("v", "x"), [(0.01, 1e-3), (0.3, 1.5), (2.25, 12.0), (7.7, 64.9), (14.9, 70.0), (15.0, 12.0), (40.0, 65.0)])
def test_derivatives_in_the_order(name: str, v: float, x: float) -> None:
    order = torch.tensor(v, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad((log_iv if name == "I" else log_kv)(order, x), order)
    with mpmath.workdps(40):
        step = mpmath.mpf(10) ** -10
        want = (exact(name, v + step, x) - exact(name, v - step, x)) / (2 * step)
    assert abs(found.item() - want) <= 1e-12 * max(1, abs(want))


def test_second_derivatives() -> None:
    """Bessel's equation, for the logarithm: f'' + f'² + f'/x = 1 + v²/x²."""
    v = torch.tensor([0.0, 0.3, 7.7, 20.0] * 4, dtype=torch.float64)
    x = torch.tensor([0.5, 3.0, 40.0, 200.0], dtype=torch.float64).repeat_interleave(4)
    x.requires_grad_()
    for function in (log_iv, log_kv):
        (first,) = torch.autograd.grad(function(v, x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second + first**2 + first / x, 1 + (v / x) ** 2, rtol=1e-11, atol=1e-11)


def test_von_mises_fisher_in_many_dimensions() -> None:
    """The concentration with a given mean length is found from derivatives alone: at 32768 dimensions I itself vanishes."""
    size, length = 32768, 0.7
    kappa = torch.tensor(length * (size - length**2) / (1 - length**2), dtype=torch.float64)
    order = torch.tensor(size / 2 - 1, dtype=torch.float64)
    for _ in range(20):
        kappa.requires_grad_()
        (slope,) = torch.autograd.grad(log_iv(order, kappa), kappa, create_graph=True)
        mean = slope - order / kappa.detach()
        (curve,) = torch.autograd.grad(slope, kappa)
        kappa = (kappa - (mean - length) / (curve + order / kappa**2)).detach()
    mean = torch.exp(log_iv(order + 1, kappa) - log_iv(order, kappa))
    assert mean.item() == pytest.approx(length, abs=1e-10)
