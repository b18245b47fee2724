"""The process that runs user code: it ends at its time limit and with its parent, and takes along whatever it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell import api
from foretell.cli import main
from foretell.errors import ModelError, UserError
from foretell.trace.sandbox import process, server
from foretell.trace.sandbox.process import WorkerEnded, ask
from foretell.units import human_seconds, parse_duration
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
HELD = "import ctypes; ctypes.PyDLL(None).sleep(600)  # in C, with the interpreter's lock held"
MODULE = f"""
import os, subprocess, sys, time
from foretell.trace.sandbox.process import serve

def work(requests, reply):
    for asked in requests:
        reply({{"progress": asked["do"]}})
        print("working on", asked["do"], flush=True)
        if asked["do"] == "die":
            os.kill(os.getpid(), 11)
        if asked["do"] == "leave":
            os._exit(3)
        if asked["do"] in ("hang", "hold"):
            child = subprocess.Popen(["sleep", "600"])
            with open(asked["pids"] + "~", "w") as file:
                file.write(f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}")
            os.rename(asked["pids"] + "~", asked["pids"])
            while asked["do"] == "hang":
                time.sleep(0.01)
            {HELD}
        reply({{"text": "x" * asked.get("size", 1)}})

def main():
    serve(work)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module to ask that imports no torch, and a folder for temporary files that must stay empty."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "worker_of_test.py").write_text(MODULE)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), str(ROOT)]))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with forks.own_server():
        yield


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pids_in(path: Path, seconds: float = 180.0) -> list[int]:
    until = time.monotonic() + seconds
    while not path.exists() or not path.read_text():  # it is there before it is written
        assert time.monotonic() < until, "the worker never began"
        time.sleep(0.02)
    return [int(word) for word in path.read_text().split()]


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def servers_of(parent: int) -> list[int]:
    """Children of a process that fork its tracing processes."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if b"foretell.trace.sandbox.server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_server_that_was_killed_or_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of nothing, in the middle of a request, and where none can be started at all."""
    assert ask("worker_of_test", [{"do": "a"}]) == [{"text": "x"}]
    first = server._known[0].process
    assert ask("worker_of_test", [{"do": "a"}]) == [{"text": "x"}] and server._known[0].process is first
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert ask("worker_of_test", [{"do": "a"}]) == [{"text": "x"}] and server._known[0].process is not first
    server._known.pop().close()
    monkeypatch.setattr(process, "forked", refused)
    assert ask("worker_of_test", [{"do": "a"}]) == [{"text": "x"}] and not server._known


def refused(*_: object) -> None:
    raise OSError("no more processes")


def test_requests_side_by_side_share_a_server_and_leave_nothing_open() -> None:
    """Each in a process of its own."""
    before = set(os.listdir("/proc/self/fd"))
    server.ready("worker_of_test")
    answers: list[object] = [None] * 4

    def asking(place: int) -> None:
        answers[place] = ask("worker_of_test", [{"do": "a", "size": 1000 + place}])

    threads = [threading.Thread(target=asking, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one[0]["text"]) for one in answers] == [1000, 1001, 1002, 1003]  # type: ignore[index]
    assert len(server._known) == 1 and server._known[0].process.poll() is None, "it does not end with a thread that asks"
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1, "the server's own socket"


def test_stopping_ends_workers_that_are_only_just_starting(tmp_path: Path) -> None:
    """As Ctrl-C does while the server still imports torch: nobody waits for it, and nothing is left."""
    stop, found = process.Stop(), list[object]()
    thread = threading.Thread(target=lambda: found.append(ask("worker_of_test", [{"do": "hang", "pids": str(tmp_path / "p")}], stop=stop)))
    stop.now()
    began = time.monotonic()
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and time.monotonic() - began < 20 and isinstance(found[0], WorkerEnded)


def test_answers_come_in_order_and_whole_whatever_their_size() -> None:
    heard: list[str] = []
    found = ask("worker_of_test", [{"do": "a"}, {"do": "b", "size": 3_000_000}], progress=heard.append)
    assert isinstance(found, list)
    assert [len(one["text"]) for one in found] == [1, 3_000_000] and heard == ["a", "b"]


