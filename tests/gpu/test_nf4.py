"""NF4 on CUDA: codes, scales and what they unpack to are those of the CPU, to the bit."""

from __future__ import annotations

import pytest
import torch

from foretell.trace.adapters.nf4 import nf4_dequantize, nf4_quantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("double", [False, True])
def test_cuda_packs_and_unpacks_as_the_cpu_does(double: bool) -> None:
    for shape in ((7, 9), (300, 77), (1024, 320)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
        here = nf4_quantize(weight, double)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            known = nf4_dequantize(*here, shape, dtype)
            assert torch.equal(nf4_dequantize(*(part.cuda() for part in here), shape, dtype).cpu(), known)
        packed, scales, _ = nf4_quantize(weight.cuda(), False)
        plain = nf4_quantize(weight, False)
        assert torch.equal(packed.cpu(), plain[0]) and torch.equal(scales.cpu(), plain[1])
