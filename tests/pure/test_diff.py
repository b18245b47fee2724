"""Two revisions of a repository: each is answered with its own files, growth beyond a bound fails, and the user's tree stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell import api
from foretell.api import revisions
from foretell.cli import common, main, names
from foretell.cli.diff import ask, file
from foretell.quantities import FITS, NO, Holder, Prediction
from foretell.report.diff import bounds, judge, markdown

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn
from parts.sizes import WIDTH

def build():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

def batch(model, micro_batch):
    return {"input": torch.randn(micro_batch, model[0].in_features), "target": torch.randn(micro_batch, 4)}

def loss(output, batch):
    return nn.functional.mse_loss(output, batch["target"])
"""
TRAIN = """
import torch
from mine import build, batch, loss

model = build().cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = {name: one.cuda() for name, one in batch(model, 8).items()}
for _ in range(3):
    loss(model(data["input"]), data).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


class Repo:
    """A little repository with a model, and a module beside it that says how wide it is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        git(root, "init", "-q", "-b", "main")
        self.write("mine.py", MODEL)
        self.write("parts/__init__.py", "")
        self.commit(256)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def commit(self, width: int | None = None, message: str = "a change") -> str:
        if width:
            self.write("parts/sizes.py", f"WIDTH = {width}\n")
        git(self.root, "add", "--all")
        git(self.root, "commit", "-q", "--allow-empty", "-m", message)
        return git(self.root, "rev-parse", "HEAD").strip()

    def state(self) -> dict[str, Any]:
        """All that must not change: status, branch, worktrees, and every file there is, those of git included."""
        said = [git(self.root, *words.split()) for words in ("status --porcelain --ignored", "branch -avv", "worktree list", "stash list")]
        files = {str(path.relative_to(self.root)): hashlib.sha256(path.read_bytes()).hexdigest()
                 for path in sorted(self.root.rglob("*")) if path.is_file()}  # fmt: skip
        return {"said": said, "files": files}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files, which must be empty afterwards."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    yield scratch
    assert [path.name for path in scratch.iterdir() if path.name.startswith("foretell-diff")] == []


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repo:
    found = Repo(tmp_path / "repo")
    monkeypatch.chdir(found.root)
    return found


Asked = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def asked(capfd: pytest.CaptureFixture[str]) -> Asked:
    """`foretell diff ... --json`, checked against its schema."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        before, after = (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, ())
        status = main(["diff", *before, "--json", *after])
        found = json.loads(capfd.readouterr().out)
        if "diff" in found:
            jsonschema.Draft202012Validator(judge.schema()).validate(found["diff"])
            assert found["diff"]["status"] == status
        return status, found

    return call


def by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch, model: str = "mine.py:build", **options: Any) -> Prediction:
    """What `fit` says in a checkout that git made."""
    with monkeypatch.context() as there:
        there.chdir(folder)
        return api.fit(model, hardware="H100", cache=False, **options)


def row(model: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in model["rows"] if one["name"] == name)


# ---------------------------------------------------------------- growth


def test_growth_is_that_of_fit_in_each_checkout(repo: Repo, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the helper module differs: each revision has its own, and the numbers are those of `fit` in a clone of it."""
    repo.commit(512)
    page = tmp_path / "comment.md"
    before = repo.state()
    status, found = asked("main~1", "main", "--on", "H100", "mine.py:build", "--micro-batch", "4", "--markdown", str(page))
    assert repo.state() == before
    assert status == 1
    (model,) = found["diff"]["models"]
    answers = []
    for number, commit in enumerate(("main~1", "main")):
        git(tmp_path, "clone", "-q", str(repo.root), f"clone{number}")
        git(tmp_path / f"clone{number}", "checkout", "-q", git(repo.root, "rev-parse", commit).strip())
        answers.append(by_hand(tmp_path / f"clone{number}", monkeypatch, micro_batch=4))
    old, new = answers
    assert new.memory.allocated_bytes > old.memory.allocated_bytes
    for side, one in (("base", old), ("head", new)):
        assert one.time is not None
        said = [one.memory.allocated_bytes, one.memory.device_bytes, one.time.step_seconds, one.parameters]
        assert [row(model, name)[side] for name in ("peak memory", "device memory", "step time", "parameters")] == said
    assert model["verdict"] == "grown" and not row(model, "peak memory")["ok"] and not row(model, "parameters")["ok"]
    assert {one["name"]: one["head"] - one["base"] for one in model["modules"]} == {"0": 512 * 513 - 256 * 257, "2": 4 * 256}
    first, last = old.memory.categories, new.memory.categories
    assert {one["name"] for one in model["categories"]} == {name for name in {*first, *last} if first.get(name, 0) != last.get(name, 0)}
    assert sum(one["head"] - one["base"] for one in model["categories"]) == row(model, "peak memory")["change"]
    text = page.read_text()
    assert text.startswith(markdown.MARK) and "❌ grown" in text and "`mine.py:build --micro-batch 4`" in text and "<details>" in text


