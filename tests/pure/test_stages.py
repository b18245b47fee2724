"""Cutting a model into stages, in one process: what is found, what is refused, and that stages run one after the other
in this process give the loss and the gradients of the whole."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from foretell.errors import UnknownName, UserError
from foretell.plan.types import Mesh, Pipeline, Plan
from foretell.runtime.parallel.pipeline.dry_run import Dry, crossing_of, dry_run
from foretell.runtime.parallel.pipeline.ghost import Ghost, ghost_like, is_ghost
from foretell.runtime.parallel.pipeline.part import BoundaryTensor, stage_of
from foretell.runtime.parallel.pipeline.stages import _parts, chart
from foretell.trace.flow.stages import look
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Workload, compute_loss

DIM = 8


# --- models that are odd in one way each -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            x = x + other
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Three blocks between two layers; a test gives the forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(DIM, 2)
        self.how = forward or plain

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def plain(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return model.last(x)


def workload(forward: Callable[[Any, Tensor], Any] | None = None) -> Workload:
    torch.manual_seed(0)
    return Workload(Stack(forward), {"x": torch.randn(3, 4)}, lambda out, _: out.square().mean())


def refused(forward: Callable[[Any, Tensor], Any], cuts: tuple[str, ...] = ("blocks.1",)) -> str:
    work = workload(forward)
    with pytest.raises(UserError) as found:
        chart(work.model, work.batch, work.loss, cuts)
    return str(found.value)


# --- running all stages here -----------------------------------------------------------------------------------------


def in_turn(work: Workload, cuts: tuple[str, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the stages, run one after the other; what crosses goes through a fresh leaf."""
    model = copy.deepcopy(work.model)
    course = chart(model, work.batch, work.loss, cuts)
    parts = _parts(model, course.flow, range(course.flow.stages))
    for part, stage in zip(parts, course.stages, strict=True):
        stage_of(part, stage)
    given: Any = ()
    crossed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    for part, stage in zip(parts, course.stages, strict=True):
        received = tuple(value.detach().requires_grad_() for value in given)
        crossed.append((given, received))
        given = stage.run(part, received, work.batch)
        if not stage.is_last:
            assert tuple(map(BoundaryTensor.of, given)) == course.crossing[stage.index + 1]
    given.backward()
    for sent, received in reversed(crossed[1:]):
        torch.autograd.backward(sent, [value.grad for value in received])
    gradients: dict[str, Tensor] = {}
    for index, part in enumerate(parts):
        assert {name for name, _ in part.named_parameters()} == course.flow.held(index)
        for name, parameter in part.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
    return given.detach(), gradients


