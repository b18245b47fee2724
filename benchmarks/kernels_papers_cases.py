"""What benchmarks/kernels_papers.py compares: of each kernel its cases, on a device, at full or small size."""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Case:
    """One size of one kernel."""

    name: str
    ours: Callable[[], Any]
    others: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    error: Callable[[], float] | None = None
    """Of ours, against the reference."""
    facts: Callable[[Mapping[str, float]], dict[str, Any]] | None = None
    """What else is to be told, of the seconds that were measured."""


def off(found: Any, want: Any) -> float:
    """Largest norm of a difference beside the norm of what it should be."""
    pairs = zip(found, want, strict=True)
    return max(float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm().clamp(min=1e-300)) for a, b in pairs)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------- BLEU


def _bleu_plain(references: list[list[int]], hypothesis: list[int]) -> float:
    """As a Python program counts it, where NLTK is not installed."""
    logs = 0.0
    for n in range(1, 5):
        counts = [collections.Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (hypothesis, *references)]
        hits = sum(min(number, max(one[gram] for one in counts[1:])) for gram, number in counts[0].items())
        logs += math.log(max(hits, 1e-300) / max(1, len(hypothesis) - n + 1)) / 4
    closest = min((abs(len(one) - len(hypothesis)), len(one)) for one in references)[1]
    return math.exp(logs) * (1.0 if len(hypothesis) > closest else math.exp(1 - closest / len(hypothesis)))


def _bleu(batch: int, tokens: int, count: int, device: str) -> Case:
    from foretell.kernels.papers.bleu import sentence_bleu

    try:
        from nltk.translate.bleu_score import sentence_bleu as other

        name = "nltk"
    except ImportError:
        name, other = "python", _bleu_plain
    draw = random.Random(0)
    refs = [[[min(int(draw.expovariate(0.02)), 50_256) for _ in range(tokens)] for _ in range(count)] for _ in range(batch)]
    hyps = [[token if draw.random() < 0.8 else draw.randrange(50_257) for token in some[0]] for some in refs]
    given = torch.tensor(hyps, device=device), torch.tensor(refs, device=device)

    def plain() -> list[float]:
        return [float(other(some, hyp)) for hyp, some in zip(hyps, refs, strict=True)]

    def ours() -> list[float]:
        return sentence_bleu(*given).tolist()

    return Case(f"{batch}x{tokens}x{count}", ours, {name: plain}, lambda: max(abs(a - b) for a, b in zip(ours(), plain(), strict=True)))


def bleu(device: str, small: bool) -> Iterator[Case]:
    for sizes in [(8, 64, 1)] if small else [(256, 1024, 1), (256, 1024, 4), (32, 256, 1), (1024, 1024, 1)]:
        yield _bleu(*sizes, device)


# ---------------------------------------------------------------- recurrent layers


def _loop(x: Tensor, weight: Tensor, bias: Tensor, cell: str) -> Tensor:
    """As one writes it in Python, by autograd."""
    from foretell.kernels.papers.recurrent import STATES, step

    now = tuple(x.new_full((x.shape[0], *x.shape[3:]), -math.inf if state == 3 else 0.0) for state in range(STATES[cell]))
    outs = []
    for at in range(x.shape[1]):
        own = torch.einsum("bhe,ghde->bghd", now[0], weight) + bias
        now, _ = step(cell, x[:, at].unbind(1), own.unbind(1), now)
        outs.append(now[0])
    return torch.stack(outs, 1)


