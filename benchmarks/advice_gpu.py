"""What `foretell plan advise` promises against what it brings on the GPU of this machine.

    python benchmarks/advice_gpu.py --predict FILE               no GPU: 24 questions, the first three changes of each and all together
    python benchmarks/advice_gpu.py --predict FILE --draw SEED   no GPU: other models and settings, drawn by a seed; the changes `fit` shows
    python benchmarks/advice_gpu.py --measure FILE --out ROWS    run each question as it is and with each change, in a plain loop
    python benchmarks/advice_gpu.py --tell ROWS                  gains beside promises

A question is a process: its step, and that with each change, are timed in turns. What compiles is compiled before, beside each other;
questions are made ready beside each other too, and all others are stopped while one is timed. Rows that --out has are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

QUESTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": "gpt2", "micro_batch": 32},
    "gpt2-fp32": {"model": "gpt2", "micro_batch": 8, "precision": "fp32", "optimizer": "adamw"},
    "gpt2-short": {"model": "gpt2", "micro_batch": 1, "seq": 128, "optimizer": "adamw"},
    "gpt2-medium-recompute": {"model": "gpt2-medium", "micro_batch": 8, "recompute": "full"},
    "gpt2-accumulate": {"model": "gpt2", "micro_batch": 1, "accumulate": 8},
    "llama3-1b": {"model": "llama3-1b", "micro_batch": 1, "seq": 2048, "optimizer": "adamw"},
    "bert-base-fp32": {"model": "bert-base", "micro_batch": 16, "precision": "fp32", "optimizer": "adamw"},
    "bert-large": {"model": "bert-large", "micro_batch": 8, "optimizer": "adamw"},
    "t5-small": {"model": "t5-small", "micro_batch": 16, "optimizer": "adamw"},
    "resnet50": {"model": "resnet50", "micro_batch": 64, "optimizer": "momentum"},
    "resnet50-fp32": {"model": "resnet50", "micro_batch": 64, "optimizer": "momentum", "precision": "fp32"},
    "resnet50-large": {"model": "resnet50", "micro_batch": 256, "optimizer": "momentum"},
    "vit-b16": {"model": "vit-b16", "micro_batch": 64, "optimizer": "adamw"},
    "vit-l16-fp32": {"model": "vit-l16", "micro_batch": 8, "precision": "fp32"},
    "convnext-base": {"model": "convnext-base", "micro_batch": 32, "optimizer": "adamw"},
    "unet-fp32": {"model": "unet", "micro_batch": 8, "precision": "fp32", "optimizer": "adam"},
    "dit-b2": {"model": "dit-b2", "micro_batch": 32, "optimizer": "adamw"},
    "lstm": {"model": "lstm-lm", "micro_batch": 32, "optimizer": "adam"},
    "mamba": {"model": "mamba-130m", "micro_batch": 4, "seq": 512},
    "scaling-mlp": {"model": "scaling-mlp-b12", "micro_batch": 64, "precision": "fp32"},
    "hf-roberta": {"model": "hf:roberta", "micro_batch": 8, "seq": 256, "optimizer": "adamw"},
    "hf-opt": {"model": "hf:opt", "micro_batch": 8, "seq": 512, "overrides": {"num_hidden_layers": 6}, "optimizer": "adamw"},
    "hf-gpt2-fp32": {"model": "hf:gpt2", "micro_batch": 4, "seq": 512, "precision": "fp32", "optimizer": "adamw"},
    "tnt": {"model": "tnt-s", "micro_batch": 32, "optimizer": "adamw"},
}
TOP = 3
PREDICTING = 600.0
COMPILING, READY, WAVE = 10, 6, 14
"""Processes that compile, and that are made ready, beside each other; questions whose changes are compiled before they are timed."""
DEVICE_BYTES = 125 << 30
LONGEST = 200
BLOCKS = 5
BLOCK_SECONDS = 0.2
PACERS = ("llama-tiny", "resnet-tiny", "bert-tiny")


def predicted(name: str, question: Mapping[str, Any], *, joins: bool) -> list[dict[str, Any]]:
    """A question's step, its first changes and, with `joins`, all of them together; without, what `fit` shows below its answer."""
    from foretell import api
    from foretell.api.advice import faster

    asked = {key: value for key, value in question.items() if key != "model"}
    if joins:
        answer, advice = api.advise(question["model"], hardware="H200", **asked)
    else:
        answer = api.fit(question["model"], hardware="H200", advice_seconds=0.0, **asked)
        advice = faster(question["model"], answer, hardware="H200", seconds=PREDICTING, joins=False, **asked)
    if answer.verdict == "no":  # nothing to run
        return []
    assert answer.time is not None and answer.throughput is not None
    about = {"question": name, "asked": dict(question), "unit": answer.throughput.unit}
    rows = [{
        **about, "change": "", "flag": "", "options": {}, "seconds": answer.time.step_seconds, "per_second": answer.throughput.per_second,
        "speedup": 1.0, "device_bytes": answer.memory.device_bytes, **_parts(answer.time),
    }]  # fmt: skip
    for gain in _chosen(advice) if advice else []:
        rows.append({
            **about, "change": gain.change, "flag": gain.flag, "options": gain.options, "seconds": gain.step_seconds,
            "per_second": gain.per_second, "speedup": gain.speedup, "low": gain.low, "high": gain.high, "sure": gain.sure, "maths": gain.maths,
            "joins": gain.joins, "device_bytes": gain.device_bytes,
        })  # fmt: skip
    return rows


