"""The chooser: generators, what is dropped and why, the best of what fits, and the command that prints it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli.plan.plan import climbed
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.plan import file, legal
from foretell.plan.facts import facts_of
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Mesh, Plan
from foretell.search.solve import choose as chooser
from foretell.search.solve import climb, engine, question
from foretell.search.solve.choose import Candidate, Choice, SearchConstraints, told, why_slower
from foretell.search.solve.climb import Climb, work_of
from foretell.search.space import layouts as space
from foretell.search.traces.needed import ModelFacts, Traces
from foretell.simulate.memory.memory import PROCESS_BYTES
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source, load
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
MADE: dict[Any, Trace] = {}


class Here(Traces):
    """Traces made in this process: the models are the project's own."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        return {mode: self._made(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        pass

    def _made(self, plan: Plan, mode: str) -> Trace:
        if plan.mesh.tp > 1:
            raise UserError("not here", "")
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        key = (recipe, plan.model["model"], plan.model.get("seq"), plan.micro_batch, self.capability)
        if key not in MADE:
            MADE[key] = capture(lambda: load(source_of(plan)), recipe, capability=self.capability)
        self.facts = ModelFacts({"weight": ((2, 2), "float32")}, ())
        return MADE[key]


def search(model: str, hardware: str, *, cluster: Cluster | None = None, **wishes: Any) -> Climb:
    found = cluster or parse(hardware)
    capability = None if found.device.backend == "cpu" else (9, 0)
    return Climb(Source(model=model), found, hardware, SearchConstraints(**wishes), OPTIONS, Here(capability=capability), lambda _: None)


def chosen(model: str, hardware: str, **wishes: Any) -> Choice:
    return search(model, hardware, **wishes).answer()


@functools.cache
def on_one() -> Choice:
    return chosen("gpt-tiny", "H200")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "LARGEST_MICRO_BATCH", 16)


