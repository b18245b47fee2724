"""Steps of the engine, predicted without a GPU and measured on one.

    python benchmarks/serve_steps.py predict --on H200 --out predicted.json
    python benchmarks/serve_steps.py measure --out rows.jsonl              on the GPU; rows that are there are not measured again
    python benchmarks/serve_steps.py compare sealed/serve_steps.json rows.jsonl [--to results/serve_steps.jsonl]

A case is a shape (models/serve_shapes.py), so many sequences that generate at so many tokens each, or a piece of a prompt, in
bf16, with compiled layers and CUDA graphs as `foretell serve` has them. Pages are filled with nothing: what they hold takes no time.
`--configs FILE` takes other cases: a list of [shape, sequences, tokens each] or [shape, 0, tokens of a prompt].
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from models.serve_shapes import SHAPES, build  # noqa: E402

Case = tuple[str, int, int]
DECODE = {
    "qwen2-0.5b": ((1, 128), (1, 32000), (8, 4096), (64, 512), (128, 2048), (256, 256)),
    "llama-1b": ((1, 512), (4, 8192), (16, 128), (32, 2048), (128, 512), (256, 1024)),
    "llama-3b": ((1, 2048), (8, 512), (32, 1024), (64, 4096), (128, 128)),
    "llama2-7b": ((1, 512), (8, 2048), (32, 512), (64, 1024), (128, 256)),
    "llama3-8b": ((1, 512), (1, 16384), (2, 1024), (8, 2048), (16, 1024), (32, 512), (64, 2048), (128, 512), (256, 1024)),
    "qwen2-14b": ((1, 512), (8, 8192), (32, 1024), (64, 512), (128, 2048)),
    "qwen2-32b": ((1, 1024), (8, 512), (16, 4096), (32, 2048), (64, 512)),
}
PROMPTS = {
    "qwen2-0.5b": (128, 1024, 8192), "llama-1b": (256, 2048, 8192), "llama-3b": (128, 1024, 4096), "llama2-7b": (128, 512, 2048),
    "llama3-8b": (128, 512, 1024, 2048, 8192), "qwen2-14b": (256, 1024, 8192), "qwen2-32b": (256, 512, 2048),
}  # fmt: skip
RUNNING, TOKENS = 256, 8192
START, EACH = {"qwen2-14b": 40, "qwen2-32b": 60}, 1.5
"""Seconds to build a model and capture its steps, if not 25; and of a case: about 6 minutes of an H200 in all."""
ROOM = 100e9
"""Bytes of weights and pages together, at most."""


def cases(path: Path | None) -> list[Case]:
    if path is not None:
        return [(str(shape), int(many), int(tokens)) for shape, many, tokens in json.loads(path.read_text())]
    found = [(shape, many, tokens) for shape, some in DECODE.items() for many, tokens in some]
    return found + [(shape, 0, tokens) for shape, some in PROMPTS.items() for tokens in some]


def predict(hardware: str, out: Path, asked: list[Case]) -> None:
    from foretell.api.serving.forecast import ServingAsked, served_model
    from foretell.lower.serving import StepShape

    rows = []
    for shape in SHAPES:
        mine = [case for case in asked if case[0] == shape]
        if not mine:
            continue
        question = ServingAsked(
            model=f"{HERE}/models/serve_shapes.py:build", hardware=hardware, overrides={"shape": shape}, pages=4096, running=RUNNING, tokens=TOKENS
        )
        costs = served_model(question).costs(question.layout)
        for _, many, tokens in mine:
            step = StepShape(many, many * tokens, (), many) if many else StepShape(0, 0, ((0, tokens),), 1)
            rows.append({"shape": shape, "many": many, "tokens": tokens, "predicted_ms": round(costs.seconds(step) * 1e3, 4)})
            print(rows[-1], flush=True)
    seconds = sum(START.get(shape, 25) for shape in dict.fromkeys(case[0] for case in asked)) + EACH * len(rows)
    print(f"{len(rows)} cases, about {seconds:.0f} s on the device", flush=True)
    about = {"on": hardware, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def measure(out: Path, asked: list[Case]) -> None:
    import torch

    from foretell.serve.graphs import GraphRunner

    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for shape in SHAPES:
        mine = [case for case in asked if case[0] == shape and not any((row["shape"], row["many"], row["tokens"]) == case for row in known)]
        if not mine:
            continue
        begun = time.monotonic()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = build(shape)[0].eval()
        torch.set_default_dtype(torch.float32)
        weights = sum(one.nbytes for one in model.parameters())
        config = model.config
        a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 2
        most = max(many * (tokens + 64) if many else tokens for _, many, tokens in mine)
        pages = min(-(-most // 16) + 2 * RUNNING, int((ROOM - weights) // (a_token * 16)))
        runner = GraphRunner(model, pages, 16, running=max(2, *(many for _, many, _ in mine)), tokens=TOKENS, longest=32768)
        start = time.monotonic() - begun
        for _, many, tokens in mine:
            if (many * (-(-(tokens + 64) // 16)) if many else -(-tokens // 16)) > pages:
                print(f"{shape} {many} x {tokens}: more than {pages} pages", flush=True)
                continue
            found = seconds_of(runner, many, tokens, pages)
            about = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__, "device": torch.cuda.get_device_name()}
            row = {"shape": shape, "many": many, "tokens": tokens, "measured_ms": round(found * 1e3, 4), "start_s": round(start, 1), **about}
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, runner.notes, flush=True)
        runner.close()
        del runner, model
        gc.collect()
        torch.cuda.empty_cache()


def seconds_of(runner: Any, many: int, tokens: int, pages: int) -> float:
    """A step, the host one ahead: the median of some."""
    import torch

    from foretell.serve.sampling import Sampling
    from foretell.simulate.serving.scheduler import Row, Sequence

    each = -(-(tokens + 64) // 16)
    if many:
        sequences = [Sequence(one, tokens - 1, 64, pages=list(range(one * each, (one + 1) * each)), length=tokens) for one in range(many)]
    else:
        sequences = [Sequence(0, tokens, 1, pages=list(range(-(-tokens // 16))))]
    how, times, before = Sampling(most=64), [], None
    for number in range(44 if many else 8):
        begun = time.perf_counter()
        if many:
            step = tuple(Row(one, one.length - 1, 1) for one in sequences)
            given = [[7] if before is None else [-1 - place] for place in range(many)]
        else:
            step, given = (Row(sequences[0], 0, tokens),), [[(7 * place) % 499 for place in range(tokens)]]
        launched = runner.launch(step, given, [(how, number)] * max(1, many))
        if not many:
            torch.cuda.synchronize()
        if before is not None:
            before.collect()
        before = launched
        for one in sequences if many else ():
            one.length += 1
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return statistics.median(times[-32 if many else -5 :])


def compare(sealed: Path, measured: Path, to: Path | None) -> None:
    known = {(row["shape"], row["many"], row["tokens"]): row for row in json.loads(sealed.read_text())["rows"]}
    offs: dict[str, list[float]] = {"decode": [], "prompt": []}
    for line in measured.read_text().splitlines():
        row = json.loads(line)
        found = known.get((row["shape"], row["many"], row["tokens"]))
        if found is None:
            continue
        off = found["predicted_ms"] / row["measured_ms"] - 1
        offs["decode" if row["many"] else "prompt"].append(off)
        each = f"predicted {found['predicted_ms']:8.3f}  measured {row['measured_ms']:8.3f} ms  {off:+.1%}"
        print(f"{row['shape']:>11} {row['many']:>4} x {row['tokens']:>6}  {each}")
        if to is not None:
            with to.open("a") as file:
                file.write(json.dumps({**row, "predicted_ms": found["predicted_ms"], "off": round(off, 4)}) + "\n")
    for name, some in (*offs.items(), ("all", [*offs["decode"], *offs["prompt"]])):
        if some:
            sizes = sorted(map(abs, some))
            print(f"{name}: {len(some)} cases, median {statistics.median(sizes):.1%}, p90 {sizes[int(0.9 * (len(sizes) - 1))]:.1%}, "
                  f"below 15 %: {sum(one < 0.15 for one in sizes) / len(sizes):.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "compare"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--on", default="H200")
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--to", type=Path)
    asked = parser.parse_args()
    if asked.what == "predict":
        predict(asked.on, asked.out or Path("serve_steps.json"), cases(asked.configs))
    elif asked.what == "measure":
        measure(asked.out or HERE / "results" / "serve_steps_measured.jsonl", cases(asked.configs))
    else:
        compare(*asked.files, asked.to)


if __name__ == "__main__":
    main()
