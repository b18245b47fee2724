"""Activations that are moved: bit for bit the gradients of the plain run, every byte once, and nothing left behind."""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from foretell import zoo
from foretell.runtime.offload import parcels
from foretell.runtime.offload.memory.slots import OffsetSpace, Slots
from foretell.runtime.offload.saved import OffloadedActivations
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.fold.recompute import recompute_block
from foretell.trace.record.step import Workload, compute_loss
from tests.further import further

CPU = torch.device("cpu")
LEAST = 512
STEPS = 3
Loss = Callable[[], Tensor]

ZOO: dict[str, tuple[str, dict[str, Any], int | None, int | None]] = {
    "gpt": ("gpt2", {"layers": 4, "dim": 32, "heads": 2, "context": 16, "vocab_size": 64, "dropout": 0.1}, 16, None),
    "bert": ("bert-base", {"layers": 3, "dim": 32, "heads": 2, "context": 16, "vocab_size": 128}, 16, None),
    "t5": ("t5-base", {"layers": 2, "dim": 32, "heads": 2, "vocab_size": 64}, 16, None),
    "conv": ("resnet50", {"depth1": 2, "depth2": 2, "depth3": 2, "depth4": 2, "width": 8, "classes": 5}, None, 32),
    "moe": ("mixtral-8x7b", {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "experts": 4, "context": 16, "vocab_size": 64}, 16, None),
    "lstm": ("lstm-lm", {"layers": 3, "embed": 24, "hidden": 32, "context": 12, "vocab_size": 64}, 12, None),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu_(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(name: str) -> tuple[nn.Module, Any, Any, list[str]]:
    entry, config, seq, image = ZOO[name]
    module = zoo.load(zoo.get(entry))
    torch.manual_seed(0)
    model = module.build(**config)
    model.train()
    blocks = find_blocks(model) or [path for path, part in model.named_modules() if isinstance(part, nn.LSTM)]
    return model, module.batch(model, 2, seq, image), module.loss, blocks


def loss_of(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    torch.manual_seed(1)
    return compute_loss(Workload(model, batch, loss))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert expected and all(torch.equal(found[name], value) for name, value in expected.items())


def nothing_left(saved: OffloadedActivations) -> None:
    """Without the help of a garbage collection: nothing holds itself in a circle."""
    assert saved.hosts.live == 0
    assert not saved._known and not saved._calls and not saved._unsent
    assert all(parcel.device is None for parcel in saved._flying)


def counted(model: nn.Module, blocks: list[str], run: Loss) -> int:
    """Bytes of the storages that autograd saves inside these blocks, by brute force: all are held, so that none shares an address.
    One that is overwritten and saved again counts again."""
    seen: dict[tuple[int, int], tuple[Tensor, int]] = {}
    stays = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in stays and storage.nbytes() >= LEAST:
            seen[storage._cdata, tensor._version] = tensor, storage.nbytes()
        return tensor

    undo = []
    for path in blocks:
        part = model.get_submodule(path)
        plain = part.forward

        def forward(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return plain(*args, **kwargs)

        part.forward = forward  # type: ignore[method-assign]
        undo.append((part, plain))
    run()
    for part, plain in undo:
        part.forward = plain
    return sum(nbytes for _, nbytes in seen.values())


@pytest.fixture(autouse=True)
def _usual_kernels() -> Iterator[None]:
    """PyTorch leaves oneDNN for good once that had no kernel for some product, as for bf16 on CPUs without it."""
    with torch.backends.mkldnn.flags(enabled=True):
        yield


# ---------------------------------------------------------------------- models of every kind


@pytest.mark.parametrize("name", ZOO)
def test_moving_activations_changes_no_bit_and_moves_each_byte_once(name: str) -> None:
    model, batch, loss, blocks = made(name)
    moved = copy.deepcopy(model)
    last = len(blocks) - len(blocks) // 3
    modes = {path: "host" if place < last else "keep" for place, path in enumerate(blocks)}
    saved = OffloadedActivations(moved, modes, CPU, least=LEAST, grow=4096)
    for step in range(STEPS):
        plain = loss_of(model, batch, loss)
        plain.backward()
        before = saved.moved.down
        found = loss_of(moved, batch, loss)
        assert found.item() == plain.item()
        down = saved.moved.down - before
        found.backward()
        same(gradients(moved), gradients(model))
        nothing_left(saved)
        twin = copy.deepcopy(model)
        assert down == counted(twin, blocks[:last], functools.partial(loss_of, twin, batch, loss)) > 0, step
    assert len(saved.hosts.pieces) == 1
    assert saved.hosts.needed <= saved.hosts.nbytes <= 1.05 * saved.hosts.needed
    assert saved.moved.up + saved.moved.forwarded <= saved.moved.down
    saved.close()


def test_parts_of_a_storage_that_are_overwritten_one_after_the_other_come_back_as_they_were() -> None:
    """Gates of a recurrent cell are four tensors over one storage that know nothing of each other, each changed in place and
    then saved."""
    with torch.backends.mkldnn.flags(enabled=False):
        model, batch, loss, blocks = made("lstm")
        moved = copy.deepcopy(model)
        saved = OffloadedActivations(moved, dict.fromkeys(blocks, "host"), CPU, least=LEAST, grow=4096)
        for _ in range(STEPS):
            loss_of(model, batch, loss).backward()
            loss_of(moved, batch, loss).backward()
            same(gradients(moved), gradients(model))
            nothing_left(saved)
    assert saved.moved.down > 0
    saved.close()


def test_what_is_moved_is_not_on_the_device_when_forward_is_over() -> None:
    model, batch, loss, blocks = made("gpt")
    saved = OffloadedActivations(model, dict.fromkeys(blocks[:-2], "host") | dict.fromkeys(blocks[-2:], "keep"), CPU, least=LEAST)
    for _ in range(2):
        found = loss_of(model, batch, loss)
        parcels = list(saved._known.values())
        assert len(parcels) > 10
        alive = [parcel for parcel in parcels if not parcel.seen.expired()]
        assert sum(parcel.nbytes for parcel in alive) <= 2 * max(parcel.nbytes for parcel in parcels)  # read by the blocks that follow
        del alive, parcels
        found.backward()
    nothing_left(saved)
    saved.close()


# ---------------------------------------------------------------------- what models do


def beside(change: Callable[[nn.Module], Any], run: Callable[[nn.Module], Any], count: int = 4) -> OffloadedActivations:
    """Run a stack with and without moved activations: the same gradients."""
    torch.manual_seed(0)
    plain = Stack(count)
    moved = copy.deepcopy(plain)
    change(plain)
    change(moved)
    saved = OffloadedActivations(moved, {f"blocks.{place}": "host" for place in range(count - 1)}, CPU, least=LEAST, grow=4096)
    for _ in range(STEPS):
        for model in (plain, moved):
            torch.manual_seed(1)
            run(model)
        same(gradients(moved), gradients(plain))
        nothing_left(saved)
    assert saved.moved.down > 0
    return saved


def sample() -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(3))


def test_micro_batches_several_forwards_and_a_second_backward() -> None:
    def together(model: nn.Module) -> None:
        losses = [model(sample() * scale).square().mean() for scale in (1, 2, 3)]
        sum(losses).backward(retain_graph=True)  # type: ignore[union-attr]
        losses[1].backward()
        del losses

    def one_by_one(model: nn.Module) -> None:
        for scale in (1, 2, 3):
            model(sample() * scale).square().mean().backward()

    assert len(beside(lambda _: None, together).hosts.pieces) == 1
    beside(lambda _: None, one_by_one)


def test_a_block_that_is_used_twice_and_one_that_shares_its_weights() -> None:
    def change(model: nn.Module) -> None:
        model.blocks[1] = model.blocks[0]
        model.blocks[3].up.weight = model.blocks[2].up.weight

    beside(change, lambda model: model(model(sample())).square().mean().backward(), count=5)


def test_blocks_that_compute_again_beside_blocks_that_move() -> None:
    def user(model: nn.Module) -> None:
        block = model.blocks[0]
        plain = block.forward
        block.forward = lambda x: x + checkpoint(plain, x, use_reentrant=False)

    beside(user, lambda model: model(sample()).square().mean().backward())
    torch.manual_seed(0)
    plain, moved = Stack(), Stack()
    moved.load_state_dict(plain.state_dict())
    recompute_block(moved.blocks[1], "full")
    recompute_block(moved.blocks[2], "full")
    saved = OffloadedActivations(moved, {"blocks.0": "host", "blocks.1": "recompute", "blocks.2": "recompute", "blocks.3": "host"}, CPU, least=LEAST)
    for model in (plain, moved):
        model(sample()).square().mean().backward()
    same(gradients(moved), gradients(plain))
    nothing_left(saved)


def test_autocast_and_double_backward() -> None:
    def cast(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(sample()).float().square().mean()
        loss.backward()

    def twice(model: nn.Module) -> None:
        x = sample().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()

    beside(lambda _: None, cast)
    beside(lambda _: None, twice)


def test_without_gradients_nothing_moves() -> None:
    model = Stack()
    saved = OffloadedActivations(model, {"blocks.0": "host"}, CPU, least=1)
    with torch.no_grad():
        model(sample())
    assert saved.moved == (0, 0, 0)
    assert saved.hosts.nbytes == 0


@pytest.mark.parametrize("first", [True, False])
def test_an_error_or_a_graph_that_nobody_differentiates_leaves_nothing(first: bool) -> None:
    model = Stack()
    saved = OffloadedActivations(model, {f"blocks.{place}": "host" for place in range(4)}, CPU, least=1)
    if not first:
        model(sample()).sum().backward()
    plain = model.blocks[1].down.forward

    def fail(x: Tensor) -> Tensor:
        raise ValueError("in the middle")

    model.blocks[1].down.forward = fail
    with pytest.raises(ValueError, match="in the middle"):
        model(sample())
    gc.collect()  # the error holds frames
    nothing_left(saved)
    model.blocks[1].down.forward = plain
    output = model(sample())
    assert saved._known
    del output
    nothing_left(saved)
    model(sample()).sum().backward()
    nothing_left(saved)
    saved.close()


def test_shapes_that_change_later_are_moved_too() -> None:
    torch.manual_seed(0)
    plain = Stack()
    moved = copy.deepcopy(plain)
    saved = OffloadedActivations(moved, {f"blocks.{place}": "host" for place in range(3)}, CPU, least=LEAST, grow=4096)
    sizes = []
    for rows in (4, 16, 16, 8, 32, 4, 4):
        for model in (plain, moved):
            model(sample().repeat(rows // 4, 1)).square().mean().backward()
        same(gradients(moved), gradients(plain))
        nothing_left(saved)
        sizes.append(saved.hosts.nbytes)
    assert sizes[0] < sizes[2] < sizes[-1] == saved.hosts.needed
    assert len(saved.hosts.pieces) == 1


class Overwriting(nn.Module):
    """Saves a tensor, overwrites it, and saves it again: of the second the new bytes count, the first may not be asked for."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.randn(24, 24)), wrong

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        z = (y * self.weight[0]) if self.wrong else (y.detach() * 2)
        y.mul_(2)
        return z + y.sigmoid_() @ self.weight


def test_an_overwritten_tensor_is_refused_as_without_moving_and_a_new_value_is_a_new_tensor() -> None:
    for wrong in (False, True):
        torch.manual_seed(0)
        plain = Overwriting(wrong=wrong)
        moved = nn.ModuleDict({"block": copy.deepcopy(plain)})
        saved = OffloadedActivations(moved, {"block": "host"}, CPU, least=1)
        for _ in range(2):
            for model in (plain, moved["block"]):
                loss = model(sample()).square().mean()
                if wrong:
                    with pytest.raises(RuntimeError, match="modified by an in"):
                        loss.backward()
                    model.zero_grad()
                else:
                    loss.backward()
                del loss
            if not wrong:
                same(gradients(moved["block"]), gradients(plain))
            nothing_left(saved)


# ---------------------------------------------------------------------- streams


class Lazy:
    """A stream that does nothing until somebody waits for it, and then no more than it must: what a device may do at its worst."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.stream: Any = self

    def put(self, work: Callable[[], None]) -> Point:
        self.work.append(work)
        return self.mark()

    def mark(self) -> Point:
        return Point(self, len(self.work))

    def until(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self.work[self.done - 1]()

    def wait(self, mark: Point | None) -> None:
        if mark is not None:
            self.work.append(mark.synchronize)


class Compute(Lazy):
    """Computes at once, as a CPU does."""

    def wait(self, mark: Point | None) -> None:
        if mark is not None:
            mark.synchronize()

    wait_event = wait


class Point:
    def __init__(self, lane: Lazy, place: int) -> None:
        self.lane, self.place = lane, place

    def synchronize(self) -> None:
        self.lane.until(self.place)

    def query(self) -> bool:
        return self.lane.done >= self.place


def late(lane: Lazy, target: Tensor, source: Tensor) -> Point:
    """A copy between addresses, as a device's: it holds neither tensor."""
    places = target.data_ptr(), source.data_ptr(), source.nbytes
    ends = StorageWeakRef(target.untyped_storage()), StorageWeakRef(source.untyped_storage())

    def work() -> None:
        assert not any(end.expired() for end in ends), "memory was given back before its copy"
        ctypes.memmove(*places)

    return lane.put(work)


@pytest.mark.parametrize("kept", further([0, 1, 3], [1], "none or more blocks kept, between which one is"))
@pytest.mark.parametrize("name", ["gpt", "t5", "stack"])
def test_copies_that_are_as_late_as_they_may_be_are_waited_for(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "copy", late)
    if name == "stack":
        torch.manual_seed(0)
        model, batch, loss, blocks = Stack(6), sample(), lambda output, _: output.square().mean(), [f"blocks.{place}" for place in range(6)]
    else:
        model, batch, loss, blocks = made(name)
    moved = copy.deepcopy(model)
    modes = {path: "host" if place < len(blocks) - kept else "keep" for place, path in enumerate(blocks)}
    lanes: Any = (Compute(), Lazy(), Lazy())
    saved = OffloadedActivations(moved, modes, CPU, least=LEAST, grow=4096, lanes=lanes)
    for micro in (1, 2, 2):
        for one in (model, moved):
            losses = [loss_of(one, batch, loss) for _ in range(micro)]
            for value in reversed(losses):
                value.backward()
            del losses, value
        same(gradients(moved), gradients(model))
        nothing_left(saved)
    unused = loss_of(moved, batch, loss)
    del unused
    nothing_left(saved)
    assert all(lane.work for lane in lanes[1:])
    saved.close()


# ---------------------------------------------------------------------- memory


class Bytes:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.closed = nbytes, False

    def close(self) -> None:
        self.closed = True


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_stretches_never_overlap_and_all_come_back(orders: list[tuple[bool, int]]) -> None:
    space, taken = OffsetSpace(), {}
    for give, size in orders:
        if give and taken:
            offset = sorted(taken)[size % len(taken)]
            space.give(offset, taken.pop(offset))
        else:
            offset = space.take(size)
            assert offset is not None
            assert all(offset + size <= begin or begin + length <= offset for begin, length in taken.items())
            taken[offset] = size
            assert space.high >= offset + size
    for offset, size in taken.items():
        space.give(offset, size)
    assert space.take(1 << 62) == 0


def test_pieces_become_one_of_the_bytes_needed() -> None:
    slots = Slots(Bytes, least=8192)
    held = [slots.take(5000) for _ in range(5)]
    assert len(slots.pieces) == 5
    assert not slots.loose()
    for slot in held:
        slots.give(slot)
    old = [piece for piece, _ in slots.pieces]
    assert slots.loose()
    slots.tighten()
    assert all(piece.closed for piece in old)
    assert slots.nbytes == slots.needed == 5 * 8192
    again = [slots.take(5000) for _ in range(5)]
    assert len({slot.offset for slot in again}) == 5 and len(slots.pieces) == 1
