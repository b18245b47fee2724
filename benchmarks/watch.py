"""`foretell watch` against the same scripts without it: what it costs, whether its predictions hold, whether its remedies do.

    python benchmarks/watch.py --part overhead     blocks of steps with its hooks and without, in one process: what it costs
    python benchmarks/watch.py --part pairs        each script with and without it, in turn: seconds of a step, bands
    python benchmarks/watch.py --part cpu          every script of the tests on this CPU: to its end, or to its own error
    python benchmarks/watch.py --part oom          scripts that run out of memory: explained, then run with the first remedy
    python benchmarks/watch.py --part all --device cpu --quick     the same on small sizes, to try it

Rows go to --out, or $OUT/watch.jsonl: one JSON object a line, with the date, device, torch and commit. Each run is a process with a
time limit; what fails is a row too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import watch_blocks
import watch_cpu

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "watch_scripts"
OTHERS = ROOT / "tests" / "data" / "scripts"


@dataclass(frozen=True)
class Case:
    """A script and its arguments on a GPU, and small ones for a trial on a CPU."""

    name: str
    script: str
    arguments: str = ""
    small: str = ""
    share: float = 0.6
    """For `oom`: of what a step needs, so much is allowed; 0: the whole device is, and the arguments ask for more."""
    folder: Path = field(default=SCRIPTS)


OVERHEAD = (
    Case("gpt-124m", "gpt.py", "--batch-size 8 --bf16 --fused", "--width 64 --layers 2 --length 32 --vocab 500 --batch-size 4"),
    Case("gpt-124m-fp32", "gpt.py", "--batch-size 4", "--width 64 --layers 2 --length 32 --vocab 500 --batch-size 2"),
    Case("gpt-small-host", "gpt.py", "--width 256 --layers 8 --length 128 --batch-size 4 --vocab 8000",
         "--width 32 --layers 2 --length 16 --vocab 100"),
    Case("gpt-350m-accum", "gpt.py", "--width 1024 --layers 24 --batch-size 4 --accumulate 2 --bf16 --fused --checkpoint",
         "--width 64 --layers 2 --length 32 --vocab 500 --accumulate 2 --checkpoint"),
    Case("conv", "conv.py", "--batch 64", "--width 16 --blocks 2 --image 16 --batch 8"),
    Case("conv-bf16", "conv.py", "--batch 128 --bf16", "--width 16 --blocks 2 --image 16 --batch 8 --bf16"),
    Case("gan", "gan.py", "--batch-size 512 --width 2048", "--width 64"),
    Case("lstm", "lstm.py", "", "--width 32 --length 16"),
    Case("lightning", "lit.py", "--precision bf16-mixed", "--width 64 --layers 2 --length 16"),
    Case("lightning-fp32", "lit.py", "--batch_size 16 --width 768", "--width 32 --layers 2 --length 16"),
    Case("trainer-llama", "hf.py", "--bf16", "--width 64 --layers 2 --length 32 --vocab 500"),
    Case("trainer-llama-checkpoint", "hf.py", "--bf16 --checkpoint --gradient_accumulation_steps 2",
         "--width 64 --layers 2 --length 32 --vocab 500 --checkpoint"),
    Case("accelerate-vit", "accel.py", "--mixed-precision bf16 --batch-size 32", "--width 64 --layers 2 --image 64 --batch-size 8"),
    Case("gpt-scaler", "gpt_scaler.py", "--layers 12 --batch-size 32", "--layers 1 --batch-size 2", folder=OTHERS),
    Case("accelerate-vit-fp32", "accel.py", "--batch-size 16 --width 384", "--width 32 --layers 2 --image 32 --batch-size 8"),
)  # fmt: skip
BLOCKS = (
    *(case for case in OVERHEAD if case.script not in ("lit.py", "gpt_scaler.py")),
    Case("gpt-scaler", "gpt_scaler.py", "--layers 12 --batch-size 32 --epochs 1000", "--layers 1 --batch-size 2 --epochs 100", folder=OTHERS),
    Case("gpt-plain-accum", "gpt_compiled.py", "--compile= --max_iters=1000000 --eval_interval=1000000 --n_layer=6", "", folder=OTHERS),
    Case("pinn-double", "closure_pinn.py", "", "", folder=OTHERS),
)  # fmt: skip
"""Those that need no Lightning."""
OOM = (
    Case("gpt-batch", "gpt.py", "--batch-size 16 --bf16", "--width 64 --layers 4 --length 128 --vocab 2000 --batch-size 64", 0.6),
    Case("gpt-batch-accumulate", "gpt.py", "--batch-size 16 --accumulate 1 --fused",
         "--width 64 --layers 4 --length 128 --vocab 2000 --batch-size 64 --accumulate 1", 0.5),
    Case("gpt-default-batch", "gpt.py", "--length 2048 --bf16 --fused", "--width 256 --layers 8 --length 256 --vocab 2000", 0.6),
    Case("gpt-deep", "gpt.py", "--layers 48 --batch-size 8 --bf16 --width 512",
         "--layers 12 --width 64 --length 128 --vocab 500 --batch-size 64", 0.4),
    Case("gpt-one-sample", "gpt.py", "--batch-size 1 --length 8192 --layers 24 --bf16",
         "--batch-size 1 --length 4096 --layers 8 --width 128 --vocab 500", 0.6),
    Case("gpt-whole-device", "gpt.py", "--batch-size 256 --width 1024 --layers 24",
         "--width 64 --layers 4 --length 128 --vocab 2000 --batch-size 96", 0.0),
    Case("conv-batch", "conv.py", "--batch 256 --image 64", "--width 32 --blocks 4 --image 32 --batch 64", 0.6),
    Case("conv-whole-device", "conv.py", "--batch 4096 --image 96 --blocks 12", "--width 32 --blocks 6 --image 32 --batch 96", 0.0),
    Case("gan-batch", "gan.py", "--batch-size 32768 --width 2048", "--batch-size 8192 --width 256", 0.7),
    Case("lstm-in-source", "lstm.py", "--length 1024 --width 1024", "--width 64 --length 128", 0.6),
    Case("lightning-batch", "lit.py", "--batch_size 64 --length 1024", "--width 64 --layers 4 --length 128 --batch_size 64", 0.6),
    Case("lightning-accumulate", "lit.py", "--batch_size 64 --length 512 --accumulate_grad_batches 1 --precision bf16-mixed",
         "--width 64 --layers 4 --length 128 --batch_size 64 --accumulate_grad_batches 1", 0.5),
    Case("trainer-batch", "hf.py", "--per_device_train_batch_size 16 --bf16",
         "--width 64 --layers 4 --length 128 --vocab 2000 --per_device_train_batch_size 64", 0.6),
    Case("trainer-default", "hf.py", "--length 2048", "--width 128 --layers 6 --length 512 --vocab 4000", 0.6),
    Case("accelerate-batch", "accel.py", "--batch-size 128 --mixed-precision bf16", "--width 64 --layers 4 --image 128 --batch-size 64", 0.6),
)  # fmt: skip
FLAGS = {
    "recompute": dict.fromkeys(("gpt.py", "conv.py", "hf.py"), "--checkpoint"),
    "autocast": {**dict.fromkeys(("gpt.py", "conv.py", "hf.py"), "--bf16"), "lit.py": "--precision bf16-mixed", "accel.py": "--mixed-precision bf16"},
}
"""How the scripts are told to do what a remedy says."""


class Bench:
    """Settings, scratch space and the file of rows."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given, self.scratch, self.quick = given, scratch, given.quick
        self.cpu = given.device == "cpu" or given.part == "cpu"
        self.file = Path(given.out or Path(os.environ.get("OUT", ".")) / "watch.jsonl")
        self.lock = threading.Lock()
        self.began = time.monotonic()
        self.about = about(self.cpu)

    def chosen(self, cases: Sequence[Case], few: Sequence[Case]) -> Sequence[Case]:
        """All; those that were named; or a few, to try it."""
        named = self.given.only.split(",") if self.given.only else []
        return [case for case in cases if case.name in named] if named else few if self.quick else cases

    def late(self) -> bool:
        return time.monotonic() - self.began > self.given.seconds

    def row(self, **content: Any) -> None:
        with self.lock, self.file.open("a") as out:
            out.write(json.dumps(content | self.about) + "\n")
        shown = {key: value for key, value in content.items() if key not in ("stderr", "lines")}
        print(f"[{time.monotonic() - self.began:4.0f} s]", json.dumps(shown)[:600], flush=True)

    def words(self, case: Case, more: str = "") -> list[str]:
        return [sys.executable, str(case.folder / case.script), *(case.small if self.cpu else case.arguments).split(), *more.split()]

    def environment(self, **more: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **own, **({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.cpu else {}), **more}

    def run(self, words: list[str], limit: float, kept: int = 3000, **more: str) -> tuple[int, str, float]:
        """Exit status, the end of stderr without paths, seconds. At the limit the whole group is ended."""
        began = time.monotonic()
        folder = tempfile.mkdtemp(dir=self.scratch)
        process = subprocess.Popen(
            words, cwd=folder, env=self.environment(**more), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
            errors += f"\nended after {limit:.0f} s"
        for path in (str(self.scratch), str(ROOT), os.path.dirname(os.path.dirname(sys.executable)), os.path.expanduser("~")):
            errors = errors.replace(path, "…")
        return process.returncode, errors[-kept:], time.monotonic() - began

    def watched(self, words: list[str], out: Path, *options: str) -> list[str]:
        return [sys.executable, "-m", "foretell", "watch", "--out", str(out), *options, "--", *words]


def about(cpu: bool) -> dict[str, str]:
    """When, where and with what a row was made. A GPU is asked for its name by another process: this one takes nothing of it."""
    from foretell.hardware.this_machine import cpu_name

    asked = "import torch; print(torch.__version__); print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    version, device, *_ = [*subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.splitlines(), ""]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"), "device": cpu_name() if cpu or not device else device,
        "torch": version, "commit": os.environ.get("COMMIT") or commit or "unknown",
    }  # fmt: skip


