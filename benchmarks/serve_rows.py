"""Rows of published serving runs as questions: model, devices, weights, engine, load, and what was measured. A row that leaves something
open which a prediction needs is refused with the reason; nothing is guessed.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from foretell.errors import ForetellError
from foretell.hardware import parse
from foretell.hardware.types import Cluster
from foretell.price.serving.engines import EngineProfile, engine, host_factor
from foretell.simulate.serving.load import Lengths, Load, Request

MODELS = Path(__file__).resolve().parent / "data" / "serving_models.toml"
QUANTITIES = ("ttft", "tpot", "output_tok_s", "total_tok_s", "latency")
ENGINES = {
    "vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm", "trt-llm": "trtllm", "trtllm": "trtllm", "tensorrt": "trtllm",
    "gpt-fast": "gpt-fast",
}  # fmt: skip
DEVICES = {"rtx6000-pro-blackwell": "RTX-PRO-6000", "rtx-pro-6000": "RTX-PRO-6000"}
FORMATS = (
    (r"^(bf16|fp16|float16|bfloat16|fp16/bf16|16-bit|half)$", "bf16"), (r"^(fp8|float8|fp8[-_ ]?(e4m3|dynamic|static|w8a8)?|mxfp8)$", "fp8"),
    (r"^(fp4|nvfp4|mxfp4)$", "fp4"), (r"^int8(-eetq|-woq|-weight-only)?$", "int8"), (r"^int4-g32$", "int4-g32"),
    (r"^(int4|int4-(awq|gptq|w4a16|g128)|awq|gptq|w4a16)$", "int4"),
)  # fmt: skip
TEXT_SHAPE = 0.9
"""Of the Weibull law that lengths of texts which people wrote are drawn from: the longest of ten is then 3.2 times their mean, as run times
of the smallest bursts have it."""
TEXT_STEPS = 256
"""Of the law, that its mean is found from."""
TEXT_LONGEST = 1024
"""Tokens of a prompt or an answer, as the client of these benchmarks drops longer ones."""
MOST_REQUESTS = 6000
"""That are simulated of a run with more: throughput is that of all, a run's latency is scaled."""
POISSON_SECONDS = 600.0
MOST_ARRIVALS = 20_000
"""Of a rate, where the row does not say how many requests there were: MLPerf's runs take ten minutes at least."""
ACCEPTED_SECONDS = 0.8e-3
"""Of a server's event loop for a request that comes over HTTP, on an H100's machine. It takes all that are there before the engine's next step: of a
burst none begins earlier than the last. Assumed."""
MOST_CONNECTIONS = 1024
"""Files that a process may have open by default: of a larger burst no more are answered."""
OLD_STEP = 2048
"""Tokens of a step at least, of vLLM without chunks; at most a longest request."""


