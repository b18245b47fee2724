"""Adapters on real ranks: a packed base that is shared, updates that are trained, and checkpoints of these alone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foretell.checkpoint import store
from foretell.errors import UserError
from foretell.plan.types import Adapters, Mesh, Plan, Residency
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.trace.load.model import Source
from tests.cpu_dist.test_checkpoint import LOSS_BOUND, SETTINGS, go, losses
from tests.further import further

Pools = Callable[[int], PoolWorld]
SOURCE = Source(model="gpt-tiny", overrides={"layers": 2, "dim": 40, "heads": 4, "vocab_size": 256, "context": 16}, micro_batch=2)
"""Weights of 40 × 40 are 25 blocks of 64, which no number of ranks shares evenly."""
PLAN = Plan(
    model={"model": SOURCE.model, "overrides": SOURCE.overrides, "seq": 16}, hardware="CPU", micro_batch=2, accumulate=4, precision="fp32",
    adapters=Adapters(kind="dora", rank=3, alpha=6.0),
    base={"adapted": "nf4-double", "up": "nf4", "out": "bf16", "blocks.0.mlp.down": "int8", "blocks.1.mlp.down": "float8"},
)  # fmt: skip
STEPS = 4


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(rank: int, world: int, plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of a few steps, and after them the packed weights, gathered, and the adapters."""
    torch.set_num_threads(1)
    ranks = start(plan, device="cpu")
    job = apply(verify.build(SOURCE), plan, ranks, learning_rate=1e-2)
    every = verify.batches(SOURCE, plan.mesh.data * plan.accumulate)
    mine = [every[number * ranks.data_size + ranks.data_rank] for number in range(plan.accumulate)]
    found = [job.train_step(mine).loss.item() for _ in range(STEPS)]
    for name, parameter in job.named_parameters():
        if ".base_" in name and world > 1:
            assert isinstance(parameter, DTensor) and parameter.to_local().dtype == (torch.bfloat16 if ".out." in name else torch.uint8)
            assert parameter.to_local().shape[1:] == parameter.shape[1:]  # rows are blocks of 64, and stay whole
    return found, {name: whole(p.detach()).clone() for name, p in job.named_parameters()}


@pytest.mark.parametrize("precision", further(["fp32", "bf16-mixed", "bf16"], ["fp32"], "cast as weights without adapters are"))
@pytest.mark.parametrize("world", further([2, 4], [2], "two ranks share rows unevenly too"))
def test_ranks_hold_the_bytes_and_have_the_losses_of_one_process(ranks: Pools, world: int, precision: str) -> None:
    plan = PLAN.with_(precision=precision)
    one, alone = ranks(1).run(trained, plan)[0]
    answers = ranks(world).run(trained, plan.with_(mesh=Mesh(dp_shard=world), accumulate=4 // world))
    shared, there = answers[0]
    packed = [name for name in alone if ".base_" in name]
    assert len(packed) == 14 and all(torch.equal(alone[name], there[name]) for name in packed)
    assert all(losses == shared for losses, _ in answers) and one[-1] < one[0]
    rel = LOSS_BOUND if precision == "fp32" else 2**-8 * math.sqrt(STEPS)
    assert shared == pytest.approx(one, rel=rel)


def test_a_plan_with_adapters_is_verified(ranks: Pools) -> None:
    """Recompute, accumulation and clipping beside it, on shards."""
    plan = PLAN.with_(
        mesh=Mesh(dp_shard=2), accumulate=2, blocks={"blocks.*": Residency(mode="recompute")}, adapters=Adapters(rank=3, train=("norm",)),
    )  # fmt: skip
    known = verify.reference(SOURCE, plan, 3)
    found = verify.compare(known, verify.merge(ranks(2).run(verify.run_rank, SOURCE, plan, 3)))
    assert found.good, found
    assert {name.rpartition(".")[2] for name in known.gradients} == {"lora_A", "lora_B", "weight", "bias"}


@pytest.mark.parametrize("count", further([1, 2], [1], "from two ranks to one, as from one to two"))
def test_checkpoints_have_what_is_trained_and_go_on_on_any_number_of_ranks(count: int, ranks: Pools, tmp_path: Path) -> None:
    plans = {1: PLAN, 2: PLAN.with_(mesh=Mesh(dp_shard=2), accumulate=2)}
    plan, other = plans[count], plans[3 - count]
    ranks(count).run(go, str(tmp_path / "first"), plan, {**SETTINGS, "steps": 2})
    saved = store.complete(tmp_path / "first" / "checkpoints")[0]
    kinds = {name.rpartition(".")[2] for name in saved.manifest.tensors if name.startswith("model/")}
    assert kinds == {"lora_A", "lora_B", "lora_magnitude"}
    for name in ("crossed", "again"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
    for name, under in (("first", plan), ("crossed", other), *([("again", plan)] if count == 1 else [])):
        ranks(under.mesh.world).run(go, str(tmp_path / name), under, {"steps": 4}, resume=True)
    straight = losses(tmp_path / "first")
    assert losses(tmp_path / "crossed") == pytest.approx(straight, rel=LOSS_BOUND)
    if count == 1:
        assert losses(tmp_path / "again") == straight
        first, second = (store.complete(tmp_path / name / "checkpoints")[0].manifest.files for name in ("first", "again"))
        assert [file.crc32 for file in first.values()] == [file.crc32 for file in second.values()]
        _refused(tmp_path / "first", PLAN)


def _refused(place: Path, plan: Plan) -> None:
    """Another base, and another format of the base, are not what the adapters were trained on."""
    with pytest.raises(UserError, match=r"differs from that of .* in base"):
        go(0, 1, str(place), plan.with_(base={}), {"steps": 6}, resume=True)
    settings = place / "settings.json"
    settings.write_text(settings.read_text().replace('"seed": 3', '"seed": 4'))
    with pytest.raises(UserError, match="trained on another base"):
        go(0, 1, str(place), plan, {"steps": 6}, resume=True)


def test_activations_on_the_host_change_nothing(ranks: Pools) -> None:
    plain, _ = ranks(1).run(trained, PLAN)[0]
    moved, _ = ranks(1).run(trained, PLAN.with_(blocks={"blocks.*": Residency(mode="host")}))[0]
    assert moved == plain


def _kinds() -> list[Any]:
    return [replace(PLAN.adapters, kind=kind) for kind in ("lora", "rslora", "dora-norm") if PLAN.adapters is not None]


@pytest.mark.parametrize("adapters", further(_kinds(), _kinds()[:1], "dora is run by all other tests here"))
def test_every_kind_trains_on_ranks(ranks: Pools, adapters: Adapters) -> None:
    plan = PLAN.with_(adapters=adapters)
    one, _ = ranks(1).run(trained, plan)[0]
    two, _ = ranks(2).run(trained, plan.with_(mesh=Mesh(dp_shard=2), accumulate=2))[0]
    assert two == pytest.approx(one, rel=LOSS_BOUND) and one[-1] < one[0]
