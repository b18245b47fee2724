"""Values beside fake tensors, against the same code on real ones; what code that asks for unknown ones is told."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from foretell.simulate.memory.memory import careful_limit, tight_share
from foretell.trace.doubts import EVENLY, memory_widening
from foretell.trace.recipe import Recipe
from foretell.trace.record.branches import asked
from foretell.trace.record.capture import any_code, capture
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import Workload
from foretell.trace.record.values import known
from foretell.trace.types import Trace


def write_through_a_view(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:3].mul_(2)
    x.view(-1)[0] = 7
    return x


def write_past_a_mode(x: Tensor) -> Tensor:
    x = x.clone()
    x.data[2] = 5
    x.t()[0] += 1
    return x


COMPUTED: list[Callable[[Tensor], Any]] = [
    write_through_a_view,
    write_past_a_mode,
    lambda x: x.t().contiguous().cumsum(0),
    lambda x: torch.cat([x[:, ::2], x.flip(1)], 1).argsort(1),
    lambda x: x[x > 4],
    lambda x: torch.where(x % 2 == 0),
    lambda x: torch.unique(x, return_counts=True),
    lambda x: torch.bincount(x.flatten()),
    lambda x: torch.repeat_interleave(x.flatten(), x.flatten()),
    lambda x: torch.nn.functional.one_hot(x % 3, 3).sum(1),
    lambda x: torch.arange(int(x.max())).masked_fill(torch.arange(int(x.max())) > x.min() + 2, -1),
    lambda x: torch.tensor(x.tolist()) + torch.from_numpy(x.numpy()),
    lambda x: torch.tensor([x[0, 0], x[1, 1]]),
    lambda x: (x.float().softmax(-1) * 100).long().expand(3, -1, -1).transpose(0, 1),
    lambda x: copy.deepcopy(x).add_(1),
]


def twin(made: Any) -> Any:
    if isinstance(made, Tensor):
        assert isinstance(made, FakeTensor)
        found = known(made)
        assert found is not None and found.stride() == made.stride() and found.shape == made.shape
        return found
    return tuple(twin(one) for one in made)


@pytest.mark.parametrize("compute", COMPUTED, ids=range(len(COMPUTED)))
def test_values_are_what_real_tensors_hold(compute: Callable[[Tensor], Any]) -> None:
    def given() -> Tensor:
        return torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])

    real = compute(given())
    with Recorder() as recorder, any_code(recorder, (9, 0)):
        found = compute(given())
    for one, other in zip(twin((found,) if isinstance(found, Tensor) else found), (real,) if isinstance(real, Tensor) else real, strict=True):
        assert torch.equal(one, other)


def test_what_is_written_from_unknown_numbers_is_unknown() -> None:
    with Recorder():
        x = torch.zeros(4)
        view = x[1:]
        assert known(view) is not None
        x[2] = torch.empty(4).sum()
        assert known(x) is None and known(view) is None


def test_what_is_large_is_not_computed() -> None:
    with Recorder():
        assert known(torch.zeros(2**16)) is not None and known(torch.zeros(2**16 + 1)) is None


class Net(nn.Module):
    def __init__(self, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(8, 8), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer, x).sum()


def trace_of(compute: Callable[..., Tensor], batch: Callable[[], Tensor] = lambda: torch.randn(16, 8)) -> Trace:
    return capture(lambda: Workload(Net(compute), batch()), Recipe(precision="fp32"))


def rows_of(trace: Trace) -> int:
    """Rows that go through the second product."""
    return [op for op in trace.programs["micro_first"].ops if op.name == "aten.addmm.default"][-1].outputs[0].spec.shape[0]


def test_a_mask_of_the_batch_is_exact_and_nothing_is_assumed() -> None:
    trace = trace_of(lambda layer, x: layer(x[x[:, 0] > 6]), lambda: torch.arange(16.0)[:, None].expand(16, 8).contiguous())
    assert rows_of(trace) == 9 and trace.meta["assumed"] == []


def test_experts_get_their_even_share_and_it_is_told() -> None:
    def route(layer: nn.Linear, x: Tensor) -> Tensor:
        chosen = layer(x).topk(2, -1)[1]
        return layer(x[(chosen == 3).any(-1).nonzero().squeeze(1)])

    trace = trace_of(route)
    assert rows_of(trace) == 16 * 2 // 8
    (told,) = trace.meta["assumed"]  # type: ignore[misc]
    assert told.endswith(EVENLY), told


def test_sizes_that_data_may_crowd_need_more_room() -> None:
    """Even shares are a mean: "it fits" is said with four times the usual reserve, and not where sizes follow from the batch."""
    def route(layer: nn.Linear, x: Tensor) -> Tensor:
        return layer(x[layer(x).argmax(-1) == 3])

    uneven, known_sizes = trace_of(route), trace_of(lambda layer, x: layer(layer(x)))
    assert memory_widening(uneven.meta) == 4 and memory_widening(known_sizes.meta) == 1
    same = replace(uneven, meta={**uneven.meta, "assumed": []})
    whole = 10**10
    assert whole - careful_limit(uneven, whole, 0) == pytest.approx(4 * (whole - careful_limit(same, whole, 0)), rel=0.15)
    assert tight_share(uneven) == 4 * tight_share(same)


def early(layer: nn.Linear, x: Tensor) -> Tensor:
    for _ in range(5):
        x = layer(x)
        if (x > 0).all():
            break
    return x


def decode(layer: nn.Linear, x: Tensor) -> Tensor:
    """May stop at each token; what does not takes them all."""
    for _ in range(100):
        x = layer(x)
        if x.argmax(1).eq(3).all():
            break
    return x


def checked(layer: nn.Linear, x: Tensor) -> Tensor:
    x = layer(x)
    if not torch.isfinite(x).all() or (x.norm() > 0).logical_not():
        raise ValueError("diverged")
    assert (x.abs() > 0.5).any() and not x.isnan().any()
    return x


def until(layer: nn.Linear, x: Tensor) -> Tensor:
    while True:
        x = layer(x)
        if x.norm().item() < 1e-3:
            return x


def while_it_is_large(layer: nn.Linear, x: Tensor) -> Tensor:
    while layer(x).norm() > 1e-3:
        x = layer(x)
    return x


@pytest.mark.parametrize(("compute", "products"), [(early, 5), (decode, 100), (checked, 1), (while_it_is_large, 3)])
def test_a_healthy_run_goes_on(compute: Callable[..., Tensor], products: int) -> None:
    ops = trace_of(compute).programs["micro_first"].ops
    assert sum(op.name == "aten.addmm.default" and op.phase == "forward" for op in ops) == products


def test_loops_that_wait_for_data_end() -> None:
    ops = trace_of(until).programs["micro_first"].ops
    assert 1 <= sum(op.name == "aten.addmm.default" and op.phase == "forward" for op in ops) <= 100


class _Asks:
    """Says what it is asked for."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __bool__(self) -> bool:
        self.found.append(asked(sys._getframe(1)))
        return False

    def __gt__(self, other: Any) -> _Asks:
        return self


