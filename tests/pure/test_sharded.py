"""One rank of FSDP2, held against FSDP2 itself: a dry run on fake tensors and a fake process group, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from foretell import zoo
from foretell.lower.fsdp.sharded import MODEL_END, shard
from foretell.lower.spread import spread
from foretell.simulate.memory.replay import Replay, Sizes
from foretell.trace import types
from foretell.trace.cuda.select import cuda_choices
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import _add_in_place, capture
from foretell.trace.record.recorder import RecordedOp, Recorder
from foretell.trace.record.step import Step, Workload
from foretell.zoo.language import gpt
from tests.further import further

FOREACH = [Tensor, nn.Parameter, FakeTensor, DTensor]
"""DTensors take the foreach path on CUDA too."""

# ------------------------------------------------------------------ the dry run


class DryRun(Recorder):
    """Also follows storages that FSDP2 empties and fills again; leaves DTensors to DTensor."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        return super().__torch_dispatch__(func, kinds, args, kwargs)

    def refill(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().size() != size:
            tensor.untyped_storage().resize_(size)
            if self._rows is not None:
                self.storage_id(tensor, self._add_row("refill"))

    def empty(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.size():
            number = self._ids.pop(storage._cdata, None)
            storage.resize_(0)
            if number is not None:
                del self._alive[number]
                assert self._last is not None
                self._last.frees.append(number)


@contextmanager
def group(ranks: int) -> Iterator[Any]:
    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank: the highest point of each phase of a step, and what the step is about."""

    peaks: Mapping[str, int]
    parameters: int
    gradients: int
    optimizer: int

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def every_block(model: nn.Module, **more: Any) -> None:
    for path in find_blocks(model):
        fully_shard(model.get_submodule(path), **more)
    fully_shard(model, **more)


def dry_run(build: Callable[[], Workload], recipe: Recipe, ranks: int, wrap: Callable[..., None] = every_block) -> Measured:
    """Two steps of FSDP2; what the second one needs (the first makes tensors of global shape besides)."""
    recorder = DryRun()
    with group(ranks) as mesh, recorder, cuda_choices(recorder, (9, 0), torch.__version__):
        workload = build()
        model = workload.model
        step = Step(workload, replace(recipe, precision="fp32"), device_type="cpu", observer=recorder)
        wrap(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with (
            mock.patch.object(_fsdp_param, "alloc_storage", recorder.refill),
            mock.patch.object(_fsdp_param, "free_storage", recorder.empty),
            mock.patch("torch.optim.optimizer._foreach_supported_types", FOREACH),
            mock.patch("torch.utils._foreach_utils._foreach_supported_types", FOREACH),
        ):
            return _two_steps(recorder, step, recipe)


def _two_steps(recorder: DryRun, step: Step, recipe: Recipe) -> Measured:
    model = step.model
    for tensor in [*model.parameters(), *model.buffers(), *step.workload.batch.values()]:
        recorder.storage_id(local(tensor))
    step.create_optimizer()

    def one_step() -> None:
        for _ in range(recipe.accumulate):
            step.micro_batch()
        step.update()

    with recorder.program("first"):
        one_step()
        step.zero_grad()
    before = recorder.living()
    with recorder.program("second"):
        one_step()
        parameters = [local(parameter) for parameter in model.parameters()]
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        state = [local(v) for s in step.optimizer.state.values() for k, v in s.items() if _on_device(k, v, recipe)]
        numbers = [list({recorder.storage_id(t) for t in ts}) for ts in (parameters, gradients, state)]
    _add_in_place(recorder)
    peaks = highest(recorder.programs["second"], before, recorder.sizes)
    return Measured(peaks, *(sum(recorder.sizes[n] for n in ns) for ns in numbers))


def _on_device(key: str, value: Any, recipe: Recipe) -> bool:
    """Step counters stay in host memory unless the optimizer is fused."""
    return isinstance(value, Tensor) and (key != "step" or recipe.optimizer.endswith("-fused"))


def highest(ops: Iterable[RecordedOp | types.Op], alive: set[int], sizes: Mapping[int, int]) -> dict[str, int]:
    """Phase → most bytes alive at once; `alive` is brought up to date."""
    peaks: dict[str, int] = {}
    live = sum(sizes[number] for number in alive)
    for op in ops:
        live += sum(sizes[number] for number in op.allocates if number not in alive)
        alive.update(op.allocates)
        phase = "backward" if op.phase == "recompute" else op.phase
        peaks[phase] = max(peaks.get(phase, 0), live)
        live -= sum(sizes[number] for number in op.frees if number in alive)
        alive.difference_update(op.frees)
    peaks.pop("", None)
    return peaks


# ------------------------------------------------------------------ what shard() says


def predict(trace: types.Trace) -> Measured:
    sizes = {n: 0 if s.host else s.nbytes for n, s in trace.storages.items()}
    alive = set(trace.resident)
    gradients = 0
    for run in ("first_step", "steady_step"):
        peaks: dict[str, int] = {}
        for name, times in trace.schedule[run]:
            for _ in range(times):
                for phase, peak in highest(trace.programs[name].ops, alive, sizes).items():
                    peaks[phase] = max(peaks.get(phase, 0), peak)
            if name.startswith("micro"):
                gradients = sum(sizes[n] for n in alive if trace.storages[n].role == types.GRADIENT)
    parameters, optimizer = (
        sum(sizes[n] for n in alive if trace.storages[n].role == role) for role in (types.PARAMETER, types.OPTIMIZER)
    )
    return Measured(peaks, parameters, gradients, optimizer)


def workload(name: str, micro_batch: int, **changes: Any) -> Callable[[], Workload]:
    entry = zoo.get(name)
    module = zoo.load(entry)

    def build() -> Workload:
        model: nn.Module = module.build(**{**entry.config, **changes})
        return Workload(model, module.batch(model, micro_batch, entry.seq, entry.image), module.loss)

    return build


def compare(
    build: Callable[[], Workload],
    recipe: Recipe,
    ranks: Iterable[int],
    *,
    slack: int = 0,
    change: Callable[[types.Trace], types.Trace] = lambda trace: trace,
    lower: Callable[[types.Trace, int], types.Trace] = shard,
    wrap: Callable[..., None] = every_block,
) -> None:
    """Every byte agrees: what is kept, and the highest point of every phase."""
    trace = change(capture(build, replace(recipe, precision="fsdp-bf16")))
    for count in ranks:
        said, seen = predict(lower(trace, count)), dry_run(build, recipe, count, wrap)
        assert (said.parameters, said.gradients, said.optimizer) == (seen.parameters, seen.gradients, seen.optimizer)
        assert said.peaks.keys() == seen.peaks.keys() == {"forward", "backward", "update"}
        for phase, peak in seen.peaks.items():
            assert 0 <= peak - said.peaks[phase] <= slack, (count, phase, said.peaks, seen.peaks)


# ------------------------------------------------------------------ tests


ALIKE = pytest.mark.slow(reason="blocks of other layers, sharded as those of the models that run")


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("gpt-tiny", {"layers": 2}), pytest.param("llama-tiny", {"layers": 2}, marks=ALIKE), pytest.param("bert-tiny", {}, marks=ALIKE),
        pytest.param("vit-tiny", {"depth": 2}, marks=ALIKE),
    ],
)
def test_every_byte_is_that_of_fsdp2(name: str, depth: dict[str, int]) -> None:
    """On ranks whose shares are even, and on more than some tensors have rows."""
    compare(workload(name, 2, **depth), Recipe(), (2, 64))


@pytest.mark.parametrize("name", further(["t5-tiny", "mixtral-tiny", "unet-tiny"], ["mixtral-tiny"], "two stacks, or none, as one"))
def test_other_shapes_of_models(name: str) -> None:
    """Two stacks of blocks, experts with fewer rows than ranks, no blocks at all."""
    compare(workload(name, 2), Recipe(), (64 if name == "mixtral-tiny" else 8,))


@pytest.mark.parametrize("recompute", further(["full", "selective"], ["selective"], "full with blocks called twice above"))
def test_with_recompute(recompute: str) -> None:
    compare(workload("gpt-tiny", 2, layers=3), Recipe(recompute=recompute), (4,))


def test_micro_batches_reduce_every_time_and_add_in_fp32() -> None:
    compare(workload("gpt-tiny", 2, layers=2), Recipe(accumulate=3), (4,))


@pytest.mark.parametrize("freeze", [pytest.param((), marks=pytest.mark.slow(reason="nothing is frozen in the other tests either")), ("tokens",)])
def test_a_loss_in_chunks_is_computed_with_what_the_root_gathered(freeze: tuple[str, ...]) -> None:
    compare(workload("gpt-tiny", 2, layers=2), Recipe(loss_chunks=3, accumulate=2, freeze=freeze), (4,))


def test_what_is_frozen_is_gathered_and_not_reduced() -> None:
    compare(workload("gpt-tiny", 2, layers=3), Recipe(freeze=("tokens", "positions", "blocks.0", "blocks.2.mlp")), (4,))


@pytest.mark.parametrize(
    "optimizer", further(["adamw", "momentum", "adam-loop"], ["momentum"], "the states of adamw, as in every other test here")
)
def test_other_optimizers(optimizer: str) -> None:
    """One image: the gradients of two parameters share a storage. Slack: step counters on the host, norms."""
    build, recipe = workload("vit-tiny", 1, depth=2), Recipe(optimizer=optimizer, clip=1.0)
    dry_run(build, replace(recipe, precision="fsdp-bf16"), 4, every_block)  # once in a process DTensor tries its ops on tensors of whole shapes
    compare(build, recipe, (4,), slack=2048)


class Wrapped(nn.Module):
    """A GPT that computes its own loss, or runs its blocks twice."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner, self.calls = gpt.build(vocab_size=1024, context=64, layers=3, dim=64, heads=4), calls

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.inner.tokens(input_ids)
        for block in [*self.inner.blocks] * self.calls:
            x = block(x)
        return gpt.loss(nn.functional.linear(x, self.inner.tokens.weight), {"targets": targets})


def wrapped(calls: int) -> Workload:
    model = Wrapped(calls)
    return Workload(model, gpt.batch(model.inner, 2))


def marked(trace: types.Trace) -> types.Trace:
    """With the end of the model marked, if it is not yet: after the loss."""
    ops = trace.programs["micro_first"].ops
    if any(op.name == MODEL_END for op in ops):
        return trace
    end = next(position for position, op in enumerate(ops) if op.phase == "backward")
    mark = types.Op(MODEL_END, (), (), "", "forward", 0)
    program = types.Program("micro_first", (*ops[:end], mark, *ops[end:]))
    return replace(trace, programs={**trace.programs, "micro_first": program})


@pytest.mark.slow(reason="a long trace; each of what is done twice is compared once elsewhere")
@pytest.mark.parametrize(
    ("calls", "recompute"), further([(1, "none"), (2, "full")], [(2, "full")], "the loss is inside here too, and blocks are called once elsewhere")
)
def test_loss_inside_the_model_and_blocks_called_twice(calls: int, recompute: str) -> None:
    compare(lambda: wrapped(calls), Recipe(recompute=recompute), (4,), change=marked)


def test_the_ops_say_what_is_communicated_and_where_it_lives() -> None:
    trace = shard(capture(workload("gpt-tiny", 2), Recipe(precision="fsdp-bf16")), 8)
    ops = trace.programs["micro_first"].ops
    gathers = [op for op in ops if op.name == "foretell.all_gather" and op.module == "blocks.1"]
    assert [op.phase for op in gathers] == ["forward", "backward"]
    block = 12 * 128 * 128 + 13 * 128
    assert gathers[0].bytes_written == 2 * block and gathers[0].bytes_read == 4 * block // 8
    (reduce,) = (op for op in ops if op.name == "foretell.reduce_scatter" and op.module == "blocks.1")
    assert reduce.bytes_read == 2 * block and reduce.bytes_written == 4 * block // 8
    streams = {
        (op.name, trace.storages[n].stream) for op in ops for n in op.allocates if op.name.startswith("foretell")
    }
    assert streams == {
        ("foretell.all_gather", 1), ("foretell.all_gather_copy_out", 0),
        ("foretell.reduce_scatter_copy_in", 0), ("foretell.reduce_scatter", 2),
    }  # fmt: skip
    assert trace.meta["units"] == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]


def test_nothing_is_left_over_and_the_replay_takes_it() -> None:
    trace = shard(capture(workload("gpt-tiny", 2), Recipe(precision="fsdp-bf16", accumulate=2)), 8)
    alive = set(trace.resident)
    for run in ("first_step", "steady_step", "steady_step"):
        for name, times in trace.schedule[run]:
            for op in (op for _ in range(times) for op in trace.programs[name].ops):
                assert not alive.intersection(op.allocates), op
                alive.update(op.allocates)
                alive.difference_update(op.frees)
        kept = [number for number in alive if number not in trace.resident]
        assert {trace.storages[number].role for number in kept} == {types.OPTIMIZER}
    replay = Replay(trace, Sizes((9, 0), 32 << 20))
    replay.start()
    for run in ("first_step", "steady_step"):
        replay.run(run)
    assert replay.allocator.peak_reserved >= replay.allocator.peak_allocated > predict(trace).peak


def test_inference_gathers_block_by_block_and_keeps_the_root() -> None:
    trace = shard(capture(workload("gpt-tiny", 2), Recipe(precision="fsdp-bf16", mode="infer")), 8)
    ops = trace.programs["forward"].ops
    assert sum(op.name == "foretell.all_gather" for op in ops) == 5
    assert sum(op.name == "foretell.reshard" for op in ops) == 4


def first_kept(model: Any, **more: Any) -> None:
    """The root gives back, the last block does not, and the others do."""
    *others, last = find_blocks(model)
    for path in others:
        fully_shard(model.get_submodule(path), **more)
    fully_shard(model.get_submodule(last), reshard_after_forward=False, **more)
    fully_shard(model, reshard_after_forward=True, **more)


def ends_apart(model: Any, **more: Any) -> None:
    """What is before the blocks is a unit, and what is after them one of two modules."""
    fully_shard(model.tokens, **more)
    for path in find_blocks(model):
        fully_shard(model.get_submodule(path), **more)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **more)
    fully_shard(model, **more)


OWN = {
    "first kept": (first_kept, [["blocks.0"], ["blocks.1"]], {"blocks.0": True, "blocks.1": False, "": True}),
    "ends apart": (ends_apart, [["tokens"], ["blocks.0"], ["blocks.1"], ["norm", "head"]], {"norm": False}),
}  # fmt: skip


@pytest.mark.parametrize("kind", further(OWN, ["ends apart"], "other units by the same rule"))
def test_units_that_a_script_chooses(kind: str) -> None:
    wrap, units, reshard = OWN[kind]
    how = {"units": units, "reshard": reshard, "reduce": None, "left": []}
    compare(
        workload("llama-tiny", 2, layers=2), Recipe(), (4,), wrap=wrap,
        lower=lambda trace, ranks: spread(trace, {"kind": "fsdp", "world": ranks, "shards": ranks, "replicate": 1, "how": how}),
    )  # fmt: skip


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        shard(types.Trace({}, {}, {}, ()), 1)
