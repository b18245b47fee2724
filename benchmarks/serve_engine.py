"""The engine on a GPU: seconds of a token, of a prompt, of many requests, beside what a user would take instead, in one run.

    python benchmarks/serve_engine.py ours --out rows.jsonl
    python benchmarks/serve_engine.py theirs --out rows.jsonl
    python benchmarks/serve_engine.py ours forward theirs bars --out rows.jsonl      all bars in one call: about 8 minutes of an H200

Random weights in the shape of Llama 3 8B, bf16, as transformers builds it. `theirs` is transformers' own generation: a static
cache and torch.compile, batches of one length, and its continuous batching. Rows that are in the file are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving_runs import Rows

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "vocab_size": 128256, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "vocab_size": 512},
}  # fmt: skip


def model(shape: str, context: int = 8192) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        **SHAPES[shape], max_position_embeddings=context, rope_theta=500000.0, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        made = transformers.AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    return made.eval()


def timed(call: Callable[[], Any], count: int = 20) -> float:
    """Milliseconds, the median."""
    call()
    torch.cuda.synchronize()
    found = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def floors(rows: Rows) -> None:
    if rows.has(part="floor"):
        return
    big = torch.empty(4 * 2**30, dtype=torch.bfloat16, device="cuda")
    half = len(big) // 2
    copy = big.nbytes / timed(functools.partial(big[:half].copy_, big[half:])) / 1e6
    del big
    rows.add(part="floor", copy_gb_s=round(copy))
    for n, k in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)):
        copies = max(1, int(4e8 // (n * k * 2)))
        weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]
        for m in (1, 2, 8, 16, 32, 64, 128, 256):
            x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
            graph = torch.cuda.CUDAGraph()
            for weight in weights:
                torch.nn.functional.linear(x, weight)
            with torch.cuda.graph(graph):
                for _ in range(max(1, 16 // copies)):
                    for weight in weights:
                        torch.nn.functional.linear(x, weight)
            each = timed(graph.replay) / (copies * max(1, 16 // copies))
            rows.add(part="linear", m=m, n=n, k=k, us=round(each * 1e3, 2), gb_s=round(n * k * 2 / each / 1e6))
        del weights


def prompts(count: int, shortest: int, longest: int, words: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(words) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def engine_of(made: Any, running: int, tokens: int, context: int, compiled: bool = True) -> Any:
    from foretell.serve.engine import ServingEngine, StepLimits

    pages = running * (-(-context // 16))
    begun = time.monotonic()
    engine = ServingEngine(made, pages=pages, limits=StepLimits(running=running, tokens=tokens), share=False, compiled=compiled)
    torch.cuda.synchronize()
    engine.started = time.monotonic() - begun  # type: ignore[attr-defined]
    return engine


def generating(engine: Any, batch: int, context: int, words: int, steps: int = 48) -> dict[str, float]:
    """Seconds of a step in which so many sequences generate, and the host's share of it."""
    from foretell.serve.sampling import Sampling

    for prompt in prompts(batch, context, context, words, seed=batch + context):
        engine.submit(prompt, Sampling(most=steps + 40))
    while any(one.scheduled.computed < context for one in engine._under_way.values()):
        engine.step()
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    step = (time.perf_counter() - begun) / steps
    size = next((one for one in engine.runner.graphs if one >= batch), 0)
    replay = timed(engine.runner.graphs[size].replay) / 1e3 if size else 0.0
    made = list(engine._under_way.values())
    for one in made:
        engine.cancel(one)
    while not engine.idle:
        engine.step()
    engine.step()
    return {"step_ms": round(step * 1e3, 3), "replay_ms": round(replay * 1e3, 3), "host_share": round(1 - replay / step, 4)}


def ours(rows: Rows, shape: str, compiled: bool) -> None:
    from foretell.serve.sampling import Sampling

    made = model(shape)
    words = SHAPES[shape]["vocab_size"]
    several = ((64, 8192, 4096, ((1, 512), (32, 512), (64, 2048))), (256, 4096, 1280, ((128, 512),)))
    for running, tokens, context, batches in several:
        if all(rows.has(part="decode", shape=shape, batch=batch, context=at, compiled=compiled) for batch, at in batches):
            continue
        engine = engine_of(made, running, tokens, context, compiled)
        rows.add(part="start", shape=shape, running=running, compiled=compiled, seconds=round(engine.started, 1), notes=engine.runner.notes,
                 graphs=len(engine.runner.graphs), reserved_gb=round(torch.cuda.memory_reserved() / 1e9, 2))  # fmt: skip
        for batch, at in batches:
            if not rows.has(part="decode", shape=shape, batch=batch, context=at, compiled=compiled):
                rows.add(part="decode", shape=shape, batch=batch, context=at, compiled=compiled, **generating(engine, batch, at, words))
        if running == 64:
            for length in (256, 512, 2048, 4000):
                found = []
                for number in range(4):
                    engine.submit(prompts(1, length, length, words, seed=number)[0], Sampling(most=1))
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    engine.step()
                    torch.cuda.synchronize()
                    found.append(time.perf_counter() - begun)
                    engine.step()
                rows.add(part="prefill", shape=shape, tokens=length, compiled=compiled, ms=round(statistics.median(found[1:]) * 1e3, 2))
        else:
            many_requests(rows, engine, shape, compiled, words)
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def many_requests(rows: Rows, engine: Any, shape: str, compiled: bool, words: int) -> None:
    """256 requests at once, of 64 to 1,024 tokens, 128 tokens each."""
    from foretell.serve.sampling import Sampling

    asked = prompts(256, 64, 1024, words)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine.generate(asked, Sampling(most=128))
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    rows.add(part="requests", shape=shape, compiled=compiled, seconds=round(seconds, 2), output_tok_s=round(256 * 128 / seconds),
             total_tok_s=round((256 * 128 + sum(map(len, asked))) / seconds), preemptions=engine.scheduler.preemptions)  # fmt: skip


