"""One setting tried: a server in a process of its own, a load sent to it, and its steps as it wrote them down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretell.errors import UserError
from foretell.lower.serving import StepShape
from foretell.plan.types import ServeLayout
from foretell.runtime.process.launch import end_with_parent
from foretell.search.serving.settings import ServeFigures, key_of
from foretell.serve.bench.client import Endpoint
from foretell.serve.bench.figures import BenchRun, run_of
from foretell.serve.bench.sweep import BenchAsked, sent
from foretell.serve.record import STEPS
from foretell.serve.tune.table import MeasuredSettings
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.records import Limit
from foretell.trace.sandbox.process import package_parent

START_SECONDS, END_SECONDS = 900.0, 20.0
WARM_SECONDS, WARM_USERS = 1.0, 4
CALIBRATION = (1, 2, 4, 8, 16, 32, 64)
"""Users whose steps are measured where none can be predicted."""


@dataclass(frozen=True, kw_only=True)
class ServedWhat:
    """The model of all trials, as `foretell serve` is told it."""

    model: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0

    def words(self, layout: ServeLayout) -> list[str]:
        words = [self.model, "--device", self.device, "--dtype", self.dtype, "--seed", str(self.seed), "--pages", str(layout.pages)]
        words += ["--page", str(layout.page), "--running", str(layout.running), "--tokens", str(max(layout.tokens, layout.running))]
        words += ["--share" if layout.share else "--no-share", "--graphs" if layout.graphs else "--no-graphs"]
        words += ["--compile" if layout.compiled else "--no-compile", "--tp", str(layout.tp), "--pp", str(layout.pp)]
        words += [] if self.weights is None else ["--init-from", self.weights]
        for name, value in self.overrides.items():
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return words


class TrialServer:
    """`foretell serve` with some settings, until it is closed; it ends with this process however that ends."""

    def __init__(self, what: ServedWhat, layout: ServeLayout, folder: Path, limit: float = START_SECONDS) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "foretell", "serve", *what.words(layout), "--port", "0", "--json", "--out", str(folder)]
        paths = [package_parent(), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        began = time.monotonic()
        self.said: list[bytes] = []
        self.process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True,
            preexec_fn=end_with_parent(os.getpid(), signal.SIGKILL),
        )  # fmt: skip
        try:
            threading.Thread(target=self._hear, daemon=True).start()
            told = self._told(limit)
        except BaseException:
            self.process.kill()
            self.close()
            raise
        self.start_seconds = time.monotonic() - began
        self.model = str(told["model"])
        self.token_bytes = int(told["kv_bytes_per_token"])
        self.endpoint = Endpoint(host="127.0.0.1", port=int(told["port"]), path="/v1")

    def _hear(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said = [*self.said[-20:], line]

    def _told(self, limit: float) -> Any:
        """What it prints when it is ready; raises what it says where it is not."""
        late = threading.Timer(limit, self.process.kill)
        late.start()
        try:
            assert self.process.stdout is not None
            lines = []
            for line in self.process.stdout:
                lines.append(line)
                if line.rstrip() == b"}":
                    break
        finally:
            late.cancel()
        found = None
        with contextlib.suppress(ValueError):
            found = json.loads(b"".join(lines))
        if isinstance(found, dict) and "serve" in found:
            return found["serve"]
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            raise UserError(str(found["error"].get("message")), str(found["error"].get("remedy") or "see foretell serve"))
        code = self.process.wait()
        last = next((line.decode(errors="replace").strip() for line in reversed(self.said) if line.strip()), "")
        raise UserError(f"the server did not start: status {code}{': ' if last else ''}{last[:200]}", "foretell serve with these settings says more")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def __enter__(self) -> TrialServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ loads

    def run(self, load: Load, limit: Limit, seconds: float) -> BenchRun:
        asked = BenchAsked(endpoint=self.endpoint, load=load, seconds=seconds)
        answers = asyncio.run(sent(asked, self.model, load))
        arrivals = 0.0 if load.kind in ("users", "all") else seconds if load.kind == "rate" else load.seconds
        return run_of(answers, limit, load.seed, arrivals)

    def warm(self, load: Load) -> None:
        """What the first requests alone pay for."""
        self.run(_of_users(load, WARM_USERS, seed=991), Limit(), WARM_SECONDS)


def _of_users(load: Load, users: int, seed: int) -> Load:
    """Requests of such lengths, from users who wait for their answers."""
    if load.kind == "trace":
        prompt, output = load.mean
        shape = Load(kind="users", amount=users)
        return replace(shape, prompt=replace(load.prompt, mean=round(prompt)), output=replace(load.output, mean=round(output)), seed=seed)
    return replace(load, kind="users", amount=users, seed=seed)


def measured(what: ServedWhat, layout: ServeLayout, load: Load, limit: Limit, seconds: float, repeats: int = 1) -> MeasuredSettings:
    """A row: the load sent to a server with these settings, the middle of some repeats."""
    busy = os.getloadavg()[0]
    row = MeasuredSettings(settings=key_of(layout), figures=None, busy=busy, date=datetime.now(UTC).date().isoformat())
    with tempfile.TemporaryDirectory(prefix="foretell-tune-") as folder:
        try:
            with TrialServer(what, layout, Path(folder) / "server") as server:
                server.warm(load)
                runs = [server.run(replace(load, seed=load.seed + number), limit, seconds) for number in range(repeats)]
                start = server.start_seconds
        except UserError as error:
            return replace(row, failed=error.problem[:300])
    if not any(run.answered for run in runs):
        why = next(iter(runs[0].reasons), "no request was answered")
        return replace(row, failed=why[:300], start_seconds=start)
    return replace(row, figures=figures_of_runs(runs, load.mean[1]), start_seconds=start)


def figures_of_runs(runs: Sequence[BenchRun], output: float) -> ServeFigures:
    """The middle of all runs."""

    def middle(name: str, part: str = "") -> float:
        return statistics.median(getattr(run, name)[part] if part else getattr(run, name) for run in runs)

    first, after = middle("ttft_seconds", "p95"), middle("tpot_seconds", "p95")
    return ServeFigures(
        tokens_per_second=middle("output_tokens_per_second"), inside=middle("inside"), ttft_p50=middle("ttft_seconds", "p50"), ttft_p95=first,
        tpot_p50=middle("tpot_seconds", "p50"), tpot_p95=after, answer_seconds=first + after * max(0.0, output - 1),
    )  # fmt: skip


def calibrated(what: ServedWhat, layout: ServeLayout, load: Load, seconds: float) -> tuple[list[StepShape], list[float], int]:
    """Steps of few and of many users with requests of the load's lengths, and what they took; bytes of a token's keys and values."""
    with tempfile.TemporaryDirectory(prefix="foretell-tune-") as folder:
        place = Path(folder) / "server"
        with TrialServer(what, layout, place) as server:
            server.warm(load)
            skipped = len(steps_of(place)[0])
            for number, users in enumerate(one for one in CALIBRATION if one <= layout.running):
                server.run(_of_users(load, users, seed=997 + number), Limit(), seconds)
        shapes, took = steps_of(place)
        return shapes[skipped:], took[skipped:], server.token_bytes


def steps_of(folder: Path) -> tuple[list[StepShape], list[float]]:
    """What a server wrote down of its steps."""
    shapes, took = [], []
    for line in (folder / STEPS).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the last one, while it is written
            row = json.loads(line)
            shapes.append(StepShape(row["generating"], row["attended"], tuple(map(tuple, row["chunks"])), row["samples"]))
            took.append(float(row["seconds"]))
    return shapes, took
