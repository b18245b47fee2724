"""Reports: figures against those of the cost room, files of all kinds, and a page that nothing can break out of."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import FileFormatError, UserError
from foretell.hardware import find, price_per_hour
from foretell.plan import file as plans
from foretell.plan.types import Mesh, Plan
from foretell.report import words
from foretell.report.html import data as html_data
from foretell.report.html import front as html_front
from foretell.report.html import page as html
from foretell.report.html import sections as html_sections
from foretell.report.html.figures import COLOURS, sizes, thinned, times
from foretell.report.html.front import Front, FrontPoint
from foretell.report.html.memory import snapshot
from foretell.report.html.page import Cell, Chart, Figure, Page, Section, Table
from foretell.search.estimate.plan import Layout, Quick
from foretell.search.solve import front as search_front
from foretell.search.solve.choose import Candidate, Choice
from foretell.search.solve.find import Finalist, SearchResult
from tests.pure import report_sample as sample

CASES: dict[str, Callable[[], tuple[Plan, str]]] = {
    "one GPU": lambda: (sample.plan(), "H100"),
    "some blocks again": lambda: (sample.plan(blocks=sample.RECOMPUTE), "H100"),
    "sharded": lambda: (sample.plan(mesh=Mesh(dp_shard=2), accumulate=2), "H100"),
    "pipeline": lambda: (sample.piped(), "H100"),
    "CPU": lambda: (sample.plan("CPU"), "CPU"),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Plan, Any]:
    plan, on = CASES[request.param]()
    return plan, sample.detail(plan, on)


# ---------------------------------------------------------------- the plan, costed for the page


def test_the_curve_reaches_the_predicted_peak(case: tuple[Plan, Any]) -> None:
    """Its bytes are followed category by category, the prediction by the allocator or by storages: they agree."""
    _, detail = case
    curve, memory = detail.curve, max((rank for rank in detail.cost.ranks), key=lambda rank: rank.memory.device_bytes).memory
    assert curve.peak_bytes == memory.allocated_bytes
    assert sum(curve.bytes[curve.peak]) == max(map(sum, curve.bytes))
    assert list(curve.at) == sorted(curve.at) and curve.at[0] >= 0 and curve.at[-1] <= curve.end


def test_bytes_of_blocks_are_those_alive_at_the_peak(case: tuple[Plan, Any]) -> None:
    _, detail = case
    curve = detail.curve
    at_peak = dict(zip(curve.categories, curve.bytes[curve.peak], strict=True))
    for category in ("parameters", "gradients", "optimizer", "activations"):
        assert sum(one.bytes.get(category, 0) for one in detail.blocks) == at_peak.get(category, 0)


def test_seconds_of_blocks_add_up_to_the_phases(case: tuple[Plan, Any]) -> None:
    plan, detail = case
    found: Counter[str] = Counter()
    for one in detail.blocks:
        found.update(one.seconds)
    if detail.cost.time is None:
        assert not found
    elif plan.mesh.pp == 1:
        wanted = {phase: value for phase, value in detail.cost.time.phases.items() if value}
        apart = 1e-4 if plan.mesh.world > 1 else 1e-9  # the sum of the loss over ranks is in no block
        assert {phase: value for phase, value in found.items() if value} == pytest.approx(wanted, rel=1e-6, abs=apart)


def test_events_of_a_pipeline_fill_the_step() -> None:
    plan = sample.piped()
    detail = sample.detail(plan)
    assert detail.cost.time is not None
    step = detail.cost.time.step_seconds
    kinds = Counter((slot.rank, slot.kind) for slot in detail.slots)
    assert kinds == {(rank, kind): times for rank in (0, 1) for kind, times in (("F", 5), ("B", 5), ("update", 1))}
    for rank in (0, 1):
        mine = sorted((slot.start, slot.finish) for slot in detail.slots if slot.rank == rank)
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(mine))
    assert max(slot.finish for slot in detail.slots) == pytest.approx(step)
    busy = sum(slot.finish - slot.start for slot in detail.slots) / 2
    assert 1 - busy / step == pytest.approx(detail.cost.bubble, abs=1e-6)
    forward = {(slot.stage, slot.micro): slot for slot in detail.slots if slot.kind == "F"}
    for micro in range(5):
        assert forward[0, micro].finish <= forward[1, micro].start, "a stage begins before it is sent anything"


def test_a_snapshot_tells_the_same_story(case: tuple[Plan, Any]) -> None:
    """Bytes before, plus what came, less what went, are highest where the curve is; torch's own reader takes the file."""
    _, detail = case
    found = snapshot(detail.curve)
    live = {one.address: one.size for one in detail.curve.before}
    peak = now = sum(live.values())
    for event in found["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
            now += event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
            now -= event["size"]
        peak = max(peak, now)
    assert peak == detail.curve.peak_bytes
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    assert {block["address"]: block["size"] for block in blocks if block["state"] == "active_allocated"} == live
    for segment in found["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    from torch.cuda import _memory_viz

    assert "segments:" in _memory_viz.segsum(pickle.loads(pickle.dumps(found)))
    assert "entries" in _memory_viz.trace(found)


# ---------------------------------------------------------------- files


def test_a_front_reads_back(tmp_path: Path) -> None:
    plan = tmp_path / "a.plan.json"
    path = html_front.write(sample.front(), plan)
    assert path.name == "a.plan.front.json"
    assert html_front.read(path) == sample.front()
    assert html_front.read(tmp_path / "none.front.json") is None
    assert html_front.from_json([{"words": "alone", "seconds": 1}]) == Front(points=(FrontPoint(words="alone", seconds=1),))
    known = html_front.from_json({"points": [{"words": "x", "later": 1}], "later": 2})
    assert known.points[0].seconds is None and known.chosen is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "cannot be read"), ("{}", "no list of points"), ("[3]", "has no words"), ('{"version": 9, "points": []}', "version 9"),
        ('[{"words": "x", "seconds": "fast"}]', "seconds is 'fast'"), ('[{"words": "x", "memory_bytes": NaN}]', "memory_bytes is nan"),
        ('[{"words": "x", "chosen": 1}]', "chosen is 1"), ('[{"words": "x", "seconds": true}]', "seconds is True"),
    ],
)  # fmt: skip
def test_a_front_that_is_none_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "x.front.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=re.escape(complaint)):
        html_front.read(path)


