"""`foretell run` with optimizer states on the host: the losses of the plain run, and resuming, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.eject.script import needs_runtime
from foretell.errors import UserError
from foretell.export import export
from foretell.plan import file as plans
from foretell.plan.facts import Facts
from foretell.plan.legal import check
from foretell.plan.types import MASTER, Mesh, Plan

TINY = {"layers": 3, "dim": 16, "heads": 2, "context": 8, "vocab_size": 256, "dropout": 0.1}
TEXT = Path(json.__file__).parent
"""Text that every Python has: the source of its json package."""


def plan(**more: Any) -> Plan:
    about = {"model": "gpt-tiny", "overrides": TINY, "seq": 8}
    return Plan(**{"model": about, "hardware": "CPU", "micro_batch": 2, "accumulate": 2, "precision": "fp32", **more})


def losses(folder: Path, asked: Plan, *more: str) -> list[float]:
    folder.mkdir(exist_ok=True)
    plans.write(asked, folder / "plan.json")
    code = main(["run", str(folder / "plan.json"), "--data", str(TEXT), "--out", str(folder / "run"), "--lr", "1e-2",
                 "--eval-batches", "2", *more])  # fmt: skip
    assert code == 0
    return logged(folder / "run")


def logged(run: Path) -> list[float]:
    """The loss of every step, the last time it was made."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows if row.get("event", "step") == "step" and "loss" in row}
    return [found[step] for step in sorted(found)]


def test_moments_on_the_host_give_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    steps = ("--steps", "6", "--no-save")
    plain = losses(tmp_path / "plain", plan(), *steps)
    assert len(plain) == 6
    moved = losses(tmp_path / "moved", plan(states={"blocks.0-2": "host", "rest": "host"}), *steps)
    assert moved == plain
    unclipped = losses(tmp_path / "unclipped", plan(clip=None), *steps)
    assert losses(tmp_path / "early", plan(clip=None, states={"blocks.1-2": "host"}), *steps) == unclipped


@pytest.mark.slow(reason="two runs; one with states on disk goes on in test_offload_disk_run.py")
@pytest.mark.parametrize(("form", "weights"), [
    ("fp32", {}),
    pytest.param("int8", {}, marks=pytest.mark.slow(reason="the format is tested in test_offload_int8.py")),
    pytest.param("split", {"blocks.1-2": "host"}, marks=pytest.mark.slow(reason="the format is tested in test_offload_weights.py")),
])  # fmt: skip
def test_a_run_with_masters_goes_on_where_it_stopped(tmp_path: Path, form: str, weights: dict[str, str]) -> None:
    kept = plan(precision=MASTER, state_format=form)
    moved = plan(precision=MASTER, state_format=form, states={"blocks.0-2": "host"}, weights=weights, cpu_share=0.5)
    whole = losses(tmp_path / "whole", kept, "--steps", "6", "--no-save")
    saved = tmp_path / "saved"
    assert losses(saved, moved, "--steps", "6", "--save-every", "3") == whole
    newest = max((saved / "run" / "checkpoints").iterdir(), key=lambda path: path.name)
    assert main(["ckpt", "verify", str(newest)]) == 0
    shutil.rmtree(newest)
    assert main(["run", str(saved / "plan.json"), "--resume", "--out", str(saved / "run")]) == 0
    assert logged(saved / "run") == whole
    if form == "int8":
        plans.write(plan(precision="bf16"), tmp_path / "other.json")
        assert main(["run", str(tmp_path / "other.json"), "--resume", "--out", str(saved / "run")]) == 2
    again = [json.loads(line) for line in (saved / "run" / "log.jsonl").read_text().splitlines()]
    assert any(row.get("event") == "resume" and row["step"] == 3 for row in again)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"states": {"blocks.*": "host"}, "mesh": Mesh(tp=2)}, "mesh.tp is 2"),
        ({"precision": MASTER, "mesh": Mesh(pp=2, dp_shard=2)}, "mesh.pp is 2"),
        ({"states": {"blocks.*": "host"}, "mesh": Mesh(dp_shard=2, cp=2)}, "mesh.cp is 2"),
        ({"states": {"blocks.*": "host"}, "mesh": Mesh(dp_shard=4, ep=2)}, "mesh.ep is 2"),
        ({"states": {"blocks.*": "host"}, "weights": {"blocks.*": "host"}, "mesh": Mesh(dp_shard=2)}, "weights come and go on one"),
        ({"states": {"blocks.0": "disk"}, "mesh": Mesh(dp_replicate=2)}, "to disk on one device"),
        ({"states": {"blocks.*": "host"}, "compile": "model"}, "wait for their update"),
        ({"states": {"blocks.*": "host"}, "optimizer": "sgd"}, "AdamW"),
        ({"state_format": "split"}, "needs bf16 weights"),
        ({"state_format": "int8", "states": {"blocks.*": "host"}}, "int8, which beside states or weights that are elsewhere needs bf16 weights"),
        ({"state_format": "int4", "precision": MASTER}, "8 bits at least"),
        ({"state_format": "int8", "precision": MASTER, "mesh": Mesh(dp_shard=2)}, "int8, whose elements are kept together"),
        ({"state_format": "int8", "optimizer": "momentum-fused"}, "codes are those of AdamW"),
        ({"state_format": "int4", "mesh": Mesh(tp=2)}, "rows with one scale are not cut"),
        ({"cpu_share": 0.5, "precision": MASTER}, "none is"),
        ({"weights": {"blocks.0-1": "host"}, "states": {"blocks.1": "host"}}, "blocks.0: weights on the host"),
        ({"weights": {"blocks.*": "host"}, "states": {"blocks.*": "host"}, "compile": "blocks"}, "not compiled"),
        ({"cpu_share": 2.0}, "not a share"),
    ],
)
def test_what_cannot_be_moved_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(plan(**more), Facts(blocks=tuple(f"blocks.{number}" for number in range(3))))


def test_leaving_with_such_a_plan_is_refused_or_told(tmp_path: Path) -> None:
    asked = plan(states={"blocks.0-2": "host"}, hardware="H100")
    assert ("states or weights on the host", "moving them in time is foretell's own") in needs_runtime(asked)
    assert any("states" in line for line in export(asked, "accelerate").lost)
    with pytest.raises(UserError, match="deepspeed cannot express precision bf16-master"):
        export(plan(precision=MASTER, hardware="H100"), "deepspeed")
    assert any("bf16-master" in what for what, _ in needs_runtime(plan(precision=MASTER)))
    plans.write(asked, tmp_path / "plan.json")
    assert plans.read(tmp_path / "plan.json") == asked
