"""Builds the wheel and the sdist, checks them, and makes a release ready to upload. It uploads nothing.

    python .ci/release.py wheel      build into dist/ and check what was built          (`make wheel`)
    python .ci/release.py release    the repository is ready, the same, sums, signature (`make release`)

Needs hatchling (the `dev` extra); twine is used if it is there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
NEEDED = ("Metadata-Version", "Name", "Version", "Summary", "License-Expression", "Requires-Python", "Description-Content-Type")
SUMS = "SHA256SUMS"


# ---------------------------------------------------------------------------------------------- the repository


def version_of(root: Path) -> str:
    """What foretell/__init__.py says, the one place that does."""
    found = VERSION.search((root / "foretell" / "__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("foretell/__init__.py has no line `__version__ = \"...\"`")
    return found[1]


def sections(changelog: str) -> list[tuple[str, str, str]]:
    """(version, date, text) of each section, in the order of the file."""
    heads = list(SECTION.finditer(changelog))
    ends = [head.start() for head in heads[1:]] + [len(changelog)]
    return [(head[1], head[2] or "", changelog[head.end() : end].strip()) for head, end in zip(heads, ends, strict=True)]


def wrong_in_changelog(changelog: str, version: str) -> list[str]:
    """What keeps this changelog from being that of a release of `version`."""
    found = sections(changelog)
    if not found or found[0][0] != "Unreleased":
        return ["CHANGELOG.md: the first section is not [Unreleased]"]
    told = [f"CHANGELOG.md: {len(found[0][2].splitlines())} lines under [Unreleased]; move them under [{version}]"] if found[0][2] else []
    if len(found) < 2 or found[1][0] != version:
        newest = found[1][0] if len(found) > 1 else "none"
        return [*told, f"CHANGELOG.md: the newest version is {newest}, that of the package {version}; add `## [{version}] - YYYY-MM-DD`"]
    if not DATE.fullmatch(found[1][1]):
        told.append(f"CHANGELOG.md: [{version}] has no date; write `## [{version}] - YYYY-MM-DD`")
    return told


def wrong_in_repository(root: Path) -> list[str]:
    """What must be done before a release; empty where nothing is left."""
    version = version_of(root)
    told = wrong_in_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if changed := git(root, "status", "--porcelain").splitlines():
        told.append(f"{len(changed)} files are not committed, the first: {changed[0].strip()}")
    if git(root, "tag", "--list", f"v{version}").strip():
        told.append(f"the tag v{version} exists; raise __version__ in foretell/__init__.py")
    return told


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------------------------------- building


def build(root: Path, out: Path, *targets: str) -> list[Path]:
    """The archives that hatchling makes of the project in `root`: its own process, as an installer's is."""
    before = set(out.iterdir()) if out.is_dir() else set()
    words = [word for target in targets for word in ("-t", target)]
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(out), *words], cwd=root, check=True, stdout=subprocess.DEVNULL)
    return sorted(set(out.iterdir()) - before)


def unpacked(sdist: Path, folder: Path) -> Path:
    """The project inside an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def metadata_of(archive: Path) -> Message:
    """METADATA of a wheel, PKG-INFO of an sdist."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(wheel.read(name).decode())
    with tarfile.open(archive) as sdist:
        opened = sdist.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        return Parser().parsestr(opened.read().decode() if opened else "")


def wrong_in_metadata(archive: Path, version: str) -> list[str]:
    """Fields that an index would refuse or show wrongly."""
    found = metadata_of(archive)
    told = [f"{archive.name}: {name} is missing" for name in NEEDED if not found[name]]
    if found["Version"] != version:
        told.append(f"{archive.name}: version {found['Version']}, that of the package is {version}")
    if not str(found.get_payload()).strip():
        told.append(f"{archive.name}: no description")
    return told


def built(root: Path, out: Path) -> list[Path]:
    """A wheel and an sdist of `root`, checked: twice the same wheel, the second one from the sdist."""
    shutil.rmtree(out, ignore_errors=True)
    sdist, wheel = sorted(build(root, out, "sdist", "wheel"), key=lambda path: path.suffix == ".whl")
    told = [line for one in (sdist, wheel) for line in wrong_in_metadata(one, version_of(root))]
    again = build(unpacked(sdist, out / "unpacked"), out / "again", "wheel")[0]
    if again.read_bytes() != wheel.read_bytes():
        told.append(f"{sdist.name} builds another wheel than the repository does")
    for folder in ("unpacked", "again"):
        shutil.rmtree(out / folder)
    if importlib.util.find_spec("twine"):
        checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], capture_output=True, text=True)
        told += [f"twine: {checked.stdout.strip()}"] if checked.returncode else []
    stop_if(told)
    return [sdist, wheel]


# ---------------------------------------------------------------------------------------------- a release


def write_sums(archives: list[Path]) -> Path:
    """What `sha256sum --check SHA256SUMS` reads."""
    sums = archives[0].parent / SUMS
    sums.write_text("".join(f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in archives))
    return sums


def sign(root: Path, sums: Path) -> str:
    """Sign the sums with the key that git signs with; say how where there is none."""
    key = subprocess.run(["git", "-C", str(root), "config", "user.signingkey"], capture_output=True, text=True).stdout.strip()
    if not key or not shutil.which("gpg"):
        return f"not signed. With a GPG key: git config user.signingkey KEY; with sigstore: python -m sigstore sign {sums.name} *.whl *.tar.gz"
    subprocess.run(["gpg", "--batch", "--yes", "--local-user", key, "--armor", "--detach-sign", str(sums)], check=True)
    return f"signed with {key}: {sums.name}.asc"


def stop_if(told: list[str]) -> None:
    if told:
        raise SystemExit("\n".join(["not ready:", *(f"- {line}" for line in told)]))


def main(words: list[str]) -> int:
    if words not in (["wheel"], ["release"]):
        print(__doc__, file=sys.stderr)
        return 2
    if importlib.util.find_spec("hatchling") is None:
        raise SystemExit("hatchling is not installed; try: pip install -e '.[dev]'")
    releasing = words == ["release"]
    if releasing:
        stop_if(wrong_in_repository(ROOT))
    archives = built(ROOT, ROOT / "dist")
    print("\n".join(f"built {one.relative_to(ROOT)}  {one.stat().st_size / 1e6:.1f} MB" for one in archives))
    if releasing:
        checked = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "package", "tests/pure/test_package.py"], cwd=ROOT)
        stop_if(["tests/pure/test_package.py fails"] if checked.returncode else [])
        sums = write_sums(archives)
        version = version_of(ROOT)
        print(f"wrote dist/{SUMS}; {sign(ROOT, sums)}")
        print(f"nothing was uploaded. What is left: git tag -s v{version} && git push origin v{version}, then: twine upload dist/*.whl dist/*.tar.gz")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