def assert_same(work: Workload, cuts: tuple[str, ...]) -> None:
    torch.manual_seed(7)
    loss, gradients = in_turn(work, cuts)
    torch.manual_seed(7)
    expected = compute_loss(work)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = {name: p.grad for name, p in work.model.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients.keys()
    for name, grad in wanted.items():
        scale = max(grad.norm().item(), 1e-6)
        assert (gradients[name] - grad).norm().item() <= 1e-5 * scale, name


def zoo(name: str, **overrides: Any) -> Workload:
    torch.manual_seed(0)
    text = {} if name.startswith(("vit", "dit", "unet", "convnext")) else {"seq": 8}
    work = load(Source(model=name, micro_batch=2, overrides=overrides, **text))
    with torch.no_grad():  # zeroed gates would hide what lies behind them
        for parameter in work.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return work


LINE = pytest.mark.slow(reason="another model, cut as the others are; ranks run stages of one with two stacks in test_pipeline.py")


@pytest.mark.parametrize(
    ("work", "cuts"),
    [
        pytest.param(lambda: zoo("gpt-tiny"), ("blocks.1", "blocks.3"), marks=LINE),
        (lambda: zoo("gpt-tiny"), ("blocks.0", "norm")),
        pytest.param(lambda: zoo("llama-tiny"), ("blocks.3",), marks=LINE),
        pytest.param(lambda: zoo("vit-tiny"), ("blocks.1", "blocks.2"), marks=LINE),
        pytest.param(lambda: zoo("t5-tiny"), ("encoder.blocks.1", "decoder.blocks.0", "decoder.blocks.1"), marks=LINE),
        pytest.param(lambda: zoo("dit-tiny"), ("blocks.1",), marks=LINE),
        (lambda: zoo("mixtral-tiny"), ("blocks.1",)),
        pytest.param(lambda: zoo("ssm-tiny"), ("blocks.1",), marks=LINE),
        pytest.param(lambda: zoo("bert-tiny", dropout=0.0), ("blocks.1",), marks=LINE),
        pytest.param(lambda: zoo("convnext-micro"), ("stage3.1",), marks=LINE),
        (lambda: zoo("unet-tiny"), ("decoder.1",)),
    ],
    ids=["gpt", "gpt, outer cuts", "llama", "vit", "t5", "dit", "mixtral", "ssm", "bert", "convnext", "unet, last"],
)
def test_stages_in_turn_compute_what_the_whole_does(work: Callable[[], Workload], cuts: tuple[str, ...]) -> None:
    assert_same(work(), cuts)


@pytest.mark.slow(reason="a model of transformers is cut and run by ranks in test_equivalence.py")
def test_a_transformers_model_is_cut() -> None:
    pytest.importorskip("transformers")
    small = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    work = load(Source(model="hf:llama", overrides=small, micro_batch=2, seq=8))
    flow = chart(work.model, work.batch, work.loss, ("model.layers.1",)).flow
    assert flow.ties == {"model.embed_tokens.weight": (0, 1)}
    assert_same(work, ("model.layers.1", "model.layers.2"))


# --- what is found ---------------------------------------------------------------------------------------------------


def test_a_flow_says_what_each_stage_runs_and_reads() -> None:
    work = zoo("gpt-tiny")
    flow = look(work.model, work.batch, work.loss, ("blocks.1", "blocks.3"))
    assert flow.ties == {"tokens.weight": (0, 2)}
    assert flow.modules["blocks.2"] == {1} and flow.modules["norm"] == {2}
    assert "norm.weight" in flow.held(2) and "norm.weight" not in flow.held(1)
    assert set().union(*(flow.held(stage) for stage in range(3))) == {name for name, _ in work.model.named_parameters()}


def test_charting_leaves_the_model_as_it_was() -> None:
    work = zoo("t5-tiny")
    before = {name: id(p) for name, p in work.model.named_parameters()}
    kinds = [type(module) for module in work.model.modules()]
    keys = [set(vars(module)) for module in work.model.modules()]
    values = {name: p.detach().clone() for name, p in work.model.named_parameters()}
    chart(work.model, work.batch, work.loss, ("encoder.blocks.1", "decoder.blocks.1"))
    assert {name: id(p) for name, p in work.model.named_parameters()} == before
    assert [type(module) for module in work.model.modules()] == kinds
    assert [set(vars(module)) for module in work.model.modules()] == keys
    assert all(torch.equal(values[name], p) for name, p in work.model.named_parameters())


def test_a_stage_lets_go_of_what_others_hold() -> None:
    work = workload()
    course = chart(work.model, work.batch, work.loss, ("blocks.1",))
    gone = {name: weakref.ref(p) for name, p in work.model.named_parameters() if name not in course.flow.held(1)}
    stage_of(work.model, course.stages[1])
    assert gone and all(ref() is None for ref in gone.values())
    assert set(work.model.state_dict()) == course.flow.held(1)


@pytest.mark.slow(reason="the same model with memory is charted above")
def test_a_model_without_memory_is_charted_alike() -> None:
    real = zoo("t5-tiny")
    cuts = ("encoder.blocks.1", "decoder.blocks.1")
    with FakeTensorMode():
        fake = load(Source(model="t5-tiny", micro_batch=2, seq=8))
        found = chart(fake.model, fake.batch, fake.loss, cuts)
    expected = chart(real.model, real.batch, real.loss, cuts)
    assert found.crossing == expected.crossing and found.flow == expected.flow
    assert [len(forms) for forms in found.crossing] == [0, 2, 3]


def test_a_first_block_that_writes_into_its_input_gets_a_copy() -> None:
    class Writes(Block):
        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            return x.add_(self.down(F.gelu(self.up(x.clone()))))

    work = workload()
    work.model.blocks[1] = Writes()
    course = chart(work.model, work.batch, work.loss, ("blocks.1",))
    assert course.stages[1].copies and not course.stages[0].copies
    assert_same(work, ("blocks.1", "blocks.2"))


def test_random_numbers_that_go_through_the_blocks_are_drawn_once() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], DIM)
        x = model.first(x)
        for block in model.blocks:
            x = block(x, noise)
        return model.last(x + noise)

    work = workload(forward)
    course = chart(work.model, work.batch, work.loss, ("blocks.1",))
    assert course.stages[1].fences and len(course.crossing[1]) == 2
    assert_same(work, ("blocks.1", "blocks.2"))


