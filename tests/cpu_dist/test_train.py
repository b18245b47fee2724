"""Training: resumed bit for bit, everything written, stopped in order."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.checkpoint.read import item_bytes
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.observe.measure import DeviceClock, HostClock, Measurement, StepReading
from foretell.runtime.train import log as logs
from foretell.runtime.train import save
from foretell.runtime.train.outcome import DONE, STOPPED
from tests import forks
from tests.cpu_dist.train_cases import (
    PLAN,
    SETTINGS,
    TINY,
    Quiet,
    cut_back,
    every_line,
    go,
    losses,
    own_order,
    sums,
    ten_steps,
    write_own,
)


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every_line(monkeypatch)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_own(tmp_path, monkeypatch)


# ---------------------------------------------------------------- resumed bit for bit


def test_ten_steps_are_five_and_five_bit_for_bit_on_one_rank(tmp_path: Path) -> None:
    straight = go(tmp_path / "a")
    go(tmp_path / "b", screen=Quiet({5: lambda: os.kill(os.getpid(), signal.SIGTERM)}))
    assert len(losses(tmp_path / "b")) == 5
    resumed = go(tmp_path / "b", resume=True)
    assert straight.status == resumed.status == DONE and resumed.step == 10
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 10
    assert sums(tmp_path / "a", 10) == sums(tmp_path / "b", 10)
    assert losses(tmp_path / "a")[-1][1] < losses(tmp_path / "a")[0][1]


@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": Mesh(dp_shard=2)},
        pytest.param(
            {"mesh": Mesh(dp_replicate=2), "clip": None, "optimizer": "adamw-foreach"},
            marks=pytest.mark.slow(reason="replicas go on to the bit in test_train_faults.py"),
        ),
        pytest.param(
            {"mesh": Mesh(pp=2), "pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",))},
            marks=pytest.mark.slow(reason="stages go on to the bit in test_verify.py"),
        ),
        pytest.param(
            {"mesh": Mesh(tp=2), "model": {**PLAN.model, "overrides": {**TINY, "dropout": 0.0}}},
            marks=pytest.mark.slow(reason="split weights are saved and loaded in test_checkpoint.py"),
        ),
    ],
    ids=["fsdp", "replicated", "pipeline", "tensor"],
)
def test_ten_steps_are_five_and_five_bit_for_bit_on_two_ranks(ranks: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = PLAN.with_(**changes)
    assert ranks(2).run(ten_steps, str(tmp_path / "a"), plan, SETTINGS, False) == [("done", 10)] * 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    cut_back(tmp_path / "b", 5)
    assert ranks(2).run(ten_steps, str(tmp_path / "b"), plan, {}, True) == [("done", 10)] * 2
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 10
    assert sums(tmp_path / "a", 10) == sums(tmp_path / "b", 10) and len(sums(tmp_path / "a", 10)) == 2
    newest = save.complete(tmp_path / "b" / "checkpoints")[0]
    sizes = [file.bytes - file.header_bytes for file in newest.files.values()]
    tensors = sum(item_bytes(spec) for spec in newest.manifest.tensors.values())
    assert tensors <= sum(sizes) < 1.2 * tensors and max(sizes) < 2 * min(sizes)  # once, and evenly shared


def test_ranks_share_the_samples_of_one_process(ranks: Any, tmp_path: Path) -> None:
    """Two data ranks with micro-batch 2 and one process with 4 see the same global batches; without dropout, the same losses."""
    calm = {**PLAN.model, "overrides": {**TINY, "dropout": 0.0}}
    go(tmp_path / "one", PLAN.with_(micro_batch=4, model=calm), no_save=True)
    two = PLAN.with_(mesh=Mesh(dp_shard=2), model=calm)
    ranks(2).run(ten_steps, str(tmp_path / "two"), two, {**SETTINGS, "no_save": True}, False)
    pairs = zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True)
    assert all(math.isclose(a, b, rel_tol=1e-4) for (_, a), (_, b) in pairs)


@pytest.mark.slow(reason="two runs; one of another length goes on in test_train_faults.py")
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
    assert found.load is not None and found.load.cores == os.cpu_count() and found.delayed is not None and 0 <= found.delayed <= 1
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
    assert len(screen.lines) == 10 and screen.lines[-1].startswith("step 10/10  loss ") and "  predicted " in screen.lines[-1]


def test_evaluation_is_of_samples_never_learned_from(tmp_path: Path) -> None:
    """Learned by heart, the text to learn from is known far better than what was held out."""
    (tmp_path / "text").mkdir()
    noise = torch.randint(97, 123, (330,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "text" / "a.txt").write_bytes(bytes(noise.tolist()))
    calm = PLAN.with_(model={**PLAN.model, "overrides": {**TINY, "dropout": 0.0}})
    done = go(tmp_path / "a", calm, data=str(tmp_path / "text"), steps=120, lr=3e-3, schedule="constant", no_save=True,
              eval_batches=16)  # fmt: skip
    assert done.measurement is not None and done.measurement.eval_loss is not None
    assert done.measurement.last_loss < 1.5 < 3.0 < done.measurement.eval_loss


def test_a_line_of_the_log_that_was_cut_and_steps_after_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    go(tmp_path / "a")
    before = losses(tmp_path / "a")
    cut_back(tmp_path / "a", 5)
    with (tmp_path / "a" / "log.jsonl").open("a") as stream:
        stream.write('{"event": "step", "st')
    go(tmp_path / "a", resume=True)
    assert losses(tmp_path / "a") == before


def test_clocks_say_where_the_seconds_went(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = HostClock()
    for step in (1, 2, 3):
        if step == 3:
            now += 0.5
            clock.pause()
        clock.begin()
        now += 0.25
        clock.middle()
        now += 0.125
        clock.end(step, torch.tensor(1.5), torch.tensor(2.0))
        now += 0.0625
    first, second, third = clock.read()
    assert [one.between_seconds for one in (first, second, third)] == [0, 0.0625, 0]
    for reading in (first, second, third):
        assert (reading.backward_seconds, reading.update_seconds) == (0.25, 0.125)
        assert reading.seconds == reading.backward_seconds + reading.update_seconds + reading.between_seconds
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
    found: list[list[StepReading]] = []
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
    text = logs.line(reading, 100, rate=380123.0, unit="tokens", mfu=0.3151, memory_bytes=30 * 2**30, predicted_seconds=0.0843)
    assert text == "step  12/100  loss 3.2145  86.1 ms  380,000 tokens/s  MFU 31.5 %  30.0 GiB  predicted 84.3 ms (-2.1 %)"
    assert logs.line(reading, 100, rate=12.34, unit="samples") == "step  12/100  loss 3.2145  86.1 ms  12.3 samples/s"


# ---------------------------------------------------------------- stopped


def test_a_signal_stops_after_the_step_saves_and_says_so(tmp_path: Path) -> None:
    screen = Quiet({3: lambda: os.kill(os.getpid(), signal.SIGINT)})
    done = go(tmp_path / "a", screen=screen, save_every=0)
    assert (done.status, done.signal, done.step) == (STOPPED, "SIGINT", 3)
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
    order = own_order(8 * 3 + 1)
    os.environ.update(env, HURT_AT=f"{where}{order}")
    try:
        return ten_steps(rank, world, out, plan, asked, False)
    finally:
        for name in ("HURT_AT", *env):
            os.environ.pop(name, None)


TWICE = """
import os, signal, time
from foretell.runtime.process.signals import Signals
with Signals(lambda text: print(text, flush=True)):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # passed on by a launcher: the same one
    time.sleep(0.6)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not here", flush=True)
"""


def test_a_second_signal_ends_at_once() -> None:
    done = forks.run(env=os.environ, code=TWICE)
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines()[1:] == ["still here"] and done.stdout.startswith("SIGINT: stopping after this step")