def _chosen(advice: Any) -> list[Any]:
    """The first three that are advised; where there are fewer, those that are said to be unsure; all together."""
    return [*[*advice.gains, *advice.unsure][:TOP], *([advice.joint] if advice.joint else [])]


def _parts(step: Any) -> dict[str, Any]:
    return {"device_seconds": step.device_seconds, "host_seconds": step.host_seconds, "binds": step.binds}


def made(question: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Any, int]:
    """One step on the GPU, and its samples."""
    from foretell.plan.precision import read
    from foretell.prove.measure import built
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe

    given = {**question, **options}
    if "precision" in given:
        given["precision"] = read(given["precision"], False)
    compile = given.pop("compile", "none")
    of_source = {key: given.pop(key) for key in ("model", "micro_batch", "seq", "image", "overrides") if key in given}
    source, recipe = Source(**of_source), Recipe(**given, compile="model" if compile is True else compile)
    return built(source, recipe), source.micro_batch * recipe.accumulate


def warmed(row: Mapping[str, Any]) -> dict[str, Any]:
    """One compiled step, once: its kernels are then in the cache that the run which is timed reads."""
    made(row["asked"], row["options"])[0]()
    return {}


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """In this process, on its GPU: a question's step as it is and with each change in turn, with small steps whose pace is the host's
    beside them, so that a machine that slows down in between slows all. Waits for a line before it begins: the machine is then its own."""
    import torch

    from foretell.prove.measure import WARM, built
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe

    high = torch.get_float32_matmul_precision()  # torch.compile asks for it when it makes its kernels, eager ops at each call
    turns: dict[str, tuple[Any, int, str]] = {}
    failed: dict[str, str] = {}
    for name, options in [("", {}), *((row["flag"], row["options"]) for row in rows)]:
        torch.set_float32_matmul_precision(high)
        try:
            one, samples = made(rows[0]["asked"], options)
            one()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            continue
        torch.cuda.synchronize()
        turns[name] = (one, samples, torch.get_float32_matmul_precision())
    for name in PACERS:
        turns[f"pacer {name}"] = (built(Source(model=name, micro_batch=2), Recipe(precision="bf16-autocast", optimizer="adamw-fused")), 2, high)
    print("ready", flush=True)
    sys.stdin.readline()
    found: dict[str, list[float]] = {name: [] for name in turns}
    for block in range(-1, BLOCKS):
        for name, (one, _, how) in turns.items():
            torch.set_float32_matmul_precision(how)
            for _ in range(WARM if block < 0 else 1):
                one()
            torch.cuda.synchronize()
            if block >= 0:
                found[name].append(_block(one, BLOCK_SECONDS if not name.startswith("pacer") else 0.05))
    answers: dict[str, Any] = {name: {"error": words} for name, words in failed.items()}
    pacers = {name: statistics.median(each) for name, each in found.items() if name.startswith("pacer")}
    base = found.get("")
    for name, each in found.items():
        if name and not name.startswith("pacer") and base:
            ratio, more, samples = [b / c for b, c in zip(base, each, strict=True)], turns[name][1], turns[""][1]
            answers[name] = {
                "base": statistics.median(base), "seconds": statistics.median(each), "gain": statistics.median(ratio) * more / samples,
                "samples": more, "base_samples": samples, "pacers": pacers, "blocks": {"base": base, "seconds": each},
            }  # fmt: skip
    return answers