def test_the_best_fits_is_the_fastest_of_all_and_is_a_legal_plan(tmp_path: Path) -> None:
    choice = on_one()
    best = choice.best
    assert best is not None and best.cost is not None and best.fits
    speeds = [one.cost.per_second for one in choice.runners_up if one.cost is not None]
    assert speeds and all((best.cost.per_second or 0) * 1.011 >= (speed or 0) for speed in speeds)
    assert not legal.complaints(best.plan, facts_of(best.plan, parse("H200")))
    file.write(best.plan, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json") == best.plan
    said = best.plan.predicted
    assert said["low_seconds"] < said["step_seconds"] < said["high_seconds"] and said["tokens_per_second"] > 0
    assert {"none", "model"} == {one.plan.compile for one in (best, *choice.runners_up)}


def test_every_plan_of_a_global_batch_makes_it() -> None:
    choice = chosen("gpt-tiny", "H100:4", global_batch=8)
    plans = [one.plan for one in (choice.best, *choice.runners_up) if one is not None]
    assert plans and {plan.global_batch for plan in plans} == {8}
    assert {plan.mesh.world for plan in plans} == {4}
    assert any(plan.mesh.dp_replicate == 4 for plan in plans) and any(plan.mesh.dp_shard == 4 for plan in plans)


def test_a_batch_that_data_ranks_cannot_share_leads_to_other_axes() -> None:
    choice = chosen("gpt-tiny", "H100:4", global_batch=2)
    reasons = [one.why for one in choice.dropped]
    assert "2 samples cannot be shared by 4 data ranks" in reasons
    assert "not here" in reasons  # tensor parallelism was asked for, and these traces have none
    assert choice.best is None or choice.best.plan.mesh.data <= 2


def test_where_nothing_fits_the_answer_says_who_holds_the_bytes() -> None:
    choice = chosen("gpt-tiny", "H100,memory=600MiB")
    assert choice.best is None and choice.infeasible is not None
    assert choice.infeasible.bytes_short > 0 and choice.infeasible.holders
    modes = {tuple(sorted({r.mode for r in one.plan.blocks.values()})) for one in choice.dropped}
    assert modes >= {(), ("selective",), ("recompute",)}
    with pytest.raises(UserError, match=r"no plan: \d+ do not fit \(the smallest needs 0\.\d+ GiB of 0\.59 GiB\)"):
        _ = choice.plan
    assert sum(one.count for one in choice.reasons) == len(choice.dropped)
    assert climbed(choice, "gpt-tiny", "H100", "plan.json")[0].startswith(f"No plan for gpt-tiny on H100: {choice.reasons[0].count} do not fit (")


@pytest.mark.slow(reason="a second search; test_find.py recomputes only as far as memory asks too")
def test_recomputing_is_tried_only_where_keeping_does_not_fit() -> None:
    """Room for the smallest micro-batch alone; recomputing lets larger ones in."""
    roomy = on_one()
    assert all(not one.plan.blocks for one in roomy.runners_up)
    found = search("gpt-tiny", "H100")
    found.cost((found_base(found).with_(micro_batch=16), "keep"))
    needs = found.found[-1].cost.worst.memory.device_bytes  # type: ignore[union-attr]
    tight = chosen("gpt-tiny", f"H100,memory={(needs >> 20) - 4}MiB", compile=("none",))
    assert any(one.plan.blocks for one in (*tight.runners_up, *filter(None, [tight.best]), *tight.dropped))


def found_base(found: Climb) -> Plan:
    return Plan(model={"model": found.source.model}, hardware=found.hardware)


@pytest.mark.slow(reason="a search on a CPU; which batch it prefers is tested below, and a GPU is searched above")
def test_a_cpu_offers_one_rank_and_two() -> None:
    machine = parse("CPU")
    cluster = replace(machine, device=replace(machine.device, sm_count=2))
    found = search("gpt-tiny", "auto", cluster=cluster)
    assert [mesh.world for mesh in found.meshes()] == [1, 2, 2]
    engine.search(found)
    choice = found.choice()
    assert choice.best is not None and choice.best.plan.precision == "fp32" and choice.best.plan.compile == "none"
    assert {one.plan.mesh.world for one in (choice.best, *choice.runners_up)} == {1, 2}


def test_no_more_plans_than_the_limit_are_costed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb, "MOST_PLANS", 3)
    found = chosen("gpt-tiny", "H200")
    assert found.costed == 3 and found.notes[-1] == "the search was ended early: 3 plans were costed"