def test_a_search_becomes_a_front() -> None:
    """From plans costed one by one, and from a search with a front; the plan that was saved is the chosen one."""
    (first, one), (second, two) = sample.told(sample.plan()), sample.told(sample.piped())
    candidates = [Candidate(plan=first, cost=one.cost), Candidate(plan=second, cost=two.cost, why="slower")]
    lost = Candidate(plan=sample.plan(mesh=Mesh(tp=3)), why="heads do not divide")
    found = html_front.of_choice(Choice(best=candidates[0], runners_up=(candidates[1],), dropped=(lost,), costed=3))
    assert one.cost.time is not None and found.chosen == found.points[0]
    assert [point.seconds for point in found.points] == [one.cost.time.step_seconds, two.cost.time.step_seconds if two.cost.time else None]
    assert found.points[1].why == "slower" and found.dropped[0].why == "heads do not divide" and found.points[0].per_step == one.cost.per_step
    quick = Quick(seconds=1.0, low=0.9, high=1.2, memory_bytes=5, margin_bytes=1, best_margin_bytes=1, stage_memory=(5,), stage_seconds=(1.0,))

    def finalist(plan: Plan, seconds: float, dollars: float | None) -> Finalist:
        layout = Layout(mesh=plan.mesh, micro_batch=plan.micro_batch)
        point = search_front.Point(layout=layout, quick=quick, devices=1, per_step=256, seconds=seconds, memory_bytes=5, dollars=dollars,
                                   joules=2.0, capacity_bytes=9)  # fmt: skip
        return Finalist(point=point, plan=plan, why="" if plan is first else "dearer")

    best, other = finalist(first, 1.0, 0.5), finalist(second, 2.0, None)
    whole = Choice(best=candidates[0], costed=9, found=SearchResult(best=best, front=(best, other), runners_up=(other,), costed=9))
    front = html_front.of_choice(whole, second)
    assert [(point.seconds, point.cost_per_step, point.chosen, point.unit) for point in front.points] == [
        (1.0, 0.5, False, "tokens"), (2.0, None, True, "tokens")
    ]  # fmt: skip
    assert html_front.from_json(json.loads(json.dumps(front.to_json()))) == front


