"""Candidates in Triton: interpreted against eager, and compiled for a device that is not here."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from foretell.tune.search.rowwise.triton_text import TritonRows
from foretell.tune.verify import scan
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


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", tasks.MODULES)
def test_values_and_gradients_are_eagers(name: str, tmp_path: Path) -> None:
    module, inputs = tasks.drawn(name)
    template = TritonRows(tasks.program(module, inputs), tasks.STUB)
    narrow = {"rows": 4, "back_rows": 2, "programs": 4, "block": 128}
    for config in (template.space.first, {**template.space.first, **{key: value for key, value in narrow.items() if key in template.space.first}}):
        assert max(tasks.gaps(module, tasks.made(template.text(config), module, tmp_path), inputs)) < ROUNDING, config
