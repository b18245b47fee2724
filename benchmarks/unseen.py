"""Training steps of model families that no stored measurement has: forecast and sealed without a device, then really run.

    python benchmarks/unseen.py --forecast                 no GPU: draw rows, predict them for an H200 and seal them
    python benchmarks/unseen.py --measure --out rows.jsonl run every row here; --done FILE skips the rows that FILE has
    python benchmarks/unseen.py --tell --out rows.jsonl    the sealed forecast beside what was measured
    python benchmarks/unseen.py --again new.jsonl          predict the sealed configurations with the code as it is now

The forecast (sealed/unseen-h200.jsonl) starts with a line that holds the SHA-256 of the rows below it. A row that cannot be
predicted is in it with its error. Rows are measured in processes of their own, so that a crash is a row and not the end: eager
ones on cores of their own, a few built side by side, timed alone; compiled ones after them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from memory import DEFAULTS, append, done_keys, in_child, key_of, machine, name_of, parts  # noqa: E402
from unseen_draw import HINTS  # noqa: E402
from zoo import GIB, measured_of, rows_of, said, seal_of, write_sealed  # noqa: E402

DEVICE = "H200"
SEALED = HERE / "sealed" / "unseen-h200.jsonl"
EAGER_AT_ONCE, COMPILED_AT_ONCE = 3, 6
MEMORY = 110 * GIB
"""That rows side by side may reserve by forecast."""
UNKNOWN = 40 * GIB
MOST_SECONDS, MOST_BYTES = 0.4, 100 * GIB
"""A step that is predicted to take or hold more is passed over: the device is ours for minutes."""
LONGEST = {"eager": 100, "compiled": 280}
"""Seconds after which a process that hangs is killed."""
TIMED_STEPS, TIMED_SECONDS = 20, 0.8
PREDICTION_SECONDS = 300
"""After which a forecast of one row is given up."""


# ---------------------------------------------------------------------------------------------- the forecast


def predict(config: dict[str, Any]) -> dict[str, Any]:
    """Seconds and peaks on the H200's profile with what a band may depend on; in a process that sees no GPU."""
    import warnings
    from dataclasses import replace

    warnings.simplefilter("ignore")
    from zoo import kept_trace

    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.simulate.plan import Options, predict_step

    begun = time.perf_counter()
    try:
        trace = hinted_trace(config) if config["model"] in HINTS else kept_trace(config)
        cluster, how = parse(DEVICE), Options(profile_of=find_profile)
        recipe = replace(parts(config)[1], compile={"eager": "none", "compiled": "model"}.get(config["mode"], config["mode"]))
        cost = predict_step(trace, recipe, cluster, how, micro_batch=config["micro_batch"])
        found = cost.time
        assert found is not None
        evidence = evidence_of(cost.programs[0], cluster, how)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    memory, steady = cost.worst.memory, trace.schedule["steady_step"]
    return {
        "seconds": found.step_seconds, "low": found.low_seconds, "high": found.high_seconds, "binds": found.binds,
        "provenance": found.provenance, "device_seconds": found.device_seconds, "host_seconds": found.host_seconds,
        "waiting_for_host_seconds": found.waiting_for_host_seconds, "phases": _rounded(found.phases), "breakdown": _rounded(found.breakdown),
        **evidence, "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "parameters": trace.meta["parameters"],
        "ops": sum(n * len(trace.programs[name].ops) for name, n in steady), "roofline_seconds": 0.0,
        "prediction_seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def hinted_trace(config: dict[str, Any]) -> Any:
    """A step whose sizes depend on data, at the shares that a user would give."""
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(config)
    return capture(lambda: load(source), recipe, hints=HINTS[config["model"]])


def evidence_of(local: Any, cluster: Any, how: Any) -> dict[str, Any]:
    """Seconds of a step's ops by family, those whose family the profile has not measured, and how many the host waits for."""
    from foretell.price.kernels.irregular import SIZED
    from foretell.price.kernels.memory_bound import goes_by_data
    from foretell.price.kernels.shapes import short
    from foretell.price.machine import machine as known
    from foretell.price.speeds import alone, profile_for
    from foretell.price.time import guessed, unmeasured_ops
    from foretell.simulate.time.step import step_tasks

    device = known(cluster.device, profile_for(cluster, how.profile_of))
    assert device is not None
    tasks = step_tasks(local, alone(device))
    families: dict[str, float] = {}
    for task in tasks:
        families[task.kind] = families.get(task.kind, 0.0) + task.seconds
    return {
        "families": _rounded(families), "guessed_seconds": guessed(tasks, device), "unmeasured_ops": list(unmeasured_ops(local, device)),
        "awaited": sum(task.synchronises for task in tasks),
        "sized": sum(task.synchronises and short(task.name) in SIZED for task in tasks),
        "kernels": sum(task.seconds > 0 for task in tasks),
        "scattered_seconds": sum(task.seconds for task in tasks if task.seconds and goes_by_data(short(task.name))),
    }  # fmt: skip


def _rounded(seconds: Any) -> dict[str, float]:
    return {name: round(value, 7) for name, value in seconds.items() if value}


def predicted_rows(configs: list[dict[str, Any]], journal: Path | None = None) -> list[dict[str, Any]]:
    """Every configuration with its prediction, each in a process that sees no GPU; those that `journal` has from the same code are kept."""
    import torch

    from foretell.hardware import parse
    from foretell.hardware.lookup import profile_stamp
    from foretell.prove.seal import own_code

    about = {
        "date": time.strftime("%Y-%m-%d %H:%M"), "commit": machine()["commit"], "torch": torch.__version__, "on": DEVICE,
        "code_sha256": own_code(), "profile": Path(profile_stamp(parse(DEVICE).device.name) or "").name,
    }  # fmt: skip
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    warm_up()
    found = {row["key"]: row for row in rows_of(journal) if row["code_sha256"] == about["code_sha256"]} if journal else {}
    left = [config for config in configs if key_of(config) not in found]
    for config in left:
        answer = in_child(predict, config, timeout=PREDICTION_SECONDS)
        row = {"key": key_of(config), "name": name_of(config), "config": config, "predicted": answer, **about}
        found[row["key"]] = row
        if journal:
            append(journal, row)
        print(said(config, answer), flush=True)
    return [found[key_of(config)] for config in configs]


def forecast(path: Path, limit: int, journal: Path | None, drawn: Any, marked: Any = list) -> None:
    """Draw, predict and seal; rows that are predicted to be too long or too large are passed over. `marked` may add to rows."""
    if path.exists():
        sys.exit(f"{path} is there already: a forecast is sealed once")
    configs = [{**DEFAULTS, **config} for config in drawn()][: limit or None]
    rows = marked(predicted_rows(configs, journal))
    kept = [row for row in rows if not _too_much(row["predicted"])]
    for row in rows:
        if row not in kept:
            print(f"passed over: {row['name']}")
    write_sealed(path, kept)
    print(f"{len(kept)} rows of {len(rows)}, {sum('error' in row['predicted'] for row in kept)} without prediction, sealed {seal_of(path)[:12]}")


def _too_much(predicted: dict[str, Any]) -> bool:
    return predicted.get("seconds", 0.0) > MOST_SECONDS or predicted.get("reserved", 0) > MOST_BYTES


# ---------------------------------------------------------------------------------------------- the measurement


def warm_up() -> None:
    """Import what rows need before they fork; nothing here touches CUDA, and no threads are started that a fork would lose."""
    import importlib

    import torch

    from foretell.trace.hub.build import mend_torchvision

    torch.set_num_threads(1)

    mend_torchvision()
    for name in ("torch", "transformers", "timm", "torchvision.models", "torch._dynamo", "pynvml"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def really(config: dict[str, Any], device: str) -> dict[str, Any]:
    """Median seconds of a step after a warm-up, the host running ahead as in a training loop."""
    import torch
    import zoo_run
    from cases import compile_model

    cuda, found = device == "cuda", dict[str, Any]()
    torch.set_num_threads(4 if cuda else 1)
    begun = time.perf_counter()
    step = built(config, device)
    compile_model(step.model, config["mode"])
    found["build_seconds"] = round(time.perf_counter() - begun, 2)
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # what building took is not the step's: a tied table is there twice for a while
    one = zoo_run.round_of([step])
    with zoo_run.door(alone=False):
        begun = time.perf_counter()
        for _ in range(3):
            one()
        zoo_run.wait(cuda)
        found["warm_up_seconds"] = round(time.perf_counter() - begun, 2)
    with zoo_run.door(alone=True):
        found |= zoo_run.timed(one, cuda, TIMED_STEPS if cuda else 3, TIMED_SECONDS if cuda else 0.1)
    if cuda:
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    found["finite"], found["losses"] = zoo_run.finite([step])
    return found


def built(config: dict[str, Any], device: str) -> Any:
    """The step as it was forecast, on the device, weights small random numbers drawn there."""
    from dataclasses import replace

    import torch
    from torch import nn

    from foretell.trace.load.model import load
    from foretell.trace.record.step import Step

    torch.manual_seed(0)
    source, recipe = parts(config)
    with _undrawn():
        step = Step(load(source), recipe, device_type=device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            return torch.empty_like(tensor, device=device, requires_grad=False).normal_(0, 0.02)
        return tensor.to(device)

    step.model._apply(move)
    batch = torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, step.workload.batch)
    step.workload = replace(step.workload, batch=batch)
    step.create_optimizer()
    return step


class _undrawn:
    """Weights are drawn on the device later: nothing is drawn while a model is built, batches excepted, which use other functions."""

    NAMES = ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_", "orthogonal_")

    def __enter__(self) -> None:
        import torch

        homes = (torch.Tensor, torch.nn.init)
        self.kept = [(home, name, getattr(home, name)) for home in homes for name in self.NAMES if hasattr(home, name)]
        for home, name, _ in self.kept:
            setattr(home, name, lambda tensor, *args, **kwargs: tensor)

    def __exit__(self, *_: object) -> None:
        for home, name, function in self.kept:
            setattr(home, name, function)


class Running:
    """One row in a process of its own, on cores of its own."""

    def __init__(self, row: dict[str, Any], device: str, slot: int, slots: int) -> None:
        self.row, self.slot, self.begun = row, slot, time.monotonic()
        self.memory = row["predicted"].get("reserved", UNKNOWN) + GIB
        context = multiprocessing.get_context("fork")
        self.answer, theirs = context.Pipe(duplex=False)
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[slot::slots] if len(cores) >= 2 * slots else cores

        def work() -> None:
            import warnings

            warnings.simplefilter("ignore")
            os.sched_setaffinity(0, mine)
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, len(mine)))
            try:
                answer = really(row["config"], device)
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:400]}
            theirs.send(answer)
            theirs.close()
            os._exit(0)

        self.process = context.Process(target=work)
        self.process.start()
        theirs.close()

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begun > LONGEST[self.row["config"]["mode"]]

    def found(self) -> dict[str, Any]:
        late = not self.answer.poll()
        try:
            answer = {"error": f"no answer in {LONGEST[self.row['config']['mode']]} s"} if late else self.answer.recv()
        except EOFError:
            self.process.join(10)
            answer = {"error": f"the process ended with {self.process.exitcode} and no answer"}
        if late:
            self.process.kill()
        self.process.join(10)
        self.answer.close()
        return dict(answer)


