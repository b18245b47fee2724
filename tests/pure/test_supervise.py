"""Any command kept alive, with processes that are real and no torch: restarts, exit codes, signals, standstills, nobody left."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.runtime.process import proc
from foretell.runtime.process.apart import apart
from foretell.runtime.process.launch import CRASHED, HUNG, KILLED, LOST, RunEnded, rank_environment
from foretell.runtime.process.supervise import reaper, slurm
from foretell.runtime.process.supervise import standby as standbys
from foretell.runtime.process.supervise.budget import RestartBudget
from foretell.runtime.process.supervise.faults import fault_of
from foretell.runtime.process.supervise.keep import again_words
from foretell.runtime.process.supervise.notices import Notices, look_of
from foretell.runtime.process.supervise.standby import Standby

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- how often, and what


def test_a_budget_is_for_restarts_in_a_row_and_pauses_double() -> None:
    budget = RestartBudget(4, first_s=1.0, most_s=3.0)
    assert [budget.spend(7) for _ in range(5)] == [0.0, 1.0, 2.0, 3.0, None]
    assert budget.spend(8) == 0.0 and budget.total == 5  # it got further: all of them again
    assert RestartBudget(0).spend(1) is None


def test_faults_of_the_machine_are_restarted_and_those_of_code_are_not() -> None:
    for kind in (KILLED, HUNG, CRASHED, LOST):
        fault = fault_of(RunEnded(1, "rank 1 was ended; all ranks stopped", fault=kind, ranks=(1,), step=7))
        assert fault is not None and (fault.kind, fault.words, fault.ranks, fault.step) == (kind, "rank 1 was ended", (1,), 7)
    for status in (0, 1, 2, 70, 130, 143):
        assert fault_of(RunEnded(status)) is None


def test_a_run_goes_on_with_its_folder_once_it_is_there(tmp_path: Path) -> None:
    words = ["run", "old", "--again", "--steps", "9", "--device", "cpu", "--json", "--max-restarts", "3", "--out", str(tmp_path)]
    assert again_words(words, tmp_path) == words  # it was killed before it began
    for name in ("plan.json", "settings.json"):
        (tmp_path / name).write_text("{}")
    assert again_words(words, tmp_path) == ["run", str(tmp_path), "--resume", "--json", "--device", "cpu"]
    other = ["run", "other.json", "--resume", "--out", str(tmp_path), "--steps", "20"]
    assert again_words(other, tmp_path) == other


# ---------------------------------------------------------------- a command

COUNTS = "import os, sys; open(sys.argv[1], 'a').write(os.environ['FORETELL_RESTARTS']); "


def supervise(*options: str, code: str, log: Path, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "foretell", "run", "supervise", *options, "--", sys.executable, "-u", "-c", COUNTS + code, str(log)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(more or {})}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def until(true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


STATUS = pytest.mark.slow(reason="another status, passed on in the same way")


@pytest.mark.parametrize(
    ("code", "status", "starts"),
    [
        ("sys.exit(0 if os.environ['FORETELL_RESTARTS'] == '1' else 5)", 0, "01"),
        pytest.param("sys.exit(7)", 7, "01", marks=STATUS),
        ("os.kill(os.getpid(), 9)", 137, "01"),
        pytest.param("sys.exit(2)", 2, "0", marks=STATUS),
        ("os.kill(os.getpid(), 15)", 143, "0"),
    ],
)
def test_a_command_is_started_again_and_its_status_passed_on(tmp_path: Path, code: str, status: int, starts: str) -> None:
    child = supervise("--max-restarts", "1", code=code, log=tmp_path / "log")
    _, said = child.communicate(timeout=60)
    assert child.returncode == status and (tmp_path / "log").read_text() == starts, said
    assert said.count("restart 1 of 1") == len(starts) - 1 and "Traceback" not in said


LEAVES = (
    "import subprocess, sys, time; p = subprocess.Popen(['sleep', '100'], start_new_session=True); "
    "open(sys.argv[1] + '.pid', 'a').write(f'{p.pid} '); "
)


def pids(log: Path) -> list[int]:
    path = Path(f"{log}.pid")
    return list(map(int, path.read_text().split())) if path.exists() else []


def test_what_a_killed_command_leaves_in_sessions_of_its_own_is_ended(tmp_path: Path) -> None:
    """As torchrun's ranks outlive a torchrun that is killed."""
    log = tmp_path / "log"
    child = supervise("--max-restarts", "1", "--grace", "0.2", code=LEAVES + "os.kill(os.getpid(), 9)", log=log)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 137 and len(pids(log)) == 2 and not any(map(proc.lives, pids(log))), said
    assert "1 processes that it has left are ended" in said


