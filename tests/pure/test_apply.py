"""Applying a plan in one process: what it changes, what it refuses, and that twins and comparisons do their part."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import UnknownName, UserError
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Pipeline, Plan, Residency
from foretell.runtime.check import verify
from foretell.runtime.check.twin import LARGEST_WORLD, twin
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.apply import Job, apply, shapes_of
from foretell.runtime.parallel.ranks import Ranks, start
from foretell.runtime.train.numbers import clip
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Workload

GPT = Source(
    model="gpt-tiny",
    overrides={"layers": 3, "dim": 16, "heads": 2, "vocab_size": 32, "context": 8},
    micro_batch=2,
)
ALONE = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"), mesh=None, sizes=Mesh())
FULL = Residency(mode="recompute")


def plan(**more: Any) -> Plan:
    return Plan(**{"model": {"model": "gpt-tiny"}, "hardware": "auto", "precision": "fp32", "clip": None, **more})


def job(asked: Plan, workload: Workload | None = None) -> Job:
    return apply(workload or verify.build(GPT), asked, ALONE, learning_rate=1e-2, backend="aot_eager")


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_world_that_does_not_match_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"for 8 processes \(dp_shard 4 × tp 2\) and 1 process started") as caught:
        start(plan(mesh=Mesh(dp_shard=4, tp=2)))
    assert "torchrun --nproc-per-node 8 -m foretell run" in caught.value.remedy


def test_variables_that_torchrun_would_have_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="MASTER_ADDR, MASTER_PORT is not set"):
        start(plan(mesh=Mesh(tp=2)))
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UserError, match="whole numbers"):
        start(plan(mesh=Mesh(tp=2)))


def test_one_process_needs_no_process_group() -> None:
    ranks = start(plan(), device="cpu")
    assert not torch.distributed.is_initialized()
    assert (ranks.rank, ranks.world, ranks.is_first, ranks.data_rank) == (0, 1, True, 0)
    assert ranks.coordinate("tp") == 0 and ranks.group("tp") is None and ranks.submesh(("tp", "pp")) is None


def test_a_plan_for_another_model_says_which_shapes_differ() -> None:
    wide = load(Source(model="gpt-tiny", overrides={**GPT.overrides, "dim": 32})).model
    asked = plan(model=model_of(GPT, shapes=shapes_of(wide)))
    with pytest.raises(UserError, match=r"another model.*tokens.weight is 32x32 in the plan and 32x16 in the model"):
        job(asked)


@pytest.mark.parametrize("changes", [{"mesh": Mesh(cp=2)}, {"mesh": Mesh(ep=2)}, {"blocks": {"layers.*": FULL}}])
def test_what_cannot_be_run_is_refused_before_anything_is_changed(changes: dict[str, Any]) -> None:
    workload = verify.build(GPT)
    before = {name: type(module) for name, module in workload.model.named_modules()}
    with pytest.raises(UserError):
        job(plan(**changes), workload)
    assert before == {name: type(module) for name, module in workload.model.named_modules()}


@pytest.mark.parametrize(
    ("mesh", "more"), [(Mesh(pp=2), {"pipeline": Pipeline(cuts=("blocks.1",)), "accumulate": 2}), (Mesh(tp=2), {})]
)
def test_where_only_blocks_can_be_compiled_the_whole_is_refused(mesh: Mesh, more: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"compile: .*") as caught:
        apply(verify.build(GPT), plan(mesh=mesh, compile="model", **more), replace(ALONE, world=2))
    assert caught.value.remedy == "compile blocks, or none"


def test_a_loss_may_be_compiled_by_itself() -> None:
    workload = verify.build(GPT)
    plain = job(plan()).train_step([workload.batch])
    compiled = job(plan(kernels={"loss": "compiled"})).train_step([workload.batch])
    torch.testing.assert_close(compiled.loss, plain.loss)


def test_errors_travel_between_processes_whole() -> None:
    error = pickle.loads(pickle.dumps(UnknownName("model", "gtp2", ["gpt2"], "see the zoo")))
    assert isinstance(error, UnknownName) and error.near == ["gpt2"] and "did you mean gpt2?" in error.remedy


# --- a step ----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_mean_over_micro_batches_clipped_as_torch_clips() -> None:
    parts = verify.batches(GPT, 3)
    asked = plan(accumulate=3, clip=0.1, optimizer="sgd")
    known = verify.build(GPT)
    losses = [known.loss(known.model(part["input_ids"]), part) for part in parts]  # type: ignore[misc, index, call-overload]
    torch.stack(losses).mean().backward()
    norm = nn.utils.clip_grad_norm_(known.model.parameters(), 0.1)
    torch.optim.SGD(known.model.parameters(), lr=1e-2).step()
    done = job(asked)
    result = done.train_step(parts)
    torch.testing.assert_close(result.loss, torch.stack(losses).mean())
    torch.testing.assert_close(result.grad_norm, norm)
    for (name, wanted), (other, found) in zip(known.model.named_parameters(), done.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_a_step_without_micro_batches_is_refused() -> None:
    with pytest.raises(UserError, match="at least one micro-batch"):
        job(plan()).train_step([])


def test_bf16_norms_are_summed_in_fp32() -> None:
    """4096 ones have norm 64; a sum of squares in bf16 stops at 256, a norm of 16."""
    parameter = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    squares = clip.squares([parameter], {parameter: 0.5})
    assert squares is not None and squares.dtype is torch.float32 and squares.item() == 2048
    clip.scale([parameter], torch.tensor(64.0), 1.0)
    assert parameter.grad.unique().item() == 1 / 64


def test_clipping_leaves_a_small_gradient_alone() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    clip.scale([parameter], torch.tensor(0.5), 1.0)
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize(
    ("precision", "weights"), [("fp32", torch.float32), ("bf16-mixed", torch.float32), ("bf16", torch.bfloat16)]
)
def test_precision_is_what_the_plan_says(precision: str, weights: torch.dtype) -> None:
    workload = verify.build(GPT)
    seen: list[torch.dtype] = []
    workload.model.blocks[0].mlp.up.register_forward_hook(lambda _, __, output: seen.append(output.dtype))  # type: ignore[union-attr, index]
    done = job(plan(precision=precision), workload)
    done.train_step([workload.batch])
    assert {p.dtype for p in done.parameters()} == {weights}
    assert seen == [torch.float32 if precision == "fp32" else torch.bfloat16]


def test_only_the_blocks_the_plan_names_are_computed_again() -> None:
    workload = verify.build(GPT)
    calls = [0, 0, 0]
    for number, block in enumerate(workload.model.blocks):  # type: ignore[arg-type]
        block.mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    done = job(plan(blocks={"blocks.1-2": FULL}), workload)
    done.train_step([workload.batch])
    assert calls == [1, 2, 2]
    done.evaluate([workload.batch])
    assert calls == [2, 3, 3]


def test_evaluating_changes_nothing() -> None:
    workload = Workload(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), torch.randn(8, 4), _square)
    done = job(plan(model={"model": "own"}), workload)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    assert done.evaluate([workload.batch] * 2) == done.evaluate([workload.batch])
    after = workload.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert workload.model.training and all(p.grad is None for p in done.parameters())


def _square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def test_a_saved_state_continues_to_the_bit() -> None:
    parts, asked = verify.batches(GPT, 2), plan(accumulate=2, clip=0.1)
    first = job(asked)
    for _ in range(3):
        first.train_step(parts)
    saved = pickle.loads(pickle.dumps(first.state_dict()))
    second = job(asked)
    second.load_state_dict(saved)
    for _ in range(2):
        assert first.train_step(parts).loss.item() == second.train_step(parts).loss.item()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_state_of_another_model_is_refused() -> None:
    saved = job(plan()).state_dict()
    other = verify.build(Source(model="llama-tiny", overrides={**GPT.overrides, "kv_heads": 2, "ffn": 16}))
    with pytest.raises(UserError, match="another model or another plan"):
        job(plan(), other).load_state_dict(saved)
    del saved["model"]["norm.weight"]
    with pytest.raises(UserError, match=r"has no norm\.weight"):
        job(plan()).load_state_dict(saved)


# --- units of sharding -----------------------------------------------------------------------------------------------


def test_blocks_that_share_parameters_are_sharded_together_or_left_to_the_root() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(5))
    model.head = nn.Linear(2, 2)
    model.blocks[1][0].weight = model.blocks[3][0].weight
    model.blocks[4][0].bias = model.head.bias
    model.blocks.append(model.blocks[0])
    found = shard.units(model, [f"blocks.{number}" for number in range(6)])
    by_number = [[list(model.blocks).index(block) for block in unit] for unit in found]
    assert sorted(by_number) == [[0], [1, 3], [2]]


# --- comparing -------------------------------------------------------------------------------------------------------


def run(scale: float = 1.0, loss: float = 2.0, **gradients: Tensor) -> verify.VerifyRun:
    torch.manual_seed(0)
    usual = {"a": torch.randn(64), "b": torch.randn(8) * 1e-3, **gradients}
    return verify.VerifyRun([loss, loss], [], {name: grad * scale for name, grad in usual.items() if grad.numel()})


def test_a_comparison_can_fail() -> None:
    assert verify.compare(run(), run(1 + 5e-5)).good
    assert not verify.compare(run(), run(1 + 2e-4)).good
    assert not verify.compare(run(), run(loss=2.0005)).good
    assert not verify.compare(run(), run(loss=math.nan)).good
    assert not verify.compare(run(), run(a=torch.full((64,), math.nan))).good
    assert "b are in one run only" in verify.compare(run(), run(b=torch.empty(0))).problem
    wrong = verify.compare(run(), run(b=torch.randn(8) * 1e-3))
    assert not wrong.good and wrong.gradient_name == "b"


def test_a_gradient_that_is_nothing_but_rounding_is_held_to_the_whole() -> None:
    noise = torch.randn(8) * 1e-9
    assert verify.compare(run(c=noise), run(c=-noise)).good
    assert not verify.compare(run(c=noise), run(c=noise + 1e-5)).good


def test_ranks_that_disagree_are_found() -> None:
    assert verify.merge([run(), run()]).losses == [2.0, 2.0]
    assert not verify.compare(run(), verify.merge([run(), run(loss=2.0000001)])).good


def test_bf16_bounds_are_counted(tmp_path: Path) -> None:
    """One product under autocast: input, weight and product are rounded in forward, the product's gradient and the
    weight's in backward."""
    file = tmp_path / "one.py"
    file.write_text(
        "import torch\n"
        "def build(): return torch.nn.Linear(8, 8, bias=False)\n"
        "def batch(micro_batch): return torch.randn(micro_batch, 8)\n"
        "def loss(output, batch): return output.float().square().mean()\n"
    )
    source, asked = Source(model=f"{file}:build", micro_batch=4), plan(precision="bf16-mixed", accumulate=2)
    known = verify.reference(source, asked, steps=1)
    single, roundings = verify.rounded(source, asked, steps=1)
    bounds = verify.bounds_of(source, asked, known, steps=1)
    assert roundings == 5 and bounds.gradient == math.sqrt(5) / 256 and bounds.loss == 1 / 256
    assert verify.compare(known, verify.VerifyRun(known.losses, [], single.gradients), bounds).good
    assert not verify.compare(known, verify.VerifyRun(known.losses, [], single.gradients)).good, "bf16 is no fp32"