def measure(path: Path, out: Path, device: str, seconds: float, done: list[Path], limit: int, only: str) -> None:
    """Run the rows of the forecast here; each is written as soon as it is done."""
    warm_up()
    about, started = machine() | {"forecast": seal_of(path), "on": device}, time.monotonic()
    known = set().union(*(done_keys(one) for one in (out, *done)))
    rows = [row for row in rows_of(path) if row["key"] not in known and only in row["config"]["model"]]
    rows = sorted(rows, key=lambda row: row["config"]["mode"] != "eager")[: limit or None]
    running: list[Running] = []
    print(f"{len(rows)} rows to run", flush=True)
    while rows or running:
        up = time.monotonic() - started > seconds
        if up and not running:
            print(f"time is up, {len(rows)} rows left", flush=True)
            break
        row = None if up else _next(rows, running, device)
        if row is not None:
            rows.remove(row)
            slots = _slots(row, device)
            free = next(slot for slot in range(slots) if slot not in {one.slot for one in running})
            running.append(Running(row, device, free, slots))
            continue
        wait([one.answer for one in running], timeout=1)
        for one in [one for one in running if one.answer.poll() or one.late]:
            running.remove(one)
            _keep(out, one.row, about, one.found(), time.monotonic() - started)


def _slots(row: dict[str, Any], device: str) -> int:
    return 1 if device == "cpu" else EAGER_AT_ONCE if row["config"]["mode"] == "eager" else COMPILED_AT_ONCE


