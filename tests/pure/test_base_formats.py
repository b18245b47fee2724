"""Formats of a frozen base with a byte a weight, and bf16: against formulas of their own, and through a layer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.trace.adapters.formats import byte_quantize, pack, unpack
from foretell.trace.adapters.layers import AdaptedLinear, PackedLinear
from foretell.trace.adapters.merge import merge_layer
from foretell.trace.adapters.put import adapt, packed_away
from foretell.trace.recipe import ADAPTED, BASE_FORMATS, Adapters

BYTES = ("int8", "float8")


def by_hand(weight: Tensor, kind: str) -> Tensor:
    """The nearest value of the format, 64 weights at a time, in fp64."""
    flat = F.pad(weight.double().reshape(-1), (0, -weight.numel() % 64)).view(-1, 64)
    largest = flat.abs().amax(1, keepdim=True)
    share = torch.where(largest > 0, flat / largest, 0.0)
    near = (share * 127).round() / 127 if kind == "int8" else (share * 448).float().to(torch.float8_e4m3fn).double() / 448
    return (near * largest).view(-1)[: weight.numel()].view(weight.shape).float()


@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (3, 64), (96, 200)])
def test_every_weight_becomes_the_nearest_of_its_row(kind: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    back = unpack(*pack(weight, kind), shape, torch.float32, kind)
    off = (back - by_hand(weight, kind)).abs()
    step = weight.abs().max() / (127 if kind == "int8" else 8)
    assert (off > 1e-6).float().mean() < 1e-3 and off.max() <= step  # a tie may fall to the other side in fp32
    assert torch.equal(unpack(*pack(weight, kind), shape, torch.bfloat16, kind), back.bfloat16())
    real, fake = pack(weight, kind), pack(weight.to("meta"), kind)
    assert [(part.shape, part.dtype) for part in real] == [(part.shape, part.dtype) for part in fake]


@pytest.mark.parametrize("kind", BYTES)
def test_sizes_zeros_and_what_is_packed_already(kind: str) -> None:
    codes, scales, _ = pack(torch.randn(64, 32), kind)
    assert 8 * (codes.nbytes + scales.nbytes) == 8.5 * 64 * 32 and codes.dtype == torch.uint8  # nothing that casts floats touches it
    assert not unpack(*pack(torch.zeros(2, 64), kind), (2, 64), torch.float32, kind).any()
    once = unpack(codes, scales, torch.empty(0), (64, 32), torch.float32, kind)
    again = unpack(*pack(once, kind), (64, 32), torch.float32, kind)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=1e-7)
    torch.library.opcheck(torch.ops.foretell.byte_quantize.default, (torch.randn(7, 9), kind))
    torch.library.opcheck(torch.ops.foretell.byte_dequantize.default, (*byte_quantize(torch.randn(7, 9), kind), (7, 9), torch.bfloat16, kind))


@pytest.mark.parametrize("kind", BASE_FORMATS)
def test_a_layer_over_it_is_the_layer_over_what_it_unpacks_to(kind: str) -> None:
    """Output, and the gradients of input and adapter, to rounding; and no more is saved than the packed weight."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 80)
    model = nn.Sequential(copy.deepcopy(plain), nn.Linear(80, 4))
    adapt(model, Adapters(rank=4), ((ADAPTED, kind),))
    layer = model[0]
    assert isinstance(layer, PackedLinear)
    nn.init.normal_(layer.lora_B, std=0.1)
    x = torch.randn(6, 48, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    a, b = (one.detach().clone().requires_grad_() for one in (layer.lora_A, layer.lora_B))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        found = layer(x)
    right = F.linear(twin, layer.weight + layer.lora_adapter.scale * b @ a, layer.bias)
    torch.testing.assert_close(found, right)
    seed = torch.randn_like(found)
    found.backward(seed)
    right.backward(seed)
    for one, other in ((x, twin), (layer.lora_A, a), (layer.lora_B, b)):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert not any(tensor.shape == plain.weight.shape and tensor.dtype == torch.float32 for tensor in saved)
    apart = (layer.weight - plain.weight).norm() / plain.weight.norm()
    assert apart < {"bf16": 2e-3, "int8": 8e-3, "float8": 0.03}.get(kind, 0.12)
    assert sum(p.numel() for p in model.parameters()) + packed_away(model) == sum(p.numel() for p in (plain.weight, plain.bias, a, b)) + 81 * 4


@pytest.mark.parametrize("kind", ["bf16", "int8", "float8"])
def test_merged_into_each_base(kind: str) -> None:
    """What was trained is what the weights unpack to; packed again loses what the format rounds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    original = model[0].weight.detach().clone()
    adapt(model, Adapters(rank=2), ((ADAPTED, kind),))
    layer = model[0]
    assert isinstance(layer, AdaptedLinear)
    nn.init.normal_(layer.lora_B, std=0.02)
    trained = layer.weight.float() + layer.lora_adapter.scale * layer.lora_B @ layer.lora_A
    merged, told = merge_layer("0", layer, original, "dequantised", torch.float32)
    assert torch.equal(merged, trained) and told.error == 0
    again, lost = merge_layer("0", layer, original, "requantised", torch.float32)
    assert lost.error > 0 and torch.equal(again, unpack(*pack(trained, kind), (64, 64), torch.float32, kind))
    other, off = merge_layer("0", layer, original, "original", torch.float32)
    assert off.error == pytest.approx(float(((other - trained).norm() / (trained - layer.weight).norm()).detach()), rel=1e-3)
