"""Kernels of papers on a GPU against their references in float64, in the formats that an interpreter has not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.kernels.papers import hash_grid, recurrent
from foretell.kernels.papers.bleu import sentence_bleu
from foretell.kernels.papers.log_bessel import log_iv, log_kv
from foretell.kernels.papers.pointwise import STEPS, Along, chain
from foretell.kernels.papers.sharded_attention import Sharding, sharded_attention
from foretell.kernels.papers.softmax import two_pass_softmax
from foretell.kernels.papers.sparse_product import sparse_product
from tests.pure import test_bleu, test_log_bessel

pytestmark = pytest.mark.gpu
FORMATS = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)]
DATA = Path(__file__).parents[1] / "data"


def off(found: Tensor, want: Tensor) -> float:
    return float((found.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


def test_bleu_is_nltks() -> None:
    given = [one.cuda() for one in test_bleu.packed(test_bleu.KEPT["cases"])]
    for name, kept in test_bleu.KEPT["scores"].items():
        smoothing, count, reweigh = name.split()
        found = sentence_bleu(*given, smoothing=smoothing, weights=test_bleu.WEIGHTS[int(count)], reweigh=reweigh == "1")
        want = torch.tensor([float("nan") if one is None else one for one in kept], dtype=torch.float64, device="cuda")
        torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("cell", recurrent.CELLS)
@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
@pytest.mark.parametrize("size", [16, 20, 32, 64, 80])
def test_recurrent(cell: str, dtype: torch.dtype, bar: float, size: int) -> None:
    torch.manual_seed(0)
    gates, batch, time, heads = recurrent.CELLS[cell], 19, 50, 3
    shapes = ((batch, time, gates, heads, size), (gates, heads, size, size), (gates, heads, size))
    x, weight, bias = (torch.randn(shape, device="cuda") for shape in shapes)
    state = torch.randn(recurrent.STATES[cell], batch, heads, size, device="cuda")
    if cell == "slstm":
        state[2] = 1 + state[2].abs()
    leaves = [one.to(dtype).requires_grad_() for one in (x, weight / size**0.5, bias)] + [state.requires_grad_()]
    ups = [torch.randn(batch, time, heads, size, device="cuda"), torch.randn_like(state)]

    def run(given: list[Tensor]) -> list[Tensor]:
        outs = recurrent.recurrent(*given, cell=cell)
        total = sum((one * up.to(one.dtype)).sum() for one, up in zip(outs, ups, strict=True))
        return [*outs, *torch.autograd.grad(total, given)]

    want = run([one.detach().double().requires_grad_() for one in leaves])
    assert [off(one, other) < bar for one, other in zip(run(leaves), want, strict=True)] == [True] * 6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_are_those_of_cudnn(kind: Any) -> None:
    layer = kind(24, 48, num_layers=2, bidirectional=True, batch_first=True, device="cuda")
    x = torch.randn(5, 30, 24, device="cuda")
    torch.testing.assert_close(recurrent.run_layer(layer, x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["I", "K"])
def test_thirteen_digits(name: str) -> None:
    v, x = (one.cuda() for one in test_log_bessel.pairs())
    want = torch.tensor(json.loads((DATA / "log_bessel.json").read_text())[name], dtype=torch.float64, device="cuda")
    assert (((log_iv if name == "I" else log_kv)(v, x) - want).abs() / want.abs().clamp(min=1)).max() < test_log_bessel.BAR


@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
def test_softmax(dtype: torch.dtype, bar: float) -> None:
    for width, size in ((1, 1.0), (100, 1e4), (70_000, 10.0)):
        x = (size * torch.randn(3, width, device="cuda")).to(dtype).requires_grad_()
        y = two_pass_softmax(x)
        assert off(y, x.double().softmax(-1)) < bar
        up = torch.randn_like(y)
        (found,), (want,) = (torch.autograd.grad(one, x, up) for one in (y, x.softmax(-1)))
        torch.testing.assert_close(found, want, rtol=bar, atol=bar)


@pytest.mark.parametrize(("dtype", "bar"), FORMATS)
def test_hash_grid(dtype: torch.dtype, bar: float) -> None:
    torch.manual_seed(0)
    for entries in (1024, 997):
        x, sides = 2 * torch.rand(1000, 3, device="cuda") - 1, torch.tensor([4, 7, 12, 30], device="cuda")
        shapes = ((4 * entries, 2), (64, 8), (64,), (5, 64), (5,))
        given = [(torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype).requires_grad_() for shape in shapes]
        x, up = x.to(dtype), torch.randn(1000, 5, device="cuda")

        def run(x: Tensor, given: list[Tensor], sides: Tensor = sides, entries: int = entries, up: Tensor = up) -> list[Tensor]:
            out = torch.ops.foretell_kernels.hash_mlp(x, given[0], sides, entries, *given[1:])
            return [out, hash_grid.encode(x, given[0], sides, entries), *torch.autograd.grad((out * up.to(out.dtype)).sum(), given)]

        found, want = run(x, given), run(x.double(), [one.detach().double().requires_grad_() for one in given])
        assert [off(one, other) < bar for one, other in zip(found, want, strict=True)] == [True] * 7


@pytest.mark.parametrize("name", STEPS)
def test_every_step(name: str) -> None:
    x = torch.rand(5000, device="cuda") + 0.1
    steps = chain((name, *(0.3, 0.7)[: STEPS[name][0]]))
    torch.testing.assert_close(steps(x), steps.reference(x.double()).float(), rtol=1e-5, atol=1e-6)


def test_a_batch_is_one_launch() -> None:
    steps = chain("float", ("sub", "mean"), ("div", "std"), ("clamp", -1.5, 1.5), "half")
    images = [torch.randint(0, 256, (3, 300 + k, 400), dtype=torch.uint8, device="cuda") for k in range(5)]
    crops = [image[:, 2:222, 5 + k : 217] for k, image in enumerate(images)]
    given = {"mean": Along(0, torch.tensor([100.0, 120, 140], device="cuda")), "std": Along(0, torch.tensor([50.0, 60, 70], device="cuda"))}
    steps(crops, **given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        found = steps(crops, **given)
        torch.cuda.synchronize()
    launches = [one.key for one in seen.key_averages() if one.self_device_time_total and not one.key.startswith(("Memcpy", "Memset"))]
    assert len(launches) == 1, launches
    for one, crop in zip(found, crops, strict=True):
        torch.testing.assert_close(one.float(), steps.reference(crop, **given).float(), rtol=1e-3, atol=1e-3)


def test_sharded_attention_by_flex_attention() -> None:
    sharding = Sharding(block=128, near=2, shards=4)
    q = torch.randn(1, 8, 1024, 64, device="cuda", requires_grad=True)
    k, v = (torch.randn(1, 4, 1024, 64, device="cuda", requires_grad=True) for _ in range(2))
    found = sharded_attention(q, k, v, sharding)
    wide = [one.repeat_interleave(2, 1) for one in (k, v)]
    want = F.scaled_dot_product_attention(q, *wide, sharding.mask(1024, 8, "cuda"))
    torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)
    up = torch.randn_like(want)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), up) for out in (found, want)), strict=True):
        assert off(one, other) < 1e-2


def test_sparse_products() -> None:
    a = torch.randn(300, 200, device="cuda") * (torch.rand(300, 200, device="cuda") < 0.05)
    for products in (500, 1 << 20):
        found = sparse_product(a.to_sparse_csr(), a.t().contiguous().to_sparse_csr(), products=products)
        torch.testing.assert_close(found.to_dense(), a @ a.t(), rtol=1e-4, atol=1e-4)
