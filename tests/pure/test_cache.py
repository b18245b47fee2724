"""The cache on disk: what was damaged is made anew, what cannot be read or written is done without."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell import api
from foretell.api import backends
from foretell.cli import main
from foretell.hardware.lookup import find_profile, profile_stamp
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import child
from foretell.trace.store import cache
from foretell.trace.store import traces as stored

FIT = ["fit", "gpt-tiny", "--on", "H100", "--json"]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Damage is told with --debug alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def traced() -> list[int]:
    return []


@pytest.fixture
def kept(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, traced: list[int]) -> Path:
    """A cache with one answer and its trace; a child would say the same again, and how often it was asked is counted."""
    traced.clear()

    def ask(module: str, requests: Sequence[Mapping[str, Any]], **_: Any) -> list[dict[str, Any]]:
        traced.append(1)
        if not SAID:
            SAID.update(child.trace_asked(requests[0]))
        return [dict(SAID)]

    monkeypatch.setattr(child, "ask", ask)
    monkeypatch.setattr(backends, "find_profile", PROFILES)
    assert api.fit("gpt-tiny", hardware="H100") and len(traced) == 1
    return cache_dir


SAID: dict[str, Any] = {}
PROFILES = functools.cache(find_profile)
"""Read once: what is tested is another cache."""


def entry(folder: Path, kind: str) -> Path:
    (path,) = (folder / kind).iterdir()
    return path


def resealed(path: Path, content: Any) -> None:
    """Content under a checksum that is right."""
    rest = json.dumps(content).encode()
    path.write_bytes(cache._seal(rest, path.parent.name, path.stem) + rest)


def content(path: Path) -> Any:
    return json.loads(path.read_bytes().partition(b"\n")[2])


def same(entry: dict[str, Any]) -> dict[str, Any]:
    return entry


# ---------------------------------------------------------------- damage


def test_every_kind_of_damage_to_an_entry_is_found(cache_dir: Path) -> None:
    cache.write("answers", "k", {"answer": {"seconds": 10.0}}, {})
    path = cache_dir / "answers" / "k.json"
    good = path.read_bytes()
    assert cache.read("answers", "k", same) == {"answer": {"seconds": 10.0}, "files": {}}
    rng = random.Random(0)
    damaged = [good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :] for at in range(len(good))]
    damaged += [good[:at] for at in range(len(good))] + [good + b" ", b"\n" + good, good.replace(b"10.0", b"-10.0"), b'{"files": []}']
    for bad in damaged:
        path.write_bytes(bad)
        assert cache.read("answers", "k", same) is None, bad
        assert not path.exists(), "it is dropped"


def test_an_entry_under_another_name_is_none(cache_dir: Path) -> None:
    cache.write("answers", "k", {"answer": 1}, {})
    shutil.copy(cache_dir / "answers" / "k.json", cache_dir / "answers" / "other.json")
    (cache_dir / "shares").mkdir()
    shutil.copy(cache_dir / "answers" / "k.json", cache_dir / "shares" / "k.json")
    assert cache.read("answers", "other", same) is None and cache.read("shares", "k", same) is None
    assert cache.read("answers", "k", same) is not None


def test_an_entry_follows_the_files_it_rests_on(cache_dir: Path) -> None:
    cache.write("answers", "k", {"answer": 1}, {str(cache_dir / "gone.py"): "abc"})
    assert cache.read("answers", "k", same) is None
    assert (cache_dir / "answers" / "k.json").exists(), "old, not damaged"


def test_a_path_counts_from_the_folder_it_was_asked_in(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders with a file of the same name: neither is answered with the other's."""
    keys = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("def build(): ...")
        monkeypatch.chdir(tmp_path / name)
        keys += [child.request(Source(model=model), Recipe(), (9, 0), {}) for model in ("mine.py:build", "gpt2")]
    assert keys[0] != keys[2] and keys[1] == keys[3]


