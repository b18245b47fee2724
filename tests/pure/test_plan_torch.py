"""What plans may say of pipelines and shards, held to PyTorch itself: what is refused fails there, what is not runs."""

from __future__ import annotations

import contextlib
import functools
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foretell.plan import blocks, legal
from foretell.plan.types import LOOPED, SCHEDULES, Mesh, Pipeline, Plan
from foretell.zoo.language import gpt, llama

TORCHS: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": schedules.ScheduleZBVZeroBubble,
}
SMALL = {"vocab_size": 50, "context": 16, "layers": 2, "dim": 32, "heads": 4}


# ---------------------------------------------------------------- schedules


def plan_of(schedule: str, ranks: int, stages: int, micro_batches: int) -> Plan:
    names = [f"blocks.{number}" for number in range(stages)]
    return Plan(
        model={"model": "x", "blocks": [f"blocks.0-{stages - 1}"]}, hardware="auto", mesh=Mesh(pp=ranks),
        pipeline=Pipeline(schedule=schedule, cuts=tuple(names[1:])), accumulate=micro_batches,
    )  # fmt: skip


def runs_in_torch(schedule: str, ranks: int, stages: int, micro_batches: int) -> bool:
    """Whether torch builds the schedule, and its own simulation of sends and receives comes to an end."""
    kind = TORCHS[schedule]
    style = "v" if schedule == "zero-bubble-v" else "loop"
    place = generate_stage_to_rank_mapping(ranks, stages, style)
    mine = [
        SimpleNamespace(
            num_stages=stages, group_size=ranks, group_rank=0, stage_index=index, submod=None, is_last=False
        )
        for index in range(stages)
        if place[index] == 0
    ]
    try:
        made = kind(mine if schedule in LOOPED else mine[0], micro_batches, loss_fn=lambda *_: None)
        if schedule not in LOOPED:
            return True
        asides = (schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD)
        order = {
            rank: [action for action in actions if action.computation_type not in asides]
            for rank, actions in made.pipeline_order_with_comms.items()
        }
        with contextlib.redirect_stdout(io.StringIO()):
            schedules._simulate_comms_compute(order, lambda stage: made.stage_index_to_group_rank[stage], stages)
    except (ValueError, KeyError, AssertionError):
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_and_stages_are_refused_exactly_where_torch_refuses_them(schedule: str) -> None:
    verdicts = set()
    for ranks in (2, 3, 4, 5):
        for each in (1, 2, 3) if schedule in LOOPED else (1,):
            for micro_batches in range(1, 19):
                runs = runs_in_torch(schedule, ranks, ranks * each, micro_batches)
                found = legal.complaints(plan_of(schedule, ranks, ranks * each, micro_batches))
                assert runs == (not found), (ranks, each, micro_batches, found)
                verdicts.add(runs)
    assert verdicts == ({True} if schedule == "gpipe" else {True, False})


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble"])
def test_stages_that_ranks_do_not_share_evenly(schedule: str) -> None:
    assert not runs_in_torch(schedule, 3, 4, 6)
    assert [one.field for one in legal.complaints(plan_of(schedule, 3, 4, 6))] == ["pipeline.cuts"]


@pytest.mark.parametrize(
    ("schedule", "style"), [("interleaved-1f1b", "loop"), ("zero-bubble", "loop"), ("zero-bubble-v", "v")]
)
def test_stages_are_on_the_ranks_where_torch_has_them(schedule: str, style: str) -> None:
    for ranks in (2, 3, 4):
        stages = 2 * ranks
        made = plan_of(schedule, ranks, stages, ranks)
        found = {stage: blocks.rank_of_stage(made, stage) for stage in range(stages)}
        assert found == generate_stage_to_rank_mapping(ranks, stages, style)


# ---------------------------------------------------------------- a backward in two passes


def compare(stage: nn.Module) -> float:
    """The largest relative difference of a weight's gradient between a plain backward and one in two passes."""
    x = torch.randn(2, 16, 32, requires_grad=True)
    gradient = torch.randn(2, 16, 32)
    stage(x).backward(gradient)
    wanted = {
        name: parameter.grad.clone() for name, parameter in stage.named_parameters() if parameter.grad is not None
    }
    stage.zero_grad()
    again = x.detach().clone().requires_grad_()
    output = stage(again)
    _, groups = stage_backward_input([output], [gradient], [again], stage.parameters())  # type: ignore[arg-type]
    stage_backward_weight(stage.parameters(), groups)
    found = dict(stage.named_parameters())
    assert all(found[name].grad is not None for name in wanted)
    return max(float((found[name].grad - value).norm() / value.norm()) for name, value in wanted.items())  # type: ignore[operator]


class Stage(nn.Module):
    """The blocks of a small model, one after the other: kept, recomputed, or all but products recomputed."""

    def __init__(self, name: str, mode: str = "keep") -> None:
        super().__init__()
        torch.manual_seed(0)
        model: Any = gpt.build(**SMALL) if name == "gpt" else llama.build(**SMALL, kv_heads=2, ffn=48)
        self.blocks = model.blocks
        self.rotary = getattr(model, "rotary", None)
        kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}
        self.options: dict[str, Any] = {"use_reentrant": False, **(contexts if mode == "selective" else {})}
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        more = self.rotary(x) if self.rotary is not None else ()
        for block in self.blocks:
            x = block(x, *more) if self.mode == "keep" else checkpoint(block, x, *more, **self.options)
        return x


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_kept_and_recomputed_blocks_have_right_gradients(name: str, mode: str) -> None:
    assert compare(Stage(name, mode)) < 1e-6


def test_selective_recompute_fails() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        compare(Stage("llama", "selective"))


def test_compiled_blocks_fail() -> None:
    stage = Stage("gpt")
    for block in stage.blocks:
        block.compile(backend="aot_eager")
    with pytest.raises(RuntimeError):
        compare(stage)


def test_a_weight_used_twice_fails() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.tanh(self.b(torch.tanh(self.a(x))))) * 1

    with pytest.raises(RuntimeError, match="second time"):
        compare(Twice())


@pytest.mark.parametrize("reshard", [False, True])
def test_parameters_given_back_after_forward_get_no_gradients(reshard: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shards = init_device_mesh("cpu", (1,))
        stage: Any = Stage("gpt")
        for block in stage.blocks:
            fully_shard(block, mesh=shards, reshard_after_forward=reshard)
        fully_shard(stage, mesh=shards, reshard_after_forward=reshard)
        x = torch.randn(2, 16, 32, requires_grad=True)
        output = stage(x)
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(False)
        _, groups = stage_backward_input([output], [torch.randn(2, 16, 32)], [x], stage.parameters())
        assert bool(groups) is not reshard, "without groups no weight ever gets its gradient"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("degree", "shards"), [(1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (8, 4)])
def test_degrees_of_resharding_are_refused_where_torch_refuses_them(degree: int, shards: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    made = Plan(model={"model": "x"}, hardware="auto", mesh=Mesh(dp_shard=shards), reshard=degree)
    refused = bool(legal.complaints(made))
    info = SimpleNamespace(shard_mesh_size=shards, mesh=None)
    try:
        _fsdp_init._get_post_forward_mesh_info(degree, info)  # type: ignore[arg-type]
    except ValueError:
        assert refused
    except AttributeError:  # it was taken, and the mesh that is not there was asked for
        assert not refused
    else:
        assert not refused
