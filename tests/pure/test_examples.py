"""Every example is short, says first what it shows, and is on the page whose commands tests/pure/test_docs.py runs."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from foretell.hardware import parse
from tests.pure import test_docs as docs

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/examples.md"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_file())
LINES = 40
LONGER = ("train_own.py",)
"""Its class, its data and its three functions are all a user has to write."""


def test_the_page_runs_every_example() -> None:
    text = docs.TEXTS[PAGE]
    ran = [one.command for block in docs.blocks(PAGE, text) if not block.mark for one in docs.examples(block)]
    assert [name for name in EXAMPLES if not any(re.search(rf"\bexamples/{re.escape(name)}\b", command) for command in ran)] == []
    assert [name for name in EXAMPLES if f"](../examples/{name})" not in text] == []
    assert PAGE in docs.TO_RUN


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.endswith(".json")])
def test_an_example_is_short_and_says_first_what_it_shows(name: str) -> None:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES or name in LONGER
    if name.endswith(".py"):
        told = ast.get_docstring(ast.parse(text)) or ""
    else:
        told = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
    commands = [line.strip() for line in told.splitlines() if line.startswith("    ")]
    assert any(f"examples/{name}" in line for line in commands), "the command that runs it"
    assert name in LONGER or re.search(r"\bprints?\b", told, re.IGNORECASE), "what it prints"
    assert {line: said for line in commands if line.startswith("foretell ") and (said := docs.wrong_in_command(line))} == {}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name.endswith((".toml", ".json"))])
def test_a_hardware_file_is_what_it_says(name: str) -> None:
    path = ROOT / "examples" / name
    data = tomllib.loads(path.read_text()) if name.endswith(".toml") else json.loads(path.read_text())
    cluster = parse(str(path))
    wanted = len(data["groups"]) if "groups" in data else data["nodes"] * data["devices_per_node"]
    assert sum(part.nodes * part.devices_per_node for part in cluster.parts) == wanted
