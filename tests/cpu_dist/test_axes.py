"""`make test` runs every two axes of a plan together at least once, beside one process.

What runs is counted from what pytest collects with the Makefile's own words: a case that is removed, or marked slow here or
anywhere, is missed. Two axes that may not be used together are left out, where `legal` says so.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from foretell.plan.legal import complaints
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from tests import forks
from tests.cpu_dist import test_context, test_equivalence, test_expert, test_pipeline

ROOT = Path(__file__).resolve().parents[2]

PLANS: dict[str, dict[str, Plan]] = {
    "test_equivalence.py::test_a_plan_computes_what_one_process_computes": {case.name: case.plan for case in test_equivalence.CASES},
    "test_context.py::test_shared_positions_compute_what_one_process_computes": {name: case.plan for name, case in test_context.CASES.items()},
    "test_expert.py::test_spread_experts_compute_what_one_process_computes": {name: case.plan for name, case in test_expert.CASES.items()},
    "test_pipeline.py::test_stages_compute_what_one_process_computes": {str(case): case.plan for case in test_pipeline.CASES},
}
"""Test → the name of each of its cases → the plan that is run."""

AXES: dict[str, Callable[[Plan], bool]] = {
    "data replicate": lambda plan: plan.mesh.dp_replicate > 1,
    "data shard": lambda plan: plan.mesh.dp_shard > 1,
    "tensor": lambda plan: plan.mesh.tp > 1,
    "pipeline": lambda plan: plan.mesh.pp > 1,
    "context": lambda plan: plan.mesh.cp > 1,
    "expert": lambda plan: plan.mesh.ep > 1,
    "accumulate": lambda plan: plan.accumulate > 1,
    "clip": lambda plan: plan.clip is not None,
    "recompute": lambda plan: any(one.mode in ("recompute", "selective") for one in plan.blocks.values()),
    "precision": lambda plan: plan.precision != "fp32",
    "compile": lambda plan: plan.compile != "none",
    "states elsewhere": lambda plan: bool(plan.states),
    "kernels": lambda plan: bool(plan.kernels),
}
SCHEDULES = {"gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zero-bubble-v"}

ALONE: dict[str, dict[str, Any]] = {
    "data replicate": {"dp_replicate": 2}, "data shard": {"dp_shard": 2}, "tensor": {"tp": 2}, "pipeline": {"pp": 2},
    "context": {"cp": 2}, "expert": {"dp_shard": 2, "ep": 2}, "accumulate": {"accumulate": 2}, "clip": {"clip": 1.0},
    "recompute": {"blocks": {"blocks.*": Residency(mode="recompute")}}, "precision": {"precision": "bf16-mixed"},
    "compile": {"compile": "blocks"}, "states elsewhere": {"states": {"blocks.*": "host"}},
    "kernels": {"kernels": {"rms_norm": "foretell"}},
}  # fmt: skip
"""The least that uses an axis."""


def refused(*axes: str) -> bool:
    """Whether a plan that uses these may not be run at all."""
    asked: dict[str, Any] = {"model": {}, "hardware": "auto", "precision": "fp32", "clip": None}
    asked |= {key: value for axis in axes for key, value in ALONE[axis].items()}
    mesh = Mesh(**{key: asked.pop(key) for key in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep") if key in asked})
    if mesh.pp > 1:
        asked |= {"accumulate": 2, "pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",))}
    plan = Plan(**asked, mesh=mesh)
    assert all(AXES[axis](plan) for axis in axes)
    return bool(complaints(plan))


def words_of_make_test() -> list[str]:
    """What `make test` tells pytest: which tests, by markers."""
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe is not None
    chosen = re.search(r'pytest .*-m "([^"]*)"', recipe[1])
    assert chosen is not None, recipe[1]
    return ["-m", chosen[1]]


@pytest.fixture(scope="module")
def chosen() -> set[tuple[str, str]]:
    """Test and case of what `make test` runs."""
    files = sorted({str(ROOT / "tests" / "cpu_dist" / name.partition("::")[0]) for name in PLANS})
    words = ["--collect-only", "-q", "-p", "no:cacheprovider", *words_of_make_test(), *files]
    done = forks.run(*words, env=os.environ, code="import pytest\nsys.exit(pytest.main(sys.argv[1:]))")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^tests/cpu_dist/(\S+?::\w+)\[(.*)\]$", done.stdout, re.M)
    return {(test, case) for test, case in found if test in PLANS}


def missing(plans: Iterable[Plan]) -> set[tuple[str, str]]:
    """Pairs that none of the plans has. In fp32 where precision is none of the two: bf16's bound is too wide to find a wrong sum."""
    on = [{axis for axis, used in AXES.items() if used(plan)} for plan in plans]
    pairs = {pair for pair in itertools.combinations(AXES, 2) if not refused(*pair)}
    return {pair for pair in pairs if not any(set(pair) <= axes and ("precision" in pair or "precision" not in axes) for axes in on)}


def test_make_test_runs_every_pair_of_axes(chosen: set[tuple[str, str]]) -> None:
    plans = [PLANS[test][case] for test, case in chosen]
    assert missing(plans) == set()
    assert {plan.pipeline.schedule for plan in plans if plan.pipeline} == SCHEDULES
    assert {test for test, _ in chosen} == set(PLANS)
    assert sum(map(len, PLANS.values())) > len(chosen) >= 30


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("not a checkout")
    assert re.search(r"^make test$", script.read_text(), re.M)


@pytest.mark.parametrize(
    ("case", "pair"),
    [
        ("tensor, replicas, compiled", ("tensor", "compile")),
        ("pipeline, compiled, shards", ("pipeline", "compile")),
        ("pipeline, replicas", ("data replicate", "pipeline")),
        ("bf16, pipeline, replicas", ("pipeline", "precision")),
        ("hybrid", ("data replicate", "states elsewhere")),
    ],
)
def test_a_case_that_is_no_longer_run_is_missed(case: str, pair: tuple[str, str], chosen: set[tuple[str, str]]) -> None:
    left = [PLANS[test][name] for test, name in chosen if name != case]
    assert len(left) == len(chosen) - 1 and pair in missing(left)


def test_what_may_not_be_used_together_is_known() -> None:
    assert {pair for pair in itertools.combinations(AXES, 2) if refused(*pair)} == {
        ("tensor", "expert"), ("context", "expert"), ("context", "compile"), ("expert", "compile"),
        ("tensor", "states elsewhere"), ("pipeline", "states elsewhere"), ("context", "states elsewhere"),
        ("expert", "states elsewhere"), ("tensor", "kernels"), ("context", "kernels"), ("expert", "kernels"),
    }  # fmt: skip
