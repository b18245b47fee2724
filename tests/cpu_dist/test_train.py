"""Training: resumed bit for bit, stopped in order, and every way it can go wrong, for real."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.checkpoint.read import item_bytes
from foretell.cli import main
from foretell.errors import MissingPackage, UserError
from foretell.plan import file as plans
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime import log as logs
from foretell.runtime import ranks as members
from foretell.runtime import save, train
from foretell.runtime.control import Control
from foretell.runtime.folder import Folder, Settings
from foretell.runtime.guard import RunFailed
from foretell.runtime.measure import DeviceClock, HostClock, Measurement, Reading
from foretell.runtime.run import run
from foretell.runtime.watch import Watch
from foretell.trace.load import Source

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path(json.__file__).parent
"""Text that every Python has: the source of its json package."""
TINY = {"layers": 2, "dim": 32, "heads": 2, "context": 32, "vocab_size": 256, "dropout": 0.1}
PLAN = Plan(
    model={"model": "gpt-tiny", "overrides": TINY, "seq": 32}, hardware="CPU", micro_batch=2, accumulate=2, precision="fp32"
)
SETTINGS: dict[str, Any] = {"steps": 10, "data": str(TEXT), "lr": 1e-2, "schedule": "wsd", "warmup": 2, "save_every": 5}

OWN = '''
import os, signal
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self): super().__init__(); self.inner = nn.Linear(4, 4)
    def forward(self, x): return x + torch.tanh(self.inner(x))

class Touchy(Layer):
    """Overflows for a sample that is marked: in forward (value 7), or in backward alone (value 9)."""
    def forward(self, x):
        x = super().forward(x)
        x = x * torch.where((x[:, :1] - x[:, :1].detach() + MARK == 7), float("inf"), 1.0)
        return Hurt.apply(x) if MARK == 9 else x

class Hurt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g * float("nan")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Touchy(), Layer()])
        self.out = nn.Linear(4, 1)
    def forward(self, x, mark):
        global MARK
        MARK = float(mark.max())
        for layer in self.layers: x = layer(x)
        return self.out(x)

MARK = 0.0

class Points:
    def __len__(self): return 64
    def __getitem__(self, i):
        rank = os.environ.get("RANK", "0")
        if os.environ.get("HURT_AT") == f"{rank}:{i}":
            os.kill(os.getpid(), getattr(signal, os.environ["HURT_WITH"]))
        mark = float(os.environ.get("MARK_AS", 0)) if os.environ.get("MARK_AT") == str(i) else 0.0
        return {"x": torch.full((4,), i / 64), "mark": mark}

def model(): return Net()
def data(split): return Points() if split == "train" else None
def loss(output, batch): return output.square().mean()
'''


class Quiet:
    """Keeps what a run says; `at` does something when a step's line is written."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.said: list[str] = []
        self.lines: list[str] = []
        self.at = at or {}

    def step(self, text: str, step: int) -> None:
        self.lines.append(text)
        self.at.get(step, lambda: None)()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TELL_SECONDS", 0.0)
    torch.set_num_threads(1)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own.py").write_text(OWN)
    for name in ("HURT_AT", "HURT_WITH", "MARK_AT", "MARK_AS"):
        monkeypatch.delenv(name, raising=False)
    return str(tmp_path / "own.py")


def go(out: Path, plan: Plan = PLAN, *, screen: Quiet | None = None, resume: bool = False, **changed: Any) -> train.Outcome:
    asked = changed if resume else {**SETTINGS, **changed}
    return run(plan, asked, screen=screen or Quiet(), out=out, resume=resume, device="cpu")


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in logs.read(out / "log.jsonl") if row["event"] == "step"]


