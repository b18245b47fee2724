"""Output layer and cross entropy in chunks against torch's own, in values, gradients, precision and memory."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretell.hardware.lookup import shipped_profile
from foretell.hardware.parse import parse
from foretell.kernels.kernel import interpreted
from foretell.kernels.linear_cross_entropy import MOST_ROUNDINGS, chunk_rows, forward, linear_cross_entropy, reference
from foretell.price.machine import machine
from foretell.price.time import Machine
from foretell.tune.head_cost import HeadShape, fastest, head_bytes, head_costs, head_seconds

IGNORED = -100


def drawn(dtype: torch.dtype = torch.float64, rows: int = 30, width: int = 6, words: int = 11) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype) for shape in ((rows, width), (words, width), (words,)))
    target = torch.randint(words, (rows,), generator=chance)
    target[::7] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), target


def gradients(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor, target: Tensor, **settings: Any) -> list[Tensor]:
    """The loss, and gradients under a gradient that is not 1."""
    found = loss(x, weight, target, bias, **settings)
    up = torch.linspace(0.5, 2.0, max(1, found.numel()), dtype=found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad(found, (x, weight, bias), up)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_torchs(reduction: str, recompute: bool) -> None:
    inputs = drawn()
    for smoothing, z_loss, softcap, chunks in itertools.product((0.0, 0.1), (0.0, 1e-2), (0.0, 3.0), (1, 4, 30)):
        settings = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
        if interpreted() and chunks != 4:
            continue
        for mine, theirs in zip(
            gradients(linear_cross_entropy, *inputs, chunks=chunks, recompute=recompute, **settings), gradients(reference, *inputs, **settings),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_the_reference_is_cross_entropy() -> None:
    x, weight, bias, target = drawn()
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.2)):
        wanted = F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(reference(x, weight, target, bias, reduction=reduction, label_smoothing=smoothing), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_at_most_twice_eagers(dtype: torch.dtype) -> None:
    """Triton's own where it is interpreted, which cannot bfloat16."""
    if interpreted() and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates bfloat16")
    inputs = drawn(dtype, rows=40, width=16, words=300)
    wide = [one.detach().double().requires_grad_() for one in inputs[:3]]
    for settings in ({}, {"softcap": 5.0, "z_loss": 1e-3}, {"label_smoothing": 0.1, "reduction": "none"}):
        truth = gradients(reference, *wide, inputs[3], **settings)
        eager = gradients(reference, *inputs, **settings)
        for mine, theirs, true in zip(gradients(linear_cross_entropy, *inputs, chunks=4, **settings), eager, truth, strict=True):
            gap, own = ((one.double() - true).norm() / true.norm() for one in (mine, theirs))
            assert gap <= max(2 * own, 2 * torch.finfo(torch.float32).eps)


# ---------------------------------------------------------------- what a gradient is added up in


def roundings_apart(chunks: int, seed: int, sums: str) -> float:
    """Error of the weight's gradient in bfloat16 over that of eager, root mean square."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 32, generator=chance).bfloat16()
    weight = (torch.randn(256, 32, generator=chance) * 32**-0.5).bfloat16().requires_grad_()
    target = torch.randint(256, (1024,), generator=chance)
    wide = weight.detach().double().requires_grad_()
    reference(x.double(), wide, target).backward()
    (own,) = torch.autograd.grad(reference(x, weight, target), weight)
    (mine,) = torch.autograd.grad(linear_cross_entropy(x, weight, target, chunks=chunks, sums=sums), weight)
    assert wide.grad is not None
    return float((mine.double() - wide.grad).norm() / (own.double() - wide.grad).norm())


@pytest.mark.skipif(interpreted(), reason="bfloat16")
def test_few_chunks_are_added_up_in_bfloat16_and_many_in_float32() -> None:
    assert all(roundings_apart(MOST_ROUNDINGS, seed, "auto") <= 2 for seed in range(3))
    assert all(roundings_apart(8 * MOST_ROUNDINGS, seed, "weight") > 2 for seed in range(3)), "the rule is not needed"
    assert all(roundings_apart(8 * MOST_ROUNDINGS, seed, "auto") <= 1.1 for seed in range(3))


def test_a_float32_weight_under_autocast_has_float32_sums() -> None:
    """Products in bfloat16, the gradient never rounded to it: nearer than eager, which does."""
    x, weight, _, target = drawn(torch.float32, rows=64, width=32, words=50)
    wide = [one.detach().double().requires_grad_() for one in (x, weight)]
    reference(*wide, target).backward()
    found = {}
    for loss in (linear_cross_entropy, reference):
        with torch.autocast("cpu", torch.bfloat16):
            found[loss] = torch.autograd.grad(loss(x, weight, target, **({"chunks": 4} if loss is linear_cross_entropy else {})), (x, weight))
    for place, true in enumerate(wide):
        mine, eager = (float((found[loss][place].double() - true.grad).norm()) for loss in (linear_cross_entropy, reference))
        assert found[linear_cross_entropy][place].dtype == torch.float32 and mine <= 2 * eager


def test_formats_linear_refuses_are_refused() -> None:
    x, weight, _, target = drawn(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        linear_cross_entropy(x.bfloat16(), weight, target)


def test_a_scaled_loss_in_fp16_keeps_small_gradients() -> None:
    """Shares of words of 1e-4 over a thousand rows vanish in fp16 unless the loss's scale is in them."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 8, generator=chance).half()
    weight = (0.1 * torch.randn(3000, 8, generator=chance)).half().requires_grad_()
    target = torch.zeros(1024, dtype=torch.long)
    (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, target, chunks=2) * 2.0**14, weight)
    (eager,) = torch.autograd.grad(reference(x, weight, target) * 2.0**14, weight)
    assert bool(eager[1:].any()) and float((found - eager).float().norm() / eager.float().norm()) < 0.02


