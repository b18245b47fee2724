"""Ops whose seconds neither FLOPs nor bytes tell: decompositions, sampling, searching, counting, selecting, sorting.

Networks have few of them, and one of those may take as long as all the rest: it goes through its matrix column by column,
picks bytes from everywhere, or makes the host wait for how much it found. Cases are drawn as those of `cases` are.
"""

# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.hardware.probe.cases.corners import CORNERS, TIMED
from foretell.hardware.probe.cases.families import Call, Draw
from foretell.hardware.probe.cases.families import back as back

COMMON = frozenset("""
mm bmm addmm baddbmm add add_ sub sub_ mul mul_ div div_ neg sum mean copy_ clone _to_copy zeros zeros_like ones ones_like
new_zeros new_ones fill_ zero_ abs sqrt rsqrt exp where cat stack randn rand scalar_tensor arange full empty transpose_
masked_fill masked_fill_ eq lt gt ge lift_fresh pow
""".split())  # fmt: skip # noqa: SIM905
"""Ops of these cases that other families time well enough."""
SECONDS = 90.0
"""Spent on these cases alone, at most."""


# ---------------------------------------------------------------- matrices taken apart


def _batch(d: Draw, side: int, columns: int, high: int = 16384) -> int:
    """How many matrices of a side: their columns together are limited, since most are gone through one by one."""
    return 1 if d.rng.random() < 0.25 else max(1, min(d.size(1, high, 1), columns // side))


def _side(d: Draw, high: int = 512) -> int:
    return d.size(2, high, d.one((1, 1, 8, 32))) if d.rng.random() < 0.7 else d.one((3, 4, 6))


def _square(d: Draw, columns: int, high: int = 512) -> tuple[Tensor, int]:
    side = _side(d, high)
    return d.tensor(_batch(d, side, columns), side, side, grad=False), side


def _definite(d: Draw, columns: int, high: int = 1024) -> tuple[Tensor, int]:
    x, side = _square(d, columns, high)
    return x @ x.mT + side * torch.eye(side, device=d.device), side


def singular(d: Draw) -> Call:
    side = _side(d)
    long = side if d.rng.random() < 0.6 else side * d.one((2, 4, 16) if side <= 64 else (2, 4))
    x = d.tensor(_batch(d, side, 4096), *((side, long) if d.rng.random() < 0.3 else (long, side)), grad=False)
    how = d.one(("thin", "thin", "full", "values"))
    if how == "values":
        return lambda: torch.linalg.svdvals(x)
    return lambda: torch.linalg.svd(x, full_matrices=how == "full" and long <= 2 * side)


def eigen(d: Draw) -> Call:
    x, _ = _definite(d, 8192, 512)
    return d.one((lambda: torch.linalg.eigh(x), lambda: torch.linalg.eigh(x), lambda: torch.linalg.eigvalsh(x)))


def orthogonal(d: Draw) -> Call:
    side = _side(d)
    x = d.tensor(_batch(d, side, 8192), side * d.one((1, 1, 2, 8)), side, grad=False)
    return lambda: torch.linalg.qr(x)


def triangle(d: Draw) -> Call:
    x, _ = _definite(d, 1 << 17)
    return lambda: torch.linalg.cholesky(x)


def solving(d: Draw) -> Call:
    x, side = _definite(d, 1 << 16, 512)
    right = d.tensor(x.shape[0], side, d.one((1, 4, side)), grad=False)
    factor, upper = torch.linalg.cholesky(x), d.one((True, False))
    return d.one((
        lambda: torch.linalg.solve(x, right), lambda: torch.linalg.inv(x), lambda: torch.linalg.det(x),
        lambda: torch.linalg.slogdet(x), lambda: torch.linalg.lu_factor_ex(x), lambda: torch.linalg.lu(x),
        lambda: torch.linalg.solve_triangular(x, right, upper=upper), lambda: torch.cholesky_solve(right, factor),
        lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), right),
    ))  # fmt: skip


