"""What `make release` refuses, tried on a small repository; sums and signature of what it makes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pure.test_package import release

GOOD = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n\n- a thing\n\n## [1.1.0] - 2026-01-01\n\n- older\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that is ready to be released as 1.2.0; git has the settings of this test alone."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "gitconfig").write_text("[user]\nname = A\nemail = a@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    root = tmp_path / "repository"
    (root / "foretell").mkdir(parents=True)
    (root / "foretell" / "__init__.py").write_text('"""A package."""\n\n__version__ = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(GOOD)
    for words in (("init", "-q"), ("add", "foretell", "CHANGELOG.md"), ("commit", "-qm", "first"), ("tag", "v1.1.0")):
        release.git(root, *words)
    return root


def test_a_repository_that_is_ready_is_let_through(repository: Path) -> None:
    assert release.wrong_in_repository(repository) == []


def test_what_is_not_committed_or_tagged_already_is_refused(repository: Path) -> None:
    (repository / "new.py").touch()
    assert ["new.py" in line for line in release.wrong_in_repository(repository)] == [True]
    (repository / "new.py").unlink()
    release.git(repository, "tag", "v1.2.0")
    assert ["v1.2.0 exists" in line for line in release.wrong_in_repository(repository)] == [True]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[Unreleased]\n", "[Unreleased]\n\n- not moved\n", "1 lines under [Unreleased]"),
        ("[1.2.0] - 2026-01-31", "[1.2.0]", "[1.2.0] has no date"),
        ("[1.2.0] - 2026-01-31", "[1.2.0] - soon", "[1.2.0] has no date"),
        ("## [1.2.0] - 2026-01-31\n\n### Added\n\n- a thing\n\n", "", "the newest version is 1.1.0"),
        ("## [Unreleased]\n\n", "", "not [Unreleased]"),
    ],
)
def test_a_changelog_that_is_not_that_of_the_version_is_refused(old: str, new: str, said: str) -> None:
    assert GOOD.count(old) == 1
    assert any(said in line for line in release.wrong_in_changelog(GOOD.replace(old, new), "1.2.0"))
    assert release.wrong_in_changelog(GOOD, "1.2.0") == []


def test_a_version_that_is_not_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "foretell").mkdir()
    (tmp_path / "foretell" / "__init__.py").touch()
    with pytest.raises(SystemExit, match="__version__"):
        release.version_of(tmp_path)


def test_what_is_wrong_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    release.stop_if([])
    with pytest.raises(SystemExit, match="not ready:\n- this\n- that"):
        release.stop_if(["this", "that"])
    assert release.main(["upload"]) == 2 and "uploads nothing" in capsys.readouterr().err


def test_sums_are_those_that_sha256sum_checks(repository: Path, tmp_path: Path) -> None:
    archives = [tmp_path / "a.whl", tmp_path / "a.tar.gz"]
    for number, path in enumerate(archives):
        path.write_bytes(bytes([number]) * 1000)
    sums = release.write_sums(archives)
    assert sums.read_text().splitlines()[1] == f"{hashlib.sha256(bytes([1]) * 1000).hexdigest()}  a.tar.gz"
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--quiet", sums.name], cwd=tmp_path, check=True)
    told = release.sign(repository, sums)
    assert told.startswith("not signed") and "sigstore" in told and "user.signingkey" in told


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_a_key_of_git_s_signs_the_sums(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "g"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("GNUPGHOME", str(home))
    made = subprocess.run(["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "a@example.org", "ed25519", "sign", "never"],
                          capture_output=True, text=True)  # fmt: skip
    if made.returncode:
        pytest.skip(f"gpg makes no key here: {made.stderr.strip()}")
    release.git(repository, "config", "user.signingkey", "a@example.org")
    (tmp_path / "a.whl").write_bytes(b"x")
    sums = release.write_sums([tmp_path / "a.whl"])
    try:
        assert release.sign(repository, sums).startswith("signed with a@example.org")
        subprocess.run(["gpg", "--verify", f"{sums}.asc", str(sums)], check=True, capture_output=True)
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], capture_output=True)
