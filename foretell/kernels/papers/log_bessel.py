"""Logarithms of the modified Bessel functions I and K, of any real order from 0 on, with derivatives in order and argument.

Plesner, Sørensen and Hauberg 2024, "Accurate Computation of the Logarithm of Modified Bessel Functions on GPUs". In float64; where the
functions themselves would overflow or vanish their logarithms are found all the same.

    order ≥ ORDER               expansion for large orders, in Debye's polynomials, which are found once from their recurrence
    I, argument ≤ ARGUMENT      power series, all of whose terms are positive
    I, argument > ARGUMENT      expansion for large arguments
    K, argument ≤ 2             Temme's series for the order's fraction, then the recurrence upwards
    K, argument > 2             the trapezoidal rule on ∫ exp(-x·cosh t)·cosh(v·t) dt, which converges exponentially

Each element is computed by its own case alone. Errors are within 1e-13 of the larger of 1 and the logarithm, but for log I where its two
large parts cancel (argument near 0.66 of a large order): there they are within 1e-15 of the order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

ORDER = 15.0
"""From which on the expansion for large orders has its full accuracy."""
ARGUMENT = 65.0
"""From which on, for orders below ORDER, the one for large arguments has."""
TERMS_AT_LEAST, TERMS_EACH = 18, 1.1
"""Of the power series, and for each unit of the argument."""
HANKEL = 34
DEBYE = 14
NODES = 48
REACH = 42.0
"""Nepers below its top at which an integrand is left out."""
TEMME = 2.0
TEMME_TERMS = 18
RECIPROCAL_GAMMA = (
    1.0, 0.5772156649015329, -0.6558780715202539, -0.04200263503409524, 0.1665386113822915, -0.04219773455554434, -0.009621971527876974,
    0.0072189432466631, -0.001165167591859065, -0.00021524167411495098, 0.0001280502823881162, -2.013485478078824e-05, -1.2504934821426706e-06,
    1.133027231981696e-06, -2.056338416977607e-07, 6.116095104481416e-09, 5.002007644469223e-09, -1.18127457048702e-09, 1.0434267116911005e-10,
    7.782263439905071e-12, -3.696805618642206e-12, 5.100370287454476e-13,
)  # fmt: skip
"""Of 1/Γ(1+x), by powers of x."""


def log_iv(v: Tensor | float, x: Tensor | float) -> Tensor:
    """log I_v(x) in float64; NaN for orders or arguments below 0."""
    return _apply(_log_iv, v, x)


def log_kv(v: Tensor | float, x: Tensor | float) -> Tensor:
    """log K_v(x) in float64; NaN for arguments below 0. K is even in its order."""
    order = v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64)
    return _apply(_log_kv, order.abs(), x)


def _apply(compute: Callable[[Tensor, Tensor], Tensor], v: Tensor | float, x: Tensor | float) -> Tensor:
    device = next((one.device for one in (v, x) if isinstance(one, Tensor) and one.dim()), torch.device("cpu"))
    both = [torch.as_tensor(one, dtype=torch.float64, device=device) for one in (v, x)]
    return _Recomputed.apply(compute, *torch.broadcast_tensors(*both))


class _Recomputed(torch.autograd.Function):
    """Keeps its inputs alone: the backward computes once more, and differentiates that."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor, Tensor], Tensor], v: Tensor, x: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(v, x)
        return compute(v, x)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()
        given = list(ctx.saved_tensors)
        if not again:
            given = [one.detach().requires_grad_(needed) for one, needed in zip(given, ctx.needs_input_grad[1:], strict=True)]
        wanted = [one for one, needed in zip(given, ctx.needs_input_grad[1:], strict=True) if needed]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.compute(*given), wanted, up, create_graph=again, allow_unused=True))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


def _by_case(v: Tensor, x: Tensor, cases: list[tuple[Tensor, Callable[[Tensor, Tensor], Tensor]]]) -> Tensor:
    out = torch.full_like(x, torch.nan)
    flat_v, flat_x, flat = v.reshape(-1), x.reshape(-1), out.reshape(-1)
    for where, formula in cases:
        places = where.reshape(-1).nonzero().squeeze(1)
        if places.numel():
            flat = flat.index_put((places,), formula(flat_v[places], flat_x[places]))
    return flat.view(x.shape)


def _log_iv(v: Tensor, x: Tensor) -> Tensor:
    valid = (v >= 0) & (x > 0) & (v < torch.inf) & (x < torch.inf)
    large = valid & (v >= ORDER)
    series = valid & ~large & (x <= ARGUMENT)
    zero = (x == 0) & (v >= 0)
    return _by_case(v, x, [
        (large, _iv_large_order), (series, _iv_series), (valid & ~large & ~series, _iv_large_argument),
        (zero, lambda v, x: torch.where(v == 0, x, x - torch.inf)), ((x == torch.inf) & (v >= 0), lambda v, x: x),
    ])  # fmt: skip


def _log_kv(v: Tensor, x: Tensor) -> Tensor:
    valid = (x > 0) & (v < torch.inf) & (x < torch.inf)
    large = valid & (v >= ORDER)
    small = valid & ~large & (x <= TEMME)
    return _by_case(v, x, [
        (large, _kv_large_order), (small, _kv_small_argument), (valid & ~large & ~small, _kv_integral),
        ((x == 0) & (v < torch.inf), lambda v, x: x + torch.inf), (x == torch.inf, lambda v, x: -x),
    ])  # fmt: skip


# ---------------------------------------------------------------- large orders


