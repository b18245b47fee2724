"""Products of compiled adapters on units for bf16, on a CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from foretell.trace.adapters import functions
from foretell.trace.adapters.put import adapt
from foretell.trace.recipe import Adapters

pytestmark = pytest.mark.gpu


def test_a_compiler_leaves_no_digit_out() -> None:
    """Casts to bf16 and back would be left out; masks are not."""
    x = torch.randn(256, 32, device="cuda")
    parts = torch.compile(functions.parts_of)(x)
    assert torch.equal(parts.float().view(-1, 3, 32).sum(1), x)


def test_a_compiled_adapter_is_as_exact_as_in_fp32() -> None:
    """Gradients of A and B beside those of fp64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024, bias=False), nn.Linear(1024, 256, bias=False)).cuda().bfloat16()
    adapt(model, Adapters(rank=8, targets=("0", "1")))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.normal_(std=0.02)
    x = torch.randn(4, 300, 512, device="cuda").bfloat16()
    found = {}
    for way in ("eager", "compiled"):
        mine = copy.deepcopy(model)
        run = torch.compile(mine) if way == "compiled" else mine
        run(x).float().square().mean().backward()
        found[way] = {name: one.grad.double() for name, one in mine.named_parameters() if one.grad is not None}
    assert found["eager"].keys() == found["compiled"].keys() and len(found["eager"]) == 4
    for name, one in found["eager"].items():
        off = float((found["compiled"][name] - one).norm() / one.norm())
        assert off < 2e-3, name  # what goes through bf16 between layers differs in its last bits
