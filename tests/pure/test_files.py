"""Files that are whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from foretell.errors import FileFormatError, UserError
from foretell.files import read_json, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_is_synced_before_it_has_its_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def named(source: Path, target: Path) -> None:
        done.append("name")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named)
    write_atomically(tmp_path / "new" / "x.json", "text")
    assert done == ["file", "name", "folder"]
    assert (tmp_path / "new" / "x.json").read_text() == "text"


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "cannot sync a folder")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refused)
    write_atomically(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    target = tmp_path / "x"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(target, "new")
    assert target.read_text() == "old" and names(tmp_path) == ["x"]


def test_modes_are_kept_and_new_files_are_as_open_as_others(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old", tmp_path / "new", tmp_path / "other"
    old.write_text("1")
    old.chmod(0o640)
    other.write_text("1")
    write_atomically(old, "2")
    write_atomically(new, "2")
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    assert stat.S_IMODE(new.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_a_link_is_replaced_and_a_missing_folder_made_only_if_asked(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    write_atomically(tmp_path / "link", "ours")
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "link").read_text() == "ours"
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "x", "1", parents=False)


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    code = "import sys; from foretell.files import write_atomically as w\nfor _ in range(10): w(sys.argv[1], sys.argv[2] * 50000)"
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "x"), letter]) for letter in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    text = (tmp_path / "x").read_text()
    assert len(text) == 50000 and len(set(text)) == 1 and names(tmp_path) == ["x"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1', b"9" * 5000])
def test_what_is_no_json_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"x\.json cannot be read: .+; mend it") as caught:
        read_json(path, "mend it")
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(UserError, match="is no regular file"):
        read_json(tmp_path / "x.json", "mend it")
    (tmp_path / "y.json").write_text(json.dumps([1]))
    assert read_json(tmp_path / "y.json", "") == [1]


def test_a_device_is_not_replaced_but_a_link_to_one_is(tmp_path: Path) -> None:
    """As /dev/null would be by root; an entry of a cache that leads to one is made anew."""
    ends = os.openpty()
    try:
        link = tmp_path / "entry"
        link.symlink_to(os.ttyname(ends[1]))
        write_atomically(link, "text")
        assert link.read_text() == "text" and not link.is_symlink()
        with pytest.raises(OSError, match="it is a device"):
            write_atomically("/dev/stdout", "text")
        assert Path("/dev/stdout").is_symlink()
        with pytest.raises(OSError, match="it is a device"):
            write_atomically(os.ttyname(ends[1]), "text")
        assert stat.S_ISCHR(os.stat(os.ttyname(ends[1])).st_mode)
    finally:
        for end in ends:
            os.close(end)
