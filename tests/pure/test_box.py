"""`foretell box`: what it prints, its JSON, and one line for every mistake."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware import parse
from foretell.plan import file
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.report.terminal import box as page
from foretell.trace.load.model import Source
from tests import forks
from tests.pure.test_cli import environment

TEXT = {"layers": 1, "dim": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab_size": 64, "context": 16}
LLAMA = Source(model="llama-tiny", overrides=TEXT, seq=16, micro_batch=1)
PLAN = Plan(model=model_of(LLAMA), hardware="cpu:8", mesh=Mesh(dp_shard=8), precision="fp32")
H200 = replace(PLAN, hardware="H200-SXM-141GB:8")


def wrong(tmp_path: Path, plan: Plan | None, *words: str, status: int = 2, command: str = "box", **env: str) -> str:
    """The one line that a mistake gets."""
    if plan is not None:
        file.write(plan, tmp_path / "plan.json")
    done = forks.run(command, str(tmp_path / "plan.json"), *words, env=environment(CUDA_VISIBLE_DEVICES="", **env))
    assert done.returncode == status and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "; try: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == (["plan.json"] if plan is not None else [])
    return done.stderr


# ---------------------------------------------------------------- mistakes


def test_mistakes_get_one_line_each(tmp_path: Path) -> None:
    assert "there is no plan file" in wrong(tmp_path, None)
    assert "rank 8 was asked for and the plan has ranks 0 to 7" in wrong(tmp_path, PLAN, "--rank", "8")
    assert "rank -1 was asked for" in wrong(tmp_path, PLAN, "--rank", "-1")
    assert "--device tpu is not known" in wrong(tmp_path, PLAN, "--device", "tpu")
    assert "without torchrun" in wrong(tmp_path, PLAN, WORLD_SIZE="8", RANK="0", MASTER_ADDR="x", MASTER_PORT="1")
    told = wrong(tmp_path, H200)
    assert "is for H200-SXM-141GB:8 and this machine has no GPU" in told and "--device cpu" in told
    assert "a box runs on NVIDIA GPUs" in wrong(tmp_path, replace(PLAN, hardware="MI300X:8"))
    odd = replace(PLAN, mesh=Mesh(pp=2), pipeline=Pipeline(schedule="1f1b", cuts=("nowhere.1",)), hardware="cpu:2")
    assert "the plan cannot be run: " in wrong(tmp_path, odd)


def test_a_plan_for_more_devices_than_it_names_is_refused(tmp_path: Path) -> None:
    assert "the plan cannot be run" in wrong(tmp_path, replace(H200, hardware="H200-SXM-141GB:4"))


def test_a_model_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    gone = replace(PLAN, model={**PLAN.model, "model": "llama-tinny"})
    assert "llama-tinny" in wrong(tmp_path, gone)


@pytest.mark.slow(reason="the answer of `fit`, which says it in test_api.py")
def test_a_plan_that_does_not_fit_says_what_uses_the_memory(tmp_path: Path) -> None:
    wide = model_of(replace(LLAMA, overrides={**TEXT, "ffn": 8192}))
    plan = replace(PLAN, model=wide, hardware="cpu", mesh=Mesh(), micro_batch=1_000_000)
    told = wrong(tmp_path, plan, status=1)
    assert "rank 0 is predicted to need" in told and "this device has" in told and "largest: activations" in told and "foretell plan" in told


def test_a_box_from_a_run_takes_no_option_that_keeps_something(tmp_path: Path) -> None:
    told = wrong(tmp_path, PLAN, "--box", "--out", "x", "--save-every", "5", command="run")
    assert "leave out --out and --save-every" in told
    assert "at least one" in wrong(tmp_path, PLAN, "--box", "--steps", "0", command="run")


# ---------------------------------------------------------------- answers


@pytest.mark.slow(reason="a box and a run beside each other; one rank is compared below")
def test_a_run_in_a_box_as_json(tmp_path: Path) -> None:
    file.write(PLAN, tmp_path / "plan.json")
    done = forks.run("run", str(tmp_path / "plan.json"), "--box", "--steps", "2", "--json", env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["box"]
    assert found["status"] == "done" and found["rank"] == 0 and found["world"] == 8 and found["ok"] is None
    lines = {line["name"]: line for line in found["lines"]}
    assert list(lines) == ["step", "exposed", "allocated", "reserved"] and lines["exposed"]["unit"] == "share"
    assert lines["step"]["measured"] > 0 and lines["step"]["error"] is None and lines["allocated"]["measured"] is None
    measured, predicted = found["measured"], found["predicted"]
    assert len(measured["steps"]) == len(measured["free_steps"]) == 2 and measured["messages"] >= 3
    assert predicted["step_seconds"] > predicted["free_seconds"] > 0 and "arrivals" not in predicted
    assert any("stand-ins" in note and "the loss means nothing" in note for note in found["notes"])
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_one_rank_is_compared_on_a_cpu(tmp_path: Path) -> None:
    file.write(replace(PLAN, mesh=Mesh(), hardware="cpu"), tmp_path / "plan.json")
    done = forks.run("box", str(tmp_path / "plan.json"), "--steps", "2", env=environment(COLUMNS="100"))
    assert done.returncode in (0, 1) and "rank 0 of 1 in a box: llama-tiny" in done.stdout
    assert ("OUTSIDE" in done.stdout) == (done.returncode == 1) and "verdict" in done.stdout


def test_ctrl_c_ends_it_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    file.write(PLAN, tmp_path / "plan.json")
    struck = """
        import os, signal
        from foretell.cli import common, main
        common.Doing.tell = lambda self, now: os.kill(os.getpid(), signal.SIGINT) if now.startswith("step 2") else None
        status = main()
        import torch.distributed as dist
        sys.exit(99 if dist.is_initialized() else status)
    """
    done = forks.run("box", str(tmp_path / "plan.json"), env=environment(), code=textwrap.dedent(struck))
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr == "stopped (SIGINT); nothing was measured, and a box saves nothing\n"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


# ---------------------------------------------------------------- predicted beside measured

SAID = {
    "step_seconds": 0.1, "low_seconds": 0.08, "high_seconds": 0.12, "exposed_share": 0.12, "allocated_bytes": 10 * 2**30,
    "reserved_bytes": 12 * 2**30, "device_bytes": 13 * 2**30, "capacity_bytes": 15 * 2**30, "verdict": "fits",
}  # fmt: skip
BANDS = {"allocated_bytes": (9 * 2**30, 11 * 2**30), "reserved_bytes": (11 * 2**30, 13 * 2**30)}
MEASURED: dict[str, Any] = {
    "rank": 3, "world": 64, "device": "NVIDIA H200", "step_seconds": 0.11, "low_seconds": 0.109, "high_seconds": 0.112,
    "exposed_share": 0.1, "allocated_bytes": 10 * 2**30, "reserved_bytes": 14 * 2**30, "messages": 40, "message_bytes": 2**30,
    "message_seconds": 0.03, "steps": [0.11] * 5, "build_seconds": 4.0,
}  # fmt: skip


def shown(*, seconds: bool = True, memory: bool = True) -> page.Boxed:
    lines = page.lines_of(SAID, BANDS, MEASURED, seconds=seconds, memory=memory)
    return page.Boxed(model="m", plan="dp_shard 64", hardware="H200:64", predicted=SAID, measured=MEASURED, lines=lines, notes=(page.STAND_INS,))


def test_what_lies_outside_is_named() -> None:
    text = page.render(shown(), 90).plain
    assert shown().ok is False and "verdict     OUTSIDE the predicted range: reserved" in text
    assert "12.0 %" in text and "+2.0 pt" in text and "-9.1 %" in text and "rank 3 of 64 in a box" in text


def test_what_was_predicted_for_another_device_is_not_compared() -> None:
    found = shown(seconds=False, memory=False)
    assert found.ok is None and all(line.error is None for line in found.lines) and "verdict" not in page.render(found).plain
    cluster = parse("H200:64")
    assert page.unlike(cluster, "NVIDIA H200", "cuda", 64) == ("", True, True)
    assert page.unlike(cluster, "NVIDIA H100 80GB HBM3", "cuda", 64)[1:] == (False, False)
    assert "H200" in page.unlike(cluster, "x86_64", "cpu", 64)[0]
    assert page.unlike(parse("cpu:2"), "x86_64", "cpu", 2)[1:] == (False, False)


def test_what_is_too_large_for_this_device_is_told_in_full() -> None:
    uses = {"activations": 8 * 2**30, "parameters": 2 * 2**30, "spare": 2**40}
    assert page.too_large(0, SAID, uses, 16 * 2**30) == ""
    told = page.too_large(2, SAID, uses, 12 * 2**30)
    assert told == "rank 2 is predicted to need 13.0 GiB and this device has 12.0 GiB; largest: activations 8.0 GiB, parameters 2.0 GiB"
    refused = {**SAID, "verdict": "no"}
    assert page.too_large(2, refused, uses, 15 * 2**30) and not page.too_large(2, refused, uses, 16 * 2**30)


def test_the_page_has_the_figures_of_the_rows() -> None:
    root = Path(__file__).resolve().parents[2]
    rows = [json.loads(line) for line in (root / "benchmarks/results/box.jsonl").read_text().splitlines()]
    newest = {row["case"]: row for row in rows}
    good = [row["errors"] for row in newest.values() if "errors" in row]
    bars = {"step": 0.08, "exposed": 0.03, "allocated": 0.005, "reserved": 0.03}
    text = (root / "docs/box.md").read_text(encoding="utf-8")
    names = ("| step time", "| exposed", "| allocated |", "| reserved |")
    shown = [line.split("|")[3].strip() for line in text.splitlines() if line.startswith(names)]
    assert shown == [f"{sum(abs(row[name]) <= bar for row in good)} of {len(good)}" for name, bar in bars.items()]
    assert not [row for row in newest.values() if row.get("ran") is False and row.get("fits_said") != "no"]
    assert f"{len(newest)} plans of 2 to 1,024 ranks" in text and f"{len(good)} ran" in text
