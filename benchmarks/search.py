"""How long a search takes with its traces cached, and whether it finds plans as fast as published ones.

    python benchmarks/search.py                  every case in a process of its own; appends rows to results/search.jsonl
    python benchmarks/search.py --case 70b       one of them
    python benchmarks/search.py --published      Megatron's and TorchTitan's models, on their hardware, with their batch
    python benchmarks/search.py --composition    the quick costs of the plans found beside the full path's, minutes a case
    python benchmarks/search.py --dry            print, append nothing

Seconds are those of `search.solve.find.find`, imports excluded and traces read from disk, as are costs that the run before has kept;
`cpu_seconds` are those that the process computed, which other work on the machine changes less. Published plans and the plans found
are costed by the same quick cost; a plan of another stack is taken as it would run here: bf16 instead of fp16 or fp8,
the attention kernels of today, an H100 of 96 GB as one of 80 GB with more memory, not compiled where ranks share a sample.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
RESULTS = HERE / "results" / "search.jsonl"
RUNS = HERE / "data" / "published_runs.csv"
CASES: dict[str, tuple[str, int, str, int, float]] = {
    "8b": ("llama3-8b", 8192, "H100:8", 128, 2.0),
    "70b": ("llama3-70b", 8192, "64x8xH100", 1024, 4.0),
    "405b": ("llama3-405b", 8192, "2048x8xH100", 2048, 10.0),
    "uneven": (f"{HERE / 'models' / 'uneven_stack.py'}:model", 4096, "8x8xH100", 512, 10.0),
    "mixed": (f"{HERE / 'models' / 'uneven_stack.py'}:model", 4096, "4x8xH100+4x8xA100", 512, 10.0),
}
"""Name → model, tokens, hardware, samples of a step, bar in seconds."""
SOURCES = ("sc21", "titan")
LLAMA2_WORDS = 32000
"""Of models whose row does not say: all of them are Llama 2."""


# ---------------------------------------------------------------------- speed


def measure(name: str) -> dict[str, Any]:
    """One case, twice: the first run makes the traces."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.search.solve.explain import told
    from foretell.search.solve.find import find
    from foretell.search.space.constraints import SearchConstraints
    from foretell.simulate.plan import Options
    from foretell.trace.load.model import Source

    model, seq, hardware, batch, bar = CASES[name]
    import numpy  # noqa: F401  imports are not counted

    found, took, computed = None, [], 0.0
    for _ in range(2):
        before, busy = time.perf_counter(), time.process_time()
        found = find(
            Source(model=model, seq=seq), parse(hardware), hardware, SearchConstraints(global_batch=batch),
            options=Options(profile_of=find_profile),
        )  # fmt: skip
        took.append(time.perf_counter() - before)
        computed = time.process_time() - busy
    assert found is not None and found.best is not None, "the cases fit"
    return {
        "case": name, "model": Path(model).name, "on": hardware, "global_batch": batch, "seconds": round(took[-1], 2),
        "cpu_seconds": round(computed, 2), "first_seconds": round(took[0], 2), "bar_seconds": bar, "layouts": found.there, "costed": found.costed,
        "best": told(found.best.point.layout), "step_seconds": round(found.best.point.seconds, 4),
        "exact": found.best.cost is not None,
    }  # fmt: skip


# ---------------------------------------------------------------------- quick costs beside the full path

COMPARED = 3
"""Plans of a case, unlike in mesh, schedule or residency, the fastest first."""


