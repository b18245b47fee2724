"""Predict drawn configurations and gather those that a sealed forecast has. No device is touched.

Traces are made on fake tensors in processes of their own, several at a time; what was predicted is kept in a journal
beside the file that is to be sealed, so that a forecast which was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import ForetellError, UserError
from foretell.hardware import overhead
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster
from foretell.price.calibrate.kin import kin_of
from foretell.prove import seal
from foretell.prove.draw import draw
from foretell.prove.types import Config, Forecast, Sealed
from foretell.quantities import NO
from foretell.simulate.memory.memory import predict_memory, run_order, sizes_for, smallest_limit
from foretell.simulate.parts import TORCH
from foretell.simulate.plan import Options, PlanCost, predict_step
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.sandbox.child import request
from foretell.trace.types import Trace
from foretell.units import MIB

TOGETHER = 8
"""Draws that are traced by one process."""
MOST_SECONDS = {"cuda": 0.5, "cpu": 1.0}
"""A step that is predicted to take longer is passed over, so that many rows can be measured."""
MOST_SHARE = {"cuda": 0.85, "cpu": 0.25}
"""Of the device's memory."""
LEAST_NEAR_BYTES = 2 << 30
"""A step that needs less is not run near a limit: there the granularity of the allocator decides."""
COMPILED_SHARE = 0.1
"""Rows that may be compiled: compiling takes most of a minute."""

