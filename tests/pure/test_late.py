"""Options are read as typer reads them, and most commands need no adapter of pydantic's for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer import _coercion
from typer.models import OptionInfo

from foretell.cli import late

ROOT = Path(__file__).resolve().parents[2]
VALUES = (
    None, "", "a word", "ü", "\udcff", "8", "-8", "08", " 8", "8 ", "1_000", "8.0", "8.5", "-0.25", "1e12", "nan", "9" * 15, "9" * 30, "٣", 8, 8.5,
    True, b"8", [], (), ["a", "8"], ("a",), ["ü"], ["\udcff"], [8],
)  # fmt: skip


def read(make: Any, annotation: Any, value: Any, **more: Any) -> Any:
    param = SimpleNamespace(multiple=annotation == list[str], nargs=1)
    try:
        found = make(_coercion.resolve_type_descriptor(annotation, OptionInfo(**more))).coerce(value, param=param, ctx=None)
    except typer.BadParameter as error:
        return error.message
    return type(found), repr(found)


@pytest.mark.parametrize("annotation", [str, int, float, bool, Path, list[str]])
@pytest.mark.parametrize("more", [{}, {"min": 3, "max": 8}, {"parser": lambda value: int(str(value), 16)}])
def test_a_value_is_the_one_that_typer_makes_of_it(annotation: Any, more: dict[str, Any]) -> None:
    made = []

    def make(descriptor: Any) -> Any:
        made.append(descriptor)
        return _coercion.build_runtime_param(descriptor)

    for value in VALUES:
        ours = read(lambda descriptor: late.Late(make, descriptor), annotation, value, **more)
        assert ours == read(_coercion.build_runtime_param, annotation, value, **more), value
    assert len(made) < len(VALUES), "not for what is not given"


def test_a_command_with_plain_options_imports_no_pydantic() -> None:
    words = ["fit", "no-such-model", "--on", "H100", "--micro-batch", "8", "--clip", "1.0"]
    code = f"import sys\nfrom foretell.cli import main\nassert main({words}) == 2\nprint('pydantic' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("more", [{}, {"exists": True}, {"file_okay": False}, {"dir_okay": False}, {"writable": True}, {"resolve_path": True}])
def test_a_path_is_the_one_that_typer_makes_of_it(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "nowhere").symlink_to("none")
    (tmp_path / "denied").touch(0)
    for value in ("file", "folder", "none", "nowhere", "denied", "file/below", "-", ".", "./file", "a b", "a\0b", "a\nb", "~", "/"):
        ours = read(lambda descriptor: late.Late(_coercion.build_runtime_param, descriptor), Path, value, **more)
        assert ours == read(_coercion.build_runtime_param, Path, value, **more), value


def test_a_run_imports_no_pydantic(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    words = ["run", str(tmp_path / "none.json"), "--device", "cpu", "--max-restarts", "2", "--save-every", "5", *out, "--no-standby"]
    code = f"import sys\nfrom foretell.cli import main\nassert main({words}) == 2\nprint('pydantic' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "False", done.stderr
