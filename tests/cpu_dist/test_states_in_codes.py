"""Moments in 8 and 4 bits on real ranks: the codes of one process whoever holds the rows, and checkpoints that move between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from foretell.checkpoint import store
from foretell.checkpoint.read import Reader
from foretell.errors import UserError
from foretell.plan.types import Adapters, Mesh, Pipeline, Plan
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.runtime.process.pool import PoolWorld
from foretell.runtime.train.take import stage
from foretell.trace.load.model import Source
from tests.cpu_dist.test_checkpoint import PLANS, SETTINGS, carried, go
from tests.further import further

Pools = Callable[[int], PoolWorld]
SOURCE = Source(model="gpt-tiny", overrides={"layers": 2, "dim": 72, "heads": 4, "vocab_size": 256, "context": 16}, micro_batch=2)
"""Rows of 72 and 288 elements: blocks of 256 and of 128 end before they are full."""
PLAN = Plan(
    model={"model": SOURCE.model, "overrides": SOURCE.overrides, "seq": 16}, hardware="CPU", micro_batch=2, accumulate=4, precision="fp32",
    state_format="int8",
)  # fmt: skip
STEPS = 3


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def updated(rank: int, world: int, plan: Plan) -> tuple[dict[str, Tensor], int]:
    """Weights and states after updates by the same gradients on any number of ranks; and the bytes of states here."""
    torch.set_num_threads(1)
    job = apply(verify.build(SOURCE), plan, start(plan, device="cpu"), learning_rate=1e-2)
    for step in range(STEPS):
        for number, (_, one) in enumerate(sorted((name, one) for name, one in job.named_parameters() if one.requires_grad)):
            grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * step + number)).square() * 0.1 - 0.05
            one.grad = distribute_tensor(grad, one.device_mesh, one.placements) if isinstance(one, DTensor) else grad
        job.optimizer.step()
    found = {name: whole(one.detach()).clone() for name, one in job.named_parameters()}
    names, held = {p: name for name, p in job.named_parameters()}, 0
    for one, state in job.optimizer.state.items():
        found |= {f"{names[one]}/{key}": whole(value).clone() for key, value in state.items()}
        held += sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in state.values())
    return found, held


@pytest.mark.parametrize("state_format", ["int8", "int4"])
@pytest.mark.parametrize("world", further([2, 4], [2], "two ranks share rows unevenly too"))
def test_ranks_have_the_codes_of_one_process(ranks: Pools, world: int, state_format: str) -> None:
    plan = PLAN.with_(state_format=state_format)
    (alone, bytes_alone), = ranks(1).run(updated, plan)
    answers = ranks(world).run(updated, plan.with_(mesh=Mesh(dp_shard=world), accumulate=4 // world))
    assert alone.keys() == answers[0][0].keys() and sum("_code" in name for name in alone) == 2 * 2 * 4
    coded = {name.partition("/")[0] for name in alone if name.endswith("_code")}
    assert not [name for name in alone if name.partition("/")[0] in coded and not torch.equal(alone[name], answers[0][0][name])]
    for name in alone:  # torch's own kernel rounds by where in a vector an element is
        torch.testing.assert_close(answers[0][0][name], alone[name])
    assert bytes_alone <= sum(held for _, held in answers) <= 1.05 * bytes_alone


def test_so_do_adapters_over_a_base_in_4_bits(ranks: Pools) -> None:
    """Of a rank that is long enough: rows of both factors."""
    plan = PLAN.with_(adapters=Adapters(kind="dora", rank=64), base={"adapted": "nf4"})
    (alone, _), = ranks(1).run(updated, plan)
    there, _ = ranks(2).run(updated, plan.with_(mesh=Mesh(dp_shard=2), accumulate=2))[0]
    coded = {name.partition("/")[0] for name in alone if name.endswith("_code")}
    assert {name.rpartition(".")[2] for name in coded} == {"lora_A", "lora_B"} and len(coded) == 2 * 2 * 4
    assert not [name for name in alone if name.partition("/")[0] in coded and not torch.equal(alone[name], there[name])]


@pytest.mark.parametrize(("precision", "mesh"), [("fp32", Mesh(dp_shard=2)), ("bf16-mixed", Mesh(dp_replicate=2)), ("fp32", Mesh(pp=2))],
                         ids=["shards", "replicas", "stages"])  # fmt: skip
def test_a_plan_with_codes_is_verified(ranks: Pools, precision: str, mesh: Mesh) -> None:
    plan: Plan = PLAN.with_(mesh=mesh, precision=precision, accumulate=4 // mesh.data)
    if mesh.pp > 1:
        plan = plan.with_(pipeline=Pipeline(cuts=("blocks.1",)))
    known = verify.reference(SOURCE, plan, 3)
    bounds = verify.Bounds() if precision == "fp32" else verify.bounds_of(SOURCE, plan, known, 3)
    found = verify.compare(known, verify.merge(ranks(2).run(verify.run_rank, SOURCE, plan, 3)), bounds)
    assert found.good, found


# ---------------------------------------------------------------- checkpoints


LONGER = PLAN.with_(model={**PLAN.model, "overrides": {**SOURCE.overrides, "layers": 4}}, accumulate=4, micro_batch=1)


@pytest.mark.parametrize(("state_format", "worlds"), further(
    [("int4", (2, 1, 2)), ("int8", (2, 4, 1, 2))], [("int4", (2, 1, 2))], "codes of a byte each, and ranks with fewer rows",
))  # fmt: skip
def test_a_run_resumes_on_other_ranks_with_the_same_codes(ranks: Pools, tmp_path: Path, state_format: str, worlds: tuple[int, ...]) -> None:
    """Every hop saves at once what it has taken up: the same bits. Back on two ranks losses are those of a run that never left them."""
    chain = tuple(f"{state_format}, {world} ranks" for world in worlds)
    for name, world in zip(chain, worlds, strict=True):
        PLANS[name] = LONGER.with_(state_format=state_format, mesh=Mesh(dp_shard=world), accumulate=4 // world)
    found = carried(ranks, tmp_path, 3, chain)
    assert found[f"{len(worlds) - 2}-{chain[-1]}"] == 0.0 and max(found.values()) < 1e-3, found


@pytest.mark.parametrize(("saved", "asked", "said"), [
    ("int8", "fp32", "has moments in 8 or 4 bits, and the plan keeps them otherwise"),
    ("int8", "int4", "has not the moments of .* in the format int4 of the plan"),
    ("fp32", "int8", "has not the moments of .* in the format int8 of the plan"),
])  # fmt: skip
def test_states_of_another_format_are_refused(tmp_path: Path, saved: str, asked: str, said: str) -> None:
    """By the plans, and where these say the same by what was saved."""
    go(0, 1, str(tmp_path / "a"), PLAN.with_(state_format=saved), {**SETTINGS, "steps": 1})
    reader = Reader(store.complete(tmp_path / "a" / "checkpoints")[0])
    known = {name: spec for name, spec in reader.tensors.items() if name.startswith("model/")}
    plan = PLAN.with_(state_format=asked)
    with pytest.raises(UserError, match=r"the plan differs from that of .* in state_format"):
        go(0, 1, str(tmp_path / "a"), plan, {}, resume=True)
    with pytest.raises(UserError, match=said):
        stage(reader, apply(verify.build(SOURCE), plan, start(plan, device="cpu")), known)
