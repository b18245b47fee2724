"""Loads on the engine by the wall clock, and the same by the forecast: times to the first token and between tokens, tokens a second.

    python benchmarks/serve_load.py measure --out rows.jsonl            on the GPU, 30 s of arrivals each; rows that are there are kept
    python benchmarks/serve_load.py predict --on H200 --out predicted.json
    python benchmarks/serve_load.py compare predicted.json rows.jsonl

Requests come to the engine in its own process, at the times that the load's seed draws: no HTTP between. `--configs FILE` takes
other cases: a list of [shape, load].
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from models.serve_shapes import SHAPES, build  # noqa: E402

CASES = [
    ("llama3-8b", "rate=8, in=512±256, out=128±64"), ("llama3-8b", "rate=14, in=512±256, out=128±64"),
    ("llama3-8b", "rate=20, in=512±256, out=128±64"),
    ("llama3-8b", "rate=4, in=1024±512, out=256±128"), ("llama3-8b", "rate=8, in=1024±512, out=256±128"),
    ("llama3-8b", "users=32, in=512, out=128"),
    ("llama-1b", "rate=20, in=512±256, out=128±64"), ("llama-1b", "rate=50, in=512±256, out=128±64"), ("llama-1b", "users=64, in=1024, out=256"),
    ("qwen2-14b", "rate=4, in=512±256, out=128±64"), ("qwen2-14b", "rate=8, in=512±256, out=128±64"),
]  # fmt: skip
RUNNING, TOKENS, PAGES, SECONDS = 128, 512, 16384, 30.0
SHARES = (0.5, 0.95)


def cases(path: Path | None) -> list[tuple[str, str]]:
    return CASES if path is None else [(str(shape), str(load)) for shape, load in json.loads(path.read_text())]


def told(first: list[float], each: list[float], tokens: int, seconds: float) -> dict[str, float]:
    from foretell.simulate.serving.records import quantile

    found = {"output_tok_s": round(tokens / seconds, 1)}
    for share in SHARES:
        found[f"ttft_p{round(share * 100)}_ms"] = round(quantile(first, share) * 1e3, 2)
        found[f"tpot_p{round(share * 100)}_ms"] = round(quantile(each, share) * 1e3, 3)
    return found


def run(engine: Any, load: Any, words: int) -> dict[str, float]:
    """By the wall clock."""
    from foretell.serve.sampling import Sampling

    draw = random.Random(1)
    coming = load.requests(SECONDS)
    pending = next(coming, None)
    came: dict[Any, float] = {}
    first: dict[Any, float] = {}
    last: dict[Any, float] = {}
    begun = time.perf_counter()

    def ask(at: float, request: Any) -> None:
        made = engine.submit([draw.randrange(words) for _ in range(request.prompt)], Sampling(most=request.output))
        came[made] = at

    for _ in range(load.users):
        ask(0.0, pending)
        pending = next(coming)
    while True:
        now = time.perf_counter() - begun
        while not load.users and pending is not None and pending.at <= now:
            ask(pending.at, pending)
            pending = next(coming, None)
        if engine.idle:
            if load.users or pending is None:
                break
            time.sleep(max(0.0, pending.at - (time.perf_counter() - begun)))
            continue
        for event in engine.step():
            at = time.perf_counter() - begun
            first.setdefault(event.generation, at)
            last[event.generation] = at
            if event.ended and load.users and at < SECONDS:
                ask(at, pending)
                pending = next(coming)
    each = [(last[one] - first[one]) / (len(one.tokens) - 1) for one in came if len(one.tokens) > 1]
    return told([first[one] - came[one] for one in came], each, sum(len(one.tokens) for one in came), max(last.values()))


def measure(out: Path, asked: list[tuple[str, str]]) -> None:
    import torch

    from foretell.serve.engine import ServingEngine, StepLimits
    from foretell.serve.sampling import Sampling
    from foretell.simulate.serving.load import load_of

    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for shape in SHAPES:
        mine = [load for one, load in asked if one == shape and not any((row["shape"], row["load"]) == (shape, load) for row in known)]
        if not mine:
            continue
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = build(shape, 8192)[0].eval()
        torch.set_default_dtype(torch.float32)
        engine = ServingEngine(model, pages=PAGES, limits=StepLimits(running=RUNNING, tokens=TOKENS), share=False)
        words = model.config.vocab_size
        engine.generate([[7] * many for many in (5, 300, 700, 1500)], Sampling(most=4))
        for text in mine:
            gc.collect()
            gc.disable()
            found = run(engine, load_of(text), words)
            gc.enable()
            about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "device": torch.cuda.get_device_name()}
            with out.open("a") as file:
                file.write(json.dumps({"shape": shape, "load": text, **found, **about}) + "\n")
            print(shape, text, found, engine.runner.notes, flush=True)
        engine.close()
        del engine, model
        gc.collect()
        torch.cuda.empty_cache()


def predict(hardware: str, out: Path, asked: list[tuple[str, str]]) -> None:
    from foretell.api.serving.forecast import ServingAsked, forecast
    from foretell.simulate.serving.load import load_of

    rows = []
    for shape, text in asked:
        found = forecast(ServingAsked(
            model=f"{HERE}/models/serve_shapes.py:build", hardware=hardware, overrides={"shape": shape, "context": 8192}, pages=PAGES,
            running=RUNNING, tokens=TOKENS, load=load_of(text), seconds=SECONDS,
        )).load  # fmt: skip
        assert found is not None
        row: dict[str, Any] = {"shape": shape, "load": text, "output_tok_s": round(found.output_tokens_per_second, 1)}
        for share in SHARES:
            row[f"ttft_p{round(share * 100)}_ms"] = round(found.ttft_seconds[f"p{round(share * 100)}"] * 1e3, 2)
            row[f"tpot_p{round(share * 100)}_ms"] = round(found.tpot_seconds[f"p{round(share * 100)}"] * 1e3, 3)
        rows.append(row)
        print(row, flush=True)
    out.write_text(json.dumps({"on": hardware, "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows}, indent=1) + "\n")


def compare(sealed: Path, measured: Path) -> None:
    known = {(row["shape"], row["load"]): row for row in json.loads(sealed.read_text())["rows"]}
    offs: dict[str, list[float]] = {}
    for line in measured.read_text().splitlines():
        row = json.loads(line)
        found = known.get((row["shape"], row["load"]))
        if found is not None:
            print(f"{row['shape']} {row['load']}")
            for name in (name for name in found if name.endswith(("_ms", "_s"))):
                off = found[name] / row[name] - 1
                offs.setdefault(name, []).append(abs(off))
                print(f"    {name:>13}  predicted {found[name]:10.2f}  measured {row[name]:10.2f}  {off:+.1%}")
    for name, some in offs.items():
        print(f"{name}: {len(some)} runs, median {statistics.median(some):.1%}, worst {max(some):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "compare"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--on", default="H200")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.out, cases(asked.configs))
    elif asked.what == "predict":
        predict(asked.on, asked.out or Path("serve_load.json"), cases(asked.configs))
    else:
        compare(*asked.files)


if __name__ == "__main__":
    main()
