"""A hook of mkdocs: pages of the repository that lie outside docs/ join the site, and links from page to page lead there.

In the repository README.md links to docs/plan.md; on the site both lie side by side. A link to a file that is no page (a schema, a
script) becomes its name, as there is no such page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
JOINING = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "hub/README.md", "benchmarks/results/README.md")
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name in JOINING:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    on_site = page.file.src_uri
    in_repository = on_site if on_site in JOINING else f"docs/{on_site}"

    def placed(found: re.Match[str]) -> str:
        text, link, anchor = found[1], found[2], found[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), link))
        if not (ROOT / target).exists():
            return found[0]  # --strict tells it
        there = target if target in JOINING else target.removeprefix("docs/") if target.startswith("docs/") else ""
        if not there.endswith(".md"):
            return text if text.startswith("`") else f"{text} (`{target}`)"
        return f"[{text}]({posixpath.relpath(there, posixpath.dirname(on_site) or '.')}{anchor})"

    return "".join(part if number % 2 else LINK.sub(placed, part) for number, part in enumerate(FENCED.split(markdown)))
