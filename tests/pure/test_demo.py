"""The demo: the whole loop with a smaller model, its text, and a run that is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from foretell import api
from foretell.api import demo as demo_api
from foretell.cli import main
from foretell.cli.run import demo
from foretell.errors import UserError
from foretell.hardware import profile as profiles
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.report import comparison
from foretell.trace.load.model import Source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def measured_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which this machine has a profile already."""
    from foretell.hardware.probe.machine import about

    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    known = profiles.load(ROOT / "foretell" / "hardware" / "profiles" / "CPU.json")
    here = about("cpu")
    own = replace(known, reported_as=here.reported_as, cores=here.cores, threads=here.threads)
    return profiles.save(own, profiles.own_path(own))


@pytest.mark.slow(reason="all of `foretell run demo`; probing, fitting, running and comparing are tested one by one")
def test_the_whole_loop_on_this_machine(
    tmp_path: Path, measured_machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the figures below are a CPU's")
    for where in (api, demo_api):  # which says it, and which plans it
        monkeypatch.setattr(where, "DEMO_MODEL", "gpt-tiny")
    monkeypatch.setattr(demo_api, "DEMO_PACERS", (Source(model="llama-tiny", micro_batch=2),))
    monkeypatch.setattr(demo, "TRAIN_SECONDS", 0.0)
    monkeypatch.setattr(demo, "ELSEWHERE", ("gpt-tiny", "H10O", 2, 128))
    status = main(["demo", "--json", "--out", str(tmp_path / "mine")])
    said = capfd.readouterr()
    found = json.loads(said.out)["demo"]
    assert status == (0 if found["ok"] else 1), "the exit status is the verdict"
    jsonschema.validate(found["comparison"], comparison.schema())
    step, rate, process = found["comparison"]["lines"]
    assert found["ok"] == (step["inside"] and rate["inside"] and process["inside"])
    assert process["inside"], (process["predicted"], process["low"], process["measured"], process["high"])
    loss = found["comparison"]["loss"]
    assert loss["last"] < 0.8 * loss["first"], "it learns"
    assert set(found["seconds"]) == {"machine", "probe", "pace", "plan", "text", "train", "elsewhere", "total"}
    for name in found["seconds"].keys() - {"total"}:
        assert f"\n{name} " in f"\n{said.err}", f"{name} is told"
    assert found["elsewhere"] == "", "a demo does not fail for what is not here"
    assert "times as long as its profile says" in said.err
    run = tmp_path / "mine"
    assert json.loads((run / "comparison.json").read_text()) == found["comparison"]
    assert {"plan.json", "log.jsonl", "measurement.json", "checkpoints"} <= {path.name for path in run.iterdir()}
    plan = plans.read(found["plan"])
    assert plan.global_batch == 8 and plan.predicted["pace"] > 0 and plan.predicted["device"] == "CPU"
    if plan.mesh.world == 1:
        seconds = plan.predicted["step_seconds"]
        assert plan.predicted["low_seconds"] == pytest.approx(seconds / 1.25)
        assert plan.predicted["high_seconds"] == pytest.approx(seconds / 0.75)
    assert main(["demo", "--out", str(run)]) == 2, "a folder that holds something is left alone"


def test_steps_follow_from_the_prediction(tmp_path: Path) -> None:
    plan = Plan(model={"model": "gpt-10m"}, hardware="CPU")
    counts = {
        seconds: demo._write(plan.with_(predicted={"step_seconds": seconds}), tmp_path / "plan.json")
        for seconds in (0.001, 0.7, 20.0)
    }
    assert counts == {0.001: demo.MOST_STEPS, 0.7: 50, 20.0: demo.LEAST_STEPS}
    assert demo._write(plan, tmp_path / "plan.json") == demo.LEAST_STEPS


def test_a_paced_plan_by_hand() -> None:
    said = {
        "step_seconds": 1.0, "low_seconds": 0.9, "high_seconds": 1.2, "tokens_per_second": 2048.0, "tokens_per_step": 2048,
        "breakdown": {"gemm": 0.75, "waiting_for_host": 0.25}, "phases": {"forward": 0.75}, "allocated_bytes": 7,
    }  # fmt: skip
    plan = Plan(model={"model": "gpt-10m"}, hardware="CPU", predicted=said)
    assert api.paced(plan, 2.0).predicted == {
        **said, "step_seconds": 2.0, "low_seconds": 1.6, "high_seconds": pytest.approx(8 / 3), "tokens_per_second": 1024.0,
        "breakdown": {"gemm": 1.5, "waiting_for_host": 0.5}, "phases": {"forward": 1.5}, "pace": 2.0,
    }  # fmt: skip
    two = api.paced(plan.with_(mesh=Mesh(dp_replicate=2)), 2.0).predicted
    assert (two["low_seconds"], two["high_seconds"]) == (1.8, 2.4), "the band of several ranks stays theirs"
    assert api.paced(plan.with_(predicted={}), 2.0).predicted == {}


def test_the_text_is_the_standard_library_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    place, files = demo._text()
    found = {path.name: path.read_bytes() for path in place.iterdir()}
    assert len(found) == files > 100 and all(name.endswith(".py") for name in found)
    assert found["argparse.py"] == Path(__import__("argparse").__file__).read_bytes()
    assert 2**20 < sum(map(len, found.values())) < 2**25
    (place / "argparse.py").write_text("cut")
    assert demo._text() == (place, files) and (place / "argparse.py").read_bytes() == found["argparse.py"]


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "_machine", lambda _: pytest.fail("the work began"))
    assert main(["demo", "--out", str(tmp_path / "file" / "run")]) == 2
    with pytest.raises(UserError, match="there already"):
        demo._check(tmp_path)


def test_the_demo_s_model_is_what_it_says() -> None:
    from foretell import zoo

    entry = zoo.get(api.DEMO_MODEL)
    config: dict[str, Any] = dict(entry.config)
    dim, layers, words, places = config["dim"], config["layers"], config["vocab_size"], config["context"]
    block = 4 * dim * dim + 4 * dim + 8 * dim * dim + 5 * dim + 4 * dim
    assert layers * block + (words + places) * dim + 2 * dim == 10_844_160, "by hand: 10.8M"
    assert words == 256 and "10.8M" in entry.summary


@pytest.mark.slow(reason="a whole run as a process; the signal itself is tested in test_train_failures.py")
def test_ctrl_c_reaches_the_run_and_it_saves(tmp_path: Path) -> None:
    plan = Plan(model={"model": "gpt-tiny", "overrides": {"layers": 1, "dim": 32, "heads": 2}}, hardware="CPU", precision="fp32")
    plans.write(plan, tmp_path / "plan.json")
    words = ["run", "plan.json", "--steps", "1000000", "--out", "run", "--device", "cpu"]
    code = f"import sys; from foretell.runtime.process.child import command; sys.exit(command({words!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        log, until = tmp_path / "run" / "log.jsonl", time.monotonic() + 90
        while (not log.exists() or log.read_text().count('"step": ') < 5) and time.monotonic() < until:
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130, said
    assert "SIGINT: stopping after this step" in said
    assert list((tmp_path / "run" / "checkpoints").iterdir()), "what was learned is kept"
    assert (tmp_path / "run" / "comparison.json").exists()