PACERS = ("llama-tiny", "bert-tiny", "resnet-tiny", "unet-tiny")
"""Models of the zoo that say how a CPU runs now; none of them is ever drawn."""
PACED_BAND = (1 / 1.25, 1 / 0.75)
"""A CPU whose pace is taken beside the row is expected within a quarter of the prediction at least. Assumed."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """What is to be forecast."""

    seed: str
    count: int
    cluster: Cluster
    reported_as: str | None = None
    """Of a CPU: what it calls itself."""

    @property
    def kind(self) -> str:
        return "cpu" if self.cluster.device.backend == "cpu" else "cuda"

    @property
    def memory_bytes(self) -> int:
        return self.cluster.device.memory_bytes

    def profile(self, name: str) -> Profile | None:
        return find_profile(name, reported_as=self.reported_as)


def forecast(
    asked: ForecastRequest, versions: Mapping[str, str], made: str, *, journal: Path | None = None, progress: Progress = lambda _: None
) -> Sealed:
    """Draw, predict and choose rows until there are as many as asked for, about half of them near a limit of memory."""
    if asked.count < 1:
        raise UserError(f"-n {asked.count} is no number of configurations", "ask for 1 or more, such as -n 20")
    code = seal.own_code()
    book = _Journal(journal, f"{code[:16]}/{asked.seed}/{asked.cluster.device.name}/{asked.memory_bytes}")
    picked = _Picked(asked.count, asked.kind)
    passed: list[tuple[int, str]] = []
    for row in _predicted(asked, book, progress):
        why = _too_much(row, asked) or picked.take(row)
        if why:
            passed.append((row.config.index, why))
        progress(f"{picked.size} of {asked.count} configurations predicted")
        if picked.full:
            break
    return Sealed(
        seed=asked.seed, count=asked.count, device=asked.reported_as or asked.cluster.device.name,
        backend=asked.cluster.device.backend, memory_bytes=asked.memory_bytes,
        rules={"most_seconds": MOST_SECONDS[asked.kind], "most_memory_share": MOST_SHARE[asked.kind]},
        rows=picked.rows(), passed_over=tuple(passed), profile=_stamp(asked), versions=dict(versions), code=code,
        pacers=_pacers(asked), made=made,
    )  # fmt: skip


def _stamp(asked: ForecastRequest) -> dict[str, str]:
    """Which profile the seconds rest on."""
    device = asked.cluster.device
    found = next((known for name in (device.name, *kin_of(device)) if (known := asked.profile(name)) is not None), None)
    if found is None:
        return {}
    content = json.dumps(found.to_dict(), sort_keys=True)
    return {"device": found.device, "reported_as": found.reported_as, "date": found.date, "torch": found.torch,
            "sha256": hashlib.sha256(content.encode()).hexdigest()}  # fmt: skip


# ---------------------------------------------------------------------------------------------- which draws are rows


@dataclass
class _Picked:
    """The rows so far: half near a limit where there are limits, few compiled."""

    count: int
    kind: str
    near: list[Forecast] = field(default_factory=list)
    free: list[Forecast] = field(default_factory=list)

    @property
    def wanted_near(self) -> int:
        return 0 if self.kind == "cpu" else (self.count + 1) // 2

    @property
    def size(self) -> int:
        return len(self.near) + len(self.free)

    @property
    def full(self) -> bool:
        return self.size >= self.count

    def take(self, row: Forecast) -> str:
        """Empty where the row is taken, otherwise why it is not."""
        if row.config.compile != "none":
            compiled = sum(one.config.compile != "none" for one in self.free)
            if compiled >= max(1, int(COMPILED_SHARE * self.count)):
                return "enough are compiled"
        if row.limit_bytes is not None and len(self.near) < self.wanted_near:
            self.near.append(row)
            return ""
        if len(self.free) >= self.count - self.wanted_near:
            return "enough are run without a limit"
        self.free.append(replace(row, config=replace(row.config, near=None), limit_bytes=None, limit_verdict=""))
        return ""

    def rows(self) -> tuple[Forecast, ...]:
        return tuple(sorted((*self.near, *self.free), key=lambda row: row.config.index))


def _too_much(row: Forecast, asked: ForecastRequest) -> str:
    most = MOST_SHARE[asked.kind] * asked.memory_bytes
    if row.error:
        return ""
    if row.verdict == NO or max(row.bytes.values()) > most:
        return f"predicted to need {max(row.bytes.values()) / 2**30:.1f} GiB"
    if row.seconds is not None and row.seconds > MOST_SECONDS[asked.kind]:
        return f"predicted to take {row.seconds:.2f} s a step"
    return ""


# ---------------------------------------------------------------------------------------------- predictions


def _predicted(asked: ForecastRequest, book: _Journal, progress: Progress) -> Iterator[Forecast]:
    """Draw after draw, predicted."""
    index, together = 0, min(TOGETHER, asked.count)
    while True:
        configs = [draw(asked.seed, index + step, asked.kind, asked.memory_bytes) for step in range(together)]
        index += together
        missing = [config for config in configs if config.index not in book.rows]
        for config, trace in zip(missing, traces_of(missing, asked, progress), strict=True):
            book.add(trace if isinstance(trace, Forecast) else predict(config, trace, asked))
        for config in configs:
            yield book.rows[config.index]


def traces_of(configs: Sequence[Config], asked: ForecastRequest, progress: Progress) -> Iterator[Trace | Forecast]:
    """Traces in order; where one cannot be made, a forecast that says so."""
    from foretell.search.traces.child import trace_all
    from foretell.trace.store.file import loads

    requests = [_request(config, asked) for config in configs]
    if not requests:
        return
    try:
        yield from [loads(text) for text, _ in trace_all(requests, progress)]
        return
    except ForetellError:
        pass
    for config, one in zip(configs, requests, strict=True):  # find out which
        try:
            yield loads(trace_all([one], progress)[0][0])
        except ForetellError as error:
            yield Forecast(config=config, error=str(error).splitlines()[0][:300])


def _request(config: Config, asked: ForecastRequest) -> dict[str, Any]:
    capability = () if asked.kind == "cpu" else asked.cluster.device.compute_capability or (9, 0)
    recipe = replace(config.recipe(), compile="none")
    asks = request(config.source(), recipe, capability, {})
    return {**asks, "in_turn": True}  # losses as `measure` runs them: the user's own step, not a plan's


def _pacers(asked: ForecastRequest) -> dict[str, float]:
    """Small models of the zoo and their seconds by this CPU's profile."""
    from foretell.search.traces.child import trace_all
    from foretell.trace.store.file import loads

    if asked.kind != "cpu":
        return {}
    recipe = Recipe(precision="fp32")
    requests = [request(Source(model=model, micro_batch=2), recipe, (), {}) for model in PACERS]
    found: dict[str, float] = {}
    for model, (text, _) in zip(PACERS, trace_all(requests), strict=True):
        trace = loads(text)
        time = predict_step(trace, recipe, asked.cluster, Options(profile_of=asked.profile), micro_batch=2).time
        found |= {model: time.step_seconds} if time is not None else {}
    return found


