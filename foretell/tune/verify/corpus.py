"""The shipped kernels: what each is for, and whether the harness still treats it as it must."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from foretell.tune.verify import harness, source
from foretell.tune.verify.cases import Cases, prepare
from foretell.tune.verify.inside import triton_kernels
from foretell.tune.verify.process import KernelLimits, KernelSetting
from foretell.tune.verify.types import HarnessOptions, Verdict

FOLDER = Path(__file__).parents[1] / "corpus"
GOOD, MISBEHAVING = "good", "misbehaving"
CHEATS = ("results", "times", "variants")
BASELINE = "baseline"
"""A kernel that computes what it should, and loses to the best of its baselines: the clock refuses it (`clock/`)."""
SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class CorpusEntry:
    """One shipped kernel."""

    path: Path
    group: str
    task: str
    check: str = ""
    """That must refuse it; empty for a good one."""
    needs: str = ""
    """cuda or triton."""
    seen: bool = False
    """The scan of its text refuses it."""
    beside: str = ""
    """A good kernel that it is measured against."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> int:
        """Of the known cheats; 0 for none."""
        found = re.match(r"c(\d+)_", self.name)
        return int(found[1]) if found else 0

    def missing(self, setting: KernelSetting) -> str:
        """What it needs and is not here."""
        if self.needs == "cuda" and not setting.on_gpu:
            return "a CUDA device"
        return "Triton" if self.needs == "triton" and not triton_kernels.installed() else ""


def entries(*groups: str) -> list[CorpusEntry]:
    folders = groups or (GOOD, *CHEATS, MISBEHAVING)
    return [_entry(path, group) for group in folders for path in sorted((FOLDER / group).glob("*.py"))]


def _entry(path: Path, group: str) -> CorpusEntry:
    head = path.read_text(encoding="utf-8").split('"""')[1]
    words = {key: found[1] for key in ("Task", "Caught by", "Needs", "Seen", "Beside") if (found := re.search(rf"{key}: (\w+)", head))}
    return CorpusEntry(
        path=path, group=group, task=words["Task"], check=words.get("Caught by", ""), needs=words.get("Needs", ""),
        seen="Seen" in words, beside=words.get("Beside", ""),
    )  # fmt: skip


def task(name: str) -> source.Code:
    return source.reference(str(FOLDER / "tasks" / f"{name}.py"))


def tried(some: Iterable[CorpusEntry], setting: KernelSetting, *, seed: int | None = None) -> Iterator[tuple[CorpusEntry, Verdict]]:
    """Each that can run here, examined without the scan, which is easily evaded; a task is drawn once for all its kernels."""
    known: dict[str, Cases] = {}
    for entry in some:
        if entry.missing(setting):
            continue
        if entry.task not in known:
            known[entry.task] = prepare(task(entry.task), setting, seed=harness.seed_of(HarnessOptions(seed=seed)))
        own = quick(setting) if entry.check == "hang" else setting
        yield entry, harness.examine(source.candidate(str(entry.path)), known[entry.task], own, HarnessOptions(seed=seed, scan=False))


def quick(setting: KernelSetting) -> KernelSetting:
    """A few seconds are enough to see that a kernel hangs."""
    return KernelSetting(device=setting.device, limits=KernelLimits(seconds=SECONDS), environment=setting.environment)


def as_it_must(entry: CorpusEntry, verdict: Verdict) -> bool:
    expected = "" if entry.check == BASELINE else entry.check
    return verdict.check == expected and verdict.accepted == (not expected)