def test_equal_code_is_equal_and_bounds_decide(repo: Repo, asked: Asked, capfd: pytest.CaptureFixture[str]) -> None:
    repo.write("README.md", "words")
    repo.commit()
    status, found = asked("HEAD~1", "HEAD", "--on", "H100", "--model", "mine.py:build")
    (model,) = found["diff"]["models"]
    assert status == 0 and model["verdict"] == "within" and not model["categories"] and not model["modules"] and not model["tensors"]
    assert [one["change"] for one in model["rows"]] == [0, 0, 0, 0, 0]
    status, found = asked("HEAD", "--on", "H100", "mine.py:build")
    assert status == 0 and [one["change"] for one in found["diff"]["models"][0]["rows"]] == [0, 0, 0, 0, 0]
    repo.commit(257)
    words = ["diff", "HEAD~1", "HEAD", "--on", "H100", "mine.py:build", "--max-memory", "+1MiB"]
    assert main(words) == 1, "more parameters"
    assert "GROWN  mine.py:build on H100" in capfd.readouterr().out
    assert main([*words, "--max-parameters", "none"]) == 0
    assert "bounds      growth of memory +1MiB, step +5 %, parameters none" in capfd.readouterr().out


def test_the_working_tree_is_as_it_is(repo: Repo, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not committed, not even added; asked from a folder below, with the tree itself on the import path, which BASE must not see."""
    repo.write("models/deep.py", "from extra import WIDTH\n" + MODEL.replace("from parts.sizes import WIDTH", ""))
    repo.write("extra.py", "WIDTH = 64\n")
    repo.commit()
    repo.write("extra.py", "WIDTH = 128\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repo.root), str(ROOT)]))
    monkeypatch.chdir(repo.root / "models")
    monkeypatch.setenv("GIT_DIR", ".git")  # as git has it for a hook
    monkeypatch.setenv("GIT_INDEX_FILE", ".git/index")
    before = repo.state()
    for words in (("HEAD",), ("HEAD", ".")):
        status, found = asked(*words, "deep.py:build", "--on", "H100", "--max-memory", "none")
        (model,) = found["diff"]["models"]
        assert status == 1 and found["diff"]["head"]["working_tree"]
        assert (row(model, "parameters")["base"], row(model, "parameters")["head"]) == (64 * 65 + 65 * 4, 128 * 129 + 129 * 4)
    assert repo.state() == before


def test_a_file_that_the_model_reads_counts(repo: Repo, asked: Asked) -> None:
    """Not a module: nothing of an answer that `fit` stored stands for it."""
    repo.write("mine.py", MODEL.replace("from parts.sizes import WIDTH", "import json\nWIDTH = json.load(open('width.json'))"))
    repo.write("width.json", "64")
    repo.commit()
    assert main(["fit", "mine.py:build", "--on", "H100", "--json"]) == 0
    repo.write("width.json", "128")
    status, found = asked("HEAD", "--on", "H100", "mine.py:build")
    (model,) = found["diff"]["models"]
    assert status == 1 and (row(model, "parameters")["base"], row(model, "parameters")["head"]) == (64 * 65 + 65 * 4, 128 * 129 + 129 * 4)


def test_a_copy_that_imports_the_tree_is_refused(repo: Repo, asked: Asked) -> None:
    repo.write("mine.py", f"import sys\nsys.path.insert(0, {str(repo.root / 'parts')!r})\nimport sizes\n{MODEL}")
    repo.commit()
    status, found = asked("HEAD", "HEAD", "mine.py:build", "--on", "H100")
    (model,) = found["diff"]["models"]
    assert status == 2 and model["head_problem"].endswith("imported from the working tree: parts/sizes.py")


@pytest.mark.slow(reason="two more checkouts; the working tree on the import path is above")
def test_a_package_that_is_installed_as_a_link_is_each_revision_s_own(
    repo: Repo, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.write("bench/model.py", MODEL.replace("parts.sizes", "widget"))
    for width in (64, 128):
        repo.write("src/widget/__init__.py", f"WIDTH = {width}\n")
        repo.commit()
    about = tmp_path / "installed" / "widget-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: widget\nVersion: 1\n")
    (about / "direct_url.json").write_text(json.dumps({"url": repo.root.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(about.parent)
    status, found = asked("HEAD~1", "HEAD", "--on", "H100", "bench/model.py:build")
    (model,) = found["diff"]["models"]
    assert status == 1 and (row(model, "parameters")["base"], row(model, "parameters")["head"]) == (64 * 65 + 65 * 4, 128 * 129 + 129 * 4)


@pytest.mark.slow(reason="two checkouts more; scripts are followed in test_scripts.py")
def test_a_script_is_followed_in_each_revision(repo: Repo, asked: Asked) -> None:
    repo.write("train.py", TRAIN)
    repo.commit()
    repo.commit(512)
    before = repo.state()
    status, found = asked("HEAD~1", "HEAD", "--on", "H100", "--", "python", "train.py")
    assert repo.state() == before
    (model,) = found["diff"]["models"]
    assert status == 1 and model["model"] == "python train.py"
    assert (row(model, "parameters")["base"], row(model, "parameters")["head"]) == (256 * 257 + 257 * 4, 512 * 513 + 513 * 4)
    assert {one["name"]: one["head"] - one["base"] for one in model["modules"]} == {"0": 512 * 513 - 256 * 257, "2": 4 * 256}
    assert row(model, "peak memory")["change"] > 4 * 4 * (512 * 513 - 256 * 257) * 0.9, "weights, gradients and two states"


# ---------------------------------------------------------------- models that are not there, and broken ones


def test_new_and_removed_models(repo: Repo, asked: Asked) -> None:
    repo.write("other.py", MODEL)
    repo.write("mine.py", MODEL + "\ndef second():\n    return build()\n")
    repo.commit()
    status, found = asked("HEAD~1", "HEAD", "--on", "H100", "--model", "other.py:build", "--model", "mine.py:second")
    assert status == 0 and [one["verdict"] for one in found["diff"]["models"]] == ["new", "new"]
    assert all(one["base"] is None and one["head"] for model in found["diff"]["models"] for one in model["rows"])
    status, found = asked("HEAD", "HEAD~1", "--on", "H100", "other.py:build")
    (model,) = found["diff"]["models"]
    assert status == 2 and model["verdict"] == "broken" and "there is no file other.py" in model["head_problem"] and "renamed" in model["remedy"]
    status, found = asked("HEAD", "HEAD~1", "--on", "H100", "nowhere.py:build")
    assert status == 2 and "in both revisions" in found["error"]["message"]


@pytest.mark.slow(reason="waits for a time limit; code that loops is ended in test_trace_child.py")
def test_code_that_raises_or_loops(repo: Repo, asked: Asked, capfd: pytest.CaptureFixture[str]) -> None:
    repo.write("mine.py", MODEL.replace("return nn.Sequential(", "raise ValueError('no such width')\n    return nn.Sequential("))
    raises = repo.commit()
    before = repo.state()
    status, found = asked("HEAD~1", "HEAD", "--on", "H100", "mine.py:build")
    (model,) = found["diff"]["models"]
    assert status == 2 and model["verdict"] == "broken"
    assert "ValueError: no such width (mine.py:7, in build)" in model["head_problem"], "a path from the repository, not of a temporary folder"
    assert main(["diff", raises, "HEAD~1", "--on", "H100", "mine.py:build"]) == 0, "a mended model is not held against who mends it"
    assert "not compared" in capfd.readouterr().out
    repo.write("mine.py", "while True:\n    pass\n" + MODEL)
    repo.commit()
    began = time.monotonic()
    status, found = asked("HEAD~2", "HEAD", "--on", "H100", "mine.py:build", "--time-limit", "4")
    (model,) = found["diff"]["models"]
    assert status == 2 and "took longer than the time limit of 4 s" in model["head_problem"] and time.monotonic() - began < 120
    git(repo.root, "reset", "-q", "--hard", raises)
    assert repo.state()["files"].keys() >= before["files"].keys()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow(reason="another signal"))])
def test_an_interruption_leaves_nothing_behind(number: int, repo: Repo, places: Path) -> None:
    repo.write("mine.py", "while True:\n    pass\n" + MODEL)
    repo.commit()
    before = repo.state()
    words = [sys.executable, "-m", "foretell", "diff", "HEAD", "HEAD~1", "--on", "H100", "mine.py:build"]
    started = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    assert re.match(r"runs code of .*0-base/mine.py", started.stderr.readline())
    assert [path for path in places.iterdir() if path.name.startswith("foretell-diff")]
    started.send_signal(number)
    started.communicate(timeout=60)
    assert started.returncode == 130
    assert [path for path in places.iterdir() if path.name.startswith("foretell-diff")] == []
    assert repo.state() == before


def test_a_folder_of_a_process_that_was_killed_goes_with_the_next(repo: Repo, places: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = places / f"foretell-diff-{ended.pid}-x"
    (left / "0-base").mkdir(parents=True)
    inside = revisions.repository()
    with revisions.checked_out(inside, [revisions.revision(inside, "HEAD")]) as (copy,):
        assert not left.exists() and (copy.folder / "mine.py").read_text() == MODEL


# ---------------------------------------------------------------- what is asked


WRONG = {
    "no base": (["--on", "H100", "mine.py:build"], "no BASE"),
    "unknown revision": (["nope", "--on", "H100", "mine.py:build"], "'nope' is not a revision of"),
    "an option for a revision": (["HEAD", "--output=x", "--on", "H100", "mine.py:build"], "No such option: --output"),
    "three revisions": (["a", "b", "c", "--on", "H100", "mine.py:build"], "3 revisions"),
    "no model": (["HEAD", "--on", "H100"], "foretell-diff.toml"),
    "no hardware": (["HEAD", "mine.py:build"], "no hardware"),
    "unknown hardware": (["HEAD", "mine.py:build", "--on", "H1000X"], "H1000X"),
    "a name of the zoo": (["HEAD", "--model", "gpt2", "--on", "H100"], "'gpt2' is not a file of the repository"),
    "outside": (["HEAD", "../other.py:build", "--on", "H100"], "is not in the repository"),
    "both": (["HEAD", "mine.py:build", "--on", "H100", "--", "python", "train.py"], "a model (mine.py:build) and a script"),
    "memory without a unit": (["HEAD", "mine.py:build", "--on", "H100", "--max-memory", "5"], "--max-memory '5' is not a bound"),
    "seconds of memory": (["HEAD", "mine.py:build", "--on", "H100", "--max-memory", "+3ms"], "--max-memory"),
    "less": (["HEAD", "mine.py:build", "--on", "H100", "--max-step", "-5%"], "--max-step"),
    "bytes of parameters": (["HEAD", "mine.py:build", "--on", "H100", "--max-parameters", "1MiB"], "--max-parameters"),
    "whole runs": (["HEAD", "mine.py:build", "--on", "H100", "--tokens", "1B"], "--tokens is not for two revisions"),
    "max": (["HEAD", "mine.py:build", "--on", "H100", "--micro-batch", "max"], "--micro-batch max"),
    "a size": (["HEAD", "mine.py:build", "--on", "H100", "--image", "large"], "--image"),
    "beside a script": (["HEAD", "--on", "H100", "--optimizer", "sgd", "--", "python", "train.py"], "--optimizer is not for a script"),
    "a page in no folder": (["HEAD", "mine.py:build", "--on", "H100", "--markdown", "no/where.md"], "--markdown 'no/where.md'"),
    "two pages": (["HEAD", "mine.py:build", "--on", "H100", "--markdown"], "--json and --markdown both print"),
    "no such file": (["HEAD", "--config", "none.toml"], "there is no file"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_clear_error(case: str, repo: Repo, asked: Asked) -> None:
    words, said = WRONG[case]
    status, found = asked(*words)
    assert status == 2 and said in found["error"]["message"] + found["error"]["remedy"]


def test_other_folders_and_clones(repo: Repo, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.commit(512)
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo.root}", "shallow")
    monkeypatch.chdir(tmp_path / "shallow")
    status, found = asked("HEAD~1", "HEAD", "mine.py:build", "--on", "H100")
    assert status == 2 and "shallow clone" in found["error"]["message"] and "fetch-depth: 0" in found["error"]["remedy"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    status, found = asked("HEAD", "mine.py:build", "--on", "H100")
    assert status == 2 and "is not in a git repository" in found["error"]["message"]


FILE = """
on = "H100"

[bounds]
parameters = "none"

[[model]]
model = "mine.py:build"
micro-batch = 2
bounds = { memory = "+1GiB" }

[[model]]
model = "mine.py:build"
optimizer = "sgd"
on = ["H100", "A100"]
"""


@pytest.mark.slow(reason="asks in a file what the tests above ask one by one; wrong files are told below")
def test_a_file_asks_for_all(repo: Repo, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.write("foretell-diff.toml", FILE)
    repo.commit(1024)
    monkeypatch.chdir(repo.root / "parts")
    status, found = asked("HEAD~1", "HEAD")
    assert status == 1 and found["diff"]["bounds"] == {"memory": "+2%", "step": "+5%", "parameters": "none"}
    assert [(one["on"], one["options"], one["verdict"]) for one in found["diff"]["models"]] == [
        ("H100", "--micro-batch 2", "within"), ("H100", "--optimizer sgd", "grown"), ("A100", "--optimizer sgd", "grown"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('on = "H100"\n\n', "", "says no hardware"), ("[bounds]", "[limits]", "'limits'"), ('"none"', '"lots"', "the bound parameters 'lots'"),
        ('parameters = "none"', 'speed = "+1%"', "speed"), ("micro-batch", "micro-bath", "--micro-bath"),
        ('model = "mine.py:build"\nm', "m", "no 'model'"),
        ("[[model]]", "[[modell]]", "'modell'"), ("on = ", "on ", "is not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_file_says_where(old: str, new: str, said: str, repo: Repo, asked: Asked) -> None:
    assert old in FILE
    repo.write("foretell-diff.toml", FILE.replace(old, new))
    status, found = asked("HEAD")
    assert status == 2 and said in found["error"]["message"]


def test_the_page_s_file_is_one_that_is_read(tmp_path: Path) -> None:
    text = re.search(r"```toml\n(.*?)```", (ROOT / "docs/diff.md").read_text(), re.DOTALL)
    assert text is not None
    path = tmp_path / file.NAME
    path.write_text(text[1])
    found = file.questions(path, file.read(path), None, file.bounds_of(path, file.read(path), {}))
    assert {one.hardware for one in found} == {"H100", "A100"} and any(one.script for one in found) and any(one.options for one in found)


# ---------------------------------------------------------------- what git has elsewhere


def test_submodules_and_lfs_are_told(repo: Repo, tmp_path: Path) -> None:
    library = Repo(tmp_path / "library")
    git(repo.root, "submodule", "--quiet", "add", str(library.root), "vendor/library")
    repo.write(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
    repo.commit()
    git(repo.root, "config", "filter.lfs.smudge", "no-such-program smudge")
    git(repo.root, "config", "filter.lfs.required", "true")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12\n"
    blob = subprocess.run(["git", "hash-object", "-w", "--stdin"], cwd=repo.root, input=pointer, text=True, capture_output=True, check=True).stdout
    git(repo.root, "update-index", "--add", "--cacheinfo", f"100644,{blob.strip()},table.bin")
    git(repo.root, "commit", "-q", "-m", "a table")
    inside = revisions.repository()
    before = repo.state()
    with revisions.checked_out(inside, [revisions.revision(inside, "HEAD")]) as (copy,):
        assert (copy.folder / "vendor/library/mine.py").read_text() == MODEL, "a submodule that is here comes with it"
        assert (copy.folder / "table.bin").read_text() == pointer
        (note,) = copy.notes
    assert "table.bin" in note and "git lfs pull" in note
    assert repo.state() == before
    git(repo.root, "submodule", "--quiet", "deinit", "--force", "--all")
    with revisions.checked_out(inside, [revisions.revision(inside, "HEAD")]) as (copy,):
        assert any("vendor/library: submodule not here" in note for note in copy.notes)


# ---------------------------------------------------------------- bounds, verdicts and pages


@pytest.mark.parametrize(
    ("what", "text", "base", "most"),
    [
        ("memory", "+2%", 1000, 1020), ("memory", "2 %", 1000, 1020), ("memory", "+200MiB", 5, 5 + 200 * 2**20), ("memory", "+1GB", 5, 5 + 10**9),
        ("step", "+3ms", 0.5, 0.503), ("step", "+50us", 0.5, 0.50005), ("step", "+0.5s", 0.5, 1.0), ("parameters", "+1M", 7, 7 + 10**6),
        ("parameters", "+12", 7, 19), ("parameters", "+0%", 10**12, 10**12), ("parameters", "+10%", 0, 0),
    ],
)  # fmt: skip
def test_a_bound_holds_up_to_its_end(what: str, text: str, base: float, most: float) -> None:
    bound = bounds.parse(what, text)
    over = most + (1 if what != "step" else 1e-6)
    assert bound.allows(base, most) and bound.allows(base, base / 2) and not bound.allows(base, over)
    assert bounds.parse(what, "None").allows(base, 1e30)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Prediction:
    return api.fit("gpt-tiny", hardware="H100", cache=False)


def compared(base: judge.RevisionAnswer, head: judge.RevisionAnswer) -> judge.RevisionDiff:
    limits = bounds.all_of({})
    one = judge.compared("a|b`c<i>.py:build", "H100", "", base, head, limits, ("main", "HEAD"))
    pair = [judge.Revision(name=name, commit="0" * 40) for name in ("main", "HEAD")]
    return judge.RevisionDiff(base=pair[0], head=pair[1], models=(one,), bounds=limits)


def test_what_no_longer_fits_fails_within_any_bound(answer: Prediction) -> None:
    old, new = (judge.RevisionAnswer(prediction=replace(answer, verdict=verdict)) for verdict in (FITS, NO))
    assert compared(old, new).status == 1 and compared(new, old).status == 0 and compared(new, new).status == 0
    assert "no longer fits" in markdown.render(compared(old, new))


def test_a_device_of_unknown_speed_is_compared_without_seconds(answer: Prediction) -> None:
    plain = judge.RevisionAnswer(prediction=replace(answer, time=None))
    found = compared(plain, plain)
    assert found.status == 0 and "not known" in markdown.render(found) + str(found.models[0].rows)


def test_tensors_that_are_new_are_told_and_what_a_list_leaves_out_is_a_limit(answer: Prediction) -> None:
    def with_tensors(*sizes: tuple[str, int]) -> judge.RevisionAnswer:
        holders = tuple(Holder(name=name, category="activations", bytes=size) for name, size in sizes)
        return judge.RevisionAnswer(prediction=replace(answer, memory=replace(answer.memory, holders=holders, categories={"activations": 1000})))

    whole = compared(with_tensors(("a", 600), ("b", 400)), with_tensors(("a", 700), ("c", 500), ("b", 400))).models[0].tensors
    assert [(one.name, one.base, one.head, one.at_most) for one in whole] == [("c", 0, 500, False), ("a", 600, 700, False)]
    cut = compared(with_tensors(("a", 600), ("b", 300)), with_tensors(("c", 500), ("a", 600))).models[0].tensors
    assert [(one.name, one.base, one.head, one.at_most) for one in cut] == [("c", 300, 500, True)]


def test_names_from_a_pull_request_are_only_text(answer: Prediction) -> None:
    """Pipes end no cell, nothing is a mention, a link or markup."""
    hostile = "x|y` @everyone [a](http://b) <img src=x>\n| fake | row |"
    memory = replace(answer.memory, holders=(Holder(name=hostile, category="logits", bytes=10**9),))
    new = judge.RevisionAnswer(prediction=replace(answer, memory=memory))
    text = markdown.render(compared(judge.RevisionAnswer(prediction=answer), new))
    text += markdown.render(compared(judge.RevisionAnswer(prediction=answer), judge.RevisionAnswer(problem=hostile, detail=f"</pre>{hostile}")))
    outside = re.sub(r"`[^`\n]*`", "", re.sub(r"<(pre|code)>.*?</\1>", "", text, flags=re.DOTALL))
    assert "@everyone" in text and "fake" in text
    for mark in ("@everyone", "](http", "<img", "</pre>", "<i>"):
        assert mark not in outside
    assert "<img" not in re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)[1]  # type: ignore[index]
    tables = [line for line in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} <= {6, 9}


def test_both_spellings_and_a_help_of_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pages = []
    for words in (["diff", "--help"], ["compare", "diff", "--help"]):
        assert main(words) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] and len(pages[0].splitlines()) <= 24 and pages[0].count("  foretell diff ") == 2
    assert main(["compare", "--help"]) == 0 and "foretell compare diff" in capsys.readouterr().out
    assert names.note(["diff"]) == "", "a spelling that stays"
    assert common.without_script(names.joined(["diff", "main", "--", "python", "x.py", "--on"])) == ["compare diff", "main"]


def test_the_workflow_is_one_that_runs() -> None:
    """Its commands parse, its token may read code and write comments and nothing else, and the summary is always written."""
    text = (ROOT / "examples/github/foretell.yml").read_text()
    flow = pytest.importorskip("yaml").safe_load(text)
    assert flow[True] == {"pull_request": None} and flow["permissions"] == {"contents": "read"}
    (job,) = flow["jobs"].values()
    assert job["permissions"] == {"contents": "read", "pull-requests": "write"} and "{ secrets" not in text and "pull_request_target" not in text
    steps = {step.get("name") or step["uses"].partition("@")[0]: step for step in job["steps"]}
    assert steps["actions/checkout"]["with"] == {"fetch-depth": 0, "persist-credentials": False}
    runs = [step["run"] for step in job["steps"] if "run" in step]
    (line,) = [line.strip() for run in runs for line in run.splitlines() if line.strip().startswith("foretell ")]
    assert ask.split(line.split()[2:]) == (["HEAD^1", "HEAD", "foretell.md"], ["--markdown"]), "nothing is left for fit"
    assert steps["Summary"]["if"] == "always()" and "GITHUB_STEP_SUMMARY" in steps["Summary"]["run"]
    assert "head.repo.full_name == github.repository" in steps["Comment"]["if"] and markdown.MARK in steps["Comment"]["run"]

