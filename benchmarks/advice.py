"""Whether advice keeps its promise: random questions, every printed suggestion asked again as it is printed.

    python benchmarks/advice.py --count 200 --out rows.jsonl      questions 0 to 199 of the public seed; goes on where it stopped
    python benchmarks/advice.py --faster 20 --out rows.jsonl      the best "faster" advice against all combinations of its changes
    python benchmarks/advice.py --score rows.jsonl

A question is a model, a device and options. Of each:

    kept       every suggestion that the screen shows, typed as it is shown, has the verdict and bytes that were promised
    offered    where it does not fit, and anything that was drawn by brute force on the same devices fits, one that does is offered
    best       the joint advice takes at most 5 % longer for a sample than the best of all combinations (`--faster`)

Brute force on the same devices: the product of micro-batches (all divisors), recomputation, number formats, 4-bit bases where there are
adapters, and growing segments; a plan that moves states to the host where that is not enough.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SEED = 20261118
MODELS: Mapping[str, tuple[int, int]] = {
    "gpt2": (4, 128), "gpt2-medium": (2, 64), "gpt2-xl": (1, 32), "llama3-1b": (1, 16), "llama3-8b": (1, 4), "qwen2-1.5b": (1, 8),
    "bert-large": (16, 512), "t5-large": (4, 64), "vit-l16": (32, 1024), "resnet50": (64, 2048), "convnext-base": (32, 1024), "dit-xl2": (8, 256),
    "unet": (1, 128), "mamba-130m": (1, 64), "lstm-lm": (16, 1024), "hf:opt": (4, 128), "hf:whisper": (4, 256), "hf:vit": (32, 1024),
    "tnt-s": (32, 512), "scaling-mlp-b12": (256, 16384),
}  # fmt: skip
"""Name → the least and the most samples of a micro-batch."""
DEVICES = ("T4", "V100", "RTX3090", "RTX4090", "A10", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "MI300X")
BEST, CHANGES = 0.05, 6


def question(number: int) -> dict[str, Any]:
    """The options of `fit` that were drawn for it."""
    draw = random.Random(SEED + number)
    model = draw.choice(list(MODELS))
    least, most = MODELS[model]
    sizes = [least * 2**power for power in range(12) if least * 2**power <= most]
    count = draw.choice((1, 1, 1, 1, 2, 4))
    asked: dict[str, Any] = {"model": model, "hardware": draw.choice(DEVICES), "micro_batch": draw.choice(sizes)}
    asked["hardware"] = f"{count}x{asked['hardware']}" if count > 1 else asked["hardware"]
    if draw.random() < 0.15:
        return {**asked, "infer": True}
    asked["optimizer"] = draw.choice(("adamw-fused", "adamw", "adamw-foreach", "sgd"))
    asked["recompute"] = draw.choice(("none", "none", "full"))
    asked["accumulate"] = draw.choice((1, 1, 4))
    asked["precision"] = draw.choice((None, None, "fp32", "bf16"))
    if asked["precision"] == "bf16" and any(name in asked["hardware"] for name in ("T4", "V100")):
        asked["precision"] = None
    if count == 1 and model in ("llama3-8b", "llama3-1b", "gpt2-xl") and draw.random() < 0.5:
        asked["lora"] = 16
    return asked


TYPED = {"hardware": "--on", "micro_batch": "--micro-batch", "optimizer": "--optimizer", "recompute": "--recompute",
         "accumulate": "--accumulate", "precision": "--precision", "lora": "--lora"}  # fmt: skip


def typed(asked: Mapping[str, Any]) -> list[str]:
    """The words after `foretell` that ask it."""
    words = ["fit", asked["model"]]
    for name, option in TYPED.items():
        words += [option, str(asked[name])] if asked.get(name) is not None else []
    return [*words, "--infer"] if asked.get("infer") else words


def told(words: Sequence[str]) -> tuple[int, dict[str, Any], str]:
    """What a command says: its status, its JSON, and what it complains of."""
    from foretell.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        status = main([*words, "--json"])
    text = out.getvalue()
    return status, json.loads(text) if text.startswith("{") else {}, errors.getvalue()[-300:]


# ---------------------------------------------------------------------- what would make it fit


def kept(answer: Any, words: Sequence[str]) -> list[dict[str, Any]]:
    """Each suggestion that a screen shows, asked again as it is shown."""
    from foretell.report import command

    found = []
    best = command.best(answer)
    for remedy in answer.remedies[: command.SHOWN]:
        again = shlex.split(remedy.command)[1:] if remedy.command else command.with_flag(words, remedy.flag)
        if remedy is best:
            assert shlex.split(shlex.join(["foretell", *again])) == command.suggest(answer, words)
        status, said, errors = told(again)
        if remedy.command:  # a plan: the fastest that fits, which may need other bytes than the thriftiest
            right, bytes_ = status == 0 and bool(remedy.fits), None
        else:
            bytes_ = said.get("memory", {}).get("device_bytes")
            right = said.get("verdict") == remedy.verdict and bytes_ == remedy.device_bytes
        row = {"typed": shlex.join(again), "promised": [remedy.verdict, remedy.device_bytes], "got": [said.get("verdict"), bytes_], "kept": right}
        found.append(row | ({"said": errors} if not right else {}))
    return found


def smaller(asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All combinations on the same devices, the strongest first."""
    size, steps = asked["micro_batch"], asked.get("accumulate", 1)
    sizes = [number for number in range(1, size + 1) if size % number == 0]
    again = ["none"] if asked.get("infer") else ["full", "selective", "none"]
    formats = list(dict.fromkeys((asked.get("precision"), "bf16")))
    bases = (True, False) if asked.get("lora") else (False,)
    for number, how, precision, nf4, grown in itertools.product(sizes, again, reversed(formats), bases, (True, False)):
        changes: dict[str, Any] = {"micro_batch": number, "precision": precision, "nf4": nf4, "expandable_segments": grown}
        yield changes if asked.get("infer") else {**changes, "recompute": how, "accumulate": steps * size // number}


def anything(asked: Mapping[str, Any], most: int = 6) -> tuple[dict[str, Any] | None, int]:
    """A combination on the same devices that fits, of the strongest few, and how many were predicted."""
    from foretell import api
    from foretell.errors import ForetellError

    tried = 0
    for changes in itertools.islice(smaller(asked), most):
        tried += 1
        with contextlib.suppress(ForetellError):
            if api.fit(**{**asked, **changes}, advice_seconds=0.0).fits:
                return changes, tried
    return None, tried


def asked_once(number: int) -> dict[str, Any]:
    from foretell import api
    from foretell.errors import ForetellError

    asked, began = question(number), time.monotonic()
    row: dict[str, Any] = {"part": "fit", "number": number, "asked": asked}
    try:
        answer = api.fit(**asked)
    except ForetellError as error:
        return row | {"refused": str(error)[:200]}
    row |= {"verdict": answer.verdict, "seconds": round(time.monotonic() - began, 1), "advice": answer.advice}
    row |= {"suggestions": kept(answer, typed(asked))}
    if answer.verdict == "no" or not answer.fits:
        here = [one for one in answer.remedies if one.fits and one.devices <= _count(answer)]
        possible, tried = anything(asked) if not here else (None, 0)
        row |= {"offered_here": bool(here), "possible_here": possible if not here else True, "brute_force": tried}
    return row


def _count(answer: Any) -> int:
    return int(answer.hardware.get("nodes", 1)) * int(answer.hardware.get("devices_per_node", 1))


# ---------------------------------------------------------------------- what would make it faster

SHRUNK: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "gpt2": ((4, 16), {"layers": 2}), "bert-large": ((8, 32), {"layers": 2}),
    "resnet50": ((16, 64), {"depth1": 1, "depth2": 1, "depth3": 1, "depth4": 1}),
    "vit-l16": ((8, 32), {"depth": 2}),
    "convnext-tiny": ((16, 64), {"n1": 1, "n2": 1, "n3": 1, "n4": 1}), "hf:opt": ((4, 16), {"num_hidden_layers": 2}),
    "t5-base": ((8, 32), {"layers": 2}),
}  # fmt: skip
"""Models with few layers, so that all combinations can be predicted."""