def _next(rows: list[dict[str, Any]], running: list[Running], device: str) -> dict[str, Any] | None:
    """The next row that fits beside those which run; eager and compiled ones do not run beside each other."""
    free = MEMORY - sum(one.memory for one in running)
    for row in rows:
        if not running:
            return row
        beside = {one.row["config"]["mode"] == "eager" for one in running} == {row["config"]["mode"] == "eager"}
        if beside and len(running) < _slots(row, device) and row["predicted"].get("reserved", UNKNOWN) + GIB <= free:
            return row
    return None


def _keep(out: Path, row: dict[str, Any], about: dict[str, str], found: dict[str, Any], clock: float) -> None:
    append(out, {"key": row["key"], "name": row["name"], "measured": found, **about})
    predicted = row["predicted"].get("seconds")
    off = f"{100 * (predicted / found['seconds'] - 1):+.1f} %" if predicted and "seconds" in found else row["predicted"].get("error", "")
    said = found.get("error") or f"{1e3 * found['seconds']:.2f} ms, predicted {off}"
    print(f"[{clock:.0f} s] {row['name']}: {said}", flush=True)


# ---------------------------------------------------------------------------------------------- the table


def tell(path: Path, out: Path) -> None:
    """How far predictions are off, and how many bands of the sealed forecast held."""
    seal_of(path)
    measured = {key: row["measured"] for key, row in measured_of(path, out).items()}
    rows = [row for row in rows_of(path) if "seconds" in measured.get(row["key"], {})]
    answered = [(row, row["predicted"], measured[row["key"]]["seconds"]) for row in rows if "seconds" in row["predicted"]]
    for row, predicted, seconds in sorted(answered, key=lambda item: abs(item[1]["seconds"] / item[2] - 1)):
        inside = "" if predicted["low"] <= seconds <= predicted["high"] else "outside its band"
        print(f"{row['name'][:90]:90s} {1e3 * seconds:8.2f} ms {100 * (predicted['seconds'] / seconds - 1):+6.1f} % {predicted['binds']} {inside}")
    errors = sorted(abs(predicted["seconds"] / seconds - 1) for _, predicted, seconds in answered)
    held = sum(predicted["low"] <= seconds <= predicted["high"] for _, predicted, seconds in answered)
    print(f"{len(rows)} rows ran, {len(answered)} of them were predicted; error median {100 * statistics.median(errors):.1f} %, "
          f"p90 {100 * statistics.quantiles(errors, n=10, method='inclusive')[8]:.1f} %; {held} bands held")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--forecast", action="store_true", help="draw, predict and seal; no GPU")
    what.add_argument("--measure", action="store_true", help="really run the rows of the forecast")
    what.add_argument("--tell", action="store_true", help="the forecast beside what was measured")
    what.add_argument("--again", type=Path, help="predict the sealed configurations with today's code, into this file")
    parser.add_argument("--forecast-file", type=Path, default=SEALED)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "unseen.jsonl", help="measured rows")
    parser.add_argument("--done", type=Path, action="append", default=[], help="a file of rows that need no measurement")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="", help="rows whose model has this in its name")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new row after this long")
    parser.add_argument("--journal", type=Path, help="where predictions go one by one, so that a forecast that was stopped resumes")
    parser.add_argument("--limit", type=int, default=0, help="so many rows at most")
    options = parser.parse_args()
    if options.forecast:
        from unseen_draw import rows as drawn

        forecast(options.forecast_file, options.limit, options.journal, drawn)
    elif options.again:
        rows = predicted_rows([row["config"] for row in rows_of(options.forecast_file)])
        options.again.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif options.measure:
        measure(options.forecast_file, options.out, options.device, options.seconds, options.done, options.limit, options.model)
    else:
        tell(options.forecast_file, options.out)


if __name__ == "__main__":
    main()
