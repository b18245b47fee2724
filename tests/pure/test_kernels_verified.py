"""Training kernels through the harness that looks for cheats, and compiled for a device that is not there. Of shipped kernels, as anybody's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foretell.kernels import catalog, measured
from foretell.tune.verify.inside import triton_kernels
from tests.kernel_cases import MINE, results

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests/data/kernels"
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_every_kernel_has_a_task() -> None:
    assert {path.stem for path in FILES.glob("*.py")} == set(MINE)


@with_triton
@pytest.mark.slow(reason="test_kernel.py holds the same kernels to float64")
@pytest.mark.parametrize("name", MINE)
def test_the_harness_accepts_it(name: str) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "foretell", "tune", "verify", str(FILES / f"{name}.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "accepted" in done.stdout, done.stdout + done.stderr


SPILLED = {("layer_norm", 16384): 64, ("add_layer_norm", 16384): 80}
"""Bytes of a thread at most: a row of so many columns does not fit beside the sums of its weight's gradient. Whether such a launch is worth
it is for a measurement to say."""


@with_triton
@pytest.mark.slow(reason="what spills is slow and not wrong; the kernels are interpreted in test_kernel.py")
@pytest.mark.parametrize("name", MINE)
def test_launches_of_declared_shapes_do_not_spill(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for sm_90, as they are launched when nothing was measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("foretell.kernels.kernel.interpreted", lambda: True)
    kernel = catalog.find(name)
    for shape in {str(one): one for one in kernel.measured_at if 16384 in (one.get("rows"), one.get("tokens"))}.values():
        small = {key: 16 if key in ("rows", "tokens") else size for key, size in shape.items()}
        bucket = kernel.bucket(shape)
        assert bucket is not None
        given = kernel.draw(small, torch.bfloat16, torch.device("cpu"))
        with measured.trying(name, bucket.config):
            reply, _ = triton_kernels.answer(
                {"how": triton_kernels.COMPILE}, lambda given=given: (results(kernel.call, kernel, list(given), torch.bfloat16), ({}, []))[1]
            )
        assert len(reply["launches"]) >= 2
        for launch in reply["launches"]:
            assert "registers" in launch, launch
            assert launch["spilled_bytes"] <= SPILLED.get((name, shape["width"]), 0), (shape, launch)