def sums(out: Path, step: int) -> dict[str, int]:
    """Checksums of weights, optimizer state and random numbers after a step, a file for every rank."""
    found = json.loads((out / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())
    return {name: file["crc32"] for name, file in found["files"].items()}


# ---------------------------------------------------------------- resumed bit for bit


def test_ten_steps_are_five_and_five_bit_for_bit_on_one_rank(tmp_path: Path) -> None:
    straight = go(tmp_path / "a")
    go(tmp_path / "b", screen=Quiet({5: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert len(losses(tmp_path / "b")) == 5
    resumed = go(tmp_path / "b", resume=True)
    assert straight.status == resumed.status == train.DONE and resumed.step == 10
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 10
    assert sums(tmp_path / "a", 10) == sums(tmp_path / "b", 10)
    assert losses(tmp_path / "a")[-1][1] < losses(tmp_path / "a")[0][1]


def _ten_steps(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], resume: bool) -> tuple[str, int]:
    torch.set_num_threads(1)
    done = run(plan, asked, screen=Quiet(), out=Path(out), resume=resume, device="cpu")
    return done.status, done.step


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": Mesh(dp_shard=2)},
        {"mesh": Mesh(dp_replicate=2), "clip": None, "optimizer": "adamw-foreach"},
        {"mesh": Mesh(pp=2), "pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",))},
        {"mesh": Mesh(tp=2), "model": {**PLAN.model, "overrides": {**TINY, "dropout": 0.0}}},
    ],
    ids=["fsdp", "replicated", "pipeline", "tensor"],
)
def test_ten_steps_are_five_and_five_bit_for_bit_on_two_ranks(ranks: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = PLAN.with_(**changes)
    assert ranks(2).run(_ten_steps, str(tmp_path / "a"), plan, SETTINGS, False) == [("done", 10)] * 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    _cut_back(tmp_path / "b", 5)
    assert ranks(2).run(_ten_steps, str(tmp_path / "b"), plan, {}, True) == [("done", 10)] * 2
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 10
    assert sums(tmp_path / "a", 10) == sums(tmp_path / "b", 10) and len(sums(tmp_path / "a", 10)) == 2
    newest = save.complete(tmp_path / "b" / "checkpoints")[0]
    sizes = [file.bytes - file.header_bytes for file in newest.files.values()]
    tensors = sum(item_bytes(spec) for spec in newest.manifest.tensors.values())
    assert tensors < sum(sizes) < 1.2 * tensors and max(sizes) < 2 * min(sizes)  # once, and evenly shared


def _cut_back(out: Path, step: int) -> None:
    """As if the run had been killed right after the checkpoint of `step`."""
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    assert [one.step for one in save.complete(out / "checkpoints")] == [step]


def test_ranks_share_the_samples_of_one_process(ranks: Any, tmp_path: Path) -> None:
    """Two data ranks with micro-batch 2 and one process with 4 see the same global batches; without dropout, the same losses."""
    calm = {**PLAN.model, "overrides": {**TINY, "dropout": 0.0}}
    go(tmp_path / "one", PLAN.with_(micro_batch=4, model=calm), no_save=True)
    two = PLAN.with_(mesh=Mesh(dp_shard=2), model=calm)
    ranks(2).run(_ten_steps, str(tmp_path / "two"), two, {**SETTINGS, "no_save": True}, False)
    pairs = zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True)
    assert all(math.isclose(a, b, rel_tol=1e-4) for (_, a), (_, b) in pairs)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    go(tmp_path / "a", schedule="constant", steps=14)
    go(tmp_path / "b", schedule="constant", warmup=2)
    assert go(tmp_path / "b", resume=True, steps=14).step == 14
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


# ---------------------------------------------------------------- what is written


