"""Candidates in plain torch: every configuration computes what its module does, forward and backward."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from foretell.tune.search.rowwise.torch_text import TorchRows
from foretell.tune.verify import scan
from tests.pure import row_tasks as tasks

ROUNDING = 20 * 2.0**-23
"""Sums of 24 numbers in another order, and their gradients."""


@pytest.mark.parametrize("name", tasks.MODULES)
def test_values_and_gradients_are_eagers(name: str, tmp_path: Path) -> None:
    module, inputs = tasks.drawn(name)
    template = TorchRows(tasks.program(module, inputs), tasks.STUB)
    texts = set()
    for chunk, reuse, dot in itertools.product((0, 16), (False, True), (False, True)):
        text = template.text({"chunk_kib": chunk, "reuse": reuse, "dot": dot})
        texts.add(text)
        assert max(tasks.gaps(module, tasks.made(text, module, tmp_path), inputs)) < ROUNDING, (name, chunk, reuse, dot)
        assert scan.findings(text) == []
    assert len(texts) >= 4


def test_chunks_end_where_rows_do(tmp_path: Path) -> None:
    """15 rows in chunks of 170, 7 and 1: the last one is short."""
    module, inputs = tasks.drawn("rms")
    text = TorchRows(tasks.program(module, inputs), tasks.STUB).text({"chunk_kib": 16, "reuse": True, "dot": True})
    for step in ("7", "1"):
        other = text.replace("max(1, 4096 // max(1, width))", step)
        assert other != text
        assert max(tasks.gaps(module, tasks.made(other, module, tmp_path), inputs)) < ROUNDING


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_wide(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nearer to fp32 than eager's own half precision."""
    module, inputs = tasks.drawn("rms")
    other = tasks.made(TorchRows(tasks.program(module, inputs), tasks.STUB).text({"chunk_kib": 0, "reuse": True, "dot": False}), module, tmp_path)
    small = [one.detach().to(dtype) for one in inputs]
    module, other = module.to(dtype), other.to(dtype)
    truth = tasks.Rms()
    truth.load_state_dict(module.state_dict())
    wide = truth(*(one.float() for one in small)).double()
    mine, eager = ((one(*small).double() - wide).square().mean() for one in (other, module))
    assert other(*small).dtype == dtype and mine <= eager


def test_other_sizes_are_done_or_declined(tmp_path: Path) -> None:
    module, inputs = tasks.drawn("softmax")
    program = tasks.program(module, inputs)
    config = {"chunk_kib": 16, "reuse": True, "dot": False}
    other = tasks.made(TorchRows(program, tasks.STUB).text(config), module, tmp_path)
    for shape in ((7,), (1, 1), (0, 5), (2, 3, 4, 9)):
        x = torch.randn(shape, requires_grad=True)
        assert torch.allclose(other(x), module(x), atol=1e-6)
    with pytest.raises(NotImplementedError):
        other(torch.randn(3, 4, dtype=torch.float64))
    guarded = tasks.made(TorchRows(program, tasks.STUB, guarded=True).text(config), module, tmp_path)
    with pytest.raises(NotImplementedError):
        guarded(torch.randn(3, 4))
    assert guarded(torch.randn(3, tasks.WIDTH)).shape == (3, tasks.WIDTH)


def test_gradients_that_nobody_wants_are_none(tmp_path: Path) -> None:
    module, inputs = tasks.drawn("rms")
    other = tasks.made(TorchRows(tasks.program(module, inputs), tasks.STUB).text({"chunk_kib": 0, "reuse": False, "dot": False}), module, tmp_path)
    other.weight.requires_grad_(False)
    (found,) = torch.autograd.grad(other(*inputs).sum(), inputs)
    (right,) = torch.autograd.grad(module(*inputs).sum(), inputs)
    assert torch.allclose(found, right, atol=1e-5)
