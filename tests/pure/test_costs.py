"""Costs of short stacks and of plans on disk: a search with them answers as one without, and wrong ones are made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware import parse
from foretell.price.speeds import profile_for
from foretell.search.block_costs.kept import KIND, Costs, Exact, Kept, Known, kept
from foretell.search.solve import costing
from foretell.search.solve.find import SearchResult, find
from foretell.search.space.constraints import SearchConstraints
from foretell.trace.load.model import Source
from foretell.trace.store import cache as store
from tests.further import further
from tests.pure import golden
from tests.pure.test_find import OPTIONS, Here


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path))
    return tmp_path


def search(*, cache: bool = True, exact: bool | None = False, **wishes: Any) -> SearchResult:
    asked = SearchConstraints(**{"global_batch": 64, "micro_batch": 4, "fixed": {"dp_shard": 2}, **wishes})
    traces = Here(capability=(9, 0), cache=cache)
    return find(Source(model="gpt-tiny"), parse("H100:4"), "H100:4", asked, options=OPTIONS, traces=traces, exact=exact)


def entries(folder: Path) -> list[Path]:
    return sorted((folder / KIND).glob("*.json"))


def same(one: SearchResult, other: SearchResult) -> bool:
    assert one.best is not None and other.best is not None
    return [(p.point.layout, p.point.quick) for p in (one.best, *one.runners_up)] == [
        (p.point.layout, p.point.quick) for p in (other.best, *other.runners_up)
    ]


@pytest.mark.slow(reason="two searches; a question asked again costs none below")
def test_a_search_with_kept_costs_answers_as_one_without(empty: Path) -> None:
    fresh = search(cache=False)
    assert not entries(empty)
    first = search()
    (entry,) = entries(empty)
    written = entry.stat().st_mtime_ns
    again = search()
    assert same(first, fresh) and same(again, fresh)
    assert entry.stat().st_mtime_ns == written  # nothing was made that was not there


def test_a_question_asked_again_costs_no_plan_op_by_op(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(found: SearchResult) -> list[object]:
        return [(one.plan, one.cost, one.why) for one in (found.best, *found.runners_up, *found.dropped, *found.front) if one is not None]

    alone, first = (search(cache=cache, exact=None) for cache in (False, True))
    assert first.best is not None and first.best.cost is not None
    monkeypatch.setattr(costing, "predict_plan", lambda *_: pytest.fail("it is kept"))
    assert told(search(exact=None)) == told(first) == told(alone)
    monkeypatch.undo()
    monkeypatch.setenv("FORETELL_CACHE", str(empty))
    costly = search(exact=None, global_batch=32)
    assert costly.best is not None and costly.best.cost is not None and costly.best.cost.plan.global_batch == 32


@pytest.mark.parametrize(
    "name",
    further(["hsdp, accumulated", "recompute some", "pp, four stages, recompute", "CPU"], ["pp, four stages, recompute"], "read as a pipeline's are"),
)
def test_a_plan_costs_as_much_read_as_found(name: str, empty: Path) -> None:
    cost = golden.CASES[name].cost()
    costs = kept({"source": name}, parse("H100"), None, {})
    costs.of("plans", cost.plan, lambda: Exact.of(cost, ["of a trace"]))
    costs.keep()
    back: Exact = kept({"source": name}, parse("H100"), None, {}).of("plans", cost.plan, lambda: pytest.fail("it is kept"))
    assert back.cost(cost.plan) == cost and back.told == ("of a trace",)
    assert back.cost(cost.plan).predicted() == cost.predicted()


@pytest.mark.slow(reason="two more searches; a question asked again is above, and entries of other devices are below")
def test_other_questions_add_to_an_entry(empty: Path) -> None:
    search()
    (entry,) = entries(empty)
    before = entry.stat().st_size
    more, alone = search(global_batch=256), search(global_batch=256, cache=False)
    assert entries(empty) == [entry] and entry.stat().st_size > before and same(more, alone)


def test_a_damaged_entry_is_dropped(empty: Path) -> None:
    def here() -> Costs:
        return kept({"source": "z"}, parse("H100"), None, {})

    costs = here()
    costs.of("peaks", "key", lambda: (1, 2))
    costs.keep()
    (entry,) = entries(empty)
    content = entry.read_bytes()
    for wrong in (content[: len(content) // 2], content.replace(b'"peaks"', b'"peakz"', 1), b"", b"[]"):
        entry.write_bytes(wrong)
        with pytest.warns(UserWarning, match="damaged"):
            assert not len(here().known)
        assert not entry.exists()
    forged = ('[1]', '{"a": "b"}', '{"a": [1]}', '{"a": [1, NaN]}', '{"a": [1, 1e999]}')
    wrong_steps = ('{"a": [{"device": "long"}, []]}', '{"a": [{"device": Infinity}, []]}', '{"a": [[], {}]}')
    wrong_plans = (("plans", '{"a": {}}'), ("plans", '{"a": {"ranks": 1}}'), ("plans", '[1]'))
    others = (*(("steps", one) for one in wrong_steps), ("events", '{"a": {"F": 3}}'), *wrong_plans)
    for table, text in (("peaks", '{"a": [1, 2]}'), *(("peaks", one) for one in forged), *others):
        parts = {**dict.fromkeys(vars(Known()), "{}"), table: text, "files": "{}"}
        sealed = f"{{{', '.join(f'{chr(34)}{name}{chr(34)}: {part}' for name, part in parts.items())}}}".encode()
        if text == '{"a": [1, 2]}':
            entry.write_bytes(store._seal(sealed, KIND, entry.stem) + sealed)
            assert len(here().known) == 1
            continue
        entry.write_bytes(store._seal(sealed, KIND, entry.stem) + sealed)
        with pytest.warns(UserWarning, match="damaged"):
            assert not len(here().known), text


def test_other_devices_and_profiles_have_entries_of_their_own(empty: Path) -> None:
    cluster, asked = parse("H100:4"), {"source": "a model"}
    profile = profile_for(parse("H200"), OPTIONS.profile_of)
    assert profile is not None
    one = kept(asked, cluster, profile, {})
    other = parse("H100:8")
    smaller = replace(cluster, device=replace(cluster.device, memory_bytes=1 << 30))
    later = replace(profile, date="2001-01-01")
    names = {one.name, kept(asked, other, profile, {}).name, kept(asked, smaller, profile, {}).name,
             kept(asked, cluster, later, {}).name, kept(asked, cluster, None, {}).name, kept({"source": "b"}, cluster, profile, {}).name}  # fmt: skip
    assert len(names) == 6 and kept(asked, cluster, profile, {}).name == one.name


def test_numbers_come_back_as_they_were(empty: Path) -> None:
    made = {"F": ({"compute": 0.1 + 0.2, "host": 1e-17}, [{}])}
    costs = kept({"source": "x"}, parse("H100"), None, {})
    assert Kept(costs, "plan").of("events", 1, lambda: made) == made
    costs.keep()
    back = kept({"source": "x"}, parse("H100"), None, {})
    assert Kept(back, "plan").of("events", 1, lambda: pytest.fail("it is kept")) == made
    assert Kept(back, "another").of("events", 1, lambda: {}) == {}
    assert Costs().of("peaks", "a", lambda: (1, 2)) == (1, 2)


def test_costs_of_a_file_that_changed_are_not_taken(empty: Path) -> None:
    model = empty / "model.py"
    model.write_text("one")
    costs = kept({"source": "y"}, parse("H100"), None, store.file_hashes([str(model)]))
    costs.of("peaks", "key", lambda: (1, 2))
    costs.keep()
    assert len(kept({"source": "y"}, parse("H100"), None, {}).known) == 1
    model.write_text("two")
    assert not len(kept({"source": "y"}, parse("H100"), None, {}).known)
