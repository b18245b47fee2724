"""Adapters where ranks share a model's blocks, positions or tensors: what they compute is what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretell.checkpoint import store
from foretell.plan.types import Adapters, Mesh, Pipeline, Plan, Residency
from foretell.runtime.check import verify
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import start
from foretell.trace.load.model import Source
from tests.cpu_dist.beside_one import Case, Ranks, check, params
from tests.cpu_dist.test_checkpoint import LOSS_BOUND, SETTINGS, go, losses

TEXT = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}
HF = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 64,
}  # fmt: skip
MODELS = {
    "gpt": Source(model="gpt-tiny", overrides=TEXT, micro_batch=2),
    "llama": Source(model="llama-tiny", overrides={**TEXT, "kv_heads": 2, "ffn": 64}, micro_batch=2),
    "hf": Source(model="hf:qwen2", overrides=HF, micro_batch=2, seq=16),
}
LORA = {"adapters": Adapters(rank=4)}
PIPED = {"pipeline": Pipeline(schedule="1f1b", cuts=("blocks.1",)), "accumulate": 2}
NF4 = {**LORA, "base": {"adapted": "nf4"}}
DORA = {"adapters": Adapters(kind="dora", rank=4)}
CASES = {
    "stages, nf4": Case("llama", Mesh(pp=2), {**NF4, **PIPED}),
    "stages": Case("llama", Mesh(pp=2), {**LORA, **PIPED}, slow="over a packed base above"),
    "stages, dora": Case("gpt", Mesh(pp=2), {**DORA, **PIPED}, slow="a stage runs its layers whole, as LoRA above"),
    "stages, shards": Case("llama", Mesh(pp=2, dp_shard=2), {**LORA, **PIPED}, slow="each of the two is there without the other"),
    "positions, nf4": Case("llama", Mesh(cp=2), NF4),
    "positions": Case("hf", Mesh(cp=2), LORA, slow="over a packed base above"),
    "positions, dora": Case("llama", Mesh(cp=2), DORA),
    "positions, shards": Case("llama", Mesh(cp=2, dp_shard=2), NF4, slow="each of the two is there without the other"),
    "tensors": Case("llama", Mesh(tp=2), LORA),
    "tensors, biases": Case("gpt", Mesh(tp=2), LORA, slow="a bias goes with the base, not with the adapter"),
    "tensors, shards": Case("hf", Mesh(tp=2, dp_shard=2), LORA, slow="each of the two is there without the other"),
    "tensors, stages": Case("llama", Mesh(tp=2, pp=2), {**LORA, **PIPED}, slow="each of the two is there without the other"),
    "tensors, positions": Case("llama", Mesh(tp=2, cp=2), LORA, slow="each of the two is there without the other"),
    "tensors, recomputed": Case("llama", Mesh(tp=2), {**LORA, "blocks": {"blocks.*": Residency(mode="recompute")}}, slow="recompute runs the same"),
    "tensors, bf16-mixed": Case("llama", Mesh(tp=2), {**LORA, "precision": "bf16-mixed"}, slow="the same calls in another precision"),
}  # fmt: skip


@pytest.mark.parametrize("name", params(CASES))
def test_ranks_compute_what_one_process_computes(name: str, ranks: Ranks) -> None:
    check(CASES[name], MODELS, ranks)


def layouts(rank: int, world: int, plan: Plan) -> dict[str, tuple[int, ...]]:
    """What a rank has of the adapters of a block."""
    job = apply(verify.build(MODELS["llama"]), plan, start(plan, device="cpu"))
    return {name: tuple(getattr(p, "to_local", lambda p=p: p)().shape) for name, p in job.named_parameters() if "blocks.0" in name and "lora" in name}


def test_rows_of_b_and_columns_of_a_are_split(ranks: Ranks) -> None:
    """Whose outputs are split have a part of B, whose inputs are split a part of A; the other factor is whole."""
    found = ranks(2).run(layouts, CASES["tensors"].plan)
    assert found[0] == found[1]
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        outputs = {"k": 16, "v": 16, "q": 32}.get(name[-1], 64)
        assert found[0][f"blocks.0.{name}.lora_A"] == (4, 32) and found[0][f"blocks.0.{name}.lora_B"] == (outputs // 2, 4)
    for name, inputs in (("attention.out", 32), ("mlp.down", 64)):
        assert found[0][f"blocks.0.{name}.lora_A"] == (4, inputs // 2) and found[0][f"blocks.0.{name}.lora_B"] == (32, 4)


@pytest.mark.slow(reason="adapters go on on other ranks in test_adapters.py, and each layout computes what one process computes above")
def test_a_run_goes_on_in_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    """One process, stages, tensors, positions: a checkpoint of each is resumed by the next, and the losses are those of one process."""
    source = Source(model="llama-tiny", overrides={**TEXT, "vocab_size": 256, "kv_heads": 2, "ffn": 64}, micro_batch=2)
    one = Plan(model={"model": source.model, "overrides": source.overrides, "seq": 16}, hardware="CPU", micro_batch=2, accumulate=2,
               precision="fp32", adapters=Adapters(rank=4))  # fmt: skip
    staged = one.with_(mesh=Mesh(pp=2), pipeline=PIPED["pipeline"])
    order = [one, staged, one.with_(mesh=Mesh(tp=2)), one.with_(mesh=Mesh(cp=2))]
    for place, plans in (("alone", [one]), ("in turn", order)):
        for number, plan in enumerate(plans):
            steps = {"steps": number + 1 if place == "in turn" else len(order)}
            asked = {**SETTINGS, "schedule_steps": len(order), **steps} if number == 0 else steps
            ranks(plan.mesh.world).run(go, str(tmp_path / place), plan, asked, **({"resume": True} if number else {}))
    assert len(losses(tmp_path / "alone")) == len(order)
    assert losses(tmp_path / "in turn") == pytest.approx(losses(tmp_path / "alone"), rel=LOSS_BOUND)
    kinds = {name.rpartition(".")[2] for name in store.complete(tmp_path / "in turn" / "checkpoints")[0].manifest.tensors}
    assert {"lora_A", "lora_B"} <= kinds and "base_codes" not in kinds
