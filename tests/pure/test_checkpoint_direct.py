"""Checkpoints of what is written from where it is: states on disk, and states in host memory that has no room for a copy."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretell.checkpoint import store
from foretell.checkpoint.boxes import whole
from foretell.checkpoint.format import Damaged
from foretell.checkpoint.read import Reader
from foretell.checkpoint.saver import NotSaved, SavedCheckpoint, Saver, SaveResult
from foretell.checkpoint.write import TensorPiece
from foretell.plan.types import MASTER, Plan
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import Job, apply
from foretell.runtime.train import save
from foretell.runtime.train.take import stage, take
from tests.further import further
from tests.pure.checkpoint_cases import Threads
from tests.pure.test_apply import ALONE, GPT

LITTLE = 4000
"""Bytes of spare memory: enough for buffers and random numbers."""


def saver(folder: Path, spare: int) -> Saver:
    return Saver(folder, Threads(1).of(0), Threads(1).of(0), spare=lambda: spare)


def near(name: str, tensor: Tensor) -> TensorPiece:
    return TensorPiece(name=name, shape=tuple(tensor.shape), box=whole(tensor.shape), tensor=tensor)


def far(name: str, tensor: Tensor) -> TensorPiece:
    """A tensor of which only bytes can be asked for."""
    flat = tensor.reshape(-1).view(torch.uint8)
    like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return TensorPiece(name=name, shape=tuple(tensor.shape), box=whole(tensor.shape), tensor=like, read=lambda a, b: flat[a:b].clone())


def done(one: Saver) -> SaveResult:
    one.wait(60)
    found = one.poll()
    assert found is not None and one.poll() is None
    return found


def contents(found: SaveResult) -> Reader:
    assert isinstance(found.result, SavedCheckpoint) and store.problems(found.result.path) == []
    return Reader(found.result)


@pytest.mark.parametrize("spare", [LITTLE, 10**12])
def test_memory_that_has_no_room_for_a_copy_is_written_itself(tmp_path: Path, spare: int) -> None:
    weight, buffer = torch.randn(2000, 1500), torch.zeros(10)
    before = weight.clone()
    one = saver(tmp_path, spare)
    own = {"random": {}, "buffers": {"b": buffer}, "more": {}}
    one.warm([near("model/w", weight)], own)
    for step in (1, 2):
        one.begin(step, [near("model/w", weight)], own, {})
        buffer += 1  # as forward may
        one.before_update()
        weight.mul_(2)
        found = done(one)
        reader = contents(found)
        assert torch.equal(reader.whole("model/w"), before * step)
        assert torch.equal(reader.own(0)["buffers"]["b"], torch.full((10,), step - 1.0))
        assert found.direct_bytes == (weight.nbytes if spare == LITTLE else 0)
    assert one._image is not None and one._image.memory.nbytes < (LITTLE if spare == LITTLE else 2 * weight.nbytes)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("spare", [LITTLE, 10**12, 0])
def test_all_ways_at_once_give_what_was_there(tmp_path: Path, spare: int, wait: bool) -> None:
    """Many small tensors, written in rows, and some that are larger than a row, some of them far."""
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for number in range(60):
        dtype = (torch.float32, torch.bfloat16, torch.int16, torch.float64)[number % 4]
        shape = (3_000_000,) if number in (8, 9, 30) else (int(torch.randint(0, 70, (1,), generator=draw)), 3)
        tensors[f"optimizer/p{number}/exp_avg"] = torch.randint(-1000, 1000, shape, generator=draw).to(dtype)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    pieces = [(far if number % 3 == 0 else near)(name, tensor) for number, (name, tensor) in enumerate(tensors.items())]
    one = saver(tmp_path, spare)
    one.begin(7, pieces, {"random": {"torch": torch.arange(9)}, "buffers": {}, "more": {}}, {}, wait=wait)
    one.before_update()
    for tensor in tensors.values():
        tensor.zero_()
    reader = contents(done(one))
    for name, tensor in kept.items():
        assert torch.equal(reader.whole(name), tensor), name
    assert torch.equal(reader.own(0)["random"]["torch"], torch.arange(9))


def test_what_cannot_be_read_is_told_and_nobody_waits_for_it(tmp_path: Path) -> None:
    def read(first: int, last: int) -> Tensor:
        raise OSError(5, "Input/output error")

    like = torch.empty(3000, device="meta")
    piece = TensorPiece(name="optimizer/p/exp_avg", shape=(3000,), box=whole((3000,)), tensor=like, read=read)
    one = saver(tmp_path, LITTLE)
    one.begin(1, [piece], {"random": {}, "buffers": {}, "more": {}}, {})
    waits = threading.Thread(target=one.before_update, daemon=True)
    waits.start()
    waits.join(60)
    assert not waits.is_alive()
    found = done(one)
    assert isinstance(found.result, NotSaved) and "Input/output error" in found.result.why and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- a job and back


def job(states: dict[str, str], folder: Path, form: str = "fp32") -> Job:
    asked = Plan(model={"model": "gpt-tiny"}, hardware="auto", precision=MASTER, states=states, state_format=form)
    return apply(verify.build(GPT), asked, ALONE, learning_rate=1e-2, scratch=folder)


@pytest.mark.parametrize("little", further([True, False], [True], "as much memory as it likes; states are read directly below"))
@pytest.mark.parametrize(("before", "after", "form"), [("disk", "disk", "split-int8"), ("host", "disk", "fp32"), ("disk", "host", "split")])
def test_a_job_whose_states_are_elsewhere_goes_on_with_little_memory(
    tmp_path: Path, before: str, after: str, form: str, little: bool
) -> None:
    spare = 0 if little else 10**12
    batches = verify.batches(GPT, 4)
    one = job({"blocks.0-1": before, "rest": before}, tmp_path, form)
    for batch in batches[:2]:
        one.train_step([batch])
    mine = saver(tmp_path / "saved", LITTLE if little else spare)
    mine.begin(2, save.pieces(one), save.own_state(one), {"plan": {}}, extra=save.extra(one))
    mine.before_update()
    expected = [float(one.train_step([batch]).loss) for batch in batches[2:]]
    reader = contents(done(mine))
    other = job({"blocks.0-1": after}, tmp_path, form)
    known = save.whole_of(verify.build(GPT).model, other.plan)
    staged = stage(reader, other, known, spare=lambda: spare)
    assert any(isinstance(value, Tensor) for value in staged.weights.values()) is not little
    take(staged, other)
    assert [float(other.train_step([batch]).loss) for batch in batches[2:]] == expected
    whole, mended = one.state_dict()["optimizer"]["state"], other.state_dict()["optimizer"]["state"]
    assert whole.keys() == mended.keys()
    for name, state in whole.items():
        assert all(torch.equal(mended[name][key], value) for key, value in state.items()), name
    one.close()
    other.close()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    one = job({"blocks.*": "disk"}, tmp_path)
    one.train_step(verify.batches(GPT, 1))
    mine = saver(tmp_path / "saved", LITTLE)
    mine.begin(1, save.pieces(one), save.own_state(one), {"plan": {}}, extra=save.extra(one), wait=True)
    found = done(mine)
    reader = contents(found)
    (path,) = reader.saved.path.glob("rank-*")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Damaged):
        stage(reader, one, save.whole_of(verify.build(GPT).model, one.plan), spare=lambda: 0)
    one.close()
