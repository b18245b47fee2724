"""What benchmarks/memory.py runs on the GPU: one real case each, in a process of its own."""

from __future__ import annotations

import ctypes
import gzip
import json
import random
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

GIB = 2**30
BUILDERS = 5
"""Cases that are built on the host beside the one on the device."""


def build_step(config: dict[str, Any], wait: Callable[[], None] = lambda: None) -> Any:
    """The step of a configuration on the GPU, weights small random numbers, moved as `.to(device)` would; waits before it moves."""
    import torch
    from memory import parts
    from torch import nn

    from foretell.trace.load.model import load
    from foretell.trace.record.step import Step

    source, recipe = parts(config)
    with _no_initialisation():
        workload = load(source)
        step = Step(workload, recipe, device_type="cuda")
    wait()

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            return torch.empty_like(tensor, device="cuda").normal_(0, 0.02)
        return tensor.to("cuda")

    step.model._apply(move)
    given = step.workload
    batch = torch.utils._pytree.tree_map(lambda t: t.to("cuda") if isinstance(t, torch.Tensor) else t, given.batch)
    step.workload = replace(given, batch=batch)
    step.create_optimizer()
    compile_model(step.model, config["mode"])
    return step


def compile_model(model: Any, mode: str) -> None:
    """As a user would: the whole model, with CUDA graphs, or block by block."""
    if mode == "compiled":
        model.compile()
    elif mode == "graphs":
        model.compile(mode="reduce-overhead")
    elif mode == "blocks":
        from foretell.trace.fold.blocks import find_blocks

        for path in find_blocks(model):
            model.get_submodule(path).compile()


class _no_initialisation:
    """Large models are built on the host without touching their memory."""

    def __enter__(self) -> None:
        import torch

        self.kept = {name: getattr(torch.Tensor, name) for name in ("normal_", "uniform_")}
        for name in self.kept:
            setattr(torch.Tensor, name, lambda tensor, *args, **kwargs: tensor)

    def __exit__(self, *_: object) -> None:
        import torch

        for name, function in self.kept.items():
            setattr(torch.Tensor, name, function)


def warm_up() -> None:
    """Import what cases need before they fork; nothing here may touch CUDA."""
    import importlib

    for name in ("torch", "torch.distributed._tools.mem_tracker", "transformers", "torchvision", "timm"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    with suppress(ImportError):
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM  # noqa: F401


def run_steps(step: Any, count: int = 3) -> None:
    import torch

    for _ in range(count):
        for _ in range(step.recipe.accumulate):
            step.micro_batch()
        step.update()
        step.zero_grad()
    torch.cuda.synchronize()


def measure(config: dict[str, Any]) -> dict[str, Any]:
    """Peaks of a fresh process after three steps."""
    import torch

    step = build_step(config)
    run_steps(step)
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
        "device": total - free,
    }  # fmt: skip


def memtracker(config: dict[str, Any]) -> dict[str, Any]:
    """PyTorch's own tracker on fake CUDA tensors, second step."""
    import torch
    from memory import parts
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from foretell.trace.load.model import load
    from foretell.trace.record.step import Step

    source, recipe = parts(config)
    torch.cuda.init()
    with FakeTensorMode(), torch.device("cuda"):
        workload = load(source)
        step = Step(workload, recipe, device_type="cuda")
        step.create_optimizer()
        tracker = MemTracker()
        tracker.track_external(step.model, step.optimizer)
        with tracker:
            run = [step.micro_batch, step.update, step.zero_grad]
            for function in run:
                function()
            tracker.reset_mod_stats()
            for function in run:
                function()
    return {"peak": tracker.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"]}


# ---------------------------------------------------------------------------------------------- no wrong "fits"


def ballast(free_bytes: int) -> None:
    """Take device memory with plain cudaMalloc until a device of `free_bytes`, context included, is left."""
    import torch

    torch.cuda.init()
    torch.cuda.synchronize()
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line)
    cudart = ctypes.CDLL(path)
    free, total = torch.cuda.mem_get_info()
    context = total - free
    amount = free - (free_bytes - context)
    while amount > 0:
        chunk = min(amount, 8 * GIB)
        pointer = ctypes.c_void_p()
        if cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(chunk)) != 0:
            raise RuntimeError(f"ballast of {chunk} bytes was refused")
        amount -= chunk


