"""The table of workload papers in docs/papers.md: paper, module, what was measured of it, its trap and what is open.

    python benchmarks/zoo_table.py            writes the table anew between its two marks
    python benchmarks/zoo_table.py --check    exit 1 if the page does not say what it would write

Papers, tasks and traps are those of the entries (`foretell/zoo/listing`), figures those that `foretell zoo check --keep` wrote
(`foretell/zoo/measured.jsonl`): of a module's rows on a kind of device the one that is furthest off.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from foretell.units import human_bytes  # noqa: E402
from foretell.zoo.catalogue import MEASURED, Card, cards, newest  # noqa: E402
from foretell.zoo.rubric import PASSED, error_of, is_cpu  # noqa: E402

PAGE = HERE.parent / "docs" / "papers.md"
START, END = "<!-- zoo table: benchmarks/zoo_table.py writes it -->", "<!-- end of zoo table -->"
HEADS = ("paper", "module", "task", "CPU: bytes, seconds", "GPU: bytes, seconds", "trap, as tests hold it", "open, and why")

WORKLOADS = (
    "3DIS-FLUX", "AMD-Hummingbird", "AllShowers", "Any-Size-Diffusion", "BEV Instance Prediction", "Beyond Backpropagation",
    "DNMP (Urban Radiance Field)", "Distilled Protein Backbone", "Distributional MIPLIB", "E2-LLM", "Gaussian RBF networks", "HMT",
    "Hyperspectral Pansharpening toolbox", "InterPrior", "Lamarr", "LongLoRA", "Mamba YOLO", "MiniCPM-V", "MonoCoder", "NeuroBack",
    "Open-Qwen2VL", "PIIP", "PIIP-LLaVA", "PVD (One is All)", "PVD-AL", "PYRA", "Perforated Backpropagation", "PoLAr-MAE", "ProNeRF",
    "Pytorch-Wildlife", "RECOMBINER", "RPCANet++", "RaftMLP", "RealPDEBench", "Resource-Aware Arabic LLM", "SC2EGSet", "SG-Reg",
    "SceneSplat", "Scaling MLPs", "Splat the Net", "Strip-MLP", "TNT", "TRIMEG", "TinyGPT-V", "TorchGeo", "Video-RAG",
    "[Re] Don't Judge an Object by Its Context", "iControl3D", "kMaX-DeepLab", "rStar2-Agent",
)  # fmt: skip
"""Papers that are workloads, as entries name them; Lamarr is two of them, which one chain serves."""


def table(found: Sequence[Card]) -> list[str]:
    """The table's lines; KeyError where a paper has no module."""
    lines = [_line(HEADS), _line(["---"] * len(HEADS))]
    for paper in sorted(WORKLOADS, key=str.casefold):
        own = [_of_paper(card, paper) for card in found if paper in card.papers]
        if not own:
            raise KeyError(paper)
        lines.append(_line(_cells(paper, own)))
    return lines


def _of_paper(card: Card, paper: str) -> Card:
    """The card with the entries of that paper alone, and their rows."""
    entries = tuple(entry for entry in card.entries if entry.paper == paper)
    names = {entry.name for entry in entries}
    return replace(card, entries=entries, rows=tuple(row for row in card.rows if row["name"] in names))


def _cells(paper: str, own: Sequence[Card]) -> list[str]:
    rows = [row for card in own for row in newest(card.rows)]
    traps = dict.fromkeys(max(card.traps, key=len) for card in own)  # a small entry may say less
    held, left = zip(*(split_trap(trap) for trap in traps), strict=True)
    return [
        f"{paper}, both papers" if paper == "Lamarr" else paper,
        ", ".join(f"`{card.file.removeprefix('foretell/')}`" for card in own),
        ", ".join(dict.fromkeys(task for card in own for task in card.tasks)),
        _figures([row for row in rows if is_cpu(row)]),
        _figures([row for row in rows if not is_cpu(row)]),
        "; ".join(dict.fromkeys(filter(None, held))),
        "; ".join(dict.fromkeys(filter(None, left))) or "–",
    ]


def split_trap(trap: str) -> tuple[str, str]:
    """What of a trap is handled, and what is not with the reason."""
    parts = re.split(r"[;.]? *\b[Nn]ot (?:handled|checked): *", trap, maxsplit=1)
    return parts[0].strip(), parts[1].strip() if len(parts) > 1 else ""


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each kind of figure the row that is furthest off; a dash where there is none."""
    told = [text for what in ("bytes", "seconds") if (text := _worst(rows, what))]
    failed = [f"{_title(row)}: {row.get('reason') or row.get('status')}" for row in rows if row.get("status") != PASSED]
    return "; ".join([*told, *dict.fromkeys(failed)]) or "–"


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['name']} {row.get('phase') or ''}".rstrip()


def _worst(rows: Iterable[Mapping[str, Any]], what: str) -> str:
    known = [(error, row) for row in rows if (error := error_of(row, what)) is not None]
    if not known:
        return ""
    error, row = max(known, key=lambda item: abs(item[0]))
    measured = float(row[f"measured_{what}"])
    return f"{human_bytes(round(measured)) if what == 'bytes' else _seconds(measured)} {100 * error:+.1f} %"


def _seconds(value: float) -> str:
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def page(text: str, lines: Sequence[str]) -> str:
    """The page with the table in its place; SystemExit where its marks are not there once each."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise SystemExit(f"{PAGE.name} has no place for the table: {START} ... {END}")
    return "\n".join([text[: text.index(START)] + START, "", *lines, "", text[text.index(END) :]])


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    words.add_argument("--measured", type=Path, default=MEASURED, help="another file of measured rows")
    asked = words.parse_args()
    now = PAGE.read_text(encoding="utf-8")
    new = page(now, table(cards(asked.measured)))
    if asked.check:
        print("up to date" if new == now else f"{PAGE.name} is not up to date: run python benchmarks/zoo_table.py")
        return int(new != now)
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PAGE.name}: {len(WORKLOADS)} papers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