def composition(name: str) -> dict[str, Any]:
    """The plans that a search finds by quick costs, costed op by op as well: seconds, and bytes of the fullest device."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.search.solve.explain import told
    from foretell.search.solve.find import Finder
    from foretell.search.solve.question import ask
    from foretell.search.space.constraints import SearchConstraints
    from foretell.simulate.plan import Options
    from foretell.trace.load.model import Source

    model, seq, hardware, batch, _ = CASES[name]
    wishes = SearchConstraints(global_batch=batch)
    question = ask(Source(model=model, seq=seq), parse(hardware), hardware, wishes, options=Options(profile_of=find_profile))
    finder = question.into(Finder, exact=False)
    answer = finder.answer(what_if=False, patience=float("inf"))
    assert answer.best is not None, "the cases fit"
    unlike = {}
    for one in (answer.best, *answer.runners_up, *answer.front):
        layout = one.point.layout
        unlike.setdefault((layout.mesh, layout.schedule, frozenset(layout.modes)), one)
    finder.exact, rows = True, []
    for one in list(unlike.values())[:COMPARED]:
        full = finder.costed(replace(one, why=""), always=True)
        row: dict[str, Any] = {"plan": told(one.point.layout), "seconds": one.point.seconds, "bytes": one.point.memory_bytes}
        if full.cost is None or full.cost.time is None:
            rows.append({**row, "not_costed": full.why})
            continue
        exact = full.cost.time.step_seconds, full.cost.worst.memory.device_bytes
        row |= {"full_seconds": exact[0], "full_bytes": exact[1]}
        row |= {"seconds_off": round(row["seconds"] / exact[0] - 1, 4), "bytes_off": round(row["bytes"] / exact[1] - 1, 4)}
        rows.append(row)
    finder.keep_costs()
    return {"composition": name, "model": Path(model).name, "on": hardware, "plans": rows}


# ---------------------------------------------------------------------- published


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run, as far as a plan says."""

    id: str
    model: str
    overrides: dict[str, Any]
    seq: int
    hardware: str
    memory: float
    """Times the memory of the device that `hardware` names."""
    mesh: dict[str, int]
    micro_batch: int
    global_batch: int
    interleave: int
    mode: str
    compile: str


def runs() -> Iterator[Run | str]:
    """Rows that a plan can say, or why not."""
    seen = set()
    for row in csv.DictReader(RUNS.open()):
        if not row["id"].startswith(SOURCES):
            continue
        found = run_of(row)
        key = replace(found, id="")
        if repr(key) in seen:
            yield f"{row['id']}: the same plan as a row before, but for the number format"
            continue
        seen.add(repr(key))
        yield found


def run_of(row: dict[str, str]) -> Run:
    whole = {name: int(row[name] or 1) for name in ("tp", "pp", "cp", "dp", "gpus", "layers", "hidden", "heads", "global_batch")}
    llama = row["family"] == "llama"
    sizes: dict[str, Any] = {"layers": whole["layers"], "dim": whole["hidden"], "heads": whole["heads"]}
    sizes["vocab_size"] = int(row["vocab"] or LLAMA2_WORDS)
    if llama:
        sizes |= {"kv_heads": int(row["kv_heads"]), "ffn": int(row["ffn_hidden"])}
    shard = "dp_shard" if row["fsdp_shard"] == "zero3" else "dp_replicate"
    device = "A100" if row["gpu"].startswith("A100") else "H100"
    nodes = whole["gpus"] // 8
    mode = {"full": "recompute", "selective": "selective"}.get(row["activation_recompute"], "keep")
    return Run(
        id=row["id"], model="llama3-8b" if llama else "gpt2", overrides=sizes, seq=int(row["seq_len"]),
        hardware=f"{nodes}x8x{device}" if nodes > 1 else f"{device}:8", memory=1.2 if "96GB" in row["gpu"] else 1.0,
        micro_batch=int(row["micro_batch"] or 1),
        mesh={"tp": whole["tp"], "pp": whole["pp"], "cp": whole["cp"], shard: whole["dp"]}, global_batch=whole["global_batch"],
        interleave=int(row["vpp"] or 1), mode=mode, compile="blocks" if "torch.compile" in row["compile"] and whole["cp"] == 1 else "none",
    )  # fmt: skip


