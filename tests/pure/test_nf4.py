"""NF4 held to bitsandbytes, to the bit: against codes that were recorded, and against the package where it is installed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.trace.adapters.nf4 import nf4_dequantize, nf4_quantize, nf4_scales

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "nf4_codes.json").read_text())["tensors"]


def made(one: dict[str, Any]) -> Tensor:
    """The recorded weights: whole numbers over a power of two, squared, so that every machine makes the same."""
    draws = torch.Generator().manual_seed(one["seed"])
    weight = torch.randint(-(2**20), 2**20, one["shape"], generator=draws).double() / 2**23
    return (weight * weight.abs() * 8).float().to(getattr(torch, one["dtype"]))


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: f"{one['shape']} {one['dtype']}")
def test_codes_are_those_recorded(one: dict[str, Any]) -> None:
    weight = made(one)
    packed, scales, nested = nf4_quantize(weight, False)
    codes = packed.view(-1)[: (weight.numel() + 1) // 2]
    assert codes[:32].tolist() == one["first_codes"]
    assert digest(codes) == one["codes"] and digest(nf4_scales(scales, nested)) == one["absmax"]
    assert digest(nf4_dequantize(packed, scales, nested, weight.shape, weight.dtype)) == one["dequantised"]
    again, short, nested = nf4_quantize(weight, True)
    assert torch.equal(again, packed) and short.view(-1).tolist() == one["scale_codes"]
    assert float(nested[-1]) == pytest.approx(one["mean"], abs=2e-9)


@pytest.mark.parametrize("shape", [(64, 64), (5, 13), (1, 1), (300, 77), (1024, 320)])
def test_codes_scales_and_weights_are_those_of_the_package(shape: tuple[int, int]) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional")
    # The package's own formulas, which its CUDA kernels follow. Its CPU kernels look scales up in a coarser table, and begin a
    # block anew with every row where these are no multiples of 64.
    shown, ops = torch._C.DispatchKey.CompositeExplicitAutograd, torch.ops.bitsandbytes
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 0.02
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = weight.to(dtype)
        packed, scales, nested = nf4_quantize(given, False)
        codes, state = theirs.quantize_4bit(given, blocksize=64, quant_type="nf4")
        assert torch.equal(packed.view(-1)[: codes.numel()], codes.view(-1))
        assert torch.equal(nf4_scales(scales, nested), state.absmax)
        unpacked = ops.dequantize_4bit.default._op_dk(shown, codes, state.absmax, 64, "nf4", shape, dtype)
        assert torch.equal(nf4_dequantize(packed, scales, nested, shape, dtype), unpacked)
        mean = state.absmax.mean()
        short, largest = ops.quantize_blockwise.default._op_dk(shown, state.absmax - mean, theirs.create_dynamic_map(), 256)
        _, found, nested = nf4_quantize(given, True)
        assert torch.equal(found.view(-1), short) and torch.equal(nested, torch.cat((largest, mean.view(1))))
        back = theirs.dequantize_blockwise(short, absmax=largest, code=theirs.create_dynamic_map(), blocksize=256) + mean
        assert torch.equal(nf4_scales(found, nested), back)


def test_pieces_are_what_one_piece_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are packed and unpacked some rows at a time."""
    from foretell.trace.adapters import nf4

    weight = torch.randn(37, 50, generator=torch.Generator().manual_seed(1))
    for double in (False, True):
        at_once = nf4_quantize(weight, double)
        monkeypatch.setattr(nf4, "AT_ONCE", 4)
        by_pieces = nf4_quantize(weight, double)
        assert all(torch.equal(one, other) for one, other in zip(at_once, by_pieces, strict=True))
        back = nf4_dequantize(*by_pieces, weight.shape, torch.float32)
        monkeypatch.undo()
        assert torch.equal(back, nf4_dequantize(*at_once, weight.shape, torch.float32))


def test_scales_that_begin_at_any_byte_are_read() -> None:
    weight = torch.randn(64, 64)
    _, scales, nested = nf4_quantize(weight, False)
    held = torch.empty(scales.numel() + 1, dtype=torch.uint8)
    held[1:] = scales.view(-1)
    moved = held[1:].view(scales.shape)
    assert torch.equal(nf4_scales(moved, nested), nf4_scales(scales, nested))
