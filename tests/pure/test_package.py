"""What a user installs: the wheel and the sdist, built once, looked into, and the wheel run where no checkout is in reach.

The clean environment is a new venv that has the wheel alone; torch and the like are found by a path to the site-packages that
the tests run with. A path in a `.pth` file reads no further `.pth` file, so an editable foretell there is not seen.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import foretell
from foretell.cli import main

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "foretell"
ASKED = ("fit", "gpt2", "--on", "H100", "--json")
REQUIRED = {"torch", "numpy", "networkx", "typer", "rich", "nvidia-ml-py"}

pytestmark = [
    pytest.mark.package,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling, of the dev extra, is not installed"),
]


def release_script() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = release_script()


class Built(NamedTuple):
    sdist: Path
    wheel: Path


class Installed(NamedTuple):
    python: Path
    command: Path
    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    sdist, wheel = sorted(release.build(ROOT, out / "tree", "sdist", "wheel"), key=lambda path: path.suffix == ".whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", "--no-compile",
                    "--disable-pip-version-check", built.wheel], check=True)  # fmt: skip
    theirs = Path(subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                                 check=True, capture_output=True, text=True).stdout.strip())  # fmt: skip
    ours = dict.fromkeys(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
    (theirs / "torch_and_the_like.pth").write_text("".join(f"{path}\n" for path in ours))
    (folder / "empty").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FORETELL", "PYTEST", "VIRTUAL_ENV"))}
    environment = {**kept, "FORETELL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return Installed(python, python.with_name("foretell"), folder / "empty", environment)


def run(installed: Installed, *words: str | Path) -> str:
    done = subprocess.run(words, cwd=installed.folder, env=installed.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of_the_package() -> dict[str, bytes]:
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in PACKAGE.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip


def in_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def in_sdist(sdist: Path) -> dict[str, bytes]:
    with tarfile.open(sdist) as archive:
        opened = {one.name.partition("/")[2]: archive.extractfile(one) for one in archive.getmembers() if one.isfile()}
        return {name: stream.read() for name, stream in opened.items() if stream}


# ---------------------------------------------------------------------------------------------- what is inside


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    found = {name: data for name, data in in_wheel(built.wheel).items() if ".dist-info/" not in name}
    wanted = files_of_the_package()
    assert sorted(found) == sorted(wanted)
    assert [name for name, data in found.items() if data != wanted[name]] == []
    assert {".toml", ".json", ".jsonl", ".gz", ".js", ".css", ".typed", ".py"} <= {Path(name).suffix for name in found}


def test_the_sdist_has_the_package_and_what_its_tests_and_pages_need(built: Built) -> None:
    found = in_sdist(built.sdist)
    assert {name: data for name, data in found.items() if name.startswith("foretell/")} == files_of_the_package()
    wanted = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "mkdocs.yml", "constraints.txt",
              "pyproject.toml", "PKG-INFO", ".ci/run", ".ci/release.py", "tests/conftest.py", "tests/pure/test_package.py", "docs/questions.md",
              "docs/decisions/0008-one-path.md", "examples/train_own.py", "benchmarks/results/README.md", "hub/README.md",
              ".github/workflows/ci.yml"}  # fmt: skip
    assert wanted <= set(found)
    assert [name for name in found if re.search(r"__pycache__|\.py[co]$|_cache/|^dist/|^site/|\.egg-info|^\.venv|^\.git/", name)] == []


@pytest.mark.slow(reason="a build more; `make release` refuses a wheel that the sdist builds otherwise")
def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    (again,) = release.build(release.unpacked(built.sdist, tmp_path / "unpacked"), tmp_path / "again", "wheel")
    assert again.name == built.wheel.name
    assert in_wheel(again) == in_wheel(built.wheel)


def test_the_record_is_that_of_the_files(built: Built) -> None:
    """An installer checks sizes and hashes; licences travel in the metadata."""
    found = in_wheel(built.wheel)
    record = next(name for name in found if name.endswith("/RECORD"))
    for name, kept, size in csv.reader(io.StringIO(found[record].decode())):
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(found[name]).digest()).rstrip(b"=").decode()
            assert (kept, int(size)) == (f"sha256={digest}", len(found[name])), name
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in found)


# ---------------------------------------------------------------------------------------------- metadata


def test_the_version_is_said_in_one_place(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    newest = next(name for name, *_ in release.sections((ROOT / "CHANGELOG.md").read_text()) if name != "Unreleased")
    told = [release.metadata_of(one)["Version"] for one in built]
    assert [*told, newest] == [foretell.__version__] * 3 and release.version_of(ROOT) == foretell.__version__
    assert built.wheel.name == f"foretell-{foretell.__version__}-py3-none-any.whl"


def test_metadata_says_what_is_needed_and_nothing_more(built: Built) -> None:
    found = release.metadata_of(built.wheel)
    assert release.wrong_in_metadata(built.wheel, foretell.__version__) == release.wrong_in_metadata(built.sdist, foretell.__version__) == []
    needs = [line for line in found.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert {re.split(r"[<>=!~ ;]", line)[0] for line in needs} == REQUIRED
    assert [line for line in needs if "<" in line or "==" in line] == [], "a torch that is there must be left alone"
    assert found["Name"] == "foretell" and found["Requires-Python"] == ">=3.11" and found["License-Expression"] == "Apache-2.0"
    assert {"hf", "timm", "torchvision", "tensorboard", "wandb", "yaml", "docs", "dev"} == set(found.get_all("Provides-Extra") or [])
    assert found["Description-Content-Type"] == "text/markdown" and str(found.get_payload()).startswith("# foretell")


def test_metadata_that_is_wrong_is_seen(built: Built, tmp_path: Path) -> None:
    assert any("0.0.9" in line for line in release.wrong_in_metadata(built.wheel, "0.0.9"))
    spoiled = tmp_path / built.wheel.name
    with zipfile.ZipFile(spoiled, "w") as archive:
        archive.writestr("foretell-0.dist-info/METADATA", "Metadata-Version: 2.4\nName: foretell\nVersion: 0\n\n")
    told = release.wrong_in_metadata(spoiled, "0")
    assert any("Summary" in line for line in told) and any("no description" in line for line in told)


# ---------------------------------------------------------------------------------------------- installed


@pytest.fixture
def of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(ASKED) == 0
    return json.loads(out.getvalue())


@pytest.mark.slow(reason="an environment of its own; `make check-wheel` and a release run it too")
def test_the_installed_command_answers_as_the_checkout_does(installed: Installed, of_the_checkout: dict[str, Any]) -> None:
    answer = json.loads(run(installed, installed.command, *ASKED))
    assert answer == of_the_checkout
    assert answer["verdict"] == "fits" and answer["memory"]["device_bytes"] > 2**30
    assert list(installed.folder.iterdir()) == [], "nothing is left in the user's folder"


@pytest.mark.slow(reason="an environment of its own; `make check-wheel` and a release run it too")
def test_only_the_wheel_is_imported(installed: Installed) -> None:
    lines = ("import sys, foretell, foretell.api, foretell.cli.app, importlib.metadata as m; foretell.cli.app.made(), foretell.fit",
             "print(m.version('foretell'), *(f.__file__ for n, f in sys.modules.items() if n.split('.')[0] == 'foretell'))")  # fmt: skip
    version, *files = run(installed, installed.python, "-c", "\n".join(lines)).split()
    assert version == foretell.__version__ and len(files) > 50
    venv = installed.python.parents[1].resolve()
    assert [name for name in files if not Path(name).resolve().is_relative_to(venv)] == []


@pytest.mark.slow(reason="an environment of its own; `make check-wheel` and a release run it too")
def test_the_module_and_the_command_are_the_same(installed: Installed) -> None:
    told = run(installed, installed.command, "--version")
    assert told == run(installed, installed.python, "-m", "foretell", "--version") and told.startswith(f"foretell {foretell.__version__} ")
    assert "H100-SXM-80GB" in run(installed, installed.command, "hardware", "H100")