def test_patience_and_ctrl_c_leave_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    found = search("gpt-tiny", "H200").answer(patience=1e-9)
    assert found.best is None and found.costed == 0 and found.notes == ("the search was ended early: 0 seconds were over",)
    exactly, asked = climb.predict_plan, []

    def interrupted(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return exactly(*given)

    monkeypatch.setattr(climb, "predict_plan", interrupted)
    found = search("gpt-tiny", "H200").answer()
    assert found.best is not None and found.best.plan.micro_batch <= 2 and "interrupted" in found.notes[-1]
    del asked[:1]  # so that the next one is the third: nothing is known by then
    with pytest.raises(KeyboardInterrupt):
        search("gpt-tiny", "H200").answer()


def test_work_is_found_block_by_block() -> None:
    trace = capture(lambda: load(Source(model="gpt-tiny", micro_batch=2)), recipe_of(found_base(search("gpt-tiny", "H100"))))
    work = work_of(trace)
    blocks = [work[f"blocks.{number}"] for number in range(4)]
    assert len(set(blocks)) == 1 and work["after"] > 0  # the head and the loss
    assert sum(work.values()) == sum(op.flops or 0 for op in trace.programs["micro_first"].ops)


def test_a_micro_batch_that_was_asked_for_is_the_only_one() -> None:
    assert [*search("gpt-tiny", "H100", micro_batch=4).batches(Mesh())] == [(4, 1)]
    assert [*search("gpt-tiny", "H100", micro_batch=4, global_batch=8).batches(Mesh())] == [(4, 2)]
    assert [*search("gpt-tiny", "H100", global_batch=2).batches(Mesh())] == [(1, 2), (2, 1)]
    assert not [*search("gpt-tiny", "H100", micro_batch=3, global_batch=8).batches(Mesh())]


def test_a_cpu_prefers_the_larger_micro_batch_among_alike() -> None:
    """Its speed comes and goes by more than what they differ in."""
    machine = parse("CPU")
    found = search("gpt-tiny", "auto", cluster=replace(machine, device=replace(machine.device, sm_count=1)), global_batch=8)
    engine.search(found)
    fitting = [one for one in found.found if one.fits]
    top = max(one.cost.per_second or 0 for one in fitting if one.cost)
    alike = [one for one in fitting if one.cost and (one.cost.per_second or 0) >= 0.951 * top]
    best = found.choice().best
    assert best is not None and best.plan.accumulate == min(one.plan.accumulate for one in alike)
    base = fitting[0].cost.time if fitting[0].cost else None
    assert base is not None and [one.plan.micro_batch for one in fitting[:4]] == [1, 2, 4, 8]
    found.found = [
        replace(one, cost=replace(one.cost, time=replace(base, step_seconds=base.step_seconds * share)))
        for one, share in zip(fitting, (1.0, 1.01, 1.02, 1.04), strict=False) if one.cost
    ]  # fmt: skip
    best = found.choice().best
    assert best is not None and best.plan.micro_batch == 8


@pytest.mark.slow(reason="a search beside every choice; that the best is the fastest is shown above")
def test_what_a_search_finds_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question, "Traces", Here)
    choice = chooser.choose(Source(model="gpt-tiny"), parse("H200"), "H200", SearchConstraints(global_batch=8), options=OPTIONS)
    assert choice.best is not None and choice.best.cost is not None and choice.found is not None
    assert choice.plan.predicted["step_seconds"] == choice.best.cost.time.step_seconds  # type: ignore[union-attr]
    assert choice.runners_up and all(one.fits and one.why for one in choice.runners_up)
    none = chooser.choose(Source(model="gpt-tiny"), parse("H200,memory=600MiB"), "H200", SearchConstraints(compile=("none",)), options=OPTIONS)
    assert none.best is None and none.infeasible is not None and none.infeasible.holders and none.dropped[0].why
    slow = chooser.choose(Source(model="gpt-tiny"), parse("H200"), "H200", SearchConstraints(global_batch=8, compile=("none",)), options=Options())
    assert slow.found is None and slow.best is not None and any("one by one" in note for note in slow.notes)


def test_words() -> None:
    plan = Plan(model={"model": "x"}, hardware="H100:4", mesh=Mesh(dp_shard=4), micro_batch=2, accumulate=3, reshard=False)
    assert told(plan) == "dp_shard 4, micro-batch 2, accumulate 3, reshard_after_forward=False"
    assert told(Plan(model={"model": "x"}, hardware="H100", compile="model")) == "one device, micro-batch 1, compile model"
    assert why_slower(Candidate(plan=plan), Candidate(plan=plan)) == ""


def test_buffers_of_messages_may_be_alive_for_a_pass_more_on_a_cpu() -> None:
    """gloo's own threads let them go when they run again; a verdict must not count on that."""
    found = chosen("gpt-tiny", "CPU", global_batch=4, micro_batch=2, meshes=(Mesh(), Mesh(dp_shard=2)))
    costs = {one.plan.mesh.world: one.cost for one in (found.best, *found.runners_up) if one is not None and one.cost is not None}
    model = load(Source(model="gpt-tiny")).model
    weights, blocks = (sum(p.nbytes for p in part.parameters()) for part in (model, model.get_submodule("blocks")))
    for ranks, late in ((1, 0), (2, 2 * weights + blocks)):  # weights are gathered, those of blocks twice, and gradients summed
        memory = costs[ranks].worst.memory
        assert memory.device_bytes - memory.allocated_bytes - PROCESS_BYTES == pytest.approx(late, rel=0.01)