# ---------------------------------------------------------------------- runs with it and without it


def pairs(bench: Bench) -> None:
    """ABAB of every case; several processes start side by side, and one at a time computes."""
    cases = bench.chosen(OVERHEAD, OVERHEAD[:3])
    with ThreadPoolExecutor(1 if bench.cpu else 4) as pool:
        jobs = {(case.name, turn): pool.submit(_timed, bench, case, turn) for case in cases for turn in range(2 if bench.quick else 4)}
        for case in cases:
            found = {turn: job.result() for (name, turn), job in jobs.items() if name == case.name}
            _tell_overhead(bench, case, found)


def _timed(bench: Bench, case: Case, turn: int) -> dict[str, Any]:
    """One run: plain where the turn is even."""
    if bench.late():
        return {"rc": None, "stderr": "the time was up"}
    times, run = bench.scratch / f"{case.name}-{turn}.json", bench.scratch / f"run-{case.name}-{turn}"
    paths = os.pathsep.join((str(SCRIPTS / "timing"), str(ROOT), os.environ.get("PYTHONPATH", "")))
    more = {
        "BENCH_TIMES": str(times), "BENCH_WARM": "3" if bench.quick else "10", "BENCH_SECONDS": "0.5" if bench.quick else "2.5",
        "BENCH_LEAST": "5" if bench.quick else "12", "BENCH_SCRIPT": case.script, "BENCH_LOCK": str(bench.scratch / "lock"), "PYTHONPATH": paths,
    }  # fmt: skip
    words = bench.words(case)
    rc, errors, seconds = bench.run(words if turn % 2 == 0 else bench.watched(words, run, "--predict", "before"), 150, **more)
    found: dict[str, Any] = {"rc": rc, "seconds": round(seconds, 1), "stderr": errors if rc or not times.exists() else ""}
    found |= json.loads(times.read_text()) if times.exists() else {}
    if turn % 2:
        found["lines"] = [line for line in errors.splitlines() if line.startswith("foretell: ")]
        found["compared"] = compared(run)
    return found


