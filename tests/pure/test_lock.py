"""A run folder has one owner: who is refused, whose lock is taken over, and that of many only one takes it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.runtime.process import lock, proc
from foretell.runtime.process.lock import NAME, Owner, take

ROOT = Path(__file__).resolve().parents[2]


def forge(folder: Path, owner: Owner | bytes, *, age: float = 0.0) -> Path:
    """A lock as if someone had left it so long ago."""
    path = folder / NAME
    path.write_bytes(owner if isinstance(owner, bytes) else json.dumps(asdict(owner)).encode())
    os.utime(path, (time.time() - age,) * 2)
    return path


def taken(folder: Path, **seconds: float) -> list[str]:
    """What is said when it is taken; it is given back at once."""
    said: list[str] = []
    take(folder, say=said.append, **seconds).release()
    assert list(folder.iterdir()) == []  # nothing of it is left, no draft either
    return said


def refused(folder: Path) -> str:
    before = (folder / NAME).read_bytes()
    with pytest.raises(UserError) as caught:
        take(folder, say=lambda _: None)
    assert caught.value.exit_code == 2 and (folder / NAME).read_bytes() == before and len(list(folder.iterdir())) == 1
    return str(caught.value)


def test_a_live_owner_is_named_and_a_folder_that_was_left_is_free(tmp_path: Path) -> None:
    held = take(tmp_path, say=lambda _: None)
    said = refused(tmp_path)
    today = time.strftime("since %Y-%m-%d")
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}, {today}" in said and f"kill {os.getpid()}" in said
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    held.release()
    assert taken(tmp_path) == []


def test_an_owner_that_was_killed_is_taken_over_with_a_line(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib; from foretell.runtime.process import lock;"
        "lock.take(pathlib.Path(sys.argv[1]), say=print); os.kill(os.getpid(), 9)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # killed, and not yet collected: it is dead all the same
    assert proc.state(child.pid) == "Z" and (tmp_path / NAME).exists()
    (said,) = taken(tmp_path)
    assert f"the lock of process {child.pid} on" in said and "is taken over: that process has ended" in said
    child.wait()


def test_a_number_that_is_another_process_now_is_a_dead_owner(tmp_path: Path) -> None:
    forge(tmp_path, replace(Owner.here(), started="1"))
    (said,) = taken(tmp_path)
    assert "its number is another's now" in said


def test_a_machine_that_was_started_again_has_no_old_owners(tmp_path: Path) -> None:
    booted = proc.boot_time()
    assert booted is not None
    before = replace(Owner.here(), boot="of another time")
    forge(tmp_path, before, age=time.time() - booted + 60)
    (said,) = taken(tmp_path)
    assert "this machine was started again since" in said
    forge(tmp_path, before)  # its heart beats: another machine of the same name
    assert "cannot be looked up" in refused(tmp_path)


def test_an_owner_elsewhere_is_believed_while_its_heart_beats(tmp_path: Path) -> None:
    for other in (replace(Owner.here(), host="far", boot="theirs"), replace(Owner.here(), space="pid:[1]")):  # a container too
        path = forge(tmp_path, other, age=100)
        said = refused(tmp_path)
        assert f"process {other.pid} on {other.host}" in said and "last heartbeat is 100 s old" in said
        assert f"delete {path}" in said and "without a heartbeat for 3 min is taken over" in said
        forge(tmp_path, other, age=200)
        (line,) = taken(tmp_path)
        assert "it gave no heartbeat for 3 min" in line


HERE = asdict(Owner.here())
FORGED = {
    "empty": b"", "cut": b'{"host": "far", "pi', "no text": b"\xff\xfe\x00", "deep": b"[" * 4000, "list": b"[1]", "number": b"7",
    **{
        name: json.dumps({**HERE, **change}).encode()
        for name, change in {
            "pid text": {"pid": "1; reboot"}, "pid true": {"pid": True}, "pid negative": {"pid": -1}, "pid huge": {"pid": 2**70},
            "since text": {"since": "now"}, "since huge": {"since": 1e300}, "since nan": {"since": float("nan")},
            "host list": {"host": ["a"]}, "no token": {"token": ""},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED.keys())
def test_a_lock_that_cannot_be_read_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = forge(tmp_path, content)
    said = refused(tmp_path)
    assert "cannot be read" in said and f"delete {path}" in said
    forge(tmp_path, content, age=1000)
    assert len(taken(tmp_path)) == 1


def test_what_is_no_file_is_a_sentence_too(tmp_path: Path) -> None:
    makers = {
        "folder": lambda path: path.mkdir(), "link": lambda path: path.symlink_to("/etc/passwd"), "pipe": os.mkfifo,
        "loop": lambda path: path.symlink_to(path),
    }  # fmt: skip
    for name, make in makers.items():
        (folder := tmp_path / name).mkdir()
        make(folder / NAME)
        with pytest.raises(UserError, match=r"run\.lock cannot be read: .*delete it if no run uses the folder"):
            take(folder, say=lambda _: None)
        assert len(list(folder.iterdir())) == 1


def test_letters_that_move_the_cursor_are_not_shown(tmp_path: Path) -> None:
    forge(tmp_path, replace(Owner.here(), host="a\x1b[2Jb\n", boot="theirs"))
    assert "\x1b" not in (said := refused(tmp_path)) and "\n" not in said and "on a?[2Jb?," in said


MANY = """
import os, sys, json, time, select, pathlib
from dataclasses import asdict, replace
from foretell.errors import UserError
from foretell.runtime.process import lock
folder, guard, rounds = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if guard == "no":
    def refuse(*_): raise OSError(37, "no locks")
    lock.fcntl.flock, lock.SETTLE_SECONDS = refuse, 1.0