def test_plans_of_unlike_batches_are_compared_by_token() -> None:
    points = (FrontPoint(words="small", seconds=1.0, memory_bytes=1e9, per_step=1000, unit="tokens", chosen=True),
              FrontPoint(words="large", seconds=1.5, memory_bytes=2e9, per_step=2000, unit="tokens"))  # fmt: skip
    subject = html_data.Subject(path=Path("p"), plan=Plan(model={}, hardware="H100"), plan_path=Path("p"), front=Front(points=points))
    section = next(section for section in html_sections.page(subject).sections if section.name == "front")
    chart = section.figures[0].chart
    assert chart is not None and [point["x"] for point in chart.data["points"]] == pytest.approx([1000.0, 750.0])
    assert "a million tokens" in section.lead and chart.data["for"] == "a million tokens"


def _page_of(front: Front | None = None, **changes: Any) -> Page:
    plan, _ = sample.told(sample.plan())
    subject = html_data.Subject(path=Path("p"), plan=plan, plan_path=Path("p"), front=front)
    return html_sections.page(replace(subject, **changes))


def test_a_plan_that_another_betters_is_never_on_the_front() -> None:
    """Whatever the file says, against the definition; and every plan that was not chosen says why."""
    rng = random.Random(3)
    points = tuple(
        FrontPoint(words=f"plan {number}", seconds=rng.randint(1, 5), memory_bytes=rng.randint(1, 5), cost_per_step=rng.choice([None, 1, 2]),
              joules_per_step=rng.randint(1, 3), per_step=rng.choice([100, 200]), unit="tokens", chosen=not number)
        for number in range(20)
    )  # fmt: skip
    front = html_front.from_json(json.loads(json.dumps(Front(points=points).to_json())))

    def each(point: FrontPoint) -> list[float | None]:
        by_token = [None if v is None else v / (point.per_step or 1) for v in (point.seconds, point.cost_per_step, point.joules_per_step)]
        return [*by_token, point.memory_bytes]

    for point in front.points:
        mine = each(point)
        others = [[(a, b) for a, b in zip(each(other), mine, strict=True) if a is not None and b is not None] for other in points]
        beaten = any(all(a <= b for a, b in pairs) and any(a < b for a, b in pairs) for pairs in others)
        assert point.on_front is not beaten
    page = _page_of(front)
    charts = [figure.chart for section in page.sections if section.name == "front" for figure in section.figures]
    drawn = {one["name"].partition(": ")[2]: one["front"] for chart in charts if chart for one in chart.data["points"]}
    assert drawn == {point.words: point.on_front for point in front.points if point.words in drawn} and len(drawn) == 20
    rows = next(section for section in page.sections if section.name == "others").figures[0].table.rows
    assert all(row[-1] not in ("", "–") for row in rows) and [row[-1] for row in rows].count("chosen") == 1


