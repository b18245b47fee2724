"""Kernels written from a chain's description, and their launch over a batch of tensors.

    table    of each tensor: address of input and of output, elements, sizes, strides         (int64)
    tiles    of each program: which tensor, and its first element
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from foretell.kernels.papers.pointwise import CASTS, STEPS, Along, Chain

BLOCK = 1024
FIELDS = 11
TYPES = {
    torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.uint8: "tl.uint8",
}  # fmt: skip
NUMBER, FULL, ALONG = "number", "full", "along"

HEAD = '''"""Written from a chain of pointwise steps."""
import triton
import triton.language as tl


@triton.jit
def kernel(table, tiles, {arguments}BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    which, first = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    row = table + which * {fields}
    source, target = tl.load(row).to(tl.pointer_type({source})), tl.load(row + 1).to(tl.pointer_type({target}))
    at = first + tl.arange(0, BLOCK)
    there = at < tl.load(row + 2)
    size1, size2, size3 = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    place3 = at % size3
    place2 = at // size3 % size2
    place1 = at // (size3 * size2) % size1
    place0 = at // (size3 * size2 * size1)
    where = place0 * tl.load(row + 7) + place1 * tl.load(row + 8) + place2 * tl.load(row + 9) + place3 * tl.load(row + 10)
    x = tl.load(source + where, mask=there, other=0.0).to(tl.float32)
'''


def source_of(steps: Chain, given: torch.dtype, kinds: Mapping[str, tuple[str, int]]) -> str:
    """The kernel's text. `kinds` says of each operand whether it is a number, of the input's shape, or along one of four dimensions."""
    arguments = "".join(f"{name}_at, " for name in steps.names)
    lines = [HEAD.format(arguments=arguments, fields=FIELDS, source=TYPES[given], target=TYPES[steps.dtype(given)])]
    for name, (kind, dim) in kinds.items():
        index = {NUMBER: "", FULL: " + at", ALONG: f" + place{dim}"}[kind]
        mask = "" if kind == NUMBER else ", mask=there, other=1.0"
        lines.append(f"    {name}_value = tl.load({name}_at{index}{mask}).to(tl.float32)\n")
    for name, some in steps.steps:
        if name in CASTS:
            if CASTS[name] in (torch.float16, torch.bfloat16):
                lines.append(f"    x = x.to({TYPES[CASTS[name]]}).to(tl.float32)\n")
            elif CASTS[name] == torch.uint8:
                lines.append("    x = x.to(tl.int32).to(tl.uint8).to(tl.float32)\n")
            continue
        values = [f"{one}_value" if isinstance(one, str) else repr(one) for one in some]
        lines.append("    x = " + STEPS[name][2].format(x="x", **dict(zip("ab", values, strict=False))) + "\n")
    lines.append(f"    tl.store(target + at, x.to({TYPES[steps.dtype(given)]}), mask=there)\n")
    return "".join(lines)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="foretell-chains-")


@cache
def kernel_of(text: str) -> Any:
    """Imported from a file, which is where Triton reads it."""
    name = "foretell_chain_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    path = Path(_folder().name) / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


def run(steps: Chain, batch: list[Tensor], operands: Mapping[str, Tensor | Along]) -> list[Tensor]:
    """One launch; formats that the kernel has no name for take the reference."""
    if batch[0].dtype not in TYPES or any(one.dtype == torch.float64 for one in _values(operands)):
        return [steps.reference(one, **operands) for one in batch]
    target = steps.dtype(batch[0].dtype)
    outs = [torch.empty(one.shape, dtype=target, device=one.device) for one in batch]
    if not sum(one.numel() for one in batch):
        return outs
    kinds, pointers = {}, []
    for name in steps.names:
        one = operands[name]
        if isinstance(one, Along):
            ranks = {(one.dim % x.dim()) + 4 - x.dim() for x in batch}
            if len(ranks) > 1:
                return [steps.reference(x, **operands) for x in batch]
            kinds[name] = (ALONG, ranks.pop())
            pointers.append(one.values.contiguous())
        else:
            kinds[name] = (NUMBER if one.numel() == 1 else FULL, 0)
            pointers.append(one.to(batch[0].device).contiguous())
    kernel = kernel_of(source_of(steps, batch[0].dtype, kinds))
    table, tiles = _tables(batch, outs)
    kernel[(tiles.shape[0],)](table, tiles, *pointers, BLOCK=BLOCK, num_warps=4)
    return outs


def _values(operands: Mapping[str, Tensor | Along]) -> list[Tensor]:
    return [one.values if isinstance(one, Along) else one for one in operands.values()]


def _tables(batch: list[Tensor], outs: list[Tensor]) -> tuple[Tensor, Tensor]:
    rows, tiles = [], []
    for number, (one, out) in enumerate(zip(batch, outs, strict=True)):
        missing = 4 - one.dim()
        rows.append((one.data_ptr(), out.data_ptr(), one.numel(), *(1,) * missing, *one.shape, *(0,) * missing, *one.stride()))
        tiles.append(torch.stack([torch.full((triton.cdiv(one.numel(), BLOCK),), number), torch.arange(0, one.numel(), BLOCK)], 1))
    device = batch[0].device
    packed = torch.cat([torch.tensor(rows, dtype=torch.int64).flatten(), torch.cat(tiles).flatten()])
    packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed
    return packed[: len(rows) * FIELDS], packed[len(rows) * FIELDS :].view(-1, 2)