@pytest.mark.parametrize(("how", "code"), [("die", -signal.SIGSEGV), ("leave", 3)])
def test_a_worker_that_dies_is_told_with_what_it_printed(how: str, code: int) -> None:
    found = ask("worker_of_test", [{"do": "a"}, {"do": how}])
    assert isinstance(found, WorkerEnded)
    assert (found.code, len(found.answers)) == (code, 1) and f"working on {how}" in found.tail


@pytest.mark.parametrize("how", ["hang", "hold"])
def test_the_time_limit_ends_the_worker_and_all_it_started(tmp_path: Path, how: str) -> None:
    pids = tmp_path / "pids"
    for limit in (1.0, 5.0, 30.0):  # a busy machine may not even have begun at the first
        started = time.monotonic()
        found = ask("worker_of_test", [{"do": "a"}, {"do": how, "pids": str(pids)}], time_limit=limit)
        assert isinstance(found, WorkerEnded) and found.code is None
        assert time.monotonic() - started < 2 * limit + 10
        if pids.exists():
            break
    assert gone(pids_in(pids, 0.0))
    assert "worker_of_test.py" in found.tail, "where it was is told"


@pytest.mark.parametrize("how", ["hang", "hold"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_outlives_its_parent(tmp_path: Path, number: int, how: str) -> None:
    pids = tmp_path / "pids"
    code = "import sys; from foretell.trace.sandbox.process import ask; ask('worker_of_test', [{'do': sys.argv[1], 'pids': sys.argv[2]}])"
    parent = subprocess.Popen([sys.executable, "-c", code, how, str(pids)])
    try:
        found = pids_in(pids)
        assert all(map(alive, found))
        parent.send_signal(number)
        assert parent.wait(10) == -number
        assert gone(found)
    finally:
        parent.kill()
        parent.wait()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_fit_that_is_killed_leaves_no_child_and_no_folder(tmp_path: Path) -> None:
    pids, model = tmp_path / "pids", tmp_path / "mine.py"
    model.write_text(f"import os\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\nwhile True: pass\ndef build(): return None\n")
    command = [sys.executable, "-m", "foretell", "fit", f"{model}:build", "--on", "H100", "--no-cache"]
    parent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        found = [*pids_in(pids), *servers_of(parent.pid)]
        assert len(found) == 2
        parent.kill()
        assert gone(found)
    finally:
        parent.kill()
        parent.wait()
    left = [path.name for path in (tmp_path / "temporary").iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == [], "torch's own cache aside"
    assert parent.stderr is not None
    with parent.stderr:
        assert f"runs code of {model}" in parent.stderr.read()


def test_a_model_that_never_returns_ends_at_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "mine.py"
    model.write_text("while True: pass\ndef build(): return None\n")
    assert main(["fit", f"{model}:build", "--on", "H100", "--no-cache", "--time-limit", "1"]) == 2
    said = capsys.readouterr().err
    assert f"tracing {model}:build took longer than the time limit of 1 s" in said and "--time-limit 3s" in said
    with pytest.raises(ModelError, match=r"time limit of 0\.5 s"):
        api.fit(f"{model}:build", hardware="H100", cache=False, time_limit=0.5)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "1w", "", "nan", "9" * 400])
def test_a_time_limit_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt-tiny", "--on", "H100", f"--time-limit={text}"]) == 2
    assert "--time-limit" in capsys.readouterr().err


def test_lengths_of_time() -> None:
    assert [parse_duration(text, bare=True) for text in ("90", "90s", "1.5m", "10 min", "2h", "1d")] == [90, 90, 90, 600, 7200, 86400]
    with pytest.raises(UserError, match="not a length of time"):
        parse_duration("90")
    assert [human_seconds(value) for value in (0.5, 90, 600, 5400, 86400)] == ["0.5 s", "1.5 min", "10 min", "1.5 h", "1 d"]
    assert parse_duration(human_seconds(5400, short=True)) == 5400


def test_a_module_of_the_current_folder_takes_nobodys_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(ask("worker_of_test", [{"do": "a"}]), list)
    assert isinstance(ask("worker_of_test", [{"do": "a"}], imports_from_here=True), list)
    assert not (tmp_path / "canary").exists()
