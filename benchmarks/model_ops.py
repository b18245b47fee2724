"""Time the ops that whole models run, alone, on a GPU: what laws of single ops are fitted to and tried on, beside the probe's own cases.

    python benchmarks/model_ops.py --out rows.jsonl              steps of the families that laws may be fitted to, and of timm models besides
    python benchmarks/model_ops.py --compare [rows.jsonl]        no GPU: how far the shipped profile is off, by op

Rows of an H200 are kept in data/model_ops.jsonl.gz; `fit_profile.py` fits the laws of its profile to them and to the journal beside it.

A step of each model runs once, forward, backward and update; every op of it that moves enough is timed as the probe times its own.
Families of the sealed half of the corpus (benchmarks/corpus.py) are left out, those drawn besides are none of the corpus at all.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import corpus  # noqa: E402
import unseen  # noqa: E402
from bands_rows import family_of  # noqa: E402
from memory import DEFAULTS, append, done_keys, key_of, machine, name_of  # noqa: E402
from zoo import rows_of  # noqa: E402

from foretell.prove.dice import Dice  # noqa: E402

KEPT = HERE / "data" / "model_ops.jsonl.gz"
SEED = "2026-11-18 ops"
LEAST_ELEMENTS = 1 << 17
"""An op that reads and writes less takes as long as its launch."""
APART = ("aten._local_scalar_dense", "aten._fused_adam", "aten._foreach", "aten.nonzero", "aten.random", "aten.randint")
"""What the host waits for, and what the probe has cases enough of."""
TIMM = ((8, 64), (16, 128), (32, 256))
LARGE = ("giant", "huge", "xxlarge", "gigantic", "enormous", "1b", "xlarge", "_dm_")
SLOTS = 6
_here: dict[str, Any] = {}
"""Of a worker: its clock, and what it has timed."""


# ---------------------------------------------------------------------------------------------- what runs


def configurations() -> Iterator[dict[str, Any]]:
    """Fitting half and judged families, those that keep the device busy first, one of timm's after each."""
    fit = [row for row in rows_of(corpus.SEALED) if row["half"] == "fit" and row["config"]["mode"] == "eager"]
    judged = [row for row in rows_of(unseen.SEALED) if row["config"]["mode"] == "eager"]
    busy = sorted((row for row in (*fit, *judged) if "error" not in row["predicted"]), key=_host_share)
    more, seen = _timm(), set()
    for row in busy:
        once = (row["config"]["model"], row["config"]["precision"])
        if once not in seen:
            seen.add(once)
            yield row["config"]
        if (one := next(more, None)) is not None:
            yield one


def _host_share(row: dict[str, Any]) -> float:
    predicted = row["predicted"]
    return round(predicted["host_seconds"] / max(predicted["device_seconds"], 1e-9), 1)


def _timm() -> Iterator[dict[str, Any]]:
    """One model of every family of timm that the corpus has none of, batch and format drawn."""
    try:
        import timm
    except ImportError:
        return
    known = {family_of(row["config"]["model"]) for path in (corpus.SEALED, unseen.SEALED) for row in rows_of(path)}
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        kinds[family_of(f"timm:{name}")].append(name)
    for family in sorted(kinds.keys() - known, key=lambda one: Dice(f"{SEED}/{one}").share()):
        dice = Dice(f"{SEED}/{family}/draw")
        names = [name for name in kinds[family] if not any(word in name for word in LARGE)]
        if names:
            name = names[min(len(names) - 1, int(dice.share() * len(names)))]
            low, high = TIMM[min(2, int(dice.share() * 3))]
            batch = int(math.exp(math.log(low) + dice.share() * math.log(high / low)))
            precision = "fp32" if dice.share() < 0.3 else "bf16-autocast"
            yield {**DEFAULTS, "model": f"timm:{name}", "micro_batch": batch, "precision": precision}