def test_what_a_condition_decides_is_read_from_the_code() -> None:
    t = _Asks()

    def code() -> None:
        if t > 3:
            raise ValueError
        if 1 > 2 or t:
            return
        for _ in range(1):
            if t:
                break
        while t:
            pass
        if t:
            print("hello")
        assert not t
        x = 1 if t else 2
        del x

    code()
    assert [(one.answer, one.guards, one.loops) for one in t.found] == [
        (False, True, False), (False, False, False), (False, False, False), (True, False, True), (None, False, False),
        (False, True, False), (None, False, False),
    ]  # fmt: skip


def test_copies_share_what_their_originals_share() -> None:
    with Recorder() as recorder, any_code(recorder, (9, 0)):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        net[1].weight = net[0].weight
        net.register_buffer("whole", torch.arange(6.0))
        net.register_buffer("part", net.whole[2:])  # type: ignore[operator,index]
        other = copy.deepcopy(net).to(torch.float64)
        assert other[1].weight is other[0].weight and isinstance(other[0].weight, nn.Parameter)
        assert other[0].weight is not net[0].weight and other[0].weight.dtype is torch.float64
        again = copy.deepcopy(net)
        assert again.part.untyped_storage()._cdata == again.whole.untyped_storage()._cdata  # type: ignore[union-attr,operator]
        assert again.part.untyped_storage()._cdata != net.whole.untyped_storage()._cdata  # type: ignore[union-attr,operator]
        assert torch.equal(known(again.part), torch.arange(2.0, 6.0))  # type: ignore[arg-type]
