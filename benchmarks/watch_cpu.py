"""Every script of tests/data/scripts under `foretell watch` on a CPU (`watch.py --part cpu`): whether it runs to its end, whether the
run folder is read, and whether what was predicted held.

A script that asks for a GPU must fail as it does by itself: with the same exit status and the same last line. This CPU is probed first."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watch import Bench

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS, OWN, WATCHED = (ROOT / folder for folder in ("tests/data/scripts", "benchmarks/watch_scripts", "tests/data/watch"))
QUIET = 0.03
"""Share of the time that other processes may have the cores of a run that bands are calibrated on."""
SECONDS = 400.0
"""That a run may take."""


@dataclass(frozen=True)
class Run:
    """A script and how it is started; `ranks` of several processes start it by torchrun."""

    script: str
    arguments: str = ""
    ranks: int = 0
    launcher: str = "torchrun"
    folder: Path = SCRIPTS

    @property
    def name(self) -> str:
        return f"{self.script.removesuffix('.py')}{f'-{self.launcher}' if self.launcher != 'torchrun' else ''}"

    def words(self) -> list[str]:
        script = [str(self.folder / self.script), *self.arguments.split()]
        if self.launcher == "accelerate":
            return [_beside("accelerate"), "launch", *script]
        if self.ranks:
            return [_beside("torchrun"), "--standalone", "--nproc-per-node", str(self.ranks), *script]
        return [sys.executable, *script]


def _beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


RUNS = (
    Run("accelerate_diffusion.py"), Run("accelerate_glue.py"), Run("accelerate_mlp.py"), Run("accelerate_mlp.py", launcher="accelerate"),
    Run("accelerate_vit.py"), Run("bert_dict.py"), Run("closure_pinn.py"), Run("conv_ema.py"), Run("gan_turns.py"),
    Run("gpt_compiled.py"), Run("gpt_scaler.py", "--layers 1 --batch-size 64 --epochs 1"), Run("lightning_fabric.py"),
    Run("lightning_images.py"), Run("lightning_manual.py"), Run("lightning_mlp.py"), Run("recompute_hydra.py"), Run("timm_style.py"),
    Run("trainer_bert.py"), Run("trainer_gpt2.py"), Run("trainer_t5.py", "--max_steps 12"), Run("trainer_vit.py"),
    *(Run(name, ranks=2) for name in ("ddp_bert.py", "ddp_forecast.py", "ddp_gpt.py", "ddp_images.py")), Run("ddp_spawn.py", "--gpus 2"),
    *(Run(name, ranks=2) for name in ("fsdp_ends.py", "fsdp_gpt2.py", "fsdp_llama.py", "fsdp_vit.py")),
    Run("gpt.py", "--width 128 --layers 2 --length 64 --vocab 1000 --batch-size 8 --steps 30", folder=OWN),
    Run("conv.py", "--width 16 --blocks 2 --image 32 --batch 16 --steps 30", folder=OWN), Run("gan.py", "--width 256 --steps 30", folder=OWN),
    Run("lstm.py", "--width 32 --length 16 --steps 12", folder=OWN),
    Run("lit.py", "--width 64 --layers 2 --length 32 --steps 12", folder=OWN),
    Run("hf.py", "--width 64 --layers 2 --length 32 --vocab 500 --steps 12", folder=OWN),
    Run("accel.py", "--width 64 --layers 2 --image 64 --batch-size 8 --steps 12", folder=OWN),
    Run("rows.py", "--batch-size 8192 --layers 3 --steps 20", folder=WATCHED), Run("ranks.py", "--steps 20", ranks=2, folder=WATCHED),
)  # fmt: skip
"""The first 30 are those of tests/data/scripts, one of them twice."""


def cpu(bench: Bench, compared: Any) -> None:
    named = bench.given.only.split(",") if bench.given.only else []
    chosen = [run for run in RUNS if run.name in named] if named else RUNS[8:11] if bench.quick else RUNS
    cache = {"FORETELL_CACHE": str(bench.given.cache or bench.scratch / "cache")}
    rc, errors, _ = bench.run([sys.executable, "-m", "foretell", "probe", "--device", "cpu"], SECONDS, **cache)
    if rc:
        print(f"this CPU could not be probed, so that no seconds are predicted: {errors[-300:]}")
    found = [_tried(bench, run, compared, cache) for run in chosen]
    summarise(found)


def _tried(bench: Bench, run: Run, compared: Any, cache: dict[str, str]) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(dir=bench.scratch)) / "run"
    rc, errors, seconds = bench.run(bench.watched(run.words(), out, "--predict", "before"), SECONDS, 1 << 20, **cache)
    told = [line.partition("foretell: ")[2] for line in errors.splitlines() if "foretell: " in line]
    content: dict[str, Any] = {"part": "cpu", "script": run.name, "ranks": run.ranks or 1, "rc": rc, "seconds": round(seconds, 1), "lines": told}
    content |= {"load": round(os.getloadavg()[0], 1)}
    if rc:
        own, alone, _ = bench.run(run.words(), SECONDS, 1 << 20, **cache)
        content |= {"outcome": "as without it" if (own, _error_of(alone)) == (rc, _error_of(errors)) else "another end", "error": _error_of(errors)}
    else:
        ends = {name: bench.run([sys.executable, "-m", "foretell", name, str(out)], SECONDS, **cache)[0] for name in ("compare", "report")}
        content |= {"outcome": "ran", "beside": any(" a step" in line for line in told), **{f"{name}_rc": end for name, end in ends.items()}}
        content |= _figures(compared(out), out)
    bench.row(**content)
    return content


def _figures(found: dict[str, Any], out: Path) -> dict[str, Any]:
    """Seconds are judged twice: as measured, and without those in which other processes had the cores."""
    step, memory = found.get("step") or {}, found.get("process") or {}
    own = quiet = None
    if step.get("inside") is not None:
        delayed = json.loads((out / "measurement.json").read_text())["delayed"]
        own, quiet = step["measured"] * (1 - delayed), delayed < QUIET
    return {
        "quiet": quiet,
        "own_seconds": own, "own_seconds_inside": None if own is None else step["low"] <= own <= step["high"],
        "predicted_seconds": step.get("predicted"), "low_seconds": step.get("low"), "high_seconds": step.get("high"),
        "measured_seconds": step.get("measured"), "seconds_inside": step.get("inside"), "predicted_bytes": memory.get("predicted"),
        "low_bytes": memory.get("low"), "high_bytes": memory.get("high"), "measured_bytes": memory.get("measured"),
        "bytes_inside": memory.get("inside"), "notes": found.get("notes"), **({"compare_error": found["error"]} if "error" in found else {}),
    }  # fmt: skip


def _error_of(errors: str) -> str:
    """The error that a script ended by: its first, since launchers and other ranks add theirs."""
    found = re.search(r"^(?:\[rank\d+\]: )?((?:[\w.]*(?:Error|Exception|Interrupt))\b.*)", errors, re.MULTILINE)
    return found[1][:300] if found else ""


def summarise(rows: Sequence[dict[str, Any]]) -> None:
    ran = [row for row in rows if row["outcome"] == "ran"]
    print(f"{len(rows)} scripts: {len(ran)} ran, {sum(row['outcome'] == 'as without it' for row in rows)} ended as without it")
    whole = sum(bool(row["beside"]) and not row["compare_rc"] and not row["report_rc"] for row in ran)
    print(f"of those that ran {whole} had their line, and a folder that compare and report read")
    for what in ("seconds", "own_seconds", "bytes"):
        known = [row[f"{what}_inside"] for row in ran if row[f"{what}_inside"] is not None]
        print(f"{what}: inside the band in {sum(known)} of {len(known)}")
