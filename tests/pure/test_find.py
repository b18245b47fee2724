"""The search on real models: what it finds fits when costed op by op, limits are kept, what does not fit says what would."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.plan import file, legal
from foretell.plan.facts import facts_of
from foretell.plan.recipe import recipe_of, source_of
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.search.solve import costing
from foretell.search.solve.explain import differs, told, what_ifs
from foretell.search.solve.find import Finder, SearchResult, Unsuited, find
from foretell.search.solve.front import Point
from foretell.search.solve.rehearse import rehearse
from foretell.search.space import explore as space_explore
from foretell.search.space.constraints import SearchConstraints
from foretell.search.traces.needed import ModelFacts, Traces
from foretell.simulate.plan import KEEP, Options, predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
MADE: dict[Any, Trace] = {}


class Here(Traces):
    """Traces made in this process: the model is the project's own."""

    def of(self, plan: Plan, modes: Iterable[str]) -> dict[str, Trace]:
        return {mode: self._made(plan, mode) for mode in modes}

    def prepare(self, plans: Iterable[tuple[Plan, str]]) -> None:
        self.facts = ModelFacts({"weight": ((2, 2), "float32")}, ())

    def _at_hand(self, asked: Any) -> bool:
        return True

    def _made(self, plan: Plan, mode: str) -> Trace:
        if plan.mesh.tp > 1:
            raise UserError("not traced here", "")
        recipe = replace(recipe_of(plan, mode), accumulate=1, compile="none", shards=1)
        key = (recipe, plan.model["model"], plan.micro_batch)
        if key not in MADE:
            MADE[key] = capture(lambda: load(source_of(plan)), recipe, capability=self.capability)
        return MADE[key]


def search(hardware: str, *, model: str = "gpt-tiny", exact: bool | None = None, what_if: bool = False, **wishes: Any) -> SearchResult:
    traces = Here(capability=(9, 0))
    return find(
        Source(model=model), parse(hardware), hardware, SearchConstraints(**wishes), options=OPTIONS, traces=traces, exact=exact, what_if=what_if
    )


@functools.cache
def on_four() -> SearchResult:
    return search("H100:4", global_batch=32)


def test_the_best_is_legal_fits_and_is_as_fast_as_costed_op_by_op(tmp_path: Path) -> None:
    found = on_four()
    best = found.best
    assert best is not None and best.cost is not None and best.cost.fits and not found.stopped
    plan, cluster = best.plan, parse("H100:4")
    assert plan.global_batch == 32
    assert not legal.complaints(plan, facts_of(plan, cluster))
    file.write(plan, tmp_path / "plan.json")
    assert file.read(tmp_path / "plan.json") == plan
    again = predict_plan(Here(capability=(9, 0)).of(plan, [KEEP]), plan, cluster, OPTIONS)
    assert again.time is not None and plan.predicted["step_seconds"] == again.time.step_seconds
    assert best.point.quick.seconds == pytest.approx(again.time.step_seconds, rel=0.05)
    assert found.runners_up and all(one.why for one in found.runners_up)
    assert found.costed <= found.there and found.binds


def test_every_point_of_the_front_is_a_plan_and_none_is_worse_in_everything() -> None:
    found = on_four()
    assert any(one is found.best for one in found.front) and len(found.front) > 1
    for one in found.front:
        assert not legal.complaints(one.plan, facts_of(one.plan, parse("H100:4")))
        assert one.plan.predicted["step_seconds"] > 0 and one.plan.predicted["verdict"] in ("fits", "tight")
        assert one is found.best or one.why, "what is not the best says why"
        others = [other.point.each() for other in found.front if other is not one]
        mine = one.point.each()
        assert one is found.best or not any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others)


@pytest.mark.slow(reason="four searches; objectives are compared in test_front.py, degrees in test_space.py")
def test_fixed_degrees_and_other_objectives() -> None:
    piped = search("H100:4", global_batch=32, fixed={"pp": 2}, micro_batch=4, exact=False)
    assert piped.best is not None and piped.best.plan.mesh.pp == 2 and piped.best.plan.pipeline is not None
    one = search("H100:4", global_batch=32, micro_batch=4, objective="smallest", exact=False)
    assert one.best is not None and one.best.plan.mesh.world == 1
    cheap = search("H100:4", global_batch=32, micro_batch=4, objective="cost", exact=False)
    quick = search("H100:4", global_batch=32, micro_batch=4, exact=False)
    assert cheap.best is not None and quick.best is not None
    per = [one.best.point.dollars / one.best.point.per_step for one in (cheap, quick)]  # type: ignore[union-attr, operator]
    assert per[0] <= per[1] * 1.011 and quick.best.point.seconds <= cheap.best.point.seconds * 1.011