def test_a_supervisor_that_is_killed_takes_everything_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.runtime.process import guardian

    log = tmp_path / "log"
    held = subprocess.Popen([sys.executable, "-c", LEAVES + "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(100)", str(log)],
                            start_new_session=True)  # fmt: skip
    until(lambda: pids(log))
    time.sleep(0.2)
    guardian.guard(f"{held.pid} {guardian._started(held.pid)}\n".encode(), most_s=0.2, tree=True)
    assert held.wait(10) == -signal.SIGKILL and not any(map(proc.lives, pids(log)))
    child = supervise(code="import time; open(sys.argv[1] + '.pid', 'w').write(str(os.getpid())); time.sleep(100)", log=log)
    until(lambda: len(pids(log)) == 1 and proc.lives(pids(log)[0]))
    child.kill()
    child.communicate()
    until(lambda: not proc.lives(pids(log)[0]))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_reach_the_command_which_is_not_started_again(tmp_path: Path, name: str) -> None:
    code = f"import signal, time; signal.signal(signal.{name}, lambda *_: sys.exit(9)); open(sys.argv[1] + '.pid', 'w').write('1'); time.sleep(100)"
    child = supervise(code=code, log=tmp_path / "log")
    until(lambda: pids(tmp_path / "log"))
    child.send_signal(getattr(signal, name))
    child.communicate(timeout=30)
    assert child.returncode == 9 and (tmp_path / "log").read_text() == "0"


SIGN = pytest.mark.slow(reason="another sign of life")


@pytest.mark.parametrize("sign", ["output", pytest.param("file", marks=SIGN)])
def test_a_command_that_stands_still_is_ended_and_started_again(tmp_path: Path, sign: str) -> None:
    """It comes on for longer than it may be silent, and stands still for ever when it is started first."""
    log, beat = tmp_path / "log", tmp_path / "beat"
    tells = "print('on', i)" if sign == "output" else f"open({str(beat)!r}, 'a').write('x')"
    code = f"import time\nfor i in range(8): {tells}; time.sleep(0.2)\nif os.environ['FORETELL_RESTARTS'] == '0': time.sleep(100)"
    more = ["--heartbeat", str(beat)] if sign == "file" else []
    child = supervise("--stall-after", "1.5", *more, code=code, log=log)
    out, said = child.communicate(timeout=60)
    assert child.returncode == 0 and log.read_text() == "01", said
    assert ("has not changed for 2 s" if sign == "file" else "it has written nothing for 2 s") in said
    assert out.count("on 7") == (2 if sign == "output" else 0)


def test_a_task_of_slurm_has_the_variables_of_torchrun(tmp_path: Path) -> None:
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40001", "SLURM_STEP_ID": "2",
           "SLURM_STEP_NODELIST": "gpu[003-004,9],login", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}  # fmt: skip
    code = "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'); print(*[os.environ[n] for n in names])"
    out, said = supervise(code=code, log=tmp_path / "log", more=env).communicate(timeout=60)
    assert out.split() == ["5", "8", "1", "4", "gpu003", "10003"], said
    assert slurm.rank_variables({**env, "RANK": "0"}) == {} == slurm.rank_variables({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
    names = {"node7": "node7", "a-[1-3]": "a-1", "n[01,04]-ib,x": "n01", "": ""}
    assert {one: slurm.first_host(one) for one in names} == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no command is given"),
        (["--", "/no/such/program"], "/no/such/program cannot be started"),
        (["--max-restarts", "-1", "--", "true"], "must not be negative"),
        (["--heartbeat", "x", "--", "true"], "nothing waits for one"),
        (["--stall-after", "soon", "--", "true"], "not a length of time"),
        (["--notice", "nowhere/x", "--", "true"], "there is no folder nowhere"),
        (["--notice", "typo", "--", "true"], "no plug-in has that name"),
    ],
)
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["supervise", *words]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1


# ---------------------------------------------------------------- ranks that are forked


def rank_of(standby: Standby, *words: str) -> int:
    hears, pipe = os.pipe()
    try:
        rank = standby.start(["-m", "foretell", *words], rank_environment(0, 1, 0, pipe), pipe)
        assert rank.wait(60) == (0 if words == ("version",) else 2)
        return rank.pid
    finally:
        os.close(hears)
        os.close(pipe)


