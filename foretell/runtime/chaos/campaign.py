"""Trials of faults, one after the other: each a row of a file, so that a campaign goes on where it was stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretell.decode import json_of, value_of
from foretell.errors import UserError
from foretell.runtime.chaos.faults import FAULTS, FaultClass
from foretell.runtime.chaos.remains import FILES, LOSSES, PARTS, remains_of, twin
from foretell.runtime.chaos.trial import ChaosRequest, NotTried, Trial

TRIALS, ABOUT = "trials.jsonl", "chaos.json"
_SETTLE_SECONDS = 0.3
_MOST_SAID = 1500
_FAILS = (OSError, AssertionError, TimeoutError, KeyError, IndexError, ValueError, UserError, subprocess.TimeoutExpired)


@dataclass(frozen=True, kw_only=True)
class ChaosTrial:
    """One fault of one run, and what became of the run."""

    fault: str
    ranks: int
    seed: int
    step: int
    """The fault comes after it."""
    good: bool
    """Nothing was lost: it ended as documented, with what its twin computed, and no process is left."""
    problem: str = ""
    not_tried: str = ""
    """Why the fault could not be done: then nothing is known."""
    losses: bool = False
    files: bool = False
    data: bool = False
    """As those of the twin."""
    repeatable: bool = True
    """Two runs that nothing hurts compute the same; looked at where a loss or a checksum differs."""
    lost: int = 0
    repeated: int = 0
    """Samples."""
    steps_again: int | None = None
    """Steps that were computed twice, since no checkpoint had them."""
    named: float | None = None
    seconds: float | None = None
    """From the fault to the next step."""
    whole_seconds: float = 0.0
    left: int = 0
    """Processes."""
    said: str = ""

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value != "" or name == "problem"}


def tried(name: str, seed: int, asked: ChaosRequest, *, kind: FaultClass | None = None, per_step: int = 1) -> ChaosTrial:
    """One trial; what it left behind is kept where something was lost."""
    kind, rng = kind or FAULTS[name], random.Random(f"{name} {asked.world} {seed}")
    folder = asked.work / f"{name}-{asked.world}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trial = Trial(asked, folder, list(kind.flags), rng=rng)
    kind.prepares(trial)
    point = rng.randint(asked.first, asked.last)
    wanted, began, problem, not_tried, found = twin(asked, trial.twin_env, trial.twin_flags), time.monotonic(), "", "", None
    try:
        trial.begin()
        kind.does(trial, point)
        if trial.end() != 0:
            problem = f"exit status {trial.statuses[-1]}"
        found = remains_of(trial.out, asked.steps)
    except NotTried as error:
        not_tried = str(error)
    except _FAILS as error:
        problem = problem or f"{type(error).__name__}: {error}"
    finally:
        if not not_tried:
            time.sleep(_SETTLE_SECONDS)
        left = trial.clean()
    same = found.same(wanted) if found else dict.fromkeys(PARTS, False)
    repeatable = (same[LOSSES] and same[FILES]) or not found or _repeatable(asked, trial)
    lost, repeated = found.off(wanted, per_step) if found else (0, 0)
    computed = all(same.values()) if repeatable else same["data"] and not lost and not repeated
    good = computed and not problem and not left and not not_tried
    said = trial.said[-_MOST_SAID:] if not good and not not_tried else ""
    if good or not_tried:
        shutil.rmtree(folder, ignore_errors=True)
    return ChaosTrial(
        fault=name, ranks=asked.world, seed=seed, step=point, good=good, problem=problem, not_tried=not_tried, **same, repeatable=repeatable,
        lost=lost, repeated=repeated, steps_again=max(0, trial.at_step - trial.again_from) if trial.again_from is not None else None,
        named=_rounded(trial.named), seconds=_rounded(trial.resumed), whole_seconds=round(time.monotonic() - began, 1),
        left=0 if not_tried else left, said=said,
    )  # fmt: skip


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 3) if seconds is not None else None


def _repeatable(asked: ChaosRequest, trial: Trial) -> bool:
    """Whether a second run that nothing hurts computes what the first did, as one on a GPU need not."""
    first = twin(asked, trial.twin_env, trial.twin_flags)
    same = twin(asked, trial.twin_env, trial.twin_flags, again=True).same(first)
    return same[LOSSES] and same[FILES]


# --- a campaign ------------------------------------------------------------------------------------------------------


def campaign(
    asked: ChaosRequest, names: Sequence[str], trials: int, seed: int, *, identity: Mapping[str, Any], per_step: int = 1,
    say: Callable[[str], None] = lambda _: None, tell: Callable[[ChaosTrial], None] = lambda _: None,
) -> list[ChaosTrial]:  # fmt: skip
    """So many trials of each fault, rows in the folder of the request; those that are there already are not done again, those
    that could not be tried are."""
    known = {(row.fault, row.seed): row for row in begun(asked.work, identity)}
    wanted = [(name, number) for number in range(seed, seed + trials) for name in names]
    left = [one for one in wanted if one not in known or known[one].not_tried]
    if left:
        say("a run that nothing hurts")
        twin(asked, {}, [])
    for place, (name, number) in enumerate(left, 1):
        say(f"trial {place} of {len(left)}: {name}")
        found = known[name, number] = tried(name, number, asked, per_step=per_step)
        note(asked.work / TRIALS, found.to_json())
        tell(found)
    return [known[one] for one in wanted]


def note(path: Path, row: Mapping[str, Any]) -> None:
    """In one write: what is stopped leaves whole rows."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, json.dumps(row).encode() + b"\n")
    finally:
        os.close(handle)


def begun(work: Path, identity: Mapping[str, Any]) -> list[ChaosTrial]:
    """The trials that a folder holds; it holds those of one question."""
    about, path = work / ABOUT, work / TRIALS
    if not about.exists():
        if work.is_dir() and any(work.iterdir()):
            raise UserError(f"{work} is there and holds no trials", "give --out a folder that is not there yet")
        work.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps(identity, indent=2) + "\n")
    try:
        before = json_of(about.read_bytes())
    except ValueError:
        before = None
    if before != identity:
        other = next((key for key in identity if not isinstance(before, dict) or before.get(key) != identity[key]), "more")
        raise UserError(f"{work} holds trials of another {other.replace('_', ' ')}", "give another --out, or ask what was asked there")
    return trials_in(path)


def trials_in(path: Path) -> list[ChaosTrial]:
    """Rows of a trials file; the last one may be half written."""
    found: list[ChaosTrial] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            found.append(value_of(ChaosTrial, json_of(line)))
        except ValueError as error:
            if number == len(lines):
                continue
            raise UserError(f"{path}, line {number}: no trial ({error})", "delete that line, or give another --out") from None
    return found