def tiny(d: Draw) -> Call:
    """Many products of small matrices: poses, bones, quadratic forms."""
    m, n, k = (d.one((1, 2, 3, 4, 8, d.size(2, 16, 1))) for _ in range(3))
    batch = max(1, min(1 << 20, d.elements(1 << 10, 1 << 24) // (m * n + n * k + m * k)))
    x, y = d.tensor(batch, m, k), d.tensor(batch, k, n)
    return lambda: back(torch.bmm(x, y))


def functions(d: Draw) -> Call:
    x, side = _square(d, 512, 128)
    x = x / side
    right = d.tensor(x.shape[0], side, 4, grad=False)
    return d.one((
        lambda: torch.linalg.matrix_exp(x), lambda: torch.linalg.eig(x), lambda: torch.linalg.lstsq(x, right),
        lambda: torch.linalg.pinv(x),
    ))  # fmt: skip


# ---------------------------------------------------------------- picking from pictures, tables and lists


def sampling(d: Draw) -> Call:
    dtype, flat = d.one(d.dtypes), d.rng.random() < 0.7
    count = d.elements(1 << 10, 1 << 22)
    channels, n = d.one((1, 3, d.size(4, 256, 4))), d.size(1, 32, 1)
    side, dims = d.size(8, 256 if flat else 48, 1), 2 if flat else 3
    while n > 1 and n * channels * side**dims > (1 << 26) * d.scale:
        n //= 2
    points = max(1, int(count / n / max(1, channels // 16)))
    x = d.tensor(n, channels, *(side,) * dims, dtype=dtype)
    grid = (2.2 * torch.rand(n, *(1,) * (dims - 2), d.one((1, 4)), points, dims, device=d.device) - 1.1).to(dtype)
    grid.requires_grad_(d.rng.random() < 0.5)
    mode, corners = d.one(("bilinear", "bilinear", "bilinear", "nearest")), d.one((True, False))
    edge = d.one(("zeros", "zeros", "border", "reflection"))
    return lambda: back(F.grid_sample(x, grid, mode=mode, padding_mode=edge, align_corners=corners))


def searching(d: Draw) -> Call:
    dtype, rows = d.one((torch.float32, torch.float32, torch.int64)), d.one((1, 1, d.size(1, 4096, 1)))
    length, asked = d.size(4, 65536, 1), max(1, d.elements(1 << 8, 1 << 24) // rows)
    table = (1000 * torch.rand(rows, length, device=d.device)).sort(-1).values.to(dtype)
    wanted = (1000 * torch.rand(rows, asked, device=d.device)).to(dtype)
    if rows == 1:
        return d.one((lambda: torch.bucketize(wanted[0], table[0]), lambda: torch.searchsorted(table[0], wanted[0])))
    return lambda: torch.searchsorted(table, wanted)


def counting(d: Draw) -> Call:
    count, classes = d.elements(1 << 8, 1 << 24), d.one((10, 256, d.size(16, 65536, 1)))
    whole, x = d.integers(classes, count), d.tensor(count, grad=False)
    weight = x.abs()
    return d.one((
        lambda: torch.bincount(whole), lambda: torch.bincount(whole, minlength=classes),
        lambda: torch.bincount(whole, weight), lambda: torch.histc(x, min(classes, 256), -3.0, 3.0), lambda: torch.histc(x, 100),
    ))  # fmt: skip


def distinct(d: Draw) -> Call:
    count, classes = d.elements(1 << 8, 1 << 23), d.one((10, 1000, 1 << 20))
    whole = d.integers(classes, count)
    x = whole.float() if d.rng.random() < 0.3 else whole
    ordered, pairs = x.sort().values, x[: count // 2 * 2].view(-1, 2)[: 1 << 18]
    return d.one((
        lambda: torch.unique(x), lambda: torch.unique(x, return_inverse=True),
        lambda: torch.unique(x, return_inverse=True, return_counts=True), lambda: torch.unique_consecutive(ordered),
        lambda: torch.unique_consecutive(ordered, return_inverse=True, return_counts=True),
        lambda: torch.unique(pairs, dim=0, return_inverse=True),
    ))  # fmt: skip


def selecting(d: Draw) -> Call:
    """How much is found decides how much room is needed: the host waits for it."""
    count, columns = d.elements(1 << 8, 1 << 25), d.one((1, 1, 64))
    rows = max(1, count // columns)
    x = d.tensor(rows, columns, dtype=d.one(d.dtypes), grad=False)
    mask = torch.rand(rows, device=d.device) < d.one((0.01, 0.5))
    wide, kept, counts = mask[:, None].expand(rows, columns).contiguous(), x[mask], d.integers(4, rows)
    one = torch.ones((), device=d.device, dtype=x.dtype)
    return d.one((
        lambda: torch.nonzero(mask), lambda: x[mask], lambda: torch.masked_select(x, wide), lambda: x.clone().__setitem__(mask, kept),
        lambda: torch.repeat_interleave(counts), lambda: x.clone().index_put_((mask,), one), lambda: torch.nonzero(wide),
        lambda: x.flatten()[0].item(),
    ))  # fmt: skip


def distances(d: Draw) -> Call:
    batch, width, p = d.one((1, d.size(1, 64, 1))), d.one((2, 3, d.size(4, 256, 4))), d.one((2.0, 2.0, 1.0, 4.0))
    rows, others = d.size(4, 8192, 1), d.size(4, 8192, 1)
    while rows > 4 and batch * rows * others > (1 << 25) * d.scale:
        rows, others = rows // 2, max(4, others // 2)
    x, y = d.tensor(batch, rows, width), d.tensor(batch, others, width)
    plain = d.rng.random() < 0.6
    return lambda: back(torch.cdist(x, y, p, compute_mode="donot_use_mm_for_euclid_dist" if plain else "use_mm_for_euclid_dist_if_necessary"))


def drawing(d: Draw) -> Call:
    rows, columns = d.size(1, 1024, 1), d.size(4, 65536, 1)
    rows = max(1, min(rows, int((1 << 24) * d.scale) // columns))
    x, many = d.tensor(rows, columns, grad=False).abs() + 0.01, d.one((1, min(columns, 8)))
    again = d.one((True, False))
    return lambda: torch.multinomial(x, many, again)


def orders(d: Draw) -> Call:
    """Sorting, choosing and running sums along any dimension."""
    rows, columns = d.matrix(1 << 24)
    dtype = d.one((*d.dtypes, torch.int64))
    x = d.integers(1 << 20, rows, columns) if dtype is torch.int64 else d.tensor(rows, columns, dtype=dtype, grad=False)
    dim, k = d.one((0, 1, 1)), max(1, x.shape[1] // d.one((2, 8, 64)))
    floating = x if x.is_floating_point() else x.float()
    return d.one((
        lambda: torch.sort(x, dim), lambda: torch.argsort(x, dim), lambda: torch.topk(x, k, 1), lambda: torch.topk(x, 1, 1),
        lambda: torch.kthvalue(x, max(1, k // 2), 1), lambda: torch.median(floating, 1), lambda: torch.cumsum(x, dim),
        lambda: torch.cumprod(floating, dim), lambda: torch.cummax(floating, dim), lambda: torch.logcumsumexp(floating.float(), dim),
        lambda: torch.cumsum(x, dim), lambda: torch.sort(x.flatten(), stable=True),
    ))  # fmt: skip


def indices(d: Draw) -> Call:
    """Single numbers and rows, picked and added by one index or several."""
    dtype, columns = d.one(d.dtypes), d.one((1, 4, d.size(4, 1024, 4)))
    rows = max(4, min(1 << 20, d.elements(1 << 10, 1 << 25) // columns))
    count = max(1, min(1 << 22, d.elements(1 << 8, 1 << 25) // columns))
    table, base = d.tensor(rows, columns, dtype=dtype), d.tensor(rows, columns, dtype=dtype, grad=False)
    index, source = d.integers(rows, count), d.tensor(count, columns, dtype=dtype)
    across, wide = d.integers(columns, count), index[:, None].expand(count, columns)
    many = d.integers(columns, rows, max(1, count // rows))
    few, small = d.tensor(d.one((16, 256)), grad=False).to(dtype), d.integers(16, count * columns)
    how = d.one(("sum", "mean", "amax"))
    return d.one((
        lambda: back(table[index, across]), lambda: back(table.take(across)), lambda: back(torch.take_along_dim(table, many, 1)),
        lambda: base.index_put((index,), source.detach(), accumulate=True), lambda: base.index_put((index,), source.detach()),
        lambda: base.index_put((index, across), source.detach()[:, 0], accumulate=True),
        lambda: back(base.scatter_reduce(0, wide, source, how)), lambda: base.scatter(0, wide, source.detach()),
        lambda: base.scatter(0, wide, 1.0), lambda: base.index_fill(0, index, 0.0), lambda: few[small], lambda: few[small.view(count, columns)],
        lambda: base.index_copy(0, index, source.detach()), lambda: base.index_reduce(0, index, source.detach(), "amax"),
    ))  # fmt: skip


# ---------------------------------------------------------------- pictures


def spectra(d: Draw) -> Call:
    """One, two and three dimensions, real and complex, round lengths and odd ones."""
    dims, rows = d.one((1, 1, 2, 3)), d.size(1, 4096, 1)
    side = {1: d.one((d.size(16, 65536, 1), d.one((256, 1024, 4096)))), 2: d.size(8, 512, 1), 3: d.size(8, 96, 1)}[dims]
    rows = max(1, min(rows, int((1 << 25) * d.scale) // side**dims))
    x = d.tensor(rows, *(side,) * dims)
    axes = tuple(range(1, dims + 1))
    if d.rng.random() < 0.4:
        z = torch.complex(x.detach(), x.detach())
        return lambda: torch.fft.ifftn(torch.fft.fftn(z, dim=axes), dim=axes)
    return lambda: back(torch.fft.irfftn(torch.fft.rfftn(x, dim=axes), s=(side,) * dims, dim=axes))


def borders(d: Draw) -> Call:
    c, side = d.size(2, 256, 1), d.one((8, 16, 32, 56, 128))
    n = max(1, min(64, d.elements(1 << 10, 1 << 25) // (c * side * side)))
    x, width = d.tensor(n, c, side, side, dtype=d.one(d.dtypes)), d.one((1, 3))
    long, most = x.detach().flatten(2).requires_grad_(), d.one((1, 2))
    deep = x.detach()[:, :, None].expand(n, c, 2, side, side).contiguous().requires_grad_()
    return d.one((
        lambda: back(F.pad(x, (width,) * 4, mode="reflect")), lambda: back(F.pad(x, (width,) * 4, mode="replicate")),
        lambda: back(F.pad(long, (width, width), mode="replicate")), lambda: back(F.pad(long, (width, width), mode="reflect")),
        lambda: back(F.pad(deep, (1,) * 6, mode="replicate")), lambda: back(torch.roll(x, (most, -most), (2, 3))),
        lambda: back(F.pixel_shuffle(x[:, : c // 4 * 4], 2)) if c >= 4 else back(F.pad(x, (1,) * 4, mode="circular")),
        lambda: back(F.pixel_unshuffle(x, 2)),
    ))  # fmt: skip


def resizing(d: Draw) -> Call:
    c, side = d.size(1, 256, 1), d.one((7, 14, 28, 56))
    n = max(1, min(64, d.elements(1 << 10, 1 << 23) // (c * side * side)))
    x, to = d.tensor(n, c, side, side, dtype=d.one(d.dtypes)), d.one((0.5, 1.7, 2.0, 4.0))
    deep = x.detach()[:, :, None].expand(n, c, 4, side, side).contiguous().requires_grad_()
    return d.one((
        lambda: back(F.interpolate(x, scale_factor=to, mode="bicubic")), lambda: back(F.interpolate(x, scale_factor=to, mode="bilinear")),
        lambda: back(F.interpolate(x, scale_factor=to, mode="bilinear", antialias=True)),
        lambda: back(F.interpolate(deep, scale_factor=2.0, mode="trilinear")), lambda: back(F.interpolate(deep, scale_factor=2.0)),
        lambda: back(F.interpolate(x.flatten(2), scale_factor=2.0, mode="linear")), lambda: back(F.adaptive_avg_pool2d(x, (5, 4))),
        lambda: back(F.adaptive_max_pool2d(x, (3, 3))), lambda: back(F.max_pool2d(x, 2)),
        lambda: back(F.max_pool3d(deep, 2)), lambda: back(F.avg_pool3d(deep, 2)),
        lambda: back(F.unfold(x, 3, padding=1)), lambda: back(F.fold(F.unfold(x, 2, stride=2), (side // 2 * 2,) * 2, 2, stride=2)),
    ))  # fmt: skip


# ---------------------------------------------------------------- seldom seen


_SELDOM: tuple[Callable[[Tensor, Tensor, Tensor], Any], ...] = (
    lambda x, y, i: x.addcmul_(x, y), lambda x, y, i: i & 3, lambda x, y, i: i | 5, lambda x, y, i: i ^ 9, lambda x, y, i: i << 2,
    lambda x, y, i: i >> 1, lambda x, y, i: 1.0 - x, lambda x, y, i: x.clamp_min(0.1), lambda x, y, i: torch.minimum(x, y),
    lambda x, y, i: i % 7, lambda x, y, i: i // 7, lambda x, y, i: x.floor(), lambda x, y, i: torch.atan2(x, y), lambda x, y, i: x.sign(),
    lambda x, y, i: torch.lerp(x, y, 0.3), lambda x, y, i: x.expm1(), lambda x, y, i: x.sinc(),
    lambda x, y, i: torch.linspace(0, 1, x.numel(), device=x.device),
    lambda x, y, i: torch.randint(0, 9, (x.numel(),), device=x.device), lambda x, y, i: torch.addcdiv(x, x, y.abs() + 1),
    lambda x, y, i: torch.log1p(x.abs()), lambda x, y, i: x.erf(), lambda x, y, i: torch.nan_to_num(x), lambda x, y, i: x.isfinite(),
    lambda x, y, i: ~(x > 0), lambda x, y, i: (x > 0).logical_and(y > 0), lambda x, y, i: x.round(), lambda x, y, i: x.tan(),
    lambda x, y, i: x.acos(),
    lambda x, y, i: torch.rand_like(x), lambda x, y, i: torch.randn_like(x), lambda x, y, i: torch.randperm(min(x.numel(), 1 << 20), device=x.device),
)  # fmt: skip


def seldom(d: Draw) -> Call:
    count = d.elements(1 << 6, 1 << 25)
    x, y, i = d.tensor(count, dtype=d.one(d.dtypes), grad=False), d.tensor(count, grad=False), d.integers(1 << 16, count)
    calls = d.rng.sample(_SELDOM, 4)

    def run() -> None:
        for call in calls:
            call(x, y.to(x.dtype), i)

    return run


def folding(d: Draw) -> Call:
    """Reductions that few networks have, and sums over several losses."""
    rows, columns = d.matrix(1 << 24)
    x, dim = d.tensor(rows, columns, dtype=d.one(d.dtypes)), d.one((0, 1))
    y, yes = torch.rand(rows, columns, device=d.device).to(x.dtype), x.detach() > 0
    three = d.tensor(rows * columns // 3 + 1, 3)
    side = max(1, int((rows * columns // 8) ** 0.5))
    picture, target = d.tensor(1, 8, side, side), d.integers(8, 1, side, side)
    return d.one((
        lambda: back(torch.logsumexp(x, dim)), lambda: back(x.prod(dim)), lambda: back(x.std(dim)), lambda: back(x.amin(dim)),
        lambda: back(x.max(dim)[0]), lambda: x.detach().max(), lambda: yes.any(dim), lambda: yes.all(),
        lambda: back(torch.cross(three, three + 1, -1)),
        lambda: F.binary_cross_entropy_with_logits(x, y).backward(), lambda: F.smooth_l1_loss(x, y).backward(),
        lambda: F.cross_entropy(picture, target).backward(), lambda: F.kl_div(x, y).backward(), lambda: back(x.var(dim)),
        lambda: back(x.tril()), lambda: back(F.normalize(x, dim=dim)), lambda: back(torch.linalg.matrix_norm(x)), lambda: back(x.cumsum(dim)),
    ))  # fmt: skip


RARE: dict[str, tuple[Callable[[Draw], Call], int]] = {
    "singular": (singular, 32), "eigen": (eigen, 24), "orthogonal": (orthogonal, 24), "triangle": (triangle, 24),
    "solving": (solving, 54), "functions": (functions, 12), "tiny": (tiny, 40), "sampling": (sampling, 40), "searching": (searching, 24),
    "counting": (counting, 24), "distinct": (distinct, 36), "selecting": (selecting, 42), "distances": (distances, 32),
    "drawing": (drawing, 16), "orders": (orders, 72), "indices": (indices, 84), "spectra": (spectra, 32), "borders": (borders, 32),
    "resizing": (resizing, 40), "seldom": (seldom, 56), "folding": (folding, 54), **CORNERS,
}  # fmt: skip
"""Family → (how to draw a case, cases of a full probe)."""


def worth(name: str, family: str = "") -> bool:
    """Whether an op of such a case is timed here."""
    short = name.split(".")[1]
    return short not in COMMON or short in TIMED.get(family, ())
