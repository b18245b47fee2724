"""A script that is watched: its own output and exit status, predicted beside measured, a run folder, and what is said when memory
runs out. The scripts run for real, on this CPU."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.cli.run.watch import _new_folder
from foretell.hardware import parse
from foretell.observe import lines
from foretell.observe.readings import LEAK_SAMPLES, WINDOW, Readings
from foretell.report import comparison
from foretell.runtime.observe import hooks
from foretell.runtime.observe.process_state import is_out_of_memory, tried_bytes
from foretell.runtime.train import log
from foretell.search.advice import script_ways
from foretell.search.traces.followed import Followed, with_room
from foretell.trace.recipe import Recipe
from foretell.trace.script import words
from foretell.trace.types import Trace
from tests import forks

DATA = Path(__file__).resolve().parents[1] / "data" / "watch"
ROWS = str(DATA / "rows.py")
SMALL = ["--batch-size", "2048", "--layers", "2"]
COMMAND = [sys.executable, "-m", "foretell", "watch", "--out", "run", "--predict", "no", "--", sys.executable]


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1"}


def watch(folder: Path, *arguments: str, options: tuple[str, ...] = ("--predict", "no")) -> subprocess.CompletedProcess[str]:
    """Python is started for the script alone: what it does there is what is watched."""
    asked = ["watch", "--out", "run", *options, "--", sys.executable, ROWS, *arguments]
    return forks.run(*asked, env=environment(), cwd=folder, timeout=240)


def plain(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROWS, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False)


# ---------------------------------------------------------------- a script from its start to its end


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("watched")
    return folder, watch(folder, *SMALL, "--steps", "12", options=("--predict", "before"))


def test_the_script_prints_what_it_prints_alone(watched: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    _, done = watched
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain(tmp_path, *SMALL, "--steps", "12").stdout
    assert all(line.startswith("foretell: ") for line in done.stderr.splitlines())


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """With another batch, and an error at the end."""
    folder = tmp_path_factory.mktemp("raised")
    return folder, watch(folder, "--batch-size", "1024", "--layers", "2", "--end", "raise")


@pytest.mark.slow(reason="a second run; compare and report read the first below")
def test_two_watched_runs_are_compared(
    watched: tuple[Path, subprocess.CompletedProcess[str]], raised: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A watched script has no settings and no losses; the rest stands side by side, with another batch as what differs."""
    (folder, _), (other, _) = watched, raised
    assert main(["compare", str(folder / "run"), str(other / "run"), "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)["runs"]
    assert {line["name"] for line in told["lines"]} == {"step", "throughput", "process RAM"}
    assert all(line["a"] and line["b"] for line in told["lines"]) and {"forward and backward", "update"} <= {part["name"] for part in told["parts"]}
    assert "--batch-size 1024" in next(one["b"] for one in told["differs"] if one["what"] == "model")


def test_predicted_stands_beside_measured(watched: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = watched
    line = next(line for line in done.stderr.splitlines() if " a step" in line)
    assert "of RAM at the peak, predicted" in line and re.search(r"forward \d", line) and re.search(r"backward \d", line)
    assert "`foretell probe`" in line or "ms (" in line  # without a profile of this CPU, how to get one
    found = comparison.of_folder(folder / "run")
    ram = found.line("process")
    assert ram is not None and ram.inside, ram
    assert found.steps + found.skipped_steps == 11 and found.comparable
    rows = [row for row in log.read(folder / "run" / log.LOG) if row["event"] == "step"]
    assert [row["step"] for row in rows] == list(range(2, 13))


def test_compare_and_report_read_the_folder(
    watched: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = watched
    monkeypatch.chdir(folder)
    found = comparison.of_folder(Path("run"))
    outside = {line.name for line in found.lines if line.inside is False}
    assert outside <= ({"step", "throughput"} if found.busy else set()), outside  # seconds of a busy machine are not its own
    assert main(["compare", "run"]) == (1 if outside else 0)
    assert "process RAM" in capsys.readouterr().out
    assert main(["report", "run"]) == 0
    page = (folder / "run" / "report.html").read_text()
    assert "blocks" in page and "Left out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param("raise", 1, marks=pytest.mark.slow(reason="a second run; errors in a loop are told in test_watch_inside.py")),
        pytest.param("exit", 7, marks=pytest.mark.slow(reason="a second run, with a status of its own")),
    ],
)
def test_the_exit_status_and_the_traceback_are_the_scripts_own(
    end: str, status: int, raised: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    folder, done = raised if end == "raise" else (tmp_path, watch(tmp_path, *SMALL, "--end", end))
    assert done.returncode == status
    assert done.stdout.endswith("tidied up\n") and done.stdout.count("step ") == 4
    if end == "raise":
        last = [line for line in done.stderr.splitlines() if not line.startswith("foretell: ")]
        assert last[0] == "Traceback (most recent call last):" and last[-1] == "ValueError: as asked"
        assert "foretell" not in "".join(last).replace(ROWS, "")
    assert comparison.of_folder(folder / "run").steps > 0


def started(folder: Path) -> forks.Command:
    """A watched script that has done four steps and waits."""
    asked = ["watch", "--out", "run", "--predict", "no", "--", sys.executable, ROWS, *SMALL, "--end", "wait"]
    process = forks.Command(*asked, env=environment(), cwd=folder)
    while "\nstep 3" not in process.said():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow(reason="a run of its own; one is killed below")),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow(reason="another signal, which Python does not handle")),
    ],
)
def test_a_signal_is_the_scripts_to_handle(number: signal.Signals, tmp_path: Path) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == -number, errors
    assert ("tidied up" in out) == (number == signal.SIGINT)
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert comparison.of_folder(tmp_path / "run").steps > 0