# ---------------------------------------------------------------- how a loss is used


def test_accumulated_gradients_and_a_tied_weight() -> None:
    x, weight, _, target = drawn(rows=24)
    words = torch.arange(24) % 11

    def step(loss: Callable[..., Tensor]) -> Tensor:
        weight.grad = None
        for part in range(3):
            rows = slice(8 * part, 8 * part + 8)
            hidden = F.embedding(words[rows], weight) + x[rows]
            (loss(hidden, weight, target[rows]) / 3).backward()
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(step(functools.partial(linear_cross_entropy, chunks=2)), step(reference), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 2), (1, 2), (0, 1)])
def test_gradients_nobody_asked_for_are_not_made(frozen: tuple[int, ...]) -> None:
    x, weight, bias, target = drawn()
    for place in frozen:
        (x, weight, bias)[place].requires_grad_(False)
    wanted = [n not in frozen for n in range(3)]
    made = forward(x.detach(), weight.detach(), bias.detach(), target, IGNORED, 0.0, 0.0, 0.0, "mean", 2, "auto", *wanted)[2:]
    assert [one.numel() > 0 for one in made] == wanted
    free = [one for one in (x, weight, bias) if one.requires_grad]
    mine, theirs = (torch.autograd.grad(loss(x, weight, target, bias), free) for loss in (linear_cross_entropy, reference))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_second_backward_is_refused_and_recomputing_allows_it() -> None:
    x, weight, _, target = drawn()
    loss = linear_cross_entropy(x, weight, target)
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()
    x.grad = None
    again = linear_cross_entropy(x, weight, target, recompute=True)
    again.backward(retain_graph=True)
    again.backward()
    (once,) = torch.autograd.grad(reference(x, weight, target), x)
    torch.testing.assert_close(x.grad, 2 * once)


def test_nothing_counts() -> None:
    x, weight, bias, target = drawn()
    target = torch.full_like(target, IGNORED)
    loss, *found = gradients(linear_cross_entropy, x, weight, bias, target)
    assert loss.isnan() and not any(bool(one.any()) for one in found)
    empty = linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert empty.item() == 0.0 and not bool(torch.autograd.grad(empty, weight)[0].any())


