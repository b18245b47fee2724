"""Reading runs no code: plans and runs that name Python files, given to every command that reads; and who says what runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.cli.app import made
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.report.html import data as html_data
from foretell.report.html import detail as html_detail
from foretell.search.traces import child as tracer
from foretell.search.traces import file as traces_file
from foretell.search.traces.needed import Traces
from foretell.trace.hub import build as hub
from foretell.trace.hub import vision as hub_vision
from foretell.trace.load import model as load
from foretell.trace.load import userfile
from foretell.trace.load.model import Source
from foretell.trace.sandbox import user_code
from foretell.trace.sandbox.child import ask_all
from foretell.trace.store import traces as stored
from tests.pure import report_sample as sample

READS = {
    "zoo", "zoo query", "hardware", "run ckpt list", "run ckpt verify", "run ckpt show", "run ckpt convert", "compare", "report", "plan show",
    "plan export", "doctor", "serve bench",
}  # fmt: skip
RUNS = {
    "fit", "plan", "plan advise", "plan eject", "run", "run demo", "run box", "watch", "verify", "probe", "compare prove",
    "compare diff", "zoo check", "zoo fuzz", "run supervise", "run chaos", "run ckpt merge", "serve", "tune",
    "tune search", "tune serve", "tune verify",
}  # fmt: skip
NEITHER = {"version"}
EVIL = "import pathlib\npathlib.Path(__file__).with_name('canary').touch()\n"
MODEL = EVIL + "import torch\nfrom torch import nn\ndef build(): return nn.Linear(8, 8), (torch.zeros(2, 8),), lambda out, batch: out.sum()\n"


# ---------------------------------------------------------------- every command is one or the other


def commands() -> dict[str, Callable[..., Any]]:
    found = {}
    app = made()
    below = {f"{one.name} ": one.typer_instance for one in app.registered_groups}
    for prefix, group in {"": app, **below}.items():
        assert group is not None
        for one in group.registered_commands:
            assert one.callback is not None
            found[f"{prefix}{one.name or one.callback.__name__}"] = one.callback
    zoo = below["zoo "]
    assert zoo is not None and zoo.registered_callback is not None and zoo.registered_callback.callback is not None
    found["zoo"] = zoo.registered_callback.callback
    return found


def test_every_command_reads_or_runs_and_those_that_read_refuse_code() -> None:
    found = commands()
    assert found.keys() == READS | RUNS | NEITHER, "say of a new command whether it runs code of the user's"
    assert {name for name, command in found.items() if hasattr(command, "__wrapped__")} == READS


# ---------------------------------------------------------------- a corpus of plans and runs that name code


@pytest.fixture
def evil(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Python files that leave a canary when they are imported, in the places a plan can name."""
    here = tmp_path / "evil"
    (here / "package").mkdir(parents=True)
    (here / "hub").mkdir()
    for name in ("mine.py", "loss.py", "data.py", "package/__init__.py", "package/inside.py", "hub/modeling.py", "torch.py", "timm.py"):
        (here / name).write_text(EVIL + "def build(): raise SystemExit\ndef loss(output, batch): return 0\ndef data(split): return []\n")
    auto = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model"}
    (here / "hub" / "config.json").write_text(json.dumps({"model_type": "gpt2", "auto_map": auto, "architectures": ["pipeline"]}))
    monkeypatch.chdir(here)
    return here


def models(here: Path) -> list[dict[str, Any]]:
    return [
        {"model": f"{here}/mine.py:build"}, {"model": "mine.py:build"}, {"model": f"{here}/mine.py"},
        {"model": f"{here}/package/inside.py:build"}, {"model": "gpt-tiny", "loss": f"{here}/loss.py:loss"},
    ]  # fmt: skip