def test_the_folder_has_everything(tmp_path: Path) -> None:
    screen = Quiet()
    done = go(tmp_path / "a", PLAN.with_(predicted={"step_seconds": 0.5, "flops_per_step": 1e9}), screen=screen, eval_every=4)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "checkpoints", "log.jsonl", "measurement.json", "plan.json", "settings.json",
    ]  # fmt: skip
    assert plans.read(tmp_path / "a" / "plan.json").with_(predicted={}) == PLAN
    found = Measurement.from_json(json.loads((tmp_path / "a" / "measurement.json").read_text()))
    assert found == done.measurement and found.steps + found.skipped_steps == 10
    assert found.unit == "tokens" and found.per_step == 4 * 32
    assert found.per_second == pytest.approx(found.per_step / found.step_seconds)
    assert found.p10_seconds <= found.step_seconds <= found.p90_seconds and found.mfu is None
    assert found.phases["backward"] + found.phases["update"] == pytest.approx(found.step_seconds, rel=0.5)
    assert {"backward", "update", "between", "data"} == set(found.phases) and found.host_bytes > 2**20
    rows = logs.read(tmp_path / "a" / "log.jsonl")
    assert [row["step"] for row in rows if row["event"] == "eval"] == [4, 8, 10]
    assert [row["step"] for row in rows if row["event"] == "save"] == [5, 10]
    rates = [row["lr"] for row in rows if row["event"] == "step"]
    assert rates[:3] == [5e-3, 1e-2, 1e-2] and rates[-1] == 0.0
    assert all(math.isfinite(row["grad_norm"]) for row in rows if row["event"] == "step")
    assert len(screen.lines) == 10 and screen.lines[-1].startswith("step 10/10  loss ") and "% vs plan" in screen.lines[-1]


