"""Hashed tables against the zoo's field and a loop over corners, their gradients, and the swap into a model."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.papers.hash_grid import amdahl, encode, fuse, hash_mlp, plain_encode
from foretell.zoo.scenes.pvd import Field, HashField


CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def drawn(entries: int = 64, levels: int = 3) -> tuple[Tensor, Tensor, Tensor, int]:
    torch.manual_seed(0)
    x = 2 * torch.rand(20, 3, dtype=torch.float64) - 1
    return x, torch.randn(levels * entries, 2, dtype=torch.float64), torch.tensor([4, 7, 12][:levels]), entries


@pytest.mark.parametrize("entries", [64, 61])
def test_features_are_found_corner_by_corner(entries: int) -> None:
    x, table, sides, _ = drawn(entries)
    found = encode(x, table, sides, entries)
    for number, point in enumerate(x.tolist()):
        for level, side in enumerate(sides.tolist()):
            at = [(0.5 + 0.5 * one) * side for one in point]
            want = torch.zeros(2, dtype=torch.float64)
            for corner in itertools.product((0, 1), repeat=3):
                place = [math.floor(one) + bit for one, bit in zip(at, corner, strict=True)]
                weight = math.prod(one % 1 if bit else 1 - one % 1 for one, bit in zip(at, corner, strict=True))
                row = (place[0] ^ place[1] * 2_654_435_761 ^ place[2] * 805_459_861) % entries
                want += weight * table[level * entries + row]
            torch.testing.assert_close(found[number, 2 * level : 2 * level + 2], want)


def test_it_is_the_field_of_the_zoo() -> None:
    torch.manual_seed(0)
    field = HashField(5, 4, 128, 64).double()
    x = (2 * torch.rand(30, 3, dtype=torch.float64) - 1).requires_grad_()
    want, sides = field(x), torch.tensor(field.sides)
    torch.testing.assert_close(hash_mlp(x, field.table, sides, field.entries, (field.out[0], field.out[2])), want)
    fixed = x.detach()
    up = torch.randn_like(want)
    got = torch.autograd.grad(hash_mlp(fixed, field.table, sides, field.entries, (field.out[0], field.out[2])), list(field.parameters()), up)
    for one, other in zip(got, torch.autograd.grad(field(fixed), list(field.parameters()), up), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_finite_differences() -> None:
    x, table, sides, entries = drawn(8, 2)
    table.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: encode(x, t, sides, entries), (table,))
    torch.testing.assert_close(encode(x.clone().requires_grad_(), table, sides, entries), plain_encode(x, table, sides, entries))


def test_the_op_is_a_torch_op() -> None:
    x, table, sides, entries = drawn()
    table.requires_grad_()
    w = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((8, 6), (8,), (4, 8), (4,))]
    torch.library.opcheck(torch.ops.foretell_kernels.hash_mlp.default, (x, table, sides, entries, *w), test_utils=CHECKS)


def test_a_model_is_fused_and_reverted() -> None:
    class Other(HashField):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Field("hash", 6, {"levels": 3, "entries": 64, "finest": 32}), "b": Other(5, 3, 64, 32)})
    x, d = 2 * torch.rand(10, 3) - 1, torch.randn(10, 3)
    want = model["a"](x, d)
    fused = fuse(model)
    assert [path for path, _, _ in fused.modules] == ["a.first"] and fused.left == (("b", "it computes something else"),)
    torch.testing.assert_close(model["a"](x, d), want, rtol=1e-4, atol=1e-6)
    assert fuse(model).left[0][1] == "its forward was replaced already"
    fused.revert()
    assert all(torch.equal(one, other) for one, other in zip(model["a"](x, d), want, strict=True))


def test_amdahl() -> None:
    """Encoding and MLP at 72 % of the time, ten times as fast."""
    assert amdahl(0.72, 10) == pytest.approx(1 / (0.28 + 0.072)) and amdahl(0.72, math.inf) == pytest.approx(1 / 0.28)
    assert amdahl(0, 10) == 1 and amdahl(1, 10) == 10
    with pytest.raises(UserError):
        amdahl(1.2, 2)
    with pytest.raises(UserError):
        amdahl(0.5, 0)


def test_bad_input() -> None:
    x, table, sides, entries = drawn()
    with pytest.raises(UserError, match="levels of 64"):
        encode(x[:, :2], table, sides, entries)
    with pytest.raises(UserError, match="no bias"):
        hash_mlp(x, table, sides, entries, (nn.Linear(6, 4), nn.Linear(4, 4, bias=False)))
