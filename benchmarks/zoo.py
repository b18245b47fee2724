"""The zoo on one GPU: every module that has a paper, forecast without a device, then really run beside the forecast.

    python benchmarks/zoo.py --forecast               no GPU: predict configs/zoo.jsonl for an H200 and seal it
    python benchmarks/zoo.py --forecast --model NAME  the rows of that model anew, the others as they were
    python benchmarks/zoo.py --measure                run every row here, each in a process of its own
    python benchmarks/zoo.py --measure --device cpu   the same on this CPU, for trying it out: no memory is measured
    python benchmarks/zoo.py --tell                   the forecast beside what was measured
    python benchmarks/zoo.py --tell --keep foretell/zoo/measured.jsonl   and the rows for `foretell zoo query` and docs/papers.md

The keys of a configuration are those of benchmarks/memory.py and `note`: what is not as in the paper, and why. A phase of the
model is the override `phase`; `a+b` is phases in turn over the same weights, each with an optimizer of its own.

The forecast (sealed/zoo-forecast-2.jsonl) starts with a line that holds the SHA-256 of the rows below it, and is not replaced once
rows of it were measured: give another --forecast-file then. Measured rows are appended one by one to --out; a row that is there
is not measured again. Rows build and warm up side by side as far as memory goes, and are timed alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from memory import DEFAULTS, append, done_keys, key_of, machine, name_of, parts  # noqa: E402

GIB = 2**30
TRACES = Path(tempfile.gettempdir()) / "foretell-zoo-traces"
DEVICE, TORCH = "H200", "2.11"
SIDE_BY_SIDE = 8
"""Processes at once; each has two threads."""
MEMORY = 118 * GIB
"""That those which are warm may hold together, by forecast."""
CONTEXT = GIB
UNKNOWN = 60 * GIB
LONGEST = 240
"""Seconds after which a process that hangs is killed."""
BARS = {"allocated": (0.02, "worst", 0.08), "seconds": (0.10, "p90", 0.25)}


def read_configs(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Every configuration with its note."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        given = json.loads(line)
        note = given.pop("note", "")
        unknown = set(given) - set(DEFAULTS)
        if unknown or given.get("mode", "eager") != "eager":
            sys.exit(f"{path}:{number}: unknown keys {sorted(unknown)}, or a mode other than eager")
        found.append(({**DEFAULTS, **given}, note))
    return found


# ---------------------------------------------------------------------------------------------- the forecast


def traced(config: dict[str, Any]) -> Any:
    """The step as CUDA runs it; phases in turn are joined."""
    from foretell.trace.fold.phases import in_turn
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(config)
    phases = str(config["overrides"].get("phase", "")).split("+")
    if len(phases) == 1:
        return capture(lambda: load(source), recipe)
    configs = {phase: {**config, "overrides": {**config["overrides"], "phase": phase}} for phase in phases}
    return in_turn({phase: traced(each) for phase, each in configs.items()})


def kept_trace(config: dict[str, Any]) -> Any:
    """The trace, from TRACES where the code that makes it has not changed since."""
    import torch

    from foretell.trace.store.file import dumps, loads

    found = hashlib.sha256(f"{key_of(config)} {torch.__version__}".encode())
    root = HERE.parent / "foretell"
    for path in sorted([*(root / "trace").rglob("*.py"), *(root / "zoo").rglob("*.py")]):
        found.update(path.read_bytes())
    path = TRACES / f"{found.hexdigest()[:32]}.json"
    if path.exists():
        return loads(path.read_text())
    trace = traced(config)
    TRACES.mkdir(exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(dumps(trace))
    aside.replace(path)
    return trace


def predict(config: dict[str, Any]) -> dict[str, Any]:
    """Peaks and seconds on the H200's profile; in a process that sees no GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from steps import roofline

    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.simulate.plan import Options, predict_step

    begun = time.perf_counter()
    try:
        trace = kept_trace(config)
        cluster = parse(DEVICE)
        cost = predict_step(trace, parts(config)[1], cluster, Options(profile_of=find_profile), micro_batch=config["micro_batch"])
        memory, found = cost.worst.memory, cost.time
        assert found is not None, f"nothing is known of the speed of {DEVICE}"
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    steady = trace.schedule["steady_step"]
    return {
        "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "seconds": found.step_seconds,
        "low": found.low_seconds, "high": found.high_seconds, "device_seconds": found.device_seconds,
        "host_seconds": found.host_seconds, "binds": found.binds, "roofline_seconds": roofline(trace, cluster.device),
        "breakdown": {name: round(value, 6) for name, value in found.breakdown.items() if value},
        "parameters": trace.meta["parameters"], "flops": sum(n * (op.flops or 0) for name, n in steady for op in trace.programs[name].ops),
        "ops": sum(n * len(trace.programs[name].ops) for name, n in steady), "no_flop_rule": list(trace.ops_without_flop_rule),
        "prediction_seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def forecast(configs: list[tuple[dict[str, Any], str]], path: Path, results: Path, only: list[str], workers: int) -> None:
    """Predict every row and write all of them with their seal."""
    import torch

    from foretell.hardware import parse
    from foretell.hardware.lookup import profile_stamp
    from foretell.prove.seal import own_code

    if path.exists() and {seal_of(path), head_of(path).get("was")} & {row.get("forecast", "") for row in rows_of(results)}:
        sys.exit(f"{path} was measured already ({results}); give another --forecast-file")
    about = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "commit": machine()["commit"], "torch": torch.__version__, "on": DEVICE,
        "code_sha256": own_code(), "profile": Path(profile_stamp(parse(DEVICE).device.name) or "").name,
    }  # fmt: skip
    kept = {row["key"]: row for row in rows_of(path)} if only else {}
    wanted = [config for config, _ in configs if not only or config["model"] in only or key_of(config) not in kept]
    rows = {}
    context = multiprocessing.get_context("fork")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    with context.Pool(workers, maxtasksperchild=1) as pool:
        for config, answer in zip(wanted, pool.imap(predict, wanted), strict=True):
            rows[key_of(config)] = {"predicted": answer, **about}
            print(said(config, answer), flush=True)
    lines = []
    for config, note in configs:
        key = key_of(config)
        row = rows.get(key) or {name: kept[key][name] for name in ("predicted", *about)}
        lines.append({"key": key, "name": name_of(config), "config": config, "note": note, **row})
    write_sealed(path, lines)
    print(f"{len(lines)} rows, sealed {seal_of(path)[:12]}: {path}")