def test_blocks_are_recomputed_only_as_far_as_memory_asks() -> None:
    """Between a device on which everything is kept and one on which nothing fits, seconds only grow."""
    roomy = search("H100", global_batch=512, micro_batch=512, compile=("none",), exact=False)
    assert roomy.best is not None and not roomy.best.plan.blocks
    needs = roomy.best.point.memory_bytes >> 20
    seconds, treated = [roomy.best.point.seconds], [0]
    for less in (0.93, 0.8, 0.7):
        found = search(f"H100,memory={int(needs * less)}MiB", global_batch=512, micro_batch=512, compile=("none",), exact=False)
        if found.best is None:
            break
        assert found.best.point.memory_bytes <= int(needs * less) << 20
        seconds.append(found.best.point.seconds)
        treated.append(sum(mode != "keep" for mode in found.best.point.layout.modes))
    assert len(seconds) > 1 and seconds == sorted(seconds) and treated[-1] > 0


@pytest.mark.slow(reason="a search without an answer, which test_spill.py has too")
def test_what_does_not_fit_says_what_would() -> None:
    found = search("H100,memory=600MiB", global_batch=8, micro_batch=8, exact=None)
    assert found.best is None and found.nearest is not None and found.short_bytes > 0
    assert "more on each device" in found.needs and found.relaxations
    for one in found.relaxations:
        assert one.verdict in ("fits", "tight") and one.change in found.needs and one.flag.startswith("--on ")
        then = search(one.flag.removeprefix("--on "), global_batch=8, micro_batch=8, exact=None).best
        assert then is not None and (then.verdict, told(then.point.layout)) == (one.verdict, one.plan)
    assert found.infeasible is not None and found.infeasible.holders


