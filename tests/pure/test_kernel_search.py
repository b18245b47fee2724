"""`foretell tune search` without a generator: a planted best found by the clock, interruptions, what an earlier search found."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretell.api.kernels import search as kernels
from foretell.cli import main
from foretell.errors import UserError
from foretell.tune.clock.measure import TimingOptions
from foretell.tune.search.search import SearchOptions, search
from foretell.tune.search.space import Axis, Config, ConfigSpace
from foretell.tune.search.templates import bucket_of, cut, digest_of, templates_of
from foretell.tune.search.trial import PRUNED, REFUSED, TIMED, Trials, pruned, written
from foretell.tune.verify import corpus, source
from foretell.tune.verify.process import KernelSetting
from foretell.tune.verify.types import HarnessOptions

SETTING = KernelSetting()
QUICK = HarnessOptions(seed=1, gradients=False, stages=("smoke",))
TIMING = TimingOptions(pairs=10, l2_bytes=1 << 12)


class Planted:
    """A softmax after work that nobody needs: none of it at rows=4, warps=2; wrong wherever both are at their ends."""

    name = "planted"
    compiles = False
    space = ConfigSpace((Axis("rows", (1, 2, 4, 8, 16), 16), Axis("warps", (1, 2, 4, 8), 8)))

    def hopeless(self, config: Config) -> str:
        return "no" if config == {"rows": 1, "warps": 1} else ""

    def text(self, config: Config) -> str:
        rows, warps = (axis.choices.index(config[axis.name]) for axis in self.space.axes)
        work, wrong = 4 * (abs(rows - 2) + 2 * abs(warps - 1)), (rows, warps) == (0, 3)
        return (
            "import torch\nfrom torch import nn\nW = torch.randn(128, 128)\n\n\nclass ModelNew(nn.Module):\n    def forward(self, x):\n"
            f"        for _ in range({work}):\n            W @ W\n        return torch.softmax(x, -1){' * 2' if wrong else ''}\n"
        )


@pytest.fixture
def trials() -> Iterator[Trials]:
    with Trials(corpus.task("softmax"), SETTING, QUICK, TIMING) as found:
        yield found


def test_the_planted_best_is_found_by_the_clock(trials: Trials, tmp_path: Path) -> None:
    """With 12 of 20 configurations measured; each step away from it doubles the time, or more."""
    options = SearchOptions(minutes=5, folder=tmp_path, compile=False, most=12)
    found = search(trials, options, template=Planted())
    assert found.config == {"rows": 4, "warps": 2} and len(found.rows) == 12
    assert found.rows[0][0] == found.config and found.verdict is not None and found.verdict.accepted


@pytest.mark.slow(reason="test_evolve.py compares with brute force where times are planted too")
def test_brute_force_by_the_clock_finds_the_same(trials: Trials, tmp_path: Path) -> None:
    template = Planted()
    times = {json.dumps(config): trials.tried(written(template.text(config))) for config in map(dict, template.space.all())}
    best = max((one.speedup, config) for config, one in times.items() if one.status == TIMED)[1]
    assert json.loads(best) == {"rows": 4, "warps": 2}
    assert sum(one.status == REFUSED for one in times.values()) == 1


def test_an_interrupted_search_goes_on_where_it_was(trials: Trials, tmp_path: Path) -> None:
    options = SearchOptions(minutes=5, folder=tmp_path, compile=False, most=5)
    told: list[str] = []

    def doing(what: str) -> None:
        told.append(what)
        if len(told) == 4:
            raise KeyboardInterrupt

    first = search(trials, options, template=Planted(), doing=doing)
    assert first.interrupted and first.text and 1 <= len(first.rows) < 5 and not first.faster
    second = search(trials, options, template=Planted())
    assert second.resumed == len(first.rows) and len(second.rows) == 5
    assert all(row in second.rows for row in first.rows)


def test_what_an_earlier_search_found_is_verified_again_and_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        for _ in range(40):\n"
        "            y = torch.softmax(x, -1)\n        return y\ndef get_inputs():\n    return [torch.randn(64, 64)]\n"
    )
    options = SearchOptions(minutes=5, folder=tmp_path / "kept", compile=False, most=2)
    with Trials(source.reference(str(path)), SETTING, QUICK, TIMING) as trials:
        first = search(trials, options)
        assert first.faster and first.kept is None and first.speed is not None
        again = search(trials, options)
        assert again.kept is not None and again.faster and again.speed is None and again.text == first.text
        (rows,) = (tmp_path / "kept").glob("*.jsonl")
        winner = json.loads(rows.read_text().splitlines()[-1])
        assert winner["winner"] == first.config and winner["low"] > 1.02
        longer = search(trials, SearchOptions(minutes=5, folder=tmp_path / "kept", compile=False, most=3, again=True))
        assert longer.kept is None and len(longer.rows) == 3


# ---------------------------------------------------------------- real templates


def test_a_task_without_a_template_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        return x.cumsum(0)\n"
        "def get_inputs():\n    return [torch.randn(4, 4)]\n"
    )
    told = r"no template does.*cumsum.*--generator"
    with Trials(source.reference(str(path)), SETTING, QUICK, TIMING) as trials, pytest.raises(UserError, match=told):
        search(trials, SearchOptions(folder=tmp_path))


def test_a_large_task_is_verified_on_fewer_rows(tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x, scale):\n        return torch.softmax(x * scale, -1)\n"
        "def get_inputs():\n    return [torch.randn(8, 300, 512), torch.rand(512)]\n"
    )
    with Trials(source.reference(str(path)), SETTING, QUICK, TIMING) as trials:
        sizes = [one.shape for one in next(iter(trials.cases.of("own"))).question.inputs]
        assert sizes[1] == (512,) and sizes[0][2] == 512 and 2**14 <= sizes[0][0] * sizes[0][1] * 512 <= 2**16
        assert bucket_of(trials.shape) == "float32 4096x512, float32 1x512"
        assert cut(trials.task, trials.shape, most=1 << 30) is trials.task
        (template,) = templates_of(trials.task, trials.shape, on_gpu=False, triton=False)
        right = template.text(template.space.first)
        assert trials.verified(written(right)).accepted
        wrong = right.replace("for a in range(0, rows, step):", "for a in range(0, min(rows, 2000), step):")
        verdict = trials.verified(written(wrong))
        assert wrong != right and (verdict.accepted, verdict.stage) == (False, "whole")


def test_what_spills_or_does_not_compile_is_pruned() -> None:
    good = {"kernel": "k", "registers": 64, "spilled_bytes": 0}
    assert pruned((good, good)) is None and pruned(()) is None
    for bad in ({**good, "spilled_bytes": 8}, {**good, "registers": 255}, {"kernel": "k", "problem": "no"}):
        found = pruned((good, bad))
        assert found is not None and found.status == PRUNED


# ---------------------------------------------------------------- the command


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["tune", "search", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(("words", "told"), [
    ((), "no TASK.py is given"), (("nothing.py",), "there is no file nothing.py"), (("nothing.py", "--minutes", "0"), "--minutes 0"),
    (("nothing.py", "--minutes", "nan"), "--minutes nan"), (("nothing.py", "--money", "1"), "--money is of --generator"),
    (("nothing.py", "--generator", "cat", "--money", "1"), "no price is given"),
    (("nothing.py", "--generator", "cat", "--without", "x"), "unknown way"),
    (("nothing.py", "--generator", "http://example.org/v1", "--model", "m"), "in the clear"),
    (("nothing.py", "--generator", "https://example.org/v1"), "--model NAME"),
    (("nothing.py", "--generator", "cat", "--price-in", "-1", "--price-out", "-1", "--money", "1"), "not below zero"),
    (("--replay", "nothing.jsonl"), "nothing.jsonl cannot be read"), (("--curate", "nothing.jsonl"), "nothing.jsonl cannot be read"),
])  # fmt: skip
def test_bad_input_is_a_line(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status, _, said = asked(capsys, *words)
    assert status == 2 and told in said and "Traceback" not in said and said.count("error:") == 1


def test_the_command_writes_a_kernel_that_passed_the_whole_harness(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CPU_CACHE_BYTES", 1 << 12)  # few calls in a loop
    task = str(corpus.FOLDER / "tasks" / "rmsnorm.py")
    status, said, _ = asked(capsys, task, "--most", "1", "--no-compile", "--device", "cpu", "--out", str(tmp_path / "out"))
    assert status in (0, 1) and "1 of 36 configurations tried" in said and "Next:  foretell tune verify" in said
    told = json.loads((tmp_path / "out" / "search.json").read_text())
    passed = {one["stage"] for one in told["verdict"]["stages"] if one["status"] == "passed"}
    assert told["verdict"]["accepted"] and passed >= {"scan", "smoke", "fuzz", "gradients", "magnitudes", "audit", "parity"}
    text = (tmp_path / "out" / "kernel.py").read_text()
    assert text == told["text"] and source.defined(ast.parse(text)) >= {"Model", "ModelNew", "get_inputs"}
    assert len(list((cache_dir / "kernels").glob("*.jsonl"))) == 1


@pytest.mark.slow(reason="test_an_interrupted_search_goes_on_where_it_was, in one process")
def test_a_killed_search_has_kept_its_rows(tmp_path: Path) -> None:
    task = str(corpus.FOLDER / "tasks" / "rmsnorm.py")
    environment = {**os.environ, "FORETELL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "foretell", "tune", "search", task, "--no-compile", "--device", "cpu", "--out", str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--minutes", "10"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and sum(len(one.read_text().splitlines()) for one in (tmp_path / "cache").glob("kernels/*.jsonl")) < 4:
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run([*command, "--most", "3", "--json"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)["kernel"]["search"]["resumed"] >= 3


def test_a_width_that_is_a_number_is_declined_elsewhere(tmp_path: Path) -> None:
    """Found out by the harness, at first and when the search is resumed."""
    path = tmp_path / "task.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n"
        "        return x - x.sum(-1, keepdim=True) / x.shape[-1]\n"
        "def get_inputs():\n    return [torch.randn(16, 40)]\n"
    )
    asked_of = HarnessOptions(seed=1, gradients=False, stages=("smoke", "fuzz"))
    with Trials(source.reference(str(path)), SETTING, asked_of, TIMING) as trials:
        for most in (1, 2):
            found = search(trials, SearchOptions(minutes=5, folder=tmp_path / "kept", compile=False, most=most))
            assert found.config is not None and found.verdict is not None and found.verdict.accepted
            assert any("declines other widths" in note for note in found.notes) and "width != 40" in found.text and found.verdict.declined


def test_the_text_around_an_op_makes_no_other_op(tmp_path: Path) -> None:
    """What was measured of an op serves wherever it is; another width is another question, and tried early."""
    texts = {
        "one": "x.softmax(-1)", "same": "torch.nn.functional.softmax(x, dim=-1)", "other": "(2 * x).softmax(-1)",
    }  # fmt: skip
    shapes = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(f"# {name}\nimport torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        return {text}\n"
                        "def get_inputs():\n    return [torch.randn(16, 40)]\n")  # fmt: skip
        with Trials(source.reference(str(path)), SETTING, QUICK, TIMING) as trials:
            (template,) = templates_of(trials.task, trials.shape, on_gpu=False, triton=False)
            shapes[name] = (trials.shape.op, digest_of(template))
    assert shapes["one"] == shapes["same"] and shapes["one"][0] != shapes["other"][0]


def test_verified_side_by_side_they_are_what_they_are_alone(trials: Trials) -> None:
    """In their order; a crash among them ends nothing."""
    good = "import torch\nfrom torch import nn\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        return torch.softmax(x, -1)\n"
    crash = good.replace("return", "torch.empty(0).numpy().ctypes.data\n        import os; os.abort()\n        return")
    codes = [written(text) for text in (good, crash, good.replace("-1)", "-1) * 2"), good)]
    found = list(trials.each(codes, workers=3))
    assert [one.status for one in found] == [TIMED, REFUSED, REFUSED, TIMED] and [one.check for one in found[1:3]] == ["crash", "values"]
