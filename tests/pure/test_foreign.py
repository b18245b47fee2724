"""Other training software: its plans take the same path as PyTorch's, and differ where its data says so."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.foreign import attention, float8, zero
from benchmarks.foreign.memory import foreign_memory, in_flight
from benchmarks.foreign.plan import ForeignPlan
from benchmarks.foreign.stacks import MOST_FITTED, Stack, stack, stacks
from benchmarks.foreign.step import line, predict_foreign
from foretell.hardware import catalog, links
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Cluster
from foretell.lower.steps import repeated
from foretell.plan.types import Mesh, Plan
from foretell.price.machine import machine
from foretell.price.speeds import Options
from foretell.price.time import op_prices
from foretell.simulate.plan import predict_plan
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

OPTIONS = Options(profile_of=functools.cache(find_profile))
DIMS = {"dim": 1024, "heads": 8, "vocab_size": 8192, "context": 1024}


@functools.cache
def traced(depth: int, recompute: str = "none", fused: bool = True, **more: Any) -> Trace:
    source = Source(model="gpt2", overrides={**DIMS, "layers": depth, "fused_attention": fused, **more}, micro_batch=4, seq=1024)
    return capture(lambda: load(source).summed(), Recipe(precision="fsdp-bf16", recompute=recompute, clip=1.0))


def cluster(nodes: int = 1, name: str = "H200") -> Cluster:
    return links.with_links(Cluster(device=catalog.find(name), nodes=nodes, devices_per_node=8), None)


def how(mesh: Mesh, name: str = "pytorch", **more: Any) -> ForeignPlan:
    plan = Plan(model={}, hardware="", mesh=mesh, micro_batch=4, accumulate=more.pop("accumulate", 1))
    given = {"stack": stack(name), "layers": 8, "data": "zero3" if mesh.dp_shard > 1 else "none", "tokens": 4096, "hidden": 1024}
    return ForeignPlan(plan=plan, **{**given, **more})


def seconds(plan: ForeignPlan, where: Cluster | None = None, **kind: Any) -> float:
    return predict_foreign({depth: traced(depth, **kind) for depth in (2, 4)}, plan, where or cluster(), OPTIONS).seconds


# ---------------------------------------------------------------- the same path


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_short_stack_extended_is_the_whole_stack(accumulate: int) -> None:
    mesh = Mesh(dp_shard=8)
    whole = predict_plan(traced(8), how(mesh, accumulate=accumulate).plan, cluster(), OPTIONS)
    assert whole.time is not None
    assert seconds(how(mesh, accumulate=accumulate)) == pytest.approx(whole.time.step_seconds, rel=0.02)


def test_memory_of_a_short_stack_extended_is_that_of_the_whole() -> None:
    mesh = Mesh(dp_shard=8)
    whole = predict_plan(traced(8), how(mesh).plan, cluster(), OPTIONS).worst.memory
    found = foreign_memory({depth: traced(depth) for depth in (2, 4)}, how(mesh), cluster(), OPTIONS)
    assert found.allocated == pytest.approx(whole.allocated_bytes, rel=0.01)
    assert found.device == pytest.approx(whole.device_bytes, rel=0.05)


def test_a_plan_for_other_software_says_so() -> None:
    found = predict_foreign({2: traced(2)}, how(Mesh(dp_replicate=8), "megatron-lm"), cluster(), OPTIONS)
    assert any(note.startswith("not runnable here: the plan is for Megatron-LM") for note in found.notes)
    assert not predict_foreign({2: traced(2), 4: traced(4)}, how(Mesh(dp_shard=8)), cluster(), OPTIONS).notes


# ---------------------------------------------------------------- what differs


def test_gradients_that_travel_late_are_not_hidden() -> None:
    mesh, far = Mesh(dp_replicate=16), cluster(2)
    early = replace(stack("megatron-lm"), reduces="early")
    late = how(mesh, "megatron-lm")
    assert seconds(late, far) > seconds(replace(late, stack=early), far)


def test_zero_1_updates_a_share_and_gathers_it() -> None:
    whole, shared = how(Mesh(dp_replicate=8), "megatron-lm"), how(Mesh(dp_replicate=8), "megatron-lm", data="zero1")
    assert shared.sharing == 8 and whole.sharing == 1
    assert zero.reduction(whole) == "foretell.all_reduce" and zero.reduction(shared) == "foretell.reduce_scatter"
    assert zero.reduction(replace(shared, stack=stack("megatron-deepspeed"))) == "foretell.all_reduce"


def test_a_slower_attention_kernel_and_blocking_launches_cost_time() -> None:
    mesh = Mesh(dp_replicate=8)
    plain = replace(stack("pytorch"), native=False)
    found = seconds(how(mesh, stack=plain))
    assert seconds(how(mesh, stack=replace(plain, kernel="flash-1"))) > found
    assert seconds(how(mesh, stack=replace(plain, blocking=True, fitted={"blocking_seconds": 1e-3}))) > 2 * found


def test_ops_that_programs_share_are_repriced_once() -> None:
    known = machine(catalog.find("MI300X"), find_profile("H200-SXM-141GB"))
    assert known is not None and known.clocks is None
    trace = repeated(traced(2), 2)
    plain, twice = op_prices(trace, known), op_prices(trace, known, lambda op, family, seconds: (2 * seconds, 1.0))
    assert twice.keys() == plain.keys()
    assert all(twice[one][1] == 2 * seconds for one, (_, seconds) in plain.items() if seconds)


def test_attention_by_a_named_kernel_draws_as_much_less_as_it_is_slower() -> None:
    a100, h100 = catalog.find("A100"), catalog.find("H100")
    assert attention.heat("flash-1", a100, backward=False) < attention.heat("flash-2", a100, backward=False) < 1
    assert attention.heat("flash-2", h100, backward=True) < attention.heat("cudnn", h100, backward=True) < 1


def test_a_compiled_loss_takes_no_float32_logits() -> None:
    mesh, plain = Mesh(dp_shard=8), stack("pytorch")
    kept, fused = (
        foreign_memory({depth: traced(depth) for depth in (2, 4)}, how(mesh, stack=one), cluster(), OPTIONS).allocated
        for one in (plain, replace(plain, fuses_loss=True))
    )
    logits = 4 * 1024 * 8192 * 2
    assert logits <= kept - fused <= 6 * logits, "at the peak up to three float32 tensors of their shape, less what is kept"


def test_attention_that_is_not_kept_is_computed_again_and_takes_no_memory() -> None:
    mesh = Mesh(dp_shard=8)
    kept, again = (how(mesh, stack=replace(stack("torchtitan"), selective=one), recompute="selective") for one in ("alternate", "alternate-products"))
    assert seconds(again, recompute="selective") > seconds(kept, recompute="selective")
    traces = {depth: traced(depth, "selective") for depth in (2, 4)}
    assert foreign_memory(traces, again, cluster(), OPTIONS).allocated < foreign_memory(traces, kept, cluster(), OPTIONS).allocated


def test_spelled_out_attention_keeps_what_megatrons_authors_count() -> None:
    """sbh (34 + 5 a s / h) bytes a layer (arXiv 2205.05198), with a fused softmax of 16 bits; more with one that is spelled out."""
    one = replace(stack("megatron-lm"), state_bytes=(0.0, 0.0))

    def layer(of: Stack) -> float:
        held = [
            foreign_memory({2: traced(2, fused=False, dropout=0.1)}, how(Mesh(pp=4), stack=of, layers=layers, accumulate=8), cluster(), OPTIONS)
            for layers in (8, 16)
        ]  # fmt: skip
        return (held[1].allocated - held[0].allocated) / (2 * 4)

    counted = 4096 * 1024 * (34 + 5 * DIMS["heads"] * 1024 / 1024)
    assert layer(one) == pytest.approx(counted, rel=0.02)
    assert layer(replace(one, fused_keys=512)) > 1.15 * counted, "rows too long for it"


def test_a_stage_of_deepspeeds_pipeline_keeps_what_it_sends() -> None:
    one = replace(stack("megatron-deepspeed"), reports="allocated")
    kept, freed = (
        foreign_memory({2: traced(2)}, how(Mesh(pp=4), stack=replace(one, keeps_sent=keeps), accumulate=8), cluster(), OPTIONS).allocated
        for keeps in (True, False)
    )
    assert one.keeps_sent and not stack("megatron-lm").keeps_sent
    assert kept - freed == 4 * 4096 * 1024 * 2, "of four micro-batches in flight, in 16 bits"


def test_a_stage_that_waits_for_its_messages_takes_longer() -> None:
    old = stack("megatron-lm")
    waits, hides = (how(Mesh(pp=4), stack=one, accumulate=8) for one in (old, replace(old, waits_for_messages=False)))
    assert old.waits_for_messages and not stack("megatron-core").waits_for_messages
    assert seconds(waits) > seconds(hides)


def test_spelled_out_attention_costs_more_and_fused_softmax_less_of_it() -> None:
    mesh = Mesh(dp_replicate=8)
    plain = replace(stack("megatron-lm"), compile="none", fitted={})
    spelled = seconds(how(mesh, stack=plain), fused=False)
    assert spelled > 1.2 * seconds(how(mesh, stack=plain))
    assert seconds(how(mesh, stack=replace(plain, compile="blocks")), fused=False) < spelled


def test_8_bit_products_are_quicker_and_what_they_read_is_cast_once() -> None:
    lowered = float8.with_float8(traced(2), "tensorwise")
    ops = lowered.programs["micro_first"].ops
    marked = [op for op in ops if float8.MARK in op.attrs]
    casts = [op for op in ops if op.outputs and op.outputs[0].spec.dtype == "float8_e4m3fn"]
    assert len(marked) == 2 * 4 * 3, "four linear layers, forward and twice backward; not the head"
    assert len(casts) == 2 * len({op.inputs[0].storage for op in casts}), "two passes, once each"
    wide = float8.with_float8(traced(2), "rowwise_with_gw_hp")
    assert sum(float8.MARK in op.attrs for op in wide.programs["micro_first"].ops) == 2 * 4 * 2


def test_recomputing_whole_blocks_runs_their_last_product_again() -> None:
    mesh = Mesh(dp_replicate=8)
    some = replace(stack("internevo"), whole_blocks=False)
    stops, whole = (how(mesh, stack=one, recompute="full") for one in (some, stack("internevo")))
    assert seconds(whole, recompute="full") > seconds(stops, recompute="full")


def test_a_pipeline_waits_and_holds_what_is_in_flight() -> None:
    pipe = how(Mesh(pp=4), "megatron-lm", accumulate=8)
    found = predict_foreign({2: traced(2)}, pipe, cluster(), OPTIONS)
    assert 0.2 < found.bubble < 0.5
    assert [in_flight(pipe, rank) for rank in range(4)] == [4, 3, 2, 1]
    few, many = (foreign_memory({2: traced(2)}, replace(pipe, schedule=name), cluster(), OPTIONS) for name in ("1f1b", "gpipe"))
    assert few.allocated < many.allocated


def test_lines_go_through_their_points() -> None:
    assert line({2: 5.0, 4: 9.0}, 10) == 21.0
    assert line({1: 3.0}, 7) == 3.0


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("name", sorted(stacks()))
def test_every_stack_has_a_source_a_known_kernel_and_few_fitted_constants(name: str) -> None:
    found = stack(name)
    assert found.source and found.framework
    assert found.kernel in ("", *attention.KERNELS)
    assert found.reports in ("allocated", "reserved", "device") and found.reduces in ("early", "late")
    assert len(found.fitted) <= MOST_FITTED
    assert set(found.fitted) <= {"memory_bound", "blocking_seconds", "ring_loss"}
    assert set(found.fitted) <= set(found.reasons), "a fitted constant says on what"
    assert set(found.reasons) <= set(Stack.__dataclass_fields__) | set(found.fitted) | {"memory_bound"}


def test_an_unknown_stack_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Exception, match="megatron-lm"):
        stack("megatron")


def test_spelled_out_attention_computes_the_same() -> None:
    import torch

    from foretell.zoo.language import gpt

    torch.manual_seed(0)
    fused, spelled = gpt.Attention(32, 4, 0.0), gpt.Attention(32, 4, 0.0, fused=False)
    spelled.load_state_dict(fused.state_dict())
    x = torch.randn(2, 16, 32)
    assert torch.allclose(fused(x), spelled(x), atol=1e-5)