def test_money_is_of_the_seconds_that_it_stands_beside(tmp_path: Path) -> None:
    """A run that took twice as long as predicted cost twice as much, and both are told."""
    plan, detail = sample.told(sample.plan())
    run = sample.run_folder(tmp_path / "run", plan)
    measured = json.loads((run / "measurement.json").read_text())
    step = 2 * plan.predicted["step_seconds"]
    (run / "measurement.json").write_text(json.dumps({**measured, "step_seconds": step, "wall_seconds": 360.0}))
    hour, _ = price_per_hour(find("H100"))
    assert hour is not None
    for known in (detail, None):
        page = html_sections.page(html_data.read(run), known)
        facts = {fact.label: fact for fact in page.facts}
        assert f"{facts['Cost'].value} {facts['Cost'].unit}" == words.per_steps(hour * step / 3600)
        assert f"{words.per_steps(hour * step / 7200)} predicted" in facts["Cost"].beside
        assert (facts["Whole run"].value, facts["Whole run"].unit) == ("6", "min") and words.money(hour / 10) in facts["Whole run"].beside
        assert f"in 6 min for {words.money(hour / 10)}" in page.conclusion and "2.0 times as long as" in page.conclusion
    alone = {fact.label: fact for fact in html_sections.page(html_data.Subject(path=run, plan=plan, plan_path=run), detail).facts}
    assert f"{alone['Cost'].value} {alone['Cost'].unit}" == words.per_steps(hour * step / 7200)


def test_a_page_opens_with_its_conclusion(tmp_path: Path) -> None:
    """In one sentence, before any table, with what comes next to copy."""
    plan, _ = sample.told(sample.plan())
    run = sample.run_folder(tmp_path / "run", plan, command="foretell run a.json --steps 30")
    going = sample.run_folder(tmp_path / "going", plan, measured=False)
    said = {
        "run": html_sections.page(html_data.read(run)), "going": html_sections.page(html_data.read(going)), "plan": _page_of(),
        "no": _page_of(plan=plan.with_(predicted={**plan.predicted, "verdict": "no"})),
    }  # fmt: skip
    assert said["run"].conclusion.startswith("gpt-tiny ran 30 steps in 60.0 s for $") and "as predicted" in said["run"].conclusion
    assert said["going"].conclusion.startswith("The run of gpt-tiny has not ended after 30 steps; a step is predicted to take ")
    assert said["plan"].conclusion.startswith("gpt-tiny fits on 8xH100 (") and " a billion tokens" in said["plan"].conclusion
    assert said["no"].conclusion.startswith("gpt-tiny does not fit on 8xH100: ")
    assert [text for _, text in said["run"].commands] == [f"foretell compare {run}", "foretell run a.json --steps 30"]
    assert [text for _, text in said["plan"].commands] == ["foretell run p", "foretell plan show p"]
    assert [text for _, text in said["going"].commands] == [f"foretell run {going} --resume"]
    for page in said.values():
        text = html.render(page)
        assert page.conclusion.count(".") - len(re.findall(r"\d\.\d", page.conclusion)) == 1, "one sentence"
        assert text.index('class="conclusion"') < text.index('class="facts"') < text.index("<table")


def test_phases_have_both_what_was_predicted_and_what_was_measured(tmp_path: Path) -> None:
    """Spans of the predicted step add up to it, as the clocks of a run see them; an older plan takes them from the costing."""
    for asked in (sample.plan(), sample.piped()):
        plan, detail = sample.told(asked)
        assert sum(plan.predicted["spans"].values()) == pytest.approx(plan.predicted["step_seconds"])
        assert plan.predicted["spans"]["update"] >= plan.predicted["phases"]["update"]
        older = plan.with_(predicted={name: value for name, value in plan.predicted.items() if name not in ("spans", "phases")})
        for number, one in enumerate((plan, older)):
            run = sample.run_folder(tmp_path / f"{asked.mesh.pp}-{number}", one)
            page = html_sections.page(html_data.read(run), detail)
            table = next(f.table for s in page.sections for f in s.figures if f.chart is not None and f.chart.name == "phases")
            rows = {str(row[0]): row[1:3] for row in table.rows}
            assert "–" not in (*rows["forward and backward"], *rows["update"]), "predicted and measured"