def _recurrent(cell: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Case:
    from foretell.kernels.papers.recurrent import CELLS
    from foretell.kernels.papers.recurrent import recurrent as op

    torch.manual_seed(0)
    (batch, length, heads, size), gates = sizes, CELLS[cell]
    x = torch.randn(batch, length, gates, heads, size, device=device).to(dtype)
    weight = (torch.randn(gates, heads, size, size, device=device) / size**0.5).to(dtype)
    given = [one.requires_grad_() for one in (x, weight, torch.randn(gates, heads, size, device=device).to(dtype))]
    up = torch.randn(batch, length, heads, size, device=device).to(dtype)

    def both(run: Any, given: list[Tensor], up: Tensor) -> list[Tensor]:
        out = run(*given, cell=cell)
        out = out[0] if isinstance(out, tuple) else out
        return [out, *torch.autograd.grad(out, given, up)]

    def error() -> float:
        """Of the first 64 steps."""
        few = [given[0].detach()[:, :64].requires_grad_(), *given[1:]]
        wide = [one.detach().double().requires_grad_() for one in few]
        return off(both(op, few, up[:, :64]), both(_loop, wide, up[:, :64].double()))

    others: dict[str, Any] = {"python": lambda: both(_loop, given, up)}
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}.get(cell)
    if heads == 1 and layer is not None:
        module = layer(size, size, batch_first=True, device=device, dtype=dtype)
        into = torch.randn(batch, length, size, device=device, dtype=dtype, requires_grad=True)
        leaves = [into, *module.parameters()]
        others["cudnn" if device == "cuda" else "torch"] = lambda: torch.autograd.grad(module(into)[0], leaves, up.squeeze(2))
    return Case(f"{cell}/{'x'.join(map(str, sizes))}/{short(dtype)}", lambda: both(op, given, up), others, error)


def recurrent(device: str, small: bool) -> Iterator[Case]:
    """Forward and backward. One head is what cuDNN, or torch's CPU layer, has, too; these two also take the product of their input."""
    from foretell.kernels.papers.recurrent import CELLS

    sizes = [(2, 4, 2, 16), (2, 4, 1, 16)] if small else [(16, 1024, 12, 64), (64, 256, 1, 64), (16, 256, 12, 32), (1, 2048, 4, 64)]
    for some in sizes:
        for cell in CELLS:
            for dtype in (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float32):
                yield _recurrent(cell, some, dtype, device)


# ---------------------------------------------------------------- Bessel functions, softmax


def _log_bessel(letter: str, name: str, order: float, argument: float, count: int, device: str) -> Case:
    from foretell.kernels.papers.log_bessel import log_iv, log_kv

    torch.manual_seed(0)
    v, x = order * torch.rand(count, dtype=torch.float64), argument * torch.rand(count, dtype=torch.float64) + 1e-3
    on = v.to(device), x.to(device)
    function, others, plain = log_iv if letter == "I" else log_kv, {}, None
    try:
        from scipy import special

        plain = special.ive if letter == "I" else special.kve
        others["scipy"] = lambda: plain(v.numpy(), x.numpy())
    except ImportError:
        pass

    def error() -> float:
        """In I_v K_{v+1} + I_{v+1} K_v = 1/x, in parts of the larger of 1 and the logarithms; tests compare with mpmath."""
        both = [log_iv(on[0], on[1]), log_kv(on[0], on[1])]
        found = torch.logaddexp(both[0] + log_kv(on[0] + 1, on[1]), log_iv(on[0] + 1, on[1]) + both[1]) + on[1].log()
        return float((found.abs() / torch.stack(both).abs().amax(0).clamp(min=1)).max())

    def facts(_: Mapping[str, float]) -> dict[str, Any]:
        """SciPy's scaled functions still overflow and vanish at large orders."""
        if plain is None:
            return {}
        found = torch.from_numpy(plain(v.numpy(), x.numpy())).log()
        return {"scipy has none": f"{1 - float(found.isfinite().double().mean()):.1%}", "ours has none": int((~function(*on).isfinite()).sum())}

    return Case(f"{letter}/{name}", lambda: function(*on), others, error, facts)


def log_bessel(device: str, small: bool) -> Iterator[Case]:
    count = 1000 if small else 100_000 if device == "cpu" else 4_000_000
    for name, (order, argument) in {"small": (15, 60), "medium": (15, 1000), "large": (1000, 1000)}.items():
        for letter in "IK":
            yield _log_bessel(letter, name, order, argument, count, device)


