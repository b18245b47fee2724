"""Goodput of a run folder: what it measured of steps, checkpoints and restarts, and the useful share that follows. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.decode import json_of
from foretell.errors import UserError
from foretell.report import words
from foretell.units import human_seconds

if TYPE_CHECKING:
    from foretell.simulate.goodput import Goodput

_WARM_STEPS = 3
LEAST_STEPS = 20
"""Fewer say nothing of a pace."""
_LOG = "log.jsonl"


def of_run(folder: Path, mtbf: float | None = None) -> Goodput | None:
    """For failures every `mtbf` seconds, by default what the run was told; None where it was told nothing, or measured no checkpoint."""
    from foretell.runtime.train.folder import read_settings
    from foretell.simulate.goodput import RESTART_SECONDS, FailureCosts, KnownSeconds, goodput, measured_costs

    if _rejoins(folder):
        return None  # a failure costs no restart of the run there, and what it costs is not measured step by step
    settings = read_settings(folder)
    wanted = mtbf if mtbf is not None else settings.mtbf if settings is not None else None
    found = figures(folder)
    if wanted is None or not {"step", "checkpoint", "written"} <= found.keys():
        return None
    usual = KnownSeconds(seconds=RESTART_SECONDS["cpu"], how="assumed", why="this run was not restarted; measured on CPUs")
    nothing = KnownSeconds(seconds=0.0, how="assumed")
    costs = measured_costs(found, FailureCosts(step=None, checkpoint=nothing, written=nothing, restart=usual))
    steps = (settings.memory_every or settings.save_every) if settings is not None else 0
    every = steps * found["step"][0] if steps else None
    return goodput(costs, wanted, every)


def _rejoins(folder: Path) -> bool:
    """Whether replicas of the run come and go."""
    from foretell.plan import file as plans

    try:
        plan = plans.read(folder / "plan.json")
    except (UserError, OSError):
        return False
    return plan.sync is not None and plan.sync.quorum > 0


def figures(folder: Path, after: int = 0) -> dict[str, tuple[float, int]]:
    """What a run measured after a step: step, checkpoint, written, restart → seconds, and of how many. The first steps of every start
    are left out."""
    from foretell.runtime.train.folder import FAULTS

    rows = [row for row in _rows(folder / _LOG) if type(row.get("step")) is int and row["step"] >= after]
    begun = [row["step"] for row in rows if row.get("event") in ("start", "resume")]
    steps = [row for row in rows if row.get("event") == "step" and _is_time(row.get("seconds"))]
    done = [row for row in rows if row.get("event") == "save" and row.get("bytes")]
    done = [row for row in done if row.get("where") == "memory"] or done  # a restart goes on from those
    saves = [row for row in done if _is_time(row.get("seconds")) and _is_time(row.get("stall_seconds"))]
    found: dict[str, tuple[float, int]] = {}
    took = {row["step"]: float(row["seconds"]) for row in steps if not any(0 < row["step"] - first <= _WARM_STEPS for first in begun)}
    beside = [_beside(took, row) for row in saves]
    plain = sorted(set(took) - {step for some in beside for step in some})
    if len(plain) >= LEAST_STEPS:
        pace = statistics.fmean(took[step] for step in plain)
        found["step"] = pace, len(plain)
        slower = [sum(took[step] for step in some) - len(some) * pace for some in beside if some]
        if slower:  # training waits for a copy, and steps beside a save share cores and memory with it
            found["checkpoint"] = max(statistics.median(row["stall_seconds"] for row in saves), statistics.fmean(slower)), len(saves)
    if saves:
        found["written"] = statistics.median(row["seconds"] for row in saves), len(saves)
    again = [float(row["seconds"]) for row in _rows(folder / FAULTS) if row.get("event") == "restarted" and _is_time(row.get("seconds"))]
    if again:
        found["restart"] = statistics.median(again), len(again)
    return found


def _beside(took: Mapping[int, float], save: Mapping[str, Any]) -> list[int]:
    """Steps after a save until it is done."""
    found, left, step = [], float(save["seconds"]), save["step"] + 1
    while left > 0 and step in took:
        found.append(step)
        left -= took[step]
        step += 1
    return found


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json_of(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


# --- words -----------------------------------------------------------------------------------------------------------


def pieces(found: Mapping[str, Any]) -> list[str]:
    """`95.3 % of the time is useful at a failure every 4 h`, and what the rest is; from `Goodput.to_json`."""
    steps = f" ({found['interval_steps']:,} steps)" if found.get("interval_steps") else ""
    if found.get("replicas"):
        return [
            f"{100 * found['share']:.1f} % useful at a failure of a replica every {human_seconds(found['mtbf_seconds'])}",
            f"its unfinished rounds {100 * found['again']:.1f} %", f"until it is in a round again {100 * found['restarts']:.1f} %",
            f"a round every {human_seconds(found['interval_seconds'])}{steps}",
        ]  # fmt: skip
    return [
        f"{100 * found['share']:.1f} % useful at a failure every {human_seconds(found['mtbf_seconds'])}",
        f"checkpoints {100 * found['checkpoints']:.1f} %", f"done again {100 * found['again']:.1f} %", f"restarts {100 * found['restarts']:.1f} %",
        f"a checkpoint every {human_seconds(found['interval_seconds'])}{steps}",
    ]  # fmt: skip


def told_of(folder: Path) -> str:
    """A sentence of a run that was told of failures, with what it has measured of checkpoints and restarts; empty for others."""
    try:
        found = of_run(folder)
    except UserError:
        return ""
    if found is None:
        return ""
    told = found.to_json()
    return f"Goodput: {', '.join(pieces(told))}; {', '.join(sources(told))}."


def sources(found: Mapping[str, Any], *, reasons: bool = True) -> list[str]:
    """How each of its inputs is known, and from what."""
    names = {"checkpoint": "checkpoint", "written": "written after", "restart": "restart"}
    if found.get("replicas"):
        names = {"restart": "restart of a replica"}
    return [f"{said} {words.seconds(one['seconds'])} {one['how']}" + (f" ({one['why']})" if one["why"] and reasons else "")
            for name, said in names.items() if (one := found["costs"][name])]  # fmt: skip