def faster_question(number: int) -> dict[str, Any]:
    draw = random.Random(SEED * 2 + number)
    model = draw.choice(list(SHRUNK))
    sizes, overrides = SHRUNK[model]
    return {
        "model": model, "hardware": draw.choice(("A100-80GB", "H100", "H200", "RTX4090")), "micro_batch": draw.choice(sizes), "overrides": overrides,
        "optimizer": draw.choice(("adamw", "adamw-fused")), "precision": draw.choice(("fp32", None)), "recompute": draw.choice(("none", "full")),
    }  # fmt: skip


def all_of(ways: Sequence[Any]) -> Iterator[list[Any]]:
    """Every choice of at most one way of each axis."""
    axes: dict[str, list[Any]] = {}
    for way in ways:
        axes.setdefault(way.axis, [None]).append(way)
    for chosen in itertools.product(*axes.values()):
        yield [way for way in chosen if way is not None]


def _largest(ways: Sequence[Any], asked: Mapping[str, Any], count: int) -> list[Any]:
    """Those that gain most by themselves."""
    from foretell import api
    from foretell.errors import ForetellError

    found = []
    for place, way in enumerate(ways):
        with contextlib.suppress(ForetellError):
            then = api.fit(**{**asked, **way.options, "advice_seconds": 0.0})
            found.append((-then.throughput.per_second if then.throughput is not None else 0.0, place))
    return [ways[place] for _, place in sorted(sorted(found)[:count], key=lambda one: one[1])]


