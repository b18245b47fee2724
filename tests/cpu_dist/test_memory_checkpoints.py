"""Checkpoints in the memory of hosts: a restart takes the newest that is as it was written, from memory, a peer's memory or disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.checkpoint import memory, store
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.process import proc
from foretell.runtime.train import log as logs
from foretell.runtime.train.memory import order
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.run import run
from tests import forks
from tests.cpu_dist.test_supervise import MODEL, STEPS, rows, sample_of
from tests.cpu_dist.train_cases import PLAN, ROOT, Quiet, go, losses, sums, write_own

RUN: dict[str, Any] = {"steps": STEPS, "lr": 1e-2, "schedule": "wsd", "warmup": 2, "data": None}
FLAGS = ["--steps", str(STEPS), "--lr", "1e-2", "--schedule", "wsd", "--warmup", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv(memory.BASE, str(tmp_path / "shm"))


@pytest.fixture(scope="module")
def twin(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that nothing hurts."""
    folder = tmp_path_factory.mktemp("twin")
    (folder / "mine.py").write_text(MODEL)
    plans.write(PLAN.with_(model={"model": str(folder / "mine.py")}, mesh=Mesh(dp_shard=2)), folder / "2.json")
    ranks(2).run(on_hosts, str(folder / "2"), plans.read(folder / "2.json"), RUN, False, str(folder), False)
    return folder / "2"


def on_hosts(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], resume: bool, base: str, several: bool) -> list[str]:
    """A run of which each rank is on a host of its own, where there are several; what was said."""
    screen = Quiet()
    kept = {name: os.environ.get(name) for name in (memory.BASE, memory.HOST, "HURT_AT", "MARK_AT", "MARK_AS")}
    os.environ[memory.BASE] = base
    if several:
        os.environ[memory.HOST] = f"host{rank}"
    os.environ.update({name: asked.pop(name) for name in list(asked) if name.isupper()})
    try:
        run(plan, asked, screen=screen, out=Path(out), resume=resume, device="cpu")
    except RunFailed as error:
        screen.said.append(str(error))
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return screen.said


def command(plan: Path, out: Path, *words: str, **env: str) -> forks.Command:
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name not in env:
            known.pop(name, None)
    return forks.Command("run", str(plan), *words, "--out", str(out), env=known)


def equal(out: Path, twin: Path) -> None:
    assert losses(out) == losses(twin) and [step for step, _ in losses(out)] == list(range(1, STEPS + 1))
    assert sums(out, STEPS) == sums(twin, STEPS)


def test_a_rank_that_is_killed_goes_on_from_memory(twin: Path, tmp_path: Path) -> None:
    """kill -9 in step 9, a checkpoint in memory after every second step and none on disk: it goes on after step 8, with the same bits."""
    hurt = f"forward {sample_of(9, 2, 1)} SIGKILL {tmp_path / 'once'}"
    child = command(Path(f"{twin}.json"), tmp_path / "run", *FLAGS, "--memory-every", "2", "--max-restarts", "2", HURT=hurt)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    equal(tmp_path / "run", twin)
    fault = next(row for row in rows(tmp_path / "run") if row["event"] == "fault")
    kept = fault["checkpoint"]
    assert kept in (6, 8) and f"resumed after step {kept}, from memory" in said
    saves = [row for row in logs.read(tmp_path / "run" / "log.jsonl") if row["event"] == "save"]
    assert {row["step"] for row in saves if row.get("where") == "memory"} >= {2, 4, 6}
    assert [row["step"] for row in saves if "where" not in row] == [STEPS]
    assert list((tmp_path / "shm").iterdir()) == []


def interrupted(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: int) -> tuple[Plan, Path, dict[str, Any], list[Path]]:
    """A run with a rank on each host as it is when all were killed after step 7: memory has step 6, the disk step 4."""
    plan = PLAN.with_(model={"model": write_own(tmp_path, monkeypatch)}, mesh=Mesh(dp_shard=hosts))
    asked = {"steps": 9, "schedule_steps": 10, "lr": 1e-2, "schedule": "constant", "warmup": 0, "memory_every": 2, "save_every": 4, "keep": 9}
    base = str(tmp_path / "shm")
    ranks(hosts).run(left, str(tmp_path / "run"), plan, asked, base, True)
    folders = []
    for host in range(hosts):
        monkeypatch.setenv(memory.HOST, f"host{host}")
        folders.append(memory.folder_of(tmp_path / "run"))
    monkeypatch.delenv(memory.HOST)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000009")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    assert [[one.name for one in store.candidates(folder)] for folder in folders] == [["step-00000006"]] * len(folders)
    return plan, tmp_path / "run", {"steps": 10}, folders


