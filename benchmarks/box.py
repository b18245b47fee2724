"""One rank of many plans on one GPU, the others stand-ins: predicted beside measured.

    python benchmarks/box.py --predict SAID.json                    what foretell says of every case; needs no GPU
    python benchmarks/box.py --predicted SAID.json --out ROWS.jsonl every case on the GPU, each in a process of its own
                             --done FILE                            leaves out cases that have a row there (--out itself counts)
                             --limit-seconds N                      begins no further case after that; --timeout N: of one case
    python benchmarks/box.py --check                                how exactly stand-ins take their time on this GPU
    python benchmarks/box.py --dry                                  the same path with tiny shapes on a CPU
    python benchmarks/box.py --summary ROWS.jsonl                   the bars

Predictions are for H200-SXM-141GB with as many devices as the plan has ranks. A row has the plan, the rank, what was predicted and
measured: seconds of a step, exposed communication, allocated, reserved, whether it was said to fit and did; or the error.

Exposed communication, predicted and measured alike, is what a step takes longer than the same step whose messages take no time.
Bars: step within 8 %, exposed within 3 points of the step, allocated within 0.5 %, reserved within 3 %, no wrong "fits".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from box_cases import CASES, tiny  # noqa: E402

BARS = {"step": 0.08, "exposed": 0.03, "allocated": 0.005, "reserved": 0.03}
DEVICE = "H200-SXM-141GB"


def case_of(name: str, dry: bool) -> dict[str, Any]:
    return tiny(CASES[name]) if dry else CASES[name]


def plan_of(case: dict[str, Any]) -> Any:
    from foretell.plan.recipe import model_of
    from foretell.plan.types import Mesh, Pipeline, Plan, Residency
    from foretell.trace.load.model import Source

    mesh = Mesh(**case["mesh"])
    source = Source(model=case["model"], overrides=dict(case["overrides"]), seq=case["seq"], micro_batch=case.get("micro_batch", 1))
    pipeline = case.get("pipeline")
    kept = ("micro_batch", "accumulate", "precision", "reshard", "states")
    return Plan(
        model=model_of(source), hardware=f"{DEVICE}:{mesh.world}", mesh=mesh,
        pipeline=Pipeline(schedule=pipeline["schedule"], cuts=tuple(pipeline["cuts"])) if pipeline else None,
        blocks={pattern: Residency(mode=mode) for pattern, mode in case.get("blocks", {}).items()},
        **{name: case[name] for name in kept if name in case},
    )  # fmt: skip


def predicted(name: str, dry: bool, traces: Any = None) -> dict[str, Any]:
    from foretell.search.boxed import expect

    case = case_of(name, dry)
    try:
        return expect(plan_of(case), case.get("rank", 0), traces=traces).to_json()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


# ---------------------------------------------------------------- one case, in a process of its own


def one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    import torch

    from foretell.errors import UserError
    from foretell.plan import file
    from foretell.runtime.box.run import BoxRequest, rehearse
    from foretell.search.boxed import Expected, scripts

    case = case_of(name, options.dry)
    plan, rank = plan_of(case), case.get("rank", 0)
    said = json.loads(options.predicted.read_text())[name]
    row: dict[str, Any] = {
        "case": name, "rank": rank, "world": plan.mesh.world, "plan": file.to_json(plan),
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() and not options.dry else "cpu",
        "date": time.strftime("%Y-%m-%d"), "commit": os.environ.get("COMMIT") or _commit(),
    }  # fmt: skip
    if "error" in said:
        return {**row, "error": f"not predicted: {said['error']}"}
    expected = Expected.from_json(said)
    row["predicted"] = expected.told()
    asked = BoxRequest(rank=rank, device="cpu" if options.dry else "cuda", steps=options.steps, warmup=options.warmup)
    try:
        found = rehearse(plan, *scripts(plan, rank, expected), asked)
    except UserError as error:
        ran_out = "ran out of device memory" in error.problem
        return {**row, "ran": not ran_out, "fits_said": expected.verdict, "error": f"{error.problem}; {error.remedy}"[:800]}
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:800], "trace": traceback.format_exc()[-2500:]}
    row |= {"measured": found.to_json(), "ran": True, "fits_said": expected.verdict}
    return {**row, "errors": errors_of(row)}


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"


def errors_of(row: dict[str, Any]) -> dict[str, float | None]:
    """Predicted over measured, less one; of exposed communication, points of the step."""
    said, found = row["predicted"], row["measured"]

    def relative(name: str, other: str = "") -> float | None:
        a, b = said.get(name), found.get(other or name)
        return None if a is None or not b else a / b - 1

    def points(name: str) -> float | None:
        a, b = said.get(name), found.get("exposed_share")
        return None if a is None or b is None else a - b

    return {
        "step": relative("step_seconds"), "free_step": relative("free_seconds"), "exposed": points("exposed_share"),
        "allocated": relative("allocated_bytes"), "reserved": relative("reserved_bytes"),
    }  # fmt: skip


# ---------------------------------------------------------------- how exact the stand-ins are


def check() -> None:
    """Ask stand-ins for known times, alone and beside products, and print what they took."""
    import torch

    from foretell.price.network.messages import CHANNEL_BYTES
    from foretell.price.network.overlap import CHANNELS
    from foretell.runtime.box.cuda import OnCuda
    from foretell.runtime.box.script import BoxScript

    def channels(nbytes: int) -> int:
        return max(1, min(CHANNELS, -(-nbytes // CHANNEL_BYTES)))

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    ins = OnCuda(BoxScript(channels=channels), device)
    big, small = torch.randn(2**26, device=device), torch.randn(2**23, device=device)

    def timed(what: Any, count: int = 20) -> float:
        what()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            what()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / count * 1e3

    began = time.perf_counter()
    for us in (0, 20, 100, 700, 3000):
        seconds = us / 1e6
        found = {
            "gather": timed(lambda s=seconds: ins.gather("a", big, small, s, True)),
            "reduce": timed(lambda s=seconds: ins.reduce("a", small, big, True, s, True)),
            "keep": timed(lambda s=seconds: ins.keep("a", (small,), s, True)),
            "small keep": timed(lambda s=seconds: ins.keep("a", (small[:2],), s, True)),
        }
        print("CHECK", us, "us:", {name: round(value, 1) for name, value in found.items()}, flush=True)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    alone = timed(lambda: a @ b)

    def beside() -> None:
        work = ins.gather("b", big, small, 1.2 * alone / 1e6, False)
        a @ b
        work.wait()

    host = time.perf_counter()
    for _ in range(200):
        ins.keep("c", (small[:2],), 0.0, True)
    host = (time.perf_counter() - host) / 200
    torch.cuda.synchronize()
    print("CHECK product alone", round(alone), "us; beside a gather of 1.2 times that", round(timed(beside)), "us; host of one message",
          round(host * 1e6, 1), "us; all in", round(time.perf_counter() - began, 1), "s", flush=True)  # fmt: skip


# ---------------------------------------------------------------- all cases


def in_child(name: str, options: argparse.Namespace, said: Path) -> dict[str, Any]:
    """A row, whatever happens; a case that hangs is ended with all it has started."""
    asked = [sys.executable, str(Path(__file__).resolve()), "--one", name, "--predicted", str(said), "--steps", str(options.steps),
             "--warmup", str(options.warmup), *(["--dry"] if options.dry else [])]  # fmt: skip
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(asked, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, text=True)
        try:
            child.wait(options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        text = out.read()
    rows = [line for line in text.splitlines() if line.startswith("ROW ")]
    if rows:
        return json.loads(rows[-1][4:])  # type: ignore[no-any-return]
    how = f"ended with {child.returncode}" if child.returncode != -signal.SIGKILL else f"took over {options.timeout:g} s"
    return {"case": name, "error": f"{how}: {text[-1500:]}", "date": time.strftime("%Y-%m-%d")}


def told(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']}: {row['error'][-600:]}"
    found, off = row["measured"], row["errors"]
    words = [f"{row['case']} rank {row['rank']}/{row['world']}: step {found['step_seconds'] * 1e3:.1f} ms"]
    for name, value in off.items():
        if value is not None:
            bar = BARS.get(name)
            words.append(f"{name} {100 * value:+.1f}{'' if bar is None or abs(value) <= bar else '!'}")
    if found["exposed_share"] is not None:
        words.append(f"exposed measured {100 * found['exposed_share']:.1f} %")
    return ", ".join([*words, f"built in {found['build_seconds']:.0f} s"])


def summary(rows: list[dict[str, Any]]) -> str:
    newest = {row["case"]: row for row in rows}
    good = [row for row in newest.values() if "errors" in row]
    wrong = [row["case"] for row in newest.values() if row.get("ran") is False and row.get("fits_said") != "no"]
    lines = [f"{len(good)} of {len(newest)} ran; said to fit and ran out: {wrong or 'none'}"]
    for name, bar in (*BARS.items(), ("free_step", BARS["step"])):
        off = sorted(abs(row["errors"][name]) for row in good if row["errors"].get(name) is not None)
        if off:
            inside, middle = sum(value <= bar for value in off), off[len(off) // 2]
            lines.append(f"{name:<16} {inside} of {len(off)} within {100 * bar:g} %, median {100 * middle:.2f}, worst {100 * off[-1]:.1f}")
    return "\n".join([*lines, *(f"failed: {row['case']}: {row['error'][:200]}" for row in newest.values() if "error" in row)])


def read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path is not None and path.exists() else []


def predict_all(names: list[str], out: Path, dry: bool) -> None:
    """Cases that are in the file already stay as they are, unless they failed."""
    from foretell.search.traces.needed import Traces

    traces = Traces(capability=(9, 0))
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        if name in known and "error" not in known[name]:
            continue
        began = time.monotonic()
        known[name] = predicted(name, dry, traces)
        out.write_text(json.dumps(known))
        shown = {key: value for key, value in known[name].items() if not key.endswith("arrivals")}
        print(f"{name} in {time.monotonic() - began:.1f} s: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="names with commas, or beginnings of them")
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--predicted", type=Path, default=HERE / "data" / "box_predicted.json")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "box.jsonl")
    parser.add_argument("--done", type=Path)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--timeout", type=float, default=75)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("ROW " + json.dumps(one(options.one, options)), flush=True)
        os._exit(0)
    if options.check:
        return check()
    if options.summary:
        return print(summary(read(options.summary)))
    begun, wanted = time.monotonic(), options.cases.split(",")
    names = [name for name in CASES if any(name.startswith(word) for word in wanted)]
    if options.predict:
        return predict_all(names, options.predict, options.dry)
    with tempfile.TemporaryDirectory() as folder:
        said = options.predicted
        if options.dry:
            said = Path(folder) / "predicted.json"
            predict_all(names, said, True)
            options.steps, options.warmup = min(options.steps, 2), 1
            options.out = Path(folder) / "rows.jsonl" if options.out == HERE / "results" / "box.jsonl" else options.out
        done = {row["case"] for row in [*read(options.done), *read(options.out)] if "error" not in row}
        for name in names:
            if name in done or time.monotonic() - begun > options.limit_seconds:
                continue
            row = in_child(name, options, said)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(told(row), flush=True)
        print(summary(read(options.out)), flush=True)


if __name__ == "__main__":
    main()