@pytest.mark.parametrize("harm", ["kill", "stop"])
def test_a_standby_forks_ranks_until_it_is_harmed_and_then_they_are_started(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr(standbys, "AGAIN_SECONDS", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    there = set(reaper.others(()))  # of tests before
    with reaper.adopting(), contextlib.closing(Standby(1, modules=())) as standby:
        rank_of(standby, "version")
        rank_of(standby, "run", "/no/such/plan.json")  # as many as are asked for
        assert standby.lives
        os.kill(standby.process.pid, signal.SIGKILL if harm == "kill" else signal.SIGSTOP)
        rank_of(standby, "version")
        assert not standby.lives and set(reaper.others(())) <= there
    assert capfd.readouterr().out.count("foretell ") == 2


# ---------------------------------------------------------------- notices


class _Metadata(http.server.BaseHTTPRequestHandler):
    said = b"FALSE"

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 404 if self.path == "/none" else 200)
        self.send_header("Location", "/said")
        self.end_headers()
        with contextlib.suppress(OSError):  # who asks reads no more than it needs
            self.wfile.write(self.said)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}"
        found.shutdown()


def test_a_server_gives_notice_with_an_answer_that_is_not_no(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = look_of(f"{server}/said?x=1")
    assert look() == ""
    monkeypatch.setattr(_Metadata, "said", b'{"action": "terminate"}' + b" " * 10_000_000)
    assert look() == f'{server}/said?x=1 says {{"action": "terminate"}}'
    assert look_of(f"{server}/none")() == "" == look_of(f"{server}/moved")()  # it is not there, or elsewhere
    with pytest.raises(UserError, match="names no host"):
        look_of("http://")


def test_a_file_that_appears_is_told_once_and_servers_that_fail_are_not(tmp_path: Path) -> None:
    said: list[str] = []
    left = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes calls and never answers
        where = ("http://127.0.0.1:9/none", f"http://127.0.0.1:{silent.getsockname()[1]}/", str(tmp_path / "go"))
        with Notices(where, said.append, left.set, look_s=0.02):
            assert not left.wait(0.2)
            (tmp_path / "go").touch()
            assert left.wait(10)
    assert said == [f"notice: {tmp_path / 'go'} has appeared; the run saves and leaves"]
    with pytest.raises(UserError, match="is there already"):
        look_of(str(tmp_path / "go"))


# ---------------------------------------------------------------- clocks


def test_nothing_here_looks_at_the_clock_on_the_wall() -> None:
    folder = ROOT / "foretell" / "runtime" / "process"
    files = [*(folder / "supervise").glob("*.py"), *(folder / f"{name}.py" for name in ("launch", "blame", "watch", "progress"))]
    assert len(files) > 8 and [path.name for path in files if "time.time" in path.read_text() or "datetime.now" in path.read_text()] == []


# ---------------------------------------------------------------- memory of who only watches

ONLY_WATCHES = """
import json, sys
from foretell.cli import main
from foretell.runtime.process import launch
from foretell.runtime.process.supervise import keep

class NoStandby:
    lives = True
    def __init__(self, world): pass
    def start(self, *_): pass
    def close(self): pass

def attempt(self, words):
    keeper._kept()
    with open("/proc/self/status") as stream:
        resident = next(int(line.split()[1]) for line in stream if line.startswith("VmRSS"))
    print(json.dumps({"modules": sorted(sys.modules), "kilobytes": resident}))
    return launch.RunEnded(0)

def remember(self, *given, _init=keep.Keeper.__init__, **more):
    global keeper
    keeper = self
    _init(self, *given, **more)

keep.Keeper.__init__, keep.Standby, launch.Launcher.attempt = remember, NoStandby, attempt
sys.exit(main(sys.argv[1:]))
"""
"""`foretell run` up to where it would start ranks, and once it has looked for the newest checkpoint as after a fault."""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_who_only_watches_takes_30_megabytes(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plans.write(Plan(model={"model": "gpt-tiny", "seq": 32}, hardware="CPU", mesh=Mesh(dp_shard=2)), plan)
    words = ["run", str(plan), "--device", "cpu", "--max-restarts", "2", "--save-every", "5", "--out", str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ONLY_WATCHES, *words], env=env, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[0])
    heavy = {"torch", "numpy", "pydantic", "ssl", "http.client", "rich", "foretell.hardware", "foretell.zoo", "foretell.plan.legal", "foretell.lower"}
    assert not heavy & set(found["modules"])
    assert found["kilobytes"] < 30_000


def test_what_is_done_apart_raises_here() -> None:
    def refuses() -> None:
        raise UserError("no such thing", "another")

    def dies() -> None:
        done.append(1)
        if os.getpid() != mine:
            os.kill(os.getpid(), signal.SIGKILL)

    mine, done = os.getpid(), list[int]()
    apart(lambda: done.append(2))
    assert done == [] or threading.active_count() > 1, "it was done in another process"
    with pytest.raises(UserError, match="no such thing; another"):
        apart(refuses)
    done.clear()
    apart(dies)
    assert done == [1], "where that process is ended it is done here"


def test_what_is_done_apart_is_done_here_beside_other_threads() -> None:
    stop, done = threading.Event(), list[int]()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        apart(lambda: done.append(1))
    finally:
        stop.set()
        thread.join()
    assert done == [1]
