"""Checkpoints that are not what they should be, files that would run code, how often to save, and the command."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretell.checkpoint import format as layout
from foretell.checkpoint import interval, saver, store
from foretell.checkpoint.format import Damaged, dump_manifest, parse_manifest, read_manifest
from foretell.checkpoint.read import Reader
from foretell.cli import main
from foretell.errors import FileFormatError, UserError
from tests.pure.checkpoint_cases import save, saved_in, some_tensors

# ---------------------------------------------------------------- files that are not what they should be


def rewritten(path: Path, **changes: Any) -> None:
    """A manifest with a digest that is right and content that is not."""
    manifest = read_manifest(path)
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_bytes(dump_manifest(replace(manifest, **changes)))


def test_a_file_that_is_missing_cut_longer_or_of_another_rank(tmp_path: Path) -> None:
    save(tmp_path / "a", some_tensors())
    file = saved_in(tmp_path / "a") / "rank-00001.safetensors"
    content = file.read_bytes()
    for change, said in (
        (lambda: file.write_bytes(content[:-1]), "bytes and was written with"),
        (lambda: file.write_bytes(content + b"x"), "bytes and was written with"),
        (lambda: file.write_bytes(b""), "bytes and was written with"),
        (lambda: file.unlink(), "rank-00001.safetensors is missing"),
        (lambda: file.symlink_to("/dev/null"), "bytes and was written with"),
    ):  # fmt: skip
        change()
        assert store.complete(tmp_path / "a") == [] and said in store.problems(saved_in(tmp_path / "a"))[0]
    file.unlink()
    aside = tmp_path / "elsewhere"
    aside.write_bytes(content)
    file.symlink_to(aside)
    assert "rank-00001" in store.problems(saved_in(tmp_path / "a"))[0]


def test_files_of_two_saves_do_not_go_together(tmp_path: Path) -> None:
    """The same step, the same shapes, the same sizes: only the generation tells."""
    save(tmp_path / "a", some_tensors(0))
    save(tmp_path / "b", some_tensors(1))
    name = "rank-00001.safetensors"
    shutil.copy(saved_in(tmp_path / "b") / name, saved_in(tmp_path / "a") / name)
    path = saved_in(tmp_path / "a")
    assert len(store.complete(tmp_path / "a")) == 1
    (problem,) = store.problems(path)
    mine, theirs = (read_manifest(saved_in(tmp_path / one)).generation for one in "ab")
    assert f"{name} belongs to another save ({theirs}, not {mine})" in problem
    with pytest.raises(Damaged, match="belongs to another save"):
        Reader(store.look(path))
    manifest = read_manifest(path)
    rewritten(path, files={**manifest.files, "rank-00000.safetensors": manifest.files[name]})
    assert store.problems(path)


def test_a_manifest_cannot_lead_elsewhere(tmp_path: Path) -> None:
    save(tmp_path / "a", some_tensors(), world=1)
    path = saved_in(tmp_path / "a")
    (file,) = read_manifest(path).files.values()
    shutil.copy(path / "rank-00000.safetensors", tmp_path / "secret")
    for name in ("../../secret", "/etc/passwd", "rank-00000.safetensors/../../../secret", "..", "", "rank-00000.safetensors\0"):
        rewritten(path, files={name: file})
        with pytest.raises(Damaged, match="is not the name of a file of a checkpoint"):
            read_manifest(path)
        assert store.problems(path) and store.complete(tmp_path / "a") == []
        (path / "manifest.json").unlink()
        save(tmp_path / "b", some_tensors(), world=1)
        shutil.rmtree(path)
        saved_in(tmp_path / "b").rename(path)


def test_sizes_that_are_lies_are_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    save(tmp_path, some_tensors(), world=1)
    path = saved_in(tmp_path)
    manifest = read_manifest(path)
    (name, file), *_ = manifest.files.items()
    rewritten(path, files={name: replace(file, header_bytes=2**20, bytes=2**41)})
    assert "bytes and was written with" in store.problems(path)[0]
    raw = dump_manifest(replace(manifest, files={name: replace(file, header_bytes=2**40, bytes=2**41)}))
    with pytest.raises(Damaged, match="has a header of"):
        parse_manifest(raw, path)
    raw = dump_manifest(replace(manifest, files={name: replace(file, header_bytes=file.bytes + 1)}))
    with pytest.raises(Damaged, match="has a header of"):
        parse_manifest(raw, path)
    raw = dump_manifest(replace(manifest, tensors={"model/x": layout.TensorMeta((-1, 5), "float32")}))
    with pytest.raises(Damaged, match="negative"):
        parse_manifest(raw, path)
    rewritten(path, files={name: file}, tensors={**manifest.tensors, "model/more": layout.TensorMeta((1000, 1000), "float32")})
    assert "model/more is not whole: 1000000 of its 1000000 elements are in no file" in store.problems(path)[0]


def test_a_newer_and_an_older_version_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "VERSION", 9)
    save(tmp_path, some_tensors(), world=1)
    monkeypatch.undo()
    for look in (read_manifest, store.look):
        with pytest.raises(FileFormatError, match=r"is of version 9 and this foretell reads version 2; use a newer foretell"):
            look(saved_in(tmp_path))
    (saved_in(tmp_path) / "manifest.json").write_text('{"version": 1, "step": 5, "world": 1, "files": {}}')
    with pytest.raises(FileFormatError, match="version 1, which is no longer read"):
        read_manifest(saved_in(tmp_path))


# ---------------------------------------------------------------- nothing is ever run


class Trap:
    """Whoever unpickles this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def traps(folder: Path, mark: Path) -> dict[str, Path]:
    """Five ways in which files of weights run code in whoever opens them; each is proven to work on its own reader."""
    made = {}
    for name in ("bin", "pt"):
        made[name] = folder / name / f"pytorch_model.{name}"
        made[name].parent.mkdir(parents=True)
        torch.save({"tokens.weight": Trap(mark)}, made[name])
    made["legacy"] = folder / "legacy" / "model.ckpt"
    made["legacy"].parent.mkdir()
    torch.save({"x": Trap(mark)}, made["legacy"], _use_new_zipfile_serialization=False)
    made["dcp"] = folder / "dcp" / ".metadata"
    made["dcp"].parent.mkdir()
    made["dcp"].write_bytes(pickle.dumps(Trap(mark)))
    (folder / "dcp" / "__0_0.distcp").write_bytes(pickle.dumps(Trap(mark)))
    made["numpy"] = folder / "numpy" / "weights.npy"
    made["numpy"].parent.mkdir()
    np.save(made["numpy"], np.array([Trap(mark)], dtype=object), allow_pickle=True)
    return made


