"""Kernels of papers in Triton's interpreter, against their references in float64. Only where TRITON_INTERPRET=1 and Triton is there."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.kernels.kernel import interpreted
from foretell.kernels.papers import hash_grid, recurrent, softmax
from foretell.kernels.papers.pointwise import STEPS, Along, chain

pytestmark = pytest.mark.skipif(
    not interpreted() or importlib.util.find_spec("triton") is None, reason="needs Triton, and TRITON_INTERPRET=1 from the beginning"
)
FORMATS = [(torch.float32, 1e-5), (torch.float16, 2e-2)]


def off(found: Tensor, want: Tensor) -> float:
    return float((found.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


@pytest.mark.parametrize("cell", recurrent.CELLS)
@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
@pytest.mark.parametrize("size", [16, 20])
def test_recurrent(cell: str, dtype: torch.dtype, bar: float, size: int) -> None:
    """A batch beyond one program's rows, a head's size that is no power of two, every gradient."""
    torch.manual_seed(0)
    gates, batch, time, heads = recurrent.CELLS[cell], 19, 4, 2
    shapes = ((batch, time, gates, heads, size), (gates, heads, size, size), (gates, heads, size))
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    state = torch.randn(recurrent.STATES[cell], batch, heads, size)
    if cell == "slstm":
        state[2] = 1 + state[2].abs()
    leaves = [one.requires_grad_() for one in (x, 0.3 * weight, bias, state)]
    leaves[1] = leaves[1].detach().requires_grad_()
    ups = [torch.randn(batch, time, heads, size), torch.randn_like(state)]

    def run(given: list[Tensor]) -> list[Tensor]:
        outs = recurrent.recurrent(*given, cell=cell)
        total = sum((one * up.to(one.dtype)).sum() for one, up in zip(outs, ups, strict=True))
        return [*outs, *torch.autograd.grad(total, given)]

    found = run(leaves)
    want = run([one.detach().double().requires_grad_() for one in leaves])  # float64 takes the loop
    assert [off(one, other) < bar for one, other in zip(found, want, strict=True)] == [True] * 6


@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
def test_softmax(dtype: torch.dtype, bar: float) -> None:
    torch.manual_seed(0)
    for width, size in ((1, 1.0), (100, 1e4), (5000, 10.0)):
        x = (size * torch.randn(3, width)).to(dtype)
        x[0, -1] = -torch.inf if width > 1 else 0.0
        assert off(softmax.two_pass_softmax(x), x.double().softmax(-1)) < bar


@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
def test_hash_grid(dtype: torch.dtype, bar: float) -> None:
    torch.manual_seed(0)
    for entries in (64, 61):
        x = 2 * torch.rand(70, 3) - 1
        x[:2] = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 1.2]])
        sides = torch.tensor([4, 7, 12])
        table, w1, b1, w2, b2 = (torch.randn(shape).to(dtype) for shape in ((3 * entries, 2), (20, 6), (20,), (5, 20), (5,)))
        given = [one.requires_grad_() for one in (table, w1, b1, w2, b2)]
        up = torch.randn(70, 5)

        def run(x: Tensor, given: list[Tensor], sides: Tensor = sides, entries: int = entries, up: Tensor = up) -> list[Tensor]:
            out = torch.ops.foretell_kernels.hash_mlp(x, given[0], sides, entries, *given[1:])
            features = hash_grid.encode(x, given[0], sides, entries)
            return [out, features, *torch.autograd.grad((out * up.to(out.dtype)).sum(), given)]

        found = run(x.to(dtype), given)
        want = run(x.to(dtype).double(), [one.detach().double().requires_grad_() for one in given])
        assert [off(one, other) < bar for one, other in zip(found, want, strict=True)] == [True] * 7


@pytest.mark.parametrize("name", STEPS)
def test_every_step(name: str) -> None:
    x = torch.rand(50) + 0.1
    steps = chain((name, *(0.3, 0.7)[: STEPS[name][0]]))
    torch.testing.assert_close(steps(x), steps.reference(x.double()).float(), rtol=1e-5, atol=1e-6)


def test_a_batch_in_one_launch() -> None:
    torch.manual_seed(0)
    steps = chain("float", ("sub", "mean"), ("div", "std"), ("mul", "gain"), ("clamp", -1.5, 1.5), "half")
    images = [torch.randint(0, 256, (3, 30 + k, 40), dtype=torch.uint8) for k in range(3)]
    crops: list[Any] = [images[0][:, 2:22, 5:17], images[1].transpose(1, 2)[:, 1:30], images[2][:, ::2], images[0][:, :0]]
    given = {"mean": Along(0, torch.tensor([100.0, 120, 140])), "std": Along(-3, torch.tensor([50.0, 60, 70])), "gain": torch.tensor(0.7)}
    for found, crop in zip(steps(crops, **given), crops, strict=True):
        want = steps.reference(crop, **given)
        assert found.dtype == torch.float16 and found.shape == want.shape
        torch.testing.assert_close(found.float(), want.float(), rtol=1e-3, atol=1e-3)


def test_gradients_of_a_chain() -> None:
    x, a = (torch.rand(4, 3, requires_grad=True) for _ in range(2))
    b = torch.rand(3, requires_grad=True)
    steps = chain(("mul", "a"), "tanh", ("add", "b"), ("max", 0.4))
    leaves = (x, a, b)
    found = torch.autograd.grad(steps(x, a=a, b=Along(1, b)).square().sum(), leaves)
    want = torch.autograd.grad(torch.maximum(torch.tanh(x * a) + b, torch.tensor(0.4)).square().sum(), leaves)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)
