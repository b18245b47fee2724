"""Weights that are on the device only while their block computes, beside the same with weights that stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from foretell.runtime.offload import forms, layout
from foretell.runtime.offload.adamw import Offloaded
from tests.further import further
from tests.pure.test_offload import PATHS, Early, Model, factor, loss_of, model, offloaded, plainly, samples, trained

__all__ = ["model", "samples"]
HOST = layout.HOST


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    ("clip", "early", "micro"),
    further(
        [(0.5, False, 1), (0.5, False, 3), (None, True, 1), (None, True, 3)], [(0.5, False, 3), (None, True, 1)],
        "one micro-batch and three, and both ways to update, are there otherwise put together",
    ),
)  # fmt: skip
@pytest.mark.parametrize("form", ["plain", "master", "split"])
def test_streamed_weights_change_no_bit(
    model: Model, samples: list[Tensor], form: str, clip: float | None, early: bool, micro: int, again: bool
) -> None:
    expected, kept, states = offloaded(model, samples, form, HOST, clip=clip, early=early, micro=micro)
    found, moved, others = offloaded(model, samples, form, HOST, clip=clip, early=early, micro=micro, streamed=True, again=again)
    assert found == expected and same(kept, moved)
    assert all(torch.equal(others[i][name], value) for i, state in states.items() for name, value in state.items())


@pytest.mark.parametrize("form", ["plain", "master", "split", "half"])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_cpu_updates_every_form_as_the_device_does(model: Model, samples: list[Tensor], form: str, streamed: bool) -> None:
    expected, kept, _ = offloaded(model, samples, form, HOST, clip=0.5)
    found, moved, _ = offloaded(model, samples, form, HOST, clip=0.5, share=0.5, streamed=streamed)
    assert found == expected and same(kept, moved)  # here both engines are one CPU


def test_blocks_that_are_used_without_a_call_are_there() -> None:
    torch.manual_seed(0)
    early = Early()
    draw = torch.Generator().manual_seed(1)
    data = [torch.randn(12, 8, generator=draw) for _ in range(4)]
    expected, after = plainly(early, data, 0.5)
    found, moved, _ = offloaded(early, data, "plain", HOST, clip=0.5, streamed=True)
    assert found == expected and same(after, moved)


def test_at_most_two_blocks_are_on_the_device_and_none_between_steps(model: Model, samples: list[Tensor]) -> None:
    engines: list[Offloaded] = []
    _, moved, _ = offloaded(model, samples[:2], "master", HOST, clip=0.5, streamed=True, optimizer=engines)
    engine, seen = engines[0], []

    def there() -> int:
        return sum(flat.untyped_storage().nbytes() > 0 for flat in engine.streamed.flat.values())

    for block in moved.blocks:
        block.norm.register_forward_hook(lambda *_: seen.append(there()))
        block.norm.weight.register_hook(lambda grad: seen.append(there()))
    assert there() == 0
    loss_of(moved, samples[2], torch.bfloat16).backward()
    assert max(seen) == 2 and len(seen) == 6
    assert all(p.grad is None for block in moved.blocks for p in block.parameters())  # they are in host memory
    engine.begin(factor(trained(moved), 0.5, engine.norms()))
    assert there() == 0
    engine.settle()
    assert all(p.untyped_storage().data_ptr() == engine.store.weights[path].untyped_storage().data_ptr()
               for path in PATHS for p in moved.get_submodule(path).parameters())  # fmt: skip
    engine.close()


def test_a_model_that_was_saved_and_loaded_goes_on_as_it_would(model: Model, samples: list[Tensor]) -> None:
    expected, _, _ = offloaded(model, samples[:6], "split", HOST, clip=0.5, share=0.4, streamed=True)
    engines: list[Offloaded] = []
    _, half, _ = offloaded(model, samples[:3], "split", HOST, clip=0.5, share=0.4, streamed=True, optimizer=engines)
    saved = copy.deepcopy(engines[0].state_dict())
    weights = copy.deepcopy(half.state_dict())
    engines[0].close()
    _, other, _ = offloaded(model, [], "split", HOST, clip=0.5, share=0.4, optimizer=engines)  # on the device this time
    other.load_state_dict(weights)
    engines[1].load_state_dict(saved)
    found = []
    for x in samples[3:6]:
        loss = loss_of(other, x, torch.bfloat16)
        loss.backward()
        engines[1].begin(factor(trained(other), 0.5, engines[1].norms()))
        found.append(loss.item())
    assert found == expected[3:]
    engines[1].close()


class Frozen(nn.Module):
    """A block with frozen weights, one that is called twice and one that is called now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.blocks[0][0].requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](self.blocks[1](x)) if self.calls % 2 else self.blocks[1](x)


def test_blocks_that_are_frozen_or_called_twice_or_not_at_all() -> None:
    torch.manual_seed(0)
    start = Frozen()
    data = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))

    def run(streamed: bool) -> tuple[list[float], Frozen]:
        model = copy.deepcopy(start)
        named = trained(model)
        groups = layout.group(list(named), [f"blocks.{n}" for n in range(3)])
        units = [layout.unit(p, {n: named[n].numel() for n in held}, HOST, streamed=streamed) for p, held in groups.items()]
        engine = Offloaded(named, units, forms.form("plain", torch.float32), device=torch.device("cpu"), lr=1e-2)
        engine.attach(model)
        losses = []
        for _ in range(6):
            loss = (model(data) - data).square().mean()
            loss.backward()
            engine.begin(factor(named, 0.5, engine.norms()))
            losses.append(loss.item())
        engine.settle()
        engine.close()
        return losses, model

    (expected, kept), (found, moved) = run(False), run(True)
    assert found == expected and same(kept, moved)


@pytest.mark.parametrize(("before", "after"), [("split", "master"), ("master", "split")])
def test_exact_weights_survive_a_change_of_form(model: Model, samples: list[Tensor], before: str, after: str) -> None:
    engines: list[Offloaded] = []
    _, one, _ = offloaded(model, samples[:3], before, HOST, clip=0.5, optimizer=engines)
    saved, weights = copy.deepcopy(engines[0].state_dict()), copy.deepcopy(one.state_dict())
    _, other, _ = offloaded(model, [], after, HOST, clip=0.5, streamed=True, optimizer=engines)
    other.load_state_dict(weights)
    engines[1].load_state_dict(saved)
    for name, parameter in trained(one).items():
        twin = other.get_parameter(name)
        exact = {}
        for engine, own in ((engines[0], parameter), (engines[1], twin)):
            state = engine.state[own]
            flat = own.detach().reshape(-1)
            exact[engine] = state["master"].reshape(-1) if "master" in state else forms.joined(flat, state["rest"].reshape(-1), flat.float())
        assert torch.equal(exact[engines[0]], exact[engines[1]]), name
        assert torch.equal(engines[0].state[parameter]["exp_avg"], engines[1].state[twin]["exp_avg"])
    for engine in engines:
        engine.close()
