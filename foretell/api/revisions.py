"""Revisions of the user's git repository, each written into a folder of its own and removed afterwards. No torch.

    git rev-parse     what a revision is, and where the repository begins
    git read-tree     its files, into an index of our own
    git checkout-index ──►  /tmp/foretell-diff-PID-.../base       no worktree is registered, no hook runs

The user's tree, index, branches and list of worktrees are read and never written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import FrameType
from urllib.parse import unquote, urlsplit

from foretell.errors import MissingModel, UserError
from foretell.report.diff.judge import Revision
from foretell.trace.sandbox import user_code
from foretell.trace.script.child import clear_stale

HERE = "."
"""The working tree as it is."""
_SCRATCH = "foretell-diff-"
_SUBMODULE = "160000"
_POINTER = b"version https://git-lfs.github.com/spec/"
_NO_LFS = ("-c", "filter.lfs.smudge=", "-c", "filter.lfs.process=", "-c", "filter.lfs.required=false")
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")
"""What git sets for hooks: it would count for submodules too."""
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Repository:
    """Where git finds one from the current folder."""

    root: Path
    prefix: str
    """The current folder in it; empty at its root."""

    def git(self, *words: str, more: Mapping[str, str] | None = None, text: str | None = None) -> str:
        return _git(self.root, words, more, text)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files of a revision, as code is run from them."""

    revision: Revision
    repository: Repository
    folder: Path
    """The repository's own root for the working tree."""
    notes: tuple[str, ...] = ()

    @property
    def is_copy(self) -> bool:
        return not self.revision.working_tree

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The current folder and the import path are this revision's: nothing of the working tree is imported in its place."""
        if not self.is_copy:
            yield
            return
        place = self.folder / self.repository.prefix
        if not place.is_dir():
            raise MissingModel(f"there is no folder {self.repository.prefix}", "name models by paths that this revision has")
        with contextlib.chdir(place), _import_path(self._paths()), user_code.apart(self.folder, self.repository.root):
            yield

    def _paths(self) -> list[str]:
        """What is imported first: folders of the tree that the user imports from, as this revision has them."""
        given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        linked = [path for path in sys.path[1:] if path] + [str(path) for path in _linked()]
        moved = [self._moved(path) or path for path in given]
        return list(dict.fromkeys([*moved, *(found for path in linked if (found := self._moved(path)))]))

    def _moved(self, path: str) -> str | None:
        """The folder in this revision that stands for one of the tree."""
        whole = Path(path).resolve()
        if not whole.is_relative_to(self.repository.root) or whole == Path(__file__).resolve().parents[2]:
            return None
        found = self.folder / whole.relative_to(self.repository.root)
        return str(found) if found.is_dir() else None


@contextlib.contextmanager
def _import_path(paths: Sequence[str]) -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _linked() -> Iterator[Path]:
    """Folders of packages that are installed as links to their source (`pip install -e`), and `src` in them."""
    for one in metadata.distributions():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            said = json.loads(one.read_text("direct_url.json") or "{}")
            if said.get("dir_info", {}).get("editable") and said["url"].startswith("file:"):
                folder = Path(unquote(urlsplit(said["url"]).path))
                yield from (folder / "src", folder)


# --- git -----------------------------------------------------------------------------------------------------------------


