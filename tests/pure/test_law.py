"""The Step Law's batch as one that devices can share, and what is said of it; by the search and by the command."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.search.solve.choose import choose
from foretell.search.solve.planned_batch import FAR, NEAR, BatchAdvice, advice, batch_for
from foretell.search.solve.step_law import step_law
from foretell.search.space.constraints import SearchConstraints
from foretell.trace.load.model import Source

SHAPES = {"embedding": ((50000, 1000), "float32"), "blocks.0.w": ((1000, 1000), "float32"), "blocks.1.w": ((1000, 1000), "float32")}


def told(tokens: float = 10e9, **more: object) -> BatchAdvice:
    found = advice(SHAPES, ("blocks.0", "blocks.1"), tokens, 1000, **{"devices": 8, "fixed": {}, **more})  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("devices", [1, 8, 12, 64, 512])
@pytest.mark.parametrize("tokens", [2e9, 10e9, 100e9, 1e12])
def test_a_batch_is_near_the_law_and_shared_by_as_many_ranks_as_it_can(devices: int, tokens: float) -> None:
    wanted = step_law(1e9, tokens).batch_tokens / 4096
    found = batch_for(wanted * 4096, 4096, devices)
    shared = max(ranks for ranks in range(1, devices + 1) if devices % ranks == 0 and found % ranks == 0)
    able = [ranks for ranks in range(1, devices + 1) if devices % ranks == 0 and ranks <= wanted * (1 + NEAR)]
    assert shared >= max(able), "no rank is left out that could have a sample"
    plain = max(1, round(wanted / max(able))) * max(able)
    assert abs(log(found / wanted)) <= max(log(1 + NEAR), abs(log(plain / wanted))) + 1e-9


def test_a_batch_keeps_given_degrees_and_micro_batch() -> None:
    wanted = 270.4 * 4096
    assert batch_for(wanted, 4096, 16, {"tp": 4}) == 256
    assert batch_for(wanted, 4096, 24, {"dp_shard": 6, "dp_replicate": 1}) % 6 == 0
    assert batch_for(wanted, 4096, 8, {}, micro_batch=5) % 40 == 0
    assert batch_for(wanted, 4096, 8, {}) == 256, "a tenth away at most, and a power of two for each rank"


def test_the_law_counts_blocks_alone_and_says_what_is_used() -> None:
    found = told(followed=True)
    law = step_law(2_000_000, 10e9)
    assert found.law == law and found.followed and found.used == found.chosen and found.chosen % 8 == 0
    assert f"{law.learning_rate:.3g}" in found.lines()[0] and f"{found.chosen:,} samples" in found.lines()[1]
    assert any("below the" in line for line in found.lines()), "two million parameters are fewer than the law was fitted to"
    assert found.steps == round(10e9 / (found.chosen * 1000))
    said = json.loads(json.dumps(found.to_json()))
    assert said["batch_samples"] == said["used_samples"] and said["provenance"] == "assumed" and said["beyond_its_runs"]


def test_a_given_batch_is_kept_and_the_laws_is_told_beside_it() -> None:
    found = told(global_batch=16, followed=True)
    assert found.used == 16 and not found.followed
    assert f"--global-batch {found.chosen}" in found.lines()[1] and abs(found.off or 0.0) > FAR
    assert any("its own batch" in line for line in found.lines())
    assert not any("its own batch" in line for line in told(global_batch=found.chosen).lines())


def test_samples_that_are_no_tokens_have_no_law() -> None:
    assert advice(SHAPES, ("blocks.0",), 1e9, None, devices=1, fixed={}) is None
    with pytest.raises(UserError, match="no rows of tokens"):
        advice(SHAPES, ("blocks.0",), 1e9, None, devices=1, fixed={}, followed=True)
    with pytest.raises(UserError, match="without the length of the run"):
        choose(Source(model="gpt-tiny"), parse("H100"), "H100", SearchConstraints(), by_law=True)


@pytest.mark.slow(reason="a search through the command line; the law itself is tested above")
def test_the_command_takes_the_batch_and_writes_it_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    code = main(["plan", "gpt-tiny", "--on", "H100:2", "--tokens", "1e8", "--step-law", "--quick", "--out", str(out), "--json"])
    said = json.loads(capsys.readouterr().out)
    law, plan = said["step_law"], json.loads(out.read_text())
    ranks = plan["mesh"].get("dp_shard", 1) * plan["mesh"].get("dp_replicate", 1)
    assert code == 0 and law["followed"] and plan["micro_batch"] * plan.get("accumulate", 1) * ranks == law["used_samples"]
    assert any(note.startswith("Step Law: learning rate") for note in plan["notes"])
    assert any("below the" in note for note in plan["notes"])
