"""What the text of a kernel gives away; and that of the shipped ones."""

from __future__ import annotations

import pytest

from foretell.tune.verify import corpus, scan


@pytest.mark.parametrize("entry", corpus.entries(), ids=lambda one: one.name)
def test_shipped_kernels_are_seen_as_their_heads_say(entry: corpus.CorpusEntry) -> None:
    assert bool(scan.findings(entry.path.read_text())) == entry.seen


@pytest.mark.parametrize(("text", "told"), [
    ("import torch\ntorch.allclose = print", "assigns to torch.allclose"),
    ("import torch as t\nt.cuda.synchronize = print", "assigns to t.cuda.synchronize"),
    ("import time\nsetattr(time, 'perf_counter', print)", "setattr on time"),
    ("from torch import cuda\ncuda.Event.elapsed_time = print", "assigns to cuda.Event.elapsed_time"),
    ("from multiprocessing import Process", "imports multiprocessing"),
    ("def forward(x):\n    try:\n        return k(x)\n    except Exception:\n        return x", "has a try in forward"),
    ("x = open('/proc/1/mem')", "calls open"),
    ("import sys\nsys._getframe()", "uses _getframe"),
])  # fmt: skip
def test_what_no_kernel_needs_is_found(text: str, told: str) -> None:
    assert any(told in one.text for one in scan.findings(text))


@pytest.mark.parametrize("text", [
    "try:\n    import triton\nexcept ImportError:\n    triton = None",
    "import torch\nclass A:\n    def __init__(self):\n        self.torch = 1\n        x = {}\n        x['a'] = 2",
])  # fmt: skip
def test_what_kernels_do_is_not(text: str) -> None:
    assert scan.findings(text) == []