def timed(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Rows of the ops of one step."""
    try:
        return {"rows": [row.to_list() for row in _ops(config, device)]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def _ops(config: dict[str, Any], device: str) -> list[Any]:
    import torch
    import zoo_run

    from foretell.hardware.probe.clock import Clock
    from foretell.hardware.probe.harvest import Harvest, specs

    class Once(Harvest):
        """Ops of enough elements, each once in a process; one that cannot run twice is passed over."""

        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            moved = sum(math.prod(spec.shape) for spec in specs((args, kwargs or {})))
            if moved < LEAST_ELEMENTS and (device == "cuda" or moved < 256):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, kinds, args, kwargs)

        def _timing(self, call: Any) -> Any:
            if self.late:
                return _NEVER
            try:
                return super()._timing(call)
            except RuntimeError:
                return _NEVER

        @property
        def late(self) -> bool:
            return time.monotonic() > until

    torch.set_num_threads(2)
    step = unseen.built(config, device)
    clock = _here.setdefault("clock", Clock(device, 1.5e-3, 3))
    one = zoo_run.round_of([step])
    if device == "cuda":
        torch.backends.cudnn.benchmark = False
    with zoo_run.door(alone=False):
        one()
        zoo_run.wait(device == "cuda")
    with zoo_run.door(alone=True):
        until = time.monotonic() + 6
        harvest = Once(clock, keep=lambda name: not name.startswith(APART))
        harvest.rows = dict(_here.get("known", {}))
        before = len(harvest.rows)
        with harvest:
            step.micro_batch()
        zoo_run.wait(device == "cuda")
    found = [row for row in list(harvest.rows.values())[before:] if row is not None and math.isfinite(row.seconds)]
    _here["known"] = dict.fromkeys(harvest.rows)
    return found


_NEVER = (math.nan, 0.0, math.nan)


def measure(out: Path, device: str, seconds: float, limit: int) -> None:
    unseen.warm_up()
    corpus._warm_up()
    begun, done = time.monotonic(), done_keys(out)
    rows = [{"key": key_of(config), "name": name_of(config), "config": config, "predicted": {}} for config in configurations()]
    rows = [row for row in rows if row["key"] not in done][: limit or None]
    left = corpus.by_workers(rows, out, machine() | {"on": device}, device, begun, seconds, SLOTS, timed, _keep)
    print(f"{left} rows left", flush=True)


def _keep(out: Path, row: dict[str, Any], about: dict[str, str], found: dict[str, Any], clock: float) -> None:
    append(out, {"key": row["key"], "name": row["name"], "family": family_of(row["config"]["model"]), **found, **about})
    print(f"[{clock:.0f} s] {row['name']}: {found.get('error') or len(found['rows'])}", flush=True)


# ---------------------------------------------------------------------------------------------- what comes of it


def measured_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Family of a model → one op, the calm ones."""
    from foretell.hardware.profile import OpRow

    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        models = [json.loads(line) for line in stream]
    for one in models:
        for row in one.get("rows", ()):
            found = OpRow.from_list(row)
            if found.seconds > 0 and found.spread < 1:
                yield one["family"], found


def compare(path: Path) -> None:
    """Median and 90th percentile of the error by family of ops; the ops that lose most seconds."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.price.kernels.features import Shape, describe
    from foretell.price.kernels.ops import OpModel

    device = parse("H200").device
    profile = find_profile(device.name)
    assert profile is not None
    rows = list(measured_rows(path))
    shapes = [Shape(row.name, row.inputs, row.outputs, row.attrs) for _, row in rows]
    said = OpModel.from_dict(device, profile.ops).seconds(shapes)
    errors: dict[str, list[float]] = defaultdict(list)
    lost: dict[str, list[float]] = defaultdict(list)
    for (_, row), shape in zip(rows, shapes, strict=True):
        described = describe(shape, device)
        if described is not None:
            errors[described.family].append(abs(said[shape] / row.seconds - 1))
            lost[f"{described.family} {row.name}"].append(said[shape] - row.seconds)
    print(f"{'family':<16} {'rows':>6} {'median':>8} {'p90':>8}")
    for family, found in sorted(errors.items()):
        print(f"{family:<16} {len(found):>6} {100 * statistics.median(found):7.1f} % {100 * sorted(found)[int(0.9 * len(found))]:6.1f} %")
    worst = sorted(lost.items(), key=lambda pair: -sum(map(abs, pair[1])))[:30]
    for name, gaps in worst:
        print(f"{name:<70} {len(gaps):>5} rows, {1e3 * sum(gaps):+8.2f} ms net, {1e3 * sum(map(abs, gaps)):8.2f} ms off")


def cases(path: Path = KEPT) -> list[Any]:
    """As cases of a probe, one a family of models, for `fit_profile.py`."""
    from foretell.hardware.profile import Case

    found: dict[str, list[Any]] = defaultdict(list)
    for family, row in measured_rows(path):
        found[family].append(row)
    return [Case("models", index, tuple(rows)) for index, (_, rows) in enumerate(sorted(found.items()))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where measured rows go, one model a line")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="start no new model after this long")
    parser.add_argument("--limit", type=int, default=0, help="so many models at most")
    parser.add_argument("--compare", type=Path, nargs="?", const=KEPT, help="the shipped profile beside these rows, or those that are kept")
    options = parser.parse_args()
    if options.compare:
        compare(options.compare)
    elif options.out:
        measure(options.out, options.device, options.limit_seconds, options.limit)
    else:
        parser.error("give --out or --compare")


if __name__ == "__main__":
    main()
