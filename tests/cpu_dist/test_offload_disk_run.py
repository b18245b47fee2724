"""`foretell run` with optimizer states on disk: the losses of the plain run, resuming, and ends that come too soon."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretell.checkpoint.write import FileLayout, Image
from foretell.cli import main
from foretell.plan import file as plans
from foretell.plan.types import MASTER, Plan
from foretell.runtime.offload import adamw
from foretell.runtime.offload.pump import Pump
from tests.cpu_dist.test_offload_run import TEXT, logged, losses, plan

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120
"""Seconds after which a run that should end hangs."""
SPREAD = {"rest": "disk", "blocks.0": "host", "blocks.1-2": "disk"}


def moved(**more: Any) -> Plan:
    return plan(precision=MASTER, states=SPREAD, **more)


def open_files(run: Path) -> list[str]:
    """What is in a run's folder and belongs to no run: files by a name that the run folder's page does not have."""
    known = {"plan.json", "settings.json", "log.jsonl", "measurement.json", "checkpoints", "comparison.json", "run.lock", "traces.json.gz"}
    return [path.name for path in run.iterdir() if path.name not in known]


def test_states_on_disk_give_the_losses_of_the_plain_run_and_go_on_anywhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = losses(tmp_path / "whole", plan(precision=MASTER), "--steps", "6", "--no-save")
    scratch, saved = tmp_path / "scratch", tmp_path / "saved"
    scratch.mkdir()
    capfd.readouterr()
    assert losses(saved, moved(weights={"blocks.2": "host"}), "--steps", "6", "--save-every", "3", "--scratch", str(scratch)) == whole
    assert f"moved to and from {scratch} at" in capfd.readouterr().err
    newest = max((saved / "run" / "checkpoints").iterdir(), key=lambda path: path.name)
    assert main(["ckpt", "verify", str(newest)]) == 0
    shutil.rmtree(newest)
    plans.write(plan(precision=MASTER, states={"blocks.0": "disk", "blocks.1": "host"}), saved / "plan.json")
    assert main(["run", str(saved / "plan.json"), "--resume", "--out", str(saved / "run")]) == 0
    assert logged(saved / "run") == whole
    rows = [json.loads(line) for line in (saved / "run" / "log.jsonl").read_text().splitlines()]
    assert any(row.get("event") == "resume" and row["step"] == 3 for row in rows)
    assert not list(scratch.iterdir()) and not open_files(saved / "run")


@pytest.mark.slow(reason="a run that saves slowly; updates during backward are in test_offload_disk.py")
def test_updates_during_backward_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is clipped; a thread updates as on a GPU, and copying for a save takes longer than a step."""
    free, take = {"clip": None, "precision": MASTER}, Image.take

    def slowly(image: Image, layout: FileLayout, *, own: bool) -> None:
        time.sleep(0.0 if own else 0.2)
        take(image, layout, own=own)

    whole = losses(tmp_path / "whole", plan(**free), "--steps", "4", "--no-save")
    monkeypatch.setattr(adamw, "Pump", lambda start, order, threaded: Pump(start, order, threaded=True))
    monkeypatch.setattr(Image, "take", slowly)
    saved = tmp_path / "saved"
    assert losses(saved, plan(states=SPREAD, **free), "--steps", "4", "--save-every", "2") == whole
    shutil.rmtree(saved / "run" / "checkpoints" / "step-00000004")
    assert main(["run", str(saved / "run"), "--resume"]) == 0
    assert logged(saved / "run") == whole


# ---------------------------------------------------------------- ends that come too soon


def at_write(number: int, after: Path, then: Callable[[], None]) -> Callable[..., int]:
    """`os.pwritev` whose call of a number, counted from when a file is there, is the last."""
    plain, count = os.pwritev, [0]

    def call(*args: Any) -> int:
        if after.exists():
            count[0] += 1
            if count[0] == number:
                then()
        return plain(*args)

    return call


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_killed_in_the_middle_of_a_step_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = losses(tmp_path / "whole", plan(precision=MASTER), "--steps", "6", "--no-save")
    folder = tmp_path / "killed"
    folder.mkdir()
    plans.write(moved(), folder / "plan.json")
    run, words = folder / "run", ["run", str(folder / "plan.json"), "--data", str(TEXT), "--out", str(folder / "run"), "--lr", "1e-2",
                                   "--eval-batches", "2"]  # fmt: skip
    child = os.fork()
    if not child:
        try:
            saved = run / "checkpoints" / "step-00000002" / "manifest.json"
            os.pwritev = at_write(2, saved, lambda: os.kill(os.getpid(), signal.SIGKILL))  # some states are new, some are not
            main([*words, "--steps", "6", "--save-every", "2"])
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert not open_files(run)
    assert main(["run", str(run), "--resume"]) == 0
    assert logged(run) == whole and not open_files(run)


def test_a_disk_that_fails_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plans.write(moved(), tmp_path / "plan.json")
    run = tmp_path / "run"
    monkeypatch.setattr(os, "pwritev", at_write(9, run / "log.jsonl", full))
    words = ["run", str(tmp_path / "plan.json"), "--data", str(TEXT), "--out", str(run), "--steps", "6", "--no-save", "--eval-batches", "2"]
    assert main(words) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(said) == 1 and "on disk" in said[0] and "No space left on device" in said[0]
    assert not open_files(run)


def test_a_scratch_folder_that_is_not_there_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plans.write(moved(), tmp_path / "plan.json")
    gone = tmp_path / "gone"
    assert main(["run", str(tmp_path / "plan.json"), "--out", str(tmp_path / "run"), "--scratch", str(gone)]) == 2
    assert f"there is no folder {gone}" in capfd.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.slow(reason="a whole run as a process; the signal itself is tested in test_train_failures.py")
def test_ctrl_c_ends_a_run_whose_states_are_on_disk(tmp_path: Path) -> None:
    plans.write(moved(cpu_share=0.5), tmp_path / "plan.json")
    run = tmp_path / "run"
    words = ["run", str(tmp_path / "plan.json"), "--data", str(TEXT), "--out", str(run), "--steps", "100000"]
    with subprocess.Popen(
        [sys.executable, "-m", "foretell", *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    ) as child:
        while child.poll() is None and not ((run / "log.jsonl").exists() and '"step": 3' in (run / "log.jsonl").read_text()):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=LIMIT)
    assert child.returncode == 130 and "stopping after this step" in said
    assert list((run / "checkpoints").iterdir()) and not open_files(run)