def test_a_run_folder_is_read_whole(tmp_path: Path) -> None:
    plan, _ = sample.told(sample.piped())
    found = html_data.read(sample.with_front(sample.run_folder(tmp_path / "run", plan)))
    assert found.plan == plan and found.finished and found.comparison is not None and found.front == sample.front()
    assert [row.step for row in found.steps] == list(range(1, 31)), "the line that was cut is left out"
    assert found.steps[6].loss is None and found.steps[7].loss == pytest.approx(2.375)
    assert [row.loss for row in found.evaluations] == [2.2]
    assert found.command == "foretell run plan.json"


def test_the_front_of_the_plan_that_was_run_is_found(tmp_path: Path) -> None:
    plan, _ = sample.told(sample.plan())
    named = tmp_path / "first.json"
    plans.write(plan, named)
    html_front.write(sample.front(), named)
    run = sample.run_folder(tmp_path / "run", plan, command=f"foretell run {named} --steps 3")
    assert html_data.read(run).front == sample.front()
    plans.write(plan.with_(micro_batch=4), named)
    assert html_data.read(run).front is None, "another plan is there by now"


def test_a_run_under_way_has_no_comparison(tmp_path: Path) -> None:
    plan, _ = sample.told(sample.plan())
    found = html_data.read(sample.run_folder(tmp_path / "run", plan, measured=False))
    assert not found.finished and found.comparison is None
    page = html_sections.page(found)
    assert "no measurement yet" in " ".join(page.notes)
    assert [section.name for section in page.sections][:2] == ["loss", "time"]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda at: at / "nothing", "there is no run folder or plan file"),
        (lambda at: at, "is no run folder: it has no plan.json"),
        (lambda at: _file(at / "plan.json", "{").parent, "is not a plan"),
        (lambda at: _file(at / "p.json", "\x00\xff"), "is not a plan"),
        (lambda at: _broken(at, "measurement.json", "{"), "measurement.json cannot be read"),
        (lambda at: _broken(at, "measurement.json", "[]"), "measurement.json: it is [] and should be an object"),
        (lambda at: _broken(at, "measurement.json", "{}"), "is missing"),
        (lambda at: _broken(at, "settings.json", "nonsense"), "settings.json cannot be read"),
        (lambda at: _broken(at, "plan.front.json", "7"), "no list of points"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(make: Callable[[Path], Path], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(make(tmp_path))]) == 2
    said = capsys.readouterr()
    assert complaint in said.err and said.err.count("\n") == 1 and not said.out
    assert not list(tmp_path.rglob("*.html"))


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _broken(at: Path, name: str, text: str) -> Path:
    run = sample.run_folder(at / "run", Plan(model={"model": "gpt-tiny"}, hardware="H100"))
    return _file(run / name, text).parent


