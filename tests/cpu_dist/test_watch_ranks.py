"""Scripts that a launcher starts, watched: every rank tells, one line says it of all, and nothing is left behind. Run for real on this CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.observe import lines
from foretell.observe.group import RankGroup
from foretell.report import comparison
from foretell.runtime.train import log
from foretell.trace.script import words
from tests import forks

DATA = Path(__file__).resolve().parents[1] / "data" / "watch"
RANKS = str(DATA / "ranks.py")
LAUNCHED = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", RANKS]


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1"}


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "foretell", "watch", "--out", "run", *options, "--"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The last rank holds 150 MiB more than the other. Python is started for the launcher and its ranks: what they do is what is watched."""
    folder = tmp_path_factory.mktemp("ranks")
    asked = ["watch", "--out", "run", "--predict", "before", "--", *LAUNCHED, "--steps", "10", "--hold", "150"]
    return folder, forks.run(*asked, env=environment(), cwd=folder, timeout=240)


def test_one_line_says_it_of_all_ranks(watched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = watched
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [str(number) for number in range(10)]
    line = next(line for line in done.stderr.splitlines() if " a step" in line)
    assert "of 2 ranks" in line and "(rank 1; " in line and "of RAM at the peak, predicted" in line
    assert "DistributedDataParallel over 2 ranks" in done.stderr and "OMP_NUM_THREADS" not in done.stderr


def test_the_folder_has_every_rank(
    watched: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = watched
    measured = json.loads((folder / "run" / "measurement.json").read_text())
    assert measured["hardware"]["count"] == 2 and measured["per_step"] == 512
    first, second = measured["by_rank"]
    assert (first["rank"], second["rank"], first["steps"], second["steps"]) == (0, 1, 10, 10)
    assert second["host_bytes"] - first["host_bytes"] > 120 << 20 and measured["host_bytes"] == second["host_bytes"]
    assert measured["step_seconds"] == max(first["step_seconds"], second["step_seconds"])
    assert [row["step"] for row in log.read(folder / "run" / log.LOG) if row["event"] == "step"] == list(range(2, 11))
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert plan["mesh"]["dp_replicate"] == 2
    ram = comparison.of_folder(folder / "run").line("process")
    assert ram is not None and ram.inside, ram  # what the rank holds besides was there before its first step, and is read
    monkeypatch.chdir(folder)
    found = comparison.of_folder(Path("run"))
    outside = {line.name for line in found.lines if line.inside is False}
    assert outside <= ({"step", "throughput"} if found.busy else set()), outside  # seconds of a busy machine are not its own
    assert main(["compare", "run"]) == (1 if outside else 0) and "2 ranks" in capsys.readouterr().out
    assert main(["report", "run"]) == 0


@pytest.mark.slow(reason="memory that runs out on one rank is explained where a script spawns its ranks, below")
def test_memory_that_runs_out_on_one_rank_is_explained_and_the_rank_named(tmp_path: Path) -> None:
    asked = [*command("--predict", "no", "--on", "CPU", "--memory-limit", "600MiB"), *LAUNCHED, "--hold", "500"]
    done = subprocess.run(asked, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stderr  # as the launcher has it
    told = done.stderr.splitlines()
    explained = next(number for number, line in enumerate(told) if "OUT OF MEMORY" in line)
    assert re.search(r"OUT OF MEMORY on rank 1 after 0 steps, at ranks.py:\d+: 500.0 MiB more were asked for", told[explained])
    assert explained < next(number for number, line in enumerate(told) if "[rank1]: Traceback" in line)
    assert "ChildFailedError" in done.stderr and "hooks.py" not in done.stderr
    assert json.loads((tmp_path / "run" / "oom.json").read_text())["rank"] == 1


def descendants(pid: int) -> list[int]:
    found = [int(one) for file in Path(f"/proc/{pid}/task").glob("*/children") for one in file.read_text().split()]
    return [*found, *(each for one in found for each in descendants(one))]


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow(reason="nothing is left of one process in tests/pure/test_watch.py, and no rank of a pool in test_pool.py")
def test_no_rank_and_no_worker_is_left_where_it_is_killed(tmp_path: Path) -> None:
    asked = [*command("--predict", "no"), *LAUNCHED, "--end", "wait", "--workers", "1"]
    process = subprocess.Popen(asked, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step 3"))
    below = descendants(process.pid)
    assert len(below) >= 3
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 60
    while any(map(runs, below)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in below if runs(pid)]


@pytest.mark.slow(reason="ranks of a launcher are watched above, scripts that start others in test_script_ranks.py")
@pytest.mark.parametrize("how", [pytest.param("fork", marks=pytest.mark.slow(reason="those that are spawned have more to be told")), "spawn"])
def test_processes_that_a_script_starts_are_ranks_too(how: str, tmp_path: Path) -> None:
    """The second of those that are spawned says that memory ran out: `torch.multiprocessing` keeps that from everybody else."""
    asked = [*command("--predict", "no"), sys.executable, str(DATA / "starts.py"), how, *(["fails"] if how == "spawn" else [])]
    done = subprocess.run(asked, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode == 0) == (how == "fork"), done.stderr
    assert "of 2 ranks" in done.stderr
    measured = json.loads((tmp_path / "run" / "measurement.json").read_text())
    assert [one["rank"] for one in measured["by_rank"]] == [0, 1] and measured["by_rank"][1]["steps"] == 6
    assert ("OUT OF MEMORY on rank 1 after 6 steps, at starts.py:20" in done.stderr) == (how == "spawn")
    assert "hooks.py" not in done.stderr


# ---------------------------------------------------------------- readings of several


def told(rank: int, steps: int, seconds: float, peak: int, *, world: int = 2, local: int = 2) -> dict[str, object]:
    memory = {"allocated": peak, "allocated_peak": peak, "rss": 1}
    ends = [seconds * number for number in range(steps)]
    return {"kind": "steps", "step": steps, "ends": ends, "data": 0.0, "device": [], "memory": memory, "rank": rank, "world": world, "local": local}


def test_the_slowest_rank_and_the_largest_stand_for_all() -> None:
    group = RankGroup()
    group.hear_from("a", told(1, 8, 0.20, 4 << 30))
    assert not group.whole  # the other has not stepped yet
    group.hear_from("b", told(0, 9, 0.10, 6 << 30))
    assert group.whole and group.steps == 8 and group.step_seconds == pytest.approx(0.2)
    line = lines.beside(group, {})
    assert "step 8 of 2 ranks; 200 ms a step on rank 1, 100 % more than on the fastest" in line
    assert "6.00 GiB allocated at the peak (rank 0; 4.00 GiB on the least)" in line
    group.hear_from("b", {"kind": "gone"})
    group.hear_from("c", told(0, 3, 0.10, 5 << 30))  # a launcher started it again
    assert len(group.ranks) == 2 and group.by_rank()[0]["allocated_bytes"] == 5 << 30


def test_ranks_of_other_nodes_are_said_to_be_there() -> None:
    group = RankGroup()
    for rank in (4, 5, 6, 7):
        group.hear_from(rank, told(rank, 8, 0.1, 1 << 30, world=8, local=4))
    assert group.whole and "on ranks 4-7 of 8 (the others run on other nodes)" in lines.beside(group, {})
    assert "rank" not in lines.beside(group, {}).partition(";")[2]  # they are alike


def test_what_cannot_be_followed_can_be_named(tmp_path: Path) -> None:
    found = words.named(["accelerate", "launch", "--use_fsdp", "--num_processes", "2", RANKS])
    assert found.launched and found.ranks == 2 and "FSDP" in found.not_followed
