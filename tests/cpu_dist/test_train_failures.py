"""Training that goes wrong, for real: bad input, losses that are no numbers, full disks, ranks that are gone."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.cli import main
from foretell.errors import MissingPackage, UserError
from foretell.plan import file as plans
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Plan
from foretell.runtime.train import log as logs
from foretell.runtime.train import save
from foretell.runtime.train.folder import Folder, RunSettings
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.trace.load.model import Source
from tests import forks
from tests.cpu_dist.train_cases import (
    PLAN,
    ROOT,
    SETTINGS,
    TEXT,
    TINY,
    Quiet,
    every_line,
    go,
    losses,
    own_order,
    ten_steps,
    write_own,
)


@pytest.fixture(autouse=True)
def _every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every_line(monkeypatch)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_own(tmp_path, monkeypatch)


# ---------------------------------------------------------------- bad input


def test_a_world_that_does_not_match_says_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"2 processes.*3 processes started.*torchrun --nproc-per-node 2 -m foretell run"):
        go(tmp_path / "a", PLAN.with_(mesh=Mesh(dp_shard=2)))
    assert not (tmp_path / "a").exists()


def test_a_plan_for_another_model_names_the_shapes(tmp_path: Path) -> None:
    source = Source(model="gpt-tiny", overrides={**TINY, "dim": 64}, seq=32)
    from foretell.zoo.language import gpt

    shapes = {name: (tuple(p.shape), "float32") for name, p in gpt.build(**source.overrides).named_parameters()}
    plan = PLAN.with_(model={**model_of(source, shapes=shapes), "overrides": TINY})
    with pytest.raises(UserError, match=r"another model: tokens.weight is 256x64 in the plan and 256x32 in the model"):
        go(tmp_path / "a", plan)


def test_data_that_is_not_there_is_said_before_anything_is_made(tmp_path: Path, own: str) -> None:
    with pytest.raises(UserError, match="there is no data folder"):
        go(tmp_path / "a", data=str(tmp_path / "nowhere"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "none.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"none\.py has no function data"):
        go(tmp_path / "b", data=str(tmp_path / "none.py"))
    with pytest.raises(UserError, match="text alone does not give: x, mark"):
        go(tmp_path / "c", PLAN.with_(model={"model": own}))


def test_a_folder_that_cannot_be_written_or_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run folder .*file/run cannot be written: Not a directory"):
        go(tmp_path / "file" / "run")
    go(tmp_path / "a", steps=2, no_save=True)
    kept = {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
    with pytest.raises(UserError, match="holds a run already"):
        go(tmp_path / "a")
    assert {path: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()} == kept


def test_resuming_what_is_not_there_or_was_otherwise(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        go(tmp_path / "none", resume=True)
    go(tmp_path / "a", steps=2, warmup=0)
    with pytest.raises(UserError, match=r"--lr 0.5 was 0.01 when the run began"):
        go(tmp_path / "a", resume=True, lr=0.5)
    with pytest.raises(UserError, match=r"the plan differs .* in accumulate"):
        go(tmp_path / "a", PLAN.with_(accumulate=1), resume=True)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("other text " * 100)
    settings = json.loads((tmp_path / "a" / "settings.json").read_text())
    (tmp_path / "a" / "settings.json").write_text(json.dumps({**settings, "data": str(tmp_path / "text")}))
    with pytest.raises(UserError, match="the data is not what"):
        go(tmp_path / "a", resume=True)


def test_logs_that_nobody_knows_and_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"unknown log 'tensorbord'.*did you mean tensorboard"):
        go(tmp_path / "a", log=("tensorbord",))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackage, match=r"--log wandb needs the package 'wandb'.*foretell\[wandb\]"):
        go(tmp_path / "b", log=("wandb",))


def test_the_adapter_of_wandb_hands_on_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself is not installed: what stands in for it only keeps what it is given."""
    given: list[tuple[int, dict[str, float]]] = []
    runs: list[dict[str, Any]] = []

    def init(**words: Any) -> Any:
        runs.append(words)
        return SimpleNamespace(log=lambda figures, step: given.append((step, figures)), finish=lambda: given.append((-1, {})))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    go(tmp_path / "a", steps=2, log=("wandb",), warmup=0)
    assert runs[0]["name"] == "a" and runs[0]["config"]["lr"] == 1e-2 and given[-1] == (-1, {})
    steps = [(step, figures["step/loss"]) for step, figures in given if "step/loss" in figures]
    assert steps == losses(tmp_path / "a")


