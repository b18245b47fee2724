"""The run folder of a watched script: what `foretell compare` and `foretell report` read, and whole at every moment.

    plan.json          the plan that the script stands for, with what was predicted
    measurement.json   what was measured so far; written anew now and then
    log.jsonl          a row for each step
    trace.json.gz      the followed step, for reports
    oom.json           where memory ran out: what held it, what would have fitted
"""

from __future__ import annotations

import gzip
import json
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.files import write_atomically
from foretell.hardware.this_machine import cpu_name
from foretell.observe.group import RankGroup
from foretell.observe.readings import Readings
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.observe.machine_load import LoadMeter
from foretell.runtime.observe.measurement import FILE, Measurement, nearest, stretches
from foretell.runtime.train import folder, log
from foretell.search.traces import file as traces_file

OOM = "oom.json"


class Record:
    """Writes what is known. A folder that cannot be written any more is no reason to stop the script."""

    def __init__(self, path: Path, command: str, versions: Mapping[str, str]) -> None:
        if any((path / name).exists() for name in (folder.PLAN, FILE)):
            raise UserError(f"{path} holds a run already", "give another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the run folder {path} cannot be written: {error.strerror or error}", "give another --out") from error
        self.path, self.command, self.versions = path, command, dict(versions)
        self._missing: dict[str, str] = {}
        """Files that could not be written the last time, and why."""
        self.load = LoadMeter(gpus=True)
        self.started, self.since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
        self.log = log.RunLog(path)
        self.log.write("start", 0, command=command)
        self._rows = 0

    def plan(self, plan: Plan) -> None:
        self._write(folder.PLAN, plans.text_of(plan))

    def trace(self, text: str) -> None:
        self._write(traces_file.STEP, gzip.compress(text.encode(), 6, mtime=0))

    def out_of_memory(self, content: Mapping[str, Any]) -> None:
        self._write(OOM, json.dumps(content, indent=2) + "\n")

    def _write(self, name: str, content: str | bytes) -> None:
        try:
            write_atomically(self.path / name, content)
            self._missing.pop(name, None)
        except OSError as error:
            self._missing[name] = error.strerror or str(error)

    @property
    def missing(self) -> str:
        """What could not be written, and why; empty where all was."""
        rows = [f"{self.log.lost} rows of {log.LOG}"] if self.log.lost else []
        return "; ".join([f"{name} ({why})" for name, why in self._missing.items()] + rows)

    def measured(self, readings: Readings, plan: Plan, unit: str, per_step: int) -> None:
        """Rows of steps that are new, of the first rank; and the measurement as it stands, of the slowest."""
        first = next(iter(readings.ranks), readings) if isinstance(readings, RankGroup) else readings
        for seconds in first.seconds[self._rows :]:
            self._rows += 1
            self.log.write("step", self._rows + 1, seconds=round(seconds, 7))
        found = measurement_of(readings, plan, unit, per_step, self)
        if found is not None:
            self._write(FILE, json.dumps(asdict(found), indent=2) + "\n")

    def close(self) -> None:
        self.log.close()


def measurement_of(readings: Readings, plan: Plan, unit: str, per_step: int, about: Record) -> Measurement | None:
    """None before the second step: the first has no beginning."""
    kept = sorted(readings.seconds[readings.skipped :])
    if not kept:
        return None
    median = statistics.median(kept)
    parts = {name: readings.part_seconds(name) for name in ("data", "forward", "backward", "update", "between")}
    both = [parts[name] for name in ("forward", "backward") if parts[name] is not None]
    phases = {"backward": sum(both) if both else None, **{name: parts[name] for name in ("update", "between", "data")}}  # type: ignore[arg-type]
    cuda, memory = readings.kind == "cuda", readings.memory
    hardware: dict[str, Any] = {
        "device": readings.device_name if cuda else cpu_name(), "kind": readings.kind, "count": readings.world,
        "host": platform.node(),
    }  # fmt: skip
    hardware |= {} if cuda else {"threads": readings.threads}
    flops = plan.predicted.get("flops_per_step")
    return Measurement(
        steps=len(kept), skipped_steps=readings.skipped, step_seconds=median, p10_seconds=nearest(kept, 0.1), p90_seconds=nearest(kept, 0.9),
        mean_seconds=statistics.fmean(kept), unit=unit, per_step=per_step, per_second=per_step / median,
        phases={name: value for name, value in phases.items() if value is not None}, overhead=(parts["between"] or 0.0) / median,
        stretches=tuple(stretches(readings.seconds[readings.skipped :])), allocated_bytes=memory.get("allocated_peak"),
        reserved_bytes=memory.get("reserved_peak"), host_bytes=memory.get("rss_peak", 0), mfu=None,
        by_rank=tuple(readings.by_rank()) if isinstance(readings, RankGroup) else (),
        flops_per_step=float(flops) if flops else None, peak_flops_per_second=None, first_loss=None, last_loss=None, eval_loss=None,
        save_seconds=None, eval_seconds=None, hardware=hardware, versions={**about.versions, **readings.versions}, command=about.command,
        delayed=readings.delay_share(), load=about.load.read(), started=about.started, wall_seconds=time.monotonic() - about.since,
    )  # fmt: skip
