"""Updates of states that are elsewhere, beside torch's own optimizer and beside the same with everything on the device."""

from __future__ import annotations

import copy
import threading
import time
import traceback
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import UserError
from foretell.runtime.offload import adamw as engine_room
from foretell.runtime.offload import chunk_updates as updates
from foretell.runtime.offload import forms, layout
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.offload.memory.arena import Arena, available, bytes_for
from foretell.runtime.offload.pump import Pump
from foretell.trace.fold.recompute import recompute_block

CPU = torch.device("cpu")
STEPS = 8
PATHS = [f"blocks.{number}" for number in range(3)]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, a weight that is used at both ends, one that nothing uses and one that is frozen."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inside = nn.Parameter(torch.randn(8, width) / 4)
        self.blocks = nn.ModuleList(Block(width) for _ in PATHS)
        self.unused, self.frozen = nn.Linear(3, 3), nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.inside
        for block in self.blocks:
            x = block(x)
        return self.frozen(x) @ self.inside.t()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def samples() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=draw) for _ in range(STEPS)]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def factor(parameters: dict[str, nn.Parameter], limit: float, known: dict[str, Tensor] | None = None) -> Tensor:
    """What gradients are multiplied by; `known` are norms of those that are not here."""
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norms = torch._foreach_norm(list(grads.values()), 2, dtype=torch.float32) if grads else []
    found = dict(zip(grads, norms, strict=True)) | (known or {})
    ordered = [found[name] for name in parameters if name in found]
    return torch.clamp(limit / (torch.stack(ordered).square().sum().sqrt() + 1e-6), max=1.0)


def loss_of(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    return 30 * (model(x.to(dtype)).float() - x).square().mean()


def offloaded(
    model: Model, samples: list[Tensor], form: str, tier: str | dict[str, str], *, clip: float | None, share: float = 0.0, early: bool = False,
    micro: int = 1, optimizer: list[Offloaded] | None = None, streamed: bool = False, again: bool = False, skip: bool = False,
) -> tuple[list[float], Model, dict[int, dict[str, Tensor]]]:  # fmt: skip
    model = copy.deepcopy(model)
    if form != "plain":
        model.frozen.to(torch.bfloat16)
    named = trained(model)
    groups = layout.group(list(named), PATHS)
    units = [
        layout.unit(p, {n: named[n].numel() for n in held}, tier if isinstance(tier, str) else tier[p], chunk=700, cpu_share=share,
                    streamed=streamed and bool(p))
        for p, held in groups.items()
    ]  # fmt: skip
    for block in model.blocks if again else ():
        recompute_block(block, "full")
    engine = Offloaded(named, units, forms.form(form, torch.float32), device=CPU, lr=1e-2, threads=2)
    engine.early = early
    more = [False]
    engine.attach(model, lambda: more[0])
    losses = []
    for x in samples:
        for part, piece in enumerate(x.chunk(micro)):
            more[0] = part < micro - 1
            loss = loss_of(model, piece, torch.bfloat16 if form != "plain" else torch.float32) / micro
            if not more[0]:
                engine.expect(torch.zeros(()) if skip else None)
            loss.backward()
        engine.begin(factor(named, clip, engine.norms()) if clip else None, torch.zeros(()) if skip else None)
        losses.append(loss.detach())
    losses = [loss.item() for loss in losses]
    state = engine.state_dict()["state"]
    if optimizer is not None:
        optimizer.append(engine)
    else:
        engine.close()
    return losses, model, state


def plainly(model: Model, samples: list[Tensor], clip: float | None, micro: int = 1) -> tuple[list[float], Model]:
    model = copy.deepcopy(model)
    named = trained(model)
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2, fused=True)
    losses = []
    for x in samples:
        for piece in x.chunk(micro):
            loss = loss_of(model, piece, torch.float32) / micro
            loss.backward()
        if clip:
            torch._foreach_mul_([p.grad for p in named.values() if p.grad is not None], factor(named, clip))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(("clip", "early"), [(None, False), (None, True), (0.5, False)])
