"""Output layer with cross entropy, AdamW and mixtures of experts on a GPU, by Triton, in bfloat16 too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.kernels import adamw, linear_cross_entropy, moe

pytestmark = pytest.mark.gpu


def error(some: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    return [float((one.double() - true).norm() / true.norm()) for one, true in zip(some, truth, strict=True)]


def results(function: Callable[..., Tensor], given: Sequence[Any], **settings: Any) -> list[Tensor]:
    out = function(*given, **settings)
    learned = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, learned, torch.full_like(out, 0.25))]


def widened(given: Sequence[Any]) -> list[Any]:
    return [one.detach().double().requires_grad_(one.requires_grad) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("words", [128256, 50257, 1000])
def test_linear_cross_entropy(words: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = list(linear_cross_entropy.draw({"rows": 512, "width": 256, "words": words}, dtype, torch.device("cuda")))
    given[2][::5] = -100
    for one in given[:2]:
        one.requires_grad_()
    for settings in ({}, {"softcap": 30.0, "z_loss": 1e-4}, {"label_smoothing": 0.1, "reduction": "none"}):
        truth = results(linear_cross_entropy.reference, widened(given), **settings)
        eager = error(results(linear_cross_entropy.reference, given, **settings), truth)
        for more in ({"chunks": 1}, {"chunks": 4}, {"chunks": 3, "recompute": True}, {"chunks": 4, "sums": "float32"}):
            mine = error(results(linear_cross_entropy.linear_cross_entropy, given, **settings, **more), truth)
            assert all(one <= 2 * other + 4e-7 for one, other in zip(mine, eager, strict=True)), (settings, more, mine, eager)


def test_peak_memory_is_the_formulas() -> None:
    from foretell.tune.head_cost import HeadShape, head_bytes

    given = linear_cross_entropy.draw({"rows": 8192, "width": 1024, "words": 50257}, torch.bfloat16, torch.device("cuda"))
    x, weight = (one.requires_grad_() for one in given[:2])
    for chunks in (1, 4, 8):
        for _ in range(2):  # what libraries take at first is not the call's
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = torch.autograd.grad(linear_cross_entropy.linear_cross_entropy(x, weight, given[2], chunks=chunks), (x, weight))
            peak = torch.cuda.max_memory_allocated() - before
            del found
        assert peak == pytest.approx(head_bytes(HeadShape(rows=8192, width=1024, words=50257), chunks), rel=0.02)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw(dtype: torch.dtype, folded: bool) -> None:
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(size, device="cuda", dtype=dtype)) for size in ((4097,), (128, 1000), (3,), (2048, 64))]
    theirs = copy.deepcopy(mine)
    optimizers = [torch.optim.AdamW(params, lr=1e-2, fused=True) for params in (mine, theirs)]
    copies = {one: torch.empty_like(one, dtype=torch.bfloat16) for one in mine} if folded else None
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        adamw.adamw_step(optimizers[0], max_norm=1.0 if folded else None, copies=copies, zero=folded, skip_nonfinite=folded)
        if folded:
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizers[1].step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-6 if dtype == torch.float32 else 2e-2)
        assert copies is None or torch.equal(copies[one], one.detach().bfloat16())


def test_adamw_in_a_graph_takes_its_steps() -> None:
    mine, theirs = ([nn.Parameter(torch.ones(1000, device="cuda"))] for _ in range(2))
    for params in (mine, theirs):
        params[0].grad = torch.linspace(-1, 1, 1000, device="cuda")
    optimizers = [torch.optim.AdamW(params, fused=True) for params in (mine, theirs)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        adamw.adamw_step(optimizers[0], max_norm=1.0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw.adamw_step(optimizers[0], max_norm=1.0)
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizers[1].step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_moe(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = list(moe.draw({"tokens": 300, "choices": 2, "width": 128, "inner": 64, "experts": 8}, dtype, torch.device("cuda")))
    given = [one.requires_grad_() if one.is_floating_point() else one for one in given]
    truth = results(moe.reference, widened(given))
    eager, mine = (error(results(function, given), truth) for function in (moe.reference, moe.moe))
    assert all(one <= 2 * other + 1e-6 for one, other in zip(mine, eager, strict=True)), (mine, eager)
