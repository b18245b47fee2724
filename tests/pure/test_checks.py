"""Checks over what a kernel's process told: each refuses what it is for, and nothing that a kernel may do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foretell.tune.verify import checks, parity
from foretell.tune.verify.inside.calls import raw_of
from foretell.tune.verify.inside.triton_kernels import resources_in


def noted(**told: Any) -> dict[str, Any]:
    return {"events": [], "replaced": [], "settings": {}, **told}


@pytest.mark.parametrize(("told", "settled", "check"), [
    (noted(), True, ""), (noted(replaced=["torch.allclose"]), False, "tamper"), (noted(settings={"default dtype": ["a", "b"]}), False, "settings"),
    (noted(events=[["network", "host"]]), False, "network"), (noted(events=[["process", "ptxas"]]), False, ""),
    (noted(events=[["process", "['/usr/bin/gcc', 'x.c']"]]), False, ""), (noted(events=[["process", "ptxas"]]), True, "processes"),
    (noted(events=[["process", "/bin/sh"]]), False, "processes"), (noted(events=[["file", "/home/cache/kernel.cubin"]]), False, ""),
    (noted(events=[["file", "/home/cache/kernel.cubin"]]), True, "files"), (noted(events=[["file", "/proc/7/mem"]]), False, "files"),
])  # fmt: skip
def test_conduct(told: dict[str, Any], settled: bool, check: str) -> None:
    found = checks.conduct(told, settled=settled)
    assert (found.check if found is not None else "") == check


def test_the_references_own_ops_are_seen_beside_others() -> None:
    theirs = ["aten.pow", "aten.mean", "aten.view", "aten.mul"]
    assert checks.passes_through(["aten.empty", *theirs, "aten.neg"], theirs) is not None
    assert checks.passes_through(["aten.view", "aten.pow", "aten.mean"], theirs) is None
    assert checks.passes_through([], []) is None and checks.passes_through(["aten.neg"], ["aten.view"]) is None


def test_waiting_in_the_first_calls_is_seen_and_noise_is_not() -> None:
    assert checks.faster_later([0.021] * 5, [0.001] * 5) is not None
    assert checks.faster_later([0.021, 0.001, 0.001, 0.001, 0.001], [0.001] * 5) is None
    assert checks.faster_later([0.004] * 5, [0.0001] * 5) is None, "a few milliseconds are a busy machine"


def test_growing_memory_is_seen() -> None:
    assert checks.leak(1 << 30, (1 << 30) + (40 << 20), 40, 1 << 10) is not None
    assert checks.leak(1 << 30, (1 << 30) + (4 << 20), 40, 1 << 10) is None


@pytest.mark.parametrize("seed", range(20))
def test_draws_of_one_distribution_are_alike(seed: int) -> None:
    """4096 values show a gap of 0.07. A shift of 0.4 in half of them is one of 0.15; one of 0.2 (0.08) is missed now and then."""
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.nn.functional.relu(torch.randn(4096, generator=random)) for _ in range(2))
    assert checks.drawn_alike([raw_of(a)], [raw_of(b)]) is None
    assert checks.drawn_alike([raw_of(a + 0.4 * (a > 0))], [raw_of(b)]) is not None


def test_losses_that_part_are_seen() -> None:
    oracle = [2.0 - 0.02 * step for step in range(50)]
    eager = [one + 1e-6 for one in oracle]
    assert parity.problem([one - 2e-6 for one in oracle], eager, oracle, "float32") is None
    for wrong in ([*oracle[:-1], oracle[-1] + 1e-3], [*oracle[:-1], float("nan")], oracle[:-1]):
        assert parity.problem(wrong, eager, oracle, "float32") is not None


def test_registers_and_spills_are_read() -> None:
    said = "Function k:\n  REG:255 STACK:48 SHARED:0 LOCAL:0 CONSTANT[0]:572 TEXTURE:0"
    assert resources_in(said) == {"registers": 255, "spilled_bytes": 48}
    assert resources_in("") == {}
