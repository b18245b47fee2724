"""A handful of faults of a run that is kept alive: after each the losses and the weights are those of a run that nothing hurt.

All of them at random points, for an hour: `benchmarks/chaos.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.cli import main
from foretell.plan import file as plans
from foretell.plan.types import Mesh
from foretell.runtime.process import proc
from foretell.runtime.train import save
from tests import forks
from tests.cpu_dist.train_cases import PLAN, ROOT, go, losses, sums, ten_steps

MODEL = '''
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop, self.out = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)
    def forward(self, x, number):
        once("forward", number)
        return self.out(self.drop(self.norm(self.first(x))))

def once(where, numbers):
    """Hurt the process at a sample, the first time that it comes."""
    at, sample, how, mark = os.environ.get("HURT", "none -1 none none").split()
    if at == where and float(sample) in (numbers.tolist() if torch.is_tensor(numbers) else [numbers]):
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), getattr(signal, how))

class Points:
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i):
        once("data", i)
        if str(i) in os.environ.get("RAISES", "").split(): raise ValueError("broken")
        return {"x": torch.full((4,), i / self.count) + torch.rand(4), "number": i}

def model(): return Net()
def data(split): return Points(512) if split == "train" else None
def loss(output, batch): return output.square().mean()
'''
STEPS = 14
RUN: dict[str, Any] = {"steps": STEPS, "lr": 1e-2, "schedule": "wsd", "warmup": 2, "save_every": 3}
FLAGS = ["--steps", str(STEPS), "--lr", "1e-2", "--schedule", "wsd", "--warmup", "2", "--save-every", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def twins(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Runs that nothing hurts, by the number of ranks."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "mine.py").write_text(MODEL)
    for world in (1, 2):
        plans.write(PLAN.with_(model={"model": str(folder / "mine.py")}, mesh=Mesh(dp_shard=world)), folder / f"{world}.json")
    ranks(2).run(ten_steps, str(folder / "2"), plans.read(folder / "2.json"), RUN, False)
    go(folder / "1", plans.read(folder / "1.json"), data=None, **RUN)
    return lambda world: folder / str(world)


@pytest.mark.slow(reason="Python itself is started; the same fault is below, with ranks that are forked for tests")
def test_ranks_without_a_standby_come_from_one_process(twins: Callable[[int], Path], tmp_path: Path) -> None:
    """At the start and after `kill -9`; torch is imported once for both, and who imported it is gone while they train."""
    out, hurt = tmp_path / "run", f"forward {sample_of(9, 2, 1)} SIGKILL {tmp_path / 'once'}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HURT": hurt}
    words = ["run", f"{twins(2)}.json", *FLAGS, "--out", str(out), "--max-restarts", "2", "--no-standby"]
    done = subprocess.run([sys.executable, "-m", "foretell", *words], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "training again" in done.stderr, done.stderr
    equal(out, twins(2))


def sample_of(step: int, world: int, rank: int) -> int:
    """The first sample that a rank sees in a step, counted from 1."""
    import numpy as np

    from foretell.runtime.data.samples import shuffled

    return int(shuffled(512, 0, 0, np.array([4 * world * (step - 1) + 2 * rank]))[0])


def command(twin: Path, out: Path, *words: str, **env: str) -> forks.Command:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return forks.Command("run", f"{twin}.json", *FLAGS, "--out", str(out), *words, env=known)


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def equal(out: Path, twin: Path) -> None:
    assert losses(out) == losses(twin) and [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
    assert sums(out, STEPS) == sums(twin, STEPS)
    assert not (out / "run.lock").exists() and not list((out / "checkpoints").glob("*.partial"))


STOPPED = pytest.mark.slow(reason="one of two that is stopped: one alone is stopped here, and one of two is killed")


@pytest.mark.parametrize(
    ("world", "where", "rank", "how"),
    [(2, "forward", 1, "SIGKILL"), pytest.param(2, "forward", 0, "SIGSTOP", marks=STOPPED),
     pytest.param(2, "data", 0, "SIGSEGV", marks=pytest.mark.slow(reason="another signal at another point: the same fault")),
     (1, "forward", 0, "SIGSTOP")],
)  # fmt: skip
def test_a_rank_that_is_killed_or_stopped_costs_nothing(
    twins: Callable[[int], Path], tmp_path: Path, world: int, where: str, rank: int, how: str
) -> None:
    out, hurt = tmp_path / "run", f"{where} {sample_of(9, world, rank)} {how} {tmp_path / 'once'}"
    child = command(twins(world), out, "--max-restarts", "2", "--no-standby", HURT=hurt, FORETELL_HANG_SECONDS="1.5")
    told, said = child.communicate(timeout=120)
    assert child.returncode == 0 and f"done after step {STEPS}" in told, said
    equal(out, twins(world))
    fault, again = rows(out)
    assert fault["kind"] == ("hung" if how == "SIGSTOP" else "killed") and fault["ranks"] == [rank] and fault["checkpoint"] in (3, 6)
    assert again["step"] == fault["checkpoint"] + 1 and f"resumed after step {fault['checkpoint']}" in said
    assert f"rank {rank} {'is stopped' if how == 'SIGSTOP' else f'was ended by signal {int(getattr(signal, how))}'}" in said
    assert "restart 1 of 2" in said and "training again" in said and "Traceback" not in said


@pytest.mark.slow(reason="standbys are harmed in tests/pure/test_supervise.py, ranks killed here, checkpoints damaged in test_train_failures.py")
def test_a_standby_gives_the_same_and_goes_with_the_run(twins: Callable[[int], Path], tmp_path: Path) -> None:
    """Two ranks forked from one process that imported torch; damage in the newest checkpoint, and a rank killed after it."""
    out = tmp_path / "run"
    hurt = f"forward {sample_of(12, 2, 1)} SIGSTOP {tmp_path / 'once'}"
    child = command(twins(2), out, "--max-restarts", "1", HURT=hurt, FORETELL_HANG_SECONDS="0", **{forks.OWN_STANDBY: "1"})
    deadline = time.monotonic() + 100
    while not (tmp_path / "once").exists() or len(save.complete(out / "checkpoints")) < 2:  # that of step 9 may have been stopped on its way
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    newest = save.complete(out / "checkpoints")[0].path
    file = newest / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    family = descendants(child.pid)
    stopped = [pid for pid in family if proc.state(pid) == proc.STOPPED]
    assert newest.name[-1] in "69" and len(stopped) == 1
    assert sum("standby" in Path(f"/proc/{pid}/cmdline").read_text() for pid in family) >= 2  # it and those it forked
    os.kill(stopped[0], signal.SIGKILL)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0 and "is damaged" in said, said
    equal(out, twins(2))
    assert not any(map(proc.lives, family))


def descendants(pid: int) -> list[int]:
    found = proc.children(pid)
    return [*found, *(one for child in found for one in descendants(child))]


def test_a_fault_that_comes_again_ends_the_run_when_restarts_are_used_up(twins: Callable[[int], Path], tmp_path: Path) -> None:
    out, hurt = tmp_path / "run", f"forward {sample_of(9, 1, 0)} SIGKILL /dev/full/none"  # it can be marked nowhere
    (tmp_path / "mine.py").write_text(MODEL.replace("except FileExistsError:\n            return", "except NotADirectoryError:\n            pass"))
    plans.write(PLAN.with_(model={"model": str(tmp_path / "mine.py")}), tmp_path / "1.json")
    child = command(tmp_path / "1", out, "--max-restarts", "1", "--no-standby", HURT=hurt)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 1 and "it was restarted once and came no further" in said and "resume with: foretell run" in said, said
    *_, first, again, last = rows(out)  # before these it may have come further: to the next checkpoint
    assert [row["event"] for row in (first, again, last)] == ["fault", "restarted", "fault"] and first["checkpoint"] == last["checkpoint"]


def test_a_notice_saves_and_leaves_and_the_next_run_is_the_same(twins: Callable[[int], Path], tmp_path: Path) -> None:
    out, gone = tmp_path / "run", tmp_path / "gone"
    hurt = f"forward {sample_of(9, 1, 0)} SIGSTOP {tmp_path / 'once'}"
    child = command(twins(1), out, "--notice", str(gone), HURT=hurt)
    deadline = time.monotonic() + 100
    while not (tmp_path / "once").exists():
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    gone.touch()  # the stopped rank is woken to save
    _, said = child.communicate(timeout=60)
    assert child.returncode == 143 and f"notice: {gone} has appeared" in said, said
    assert save.complete(out / "checkpoints")[0].step == 9
    go(out, plans.read(out / "plan.json"), resume=True)
    equal(out, twins(1))


def test_a_loader_process_that_is_killed_is_replaced_at_the_same_sample(twins: Callable[[int], Path], tmp_path: Path) -> None:
    out, hurt = tmp_path / "run", f"data {sample_of(9, 1, 0)} SIGKILL {tmp_path / 'once'}"
    child = command(twins(1), out, "--workers", "2", HURT=hurt)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0 and "others take its place, at sample" in said, said
    equal(out, twins(1))
    assert [(row["event"], row["rank"]) for row in rows(out)] == [("loader", 0)]


@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.slow(reason="the same code, called in the rank itself")), "2"])
def test_a_sample_that_raises_again_and_again_is_set_aside(twins: Callable[[int], Path], tmp_path: Path, workers: str) -> None:
    bad = sample_of(9, 1, 0)
    child = command(twins(1), tmp_path / "run", "--workers", workers, "--bad-samples", "1", RAISES=str(bad))
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0 and f"sample {bad} of " in said and f"sample {(bad + 1) % 512} takes its place" in said, said
    assert [(row["event"], row["index"], row["instead"]) for row in rows(tmp_path / "run")] == [("sample", bad, (bad + 1) % 512)]
    found, twin = dict(losses(tmp_path / "run")), dict(losses(twins(1)))
    assert [step for step in twin if found[step] != twin[step]] == list(range(9, STEPS + 1))
    worse = command(twins(1), tmp_path / "more", "--workers", workers, "--bad-samples", "1", RAISES=f"{bad} {sample_of(11, 1, 0)}")
    _, said = worse.communicate(timeout=120)
    assert worse.returncode == 1 and "2 samples raised 3 times each, and 1 may be set aside" in said and "--bad-samples" in said, said


def test_a_command_that_was_started_again_goes_on_with_its_run(twins: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `foretell run supervise -- torchrun ... -m foretell run PLAN --out FOLDER`."""
    words = ["run", f"{twins(1)}.json", *FLAGS, "--out", str(tmp_path / "run")]
    monkeypatch.setenv("FORETELL_RESTARTS", "1")
    torch.set_num_threads(1)
    assert main([*words, "--steps", "6", "--schedule-steps", str(STEPS)]) == 0  # there is none to go on with
    assert main(words) == 0
    equal(tmp_path / "run", twins(1))
    monkeypatch.setenv("FORETELL_RESTARTS", "0")
    assert main(words) == 2
