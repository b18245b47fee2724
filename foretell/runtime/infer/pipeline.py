"""A model split over processes of this machine: requests go in, answers come out, several are under way.

    with SplitPipeline(source, cuts=("blocks.6",), over="tcp") as split:
        logits = split(tokens)                 # an answer
        split.latency_seconds(20)              # one request at a time
        split.per_second(200)                  # as they follow each other
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.runtime.infer.links import Closed, accept, connect, listener, nbytes
from foretell.runtime.infer.stage import SplitForms, SplitModel
from foretell.runtime.infer.worker import as_served
from foretell.runtime.parallel.pipeline.part import BoundaryTensor
from foretell.runtime.process.launch import end_with_parent
from foretell.trace.load.model import Source, load
from foretell.trace.sandbox.process import package_parent

OVER = ("tcp", "gloo")
START_SECONDS, END_SECONDS = 600.0, 10.0
WARM = 3
"""Requests that nothing is measured of."""


class SplitPipeline:
    """Stages as processes, which end with this one however it ends."""

    def __init__(
        self, source: Source, *, cuts: Sequence[str], over: str = "tcp", dtype: str = "float32", devices: Sequence[str] = (), seed: int = 0,
        threads: int = 1, weights: Path | None = None,
    ) -> None:  # fmt: skip
        if over not in OVER:
            raise UserError(f"stages talk over {over!r}", f"one of {', '.join(OVER)}")
        self.count, self.over = len(cuts) + 1, over
        devices = tuple(devices) or ("cpu",) * self.count
        lacking = [one for one in devices if one.startswith("cuda") and int(one.partition(":")[2] or 0) >= torch.cuda.device_count()]
        if len(devices) != self.count or lacking:
            raise UserError(f"{self.count} stages on {', '.join(devices)}, and {torch.cuda.device_count()} GPUs are here", "devices that are here")
        looked = _looked_at(source, cuts, dtype, seed, weights)
        self.whole, self.request, self.forms, self.batch = looked.model, looked.request, looked.forms, looked.batch
        self.folder = Path(tempfile.mkdtemp(prefix="foretell-infer-"))
        self.token = secrets.token_bytes(32)
        self._stages: list[subprocess.Popen[str]] = []
        self._under_way: Queue[bool] = Queue()
        self.took: tuple[float, ...] = ()
        """Seconds that each stage computed for the newest answer."""
        told = {
            "source": asdict(source), "cuts": list(cuts), "over": over, "dtype": dtype, "seed": seed, "threads": threads,
            "weights": None if weights is None else str(weights), "token": self.token.hex(), "store": str(self.folder / "stages"),
        }  # fmt: skip
        try:
            self._start(told, devices)
        except BaseException:
            self.close()
            raise

    def _start(self, told: dict[str, Any], devices: Sequence[str]) -> None:
        paths = [package_parent(), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": str(told["threads"])}
        for stage, device in enumerate(devices):
            process = subprocess.Popen(
                [sys.executable, "-m", "foretell.runtime.infer.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
                start_new_session=True, preexec_fn=end_with_parent(os.getpid(), 9),
            )  # fmt: skip
            self._stages.append(process)
            self._tell(stage, {**told, "stage": stage, "device": device})
        ports = [int(self._hear(stage, "port")) for stage in range(self.count)]
        sees = [bool(self._hear(stage, "sees")) for stage in range(self.count)]
        wants = tuple(any(sees[stage:]) for stage in range(self.count))
        self.forms = SplitForms(inputs=self.forms.inputs, crossing=self.forms.crossing, outputs=self.forms.outputs, wants=wants)
        place = listener()
        try:
            ends = [*ports[1:], place.getsockname()[1]]
            for stage in range(self.count):
                self._tell(stage, {"sees": sees})
                self._tell(stage, {"next": ends[stage]})
            self._into = connect("127.0.0.1", ports[0], self.token, "link 0")
            self._back = accept(place, self.token, f"link {self.count}")
        except Closed as error:
            raise self._lost(str(error)) from error
        finally:
            place.close()
        for stage in range(self.count):
            self._hear(stage, "linked")

    @property
    def processes(self) -> list[int]:
        return [one.pid for one in self._stages]

    def sends_bytes(self, stage: int) -> int:
        """Of a message to a stage."""
        return sum(map(nbytes, self.forms.into(stage)))

    # ------------------------------------------------------------------ requests

    def __call__(self, batch: Any) -> tuple[Tensor, ...]:
        """The answer to a request: the tensors that the model gives."""
        leaves = pytree.tree_leaves(batch)
        asked, wanted = tuple(map(BoundaryTensor.of, leaves)), self.forms.inputs
        if asked != wanted:
            told = [", ".join(f"{one.dtype} {one.shape}" for one in some) for some in (asked, wanted)]
            raise UserError(f"a request of {told[0]}", f"as the stages were made for: {told[1]}")
        self.send(leaves, answer=True)
        return self.receive()

    def send(self, leaves: Sequence[Tensor], *, answer: bool) -> None:
        self._under_way.put(answer)
        ends = torch.tensor([answer], dtype=torch.uint8), torch.zeros(self.count, dtype=torch.float64)
        try:
            self._into.send((*leaves, *ends))
        except Closed as error:
            raise self._lost(str(error)) from error

    def receive(self) -> tuple[Tensor, ...]:
        """The oldest request's answer, or nothing where it was not wanted."""
        try:
            *found, _, took = self._back.receive(self.forms.back(self._under_way.get()))
        except Closed as error:
            raise self._lost(str(error)) from error
        self.took = tuple(took.tolist())
        return tuple(found)

    def latency_seconds(self, requests: int) -> tuple[float, tuple[float, ...]]:
        """The median of some, one after the other; and of what each stage computes, while no other does."""
        found, stages = [], []
        for number in range(requests + WARM):
            began = time.perf_counter()
            self.send(self.request, answer=False)
            self.receive()
            if number >= WARM:
                found.append(time.perf_counter() - began)
                stages.append(self.took)
        return statistics.median(found), tuple(statistics.median(each) for each in zip(*stages, strict=True))

    def per_second(self, requests: int) -> float:
        """As they follow each other: so many are under way that no stage waits for the caller."""
        room, failed = threading.Semaphore(2 * self.count + 2), []

        def feed() -> None:
            try:
                for _ in range(requests + WARM):
                    room.acquire()
                    self.send(self.request, answer=False)
            except UserError as error:
                failed.append(error)

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        began = 0.0
        for number in range(requests + WARM):
            self.receive()
            room.release()
            if number == WARM - 1:
                began = time.perf_counter()
        thread.join()
        if failed:
            raise failed[0]
        return requests / (time.perf_counter() - began)

    # ------------------------------------------------------------------ processes

    def _tell(self, stage: int, what: dict[str, Any]) -> None:
        stream = self._stages[stage].stdin
        assert stream is not None
        with contextlib.suppress(OSError):  # what became of it is told when it is heard
            stream.write(json.dumps(what) + "\n")
            stream.flush()

    def _hear(self, stage: int, name: str) -> Any:
        stream = self._stages[stage].stdout
        assert stream is not None
        late = threading.Timer(START_SECONDS, self._stages[stage].kill)
        late.start()
        try:
            line = stream.readline()
        finally:
            late.cancel()
        if not line:
            raise self._lost(f"stage {stage} did not start")
        told = json.loads(line)
        if "refused" in told:
            raise UserError(f"stage {stage}: {told['refused'][0]}", told["refused"][1])
        return told[name]

    def _lost(self, words: str) -> UserError:
        time.sleep(0.2)
        codes = {stage: code for stage, process in enumerate(self._stages) if (code := process.poll()) is not None}
        first = next((stage for stage, code in codes.items() if code < 0), next(iter(codes), None))
        if first is None:
            return UserError(f"the split is broken: {words}", "start it anew")
        code = codes[first]
        why = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return UserError(f"stage {first} is gone: {why}", "see what it said above, and start it anew")

    def close(self) -> None:
        for link in (getattr(self, "_into", None), getattr(self, "_back", None)):
            if link is not None:
                link.close()
        until = time.monotonic() + END_SECONDS
        for process in self._stages:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._stages:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> SplitPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _looked_at(source: Source, cuts: Sequence[str], dtype: str, seed: int, weights: Path | None) -> SplitModel:
    """The whole model with the stages' own weights, a request, and what will travel; refuses what cannot be cut so."""
    torch.manual_seed(seed)
    workload = load(source)
    kind = getattr(torch, dtype)
    model = workload.model.to(kind)
    if weights is not None:
        load_into(model, weights)
    return SplitModel(model, as_served(workload.batch, kind, torch.device("cpu")), cuts)
