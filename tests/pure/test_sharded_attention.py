"""Sharded attention against masked dense attention, and what its heads cover."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foretell.errors import UserError
from foretell.kernels.papers.sharded_attention import Sharding, sharded_attention
from tests.pure.test_sparse_product import peak


@pytest.mark.parametrize("tokens", [1, 8, 37, 64])
@pytest.mark.parametrize("sharding", [Sharding(block=8, near=1, shards=3), Sharding(block=5, near=2, shards=4), Sharding(block=16, near=9, shards=1)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_is_masked_dense_attention(tokens: int, sharding: Sharding, kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, tokens, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, tokens, size, dtype=torch.float64, requires_grad=True) for size in (6, 7))
    found = sharded_attention(q, k, v, sharding)
    wide = [one.repeat_interleave(4 // kv_heads, 1) for one in (k, v)]
    want = F.scaled_dot_product_attention(q, *wide, sharding.mask(tokens, 4))
    torch.testing.assert_close(found, want)
    up = torch.randn_like(want)
    pairs = zip(*(torch.autograd.grad(one, (q, k, v), up) for one in (found, want)), strict=True)
    for got, expected in pairs:
        torch.testing.assert_close(got, expected)


def test_the_mask_is_what_was_said() -> None:
    sharding, heads, tokens = Sharding(block=3, near=2, shards=2), 3, 14
    want = [
        [[j <= i and (j // 3 > i // 3 - 2 or (j // 3) % 2 == h % 2) for j in range(tokens)] for i in range(tokens)] for h in range(heads)
    ]
    assert sharding.mask(tokens, heads).tolist() == want


@pytest.mark.parametrize(("heads", "shards"), [(4, 4), (6, 4), (8, 3)])
def test_the_heads_cover_the_context(heads: int, shards: int) -> None:
    sharding = Sharding(block=4, near=1, shards=shards)
    assert torch.equal(sharding.mask(50, heads).any(0), torch.ones(50, 50).tril().bool())
    assert not torch.equal(sharding.mask(50, shards - 1).any(0), torch.ones(50, 50).tril().bool())
    assert sharding.density(4 * 400, shards * 2) == pytest.approx(1 / shards, rel=0.05)


def test_pages_that_no_later_token_reads_can_be_freed() -> None:
    sharding, heads = Sharding(block=4, near=2, shards=4), 4
    mask = sharding.mask(80, heads)
    for head in range(heads):
        kept = sharding.pages(40, head)
        later = {int(place) // 4 for row in range(40, 80) for place in mask[head, row, :40].nonzero()}
        assert later <= set(kept) and len(kept) < 11


def test_scores_of_unseen_blocks_are_not_made() -> None:
    q, k, v = torch.randn(3, 1, 8, 512, 16)
    sharding = Sharding(block=32, near=1, shards=8)
    assert peak(lambda: sharded_attention(q, k, v, sharding)) < 0.25 * peak(lambda: F.scaled_dot_product_attention(q, k, v, sharding.mask(512, 8)))


def test_bad_input() -> None:
    with pytest.raises(UserError, match="a sharding of 0"):
        Sharding(block=0, near=1, shards=1)
    with pytest.raises(UserError, match="equal tokens"):
        sharded_attention(torch.zeros(1, 4, 8, 2), torch.zeros(1, 3, 8, 2), torch.zeros(1, 3, 8, 2), Sharding(block=8, near=1, shards=1))