def _block(one: Any, seconds: float) -> float:
    """Seconds of a step as a loop runs it, over a short while."""
    import torch

    began = time.perf_counter()
    one()
    torch.cuda.synchronize()
    count = max(3, min(200, int(seconds / (time.perf_counter() - began))))
    began = time.perf_counter()
    for _ in range(count):
        one()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


@dataclass
class Runs:
    """Processes that are made ready beside each other and timed one at a time, while the others are stopped."""

    out: Path
    about: Mapping[str, Any]
    until: float
    """No process is begun after this moment of the clock."""
    going: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    """Some changes → bytes of the device that they are said to need together."""
    lock: threading.Condition = field(default_factory=threading.Condition)
    timing: threading.Lock = field(default_factory=threading.Lock)

    def warm(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Compile what is compiled, beside each other."""
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}

        def one(row: Mapping[str, Any]) -> None:
            left = min(LONGEST, self.until - time.monotonic())
            if left > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run([sys.executable, __file__, "--warm", json.dumps(row)], capture_output=True, timeout=left, env=environment)
                print(f"compiled {row['question']} {row['flag']}", flush=True)

        with ThreadPoolExecutor(COMPILING) as pool:
            list(pool.map(one, rows))

    def question(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make ready, wait for the machine, time, keep."""
        if time.monotonic() > self.until:
            return
        wanted = min(sum(int(row["device_bytes"]) for row in rows) + int(rows[0]["base_bytes"]), DEVICE_BYTES)
        with tempfile.TemporaryFile("w+") as errors:
            with self.lock:
                self.lock.wait_for(lambda: sum(self.held.values()) + wanted <= DEVICE_BYTES)
                self.held[id(rows)] = wanted
            with self.timing:  # nobody begins while another is timed
                command = [sys.executable, __file__, "--one", json.dumps(rows)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
                with self.lock:
                    self.going[process.pid] = process
            guard = threading.Timer(LONGEST, process.kill)
            guard.start()
            try:
                found = self._timed(process)
            except (OSError, ValueError, IndexError) as error:
                errors.seek(0)
                words = (errors.read().strip().splitlines() or [type(error).__name__])[-1][:200]
                found = {row["flag"]: {"error": words} for row in rows}
            finally:
                guard.cancel()
                process.kill()
                process.communicate()
                with self.lock:
                    del self.going[process.pid], self.held[id(rows)]
                    self.lock.notify_all()
        self._keep(rows, found)

    def _timed(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """What a process answers that is given the machine once it is ready."""
        assert process.stdout is not None and process.stdin is not None
        if not any(line.strip() == "ready" for line in iter(process.stdout.readline, "")):
            raise ValueError("it was never ready")
        with self.timing:
            self._others(process.pid, signal.SIGSTOP)
            try:
                process.stdin.write("go\n")
                process.stdin.flush()
                answer: dict[str, Any] = json.loads(process.stdout.read().strip().splitlines()[-1])
                return answer
            finally:
                self._others(process.pid, signal.SIGCONT)

    def _keep(self, rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> None:
        with self.lock, self.out.open("a") as stream:
            for row in rows:
                answer = found.get(row["flag"], {"error": "no answer"})
                stream.write(json.dumps({**row, "measured": answer, **self.about}) + "\n")
                print(f"{row['question']:22} {row['flag'][:60]:60} {answer.get('gain', answer.get('error'))} said {row['speedup']:.2f}", flush=True)

    def _others(self, mine: int, what: signal.Signals) -> None:
        with self.lock:
            for pid in self.going:
                if pid != mine:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, what)


def groups_of(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Changes of a question that fit the device beside the step as it is, in as few groups as come; the first questions first."""
    base = {row["question"]: row["device_bytes"] for row in rows if not row["change"]}
    found: list[list[dict[str, Any]]] = []
    for name in dict.fromkeys(row["question"] for row in rows):
        left: list[dict[str, Any]] = []
        for row in ({**row, "base_bytes": base[name]} for row in rows if row["question"] == name and row["change"]):
            if left and sum(one["device_bytes"] for one in left) + row["device_bytes"] + base[name] > DEVICE_BYTES:
                found.append(left)
                left = []
            left.append(row)
        found += [left] if left else []
    return found


def measure(path: Path, out: Path, seconds: float) -> None:
    import torch

    about = {
        "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": os.environ.get("COMMIT", ""),
    }  # fmt: skip
    done = {(row["question"], row["flag"]) for row in map(json.loads, out.read_text().splitlines())} if out.exists() else set()
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if (row["question"], row["flag"]) not in done]
    groups, runs = groups_of(rows), Runs(out, about, time.monotonic() + seconds)
    for first in range(0, len(groups), WAVE):  # what was compiled is measured before more is: a run that is cut short has whole questions
        wave = groups[first : first + WAVE]
        runs.warm([row for group in wave for row in group if "compile" in row["options"]])
        with ThreadPoolExecutor(READY) as pool:
            list(pool.map(runs.question, wave))


def share(gain: float) -> float:
    """Of the step that is saved."""
    return 1 - 1 / gain


def tell(path: Path) -> None:
    """Gains beside promises: signs, shares of the step that are saved (middles), ranges."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    shown = [(row, _gain(row, rows)) for row in rows if row["change"]]
    ran = [(row, gain) for row, gain in shown if gain is not None]
    for row, gain in ran:
        print(f"{row['question']:22} {row['flag'][:66]:66} said {row['speedup']:5.2f} {_range(row)}  measured {gain:5.2f}  {_sure(row)}")
    print(f"{len(shown) - len(ran)} changes did not run")
    for name, part in (
        ("advised", [one for one in ran if one[0]["joins"] == 1 and one[0].get("sure", True)]),
        ("told as unsure", [one for one in ran if one[0]["joins"] == 1 and not one[0].get("sure", True)]),
        ("joint", [one for one in ran if one[0]["joins"] > 1]),
    ):
        if not part:
            continue
        off = sorted(abs(share(row["speedup"]) - share(gain)) for row, gain in part)
        inside = sum(row["low"] <= gain <= row["high"] for row, gain in part if "low" in row)
        print(f"{name}: {len(part)} changes, {sum(gain > 1 for _, gain in part)} are faster; share saved within 10 points in "
              f"{sum(one <= 0.10 for one in off)} (median {100 * statistics.median(off):.1f} points); inside the printed range {inside} of "
              f"{sum('low' in row for row, _ in part)}")  # fmt: skip


def _gain(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    now = row["measured"]
    if "gain" in now:
        return float(now["gain"])
    own = [one["measured"] for one in rows if one["question"] == row["question"] and not one["change"]]  # the first round: runs of their own
    base = own[0] if own else {}
    if "seconds" not in now or "seconds" not in base:
        return None
    return float(base["seconds"] / now["seconds"] * now["samples"] / base["samples"])


def _range(row: Mapping[str, Any]) -> str:
    return f"({row['low']:.2f} to {row['high']:.2f})" if "low" in row else ""


def _sure(row: Mapping[str, Any]) -> str:
    return "" if row.get("sure", True) else "unsure"


def order(path: Path) -> None:
    """The most telling first: questions with more kinds of changes, and with wider ranges."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_question: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_question.setdefault(row["question"], []).append(row)

    def telling(some: list[dict[str, Any]]) -> tuple[bool, float]:
        changes = [row for row in some if row["change"]]
        return any("compile" in row["options"] for row in changes), sum(math.log(row["high"] / row["low"]) for row in changes)

    ranked = sorted(by_question.values(), key=telling, reverse=True)
    path.write_text("".join(json.dumps(row) + "\n" for some in ranked for row in some))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--draw", help="ask other models, drawn by this seed, the changes that `fit` shows; with --predict")
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--tell", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further run is begun")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(json.loads(given.one))))
    elif given.warm:
        warmed(json.loads(given.warm))
    elif given.predict:
        predict(given.predict, given.only.split(",") if given.only else [], given.draw)
    elif given.measure:
        measure(given.measure, given.out, given.seconds)
    elif given.tell:
        tell(given.tell)


def predict(path: Path, only: Sequence[str], seed: str | None) -> None:
    from advice_draw import drawn

    asked = drawn(seed) if seed else QUESTIONS
    done = {json.loads(line)["question"] for line in path.read_text().splitlines()} if path.exists() else set()
    for name in only or asked:
        if name in done:
            continue
        try:
            rows = predicted(name, asked[name], joins=seed is None)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        with path.open("a") as stream:
            stream.write("".join(json.dumps({**row, **({"seed": seed} if seed else {})}) + "\n" for row in rows))
        print(name, *(f"{row['speedup']:.2f} {row['flag']};" for row in rows[1:]), flush=True)
    if seed and path.exists():
        order(path)


if __name__ == "__main__":
    main()