def test_the_traps_work_and_none_of_ours_steps_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from foretell.checkpoint.pretrained import offered

    mark = tmp_path / "mark"
    made = traps(tmp_path / "traps", mark)
    for name, path in made.items():
        if name == "dcp":
            pickle.loads(path.read_bytes())
        elif name == "numpy":
            np.load(path, allow_pickle=True)
        else:
            torch.load(path, weights_only=False)
        assert mark.exists(), name
        mark.unlink()
    save(tmp_path / "run" / "checkpoints", some_tensors(), world=1)
    good = saved_in(tmp_path / "run" / "checkpoints")
    for name, path in made.items():
        for given in (path, path.parent):
            with pytest.raises(UserError, match=r"runs code|no \.safetensors file|not a safetensors file"):
                offered(given)
            for words in (["verify"], ["show"], ["list"], ["convert"]):
                main(["ckpt", *words, str(given), *([str(tmp_path / "out")] if words == ["convert"] else [])])
        copy = tmp_path / f"with-{name}" / "checkpoints"
        shutil.copytree(good, copy / good.name)
        shutil.copy(path, copy / good.name / path.name)  # beside good files it is not even looked at
        assert store.problems(copy / good.name) == []
        shutil.copy(path, copy / good.name / "rank-00000.safetensors")  # in place of one it is damage
        assert store.problems(copy / good.name)
        shutil.copy(path, copy / good.name / "manifest.json")
        assert store.problems(copy / good.name) and store.complete(copy) == []
    capsys.readouterr()
    assert not mark.exists()


