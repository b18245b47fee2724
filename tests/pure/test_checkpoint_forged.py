"""Checkpoints that are broken, and forged ones whose checksums are right: never a bug of foretell, never much memory."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretell.checkpoint import format as layout
from foretell.checkpoint import store
from foretell.checkpoint.format import Damaged
from foretell.checkpoint.pretrained import load_into, offered
from foretell.checkpoint.read import Reader
from foretell.cli import common, main
from foretell.cli.run import ckpt
from foretell.errors import FileFormatError, UserError
from foretell.plan.types import Plan
from foretell.runtime.parallel import ranks as members
from foretell.runtime.process.control import Control
from foretell.runtime.train import folder as folders
from foretell.runtime.train import train
from foretell.runtime.train.folder import Folder, RunSettings
from foretell.runtime.train.run import run
from tests.pure.checkpoint_cases import save, saved_in, some_tensors

# ---------------------------------------------------------------- ckpt verify


def cut(path: Path) -> None:
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 16
    file.write_bytes(content)


def flip_manifest(path: Path) -> None:
    content = bytearray((path / "manifest.json").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "manifest.json").write_bytes(content)


def newer(path: Path) -> None:
    forge(path, manifest=lambda content: content.update(version=9))


BREAKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "rank-00001.safetensors has"),
    "flipped": (flip, "rank-00000.safetensors is damaged"),
    "file gone": (lambda path: (path / "rank-00001.safetensors").unlink(), "rank-00001.safetensors is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json is cut short"),
    "flipped manifest": (flip_manifest, "does not have the digest it says"),
    "nothing left": (lambda path: [one.unlink() for one in path.iterdir()], "has no manifest.json"),
    "newer version": (newer, "is of version 9"),
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    good: set[Path] = set()
    for step in (5, 10, 15):
        save(folder / "checkpoints", some_tensors(step), step=step, keep=3, good=good)
    (folder / "checkpoints" / "step-00000020.0123abcd.partial").mkdir()
    (folder / "checkpoints" / "step-00000020.0123abcd.partial" / "rank-00000.safetensors").write_bytes(b"half")
    return folder


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    status = main(["ckpt", "verify", str(path)])
    words = capsys.readouterr().out
    assert main(["ckpt", "verify", str(path), "--json"]) == status
    return status, words, json.loads(capsys.readouterr().out)


def test_a_run_is_good_when_all_its_checkpoints_are(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a save that was killed left behind is none."""
    status, words, found = verified(run_folder, capsys)
    assert status == 0 and words.count("is as it was written") == 3 and "3 checkpoints, none broken" in words and "partial" not in words
    assert found["good"] and found["problems"] == [] and found["newest_good"].endswith("step-00000015")
    assert [row["good"] for row in found["checkpoints"]] == [True] * 3


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("step", [15, 5], ids=["newest", "oldest"])
def test_one_broken_checkpoint_of_a_run_is_exit_1_and_named(
    kind: str, step: int, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "run"
    shutil.copytree(run_folder, here)
    broken = saved_in(here / "checkpoints", step)
    break_it, said = BREAKS[kind]
    break_it(broken)
    used = "step-00000010" if step == 15 else "step-00000015"
    status, words, found = verified(here, capsys)
    assert status == 1
    assert f"{broken} is broken" in words and said in words and f"1 of 3 broken; --resume would use {used}" in words
    assert not found["good"] and any(said in problem for problem in found["problems"]) and found["newest_good"].endswith(used)
    assert {row["path"]: row["good"] for row in found["checkpoints"]}[str(broken)] is False
    assert sum(row["good"] for row in found["checkpoints"]) == 2
    status, words, found = verified(saved_in(here / "checkpoints", 10), capsys)
    assert status == 0 and found["good"], "a good one is good whatever is beside it"
    if kind != "newer version":
        status, words, found = verified(broken, capsys)
        assert status == 1 and said in words and found["newest_good"] is None
    if step == 15 and kind not in ("flipped",):  # a flipped bit is seen by reading alone
        assert main(["ckpt", "show", str(here)]) == 0
        told = capsys.readouterr()
        assert "step        10" in told.out and "note: step-00000015 is passed over" in told.err


def test_a_run_without_a_good_checkpoint_says_so(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    for step, kind in ((5, "cut"), (10, "no manifest"), (15, "flipped")):
        BREAKS[kind][0](saved_in(tmp_path / "run" / "checkpoints", step))
    status, words, found = verified(tmp_path / "run", capsys)
    assert status == 1 and "3 of 3 broken; none is good" in words and found["newest_good"] is None and len(found["problems"]) == 3


# ---------------------------------------------------------------- forging

Change = Callable[[Any], Any]


def dumped(content: dict[str, Any]) -> bytes:
    """A manifest with the digest that it must have."""
    rest = ('",\n' + json.dumps({key: value for key, value in content.items() if key != "blake2b"}, indent=1)[2:] + "\n").encode()
    return layout._FIRST + layout._digest(rest) + rest


def parsed(raw: bytes) -> dict[str, Any]:
    """A header with the texts in it opened."""
    found: dict[str, Any] = json.loads(raw[8:])
    for name in ("boxes", "own", "extra"):
        found["__metadata__"][name] = json.loads(found["__metadata__"][name])
    return found


def header_bytes(header: Any, doubled: bool = False) -> bytes:
    header = copy.deepcopy(header)
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        for name in ("boxes", "own", "extra"):
            if name in header["__metadata__"]:
                header["__metadata__"][name] = json.dumps(header["__metadata__"][name])
    text = json.dumps(header)
    head = (twice(text) if doubled else text).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head


def twice(text: str) -> str:
    """Its first name once more, with nothing in it."""
    name, at = json.JSONDecoder().raw_decode(text, 1)
    return text[: at + 1] + " null, " + json.dumps(name) + ":" + text[at + 1 :]


def forge(path: Path, *, manifest: Change | None = None, header: Change | None = None, rank: int = 0, doubled: bool = False) -> None:
    """Change what a checkpoint says, and make every checksum and size anew."""
    content = json.loads((path / "manifest.json").read_bytes())
    if header is not None or (doubled and manifest is None):
        file = path / layout.file_name(rank)
        raw, length = file.read_bytes(), content["files"][file.name]["header_bytes"]
        found = parsed(raw[:length])
        found = (header(found) if header is not None else None) or found
        head = header_bytes(found, doubled)
        file.write_bytes(head + raw[length:])
        content["files"][file.name].update(bytes=len(head) + len(raw) - length, header_bytes=len(head), header_crc32=zlib.crc32(head))
    if manifest is not None:
        content = manifest(content) or content
    text = dumped(content)
    if doubled and manifest is not None:
        rest = text[len(layout._FIRST) + 2 * layout._DIGEST :]
        rest = rest.replace(b'"files": {', b'"files": {}, "files": {', 1)
        text = layout._FIRST + layout._digest(rest) + rest
    (path / "manifest.json").write_bytes(text)


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.two(self.norm(self.one(x)).relu()).square().mean()

def model():
    return Net()

def batch(micro_batch):
    return {"x": torch.randn(micro_batch, 6)}
"""


class Silent:
    def step(self, text: str, step: int) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass
class Bench:
    """A run that can take up any checkpoint, and one good checkpoint of it."""

    run: train.TrainingRun
    good: Path
    work: Path

    def copy(self) -> Path:
        place = self.work / "run" / "checkpoints" / self.good.name
        shutil.rmtree(self.work / "run", ignore_errors=True)
        shutil.copytree(self.good, place)
        return place

    def resumed(self, path: Path) -> int:
        """As `run --resume` does, and then one step of training. 2: refused, before anything was changed."""
        before = [p.detach().clone() for p in self.run.job.parts[0].parameters()]
        staged, why = self.run._staged(path)
        assert all(map(torch.equal, before, self.run.job.parts[0].parameters()))
        if staged is None:
            assert why
            return 2
        self.run._take(*staged)
        for group in self.run.job.optimizer.param_groups:
            group["lr"] = self.run.schedule.at(0)
        self.run.job.update(self.run.job.backward(self.run.feed.next()))
        return 0

    def statuses(self, path: Path, *, json: bool = False) -> dict[str, int]:
        """What every reader of a checkpoint makes of it, as exit codes; with `json` of the run that it is alone in."""
        out = self.work / "out"
        shutil.rmtree(out, ignore_errors=True)
        readers: dict[str, Callable[[], int]] = {
            "list": lambda: ckpt.listing(path, json=json, debug=False),
            "verify": lambda: ckpt.verify(self.work / "run" if json else path, json=json, debug=False),
            "show": lambda: ckpt.show(path, tensors=True, json=json, debug=False),
            "convert": lambda: ckpt.convert(path, out, to="hf", dtype=None, shard="5GB", json=False, debug=False),
            "resume": lambda: self.resumed(path),
            "init-from": lambda: bool(load_into(self.fresh(), path, may_miss=("",)).matched) and 0,
        }
        return {name: self.status(reader) for name, reader in readers.items()}

    def fresh(self) -> nn.Module:
        names: dict[str, Any] = {}
        exec(MODEL, names)
        made: nn.Module = names["model"]()
        return made

    def status(self, reader: Callable[[], int]) -> int:
        began = time.monotonic()
        try:
            return reader()
        except Exception as error:
            if not isinstance(error, UserError):
                raise
            return common.fail(error)
        finally:
            assert time.monotonic() - began < 10


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("forged")
    (folder / "net.py").write_text(MODEL)
    plan = Plan(model={"model": f"{folder / 'net.py'}:model"}, hardware="CPU", precision="fp32", micro_batch=4, optimizer="adamw-foreach")
    outcome = run(plan, {"steps": 2}, screen=Silent(), out=folder / "first", device="cpu")
    assert outcome.saved is not None
    ranks = members.start(plan, device="cpu")
    settings = RunSettings(steps=9, no_save=True)
    folders.begin(folder / "second", plan, settings)
    try:
        where = Folder(path=folder / "second")
        made = train._prepared(plan, settings, ranks, where, Control(ranks), Silent(), "")
        yield Bench(run=made, good=outcome.saved.path, work=folder / "work")
    finally:
        members.stop()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Memory for what is there, and a gigabyte."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_checkpoint_that_is_forged_to_say_the_same_is_read_by_all(bench: Bench) -> None:
    """The bench itself: what is refused below is refused for what it says."""
    path = bench.copy()
    forge(path, manifest=lambda content: None, header=lambda found: None)
    assert set(bench.statuses(path).values()) == {0}


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("where", ["manifest", "own", "boxes", "header"])
def test_what_is_nested_without_end_is_refused(where: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.copy()
    if where == "manifest":
        rest = f'",\n"x": {DEEP}}}\n'.encode()
        (path / "manifest.json").write_bytes(layout._FIRST + layout._digest(rest) + rest)
    else:
        file = path / layout.file_name(0)
        content = json.loads((path / "manifest.json").read_bytes())
        raw, length = file.read_bytes(), content["files"][file.name]["header_bytes"]
        found = json.loads(raw[8:length])
        if where != "header":
            found["__metadata__"][where] = DEEP
        text = json.dumps(found) if where != "header" else DEEP
        head = len(text).to_bytes(8, "little") + text.encode()
        file.write_bytes(head + raw[length:])
        content["files"][file.name].update(bytes=len(head) + len(raw) - length, header_bytes=len(head), header_crc32=zlib.crc32(head))
        (path / "manifest.json").write_bytes(dumped(content))
    found = bench.statuses(path)
    assert found["verify"] == 1 and found["resume"] == found["convert"] == found["init-from"] == 2


def nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [made]
    return made


VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**40, 2**63, 10**30, -(10**30), 1.5, 1e300, float("nan"), float("inf"), "", "0", "3",
    "x", "x" * 9999, "ff", "../../../etc/passwd", "/etc/passwd", "a\x1b[2J\u2028b", "\ud800",
    [], {}, [[]], [1], ["float32", 1], [True], [2**62, 2**62], [0, 2**62, 4], {"a": 1},
    {"$": "rank/x"}, {"{": []}, {"{": [["a"]]}, {"{": [[[], 1]]}, {"[": 1}, {"(": [1]}, {"[": [], "{": []}, nested(60), nested(250),
    {"values": {}, "names": 3}, [{"values": {"betas": "x"}}], {"x": {"exp_avg": [1]}}, "float32", "bool", "adamw", "NaN",
]  # fmt: skip


def spots(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += spots(item, (*here, name))
    return found


def mutated(value: Any, draw: random.Random) -> Any:
    """One to three things changed, taken out, doubled, renamed or put in; every level as likely as the others."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = [spot for spot in spots(value) if len(spot) < 40]
        if not places:
            return value
        depth = draw.choice(sorted({len(spot) for spot in places}))
        *above, last = draw.choice([spot for spot in places if len(spot) == depth])
        parent = value
        for step in above:
            parent = parent[step]
        kind = draw.random()
        if kind < 0.12:
            del parent[last]
        elif kind < 0.2 and isinstance(parent, dict):
            parent[str(draw.choice(VALUES))[:50]] = parent.pop(last)
        elif kind < 0.26:
            other = draw.choice(places)
            found = value
            for step in other:
                found = found[step] if isinstance(found, dict | list) and (isinstance(found, list) or step in found) else None
            parent[last] = copy.deepcopy(found)
        elif kind < 0.36 and isinstance(parent[last], int):
            parent[last] += draw.choice((-1, 1, 8, -8, 2**20))
        elif kind < 0.42 and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        elif kind < 0.48 and isinstance(parent[last], str):
            parent[last] = draw.choice((parent[last].upper(), parent[last] + "0", parent[last][:-1], f"+{parent[last]}", f" {parent[last]}"))
        else:
            parent[last] = copy.deepcopy(draw.choice(VALUES))
    return value


MORE = pytest.mark.slow(reason="four times as many more, drawn alike")


@pytest.mark.parametrize("first", [0, pytest.param(24, marks=MORE)])
def test_forged_manifests_are_refused_or_harmless(first: int, bench: Bench, little_memory: None, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(bench, "manifest", range(first, 5 * first or 24))


@pytest.mark.parametrize("first", [0, pytest.param(24, marks=MORE)])
def test_forged_headers_are_refused_or_harmless(first: int, bench: Bench, little_memory: None, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(bench, "header", range(first, 5 * first or 24))


def sweep(bench: Bench, what: str, seeds: range) -> None:
    refused = 0
    for seed in seeds:
        draw = random.Random(f"{what}/{seed}")
        path = bench.copy()
        forge(path, **{what: lambda found, draw=draw: mutated(found, draw)}, doubled=draw.random() < 0.05)
        try:
            found = bench.statuses(path, json=bool(seed % 2))
        except Exception as error:
            raise AssertionError(f"{what} {seed}: {type(error).__name__}: {error}") from error
        assert set(found.values()) <= {0, 1, 2}, f"{what} {seed}: {found}"
        assert found["list"] == 0
        assert found["verify"] == 0 or found["resume"], f"{what} {seed}: {found}"
        refused += any(found.values())
    assert refused > len(seeds) // 2


# ---------------------------------------------------------------- forged on purpose


def in_both(change: Callable[[str, Any], Any]) -> tuple[Change, Change]:
    """What a tensor is, changed alike in the manifest and in the header; None takes it out of both."""

    def manifest(content: Any) -> None:
        for name, (dtype, *shape) in list(content["tensors"].items()):
            made = change(name, (dtype, shape))
            content["tensors"].pop(name)
            if made is not None:
                content["tensors"][name] = [made[0], *made[1]]

    def header(found: Any) -> None:
        boxes = found["__metadata__"]["boxes"]
        at, order = 0, sorted((key for key in found if key != "__metadata__"), key=lambda key: found[key]["data_offsets"])
        for key in order:
            name, dtype, shape, *_, sums = boxes[key]
            made = change(name, (dtype, shape)) if name else (dtype, shape)
            if made is None:
                del boxes[key], found[key]
                continue
            length = layout.itemsize(made[0])
            for one in made[1]:
                length *= one
            boxes[key] = [name, made[0], made[1], [0] * len(made[1]), made[1], (sums or "0" * 8) if length else ""]
            found[key] = {"dtype": layout.CODES[made[0]], "shape": made[1], "data_offsets": [at, at + length]}
            at += length

    return manifest, header


def put(*path: Any, value: Any) -> Change:
    def work(content: Any) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return work


def own(part: str, change: Callable[[Any], Any]) -> Change:
    def work(found: Any) -> None:
        pairs = found["__metadata__"]["own"]["{"]
        pairs[:] = [[key, change(value) if key == part else value] for key, value in pairs]

    return work


def within(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda outline: {"{": [[key, value if key == name else inner] for key, inner in outline["{"]]}


FORGED: dict[str, dict[str, Any]] = {
    "mesh of other ranks": {"manifest": put("plan", "mesh", value={"dp_shard": 2})},
    "mesh of no ranks": {"manifest": put("plan", "mesh", value={"dp_shard": 0})},
    "an axis nobody knows": {"manifest": put("plan", "mesh", value={"zz": 1})},
    "no data": {"manifest": lambda content: content.pop("data") and None},
    "no digest": {"manifest": lambda content: content["data"].pop("digest") and None},
    "an epoch too far": {"manifest": put("data", "position", value=2**61)},
    "an epoch below": {"manifest": put("data", "epoch", value=-1)},
    "position as text": {"manifest": put("data", "position", value="8")},
    "parameters among the settings": {"manifest": put("optimizer", "groups", 0, "values", "params", value=[0])},
    "how it is computed among the settings": {"manifest": put("optimizer", "groups", 0, "values", "fused", value=True)},
    "betas of one": {"manifest": put("optimizer", "groups", 0, "values", "betas", value=[0.9])},
    "betas of text": {"manifest": put("optimizer", "groups", 0, "values", "betas", value=["0.9", "0.99"])},
    "eps not a number": {"manifest": put("optimizer", "groups", 0, "values", "eps", value=float("nan"))},
    "decay of lists": {"manifest": put("optimizer", "groups", 0, "values", "weight_decay", value=[])},
    "state that is a list": {"manifest": put("optimizer", "state", value={"one.weight": {"exp_avg": [1]}})},
    "state of no weight": {"manifest": put("optimizer", "state", value={"nobody": {"exp_avg": 1}})},
    "more files than ranks": {"manifest": put("world", value=2)},
    "a step below": {"manifest": put("step", value=-2)},
    "a file elsewhere": {"manifest": lambda content: content["files"].update({"../x": content["files"].pop("rank-00000.safetensors")})},
    "a rank of other digits": {"manifest": lambda content: content["files"].update(
        {"rank-٠٠٠٠٠.safetensors": content["files"].pop("rank-00000.safetensors")})},
    "a buffer that is a number": {"header": own("buffers", within("norm.running_mean", 3))},
    "buffers in a list": {"header": own("buffers", lambda outline: {"[": [1, 2]})},
    "a buffer of another's bytes": {"header": own("buffers", lambda outline: {"{": [[key, outline["{"][0][1]] for key, _ in outline["{"]]})},
    "moments left out": dict(zip(("manifest", "header"), in_both(lambda name, said: None if name.endswith("exp_avg") else said), strict=True)),
    "moments of one number": dict(zip(("manifest", "header"), in_both(
        lambda name, said: ("float32", []) if name.endswith("exp_avg") else said), strict=True)),
    "moments of integers": dict(zip(("manifest", "header"), in_both(
        lambda name, said: ("int32", said[1]) if name.endswith("exp_avg_sq") else said), strict=True)),
    "a step of truths": dict(zip(("manifest", "header"), in_both(
        lambda name, said: ("bool", said[1]) if name.endswith("step") else said), strict=True)),
    "a weight of another shape": dict(zip(("manifest", "header"), in_both(
        lambda name, said: (said[0], said[1][::-1]) if name == "model/one.weight" else said), strict=True)),
}  # fmt: skip
@pytest.mark.parametrize("kind", FORGED)
def test_what_is_forged_on_purpose_is_not_resumed(kind: str, bench: Bench, little_memory: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.copy()
    forge(path, **FORGED[kind])
    fix_sums(path)
    found = bench.statuses(path)
    assert set(found.values()) <= {0, 1, 2} and found["resume"] == 2, found


def fix_sums(path: Path) -> None:
    """Checksums of tensors that begin elsewhere now, and as many bytes as are listed."""
    content = json.loads((path / "manifest.json").read_bytes())
    name = "rank-00000.safetensors"
    if name not in content["files"] or not (path / name).exists():
        return
    raw, length = (path / name).read_bytes(), content["files"][name]["header_bytes"]
    found = parsed(raw[:length])
    end = max(entry["data_offsets"][1] for key, entry in found.items() if key != "__metadata__")
    data = (raw[length:] + b"\0" * end)[:end]
    for key, said in found["__metadata__"]["boxes"].items():
        first, last = found[key]["data_offsets"]
        said[5] = f"{zlib.crc32(data[first:last]):08x}" if last > first else ""
    head = header_bytes(found)
    (path / name).write_bytes(head + data)
    content["files"][name].update(bytes=len(head) + len(data), header_bytes=len(head), header_crc32=zlib.crc32(head))
    (path / "manifest.json").write_bytes(dumped(content))


def test_a_tensor_larger_than_its_files_asks_for_no_memory(bench: Bench, little_memory: None) -> None:
    """Before anything is read: a sparse file is as long as it likes, a header is not."""
    path = bench.copy()
    forge(path, manifest=put("tensors", "model/one.weight", value=["float32", 2**20, 2**20]))
    with pytest.raises(Damaged, match="is not in the manifest so"):
        Reader(store.look(path))
    path = bench.copy()
    size = 2**41
    forge(path, manifest=lambda content: content["files"]["rank-00000.safetensors"].update(bytes=size, header_bytes=size))
    os.truncate(path / "rank-00000.safetensors", size)
    with pytest.raises(Damaged, match="has a header of"):
        store.look(path)


# ---------------------------------------------------------------- safetensors of others


def test_forged_safetensors_are_refused_or_harmless(tmp_path: Path, little_memory: None) -> None:
    header = {
        "__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}, "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
    }  # fmt: skip
    path, refused = tmp_path / "a.safetensors", 0

    def write(content: Any, *, doubled: bool = False) -> None:
        text = json.dumps(content)
        raw = (twice(text) if doubled else text).encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(40))

    write(header)
    assert sum(offer.read().numel() for offer in offered(path).values()) == 11
    for seed in range(300):
        draw = random.Random(f"theirs/{seed}")
        write(mutated(header, draw), doubled=draw.random() < 0.05)
        try:
            for offer in offered(path).values():
                offer.read()
        except FileFormatError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{seed}: {type(error).__name__}: {error}\n{path.read_bytes()[:500]!r}") from error
    assert refused > 150


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(FileFormatError, match="is not a plain file"):
        offered(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text('{"weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(FileFormatError, match="cannot be read"):
        offered(tmp_path / "b")
