"""Checkpoints on real ranks: carried from any plan to any other, killed at any moment, flipped anywhere."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoint import store
from foretell.checkpoint.read import Reader
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Pipeline, Plan, Split
from foretell.runtime.parallel import ranks as members
from foretell.runtime.process.control import Control
from foretell.runtime.process.signals import Signals
from foretell.runtime.train import folder as folders
from foretell.runtime.train import log as logs
from foretell.runtime.train import loop, save, train
from foretell.runtime.train.folder import Folder
from foretell.runtime.train.run import run
from foretell.runtime.train.take import refuse_other

TEXT = str(Path(json.__file__).parent)
TINY = {"layers": 4, "dim": 32, "heads": 4, "context": 16, "vocab_size": 256, "dropout": 0.0}
PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": TINY, "seq": 16}, hardware="CPU", micro_batch=2, accumulate=4, precision="fp32"
)
SETTINGS: dict[str, Any] = {"steps": 4, "data": TEXT, "lr": 1e-2, "schedule": "constant", "warmup": 0, "seed": 3, "eval_batches": 2}
PLANS = {
    "one": PLAN,
    "fsdp2": PLAN.with_(mesh=Mesh(dp_shard=2), accumulate=2),
    "fsdp4": PLAN.with_(mesh=Mesh(dp_shard=4), accumulate=1),
    "tp": PLAN.with_(mesh=Mesh(tp=2), split=Split()),
    "pp": PLAN.with_(mesh=Mesh(pp=2), pipeline=Pipeline(schedule="interleaved-1f1b", cuts=("blocks.1", "blocks.2", "blocks.3"))),
    "2-d": PLAN.with_(mesh=Mesh(dp_shard=2, tp=2), accumulate=2, split=Split()),
    "hsdp": PLAN.with_(mesh=Mesh(dp_replicate=2, dp_shard=2), accumulate=1),
}
MOE = PLAN.with_(model={"model": "mixtral-tiny", "overrides": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64,
                                                               "vocab_size": 256, "context": 16, "experts": 4}, "seq": 16})  # fmt: skip
PLANS |= {
    "cp": PLAN.with_(mesh=Mesh(dp_shard=2, cp=2), accumulate=2),
    "experts": MOE.with_(mesh=Mesh(dp_shard=4, ep=2), accumulate=1),
    "experts, replicas": MOE.with_(mesh=Mesh(dp_replicate=2, dp_shard=2, ep=2), accumulate=1),
    "experts, one": MOE,
}
CHAIN = ("fsdp2", "one", "fsdp4", "tp", "pp", "2-d", "hsdp", "fsdp2")
LOSS_BOUND = 1e-6
"""Relative, fp32, over all steps after a change of plan: sums are made in another order, and nothing else differs."""


class Quiet:
    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, text: str, step: int) -> None:
        pass

    def say(self, text: str) -> None:
        self.said.append(text)


def go(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], resume: bool = False) -> list[str]:
    torch.set_num_threads(1)
    screen = Quiet()
    run(plan, asked, screen=screen, out=Path(out), resume=resume, device="cpu")
    return screen.said


def hop(rank: int, world: int, out: str, plan: Plan, steps: int, target: str) -> list[str]:
    """Take up a run under a plan, save at once what was taken up, elsewhere; then go on."""
    torch.set_num_threads(1)
    screen = Quiet()
    here = members.start(plan, device="cpu")
    control = Control(here)
    asked = folders.RunSettings.from_json(control.first(lambda: folders.go_on(Path(out), plan, {"steps": steps}).to_json()))
    under_way = train._prepared(plan, asked, here, Folder(path=Path(out)), control, screen, "", resume=True)
    under_way.resume()
    assert under_way.saver is not None
    usual, under_way.saver.folder = under_way.saver.folder, Path(target)
    kept, under_way.last_saved = under_way.last_saved, None
    under_way.origin = under_way.step, under_way.feed.first  # as training notes it when it begins
    assert isinstance(under_way.save(), save.SavedCheckpoint)
    under_way.saver.folder, under_way.last_saved = usual, kept
    under_way.all_steps(Signals())
    return screen.said


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in logs.read(out / "log.jsonl") if row["event"] == "step"]


def carried(ranks: Any, place: Path, more: int, chain: tuple[str, ...] = CHAIN) -> dict[str, Any]:
    """A chain of plans, each from what the one before has saved; how far losses are from those of the first plan."""
    first = PLANS[chain[0]]
    start = place / "start"
    ranks(first.mesh.world).run(go, str(start), first, SETTINGS)
    wanted = Reader(store.complete(start / "checkpoints")[0])
    straight = place / "straight"
    shutil.copytree(start, straight)
    ranks(first.mesh.world).run(go, str(straight), first, {"steps": 4 + more}, resume=True)
    before, found = start / "checkpoints", {}
    for number, name in enumerate(chain[1:]):
        out, after = place / f"{number}-{name}", place / f"{number}-{name}-saved"
        shutil.copytree(start, out, ignore=shutil.ignore_patterns("checkpoints"))
        shutil.copytree(before, out / "checkpoints")
        world = PLANS[name].mesh.world
        said = ranks(world).run(hop, str(out), PLANS[name], 4 + more, str(after))[0]
        reader = Reader(store.complete(after)[0])
        same(wanted, reader)
        assert any(line.startswith("resumed after step 4") for line in said)
        pairs = list(zip(losses(straight), losses(out), strict=True))
        found[f"{number}-{name}"] = max(abs(a - b) / abs(a) for a, b in pairs)
        assert len(pairs) == 4 + more
        before = after
    return found


def same(a: Reader, b: Reader) -> None:
    """Weights, optimizer and data order, bit for bit; random numbers follow from the run's seed and the step."""
    assert a.tensors == b.tensors and len(a.tensors) > 50
    for name in a.tensors:
        assert torch.equal(a.whole(name), b.whole(name)), name
    assert a.saved.about["data"] == b.saved.about["data"] and a.saved.about["optimizer"] == b.saved.about["optimizer"]


