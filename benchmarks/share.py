"""A shared probe against the full one: the same measured steps, predicted from each.

    python benchmarks/share.py --fit /tmp/share.json           the subset that `foretell probe --share` would have, packed, read and fitted
    python benchmarks/share.py --profile /tmp/share.json       predict measured H200 steps from it and from the full probe; medians of both
    python benchmarks/share.py --tell                          the medians of rows that were predicted before
    python benchmarks/share.py --fit A --file hub/H200-SXM-141GB.foretell.json.gz          a file that was really measured, in place of the subset
    python benchmarks/share.py --fit B --file hub/H200-SXM-141GB.foretell.json.gz --alone  the same without what the nearest full probe says
    python benchmarks/share.py --profile A --beside B --corpus --out results/share_hub.jsonl    steps of the corpus, its sealed half first

    python benchmarks/share.py --elsewhere GEMM.csv.gz         products of devices in a public table, from 300 of them

No GPU: the subset is taken from the journal of the full probe (foretell/hardware/profiles), case by case in the order of a shared
probe until its time is up, by the seconds that each case took there. Steps are those of results/ that bands are calibrated on. Rows of
results/share.jsonl that say `fresh` had no part in the choice of cases.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from memory import append, name_of, parts  # noqa: E402

DEVICE, NAME = "H200", "H200-SXM-141GB"
JOURNAL = HERE.parent / "foretell" / "hardware" / "profiles" / f"{NAME}.rows.jsonl.gz"
OUT = HERE / "results" / "share.jsonl"
SEALED = HERE / "sealed" / "corpus-h200.jsonl"
SIZES_SECONDS = 0.009
"""Of a case of the family `sizes`: the journal does not say."""
OTHERS_SECONDS = 10.0
"""Start, launches, levels, copies and disk, before steps and ops."""


def subset(budget: float | None = None) -> Any:
    """What a shared probe would have measured of the journal's rows on the H200 that most of them are of."""
    from foretell.hardware.probe import ops, run
    from foretell.hardware.probe.cases.steps import _HEAVY, _config, configs, name_of
    from foretell.hardware.probe.journal import gather, read

    budget = budget or run.BUDGET_SECONDS["cuda", "share"]
    whole = gather(JOURNAL)
    spent: dict[Any, float] = {}
    for entry in read(JOURNAL)[1]:
        if entry.stage == "ops":
            spent[tuple(entry.content["case"])] = entry.spent or SIZES_SECONDS
        elif entry.stage == "step":
            step = entry.content
            wanted = max(run.LEAST_STEPS["cuda", "share"], int(run.STEP_SECONDS["share"] / step["seconds"]) + 1)
            spent[name_of(step["config"])] = entry.spent - max(0, step["steps"] - wanted) * step["seconds"]
    known = {name_of(step["config"]): step for step in whole.steps}
    heavy = [name_of(_config(**given)) for given in _HEAVY]
    order = [known[name] for name in map(name_of, configs("cuda", large=True)) if name in known and name not in heavy]
    steps = list(_while(order, [spent[name_of(step["config"])] for step in order], run.SHARED_STEPS_SHARE * budget))
    cases = {(case.family, case.number): case for case in whole.cases}
    drawn = [cases[key] for key in ops.order("cuda", mode="share") if key in cases]
    left = budget - OTHERS_SECONDS - run.POWER_SECONDS["share"] - sum(spent[name_of(step["config"])] for step in steps)
    kept = list(_while(drawn, [spent[case.family, case.number] for case in drawn], left))
    print(f"{len(steps)} of {len(whole.steps)} steps; {len(kept)} of {len(whole.cases)} cases, {left:.0f} s of ops", flush=True)
    return replace(whole, cases=tuple(kept), steps=tuple(steps), notes=())


def _while(items: list[Any], seconds: list[float], budget: float) -> Iterator[Any]:
    for item, took in zip(items, seconds, strict=True):
        if budget <= 0:
            return
        budget -= took
        yield item


def shared(budget: float | None = None) -> Any:
    """The same after it was written as a file, checked and read."""
    from foretell.hardware.share.check import refuse
    from foretell.hardware.share.file import read, shared_of, write

    content = write(shared_of(subset(budget), known=True))
    print(f"{len(content):,} bytes", flush=True)
    found = read(content, "share")
    refuse(found, "share")
    return found


def fit(out: Path, budget: float | None, given: Path | None = None, alone: bool = False) -> None:
    from foretell.api import fit_profile
    from foretell.hardware.catalog import find
    from foretell.hardware.profile import save
    from foretell.hardware.share.file import load

    measured = (load(given) if given else shared(budget)).measured
    if alone:
        measured = replace(measured, mode="full")
    began = time.perf_counter()
    save(fit_profile(measured, find(DEVICE)), out)
    print(f"{len(measured.rows):,} rows fitted in {time.perf_counter() - began:.0f} s: {out}", flush=True)


def predict(config: dict[str, Any], profiles: dict[str, Any]) -> dict[str, Any]:
    from zoo import kept_trace

    from foretell.hardware import parse
    from foretell.simulate.plan import Options, predict_step

    recipe = replace(parts(config)[1], compile={"eager": "none", "compiled": "model"}.get(config["mode"], config["mode"]))
    trace, found = kept_trace(config), {}
    for which, profile in profiles.items():
        cost = predict_step(trace, recipe, parse(DEVICE), Options(profile_of=lambda _, profile=profile: profile), micro_batch=config["micro_batch"])
        assert cost.time is not None
        found[which] = cost.time.step_seconds
    return found