class LeftOut(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    type: str
    layers: int
    set: Mapping[str, Any]
    experts: bool = False
    positions: int = 0
    """Tokens of a request at most, prompt and answer; 0: more than any row asks for."""


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """One published configuration."""

    id: str
    source: str
    engine: EngineProfile
    known: bool
    """The engine is one that something is known of."""
    model: PublishedModel
    cluster: Cluster
    tp: int
    pp: int
    apart: bool
    """Ranks have sequences of their own (simulate.serving.engines)."""
    replicas: int
    weights: str
    load: Load
    accepted: float
    """Seconds from when all requests of a burst were sent to when they are known: part of the time to the first token."""
    requests: int
    stat: Mapping[str, str]
    published: Mapping[str, float]
    assumed: tuple[str, ...]


@cache
def models() -> list[dict[str, Any]]:
    return list(tomllib.loads(MODELS.read_text(encoding="utf-8"))["model"])


def model_of(name: str) -> PublishedModel:
    plain = re.sub(r"[ _]", "-", name.strip().lower().rpartition("/")[2]).removeprefix("meta-")
    found = [(len(m[0]), one) for one in models() for pattern in one["names"] if (m := re.search(pattern, plain))]
    if not found:
        raise LeftOut(f"model not known: {name or 'none given'}")
    one = max(found, key=lambda pair: pair[0])[1]
    if "missing" in one:
        raise LeftOut(one["missing"])
    experts = any("expert" in key for key in one["set"])
    return PublishedModel(type=one["type"], layers=one["layers"], set=one["set"], experts=experts, positions=one.get("positions", 0))


def number(text: object, least: float = 0.0) -> float | None:
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if least <= found < 1e12 else None


def read(row: Mapping[str, Any]) -> ServingRow:
    """A row as a question."""
    def cell(key: str) -> str:
        return str(row.get(key) or "").strip()

    published = _published(row)
    if not published:
        raise LeftOut("nothing measured that is predicted")
    if cell("spec_decode").lower() not in ("", "no", "none", "false", "off", "0"):
        raise LeftOut(f"speculative decoding: {cell('spec_decode')}")
    name = cell("engine").lower()
    key = next((ours for theirs, ours in ENGINES.items() if name == theirs or name.startswith(f"{theirs} ")), None)
    if not name or name.startswith("(") or "transformers" in name:
        raise LeftOut(f"engine: {cell('engine') or 'none given'}")
    if (number(cell("ep")) or 1) > 1:
        raise LeftOut("expert parallel")
    stages = int(number(cell("pp"), 1) or 1)
    model = model_of(cell("model"))
    gpus, tp = number(cell("gpus"), 1), number(cell("tp"), 1)
    if gpus is None and tp is None:
        raise LeftOut("number of GPUs not given")
    ranks = int(tp or gpus or 1)
    world = int(gpus or ranks * stages)
    if world % (ranks * stages) or ranks * stages > 8:
        raise LeftOut(f"{world} GPUs, tp {ranks}, pp {stages}")
    assumed: list[str] = [] if tp is not None or world == 1 else ["tp: all GPUs"]
    if key is None:
        assumed.append(f"engine {cell('engine')}: nothing is known of it")
    cluster = _cluster(cell("gpu"), ranks * stages, number(cell("gpu_mem_gb"), 1))
    profile = _limited(engine(key or "other", cell("engine_version"), cluster.device.backend), cell("notes"))
    apart = profile.experts_apart and model.experts and ranks > 1
    replicas = world // stages if apart else world // (ranks * stages)
    load, requests = _load(row, replicas, assumed)
    burst = len(load.recorded) if cell("load_kind").lower() == "burst" else 0
    if model.positions and load.longest > model.positions:
        raise LeftOut(f"longer than the model's positions: {load.longest} tokens of {model.positions}")
    return ServingRow(
        id=cell("id") or cell("url"), source=cell("source") or "none", engine=profile, known=key is not None, model=model, cluster=cluster,
        tp=ranks, pp=stages, apart=apart, replicas=replicas, weights=_weights(cell("weights"), assumed), load=load, requests=requests,
        accepted=burst * ACCEPTED_SECONDS * host_factor(cluster.device),
        stat={"ttft": cell("ttft_stat"), "tpot": cell("tpot_stat")}, published=published, assumed=tuple(assumed),
    )  # fmt: skip


def _limited(profile: EngineProfile, notes: str) -> EngineProfile:
    """With the limits that a row names."""
    length, running = (re.search(rf"{name} (\d+)", notes) for name in ("max_model_len", "max_num_seqs"))
    if running:
        profile = replace(profile, running=int(running[1]))
    if length and profile.prompts_first:
        profile = replace(profile, tokens=max(OLD_STEP, profile.running, int(length[1])))
    return profile


def _published(row: Mapping[str, Any]) -> dict[str, float]:
    given = {
        "ttft": (row.get("ttft_ms"), 1e-3), "tpot": (row.get("tpot_ms"), 1e-3), "output_tok_s": (row.get("output_tok_s"), 1.0),
        "total_tok_s": (row.get("total_tok_s"), 1.0), "latency": (row.get("latency_s"), 1.0),
    }  # fmt: skip
    found = {name: value * unit for name, (text, unit) in given.items() if (value := number(text, 1e-9)) is not None}
    if str(row.get("tpot_stat") or "") == "limit":
        found.pop("tpot", None)
    if "per gpu" in str(row.get("notes") or "").lower() or "per_gpu" in str(row.get("notes") or "").lower():
        found.pop("total_tok_s", None)
        found.pop("output_tok_s", None)
    return found


def _weights(text: str, assumed: list[str]) -> str:
    plain = text.lower()
    if not plain:
        assumed.append("weights: 16 bits")
        return "bf16"
    for pattern, name in FORMATS:
        if re.match(pattern, plain):
            return name
    raise LeftOut(f"weights: {text}")


def _cluster(gpu: str, ranks: int, gigabytes: float | None) -> Cluster:
    plain = re.sub(r"\s*\(.*\)", "", gpu).strip()
    if not plain or plain.lower().startswith("unknown"):
        raise LeftOut("GPU not given")
    tried = (plain, re.sub(r"-\d+GB$", "", plain), *(ours for theirs, ours in DEVICES.items() if plain.lower().startswith(theirs)))
    for name in tried:
        try:
            cluster = parse(name if ranks == 1 else f"{ranks}x{name}")
        except ForetellError:
            continue
        if cluster.device.backend == "cpu":
            raise LeftOut(f"a CPU: {gpu}")
        if gigabytes is not None and not 0.85 < gigabytes / (cluster.device.memory_nominal_bytes / 2**30) < 1.15:
            raise LeftOut(f"GPU not in the catalogue with that memory: {gpu}")
        return cluster
    raise LeftOut(f"GPU not in the catalogue: {gpu}")


def _load(row: Mapping[str, Any], replicas: int, assumed: list[str]) -> tuple[Load, int]:
    lengths = str(row.get("lengths") or "")
    prompt, output = number(row.get("input_len"), 1), number(row.get("output_len"), 1)
    said_in = re.search(r"input mean[^()]*\(about (\d+)\)|about (\d+) in", lengths)
    said_out = re.search(r"in, (\d+) out", lengths)
    if prompt is None and said_in:
        prompt = float(said_in[1] or said_in[2])
        assumed.append(f"prompts of about {prompt:g} tokens")
    if output is None and said_out:
        output = float(said_out[1])
    if prompt is None or output is None:
        raise LeftOut("lengths of prompts or answers not given")
    kind, said = str(row.get("load_kind") or "").lower(), str(row.get("load") or "")
    many = number(row.get("num_requests"), 1)
    amount = number(re.sub(r"[^0-9.].*$", "", said.lstrip("~")), 1e-6)
    spread = _spread(lengths)
    if kind in ("batch", "burst", "offline"):
        count = many or (amount if kind == "batch" else None)
        if count is None and "all at once" in said:
            count = float(MOST_REQUESTS * replicas)
            assumed.append("as many requests as keep it busy")
        if count is None:
            raise LeftOut("number of requests not given")
        if kind == "burst":
            count = many = min(count, MOST_CONNECTIONS)
        count = min(MOST_REQUESTS, max(1, round(count / replicas)))
        drawn = _drawn(count, prompt, output, spread)
        requests = tuple(Request(0.0, *one) for one in drawn)
        return Load(kind="trace", recorded=requests), round(many / replicas) if many else count
    if amount is None:
        raise LeftOut(f"load: {kind} {said}")
    if kind in ("concurrency", "users", "closed"):
        users = max(1, round(amount / replicas))
        if many is not None and many / replicas < users:
            users = max(1, round(many / replicas))
        return Load(kind="users", amount=users, prompt=_lengths(prompt, spread), output=_lengths(output, spread)), int(many or 0) // replicas
    if kind in ("poisson", "rate"):
        rate = amount / replicas
        drawn = _drawn(int(min(MOST_ARRIVALS, max(1.0, many / replicas if many else rate * POISSON_SECONDS))), prompt, output, spread)
        source, at, arrivals = random.Random(0), 0.0, []
        for one in drawn:
            at += source.expovariate(rate)
            arrivals.append(Request(at, *one))
        return Load(kind="trace", recorded=tuple(arrivals)), len(arrivals)
    raise LeftOut(f"load: {kind or 'none given'} {said}")


def _spread(lengths: str) -> str:
    plain = lengths.lower()
    if "sharegpt" in plain or "orca" in plain or "gsm8k" in plain:
        return "texts"
    if "uniform" in plain:
        return "uniform"
    return "80-100" if "80-100" in plain else "fixed"


def _lengths(mean: float, spread: str) -> Lengths:
    if spread in ("uniform", "texts"):
        return Lengths(mean=mean, low=max(1, round(0.18 * mean)), high=round(1.82 * mean))
    return Lengths(mean=mean)


def _law(count: int) -> list[float]:
    """So many lengths at even steps of the law."""
    return [(-math.log(1 - (place + 0.5) / count)) ** (1 / TEXT_SHAPE) for place in range(count)]


@cache
def _scale(mean: float, count: int) -> float:
    """At which they have this mean, cut off as they are."""
    raw, low, high = _law(count), 0.0, 10 * mean
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(TEXT_LONGEST, middle * one) for one in raw) < mean * count else (low, middle)
    return low


def _drawn(count: int, prompt: float, output: float, spread: str) -> list[tuple[int, int]]:
    """Lengths with these means; of texts that people wrote: at even steps of their law, in any order, cut off where the client does."""
    source = random.Random(0)

    def some(mean: float) -> Iterator[int]:
        if spread != "texts":
            law = _lengths(mean, spread)
            yield from (max(1, law.drawn(source)) for _ in range(count))
            return
        raw, scale = _law(count), _scale(mean, min(count, TEXT_STEPS))
        source.shuffle(raw)
        yield from (max(1, min(TEXT_LONGEST, round(scale * one))) for one in raw)

    return list(zip(some(prompt), some(output), strict=True))
