"""Pages of serving from each kind of file, and files that are none."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.plan import file
from foretell.plan.types import Plan, ServeLayout
from foretell.report.html import page as html
from foretell.report.html import served, serving
from foretell.report.html.served import SPANS, ServeMoment, ServePointTold

QUANTILES = {"p50": 0.01, "p95": 0.02, "p99": 0.03}


def run(rate: float, tpot: float) -> dict[str, Any]:
    return {"output_tokens_per_second": rate, "tpot_seconds": {**QUANTILES, "p50": tpot}, "ttft_seconds": QUANTILES, "inside": 0.97}


BENCH = {"bench": {"url": "http://127.0.0.1:1/v1", "model": "tiny", "saturated": 8.0, "why": "goodput falls", "points": [
    {"load": "users=4", "amount": 4, "closed": True, "runs": [run(100, 0.01)]},
    {"load": "users=8", "amount": 8, "closed": True, "runs": [run(150, 0.02), run(170, 0.02), run(160, 0.02)]},
    {"load": "users=16", "amount": 16, "closed": True, "runs": [run(150, 0.05)]},
]}}  # fmt: skip
FIGURES = {"tokens_per_second": 120.0, "inside": 1.0, "ttft_p50": 0.01, "ttft_p95": 0.02, "tpot_p50": 0.004, "tpot_p95": 0.005, "answer_seconds": 0.1}
ONE = {"settings": {"running": 8, "tokens": 128, "page": 16, "pages": 60, "share": True, "graphs": True}, "predicted": FIGURES,
       "measured": {**FIGURES, "tokens_per_second": 100.0}, "failed": ""}  # fmt: skip
TUNE = {"tune": {"best": ONE, "points": [ONE, {**ONE, "settings": {**ONE["settings"], "running": 4}}],  # type: ignore[dict-item]
                 "carried_loss": 0.125, "carried_from": "H100", "notes": []}}  # fmt: skip
LAYOUT = ServeLayout(running=8, tokens=128, pages=60, load="users=8, in=64, out=16", slo="tpot=40ms").to_json()
SEARCH = {"serving": {
    "best": {"layout": LAYOUT}, "ruled_out": [{"layout": {**LAYOUT, "tp": 2}, "why": "no room"}],
    "front": [{"layout": LAYOUT, "tpot_p95_seconds": 0.02, "ttft_p95_seconds": 0.1, "output_tokens_per_second": 900.0, "inside": 1.0,
               "capacity_rate": 5.0}],
    "forecast": {"model": "llama3-8b", "device": "H100-SXM-80GB", "pages": 60, "timeline": [[1.0, 10], [2.0, 42], [3.0, 17]]},
}}  # fmt: skip


class Text(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(content: Any, tmp_path: Path) -> tuple[str, Any]:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(content))
    assert served.holds(path)
    made = serving.page(served.read(path))
    return " ".join(Text(html.render(made)).words), made


def test_a_measured_server_is_drawn_as_tokens_against_seconds(tmp_path: Path) -> None:
    text, made = page_of(BENCH, tmp_path)
    points = made.sections[0].figures[0].chart.data["points"]
    assert [(one["x"], one["y"], one["front"]) for one in points] == [(0.01, 100.0, True), (0.02, 160.0, True), (0.05, 150.0, False)]
    assert "Saturated above 8 users" in text and "At most 160 tokens a second" in text


def test_tuned_settings_are_told_beside_what_was_predicted(tmp_path: Path) -> None:
    text, made = page_of(TUNE, tmp_path)
    assert [section.name for section in made.sections] == ["rate", "compared"]
    assert "+20 %" in text and "12.5% fewer tokens a second" in text and made.sections[0].figures[0].chart.data["points"][0]["chosen"]


def test_a_search_has_its_front_and_its_pages(tmp_path: Path) -> None:
    text, made = page_of(SEARCH, tmp_path)
    assert [section.name for section in made.sections] == ["rate", "pages"]
    assert "At most 42 pages are held, 70% of 60" in text and "5 requests a second inside the limits" in text and "no room" in text


def test_a_plan_takes_what_the_search_left_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted = {"output_tokens_per_second": 880.0, "tpot_p95_seconds": 0.021, "ttft_p95_seconds": 0.1, "inside": 1.0}
    layout = ServeLayout.from_json(LAYOUT)
    plan = Plan(model={"model": "llama3-8b"}, hardware="H100", serve=layout, predicted={"serving": predicted})
    file.write(plan, tmp_path / "p.json")
    assert main(["report", str(tmp_path / "p.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["sections"] == ["rate"]
    (tmp_path / "p.serving.json").write_text(json.dumps(SEARCH))
    assert main(["report", str(tmp_path / "p.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["sections"] == ["rate", "pages"]
    assert "users=8, in=64, out=16" in (tmp_path / "p.report.html").read_text()


@pytest.mark.parametrize(
    "content",
    [{"bench": {"points": 3}}, {"bench": {}}, {"tune": {"points": [{"settings": {}}]}}, {"serving": {"front": [1]}}, {"serve": {"a": 1}},
     {"bench": {**BENCH["bench"], "points": [{"load": "x", "amount": "<script>", "closed": True, "runs": [run(1, 1)]}]}}],
)  # fmt: skip
def test_a_broken_file_is_one_line(content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(content))
    assert main(["report", str(path)]) == 2
    said = capsys.readouterr().err
    assert "no file of serving" in said and said.count("\n") == 1, said


def test_names_break_out_of_nothing(tmp_path: Path) -> None:
    bench = json.loads(json.dumps(BENCH))
    bench["bench"]["model"] = "</script><script>alert(1)</script>"
    path = tmp_path / "given.json"
    path.write_text(json.dumps(bench))
    assert "<script>alert" not in html.render(serving.page(served.read(path)))


def test_many_moments_are_thinned_to_the_most_of_each_span() -> None:
    some = [ServeMoment(at=float(number), pages=number % 97, running=1, waiting=0) for number in range(5000)]
    found = served.thinned(some)
    assert len(found) == SPANS and max(one.pages for one in found) == 96 and found[0].at == 0.0


def test_a_point_is_beaten_by_one_that_is_better_in_something_and_worse_in_nothing() -> None:
    one, faster, same = (ServePointTold(name="", tpot=tpot, rate=rate) for tpot, rate in ((0.02, 100.0), (0.01, 100.0), (0.02, 100.0)))
    assert serving.beaten(one, [one, faster]) and not serving.beaten(one, [one, same]) and not serving.beaten(faster, [one, faster])
