"""Products of spherical tensors: rotated with their inputs, as known coefficients have them, and told apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sympy.physics.quantum.cg import CG
from torch import Tensor

from foretell.errors import UserError
from foretell.kernels.papers.tensor_product import (
    FORMS,
    equivalent,
    expressivity,
    fastest,
    harmonics,
    paths,
    real_clebsch_gordan,
    tensor_product,
    weights,
)  # fmt: skip

DEGREE = 3


def unit(count: int, seed: int = 0) -> np.ndarray:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def turned(degree: int, turn: np.ndarray) -> Tensor:
    """How features turn: what takes harmonics at points to those at turned points."""
    points = unit(200)
    return torch.from_numpy(np.linalg.lstsq(harmonics(degree, points), harmonics(degree, points @ turn.T), rcond=None)[0].T)


def drawn(form: str, degree: int = DEGREE, batch: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(2, batch, (degree + 1) ** 2, dtype=torch.float64)
    return x, y, torch.randn(batch, weights(degree, form), dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_products_turn_with_their_inputs(form: str) -> None:
    x, y, weight = drawn(form)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    by = turned(DEGREE, turn * np.sign(np.linalg.det(turn)))
    want = tensor_product(x, y, weight, DEGREE, form=form) @ by.T
    torch.testing.assert_close(tensor_product(x @ by.T, y @ by.T, weight, DEGREE, form=form), want, rtol=1e-9, atol=1e-9)
    assert want.abs().mean() > 0.1


@pytest.mark.parametrize("form", ["gaunt", "grid"])
def test_functions_on_the_sphere_are_multiplied(form: str) -> None:
    """Inputs of degree 1 and 2 have a product of degree 3 at most, which is exact."""
    x, y, _ = drawn(form)
    x[:, 4:], y[:, 9:] = 0, 0
    values = torch.from_numpy(harmonics(DEGREE, unit(20)))
    z = tensor_product(x, y, None, DEGREE, form=form)
    torch.testing.assert_close(z @ values.T, (x @ values.T) * (y @ values.T), rtol=1e-10, atol=1e-10)


def test_gaunt_and_grid_are_one_function() -> None:
    x, y, weight = drawn("gaunt")
    a, b = (tensor_product(x, y, weight, DEGREE, form=form) for form in ("gaunt", "grid"))
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("path", [(1, 1, 0), (1, 1, 1), (1, 2, 3), (2, 2, 1), (2, 3, 2)])
def test_coefficients_are_those_of_sympy(path: tuple[int, int, int]) -> None:
    """In the complex basis, from harmonics that numpy combines: up to a phase for all of a path."""
    a, b, c = path
    table = np.zeros([2 * one + 1 for one in path])
    for i, j in itertools.product(range(-a, a + 1), range(-b, b + 1)):
        if abs(i + j) <= c:
            table[a + i, b + j, c + i + j] = float(CG(a, i, b, j, c, i + j).doit())
    bases = [complex_in_real(one) for one in path]
    found = np.einsum("ia,jb,kc,ijk->abc", bases[0].conj(), bases[1].conj(), bases[2], real_clebsch_gordan(*path))
    phase = (found * table).sum() / (table * table).sum()
    np.testing.assert_allclose(found, phase * table, atol=1e-12)
    assert abs(phase) == pytest.approx(1)


def complex_in_real(degree: int) -> np.ndarray:
    """(real, complex): complex harmonics are found again from real ones at points, with the sign (-1)^m."""
    points = unit(100)
    azimuth = np.arctan2(points[:, 1], points[:, 0])
    real = harmonics(degree, points)[:, degree**2 :]
    waves = [real[:, degree]]
    for m in range(1, degree + 1):
        size = np.hypot(real[:, degree + m], real[:, degree - m])
        sign = np.sign(np.where(abs(np.cos(m * azimuth)) > 0.5, real[:, degree + m] / np.cos(m * azimuth), real[:, degree - m] / np.sin(m * azimuth)))
        whole = sign * size * np.exp(1j * m * azimuth) / np.sqrt(2)
        waves = [whole.conj(), *waves, (-1) ** m * whole]
    return np.linalg.lstsq(real.astype(complex), np.stack(waves, 1), rcond=None)[0]


def test_two_vectors_have_dot_and_cross_products() -> None:
    x, y = torch.randn(2, 3, dtype=torch.float64)
    order = [1, 2, 0]  # y z x, as m = -1 0 1
    cross = torch.linalg.cross(x, y)[order]
    table = torch.from_numpy(real_clebsch_gordan(1, 1, 1))
    found = torch.einsum("abc,a,b->c", table, x[order], y[order])
    torch.testing.assert_close(found.abs(), cross.abs() / 2**0.5)
    dot = torch.einsum("abc,a,b->c", torch.from_numpy(real_clebsch_gordan(1, 1, 0)), x[order], y[order])
    torch.testing.assert_close(dot.abs().squeeze(), (x @ y).abs() / 3**0.5)


def test_only_equals_are_swapped() -> None:
    assert equivalent("gaunt", "grid") and not equivalent("gaunt", "clebsch-gordan")
    taken = {"clebsch-gordan": 3.0, "gaunt": 2.0, "grid": 1.0}
    assert [fastest(form, taken) for form in FORMS] == ["clebsch-gordan", "grid", "grid"]
    assert fastest("clebsch-gordan", {"grid": 1.0}) == "clebsch-gordan"
    x, y, _ = drawn("gaunt")
    same = tensor_product(x, y, None, DEGREE, form="gaunt") - tensor_product(y, x, None, DEGREE, form="gaunt")
    other = tensor_product(x, y, None, DEGREE, form="clebsch-gordan") - tensor_product(y, x, None, DEGREE, form="clebsch-gordan")
    assert same.abs().max() < 1e-12 < 0.1 < other.abs().max()


def test_what_a_form_can_express() -> None:
    some = {form: expressivity(DEGREE, form) for form in FORMS}
    assert some["clebsch-gordan"].paths == len(paths(DEGREE)) == 34 and some["gaunt"].paths == 23
    assert some["clebsch-gordan"].antisymmetric and not some["grid"].antisymmetric


def test_gradients_and_bad_input() -> None:
    x, y, weight = (one[:2].requires_grad_() for one in drawn("clebsch-gordan", 1))
    assert torch.autograd.gradcheck(lambda *some: tensor_product(*some, 1, form="clebsch-gordan"), (x, y, weight))
    with pytest.raises(UserError, match="'cg' is not known"):
        tensor_product(x, y, None, 1, form="cg")
    with pytest.raises(UserError, match="for degree 2"):
        tensor_product(x, y, None, 2, form="grid")
    with pytest.raises(UserError, match="weights for 'gaunt'"):
        tensor_product(x, y, weight[..., :2], 1, form="gaunt")