def run_in(config: dict[str, Any], free_bytes: int, wait: Callable[[], None]) -> dict[str, Any]:
    """Whether two steps, the first of which makes optimizer state, get through on a device of this size."""
    import torch

    def take() -> None:
        wait()
        ballast(free_bytes)

    try:
        run_steps(build_step(config, take), 2)
    except torch.OutOfMemoryError as error:
        return {"ran": False, "why": str(error)[:160]}
    except RuntimeError as error:
        if "memory" not in str(error).lower() and "alloc" not in str(error).lower():
            raise
        return {"ran": False, "why": str(error)[:160]}
    return {"ran": True}


def verdicts(config: dict[str, Any]) -> dict[str, Any]:
    """Need of a configuration and its verdicts at limits drawn around it, or at those given; runs without a GPU."""
    import warnings

    warnings.simplefilter("ignore")
    from memory import parts

    from foretell.hardware import overhead, parse
    from foretell.simulate.memory.memory import predict_memory, run_order, sizes_for, smallest_limit
    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    draws, seed, limits = config.pop("draws", 0), config.pop("seed", 0), config.pop("limits", [])
    source, recipe = parts(config)
    try:
        trace = capture(lambda: load(source), recipe)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    cluster = parse("H200")
    extra = overhead(cluster.device, "2.11")
    need = smallest_limit(trace, sizes_for(cluster, extra), run_order(trace)) + extra.context_bytes
    rng = random.Random(seed)
    drawn = [int(need * rng.uniform(0.9, 1.1)) for _ in range(draws)]
    found = []
    for limit in [*limits, *(limit for limit in drawn if 4 * GIB <= limit <= 100 * GIB)]:
        device = replace(cluster.device, memory_bytes=limit)
        outcome = predict_memory(trace, replace(cluster, device=device), extra)
        found.append({"limit": limit, "verdict": outcome.verdict})
    return {"need": need, "cases": found}


def run_limits(
    configs: list[dict[str, Any]], count: int, out: Path, given: Path | None, predict_only: bool, seconds: float
) -> None:
    from memory import append, done_keys, in_child, machine

    started = time.monotonic()
    rows = [json.loads(line) for line in given.read_text().splitlines()] if given else draw_cases(configs, count)
    about, done = machine(), done_keys(out)
    device = threading.Lock()

    def run(row: dict[str, Any]) -> None:
        if time.monotonic() - started > seconds:
            return
        if not predict_only:
            config, limit = row["config"], row["limit"]
            row |= {**about, **in_child(run_in, config, limit, timeout=60, device=device)}
            if row.get("ran") and row["verdict"] == "no":
                row["ran_at_95"] = in_child(run_in, config, int(limit * 0.95), timeout=60, device=device).get("ran")
        append(out, row)
        print(f"{row['name']}: {row['limit'] / GIB:.1f} GiB, need {row['need'] / GIB:.1f}, {row['verdict']}, "
              f"ran {row.get('ran')} {row.get('error', '')}", flush=True)  # fmt: skip

    if not predict_only:
        warm_up()
    with ThreadPoolExecutor(1 if predict_only else BUILDERS) as pool:
        list(pool.map(run, [row for row in rows if row["key"] not in done]))
    if time.monotonic() - started > seconds:
        print("time is up; run again to go on", flush=True)
    if not predict_only:
        limits_summary(out)