def test_moments_in_host_memory_give_the_bits_of_fused_adamw(
    model: Model, samples: list[Tensor], clip: float | None, early: bool, micro: int
) -> None:
    expected, after = plainly(model, samples, clip, micro)
    found, moved, _ = offloaded(model, samples, "plain", layout.HOST, clip=clip, early=early, micro=micro)
    assert found == expected
    for name, value in after.state_dict().items():
        assert torch.equal(value, moved.state_dict()[name]), name


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("form", ["master", "split", "half"])
def test_where_states_are_changes_no_bit(model: Model, samples: list[Tensor], form: str, clip: float | None) -> None:
    expected, kept, _ = offloaded(model, samples, form, layout.DEVICE, clip=clip)
    for early in (False, clip is None):
        found, moved, _ = offloaded(model, samples, form, layout.HOST, clip=clip, early=early)
        assert found == expected
        assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), moved.parameters(), strict=True))
    assert kept.inside.dtype is torch.bfloat16


def test_a_master_is_what_fp32_weights_would_be(model: Model, samples: list[Tensor]) -> None:
    """The same gradients into torch's AdamW on fp32 weights: the master equals them, the weights are its rounding."""
    engines: list[Offloaded] = []
    _, moved, _ = offloaded(model, samples[:1], "master", layout.HOST, clip=None, optimizer=engines)
    weights = {name: p.detach().clone().requires_grad_() for name, p in trained(model).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-2, fused=True)
    twin = copy.deepcopy(model).to(torch.bfloat16)
    loss_of(twin, samples[0], torch.bfloat16).backward()
    for name, weight in weights.items():
        grad = twin.get_parameter(name).grad
        weight.grad = grad.float() if grad is not None else None
    optimizer.step()
    for name, parameter in trained(moved).items():
        master = engines[0].state[parameter]["master"]
        assert torch.equal(master, weights[name]), name
        assert torch.equal(parameter, master.bfloat16()), name
    engines[0].close()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_cpu_updates_as_the_device_does(model: Model, samples: list[Tensor], clip: float | None) -> None:
    _, _, expected = offloaded(model, samples, "master", layout.HOST, clip=clip)
    _, _, found = offloaded(model, samples, "master", layout.HOST, clip=clip, share=0.5, early=clip is None)
    for index, state in expected.items():
        for name, value in state.items():
            assert torch.allclose(found[index][name], value, rtol=1e-6, atol=0), (index, name)


def test_a_bad_step_changes_nothing(model: Model, samples: list[Tensor]) -> None:
    for share in (0.0, 0.5):
        engines: list[Offloaded] = []
        _, moved, before = offloaded(model, samples[:2], "master", layout.HOST, clip=0.5, share=share, optimizer=engines)
        engine, kept = engines[0], copy.deepcopy(before)
        weights = [p.detach().clone() for p in moved.parameters()]
        loss_of(moved, samples[2], torch.bfloat16).backward()
        engine.begin(torch.tensor(1.0), torch.tensor(1.0))
        after = engine.state_dict()["state"]
        assert all(torch.equal(after[i][name], value) for i, state in kept.items() for name, value in state.items())
        assert all(torch.equal(a, b) for a, b in zip(weights, moved.parameters(), strict=True))
        loss_of(moved, samples[2], torch.bfloat16).backward()
        engine.begin(torch.tensor(1.0), torch.tensor(0.0))
        steps = {float(state["step"]) for state in engine.state_dict()["state"].values()}
        assert steps == {0.0, 3.0}  # those that no gradient reaches take no step
        engine.close()