def left(rank: int, world: int, out: str, plan: Plan, asked: dict[str, Any], base: str, several: bool) -> list[str]:
    """A run that leaves what it has in memory, as one that is killed does."""
    kept, memory.remove = memory.remove, lambda folder: None
    try:
        return on_hosts(rank, world, out, plan, asked, False, base, several)
    finally:
        memory.remove = kept


@pytest.mark.parametrize(
    ("gone", "hosts"),
    [(("a host", "both"), 2), *(pytest.param((lost,), hosts, marks=pytest.mark.slow(reason="a host, and both copies of a file, are lost of two"))
                                for lost, hosts in (("nothing", 2), ("a file", 2), ("a host", 3)))],
)  # fmt: skip
def test_hosts_keep_copies_of_each_other(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: tuple[str, ...], hosts: int
) -> None:
    """Memory of hosts has step 6, the disk step 4: whatever is lost, the run goes on from the newest that is whole somewhere."""
    plan, out, asked, (one, other, *more) = interrupted(ranks, tmp_path, monkeypatch, hosts)
    copy = (more or [one])[0] / "step-00000006" / "rank-00001.safetensors"
    assert copy.read_bytes() == (other / "step-00000006" / "rank-00001.safetensors").read_bytes()
    assert len(list((one / "step-00000006").glob("rank-*"))) == 2, "its own, and that of the host before it"
    usual = {"steps": 10, "schedule_steps": 10, "lr": 1e-2, "schedule": "constant", "warmup": 0}
    ranks(hosts).run(on_hosts, str(tmp_path / "twin"), plan, usual, False, str(tmp_path), False)
    for folder in (out, tmp_path / "shm"):
        shutil.copytree(folder, tmp_path / "kept" / folder.name)
    for lost in gone:
        for folder in (out, tmp_path / "shm"):
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "kept" / folder.name, folder)
        if lost == "a host":
            shutil.rmtree(other)
        for folder in {"a file": [other], "both": [one, other]}.get(lost, []):
            path = folder / "step-00000006" / "rank-00001.safetensors"
            content = bytearray(path.read_bytes())
            content[-5] ^= 4
            path.write_bytes(content)
        said = "\n".join(ranks(hosts).run(on_hosts, str(out), plan, asked, True, str(tmp_path / "shm"), True)[0])
        assert {"nothing": "resumed after step 6, from memory", "a host": "resumed after step 6, from memory of the peer host",
                "a file": "resumed after step 6, from memory of the peer host0", "both": "resumed after step 4"}[lost] in said  # fmt: skip
        assert ("from memory" in said) == (lost != "both") and ("damaged in memory: " in said) == (lost in ("a file", "both"))
        assert losses(out) == losses(tmp_path / "twin") and sums(out, 10) == sums(tmp_path / "twin", 10)
        assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.slow(reason="a host whose memory is gone is above; here its rank is killed, and others start")
def test_a_host_that_dies_is_replaced_from_its_peer(twin: Path, tmp_path: Path) -> None:
    """Two processes as torchrun starts them, each on a host of its own: one is killed with its memory, and both are started again."""
    def started(*words: str) -> list[forks.Command]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        return [
            command(Path(f"{twin}.json"), tmp_path / "run", *FLAGS, "--memory-every", "2", *words, RANK=str(rank), LOCAL_RANK=str(rank),
                    WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FORETELL_HOST=f"host{rank}",
                    HURT=f"forward {sample_of(9, 2, 1)} SIGKILL {tmp_path / 'once'}")
            for rank in range(2)
        ]  # fmt: skip

    first, second = started()
    second.communicate(timeout=120)
    first.communicate(timeout=120)
    assert second.returncode == -signal.SIGKILL and first.returncode == 1 and not list((tmp_path / "run" / "checkpoints").iterdir())
    folders = list((tmp_path / "shm").iterdir())
    os.environ[memory.HOST] = "host1"
    shutil.rmtree(memory.folder_of(tmp_path / "run"))
    del os.environ[memory.HOST]
    assert len(folders) == 2 and len(list((tmp_path / "shm").iterdir())) == 1
    again = started("--resume")
    said = [child.communicate(timeout=120)[1] for child in again]
    assert [child.returncode for child in again] == [0, 0], said
    assert "from memory of the peer host0" in said[0]
    equal(tmp_path / "run", twin)


