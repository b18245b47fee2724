"""Every shipped kernel through the harness on this machine: is it treated as its head says, and how long that takes.

    python benchmarks/tune_kernels.py --out FILE [--device cuda] [--only NAME ...] [--configs FILE]

A row for each kernel as it is done; what FILE has already is left out, so a run that was stopped goes on. On a CPU it does the same
for what needs no GPU. `--configs` names kernels, one in a line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from foretell.tune.clock.corpus import refused_by_the_clock
from foretell.tune.verify import corpus
from foretell.tune.verify.inside import triton_kernels
from foretell.tune.verify.process import KernelSetting

SEED = 20261119


def done(path: Path) -> set[str]:
    return {json.loads(line)["kernel"] for line in path.read_text().splitlines() if line} if path.exists() else set()


def about(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    triton = __import__("triton").__version__ if triton_kernels.installed() else None
    return {"device": name, "torch": torch.__version__, "triton": triton, "commit": os.environ.get("COMMIT", ""),
            "date": time.strftime("%Y-%m-%d", time.gmtime())}  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked.add_argument("--only", nargs="*", default=[])
    asked.add_argument("--configs", type=Path)
    given = asked.parse_args()
    names = {*given.only, *(given.configs.read_text().split() if given.configs else [])}
    setting, known = KernelSetting(device=given.device), done(given.out)
    some = [one for one in corpus.entries() if one.name not in known and (not names or one.name in names)]
    for entry in some:
        if missing := entry.missing(setting):
            print(f"{entry.name:<24} needs {missing}")
    begun = time.perf_counter()
    for entry, verdict in corpus.tried(some, setting, seed=SEED):
        good = corpus.as_it_must(entry, verdict)
        if good and entry.check == corpus.BASELINE:
            good = refused_by_the_clock(entry, setting, SEED)
        row = {
            **about(given.device), "kernel": entry.name, "group": entry.group, "cheat": entry.number, "expected": entry.check, "as_it_must": good,
            "stage": verdict.stage, "check": verdict.check, "reason": verdict.reason, "worst_error": verdict.worst_error,
            "determinism": verdict.determinism, "compiled": list(verdict.compiled), "isolation": list(verdict.isolation),
            "seconds": round(time.perf_counter() - begun, 3),
        }  # fmt: skip
        begun = time.perf_counter()
        with given.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        print(f"{entry.name:<24} {'as it must' if good else 'WRONG':<11} {verdict.stage} {verdict.check} {row['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
