"""Plans whose activations are moved: the losses of the plain run, on one rank and on two, to the host and to disk."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.eject.script import needs_runtime
from foretell.errors import UserError
from foretell.export import export
from foretell.plan import file as plans
from foretell.plan.legal import check
from foretell.plan.recipe import recipe_of
from foretell.plan.types import MASTER, Mesh, Plan, Residency
from foretell.runtime.check import verify
from foretell.runtime.offload import saved as moving
from foretell.runtime.offload.memory.disk import DiskFile
from foretell.runtime.offload.saved import OffloadedActivations
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.trace.load.model import Source
from tests.cpu_dist.test_offload_run import losses, plan
from tests.pure.test_saved import CPU, gradients, loss_of, made, nothing_left, same

HOST, DISK, FULL = Residency(mode="host"), Residency(mode="disk"), Residency(mode="recompute")
LEAST = 256
GPT = Source(model="gpt-tiny", overrides={"layers": 4, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16, "dropout": 0.1}, micro_batch=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of tiny models move too."""
    monkeypatch.setattr(moving, "LEAST", LEAST)


def test_a_run_that_moves_activations_has_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    steps = ("--steps", "4", "--no-save")
    plain = losses(tmp_path / "plain", plan(precision=MASTER), *steps)
    moved = plan(precision=MASTER, blocks={"blocks.0-1": HOST}, states={"blocks.0-2": "host"})
    assert losses(tmp_path / "moved", moved, *steps) == plain
    several = plan(precision=MASTER, blocks={"blocks.0": HOST, "blocks.1": FULL, "blocks.2": DISK})
    assert losses(tmp_path / "several", several, *steps) == plain


def _steps(rank: int, world: int, blocks: dict[str, Residency], mesh: Mesh, precision: str) -> tuple[list[float], dict[str, Any], int, int]:
    moving.LEAST = LEAST
    asked = Plan(model={}, hardware="auto", micro_batch=2, accumulate=2, precision=precision, clip=0.1, mesh=mesh, blocks=blocks)
    ranks = start(asked)
    torch.manual_seed(0)
    workload = verify.build(GPT)
    job = apply(workload, asked, ranks, learning_rate=1e-2)
    torch.manual_seed(rank)
    found = [job.train_step([workload.batch] * 2).loss.item() for _ in range(3)]
    job.backward([workload.batch] * 2)
    grads = {name: value.cpu() for name, value in job.gradients().items()}
    away = job.away
    counts = (away.moved.down, away.hosts.live) if away is not None else (0, 0)
    job.close()
    return found, grads, *counts


@pytest.mark.slow(reason="two worlds; one rank does the same above")
def test_ranks_that_share_parameters_move_their_own_activations(ranks: Any) -> None:
    plain = ranks(2).run(_steps, {}, Mesh(dp_shard=2), "bf16-mixed")
    moved = ranks(2).run(_steps, {"blocks.0-2": HOST}, Mesh(dp_shard=2), "bf16-mixed")
    for (expected, grads, _, _), (found, own, down, live) in zip(plain, moved, strict=True):
        assert found == expected
        assert down > 0
        assert live == 0
        same(own, grads)


@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_activations_on_disk_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    model, batch, loss, blocks = made(name)
    moved = copy.deepcopy(model)
    shelf = functools.partial(DiskFile, folder=tmp_path, reserve=0)
    places = {path: "disk" if place else "host" for place, path in enumerate(blocks[:-1])}
    saved = OffloadedActivations(moved, places, CPU, shelf=shelf, least=LEAST, grow=4096)
    for _ in range(3):
        for one in (model, moved):
            loss_of(one, batch, loss).backward()
        same(gradients(moved), gradients(model))
        nothing_left(saved)
        assert saved.shelves.live == 0
    assert saved.shelves.nbytes >= saved.bounces.nbytes > 0
    assert sum(piece.written_bytes for piece, _ in saved.shelves.pieces) > 0
    saved.close()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_is_said_and_nothing_hangs(tmp_path: Path) -> None:
    model, batch, loss, blocks = made("gpt")

    class Broken(DiskFile):
        def read(self, *args: Any, **kwargs: Any) -> Any:
            return self.later(self._broken)

        def _broken(self) -> None:
            raise OSError(5, "Input/output error")

    saved = OffloadedActivations(model, dict.fromkeys(blocks, "disk"), CPU, shelf=functools.partial(Broken, folder=tmp_path, reserve=0), least=LEAST)
    with pytest.raises(OSError, match="Input/output error"):
        loss_of(model, batch, loss).backward()
    saved.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"mesh": Mesh(tp=2)}, "whole blocks"),
        ({"mesh": Mesh(cp=2)}, "whole blocks"),
        ({"compile": "blocks"}, "never checked"),
    ],
)
def test_what_cannot_be_moved_is_said(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check(plan(blocks={"blocks.0-1": HOST}, **more))


def test_such_a_plan_is_written_shown_and_not_ejected(tmp_path: Path) -> None:
    asked = plan(blocks={"blocks.0-1": HOST, "blocks.2": DISK}, hardware="H100")
    plans.write(asked, tmp_path / "plan.json")
    assert plans.read(tmp_path / "plan.json") == asked
    assert ("blocks.0-1: host", "moving activations is foretell's own") in needs_runtime(asked)
    for tool in ("accelerate", "deepspeed"):
        assert any("activations of blocks.0-1, blocks.2 are moved" in line for line in export(asked.with_(precision="bf16-mixed"), tool).lost)
    assert recipe_of(asked).recompute == "none"
