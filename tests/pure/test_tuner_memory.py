"""What is remembered of kernels: shown where tasks are alike, valued by what came of it, in a file of the user's alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.tune.generate.memory import DRAFT, LEAST_ALIKE, REFINE, SHOWN, TunerMemory, alike

NORM, OTHER = ("aten.mul", "aten.mean", "aten.rsqrt"), ("aten.mm", "aten.relu")


def test_what_is_alike_and_worked_is_shown() -> None:
    memory = TunerMemory("cpu")
    memory.keep(DRAFT, NORM, "slow", 1.1)
    memory.keep(DRAFT, NORM, "fast", 3.0)
    memory.keep(DRAFT, NORM, "middling", 2.0)
    memory.keep(DRAFT, OTHER, "of something else", 4.0)
    memory.keep(REFINE, NORM, "of another stage", 4.0)
    assert [one.text for one in memory.recalled(DRAFT, NORM)] == ["fast", "middling"][:SHOWN]
    assert memory.recalled(DRAFT, ("aten.conv",)) == [] and alike(NORM, OTHER) < LEAST_ALIKE


def test_a_value_follows_what_came_of_showing_it() -> None:
    """Twenty rounds that came to nothing, and the other one is shown first."""
    memory = TunerMemory("cpu")
    memory.keep(DRAFT, NORM, "promising", 3.0)
    memory.keep(DRAFT, NORM, "plain", 1.5)
    for _ in range(20):
        memory.learned(memory.recalled(DRAFT, NORM)[:1], 0.0 if memory.recalled(DRAFT, NORM)[0].text == "promising" else 1.5)
    assert [one.text for one in memory.recalled(DRAFT, NORM)] == ["plain", "promising"]
    assert memory.items[(DRAFT, "plain")].uses > 10


def test_two_sessions_remember_together(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    first, second = TunerMemory("cpu", path), TunerMemory("cpu", path)
    first.keep(DRAFT, NORM, "one", 2.0)
    second.keep(DRAFT, NORM, "two", 3.0)
    first.save()
    second.save()
    assert {one.text for one in TunerMemory("cpu", path).recalled(DRAFT, NORM)} == {"one", "two"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


HEAD = json.dumps({"foretell-memory": 1, "backend": "cpu"})
ITEM = {"stage": DRAFT, "ops": ["a"], "text": "x", "step": "", "speedup": 1.0, "value": 1.0, "uses": 0}


@pytest.mark.parametrize("text", [
    "{}", "[]", "\xff", json.dumps({"foretell-memory": 1, "backend": "cuda"}), HEAD + "\n[]", HEAD + "\n" + "[" * 100_000,
    HEAD + "\n" + json.dumps({**ITEM, "stage": "other"}), HEAD + "\n" + json.dumps({**ITEM, "value": float("nan")}),
    HEAD + "\n" + json.dumps({**ITEM, "text": 3}), HEAD + "\n" + json.dumps({**ITEM, "ops": "aten.mul"}),
])  # fmt: skip
def test_a_hostile_memory_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_bytes(text.encode("latin-1") + b"\n")
    path.chmod(0o600)
    with pytest.raises(UserError, match=r"memory\.jsonl") as caught:
        TunerMemory("cpu", path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["link", "pipe", "shared"])
def test_a_file_of_another_kind_is_one_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(HEAD + "\n")
        path.chmod(0o666)
    with pytest.raises(UserError):
        TunerMemory("cpu", path)
    assert not (tmp_path / "elsewhere").exists()