def draw_cases(configs: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Limits within ten percent of each configuration's predicted need, and the verdict at each."""
    from memory import key_of, name_of, predict_all

    each = -(-count // len(configs))
    work = [{**config, "draws": each, "seed": position} for position, config in enumerate(configs)]
    rows = []
    for config, answer in zip(configs, predict_all(work, "verdicts"), strict=True):
        if "error" in answer:
            print(name_of(config), answer["error"], flush=True)
            continue
        for case in answer["cases"]:
            key = f"{key_of(config)}@{case['limit']}"
            rows.append({"key": key, "name": name_of(config), "config": config, "need": answer["need"], **case})
    return rows


def limits_summary(out: Path) -> None:
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [row for row in rows if "ran" in row]
    said = [row for row in rows if row["verdict"] in ("fits", "tight")]
    wrong = [row for row in said if not row["ran"]]
    roomy = [row for row in said if row["need"] <= 0.95 * row["limit"]]
    refused = [row for row in rows if row["verdict"] == "no"]
    could = [row for row in refused if row.get("ran_at_95")]
    untried = [row for row in refused if row["ran"] and row.get("ran_at_95") is None]
    print(f"{len(rows)} cases, {len(said)} called fitting, {len(wrong)} of them ran out of memory; {len(refused)} refused, "
          f"{sum(row['ran'] for row in refused)} of them ran, {len(could)} in 95 % of the memory too ({len(untried)} not tried), "
          f"beside {len(roomy)} called fitting that need at most 95 %")  # fmt: skip
    for row in wrong:
        print("  WRONG FIT", row["name"], row["limit"])


# ---------------------------------------------------------------------------------------------- op lists


def signature(name: str, inputs: Any, outputs: Any) -> list[Any]:
    import torch

    def specs(values: Any) -> list[Any]:
        leaves = torch.utils._pytree.tree_leaves(values)
        return [[list(t.shape), str(t.dtype)[6:]] for t in leaves if isinstance(t, torch.Tensor)]

    return [name, specs(inputs), specs(outputs)]


def real_ops(config: dict[str, Any]) -> dict[str, Any]:
    """Ops of the second real step, seen by a dispatch mode on the GPU."""
    from torch.utils._python_dispatch import TorchDispatchMode

    ops: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = function(*args, **(kwargs or {}))
            ops.append(signature(str(function), (args, kwargs), output))
            return output

    step = build_step(config)
    run_steps(step, 1)
    with Mode():
        for _ in range(step.recipe.accumulate):
            step.micro_batch()
        step.update()
    return {"ops": ops}


def traced_ops(config: dict[str, Any]) -> dict[str, Any]:
    """The same step as foretell traces it."""
    import warnings

    warnings.simplefilter("ignore")
    from memory import parts

    from foretell.trace.load.model import load
    from foretell.trace.record.capture import capture

    source, recipe = parts(config)
    try:
        trace = capture(lambda: load(source), recipe)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    names = [name for name, times in trace.schedule["steady_step"] for _ in range(times) if name != "zero_grad"]
    return {
        "ops": [
            [op.name, [[list(r.spec.shape), r.spec.dtype] for r in op.inputs], [[list(r.spec.shape), r.spec.dtype] for r in op.outputs]]
            for name in names
            for op in trace.programs[name].ops
            if not op.name.startswith("foretell.")
        ]
    }


def run_oplists(configs: list[dict[str, Any]], out: Path, seconds: float) -> None:
    from memory import append, done_keys, in_child, key_of, machine, name_of, predict_all

    started = time.monotonic()
    left = [config for config in configs if key_of(config) not in done_keys(out)]
    traced = predict_all(left, "traced_ops")
    about = machine()
    warm_up()
    for config, ours in zip(left, traced, strict=True):
        if time.monotonic() - started > seconds:
            print("time is up; run again to go on", flush=True)
            break
        theirs = in_child(real_ops, config)
        row = {"key": key_of(config), "name": name_of(config), **about}
        if "error" in ours or "error" in theirs:
            row["error"] = [ours.get("error"), theirs.get("error")]
        else:
            row |= {"ops": len(theirs["ops"]), "differences": differences(theirs["ops"], ours["ops"])}
            number = zlib.crc32(key_of(config).encode()) % 10**6
            golden = out.with_suffix("") / f"{config['model'].replace(':', '_').replace('/', '_')}-{number}.json.gz"
            golden.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(golden, "wt") as stream:
                json.dump({"config": config, "ops": theirs["ops"], **about}, stream)
        append(out, row)
        print(row["name"], row.get("ops"), row.get("error") or row["differences"][:2], flush=True)


def differences(real: list[Any], ours: list[Any]) -> list[Any]:
    import difflib

    a, b = [json.dumps(op) for op in real], [json.dumps(op) for op in ours]
    matcher = difflib.SequenceMatcher(a=a, b=b, autojunk=False) if a != b else nullcontext()
    return [
        {"real": a[i:j][:3], "ours": b[k:m][:3]}
        for tag, i, j, k, m in (matcher.get_opcodes() if a != b else [])  # type: ignore[union-attr]
        if tag != "equal"
    ]