judged = lock._dead
def slowly(*asked):
    found = judged(*asked)
    time.sleep(0.02)  # whoever is quick replaces it meanwhile
    return found
lock._dead = slowly
dead = replace(lock.Owner.here(), started="1")
for _ in range(rounds):
    (folder / lock.NAME).write_text(json.dumps(asdict(dead)))
    go, hold = os.pipe(), os.pipe()
    children = []
    for _ in range(5):
        children.append(os.fork())
        if not children[-1]:
            os.close(go[1]); os.close(hold[1])
            os.read(go[0], 1)  # all at once
            try:
                held = lock.take(folder, say=lambda _: None)
            except UserError:
                os._exit(0)
            select.select([hold[0]], [], [], 10)  # until the others have given up
            os._exit(1 if lock._holds(held.path, held.owner) else 3)
    os.close(go[0]); os.close(go[1])
    ended = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in children[1:]]
    os.close(hold[0]); os.close(hold[1])
    ended.append(os.waitstatus_to_exitcode(os.wait()[1]))
    assert ended == [0, 0, 0, 0, 1], ended
    (folder / lock.NAME).unlink()
assert not list(folder.iterdir()), list(folder.iterdir())
"""


@pytest.mark.parametrize(("guard", "rounds"), [("yes", 6), ("no", 1)])
def test_of_many_that_take_over_at_once_one_does(tmp_path: Path, guard: str, rounds: int) -> None:
    """With locks of the kernel and, as on some network file systems, without."""
    words = [sys.executable, "-c", MANY, str(tmp_path), guard, str(rounds)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_without_hard_links_it_works_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(lock.os, "link", refuse)
    held = take(tmp_path, say=lambda _: None)
    assert "is in use by process" in refused(tmp_path)
    held.release()
    forge(tmp_path, replace(Owner.here(), started="1"))
    assert len(taken(tmp_path)) == 1


def _until(wanted: object) -> None:
    deadline = time.monotonic() + 20
    while not wanted():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_heart_beats_and_a_lock_that_was_deleted_comes_back(tmp_path: Path) -> None:
    held = take(tmp_path, say=lambda _: None, beat_s=0.05)
    os.utime(held.path, (0, 0))
    _until(lambda: held.path.stat().st_mtime > 0)
    held.path.unlink()
    _until(held.path.exists)
    assert "is in use by process" in refused(tmp_path)
    held.release()
    assert not list(tmp_path.iterdir())


def test_whoever_was_taken_over_learns_of_it_and_leaves_the_lock(tmp_path: Path) -> None:
    lost: list[str] = []
    held = take(tmp_path, say=lambda _: None, lost=lost.append, beat_s=0.05)
    theirs = replace(Owner.here(), token="theirs", host="far", boot="theirs")
    draft = tmp_path / "draft"
    draft.write_text(json.dumps(asdict(theirs)))
    draft.replace(tmp_path / NAME)
    _until(lambda: lost)
    assert lost == [f"another process has taken over {tmp_path}"]
    held.release()
    assert json.loads((tmp_path / NAME).read_text())["token"] == "theirs"


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run folder .*nowhere cannot be written: No such file"):
        take(tmp_path / "nowhere", say=lambda _: None)
