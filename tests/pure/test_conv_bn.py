"""Folded BatchNorm against evaluation mode: outputs, every gradient, what is kept; and which pairs are left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.kernels.papers.conv_bn import tune
from foretell.zoo.vision import resnet


class Mixed(nn.Module):
    """A pair, one without bias or affine, one whose middle is read twice, one that is called twice, one behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=2, bias=False), nn.BatchNorm2d(4, affine=False)
        self.conv3, self.bn3 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.conv4, self.bn4 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.linear, self.bn5 = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.conv6, self.bn6 = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))
        middle = self.conv3(x)
        x = self.bn3(middle) + middle
        x = self.bn4(self.conv4(self.bn4(self.conv4(x))))
        return self.bn5(self.linear(self.bn6(self.conv6(x)).mean((2, 3))))


def drawn(model: nn.Module) -> nn.Module:
    """Statistics and scales as a trained model has them."""
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if one.is_floating_point():
            one.data = torch.rand_like(one) + 0.5 if "var" in name else one.data + 0.1 * torch.randn_like(one)
    return model


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    kept: dict[int, int] = {}
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def pack(one: Tensor) -> Tensor:
        if one.untyped_storage().data_ptr() not in parameters:
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        out = model(x)
    assert out.requires_grad
    return sum(kept.values())


def same_as_evaluation(model: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(model)
    tuned = tune(model)
    x, y = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = model(x), other(y)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    torch.manual_seed(1)
    up = torch.randn_like(want)
    for out in (got, want):
        out.backward(up)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-11)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-10, msg=lambda said, name=name: f"{name}: {said}")
    tuned.revert()
    assert torch.equal(model(x), other(x))


def test_eligible_pairs_and_no_others() -> None:
    torch.manual_seed(0)
    model = drawn(Mixed()).double().eval()
    tuned = tune(model)
    assert tuned.pairs == (("conv1", "bn1"), ("conv2", "bn2"))
    reasons = dict(tuned.left)
    assert set(reasons) == {"bn3", "bn4", "bn5", "bn6"} and "read by others" in reasons["bn3"] and "more than once" in reasons["bn4"]
    assert "no convolution" in reasons["bn5"] and "no running statistics" in reasons["bn6"]
    tuned.revert()
    same_as_evaluation(model, torch.randn(2, 3, 9, 9, dtype=torch.float64))


def test_training_mode_is_left_alone() -> None:
    model = drawn(Mixed()).double()
    other = copy.deepcopy(model)
    tune(model)
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    assert torch.equal(model(x), other(x))
    assert torch.equal(model.bn1.running_mean, other.bn1.running_mean)


def test_a_resnet_keeps_less() -> None:
    """One tensor behind each convolution and not two; weights, scaled anew, are kept as well."""
    torch.manual_seed(0)
    model = drawn(resnet.ResNet(depths=(1, 1, 1, 1), width=8, classes=10)).eval()
    x = torch.randn(4, 3, 128, 128)
    before = kept_bytes(model, x)
    tuned = tune(model)
    assert len(tuned.pairs) == 17 and not tuned.left
    assert kept_bytes(model, x) < 0.6 * before
    tuned.revert()
    same_as_evaluation(model.double(), x[:2, :, :32, :32].double())


def test_a_copy_has_its_own_statistics() -> None:
    torch.manual_seed(0)
    model = drawn(Mixed()).eval()
    tune(model)
    x = torch.randn(2, 3, 9, 9)
    other = copy.deepcopy(model)
    want = model(x)
    model.bn1.running_mean += 1.0
    assert torch.equal(other(x), want) and not torch.equal(model(x), want)
    assert list(other.state_dict()) == list(Mixed().state_dict())


def test_what_cannot_be_traced() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(UserError, match="cannot be traced"):
        tune(Branch())
