"""`python -m foretell.hardware.probe.alone PROFILE.json` measures irregular ops alone.

Their rows go into the journal beside that profile, in the place of older ones; with `--missing` only families that the journal has no
case of, with `--only FAMILY ...` those. A profile is then fitted to its journal by `benchmarks/fit_profile.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from foretell.errors import UserError
from foretell.hardware.probe import journal as journals
from foretell.hardware.probe.cases.irregular import RARE, SECONDS
from foretell.hardware.probe.machine import about as machine_here
from foretell.hardware.probe.machine import device_of
from foretell.hardware.probe.ops import run_cases
from foretell.hardware.profile import Case, journal_path, load


def measure(kind: str, seconds: float, families: Collection[str] = RARE) -> Iterator[tuple[float, dict[str, Any], bool]]:
    """Journal entries of every case of some families, until the time is up: seconds spent, content, whether it could run."""
    until = time.perf_counter() + seconds
    for family, index, spent, found in run_cases(kind, device_of(kind), (), until, families):
        about = {"case": [family, index]}
        if isinstance(found, Case):
            yield spent, {**about, "rows": [row.to_list() for row in found.rows]}, True
        else:
            yield spent, {**about, "why": found}, False


def main(arguments: list[str]) -> int:
    """Measure, tell, and put the rows into the journal beside a profile if one is named."""
    given = _parser().parse_args(arguments)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    path = journals.packed_path(journal_path(given.profile)) if given.profile else None
    entries: list[journals.JournalEntry] = []
    if path is not None:
        profile, here = load(given.profile), machine_here(kind)
        if profile.device != here.device:
            raise UserError(f"'{given.profile}' is a profile of {profile.device}, and this is {here.device}", "name the profile of this machine")
        about, entries = journals.read(path)
    families = _asked(given, {entry.content["case"][0] for entry in entries if entry.stage == "ops"})
    sys.stdout.write(f"measuring {', '.join(families) or 'nothing: the journal has all families'}\n")
    found = []
    for spent, content, ran in measure(kind, given.seconds or SECONDS, families):
        found.append(journals.JournalEntry("ops" if ran else "failed", spent, content))
        for row in content.get("rows", ()):
            sys.stdout.write(f"{content['case'][0]:<11} {row[0]:<44} {1e6 * row[4]:11.1f} us  host {1e6 * row[6]:8.1f} us  {row[1][:2]}\n")
        if not ran:
            sys.stdout.write(f"{content['case'][0]:<11} could not run: {content['why']}\n")
    told = {"cases": len(found), "rows": sum(len(entry.content.get("rows", ())) for entry in found), "seconds": round(sum(e.spent for e in found), 1)}
    sys.stdout.write(json.dumps(told) + "\n")
    if path is not None and found:
        anew = {entry.content["case"][0] for entry in found}
        kept = [entry for entry in entries if entry.stage not in ("ops", "failed") or entry.content["case"][0] not in anew]
        journals.write(path, about, [*kept, *found])
        sys.stdout.write(f"written to {Path(path)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m foretell.hardware.probe.alone", description="Measure rare ops alone.")
    parser.add_argument("profile", nargs="?", help="put the rows into the journal beside this profile")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--missing", action="store_true", help="only families that the journal has no case of")
    which.add_argument("--only", nargs="+", metavar="FAMILY", help="only these families")
    parser.add_argument("--seconds", type=float, help=f"spent on cases, at most (default {SECONDS:.0f})")
    return parser


def _asked(given: argparse.Namespace, known: Collection[str]) -> list[str]:
    """Families to measure, in the order of RARE."""
    unknown = sorted({*(given.only or ())} - {*RARE})
    if unknown:
        raise UserError(f"no family '{unknown[0]}' among the rare ops", f"one of {', '.join(RARE)}")
    if given.missing and not given.profile:
        raise UserError("--missing needs a profile whose journal says what is there", "name the profile of this machine")
    return [family for family in RARE if (family in given.only if given.only else not given.missing or family not in known)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
