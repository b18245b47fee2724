"""One run folder, one owner. No torch.

The lock is a file that says who the owner is: machine, boot, process and its start. It is made whole under another name and
linked to its own, which fails where there is one. An owner on this machine is looked up; it is dead if there is no such
process, or another one of that number. An owner that cannot be looked up (another machine or container) is taken for dead
when its heartbeat, the file's time of change, is old. The lock of the dead is replaced: whoever replaces it holds the old
file locked in the kernel meanwhile, so that of two that try one succeeds. Where a network file system cannot do that, the
winner is who is still there a moment later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from foretell.errors import UserError
from foretell.runtime.process import proc

NAME = "run.lock"
BEAT_SECONDS = 15.0
STALE_SECONDS = 180.0
"""Without a heartbeat for so long, an owner that cannot be looked up is taken for dead."""
SETTLE_SECONDS = 0.5
"""Where files cannot be locked: how long after replacing a lock one looks whether it is still one's own."""
TRIES = 100
TRY_SECONDS = 0.05
_MOST_BYTES = 4096
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process that has a run folder."""

    host: str
    boot: str
    space: str
    """Its process numbers are those of this name space."""
    pid: int
    started: str
    """When it was started, as the kernel counts."""
    since: float
    """When it took the folder, by the clock on the wall."""
    token: str

    @classmethod
    def here(cls) -> Owner:
        pid = os.getpid()
        return cls(
            host=socket.gethostname(), boot=proc.boot_id(), space=proc.space(), pid=pid, started=proc.started(pid),
            since=time.time(), token=secrets.token_hex(8),
        )  # fmt: skip

    def __str__(self) -> str:
        then = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {_plain(self.host)}, since {then}"


@dataclass(frozen=True)
class _LockRead:
    """A lock as it was read; its owner is None where nobody can tell."""

    owner: Owner | None
    age: float
    """Seconds since its heartbeat, both by the clock of the file system."""
    beat: float


class _Gone(Exception):
    """The lock was there a moment ago."""


class Lock:
    """A run folder that is this process's own until `release`."""

    def __init__(self, path: Path, owner: Owner, *, lost: Callable[[str], None], beat_s: float = BEAT_SECONDS) -> None:
        self.path, self.owner, self.lost, self.beat_s = path, owner, lost, beat_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="foretell-lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Leave the folder to others; one that others have taken meanwhile is left as it is."""
        if os.getpid() != self.owner.pid:
            return  # a copy of the process that has it
        self._done.set()
        self._thread.join(timeout=5)
        with contextlib.suppress(OSError):
            if _holds(self.path, self.owner):
                self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._done.wait(self.beat_s):
            with contextlib.suppress(OSError):
                try:
                    found = _token(self.path)
                except FileNotFoundError:
                    self._make_again()
                    continue
                if found == self.owner.token:
                    os.utime(self.path)
                elif found:
                    self.lost(f"another process has taken over {self.path.parent}")
                    return

    def _make_again(self) -> None:
        """Someone has deleted it while its owner lives."""
        draft = _drafted(self.path.parent, self.owner)
        try:
            _created(draft, self.path, self.owner)
        finally:
            draft.unlink(missing_ok=True)


def take(
    folder: Path, *, say: Callable[[str], None], lost: Callable[[str], None] = lambda _: None,
    stale_s: float = STALE_SECONDS, beat_s: float = BEAT_SECONDS,
) -> Lock:  # fmt: skip
    """Make the folder this process's own, or raise with who has it. `lost` is called, from a thread, when another process
    has taken it over because this one gave no heartbeat."""
    path, mine = folder / NAME, Owner.here()
    draft: Path | None = None
    try:
        draft = _drafted(folder, mine)
        for _ in range(TRIES):
            if _created(draft, path, mine):
                return Lock(path, mine, lost=lost, beat_s=beat_s)
            why = _replaced(draft, path, stale_s)
            if why and _holds(path, mine):
                say(why)
                return Lock(path, mine, lost=lost, beat_s=beat_s)
            if not draft.exists():
                draft = _drafted(folder, mine)
            time.sleep(TRY_SECONDS)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written: {error.strerror or error}", "make it writable, or give another --out"
        ) from error
    finally:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
    raise UserError(f"{folder} is being taken by other processes", f"wait until they have ended; their lock is {path}")


def _drafted(folder: Path, owner: Owner) -> Path:
    draft = folder / f".{NAME}-{owner.token}"
    _write(draft, owner)
    return draft


