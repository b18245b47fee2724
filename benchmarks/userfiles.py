"""Files as users write them (tests/data/userfiles): peaks and seconds predicted without a GPU, and measured on one.

    python benchmarks/userfiles.py --predict predicted.jsonl            no GPU; before anything is measured
    python benchmarks/userfiles.py --measure measured.jsonl             every file in a process of its own
    python benchmarks/userfiles.py --tell predicted.jsonl measured.jsonl

Files set defaults, patch torch and keep state, hence the processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import unseen  # noqa: E402
from memory import DEFAULTS, append, in_child, key_of, machine  # noqa: E402
from zoo import rows_of  # noqa: E402

FOLDER = HERE.parent / "tests" / "data" / "userfiles"
MICRO_BATCH = 16
PRECISION = {"other_complex": "fp32"}
"""Files that 16-bit products are not made for."""
LONGEST = 40


def configs() -> list[dict[str, Any]]:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    return [
        {**DEFAULTS, "model": os.path.relpath(FOLDER / f"{name}.py", HERE.parent), "micro_batch": MICRO_BATCH,
         "precision": PRECISION.get(name, DEFAULTS["precision"])}
        for name in names
    ]  # fmt: skip


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """One file in a forked process that has the GPU to itself."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        import warnings

        warnings.simplefilter("ignore")
        try:
            answer = unseen.really(config, "cuda")
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        theirs.send(answer)
        os._exit(0)

    process = context.Process(target=work)
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv() if ours.poll(LONGEST) else {"error": f"no answer in {LONGEST} s"}
    except EOFError:
        found = {"error": "the process ended without an answer"}
    process.kill()
    process.join()
    return found


def tell(predicted: Path, found: Path) -> None:
    told = {row["key"]: row["predicted"] for row in rows_of(predicted)}
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "seconds": []}
    for row in rows_of(found):
        guess, real = told.get(row["key"], {"error": "not predicted"}), row["measured"]
        name = Path(json.loads(row["key"])["model"]).stem
        if "error" in guess or "error" in real:
            print(f"{name:<20} predicted: {guess.get('error', 'yes')[:70]}; measured: {real.get('error', 'yes')[:70]}")
            continue
        off = {what: guess[what] / real[what] - 1 for what in errors}
        for what, value in off.items():
            errors[what].append(value)
        print(f"{name:<20} " + "  ".join(f"{what} {100 * value:+.2f} %" for what, value in off.items()))
    for what, values in errors.items():
        sizes = sorted(map(abs, values))
        high = 100 * sizes[int(0.9 * len(sizes))]
        print(f"{what}: {len(values)} files, median {100 * statistics.median(sizes):.2f} %, nine of ten {high:.1f} %, worst {100 * sizes[-1]:.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--predict", type=Path)
    what.add_argument("--measure", type=Path)
    what.add_argument("--tell", type=Path, nargs=2)
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="start no further file after this long")
    options = parser.parse_args()
    if options.tell:
        return tell(*options.tell)
    begun, out = time.monotonic(), options.predict or options.measure
    unseen.warm_up()
    if options.measure:
        import zoo_run  # noqa: F401  before anything forks
    known = {row["key"] for row in rows_of(out)} if out.exists() else set()
    for config in configs():
        if key_of(config) in known or time.monotonic() - begun > options.limit_seconds:
            continue
        found = {"predicted": in_child(unseen.predict, config, timeout=180)} if options.predict else {"measured": measured(config)}
        append(out, {"key": key_of(config), **found, **machine()})
        (answer,) = found.values()
        print(Path(config["model"]).stem, answer.get("error") or f"{answer['allocated']:,} bytes, {1e3 * answer['seconds']:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