def against(run: Run) -> dict[str, Any]:
    """Their plan and the one found, under the same quick cost."""
    from foretell.errors import UserError
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.plan.types import Mesh
    from foretell.search.estimate.depth import Depth
    from foretell.search.estimate.plan import Layout
    from foretell.search.solve.explain import differs, told, with_memory
    from foretell.search.solve.find import Finder
    from foretell.search.space.constraints import SearchConstraints
    from foretell.search.space.fill import fill
    from foretell.search.space.price import SheetPricer
    from foretell.search.traces.needed import Traces
    from foretell.simulate.plan import Options
    from foretell.trace.load.model import Source

    cluster = with_memory(parse(run.hardware), run.memory) if run.memory > 1 else parse(run.hardware)
    overrides = {**run.overrides, **({"context": run.seq} if run.model == "gpt2" else {})}
    wishes = SearchConstraints(global_batch=run.global_batch, compile=(run.compile,))
    traces = Traces(capability=cluster.device.compute_capability or (9, 0))
    source = Source(model=run.model, overrides=overrides, seq=run.seq)
    finder = Finder(source, cluster, run.hardware, wishes, Options(profile_of=find_profile), traces, lambda _: None, False)
    mesh = Mesh(**run.mesh)
    schedule = None if mesh.pp == 1 else "interleaved-1f1b" if run.interleave > 1 else "1f1b"
    pricer = SheetPricer(finder.sheet(cluster), cluster, held=Depth.SHORT)
    bare = Layout(
        mesh=mesh, micro_batch=run.micro_batch, accumulate=run.global_batch // run.micro_batch // mesh.data, schedule=schedule,
        interleave=run.interleave if mesh.pp > 1 else 1, compile=run.compile,
    )  # fmt: skip
    try:
        cut = fill(bare, pricer)
        theirs = replace(cut.layout if cut else bare, modes=(run.mode,) * len(pricer.blocks))
        quick = pricer.quick(theirs)
    except UserError as error:
        return {"id": run.id, "skipped": error.problem}
    before = time.perf_counter()
    best = None
    for held in (Depth.ALIVE, Depth.SHORT):  # as `find` does: where none holds what the allocator reserves, that is counted in
        points = sorted(finder.explore(cluster, wishes, held=held).points, key=lambda p: p.seconds)[:8] if best is None else []
        best = min(filter(None, map(finder.settled, points)), key=lambda point: point.seconds, default=best)
    if best is None:
        return {"id": run.id, "skipped": "nothing fits", "theirs_fits": quick.fits}
    return {
        "id": run.id, "on": run.hardware, "theirs": told(theirs), "theirs_seconds": quick.seconds, "theirs_fits": quick.fits,
        "found": told(best.layout), "found_seconds": best.seconds, "faster": quick.seconds / best.seconds - 1,
        "differs": list(differs(best.layout, theirs)), "search_seconds": round(time.perf_counter() - before, 2),
    }  # fmt: skip


def published() -> list[dict[str, Any]]:
    found = []
    for run in runs():
        if isinstance(run, str):
            print(f"  {run}")
            continue
        row = against(run)
        if "skipped" in row:
            print(f"{run.id}: {row['skipped']}", flush=True)
            continue
        found.append(row)
        print(f"{run.id} on {row['on']}: {row['faster']:+.1%} against {row['theirs']} ({'fits' if row['theirs_fits'] else 'does not fit here'})")
        print(f"    found {row['found']}: {'; '.join(row['differs']) or 'the same plan'}", flush=True)
    fit = [row for row in found if row["theirs_fits"]]
    slower = [row["id"] for row in fit if row["faster"] < -0.005]
    print(f"{len(fit)} plans that fit here: {len(fit) - len(slower)} found as fast or faster, slower {', '.join(slower) or 'none'}")
    print(f"{len(found) - len(fit)} plans that do not fit here by the same memory prediction: "
          + ", ".join(f"{row['id']} {row['faster']:+.1%}" for row in found if not row["theirs_fits"]))  # fmt: skip
    return found


# ---------------------------------------------------------------------- rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES])
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--composition", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        print(json.dumps(composition(asked.inside) if asked.composition else measure(asked.inside)))
        return 0
    frame = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    rows = [{"published": True, **row} for row in published()] if asked.published else []
    for name in [] if asked.published else [asked.case] if asked.case else CASES:
        command = [sys.executable, __file__, "--inside", name, *(["--composition"] if asked.composition else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        if asked.composition:
            for one in row["plans"]:
                print(f"{name}: {one['plan']}: {one.get('seconds_off')} of seconds, {one.get('bytes_off')} of bytes {one.get('not_costed', '')}")
            continue
        fine = "within" if row["seconds"] <= row["bar_seconds"] else "ABOVE"
        print(f"{name}: {row['seconds']} s, {fine} {row['bar_seconds']} s; {row['costed']} of {row['layouts']} layouts; {row['best']}")
    if not asked.dry:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps({**row, **frame}) + "\n" for row in rows)
    return int(any(row["seconds"] > row["bar_seconds"] for row in rows if "bar_seconds" in row))


if __name__ == "__main__":
    raise SystemExit(main())
