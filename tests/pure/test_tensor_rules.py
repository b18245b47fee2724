"""Rules for splitting calls over ranks, held against the calls themselves: two ranks in two threads, every way operands
may lie, values and gradients."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.errors import UserError
from foretell.plan.tensor.types import PARTIAL, Operand, Place, Refine, Refuse, Setting, Shard
from foretell.plan.tensor.views import reshaped
from foretell.runtime.parallel.tensor import values as tensor_values
from foretell.runtime.parallel.tensor.exchange import TensorGroup, joined, part
from foretell.runtime.parallel.tensor.split import reordered

RANKS = 2
MOST = 20
"""Ways to lay out the operands of one call that are tried; of more, a fixed sample."""


# ---------------------------------------------------------------- ranks as threads


class Ring:
    """Where the threads hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.detach().clone()
        self.barrier.wait()
        found = [one.clone() for one in self.slots]
        self.barrier.wait()
        return found


class ThreadTeam(TensorGroup):
    """A team whose exchanges go through memory."""

    def __init__(self, ring: Ring, rank: int, setting: Setting) -> None:
        self.ring, self.rank, self.size, self.setting = ring, rank, ring.size, setting
        self.known: dict[Any, Any] = {}

    def all_reduce(self, x: Tensor, how: str = "sum") -> Tensor:
        found = torch.stack(self.ring.exchange(self.rank, x))
        return found.sum(0) if how == "sum" else found.amax(0)

    def all_gather(self, x: Tensor, place: Shard) -> Tensor:
        return joined(self.ring.exchange(self.rank, x), place)

    def reduce_scatter(self, x: Tensor, place: Shard) -> Tensor:
        return part(self.all_reduce(x), place, self.rank, self.size).clone()


def on_ranks(function: Callable[[ThreadTeam], Any], setting: Setting) -> list[Any]:
    """What the function gives on every rank."""
    ring = Ring(setting.ranks)
    results: list[Any] = [None] * setting.ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadTeam(ring, rank, setting))
        except BaseException as error:
            errors.append(error)
            ring.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(setting.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results


def piece(x: Tensor, place: Place, rank: int, size: int) -> Tensor:
    """What one rank has of a tensor that lies so."""
    if isinstance(place, Shard):
        return part(x, place, rank, size).clone()
    if place is PARTIAL:
        shares = torch.linspace(0.2, 1.7, size, dtype=x.dtype)
        return x * (shares / shares.sum())[rank]
    return x.clone()


def flat(values: Any) -> list[Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)]


def weighed(outputs: list[Tensor]) -> Tensor:
    """One number that every element of every output has its own part in."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        if output.is_floating_point():
            total = (
                total + (output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)).sum()
            )
    return total


def check(function: Callable[..., Any], inputs: list[Tensor], places: tuple[Place, ...], setting: Setting) -> None:
    """The call on parts gives what the call on the whole gives, and so do its gradients."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected = flat(function(*leaves))
    floats = [x for x in leaves if x.requires_grad]
    loss = weighed(expected)
    wanted = torch.autograd.grad(loss, floats, allow_unused=True) if loss.requires_grad else (None,) * len(floats)

    def run(team: ThreadTeam) -> tuple[list[Tensor], list[Tensor | None]]:
        own = [piece(x, place, team.rank, team.size) for x, place in zip(inputs, places, strict=True)]
        own = [x.requires_grad_(x.is_floating_point()) for x in own]
        seen = [
            x if place is None else tensor_values.split(x, place, team) for x, place in zip(own, places, strict=True)
        ]
        outputs = flat(tensor_values.whole(function(*seen)))
        mine = [x for x in own if x.requires_grad]
        total = weighed(outputs)
        grads = torch.autograd.grad(total, mine, allow_unused=True) if total.requires_grad else (None,) * len(mine)
        return [output.detach() for output in outputs], list(grads)

    of_floats = [place for x, place in zip(inputs, places, strict=True) if x.is_floating_point()]
    for rank, (outputs, grads) in enumerate(on_ranks(run, setting)):
        assert len(outputs) == len(expected)
        for found, known in zip(outputs, expected, strict=True):
            assert found.shape == known.shape
            torch.testing.assert_close(found, known.detach(), rtol=1e-9, atol=1e-9)
        for grad, known, place in zip(grads, wanted, of_floats, strict=True):
            whole = (
                torch.zeros(())
                if known is None
                else piece(known, place if isinstance(place, Shard) else None, rank, RANKS)
            )
            assert (grad is None or not grad.any()) if known is None else grad is not None
            if known is not None and grad is not None:
                torch.testing.assert_close(grad, whole, rtol=1e-9, atol=1e-9)