def compared(run: Path) -> dict[str, Any]:
    """Predicted beside measured, as `foretell compare` has it."""
    from foretell.report.comparison import of_folder

    try:
        made = of_folder(run)
    except Exception as error:  # a row says why
        return {"error": str(error).replace(str(run), "the run folder")}
    return {
        line.name: {"predicted": line.predicted, "low": line.low, "high": line.high, "measured": line.measured, "inside": line.inside}
        for line in made.lines
    } | {"notes": list(made.notes), "comparable": made.comparable}  # fmt: skip


def _tell_overhead(bench: Bench, case: Case, found: dict[int, dict[str, Any]]) -> None:
    plain = [one["step_seconds"] for turn, one in found.items() if turn % 2 == 0 and "step_seconds" in one]
    with_it = [one["step_seconds"] for turn, one in found.items() if turn % 2 and "step_seconds" in one]
    last = next((one for turn, one in sorted(found.items(), reverse=True) if turn % 2 and "compared" in one), {})
    content: dict[str, Any] = {"part": "pairs", "case": case.name, "plain_seconds": plain, "watched_seconds": with_it}
    if plain and with_it:
        a, b = statistics.median(plain), statistics.median(with_it)
        content |= {"plain_median": a, "watched_median": b, "overhead": b / a - 1, "noise": max(plain) / min(plain) - 1}
    content |= {"compared": last.get("compared"), "lines": last.get("lines")}
    content["failed"] = [one["stderr"] for one in found.values() if one.get("stderr")]
    bench.row(**content)


