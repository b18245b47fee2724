"""TF32: products of fp32 matrices whose inputs the tensor cores round to ten bits, where the user's code asks for it.

    torch.set_float32_matmul_precision("high"), torch.backends.cuda.matmul.allow_tf32 = True, Trainer(tf32=True), ...

All of these set one switch of PyTorch, which is read here. Convolutions have another one, and it is on by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PRODUCTS = {
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default,
    torch.ops.aten._addmm_activation.default, torch.ops.aten.addbmm.default,
}  # fmt: skip


def rounds(func: Any, args: Any) -> bool:
    """Whether this op is a product that would round its inputs."""
    return func in _PRODUCTS and args[0].dtype is torch.float32 and str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


@contextmanager
def products_in_tf32(on: bool) -> Iterator[None]:
    """Ask for it until the end of the block, if at all."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if on:
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        if on:
            matmul.fp32_precision = before