def corpus(here: Path) -> list[tuple[Path, Path]]:
    """A plan file and a run folder for each model; the settings name data that is code too."""
    made = []
    for number, model in enumerate(models(here)):
        plan = Plan(model=model, hardware="2xH100", mesh=Mesh(dp_shard=2), micro_batch=2, predicted={"step_seconds": 0.1})
        run = sample.run_folder(here / f"run{number}", plan, command=f"foretell run {here}/plan{number}.json")
        (run / "settings.json").write_text(json.dumps({"steps": 30, "data": f"{here}/data.py"}))
        plans.write(plan, here / f"plan{number}.json")
        made.append((here / f"plan{number}.json", run))
    return made


def reading(plan: Path, run: Path) -> list[list[str]]:
    tools = ("accelerate", "deepspeed", "torchtitan", "slurm", "k8s", "skypilot")
    return [
        ["show", str(plan)], ["show", str(plan), "--json"], ["report", str(plan)], ["report", str(run)], ["report", str(run), "--json"],
        ["compare", str(run)], ["compare", str(run), "--json"], *(["export", str(plan), "--to", tool, "--force"] for tool in tools),
        ["ckpt", "list", str(run)], ["ckpt", "verify", str(run)], ["ckpt", "show", str(run)], ["prove", "--show", str(plan)],
    ]  # fmt: skip


AT_LARGE = [["hardware", "H100"], ["doctor"], ["zoo"], ["zoo", "query", "gpt-tiny"]]
"""What reads no plan."""


