"""What a load gets, predicted beside measured, as lines of a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.units import human_seconds

if TYPE_CHECKING:
    from foretell.search.serving.settings import ServeFigures

NAMES = (
    ("good", "tokens/s"), ("ttft_p50", "first token p50"), ("ttft_p95", "first token p95"), ("tpot_p50", "a token after it p50"),
    ("tpot_p95", "a token after it p95"),
)  # fmt: skip


def beside_lines(predicted: ServeFigures, measured: ServeFigures) -> list[str]:
    rows = [("", "predicted", "measured", "")]
    for name, words in NAMES:
        one, other = getattr(predicted, name), getattr(measured, name)
        both = [f"{value:,.0f}" if name == "good" else human_seconds(value) for value in (one, other)]
        rows.append((words, both[0], both[1], f"{one / other - 1:+.0%}" if other else ""))
    return [f"  {row[0]:<22}{row[1]:>11}{row[2]:>11}{row[3]:>7}".rstrip() for row in rows]
