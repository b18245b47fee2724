"""Judge so many models in a process that is replaced when it dies; reduce what fails; tell the whole. No torch here."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from foretell.prove.fuzz.types import Failure, FuzzVerdict

HANG_SECONDS = 90.0
"""After which a model that does not answer is ended."""
SHRINK_SECONDS = 180.0
MOST_SHRUNK = 25
"""Failures of a campaign that are reduced; of others the whole model is written."""
WITHIN = 0.05

Progress = Callable[[str], None]


@dataclass
class Campaign:
    """What was found so far."""

    seed: str
    asked: int
    verdicts: list[FuzzVerdict] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[FuzzVerdict]:
        return [one for one in self.verdicts if one.failure is not None]

    def summary(self) -> dict[str, Any]:
        measured = [one for one in self.verdicts if one.measured]
        errors = sorted(abs(one.error) for one in measured)
        return {
            "seed": self.seed, "asked": self.asked, "models": len(self.verdicts), "ops": sum(one.ops for one in self.verdicts),
            "operators": len({name for one in self.verdicts for name in one.names}),
            "with_blocks": sum(one.blocks > 0 for one in self.verdicts), "redrawn": sum(one.redrawn for one in self.verdicts),
            "traced": sum(one.traced for one in self.verdicts), "measured": len(measured),
            "memory_within": sum(error <= WITHIN for error in errors),
            "memory_median": statistics.median(errors) if errors else None, "memory_worst": errors[-1] if errors else None,
            "composed": sum(one.composed for one in self.verdicts),
            "refused": _counted(one.refused for one in self.verdicts), "failures": len(self.failed),
            "failures_by_kind": _counted(one.failure.kind for one in self.failed if one.failure is not None),
            "files": list(self.files), "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def line(self) -> str:
        """The whole in a line."""
        told = self.summary()
        memory = f"median {told['memory_median']:.2%}, worst {told['memory_worst']:.2%}" if told["measured"] else "none measured"
        end = f"failures {told['failures']}" + (f" → {', '.join(self.files)}" if self.files else "")
        return (
            f"{told['models']} models, {told['ops']} ops of {told['operators']} kinds; traced {told['traced']}, memory within "
            f"{WITHIN:.0%} {told['memory_within']} ({memory}), composed equal {told['composed']}; {end}"
        )


def _counted(words: Iterable[str]) -> dict[str, int]:
    """How often each word was said."""
    return dict(sorted(Counter(filter(None, words)).items()))


class Worker:
    """A process that judges, as long as it lives."""

    def __init__(self, seed: str, ops: int) -> None:
        self.seed, self.ops = seed, ops
        self.process: Any = None
        self.pipe: Connection | None = None

    def ask(self, what: str, index: int, more: Any, seconds: float) -> dict[str, Any] | str:
        """Its answer, or why there is none."""
        if self.process is None or not self.process.is_alive():
            self._start()
        assert self.pipe is not None
        try:
            self.pipe.send((what, index, more))
            if not self.pipe.poll(seconds):
                self.stop()
                return f"hang: no answer in {seconds:.0f} s"
            answer: dict[str, Any] = self.pipe.recv()
            return answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self.process.join(10)
            code = self.process.exitcode
            self.stop()
            return f"crash: the process ended with {code}"

    def _start(self) -> None:
        from foretell.prove.fuzz.worker import serve

        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.seed, self.ops), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join(10)
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None


def run(seed: str, count: int, ops: int, folder: Path, *, progress: Progress = lambda _: None) -> Campaign:
    """Judge models 0 to count - 1 of a seed. Rows are written as they are known; what was found stays when it is stopped."""
    found = Campaign(seed, count)
    worker = Worker(seed, ops)
    began = time.monotonic()
    try:
        for index in range(count):
            verdict = _judged(worker, index)
            found.verdicts.append(verdict)
            found.seconds = time.monotonic() - began
            _write_row(folder, verdict)
            if verdict.failure is not None:
                progress(f"model {index}: {verdict.failure.kind}: {verdict.failure.said.splitlines()[0][:160]}")
                found.files.append(str(_written(worker, verdict, folder, shrink=len(found.files) < MOST_SHRUNK)))
            if (index + 1) % 25 == 0 or index + 1 == count:
                progress(f"{index + 1} of {count} models, {len(found.failed)} failures, {found.seconds:.0f} s")
    except KeyboardInterrupt:
        progress(f"stopped after {len(found.verdicts)} of {count} models")
    finally:
        worker.stop()
        found.seconds = time.monotonic() - began
    return found


def _judged(worker: Worker, index: int) -> FuzzVerdict:
    answer = worker.ask("judge", index, None, HANG_SECONDS)
    if isinstance(answer, str):
        return FuzzVerdict(index, failure=Failure(answer.partition(":")[0], f"the model was to be judged; {answer}"))
    return FuzzVerdict.from_json(answer)


def _write_row(folder: Path, verdict: FuzzVerdict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w" if verdict.index == 0 else "a", encoding="utf-8") as stream:
        stream.write(json.dumps(verdict.to_json()) + "\n")


def _written(worker: Worker, verdict: FuzzVerdict, folder: Path, *, shrink: bool) -> Path:
    """The failure as a file: reduced where that can be done in time, else the whole model."""
    assert verdict.failure is not None
    path = folder / f"{verdict.failure.kind}_{verdict.index}.py"
    answer = worker.ask("shrink", verdict.index, asdict(verdict.failure), SHRINK_SECONDS) if shrink and _reducible(verdict) else ""
    if isinstance(answer, str):
        answer = worker.ask("whole", verdict.index, asdict(verdict.failure), HANG_SECONDS)
    text = answer["text"] if isinstance(answer, dict) else f'"""{verdict.failure.said}"""\n'
    path.write_text(text, encoding="utf-8")
    return path


def _reducible(verdict: FuzzVerdict) -> bool:
    return verdict.failure is not None and verdict.failure.kind not in ("crash", "hang", "fuzzer")


def operators_seen(verdicts: Sequence[FuzzVerdict]) -> Mapping[str, int]:
    """Operator → models that have it."""
    names = [name for one in verdicts for name in one.names]
    return {name: names.count(name) for name in sorted(set(names))}
