"""AdamW with moments in codes on CUDA: weights, codes and scales are those of a CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from foretell.trace.moments import rows
from foretell.trace.moments.update import coded_adamw_

pytestmark = pytest.mark.gpu
SHAPES = [(64, 1024), (33, 300), (70, 71), (4, 5, 300), (16, 8, 3, 3)]
"""Rows of whole blocks; rows that end within one, with an odd number of codes too."""


def updated(device: str, state_format: str, dtype: torch.dtype, decoupled: bool) -> list[torch.Tensor]:
    """Four updates of every shape, the third of which is skipped."""
    draw = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=draw).to(dtype).to(device) for shape in SHAPES]
    kept = [
        [torch.zeros(held, dtype=getattr(torch, name), device=device) for held, name in rows.shapes(shape, state_format).values()]
        for shape in SHAPES
    ]
    for step in range(4):
        sizes = 10.0 ** (-8 * torch.rand(1, generator=draw))
        grads = [(torch.randn(shape, generator=draw).pow(3) * sizes).to(dtype).to(device) for shape in SHAPES]
        steps = [torch.tensor(step + 1.0, device=device)] * len(SHAPES)
        skip = torch.tensor(float(step == 2), device=device)
        lists = [list(one) for one in zip(*kept, strict=True)]
        coded_adamw_(weights, grads, *lists, steps, skip, 1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled)
    return [one.cpu() for one in (*weights, *(tensor for held in kept for tensor in held))]


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("state_format", ["int8", "int4"])
def test_cuda_has_the_bits_of_a_cpu(state_format: str, dtype: torch.dtype, decoupled: bool) -> None:
    known, found = (updated(device, state_format, dtype, decoupled) for device in ("cpu", "cuda"))
    assert all(torch.equal(a, b) for a, b in zip(known, found, strict=True))
