"""Training a model whose states do not fit: foretell's engine beside what a user would pick instead, one model, one batch.

    python benchmarks/offload.py --out ROWS.jsonl                   every way below, each in a process of its own
    python benchmarks/offload.py --ways resident stream:form=split,cpu_share=0.3   some of them, with other options
    python benchmarks/offload.py --layers 40 --width 5120 --cap 0   a 13B model, no cap
    python benchmarks/offload.py --smoke                            a tiny model on a CPU: does it work at all

A GPT without biases (LayerNorm, GELU, learned positions, head of its own), bf16 compute with fp32 states, every block
computed again, the loss in chunks, gradients clipped at norm 1 unless --no-clip. Seconds are the median of steps after the first two.

ways: resident  all on the device (the same weights, master and update)       stream   states in host memory (--form, --cpu-share,
      fsdp2     fully_shard with CPUOffloadPolicy and fused AdamW                       --resident, --weights: what is where)
      ceiling   forward and backward alone, nothing updated                   ds2, ds3 DeepSpeed ZeRO offload (DEEPSPEED_PATH)
      plain     all on the device, in a loop of one's own
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
GIB = 2**30


def build(options: argparse.Namespace) -> Any:
    """The model, without values, its blocks computed again."""
    import torch

    sys.path.insert(0, str(HERE / "models"))
    import chunked_gpt

    from foretell.trace.fold.recompute import recompute_block

    with torch.device("meta"):
        model = chunked_gpt.model(options.layers, options.width, options.words, options.tokens)
    for block in model.blocks:
        recompute_block(block, "full")
    return model


def value_of(model: Any, device: Any) -> Any:
    """First values of parameters by name, the same for every way; made on the device, one at a time."""
    import torch

    shapes = {name: p.shape for name, p in model.named_parameters()}
    numbers = {name: number for number, name in enumerate(shapes)}

    def source(name: str) -> Any:
        if len(shapes[name]) == 1:
            return torch.ones(shapes[name], device=device)
        draw = torch.Generator(device).manual_seed(numbers[name])
        return torch.empty(shapes[name], device=device).normal_(0, 0.02, generator=draw)

    return source


def steps(run: Any, count: int, device: Any) -> tuple[list[float], list[float]]:
    """Seconds from one loss to the next, and losses; the host is never more than a step ahead, as in a training loop."""
    import torch

    seconds, losses = [], []
    began, before = time.perf_counter(), None
    for _ in range(count + 1):
        loss = run()
        if device.type == "cuda":
            there = torch.empty((), pin_memory=True)
            there.copy_(loss, non_blocking=True)
            mark = torch.cuda.current_stream().record_event()
        else:
            there, mark = loss, None
        if before is not None:
            if before[1] is not None:
                before[1].synchronize()
            losses.append(float(before[0]))
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
        before = (there, mark)
    return seconds[1:], losses


def engine(options: argparse.Namespace, way: str, device: Any) -> tuple[Any, dict[str, Any]]:
    """A step with foretell's engine."""
    import torch

    from foretell.runtime.offload import forms, layout
    from foretell.runtime.offload.adamw import Offloaded
    from foretell.runtime.train.numbers import clip

    model = build(options)
    named = dict(model.named_parameters())
    blocks = [f"blocks.{number}" for number in range(options.layers)]
    groups = layout.group(list(named), ["words", "places", *blocks, "norm", "head"])
    kept = options.layers if way == "resident" else options.resident
    share = 0.0 if way == "resident" else options.cpu_share
    on_device = {"norm", *blocks[:kept]} | ({"words", "places", "head"} if way == "resident" or options.ends else set())
    away = set(blocks[options.layers - options.weights :]) if way != "resident" else set()
    far = set(blocks[options.layers - options.disk :]) if way != "resident" else set()
    tiers = {path: layout.DEVICE if path in on_device else layout.DISK if path in far else layout.HOST for path in groups}
    units = [
        layout.unit(path, {n: named[n].numel() for n in held}, tiers[path],
                    cpu_share=share, chunk=options.chunk, streamed=path in away)
        for path, held in groups.items()
    ]  # fmt: skip
    began = time.perf_counter()
    form = forms.form(options.form, torch.bfloat16)
    optimizer = Offloaded(named, units, form, device=device, lr=1e-4, slots=options.slots, source=value_of(model, device),
                          hold=int(options.hold * GIB) if options.hold else None, folder=options.scratch)  # fmt: skip
    optimizer.early = options.no_clip
    more = [False]
    optimizer.attach(model, lambda: more[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter() - began
    data = torch.randint(0, options.words, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> Any:
        for left in reversed(range(options.accumulate)):
            more[0] = left > 0
            loss = model(data, data) / options.accumulate
            skip = (~loss.detach().isfinite()).float()
            if not left:
                optimizer.expect(skip)
            loss.backward()
        loss = loss * options.accumulate
        if options.no_clip:
            optimizer.begin(None, skip)
            return loss.detach()
        known = {named[name]: norm for name, norm in optimizer.norms().items()}
        norm = clip.squares(named.values(), dict.fromkeys(named.values(), 1.0), known).sqrt()
        optimizer.begin(torch.clamp(1.0 / (norm + 1e-6), max=1.0), (~norm.isfinite()).float() + skip)
        return loss.detach()

    arena = optimizer.arena
    if arena is not None and device.type == "cuda":
        about = {"link": duplex(arena, device), "huge": huge(arena.nbytes)}
    else:
        about = {}
    return step, {**about, "start_seconds": started, "host_arena": arena.nbytes if arena else 0, "pin_seconds": arena.seconds if arena else 0,
                  "resident_blocks": kept, "streamed_blocks": len(away), "disk_blocks": len(far), "cpu_share": share, "form": form.name}  # fmt: skip


def duplex(arena: Any, device: Any, rounds: int = 4) -> float:
    """GB/s each way between the arena and the device, both ways at once; what is in the arena stays."""
    import torch

    size = min(2**30, arena.nbytes // 2)
    ends = [arena._bytes[:size], arena._bytes[arena.nbytes - size :]]
    here, lanes = [end.to(device) for end in ends], [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        with torch.cuda.stream(lanes[0]):
            here[0].copy_(ends[0], non_blocking=True)
        with torch.cuda.stream(lanes[1]):
            ends[1].copy_(here[1], non_blocking=True)
    torch.cuda.synchronize()
    return rounds * size / 1e9 / (time.perf_counter() - began)


def huge(nbytes: int) -> float:
    """Share of so many bytes that this process has in huge pages."""
    found = [line.split()[1] for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("AnonHugePages")]
    return int(found[0]) * 1024 / nbytes if found else -1.0


def timeline(run: Any, bin_seconds: float = 0.05) -> dict[str, Any]:
    """Of two steps, in pieces of time: bytes up, bytes down, share of the time in which kernels run."""
    import tempfile

    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        recorded = json.loads(path.read_text())["traceEvents"]
    events = [event for event in recorded if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")]
    first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    bins = int((last - first) / 1e6 / bin_seconds) + 1
    rows = {"up": [0.0] * bins, "down": [0.0] * bins, "kernels": [0.0] * bins}
    for event in events:
        kind = "kernels" if event["cat"] == "kernel" else "up" if "HtoD" in event["name"] else "down" if "DtoH" in event["name"] else ""
        if kind:
            each = event["dur"] / 1e6 if kind == "kernels" else event["args"]["bytes"] / 1e9
            rows[kind][int((event["ts"] - first) / 1e6 / bin_seconds)] += each / bin_seconds
    return {"timeline": {name: [round(v, 2) for v in values] for name, values in rows.items()}, "bin": bin_seconds}


def ceiling(options: argparse.Namespace, device: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    model = build(options)
    source = value_of(model, device)
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(source(name).bfloat16()))
        del parameter
    data = torch.randint(0, options.words, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> Any:
        loss = model(data, data)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return step, {}


def plain(options: argparse.Namespace, device: Any) -> tuple[Any, dict[str, Any]]:
    """All on the device, written as anybody would: bf16 weights, fp32 master weights in torch's fused AdamW."""
    import torch

    model = build(options)
    source = value_of(model, device)
    pairs = []
    for name, _ in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        master = torch.nn.Parameter(source(name))
        setattr(model.get_submodule(owner), own, torch.nn.Parameter(master.detach().bfloat16()))
        pairs.append((model.get_parameter(name), master))
    optimizer = torch.optim.AdamW([master for _, master in pairs], lr=1e-4, weight_decay=1e-2, fused=True)
    data = torch.randint(0, options.words, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> Any:
        loss = model(data, data)
        loss.backward()
        if not options.no_clip:
            norms = torch._foreach_norm([p.grad for p, _ in pairs], 2, dtype=torch.float32)
            factor = torch.clamp(1.0 / (torch.stack(norms).square().sum().sqrt() + 1e-6), max=1.0)
        for parameter, master in pairs:
            master.grad = parameter.grad.float() if options.no_clip else torch.mul(parameter.grad, factor.view(1), out=torch.empty_like(master))
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in pairs], [master for _, master in pairs])
        for _, master in pairs:
            master.grad = None
        return loss.detach()

    return step, {}


def one(way: str, options: argparse.Namespace) -> dict[str, Any]:
    import resource

    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(options.deterministic)
    if options.cap and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * GIB / total)
    if way in ("fsdp2", "ds2", "ds3", "superoffload"):
        import offload_others

        run, about = offload_others.WAYS[way](options, device, build(options), value_of)
    else:
        own = {"ceiling": ceiling, "plain": plain}
        run, about = own[way](options, device) if way in own else engine(options, way, device)
    _, losses = steps(run, 1, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    more, after = steps(run, options.steps, device)
    ordered = sorted(more)
    found = {
        "cap": options.cap, "batch": options.batch, "accumulate": options.accumulate, "clip": not options.no_clip,
        "way": way, "seconds": ordered[len(ordered) // 2], "all": more, "losses": [*losses, *after],
        "tokens_a_second": options.batch * options.accumulate * options.tokens / ordered[len(ordered) // 2],
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **about,
    }  # fmt: skip
    if options.timeline:
        found |= timeline(run)
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()
        found |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
                  "retries": stats.get("num_alloc_retries", 0)}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["resident", "stream", "stream:form=split,cpu_share=0.3", "fsdp2", "ds2", "ds3"])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--words", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB of device memory; 0: all of it (resident, ceiling: always all)")
    parser.add_argument("--resident", type=int, default=0, help="blocks whose states stay on the device")
    parser.add_argument("--weights", type=int, default=0, help="blocks whose weights are in host memory too, from the last on")
    parser.add_argument("--ends", type=int, default=0, help="1: states of embeddings and head stay on the device")
    parser.add_argument("--disk", type=int, default=0, help="blocks whose states are on disk, from the last on, in --scratch")
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--cpu-share", type=float, default=0.0)
    parser.add_argument("--form", default="master", choices=("master", "split", "half", "int8", "split-int8"))
    parser.add_argument("--chunk", type=int, default=16 * 2**20)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--hold", type=float, default=0, help="GiB of gradients that may wait for their update, without clipping")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits every time, to compare losses")
    parser.add_argument("--timeline", type=int, default=0, help="1: copies and kernels of two more steps, in pieces of 50 ms")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--timeout", type=float, default=200)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "offload.jsonl")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.layers, options.width, options.words, options.batch, options.tokens = 2, 128, 256, 2, 32
    if options.one:
        way, _, more = options.one.partition(":")
        for key, _, value in (pair.partition("=") for pair in more.split(",") if pair):
            setattr(options, key, type(getattr(options, key))(float(value)) if key != "form" else value)
        print("ROW " + json.dumps(one(way, options)), flush=True)
        os._exit(0)
    from memory import append, machine

    about = {**machine(), "layers": options.layers, "width": options.width, "batch": options.batch, "tokens": options.tokens,
             "clip": not options.no_clip}  # fmt: skip
    path = f"{HERE}{os.pathsep}{os.environ.get('DEEPSPEED_PATH', '')}"
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONPATH": path, "RANK": "0", "LOCAL_RANK": "0",
           "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "DS_PIN_MEMORY_BACKEND": "native",
           "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # fmt: skip
    for way in options.ways:
        began = time.perf_counter()
        whole = ["--cap", "0"] if way.partition(":")[0] in ("resident", "ceiling", "plain") else []
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--one", way, *sys.argv[1:], *whole], env=env, capture_output=True, text=True, timeout=options.timeout
            )
            rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
            row = json.loads(rows[0][4:]) if rows else {"way": way, "error": (done.stderr or done.stdout)[-1500:]}
        except subprocess.TimeoutExpired:
            row = {"way": way, "error": f"took longer than {options.timeout:.0f} s"}
        row = {**about, "cap": 0.0 if whole else options.cap, "asked": way, **row, "process_seconds": round(time.perf_counter() - began, 1)}
        append(options.out, row)
        print(told(row), flush=True)


def told(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['asked']} {row['error'][-700:]}"
    gib = {name: f"{row[name] / GIB:.1f}" for name in ("allocated", "reserved", "host", "host_arena") if name in row}
    return (f"{row['asked']} clip {row['clip']} {row['seconds']:.3f} s a step, {row['tokens_a_second']:.0f} tokens/s, cap {row['cap']:g} GiB {gib}, "
            f"start {row.get('start_seconds', 0):.1f} s, pin {row.get('pin_seconds', 0):.1f} s, retries {row.get('retries', 0)}, "
            f"losses {row['losses'][0]:.5f} … {row['losses'][-1]:.5f} "
            f"{[round(s, 3) for s in row['all']]} in {row['process_seconds']} s")  # fmt: skip


if __name__ == "__main__":
    main()
