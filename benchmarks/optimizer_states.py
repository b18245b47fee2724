"""AdamW's moments in 8 and 4 bits: what they lose in training, and how fast their update is.

    python benchmarks/optimizer_states.py loss               on a CPU: a small GPT, 400 steps on the text of docs/, fp32, int8 and int4
    python benchmarks/optimizer_states.py summary            of the rows of `loss`
    python benchmarks/optimizer_states.py speed              on a CUDA GPU: a 1B model's parameters, beside AdamW(fused=True) and others
    python benchmarks/optimizer_states.py speed --sweep      the kernel's elements of a program and warps
    python benchmarks/optimizer_states.py speed --small      few parameters; on a CPU where there is no GPU, to see that the script works

Rows go to results/optimizer_states.jsonl (`--out`). `loss`: the mean of the last 50 losses, and by how much that of codes differs from
that of fp32 with the same seed: the same first weights, the same samples. What is rounded sends a training another way, to a better or
a worse place, so bars are for the mean over seeds. `speed`: every optimizer updates the same parameters in turn; `step_ms` is that of
updates one after another, `device_ms` what the device takes where the host was ahead. `of_fused` is the median over rounds of how many
times as fast as AdamW(fused=True) on fp32 weights an update of the round is; `of_its_own`: on weights of this format.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from foretell.trace.moments import rows as held  # noqa: E402
from foretell.trace.moments.optimizer import CodedAdamW, tables  # noqa: E402
from foretell.trace.moments.update import coded_adamw_  # noqa: E402

ROWS = HERE / "results" / "optimizer_states.jsonl"
FORMATS = ("fp32", "int8", "int4")
STEPS, LAST = 400, 50
SMALL = {"vocab_size": 256, "context": 64, "layers": 3, "dim": 128, "heads": 4}
BATCH, PEAK, CLIP, DECAY = 8, 2e-3, 1.0, 0.1
BARS = {"int8": 0.002, "int4": 0.01}
LIMIT_SECONDS = 60.0
"""Of all that is timed; compiling comes before it."""
OTHERS_SECONDS = 40
"""What another library may take to be ready."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "summary", "speed"))
    parser.add_argument("--out", type=Path, default=ROWS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.what == "loss":
        found = losses(options.seeds, options.steps)
    elif options.what == "summary":
        found = summary(options.out)
    else:
        found = swept() if options.sweep else speeds(options.rounds, options.small)
    here = about()
    for row in found:
        print(json.dumps(row), flush=True)
        if not options.small:
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**here, **row}) + "\n")


