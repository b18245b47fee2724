"""Which blocks selective recomputation can take: said from a trace of the plain step, and held against PyTorch's own answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.search.block_costs.residency import KEEP, MODES, RECOMPUTE, SELECTIVE, modes_of
from foretell.search.solve.choose import SearchConstraints, choose
from foretell.simulate.plan import Options
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload

WIDTH = 64


class Block(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(WIDTH, WIDTH), nn.Sequential(*between), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))  # type: ignore[no-any-return]


class Seen(nn.Module):
    """A view of a product's result is changed: so is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x).view(-1, 8).mul_(0.5)).view(x.shape)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in place on a product": lambda: Block(nn.ReLU(inplace=True)),
    "not in place": lambda: Block(nn.ReLU()),
    "in place on something else": lambda: Block(nn.LayerNorm(WIDTH), nn.ReLU(inplace=True)),
    "in place on a view of a product": Seen,
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def workload(kind: str) -> Workload:
    return Workload(Model(kind), {"x": torch.randn(4, WIDTH)}, lambda output, batch: output.square().mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_what_is_said_is_what_pytorch_does(kind: str, precision: str) -> None:
    build = functools.partial(workload, kind)
    said = modes_of(capture(build, Recipe(precision=precision)))
    again = functools.partial(capture, build, Recipe(precision=precision, recompute="selective"))
    if SELECTIVE in said:
        again()
        return
    assert said == (KEEP, RECOMPUTE)
    with pytest.raises(ModelError, match="selective recompute cannot take"):
        again()


def test_both_answers_are_among_them() -> None:
    said = {kind: modes_of(capture(functools.partial(workload, kind), Recipe(precision="fp32"))) for kind in KINDS}
    assert [kind for kind, modes in said.items() if modes == MODES] == ["not in place", "in place on something else"]


CODE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.on, self.down = nn.Linear(256, 1024), nn.ReLU(inplace=True), nn.Linear(1024, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.on(self.act(self.up(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model():
    return Model()


def batch(model, micro_batch):
    return {"x": torch.randn(micro_batch, 512, 256)}


def loss(output, batch):
    return output.square().mean()
"""


@pytest.mark.parametrize("device", [pytest.param("H200", marks=pytest.mark.slow(reason="a second search; the plan runs on a CPU either way")), "CPU"])
def test_a_plan_for_such_a_model_is_one_that_runs(device: str, tmp_path: Path) -> None:
    """In so little memory that something must be computed again; with exact costs the search would stop at a plan PyTorch refuses."""
    (tmp_path / "model.py").write_text(CODE)
    source, cluster = Source(model=f"{tmp_path / 'model.py'}:model"), parse(device)
    options = Options(profile_of=functools.cache(find_profile))
    wishes = SearchConstraints(global_batch=16, micro_batch=16, precision="fp32", compile=("none",), ranks=(1,))
    free = choose(source, cluster, device, wishes, options=options)
    assert free.best is not None and free.best.cost is not None and not free.best.plan.blocks
    need = free.best.cost.worst.memory.device_bytes
    less = replace(cluster, device=cluster.device.with_memory(int(0.9 * need), "less than the plain step needs"))
    for exact in (True, False):
        found = choose(source, less, device, wishes, options=options, exact=exact)
        assert found.best is not None
        assert {residency.mode for residency in found.best.plan.blocks.values()} == {RECOMPUTE}