def best_of_all(number: int) -> dict[str, Any]:
    from foretell import api
    from foretell.api.advice import question_of
    from foretell.errors import ForetellError
    from foretell.hardware import parse
    from foretell.search.advice import faster_ways

    asked = faster_question(number)
    options = {name: value for name, value in asked.items() if name not in ("model", "hardware")}
    row: dict[str, Any] = {"part": "faster", "number": number, "asked": asked}
    try:
        answer, found = api.advise(asked["model"], hardware=asked["hardware"], **options)
    except ForetellError as error:
        return row | {"refused": str(error)[:200]}
    row["verdict"] = answer.verdict
    if found is None or answer.throughput is None:
        return row
    given = question_of(asked["model"], answer, parse(asked["hardware"]), options)
    ways = [*faster_ways.ways(given, answer), *faster_ways.batches(given)]
    rate, top, tried = answer.throughput.per_second, 1.0, 0
    for chosen in all_of(_largest(ways, asked, CHANGES)):
        if not chosen:
            continue
        joined = chosen[0]
        for way in chosen[1:]:
            joined = joined.beside(way)
        if not faster_ways.legal(given, joined.options):
            continue
        tried += 1
        with contextlib.suppress(ForetellError):
            then = api.fit(**{**asked, **joined.options, "advice_seconds": 0.0})
            padded = "overrides" not in joined.options or faster_ways.pads(answer, then)
            if padded and then.throughput is not None and then.verdict == "fits":
                top = max(top, then.throughput.per_second / rate)
    said = found.joint or (found.gains[0] if found.gains else None)
    return row | {"advised": said.speedup if said else 1.0, "best": top, "changes": len({way.axis for way in ways}), "combinations": tried}


# ---------------------------------------------------------------------- rows


def score(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    fits = [row for row in rows if row["part"] == "fit"]
    suggestions = [one for row in fits for one in row.get("suggestions", ())]
    short = [row for row in fits if "possible_here" in row]
    all_of_them = [row for row in rows if row["part"] == "faster" and "best" in row]
    return {
        "questions": len(fits), "refused": sum("refused" in row for row in fits), "suggestions": len(suggestions),
        "kept": sum(one["kept"] for one in suggestions), "do_not_fit": len(short), "can_fit_here": sum(bool(row["possible_here"]) for row in short),
        "offered_here": sum(row["offered_here"] for row in short), "faster": len(all_of_them),
        "within_5_percent": sum(row["advised"] >= (1 - BEST) * row["best"] for row in all_of_them),
        "worst": round(min((row["advised"] / row["best"] for row in all_of_them), default=1.0), 4),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--faster", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="take every so many, to share the work")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--score", type=Path)
    given = parser.parse_args()
    path = given.score or given.out
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    if given.score is None:
        done = {(row["part"], row["number"]) for row in rows}
        work = [("fit", number, asked_once) for number in range(given.first, given.count, given.every)]
        work += [("faster", number, best_of_all) for number in range(given.first, given.faster, given.every)]
        os.environ.setdefault("NO_COLOR", "1")
        for part, number, ask in work:
            if (part, number) in done:
                continue
            rows.append(ask(number))
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print(part, number, json.dumps({name: value for name, value in rows[-1].items() if name != "suggestions"})[:220], flush=True)
    print(json.dumps(score(rows)))


if __name__ == "__main__":
    main()
