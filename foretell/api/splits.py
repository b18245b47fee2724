"""A split of `plan --infer` run on this machine: predicted beside measured, and the answer beside the whole model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foretell.cores import physical_cores
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.runtime.infer.pipeline import SplitPipeline
from foretell.runtime.infer.stage import tensors_of
from foretell.search.inference.split import InferenceSplit
from foretell.search.inference.units import InferPlan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import COMPUTES
from foretell.trace.record.step import call_model

MOST_ALONE = 50
"""Requests of which latency is the median."""


@dataclass(frozen=True, kw_only=True)
class SplitRun:
    """An answer."""

    over: str
    cuts: tuple[str, ...]
    devices: tuple[str, ...]
    requests: int
    predicted_latency_seconds: float
    latency_seconds: float
    predicted_per_second: float
    per_second: float
    stage_seconds: tuple[float, ...]
    """That each stage computes while no other does, measured."""
    sends_bytes: tuple[int, ...]
    """Of a request, over each link between stages."""
    off: float
    """Of the whole model's answer, the largest difference as a share of its largest number; 0: bit for bit."""
    best_is_run: bool
    """Of the front, the one with most requests a second; else the best that begins each part with a module."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_split(source: Source, on: str, found: InferPlan, precision: str, over: str, requests: int) -> SplitRun:
    """Run the split with most requests a second, all of its stages on this machine."""
    names = {name for name, _ in load(source).model.named_modules() if name}
    way = _chosen(found, names)
    cuts = cuts_of(way, found)
    cluster = parse(on)
    devices = tuple("cpu" if cluster.part_of(part.device).device.backend == "cpu" else f"cuda:{part.device}" for part in way.parts)
    if not cuts:
        raise UserError("the split with most requests a second is of one device: there is nothing to run apart", "--on 1x2xCPU, or other devices")
    threads = max(1, physical_cores() // max(1, devices.count("cpu")))
    with SplitPipeline(source, cuts=cuts, over=over, dtype=COMPUTES[precision], devices=devices, threads=threads) as split:
        answer = split(split.request)
        with torch.no_grad():
            whole = tensors_of(call_model(split.whole, split.batch(split.request)))
        latency, stages = split.latency_seconds(min(requests, MOST_ALONE))
        rate = split.per_second(requests)
        sends = tuple(split.sends_bytes(stage) for stage in range(1, len(way.parts)))
    return SplitRun(
        over=over, cuts=cuts, devices=devices, requests=requests, predicted_latency_seconds=way.latency_seconds, latency_seconds=latency,
        predicted_per_second=way.per_second, per_second=rate, stage_seconds=stages, sends_bytes=sends,
        off=_off(answer, whole), best_is_run=way == found.busiest,
    )  # fmt: skip


def cuts_of(way: InferenceSplit, found: InferPlan) -> tuple[str, ...]:
    """The module that begins each part after the first."""
    return tuple(found.units[part.first] for part in way.parts[1:])


def _chosen(found: InferPlan, names: set[str]) -> InferenceSplit:
    fine = [way for way in found.front if all(cut in names for cut in cuts_of(way, found))]
    if not fine:
        raise UserError("no split of the front begins each part with a module of the model", "--on with other devices")
    return min(fine, key=lambda way: (way.slowest_seconds, way.latency_seconds))


def _off(answer: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> float:
    worst = 0.0
    for one, other in zip(answer, whole, strict=True):
        if not torch.equal(one, other):
            worst = max(worst, float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-30)))
    return worst