@pytest.mark.slow(reason="seven plans in turn, each applied by four ranks")
def test_any_plan_goes_on_from_any_other(ranks: Any, tmp_path: Path) -> None:
    found = carried(ranks, tmp_path, 4)
    assert found["6-fsdp2"] == 0.0, found  # back on the first plan: the same numbers
    assert max(found.values()) < LOSS_BOUND, found


@pytest.mark.slow(reason="three plans in turn, each applied by two ranks")
@pytest.mark.parametrize("chain", [("experts", "experts, one", "experts, replicas"), ("one", "cp")], ids=["experts", "context"])
def test_so_do_experts_and_positions_on_several_ranks(ranks: Any, tmp_path: Path, chain: tuple[str, ...]) -> None:
    assert max(carried(ranks, tmp_path, 2, chain).values()) < LOSS_BOUND


# ---------------------------------------------------------------- flipped bits, and what is live


def prepared(out: Path, plan: Plan) -> train.TrainingRun:
    """A run of one process that is about to resume."""
    here = members.start(plan, device="cpu")
    settings = folders.go_on(out, plan, {})
    return train._prepared(plan, settings, here, Folder(path=out), Control(here), Quiet(), "", resume=True)


def live(under_way: train.TrainingRun) -> list[torch.Tensor]:
    """Everything that a load may change."""
    model = [value.clone() for _, value in sorted(under_way.job.parts[0].state_dict().items())]
    moments = [
        value.clone() for state in under_way.job.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return [*model, *moments, torch.get_rng_state()]


def flipped(out: Path, plan: Plan, count: int, seed: int) -> dict[str, int]:
    """Flip bits of the newest checkpoint, one at a time, and try to take it up; file → how many were seen and named."""
    dice = random.Random(seed)
    under_way = prepared(out, plan)
    path = store.complete(out / "checkpoints")[0].path
    before = live(under_way)
    seen: dict[str, int] = {}
    manifest = store.look(path).manifest
    places = [(path / "manifest.json", 0, (path / "manifest.json").stat().st_size)]
    for name, file in manifest.files.items():
        places += [(path / name, 0, file.header_bytes), (path / name, file.header_bytes, file.bytes)]
    for turn in range(count):
        file, low, high = places[turn % len(places)]
        at, bit = dice.randrange(low, high), 1 << dice.randrange(8)
        _flip(file, at, bit)
        staged, why = under_way._staged(path)
        assert staged is None and file.name in why, (file.name, at, why)
        seen[file.name] = seen.get(file.name, 0) + 1
        _flip(file, at, bit)
    assert all(torch.equal(a, b) for a, b in zip(before, live(under_way), strict=True))
    assert len(before) == len(live(under_way))
    staged, why = under_way._staged(path)
    assert staged is not None and not why
    return seen


def _flip(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (value,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([value ^ bit]))


@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.slow(reason="more places of the same files"))])
def test_no_flipped_bit_is_loaded_and_nothing_live_is_touched(ranks: Any, tmp_path: Path, count: int) -> None:
    """What two ranks saved, taken up by one, which reads all of it."""
    ranks(2).run(go, str(tmp_path / "a"), PLANS["fsdp2"], SETTINGS)
    seen = flipped(tmp_path / "a", PLANS["one"], count, 0)
    assert sum(seen.values()) == count and len(seen) == 3