@pytest.mark.slow(reason="three traces of a file; entries that are damaged or replaced are not read below")
def test_a_config_that_changes_is_read_again(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    found = []
    for layers in (1, 2, 2):
        config = {"model_type": "gpt2", "n_layer": layers, "n_embd": 16, "n_head": 2, "vocab_size": 10}
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(api.fit("hf:config.json", hardware="H100").parameters)
    assert found[0] < found[1] == found[2]


def test_what_the_reader_refuses_is_dropped_and_what_is_a_bug_is_not_hidden(cache_dir: Path) -> None:
    def refuse(found: dict[str, Any]) -> int:
        return int(found["nothing"])

    def broken(found: dict[str, Any]) -> int:
        raise AssertionError

    cache.write("answers", "k", {}, {})
    with pytest.raises(AssertionError):
        cache.read("answers", "k", broken)
    assert cache.read("answers", "k", refuse) is None and not (cache_dir / "answers" / "k.json").exists()
    cache.write("answers", "k", {}, {})
    with pytest.warns(UserWarning, match=r"k\.json is damaged and made anew: 'nothing'"):
        cache.read("answers", "k", refuse)


@pytest.mark.parametrize("kind", [pytest.param("answers", marks=pytest.mark.slow(reason="a few fields, where traces have many")), "traces"])
def test_a_mutated_entry_does_not_answer(kind: str, kept: Path, traced: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """The step of −10.0 ms, and the empty list of files that was exit 70 until it was deleted by hand."""
    good = api.fit("gpt-tiny", hardware="H100")
    path = entry(kept, kind)
    before = path.read_bytes()
    assert good.time is not None
    step = str(good.time.step_seconds).encode()
    for bad in (before.replace(step, b"-0.01") if kind == "answers" else before.replace(b"float32", b"floot32"), b'{"files": []}', b""):
        assert bad != before
        path.write_bytes(bad)
        if kind == "traces":
            shutil.rmtree(kept / "answers")
        assert main(FIT) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["time"]["step_seconds"] == good.time.step_seconds and not said.err
        assert path.read_bytes() == before, "made anew"
    assert len(traced) == (1 if kind == "answers" else 4)


WRONG: tuple[Any, ...] = (None, "x", -1, [], {}, [1], {"a": []}, 1e400, True)


@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.slow(reason="other fields, read by the same code")) for n in (1, 2))])
@pytest.mark.parametrize("kind", [pytest.param("answers", marks=pytest.mark.slow(reason="a few fields, where traces have many")), "traces"])
def test_wrong_types_under_a_right_checksum_are_a_miss(kind: str, third: int, kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = entry(kept, kind)
    good, before = content(path), path.read_bytes()
    inner = good["answer"] if kind == "answers" else json.loads(good["trace"])
    parts = ("memory", "time", "model") if kind == "answers" else ("meta", "schedule")
    places = [(holder, name) for holder in (good, inner, *(inner[part] for part in parts)) for name in holder]
    for holder, name in places[third::3]:
        right, wrong = holder[name], random.Random(name).choice(WRONG)
        holder[name] = wrong
        resealed(path, good if kind == "answers" or holder is good else {**good, "trace": json.dumps(inner)})
        if kind == "traces":
            shutil.rmtree(kept / "answers")
        assert main(FIT) in (0, 1), (name, wrong)
        holder[name] = right
        path.write_bytes(before)
    capsys.readouterr()


# ---------------------------------------------------------------- without


def unreadable(path: Path, how: str) -> None:
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("how", ["folder", "endless", "loop", "pipe"])
def test_what_stands_in_place_of_an_entry_is_passed_over(how: str, kept: Path, traced: list[int]) -> None:
    good = api.fit("gpt-tiny", hardware="H100")
    for kind in ("answers", "traces"):
        unreadable(entry(kept, kind), how)
    assert api.fit("gpt-tiny", hardware="H100") == good and len(traced) == 2
    assert api.fit("gpt-tiny", hardware="H100") == good and len(traced) == (3 if how == "folder" else 2)


@pytest.mark.parametrize("how", ["a file", "no home", "may not be read", "may not be written"])
def test_a_cache_that_cannot_be_used_is_done_without(
    how: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: list[int]
) -> None:
    good = api.fit("gpt-tiny", hardware="H100")
    if how == "a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    elif how == "no home":
        monkeypatch.delenv("FORETELL_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        _refuse(monkeypatch, kept, "iterdir" if "read" in how else "mkdir")
        shutil.rmtree(kept / "answers") if "written" in how else None
    assert api.fit("gpt-tiny", hardware="H100") == good
    assert find_profile("MI300X") is None and profile_stamp("MI300X") == ""


def _refuse(monkeypatch: pytest.MonkeyPatch, below: Path, name: str) -> None:
    """As for a user who may not: root may everything, so that permissions alone would refuse nothing here."""
    real = getattr(Path, name)
    opened = os.open

    def method(self: Path, *args: Any, **more: Any) -> Any:
        if self.is_relative_to(below):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *args, **more)

    def no(path: Any, *args: Any, **more: Any) -> int:
        if name == "iterdir" and str(path).startswith(str(below)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(Path, name, method)
    monkeypatch.setattr(os, "open", no)


def test_stored_traces_are_read_whole(kept: Path) -> None:
    trace, beside = stored.parsed(content(entry(kept, "traces")))
    assert trace.meta["parameters"] and isinstance(beside.notes, tuple)
