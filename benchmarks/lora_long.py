"""LoRA on Llama 3.1 8B: how many tokens fit in 24 GB, and how quick a step is beside peft's.

    python benchmarks/lora_long.py predict            no GPU needed; writes data/lora_long_predicted.json
    python benchmarks/lora_long.py limit              on the GPU of the cases; adds rows to results/lora_long.jsonl, or to --out
    python benchmarks/lora_long.py speed              needs peft there
    python benchmarks/lora_long.py predict --tiny     a tiny shape, then `limit --tiny` and `speed --tiny` on this machine's CPU

limit: one sample, rank 32 over an NF4 base, under foretell's plan for a GPU of 24·10⁹ bytes: 40,000 tokens, then 0.97 and 1.05 times
what was predicted to be the most: the length at which the replay of the caching allocator, given what the cap leaves beside the
context, no longer gets through. PyTorch's allocator gets that much (`set_per_process_memory_fraction`), and a step that wants more fails.
Weights are random numbers on the GPU, in the order and the places in which a run puts them. Each length has a process of its own.

speed: rank 32 on weights in bf16, 2,048 tokens a sample; foretell's plan and peft's adapters, eager, on two copies of one model, in turns.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import packed  # noqa: E402

PREDICTED, ROWS = HERE / "data" / "lora_long_predicted.json", HERE / "results" / "lora_long.jsonl"
CAP, RANK, HARDWARE, STEPS = 24 * 10**9, 32, "H200", 2
HOST = 64 * 2**30
"""Of host memory, what a plan may use."""
AIM, UNDER, OVER = 40_000, 0.97, 1.05
GRAIN = 64
"""Lengths are multiples of this."""
TINY = {"layers": 2, "dim": 256, "heads": 4, "kv_heads": 2, "ffn": 640, "vocab_size": 512, "context": 4096}
"""Wide enough that what a block keeps of 2,048 tokens is worth moving."""
SPEED_SEQ, BATCHES = 2048, (2, 1)
ROUNDS, ROUND_STEPS = 4, 5


# ---------------------------------------------------------------------- predicted


def settings(tiny: bool) -> dict[str, Any]:
    return {"model": "llama3-8b", "overrides": TINY if tiny else None, "hardware": HARDWARE, "lora": RANK, "precision": "bf16"}


def predict(tiny: bool) -> dict[str, Any]:
    """The plans, and what each length needs."""
    from foretell import api
    from foretell.plan import file

    cap, aim, seq = (CAP, AIM, SPEED_SEQ) if not tiny else (2 * 10**9, 2048, 64)
    began = time.monotonic()
    answer = api.plan(**settings(tiny), hbm=cap, host=HOST, seq=aim, base=("nf4",), global_batch=1, compile="none" if tiny else None)
    print(f"{answer.headline()} ({time.monotonic() - began:.0f} s)", flush=True)
    assert answer.plan is not None, answer.why
    plan = answer.plan if not tiny else _moved(answer.plan)
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "cap": cap, "plan": file.to_json(plan), "lengths": {}}
    needs = {aim: need(plan, aim, cap)}
    limit = _grain(aim * 1.4)
    for _ in range(0 if tiny else 3):
        needs[limit] = need(plan, limit, cap)
        (one, low), (other, high) = sorted(needs.items())[-2:]
        slope = (high["least"] - low["least"]) / (other - one)
        limit = _grain(one + (low["room"] - low["least"]) / slope) if slope > 0 else limit
        print(f"limit about {limit}", flush=True)
        if any(abs(limit - known) <= 0.005 * limit for known in needs):
            break
    for length in (aim, _grain(UNDER * limit), _grain(OVER * limit)):
        found["lengths"][str(length)] = needs.get(length) or need(plan, length, cap)
        print(length, found["lengths"][str(length)], flush=True)
    found["limit"] = limit
    found["speed"] = {}
    for batch in BATCHES:
        answer = api.plan(**settings(tiny), seq=seq, global_batch=batch, micro_batch=batch, compile="none" if tiny else "blocks")
        print(answer.headline(), flush=True)
        found["speed"][str(batch)] = {"seq": seq, "plan": file.to_json(answer.plan), "predicted": dict(answer.plan.predicted)}
    return found


def _moved(plan: Any) -> Any:
    from foretell.plan.types import Residency

    return plan.with_(blocks={"blocks.*": Residency(mode="recompute-host")}, loss_chunks=4)


def _grain(length: float) -> int:
    return int(length) // GRAIN * GRAIN


def need(plan: Any, length: int, cap: int) -> dict[str, Any]:
    """What a sample of this length takes, unlimited and at the least, and what the cap leaves it."""
    from foretell.hardware import parse
    from foretell.hardware.lookup import find_profile
    from foretell.hardware.overheads import overhead
    from foretell.plan.recipe import recipe_of, source_of
    from foretell.simulate.memory.memory import run_order, sizes_for, smallest_limit
    from foretell.simulate.parts import TORCH
    from foretell.simulate.plan import Options, predict_plan
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    plan = plan.with_(model={**plan.model, "seq": length})
    source, recipe, cluster = source_of(plan), recipe_of(plan), parse(HARDWARE)
    cluster = replace(cluster, device=cluster.device.with_memory(cap, "a cap for this row"))
    trace = capture(lambda: load(source), recipe)
    cost = predict_plan({"recompute": trace}, plan, cluster, Options(profile_of=find_profile))
    extra, memory = overhead(cluster.device, TORCH), cost.worst.memory
    least = smallest_limit(cost.programs[0], sizes_for(cluster, extra), list(run_order(cost.programs[0])))
    return {
        "verdict": cost.verdict, "allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "least": least,
        "room": cap - extra.context_bytes, "context": extra.context_bytes, "host": memory.host_bytes,
        "seconds": cost.time.step_seconds if cost.time else None,
        "low": cost.time.low_seconds if cost.time else None, "high": cost.time.high_seconds if cost.time else None,
        "holders": [[one.name, one.category, one.bytes] for one in memory.holders[:12]],
    }  # fmt: skip


# ---------------------------------------------------------------------- measured: the limit


def tokens(vocabulary: int, batch: int, seq: int, device: Any) -> dict[str, Any]:
    import torch

    found = torch.randint(0, vocabulary, (batch, seq + 1), generator=torch.Generator().manual_seed(seq))
    return {"input_ids": found[:, :-1].contiguous().to(device), "targets": found[:, 1:].contiguous().to(device)}


def one_length(length: int, known: dict[str, Any], steps: int) -> dict[str, Any]:
    """Steps of one sample in this process."""
    import torch

    from foretell.plan import file
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start

    began, cuda = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    plan = file.from_json(known["plan"])
    plan = plan.with_(model={**plan.model, "seq": length})
    said = known["lengths"][str(length)]
    row = {"kind": "limit", "length": length, "limit": known["limit"], "cap": known["cap"], "sealed": known["date"], **_about(), "predicted": said}
    if cuda:
        packed.limit_reserved(said["room"])
    workload = packed.packed_model(plan, device)
    if cuda:
        torch.cuda.synchronize()
    built, resident = time.perf_counter() - began, torch.cuda.memory_allocated() if cuda else 0
    batch = tokens(workload.model.vocab_size, 1, length, "cpu")
    taken: list[tuple[float, float]] = []
    error, job = "", None
    try:
        job = apply(replace(workload, batch=batch), plan, start(plan), learning_rate=1e-4, adapted=True)
        taken.extend(packed.timed(job, [batch], steps, f"{length} tokens"))
    except torch.OutOfMemoryError as problem:
        error = str(problem)[:200]
    found = packed.peaks(job)
    measured = {
        "resident": resident, "allocated": found["allocated_bytes"], "reserved": found["reserved_bytes"], "retries": found["retries"],
        "device": found["device_bytes"], "seconds": [each for each, _ in taken], "losses": [loss for _, loss in taken],
        "arena": found["host_bytes"], "moved": found["moved"], "built": round(built, 1), "whole": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    return {**row, "done": len(taken) == steps, "error": error, "measured": measured}


def _about() -> dict[str, Any]:
    import torch

    return {"date": datetime.date.today().isoformat(), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}  # fmt: skip


# ---------------------------------------------------------------------- measured: speed


def plain_model(plan: Any, device: Any) -> Any:
    import torch

    from foretell.plan.recipe import source_of
    from foretell.trace.load.model import load

    with torch.device("meta"):
        workload = load(source_of(plan))
    model = workload.model.to(torch.bfloat16).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() == 2 else parameter.fill_(1.0)
    return replace(workload, model=model)


def with_peft(workload: Any) -> Any:
    """One step of peft's adapters on the same layers, eager: AdamW fused, clipped, as foretell's."""
    import peft
    import torch

    from foretell.trace.adapters.put import layers_to_adapt
    from foretell.trace.recipe import Adapters

    layers = list(layers_to_adapt(workload.model, Adapters(rank=RANK)))
    model = peft.get_peft_model(workload.model, peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=layers))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=trained[0].is_cuda)

    def step(batch: Any) -> float:
        loss = workload.loss(model(input_ids=batch["input_ids"]), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _ours(job: Any, batch: Any) -> Any:
    return job.train_step([batch]).loss


def speed(known: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
    """Rounds in turns, for each batch; none is begun after so many seconds."""
    import torch

    from foretell.plan import file
    from foretell.runtime.parallel.apply import apply
    from foretell.runtime.parallel.ranks import start

    began, cuda = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch._dynamo.config.automatic_dynamic_shapes = False
    steps: dict[str, Any] = {}
    for batch, told in known["speed"].items():
        if time.perf_counter() - began > 0.6 * seconds:
            break
        plan = file.from_json(told["plan"])
        plan = plan.with_(model={name: value for name, value in plan.model.items() if name not in ("shapes", "digest")})
        if not steps:
            workload = plain_model(plan, device)
            example = tokens(workload.model.vocab_size, int(batch), told["seq"], device)
            job = apply(replace(workload, batch=example), plan, start(plan), learning_rate=1e-4)
            other = with_peft(plain_model(plan, device))
            steps = {"foretell": functools.partial(_ours, job), "peft": other}
            print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
        given = tokens(workload.model.vocab_size, int(batch), told["seq"], device)
        found: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, float] = {}
        peaks: dict[str, int] = {}
        for turn in range(ROUNDS + 1):
            for name, step in steps.items():
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                at = time.perf_counter()
                for _ in range(ROUND_STEPS):
                    loss = step(given)
                losses[name] = float(loss)
                each = (time.perf_counter() - at) / ROUND_STEPS
                if cuda:
                    peaks[name] = torch.cuda.max_memory_allocated()
                if turn:
                    found[name].append(round(each, 5))
                print(f"  {batch} x {told['seq']} {name}{' (warm-up)' if not turn else ''}: {each:.4f} s a step", flush=True)
        rates = {name: round(int(batch) * told["seq"] / statistics.median(rounds)) for name, rounds in found.items()}
        yield {
            "kind": "speed", "batch": int(batch), "seq": told["seq"], "compile": plan.compile,
            "blocks": sorted({one.mode for one in plan.blocks.values()}), **_about(), "sealed": known["date"],
            "predicted_seconds": told["predicted"].get("step_seconds"), "seconds": found,
            "tokens_per_second": rates, "ratio": round(rates["foretell"] / rates["peft"], 3), "losses": losses, "allocated_with_both": peaks,
        }  # fmt: skip


# ---------------------------------------------------------------------- rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "limit", "speed"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seconds", type=float, default=90.0, help="of the speed rows")
    parser.add_argument("--length", type=int, help="of the limit, this length alone, in this process")
    options = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "lora_long_tiny.json" if options.tiny else PREDICTED
    out = Path(tempfile.gettempdir()) / "lora_long_tiny.jsonl" if options.tiny and options.out == ROWS else options.out
    if options.what == "predict":
        place.write_text(json.dumps(predict(options.tiny), indent=1) + "\n")
        return
    known = json.loads(place.read_text())
    if options.what == "speed":
        for row in speed(known, options.seconds):
            _write(out, row)
    elif options.length:
        _write(out, one_length(options.length, known, options.steps))
    else:
        for length in known["lengths"]:
            words = [sys.executable, __file__, "limit", "--length", length, "--out", str(out), "--steps", str(options.steps)]
            try:
                subprocess.run(words + ["--tiny"] * options.tiny, check=False, timeout=100, env={**os.environ, "PYTHONUNBUFFERED": "1"})
            except subprocess.TimeoutExpired:
                print(f"{length} tokens took longer than they may", flush=True)


def _write(out: Path, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with out.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