def about() -> dict[str, Any]:
    """Where, when and with what."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    triton = importlib.util.find_spec("triton") and importlib.import_module("triton").__version__
    return {
        "date": datetime.date.today().isoformat(), "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__, "triton": triton, "python": platform.python_version(), "commit": os.environ.get("COMMIT") or commit or "unknown",
    }  # fmt: skip


# ---------------------------------------------------------------- loss


def losses(seeds: list[int], steps: int) -> Iterator[dict[str, Any]]:
    from foretell.runtime.data.text import read_corpus

    corpus = read_corpus(HERE.parent / "docs")
    text = torch.from_numpy(corpus.tokens.copy()).long()
    same = {"what": "loss", "model": SMALL, "batch": BATCH, "steps": steps, "lr": PEAK, "clip": CLIP, "decay": DECAY, "text": corpus.digest}
    for seed in seeds:
        exact = None
        for name in FORMATS:
            began = time.perf_counter()
            seen = trained(name, seed, steps, text)
            mean = statistics.fmean(seen[-LAST:])
            exact = mean if exact is None else exact
            yield {**same, "states": name, "seed": seed, "loss": mean, "off": mean / exact - 1, "last": seen[-1],
                   "seconds": time.perf_counter() - began}  # fmt: skip


def summary(place: Path) -> Iterator[dict[str, Any]]:
    """Of the newest rows that belong together: those of one commit and one text."""
    rows = [row for line in place.read_text().splitlines() if (row := json.loads(line))["what"] == "loss"]
    last = {key: rows[-1][key] for key in ("commit", "text", "steps", "torch")}
    for name, bar in BARS.items():
        off = {row["seed"]: row["off"] for row in rows if row["states"] == name and last.items() <= row.items()}
        mean = statistics.fmean(off.values())
        yield {**last, "what": "summary", "states": name, "seeds": sorted(off), "mean_off": mean, "worst_off": max(off.values(), key=abs),
               "spread": statistics.stdev(off.values()) if len(off) > 1 else None, "bar": bar, "within": abs(mean) <= bar}  # fmt: skip


def trained(states: str, seed: int, steps: int, text: Tensor) -> list[float]:
    """Losses of a training from its seed's weights and samples."""
    from foretell.runtime.train.schedule import Schedule
    from foretell.zoo.language import gpt

    torch.manual_seed(seed)
    model = gpt.build(**SMALL)
    draw = torch.Generator().manual_seed(1000 + seed)
    settings: dict[str, Any] = {"lr": PEAK, "weight_decay": DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    if states != "fp32":
        optimizer = CodedAdamW(model.parameters(), states, tables(model), **settings)
    rate = Schedule(peak=PEAK, steps=steps, warmup=steps // 10)
    length, seen = SMALL["context"], []
    for step in range(steps):
        at = torch.randint(len(text) - length - 1, (BATCH,), generator=draw)
        sample = torch.stack([text[begin : begin + length + 1] for begin in at])
        loss = gpt.loss(model(sample[:, :-1]), {"targets": sample[:, 1:]})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


# ---------------------------------------------------------------- speed


def shapes(small: bool) -> list[tuple[int, ...]]:
    """Llama 3.2 1B without its embedding, whose moments no format changes: 973 million elements."""
    layers, dim, narrow, wide = (2, 256, 64, 1024) if small else (16, 2048, 512, 8192)
    block = [(dim,), (dim, dim), (narrow, dim), (narrow, dim), (dim, dim), (dim,), (wide, dim), (wide, dim), (dim, wide)]
    return [*block * layers, (dim,)]


def parameters(dtype: torch.dtype, small: bool, device: str) -> list[torch.nn.Parameter]:
    made = []
    for shape in shapes(small):
        one = torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        one.grad = torch.randn(shape, device=device).mul_(1e-3).to(dtype)
        made.append(one)
    return made


def speeds(rounds: int, small: bool) -> Iterator[dict[str, Any]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    same = {"what": "speed", "elements": sum(torch.Size(one).numel() for one in shapes(small)), "tensors": len(shapes(small))}
    if device == "cuda":
        yield {**same, "what": "bits", "equal": bits_equal()}
    timed: dict[str, dict[str, Any]] = {}
    for dtype in ("fp32", "bf16"):
        weights = parameters(torch.float32 if dtype == "fp32" else torch.bfloat16, small, device)
        for name, made in {"fused": _fused, "int8": _coded("int8"), "int4": _coded("int4")}.items():
            timed[f"{dtype} {name}"] = _ready(made, weights)
        for name, made in others().items():
            with _at_most(OTHERS_SECONDS):
                try:
                    timed[f"{dtype} {name}"] = _ready(made, weights)
                except Exception as error:
                    yield {**same, "case": f"{dtype} {name}", "error": f"{type(error).__name__}: {error}"[:300]}
    began = time.perf_counter()
    for number in range(rounds):
        order = list(timed.values())
        for one in order[number % len(order) :] + order[: number % len(order)]:
            _time(one, device)
        if time.perf_counter() - began > LIMIT_SECONDS:
            break
    for case, one in timed.items():
        base, own = timed["fp32 fused"], timed[f"{case.partition(' ')[0]} fused"]
        yield {
            **same, "case": case, "rounds": len(one["step_ms"]), "state_bytes": one["bytes"],
            **{key: round(statistics.median(one[key]), 4) for key in ("step_ms", "device_ms", "host_ms")},
            **{f"of_{name}": {key: round(ratio(other, one, key), 4) for key in ("step_ms", "device_ms")}
               for name, other in (("fused", base), ("its_own", own))},
        }  # fmt: skip


def ratio(base: dict[str, Any], one: dict[str, Any], key: str) -> float:
    """How many times as fast, in the median of rounds."""
    return statistics.median(a / b for a, b in zip(base[key], one[key], strict=True))


def _fused(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, fused=True)


def _coded(state_format: str) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    return lambda weights: CodedAdamW(weights, state_format)


def others() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """Those of other libraries that are installed."""
    found: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {}
    for library, module, name in (("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"), ("torchao", "torchao.optim", "AdamW8bit"),
                                  ("torchao", "torchao.optim", "AdamW4bit")):  # fmt: skip
        try:
            found[f"{library} {name}"] = getattr(importlib.import_module(module), name)
        except Exception:
            continue  # not installed, or not for this machine
    return found


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not ready in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _ready(made: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], weights: list[torch.nn.Parameter]) -> dict[str, Any]:
    """An optimizer that has made its states and compiled its kernels."""
    optimizer = made(weights)
    for _ in range(3):
        optimizer.step()
    _wait()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {"step": optimizer.step, "bytes": sum(one.nbytes for one in kept), "step_ms": [], "device_ms": [], "host_ms": []}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _time(one: dict[str, Any], device: str, in_a_row: int = 4) -> None:
    """Updates one after another; and one that was enqueued while the device was held busy."""
    step = one["step"]
    if device == "cpu":
        began = time.perf_counter()
        step()
        for key in ("step_ms", "device_ms", "host_ms"):
            one[key].append((time.perf_counter() - began) * 1e3)
        return
    for key, count in (("step_ms", in_a_row), ("device_ms", 1)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step()  # into caches, and the host is past its first call
        torch.cuda.synchronize()
        if key == "device_ms":
            torch.cuda._sleep(60_000_000)  # cycles, some 30 ms
        begin.record()
        began = time.perf_counter()
        for _ in range(count):
            step()
        host = (time.perf_counter() - began) * 1e3
        end.record()
        torch.cuda.synchronize()
        one[key].append(begin.elapsed_time(end) / count)
    one["host_ms"].append(host)


def bits_equal() -> bool:
    """Whether a few updates give the weights, codes and scales of a CPU, to the bit."""
    ends = []
    for device in ("cpu", "cuda"):
        draw, found = torch.Generator().manual_seed(7), []
        for state_format in ("int8", "int4"):
            for shape, dtype in (((64, 1024), torch.bfloat16), ((33, 300), torch.float32), ((70, 71), torch.float32)):
                weight = torch.randn(shape, generator=draw).to(dtype).to(device)
                kept = [torch.zeros(size, dtype=getattr(torch, name), device=device) for size, name in held.shapes(shape, state_format).values()]
                for step in range(3):
                    grad = torch.randn(shape, generator=draw).pow(3).to(dtype).to(device)
                    count = torch.tensor(step + 1.0, device=device)
                    coded_adamw_([weight], [grad], *([one] for one in kept), [count], None, 1e-2, 0.9, 0.999, 1e-8, 0.1, True)
                found += [weight.cpu(), *(one.cpu() for one in kept)]
        ends.append(found)
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def swept() -> Iterator[dict[str, Any]]:
    """The device's time of an update for elements of a program and warps, in bf16 and fp32."""
    from foretell.trace.moments import kernel

    began = time.perf_counter()
    for dtype in (torch.float32, torch.bfloat16):
        weights = parameters(dtype, False, "cuda")[: 9 * 4]  # four layers
        for state_format in ("int8", "int4"):
            for kernel.AT_ONCE in (1024, 2048, 4096):
                for kernel.WARPS in (4, 8):
                    one = _ready(_coded(state_format), weights)
                    for _ in range(5):
                        _time(one, "cuda", 1)
                    yield {
                        "what": "sweep", "weights": str(dtype).removeprefix("torch."), "states": state_format, "at_once": kernel.AT_ONCE,
                        "warps": kernel.WARPS, "device_ms": round(statistics.median(one["device_ms"]), 4),
                        "elements": sum(w.numel() for w in weights), "seconds": round(time.perf_counter() - began, 1),
                    }  # fmt: skip


if __name__ == "__main__":
    main()