def predict(config: Config, counted: Trace, asked: ForecastRequest) -> Forecast:
    """Bytes, seconds and verdicts of a traced configuration."""
    try:
        return _on_cpu(config, counted, asked) if asked.kind == "cpu" else _on_gpu(config, counted, asked)
    except Exception as error:  # a row that cannot be predicted is a row, and a miss
        return Forecast(config=config, error=f"{type(error).__name__}: {error}"[:300])


def _on_gpu(config: Config, counted: Trace, asked: ForecastRequest) -> Forecast:
    cluster = asked.cluster
    extra = overhead(cluster.device, TORCH)
    cost = _cost(config, counted, asked)
    time, memory, trace = cost.time, cost.worst.memory, cost.programs[0]
    bands: dict[str, tuple[float, float]] = {name: memory.bands[f"{name}_bytes"] for name in ("allocated", "reserved", "device")}
    if time is not None:
        bands["seconds"] = (time.low_seconds, time.high_seconds)
    limit, verdict = None, ""
    if config.near is not None:
        need = smallest_limit(trace, sizes_for(cluster, extra), run_order(trace))
        if need >= LEAST_NEAR_BYTES:
            limit = int(need * config.near) // (2 * MIB) * 2 * MIB
            device = cluster.device.with_memory(limit + extra.context_bytes, "a limit for this row")
            verdict = predict_memory(trace, replace(cluster, device=device), extra).verdict
    return Forecast(
        config=config,
        bytes={"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "device": memory.device_bytes},
        bands=bands, seconds=time.step_seconds if time else None, verdict=cost.verdict, limit_bytes=limit,
        limit_verdict=verdict,
    )  # fmt: skip


def _cost(config: Config, counted: Trace, asked: ForecastRequest) -> PlanCost:
    return predict_step(counted, config.recipe(), asked.cluster, Options(profile_of=asked.profile), micro_batch=config.micro_batch)


def _on_cpu(config: Config, counted: Trace, asked: ForecastRequest) -> Forecast:
    cost = _cost(config, counted, asked)
    time, memory = cost.time, cost.worst.memory
    bands: dict[str, tuple[float, float]] = {"allocated": memory.bands["allocated_bytes"]}
    if time is not None:
        low, high = (factor * time.step_seconds for factor in PACED_BAND)
        bands["seconds"] = (min(low, time.low_seconds), max(high, time.high_seconds))
    return Forecast(
        config=config, bytes={"allocated": memory.allocated_bytes}, bands=bands,
        seconds=time.step_seconds if time else None, verdict=cost.verdict,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the journal


class _Journal:
    """Predictions so far, on disk where a path is given; those of other code, seed or device do not count."""

    def __init__(self, path: Path | None, key: str) -> None:
        self.path, self.key = path, key
        self.rows: dict[int, Forecast] = {}
        if path is None or not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                kept = json_of(line)
                if kept["key"] == key:
                    row = Forecast.from_json(kept["row"])
                    self.rows[row.config.index] = row
            except (ValueError, KeyError, TypeError):
                continue  # a line that was cut off

    def add(self, row: Forecast) -> None:
        self.rows[row.config.index] = row
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": self.key, "row": row.to_json()}) + "\n")