def corpus() -> Iterator[tuple[str, dict[str, Any], float]]:
    """Steps of the corpus that were measured; where each comes from is its half."""
    took = {row["key"]: row["measured"] for row in _rows(OUT.with_name("corpus.jsonl"))}
    for row in _rows(SEALED):
        if "config" in row and "seconds" in took.get(row["key"], {}):
            yield row["half"], row["config"], took[row["key"]]["seconds"]


def compare(paths: dict[str, Path], out: Path, seconds: float, of_corpus: bool = False) -> None:
    """Rows in an order of which any beginning has each source in proportion; of the corpus, the sealed half comes first."""
    import warnings

    import torch
    from bands_rows import measured

    from foretell.hardware.lookup import find_profile
    from foretell.hardware.profile import load

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    profiles = {"full": find_profile(NAME), **{which: load(path) for which, path in paths.items()}}
    rows, began = list(corpus() if of_corpus else measured()), time.monotonic()
    done = {row["name"] for row in _rows(out)}
    rows.sort(key=lambda row: (row[0] != "sealed", hash_of(name_of(row[1]))))
    for source, config, took in rows:
        if time.monotonic() - began > seconds:
            break
        if name_of(config) in done:
            continue
        try:
            found = predict(config, profiles)
        except Exception as error:
            print(f"{name_of(config)}: {type(error).__name__}: {error}"[:200], flush=True)
            continue
        append(out, {"from": source, "name": name_of(config), "measured": took, **{name: float(f"{value:.5g}") for name, value in found.items()}})
        print(f"{name_of(config)[:80]:80s} " + "  ".join(f"{name} {100 * (value / took - 1):+.1f} %" for name, value in found.items()), flush=True)


def hash_of(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tell(path: Path) -> dict[str, float]:
    """Median absolute errors, in percent."""
    rows = _rows(path)
    for half in ("sealed", "fit") if any(row["from"] == "sealed" for row in rows) else ():
        told(half, [row for row in rows if row["from"] == half])
    return told("all", rows)


def told(what: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {}
    print(f"{what}: {len(rows)} steps")
    for which in (name for name in ("full", "share", "alone") if rows and name in rows[0]):
        errors = [100 * abs(row[which] / row["measured"] - 1) for row in rows]
        found[which] = statistics.median(errors)
        p90 = statistics.quantiles(errors, n=10, method="inclusive")[8]
        apart = statistics.median(100 * abs(row[which] / row["full"] - 1) for row in rows)
        middle = f"median {found[which]:5.2f} %  mean {statistics.mean(errors):5.2f} %  90 % {p90:5.1f} %"
        print(f"  {which:6} {middle}  from full by {apart:.2f} % in the middle")
    return found


FEW = 300
"""Rows of one device that are fitted by `elsewhere`: about the 16-bit products of one layout in a shared probe."""


def elsewhere(table: Path) -> None:
    """What a shared probe would say of products of devices that nobody here has: `FEW` rows of a public table, the others predicted."""
    import numpy as np
    import silicon_rows as products

    from foretell.hardware.profile import OpRow
    from foretell.price.kernels.ops import OpModel, learn
    from foretell.search.profiles.fit import basis_of

    every = [kernel for kernel in products.products(table) if kernel.group == "16-bit"]
    for name in dict.fromkeys(kernel.device for kernel in every):
        device = products.device_of(name)
        basis = basis_of(device) if device is not None else None
        if device is None or basis is None or device.name == NAME:
            continue
        mine = [kernel for kernel in every if kernel.device == name]
        order = np.random.default_rng(0).permutation(len(mine))
        few, asked = [mine[at] for at in order[:FEW]], [mine[at] for at in order[FEW:]]
        rows = [OpRow(*kernel.shape, kernel.seconds, 0.0, 0.0) for kernel in few]
        models = {"alone": learn(rows, device), "corrected": learn(rows, device, basis=basis), "carried": OpModel(device, basis.families)}
        found = []
        for which, model in models.items():
            seconds = model.seconds([kernel.shape for kernel in asked])
            errors = [abs(seconds[kernel.shape] / kernel.seconds - 1) for kernel in asked]
            found.append(f"{which} {statistics.median(errors):.1%} / {statistics.quantiles(errors, n=10)[8]:.1%}")
        print(f"{device.name:16} {len(asked):5} products, median and 90 %: {', '.join(found)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", type=Path, help="write the profile of the subset here")
    parser.add_argument("--file", type=Path, help="with --fit: a shared probe that was really measured, in place of the subset")
    parser.add_argument("--profile", type=Path, help="compare this profile with the full probe's")
    parser.add_argument("--alone", action="store_true", help="with --fit: without what the nearest full probe says")
    parser.add_argument("--beside", type=Path, help="compare this one too, as `alone`")
    parser.add_argument("--corpus", action="store_true", help="predict steps of the corpus, the sealed half first")
    parser.add_argument("--budget", type=float, help="seconds of the shared probe; as `foretell probe --share` has it by default")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further prediction after so long")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--elsewhere", type=Path, help="a public table of products (benchmarks/silicon_rows.py)")
    parser.add_argument("--tell", action="store_true")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.fit:
        fit(options.fit, options.budget, options.file, options.alone)
    if options.profile:
        beside = {"alone": options.beside} if options.beside else {}
        compare({"share": options.profile, **beside}, options.out, options.seconds, options.corpus)
    if options.elsewhere:
        elsewhere(options.elsewhere)
    if options.profile or options.tell:
        tell(options.out)


if __name__ == "__main__":
    main()
