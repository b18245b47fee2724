"""Candidates in Triton: interpreted against eager, and compiled for a device that is not here."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.tune.clock.measure import TimingOptions
from foretell.tune.search.rowwise.torch_text import TorchRows
from foretell.tune.search.rowwise.triton_text import TritonRows
from foretell.tune.search.templates import templates_of
from foretell.tune.search.trial import PRUNED, Trials, pruned, written
from foretell.tune.verify import scan, source
from foretell.tune.verify.process import KernelSetting
from foretell.tune.verify.types import HarnessOptions
from tests.pure import row_tasks as tasks

ROUNDING = 40 * 2.0**-23
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize("name", tasks.MODULES)
def test_the_text_is_python_that_no_scan_refuses(name: str) -> None:
    module, inputs = tasks.drawn(name)
    template = TritonRows(tasks.program(module, inputs), tasks.STUB)
    for config in (template.space.first, {**template.space.first, "warps": 16}):
        text = template.text(config)
        ast.parse(text)
        assert scan.findings(text) == [] and f"num_warps={config['warps']}" in text


def test_what_is_flat_has_no_rows_to_choose() -> None:
    def axes(name: str) -> set[str]:
        return {axis.name for axis in TritonRows(tasks.program(*tasks.drawn(name)), "").space.axes}

    assert axes("gates") == {"warps", "back_warps", "block"}
    assert axes("rms") == {"warps", "back_warps", "rows", "back_rows", "programs"}


def test_what_fits_no_registers_is_not_compiled() -> None:
    """24 numbers in a row are held as 32: four rows in a warp are four numbers a thread."""
    template = TritonRows(tasks.program(*tasks.drawn("rms")), "")
    usual = {**template.space.first, "warps": 1, "back_warps": 1}
    assert template.hopeless(usual) == "" == TorchRows(template.program, "").hopeless({})
    wide = replace(template, program=replace(template.program, width=4096))
    assert wide.hopeless({**usual, "back_warps": 4}) == "" and wide.hopeless({**usual, "rows": 2}) == "256 numbers in each thread"


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", tasks.MODULES)
def test_values_and_gradients_are_eagers(name: str, tmp_path: Path) -> None:
    module, inputs = tasks.drawn(name)
    template = TritonRows(tasks.program(module, inputs), tasks.STUB)
    narrow = {"rows": 4, "back_rows": 2, "programs": 4, "block": 128}
    for config in (template.space.first, {**template.space.first, **{key: value for key, value in narrow.items() if key in template.space.first}}):
        assert max(tasks.gaps(module, tasks.made(template.text(config), module, tmp_path), inputs)) < ROUNDING, config


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.slow(reason="test_kernel_search.py prunes by what a compiler would say")
def test_configurations_that_spill_are_pruned_without_a_gpu(tmp_path: Path) -> None:
    """Forward and backward for sm_90: two rows of 4096 numbers in one warp do not fit its registers, one row in eight warps does."""
    path = tmp_path / "task.py"
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(4096))\n    def forward(self, x):\n"
        "        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight\n"
        "def get_inputs():\n    return [torch.randn(8, 4096)]\n"
    )
    with Trials(source.reference(str(path)), KernelSetting(), HarnessOptions(seed=1), TimingOptions()) as trials:
        (template,) = templates_of(trials.task, trials.shape, on_gpu=True, triton=True)
        usual = {**template.space.first, "warps": 8, "back_warps": 8}
        good = trials.compiled(written(template.text(usual)))
        assert [one["kernel"] for one in good] == ["forward_rows", "backward_rows"] and pruned(good) is None
        assert all(0 < one["registers"] < 255 and not one["spilled_bytes"] for one in good)
        bad = trials.tried(written(template.text({**usual, "back_rows": 2, "back_warps": 1})), prune=True)
        assert bad.status == PRUNED and bad.spilled_bytes > 0