def repository() -> Repository:
    """That of the current folder."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder is gone", "cd to one that exists") from None
    root = _git(here, ("rev-parse", "--show-toplevel")).strip()
    return Repository(root=Path(root).resolve(), prefix=_git(here, ("rev-parse", "--show-prefix")).strip())


def _git(folder: Path, words: Sequence[str], more: Mapping[str, str] | None = None, text: str | None = None) -> str:
    """What git prints; a `UserError` with what it says where it fails."""
    command = ["git", "-C", str(folder), *words]
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    environment = {**kept, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_OPTIONAL_LOCKS": "0", **(more or {})}
    try:
        done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, errors="surrogateescape", check=False)
    except FileNotFoundError:
        raise UserError("git is not installed, and revisions are read with it", "install git") from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        said = lines[0].removeprefix("fatal: ").removeprefix("error: ") if lines else f"exit status {done.returncode}"
        if "not a git repository" in said:
            raise UserError(f"{folder} is not in a git repository", "run it in the repository whose revisions are compared")
        raise UserError(f"git {words[0] if not words[0].startswith('-') else 'checkout-index'}: {said}", "see what git says there")
    return done.stdout


def revision(inside: Repository, name: str) -> Revision:
    """What a revision is called and which commit it is; `.` is the working tree."""
    if name == HERE:
        try:
            commit = inside.git("rev-parse", "--verify", "--quiet", "HEAD^{commit}").strip()
        except UserError:  # nothing is committed yet
            commit = ""
        return Revision(name="the working tree", commit=commit, working_tree=True)
    try:
        commit = inside.git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except UserError:
        raise _unknown(inside, name) from None
    return Revision(name=name, commit=commit)


def _unknown(inside: Repository, name: str) -> UserError:
    if inside.git("rev-parse", "--is-shallow-repository").strip() == "true":
        return UserError(f"'{name}' is not in this shallow clone of {inside.root}", "git fetch --unshallow; actions/checkout with fetch-depth: 0")
    known = inside.git("for-each-ref", "--format=%(refname:short)", "--sort=-committerdate", "--count=5", "refs/heads", "refs/remotes", "refs/tags")
    near = ", ".join(line for line in known.split() if line)
    remedy = f"name a branch, a tag or a commit{f' ({near})' if near else ''}; a model is file.py:function"
    return UserError(f"'{name}' is not a revision of {inside.root}", remedy)


# --- files ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(inside: Repository, wanted: Sequence[Revision]) -> Iterator[list[Checkout]]:
    """The files of each revision, gone afterwards; those of a process that was killed go when the next one starts."""
    clear_stale(_SCRATCH)
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True) as scratch:
        found = []
        for number, one in enumerate(wanted):
            folder = Path(scratch).resolve() / f"{number}-{'base' if not number else 'head'}"
            if one.working_tree:
                found.append(Checkout(revision=one, repository=inside, folder=inside.root))
                continue
            folder.mkdir()
            notes = _extracted(inside.root, one.commit, folder, Path(scratch) / f"{number}.index")
            found.append(Checkout(revision=one, repository=inside, folder=folder, notes=tuple(f"{one.shown}: {note}" for note in notes)))
        yield found


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A termination is an interruption: what was written is removed."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupted) for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, how in before.items():
            signal.signal(number, how)


def _extracted(root: Path, commit: str, folder: Path, index: Path) -> list[str]:
    """Write the files of a commit, those of its submodules with it; what is missing, in words."""
    own = {"GIT_INDEX_FILE": str(index)}
    _git(root, ("read-tree", commit), own)
    words = ("checkout-index", "--all", "--force", "--quiet", f"--prefix={folder}/")
    try:
        _git(root, words, own)
    except UserError:  # a filter that is set up and not installed: Git LFS, most often
        _git(root, (*_NO_LFS, *words), own)
    notes = _pointers(root, folder, own)
    missing: list[str] = []
    for line in _git(root, ("ls-files", "--stage", "-z"), own).split("\0"):
        about, _, path = line.partition("\t")
        if about.startswith(_SUBMODULE):
            try:
                (folder / path).mkdir(parents=True, exist_ok=True)
                if Path(_git(root / path, ("rev-parse", "--show-toplevel")).strip()).resolve() != (root / path).resolve():
                    raise UserError("not checked out")
                notes += _extracted(root / path, about.split()[1], folder / path, index.with_name(f"{index.name}-{len(missing)}-{len(path)}"))
            except (UserError, OSError):
                missing.append(path)
    if missing:
        notes.append(f"{_listed(missing)}: submodule not here, its files are missing; git submodule update --init")
    return notes


def _pointers(root: Path, folder: Path, own: Mapping[str, str]) -> list[str]:
    """Files that Git LFS keeps elsewhere and that are not here."""
    if not any("filter=lfs" in path.read_text(errors="replace") for path in folder.rglob(".gitattributes") if path.is_file()):
        return []
    names = _git(root, ("ls-files", "-z"), own).split("\0")
    small = [name for name in names if name and (path := folder / name).is_file() and not path.is_symlink() and path.stat().st_size < 1024]
    found = [name for name in small if (folder / name).read_bytes().startswith(_POINTER)]
    return [f"{_listed(found)}: content is in Git LFS and not here; git lfs pull"] if found else []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
