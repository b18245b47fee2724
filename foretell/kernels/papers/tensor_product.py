"""Products of spherical tensors, in the three forms in use; a form is named, never put in place of another that is not its equal.

Xie et al. 2025, "The Price of Freedom: Exploring Expressivity and Runtime Tradeoffs in Equivariant Tensor Products". Features are real, by
degree l = 0..L and order m = -l..l: (..., (L+1)²).

    clebsch-gordan   z_l3 = Σ_l1,l2 w(l1,l2,l3) · C · x_l1 ⊗ y_l2      every path has a weight, those of odd l1+l2+l3 too
    gaunt            the product of two functions on the sphere, w(l1)·x, w(l2)·y, w(l3)·z: no antisymmetric paths
    grid             the same product, taken point by point on a grid that is exact for it

`gaunt` and `grid` are one function in two ways; `clebsch-gordan` can express more: x × y of two vectors is one of its paths, and zero for
the others. `fastest` chooses among equals alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.errors import UserError

FORMS = ("clebsch-gordan", "gaunt", "grid")
EQUAL = (frozenset({"clebsch-gordan"}), frozenset({"gaunt", "grid"}))


@dataclass(frozen=True, kw_only=True)
class Expressivity:
    """What a form can express of degrees up to `degree`."""

    form: str
    paths: int
    """Combinations (l1, l2, l3) that reach the result."""
    weights: int
    antisymmetric: bool
    """Whether x ⊗ y - y ⊗ x has a part in it."""


def tensor_product(x: Tensor, y: Tensor, weight: Tensor | None, degree: int, *, form: str) -> Tensor:
    """Of features up to `degree`, to features up to `degree`; `weight` has what `weights(degree, form)` says, ones if None."""
    size, count = (degree + 1) ** 2, weights(degree, form)
    if x.shape[-1] != size or y.shape[-1] != size:
        raise UserError(f"features of {x.shape[-1]} and {y.shape[-1]} for degree {degree}", f"(degree + 1)² = {size}")
    if weight is not None and weight.shape[-1] != count:
        raise UserError(f"{weight.shape[-1]} weights for '{form}' of degree {degree}", f"{count}")
    if form == "clebsch-gordan":
        a, b, c, path, factor = (one.to(x.device) for one in _coupled(degree))
        terms = factor.to(x.dtype) * x[..., a] * y[..., b]
        if weight is not None:
            terms = terms * weight[..., path]
        return terms.new_zeros(*terms.shape[:-1], size).index_add(-1, c, terms)
    if weight is not None:
        of = torch.repeat_interleave(torch.arange(degree + 1), 2 * torch.arange(degree + 1) + 1).to(x.device)
        a, b, c = (weight[..., k * (degree + 1) + of] for k in range(3))
        x, y = a * x, b * y
    if form == "gaunt":
        z = torch.einsum("abc,...a,...b->...c", _gaunt(degree).to(x), x, y)
    else:
        onto, back = (one.to(x) for one in _grid(degree))
        z = ((x @ onto) * (y @ onto)) @ back
    return z if weight is None else c * z


def weights(degree: int, form: str) -> int:
    if form not in FORMS:
        raise UserError(f"form '{form}' is not known", f"one of {', '.join(FORMS)}")
    return len(paths(degree)) if form == "clebsch-gordan" else 3 * (degree + 1)


def paths(degree: int) -> tuple[tuple[int, int, int], ...]:
    """That the triangle rule allows."""
    span = range(degree + 1)
    return tuple((a, b, c) for a in span for b in span for c in span if abs(a - b) <= c <= a + b)


def expressivity(degree: int, form: str) -> Expressivity:
    some = paths(degree) if form == "clebsch-gordan" else tuple(one for one in paths(degree) if sum(one) % 2 == 0)
    return Expressivity(form=form, paths=len(some), weights=weights(degree, form), antisymmetric=form == "clebsch-gordan")


def equivalent(form: str, other: str) -> bool:
    """Whether both compute the same function of the same weights."""
    for one in (form, other):
        weights(0, one)
    return any(form in some and other in some for some in EQUAL)


def fastest(form: str, seconds: Mapping[str, float]) -> str:
    """The fastest that was measured among the equals of `form`."""
    return min((one for one in seconds if equivalent(form, one)), key=lambda one: seconds[one], default=form)


# ---------------------------------------------------------------- tables, in float64


def harmonics(degree: int, points: np.ndarray) -> np.ndarray:
    """Orthonormal real spherical harmonics at unit vectors (n, 3): (n, (degree+1)²)."""
    x, y, z = points.T
    azimuth, side = np.arctan2(y, x), np.sqrt(np.maximum(0.0, 1 - z * z))
    found = []
    legendre: dict[tuple[int, int], np.ndarray] = {}
    for m in range(degree + 1):  # without the sign (-1)^m
        legendre[m, m] = side**m * math.prod(range(2 * m - 1, 0, -2)) if m else np.ones_like(z)
        if m < degree:
            legendre[m + 1, m] = (2 * m + 1) * z * legendre[m, m]
        for n in range(m + 2, degree + 1):
            legendre[n, m] = ((2 * n - 1) * z * legendre[n - 1, m] - (n + m - 1) * legendre[n - 2, m]) / (n - m)
    for n in range(degree + 1):
        for m in range(-n, n + 1):
            k = abs(m)
            scale = math.sqrt((2 * n + 1) / (4 * math.pi) * math.factorial(n - k) / math.factorial(n + k))
            wave = 1.0 if m == 0 else math.sqrt(2) * (np.cos(k * azimuth) if m > 0 else np.sin(k * azimuth))
            found.append(scale * wave * legendre[n, k])
    return np.stack(found, 1)


def _quadrature(exact: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights that integrate polynomials of that degree over the sphere."""
    z, by = np.polynomial.legendre.leggauss(exact // 2 + 1)
    turn = 2 * math.pi * np.arange(exact + 1) / (exact + 1)
    side = np.sqrt(1 - z * z)
    points = np.stack([np.outer(side, np.cos(turn)), np.outer(side, np.sin(turn)), np.outer(z, np.ones_like(turn))], -1).reshape(-1, 3)
    return points, np.repeat(by * 2 * math.pi / (exact + 1), exact + 1)


@functools.cache
def _grid(degree: int) -> tuple[Tensor, Tensor]:
    points, by = _quadrature(3 * degree)
    values = harmonics(degree, points)
    return torch.from_numpy(np.ascontiguousarray(values.T)), torch.from_numpy(values * by[:, None])


@functools.cache
def _gaunt(degree: int) -> Tensor:
    onto, back = _grid(degree)
    table = torch.einsum("ap,bp,pc->abc", onto, onto, back)
    return torch.where(table.abs() < 1e-13, 0.0, table)


@functools.cache
def _coupled(degree: int) -> tuple[Tensor, ...]:
    """Places a, b, c, path and value of every real Clebsch-Gordan coefficient that is not 0."""
    found = []
    for number, (a, b, c) in enumerate(paths(degree)):
        table = real_clebsch_gordan(a, b, c)
        for i, j, k in zip(*np.nonzero(np.abs(table) > 1e-13), strict=True):
            found.append((a * a + i, b * b + j, c * c + k, number, table[i, j, k]))
    columns = list(zip(*found, strict=True))
    return *(torch.tensor(one, dtype=torch.int64) for one in columns[:4]), torch.tensor(columns[4], dtype=torch.float64)


def real_clebsch_gordan(a: int, b: int, c: int) -> np.ndarray:
    """In the basis of `harmonics`, (2a+1, 2b+1, 2c+1), with ∑ C² = 2c + 1."""
    table = np.zeros((2 * a + 1, 2 * b + 1, 2 * c + 1), dtype=complex)
    for i in range(-a, a + 1):
        for j in range(-b, b + 1):
            if abs(i + j) <= c:
                table[a + i, b + j, c + i + j] = _racah(a, b, c, i, j)
    found = np.einsum("ia,jb,kc,abc->ijk", _to_real(a), _to_real(b), _to_real(c).conj(), table)
    return np.ascontiguousarray(found.real if (a + b + c) % 2 == 0 else found.imag)


def _to_real(degree: int) -> np.ndarray:
    """Rows: real harmonics; columns: what the complex ones (with the sign (-1)^m) have in them."""
    found = np.zeros((2 * degree + 1, 2 * degree + 1), dtype=complex)
    found[degree, degree] = 1
    for m in range(1, degree + 1):
        sign = (-1) ** m
        found[degree + m, degree + m], found[degree + m, degree - m] = sign / math.sqrt(2), 1 / math.sqrt(2)
        found[degree - m, degree + m], found[degree - m, degree - m] = -1j * sign / math.sqrt(2), 1j / math.sqrt(2)
    return found


def _racah(a: int, b: int, c: int, i: int, j: int) -> float:
    """<a i b j | c i+j>."""
    f, m = math.factorial, i + j
    inner = sum(
        (-1) ** k / (f(k) * f(a + b - c - k) * f(a - i - k) * f(b + j - k) * f(c - b + i + k) * f(c - a - j + k))
        for k in range(max(0, b - c - i, a - c + j), min(a + b - c, a - i, b + j) + 1)
    )
    outer = (2 * c + 1) * f(a + b - c) * f(c + a - b) * f(c + b - a) / f(a + b + c + 1)
    return math.sqrt(outer * f(a + i) * f(a - i) * f(b + j) * f(b - j) * f(c + m) * f(c - m)) * inner