def test_a_run_with_memory_is_resumed_without_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings say --memory-every; who resumes it need not say --max-restarts."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "run"
    go(out, memory_every=2, steps=4)
    plans.write(plans.read(out / "plan.json").with_(mesh=Mesh(dp_shard=2), accumulate=1), tmp_path / "2.json")
    child = command(tmp_path / "2.json", out, "--resume", "--steps", "6", "--device", "cpu")
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0 and "resumed after step 4" in said, said


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_nothing_is_left_when_everything_is_killed(twin: Path, tmp_path: Path) -> None:
    child = command(Path(f"{twin}.json"), tmp_path / "run", *FLAGS, "--steps", "100000", "--memory-every", "2", "--max-restarts", "2")
    folder = memory.folder_of(tmp_path / "run")
    wait_for(lambda: store.complete(folder) if folder.exists() else [])
    assert folder.stat().st_mode & 0o777 == 0o700
    below = proc.children(child.pid)
    for pid in (child.pid, *below):
        if "guardian" not in (Path(f"/proc/{pid}/cmdline").read_text() if Path(f"/proc/{pid}").exists() else "guardian"):
            os.kill(pid, signal.SIGKILL)
    child.communicate(timeout=60)
    wait_for(lambda: not folder.exists(), 30)


def test_what_is_in_memory_alone_is_written_to_disk_at_the_end(tmp_path: Path) -> None:
    done = go(tmp_path / "run")
    kept, folder = tmp_path / "run" / "checkpoints" / "step-00000010", memory.folder_of(tmp_path / "run")
    memory.make(folder)
    before = sums(tmp_path / "run", 10)
    shutil.move(kept, folder / kept.name)
    assert memory.newest_step(folder) == 10 and [one.step for one in store.complete(kept.parent)] == [5]
    assert memory.rescue(folder, kept.parent) == kept and store.problems(kept) == [] and sums(tmp_path / "run", 10) == before
    assert memory.rescue(folder, kept.parent) is None and done.step == 10
    path = folder / kept.name / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    shutil.rmtree(kept)
    assert memory.rescue(folder, kept.parent) is None, "what is damaged stays where it is"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = memory.folder_of(tmp_path / "run")
    folder.mkdir(mode=0o755)
    with pytest.raises(UserError, match="is not a folder of this user's alone"):
        memory.make(folder)
    folder.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is not a folder of this user's alone"):
        memory.make(folder)
    memory.remove(folder)
    assert (tmp_path / "mine").is_dir() and memory.parts(folder) == {}


def test_memory_that_is_short_is_told_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.KEEP_FREE + 1000
    with pytest.raises(OSError, match="memory has no room"):
        memory.check_room(tmp_path, 1001, free)
    memory.check_room(tmp_path, 1000, free)
    monkeypatch.setattr(memory, "check_room", lambda *_: (_ for _ in ()).throw(OSError(28, "memory has no room: 9 GB to write and 1 GB free")))
    screen = Quiet()
    done = go(tmp_path / "run", screen=screen, memory_every=2)
    assert done.status == "done" and [line for line in screen.said if "memory" in line] == [
        "step 2: no checkpoint in memory: rank 0: memory has no room: 9 GB to write and 1 GB free"
    ]


def test_the_newest_is_first_and_memory_before_disk() -> None:
    found = order(["step-00000008", "step-00000004"], ["memory/step-00000008", "memory/step-00000006"])
    assert found == ["memory/step-00000008", "step-00000008", "memory/step-00000006", "step-00000004"]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plans.write(PLAN, tmp_path / "plan.json")
    for words, told in (
        (["--memory-every", "5"], "--memory-every keeps checkpoints for restarts, and there are none"),
        (["--memory-every", "5", "--max-restarts", "1", "--no-save"], "--no-save has none"),
        (["--memory-every", "-1", "--max-restarts", "1"], "memory_every must not be negative"),
    ):  # fmt: skip
        assert main(["run", "plan.json", "--device", "cpu", *words]) == 2, words
        assert told in capsys.readouterr().err
