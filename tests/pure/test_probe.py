"""The probe on this CPU, for real: measured, killed and gone on with, stopped, on a full disk, without a GPU."""

from __future__ import annotations

import json
import operator
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware.lookup import find_profile
from foretell.hardware.probe import journal, machine, memory, ops, run
from foretell.hardware.probe.cases import families as cases
from foretell.hardware.probe.cases import steps
from foretell.hardware.probe.clock import Clock, Timing, host_clock
from foretell.hardware.probe.harvest import Harvest
from foretell.hardware.profile import Measured, load
from tests import forks

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "foretell" / "hardware" / "profiles" / "H200-SXM-141GB.rows.jsonl.gz"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


# ---------------------------------------------------------------- end to end


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The journal of a probe that was killed in the middle of its ops; in fp32: products in bf16 take long on most CPUs."""
    path = tmp_path_factory.mktemp("killed") / "cpu.rows.jsonl"
    code = (
        "from foretell.hardware.probe import run; from foretell.hardware.probe.cases import families as cases;"
        " cases.MOSTLY_FP32 = cases.MOSTLY_FP32[:1] * len(cases.MOSTLY_FP32);"
        f"run.probe('cpu', 'quick', journal={str(path)!r}, seconds=24)"
    )
    child = forks.Command(code=code, env=environment())
    wait_for(lambda: path.exists() and path.read_bytes().count(b'\n["ops"') >= 4, child)
    child.kill()
    child.communicate()
    return path, path.read_bytes()


def wait_for(ready: Any, child: forks.Command, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert child.poll() is None, "it ended by itself"
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def resumed(killed: tuple[Path, bytes]) -> tuple[Measured, Measured]:
    """What the killed probe had, and what it had after going on for some seconds; its last line was torn besides."""
    path, content = killed
    path.write_bytes(content + b'["ops",0.1,{"case":["lin')
    before = journal.gather(path)
    spent = sum(entry.spent for entry in journal.read(path)[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cases, "MOSTLY_FP32", cases.MOSTLY_FP32[:1] * len(cases.MOSTLY_FP32))
            after = run.probe("cpu", "quick", journal=path, seconds=spent + 4.0, resume=True)
    finally:
        torch.set_num_threads(threads)
    return before, after


def test_a_killed_probe_leaves_a_valid_partial_journal(resumed: tuple[Measured, Measured]) -> None:
    before, _ = resumed
    assert len(before.cases) >= 4 and before.rows
    assert "ops: interrupted" in before.missing


def test_going_on_keeps_what_was_measured_and_adds_to_it(resumed: tuple[Measured, Measured], killed: tuple[Path, bytes]) -> None:
    before, after = resumed
    names = [(case.family, case.number) for case in after.cases]
    assert len(set(names)) == len(names)
    assert after.cases[: len(before.cases)] == before.cases and len(after.cases) > len(before.cases)
    assert after.levels == before.levels and after.launch == before.launch
    assert after.missing == ()
    assert not killed[0].exists() and journal.packed_path(killed[0]).exists()


def test_figures_of_this_cpu_are_possible(resumed: tuple[Measured, Measured]) -> None:
    """Bounds that no machine of this kind leaves: nothing is negative, absurd or in other units."""
    _, after = resumed
    assert after.about.backend == "cpu" and after.about.device == "CPU" and after.about.torch == torch.__version__
    assert 1e-7 < after.launch["device_seconds"] < 1e-3
    assert all(1e7 < level["bytes_per_second"] < 1e13 for level in after.levels)
    assert {copy["name"] for copy in after.copies} >= {"host-copy", "disk-write"}
    assert after.steps and all(1e-4 < step["seconds"] < 60 for step in after.steps)
    for row in after.rows:
        assert 0 < row.seconds < 30 and row.spread >= 0 and row.host_seconds == 0
        assert {spec.dtype for spec in row.inputs} <= {"float32", "bfloat16", "int64", "int32", "bool", "complex64", "uint8"}


def test_a_finished_probe_measures_nothing_again(resumed: tuple[Measured, Measured], killed: tuple[Path, bytes]) -> None:
    _, after = resumed
    began = time.perf_counter()
    again = run.probe("cpu", "quick", journal=killed[0], seconds=30, resume=True)
    assert time.perf_counter() - began < 10
    by_name = operator.attrgetter("family", "number")
    assert sorted(again.cases, key=by_name) == sorted(after.cases, key=by_name) and again.copies == after.copies


def test_the_command_measures_fits_and_keeps_a_profile(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.BUDGET_SECONDS, ("cpu", "quick"), 7.0)
    monkeypatch.setattr(cases, "MOSTLY_FP32", cases.MOSTLY_FP32[:1] * len(cases.MOSTLY_FP32))
    assert main(["probe", "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = answer["probe"]
    path = Path(found["profile"])
    assert path.parent == cache_dir / "profiles"
    known = load(path, device="CPU", torch_version=torch.__version__)
    assert known.ops and known.mode == "quick" and known.figures["name"] == "CPU"
    assert find_profile("CPU", torch.__version__, reported_as=known.reported_as) == known
    assert found["rows"] == len(journal.gather(next(path.parent.glob("*.rows.jsonl.gz"))).rows)
    assert found["product_flops_per_second"].get("float32", 1e9) > 1e7
    assert answer["schema_version"] and "versions" in answer


# ---------------------------------------------------------------- stopped, refused, full


def test_ctrl_c_keeps_the_journal_and_says_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    child = forks.Command("probe", "--device", "cpu", "--full", "--out", str(out), env=environment())
    rows = tmp_path / "here.rows.jsonl"
    wait_for(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 4, child)
    child.send_signal(signal.SIGINT)
    printed, told = child.communicate(timeout=60)
    assert child.returncode == 130 and printed == ""
    assert f"foretell probe --full --out {out} --resume" in told and "no profile was written" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.rows.jsonl"]
    assert journal.gather(rows).missing


_SMALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
from foretell.cli import main
sys.exit(main(["probe", "--device", "cpu", "--out", sys.argv[1]]))
"""