def test_what_the_batch_alone_decides_does_not_cross() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        scale = torch.arange(DIM, dtype=x.dtype) / x.shape[0]
        mask = torch.ones_like(model.first(x)) * (x.sum(1, keepdim=True) > 0)
        x = model.first(x)
        for block in model.blocks:
            x = block(x, mask)
        return model.last(x * scale + mask)

    work = workload(forward)
    assert chart(work.model, work.batch, work.loss, ("blocks.1",)).crossing == ((), (BoundaryTensor((3, DIM), torch.float32),))
    assert_same(work, ("blocks.1",))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_value_that_no_block_hands_on_is_refused() -> None:
    work = zoo("unet-tiny")
    with pytest.raises(UserError, match=r"decoder\.1 needs the output of encoder\.0"):
        chart(work.model, work.batch, work.loss, ("decoder.0",))

    def skips(model: Any, x: Tensor) -> Tensor:
        early = model.first(x)
        x = early
        for block in model.blocks:
            x = block(x)
        return model.last(x + early)

    assert "last needs the output of first" in refused(skips)

    def in_the_loss(model: Any, x: Tensor) -> Tensor:
        early = model.first(x)
        x = early
        for block in model.blocks:
            x = block(x)
        return model.last(x).sum() + early.sum()

    assert "the loss needs the output of first" in refused(in_the_loss)


def test_random_numbers_used_after_the_cut_are_refused() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], DIM)
        x = model.first(x)
        for block in model.blocks:
            x = block(x)
        return model.last(x + noise)

    assert "random numbers" in refused(forward)


def test_reading_a_value_of_an_activation_is_refused() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks:
            x = block(x) if x.shape[0] else x
        return model.last(x / float(x.detach().abs().max()))

    work = workload(forward)
    with pytest.raises(UserError):
        chart(work.model, work.batch, work.loss, ("blocks.1",))
    ghost = ghost_like(torch.empty(2, 2), "first")
    with pytest.raises(UserError, match="reads the value of first"):
        bool(ghost.sum() > 0)


def test_writing_activations_into_a_real_tensor_is_refused() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        kept = torch.zeros(x.shape[0], DIM)
        kept.copy_(model.first(x))
        x = kept
        for block in model.blocks:
            x = block(x)
        return model.last(x)

    assert "in place" in refused(forward)


def test_only_tensors_with_a_gradient_cross() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        order = x.detach().sum(1).argsort()
        for block in model.blocks:
            x = block(x, order[:, None])
        return model.last(x)

    assert "only numbers that have a gradient" in refused(forward)