def _softmax(rows: int, width: int, dtype: torch.dtype, device: str) -> Case:
    from foretell.kernels.papers.softmax import two_pass_softmax

    x = torch.randn(rows, width, device=device).to(dtype)
    others: dict[str, Any] = {"eager": lambda: x.softmax(-1)}
    if device == "cuda":
        compiled = torch.compile(lambda x: x.softmax(-1), dynamic=False)
        others["compile"] = lambda: compiled(x)

    def facts(seconds: Mapping[str, float]) -> dict[str, Any]:
        return {"TB/s of two reads and a write": round(3 * x.nbytes / seconds["ours"] / 1e12, 3)}

    return Case(
        f"{rows}x{width}/{short(dtype)}", lambda: two_pass_softmax(x), others,
        lambda: off([two_pass_softmax(x[:8])], [x[:8].double().softmax(-1)]), facts,
    )  # fmt: skip


def softmax(device: str, small: bool) -> Iterator[Case]:
    sizes = [(8, 1000)] if small else [(16, 1 << 20)] if device == "cpu" else [(4096, 131_072), (1024, 262_144), (64, 1 << 22), (8192, 8192)]
    for rows, width in sizes:
        for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
            yield _softmax(rows, width, dtype, device)


# ---------------------------------------------------------------- convolutions


def weighted_conv(device: str, small: bool) -> Iterator[Case]:
    from foretell.kernels.papers.weighted_conv import density, weighted_conv

    batch, width, side = (2, 8, 16) if small else (8, 64, 56) if device == "cpu" else (64, 256, 56)
    conv = nn.Conv2d(width, width, 3, padding=1, device=device)
    x = torch.randn(batch, width, side, side, device=device, requires_grad=True)
    weights, ones = (density((3, 3), {3: (rim,)}).to(device) for rim in (0.8, 1.0))
    leaves = [x, conv.weight, conv.bias]
    yield Case(
        f"{batch}x{width}x{side}", lambda: torch.autograd.grad(weighted_conv(conv, x, weights).sum(), leaves),
        {"plain": lambda: torch.autograd.grad(conv(x).sum(), leaves)}, lambda: off([weighted_conv(conv, x, ones)], [conv(x)]),
    )  # fmt: skip


def conv_bn(device: str, small: bool) -> Iterator[Case]:
    """A step of fine-tuning with frozen statistics: evaluation mode with gradients, and the same folded."""
    from foretell.kernels.papers.conv_bn import tune
    from foretell.zoo.vision.resnet import ResNet

    full = ((3, 4, 6, 3), 64, 64, 4) if device == "cpu" else ((3, 4, 6, 3), 64, 224, 64)
    depths, width, side, batch = ((1, 1, 1, 1), 8, 32, 2) if small else full
    torch.manual_seed(0)
    model, other = (ResNet(depths, width, 1000).to(device).eval() for _ in range(2))
    other.load_state_dict(model.state_dict())
    pairs = tune(model).pairs
    x = torch.randn(batch, 3, side, side, device=device)

    def step(model: Any) -> list[Tensor]:
        return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))

    yield Case(
        f"resnet/{batch}x{side}", lambda: step(model), {"evaluation": lambda: step(other)}, lambda: off(step(model), step(other)),
        lambda _: {"pairs": len(pairs)},
    )  # fmt: skip


# ---------------------------------------------------------------- chains


def _chain(length: int, elements: int, device: str) -> Case:
    from foretell.kernels.papers.pointwise import chain

    x = torch.randn(elements, device=device)
    steps = chain(*([("mul", 0.99), ("add", 0.01), "silu"] * 10)[:length])
    others: dict[str, Any] = {"eager": lambda: steps.reference(x)}
    if device == "cuda":
        compiled = torch.compile(steps.reference, dynamic=False)
        others["compile"] = lambda: compiled(x)
    return Case(f"steps/{length}", lambda: steps(x), others, lambda: off([steps(x)], [steps.reference(x.double())]))