def test_no_module_of_the_room_can_unpickle() -> None:
    for file in (Path(saver.__file__).parent).glob("*.py"):
        source = file.read_text()
        assert not any(word in source for word in ("import pickle", "torch.load(", "np.load", "eval(", "exec(")), file


# ---------------------------------------------------------------- how often


def lost_share(interval_seconds: float, cost_seconds: float, mtbf_seconds: float) -> float:
    """Share of the time that saving and failing take, failures coming at random (exponentially), restart left out."""
    cycle = interval_seconds + cost_seconds
    return 1 - interval_seconds / (mtbf_seconds * math.expm1(cycle / mtbf_seconds))


@pytest.mark.parametrize(("cost", "mtbf"), [(0.3, 3600.0), (60.0, 86400.0), (300.0, 7200.0), (1800.0, 14400.0)])
def test_the_interval_loses_the_least_time(cost: float, mtbf: float) -> None:
    """Held against a search over the exact share that is lost."""
    found = interval.best_interval(cost, mtbf)
    grid = np.geomspace(found / 20, found * 20, 20001)
    best = min(grid, key=lambda seconds: lost_share(float(seconds), cost, mtbf))
    assert found == pytest.approx(best, rel=0.02)
    young = (2 * cost * mtbf) ** 0.5
    assert lost_share(found, cost, mtbf) <= lost_share(young, cost, mtbf) * (1 + 1e-9)


def test_intervals_in_steps_and_times_that_people_write() -> None:
    assert interval.best_interval(100.0, 40.0) == 40.0
    assert interval.steps_between(0.5, 3600.0, 0.1, 10**6) == round(interval.best_interval(0.5, 3600.0) / 0.1)
    assert interval.steps_between(0.5, 3600.0, 1e9, 100) == 1 and interval.steps_between(0.5, 3600.0, 0.0, 100) == 100
    assert [interval.parse_duration(text) for text in ("90s", "30m", "1.5h", "2d")] == [90.0, 1800.0, 5400.0, 172800.0]
    for text in ("4", "h", "-3h", "0h", "4 weeks"):
        with pytest.raises(UserError, match="not a length of time"):
            interval.parse_duration(text)


# ---------------------------------------------------------------- the command


def test_looking_at_checkpoints_needs_no_torch() -> None:
    code = "import sys, foretell.cli.run.ckpt, foretell.checkpoint.store, foretell.checkpoint.interval; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, timeout=60).returncode == 0


def test_the_command_lists_verifies_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    good: set[Path] = set()
    for step in (5, 10):
        save(run / "checkpoints", some_tensors(), step=step, good=good)
    assert main(["ckpt", "list", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000010", "step-00000005"] and "dp_shard 2" in lines[0]
    assert main(["ckpt", "verify", str(run)]) == 0 and "as it was written" in capsys.readouterr().out
    assert main(["ckpt", "show", str(run), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "step        10" in told and "model       10 tensors" in told and "model/t1.weight  12x4 bfloat16" in told
    assert main(["ckpt", "show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["step"] == 10 and found["schema_version"] and "files" in found["checkpoint"]
    file = saved_in(run / "checkpoints", 10) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["ckpt", "verify", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["good"] and "rank-00001.safetensors is damaged" in found["problems"][0]
    assert main(["ckpt", "verify", str(saved_in(run / "checkpoints", 5))]) == 0
    file.unlink()
    assert main(["ckpt", "list", str(run)]) == 0 and "rank-00001.safetensors is missing" in capsys.readouterr().out
    assert main(["ckpt", "list", str(run), "--json"]) == 0
    assert [row.get("step") for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [None, 5]


def test_paths_that_are_no_checkpoint_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for words, said in (
        (["list", str(tmp_path / "file")], "is a file"),
        (["verify", str(tmp_path / "file")], "is a file and no checkpoint"),
        (["verify", str(tmp_path / "nowhere")], "there is no folder"),
        (["show", str(tmp_path / "empty")], "has no checkpoint"),
        (["convert", str(tmp_path / "empty"), str(tmp_path / "x")], "has no checkpoint"),
    ):
        assert main(["ckpt", *words]) == 2
        told = capsys.readouterr().err
        assert said in told and len(told.splitlines()) == 1