# ---------------------------------------------------------------- resumed

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 4))
                                     for _ in range(2)])
    def forward(self, x):
        for layer in self.layers: x = x + layer(x)
        return x

class Points:
    def __len__(self): return 64
    def __getitem__(self, i): return {"x": torch.full((4,), i / 64) * torch.arange(1, 5)}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN.replace("WIDTH", "8"))
    return str(tmp_path / "own.py")


def alone(out: Path, plan: Plan, *, resume: bool = False, **asked: Any) -> list[str]:
    return go(0, 1, str(out), plan, asked if resume else {**SETTINGS, **asked}, resume)


def test_buffers_that_differ_between_ranks_are_those_of_each_rank(ranks: Any, tmp_path: Path, own: str) -> None:
    """Batch norm's running mean is of a rank's own samples: five and five are ten, bit for bit, and one rank can go on."""
    plan = PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2), accumulate=2, micro_batch=2)
    asked = {**SETTINGS, "data": None, "steps": 6, "save_every": 3}
    ranks(2).run(go, str(tmp_path / "a"), plan, asked)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000006")
    ranks(2).run(go, str(tmp_path / "b"), plan, {}, resume=True)
    one, other = (store.complete(tmp_path / name / "checkpoints")[0] for name in "ab")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert {name: file.crc32 for name, file in one.files.items()} == {name: file.crc32 for name, file in other.files.items()}
    means = [Reader(one).own(rank, only="buffers")["layers.0.1.running_mean"] for rank in (0, 1)]
    assert not torch.equal(*means)
    said = alone(tmp_path / "a", plan.with_(mesh=Mesh(), accumulate=4), resume=True, steps=7)
    assert "resumed after step 6, saved on 2 ranks" in said
    assert plans.read(tmp_path / "a" / "plan.json").mesh == Mesh()  # from now on it is the run's plan


def test_a_checkpoint_of_another_model_names_the_tensors(tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own})
    alone(tmp_path / "a", plan, data=None)
    Path(own).write_text(OWN.replace("WIDTH", "16"))
    with pytest.raises(UserError, match=r"another model: layers.0.0.weight is 8x4 in the checkpoint and 16x4 in the model;.* more"):
        alone(tmp_path / "a", plan, resume=True, steps=6)


def test_an_optimizer_of_another_kind_and_a_version_of_the_future_are_refused(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.checkpoint import format as layout

    plan = PLAN.with_(model={"model": own})
    with monkeypatch.context() as patched:
        patched.setattr(layout, "VERSION", 3)
        alone(tmp_path / "a", plan, data=None)
    with pytest.raises(UserError, match="is of version 3 and this foretell reads version 2"):
        alone(tmp_path / "a", plan, resume=True)
    alone(tmp_path / "b", plan, data=None)
    saved = store.complete(tmp_path / "b" / "checkpoints")[0]
    with pytest.raises(UserError, match="was saved with optimizer adamw-fused and the plan has momentum"):
        refuse_other(saved, {k: v for k, v in saved.manifest.tensors.items() if k[0] == "m"}, plan.with_(optimizer="momentum"))


@pytest.mark.slow(reason="two runs more; another kind of optimizer is refused above")
def test_the_same_model_under_another_way_to_compute_the_optimizer(tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own}, micro_batch=4, accumulate=2)
    alone(tmp_path / "a", plan, data=None)
    wider = plan.with_(micro_batch=2, accumulate=4, reshard=False)
    assert "resumed after step 4" in alone(tmp_path / "a", wider, resume=True, steps=6)
    assert plans.read(tmp_path / "a" / "plan.json") == wider
    for other, field in ((wider.with_(optimizer="sgd"), "optimizer"), (wider.with_(precision="bf16"), "precision")):
        with pytest.raises(UserError, match=f"the plan differs .* in {field}"):
            alone(tmp_path / "a", other, resume=True)


