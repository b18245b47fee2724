"""Reports in a real browser: charts are drawn, nothing complains, nothing is loaded, at both widths and in both schemes.

Chromium writes the page's own account of itself (attributes of <html> and of every chart), what its console said, and
a log of every request. Planted faults show that each of the three would be seen.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from foretell.report.html import data as html_data
from foretell.report.html import page as html
from foretell.report.html import sections as html_sections
from tests.pure import report_sample as sample

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: reports are not seen drawn; apt-get install chromium")

SCHEMES = {"dark": 0, "light": 1}
NARROW = """<!doctype html><html><body style="margin:0"><iframe src="%s" style="border:0;width:400px;height:800px"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement;
  const shut = Array.from(page.querySelectorAll("figure .chart ~ details"), (one) => one.open ? 1 : 0);
  for (const one of page.querySelectorAll("details")) one.open = true;
  const cut = Array.from(page.querySelectorAll(".scroll"), (one) => one.scrollWidth - one.clientWidth);
  const edges = Array.from(page.querySelectorAll(".chart svg, .chart canvas"), (one) => one.getBoundingClientRect().right);
  Object.assign(document.documentElement.dataset, root.dataset, {
    wide: root.clientWidth, over: root.scrollWidth - root.clientWidth, edge: Math.max(...edges),
    shut: shut.join(" "), tables: cut.length, cut: Math.max(...cut), copies: page.querySelectorAll("pre + button.copy").length,
    blocks: page.querySelectorAll("pre").length,
    marks: Array.from(page.querySelectorAll(".chart"), (one) => one.dataset.marks).join(" ") });
}, 200);
</script></body></html>"""


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page."""

    about: dict[str, str]
    """data-* of <html>."""
    dom: str
    console: list[str]
    requests: list[str]
    """Addresses the page asked for; what the browser asks for itself is not among them."""

    @property
    def marks(self) -> dict[str, int]:
        """Chart → shapes in its own colours."""
        return {name: int(marks) for name, marks in re.findall(r'id="chart-([^"]+)"[^>]*data-marks="(\d+)"', self.dom)}


def visit(page: Path, scheme: str, *more: str) -> Visit:
    assert BROWSER is not None
    profile, log = page.with_suffix(".profile"), page.with_suffix(".net")
    words = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}", f"--log-net-log={log}", "--window-size=1280,900", "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--enable-logging=stderr", *more, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, errors="replace")
    assert done.stdout, f"the browser said nothing but: {done.stderr[-2000:]}"
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root is not None
    return Visit(
        about=dict(re.findall(r'data-([a-z]+)="([^"]*)"', root.group())), dom=done.stdout,
        console=[line for line in done.stderr.splitlines() if ":CONSOLE" in line], requests=_requests(log),
    )  # fmt: skip


