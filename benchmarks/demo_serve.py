"""Serving from end to end on this machine, small: train a byte-level GPT, measure steps, foretell a load, serve it, compare.

    python benchmarks/demo_serve.py              about three minutes on two cores (make demo-serve)
    python benchmarks/demo_serve.py --train 5 --requests 40

The forecast is made before the load is sent: the engine's own scheduler on step times that were measured for other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from foretell import zoo  # noqa: E402
from foretell.lower.serving import StepShape  # noqa: E402
from foretell.serve.bench.client import endpoint_of  # noqa: E402
from foretell.serve.bench.figures import BenchRun, run_of  # noqa: E402
from foretell.serve.bench.sweep import BenchAsked, sent  # noqa: E402
from foretell.serve.engine import ServingEngine  # noqa: E402
from foretell.serve.sampling import Sampling  # noqa: E402
from foretell.simulate.serving.load import Load, load_of  # noqa: E402
from foretell.simulate.serving.pages import Pages  # noqa: E402
from foretell.simulate.serving.records import Limit  # noqa: E402
from foretell.simulate.serving.run import capacity, shape_of, simulated  # noqa: E402
from foretell.simulate.serving.scheduler import Scheduler, StepLimits  # noqa: E402

SIZES = {"layers": 4, "dim": 128, "heads": 4, "vocab_size": 256, "context": 256}
PAGES, PAGE, LIMITS = 256, 16, StepLimits(running=24, tokens=128)
LOAD = "rate=1, in=40..120, out=16..64"
SHARE = 0.6
"""Of the capacity foretold: nearer to it, waiting times are ill-conditioned."""
MOST_SECONDS = 75.0
"""Of arrivals: a slow machine gets fewer requests."""
SLO = Limit(ttft=0.5, tpot=0.1)


def tell(name: str, began: float, text: str) -> None:
    print(f"{name:<10}{time.perf_counter() - began:6.1f} s  {text}", flush=True)


# ---------------------------------------------------------------------- a model


def trained(seconds: float) -> tuple[Any, float, int]:
    """A GPT of 0.9 M parameters on the bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    model = zoo.load(zoo.get("gpt2")).build(**{**zoo.get("gpt2").config, **SIZES}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    width, until, steps, loss = SIZES["context"], time.perf_counter() + seconds, 0, torch.zeros(())
    while time.perf_counter() < until:
        places = torch.randint(len(text) - width - 1, (12,))
        batch = torch.stack([text[place : place + width + 1] for place in places.tolist()]).long()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    torch.set_num_threads(1)
    return model.eval(), loss.item(), steps


def written(model: Any, path: Path) -> None:
    """As a safetensors file."""
    header, parts, at = {}, [], 0
    for name, one in model.named_parameters():
        data = one.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(one.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


# ---------------------------------------------------------------------- this machine


def features(shape: StepShape) -> list[float]:
    chunked = [(start, count) for start, count in shape.chunks]
    tokens = shape.generating + sum(count for _, count in chunked)
    read = shape.attended + sum(start + count for start, count in chunked)
    pairs = sum(count * (start + count) for start, count in chunked)
    return [1.0, tokens, shape.generating + len(chunked), read, pairs, shape.samples]


def law(model: Any) -> tuple[Any, float]:
    """Seconds of a step by its shape, fitted to steps of other requests than those that will come; and how far off in the median."""
    draw, rows, seconds = random.Random("steps"), [], []
    engine = ServingEngine(model, pages=PAGES, size=PAGE, limits=LIMITS, share=False)
    run = engine.runner.launch

    def launch(step: Any, *more: Any) -> Any:
        began = time.perf_counter()
        found = run(step, *more)
        rows.append(features(shape_of(step)))
        seconds.append(time.perf_counter() - began)
        return found

    engine.runner.launch = launch  # type: ignore[method-assign]
    for count in (1, 2, 4, 8, 16, 24, 1, 12):
        prompts = [[draw.randrange(256) for _ in range(draw.randrange(8, 160))] for _ in range(count)]
        engine.generate(prompts, [Sampling(most=draw.randrange(8, 60)) for _ in prompts])
    engine.close()
    x, y = np.array(rows), np.array(seconds)
    weights, kept = 1 / y, list(range(x.shape[1]))
    while True:  # nothing makes a step quicker
        found = np.linalg.lstsq(x[:, kept] * weights[:, None], np.ones(len(y)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    factors = np.zeros(x.shape[1])
    factors[kept] = found
    off = float(np.median(np.abs(x @ factors / y - 1)))
    return (lambda shape: float(np.dot(factors, features(shape)))), off


class Server:
    """`foretell serve` in a process of its own."""

    def __init__(self, weights: Path) -> None:
        command = [sys.executable, "-m", "foretell", "serve", "gpt2", "--port", "0", "--device", "cpu", "--json", "--init-from", str(weights),
                   "--pages", str(PAGES), "--page", str(PAGE), "--running", str(LIMITS.running), "--tokens", str(LIMITS.tokens),
                   "--no-share"]  # fmt: skip
        for name, value in SIZES.items():
            command += ["--set", f"{name}={value}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.port = json.loads("".join(iter(self.process.stdout.readline, "}\n")) + "}")["serve"]["port"]

    def measured(self, load: Load, seconds: float) -> BenchRun:
        asked = BenchAsked(endpoint=endpoint_of(f"http://127.0.0.1:{self.port}/v1"), load=load, seconds=seconds)
        return run_of(asyncio.run(sent(asked, "gpt2", load)), SLO, load.seed, seconds if load.kind == "rate" else 0.0)

    def sample(self, prompt: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 48, "temperature": 0}))
        return str(json.loads(connection.getresponse().read())["choices"][0]["text"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def around(server: Server, seconds: Any) -> tuple[float, float, float]:
    """What a token and a step cost beside the model (HTTP, the scheduler, threads), and a request before its first token: from users
    who ask for other lengths than the load."""
    points = []
    for users in (1, 4, 16):
        run = server.measured(load_of(f"users={users}, in=30, out=80, seed=7"), 2.0)
        shape = StepShape(users, users * 70, (), users)
        points.append((users, max(0.0, run.gap_seconds["p50"] - seconds(shape)), run.ttft_seconds["p50"]))
    slope, base = np.polyfit([users for users, _, _ in points], [more for _, more, _ in points], 1)
    slope, base = max(0.0, float(slope)), max(0.0, float(base))
    first = points[0][2] - seconds(StepShape(0, 0, ((0, 30),), 1)) - base - slope
    return base, slope, max(0.0, first)


# ---------------------------------------------------------------------- predicted beside measured


def compared(predicted: Any, run: BenchRun, first: float) -> list[tuple[str, float, float, str]]:
    rows = [("requests answered", float(len(predicted.answers)), float(run.answered), "")]
    rows += [(f"first token {name}", predicted.ttft(share) + first, run.ttft_seconds[name], "ms") for name, share in (("p50", 0.5), ("p95", 0.95))]
    rows += [(f"a token after it {name}", predicted.tpot(share), run.tpot_seconds[name], "ms") for name, share in (("p50", 0.5), ("p95", 0.95))]
    tokens = sum(one.output for one in predicted.answers)
    return [*rows, ("tokens a second", tokens / max(predicted.seconds, run.seconds), run.output_tokens_per_second, "/s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None, help="append a row to this file")
    asked = parser.parse_args()
    began = time.perf_counter()
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > cores / 2:
        print(f"other programs use this machine (load {busy:.1f} on {cores} cores): what is foretold from measured steps will not hold")
    model, loss, steps = trained(asked.train)
    size = sum(one.numel() for one in model.parameters()) / 1e6
    tell("train", began, f"a GPT of {size:.1f} M parameters, bytes as tokens: {steps} steps, loss {loss:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        written(model, Path(folder) / "model.safetensors")
        server = Server(Path(folder) / "model.safetensors")
        try:
            tell("serve", began, f"ready; after 'def main(' it says {server.sample('def main(')!r:.60}")
            seconds, off = law(model)
            base, slope, first = around(server, seconds)
            beside = f"beside the model {base * 1e3:.2f} ms a step, {slope * 1e3:.2f} ms a token"
            tell("measure", began, f"steps by their shape ({off:.0%} off in the median); {beside}")

            def whole(shape: StepShape) -> float:
                return float(seconds(shape)) + base + slope * shape.samples

            def made() -> Scheduler:
                return Scheduler(Pages(PAGES, PAGE), LIMITS)

            found = capacity(load_of(LOAD), made, whole, SLO, 60.0)
            if found is None:
                raise SystemExit("not even single requests keep the limits here")
            rate = round(SHARE * found[0], 2)
            load, duration = replace(load_of(LOAD), amount=rate, seed=11), min(asked.requests / rate, MOST_SECONDS)
            predicted = simulated(load, made(), whole, duration)
            within = f"capacity {found[0]:.3g} requests a second within {SLO.ttft} s and {SLO.tpot} s a token"
            tell("forecast", began, f"{within}; {len(predicted.answers)} will come at {rate:.3g}")
            run = server.measured(load, duration)
            tell("load", began, f"{run.answered} answered, {run.failed + run.busy} not")
        finally:
            server.close()
    rows = compared(predicted, run, first)
    print(f"{'':<28}predicted  measured")
    for name, one, other, unit in rows:
        scale = 1e3 if unit == "ms" else 1.0
        print(f"{name:<28}{one * scale:9.3g}  {other * scale:8.3g} {unit:<3}{(one / other - 1) if other else 0:+8.0%}")
    if asked.out is not None:
        row = {"capacity": found[0], "rate": rate, "off_of_steps": off, "loss": loss, "steps": steps, "seconds": time.perf_counter() - began,
               "load_before": busy, "rows": {name: [one, other] for name, one, other, _ in rows}, "cores": os.cpu_count(), "torch": torch.__version__,
               "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        with asked.out.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
    tell("done", began, "")
    raise SystemExit(run.answered != run.requests)


if __name__ == "__main__":
    main()
