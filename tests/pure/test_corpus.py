"""The shipped kernels, run: cheats are refused for the right reason, good ones accepted. Without the scan of their text, which would see some."""

from __future__ import annotations

import importlib.util

import pytest

from foretell.tune.clock.corpus import clocked
from foretell.tune.verify import corpus, harness
from foretell.tune.verify.cases import Cases, prepare
from foretell.tune.verify.process import KernelSetting
from foretell.tune.verify.types import HarnessOptions, Verdict

SETTING = KernelSetting()
QUICK = ("c01_uninitialised", "c06_weights", "c11_precision", "c15_gradient", "c20_thread", "c28_forged", "spawns")
SEED = 20261119
"""Of inputs, so that a failure is seen again."""


def told(entry: corpus.CorpusEntry, verdict: Verdict) -> str:
    return f"{entry.name}: {verdict.stage} {verdict.check}: {verdict.reason}"


def test_every_known_cheat_is_there() -> None:
    assert {entry.number for entry in corpus.entries(*corpus.CHEATS)} == set(range(1, 36))


def test_every_stage_that_compares_refuses_something() -> None:
    checks = {entry.check for entry in corpus.entries(*corpus.CHEATS)}
    assert checks >= {"unwritten", "values", "nonfinite", "task", "weights", "shapes", "passthrough", "decoy", "mutation", "reuse", "accuracy",
                      "magnitudes", "determinism", "guards", "gradients", "subsets", "randomness", "drift", "stale", "deferred", "type", "cache",
                      "audit", "tamper", "protocol", "settings", "pace", "files", "threads", "baseline"}  # fmt: skip


@pytest.fixture(scope="module")
def rmsnorm() -> Cases:
    return prepare(corpus.task("rmsnorm"), SETTING, seed=SEED)


@pytest.mark.parametrize("entry", [one for one in corpus.entries() if one.name in QUICK], ids=lambda one: one.name)
def test_a_cheat_of_each_kind_is_refused(entry: corpus.CorpusEntry, rmsnorm: Cases) -> None:
    from foretell.tune.verify import source

    found = harness.examine(source.candidate(str(entry.path)), rmsnorm, SETTING, HarnessOptions(seed=SEED, scan=False))
    assert corpus.as_it_must(entry, found), told(entry, found)


def test_a_good_kernel_is_accepted(rmsnorm: Cases) -> None:
    from foretell.tune.verify import source

    path = corpus.FOLDER / "good" / "rmsnorm_function.py"
    found = harness.examine(source.candidate(str(path)), rmsnorm, SETTING, HarnessOptions(seed=SEED))
    assert found.accepted, found.reason
    assert found.determinism == "bitwise" and 0 < found.worst_error <= 1


@pytest.mark.slow(reason="one of each kind of check is tried above")
@pytest.mark.parametrize("group", [corpus.GOOD, *corpus.CHEATS, corpus.MISBEHAVING])
def test_all_of_them(group: str) -> None:
    some = list(corpus.tried(corpus.entries(group), SETTING, seed=SEED))
    assert len(some) >= len(corpus.entries(group)) - sum(bool(one.missing(SETTING)) for one in corpus.entries(group)) > 0
    assert [told(entry, verdict) for entry, verdict in some if not corpus.as_it_must(entry, verdict)] == []


@pytest.mark.slow(reason="test_statistics.py judges known times the same way")
def test_the_best_baseline_is_what_counts() -> None:
    """Cheat 34, measured: faster than the task's loop, slower than all rows at once."""
    (entry,) = [one for one in corpus.entries("times") if one.check == corpus.BASELINE]
    assert clocked(entry, SETTING, SEED, beside=False).faster
    assert clocked(entry, SETTING, SEED, beside=True).check == corpus.BASELINE


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.slow(reason="Triton's interpreter; test_all_of_them runs what needs no Triton")
def test_triton_kernels_are_interpreted() -> None:
    some = [one for one in corpus.entries() if one.needs == "triton"]
    found = list(corpus.tried(some, SETTING, seed=SEED))
    assert len(found) == len(some) > 1
    assert [told(entry, verdict) for entry, verdict in found if not corpus.as_it_must(entry, verdict)] == []
