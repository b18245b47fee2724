"""Is the plan that foretell chooses the best there is? Every plan of a case run for real, beside what was predicted.

    python benchmarks/plans.py --plan                     choose and predict for the GPU cases; no GPU needed
    python benchmarks/plans.py                            measure those plans on the GPU at hand, then compare
    python benchmarks/plans.py --device cpu --ranks 2     choose, predict and measure on gloo ranks of this machine (or 4)
    python benchmarks/plans.py --predict-only             predict and choose again for what results/plans.jsonl holds; plans
                                                          that are chosen now and were not measured are left to be
    python benchmarks/plans.py --smoke [--device cpu]     does it work at all

A case is a model, a batch and a limit of memory (plans_cases.py). Its plans: every micro-batch, with blocks kept, kept in
part, recomputed selectively, in half and whole, some of them compiled; on a CPU over 1, 2 or 4 ranks and the axes between
them. On a GPU the limit is set with torch.cuda.set_per_process_memory_fraction and running out of it is what PyTorch
says; the chooser is given a device of that size and the context. On a CPU the limit is compared with the resident memory
of all ranks. Measured rows are appended one by one and not measured twice.

A case is held to: the chosen plan within 5 % (CPU: 10 %) of the fastest of all that ran; Kendall's tau of predicted and
measured seconds at least 0.8; nothing that was said to fit ran out of memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
NEAR = {"cuda": 1.05, "cpu": 1.10}
ORDER = 0.8


def cases_of(options: argparse.Namespace) -> tuple[Any, ...]:
    import plans_cases

    if options.smoke:
        found = plans_cases.smoke_cases(options.device)
    else:
        found = plans_cases.GPU if options.device == "cuda" else plans_cases.cpu_cases(options.ranks)
    wanted = options.case
    return tuple(case for case in found if not wanted or any(word in case.name for word in wanted))


# ---------------------------------------------------------------------------------------------- predictions


class Oracle:
    """Predicts plans of one case and chooses among all; traces are shared."""

    def __init__(self, case: Any) -> None:
        from foretell.hardware import overhead, parse
        from foretell.hardware.lookup import find_profile
        from foretell.hardware.probe.machine import cpu_name
        from foretell.search.traces.needed import Traces
        from foretell.simulate.parts import TORCH
        from foretell.simulate.plan import Options

        self.case = case
        on_cpu = case.device == "cpu"
        cluster = parse("auto" if on_cpu else "H200")
        device = cluster.device
        capacity = case.cap if on_cpu else case.cap + overhead(device, TORCH).context_bytes
        self.cluster = replace(cluster, device=device.with_memory(capacity, "a limit set for this case"))
        reported = cpu_name() if on_cpu else None
        self.options = Options(profile_of=lambda name: find_profile(name, reported_as=reported))
        self.traces = Traces(capability=None if on_cpu else (9, 0))

    def plans(self) -> list[Any]:
        """Every plan of the case, and the one chosen first if it is none of them."""
        from plans_cases import key_of, plans_of

        from foretell.lower.blocks import blocks_of
        from foretell.plan.recipe import model_of
        from foretell.plan.types import Plan

        bare = Plan(model=model_of(self.case.source()), hardware="auto" if self.case.device == "cpu" else "H200",
                    precision="fp32" if self.case.device == "cpu" else "bf16-mixed")  # fmt: skip
        blocks = blocks_of(self.traces.of(bare, ["keep"])["keep"])
        about = model_of(self.case.source(), blocks=blocks)
        found = plans_of(self.case, about, blocks)
        self.chosen = self.choose(about)
        keys = {key_of(self.case.name, plan) for plan in found}
        if self.chosen is not None and key_of(self.case.name, self.chosen) not in keys:
            found.insert(0, self.chosen)
        return found

    def choose(self, about: Any) -> Any:
        from foretell.plan.types import Mesh
        from foretell.search.solve.choose import SearchConstraints, choose

        case = self.case
        meshes = () if case.device == "cuda" else tuple(Mesh(**axes) for axes in case.meshes)
        compile = ("none", "model") if case.compile else ("none",)
        wishes = SearchConstraints(global_batch=case.global_batch, ranks=case.ranks, meshes=meshes, compile=compile)
        hardware = "auto" if case.device == "cpu" else "H200"
        best = choose(case.source(), self.cluster, hardware, wishes, options=self.options).best
        return best.plan.with_(model=about, predicted={}, notes=()) if best else None

    def predict(self, plan: Any) -> dict[str, Any]:
        from foretell.lower.blocks import blocks_of
        from foretell.plan.blocks import expand
        from foretell.simulate.plan import predict_plan

        keep = self.traces.of(plan, ["keep"])
        modes = {residency.mode for residency in expand(plan.blocks, blocks_of(keep["keep"])).values()}
        cost = predict_plan({**keep, **self.traces.of(plan, modes)}, plan, self.cluster, self.options)
        memory, clock = cost.worst.memory, cost.time
        return {
            "verdict": cost.verdict, "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes,
            "device": memory.device_bytes, "capacity": memory.capacity_bytes, "seconds": clock.step_seconds if clock else None,
            "low": clock.low_seconds if clock else None, "high": clock.high_seconds if clock else None,
            "binds": clock.binds if clock else "",
        }  # fmt: skip


def planned(case: Any) -> list[dict[str, Any]]:
    """A row for every plan of a case, with its prediction."""
    from plans_cases import key_of

    from foretell.errors import UserError

    oracle = Oracle(case)
    rows = []
    plans = oracle.plans()
    best = key_of(case.name, oracle.chosen) if oracle.chosen is not None else ""
    for plan in plans:
        key = key_of(case.name, plan)
        try:
            predicted = oracle.predict(plan)
        except UserError as error:
            print(f"{case.name}: {words(plan)}: left out: {error.problem}", flush=True)
            continue
        row = row_of(case, plan, predicted, chosen=key == best)
        rows.append(row)
        print(describe(row), flush=True)
    fitting = [row for row in rows if row["predicted"]["verdict"] != "no"]
    chosen = next((row for row in rows if row["chosen"]), None)
    if chosen is None:
        print(f"{case.name}: the chooser found no plan, and {len(fitting)} are predicted to fit", flush=True)
    elif fitting:
        quickest = min(fitting, key=lambda row: row["predicted"]["seconds"])
        lost = chosen["predicted"]["seconds"] / quickest["predicted"]["seconds"] - 1
        print(f"{case.name}: chosen {lost:+.1%} beside the quickest predicted: {quickest['words']}", flush=True)
    return rows


def row_of(case: Any, plan: Any, predicted: dict[str, Any], *, chosen: bool) -> dict[str, Any]:
    from plans_cases import key_of

    from foretell.plan import file

    return {"case": case.name, "key": key_of(case.name, plan), "words": words(plan), "device_kind": case.device, "cap": case.cap,
            "chosen": chosen, "plan": file.to_json(plan), "predicted": predicted}  # fmt: skip


def words(plan: Any) -> str:
    from foretell.search.solve.choose import told

    blocks = ", ".join(f"{pattern} {residency.mode}" for pattern, residency in plan.blocks.items())
    return told(plan.with_(blocks={})) + (f"; {blocks}" if blocks else "")


def describe(row: dict[str, Any]) -> str:
    predicted, measured = row["predicted"], row.get("measured")
    mark = "*" if row["chosen"] else " "
    said = f"{1e3 * predicted['seconds']:8.2f} ms, {predicted['reserved'] / 2**30:6.2f} GiB, {predicted['verdict']:5s}"
    seen = ""
    if measured:
        ran = measured.get("ran")
        seen = f" | {1e3 * measured['seconds']:8.2f} ms" if "seconds" in measured else f" | {measured.get('error') or 'out of memory'}"
        seen += f", {measured['reserved'] / 2**30:6.2f} GiB" if "reserved" in measured else ""
        seen += "" if ran is not False or "seconds" not in measured else ", over the limit"
    return f"{mark} {row['case']:32s} {row['words'][:70]:70s} {said}{seen}"


# ---------------------------------------------------------------------------------------------- measuring


def measure_gpu(rows: Sequence[dict[str, Any]], out: Path, seconds: float) -> None:
    """Eager plans case by case, a process each; compiled ones in waves."""
    import plans_run
    import torch  # noqa: F401  # imported once, before the cases fork; CUDA stays untouched here
    from memory import append, done_keys, in_child, machine

    import foretell.runtime.parallel.apply  # noqa: F401

    about, until = machine(), time.monotonic() + seconds
    left = [row for row in rows if row["key"] not in done_keys(out)]
    print(f"{len(rows)} plans, {len(left)} to measure", flush=True)

    def keep(row: dict[str, Any], found: dict[str, Any]) -> None:
        whole = {**row, "measured": found, **about}
        append(out, whole)
        print(describe(whole), flush=True)

    def case(_: dict[str, Any], mine: list[dict[str, Any]]) -> dict[str, Any]:
        plans_run.run_case(mine, keep, until)
        return {}

    eager = [row for row in left if row["plan"]["compile"] == "none"]
    for _, mine in itertools.groupby(eager, key=lambda row: row["case"]):
        own = list(mine)
        for _ in range(3):  # a process that dies leaves the rest to another
            own = [row for row in own if row["key"] not in done_keys(out)]
            if not own or time.monotonic() > until:
                break
            answer = in_child(case, {}, own, timeout=300)
            if "error" in answer:
                print(own[0]["case"], answer["error"], flush=True)
    compiled = [row for row in left if row["plan"]["compile"] != "none"]
    for first in range(0, len(compiled), plans_run.WAVE):
        if time.monotonic() < until:
            for row, found in plans_run.run_wave(compiled[first : first + plans_run.WAVE]):
                keep(row, found)
    if time.monotonic() > until:
        print("time is up; run again to go on", flush=True)


def cost_seconds(row: dict[str, Any]) -> float:
    """What measuring a plan is expected to take: building it, then steps unless it runs out of memory."""
    import plans_run

    each = row["predicted"]["seconds"] or 0.0
    timed = max(plans_run.LEAST * each, min(plans_run.MOST * each, plans_run.TIMED_SECONDS))
    return 0.7 + (0.0 if row["predicted"]["verdict"] == "no" else (plans_run.WARM + 1) * each + timed)


def measure_cpu(rows: Sequence[dict[str, Any]], out: Path, rounds: int, seconds: float) -> None:
    """All plans of a case in turns, some rounds; seconds are a step that four of five take longer than, of a plan's quietest round:
    what other programs do on these cores makes steps longer and never shorter."""
    import os

    import plans_run
    from memory import append, done_keys

    about = {"date": time.strftime("%Y-%m-%d"), **_here(), "cores": os.cpu_count()}
    left = [row for row in rows if row["key"] not in done_keys(out)]
    until = time.monotonic() + seconds
    runner = plans_run.OnCpu()
    try:
        for _, mine in itertools.groupby(left, key=lambda row: row["case"]):
            if time.monotonic() > until:
                break
            own = list(mine)
            found: list[list[dict[str, Any]]] = [[] for _ in own]
            for _ in range(rounds):
                for position, row in enumerate(own):
                    if not found[position] or "error" not in found[position][-1]:
                        found[position].append(runner.attempt(row, 1.0))
            for row, answers in zip(own, found, strict=True):
                whole = {**row, "measured": _together(answers), **about}
                append(out, whole)
                print(describe(whole), flush=True)
    finally:
        runner.close()


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wrong = next((answer for answer in answers if "error" in answer), None)
    if wrong:
        return wrong
    rounds = [sorted(answer["each"])[len(answer["each"]) // 5] for answer in answers]
    return {
        "ran": all(answer["ran"] for answer in answers), "seconds": min(rounds), "rounds": rounds,
        "steps": sum(len(answer["each"]) for answer in answers), "reserved": max(answer["host"] for answer in answers),
    }  # fmt: skip


def _here() -> dict[str, str]:
    from memory import machine

    from foretell.hardware.probe.machine import cpu_name

    return {**machine(), "device": cpu_name()}


# ---------------------------------------------------------------------------------------------- what came of it


def tau(pairs: Sequence[tuple[float, float]], alike: float = 0.0) -> float | None:
    """Kendall's tau; pairs of plans whose measured seconds differ by no more than the share `alike` are left out."""
    agree = disagree = 0
    for (a, x), (b, y) in itertools.combinations(pairs, 2):
        if abs(x - y) <= alike * min(x, y):
            continue
        sign = (a - b) * (x - y)
        agree, disagree = agree + (sign > 0), disagree + (sign < 0)
    return (agree - disagree) / (agree + disagree) if agree + disagree else None


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every case, and how many hold."""
    found = []
    for name, group in itertools.groupby(sorted(rows, key=lambda row: row["case"]), key=lambda row: row["case"]):
        mine = [row for row in group if "error" not in row["measured"]]
        ran = [row for row in mine if row["measured"]["ran"]]
        chosen = next((row for row in mine if row["chosen"]), None)
        best = min(ran, key=lambda row: row["measured"]["seconds"], default=None)
        pairs = [(row["predicted"]["seconds"], row["measured"]["seconds"]) for row in ran]
        wrong = [row for row in mine if not row["measured"]["ran"] and row["predicted"]["verdict"] != "no"]
        ratio = None
        if chosen and best and chosen["measured"]["ran"]:
            ratio = chosen["measured"]["seconds"] / best["measured"]["seconds"]
        kind = mine[0]["device_kind"] if mine else "cuda"
        order = tau(pairs)
        holds = ratio is not None and ratio <= NEAR[kind] and (order or 0.0) >= ORDER and not wrong
        found.append({"case": name, "kind": kind, "plans": len(mine), "ran": len(ran), "ratio": ratio, "tau": order,
                      "tau_apart": tau(pairs, 0.02), "wrong_fits": len(wrong), "holds": holds})  # fmt: skip
        error = statistics.median(abs(said / seen - 1) for said, seen in pairs) if pairs else float("nan")
        print(f"{'ok  ' if holds else 'MISS'} {name:36s} {len(ran):3d} of {len(mine):3d} ran; chosen/best "
              f"{f'{ratio:.3f}' if ratio else 'not measured'}; tau {f'{order:.2f}' if order is not None else '-'} "
              f"({f'{t:.2f}' if (t := tau(pairs, 0.02)) is not None else '-'} where 2 % apart); wrong fits {len(wrong)}; "
              f"seconds off by {100 * error:.1f} %")  # fmt: skip
        if best and chosen and best is not chosen:
            print(f"       chosen {chosen['words']}; best {best['words']}")
    print(f"{sum(case['holds'] for case in found)} of {len(found)} cases hold")
    return found


def again(rows: list[dict[str, Any]], cases: Sequence[Any], missing: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stored rows with today's predictions and today's choice; and what is chosen and was never measured."""
    from plans_cases import key_of

    from foretell.plan import file

    known = {case.name: case for case in cases}
    for name, group in itertools.groupby(sorted(rows, key=lambda row: row["case"]), key=lambda row: row["case"]):
        if name not in known:
            continue
        oracle = Oracle(known[name])
        oracle.plans()
        best = key_of(name, oracle.chosen) if oracle.chosen is not None else ""
        mine = list(group)
        for row in mine:
            row["predicted"] = oracle.predict(file.from_json(row["plan"]))
            row["chosen"] = row["key"] == best
        if not any(row["chosen"] for row in mine):
            if oracle.chosen is not None:
                missing.append(row_of(known[name], oracle.chosen, oracle.predict(oracle.chosen), chosen=True))
            print(f"{name}: the plan chosen now was not measured: {words(oracle.chosen) if oracle.chosen else 'none'}")
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="on a CPU, of the largest plans")
    parser.add_argument("--plan", action="store_true", help="choose and predict only, into --configs")
    parser.add_argument("--predict-only", action="store_true", help="predict again what --out holds")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--case", action="append", default=[], help="only cases with this in their name")
    parser.add_argument("--configs", type=Path, default=HERE / "configs" / "plans.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plans.jsonl")
    parser.add_argument("--rounds", type=int, default=3, help="on a CPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new plan after this long")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import plans_run

        return plans_run.one(options.one)
    cases = cases_of(options)
    names = {case.name for case in cases}
    if options.predict_only:
        rows = [row for row in read(options.out) if row["case"] in names]
        others = [row for row in read(options.out) if row["case"] not in names]
        missing: list[dict[str, Any]] = []
        write(options.out, [*others, *again(rows, cases, missing)])
        write(options.configs, [*(row for row in read(options.configs) if row["key"] not in {m["key"] for m in missing}), *missing])
    elif options.plan:
        rows = [row for case in cases for row in planned(case)]
        write(options.configs, [*(row for row in read(options.configs) if row["case"] not in names), *rows])
        print(f"{len(rows)} plans; about {sum(map(cost_seconds, rows)):.0f} s on the device, compiling aside")
        return None
    elif options.device == "cpu":
        measure_cpu([row for case in cases for row in planned(case)], options.out, options.rounds, options.seconds)
    else:
        if options.smoke:
            write(options.configs, [row for case in cases for row in planned(case)])
        measure_gpu([row for row in read(options.configs) if row["case"] in names], options.out, options.seconds)
    summary(row for row in read(options.out) if row["case"] in names)
    return None


if __name__ == "__main__":
    main()
