"""Files with mistakes: one line that names the file and the line, exit 2, and nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox import child

HEAD = """import os, signal, sys, time
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        {forward}

def build():
    {build}

def batch(micro_batch):
    {batch}

def loss(output, batch):
    {loss}
"""
RIGHT = {
    "forward": "return self.b(torch.relu(self.a(x)))",
    "build": "return Net()",
    "batch": 'return {"x": torch.randn(micro_batch, 32), "y": torch.randint(10, (micro_batch,))}',
    "loss": 'return nn.functional.cross_entropy(output, batch["y"])',
}
FORWARD, BUILD, LOSS = 12, 15, 21
"""Lines of the bodies; a function itself begins one before."""
WRONG = {
    "sizes": ("forward", "return self.b(self.a(x)[:, :32])", FORWARD, "same reduction dim", "sizes do not match"),
    "a name": ("forward", "return self.b(missing)", FORWARD, "name 'missing' is not defined", ""),
    "recursion": ("forward", "return self.forward(x)", FORWARD, "recursion", "calls itself"),
    "prints": ("forward", "print('x' * 3_000_000); raise KeyError('k')", FORWARD, "KeyError", ""),
    "leaves": ("forward", "os._exit(0)", FORWARD, "os._exit ends the process", "take that out"),
    "kills": ("forward", "os.kill(os.getpid(), signal.SIGKILL)", FORWARD, "os.kill ends the process", "take that out"),
    "exits": ("forward", "sys.exit(3)", FORWARD, "ends the program", "__main__"),
    "a package": ("build", "import flash_attn_cuda", BUILD, "flash_attn_cuda", "install 'flash_attn_cuda'"),
    "a download": ("build", "import urllib.request as r; r.urlopen('http://127.0.0.1:9/w')", BUILD, "refused", "without downloading"),
    "a folder": ("build", "os.chdir('/'); open('data/train.csv')", BUILD, "No such file", "whole path"),
    "raises": ("build", "return Net(**{'width': 3})", BUILD, "unexpected keyword", ""),
    "None": ("build", "Net()", BUILD - 1, "returned None, not a model", "return an nn.Module"),
    "a tuple": ("build", "return 'model', 3", BUILD - 1, "returned tuple, not a model", "return an nn.Module"),
    "frozen": ("build", "return Net().requires_grad_(False)", BUILD, "no parameter to train", "unfreeze"),
    "many losses": ("loss", 'return (output - 1).pow(2)', LOSS - 1, "shape (1, 10)", ".mean()"),
    "no gradient": ("loss", "return output.detach().mean()", LOSS - 1, "no gradient", ".detach()"),
    "numpy": ("batch", 'return {"x": np.zeros((micro_batch, 32)), "y": 0}', FORWARD, "numpy.ndarray", "torch.as_tensor"),
    "other names": ("batch", 'return {"image": torch.zeros(2, 32), "label": 0}', FORWARD, "not dict", "check that the batch is"),
}  # fmt: skip


def refused(path: Path, *more: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["fit", f"{path}:build", "--on", "H100", "--no-cache", *more]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and "foretell/trace" not in said
    return next(line for line in said.splitlines() if line.startswith("error: "))


def told_of(path: Path) -> str:
    """What the process that traces answers, without one."""
    error = child.answered(lambda: child.trace_asked(child.request(Source(model=f"{path}:build"), Recipe(), (9, 0), {})))["error"]
    assert error["kind"] in ("ModelError", "UserError")
    return f"{error['problem']}; try: {error['remedy']}"


@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_told_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, path = os.getcwd(), tmp_path / "mine.py"
    for part, code, line, said, remedy in WRONG.values():
        path.write_text(HEAD.format(**{**RIGHT, part: code}))
        told = told_of(path)
        assert f"mine.py:{line}" in told and said in told and remedy in told, (code, told)
        assert ("check that the batch" in told) == ("check that the batch" in remedy)
    assert os.getcwd() == here and [file.name for file in tmp_path.iterdir()] == ["mine.py"]


def test_a_crash_is_told_at_its_line_and_not_blamed_on_anybody(tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD.format(**{**RIGHT, "forward": "import ctypes; ctypes.string_at(0)"}))
    told = refused(path, capsys=capsys)
    assert f"crashed (SIGSEGV) ({path}:{FORWARD}, in forward)" in told and "if it does not, the mistake is foretell's" in told


def test_what_forward_cannot_take_is_told_of_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD.format(**RIGHT).replace("def forward(self, x)", "def forward(self, x, mask)"))
    told = told_of(path)
    assert "forward(x, mask)" in told and "mask" in told and "mine.py:11" in told and "check that the batch is what forward takes" in told


def test_backward_is_told_at_the_line_of_its_forward(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD.format(**{**RIGHT, "forward": "h = torch.sigmoid(self.a(x)); y = h * h; h += 1; return self.b(y + h)"}))
    told = told_of(path)
    assert f"mine.py:{FORWARD}, in forward" in told and "x = x + y" in told


@pytest.mark.slow(reason="waits for a time limit; a model that never returns is ended in test_trace_child.py")
def test_a_loop_without_end_is_told_at_its_line_and_what_it_forked_is_gone(
    tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, pids = tmp_path / "mine.py", tmp_path / "pids"
    spin = f"\n        if os.fork() == 0:\n            open({str(pids)!r}, 'w').write(str(os.getpid()))\n            time.sleep(600)\n"
    path.write_text(HEAD.format(**{**RIGHT, "forward": f"{spin}        while True:\n            x = x"}))
    told = refused(path, "--time-limit", "4", capsys=capsys)
    assert "time limit" in told and any(f"mine.py:{line}, in forward" in told for line in (16, 17))
    until = time.monotonic() + 10
    while pids.exists() and Path(f"/proc/{pids.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not pids.exists() or not Path(f"/proc/{pids.read_text()}").exists()