def pointwise(device: str, small: bool) -> Iterator[Case]:
    from foretell.kernels.papers.pointwise import Along, chain

    count, side = (3, 20) if small else (32, 224)
    torch.manual_seed(0)
    images = [torch.randint(0, 256, (3, side + 8 + k, side + 40), dtype=torch.uint8, device=device) for k in range(count)]
    crops = [image[:, 4 : 4 + side, 10 : 10 + side] for image in images]
    mean, std = (torch.tensor(one, device=device) for one in ([124.0, 116.0, 104.0], [58.0, 57.0, 57.0]))
    steps = chain("float", ("sub", "mean"), ("div", "std"), ("clamp", -2.0, 2.0), "half")
    given = {"mean": Along(0, mean), "std": Along(0, std)}

    def eager() -> list[Tensor]:
        return [steps.reference(crop, **given) for crop in crops]

    yield Case(f"normalise/{count}x{side}", lambda: steps(crops, **given), {"eager": eager}, lambda: off(steps(crops, **given), eager()))
    for length in (1, 3, 10, 30):
        yield _chain(length, 1000 if small else 1 << 24 if device == "cuda" else 1 << 20, device)


# ---------------------------------------------------------------- sparse


def _sharded(tokens: int, heads: int, block: int, device: str) -> Case:
    from foretell.kernels.papers.sharded_attention import Sharding, sharded_attention

    sharding = Sharding(block=block, near=2, shards=min(8, heads))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = [torch.randn(1, heads, tokens, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    up = torch.randn_like(given[0])

    def both(run: Any, how: Any) -> list[Tensor]:
        out = run(*given, **how)
        return [out, *torch.autograd.grad(out, given, up)]

    def error() -> float:
        few = [one[:, :, :2048].detach() for one in given]
        mask = sharding.mask(few[0].shape[2], heads, device)
        return off([sharded_attention(*few, sharding)], [F.scaled_dot_product_attention(*(one.double() for one in few), mask)])

    others = {"dense causal": lambda: both(F.scaled_dot_product_attention, {"is_causal": True})}
    return Case(
        f"{tokens}x{heads}", lambda: both(sharded_attention, {"sharding": sharding}), others, error,
        lambda _: {"density": round(sharding.density(tokens, heads), 3)},
    )  # fmt: skip


def sharded_attention(device: str, small: bool) -> Iterator[Case]:
    if small:
        yield _sharded(64, 4, 16, device)
        return
    for tokens, heads in [(2048, 8)] if device == "cpu" else [(8192, 32), (32_768, 32)]:
        yield _sharded(tokens, heads, 128, device)


def _graph(nodes: int, edges: int, device: str) -> Case:
    from foretell.kernels.papers.sparse_product import sparse_product

    generator = torch.Generator().manual_seed(0)
    ends = (nodes * torch.rand(2, edges, generator=generator) ** 3).long()
    graph = torch.sparse_coo_tensor(ends, torch.rand(edges, generator=generator), (nodes, nodes), check_invariants=False)
    graph = graph.coalesce().to_sparse_csr().to(device)
    degree = (graph.crow_indices()[1:] - graph.crow_indices()[:-1])[graph.col_indices()]

    def values(one: Tensor) -> list[Tensor]:
        """In order of rows and columns: torch leaves a row's columns as they came."""
        ends = one.crow_indices()
        row = torch.repeat_interleave(torch.arange(nodes, device=device), ends[1:] - ends[:-1])
        return [one.values()[(row * nodes + one.col_indices()).argsort()]]

    def error() -> float:
        return off(values(sparse_product(graph, graph)), values(torch.sparse.mm(graph, graph)))

    return Case(
        f"{nodes}x{edges}", lambda: sparse_product(graph, graph), {"torch.sparse.mm": lambda: torch.sparse.mm(graph, graph)}, error,
        lambda _: {"products": int(degree.sum())},
    )  # fmt: skip


def sparse_product(device: str, small: bool) -> Iterator[Case]:
    """A graph's matrix times itself; degrees follow a power law."""
    for nodes, edges in [(200, 1000)] if small else [(20_000, 100_000), (100_000, 400_000)]:
        yield _graph(nodes, edges, device)


# ---------------------------------------------------------------- science


def hash_grid(device: str, small: bool) -> Iterator[Case]:
    """A field of hashed tables, as in the zoo: encoding and MLP by themselves, and in the whole, which Amdahl's law foretells."""
    from foretell.kernels.papers.hash_grid import amdahl, fuse
    from foretell.zoo.scenes import pvd

    points = 500 if small else 1 << 14 if device == "cpu" else 1 << 20
    torch.manual_seed(0)
    fields = [pvd.Field("hash", 15, {"levels": 16, "entries": 1 << (10 if small else 19), "finest": 2048}).to(device) for _ in range(2)]
    fields[1].load_state_dict(fields[0].state_dict())
    fuse(fields[0])
    x, d = 2 * torch.rand(points, 3, device=device) - 1, torch.randn(points, 3, device=device)
    part_seconds: dict[str, float] = {}

    def step(which: Any) -> list[Tensor]:
        _, density, colour = which(x, d)
        return list(torch.autograd.grad(density.sum() + colour.square().sum(), list(which.parameters())))

    def part(which: Any) -> list[Tensor]:
        return list(torch.autograd.grad(which.first(x).square().sum(), list(which.first.parameters())))

    def keep(seconds: Mapping[str, float]) -> dict[str, Any]:
        part_seconds.update(seconds)
        return {}

    def foretold(seconds: Mapping[str, float]) -> dict[str, Any]:
        if not part_seconds:
            return {}
        share, factor = min(1.0, part_seconds["zoo"] / seconds["zoo"]), part_seconds["zoo"] / part_seconds["ours"]
        told = {"share": share, "faster by": factor, "so the whole by": amdahl(share, factor), "measured": seconds["zoo"] / seconds["ours"]}
        return {**{name: round(one, 3) for name, one in told.items()}, "with an engine of 8x": round(amdahl(share, 8), 2)}

    yield Case(f"part/{points}", lambda: part(fields[0]), {"zoo": lambda: part(fields[1])}, lambda: off(part(fields[0]), part(fields[1])), keep)
    yield Case(f"whole/{points}", lambda: step(fields[0]), {"zoo": lambda: step(fields[1])}, lambda: off(step(fields[0]), step(fields[1])), foretold)


def _product(form: str, degree: int, batch: int, device: str) -> Case:
    from foretell.kernels.papers import tensor_product as products

    x, y = torch.randn(2, batch, (degree + 1) ** 2, device=device)

    def run(form: str, x: Tensor = x, y: Tensor = y) -> Tensor:
        return products.tensor_product(x, y, None, degree, form=form)

    equals = [other for other in products.FORMS if other != form and products.equivalent(form, other)]
    return Case(
        f"{form}/{degree}", lambda: run(form), {other: (lambda other=other: run(other)) for other in equals},
        lambda: off([run(form)], [run(form, x.double(), y.double())]), lambda _: {"paths": products.expressivity(degree, form).paths},
    )  # fmt: skip


def tensor_product(device: str, small: bool) -> Iterator[Case]:
    """Each form by itself: those that are not equal are not compared as if they were."""
    from foretell.kernels.papers.tensor_product import FORMS

    for degree in (1,) if small else (1, 2, 4, 6):
        for form in FORMS:
            yield _product(form, degree, 10 if small else 2000 if device == "cpu" else 100_000, device)


KERNELS: dict[str, Callable[[str, bool], Iterator[Case]]] = {
    "bleu": bleu, "recurrent": recurrent, "log_bessel": log_bessel, "softmax": softmax, "weighted_conv": weighted_conv, "conv_bn": conv_bn,
    "pointwise": pointwise, "sharded_attention": sharded_attention, "sparse_product": sparse_product, "hash_grid": hash_grid,
    "tensor_product": tensor_product,
}  # fmt: skip
