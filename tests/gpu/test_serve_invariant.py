"""The invariant mode on a GPU: kernels, steps and whole answers give the same bits whatever is beside them."""

from __future__ import annotations

import random

import pytest
import torch

from foretell.errors import UserError
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.invariant import FixedRunner
from foretell.serve.sampling import Sampling
from tests.gpu.test_paged import sharp
from tests.pure.test_serve_engine import prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "window", "cap"), [(128, 0, 0.0), (64, 100, 0.0), (256, 0, 30.0), (80, 37, 5.0)])
def test_a_prompts_rows_are_the_same_wherever_it_is_cut(size: int, window: int, cap: float, dtype: torch.dtype) -> None:
    """Keys are read in the same blocks from the beginning; those after a row, and those before its window, change nothing."""
    from foretell.kernels import paged_attention

    torch.manual_seed(0)
    length, heads, kv_heads, page = 700, 8, 2, 16
    table = torch.randperm(44).int().cuda()[None]
    pool = [torch.randn(44 * page, kv_heads, size, device="cuda").to(dtype) for _ in range(2)]
    query = torch.randn(length, heads, size, device="cuda").to(dtype)
    found = []
    for cuts in ((700,), (128,) * 5 + (60,), (1, 37, 300, 2, 360), (350, 350)):
        out = torch.full((length, heads, size), float("nan"), dtype=dtype, device="cuda")
        first = 0
        for count in cuts:
            tall = paged_attention.TALL
            tiles = [(0, at, first + at, min(tall, count - at)) for at in range(0, count, tall)]
            rows = torch.tensor(tiles, dtype=torch.int32, device="cuda")
            paged_attention.chunk(
                query[first : first + count], *pool, table, rows, out[first : first + count], page=page, scale=size**-0.5, window=window, cap=cap
            )
            first += count
        found.append(out)
    assert all(torch.equal(one, found[0]) for one in found[1:]) and not found[0].isnan().any()


@pytest.mark.parametrize("window", [0, 300])
def test_a_generated_row_is_the_same_among_any_others(window: int) -> None:
    from foretell.kernels import paged_attention

    torch.manual_seed(0)
    heads, kv_heads, size, page = 8, 2, 128, 16
    lengths = [1, 17, 700, 4000, 250, 1200]
    table = torch.stack([torch.randperm(1500)[:250] for _ in lengths]).int().cuda()
    pool = [torch.randn(1500 * page, kv_heads, size, device="cuda").bfloat16() for _ in range(2)]
    query = torch.randn(len(lengths), heads, size, device="cuda").bfloat16()

    def attended(rows: list[int]) -> dict[int, torch.Tensor]:
        out = torch.empty(len(rows), heads, size, dtype=torch.bfloat16, device="cuda")
        of = torch.tensor([lengths[row] for row in rows], dtype=torch.int32, device="cuda")
        paged_attention.decode(query[rows], *pool, table[rows], of, out, page=page, scale=size**-0.5, window=window)
        return dict(zip(rows, out, strict=True))

    known = attended(list(range(len(lengths))))
    for rows in ([5, 3, 1], [2], [0, 4, 2, 3]):
        assert all(torch.equal(one, known[row]) for row, one in attended(rows).items())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_answers_are_the_same_bits_alone_and_among_others(name: str, compiled: bool) -> None:
    """In bf16: lost pages, shared pages, pieces of prompts, drawn tokens, the host a step ahead."""
    asked = prompts(40)
    how = [Sampling(most=20, temperature=number % 2 * 0.9, top_p=0.9, seed=number, logprobs=3) for number in range(40)]
    engine = ServingEngine(sharp(name, torch.bfloat16), pages=40, size=8, limits=StepLimits(running=9, tokens=64, invariant=True), compiled=compiled)
    assert isinstance(engine.runner, FixedRunner) and not engine.runner.notes
    among = engine.generate(asked, how)
    assert engine.scheduler.preemptions and sum(one.scheduled.shared for one in among)
    order = random.Random(3).sample(range(40), 40)
    for number in order:
        engine.scheduler.pages.forget()
        (alone,) = engine.generate([asked[number]], [how[number]])
        assert alone.tokens == among[number].tokens, number
    engine.close()


def test_answers_are_those_of_the_default_where_rounding_decides_nothing() -> None:
    asked = prompts(12)
    found = []
    for invariant in (True, False):
        engine = ServingEngine(sharp("llama", torch.float32), pages=24, size=8, limits=StepLimits(running=5, tokens=32, invariant=invariant))
        found.append([one.ids for one in engine.generate(asked, Sampling(most=20))])
        engine.close()
    assert found[0] == found[1]


def test_experts_are_refused() -> None:
    with pytest.raises(UserError, match="has experts"):
        ServingEngine(sharp("mixtral", torch.bfloat16), pages=24, size=8, limits=StepLimits(running=5, tokens=32, invariant=True))