@pytest.mark.slow(reason="a probe as a process of its own")
def test_a_full_disk_keeps_what_was_whole_and_says_so(tmp_path: Path) -> None:
    """No file may grow beyond 12 kB: writing fails half-way, as on a full disk."""
    out = tmp_path / "here.json"
    done = subprocess.run(
        [sys.executable, "-c", _SMALL, str(out)], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "the disk is full" in done.stderr and "are kept there and no profile was written" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.rows.jsonl"]
    found = journal.gather(tmp_path / "here.rows.jsonl")
    assert found.rows and any(line.startswith("disk: ") for line in found.missing)


@NO_GPU
def test_no_gpu_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--device", "cuda", "--out", str(tmp_path / "p.json")]) == 2
    told = capsys.readouterr().err
    assert "--device cuda" in told and "foretell probe --device cpu" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["--quick", "--full"], ["--device", "tpu"]])
def test_bad_options_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *words]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_told_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["probe", "--device", "cpu", "--out", str(tmp_path / "file" / "p.json")]) == 2
    assert "nothing was measured" in capsys.readouterr().err


class Driver:
    """An NVIDIA driver that says what it is told to."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, percent: list[int], processes: list[tuple[int, int]]) -> None:
        self.percent, self.processes = percent, processes

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self.percent.pop(0))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes]


def test_a_gpu_in_use_is_refused_with_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver([0, 97, 98, 0, 99], [(os.getpid(), 1), (4711, 5 * 2**30)]))
    with pytest.raises(UserError, match=r"busy 97 % of the time, process 4711 holds 5\.0 GiB.*--force"):
        machine.refuse_busy()
    monkeypatch.setitem(sys.modules, "pynvml", Driver([0, 0, 3, 0, 100], [(os.getpid(), 1)]))
    machine.refuse_busy()


# ---------------------------------------------------------------- what is measured


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_any_beginning_has_every_family_in_proportion(kind: str) -> None:
    order = ops.order(kind)
    assert len(set(order)) == len(order)
    whole = Counter(family for family, _ in order)
    seen: Counter[str] = Counter()
    for position, (family, _) in enumerate(order, 1):
        seen[family] += 1
        if position % 50 == 0:
            for name, count in whole.items():
                assert abs(seen[name] - count * position / len(order)) < 4, (name, position)
    assert not (kind == "cpu" and cases.CUDA_ONLY & set(whole))


@pytest.mark.slow(reason="shapes of all shipped rows drawn anew; beginnings of what is drawn are looked at above")
def test_cases_of_a_large_gpu_are_those_that_were_shipped() -> None:
    """Drawing is held fixed: the shapes of the shipped rows come out again."""

    class Stop(Exception):
        pass

    class First(cases.Draw):
        def tensor(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Any:
            raise Stop((str(dtype)[6:], *shape))

    compared = 0
    for case in journal.gather(SHIPPED).cases:
        if case.family not in ("linear", "unary", "convolution", "softmax", "batched"):
            continue
        with pytest.raises(Stop) as first:
            cases.FAMILIES[case.family][0](First(1000 * sum(map(ord, case.family)) + case.number, "cuda", 1.0))
        specs = {(spec.dtype, *spec.shape) for row in case.rows for spec in (*row.inputs, *row.outputs)}
        assert first.value.args[0] in specs, (case.family, case.number)
        compared += 1
    assert compared > 1200


@pytest.mark.slow(reason="fifty cases are measured; that cases of every family are drawn is looked at above")
def test_cases_of_a_cpu_have_the_ops_and_sizes_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of a step of gpt-tiny has been timed by a few cases, on larger and on smaller tensors; in fp32, as the demo is."""
    monkeypatch.setattr(cases, "MOSTLY_FP32", (torch.float32,) * len(cases.MOSTLY_FP32))
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.on_cpu import trace_as_cpu

    trace = trace_as_cpu(Source(model="gpt-tiny", micro_batch=2), Recipe(precision="fp32"))
    wanted: dict[str, list[int]] = {}
    for program, _ in trace.schedule["steady_step"]:
        for op in trace.programs[program].ops:
            wanted.setdefault(op.name, []).append(sum(ref.spec.nbytes for ref in (*op.inputs, *op.outputs)))
    device, clock = machine.device_of("cpu"), Clock("cpu", budget=1e-4)
    found: dict[str, list[int]] = {}
    for family, numbers in (("transformer", range(8)), ("head", range(6)), ("update", range(24)), ("linear", range(12))):
        for number in numbers:
            for row in ops.run_case(family, number, "cpu", device, clock).rows:
                found.setdefault(row.name, []).append(sum(spec.nbytes for spec in (*row.inputs, *row.outputs)))
    timed = [name for name in wanted if name.startswith("aten.") and not free(name) and name != "aten.arange.default"]
    assert len(timed) > 15
    assert [name for name in timed if name not in found] == []
    for name in ("aten.addmm.default", "aten.mm.default", "aten.native_layer_norm.default", "aten._fused_adamw_.default"):
        assert min(found[name]) <= max(wanted[name]) and max(found[name]) >= min(wanted[name]), name


