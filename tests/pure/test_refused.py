"""What nobody asked for and a model refuses gives way to what it takes; what was asked for never does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foretell import api
from foretell.api.refused import settled
from foretell.errors import ModelError

FOLDER = Path(__file__).resolve().parents[1] / "data" / "userfiles"
USUAL: dict[str, Any] = {"precision": None, "micro_batch": None}


@dataclass(frozen=True)
class Answered:
    asked: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)


def model(*needs: tuple[str, Any]) -> Any:
    """Takes nothing but these, and says so of one after another; counts how often it was tried."""
    tried: list[dict[str, Any]] = []

    def attempt(asked: dict[str, Any]) -> Answered:
        tried.append(asked)
        for name, value in needs:
            if asked[name] != value:
                error = ModelError(f"one step of it failed: RuntimeError: no {name}", "say it")
                error.change = {name: value}
                raise error
        return Answered(asked)

    return attempt, tried


def test_two_settings_give_way_one_after_another_and_are_told(cache_dir: Path) -> None:
    attempt, tried = model(("precision", "fp32"), ("micro_batch", 2))
    found, asked, told = settled(attempt, USUAL, {"of": "it"}, True)
    assert found.asked == asked == {"precision": "fp32", "micro_batch": 2} and len(tried) == 3
    assert told == (
        "precision fp32, since the usual one is refused: RuntimeError: no precision",
        "micro-batch 2, since the usual one is refused: RuntimeError: no micro_batch",
    )
    assert settled(attempt, USUAL, {"of": "it"}, True) == (found, asked, told) and len(tried) == 4, "kept"


def test_what_was_asked_for_stays_and_the_first_refusal_is_raised(cache_dir: Path) -> None:
    attempt, tried = model(("precision", "fp32"), ("micro_batch", 2))
    with pytest.raises(ModelError, match="no precision"):
        settled(attempt, {"precision": None, "micro_batch": 1}, {"of": "it"}, True)
    assert len(tried) == 2


def test_a_change_that_does_not_help_ends(cache_dir: Path) -> None:
    attempt, tried = model(("precision", "tf32"), ("precision", "fp32"))
    with pytest.raises(ModelError, match="no precision"):
        settled(attempt, USUAL, {"of": "it"}, False)
    assert len(tried) == 2


def test_files_that_take_no_bf16_and_no_single_sample_have_an_answer(cache_dir: Path) -> None:
    two = api.fit(f"{FOLDER}/takes_two.py:build", hardware="H100")
    assert two.model["micro_batch"] == 2 and two.assumptions[0].startswith("micro-batch 2, since")
    with pytest.raises(ModelError, match="more than 1 value per channel"):
        api.fit(f"{FOLDER}/takes_two.py:build", hardware="H100", micro_batch=1)
    full = api.fit(f"{FOLDER}/takes_lstsq.py:build", hardware="H100")
    assert full.model["recipe"]["precision"] == "fp32" and full.assumptions[0].startswith("precision fp32, since")
    with pytest.raises(ModelError, match="same dtype"):
        api.fit(f"{FOLDER}/takes_lstsq.py:build", hardware="H100", precision="bf16-mixed")