def test_evaluation_is_of_samples_never_learned_from(tmp_path: Path) -> None:
    """Learned by heart, the text to learn from is known far better than what was held out."""
    (tmp_path / "text").mkdir()
    noise = torch.randint(97, 123, (330,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "text" / "a.txt").write_bytes(bytes(noise.tolist()))
    calm = PLAN.with_(model={**PLAN.model, "overrides": {**TINY, "dropout": 0.0}})
    done = go(tmp_path / "a", calm, data=str(tmp_path / "text"), steps=120, lr=3e-3, schedule="constant", no_save=True)
    assert done.measurement is not None and done.measurement.eval_loss is not None
    assert done.measurement.last_loss < 1.5 < 3.0 < done.measurement.eval_loss


def test_a_line_of_the_log_that_was_cut_and_steps_after_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    go(tmp_path / "a")
    before = losses(tmp_path / "a")
    _cut_back(tmp_path / "a", 5)
    with (tmp_path / "a" / "log.jsonl").open("a") as stream:
        stream.write('{"event": "step", "st')
    go(tmp_path / "a", resume=True)
    assert losses(tmp_path / "a") == before


def test_clocks_say_where_the_seconds_went() -> None:
    clock = HostClock()
    for step in (1, 2, 3):
        if step == 3:
            time.sleep(0.05)
            clock.pause()
        clock.begin()
        time.sleep(0.02)
        clock.middle()
        time.sleep(0.01)
        clock.end(step, torch.tensor(1.5), torch.tensor(2.0))
        time.sleep(0.005)
    first, second, third = clock.read()
    assert first.between_seconds == 0 and 0.005 <= second.between_seconds < 0.02 and third.between_seconds == 0
    for reading in (first, second, third):
        assert 0.02 <= reading.backward_seconds < 0.03 and 0.01 <= reading.update_seconds < 0.02
        assert reading.seconds == pytest.approx(reading.backward_seconds + reading.update_seconds + reading.between_seconds)
    assert (first.loss, first.grad_norm, first.step) == (1.5, 2.0, 1)


class Event:
    """A CUDA event of a device whose time this test moves on by hand."""

    now = 0.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def test_a_device_is_read_one_step_late_and_nothing_is_lost() -> None:
    clock = DeviceClock(Event, pin=False)
    found: list[list[Reading]] = []
    for step in range(1, 9):
        if step == 5:
            found.append(clock.read(all=True))
            Event.now += 1000
            clock.pause()
        Event.now += step  # milliseconds between two steps
        clock.begin()
        Event.now += 20
        clock.middle()
        Event.now += 10
        clock.end(step, torch.tensor(float(step)), torch.tensor(2.0) if step % 2 else None)
        found.append(clock.read())
    found.append(clock.read(all=True))
    assert [[reading.step for reading in some] for some in found] == [[], [1], [2], [3], [4], [], [5], [6], [7], [8]]
    for reading in (reading for some in found for reading in some):
        between = 0 if reading.step in (1, 5) else reading.step
        assert reading.seconds == pytest.approx((30 + between) / 1e3) and reading.between_seconds == pytest.approx(between / 1e3)
        assert reading.loss == reading.step and reading.grad_norm == (2.0 if reading.step % 2 else None)


def test_lines_are_short_and_say_what_is_known() -> None:
    clock = HostClock()
    clock.begin()
    clock.middle()
    clock.end(12, torch.tensor(3.21449), None)
    reading = replace(clock.read()[0], seconds=0.0861)
    text = logs.line(reading, 100, rate=380123.0, unit="tokens", mfu=0.3151, memory_bytes=30 * 2**30, drift=0.0211)
    assert text == "step  12/100  loss 3.2145  86.1 ms  380,000 tokens/s  MFU 31.5 %  30.0 GiB  +2.1 % vs plan"
    assert logs.line(reading, 100, rate=12.34, unit="samples") == "step  12/100  loss 3.2145  86.1 ms  12.3 samples/s"


# ---------------------------------------------------------------- stopped


def test_a_signal_stops_after_the_step_saves_and_says_so(tmp_path: Path) -> None:
    screen = Quiet({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    done = go(tmp_path / "a", screen=screen, save_every=0)
    assert (done.status, done.signal, done.step) == (train.STOPPED, "SIGINT", 3)
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [3]
    assert "SIGINT: stopping after this step" in screen.said[-1]
    assert done.measurement is not None and (tmp_path / "a" / "measurement.json").exists()


def test_a_signal_to_one_rank_stops_all_at_the_same_step(ranks: Any, tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2))
    found = ranks(2).run(_hurt, str(tmp_path / "a"), plan, {"steps": 4000, "lr": 1e-3}, {"HURT_WITH": "SIGTERM"}, "1:")
    assert [status for status, _ in found] == ["stopped"] * 2 and found[0][1] == found[1][1] < 4000
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [found[0][1]]


def _hurt(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], env: dict[str, str], where: str) -> tuple[str, int]:
    """A run in which a rank signals itself at whatever sample comes third."""
    order = _own_order(8 * 3 + 1)
    os.environ.update(env, HURT_AT=f"{where}{order}")
    try:
        return _ten_steps(rank, world, out, plan, asked, False)
    finally:
        for name in ("HURT_AT", *env):
            os.environ.pop(name, None)


def _own_order(number: int) -> int:
    """Which of the 64 own samples is number so-and-so of a run with seed 0; one that rank 1 of 2 gets."""
    import numpy as np

    from foretell.runtime.data import shuffled

    return int(shuffled(64, 0, 0, np.array([number + 2]))[0])


TWICE = """
import os, signal, time
from foretell.runtime.signals import Signals
with Signals(lambda text: print(text, flush=True)):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # passed on by a launcher: the same one
    time.sleep(0.6)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not here", flush=True)
"""


def test_a_second_signal_ends_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines()[1:] == ["still here"] and done.stdout.startswith("SIGINT: stopping after this step")


# ---------------------------------------------------------------- bad input


def test_a_world_that_does_not_match_says_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 processes.*3 processes started.*torchrun --nproc-per-node 2 -m foretell run"):
        go(tmp_path / "a", PLAN.with_(mesh=Mesh(dp_shard=2)))
    assert not (tmp_path / "a").exists()


def test_a_plan_for_another_model_names_the_shapes(tmp_path: Path) -> None:
    source = Source(model="gpt-tiny", overrides={**TINY, "dim": 64}, seq=32)
    from foretell.zoo import gpt

    shapes = {name: (tuple(p.shape), "float32") for name, p in gpt.build(**source.overrides).named_parameters()}
    plan = PLAN.with_(model={**model_of(source, shapes=shapes), "overrides": TINY})
    with pytest.raises(UserError, match=r"another model: tokens.weight is 256x64 in the plan and 256x32 in the model"):
        go(tmp_path / "a", plan)


def test_data_that_is_not_there_is_said_before_anything_is_made(tmp_path: Path, own: str) -> None:
    with pytest.raises(UserError, match="there is no data folder"):
        go(tmp_path / "a", data=str(tmp_path / "nowhere"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "none.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"none\.py has no function data"):
        go(tmp_path / "b", data=str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="text alone does not give: x, mark"):
        go(tmp_path / "c", PLAN.with_(model={"model": own}))


def test_a_folder_that_cannot_be_written_or_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run folder .*file/run cannot be written: Not a directory"):
        go(tmp_path / "file" / "run")
    go(tmp_path / "a", steps=2, no_save=True)
    kept = {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    with pytest.raises(UserError, match="holds a run already"):
        go(tmp_path / "a")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()} == kept


def test_resuming_what_is_not_there_or_was_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        go(tmp_path / "none", resume=True)
    go(tmp_path / "a", steps=2, warmup=0)
    with pytest.raises(UserError, match=r"--lr 0.5 was 0.01 when the run began"):
        go(tmp_path / "a", resume=True, lr=0.5)
    with pytest.raises(UserError, match=r"the plan differs .* in accumulate"):
        go(tmp_path / "a", PLAN.with_(accumulate=1), resume=True)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("other text " * 100)
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    (tmp_path / "a" / "settings.json").write_text(json.dumps({**settings, "data": str(tmp_path / "text")}))
    with pytest.raises(UserError, match="the data is not what"):
        go(tmp_path / "a", resume=True)


def test_logs_that_nobody_knows_and_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"unknown log 'tensorbord'.*did you mean tensorboard"):
        go(tmp_path / "a", log=("tensorbord",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match=r"--log wandb needs the package 'wandb'.*foretell\[wandb\]"):
        go(tmp_path / "b", log=("wandb",))


def test_the_adapter_of_wandb_hands_on_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself is not installed: what stands in for it only keeps what it is given."""
    given: list[tuple[int, dict[str, float]]] = []
    runs: list[dict[str, Any]] = []

    def init(**words: Any) -> Any:
        runs.append(words)
        return SimpleNamespace(log=lambda figures, step: given.append((step, figures)), finish=lambda: given.append((-1, {})))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    go(tmp_path / "a", steps=2, log=("wandb",), warmup=0)
    assert runs[0]["name"] == "a" and runs[0]["config"]["lr"] == 1e-2 and given[-1] == (-1, {})
    steps = [(step, figures["step/loss"]) for step, figures in given if "step/loss" in figures]
    assert steps == losses(tmp_path / "a")


# ---------------------------------------------------------------- no longer numbers


@pytest.mark.parametrize(
    ("mark", "said"),
    [("7", r"the loss of step 2 is (nan|inf): first in the forward of layers\.1, in micro-batch"),
     ("9", r"the gradient's norm of step 2 is nan: first in backward, in the gradient that reaches the output of layers\.\d")],
    ids=["forward", "backward"],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw-fused", "adamw-foreach"])
def test_not_a_number_stops_saves_and_names_the_block(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, mark: str, said: str, optimizer: str
) -> None:
    plan = PLAN.with_(model={"model": own}, optimizer=optimizer)
    go(tmp_path / "good", plan, data=None, steps=1, warmup=0, save_every=1)
    monkeypatch.setenv("MARK_AT", str(_own_order(4)))  # sample 6: in step 2
    monkeypatch.setenv("MARK_AS", mark)
    with pytest.raises(RunFailed, match=said) as caught:
        go(tmp_path / "a", plan, data=None, warmup=0, schedule="constant", save_every=0)
    assert caught.value.exit_code == 1 and "samples 4 to 7" in caught.value.remedy
    kept = save.complete(tmp_path / "a" / "checkpoints")
    assert [one.step for one in kept] == [2]
    after, before = (save.Reader(one) for one in (kept[0], save.complete(tmp_path / "good" / "checkpoints")[0]))
    assert "optimizer/out.weight/exp_avg" in before.tensors
    for name in before.tensors:  # the bad update was not applied
        assert torch.equal(after.whole(name), before.whole(name)), name
    assert logs.read(tmp_path / "a" / "log.jsonl")[-1]["event"] == "not finite"
    monkeypatch.delenv("MARK_AT")
    assert go(tmp_path / "a", plan, resume=True).step == 10


def _not_a_number(rank: int, world: int, out: str, plan: Plan, at: str) -> str:
    os.environ.update(MARK_AT=at, MARK_AS="7")
    try:
        _ten_steps(rank, world, out, plan, {**SETTINGS, "data": None}, False)
    except RunFailed as error:
        return str(error)
    finally:
        os.environ.pop("MARK_AT")
    return "went on"


def test_not_a_number_on_one_rank_is_known_to_all(ranks: Any, tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2))
    found = ranks(2).run(_not_a_number, str(tmp_path / "a"), plan, str(_own_order(8)))
    assert found[0] == found[1] and "first in the forward of layers.1, in micro-batch 0" in found[0], found
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [2]


# ---------------------------------------------------------------- disks


def _limit_files(most: int, ever: int) -> None:
    """From now on; a save that is under way is waited for."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, ever))


def test_a_disk_that_takes_no_more_costs_one_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow, in the middle of writing one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    screen = Quiet({3: lambda: _limit_files(100_000, before[1]), 5: lambda: _limit_files(*before)})
    try:
        done = go(tmp_path / "a", screen=screen, steps=6, save_every=2, warmup=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.step == 6 and [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [6, 2]
    told = [line for line in screen.said if "was not saved" in line]
    assert len(told) == 1 and "step 4" in told[0] and "File too large" in told[0] and "the one of step 2 is kept" in told[0]
    assert not list((tmp_path / "a" / "checkpoints").glob("*.partial"))


def test_a_last_checkpoint_that_cannot_be_saved_is_a_failure(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RunFailed, match=r"last checkpoint was not saved: rank 0: File too large.*step 2 is kept"):
            go(tmp_path / "a", screen=Quiet({3: lambda: _limit_files(100_000, before[1])}), steps=4, save_every=2, warmup=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000002"]  # no half of one
    assert (tmp_path / "a" / "measurement.json").exists()


@pytest.mark.parametrize("harm", ["flip", "cut", "delete", "manifest"])
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    go(tmp_path / "a")
    wanted = losses(tmp_path / "a")
    newest = tmp_path / "a" / "checkpoints" / "step-00000010"
    file = newest / ("manifest.json" if harm == "manifest" else "rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    if harm == "delete":
        file.unlink()
    else:
        if harm == "flip":
            content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    screen = Quiet()
    go(tmp_path / "a", resume=True, screen=screen)
    assert "resumed after step 5" in screen.said
    assert any("is damaged" in line for line in screen.said) == (harm == "flip")
    assert losses(tmp_path / "a") == wanted and save.complete(tmp_path / "a" / "checkpoints")[0].step == 10


def test_a_save_cut_short_is_not_seen_and_cleared_away(tmp_path: Path) -> None:
    go(tmp_path / "a", steps=5)
    left = tmp_path / "a" / "checkpoints" / "step-00000099.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [5]
    go(tmp_path / "a", resume=True, steps=6)
    assert not left.exists() and [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [6, 5]


# ---------------------------------------------------------------- ranks that go


def _stopped_rank(rank: int, world: int, silence: float) -> tuple[str, float, bool]:
    """Rank 1 is stopped by the kernel for a while; rank 0 must notice, name it and go free."""
    plan = PLAN.with_(mesh=Mesh(dp_shard=2))
    control = Control(members.start(plan, device="cpu"))
    watch = Watch(control, tell=lambda _: None, silence_s=silence, grace_s=60.0)
    other = control.gather(os.getpid())[1]
    began = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        while not watch.verdict and time.monotonic() < began + 30:
            time.sleep(0.05)
    else:
        while not watch.verdict and time.monotonic() < began + 30:
            time.sleep(0.05)
        os.kill(other, signal.SIGCONT)
    seconds = time.monotonic() - began
    control.gather(None)
    watch.stop()
    return watch.verdict, seconds, watch.speaks


def test_a_rank_that_gives_no_sign_of_life_is_named_in_time(ranks: Any) -> None:
    (said, seconds, speaks), (_, _, other) = ranks(2).run(_stopped_rank, 2.0)
    assert said == "rank 1 is gone (no sign of life for 2 s)" and 2 <= seconds < 8
    assert speaks and not other


def cli(*words: str, **env: str) -> subprocess.Popen[str]:
    """`foretell run`, in a process of its own."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return subprocess.Popen(
        [sys.executable, "-m", "foretell", "run", *words], env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_rank_that_is_killed_stops_all_in_time_with_one_message(ranks: Any, tmp_path: Path, own: str) -> None:
    """The whole command: it starts two ranks, the second is killed, and what was saved is taken up again."""
    plan, out = tmp_path / "plan.json", tmp_path / "run"
    plans.write(PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2)), plan)
    hurt = {"HURT_AT": f"1:{_own_order(8 * 5 + 1)}", "HURT_WITH": "SIGKILL"}  # in step 6: the save of step 4 waited for that of 2
    child = cli(str(plan), "--steps", "200", "--save-every", "2", "--out", str(out), **hurt)
    told, said = child.communicate(timeout=120)
    ended = time.time()
    assert child.returncode == 1 and told == "", said
    errors = [line for line in said.splitlines() if "error" in line or "gone" in line or "Traceback" in line]
    assert len(errors) == 1 and "rank 1 was ended by signal 9 (SIGKILL); all ranks stopped" in errors[0], said
    assert f"foretell run {out} --resume" in errors[0]
    assert ended - (out / "log.jsonl").stat().st_mtime < 30
    kept = save.complete(out / "checkpoints")
    assert kept and kept[0].step in (2, 4)
    assert ranks(2).run(_ten_steps, str(out), plans.read(out / "plan.json"), {"steps": 8}, True) == [("done", 8)] * 2
    assert [step for step, _ in losses(out)] == list(range(1, 9))


# ---------------------------------------------------------------- the command


def test_the_command_trains_tells_and_exits_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans.write(PLAN, tmp_path / "plan.json")
    words = ["run", str(tmp_path / "plan.json"), "--steps", "3", "--data", str(TEXT), "--out", str(tmp_path / "a"), "--device", "cpu"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "done after step 3" in out and str(tmp_path / "a") in out and "held out" in out
    assert "step 1/3  loss" in err and "sequences of 32 bytes" in err
    assert main([*words, "--resume", "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["measurement"]["steps"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "cosin"], "did you mean cosine"),
        (["--data", "nowhere"], "there is no data folder nowhere"),
        (["--resume"], "--resume needs the run"),
        (["--device", "tpu"], "--device tpu is not known"),
        (["--steps", "0"], "at least one step"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    plans.write(PLAN, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.json")]) == 2


def test_more_gpus_than_there_are_says_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plans.write(PLAN.with_(mesh=Mesh(dp_shard=8)), tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "wants 8 GPUs and this machine has 2" in said and "torchrun" in said


def test_settings_are_kept_as_they_were(tmp_path: Path) -> None:
    settings = Settings(**{**SETTINGS, "log": ("wandb",)})
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert Folder(path=tmp_path).checkpoints == tmp_path / "checkpoints"