def free(name: str) -> bool:
    from foretell.hardware.probe.harvest import _FREE

    return f"aten::{name.split('.')[1]}" in _FREE


def test_cpu_cases_are_small() -> None:
    device = machine.device_of("cpu")
    scales = [ops.scale_of("cpu", device, seed) for seed in range(300)]
    assert min(scales) >= ops.CPU_LEAST_SCALE and max(scales) <= ops.CPU_MOST_SCALE
    assert max(scales) > 2 * min(scales)


# ---------------------------------------------------------------- clocks


def test_the_clock_finds_how_long_a_call_takes() -> None:
    now = host_clock()

    def call() -> None:
        end = now() + 200e-6
        while now() < end:
            pass

    timing = Clock("cpu").measure(call)
    assert 200e-6 <= timing.seconds < 400e-6
    assert timing.host_seconds == 0


def test_a_restless_timing_is_taken_again_and_the_calmer_kept() -> None:
    class Restless:
        def __init__(self) -> None:
            self.told = [Timing(5.0, 0.9, 0.0), Timing(2.0, 0.1, 0.0), Timing(3.0, 0.2, 0.0)]

        def measure(self, call: Any) -> Timing:
            return self.told.pop(0)

    harvest = Harvest(Restless())  # type: ignore[arg-type]
    x = torch.ones(4)
    with harvest:
        x * 2.0
        x + 3.0
    assert [(row.name, row.seconds) for row in harvest.rows.values()] == [("aten.mul.Tensor", 2.0), ("aten.add.Tensor", 3.0)]


def test_harvested_ops_leave_values_as_they_were() -> None:
    x = torch.ones(8)
    harvest = Harvest(Clock("cpu", budget=1e-4))
    with harvest:
        x.add_(1.0)
        y = x * 3.0
    assert x.tolist() == [2.0] * 8 and y.tolist() == [6.0] * 8
    assert all(row.seconds > 0 for row in harvest.rows.values())


# ---------------------------------------------------------------- disk and steps


def test_a_disk_without_room_is_left_out_with_the_reason(tmp_path: Path) -> None:
    rows, why = memory.disk(tmp_path, size=10**18)
    assert rows == [] and why is not None and "wanted" in why
    rows, why = memory.disk(tmp_path / "none")
    assert rows == [] and why
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_room_is_measured_and_left_clean(tmp_path: Path) -> None:
    rows, why = memory.disk(tmp_path, size=16 * 2**20)
    assert why is None and list(tmp_path.iterdir()) == []
    assert {row["name"]: row["bytes"] >> 20 for row in rows} == {"disk-write": 16, "disk-read": 16, "disk-both": 32}


def test_the_model_of_the_demo_is_no_reference_on_a_cpu() -> None:
    names = [config["model"] for config in steps.configs("cpu")]
    assert "gpt-tiny" not in names and len(names) >= 14
    every = [steps.name_of(config) for config in steps.configs("cuda")]
    assert len(set(every)) == len(every) >= 40


@pytest.mark.slow(reason="a probe of its own; what a killed one lacks is told above")
def test_stages_that_are_left_out_are_told(tmp_path: Path) -> None:
    """No time at all: what cannot be measured is missing, and the journal is whole."""
    found = run.probe("cpu", "quick", journal=tmp_path / "j.rows.jsonl", seconds=1e-9)
    assert found.missing == ("ops: no time was left",)
    assert journal.gather(tmp_path / "j.rows.jsonl.gz").missing == found.missing
