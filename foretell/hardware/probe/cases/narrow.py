"""Cases of small models on a CPU: short lines, short sequences, many tiny tensors, little pictures.

A large GPU does not notice how narrow a tensor is; a CPU goes over it line by line.
"""

# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from foretell.hardware.probe.cases.families import Call, Draw, back


def _rows(d: Draw, each: int) -> int:
    return max(1, round(2.0 ** d.rng.uniform(6, 17)) // max(1, each))


def broadcast(d: Draw) -> Call:
    """Numbers for each pair of a few: one of two tensors is spread over the other's last dimensions."""
    a, b = d.one((1, 2, 3, 4, 6, 8, 16)), d.one((2, 3, 4, 8, 12, 16, 32))
    rows = _rows(d, a * b)
    x, y = d.one((
        (d.tensor(rows, a, 1), d.tensor(rows, 1, b)), (d.tensor(rows, 1, b), d.tensor(a, b)), (d.tensor(rows, a, b), d.tensor(rows, a, 1)),
        (d.tensor(rows, a, b), d.tensor(a, b)), (d.tensor(rows, a, b), d.tensor(b)), (d.tensor(rows, b), d.tensor(rows, 1)),
    ))  # fmt: skip
    yes = x.detach() > 0
    return d.one((
        lambda: back(x * y), lambda: back(x + y), lambda: back(x - y), lambda: back(torch.where(yes, x, y)),
        lambda: back(x / y), lambda: back(torch.maximum(x, y)),
    ))  # fmt: skip


def short_sums(d: Draw) -> Call:
    """Sums over a few numbers each."""
    a, b = d.one((2, 3, 4, 8, 16)), d.one((1, 2, 3, 4, 8, 16, 32))
    x = d.tensor(_rows(d, a * b), a, b)
    dim = d.one((1, 1, 2, 0, (1, 2)))
    single = dim if isinstance(dim, int) else 1
    return d.one((
        lambda: back(x.sum(dim)), lambda: back(x.mean(dim)), lambda: back(x.amax(dim)), lambda: back(x.sum(dim, keepdim=True)),
        lambda: back(x.prod(single)),
    ))  # fmt: skip


def turned_copies(d: Draw) -> Call:
    """Copies of tensors whose dimensions were exchanged, joined and picked from."""
    a, b, c = d.one((2, 3, 4, 8, 16)), d.one((2, 3, 4, 8)), d.one((2, 3, 4, 8, 16))
    x = d.tensor(_rows(d, a * b * c), a, b, c, grad=False)
    order = d.one(((0, 2, 1, 3), (0, 1, 3, 2), (2, 0, 1, 3), (0, 2, 3, 1), (1, 0, 2, 3), (0, 3, 2, 1)))
    y = x.permute(order)
    return d.one((
        lambda: y.contiguous(), lambda: y.clone(memory_format=torch.contiguous_format), lambda: y * x.permute(order), lambda: y.exp(),
        lambda: torch.cat([x, x], d.one((1, 2, 3))), lambda: torch.stack([x[..., 0], x[..., -1]], -1), lambda: x[:, ::2] + x[:, ::2],
    ))  # fmt: skip


def short_attention(d: Draw) -> Call:
    """Many short sequences."""
    heads, t, size = d.one((1, 2, 4, 8)), d.one((2, 4, 4, 8, 9, 16, 16, 32, 64)), d.one((2, 4, 8, 8, 16, 16, 32))
    batch = max(1, round(2.0 ** d.rng.uniform(3, 14)) // (heads * t))
    s = t if d.rng.random() < 0.7 else d.one((1, 4, 16, 64, 256))
    q = d.tensor(batch, t, heads, size).detach().transpose(1, 2).requires_grad_()
    k, v = (d.tensor(batch, s, heads, size).detach().transpose(1, 2).requires_grad_() for _ in range(2))
    causal = s == t and d.rng.random() < 0.4
    return lambda: back(F.scaled_dot_product_attention(q, k, v, is_causal=causal))


def little_pictures(d: Draw) -> Call:
    """Convolutions, one filter a channel among them, and norms of what they give."""
    while True:
        n, side, cin = d.one((1, 2, 2, 4, 8, 24)), d.one((2, 4, 8, 8, 16, 16, 32, 64)), d.one((3, 4, 8, 16, 16, 32, 64, 128))
        cout, kernel = d.one((4, 8, 16, 16, 32, 64, 128)), d.one((1, 1, 3, 3, 3, 5, 7))
        if n * side * side * max(cin, cout) < 1 << 19:
            break
    each = cin > 3 and d.rng.random() < 0.35
    conv = nn.Conv2d(cin, cin if each else cout, kernel, d.one((1, 1, 1, 2)), kernel // 2, groups=cin if each else 1, bias=d.rng.random() < 0.5)
    norm = nn.BatchNorm2d(conv.out_channels) if d.rng.random() < 0.5 else nn.Identity()
    x = d.tensor(n, cin, side, side)
    return lambda: back(norm(conv(x)))


def tiny_products(d: Draw) -> Call:
    """Products of small matrices, one by one and many at once, some of complex numbers."""
    m, k, n = (d.one((1, 2, 3, 4, 8, 16, 16, 32, 64)) for _ in range(3))
    batch = d.one((1, 1, 2, 4, 16, 64, 256, 1024))
    dtype = torch.complex64 if d.rng.random() < 0.25 else torch.float32
    x, y = d.tensor(batch, m, k, dtype=dtype), d.tensor(batch, k, n, dtype=dtype)
    return lambda: back(x @ y) if batch > 1 else back(x[0] @ y[0])


def lists(d: Draw) -> Call:
    """Counters and weights of many small layers, updated together."""
    count, numel = d.one((8, 20, 50, 100, 200, 400)), d.one((1, 1, 8, 64, 512))
    some = [torch.zeros(numel) if numel > 1 else torch.zeros(()) for _ in range(count)]

    def run() -> None:
        torch._foreach_add_(some, 1)
        if numel > 1:
            state = [[torch.zeros_like(t) for t in some] for _ in range(3)]
            steps = [torch.zeros(()) for _ in some]
            about = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
            torch._fused_adamw_(some, *state, [], steps, **about)

    return run


NARROW: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "broadcast": (broadcast, 120), "short_sums": (short_sums, 60), "turned_copies": (turned_copies, 60), "short_attention": (short_attention, 60),
    "little_pictures": (little_pictures, 120), "tiny_products": (tiny_products, 80), "lists": (lists, 24),
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe). CPUs alone have them."""
