"""Small pieces of PyTorch with sizes drawn at random: what the probe times, family by family.

A family is a function of (random numbers, device, largest size) that prepares tensors and returns a call to run
under `Harvest`; most run forward and backward, so gradients' ops are timed as well. Sizes are drawn evenly in
their logarithm, some round, some odd, because models have both.
"""

# mypy: no-warn-return-any

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

Call = Callable[[], Any]
LOW = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
BOTH = (torch.bfloat16, torch.float32)
MOSTLY_FP32 = (*(torch.float32,) * 11, torch.bfloat16)


class Draw:
    """Random sizes and tensors on one device; `scale` below 1 shrinks everything: work by it, lengths by its root."""

    def __init__(self, seed: int, device: str, scale: float = 1.0) -> None:
        self.seed, self.rng, self.device, self.scale = seed, random.Random(seed), device, scale
        self.dtypes_low = LOW if device == "cuda" else MOSTLY_FP32
        self.dtypes = BOTH if device == "cuda" else MOSTLY_FP32

    def size(self, low: int, high: int, multiple: int | None = None) -> int:
        """Log-uniform; rounded to a multiple of 64, of 8, or not at all, unless said."""
        if self.scale < 1:
            high = max(min(high, 2 * low), int(high * self.scale**0.5))
        value = math.exp(self.rng.uniform(math.log(low), math.log(high)))
        if multiple is None:
            multiple = self.rng.choices((64, 8, 1), (0.6, 0.2, 0.2))[0]
        return max(1, round(value / multiple)) * multiple

    def elements(self, low: int = 1 << 10, high: int = 1 << 28) -> int:
        least = max(1 << 8, int(low * self.scale))
        return round(math.exp(self.rng.uniform(math.log(least), math.log(max(2 * least, high * self.scale)))))

    def matrix(self, high: int = 1 << 28, rows: int = 1 << 18) -> tuple[int, int]:
        """A (rows, columns) shape like that of activations."""
        columns = self.size(16, 16384, self.rng.choice((64, 64, 8, 1)))
        total = self.elements(1 << 12, high)
        return max(1, min(rows * max(1, 256 // columns), total // columns)), columns

    def one(self, choices: Any) -> Any:
        return self.rng.choice(choices)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype).requires_grad_(grad)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device)


def back(output: Tensor) -> None:
    """Backward from random numbers, as in training: a GPU multiplies ones up to an eighth faster. Their drawing is not timed."""
    if not output.is_cuda:
        output.backward(torch.ones_like(output))
        return
    with _disable_current_modes():
        gradient = torch.randn_like(output)
    output.backward(gradient)


VOCABULARIES = (1000, 21841, 30522, 32000, 32128, 50257, 50304, 51200, 64000, 100277, 128256, 151936)


def linear(d: Draw) -> Call:
    dtype = d.one(d.dtypes_low)
    most = 3e12 * d.scale * (1 if dtype != torch.float32 else 0.1)
    while True:
        m, n, k = d.size(16, 65536), d.size(16, 32768), d.size(16, 32768)
        if d.rng.random() < 0.08 and d.device == "cuda":
            n, k = d.one((*VOCABULARIES, d.size(8192, 160000, 1))), d.size(256, 8192, 64)
        elif d.rng.random() < 0.4:
            m, k = d.size(64, 65536, d.one((256, 128, 197, 50))), d.size(128, 8192, d.one((128, 64)))
            n = d.one((k, 2 * k, 3 * k, 4 * k, max(64, k // 4), d.size(64, 16384, 64)))
        if 2 * m * n * k < most and m * n + n * k + m * k < 2e9 * d.scale:
            break
    x, w = d.tensor(m, k, dtype=dtype), d.tensor(n, k, dtype=dtype)
    b = d.tensor(n, dtype=dtype) if d.rng.random() < 0.4 else None
    return lambda: back(F.linear(x, w, b))


def sizes(d: Draw) -> Call:
    """Products of any three sizes: rows that are no multiple of anything cannot be fetched in wide pieces."""
    dtype = d.one((torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    most = 2e12 * d.scale * (1 if dtype != torch.float32 else 0.1)
    while True:
        multiple = d.one((1, 1, 8, 16, 32, 64))
        m, n, k = (d.size(24, 24000, multiple) for _ in range(3))
        if 2 * m * n * k < most:
            break
    x, w = d.tensor(m, k, dtype=dtype, grad=False), d.tensor(n, k, dtype=dtype, grad=False)
    return lambda: torch.mm(x, w.t())


def batched(d: Draw) -> Call:
    dtype = d.one(d.dtypes_low)
    most = 1e12 * d.scale * (1 if dtype != torch.float32 else 0.1)
    while True:
        batch, m, n, k = d.size(2, 2048, 1), d.size(8, 4096), d.size(8, 4096), d.size(8, 1024)
        if 2 * batch * m * n * k < most and batch * (m * n + n * k + m * k) < 1e9 * d.scale:
            break
    x, y = d.tensor(batch, m, k, dtype=dtype), d.tensor(batch, k, n, dtype=dtype)
    return lambda: back(torch.bmm(x, y))


def attention(d: Draw) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = d.one(d.dtypes_low)
    while True:
        b, h, t = d.size(1, 128, 1), d.size(1, 64, 1), d.size(32, 16384, d.one((128, 64, 1)))
        size = d.one((8, 32, 64, 64, 64, 80, 96, 128, 128, 256))
        if d.rng.random() < 0.15:
            b, h, t = d.size(64, 8192, 1), d.one((2, 4, 8)), d.size(8, 128, 1)
        s = t if d.rng.random() < 0.8 else d.size(32, 8192, 64)
        work = 4 * b * h * t * s * size
        if work < 2e12 * d.scale * (1 if dtype != torch.float32 else 0.05) and b * h * (t + s) * size < 5e8 * d.scale:
            break
    causal = s == t and d.rng.random() < 0.5
    kv = d.one([n for n in (h, h, h // 4) if n and h % n == 0])
    heads = h if kv == h or size == 256 else kv
    q = d.tensor(b, t, h, size, dtype=dtype).detach().transpose(1, 2).requires_grad_()
    k = d.tensor(b, s, heads, size, dtype=dtype).detach().transpose(1, 2).requires_grad_()
    v = d.tensor(b, s, heads, size, dtype=dtype).detach().transpose(1, 2).requires_grad_()
    forced = d.one((None, None, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION))

    def plain() -> None:
        back(F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != h))

    def run() -> None:
        if forced is None or d.device != "cuda" or dtype == torch.float32 or heads != h:
            return plain()
        with sdpa_kernel(forced):
            plain()

    return run


def _near(d: Draw, width: int) -> int:
    """A number of channels as nets have them where the picture has this size."""
    return max(8, d.one((1, 1, 2, 4)) * (width // d.one((1, 2, 4)) // 8 * 8)) if d.rng.random() < 0.97 else 3


def convolution(d: Draw) -> Call:
    dtype = d.one(d.dtypes)
    most = 5e11 * d.scale * (1 if dtype != torch.float32 else 0.2)
    while True:
        n, side = d.size(1, 256, d.one((1, 8))), d.one((7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224))
        cin, cout = d.one((3, 16, 24, d.size(16, 2048, 8))), d.size(16, 2048, 8)
        if d.rng.random() < 0.75:
            wide = max(16, min(2048, int(d.one((1792, 3584, 7168, 14336)) / side)))
            cin, cout = _near(d, wide), _near(d, wide)
        kernel, stride = d.one((1, 1, 3, 3, 3, 5, 7, 16)), d.one((1, 1, 2))
        cin = min(cin, 4) if kernel == 16 else cin
        depthwise = d.rng.random() < (0.6 if kernel in (5, 7) else 0.12) and cin > 3
        groups, cout = (cin, cin) if depthwise else (1, cout)
        padding = kernel // 2 if kernel < 16 else 0
        stride = 16 if kernel == 16 else stride
        out = (side + 2 * padding - kernel) // stride + 1
        work = 2 * n * out * out * cout * kernel * kernel * cin // groups
        if kernel <= side and work < most and n * (cin * side * side + cout * out * out) < 4e8 * d.scale:
            break
    x, w = d.tensor(n, cin, side, side, dtype=dtype), d.tensor(cout, cin // groups, kernel, kernel, dtype=dtype)
    b = d.tensor(cout, dtype=dtype) if d.rng.random() < 0.4 else None
    if d.rng.random() < (0.5 if depthwise else 0.25):
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        w = w.detach().to(memory_format=torch.channels_last).requires_grad_()
    return lambda: back(F.conv2d(x, w, b, stride=stride, padding=padding, groups=groups))


def norm(d: Draw) -> Call:
    dtype = d.one(d.dtypes)
    kind = d.one(("layer", "layer", "rms", "batch", "group"))
    if kind in ("layer", "rms"):
        rows, columns = d.matrix()
        x, w = d.tensor(rows, columns, dtype=dtype), d.tensor(columns, dtype=dtype)
        b = d.tensor(columns, dtype=dtype)
        if kind == "rms":
            return lambda: back(F.rms_norm(x, (columns,), w))
        return lambda: back(F.layer_norm(x, (columns,), w, b))
    channels, side = d.size(32, 2048, 32), d.one((7, 14, 28, 32, 56, 64, 112))
    n = max(1, min(256, d.elements(1 << 14, 1 << 27) // (channels * side * side)))
    x = d.tensor(n, channels, side, side, dtype=dtype)
    if d.rng.random() < 0.25:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    module: nn.Module = nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(32, channels)
    module = module.to(d.device)
    if kind == "group":
        module = module.to(dtype)
    return lambda: back(module(x))


_UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    F.gelu, F.silu, F.relu, torch.tanh, torch.sigmoid, lambda x: F.dropout(x, 0.1), torch.exp, lambda x: x * 2.0,
    lambda x: F.gelu(x, approximate="tanh"), torch.square, lambda x: x.pow(3.0), torch.neg, torch.sqrt, torch.rsqrt,
    lambda x: F.leaky_relu(x, 0.2), F.softplus, torch.cos, torch.sin, lambda x: x / 3.0, lambda x: x + 1.0,
    lambda x: x.to(torch.float32), lambda x: x.to(torch.bfloat16), lambda x: x.clone(), torch.log, torch.abs,
    lambda x: torch.clamp(x, min=0.0), F.hardswish, F.elu,
)  # fmt: skip


def unary(d: Draw) -> Call:
    function, x = d.one(_UNARY), d.tensor(d.elements(), dtype=d.one(d.dtypes_low))
    if d.device == "cpu":  # whose roots and logarithms are slow where the answer is no number
        x = x.detach().abs().add(0.01).requires_grad_()
    return lambda: back(function(x))


_BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.add, torch.mul, torch.sub, torch.div, torch.maximum)


def binary(d: Draw) -> Call:
    """Of equal shapes, with a row or a column broadcast, or through swapped dimensions."""
    function, dtype = d.one(_BINARY), d.one(d.dtypes_low)
    rows, columns = d.matrix(1 << 28)
    how = d.one(("equal", "equal", "row", "column", "swapped", "mixed", "heads"))
    x = d.tensor(rows, columns, dtype=dtype, grad=how != "swapped")
    if how == "heads":
        heads = d.one((4, 8, 16))
        columns = max(2, columns // 2 * 2)
        batch, length = max(1, rows // 512), min(rows, 512)
        parent = d.tensor(batch, length, heads, columns // heads + 2, dtype=dtype, grad=False)
        x = parent.transpose(1, 2)
        other = d.tensor(length, columns // heads + 2, dtype=d.one(d.dtypes), grad=False)
        return lambda: function(x, other)
    shape = {"row": (1, columns), "column": (rows, 1), "swapped": (columns, rows)}.get(how, (rows, columns))
    y = d.tensor(*shape, dtype=torch.float32 if how == "mixed" else dtype, grad=how != "swapped")
    if how == "swapped":
        return lambda: function(x, y.t())
    return lambda: back(function(x, y))


def reduction(d: Draw) -> Call:
    rows, columns = d.matrix()
    x = d.tensor(rows, columns, dtype=d.one(d.dtypes))
    function = d.one((torch.sum, torch.mean, torch.amax, torch.linalg.vector_norm))
    how = d.one((0, 1, -1, None))
    return lambda: back(function(x) if how is None else function(x, dim=how))


def softmax(d: Draw) -> Call:
    rows, columns = d.matrix()
    x = d.tensor(rows, columns, dtype=d.one(d.dtypes))
    return lambda: back(d_softmax(x))


def d_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def loss(d: Draw) -> Call:
    classes = d.one((10, 1000, d.size(512, 160000, 8)))
    rows = max(1, min(1 << 16, d.elements(1 << 12, 1 << 29) // classes))
    x, target = d.tensor(rows, classes, dtype=d.one(d.dtypes)), d.integers(classes, rows)
    if d.rng.random() < 0.15:
        other = torch.randn_like(x)
        return lambda: F.mse_loss(x, other).backward()
    return lambda: F.cross_entropy(x, target).backward()


def indexing(d: Draw) -> Call:
    """Rows picked from, added to and written into a table."""
    dtype = d.one(d.dtypes)
    columns = d.size(16, 8192, 8)
    rows = max(16, min(200000, d.elements(1 << 12, 1 << 27) // columns))
    count = max(1, min(1 << 22, d.elements(1 << 10, 1 << 29) // columns))
    table, index = d.tensor(rows, columns, dtype=dtype), d.integers(rows, count)
    how = d.one(("embedding", "embedding", "select", "getitem", "gather", "scatter", "index_add"))
    if how == "embedding":
        return lambda: back(F.embedding(index, table))
    if how == "select":
        return lambda: back(table.index_select(0, index))
    if how == "getitem":
        return lambda: back(table[index])
    wide = index[:, None].expand(count, columns)
    if how == "gather":
        return lambda: back(table.gather(0, wide))
    source, base = d.tensor(count, columns, dtype=dtype), d.tensor(rows, columns, dtype=dtype, grad=False)
    if how == "scatter":
        return lambda: back(base.scatter_add(0, wide, source))
    return lambda: back(base.index_add(0, index, source))


def ordering(d: Draw) -> Call:
    rows, columns = d.matrix(1 << 25)
    x = d.tensor(rows, columns, dtype=d.one(d.dtypes), grad=False)
    how = d.one(("sort", "topk", "cumsum", "argmax"))
    if how == "sort":
        return lambda: torch.sort(x, -1)
    if how == "topk":
        return lambda: torch.topk(x, min(columns, 8), -1)
    return (lambda: torch.cumsum(x, -1)) if how == "cumsum" else (lambda: torch.argmax(x, -1))


def movement(d: Draw) -> Call:
    """Copies that gather, spread, swap, pad, mask or join."""
    dtype = d.one(d.dtypes)
    how = d.one(("heads", "heads", "swap", "cat", "where", "pad", "stack", "fill", "repeat", "slice", "images", "roll", "flip", "write"))
    if how == "heads":
        b, t, h, size = d.size(1, 64, 1), d.size(64, 4096, 64), d.size(1, 64, 1), d.one((32, 64, 128))
        if b * t * h * size > 2e8 * d.scale:
            b = 1
        x = d.tensor(b, t, h, size, dtype=dtype)
        return lambda: back(x.transpose(1, 2).contiguous())
    if how == "images":
        n, c, side = d.size(1, 128, 1), d.size(8, 1024, 8), d.one((7, 14, 28, 56))
        if n * c * side * side > 2e8 * d.scale:
            n = 1
        x = d.tensor(n, c, side, side, dtype=dtype)
        return lambda: back(x.flatten(2).transpose(1, 2).contiguous())
    rows, columns = d.matrix(1 << 27)
    x = d.tensor(rows, columns, dtype=dtype)
    if how == "swap":
        return lambda: back(x.t().contiguous())
    if how in ("cat", "stack"):
        y = d.tensor(rows, columns, dtype=dtype)
        dim = d.one((0, 1, -1))
        return lambda: back(torch.cat((x, y), dim) if how == "cat" else torch.stack((x, y), dim))
    if how == "where":
        mask = torch.rand(rows, columns, device=d.device) < 0.5
        y = d.tensor(rows, columns, dtype=dtype)
        return d.one((lambda: back(torch.where(mask, x, y)), lambda: back(x.masked_fill(mask, 0.0))))
    if how == "pad":
        return lambda: back(F.pad(x, (1, 1)))
    if how == "slice":
        return lambda: back(x[:, : max(1, columns // 2)])
    if how == "roll":
        return lambda: back(torch.roll(x, (3, 5), (0, 1)))
    if how == "flip":
        return lambda: back(torch.flip(x, (1,)))
    if how == "write":
        part = d.tensor(rows, max(1, columns // 2), dtype=dtype, grad=False)
        return lambda: x.detach()[:, : max(1, columns // 2)].copy_(part)
    if how == "repeat":
        return lambda: back(x.repeat(2, 1))
    return lambda: (torch.zeros_like(x.detach()), torch.full_like(x.detach(), 1.0), x.detach().mul_(1.0), x.detach().add_(x.detach()))


def images(d: Draw) -> Call:
    """Pooling and resizing."""
    dtype = d.one(d.dtypes)
    c, side = d.size(8, 1024, 8), d.one((14, 28, 32, 56, 64, 112))
    n = max(1, min(256, d.elements(1 << 14, 1 << 26) // (c * side * side)))
    x = d.tensor(n, c, side, side, dtype=dtype)
    return d.one((
        lambda: back(F.max_pool2d(x, 3, 2, 1)), lambda: back(F.avg_pool2d(x, 2)),
        lambda: back(F.adaptive_avg_pool2d(x, 1)), lambda: back(F.interpolate(x, scale_factor=2.0)),
        lambda: back(F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    ))  # fmt: skip


def recurrent(d: Draw) -> Call:
    dtype = d.one(d.dtypes)
    batch, length, hidden = d.size(1, 256, 1), d.size(8, 512, 1), d.size(32, 2048, d.one((32, 32, 2)))
    layers = d.one((1, 1, 2))
    if batch * length * hidden * layers > 6e7 * d.scale:
        length = 16
    kind = d.one((nn.LSTM, nn.LSTM, nn.GRU))
    module = kind(hidden, hidden, layers, batch_first=True).to(d.device, dtype)
    x = d.tensor(batch, length, hidden, dtype=dtype)
    return lambda: back(module(x)[0])


def fourier(d: Draw) -> Call:
    n, c, side = d.size(1, 64, 1), d.size(4, 128, 4), d.one((32, 64, 85, 128, 256))
    if n * c * side * side > 5e7 * d.scale:
        n = 1
    x = d.tensor(n, c, side, side)
    return lambda: back(torch.fft.irfft2(torch.fft.rfft2(x), s=(side, side)))


def complex_product(d: Draw) -> Call:
    b, i, o, modes = d.size(1, 64, 1), d.size(8, 128, 8), d.size(8, 128, 8), d.size(64, 1024, 1)
    x = torch.randn(b, i, modes, device=d.device, dtype=torch.complex64, requires_grad=True)
    w = torch.randn(i, o, modes, device=d.device, dtype=torch.complex64, requires_grad=True)
    return lambda: back(torch.einsum("bim,iom->bom", x, w).abs())


def update(d: Draw) -> Call:
    """Optimizer steps over lists of tensors like those of a model: some large, most small."""
    width, layers = d.size(64, 4096, 64), d.size(2, 48, 1)
    while layers > 1 and 12 * width * width * layers > 6e8 * d.scale:
        layers = layers // 2
    sizes = [n for _ in range(layers) for n in (3 * width * width, width, width * width, 4 * width * width, 4 * width, width)]
    sizes += [d.one((1000, 32000, 50257)) * width] if d.scale == 1.0 else []
    dtype = d.one((torch.float32, torch.float32, torch.bfloat16)) if d.device == "cuda" else torch.float32
    parameters = [nn.Parameter(torch.randn(each, device=d.device, dtype=dtype)) for each in sizes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    how: dict[str, Any] = d.one(({"fused": True}, {"fused": True}, {"foreach": True}))  # loops run pointwise ops
    kind: Any = d.one((torch.optim.AdamW, torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD))
    if kind is torch.optim.SGD:
        how = {**how, "momentum": 0.9}
    optimizer = kind(parameters, lr=1e-3, **how)
    clip = d.rng.random() < 0.3
    optimizer.step()

    def run() -> None:
        if clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return run


def grouped(d: Draw) -> Call:
    """Products of several experts with rows of their own, where this torch has them."""
    experts, n, k = d.one((4, 8, 16, 64)), d.size(128, 8192, 64), d.size(128, 8192, 64)
    rows = max(experts * 16, min(65536, int(5e11 * d.scale / (2 * n * k)))) // experts
    rows = max(16, rows // 16 * 16)
    x = d.tensor(rows * experts, k, dtype=torch.bfloat16, grad=False)
    w = d.tensor(experts, k, n, dtype=torch.bfloat16, grad=False)
    ends = torch.arange(1, experts + 1, device=d.device, dtype=torch.int32) * rows
    return lambda: torch._grouped_mm(x, w, ends)


def eight_bits(d: Draw) -> Call:
    m, n, k = d.size(64, 32768, 64), d.size(64, 16384, 64), d.size(64, 16384, 64)
    while 2 * m * n * k > 3e12 * d.scale:
        m = max(64, m // 128 * 64)
    x = torch.randn(m, k, device=d.device).to(torch.float8_e4m3fn)
    w = torch.randn(n, k, device=d.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=d.device)
    return lambda: torch._scaled_mm(x, w, one, one, out_dtype=torch.bfloat16)


def tf32(d: Draw) -> Call:
    m, n, k = d.size(64, 32768), d.size(64, 16384), d.size(64, 16384)
    while 2 * m * n * k > 1e12 * d.scale:
        m = max(64, m // 2)
    x, w = d.tensor(m, k, grad=False), d.tensor(n, k, grad=False)

    def run() -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            torch.mm(x, w.t())
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    return run


FAMILIES: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "linear": (linear, 1300), "sizes": (sizes, 3500), "batched": (batched, 300), "attention": (attention, 220), "convolution": (convolution, 520),
    "norm": (norm, 260), "unary": (unary, 380), "binary": (binary, 380), "reduction": (reduction, 200),
    "softmax": (softmax, 70), "loss": (loss, 90), "indexing": (indexing, 200), "ordering": (ordering, 70),
    "movement": (movement, 260), "images": (images, 70), "recurrent": (recurrent, 70), "fourier": (fourier, 50),
    "complex_product": (complex_product, 40), "update": (update, 60), "grouped": (grouped, 40),
    "eight_bits": (eight_bits, 60), "tf32": (tf32, 120),
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe)."""

CUDA_ONLY = frozenset({"sizes", "grouped", "experts", "eight_bits", "tf32"})
TAGS = {"tf32": "tf32"}
"""Marks for what the op's arguments do not show."""