# --- twins -----------------------------------------------------------------------------------------------------------


def test_a_twin_keeps_classes_axes_and_ways_and_loses_size() -> None:
    asked = Plan(
        model={"model": "llama3-1b", "blocks": ["blocks.0-15"]}, hardware="H100:64", micro_batch=8, accumulate=16,
        mesh=Mesh(pp=4, dp_replicate=2, dp_shard=4, tp=8),
        pipeline=Pipeline(schedule="interleaved-1f1b", cuts=tuple(f"blocks.{n}" for n in range(2, 16, 2))),
        blocks={"blocks.0-7": FULL},
    )  # fmt: skip
    small = twin(asked)
    assert small.plan.mesh == Mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2) and small.plan.mesh.world == LARGEST_WORLD
    assert small.plan.pipeline is not None and small.plan.pipeline.cuts == ("blocks.1", "blocks.2", "blocks.3")
    assert [small.plan.blocks[f"blocks.{n}"].mode for n in range(4)] == ["recompute", "recompute", "keep", "keep"]
    model = load(small.source).model
    assert type(model).__name__ == "Llama" and model.head is None, "tied, as llama3-1b is"
    assert small.parameters == sum(p.numel() for p in model.parameters()) < 1_000_000
    assert {"layers 16 → 4", "tp 8 → 2", "stages 8 → 4", "tokens 4096 → 32"} <= set(small.notes)


