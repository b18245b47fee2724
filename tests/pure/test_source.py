"""Tasks and candidates, read without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.errors import FileFormatError, MissingModel, UserError
from foretell.tune.verify import source

BOTH = '''"""Both in one file."""
from __future__ import annotations
import os
import torch
from torch import nn

WIDTH = 8
HALF = WIDTH // 2
Model_patched = os.system("touch patched")

def helper(x):
    return x * HALF

class Model(nn.Module):
    def forward(self, x):
        return helper(x)

def get_inputs():
    return [torch.randn(WIDTH)]

class ModelNew(nn.Module):
    pass

Model.forward = lambda self, x: x
'''


def test_a_reference_is_run_without_the_candidates_part(tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text(BOTH)
    text = source.reference(str(path)).text
    names = source.defined(source.read(str(path))[1])
    assert {"Model", "ModelNew", "helper"} <= names
    known: dict[str, object] = {}
    exec(compile(text, "reference", "exec"), known)
    assert {"Model", "get_inputs", "helper", "WIDTH", "HALF"} <= known.keys()
    assert not {"ModelNew", "Model_patched", "os"} & known.keys()
    assert text.splitlines().index("def helper(x):") == BOTH.splitlines().index("def helper(x):")


@pytest.mark.parametrize(("text", "kind", "told"), [
    ("class Model: pass", MissingModel, "no class ModelNew"), ("def (", FileFormatError, "is no Python"), (None, MissingModel, "no file"),
])  # fmt: skip
def test_a_file_that_is_no_candidate(tmp_path: Path, text: str | None, kind: type[UserError], told: str) -> None:
    path = tmp_path / "kernel.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(kind, match=told):
        source.candidate(str(path))


def test_a_candidate_alone_needs_a_reference(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("class ModelNew: pass")
    with pytest.raises(UserError, match="has no Model and no get_inputs") as caught:
        source.reference(str(path))
    assert "--reference" in caught.value.remedy