def layouts(x: Tensor) -> list[Place]:
    """Every way a tensor may lie on two ranks."""
    found: list[Place] = [None]
    for dim, size in enumerate(x.shape):
        if size and size % RANKS == 0:
            found += [Shard(dim, (size,)), Shard(dim, (size,), True)]
        if size and size % (2 * RANKS) == 0:
            found.append(Shard(dim, (size // 2, size // 2)))
        if size == 6:
            found.append(Shard(dim, (2, 4)))
    return [*found, PARTIAL] if x.is_floating_point() else found


def combinations(inputs: list[Tensor], name: str) -> list[tuple[Place, ...]]:
    every = [places for places in product(*map(layouts, inputs)) if any(place is not None for place in places)]
    return every if len(every) <= MOST else random.Random(name).sample(every, MOST)


# ---------------------------------------------------------------- calls


def mha(x: Tensor, w: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """torch's own multi-head attention: its heads and its batch share a dimension inside."""
    return F.multi_head_attention_forward(
        x, x, x, 8, 4, w, b, None, None, False, 0.0, out, bias, training=True, need_weights=False
    )[0]


def iterated(x: Tensor) -> Tensor:
    first, second = x
    return first * second.exp()


def plus(x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    x += y
    return x


def stored(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(4, 8, dtype=x.dtype)
    z[1:3] = x
    return z + y


WRITES = {"iadd"}
"""Calls that write over their first operand, and may be refused where the others lie otherwise."""
INTS = {"ids": lambda: torch.tensor([[1, 0, 5, 3], [2, 2, 7, 6]]), "rows": lambda: torch.tensor([2, 0, 1, 1])}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (lambda x, y: x + y, ((2, 4, 8), (2, 4, 8))),
    "add broadcast": (lambda x, y: x + y, ((2, 4, 8), (8,))),
    "add ones": (lambda x, y: x + y, ((2, 4, 8), (4, 1))),
    "add three": (lambda x, y, z: x + y + z, ((2, 4, 8),) * 3),
    "sub number": (lambda x: 3 - x, ((2, 4),)),
    "mul": (lambda x, y: x * y, ((2, 4, 8), (2, 1, 8))),
    "div": (lambda x, y: x / (y + 4), ((2, 4), (2, 4))),
    "rdiv": (lambda x: 1 / (x + 4), ((2, 4),)),
    "double": (lambda x: 2 * x / 3, ((2, 4),)),
    "neg": (lambda x: -x, ((2, 4),)),
    "pow": (lambda x: (x**2).abs(), ((2, 4),)),
    "gelu": (F.gelu, ((2, 4, 8),)),
    "silu": (F.silu, ((2, 4),)),
    "relu": (F.relu, ((2, 4),)),
    "where": (lambda m, x, y: torch.where(m > 0, x, y), ((2, 4), (2, 4), (4,))),
    "masked_fill": (lambda x, m: x.masked_fill(m > 0, -1.0), ((2, 4), (1, 4))),
    "to": (lambda x: x.to(torch.float64), ((2, 4),)),
    "to int": (lambda x: (4 * x).to(torch.int64), ((2, 4),)),
    "type_as": (lambda x, y: x.type_as(y) * y, ((2, 4), (2, 4))),
    "iadd": (plus, ((2, 4, 8), (2, 4, 8))),
    "setitem": (stored, ((2, 8), (8,))),
    "zeros_like": (lambda x: torch.zeros_like(x) + 1, ((2, 4),)),
    "dropout off": (lambda x: F.dropout(x, 0.0, True), ((2, 4, 8),)),
    "dropout eval": (lambda x: F.dropout(x, 0.5, False), ((2, 4),)),
    "softmax": (lambda x: x.softmax(-1), ((2, 4, 8),)),
    "softmax 1": (lambda x: F.softmax(x, dim=1), ((2, 4, 8),)),
    "sum": (lambda x: x.sum(1), ((2, 4, 8),)),
    "sum all": (lambda x: x.sum(), ((2, 4),)),
    "mean keep": (lambda x: x.mean(-1, keepdim=True), ((2, 4, 8),)),
    "mean two": (lambda x: x.mean((0, 2)), ((2, 4, 8),)),
    "amax": (lambda x: x.amax(1), ((2, 4, 8),)),
    "max": (lambda x: x.max(1)[0], ((2, 4, 8),)),
    "std": (lambda x: x.std(1, True), ((2, 4, 8),)),
    "norm": (lambda x: x.norm(2, 1), ((2, 4, 8),)),
    "cumsum": (lambda x: x.cumsum(1), ((2, 4),)),
    "topk": (lambda x: x.topk(2, dim=-1).values, ((2, 4, 8),)),
    "sort": (lambda x: x.sort(dim=1).values, ((2, 4, 8),)),
    "normalize": (lambda x: F.normalize(x, dim=-1), ((2, 4),)),
    "flip": (lambda x: x.flip(1), ((2, 4),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), ((2, 4, 8), (8,), (8,))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), ((2, 4, 8), (8,))),
    "glu": (lambda x: F.glu(x, -1), ((2, 4, 8),)),
    "pad": (lambda x: F.pad(x, (1, 2)), ((2, 4, 8),)),
    "tril": (lambda x: x.tril(), ((2, 4, 8),)),
    "view": (lambda x: x.view(2, 4, 2, 4), ((2, 4, 8),)),
    "view merge": (lambda x: x.view(8, 8), ((2, 4, 8),)),
    "view -1": (lambda x: x.view(x.shape[0], -1, 2), ((2, 4, 8),)),
    "view three": (lambda x: x.view(2, 3, 2, 2), ((2, 12),)),
    "reshape moved": (lambda x: x.transpose(1, 2).reshape(2, 32), ((2, 4, 8),)),
    "flatten": (lambda x: x.flatten(0, 1), ((2, 4, 8),)),
    "unflatten": (lambda x: x.unflatten(-1, (4, 2)), ((2, 8),)),
    "view_as": (lambda x, y: x.view_as(y) + y, ((2, 4, 8), (8, 8))),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(1), ((2, 4),)),
    "squeeze all": (lambda x: x[None, :, None].squeeze(), ((2, 4),)),
    "transpose": (lambda x: x.transpose(0, -1), ((2, 4, 8),)),
    "permute": (lambda x: x.permute(2, 0, 1), ((2, 4, 8),)),
    "movedim": (lambda x: x.movedim(0, -1), ((2, 4, 8),)),
    "t": (lambda x: x.t(), ((2, 4),)),
    "mT": (lambda x: x.mT, ((2, 4, 8),)),
    "split": (lambda x: x.split(4, dim=-1), ((2, 8),)),
    "split uneven": (lambda x: x.split([2, 4], dim=1), ((2, 6),)),
    "chunk": (lambda x: x.chunk(2, dim=-1), ((2, 8),)),
    "unbind": (lambda x: x.unbind(1), ((2, 4, 8),)),
    "iterate": (iterated, ((2, 4, 8),)),
    "narrow": (lambda x: x.narrow(1, 2, 4), ((2, 6),)),
    "slice": (lambda x: x[:, 2:], ((2, 6, 4),)),
    "slice every": (lambda x: x[:, 1::2] + x[:, ::2], ((2, 8),)),
    "slice some": (lambda x: x[:, 1:7:2], ((2, 8),)),
    "slice half": (lambda x: x[..., :4] * x[..., 4:], ((2, 8),)),
    "index": (lambda x: x[:, 0], ((2, 4, 8),)),
    "index none": (lambda x: x[:, None, 1:3], ((2, 4, 8),)),
    "index tensor": (lambda x, i: x[i], ((4, 8), "rows")),
    "index tensor 1": (lambda x, i: x[:, i], ((2, 4, 8), "rows")),
    "index mask": (lambda x: x[torch.tensor([True, False, True, True])], ((4, 8),)),
    "index two": (lambda x, i: x[:, :, i], ((2, 4, 4), "rows")),
    "expand": (lambda x: x[:, :, None].expand(2, 4, 3, 8), ((2, 4, 8),)),
    "expand heads": (lambda x: x[:, :, None].expand(2, 4, 3, 8).reshape(2, 12, 8), ((2, 4, 8),)),
    "repeat": (lambda x: x.repeat(2, 3), ((2, 4),)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, dim=1), ((2, 4),)),
    "cat": (lambda x, y: torch.cat([x, y], dim=1), ((2, 4, 8), (2, 2, 8))),
    "cat same": (lambda x, y: torch.cat((x, y), -1), ((2, 4, 8), (2, 4, 8))),
    "stack": (lambda x, y: torch.stack([x, y], dim=1), ((2, 4), (2, 4))),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), ((2, 4, 2),)),
    "index_select": (lambda x, i: x.index_select(0, i), ((4, 8), "rows")),
    "gather": (lambda x: x.gather(1, torch.zeros(2, 4, dtype=torch.long)), ((2, 4),)),
    "one_hot": (lambda i: F.one_hot(i, 8) * 2.0, ("ids",)),
    "roll": (lambda x: x.roll(1, 1), ((2, 4),)),
    "linear": (F.linear, ((2, 4, 8), (6, 8), (6,))),
    "linear no bias": (F.linear, ((2, 4, 8), (6, 8))),
    "linear 2": (F.linear, ((4, 8), (8, 8), (8,))),
    "matmul": (torch.matmul, ((2, 4, 8), (2, 8, 4))),
    "matmul broadcast": (lambda x, y: x @ y, ((2, 4, 6, 8), (8, 4))),
    "matmul vector": (lambda x, y: x @ y, ((4, 8), (8,))),
    "bmm": (torch.bmm, ((2, 4, 8), (2, 8, 6))),
    "addmm": (torch.addmm, ((6,), (4, 8), (8, 6))),
    "baddbmm": (lambda a, x, y: a.baddbmm(batch1=x, batch2=y), ((2, 4, 6), (2, 4, 8), (2, 8, 6))),
    "einsum": (lambda x, y: torch.einsum("bth,hd->btd", x, y), ((2, 4, 8), (8, 6))),
    "einsum heads": (lambda x, y: torch.einsum("...qd,...kd->...qk", x, y), ((2, 4, 6, 2), (2, 4, 8, 2))),
    "embedding": (lambda i, w: F.embedding(i, w), ("ids", (8, 4))),
    "embedding padded": (lambda i, w: F.embedding(i, w, padding_idx=2), ("ids", (8, 4))),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ((2, 4, 6, 2),) * 3),
    "attention mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        ((2, 4, 6, 2),) * 3 + ((1, 4, 6, 6),),
    ),
    "attention grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 6, 2), (2, 2, 6, 2), (2, 2, 6, 2)),
    ),
    "attention one kv": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 6, 2), (2, 1, 6, 2), (2, 1, 6, 2)),
    ),
    "multi head attention": (mha, ((4, 2, 8), (24, 8), (24,), (8, 8), (8,))),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.flatten(0, 1), i.flatten()), ((2, 4, 8), "ids")),
    "cross_entropy ignored": (lambda x, i: F.cross_entropy(x.movedim(-1, 1), i, ignore_index=2), ((2, 4, 8), "ids")),
    "cross_entropy sum": (lambda x, i: F.cross_entropy(x.view(-1, 8), i.view(-1), reduction="sum"), ((2, 4, 8), "ids")),
    "cross_entropy smooth": (
        lambda x, i: F.cross_entropy(x.view(-1, 8), i.view(-1), label_smoothing=0.1),
        ((2, 4, 8), "ids"),
    ),
    "mse_loss": (F.mse_loss, ((2, 4, 8), (2, 4, 8))),
    "logsumexp": (lambda x: x.logsumexp(-1), ((2, 4, 8),)),
    "unknown": (lambda x: torch.linalg.pinv(x), ((4, 4),)),
    "conv": (lambda x, w: F.conv1d(x, w, padding=1), ((2, 4, 8), (6, 4, 3))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_on_parts_is_the_call_on_the_whole(name: str) -> None:
    function, shapes = CASES[name]
    generator = torch.Generator().manual_seed(5)
    inputs = [
        INTS[shape]() if isinstance(shape, str) else torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in shapes
    ]
    for number, places in enumerate(combinations(inputs, name)):
        setting = Setting(RANKS, sequence=number % 2 == 0)
        try:
            check(function, inputs, places, setting)
        except UserError:
            assert name in WRITES, f"{name} with {places} is refused"
        except Exception as error:
            told = f"{name} with {places}, sequence {setting.sequence}: {type(error).__name__} {error}"
            raise AssertionError(told) from error


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.plan.tensor import rules as tensor_rules

    x, places = torch.randn(2, 4, 8, dtype=torch.float64), (Shard(1, (4,)),)
    monkeypatch.setitem(tensor_rules.ALL, "softmax", lambda s, x, dim, **_: tensor_rules.Result(x.place, {0: x.place}))
    with pytest.raises(AssertionError):
        check(lambda x: x.softmax(1), [x], places, Setting(RANKS))


def test_chance_is_each_ranks_own_and_the_same_again_afterwards() -> None:
    def run(team: ThreadTeam) -> tuple[Tensor, Tensor]:
        with one_at_a_time:  # the generator is the process's: here two ranks share it
            torch.manual_seed(3)
            x = tensor_values.split(torch.ones(2, 64), Shard(1, (128,)), team)
            return tensor_values.plain(F.dropout(x, 0.5)), torch.rand(4)

    one_at_a_time = threading.Lock()
    (first, after), (second, later) = on_ranks(run, Setting(RANKS))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(after, later)


# ---------------------------------------------------------------- reshapes, element by element


def owners(shape: tuple[int, ...], place: Shard) -> Tensor:
    """Which rank has each element."""
    line = torch.cat([torch.arange(size) * RANKS // size for size in place.segments])
    return line.view([-1 if dim == place.dim else 1 for dim in range(len(shape))]).expand(shape)


def compositions(size: int) -> list[tuple[int, ...]]:
    """Every way to write a size as a sum of even segments."""
    found = [(size,)] if size % RANKS == 0 else []
    for first in range(RANKS, size, RANKS):
        found += [(first, *rest) for rest in compositions(size - first)]
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((8,), (2, 4)), ((12,), (3, 4)), ((12,), (3, 2, 2)), ((2, 6), (12,)), ((3, 4), (12,)), ((2, 4, 3), (8, 3)),
        ((4, 3), (2, 6)), ((12,), (1, 12)), ((2, 1, 6), (2, 3, 2)), ((8,), (4, 1, 2)), ((2, 2, 2), (4, 2)),
    ],
)  # fmt: skip
def test_reshapes_keep_every_element_with_its_rank(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    for dim, size in enumerate(old):
        for segments in compositions(size):
            place = Shard(dim, segments)
            wanted = owners(old, place).reshape(new)
            possible = [
                Shard(at, parts)
                for at, length in enumerate(new) for parts in compositions(length)
                if torch.equal(owners(new, Shard(at, parts)), wanted)
            ]  # fmt: skip
            try:
                found = reshaped(Operand(0, old, place), new, RANKS)
            except Refuse:
                assert not possible, f"{place} of {old} can be {possible} of {new}"
            else:
                assert found in possible, f"{place} of {old} is not {found} of {new}"


def test_a_reshape_asks_for_the_parts_of_a_fused_layer() -> None:
    with pytest.raises(Refine) as caught:
        reshaped(Operand(0, (2, 5, 24), Shard(2, (24,))), (2, 5, 3, 4, 2), RANKS)
    assert caught.value.segments == (8, 8, 8)


def test_a_fused_layer_is_stored_by_ranks_and_comes_back_in_its_own_order() -> None:
    x = torch.arange(24).view(12, 2)
    place = Shard(0, (4, 8))
    kept = reordered(x, place, 2, stored=True)
    assert kept[:, 0].tolist() == [0, 2, 8, 10, 12, 14, 4, 6, 16, 18, 20, 22]
    assert torch.equal(kept[:6], part(x, place, 0, 2))
    assert torch.equal(reordered(kept, place, 2, stored=False), x)
