"""Attention over pages by kernels, and the engine on a GPU, against plain attention and `generate`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.graphs import GraphRunner
from foretell.serve.sampling import Sampling
from tests.pure.test_serve_engine import COMMON, MORE, QUICK, prompts

pytestmark = pytest.mark.gpu
LENGTHS = (1, 7, 300, 0, 613, 5000)


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, cap: float) -> Tensor:
    """In double precision."""
    query, key, value = (one.double() for one in (query, key, value))
    count, total, group = query.shape[0], key.shape[0], query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    place, other = torch.arange(total - count, total, device=query.device)[:, None], torch.arange(total, device=query.device)[None]
    seen = (other <= place) & (other > place - (window or total))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "wide", "page", "window", "cap"),
    [
        (32, 8, 128, 128, 16, 0, 0.0), (4, 4, 64, 64, 8, 0, 0.0), (4, 1, 80, 80, 16, 40, 0.0),
        (8, 2, 256, 256, 16, 0, 5.0), (2, 2, 96, 96, 4, 300, 0.0),
        (4, 4, 192, 128, 16, 0, 0.0), (8, 2, 16, 16, 32, 0, 30.0),
    ],
)  # fmt: skip
def test_kernels_over_pages_are_plain_attention(
    heads: int, kv_heads: int, size: int, wide: int, page: int, window: int, cap: float, dtype: torch.dtype
) -> None:
    from foretell.kernels import paged_attention

    torch.manual_seed(0)
    count = sum(-(-one // page) for one in LENGTHS)
    free = torch.randperm(count + 5).tolist()
    table = torch.zeros(len(LENGTHS), max(-(-one // page) for one in LENGTHS), dtype=torch.int32)
    pool = [torch.full(((count + 5) * page, kv_heads, one), math.nan, dtype=dtype, device="cuda") for one in (size, wide)]
    texts = []
    for row, length in enumerate(LENGTHS):
        mine = torch.tensor([free.pop() for _ in range(-(-length // page))], dtype=torch.int32)
        table[row, : len(mine)] = mine
        key, value = (torch.randn(length, kv_heads, one, device="cuda").to(dtype) for one in (size, wide))
        texts.append((key, value))
        if length:
            place = torch.arange(length)
            paged_attention.write(*pool, key, value, (mine[place // page] * page + place % page).int().cuda())
    query = torch.randn(len(LENGTHS), heads, size, device="cuda").to(dtype)
    out, how = torch.full((len(LENGTHS), heads, wide), math.nan, dtype=dtype, device="cuda"), {"scale": size**-0.5, "window": window, "cap": cap}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    paged_attention.decode(query, *pool, table.cuda(), lengths, out, page=page, **how)
    near = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}[dtype]
    for row, (length, text) in enumerate(zip(LENGTHS, texts, strict=True)):
        known = plain(query[row : row + 1], *text, size**-0.5, window, cap)[0] if length else torch.zeros(heads, wide, device="cuda")
        assert float((out[row] - known).abs().max()) < near, (row, length)
    tiles, queries, known, first = [], [], [], 0
    for row, many in ((1, 7), (2, 150), (4, 1), (5, 700)):
        queries.append(torch.randn(many, heads, size, device="cuda").to(dtype))
        known.append(plain(queries[-1], *texts[row], size**-0.5, window, cap))
        tall = paged_attention.TALL
        tiles += [(row, first + at, LENGTHS[row] - many + at, min(tall, many - at)) for at in range(0, many, tall)]
        first += many
    out = torch.full((first, heads, wide), math.nan, dtype=dtype, device="cuda")
    paged_attention.chunk(torch.cat(queries), *pool, table.cuda(), torch.tensor(tiles, dtype=torch.int32, device="cuda"), out, page=page, **how)
    assert float((out - torch.cat(known)).abs().max()) < near


def sharp(name: str, dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **{**COMMON, **{**QUICK, **MORE}[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return model.to("cuda", dtype)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral", "qwen3", "gpt_neox", "opt", "mixtral", "deepseek_v3"])
def test_tokens_are_those_of_generate(name: str, compiled: bool) -> None:
    """In fp32 with exact products; graphs, lost pages, shared pages, pieces of prompts and the host a step ahead."""
    if compiled and name not in ("llama", "gemma2", "gpt2"):
        pytest.skip("compiled layers: three families")
    model, asked = sharp(name, torch.float32), prompts(20)
    engine = ServingEngine(model, pages=24, size=8, limits=StepLimits(running=5, tokens=32), compiled=compiled)
    assert isinstance(engine.runner, GraphRunner)
    answers = engine.generate(asked, Sampling(most=20))
    graphs = len(engine.runner.graphs)
    engine.close()
    assert engine.scheduler.preemptions and sum(one.scheduled.shared for one in answers)
    known = []
    for prompt in asked:
        found = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        known.append(found[0, len(prompt) :].tolist())
    assert [one.ids for one in answers] == known, engine.runner.notes
    assert graphs or name in ("mixtral", "deepseek_v3"), engine.runner.notes


def test_drawn_tokens_and_their_chances_are_those_of_a_cpu() -> None:
    model = sharp("llama", torch.float32)
    asked = prompts(6, seed=4)
    how = [Sampling(most=15, temperature=1.5, top_k=20, top_p=0.9, seed=number, logprobs=2) for number in range(6)]
    limits = StepLimits(running=6, tokens=64)
    here = ServingEngine(model, pages=100, limits=limits, compiled=False).generate(asked, how)
    model.cpu()
    there = ServingEngine(model, pages=100, limits=limits).generate(asked, how)
    assert [one.ids for one in here] == [one.ids for one in there]
    for one, other in zip(here, there, strict=True):
        assert [token.logprob for token in one.tokens] == pytest.approx([token.logprob for token in other.tokens], abs=1e-3)