def test_going_on_from_a_state_dict_gives_the_same(model: Model, samples: list[Tensor]) -> None:
    expected, _, _ = offloaded(model, samples, "master", layout.HOST, clip=0.5, share=0.4)
    first: list[Offloaded] = []
    _, half, _ = offloaded(model, samples[:4], "master", layout.HOST, clip=0.5, share=0.4, optimizer=first)
    saved, weights = copy.deepcopy(first[0].state_dict()), copy.deepcopy(half.state_dict())
    first[0].close()
    second: list[Offloaded] = []
    _, other, _ = offloaded(model, [], "master", layout.HOST, clip=0.5, share=0.4, optimizer=second)
    other.load_state_dict(weights)
    second[0].load_state_dict(saved)
    found = []
    for x in samples[4:]:
        loss = loss_of(other, x, torch.bfloat16)
        loss.backward()
        second[0].begin(factor(trained(other), 0.5, second[0].norms()))
        found.append(loss.item())
    assert found == expected[4:]
    second[0].close()


class Early(Model):
    """Uses a block's weights before it is called, and shares a weight between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down.bias = self.blocks[1].down.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.blocks[2].up.weight.square().mean())


def test_weights_that_are_used_before_their_block_is_called_are_new() -> None:
    torch.manual_seed(0)
    model = Early()
    draw = torch.Generator().manual_seed(1)
    samples = [torch.randn(12, 8, generator=draw) for _ in range(STEPS)]
    expected, after = plainly(model, samples, 0.5)
    engines: list[Offloaded] = []
    found, moved, _ = offloaded(model, samples, "plain", layout.HOST, clip=0.5, optimizer=engines)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), moved.parameters(), strict=True))
    assert engines[0]._first == {"blocks.1", "blocks.2"}
    engines[0].close()


def test_a_block_is_updated_when_it_is_called_and_no_sooner(model: Model, samples: list[Tensor]) -> None:
    engines: list[Offloaded] = []
    _, moved, _ = offloaded(model, samples[:1], "plain", layout.HOST, clip=0.5, optimizer=engines)
    loss_of(moved, samples[1], torch.float32).backward()
    before = [p.detach().clone() for p in moved.blocks[1].parameters()]
    engines[0].begin(torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, moved.blocks[1].parameters(), strict=True))
    seen = []
    moved.blocks[1].norm.register_forward_pre_hook(lambda *_: seen.append(moved.blocks[1].up.weight.detach().clone()))
    moved(samples[2])
    assert not torch.equal(seen[0], before[2]) and torch.equal(seen[0], moved.blocks[1].up.weight)
    engines[0].close()


# ---------------------------------------------------------------- pieces


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**120, min_value=-(2.0**120)), min_size=1))
@settings(max_examples=200, deadline=None)
def test_what_rounding_cuts_off_is_kept(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, rest = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    forms.take_apart(master.clone(), weight, rest)
    found = forms.joined(weight, rest, torch.empty_like(master))
    assert torch.equal(found.view(torch.int32), master.view(torch.int32))
    error = (weight.double() - master.double()).abs()
    assert bool((error <= (master.bfloat16().double() - master.double()).abs()).all())


@given(st.lists(st.integers(1, 500), min_size=1, max_size=8), st.integers(1, 400), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_chunks_hold_every_element_once(sizes: list[int], chunk: int, share: float) -> None:
    unit = layout.unit("b", {f"p{i}": size for i, size in enumerate(sizes)}, layout.HOST, chunk=chunk, cpu_share=share)
    seen = [(p.name, p.begin + i) for c in unit.chunks for p in c.pieces for i in range(p.elements)]
    assert sorted(seen) == sorted((f"p{i}", at) for i, size in enumerate(sizes) for at in range(size))
    assert len(seen) == len(set(seen))
    for one in unit.chunks:
        assert sum(piece.elements for piece in one.pieces) <= one.elements <= chunk + layout.ALIGN
        assert all(piece.begin % layout.ALIGN == 0 and piece.at % layout.ALIGN == 0 for piece in one.pieces)
    by_cpu = sum(one.engine == layout.CPU for one in unit.chunks)
    assert abs(by_cpu - share * len(unit.chunks)) <= 1


def test_an_arena_has_the_size_that_was_asked_for() -> None:
    arena = Arena(bytes_for([10, 5000]), register=False)
    assert arena.nbytes == 3 * 4096
    first, second = arena.take(10, torch.uint8), arena.take(1250, torch.float32)
    second.fill_(1.0)
    assert not first.any() and second.data_ptr() - first.data_ptr() == 4096
    with pytest.raises(AssertionError):
        arena.take(1, torch.uint8)


def test_too_little_host_memory_is_said_before_anything_is_taken() -> None:
    there = available()
    assert there is not None
    with pytest.raises(UserError, match=r"in host memory, and .* can be had"):
        Arena(there, register=False)


def test_the_pump_takes_what_is_needed_first() -> None:
    units = [layout.unit(str(number), {"p": 1}) for number in range(6)]
    begun, free = [], threading.Event()

    def start(unit: layout.OffloadUnit) -> None:
        begun.append(unit.path)
        if unit.path == "5":
            free.wait(5)

    pump = Pump(start, {unit.path: int(unit.path) for unit in units}, threaded=True)
    pump.offer(units[5])
    while not begun:
        time.sleep(0.001)
    for number in (4, 2, 3, 0, 1):  # all come while the last unit is under way
        pump.offer(units[number])
    free.set()
    pump.wait("4")
    assert begun == ["5", "0", "1", "2", "3", "4"]
    pump.close()


def test_two_threads_that_update_share_no_scratch(model: Model, samples: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """States that stay are updated by who needs them, others by the pump's thread, at the same time: on a device with two streams
    their kernels would mix."""
    users: dict[int, set[str]] = {}

    def watched(form: forms.StateFormat, runs: list[forms.ElementRun], wide: Tensor, *rest: Any, **more: Any) -> None:
        users.setdefault(wide.data_ptr(), set()).add(threading.current_thread().name)
        forms.update(form, runs, wide, *rest, **more)

    monkeypatch.setattr(updates, "update", watched)
    monkeypatch.setattr(engine_room, "Pump", lambda start, order, threaded: Pump(start, order, threaded=True))
    places = {"": layout.HOST, PATHS[0]: layout.DEVICE, PATHS[1]: layout.HOST, PATHS[2]: layout.DEVICE}
    expected, _, kept = offloaded(model, samples, "split", layout.DEVICE, clip=0.5)
    users.clear()
    found, _, mixed = offloaded(model, samples, "split", places, clip=0.5)
    assert found == expected
    assert all(torch.equal(mixed[index][name], value) for index, state in kept.items() for name, value in state.items())
    assert len(users) == 2
    assert all(len(threads) == 1 for threads in users.values())


class Asked(TorchDispatchMode):
    """What waits for the device: its values are asked for on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append("".join(traceback.format_stack(limit=4)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("form", ["plain", "master", "split", "int8"])
def test_an_update_never_waits_for_a_value_of_the_device(model: Model, samples: list[Tensor], form: str, clip: float | None) -> None:
    """On a GPU the host would stand behind whatever is being copied, and kernels behind the host."""
    places = {"": layout.HOST, PATHS[0]: layout.DEVICE, PATHS[1]: layout.HOST, PATHS[2]: layout.DEVICE}
    with Asked() as asked:
        offloaded(model, samples, form, places, clip=clip, early=clip is None, skip=True)
    assert asked.found == ["".join(found) for found in asked.found if "losses = [loss.item()" in found]
    assert len(asked.found) == len(samples)


def test_a_failure_of_the_pump_is_told_where_it_is_waited_for() -> None:
    def start(unit: layout.OffloadUnit) -> None:
        raise ValueError("no more room")

    unit = layout.unit("b", {"p": 1})
    pump = Pump(start, {"b": 0}, threaded=True)
    pump.offer(unit)
    with pytest.raises(RuntimeError, match="updating weights failed") as caught:
        pump.wait("b")
    assert isinstance(caught.value.__cause__, ValueError)


def test_running_out_of_memory_in_the_pump_is_told_as_that() -> None:
    def start(unit: layout.OffloadUnit) -> None:
        raise torch.OutOfMemoryError("no more room")

    pump = Pump(start, {"b": 0}, threaded=True)
    pump.offer(layout.unit("b", {"p": 1}))
    with pytest.raises(torch.OutOfMemoryError, match="no more room"):
        pump.wait("b")
