"""Completion as a shell asks for it: bash runs the script that is installed; the others ask with the variables that theirs set."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foretell import zoo
from foretell.cli import complete
from foretell.hardware import catalog

ROOT = Path(__file__).resolve().parents[2]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With a `foretell` of this checkout on the path, and torch out of reach: completion must not wait for it."""
    programs, blocked = folder / "programs", folder / "blocked"
    programs.mkdir(exist_ok=True)
    blocked.mkdir(exist_ok=True)
    (blocked / "torch.py").write_text("raise ImportError('completion imports torch')\n")
    command = programs / "foretell"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m foretell "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{blocked}:{ROOT}", "HOME": str(folder), **more}


def output(words: list[str], folder: Path, **more: str) -> str:
    return subprocess.run(words, env=environment(folder, **more), cwd=folder, capture_output=True, text=True, check=True).stdout


ASK = """eval "$(_FORETELL_COMPLETE=source_bash foretell)"
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"; [[ "$line" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=(); _foretell_completion foretell; echo "${COMPREPLY[@]}"
done"""


@pytest.mark.slow(reason="a process for each of ten lines; two other shells complete the same below")
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_models_and_devices(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "notes.txt").touch()
    asked = {
        "foretell wat": ["watch"],
        "foretell fit gpt2-": [name for name in zoo.names() if name.startswith("gpt2-")],
        "foretell fit mi": [*(name for name in zoo.names() if name.startswith("mi")), "mine.py"],
        "foretell fit notes": [],
        "foretell fit gpt2 --micro": ["--micro-batch"],
        "foretell fit gpt2 --on mi300": [name for name in catalogued() if name.lower().startswith("mi300")],
        "foretell plan gpt2 --on 2x8xmi300x": [f"2x8x{name}" for name in catalogued() if name.lower().startswith("mi300x")],
        "foretell plan adv": ["advise"],
        "foretell plan show --sch": ["--schema"],
        "foretell run ckpt ver": ["verify"],
    }
    said = subprocess.run(["bash", "--norc", "-c", ASK], input="".join(f"{line}\n" for line in asked), env=environment(tmp_path), cwd=tmp_path,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert said.stderr == ""
    assert dict(zip(asked, (line.split() for line in said.stdout.splitlines()), strict=True)) == asked
    assert asked["foretell fit gpt2-"] and asked["foretell fit gpt2 --on mi300"], "there is something to complete"


def catalogued() -> list[str]:
    return sorted({name for device in catalog.devices() for name in (*catalog.aliases(device), device.name)})


def test_zsh_and_fish_complete_the_same(tmp_path: Path) -> None:
    typed = {"_TYPER_COMPLETE_ARGS": "foretell plan show --sch"}
    assert "--schema" in output(["foretell"], tmp_path, _FORETELL_COMPLETE="complete_zsh", **typed)
    fish = {"_FORETELL_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": "foretell fit gpt2-m"}
    assert output(["foretell"], tmp_path, **fish).split() == ["gpt2-medium"]


def test_it_is_installed_where_the_shell_looks(tmp_path: Path) -> None:
    output(["foretell", "--install-completion", "bash"], tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    script = tmp_path / ".bash_completions" / "foretell.sh"
    assert "_FORETELL_COMPLETE=complete_bash" in script.read_text() and str(script) in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"COMP_WORDS": "foretell plan show --s", "COMP_CWORD": "3"}, {"COMP_WORDS": "foretell 'plan show' --s", "COMP_CWORD": "2"}),
        ({"COMP_WORDS": "foretell plan sh", "COMP_CWORD": "2"}, {}),
        ({"COMP_WORDS": "foretell show ", "COMP_CWORD": "2"}, {"COMP_WORDS": "foretell 'plan show' "}),
        ({"COMP_WORDS": "foretell fit 'open", "COMP_CWORD": "2"}, {}),
        ({"_TYPER_COMPLETE_ARGS": "foretell run box "}, {"_TYPER_COMPLETE_ARGS": "foretell 'run box' "}),
        ({}, {}),
    ],
)
def test_two_words_are_one_command_once_both_are_typed(given: dict[str, str], left: dict[str, str]) -> None:
    found = dict(given)
    complete.join_words(found)
    assert found == {**given, **left}


@pytest.mark.parametrize(("start", "some"), [("", "auto"), ("8xrtx-40", "8xRTX-4090"), ("H100,a1", "H100,A100"), ("2x4xh2", "2x4xH200")])
def test_a_device_is_found_after_what_stands_before_it(start: str, some: str) -> None:
    found = complete.devices(start)
    assert some in found and all(name.lower().startswith(start.lower()) for name in found)
    assert complete.devices("nothing-like-it") == []