# ---------------------------------------------------------------- no longer numbers


@pytest.mark.parametrize(
    ("mark", "said"),
    [("7", r"the loss of step 2 is (nan|inf): first in the forward of layers\.1, in micro-batch"),
     ("9", r"the gradient's norm of step 2 is nan: first in backward, in the gradient that reaches the output of layers\.\d")],
    ids=["forward", "backward"],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["adamw-fused", pytest.param("adamw-foreach", marks=pytest.mark.slow(reason="another kernel, the same check"))])
def test_not_a_number_stops_saves_and_names_the_block(
    tmp_path: Path, own: str, monkeypatch: pytest.MonkeyPatch, mark: str, said: str, optimizer: str
) -> None:
    plan = PLAN.with_(model={"model": own}, optimizer=optimizer)
    go(tmp_path / "good", plan, data=None, steps=1, warmup=0, save_every=1)
    monkeypatch.setenv("MARK_AT", str(own_order(4)))  # sample 6: in step 2
    monkeypatch.setenv("MARK_AS", mark)
    with pytest.raises(RunFailed, match=said) as caught:
        go(tmp_path / "a", plan, data=None, warmup=0, schedule="constant", save_every=0)
    assert caught.value.exit_code == 1 and "samples 4 to 7" in caught.value.remedy
    kept = save.complete(tmp_path / "a" / "checkpoints")
    assert [one.step for one in kept] == [2]
    after, before = (save.Reader(one) for one in (kept[0], save.complete(tmp_path / "good" / "checkpoints")[0]))
    assert "optimizer/out.weight/exp_avg" in before.tensors
    for name in before.tensors:  # the bad update was not applied
        assert torch.equal(after.whole(name), before.whole(name)), name
    assert logs.read(tmp_path / "a" / "log.jsonl")[-1]["event"] == "not finite"
    monkeypatch.delenv("MARK_AT")
    assert go(tmp_path / "a", plan, resume=True).step == 10


def _not_a_number(rank: int, world: int, out: str, plan: Plan, at: str) -> str:
    os.environ.update(MARK_AT=at, MARK_AS="7")
    try:
        ten_steps(rank, world, out, plan, {**SETTINGS, "data": None}, False)
    except RunFailed as error:
        return str(error)
    finally:
        os.environ.pop("MARK_AT")
    return "went on"


def test_not_a_number_on_one_rank_is_known_to_all(ranks: Any, tmp_path: Path, own: str) -> None:
    plan = PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2))
    found = ranks(2).run(_not_a_number, str(tmp_path / "a"), plan, str(own_order(8)))
    assert found[0] == found[1] and "first in the forward of layers.1, in micro-batch 0" in found[0], found
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [2]


# ---------------------------------------------------------------- disks