LOOP = pytest.mark.slow(reason="keeps what runs of test_train.py keep")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": "sgd"}, marks=pytest.mark.slow(reason="keeps nothing: the others keep more")),
        pytest.param({"optimizer": "momentum"}, marks=pytest.mark.slow(reason="keeps one tensor of the two that adam keeps")),
        pytest.param({"optimizer": "adam-loop"}, marks=LOOP), {"precision": "bf16"},
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.slow(reason="saved in fp32, as the first")),
    ],
    ids=lambda changes: "-".join(changes.values()),
)  # fmt: skip
def test_four_steps_are_two_and_two_whatever_is_kept_of_them(tmp_path: Path, own: str, changes: dict[str, Any]) -> None:
    plan = PLAN.with_(model={"model": own}, **changes)
    alone(tmp_path / "a", plan, data=None, save_every=2, lr=1e-2)
    before = losses(tmp_path / "a")
    newest = store.complete(tmp_path / "a" / "checkpoints")[0]
    newest.path.rename(tmp_path / "aside")
    assert "resumed after step 2" in alone(tmp_path / "a", plan, resume=True)
    assert losses(tmp_path / "a") == before and len(before) == 4
    again = store.complete(tmp_path / "a" / "checkpoints")[0]
    assert [file.crc32 for file in again.files.values()] == [file.crc32 for file in newest.files.values()]


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew(tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own})
    alone(tmp_path / "a", plan, data=None, steps=4, save_every=2)
    for saved in store.complete(tmp_path / "a" / "checkpoints"):
        _flip(saved.path / "rank-00000.safetensors", saved.files["rank-00000.safetensors"].bytes - 3, 1)
    with pytest.raises(UserError, match=r"no checkpoint of .* can be used: .*step-00000004.* is damaged"):
        alone(tmp_path / "a", plan, resume=True)


# ---------------------------------------------------------------- saved on the way


class At(Quiet):
    """Does something when the line of a step is written."""

    def __init__(self, at: dict[int, Callable[[], None]]) -> None:
        super().__init__()
        self.at = at

    def step(self, text: str, step: int) -> None:
        self.at.get(step, lambda: None)()


def test_a_signal_waits_for_the_save_under_way_and_saves_once_more(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretell.checkpoint import saver

    plain = saver.write_file

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.4)
        return plain(*args, **kwargs)

    monkeypatch.setattr(saver, "write_file", slow)
    monkeypatch.setattr(loop, "TELL_SECONDS", 0.0)
    screen = At({4: lambda: os.kill(os.getpid(), signal.SIGTERM)})
    plan = PLAN.with_(model={"model": own})
    done = run(plan, {**SETTINGS, "data": None, "save_every": 3, "steps": 100}, screen=screen, out=tmp_path / "a", device="cpu")
    assert (done.status, done.step) == ("stopped", 4)
    assert [one.step for one in store.complete(tmp_path / "a" / "checkpoints")] == [4, 3]
    rows = {row["step"]: row for row in logs.read(tmp_path / "a" / "log.jsonl") if row["event"] == "save"}
    assert rows[3]["seconds"] > 0.4 > rows[3]["stall_seconds"] and rows[4]["stall_seconds"] >= rows[4]["seconds"] > 0.4


def test_the_time_between_failures_says_when_to_save(tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the costs given, the steps are those of the formula; the first save shows that saving works at all."""
    asked: list[tuple[float, float]] = []

    def between(cost: float, mtbf: float, step: float, total: int) -> int:
        asked.append((cost, mtbf))
        assert 0 < cost < 5 and 0 < step < 5 and total == 40
        return 7

    monkeypatch.setattr(loop, "steps_between", between)
    plan = PLAN.with_(model={"model": own})
    alone(tmp_path / "a", plan, data=None, steps=40, mtbf=3600.0, keep=3)
    saves = [row["step"] for row in logs.read(tmp_path / "a" / "log.jsonl") if row["event"] == "save"]
    assert saves == [5, 13, 21, 29, 37, 40] and {mtbf for _, mtbf in asked} == {3600.0}
    assert [one.step for one in store.complete(tmp_path / "a" / "checkpoints")] == [40, 37, 29]