def _requests(log: Path) -> list[str]:
    text = log.read_text(errors="replace").rstrip()
    try:
        events = json.loads(text)["events"]
    except ValueError:  # the browser left before it closed the list
        events = json.loads(text.rstrip(",") + "]}")["events"]
    asked = [event["params"] for event in events if isinstance(event.get("params"), dict)]
    return [str(one["url"]) for one in asked if one.get("initiator") not in (None, "not an origin") and not str(one.get("url")).startswith("file:")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report with every kind of chart."""
    at = tmp_path_factory.mktemp("report")
    plan, detail = sample.told(sample.piped())
    run = sample.with_ranks(sample.with_front(sample.run_folder(at / "run", plan)))
    return html.render(html_sections.page(html_data.read(run), detail))


def written(at: Path, text: str) -> Path:
    at.write_text(text, encoding="utf-8")
    return at


CHARTS = {
    "bands": 5, "steps": 2, "loss": 2, "time": 3, "phases": 4, "memory": 5, "pipeline": 22, "blocks-seconds": 8, "blocks-bytes": 8,
    "front-memory": 3, "front-cost": 2, "front-energy": 2, "ranks": 16,
}  # fmt: skip
"""Every chart of the page, and how many shapes it has at least: bars, dots, areas, events."""


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow(reason="the scheme of the narrow page below"))])
def test_every_chart_is_drawn(page: str, scheme: str, tmp_path: Path) -> None:
    seen = visit(written(tmp_path / "report.html", page), scheme)
    assert seen.about == {"ready": "true", "errors": "0", "charts": "13", "drawn": "13", "scheme": scheme}
    assert seen.console == [] and seen.requests == []
    assert seen.marks.keys() == CHARTS.keys()
    few = {name: (seen.marks[name], least) for name, least in CHARTS.items() if seen.marks[name] < least}
    assert not few, f"shapes drawn, and expected at least: {few}"
    assert seen.dom.count("<table") >= len(CHARTS)
    assert seen.dom.count("<svg") == len(CHARTS)


def test_a_phone_shows_it_whole(page: str, tmp_path: Path) -> None:
    """400 pixels wide nothing sticks out, every chart is drawn for that width, and no table is cut once it is opened."""
    written(tmp_path / "report.html", page)
    seen = visit(written(tmp_path / "narrow.html", NARROW % "report.html"), "light", "--allow-file-access-from-files")
    assert seen.about["drawn"] == "13" and seen.about["errors"] == "0" and seen.console == []
    assert int(seen.about["wide"]) <= 400 and seen.about["over"] == "0" and float(seen.about["edge"]) <= 400
    assert set(seen.about["shut"].split()) == {"0"} and len(seen.about["shut"].split()) == 13, "the table of a chart opens on demand"
    assert int(seen.about["tables"]) > 12 and int(seen.about["cut"]) <= 0, "tables fold into cards"
    assert int(seen.about["blocks"]) > 4 and seen.about["copies"] == seen.about["blocks"], "every command has its button"
    assert "0" not in seen.about["marks"].split()


def test_hostile_names_do_nothing(tmp_path: Path) -> None:
    plan, detail = sample.told(sample.plan())
    plan = plan.with_(model={**plan.model, "model": sample.HOSTILE}, notes=(sample.HOSTILE,))
    subject = html_data.Subject(path=Path("p"), plan=plan, plan_path=Path("p"), front=sample.front(hostile=True))
    blocks = tuple(replace(one, name=f"{sample.HOSTILE}{number}") for number, one in enumerate(detail.blocks))
    text = html.render(html_sections.page(subject, replace(detail, blocks=blocks)))
    before, _, after = _unguarded(text).rpartition("</body>")
    probe = "<script>document.documentElement.dataset.harmed = window.harmed || 'no'</script></body>"
    seen = visit(written(tmp_path / "report.html", f"{before}{probe}{after}"), "light")
    assert seen.about["harmed"] == "no" and seen.about["drawn"] == seen.about["charts"] and seen.requests == []


def _unguarded(text: str) -> str:
    """Without the page's own ban on everything else, so that only the escaping is left."""
    changed = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert changed != text
    return changed


# ---------------------------------------------------------------- that the tests above can fail


@pytest.mark.slow(reason="the check itself; charts of whole pages are counted above")
def test_a_broken_chart_is_seen(page: str, tmp_path: Path) -> None:
    """One chart of a kind nobody knows, one whose figures are gone: told, counted, logged. One with no events: counted."""
    unknown = page.replace('"kind":"scatter"', '"kind":"unheard"', 1)
    gone = re.sub(r'("kind":"areas".*?),"values":\[\[', r'\1,"lost":[[', unknown, count=1)
    empty = re.sub(r'("name":"pipeline".*?"slots":)\[\[.*?\]\]', r"\1[]", gone, count=1)
    assert len({page, unknown, gone, empty}) == 4
    seen = visit(written(tmp_path / "report.html", empty), "light")
    assert seen.about["drawn"] == "10" and seen.about["errors"] == "2" and seen.marks["pipeline"] == 0
    assert len(seen.console) == 2 and "chart memory" in "".join(seen.console)
    assert seen.dom.count('data-failed="') == 2


@pytest.mark.slow(reason="two visits; every page above is asked for what it requests")
def test_a_request_is_seen(page: str, tmp_path: Path) -> None:
    planted = page.replace("<main>", '<main><img src="https://report.invalid/x.png">')
    held = visit(written(tmp_path / "held.html", planted), "light")
    assert held.requests == [] and "Content Security Policy" in "".join(held.console)
    free = visit(written(tmp_path / "free.html", _unguarded(planted)), "light")
    assert free.requests and set(free.requests) == {"https://report.invalid/x.png"}
