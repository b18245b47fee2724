"""Ops of image, audio and video nets at the sizes at which their kernels leave most of a GPU idle, or go another way.

    mobile      one filter a channel, of every width and kind of number, with the statistics that follow
    bundles     convolutions in groups
    thin        few channels of large pictures: the first and last layers of every net
    lines       one and three dimensions
    enlarged    resized by large factors, and the gradient of it
    windows     windows unfolded and folded, edges mirrored, pools that overlap
    looking     a few queries that attend to many keys, and the reverse
    words       tables looked up by many indices, their gradients summed

GPUs alone have them: a CPU's are in `narrow`.
"""

# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.hardware.probe.cases.families import Call, Draw, back

SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128)


def _batch(d: Draw, each: int, most: int = 1 << 27) -> int:
    """A batch whose pictures have so many elements each."""
    return max(1, min(512, d.elements(1 << 14, most) // max(1, each)))


def _laid(d: Draw, x: Tensor, share: float = 0.15) -> Tensor:
    return x.detach().to(memory_format=torch.channels_last).requires_grad_() if d.rng.random() < share else x


def _normed(d: Draw, y: Tensor) -> Tensor:
    c = y.shape[1]
    mean, var = torch.zeros(c, device=d.device), torch.ones(c, device=d.device)
    return F.batch_norm(y, mean, var, torch.ones(c, device=d.device), torch.zeros(c, device=d.device), training=True)


def mobile(d: Draw) -> Call:
    dtype, kernel, side = d.one((*d.dtypes, torch.float32)), d.one((3, 3, 3, 5, 5, 7, 7, 9)), d.one(SIDES)
    c, stride = d.size(8, 1536, 8), d.one((1, 1, 1, 2))
    n = _batch(d, c * side * side)
    x, w = _laid(d, d.tensor(n, c, side, side, dtype=dtype)), d.tensor(c, 1, kernel, kernel, dtype=dtype)
    b = d.tensor(c, dtype=dtype) if d.rng.random() < 0.4 else None
    return lambda: back(F.conv2d(x, w, b, stride, kernel // 2, groups=c))


def bundles(d: Draw) -> Call:
    dtype, kernel, side = d.one(d.dtypes), d.one((1, 3, 3, 3, 5)), d.one(SIDES)
    groups, each, other = d.one((2, 4, 8, 16, 32, 32, 64)), d.one((4, 8, 8, 16, 16, 32, 64)), d.one((1, 1, 1, 2))
    n = _batch(d, groups * each * side * side, 1 << 26)
    x = _laid(d, d.tensor(n, groups * each, side, side, dtype=dtype))
    w = d.tensor(groups * each * other, each, kernel, kernel, dtype=dtype)
    stride = d.one((1, 1, 1, 2))
    return lambda: back(F.conv2d(x, w, None, stride, kernel // 2, groups=groups))


def thin(d: Draw) -> Call:
    dtype, side = d.one((*d.dtypes, torch.bfloat16)), d.one((28, 56, 64, 96, 112, 128, 144, 224))
    cin, cout, kernel = d.one((3, 8, 12, 16, 24, 32, 48, 64)), d.one((8, 12, 16, 24, 32, 40, 48, 64, 72, 96)), d.one((1, 1, 3, 3, 5, 7))
    n = _batch(d, max(cin, cout) * side * side)
    x = d.tensor(n, cout, side, side, dtype=dtype)
    if d.rng.random() < 0.5:
        return lambda: back(_normed(d, x))
    x, w = _laid(d, d.tensor(n, cin, side, side, dtype=dtype)), d.tensor(cout, cin, kernel, kernel, dtype=dtype)
    stride = d.one((1, 1, 2))
    return lambda: back(F.conv2d(x, w, None, stride, kernel // 2))


def lines(d: Draw) -> Call:
    dtype = d.one(d.dtypes)
    cin, cout = d.one((1, 4, d.size(8, 512, 8))), d.size(8, 512, 8)
    each = cin == cout or d.rng.random() < 0.15
    groups = cin if each else 1
    cout = cin if each else cout
    if d.rng.random() < 0.6:
        kernel, length = d.one((1, 3, 3, 5, 7, 9, 15, 31)), d.one((64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
        x = d.tensor(min(64, _batch(d, max(cin, cout) * length, 1 << 26)), cin, length, dtype=dtype)
        w, stride, wide = d.tensor(cout, cin // groups, kernel, dtype=dtype), d.one((1, 1, 1, 2, 4)), d.one((1, 1, 1, 2, 4, 16))
        return lambda: back(F.conv1d(x, w, None, stride, wide * (kernel // 2), wide, groups))
    kernel, side, depth = d.one((1, 3, 3, 3)), d.one((7, 14, 16, 28, 32, 56, 64)), d.one((2, 4, 8, 16, 32))
    cin, cout = min(cin, 128), min(cout, 128)
    groups = cin if each else 1
    cout = cin if each else cout
    x = d.tensor(min(32, _batch(d, max(cin, cout) * side * side * depth, 1 << 25)), cin, depth, side, side, dtype=dtype)
    w, stride = d.tensor(cout, cin // groups, kernel, kernel, kernel, dtype=dtype), d.one((1, 1, 2))
    return lambda: back(F.conv3d(x, w, None, stride, kernel // 2, groups=groups))


def enlarged(d: Draw) -> Call:
    dtype, factor, side = d.one((*d.dtypes, torch.float32)), d.one((2, 2, 4, 4, 8, 16)), d.one((7, 8, 14, 16, 18, 28, 32, 36, 56, 64, 72))
    side = min(side, 512 // factor)
    c = d.one((1, 2, 3, 19, 21, 64, d.size(8, 512, 8)))
    x = d.tensor(_batch(d, c * (side * factor) ** 2, 1 << 26), c, side, side, dtype=dtype)
    mode, to = d.one(("bilinear", "bilinear", "bilinear", "nearest", "bicubic")), (side * factor, side * factor)
    corners = None if mode == "nearest" else d.rng.random() < 0.3
    return lambda: back(F.interpolate(x, to, mode=mode, align_corners=corners))


def windows(d: Draw) -> Call:
    dtype, side, c = d.one(d.dtypes), d.one((14, 16, 28, 32, 48, 56, 64, 96, 112)), d.size(4, 512, 4)
    x = d.tensor(_batch(d, 4 * c * side * side, 1 << 26), c, side, side, dtype=dtype)
    kernel, stride = d.one((2, 3, 3, 5)), d.one((1, 1, 2))
    pad = d.one((1, 2, 3))
    places = ((side + 2 * (kernel // 2) - kernel) // stride + 1) ** 2
    columns = d.tensor(x.shape[0], c * kernel * kernel, places, dtype=dtype) if places * kernel * kernel * x.shape[0] * c < 1 << 28 else None
    sides: list[Callable[[], Any]] = [
        lambda: back(F.unfold(x, kernel, padding=kernel // 2, stride=stride)), lambda: back(x.unfold(2, kernel, stride).unfold(3, kernel, stride)),
        lambda: back(F.pad(x, (pad,) * 4, "reflect")), lambda: back(F.pad(x, (pad,) * 4, "replicate")),
        lambda: back(F.avg_pool2d(x, kernel, stride, kernel // 2)), lambda: back(F.max_pool2d(x, kernel, stride, kernel // 2)),
        lambda: back(F.adaptive_avg_pool2d(x, d.one((1, 2, 4, 7)))), lambda: back(x.mean((2, 3))), lambda: back(x.amax((2, 3))),
    ]  # fmt: skip
    if columns is not None:
        sides.append(lambda: back(F.fold(columns, (side, side), kernel, padding=kernel // 2, stride=stride)))
    return d.one(sides)


def looking(d: Draw) -> Call:
    dtype, heads, size = d.one((*d.dtypes, torch.float32)), d.one((1, 2, 4, 8, 16)), d.one((16, 32, 64, 64, 128))
    few, many = d.one((1, 16, 32, 64, 77, 128, 197, 256)), d.one((256, 512, 577, 1024, 2048, 4096, 8192))
    t, s = (few, many) if d.rng.random() < 0.7 else (many, few)
    n = max(1, min(128, int((1 << 26) * d.scale) // (heads * max(t, s) * size // 4)))
    q, k, v = (d.tensor(n, heads, length, size, dtype=dtype) for length in (t, s, s))
    return lambda: back(F.scaled_dot_product_attention(q, k, v))


def words(d: Draw) -> Call:
    rows, columns = d.one((100, 1000, 10000, 30522, 100000, 300000, 1000000)), d.one((8, 16, 32, 64, 100, 128, 256, 300, 512, 768))
    if rows * columns > (1 << 27) * d.scale:
        rows = max(100, int((1 << 27) * d.scale) // columns)
    shape = d.one(((d.size(16, 1 << 18, 1),), (d.size(16, 32768, 8), d.one((2, 8, 20, 40))), (d.size(1, 64, 1), d.one((64, 128, 512, 1024)))))
    table, index = d.tensor(rows, columns), d.integers(rows, *shape)
    if d.rng.random() < 0.25:
        offsets = torch.arange(0, index.numel(), d.one((1, 4, 20)), device=d.device)
        mode = d.one(("sum", "mean"))
        return lambda: back(F.embedding_bag(index.reshape(-1), table, offsets, mode=mode))
    return lambda: back(F.embedding(index, table))


PICTURES: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "mobile": (mobile, 130), "bundles": (bundles, 100), "thin": (thin, 150), "lines": (lines, 130), "enlarged": (enlarged, 60),
    "windows": (windows, 110), "looking": (looking, 70), "words": (words, 60),
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe)."""
