"""Weighted convolutions: ones change no bit, a density is a sum over shifted inputs, and a model gets its forwards back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foretell.errors import UserError
from foretell.kernels.papers.weighted_conv import density, weigh, weighted_conv

RIMS = {3: (0.7,), 5: (0.2, 0.9)}
SIZES = {nn.Conv1d: (3, 6, 9), nn.Conv2d: (3, 6, 9, 8), nn.Conv3d: (2, 6, 5, 6, 7)}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("how", [{}, {"padding": 1, "stride": 2, "groups": 2, "padding_mode": "circular"}])
def test_ones_leave_every_bit(kind: type[nn.Conv2d], how: dict[str, object]) -> None:
    torch.manual_seed(0)
    conv, x = kind(6, 4, 3, **how), torch.randn(*SIZES[kind])
    ones = density(conv.kernel_size, {3: (1.0,)})
    assert ones is not None and torch.equal(weighted_conv(conv, x, ones), conv(x))
    assert not torch.equal(weighted_conv(conv, x, density(conv.kernel_size, RIMS)), conv(x))


def test_a_density_weighs_shifted_inputs() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, (3, 5), bias=False).double()
    x = torch.randn(2, 3, 8, 9, dtype=torch.float64)
    rows, columns = (0.7, 1, 0.7), (0.2, 0.9, 1, 0.9, 0.2)
    want = sum(
        rows[i] * columns[j] * torch.einsum("bchw,oc->bohw", x[:, :, i : i + 6, j : j + 5], conv.weight[:, :, i, j])
        for i in range(3) for j in range(5)
    )  # fmt: skip
    torch.testing.assert_close(weighted_conv(conv, x, density((3, 5), RIMS)), want, rtol=1e-6, atol=1e-6)


def test_gradients_are_finite_differences() -> None:
    conv = nn.Conv1d(2, 2, 3).double()
    weights = density((3,), RIMS)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(Weighted(conv, weights), {"conv.weight": weight}, (x,))

    x = torch.randn(2, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, conv.weight.detach().clone().requires_grad_()))


class Weighted(nn.Module):
    def __init__(self, conv: nn.Conv1d, weights: torch.Tensor) -> None:
        super().__init__()
        self.conv, self.weights = conv, weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return weighted_conv(self.conv, x, self.weights)


def test_a_model_is_weighed_and_reverted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 5), nn.ConvTranspose2d(2, 2, 3))
    x, names = torch.randn(1, 3, 12, 12), list(model.state_dict())
    plain = model(x)
    weighed = weigh(model, RIMS)
    assert [path for path, _, _ in weighed.modules] == ["0", "3"] and [path for path, _ in weighed.left] == ["2"]
    assert list(model.state_dict()) == names and not torch.equal(model(x), plain)
    again = weigh(model, RIMS)
    assert not again.modules and "replaced already" in str(again)
    weighed.revert()
    assert torch.equal(model(x), plain)


def test_bad_densities() -> None:
    with pytest.raises(UserError, match="2 values for a kernel of side 3"):
        density((3,), {3: (1.0, 2.0)})
    with pytest.raises(UserError, match="side 4"):
        density((4,), {4: (1.0, 2.0)})
