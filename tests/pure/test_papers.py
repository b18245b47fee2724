"""docs/papers.md names files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs" / "papers.md").read_text().splitlines() if line.startswith("| ") and "`" in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_where_a_paper_lives_is_there(row: str) -> None:
    places = [word for word in re.findall(r"`([^`]+)`", row.split("|")[2]) if "/" in word or word.endswith(".py")]
    assert places or "`" in row.split("|")[2], row
    for place in places:
        roots = (ROOT / "foretell", ROOT)
        assert any(list(root.glob(place)) if "*" in place else (root / place).exists() for root in roots), f"{place} is not there"