@pytest.mark.parametrize(("out", "complaint"), [(".", "is a folder"), ("x.txt", "does not end in .html"), ("no/x.html", "there is no folder")])
def test_a_page_that_cannot_be_written_is_said_first(out: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plans.write(Plan(model={"model": "gpt-tiny"}, hardware="H100"), plan)
    assert main(["report", str(plan), "--out", str(tmp_path / out)]) == 2
    assert complaint in capsys.readouterr().err


def test_without_a_trace_the_page_has_what_the_files_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(sample.told(sample.plan())[0], hardware="gone.toml")
    path = tmp_path / "plan.json"
    plans.write(plan, path)
    assert main(["report", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["report"]
    assert said["file"] == str(tmp_path / "plan.report.html") and not said["beside"] and "gone.toml" in said["left_out"]
    text = (tmp_path / "plan.report.html").read_text()
    assert "are left out: " in text and "gone.toml" in text
    assert said["sections"] == ["time", "memory", "plan", "repeat"]


def test_the_command_writes_the_page_and_what_lies_beside_it(tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the real tracing in a process of its own; a second time the kept trace is enough."""
    path = tmp_path / "plan.json"
    plans.write(sample.plan(), path)
    assert main(["report", str(path)]) == 0
    assert "plan.report.html" in capsys.readouterr().out
    text = (tmp_path / "plan.report.html").read_text()
    for section in ("time", "memory", "blocks", "plan", "repeat", "known"):
        assert f'<section id="{section}">' in text
    events = json.loads((tmp_path / "plan.report.trace.json").read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)
    assert pickle.loads((tmp_path / "plan.report.snapshot.pickle").read_bytes())["device_traces"][0]
    assert 'href="plan.report.trace.json"' in text and 'href="plan.report.snapshot.pickle"' in text


# ---------------------------------------------------------------- the page


class Seen(HTMLParser):
    """Elements, their attributes and the text between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        else:
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """All there is to tell, with names that try to be more than names."""
    plan, detail = sample.told(sample.piped())
    bad = sample.HOSTILE
    plan = replace(plan, model={**plan.model, "model": bad, "overrides": {bad: bad}}, hardware=bad, notes=(bad,), kernels={bad: bad})
    run = sample.run_folder(tmp_path_factory.mktemp("hostile") / "run", plan, command=f"foretell run {bad}")
    subject = replace(html_data.read(run), front=sample.front(hostile=True))
    curve = replace(detail.curve, peak_module=bad)
    blocks = tuple(replace(one, name=f"{bad}{number}") for number, one in enumerate(detail.blocks))
    return html_sections.page(subject, replace(detail, curve=curve, blocks=blocks), why_not=bad, files=[(f"{bad}.json", bad)], made=bad)


def test_no_name_breaks_out_of_the_page(hostile: Page) -> None:
    text = html.render(hostile)
    seen = Seen(text)
    assert seen.count("script") == 3 and seen.count("img") == 0 and len(seen.scripts) == 3
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    assert sum("window.harmed=1" in part for part in seen.text) > 10, "the names are told, as text"
    charts = json.loads(seen.scripts[0])
    assert "window.harmed=1" in json.dumps(charts)
    assert not re.search(r"[<>&\u2028]", seen.scripts[0])


def test_only_the_two_scripts_may_run(hostile: Page) -> None:
    seen = Seen(html.render(hostile))
    policy = next(attributes["content"] for tag, attributes in seen.tags if attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert re.findall(r"'sha256-([^']+)'", policy) == [html._hash(script) for script in seen.scripts[1:]]


def test_the_page_needs_nothing_from_elsewhere(hostile: Page) -> None:
    text = html.render(hostile)
    seen = Seen(text)
    for tag, attributes in seen.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        for name in ("src", "srcset", "data", "action", "formaction", "poster", "background"):
            assert name not in attributes
        assert not re.match(r"(?i)\s*(https?:|//|javascript:|data:)", attributes.get("href", ""))
    own = [(resources.files("foretell.report") / "assets" / name).read_text() for name in ("page.css", "page.js")]
    for written in own:
        assert not re.search(r"https?://|url\(|@import|import\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|eval\(", written)


def test_every_chart_has_its_table(hostile: Page) -> None:
    page = hostile
    figures = [figure for section in page.sections for figure in section.figures]
    assert {figure.chart.kind for figure in figures if figure.chart} == {"bands", "lines", "bars", "areas", "gantt", "scatter"}
    assert len({figure.chart.name for figure in figures if figure.chart}) == sum(figure.chart is not None for figure in figures)
    for figure in figures:
        assert figure.table.rows and all(len(row) == len(figure.table.head) for row in figure.table.rows)
        assert figure.chart is None or figure.chart.told
    text = html.render(page)
    for body in re.findall(r"<figure>(.*?)</figure>", text, re.S):
        assert 'class="chart"' not in body or body.index('class="chart"') < body.index("<details>") < body.index("<table")
    names = [section.name for section in page.sections]
    assert names == ["compared", "loss", "time", "memory", "pipeline", "blocks", "front", "others", "plan", "repeat", "known"]


def test_a_page_says_what_was_asked_of_it(tmp_path: Path) -> None:
    plan, detail = sample.told(sample.piped())
    run = sample.with_front(sample.run_folder(tmp_path / "run", plan))
    page = html_sections.page(html_data.read(run), detail)
    text = " ".join(Seen(html.render(page)).text)
    for piece in ("the bubble", "1f1b: one forward, one backward in turn", "heads do not divide", "50 % slower", "foretell run plan.json",
                  "foretell plan gpt-tiny --on 8xH100 --global-batch 10", "42 plans were costed", "peak comes"):  # fmt: skip
        assert piece in text.replace("\u00a0", " "), piece
    facts = {fact.label: fact for fact in page.facts}
    assert facts["Step"].known == "measured" and facts["Step"].good is True
    assert facts["Allocated"].beside.endswith(", 0 %")


def test_figures_of_the_chart_are_those_of_the_curve() -> None:
    plan, detail = sample.told(sample.plan())
    page = html_sections.page(html_data.Subject(path=Path("p"), plan=plan, plan_path=Path("p")), detail)
    chart = next(figure.chart for section in page.sections for figure in section.figures if figure.chart and figure.chart.name == "memory")
    assert sum(row[chart.data["peak"]] for row in chart.data["values"]) == detail.cost.worst.memory.allocated_bytes
    assert set(detail.curve.categories) <= set(COLOURS)


def test_text_that_html_knows_stays_text() -> None:
    table = Table(head=("a<b",), rows=((Cell(text="<b>", mark="good"),), ("x&y",)))
    chart = Chart(name="one", kind="bars", data={"nan": float("nan"), "text": "</script>"}, told='"quoted"')
    section = Section(name="s", title="t<", lead="", figures=(Figure(table=table, chart=chart),), code=(("l", "a < b && c"),))
    text = html.render(Page(title="<t>", subtitle="", about=(), facts=(), sections=(section,)))
    assert "a&lt;b" in text and "x&amp;y" in text and "a &lt; b &amp;&amp; c" in text and "&quot;quoted&quot;" in text
    assert json.loads(Seen(text).scripts[0]) == [{"name": "one", "kind": "bars", "height": 300, "nan": None, "text": "</script>"}]


def test_columns_have_one_unit() -> None:
    assert sizes([3 * 2**30, 2**20, None, 0]) == ["3.00 GiB", "< 0.01 GiB", "–", "0.00 GiB"]
    assert sizes([300 * 2**20, 2**20]) == ["300.0 MiB", "1.0 MiB"]
    assert times([0.0421, 0.00011]) == ["42.10 ms", "0.11 ms"]
    assert times([]) == []


def test_thinning_keeps_both_ends() -> None:
    rows = [html_data.LogRow(step=n, loss=None, seconds=None, rate=None, norm=None) for n in range(1000)]
    kept = [row.step for row in thinned(rows, 24)]
    assert len(kept) == 24 and kept[0] == 0 and kept[-1] == 999
    assert thinned(rows[:5], 24) == rows[:5]


def test_the_chart_library_is_the_one_named() -> None:
    """Vendored unchanged, with its licences; the version stands in its README and in the page."""
    folder = resources.files("foretell.report") / "assets"
    found = hashlib.sha256((folder / "echarts.min.js").read_bytes()).hexdigest()
    assert found == "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"
    assert f"Apache ECharts {html.ECHARTS}" in (folder / "README.md").read_text()
    assert f'version="{html.ECHARTS}"' in (folder / "echarts.min.js").read_text()
    assert "Apache License" in (folder / "echarts.LICENSE").read_text()
    assert "Apache Software Foundation" in (folder / "echarts.NOTICE").read_text()
    for name in ("d3", "zrender"):
        assert "Redistribution and use" in (folder / f"echarts.LICENSE-{name}").read_text()


def test_a_plan_that_was_never_costed_has_a_page() -> None:
    plan = Plan(model={"model": "gpt-tiny"}, hardware="H100")
    page = html_sections.page(html_data.Subject(path=Path("p"), plan=plan, plan_path=Path("p")))
    assert [section.name for section in page.sections] == ["plan", "repeat"] and not page.facts
    with pytest.raises(UserError):
        html_data.read("/nonexistent/plan.json")