def requests_alone(rows: Rows, shape: str) -> None:
    words = SHAPES[shape]["vocab_size"]
    engine = engine_of(model(shape), 256, 4096, 1280)
    many_requests(rows, engine, shape, True, words)
    many_requests(rows, engine, shape, True, words)


def forward_alone(rows: Rows, shape: str) -> None:
    """The model's own forward with compiled layers, of one prompt, as the reference of prefill."""
    made = model(shape)
    for layer in made.model.layers:
        layer.compile(dynamic=True)
    for length in (512, 2048, 4000):
        tokens = torch.tensor(prompts(1, length, length, SHAPES[shape]["vocab_size"]), device="cuda")
        with torch.no_grad():
            ms = timed(lambda tokens=tokens: made(tokens, use_cache=False, logits_to_keep=1), 5)
        rows.add(part="forward", shape=shape, tokens=length, ms=round(ms, 2))


def bars(rows: Rows, shape: str) -> None:
    """What was asked for, beside the newest rows of each figure."""

    def value(name: str, part: str, **key: Any) -> float | None:
        found = [row for row in rows.known if row.get("part") == part and row.get("shape", shape) == shape]
        found = [row for row in found if all(row.get(one) == of for one, of in key.items()) and row.get("compiled", True)]
        return float(found[-1][name]) if found else None

    def told(name: str, got: float | None, least: float) -> None:
        verdict = "not measured" if got is None else f"{got:.3f} {'ok' if got >= least else 'BELOW'}"
        print(f"{name:52} {verdict:14} at least {least:g}")

    def over(one: float | None, other: float | None) -> float | None:
        return None if one is None or other is None else one / other

    copy = value("copy_gb_s", "floor") or 4130
    step = {(batch, at): value("step_ms", "decode", batch=batch, context=at) for batch, at in ((1, 512), (32, 512), (64, 2048))}
    read = (shape_bytes(shape) / 1e6, kv_bytes(shape) / 1e6)  # of weights, and of a token's keys and values
    told("a token alone, of the floor by bytes", over((read[0] + 512 * read[1]) / copy, step[1, 512]), 0.75)
    told("a token alone, beside static and compiled", over(value("tpot_ms", "theirs", batch=1), step[1, 512]), 1.4)
    told("32 sequences, beside static and compiled", over(value("tpot_ms", "theirs", batch=32), step[32, 512]), 1.9)
    told("64 sequences of 2,048, of the floor by bytes", over((read[0] + 64 * 2048 * read[1]) / copy, step[64, 2048]), 0.65)
    best = [one for batch in (128, 256) if (one := value("seconds", "batches", batch=batch)) is not None]
    told("256 requests, beside static batches at their best", over(min(best, default=None), value("seconds", "requests")), 1.8)
    for length in (512, 2048, 4000):
        forward, ours = value("ms", "forward", tokens=length), value("ms", "prefill", tokens=length)
        told(f"a prompt of {length}, beside the compiled forward", over(forward, ours), 0.95)
    share = value("host_share", "decode", batch=64, context=2048)
    told("share of a step that is not the host's, at 64", None if share is None else 1 - share, 0.95)


def shape_bytes(shape: str) -> float:
    """Of weights that a step reads: all but the table of words."""
    sizes = SHAPES[shape]
    hidden, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    attention = hidden * hidden * 2 + 2 * hidden * hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    return 2.0 * (sizes["num_hidden_layers"] * (attention + 3 * hidden * inner) + hidden * words)


def kv_bytes(shape: str) -> float:
    """Of a token, all layers."""
    sizes = SHAPES[shape]
    return 4.0 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["hidden_size"] // sizes["num_attention_heads"]


def theirs(rows: Rows, shape: str) -> None:
    made = model(shape)
    words = SHAPES[shape]["vocab_size"]

    def generate(batch: int, length: int, most: int, **more: Any) -> float:
        tokens = torch.tensor([one[:length] for one in prompts(batch, length, length, words)], device="cuda")
        begun = time.perf_counter()
        mask = torch.ones_like(tokens)
        made.generate(tokens, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0, **more)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for batch in (1, 32):
        if rows.has(part="theirs", kind="static", batch=batch, shape=shape):
            continue
        begun = time.perf_counter()
        for _ in range(2):
            generate(batch, 512, 84, cache_implementation="static")
        ready = time.perf_counter() - begun
        short, long = generate(batch, 512, 20, cache_implementation="static"), generate(batch, 512, 84, cache_implementation="static")
        rows.add(part="theirs", kind="static", batch=batch, shape=shape, tpot_ms=round((long - short) / 64 * 1e3, 3), warm_up_s=round(ready, 1))
    for batch in (128, 256):
        if rows.has(part="batches", batch=batch, shape=shape):
            continue
        seconds = 0.0
        for at in range(0, 256, batch):  # prompts padded to one length, so that there is one program
            if not at:
                generate(batch, 1024, 128, cache_implementation="static")
            seconds += generate(batch, 1024, 128, cache_implementation="static")
        rows.add(part="batches", batch=batch, shape=shape, seconds=round(seconds, 2), output_tok_s=round(256 * 128 / seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["floors", "ours", "eager", "requests", "forward", "theirs", "bars"])
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    rows = Rows(asked.out)
    for part in asked.parts:
        if part == "floors":
            floors(rows)
        elif part in ("ours", "eager"):
            ours(rows, asked.shape, part == "ours")
        else:
            {"requests": requests_alone, "forward": forward_alone, "theirs": theirs, "bars": bars}[part](rows, asked.shape)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
