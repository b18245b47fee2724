"""What a run leaves, and what of it is not as its twin, which nothing hurt, left it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from foretell.decode import json_of, value_of
from foretell.errors import UserError
from foretell.files import write_atomically
from foretell.runtime.chaos.trial import ChaosRequest, Trial, log, rows_of

LOSSES, FILES, DATA = "losses", "files", "data"
PARTS = (LOSSES, FILES, DATA)


@dataclass(frozen=True, kw_only=True)
class Remains:
    """Of one run."""

    losses: Mapping[str, float]
    """By step."""
    times: Mapping[str, int]
    """How often a step is in the log, where that is not once."""
    files: Mapping[str, int]
    """Checksums of the last checkpoint."""
    data: Mapping[str, int]
    """Seed, epoch and position after the last step."""

    def same(self, twin: Remains) -> dict[str, bool]:
        """Which parts are as those of the twin."""
        return {part: getattr(self, part) == getattr(twin, part) for part in PARTS}

    def off(self, twin: Remains, per_step: int) -> tuple[int, int]:
        """Samples lost, and samples that count twice: by the steps in the log, and the place in the data."""
        lost = sum(step not in self.losses for step in twin.losses) * per_step
        again = sum(count - 1 for count in self.times.values()) * per_step
        if self.data.get("epoch") == twin.data.get("epoch"):
            ahead = self.data.get("position", 0) - twin.data.get("position", 0)
            lost, again = max(lost, ahead), max(again, -ahead)
        return lost, again


def remains_of(out: Path, steps: int) -> Remains:
    from foretell.checkpoint import store

    rows = [row for row in rows_of(log(out)) if row.get("event") == "step"]
    saved = store.look(out / "checkpoints" / f"step-{steps:08d}")
    return Remains(
        losses={str(row["step"]): row["loss"] for row in rows},
        times={step: count for step, count in Counter(str(row["step"]) for row in rows).items() if count > 1},
        files={name: file.crc32 for name, file in saved.files.items()},
        data={key: saved.about["data"][key] for key in ("seed", "epoch", "position")},
    )


def twin(asked: ChaosRequest, env: Mapping[str, str], flags: list[str], *, again: bool = False) -> Remains:
    """What such a run leaves where nothing hurts it: one for all trials of its kind, kept. `again` is a second one, to compare with."""
    kind = hashlib.sha256(json.dumps([sorted(env.items()), flags]).encode()).hexdigest()[:8] if env or flags else "plain"
    folder = asked.work / f"twin-{asked.world}-{kind}{'-again' if again else ''}"
    done = folder / "twin.json"
    kept = kept_remains(done)
    if kept is None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trial = Trial(asked, folder, [*flags, "--no-standby"], dict(env))
        try:
            trial.begin()
            status = trial.end()
        finally:
            trial.clean()
        if status != 0:
            last = next((line for line in reversed(trial.said.splitlines()) if line.startswith("error: ")), "").removeprefix("error: ")
            raise UserError(f"the plan does not run where nothing hurts it: exit status {status}" + (f", {last}" if last else ""),
                            f"foretell run {asked.plan} --steps {asked.steps}", trial.said[-2000:] if not last else "")  # fmt: skip
        kept = remains_of(trial.out, asked.steps)
        write_atomically(done, json.dumps(asdict(kept)))
        shutil.rmtree(trial.out, ignore_errors=True)
    return kept


def kept_remains(path: Path) -> Remains | None:
    """Those of a twin that was run before; None where there is none, or the file is not whole."""
    try:
        return value_of(Remains, json_of(path.read_bytes()))
    except (OSError, ValueError):
        return None
