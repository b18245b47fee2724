"""A mixture of experts by groups against a loop over experts, in values, gradients and kept bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from foretell.kernels.kernel import interpreted
from foretell.kernels.moe import draw, moe, reference, saved_bytes, shape_of

NAMES = ("tokens", "choices", "width", "inner", "experts")


def drawn(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    found = list(draw(dict(zip(NAMES, sizes, strict=True)), dtype, torch.device("cpu")))
    return [one.requires_grad_() if one.is_floating_point() else one for one in found]


def gradients(by: object, given: list[Tensor]) -> list[Tensor]:
    assert callable(by)
    out = by(*given)
    up = torch.linspace(-1, 1, max(1, out.numel()), dtype=torch.float64).to(out.dtype)[: out.numel()].view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, [one for one in given if one.requires_grad], up)]


@pytest.mark.parametrize("sizes", [(12, 2, 6, 5, 4), (9, 3, 8, 4, 5), (3, 1, 4, 3, 7), (1, 1, 2, 2, 1), (0, 2, 4, 4, 3)])
def test_values_and_gradients_are_those_of_a_loop(sizes: tuple[int, ...]) -> None:
    given = drawn(*sizes, dtype=torch.float32 if interpreted() else torch.float64)
    tolerance = {"rtol": 2e-5, "atol": 2e-6} if interpreted() else {"rtol": 1e-10, "atol": 1e-12}
    for mine, theirs in zip(gradients(moe, given), gradients(reference, given), strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.skipif(interpreted(), reason="float64")
def test_gradients_are_slopes() -> None:
    x, index, share, w_in, w_out = drawn(5, 2, 3, 2, 3)
    assert torch.autograd.gradcheck(lambda *some: moe(some[0], index, *some[1:]), (x, share, w_in, w_out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_errors_are_at_most_twice_the_loops(dtype: torch.dtype) -> None:
    if interpreted() and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates bfloat16")
    given = drawn(16, 2, 32, 24, 4, dtype=dtype)
    wide = [one.detach().double().requires_grad_() if one.requires_grad else one for one in given]
    for mine, theirs, true in zip(gradients(moe, given), gradients(reference, given), gradients(reference, wide), strict=True):
        gap, own = (float((one.double() - true).norm() / true.norm()) for one in (mine, theirs))
        assert gap <= 2 * own


def test_all_choose_one_expert_and_others_have_no_gradient() -> None:
    given = drawn(6, 1, 4, 3, 3, dtype=torch.float32)
    given[1] = torch.full_like(given[1], 2)
    for mine, theirs in zip(gradients(moe, given), gradients(reference, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
    assert not bool(gradients(moe, given)[3][:2].any())


def test_kept_are_neither_sorted_rows_nor_results_of_experts() -> None:
    """x and shares are inputs; weights are parameters; the rest is the formula."""
    given = drawn(64, 4, 24, 16, 8, dtype=torch.bfloat16)
    kept: dict[int, Tensor] = {}

    def pack(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = one
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = moe(*given)
    mine = {one.untyped_storage().data_ptr() for one in given}
    assert sum(one.nbytes for key, one in kept.items() if key not in mine) == saved_bytes(shape_of(*given), 2)
    assert saved_bytes(shape_of(*given), 2) == 4 * 64 * 4 * 16 + 4 * 64 * 4 + 4 * 8
    assert all(one.data_ptr() in kept for one in (given[0], given[2])) and out.data_ptr() not in kept


@pytest.mark.parametrize("frozen", [(0,), (2,), (3, 4), (0, 3)])
def test_gradients_nobody_asked_for(frozen: tuple[int, ...]) -> None:
    given = drawn(7, 2, 4, 3, 3, dtype=torch.float32)
    for place in frozen:
        given[place].requires_grad_(False)
    for mine, theirs in itertools.zip_longest(gradients(moe, given), gradients(reference, given)):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_autocast() -> None:
    if interpreted():
        pytest.skip("bfloat16")
    given = drawn(8, 2, 16, 8, 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(*given)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), reference(*given), rtol=0.1, atol=0.05)
    assert all(one.dtype == torch.float32 for one in torch.autograd.grad(out.sum(), [one for one in given if one.requires_grad]))


@pytest.mark.skipif(interpreted(), reason="the same ops, many times slower")
def test_opcheck_and_compile() -> None:
    given = drawn(6, 2, 4, 3, 3, dtype=torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # compiled below, with sizes that change nothing
    torch.library.opcheck(torch.ops.foretell_kernels.moe.default, tuple(given), test_utils=checks)
    h, place = torch.randn(5, 8), torch.tensor([[0, 3], [1, 4]], dtype=torch.int32)
    torch.library.opcheck(torch.ops.foretell_kernels.moe_activate_backward.default, (h, torch.randn(5, 4), torch.rand(5)))
    torch.library.opcheck(torch.ops.foretell_kernels.moe_combine.default, (h, place, torch.rand(2, 2)))
    torch.library.opcheck(torch.ops.foretell_kernels.moe_activate.default, (h,))
    compiled = torch.compile(lambda *some: moe(*some) * 2, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(gradients(compiled, given), gradients(lambda *some: reference(*some) * 2, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)
