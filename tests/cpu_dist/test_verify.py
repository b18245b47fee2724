"""`foretell verify` from outside: a right plan, a wrong model, a plan that does not run; and states of ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from foretell.cli import main
from foretell.plan import file
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.trace.load.model import Source

GPT = Source(model="gpt-tiny", overrides={"layers": 4, "dim": 16, "heads": 2, "vocab_size": 32, "context": 8})
OWN = """
import os
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.wrong = wrong

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if self.wrong and os.environ.get("WORLD_SIZE") == "2":
            x = x * 1.01
        return x

def right(): return Model(False)
def wrong(): return Model(True)
def slow():
    import time
    if os.environ.get("WORLD_SIZE") == "2":
        time.sleep(60)
    return Model(False)
def fails(): raise KeyError("no such weight")
def batch(micro_batch): return torch.randn(micro_batch, 8)
def loss(output, batch): return (output - 1).square().mean()
"""


@pytest.fixture
def planned(ranks: Callable[[int], PoolWorld], tmp_path: Path) -> Callable[..., str]:
    """The path of a plan for a function of a user's file, or for another model. Ranks of a command are forked as those of tests."""
    (tmp_path / "own.py").write_text(OWN)

    def make(model: str, **more: Any) -> str:
        about: dict[str, Any] = {"model": model if "-" in model else f"{tmp_path / 'own.py'}:{model}"}
        if model == "llama-tiny":
            about["seq"] = 16  # products in bf16 take long on most CPUs
        path = tmp_path / "plan.json"
        file.write(Plan(**{"model": about, "hardware": "auto", "mesh": Mesh(dp_shard=2), **more}), path)
        return str(path)

    return make


def test_a_right_plan_is_found_right(planned: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path = planned("llama-tiny", mesh=Mesh(dp_replicate=2, dp_shard=2))
    assert main(["verify", path, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "scaled" in out and "layers 4 → 2" in out and "on 4 processes, 2 steps" in out
    for name in (
        "data replicas alone, fp32",
        "data shards alone, fp32",
        "as planned, but fp32",
        "as planned, bf16-mixed",
    ):
        assert name in out
    assert out.endswith("the plan computes what one process computes\n")


def test_a_wrong_result_is_found_and_named(planned: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """A model that computes something else when it has company."""
    assert main(["verify", planned("wrong", precision="fp32"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {"schema_version", "versions", "assumptions"} <= found.keys()
    (case,) = found["verification"]["cases"]
    assert not found["verification"]["good"] and not case["good"]
    assert 1e-3 < case["loss"] < 0.1 and case["loss_bound"] == 1e-4
    assert case["gradient"] > 1e-3 and case["gradient_name"].startswith("blocks.")
    assert main(["verify", planned("right", precision="fp32"), "--json"]) == 0


@pytest.mark.slow(reason="waits for a time limit; ranks that hang are ended in test_hangs.py")
def test_a_case_that_does_not_end_has_failed(planned: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", planned("slow", precision="fp32"), "--limit", "6"]) == 1
    assert "FAILED: rank 0: did not answer in time" in capsys.readouterr().out


def test_bad_input_is_told_apart(planned: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "nowhere.json"]) == 2
    assert main(["verify", planned("fails")]) == 2
    assert main(["verify", planned("gpt-tinny")]) == 2
    assert main(["verify", planned("right", mesh=Mesh(ep=2))]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 4
    for line, words in zip(lines, ("no plan file", "no such weight", "gpt-tiny", "mesh.ep"), strict=True):
        assert words in line


# --- states of ranks -------------------------------------------------------------------------------------------------


def resume(rank: int, world: int, plan: Plan) -> tuple[list[float], list[float], int]:
    """Losses of two steps that follow a save, in the job that went on and in one that took the state."""
    ranks = start(plan, device="cpu")
    parts = verify.batches(GPT, plan.accumulate * plan.mesh.data)[ranks.data_rank :: ranks.data_size]
    first, second = (apply(verify.build(GPT), plan, ranks, learning_rate=1e-2) for _ in range(2))
    first.train_step(parts)
    before = first.evaluate(parts)
    state = first.state_dict()
    sharded = sum(isinstance(value, DTensor) for value in state["model"].values())
    second.load_state_dict(state)
    assert torch.equal(second.evaluate(parts), before)
    pickle.dumps({name: value.shape for name, value in state["model"].items()})
    return *([job.train_step(parts).loss.item() for _ in range(2)] for job in (first, second)), sharded  # type: ignore[return-value]


@pytest.mark.parametrize(
    "plan",
    [
        Plan(model={}, hardware="auto", mesh=Mesh(dp_shard=2), precision="fp32", reshard=False),
        Plan(
            model={}, hardware="auto", mesh=Mesh(pp=2), precision="fp32", accumulate=4,
            pipeline=Pipeline(schedule="zero-bubble-v", cuts=("blocks.1", "blocks.2", "blocks.3")),
        ),
    ],
    ids=["shards", "one rank holds the first and the last stage, whose weights are tied"],
)  # fmt: skip
def test_a_state_taken_after_evaluating_continues_to_the_bit(plan: Plan, ranks: Callable[[int], PoolWorld]) -> None:
    for went_on, took_up, sharded in ranks(2).run(resume, plan):
        assert went_on == took_up and went_on[1] < went_on[0]
        assert (sharded > 0) == (plan.mesh.dp_shard > 1)
