"""How busy a machine is: held against what processes say of themselves, and what is said of it by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.cli import main
from foretell.report.comparison import compare, render
from foretell.report.html import data as html_data
from foretell.report.html import sections as html_sections
from foretell.runtime.observe import machine_load as load
from foretell.runtime.observe.machine_load import LoadMeter, MachineLoad, OnGpu, Other
from foretell.runtime.observe.measurement import Measurement
from tests.pure.test_comparison import CPU, MEASURED, PLAN, folder

SPINS = """
import sys, time
print("ready", flush=True); sys.stdin.readline()
before, began = time.process_time(), time.monotonic()
while time.monotonic() - began < 1.0: pass
print(time.process_time() - before, flush=True); sys.stdin.readline()
"""
LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells who uses its cores")


@pytest.fixture
def spinner() -> Any:
    with subprocess.Popen([sys.executable, "-c", SPINS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@LINUX
def test_who_uses_the_cores(spinner: Any) -> None:
    """Seconds of a process that computes, by its own clock: the run's own where it is the run, another's where it is not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as idle:
        mine, theirs = LoadMeter(spinner.pid), LoadMeter(idle.pid)
        began = time.monotonic()
        spinner.stdin.write("go\n")
        spinner.stdin.flush()
        used = float(spinner.stdout.readline())
        as_run, as_other = mine.read(), theirs.read()
        seconds = time.monotonic() - began
        idle.kill()
    assert as_run.own_cores == pytest.approx(used / seconds, abs=0.1)
    assert as_other.own_cores is not None and as_other.own_cores < as_run.own_cores
    assert as_other.other_cores is not None and as_other.other_cores > used / seconds - 0.1
    named = next(one for one in as_other.others if one.name.startswith("python"))
    assert named.cores > used / seconds - 0.1 and as_other.cores >= 1 and as_other.load_average is not None
    assert load.of_json(as_other.to_json()) == as_other


def test_what_is_said() -> None:
    busy = MachineLoad(cores=2, load_average=9.8, own_cores=0.5, other_cores=1.4, others=(Other(name="python", processes=2, cores=1.2),))
    assert load.words(busy, 0.57) == (
        "this machine was busy: load 9.8 on 2 cores, other processes used 1.4 of them (python 1.2), this run waited for a core 57 % of the time"
    )
    assert load.words(MachineLoad(cores=8, load_average=1.2, own_cores=1.0, other_cores=0.3), 0.01) == ""
    assert load.words(MachineLoad(cores=8, load_average=8.4, own_cores=8.0, other_cores=0.02), 0.02) == "", "its own threads"
    assert "more threads than cores" in load.words(MachineLoad(cores=2, load_average=4.0, own_cores=1.9, other_cores=0.01), 0.5)
    assert "host gave 1.5 to other guests" in load.words(MachineLoad(cores=4, load_average=2.0, own_cores=2.0, other_cores=0.0, stolen_cores=1.5))
    shared = MachineLoad(cores=8, load_average=1.0, own_cores=1.0, other_cores=0.1, gpu_others=(OnGpu(device=0, name="python", bytes=3 << 30),))
    assert load.words(shared).endswith("1 other process was on its GPUs (python, 3.0 GiB)")
    assert load.words(None, 0.5) == "this machine was busy: this run waited for a core 50 % of the time" and load.words(None, None) == ""


@pytest.mark.parametrize(("own", "wanted"), [({11}, (OnGpu(device=1, name="a process", bytes=7),)), ({11, 12, 99999999}, ()), ({5}, None)])
def test_other_processes_on_the_run_s_gpus(own: set[int], wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs that the run does not use do not count; where the driver does not name the run itself, nobody knows."""
    there = {0: [(13, 5)], 1: [(11, 1), (99999999, 7)]}
    driver = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda index: [SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in there[index]],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert load.gpu_others(own) == wanted


OTHERS = [{"name": "chrome", "processes": 3, "cores": 1.5}]
BUSY = {**MachineLoad(cores=2, load_average=9.8, own_cores=0.4, other_cores=1.6).to_json(), "others": OTHERS}


def test_every_screen_says_that_the_machine_was_busy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the difference: a step that took long there says little about the predictor; and nothing is learned from it."""
    slow = {"step_seconds": 3.0, "per_second": 1024 / 3.0, "stretches": [3.0] * 10, "hardware": CPU, "load": BUSY, "delayed": 0.7}
    plan = PLAN.with_(hardware="CPU")
    run = folder(tmp_path / "run", plan, **slow)
    found = compare(plan, {**MEASURED, **slow})
    used = "other processes used 1.6 of them (chrome 1.5)"
    sentence = f"this machine was busy: load 9.8 on 2 cores, {used}, this run waited for a core 70 % of the time"
    assert found.busy == sentence
    text = render(found, 80).plain
    assert "OUTSIDE, busy" in text and sentence in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80
    page = html_sections.page(html_data.read(run))
    assert "the machine was busy" in page.conclusion and any("load 9.8 on 2 cores" in note for note in page.notes)
    assert main(["compare", str(run), "--update-profile", "--device", "cpu"]) == 1
    assert f"left as it is: {sentence}" in " ".join(capsys.readouterr().out.split())
    calm = folder(tmp_path / "calm", plan, hardware=CPU)
    assert main(["compare", str(calm), str(run)]) == 1
    assert f"B: {sentence}" in " ".join(capsys.readouterr().out.split())
    assert "busy" not in render(compare(plan, {**MEASURED, "hardware": CPU}), 80).plain
    assert Measurement.from_json({**MEASURED, **slow, "flops_per_step": None, "peak_flops_per_second": None}).load == load.of_json(BUSY)