def test_leading_dimensions_strides_and_masked_words() -> None:
    x, weight, bias, target = drawn(rows=24)
    bias = bias.detach().index_fill(0, torch.tensor([3]), -torch.inf)
    target = torch.where(target == 3, 4, target).view(2, 12)
    strided = weight.detach().t().contiguous().t().requires_grad_()
    turned = x.detach().view(12, 2, 6).transpose(0, 1).requires_grad_()
    mine, theirs = (loss(turned, strided, target, bias, reduction="none") for loss in (linear_cross_entropy, reference))
    assert mine.shape == target.shape
    torch.testing.assert_close(mine.flatten(), theirs)
    found = [torch.autograd.grad(one.sum(), (turned, strided)) for one in (mine, theirs)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert bool(found[0][0].isfinite().all())


def test_a_target_outside_the_words_is_no_silent_number() -> None:
    x, weight, _, target = drawn(torch.float32)
    target[1] = 11
    if interpreted():
        assert linear_cross_entropy(x, weight, target).isnan()
    else:
        with pytest.raises((RuntimeError, IndexError)):
            linear_cross_entropy(x, weight, target)


@pytest.mark.parametrize(("name", "value"), [("reduction", "average"), ("sums", "bfloat16")])
def test_unknown_words_are_refused(name: str, value: str) -> None:
    x, weight, _, target = drawn()
    with pytest.raises(ValueError, match=value):
        linear_cross_entropy(x, weight, target, **{name: value})


# ---------------------------------------------------------------- as an op of torch


@pytest.mark.skipif(interpreted(), reason="the same ops, many times slower")
@pytest.mark.parametrize("wanted", [(True, True, True), (False, False, False)])
def test_opcheck(wanted: tuple[bool, ...]) -> None:
    x, weight, bias, target = drawn(torch.float32)
    op = torch.ops.foretell_kernels.linear_cross_entropy.default
    torch.library.opcheck(op, (x, weight, bias, target, IGNORED, 0.1, 1e-3, 4.0, "mean", 3, "auto", *wanted))
    rows = torch.ops.foretell_kernels.logits_gradient_.default
    torch.library.opcheck(rows, (torch.randn(5, 7), 6, torch.arange(5), torch.ones(()), None, IGNORED, 0.0, 0.0, 0.0, True))
    torch.library.opcheck(torch.ops.foretell_kernels.scale_.default, (torch.randn(5), torch.tensor(2.0)))


@pytest.mark.skipif(interpreted(), reason="torch.compile")
def test_it_compiles_without_a_break() -> None:
    x, weight, _, target = drawn(torch.float32)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x * 2, weight, target, chunks=2) / 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    mine, theirs = (torch.autograd.grad(one(x, weight), (x, weight)) for one in (compiled, step))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------- memory against time


class PeakBytes(TorchDispatchMode):
    """Bytes of storages made meanwhile and still there, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and (key := one.untyped_storage()._cdata) not in given | self.known:
                self.known.add(key)
                self.now += one.untyped_storage().nbytes()
                weakref.finalize(one.untyped_storage(), self._gone, key, one.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return found

    def _gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("chunks", [1, 3, 8, 22])
def test_bytes_are_those_of_a_call(chunks: int) -> None:
    shape = HeadShape(rows=16384, width=4096, words=128256)
    with FakeTensorMode(), PeakBytes() as counted:
        x, weight = (torch.empty(size, shape.width, dtype=torch.bfloat16) for size in (shape.rows, shape.words))
        target = torch.empty(shape.rows, dtype=torch.int64)
        before = counted.most = counted.now
        forward(x, weight, None, target, IGNORED, 0.0, 0.0, 0.0, "mean", chunks, "weight", True, True, False)
    most = counted.most - before
    assert head_bytes(HeadShape(rows=16384, width=4096, words=128256, sums="weight"), chunks) == pytest.approx(most, rel=1e-3)


def test_the_gradient_of_a_weight_is_not_copied() -> None:
    x, weight, _, target = drawn(torch.float32, rows=64, width=64, words=512)
    leaf = nn.Parameter(weight.detach())
    loss = linear_cross_entropy(x.detach(), leaf, target, chunks=1)
    with PeakBytes() as counted:
        loss.backward()
    assert leaf.grad is not None and counted.most < leaf.nbytes / 8


@pytest.fixture(scope="module")
def h200() -> Machine:
    device = parse("H200").device
    found = machine(device, shipped_profile(device.name))
    assert found is not None
    return found


def test_the_number_of_chunks_is_memory_against_time(h200: Machine) -> None:
    shape = HeadShape(rows=16384, width=4096, words=128256)
    costs = head_costs(shape, h200)
    assert [one.bytes for one in costs] == sorted((one.bytes for one in costs), reverse=True) and costs[0].chunks == 1
    everything = {one.chunks: one for one in costs}
    assert fastest(costs, 1 << 40) == min(costs, key=lambda one: one.seconds)
    assert fastest(costs, costs[-1].bytes - 1) is None
    few, many = head_seconds(shape, 4, h200), head_seconds(HeadShape(rows=16384, width=4096, words=128256, sums="weight"), 64, h200)
    assert many > 1.1 * few > 1.1 * 3 * 2 * 16384 * 4096 * 128256 / 990e12
    assert max(everything) == MOST_ROUNDINGS, "more chunks take float32 sums, and more memory for them than their logits are"


def test_chunks_are_whole_tiles_and_cover_the_rows() -> None:
    for rows, chunks in itertools.product((1, 100, 128, 1000, 16384), (1, 2, 7, 30, 5000)):
        size = chunk_rows(rows, chunks)
        assert 1 <= size <= rows and -(-rows // size) <= chunks and (size % 128 == 0 or size in (rows, -(-rows // chunks)))