def _limit_files(most: int, ever: int) -> None:
    """From now on; a save that is under way is waited for."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, ever))


def test_a_disk_that_takes_no_more_costs_one_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow, in the middle of writing one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    screen = Quiet({3: lambda: _limit_files(100_000, before[1]), 5: lambda: _limit_files(*before)})
    try:
        done = go(tmp_path / "a", screen=screen, steps=6, save_every=2, warmup=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.step == 6 and [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [6, 2]
    told = [line for line in screen.said if "was not saved" in line]
    assert len(told) == 1 and "step 4" in told[0] and "File too large" in told[0] and "the one of step 2 is kept" in told[0]
    assert not list((tmp_path / "a" / "checkpoints").glob("*.partial"))


def test_a_last_checkpoint_that_cannot_be_saved_is_a_failure(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(RunFailed, match=r"last checkpoint was not saved: rank 0: File too large.*step 2 is kept"):
            go(tmp_path / "a", screen=Quiet({3: lambda: _limit_files(100_000, before[1])}), steps=4, save_every=2, warmup=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000002"]  # no half of one
    assert (tmp_path / "a" / "measurement.json").exists()


@pytest.mark.parametrize(
    "harm", ["flip", *(pytest.param(one, marks=pytest.mark.slow(reason="found as a flipped bit is")) for one in ("cut", "delete", "manifest"))]
)
def test_a_damaged_checkpoint_is_found_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    go(tmp_path / "a")
    wanted = losses(tmp_path / "a")
    newest = tmp_path / "a" / "checkpoints" / "step-00000010"
    file = newest / ("manifest.json" if harm == "manifest" else "rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    if harm == "delete":
        file.unlink()
    else:
        if harm == "flip":
            content[len(content) // 2] ^= 1
        file.write_bytes(content if harm == "flip" else content[: len(content) // 2])
    screen = Quiet()
    go(tmp_path / "a", resume=True, screen=screen)
    assert "resumed after step 5" in screen.said
    assert any("is damaged" in line for line in screen.said) == (harm == "flip")
    assert losses(tmp_path / "a") == wanted and save.complete(tmp_path / "a" / "checkpoints")[0].step == 10


def test_a_save_cut_short_is_not_seen_and_cleared_away(tmp_path: Path) -> None:
    go(tmp_path / "a", steps=5)
    left = tmp_path / "a" / "checkpoints" / "step-00000099.partial"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [5]
    go(tmp_path / "a", resume=True, steps=6)
    assert not left.exists() and [one.step for one in save.complete(tmp_path / "a" / "checkpoints")] == [6, 5]


# ---------------------------------------------------------------- ranks that go


def cli(*words: str, **env: str) -> forks.Command:
    """`foretell run`, in a process of its own."""
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        known.pop(name, None)
    return forks.Command("run", *words, env=known)


def test_a_rank_that_is_killed_stops_all_in_time_with_one_message(ranks: Any, tmp_path: Path, own: str) -> None:
    """The whole command: it starts two ranks, the second is killed, and what was saved is taken up again."""
    plan, out = tmp_path / "plan.json", tmp_path / "run"
    plans.write(PLAN.with_(model={"model": own}, mesh=Mesh(dp_shard=2)), plan)
    hurt = {"HURT_AT": f"1:{own_order(8 * 5 + 1)}", "HURT_WITH": "SIGKILL"}  # in step 6: the save of step 4 waited for that of 2
    child = cli(str(plan), "--steps", "200", "--save-every", "2", "--out", str(out), **hurt)
    told, said = child.communicate(timeout=120)
    ended = time.time()
    assert child.returncode == 1 and told == "", said
    errors = [line for line in said.splitlines() if "error" in line or "gone" in line or "Traceback" in line]
    assert len(errors) == 1 and "rank 1 was ended by signal 9 (SIGKILL); all ranks stopped" in errors[0], said
    assert f"foretell run {out} --resume" in errors[0]
    assert ended - (out / "log.jsonl").stat().st_mtime < 30
    kept = save.complete(out / "checkpoints")
    assert kept and kept[0].step in (2, 4)
    assert ranks(2).run(ten_steps, str(out), plans.read(out / "plan.json"), {"steps": 8}, True) == [("done", 8)] * 2
    assert [step for step, _ in losses(out)] == list(range(1, 9))


# ---------------------------------------------------------------- the command


def test_the_command_trains_tells_and_exits_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans.write(PLAN, tmp_path / "plan.json")
    words = ["run", str(tmp_path / "plan.json"), "--steps", "3", "--data", str(TEXT), "--out", str(tmp_path / "a"), "--device", "cpu"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "done after step 3" in out and str(tmp_path / "a") in out and "held out" in out
    assert "step 1/3  loss" in err and "sequences of 32 bytes" in err
    assert main([*words, "--resume", "--steps", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["measurement"]["steps"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "cosin"], "did you mean cosine"),
        (["--data", "nowhere"], "there is no data folder nowhere"),
        (["--resume"], "--resume needs the run"),
        (["--device", "tpu"], "--device tpu is not known"),
        (["--steps", "0"], "at least one step"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    plans.write(PLAN, tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json"), *words]) == 2
    assert said in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.json")]) == 2


def test_more_gpus_than_there_are_says_how_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plans.write(PLAN.with_(mesh=Mesh(dp_shard=8)), tmp_path / "plan.json")
    assert main(["run", str(tmp_path / "plan.json")]) == 2
    said = capsys.readouterr().err
    assert "wants 8 GPUs and this machine has 2" in said and "torchrun" in said


def test_settings_are_kept_as_they_were(tmp_path: Path) -> None:
    settings = RunSettings(**{**SETTINGS, "log": ("wandb",)})
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
    assert Folder(path=tmp_path).checkpoints == tmp_path / "checkpoints"
