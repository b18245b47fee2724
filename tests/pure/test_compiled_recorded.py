"""What compiled Hugging Face models keep for backward, against what torch 2.11's partitioner kept on an H200."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretell.trace.inductor.compiled import _split, _ways
from foretell.trace.inductor.graph import INPUT
from foretell.trace.inductor.joint import join, pieces
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from tests.further import further

pytest.importorskip("transformers")
RECORDED: dict[str, Any] = json.loads((Path(__file__).parent.parent / "data" / "compiled_saved_h200.json").read_text())
ROTARY = {"ernie": None, "granite": ((8192, "float32"), (16384, "float32"))}
"""Known to differ: the angles of rotary positions are kept there, and both halves of their table here."""


@pytest.mark.parametrize("name", further(RECORDED, ["granite"], "a longer trace of another model"))
def test_the_same_tensors_are_kept_as_on_an_h200(name: str) -> None:
    row = RECORDED[name]
    source = Source(model=row["model"], micro_batch=row["micro_batch"], seq=row["seq"], overrides=row["overrides"])
    trace = capture(lambda: load(source), Recipe(), release="2.11.0")
    storages = dict(trace.storages)
    joint = join(pieces(trace.programs["micro_first"].ops, storages), storages, *_ways(trace))
    mine = Counter((node.numel, node.spec.dtype) for node in _split(joint, storages).saved if node.kind != INPUT)
    theirs = Counter((math.prod(shape), dtype) for _, shape, dtype in row["saved"])
    if ROTARY[name] is not None:
        angles, table = ROTARY[name]
        theirs[angles] -= 1
        mine[table] -= 1
    assert +mine == +theirs
