"""DistributedDataParallel itself on two ranks: most bytes alive at once, by PyTorch's own record of allocations, against what is lowered."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foretell.lower.ddp import Replicas, replicated
from foretell.runtime.process.pool import PoolWorld
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload

STEPS = 3
CASES = {
    "one micro-batch": {"view": False, "accumulate": 1, "last_only": False},
    "each sums": {"view": False, "accumulate": 3, "last_only": False},
    "the last sums": {"view": False, "accumulate": 3, "last_only": True},
    "views": {"view": True, "accumulate": 1, "last_only": False},
    "views, each sums": {"view": True, "accumulate": 3, "last_only": False},
    "views, the last sums": {"view": True, "accumulate": 3, "last_only": True},
}  # fmt: skip


class Net(nn.Module):
    """With a frozen layer, statistics, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.norm, self.aside = nn.BatchNorm1d(256), nn.Linear(256, 128)
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.norm(x).square().mean()


def most(view: bool, accumulate: int, last_only: bool) -> int:
    """Of a real run, from before the model is made; in the last of three steps, when all states are there."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as seen:
        x = torch.randn(64, 256)
        quiet_start = {"init_sync": False, "broadcast_buffers": False}  # what these send is often let go of by a thread that the record misses
        model = DistributedDataParallel(Net(), gradient_as_bucket_view=view, find_unused_parameters=True, **quiet_start)
        optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), foreach=False)
        for step in range(STEPS):
            with torch.profiler.record_function(f"step {step}"):
                for micro in range(accumulate):
                    quiet = last_only and micro < accumulate - 1
                    with model.no_sync() if quiet else contextlib.nullcontext():
                        model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = {one.name(): (one.start_ns(), one.end_ns()) for one in events if one.name().startswith("step ")}
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    begin, end = steps[f"step {STEPS - 1}"]
    alive, peak = 0, 0
    for at, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive) if begin <= at <= end else peak
    return peak


def all_of_them(rank: int, world: int, names: tuple[str, ...]) -> dict[str, int]:
    return {name: most(**CASES[name]) for name in names}


CROSSED = ("views, each sums", "the last sums")
"""Views and copies, micro-batches that sum and that wait."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(CROSSED, id="crossed"),
        pytest.param(tuple(name for name in CASES if name not in CROSSED), id="the others",
                     marks=pytest.mark.slow(reason="each of the two is among those that are crossed")),
    ],
)  # fmt: skip
def test_buckets_are_those_of_pytorch(names: tuple[str, ...], ranks: Callable[[int], PoolWorld]) -> None:
    seen: list[dict[str, int]] = ranks(2).run(all_of_them, names)

    def build() -> Workload:
        return Workload(Net(), {"x": torch.randn(64, 256)})

    said = {}
    for name in names:
        case = CASES[name]
        trace = capture(build, Recipe(precision="fp32", optimizer="adamw-loop", accumulate=case["accumulate"]), capability=None)
        trained = sum(one.nbytes for one in trace.storages.values() if one.role == types.GRADIENT)
        aside = 4 * (256 * 128 + 128)
        how = Replicas(ranks=2, view=case["view"], last_only=case["last_only"], nbytes=trained + aside, unused=True, buffers=False)
        lowered = replicated(trace, how)
        said[name] = peak_live(lowered, tuple(lowered.schedule))
        sent = [op for program, times in lowered.schedule["steady_step"] for op in lowered.programs[program].ops if op.name == "foretell.all_reduce"]
        assert sum(op.bytes_read for op in sent) == (trained + aside) * (1 if case["last_only"] or case["accumulate"] == 1 else 2)
    for own in seen:
        for name, peak in own.items():  # numbers that hooks and norms need beside, some hundred bytes
            assert 0 <= peak - said[name] < 1024, (name, said[name], peak)