def test_resharding_to_fewer_ranks_takes_four() -> None:
    small = twin(plan(mesh=Mesh(dp_shard=16), reshard=8))
    assert small.plan.mesh.dp_shard == 4 and small.plan.reshard == 2


def test_a_file_is_its_own_twin_or_has_one(tmp_path: Path) -> None:
    body = "import torch\nfrom torch import nn\n\ndef batch(micro_batch): return torch.randn(micro_batch, 4)\n"
    build = "def {}(): return nn.Linear(4, {})\n"
    small, large, both = (tmp_path / f"{name}.py" for name in ("small", "large", "both"))
    small.write_text(body + build.format("build", 4))
    large.write_text(body + build.format("build", 10_000_000))
    both.write_text(body + build.format("build", 10_000_000) + build.format("twin", 5))
    assert twin(plan(model={"model": f"{small}:build"})).parameters == 20
    assert twin(plan(model={"model": f"{both}:build"})).parameters == 25
    with pytest.raises(UserError, match="50,000,000 parameters") as caught:
        twin(plan(model={"model": f"{large}:build"}))
    assert "`twin`" in caught.value.remedy


def test_a_transformers_config_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    small = twin(plan(model={"model": "hf:mistral"}, mesh=Mesh(tp=8)))
    assert small.parameters < 1_000_000
    assert {"num_hidden_layers 32 → 2", "hidden_size 4096 → 64", "num_key_value_heads 8 → 2"} <= set(small.notes)


def test_each_axis_is_checked_alone_then_all_then_as_planned() -> None:
    cases = verify.cases_of(plan(mesh=Mesh(dp_shard=2, tp=2), precision="bf16-mixed", clip=1.0, compile="blocks"))
    assert [case.name for case in cases] == [
        "data shards alone, fp32", "tensor split alone, fp32", "as planned, but fp32", "as planned, bf16-mixed",
    ]  # fmt: skip
    assert [case.plan.mesh.world for case in cases] == [2, 2, 4, 4]
    assert [case.plan.compile for case in cases] == ["none", "none", "blocks", "blocks"]