@functools.cache
def debye() -> tuple[tuple[float, ...], ...]:
    """Coefficients of U_k(t) / t^k by powers of t², k = 0, 1, ...: U_{k+1} = t²(1-t²)/2·U_k' + 1/8·∫(1-5s²)·U_k."""
    poly = {0: Fraction(1)}
    found: list[tuple[float, ...]] = [(1.0,)]
    for k in range(1, DEBYE):
        following: dict[int, Fraction] = {}
        for power, factor in poly.items():
            for raised, part in (
                (power + 1, Fraction(power, 2) + Fraction(1, 8 * (power + 1))), (power + 3, -Fraction(power, 2) - Fraction(5, 8 * (power + 3))),
            ):  # fmt: skip
                following[raised] = following.get(raised, Fraction(0)) + factor * part
        poly = following
        found.append(tuple(float(poly.get(k + 2 * i, Fraction(0))) for i in range(k + 1)))
    return tuple(found)


def _horner(factors: tuple[float, ...], at: Tensor) -> Tensor:
    total = torch.full_like(at, factors[-1])
    for factor in reversed(factors[:-1]):
        total = total * at + factor
    return total


def _debye_sum(v: Tensor, root: Tensor, sign: float) -> Tensor:
    """Σ (±1)^k U_k(v/root) / v^k, root = √(v² + x²)."""
    square = (v / root) ** 2
    total = torch.zeros_like(v)
    for k in reversed(range(1, DEBYE)):
        total = (total + _horner(debye()[k], square)) * (sign / root)
    return total


def _iv_large_order(v: Tensor, x: Tensor) -> Tensor:
    root = torch.hypot(v, x)
    return root - v * torch.log((v + root) / x) - 0.5 * torch.log(2 * math.pi * root) + torch.log1p(_debye_sum(v, root, 1.0))


def _kv_large_order(v: Tensor, x: Tensor) -> Tensor:
    root = torch.hypot(v, x)
    return v * torch.log((v + root) / x) - root + 0.5 * torch.log(math.pi / (2 * root)) + torch.log1p(_debye_sum(v, root, -1.0))


# ---------------------------------------------------------------- I


def _iv_series(v: Tensor, x: Tensor) -> Tensor:
    square = x * x / 4
    total = torch.zeros_like(x)
    # Σ from 1 on, by nesting: q/(1(v+1))·(1 + q/(2(v+2))·(1 + ...)), as many terms as the largest argument wants
    terms = int(TERMS_AT_LEAST + TERMS_EACH * float(x.detach().amax()))
    for k in range(terms, 0, -1):
        total = square / (k * (v + k)) * (1 + total)
    return v * torch.log(x / 2) - torch.lgamma(v + 1) + torch.log1p(total)


def _iv_large_argument(v: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    square = 4 * v * v
    for k in range(HANKEL, 0, -1):
        total = -(square - (2 * k - 1) ** 2) / (8 * k * x) * (1 + total)
    return x - 0.5 * torch.log(2 * math.pi * x) + torch.log1p(total)


# ---------------------------------------------------------------- K


def _kv_integral(v: Tensor, x: Tensor) -> Tensor:
    """½ ∫ exp(v·t - x·cosh t) dt over the line, relative to its top: the curvature is nowhere less than there."""
    with torch.no_grad():
        top, root = torch.asinh(v / x), torch.hypot(x, v)
        height = v * top - v * v / (root + x)  # and -x, which is left out of the exponents
        drop = REACH / root
        width = (top + torch.log1p(drop + torch.sqrt(drop * (drop + 2)))) / (NODES - 1)
    total = torch.exp(-height) / 2
    for node in range(1, NODES):
        t = node * width
        total = total + torch.exp(-2 * x * torch.sinh(t / 2) ** 2 - height) * torch.cosh(v * t)
    return height - x + torch.log(total * width)


def _kv_small_argument(v: Tensor, x: Tensor) -> Tensor:
    """Temme's series at the order's fraction within ±½, then K_{v+1} = K_{v-1} + 2v/x·K_v, by ratios."""
    steps = torch.floor(v.detach() + 0.5)
    fraction = v - steps
    log_k, ratio = _temme(fraction, x)
    for step in range(int(steps.amax())):
        more = step < steps
        log_k = torch.where(more, log_k + torch.log(ratio), log_k)
        ratio = torch.where(more, 2 * (fraction + step + 1) / x + 1 / ratio, ratio)
    return log_k


def _temme(mu: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """log K_mu(x) and K_{mu+1}(x) / K_mu(x), |mu| ≤ ½."""
    square = mu * mu
    even, odd = _horner(RECIPROCAL_GAMMA[0::2], square), _horner(RECIPROCAL_GAMMA[1::2], square)
    plus, minus = even + mu * odd, even - mu * odd  # 1/Γ(1+mu), 1/Γ(1-mu)
    log = torch.log(2 / x)
    sigma = mu * log
    near = sigma.abs() < 0.1
    safe = torch.where(near, 1.0, sigma)
    sinhc = torch.where(near, _horner(tuple(1 / math.factorial(2 * n + 1) for n in range(6)), sigma * sigma), torch.sinh(safe) / safe)
    f = (-odd * torch.cosh(sigma) + even * log * sinhc) / (plus * minus)
    p, q = torch.exp(sigma) / (2 * plus), torch.exp(-sigma) / (2 * minus)
    quarter = x * x / 4
    c, total, following = torch.ones_like(x), f, p
    for k in range(1, TEMME_TERMS):
        f = (k * f + p + q) / (k * k - square)
        c, p, q = c * quarter / k, p / (k - mu), q / (k + mu)
        total, following = total + c * f, following + c * (p - k * f)
    return torch.log(total), following * (2 / x) / total
