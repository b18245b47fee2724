"""Links and anchors of every page lead somewhere, every page is in the navigation of the site, and project files have what they must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import foretell

ROOT = Path(__file__).resolve().parents[2]
APART = (".venv", "build", "dist", "runs", "node_modules")
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("*/**/*.md")]
               if path.relative_to(ROOT).parts[0] not in APART)  # fmt: skip
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"(?<!\\)\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")
ELSEWHERE = re.compile(r"[a-z]+:", re.IGNORECASE)


def links(text: str) -> Iterator[str]:
    """Targets of a page's links; what is shown as code has none, but the words of a link may be code."""
    plain = CODE.sub("code", FENCE.sub("", text))
    yield from (found[1] for found in LINK.finditer(plain))


def anchors(text: str) -> set[str]:
    """Those of its headings: words in lower case joined by hyphens, a number after the second of a name."""
    found: set[str] = set()
    for line in FENCE.sub("", text).splitlines():
        if heading := re.match(r"#{1,6} (.+?)#*$", line):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).strip().lower()
            slug = re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", words))
            count = 0
            while (f"{slug}-{count}" if count else slug) in found:
                count += 1
            found.add(f"{slug}-{count}" if count else slug)
    return found


def wrong_links(page: Path, root: Path) -> list[str]:
    """Relative links of a page that lead nowhere, or out of the repository."""
    told = []
    for link in links(page.read_text(encoding="utf-8")):
        if ELSEWHERE.match(link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(root.resolve()) or not target.exists():
            told.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            told.append(f"{link}: no such heading")
    return told


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert wrong_links(ROOT / page, ROOT) == []


def test_all_pages_are_looked_at() -> None:
    assert {"README.md", "SECURITY.md", "docs/plan.md", "docs/decisions/0008-one-path.md", "hub/README.md"} <= set(PAGES)
    assert sum(len(list(links((ROOT / page).read_text(encoding="utf-8")))) for page in PAGES) > 100


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One: two, `three`\n## Again\n## Again\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md) [`b`](other.md#one-two-three)\n"
                    "[c](other.md#again-1) [d](https://example.org/x) [e](#f)\n# F\n```\n[x](none.md)\n```\n")
    assert wrong_links(page, tmp_path) == []
    page.write_text("[a](none.md) [b](other.md#no-heading) [c](#gone) `[d](code.md)` [e](../../etc)\n")
    assert [line.partition(":")[0] for line in wrong_links(page, tmp_path)] == ["none.md", "other.md#no-heading", "#gone", "../../etc"]


# ---------------------------------------------------------------------------------------------- the site


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(one)


def loaded(name: str) -> Any:
    return pytest.importorskip("yaml", reason="pyyaml, of the dev extra, is not installed").safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(leaves(loaded("mkdocs.yml")["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    joining = set(re.findall(r'"([^"]+\.md)"', re.search(r"^JOINING = .*$", (ROOT / ".ci" / "site.py").read_text(), re.MULTILINE)[0]))  # type: ignore[index]
    assert sorted(named) == sorted(pages | joining), "name every page once under `nav` in mkdocs.yml"
    assert all((ROOT / name).is_file() for name in joining)


# ---------------------------------------------------------------------------------------------- files about the project


def test_the_citation_has_what_the_format_requires() -> None:
    """Citation File Format 1.2: four required keys, authors that are people or entities, a date, a version of this package."""
    found = loaded("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(found) and found["cff-version"] == "1.2.0"
    assert all(author.get("name") or author.get("family-names") for author in found["authors"]) and found["type"] == "software"
    assert found["version"] == foretell.__version__ and found["license"] == "Apache-2.0"
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["date-released"])
    dated = re.search(rf"^## \[{re.escape(foretell.__version__)}\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated and found["date-released"] == dated[1]


@pytest.mark.parametrize("name", ["wrong_prediction", "crash", "idea"])
def test_issue_forms_ask_for_something(name: str) -> None:
    form = loaded(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"] and len({part["id"] for part in form["body"]}) == len(form["body"])
    assert any(part.get("validations", {}).get("required") for part in form["body"])
    told = " ".join(str(part["attributes"]) for part in form["body"])
    assert name == "idea" or ("foretell doctor --json" in told and "command" in told)


def test_the_workflow_runs_what_makes_a_change_good() -> None:
    """Commands exist in the Makefile; rights are the least; actions are of a pinned major version."""
    flow = loaded(".github/workflows/ci.yml")
    assert flow["permissions"] == {"contents": "read"}
    steps = [step for job in flow["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"[\w./-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = {step["run"].removeprefix("make ") for step in steps if "run" in step}
    assert {"lint", "test", "wheel", "check-wheel", "site"} <= ran <= targets
    assert flow["jobs"]["wheel"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert not any("permissions" in job for job in flow["jobs"].values())