@pytest.mark.slow(reason="a second search where nothing fits")
def test_what_would_fit_by_a_quick_look_alone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costed to the end nothing else fits either: no change is named, and how many were tried is."""
    monkeypatch.setattr(Finder, "_finalists", lambda self, explored: ([], []))
    found = search("H100,memory=600MiB", global_batch=8, micro_batch=8, exact=None)
    assert found.best is None and found.relaxations == () and found.tried > 1
    assert f"nothing tried here fits: {found.tried} ways tried" in found.needs


@pytest.mark.slow(reason="a search without an answer; limits are kept in test_front.py, and what would help is told in test_spill.py")
def test_limits_of_a_run_that_nothing_keeps() -> None:
    found = search("H100", global_batch=2, micro_batch=2, tokens=1e12, deadline_seconds=60.0, exact=False)
    assert found.best is None and "more than allowed" in found.unmet and "a later --deadline" in found.needs


@pytest.mark.slow(reason="three searches; that what is said to help does is shown in test_spill.py")
def test_what_if_is_searched_not_guessed() -> None:
    found = search("H100:2", global_batch=8, micro_batch=2, what_if=True, exact=False)
    rows = {row.change: row for row in found.what_if}
    twice = next(row for change, row in rows.items() if change.startswith("twice the devices"))
    direct = search("H100:4", global_batch=8, micro_batch=2, exact=False)
    assert found.best is not None and direct.best is not None and twice.faster is not None
    wanted = direct.best.point.quick.seconds / found.best.point.quick.seconds
    assert 1 + twice.faster == pytest.approx(1 / wanted, rel=0.03)
    assert any(change.startswith("one more device") for change in rows) and any("H200" in change for change in rows)
    assert json.dumps([row.to_json() for row in found.what_if])


def test_ctrl_c_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    real = space_explore.fill

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(space_explore, "fill", interrupted)
    found = search("H100:4", global_batch=32)
    assert found.stopped == "interrupted" and found.best is not None and found.costed == 4
    assert any("ended early" in note for note in found.best.plan.notes)


def test_patience_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Here(capability=(9, 0))
    found = find(Source(model="gpt-tiny"), parse("H100:4"), "H100:4", SearchConstraints(global_batch=32), options=OPTIONS,
                 traces=traces, exact=False, patience=0.02)  # fmt: skip
    assert "seconds were over" in found.stopped


@pytest.mark.slow(reason="a search from an empty cache; plans found by others are costed op by op above")
def test_a_plan_that_does_not_fit_op_by_op_is_dropped(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = costing.predict_plan
    refused: list[Plan] = []

    def strict(traces: Any, plan: Plan, cluster: Any, options: Any) -> Any:
        found = real(traces, plan, cluster, options)
        if refused and plan != refused[0]:
            return found
        refused.append(plan)
        worst = found.ranks[0]
        return replace(found, ranks=(replace(worst, verdict="no", memory=replace(worst.memory, margin_bytes=-(1 << 30))),))

    monkeypatch.setattr(costing, "predict_plan", strict)
    found = search("H100:4", global_batch=32)
    assert found.best is not None and found.best.cost is not None and found.best.cost.fits
    assert [one.plan.mesh for one in found.dropped] == [refused[0].mesh] and "1.0 GiB short" in found.dropped[0].why


def test_a_device_of_unknown_speed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsuited, match="speed"):
        find(Source(model="gpt-tiny"), parse("H100"), "H100", SearchConstraints(), options=Options(), traces=Here(capability=(9, 0)))


def test_how_two_layouts_differ() -> None:
    found = search("H100:4", global_batch=32, micro_batch=4, exact=False)
    assert found.best is not None
    layout = found.best.point.layout
    other = replace(layout, mesh=replace(layout.mesh, tp=2, dp_shard=2, dp_replicate=1), micro_batch=layout.micro_batch * 2)
    words = differs(layout, other)
    assert any(word.startswith("tp 1 instead of 2") for word in words) and any("micro-batch" in word for word in words)
    assert not differs(layout, layout) and told(layout)


def test_a_change_that_uses_no_device_more_is_told() -> None:
    found = search("H100:2", global_batch=32, micro_batch=4, exact=False)
    assert found.best is not None
    best = found.best.point

    def slower(cluster: Any, wishes: SearchConstraints) -> Point | None:
        return replace(best, devices=cluster.count, seconds=best.seconds * 2)

    rows = what_ifs(parse("H100:2"), SearchConstraints(global_batch=32), best, slower)
    assert rows[0].words.startswith("no gain") and rows[0].faster == 0.0
    assert what_ifs(parse("H100:2"), SearchConstraints(), best, lambda cluster, wishes: None)[0].point is None


def test_a_pipeline_is_rehearsed_before_it_runs() -> None:
    found = search("H100:2", global_batch=8, micro_batch=2, fixed={"pp": 2}, schedule="1f1b", exact=False)
    assert found.best is not None
    plan = found.best.plan.with_(model={"model": "gpt-tiny", "blocks": ["blocks.0-3"]})
    words = rehearse(Source(model="gpt-tiny"), plan, exact=False)
    assert "rank 0 of the pipeline" in words and "rank 1 of the pipeline" in words and "sent" in words
    alone = plan.with_(mesh=Mesh(), pipeline=None)
    assert "op by op" in rehearse(Source(model="gpt-tiny"), alone, exact=True)
    with pytest.raises(UserError):
        rehearse(Source(model="gpt-tiny"), plan.with_(pipeline=Pipeline(cuts=("blocks.9",))), exact=False)


# ---------------------------------------------------------------------- the command


@pytest.mark.slow(reason="four searches through the command line")
def test_the_command_saves_points_explains_and_says_no(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "plan.json"
    asked = ["plan", "gpt-tiny", "--global-batch", "64", "--compile", "none", "--quick", "--out", str(out), "--on"]
    assert main([*asked, "H200", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    plan = file.read(out)
    assert plan.global_batch == 64 and plan.model["blocks"] == ["blocks.0-3"] and plan.model["digest"]
    assert answer["schema_version"] and answer["binds"] and answer["search"]["costed"] > 0
    assert answer["plan"]["predicted"]["step_seconds"] == plan.predicted["step_seconds"]
    last = answer["front"][-1]
    assert last["number"] == len(answer["front"]) > 1
    assert main([*asked, "H200", "--point", str(last["number"]), "--explain"]) == 0
    text = capsys.readouterr().out
    assert "What holds it back" in text and "What would change it" in text and "Trade-offs" in text
    assert file.read(out).predicted["step_seconds"] == pytest.approx(last["step_seconds"])
    assert main([*asked, "H200", "--point", "99"]) == 2
    assert "--point 99: there are" in capsys.readouterr().err
    assert main([*asked, "H200,memory=600MiB"]) == 1
    text = capsys.readouterr().out
    assert "fits" in text and "short on" in text and "more on each device." in text
    printed = [line.strip() for line in text.splitlines() if line.startswith("  foretell plan ")]
    assert printed
    for line in printed:
        assert main(shlex.split(line)[1:]) == 0


@pytest.mark.parametrize(
    ("flags", "told_"),
    [
        (["--objective", "speed"], "--objective 'speed' is not known"),
        (["--precision", "fp8"], "--precision 'fp8' is not known"),
        (["--global-batch", "0"], "--global-batch is 0"),
        (["--tp", "3"], "groups of 3 ranks"),
        (["--deadline", "3d"], "without the length of the run"),
        (["--deadline", "soon", "--tokens", "1e9"], "--deadline 'soon' is not a length of time"),
        (["--patience", "-1"], "--patience is -1"),
        (["--pp", "4", "--tp", "4"], "makes 16 ranks and there are 8 devices"),
    ],
)
def test_contradictions_are_one_line(flags: list[str], told_: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["plan", "gpt-tiny", "--on", "H100:8", "--out", str(tmp_path / "p.json"), *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert told_ in error and len(error.splitlines()) == 1
    assert main(["plan", "gpt-tiny", "--on", "H200", "--out", str(tmp_path)]) == 2
    assert main(["plan", "gpt-tinny", "--on", "H200"]) == 2


@pytest.mark.slow(reason="traces a large model; that such traces are refused is in test_plan_cost, and what is unsuited is told above")
def test_a_batch_that_is_not_on_a_straight_line_is_no_matter_for_a_sheet() -> None:
    """Images of a ragged batch have 11 slices by two, 22 by four: larger ones are not derived, and the model is told so."""
    with pytest.raises(Unsuited, match="11 and 22 is not on a line"):
        search("RTX-4090", model="minicpm_v-tiny")