def test_no_reading_command_runs_a_file(evil: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for plan, run in corpus(evil):
        for words in reading(plan, run) + (AT_LARGE if plan.stem == "plan0" else []):
            assert main(words) in (0, 1, 2), words
            assert not list(evil.rglob("canary")), words
    said = capsys.readouterr()
    line = next(line for line in said.out.splitlines() if line.startswith("Left out"))
    assert "no trace of" in line and "foretell report" in line and "--trace" in line and f"runs code of {evil}/mine.py" in line
    assert "runs code of" not in said.err


def test_nor_does_one_in_a_process_of_its_own_in_a_folder_of_modules(evil: Path) -> None:
    """`torch.py` in the current folder is not torch."""
    _, run = corpus(evil)[0]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foretell", "report", str(run)], cwd=evil, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--trace" in done.stdout and not list(evil.rglob("canary"))


def test_the_guard_holds_below_the_commands(evil: Path) -> None:
    """Whatever a reading command calls: importing in this process, tracing in another, the user's data."""
    source = Source(model=f"{evil}/mine.py:build")
    with user_code.refused():
        for work in (
            lambda: load.load(source), lambda: userfile.function(f"{evil}/data.py", "data"), lambda: userfile.import_file(evil / "mine.py"),
            lambda: ask_all("foretell.search.traces.child", [{"source": vars(source)}], time_limit=60.0),
            lambda: load.load(Source(model="gpt-tiny", loss=f"{evil}/loss.py:loss")),
        ):  # fmt: skip
            with pytest.raises(user_code.CodeNeeded, match=r"would run code of .*\.py, and reading runs no code"):
                work()
    assert not list(evil.rglob("canary"))
    with user_code.refused(), user_code.allowed():
        userfile.import_file(evil / "data.py")
    assert (evil / "canary").exists()


def test_a_config_file_names_models_alone(evil: Path) -> None:
    """`auto_map` runs nothing, and `architectures` chooses among models, not among whatever transformers has."""
    pytest.importorskip("transformers")
    name = f"{evil}/hub"
    config = hub.config_of(Source(model=f"hf:{name}"), name)
    assert config.architectures == ["pipeline"] and hub.class_of_model(config).__name__ == "GPT2LMHeadModel"
    assert not list(evil.rglob("canary"))


def test_settings_that_would_read_weights_are_refused() -> None:
    source = Source(model="timm:resnet18", overrides={"checkpoint_path": "evil.pth"})
    with pytest.raises(UserError, match="'checkpoint_path' of timm:resnet18 names files of weights"):
        hub_vision.reject_files(source, ("checkpoint_path",))


# ---------------------------------------------------------------- with stored traces nothing is needed


def test_a_report_is_made_from_stored_traces_and_says_which_command_makes_them(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MODEL)
    plan = Plan(model={"model": f"{mine}:build"}, hardware="H100", micro_batch=2, precision="fp32")
    path = tmp_path / "plan.json"
    plans.write(plan, path)
    assert main(["report", str(path), "--json"]) == 0
    assert "--trace" in json.loads(capsys.readouterr().out)["report"]["left_out"]
    assert main(["report", str(path), "--trace", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["report"]["left_out"] is None and f"runs code of {mine}" in said.err
    (tmp_path / "canary").unlink()
    assert main(["report", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["left_out"] is None and not (tmp_path / "canary").exists()


def test_a_run_folder_is_reported_where_its_model_never_was(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its traces go along: neither the cache nor the file of the model is needed."""
    asked, _ = sample.told(sample.plan(mesh=Mesh(dp_shard=2)))
    traces = Traces(capability=(9, 0))
    (wanted,) = traces._needed(asked, "keep")
    reply = tracer.answer(wanted)
    named = replace(asked, model={**asked.model, "model": str(tmp_path / "gone.py:build")})
    (renamed,) = traces._needed(named, "keep")
    stored.keep(renamed, reply.pop("text"), reply)
    run = sample.run_folder(tmp_path / "run", named)
    html_detail.keep_traces(named, run)
    shutil.rmtree(cache_dir)
    assert main(["report", str(run), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["report"]
    assert said["left_out"] is None and "blocks" in said["sections"]
    (run / traces_file.NAME).unlink()
    assert main(["report", str(run), "--json"]) == 0
    assert "no trace of" in json.loads(capsys.readouterr().out)["report"]["left_out"]


# ---------------------------------------------------------------- what runs says so


@pytest.mark.parametrize("command", ["run", "eject"])
def test_what_runs_code_says_whose(command: str, evil: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = Plan(model={"model": f"{evil}/mine.py:build"}, hardware="auto", precision="fp32")
    plans.write(plan, evil / "plan.json")
    assert main([command, str(evil / "plan.json"), *(["--device", "cpu"] if command == "run" else [])]) in (1, 2)
    assert f"runs code of {evil}/mine.py" in capfd.readouterr().err and (evil / "canary").exists()


def test_nobody_is_told_twice_and_callers_of_the_api_not_at_all(evil: Path) -> None:
    told: list[str] = []
    userfile.import_file(evil / "mine.py")
    user_code.tell_with(told.append)
    try:
        for _ in range(2):
            userfile.import_file(evil / "mine.py")
        user_code.before(["a.py", "b.py", "a.py"])
    finally:
        user_code._tell.set(None)
    assert told == [str(evil / "mine.py"), "a.py", "b.py"]
    assert html_data.read(corpus(evil)[0][0]).plan.model["model"] == f"{evil}/mine.py:build"


# ---------------------------------------------------------------- a function that makes a batch


@pytest.mark.parametrize("arguments", ["n", "batch_size", "B", "how_many", "model, batch_size", "*, bs", "batch_size, seq_len=7"])
def test_a_batch_is_asked_for_by_whatever_name_its_size_has(tmp_path: Path, arguments: str) -> None:
    file = tmp_path / "net.py"
    size = arguments.replace("model, ", "").replace("*, ", "").partition(",")[0]
    file.write_text(f"import torch\ndef build():\n    return torch.nn.Linear(3, 3)\ndef batch({arguments}):\n    return torch.ones({size}, 3)\n")
    assert load.load(Source(model=f"{file}:build", micro_batch=5)).batch.shape == (5, 3)


@pytest.mark.parametrize("argument", ["device", "tokenizer", "config"])
def test_what_is_no_size_is_not_given_one(tmp_path: Path, argument: str) -> None:
    file = tmp_path / "net.py"
    file.write_text(f"import torch\ndef build():\n    return torch.nn.Linear(3, 3)\ndef batch({argument}):\n    return torch.ones(2, 3)\n")
    with pytest.raises(UserError, match=argument):
        load.load(Source(model=f"{file}:build", micro_batch=5))