# ---------------------------------------------------------------------- memory that runs out


def oom(bench: Bench) -> None:
    cases = bench.chosen(OOM, (OOM[1], OOM[3], OOM[6]))
    with ThreadPoolExecutor(1 if bench.cpu else 8) as pool:
        list(pool.map(lambda case: _out_of_memory(bench, case), [case for case in cases if case.share]))
    for case in cases:  # those that take the whole device, one by one
        if not case.share:
            _out_of_memory(bench, case)


def _out_of_memory(bench: Bench, case: Case) -> None:
    content: dict[str, Any] = {"part": "oom", "case": case.name}
    if bench.late():
        bench.row(**content, failed="the time was up")
        return
    try:
        content |= _tried(bench, case)
    except Exception as error:  # one case says nothing of the others
        content["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    bench.row(**content)


def _tried(bench: Bench, case: Case) -> dict[str, Any]:
    limit = _limit(bench, case)
    held = ["--memory-limit", str(limit)] if limit else []
    run, again = bench.scratch / f"oom-{case.name}", bench.scratch / f"again-{case.name}"
    rc, errors, seconds = bench.run(bench.watched(bench.words(case, "--steps 6"), run, "--predict", "before", *held), 150)
    found: dict[str, Any] = {"limit_bytes": limit, "rc": rc, "seconds": round(seconds, 1)}
    if not (run / "oom.json").exists():
        return {**found, "explained": False, "stderr": errors}
    told = json.loads((run / "oom.json").read_text())
    ways = [way for way in told["ways"] if way["fits"]]
    found |= {
        "explained": bool(told["held"]), "traceback_kept": "Traceback" in errors or "Error" in errors, "steps_before": told["steps"],
        "room_bytes": told["room_bytes"], "needs_bytes": told["predicted"].get("allocated_bytes"), "measured": told["memory"],
        "lines": told["lines"], "ways": [way["change"]["words"] for way in ways], "ways_tried": told["ways_tried"],
    }  # fmt: skip
    if not ways:
        return {**found, "remedy_runs": None, "stderr": errors}
    words, more = _changed(bench, case, ways[0]["change"])
    rc, errors, seconds = bench.run(bench.watched(words, again, "--predict", "no", *held), 90, **more)
    measured = json.loads((again / "measurement.json").read_text()) if (again / "measurement.json").exists() else {}
    return {
        **found, "remedy": ways[0]["change"]["words"], "remedy_verdict": ways[0]["verdict"], "remedy_predicted_bytes": ways[0]["allocated_bytes"],
        "remedy_runs": rc == 0, "remedy_seconds": round(seconds, 1), "remedy_allocated_bytes": measured.get("allocated_bytes"),
        "remedy_reserved_bytes": measured.get("reserved_bytes"), "stderr": errors if rc else "",
    }  # fmt: skip


def _limit(bench: Bench, case: Case) -> int | None:
    """A share of what the step is predicted to need; on a CPU of its tensors, with the process around them."""
    if not case.share and not bench.cpu:
        return None
    need = bench.scratch / f"need-{case.name}"
    rc, errors, _ = bench.run([sys.executable, "-c", _NEED, str(need), *bench.words(case)], 120)
    if rc or not need.exists():
        raise RuntimeError(f"not predicted: {errors[-300:]}")
    share, bytes_ = case.share or 0.6, int(need.read_text())
    return int(share * bytes_ * 1.25) + (460 << 20) if bench.cpu else int(share * bytes_)


_NEED = """
import pathlib, sys
from foretell.observe.machine import cluster_of
from foretell.search.traces import followed
from foretell.trace.script.words import parse
cluster = cluster_of("auto")
found = followed.cost(followed.follow(parse(sys.argv[2:]), cluster), cluster, "auto")
pathlib.Path(sys.argv[1]).write_text(str(found.worst.memory.allocated_bytes))
"""


def _changed(bench: Bench, case: Case, change: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command with a remedy applied: arguments, environment, a flag of the script, or a line of its source."""
    words, model = bench.words(case, "--steps 6"), dict(change["model"])
    if change["arguments"] is not None:
        words = [*words[:2], *change["arguments"]]
    if "batch" in model:
        before, after = model.pop("batch")
        text = (case.folder / case.script).read_text()
        assert f"BATCH = {before}" in text, "the batch size is not where the benchmark expects it"
        changed = bench.scratch / f"{case.name}.py"
        changed.write_text(text.replace(f"BATCH = {before}", f"BATCH = {after}"))
        words[1] = str(changed)
    for name in model:
        words += FLAGS[name][case.script].split()
    return words, dict(change["environment"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("overhead", "pairs", "oom", "cpu", "all"), default="all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few cases, few steps")
    parser.add_argument("--only", default="", help="names of cases, with commas between them")
    parser.add_argument("--seconds", type=float, default=390.0, help="after which no further run is begun")
    parser.add_argument("--case-seconds", type=float, default=9.0, help="of a script's blocks, for --part overhead")
    parser.add_argument("--cache", default=None, help="FORETELL_CACHE of --part cpu, with the profile of this CPU")
    parser.add_argument("--out", default=None)
    given = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    scratch = Path(tempfile.mkdtemp(prefix="watch-bench-"))
    try:
        bench = Bench(given, scratch)
        if given.part in ("overhead", "all"):
            watch_blocks.overhead(bench, bench.chosen(BLOCKS, BLOCKS[:2]))
        if given.part in ("pairs", "all"):
            pairs(bench)
        if given.part in ("oom", "all"):
            oom(bench)
        if given.part == "cpu":
            watch_cpu.cpu(bench, compared)
        print(f"rows in {bench.file.name}, {time.monotonic() - bench.began:.0f} s")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