def said(config: dict[str, Any], answer: dict[str, Any]) -> str:
    if "error" in answer:
        return f"{name_of(config)}: {answer['error']}"
    return (
        f"{name_of(config)}: {answer['allocated'] / GIB:.2f} GiB, {1e3 * answer['seconds']:.1f} ms (device "
        f"{1e3 * answer['device_seconds']:.1f}, host {1e3 * answer['host_seconds']:.1f}, roofline "
        f"{1e3 * answer['roofline_seconds']:.1f}), {answer['ops']} ops, predicted in {answer['prediction_seconds']} s"
    )


def write_sealed(path: Path, rows: list[dict[str, Any]]) -> None:
    from foretell.prove.seal import digest

    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in [{"sha256": digest({"rows": rows}), "rows": len(rows)}, *rows])
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(text)
    aside.replace(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of a forecast or of measurements."""
    if not path.exists():
        return []
    return [row for line in path.read_text().splitlines() if line.strip() and "key" in (row := json.loads(line))]


def head_of(path: Path) -> dict[str, Any]:
    """The line above the rows of a forecast: its hash, and where it was sealed again the one before (`was`) and why."""
    found: dict[str, Any] = json.loads(path.read_text().split("\n", 1)[0])
    return found


def seal_of(path: Path) -> str:
    """The hash of a forecast; ends the program where its rows are not those that were sealed."""
    from foretell.prove.seal import digest

    said = head_of(path).get("sha256", "none")
    found = digest({"rows": rows_of(path)})
    if said != found:
        sys.exit(f"the seal of {path} is broken: it says {said[:12]} and its rows give {found[:12]}")
    return str(found)


# ---------------------------------------------------------------------------------------------- the measurement


class Running:
    """One configuration in a process of its own."""

    def __init__(self, row: dict[str, Any], device: str) -> None:
        predicted = row["predicted"]
        context = multiprocessing.get_context("fork")
        self.row, self.begun = row, time.monotonic()
        self.memory = predicted["reserved"] + CONTEXT if "reserved" in predicted else UNKNOWN
        self.answer, theirs = context.Pipe(duplex=False)

        def work() -> None:
            import zoo_run

            try:
                answer = zoo_run.really(row["config"], device, predicted.get("ops", 0))
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:400]}
            theirs.send(answer)
            theirs.close()
            os._exit(0)

        self.process = context.Process(target=work)
        self.process.start()
        theirs.close()

    def found(self, late: bool) -> dict[str, Any]:
        """What it answered, once it did or hangs."""
        try:
            answer = self.answer.recv() if not late else {"error": f"no answer in {LONGEST} s"}
        except EOFError:
            self.process.join(10)
            answer = {"error": f"the process ended with {self.process.exitcode} and no answer"}
        self.stop(late)
        return dict(answer)

    def stop(self, kill: bool = True) -> None:
        if kill:
            self.process.kill()
        self.process.join(10)
        self.answer.close()


def measure(path: Path, out: Path, device: str, seconds: float, only: list[str]) -> None:
    """Run the rows of a forecast here, in their order as far as they fit beside the others."""
    import torch  # noqa: F401  so that processes fork with it loaded; CUDA must not be touched here

    about, seal, started = machine() | {"forecast": seal_of(path), "on": device}, done_keys(out), time.monotonic()
    left = [row for row in rows_of(path) if row["key"] not in seal and (not only or row["config"]["model"] in only)]
    most = SIDE_BY_SIDE if device == "cuda" else 1
    running: list[Running] = []
    print(f"{len(left)} rows to run", flush=True)
    try:
        while left or running:
            late = time.monotonic() - started > seconds
            if late and not running:
                print(f"time is up, {len(left)} rows left; run again to go on", flush=True)
                break
            while left and len(running) < most and not late:
                row = _next(left, MEMORY - sum(one.memory for one in running), alone=not running)
                if row is None:
                    break
                left.remove(row)
                running.append(Running(row, device))
            wait([one.answer for one in running], timeout=1)
            for one in list(running):
                hangs = time.monotonic() - one.begun > LONGEST
                if one.answer.poll() or hangs:
                    running.remove(one)
                    _keep(out, one.row, about, one.found(hangs), time.monotonic() - started)
    finally:
        for one in running:
            one.stop()


def _next(left: list[dict[str, Any]], free: int, alone: bool) -> dict[str, Any] | None:
    """Large and small in turn would wait for each other: the first that fits; any where nothing else runs."""
    for row in left:
        if alone or row["predicted"].get("reserved", UNKNOWN) + CONTEXT <= free:
            return row
    return None


def _keep(out: Path, row: dict[str, Any], about: dict[str, str], found: dict[str, Any], clock: float) -> None:
    append(out, {"key": row["key"], "name": row["name"], "measured": found, **about})
    predicted = row["predicted"]
    if "error" in found or "error" in predicted:
        said = found.get("error") or predicted.get("error")
    else:
        held = f"{found['allocated'] / GIB:.2f} GiB {_off(predicted, found, 'allocated')}, " if found["allocated"] else ""
        busy = (found.get("kernels") or {}).get("busy_share")
        said = f"{held}{1e3 * found['seconds']:.1f} ms {_off(predicted, found, 'seconds')}, busy {busy}, finite {found['finite']}"
    print(f"[{clock:.0f} s] {row['name']}: {said}", flush=True)


def _off(predicted: dict[str, Any], measured: dict[str, Any], what: str) -> str:
    return f"{100 * (predicted[what] / measured[what] - 1):+.1f} %" if measured.get(what) else ""


# ---------------------------------------------------------------------------------------------- the table


def measured_of(path: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Rows that were measured beside a forecast, by key."""
    head = head_of(path)
    return {row["key"]: row for row in rows_of(out) if row.get("forecast") in (head.get("sha256"), head.get("was"))}


def keep(path: Path, out: Path, target: Path) -> None:
    """Append the rows as `foretell zoo check --keep` writes its own."""
    from foretell import zoo

    said = {row["key"]: row for row in rows_of(path)}
    for key, row in measured_of(path, out).items():
        config, found, predicted = said[key]["config"], row["measured"], said[key]["predicted"]
        entry, error = zoo.get(config["model"]), found.get("error") or predicted.get("error") or ""
        own = {name: value for name, value in config["overrides"].items() if name != "phase"}
        figures = {} if error else {
            "predicted_bytes": predicted["allocated"], "measured_bytes": found["allocated"],
            "predicted_seconds": predicted["seconds"], "measured_seconds": found["seconds"],
        }  # fmt: skip
        append(target, {
            "name": entry.name, "module": entry.module, "paper": entry.paper, "phase": config["overrides"].get("phase", ""),
            **{name: row[name] for name in ("device", "torch", "date", "commit")}, "samples": config["micro_batch"],
            "precision": config["precision"], "seq": config["seq"], "overrides": own, **figures,
            "status": "fail" if error else "pass", "reason": error.partition("\n")[0].partition(" when calling")[0][:120],
            "forecast": row["forecast"],
        })  # fmt: skip


def tell(path: Path, out: Path, as_json: bool) -> bool:
    """Print the forecast beside the measurements, the farthest last; whether all bars are held."""
    seal_of(path)
    measured = {key: row["measured"] for key, row in measured_of(path, out).items()}
    rows = rows_of(path)
    good, bad = [], []
    for row in rows:
        found = measured.get(row["key"])
        if found is None or "error" in found or "error" in row["predicted"]:
            bad.append((row["name"], "not measured" if found is None else found.get("error") or row["predicted"]["error"]))
        else:
            good.append((row, found, {what: row["predicted"][what] / found[what] - 1 for what in BARS if found.get(what)}))
    if as_json:
        table = [{"name": row["name"], "predicted": row["predicted"], "measured": found, "errors": e} for row, found, e in good]
        print(json.dumps({"rows": table, "without": [{"name": n, "why": w} for n, w in bad], "summary": bars_of(good)}))
    else:
        _print(good, bad)
    return not bad and all(one["held"] for one in bars_of(good).values())


def _print(good: list[Any], bad: list[Any]) -> None:
    good = sorted(good, key=lambda item: abs(item[2].get("seconds", 0)))
    print(f"{'configuration':78s} {'GiB':>7s} {'error':>8s} {'reserved':>9s} {'ms':>9s} {'error':>8s} {'busy':>5s} binds")
    for row, found, errors in good:
        reserved = _off(row["predicted"], found, "reserved")
        busy = (found.get("kernels") or {}).get("busy_share")
        held = f"{found['allocated'] / GIB:7.2f} {100 * errors['allocated']:+7.2f}%" if "allocated" in errors else 16 * " "
        print(f"{row['name'][:78]:78s} {held} {reserved:>9s} {1e3 * found['seconds']:9.2f} {100 * errors['seconds']:+7.1f}% "
              f"{busy if busy is not None else '':>5} {row['predicted']['binds']}{'' if found['finite'] else ', losses not finite'}")  # fmt: skip
    for name, why in bad:
        print(f"{name}: {why}")
    print(f"{len(good)} rows measured, {len(bad)} without an answer")
    for what, one in bars_of(good).items():
        print(f"{what:10s} {one['rows']} rows, median {100 * one['median']:.2f} %, p90 {100 * one['p90']:.2f} %, worst "
              f"{100 * one['worst']:+.2f} %: {'held' if one['held'] else 'missed'} ({one['bar']})")  # fmt: skip


def bars_of(good: list[Any]) -> dict[str, Any]:
    """Median, 90th percentile and worst error of each quantity, and whether its bar is held."""
    found = {}
    for what, (middle, kind, most) in BARS.items():
        errors = [errors[what] for *_, errors in good if what in errors]
        if not errors:
            continue
        sizes = sorted(map(abs, errors))
        ninety = statistics.quantiles(sizes, n=10, method="inclusive")[8] if len(sizes) > 1 else sizes[0]
        median = statistics.median(sizes)
        found[what] = {
            "rows": len(errors), "median": median, "p90": ninety, "worst": max(errors, key=abs),
            "held": median <= middle and (ninety if kind == "p90" else sizes[-1]) <= most,
            "bar": f"median {100 * middle:.0f} %, {kind} {100 * most:.0f} %",
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--forecast", action="store_true", help="predict and seal; no GPU")
    what.add_argument("--measure", action="store_true", help="really run the rows of the forecast")
    what.add_argument("--tell", action="store_true", help="the forecast beside what was measured")
    parser.add_argument("--configs", type=Path, default=HERE / "configs" / "zoo.jsonl")
    parser.add_argument("--forecast-file", type=Path, default=HERE / "sealed" / "zoo-forecast-2.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "zoo.jsonl", help="measured rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", action="append", default=[], help="these models only; repeatable")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new row after this long")
    parser.add_argument("--workers", type=int, default=1, help="forecasts at once")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--keep", type=Path, help="append the measured rows to this file, as `foretell zoo check --keep` does")
    options = parser.parse_args()
    if options.forecast:
        forecast(read_configs(options.configs), options.forecast_file, options.out, options.model, options.workers)
        return
    if not options.forecast_file.exists():
        sys.exit(f"there is no forecast {options.forecast_file}; make one with --forecast")
    if options.measure:
        if options.device == "cuda" and machine()["device"] == "no GPU":
            sys.exit("there is no GPU here to measure on; --device cpu tries it out")
        measure(options.forecast_file, options.out, options.device, options.seconds, options.model)
    if options.keep:
        keep(options.forecast_file, options.out, options.keep)
    held = tell(options.forecast_file, options.out, options.json)
    sys.exit(0 if held or options.measure else 1)


if __name__ == "__main__":
    main()