def test_nothing_is_left_where_it_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < until:
        time.sleep(0.1)
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["hardware"] == "auto"
    log.read(tmp_path / "run" / log.LOG)


# ---------------------------------------------------------------- what may go wrong around it


@pytest.mark.slow(reason="a run of its own; what a script prints is compared above")
def test_a_full_disk_costs_the_script_nothing_and_is_said(tmp_path: Path) -> None:
    """No file may be longer than 1 KiB. Megabytes on both streams arrive."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    asked = [*COMMAND, ROWS, "--batch-size", "64", "--steps", "40", "--chatter", "3"]
    done = subprocess.run(asked, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=240, check=False, preexec_fn=small_files)
    assert done.returncode == 0
    assert done.stdout.count("chatter\n") == done.stderr.count("chatter\n") == 3 << 17 and done.stdout.count("step ") == 40
    said = [line for line in done.stderr.splitlines() if line.startswith("foretell: ")]
    assert re.fullmatch(r"foretell: the run folder lacks measurement.json \(File too large\); \d+ rows of log.jsonl", said[-2])
    assert said[-1] == "foretell: 40 steps; run folder run" and not set(done.stderr.splitlines()) - {*said, "chatter"}


@pytest.mark.slow(reason="a run of its own; what a script prints is compared above")
def test_closed_streams_are_no_reason_to_stop(tmp_path: Path) -> None:
    command = f"exec {shlex.join([*COMMAND, ROWS, '--batch-size', '64'])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), timeout=240, check=False).returncode == 0
    assert comparison.of_folder(tmp_path / "run").steps > 0


@pytest.mark.slow(reason="an interrupted script as above, at a terminal and twice")
def test_ctrl_c_twice_at_a_terminal_is_the_scripts_and_the_folder_is_whole(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [*COMMAND, ROWS, *SMALL, "--end", "wait"], environment())
    shown = b""
    while b"step 3 " not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03\x03")
    with contextlib.suppress(OSError):  # its end
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    text = shown.decode()
    assert "foretell/cli" not in text and "foretell/observe" not in text and "hooks.py" not in text  # a terminal drops what waits at a Ctrl-C
    assert text.strip().endswith("run folder run (foretell compare, foretell report)")
    assert comparison.of_folder(tmp_path / "run").steps > 0


def test_runs_that_begin_at_the_same_moment_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: _new_folder(tmp_path / "runs" / "train-20260101-000000"), range(24)))
    assert len(set(made)) == 24 and all(path.is_dir() for path in made)


def test_the_process_that_watches_needs_no_torch() -> None:
    asked = "import sys; import foretell.observe.session, foretell.observe.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], env=environment(), timeout=120, check=False).returncode == 0


# ---------------------------------------------------------------- memory that runs out


@pytest.mark.slow(reason="two runs of a large script; what is read, halved and told is tested piece by piece below")
def test_out_of_memory_is_explained_and_the_first_remedy_runs(tmp_path: Path) -> None:
    limit = ("--on", "CPU", "--memory-limit", "700MiB")
    large = ("--batch-size", "65536", "--accumulate", "1", "--steps", "1", "--layers", "8")  # in forward, whatever the process holds
    done = watch(tmp_path, *large, options=("--predict", "before", *limit))
    assert done.returncode == 1, done.stderr
    told = done.stderr.splitlines()
    explained = next(number for number, line in enumerate(told) if "OUT OF MEMORY" in line)
    assert explained < told.index("Traceback (most recent call last):")
    assert re.search(r"at (Block|Linear) in rows.py:\d+", told[explained])
    assert any("blocks.*: activations" in line for line in told)
    assert "hooks.py" not in done.stderr
    found = json.loads((tmp_path / "run" / "oom.json").read_text())
    assert found["held"]["activations"] > 0.5 * found["predicted"]["allocated_bytes"] and found["tried"] == 65536 * 64 * 4
    first = found["ways"][0]
    assert first["fits"] and first["change"]["words"] in " ".join(told)
    name, size, more, times = first["change"]["arguments"][:4]  # which of the halves depends on what the process holds besides
    assert (name, more) == ("--batch-size", "--accumulate") and int(size) * int(times) == 65536 and int(times) > 1
    again = tmp_path / "again"
    again.mkdir()
    done = watch(again, *first["change"]["arguments"], options=("--predict", "no", *limit))
    assert done.returncode == 0, done.stderr


def test_what_an_argument_is_for() -> None:
    assert script_ways.batch_argument(["--lr", "64", "--batch-size", "64"], 64) == script_ways.Argument(name="--batch-size", value=64, place=3)
    assert script_ways.batch_argument(["--eval-batch-size", "64"], 64) is None
    assert script_ways.batch_argument(["--batch-size", "32"], 64) is None
    found = script_ways.batch_argument(["train.batch_size=64"], 64)
    assert found is not None and script_ways.with_value(["train.batch_size=64"], found, 32) == ("train.batch_size=32",)
    found = script_ways.batch_argument(["--lr", "1"], 64, [("--batch-size", 64)])
    assert found is not None and script_ways.with_value(["--lr", "1"], found, 32) == ("--lr", "1", "--batch-size", "32")
    assert script_ways.accumulate_argument(["--gradient_accumulation_steps=2"], 2) is not None


def test_an_error_is_read_for_what_it_says() -> None:
    gpu = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 70 GiB is free. 7.91 GiB allowed; Of"
    assert tried_bytes(gpu) == int(2.5 * 2**30) and is_out_of_memory(RuntimeError(gpu))
    assert tried_bytes("you tried to allocate 33554432 bytes. Error code 12") == 33554432
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_room_is_what_the_allocator_may_hold() -> None:
    gpu = parse("H100")
    assert with_room(gpu, 10 << 30).device.memory_bytes > 10 << 30  # with the context beside it
    assert with_room(parse("CPU"), 1 << 30).device.memory_bytes == (1 << 30) + (400 << 20)


# ---------------------------------------------------------------- readings


def steps(readings: Readings, *, seconds: list[float], allocated: list[int], data: float = 0.0) -> None:
    """As the hooks tell them, one message each."""
    end = readings._last_end or 0.0
    for each, held in zip(seconds, allocated, strict=True):
        end += each
        memory = {"allocated": held, "allocated_peak": max(allocated), "rss": 1}
        message = {"kind": "steps", "step": readings.steps + 1, "ends": [end], "data": data, "device": [], "memory": memory}
        readings.hear(message)


def test_growing_memory_is_told_and_a_level_one_is_not() -> None:
    level, leaking = Readings(), Readings()
    count = 4 * LEAK_SAMPLES
    steps(level, seconds=[0.1] * count, allocated=[1 << 30] * count)
    steps(leaking, seconds=[0.1] * count, allocated=[(1 << 30) + step * (10 << 20) for step in range(count)])
    assert level.leak() is None and lines.growing(level) is None
    assert leaking.leak() is None  # a few readings, over too few steps
    leaking.after = [(10 * step, held) for step, held in leaking.after]
    assert "grows by 1.0 MiB a step" in str(lines.growing(leaking))


def test_slower_steps_are_told_against_the_band_or_against_the_first() -> None:
    readings = Readings()
    steps(readings, seconds=[0.1] * (WINDOW + 1) + [0.15] * WINDOW, allocated=[1] * (2 * WINDOW + 1))
    assert "150 ms a step now, 100 ms at first" in str(lines.slower(readings, {}, 0.1))
    assert "above the predicted 120 ms at most" in str(lines.slower(readings, {"high_seconds": 0.12}, 0.1))
    assert lines.slower(readings, {"high_seconds": 0.2}, 0.13) is None


def test_seconds_of_the_device_come_before_those_of_the_host() -> None:
    """The host of a GPU runs ahead, and waits now and then."""
    readings = Readings()
    steps(readings, seconds=[0.001, 0.001, 0.4], allocated=[1] * 3)
    memory = {"allocated": 1, "allocated_peak": 1}
    readings.hear({"kind": "steps", "step": 9, "ends": [], "data": 0.0, "device": [[3, 5, 0.2], [5, 9, 0.4]], "memory": memory})
    assert readings.kind == "cuda" and list(readings.seconds) == pytest.approx([0.1] * 6)


def test_a_round_of_two_optimizers_is_one_step() -> None:
    import torch

    told: list[dict[str, object]] = []
    both = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2)]
    seen = hooks.StepHooks(told.append)
    seen.install()
    try:
        for _ in range(5):
            for one in both:
                one.step()
        assert seen.steps == 5
        for _ in range(3):  # parts of a step are seen without a loader too
            torch.zeros(1, requires_grad=True).sum().backward()
            both[0].step()
            both[1].step()
    finally:
        seen.remove()
    both[1].step()
    assert seen.steps == 8 and torch.autograd.backward.__module__ == "torch.autograd"


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["watch"], "no script is given"), (["watch", "--", "torchrun", "--nproc-per-node", "two", ROWS], "no number of processes"),
        (["watch", "--", "python", "-I", ROWS], "cannot be watched"), (["watch", "--predict", "later", "--", "python", ROWS], "--predict"),
        (["watch", "--on", "H100", "--memory-limit", "2GiB", "--", "python", ROWS], "may be another device"),
        (["watch", "--memory-limit", "lots", "--", "python", ROWS], "not an amount of memory"), (["watch", "--", "python", "missing.py"], "no file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(given) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and said in errors[0]
    assert not list(tmp_path.iterdir())


def test_halves_keep_the_samples_of_a_step_where_the_script_has_an_argument_for_that() -> None:
    script = words.parse(["python", ROWS, "--batch-size", "6"])
    trace = Trace(programs={}, schedule={}, storages={}, resident=(), meta={"options": [["--accumulate", 1]]})
    step = Followed(name=script.text, trace=trace, recipe=Recipe(), micro_batch=6, script=script)
    found = script_ways.halves(step)
    assert [change.words for change in found] == ["--batch-size 3 --accumulate 2", "--batch-size 1 --accumulate 6"]
    assert all(change.same_maths for change in found)