def _write(path: Path, owner: Owner) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, json.dumps(asdict(owner)).encode())
    finally:
        os.close(handle)


def _created(draft: Path, path: Path, owner: Owner) -> bool:
    """Whether the lock is ours because there was none."""
    try:
        os.link(draft, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        _write(path, owner)
        return True
    except FileExistsError:
        return False


def _replaced(draft: Path, path: Path, stale_s: float) -> str:
    """Put ours in the place of a dead owner's lock, and say so; empty where it must be tried again. A live one raises."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            guarded = True
        except BlockingIOError:
            return ""  # someone else is about to replace it
        except OSError:
            guarded = False
        try:
            found = _read(handle, path, draft)
        except _Gone:
            return ""
        why = _dead(found, stale_s)
        if not why:
            raise _in_use(path, found, stale_s)
        os.replace(draft, path)
    finally:
        os.close(handle)
    if not guarded:
        time.sleep(SETTLE_SECONDS)
    return f"the lock of {found.owner or path} is taken over: {why}"


def _read(handle: int, path: Path, draft: Path) -> _LockRead:
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        raise _unreadable(path, "it is not a file")
    try:
        now = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        raise _Gone from None
    if (now.st_ino, now.st_dev) != (about.st_ino, about.st_dev):
        raise _Gone
    os.utime(draft)  # by the same clock as the other's heartbeat
    return _LockRead(owner=_parsed(os.read(handle, _MOST_BYTES)), age=draft.stat().st_mtime - about.st_mtime, beat=about.st_mtime)


def _parsed(content: bytes) -> Owner | None:
    """Who it says; None where it is torn, or not a lock of ours."""
    try:
        said = json.loads(content)
        values = {item.name: said[item.name] for item in fields(Owner)}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    numbers = isinstance(values["since"], int | float) and 0 <= values["since"] < 1e11
    words = all(isinstance(values[name], str) for name in ("host", "boot", "space", "started", "token"))
    process = type(values["pid"]) is int and 0 < values["pid"] < 2**31
    return Owner(**values) if numbers and words and process and values["token"] else None


def _token(path: Path) -> str:
    """Of the lock that is there; empty where it cannot be read."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = _parsed(os.read(handle, _MOST_BYTES))
    finally:
        os.close(handle)
    return found.token if found is not None else ""


def _holds(path: Path, owner: Owner) -> bool:
    try:
        return _token(path) == owner.token
    except FileNotFoundError:
        return False


def _looked_up(owner: Owner) -> bool:
    """Whether this process sees that one's process numbers."""
    if owner.boot:
        return owner.boot == proc.boot_id() and bool(owner.space) and owner.space == proc.space()
    return owner.host == socket.gethostname() and not proc.boot_id()


def _dead(found: _LockRead, stale_s: float) -> str:
    """Why an owner is taken for dead; empty where it may live."""
    owner = found.owner
    if owner is not None and _looked_up(owner):
        if not proc.lives(owner.pid):
            return "that process has ended"
        now = proc.started(owner.pid)
        if now and owner.started and now != owner.started:
            return "that process has ended, and its number is another's now"
        return ""
    if owner is not None and owner.host == socket.gethostname() and owner.boot and owner.boot != proc.boot_id():
        booted = proc.boot_time()  # a beat after that is of another machine of the same name
        if booted is not None and found.beat < booted:
            return "this machine was started again since"
    return f"it gave no heartbeat for {_span(found.age)}" if found.age >= stale_s else ""


def _in_use(path: Path, found: _LockRead, stale_s: float) -> UserError:
    owner = found.owner
    if owner is not None and _looked_up(owner):
        return UserError(
            f"{path.parent} is in use by {owner}",
            f"wait until that run has ended, or stop it with `kill {owner.pid}`: it saves and leaves; then resume",
        )
    who = f"by {owner}" if owner is not None else f"as far as {path} tells, which cannot be read"
    return UserError(
        f"{path.parent} is in use {who}; it cannot be looked up from {_plain(socket.gethostname())} "
        f"and its last heartbeat is {_span(found.age)} old",
        f"stop that run, or wait: a lock without a heartbeat for {_span(stale_s)} is taken over; "
        f"if you know that the run has ended, delete {path}",
    )


def _unreadable(path: Path, why: str) -> UserError:
    return UserError(f"the lock {path} cannot be read: {why}", "delete it if no run uses the folder")


def _span(seconds: float) -> str:
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _plain(name: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:100]