def test_cuts_that_forward_does_not_follow_are_refused() -> None:
    assert "should begin a stage" in refused(plain, ("blocks.2", "blocks.1"))
    assert "never" in refused(plain, ("blocks",))
    assert "twice" in refused(plain, ("blocks.1", "blocks.1"))

    def again(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for _ in range(2):
            for block in model.blocks:
                x = block(x)
        return model.last(x)

    assert "2 times" in refused(again)
    work = workload()
    with pytest.raises(UnknownName, match=r"blocks\.2"):
        chart(work.model, work.batch, work.loss, ("blocks.7",))
    work.model.blocks[2] = work.model.blocks[1]
    with pytest.raises(UserError, match="several names"):
        chart(work.model, work.batch, work.loss, ("blocks.1",))


def test_a_forward_that_changes_its_way_is_caught_when_it_runs() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        for block in model.blocks if model.training else ():
            x = block(x)
        return model.last(x)

    work = workload(forward)
    course = chart(work.model, work.batch, work.loss, ("blocks.1",))
    stage_of(work.model, course.stages[1])
    work.model.eval()
    with pytest.raises(UserError):
        course.stages[1].run(work.model, (torch.zeros(3, DIM),), work.batch)


def again(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return model.last(F.pad(model.last(x), (0, DIM - 2)))


def derived(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for number, block in enumerate(model.blocks):
        x = block(x)
        if number == 1:
            scale = model.last.weight[0] * 2
        if number >= 1:
            x = x * scale
    return x


def abreast(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return model.last(x) * model.last(x.tanh())


@pytest.mark.parametrize(("forward", "name"), [(again, "last.bias"), (derived, "last.weight")])
def test_a_weight_met_twice_in_a_line_keeps_the_backward_whole(forward: Any, name: str) -> None:
    work = workload(forward)
    chart(work.model, work.batch, work.loss, ("blocks.1",), schedule="1f1b")
    with pytest.raises(UserError, match=rf"stage 1 uses {name} at several places"):
        chart(work.model, work.batch, work.loss, ("blocks.1",), schedule="zero-bubble")


def test_two_passes_are_refused_where_torch_goes_wrong_and_not_everywhere() -> None:
    assert _in_two_passes(derived) > 1e-2
    assert _in_two_passes(plain) < 1e-5
    assert _in_two_passes(abreast) < 1e-5
    work = workload(abreast)
    chart(work.model, work.batch, work.loss, ("blocks.1",), schedule="zero-bubble")


def _in_two_passes(forward: Any) -> float:
    """How far off the gradients of the second stage are; infinite where torch fails."""
    work = workload(forward)
    course = chart(work.model, work.batch, work.loss, ("blocks.1",))
    stage_of(work.model, course.stages[1])
    received = torch.randn(3, DIM, requires_grad=True)
    course.stages[1].run(work.model, (received,), work.batch).backward()
    wanted = {name: p.grad for name, p in work.model.named_parameters()}
    for parameter in (received, *work.model.parameters()):
        parameter.grad = None
    loss = course.stages[1].run(work.model, (received,), work.batch)
    try:
        _, groups = stage_backward_input([loss], None, [received], work.model.parameters())
        stage_backward_weight(work.model.parameters(), groups)
    except RuntimeError:
        return float("inf")
    return max((p.grad - wanted[name]).norm().item() for name, p in work.model.named_parameters())


# --- ghosts ----------------------------------------------------------------------------------------------------------


def test_a_ghost_spreads_and_then_acts_as_its_value() -> None:
    ghost = ghost_like(torch.empty(2, 3), "here")
    assert ghost.shape == (2, 3) and ghost.dtype == torch.float32
    other = F.layer_norm(ghost + torch.ones(3), (3,))
    assert is_ghost(other) and other.shape == (2, 3) and other.origin == "here"
    other += 1
    assert is_ghost(other)
    assert torch.equal(torch.zeros_like(ghost), torch.zeros(2, 3)) and not isinstance(ghost.new_ones(2), Ghost)
    assert isinstance(ghost, Ghost)
    ghost.value = torch.ones(2, 3, requires_grad=True)
    total = (ghost * 2).sum()
    total.backward()
    assert not is_ghost(ghost) and total.item() == 12.0
    assert torch.equal(ghost.value.grad, torch.full((2, 3), 2.0))
    assert is_ghost(torch.cat([ghost, other]))


# --- the dry run -----------------------------------------------------------------------------------------------------


def dry(schedule: str, cuts: tuple[str, ...], rank: int, count: int, **more: Any) -> Dry:
    given = {"precision": "fp32", "mesh": Mesh(pp=2), **more}
    plan = Plan(
        model={},
        hardware="auto",
        micro_batch=2,
        accumulate=count,
        pipeline=Pipeline(schedule=schedule, cuts=cuts),
        **given,
    )
    return dry_run(Source(model="gpt-tiny", seq=8), plan, rank)


def order(found: Dry) -> str:
    letters = {"forward": "F", "backward": "B", "backward input": "I", "backward weight": "W"}
    return " ".join(f"{letters[e.what]}{e.micro_batch}" for e in found.events if e.what in letters)


def test_a_dry_run_is_the_schedule_as_published() -> None:
    crossing = 2 * 8 * 128 * 4
    first = dry("1f1b", ("blocks.2",), 0, 4)
    assert order(first) == "F0 F1 B0 F2 B1 F3 B2 B3"  # two forwards to warm up, then one of each
    last = dry("1f1b", ("blocks.2",), 1, 4)
    assert order(last) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert order(dry("gpipe", ("blocks.2",), 0, 3)) == "F0 F1 F2 B0 B1 B2"
    for found, sends, receives in ((first, "activations", "gradients"), (last, "gradients", "activations")):
        moved = [(e.what, e.nbytes, e.peer) for e in found.events if e.what.endswith((sends, receives))]
        peer = 1 if found is first else 0
        moved = [move for move in moved if move[0] != "reduce gradients"]
        assert sorted(moved) == sorted([(f"send {sends}", crossing, peer), (f"receive {receives}", crossing, peer)] * 4)
    tie = 512 * 128 * 4
    assert [(e.what, e.nbytes) for e in first.events[-2:]] == [("receive ties", tie), ("send ties", tie)]
    assert sum(first.parameters[0].values()) + sum(last.parameters[1].values()) == tie + sum(
        p.numel() * 4 for p in zoo("gpt-tiny").model.parameters()
    )


def test_a_dry_run_splits_the_backward_of_zero_bubble() -> None:
    found = dry("zero-bubble-v", ("blocks.1", "blocks.2", "blocks.3"), 1, 4)
    assert set(found.parameters) == {1, 2}
    for stage in (1, 2):
        events = [e for e in found.events if e.stage == stage]
        for number in range(4):
            ran = [e.what for e in events if e.micro_batch == number and not e.what.startswith(("send", "receive"))]
            assert ran in (["forward", "backward input", "backward weight"], ["forward", "backward"])
    assert not any(e.stage == 1 and e.what == "send activations" for e in found.events)  # stage 2 is on this rank too


@pytest.mark.slow(reason="test_pipeline.py compares a dry run of shards with a real one")
def test_a_dry_run_gathers_and_scatters_shards() -> None:
    found = dry("1f1b", ("blocks.2",), 0, 2, mesh=Mesh(pp=2, dp_shard=2), precision="bf16-mixed")
    held = sum(found.parameters[0].values())
    scattered = sum(e.nbytes for e in found.events if e.what == "reduce_scatter_base")
    assert scattered == 2 * held  # fp32 gradients of both shards, once a step
    gathered = [e.nbytes for e in found.events if e.what == "allgather_base"]
    assert sum(gathered) % 2 == 0 and max(gathered) < scattered
    assert found.crossing[1] == (BoundaryTensor((2, 8, 128), torch.bfloat16),)
    plan = Plan(
        model={}, hardware="auto", micro_batch=2, mesh=Mesh(pp=2), pipeline=Pipeline(cuts=("blocks.2",)), accumulate=2
    )
    crossing = crossing_of(Source(model="gpt-tiny", seq=8, micro_batch=2), plan)
    assert crossing[1] == (BoundaryTensor((2, 8, 128), torch.float32),)  # autocast leaves what is added up in fp32
