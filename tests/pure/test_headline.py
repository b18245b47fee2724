"""Answers of a few headline questions, so that a change of the code that moves one is seen in the difference.

    python -m tests.pure.test_headline        writes them anew; look at the difference, and say in the changelog why it moved
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretell import api

HELD = Path(__file__).resolve().parents[1] / "data" / "headline.json"
QUESTIONS = [
    {"model": "llama3-8b", "hardware": "H100:8", "micro_batch": 1, "seq": 8192},
    {"model": "llama3-8b", "hardware": "H200:8", "micro_batch": 1, "seq": 8192},
    {"model": "llama3-8b", "hardware": "H100:8,memory=70GiB", "micro_batch": 1, "seq": 8192},
    {"model": "gpt2", "hardware": "H200", "micro_batch": 16},
    {"model": "gpt2", "hardware": "T4", "micro_batch": 4},
]
SAME_BYTES, SAME_SECONDS = 1e-4, 1e-3


def answer(question: dict[str, Any]) -> dict[str, Any]:
    found = api.fit(**question, advice_seconds=0)
    assert found.time is not None
    memory = {name: getattr(found.memory, f"{name}_bytes") for name in ("allocated", "reserved", "device", "margin")}
    return {"verdict": found.verdict, **memory, "seconds": found.time.step_seconds}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: " on ".join((one["model"], one["hardware"])))
def test_headline_answers_do_not_move(question: dict[str, Any]) -> None:
    expected, today = json.loads(HELD.read_text())[json.dumps(question)], answer(question)
    why = "another answer than before; if that is meant: python -m tests.pure.test_headline, and say why in the changelog"
    assert today["verdict"] == expected["verdict"], why
    for name in ("allocated", "reserved", "device", "margin"):
        assert today[name] == pytest.approx(expected[name], abs=SAME_BYTES * expected["device"]), f"{name}: {why}"
    assert today["seconds"] == pytest.approx(expected["seconds"], rel=SAME_SECONDS), why


if __name__ == "__main__":
    HELD.write_text(json.dumps({json.dumps(one): answer(one) for one in QUESTIONS}, indent=2) + "\n")
    sys.exit(0)
