"""The invariant mode: answers alone and under load, bit for bit, and what it costs beside the default.

    python benchmarks/serve_invariant.py predict --on H200 --out sealed/serve_invariant.json    no GPU needed
    python benchmarks/serve_invariant.py measure --out results/serve_invariant.jsonl            on the GPU; rows that are there are kept
    python benchmarks/serve_invariant.py compare sealed/serve_invariant.json results/serve_invariant.jsonl

200 prompts of 16 to 768 tokens, every third beginning as the one before, half of them drawn at a temperature, all with log probabilities:
once together, with too few pages for all so that some lose theirs, and once each by itself in the same engine with all pages free. The
default mode does the same with its first 40. Then seconds of a step that only generates, and of all 200, in both modes, in one call.
`--shapes tiny` on a CPU is a dry run. An 8B takes about 150 s of an H200, a 1B 60.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from serving_runs import MODEL, Rows, finished, freed, model_of, no_collections, prompts, read_sealed, sealed, words_of

COUNT, SOME, ANSWER = 200, 40, 48
RUNNING, TOKENS, CONTEXT = 64, 512, 4096
PAGES, STEP_PAGES = 2200, 64 * 2100 // 16
"""2,200 pages are 35,000 tokens: 64 of these requests want 28,000, a third more at times."""
STEPS = ((1, 512), (32, 512), (64, 1024), (64, 2048))
"""Sequences that generate, and tokens of each."""


def layouts(tiny: bool) -> dict[str, int]:
    return {"running": 8, "tokens": 64, "pages": 40} if tiny else {"running": RUNNING, "tokens": TOKENS, "pages": PAGES}


def asked(words: int, count: int) -> list[tuple[list[int], Any]]:
    from foretell.serve.sampling import Sampling

    found = prompts(count, 16, 768 if words > 1000 else 60, words, seed=5)
    for place in range(2, count, 3):
        found[place] = (found[place - 1][: len(found[place]) // 2] + found[place])[:768]
    most = ANSWER if words > 1000 else 8
    how = [Sampling(most=most, temperature=0.8 * (number % 2), top_p=0.95, seed=number, logprobs=2) for number in range(count)]
    return list(zip(found, how, strict=True))


def engine_of(made: Any, invariant: bool, sizes: dict[str, int]) -> Any:
    from foretell.serve.engine import ServingEngine, StepLimits

    limits = StepLimits(running=sizes["running"], tokens=sizes["tokens"], invariant=invariant)
    return ServingEngine(made, pages=sizes["pages"], limits=limits)


def bits(rows: Rows, made: Any, shape: str, mode: str) -> None:
    """Answers under load and alone."""
    if rows.has(part="bits", shape=shape, mode=mode):
        return
    words, tiny = words_of(shape), shape == "tiny"
    every = asked(words, 12 if tiny else COUNT)
    engine = engine_of(made, mode == "invariant", layouts(tiny))
    begun = time.perf_counter()
    among = engine.generate([prompt for prompt, _ in every], [how for _, how in every])
    finished()
    seconds = time.perf_counter() - begun
    preempted, shared = engine.scheduler.preemptions, sum(one.scheduled.shared for one in among)
    some = every if mode == "invariant" else every[:SOME]
    tokens = whole = 0
    first, apart = [], 0.0
    for (prompt, how), other in zip(some, among, strict=False):
        engine.scheduler.pages.forget()
        (one,) = engine.generate([prompt], [how])
        tokens += one.ids == other.ids
        whole += one.tokens == other.tokens
        places = [place for place, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=True)) if a != b]
        first += places[:1]
        same = [(a.logprob, b.logprob) for a, b in zip(one.tokens, other.tokens, strict=True) if a.id == b.id]
        apart = max([apart, *(abs(a - b) for a, b in same if a is not None and b is not None)])
    rows.add(part="bits", shape=shape, mode=mode, prompts=len(some), equal_tokens=tokens, equal_bits=whole, preemptions=preempted,
             shared_tokens=shared, first_difference=min(first, default=None), logprob_apart=apart, load_s=round(seconds, 3),
             notes=engine.runner.notes)  # fmt: skip
    engine.close()
    freed()


def steps(rows: Rows, made: Any, shape: str, mode: str) -> None:
    """Seconds of all 200 at once, then of steps that only generate; pages for all."""
    from foretell.serve.sampling import Sampling

    tiny = shape == "tiny"
    several = ((1, 16), (4, 16)) if tiny else STEPS
    if all(rows.has(part="step", shape=shape, mode=mode, batch=batch, context=context) for batch, context in several):
        return
    words, sizes = words_of(shape), {**layouts(tiny), "pages": 64 if tiny else STEP_PAGES}
    engine = engine_of(made, mode == "invariant", sizes)
    engine.share = False
    every = asked(words, 12 if tiny else COUNT)
    plain = Sampling(most=every[0][1].most)
    for _ in range(2):
        finished()
        with no_collections():
            begun = time.perf_counter()
            engine.generate([prompt for prompt, _ in every], plain)
            finished()
            seconds = time.perf_counter() - begun
    if not rows.has(part="load", shape=shape, mode=mode):
        count = sum(len(prompt) for prompt, _ in every)
        rows.add(part="load", shape=shape, mode=mode, seconds=round(seconds, 4), prompt_tokens=count, answers=len(every) * plain.most)
    for batch, context in several:
        for prompt in prompts(batch, context, context, words, seed=batch + context):
            engine.submit(prompt, Sampling(most=6 if tiny else 80))
        waiting = list(engine.scheduler.waiting)
        while any(one.computed < context for one in waiting):
            engine.step()
        found = []
        for _ in range(4 if tiny else 48):
            begun = time.perf_counter()
            engine.step()
            found.append(time.perf_counter() - begun)
        while not engine.idle:
            engine.step()
        engine.step()
        rows.add(part="step", shape=shape, mode=mode, batch=batch, context=context, ms=round(statistics.median(found) * 1e3, 4))
    engine.close()
    freed()


def measure(out: Path, shapes: list[str]) -> None:
    rows = Rows(out)
    for shape in shapes:
        made = None
        for mode in ("invariant", "default"):
            if rows.has(part="bits", shape=shape, mode=mode) and rows.has(part="step", shape=shape, mode=mode, batch=64, context=2048):
                continue
            made = model_of(shape, 256 if shape == "tiny" else CONTEXT) if made is None else made
            steps(rows, made, shape, mode)
            bits(rows, made, shape, mode)
        del made
        freed()


def predict(hardware: str, out: Path, shapes: list[str]) -> None:
    """Milliseconds of steps, and seconds of all 200, by the forecast."""
    from foretell.api.serving.forecast import ServingAsked, scheduler_of, served_model
    from foretell.lower.serving import StepShape
    from foretell.simulate.serving.load import Load, Request
    from foretell.simulate.serving.run import simulated

    rows: list[dict[str, Any]] = []
    for shape in shapes:
        every = asked(words_of(shape), COUNT)
        recorded = tuple(Request(0.0, len(prompt), how.most) for prompt, how in every)
        for mode in ("invariant", "default"):
            question = ServingAsked(
                model=MODEL, hardware=hardware, overrides={"shape": shape, "context": CONTEXT}, pages=STEP_PAGES, running=RUNNING, tokens=TOKENS,
                invariant=mode == "invariant", share=False,
            )  # fmt: skip
            costs = served_model(question).costs(question.layout)
            for batch, context in STEPS:
                ms = costs.seconds(StepShape(batch, batch * context, (), batch)) * 1e3
                rows.append({"part": "step", "shape": shape, "mode": mode, "batch": batch, "context": context, "ms": round(ms, 4)})
                print(rows[-1], flush=True)
            served = simulated(Load(kind="trace", recorded=recorded), scheduler_of(question.layout), costs.seconds, 1.0)
            rows.append({"part": "load", "shape": shape, "mode": mode, "seconds": round(served.seconds, 4)})
            print(rows[-1], flush=True)
    sealed(out, hardware, rows)


def compare(path: Path, measured: Path) -> None:
    """Each figure beside its prediction; and the bars."""
    known = Rows(measured).known

    def value(rows: list[dict[str, Any]], **key: Any) -> float | None:
        row = next((row for row in rows if all(row.get(name) == one for name, one in key.items())), None)
        return None if row is None else float(row["ms"] if "ms" in row else row["seconds"])

    told = read_sealed(path)
    for row in [row for row in known if row["part"] in ("step", "load") and row["mode"] == "invariant"]:
        key = {name: row[name] for name in ("part", "shape", "batch", "context") if name in row}
        figures = [value(rows, mode=mode, **key) for rows in (told, known) for mode in ("invariant", "default")]
        if None in figures:
            continue
        predicted, measured_, ratio = figures[0], figures[2], [figures[0] / figures[1], figures[2] / figures[3]]  # type: ignore[operator]
        print(f"{' '.join(map(str, key.values())):32} predicted {predicted:9.4g}  measured {measured_:9.4g}  of the default: "
              f"predicted {ratio[0]:.2f}, measured {ratio[1]:.2f}  {'ok' if ratio[1] <= 1.5 else 'ABOVE 1.5'}")  # fmt: skip
    for row in known:
        if row["part"] == "bits":
            print(f"{row['shape']} {row['mode']}: {row['equal_tokens']} of {row['prompts']} with equal tokens, {row['equal_bits']} bit for bit; "
                  f"{row['preemptions']} lost pages, {row['shared_tokens']} tokens shared")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["predict", "measure", "compare"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shapes", default="llama3-8b,llama-1b")
    parser.add_argument("--on", default="H200")
    parser.add_argument("--out", type=Path)
    asked_for = parser.parse_args()
    random.seed(0)
    shapes = asked_for.shapes.split(",")
    if asked_for.what == "predict":
        predict(asked_for.on, asked_for.out or Path("serve_invariant.json"), shapes)
    elif asked_for.what == "measure":
        measure(asked_for.out or Path("serve_invariant.jsonl"), shapes)
    else:
        compare(*asked_for.files)


if __name__ == "__main__":
    main()
