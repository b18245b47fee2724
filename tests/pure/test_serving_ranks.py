"""A rank's share of a server's step by rule, beside a trace of a module whose layers were split by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from foretell import zoo
from foretell.errors import UserError
from foretell.lower.serving import ATTEND, ROWS, TOKENS, StepShape, kv_bytes, resized, served_step
from foretell.lower.serving_ranks import blocks_of, sampled, sent_bytes, stage_share, tensor_share
from foretell.price.kernels.shapes import short
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.trace.serving.programs import served
from foretell.trace.types import PARAMETER, Trace
from tests.pure.test_serve_engine import COMMON, MORE, QUICK

RECIPE = Recipe(mode="infer", precision="bf16")
LLAMA = {"layers": 3, "dim": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "vocab_size": 300}
COLUMNS = ("q", "k", "v", "gate", "up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWED = ("out", "down", "o_proj", "down_proj")


def model_of(name: str) -> nn.Module:
    if name == "llama3-1b":
        entry = zoo.get(name)
        made: nn.Module = zoo.load(entry).build(**{**entry.config, **LLAMA})
        return made
    transformers = pytest.importorskip("transformers")
    kind = name.removeprefix("hf:")
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**COMMON, **{**QUICK, **MORE}[kind]}))
    return found


def by_hand(model: nn.Module, ranks: int, kept: int) -> nn.Module:
    """Layers replaced by a rank's part of them; sums and gathers are left out."""

    def less(size: int, parts: int) -> int:
        return -(-size // parts)

    for path, module in list(model.named_modules()):
        owner = model.get_submodule(path.rpartition(".")[0])
        last = path.rpartition(".")[2]
        if isinstance(module, nn.Embedding):
            setattr(owner, last, nn.Embedding(less(module.num_embeddings, ranks), module.embedding_dim))
        elif isinstance(module, nn.Linear):
            parts = min(ranks, kept) if last in ("k", "v", "k_proj", "v_proj") else ranks
            into, out = module.in_features, module.out_features
            if last in ROWED:
                into = less(into, parts)
            elif last in COLUMNS or last in ("head", "lm_head"):
                out = less(out, parts)
            setattr(owner, last, nn.Linear(into, out, bias=module.bias is not None))
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


@functools.cache
def whole(name: str) -> Trace:
    return capture(lambda: served(Workload(model_of(name), {}), TOKENS, ROWS), RECIPE)


def figures(trace: Trace) -> list[Any]:
    """Ops besides messages, as they are priced, and bytes that come to life."""
    own = [op for op in trace.ops() if not op.name.startswith("foretell.all_")]
    return [
        (op.name, [ref.spec for ref in op.inputs], [ref.spec for ref in op.outputs], op.flops, op.module,
         [trace.storages[number].nbytes for number in op.allocates]) for op in own
    ]  # fmt: skip


def held(trace: Trace) -> int:
    return sum(trace.storages[number].nbytes for number in trace.resident if trace.storages[number].role == PARAMETER)


@pytest.mark.parametrize(
    ("name", "ranks", "kept"), [("llama3-1b", 2, 2), ("llama3-1b", 8, 2), ("hf:qwen3", 2, 2), ("hf:llama", 4, 2), ("hf:mistral", 2, 2)]
)
def test_a_share_is_that_of_a_module_split_by_hand(name: str, ranks: int, kept: int) -> None:
    share = tensor_share(whole(name), ranks)
    hand = capture(lambda: served(Workload(by_hand(model_of(name), ranks, kept), {}), TOKENS, ROWS), RECIPE)
    assert held(share) == held(hand) and kv_bytes(share) == kv_bytes(hand)
    assert sum(op.flops or 0 for op in share.ops()) == sum(op.flops or 0 for op in hand.ops())
    if name == "llama3-1b":
        for one, other in zip(figures(share), figures(hand), strict=True):
            assert one[:3] == other[:3] or short(one[0]) in ("_unsafe_view", "select"), "what is gathered is whole from there on"
            assert one[3:5] == other[3:5] and (one[5] == other[5] or short(one[0]) == "mm")


def test_two_sums_a_layer_and_one_of_the_table() -> None:
    share = tensor_share(whole("llama3-1b"), 4)
    sums = [op for op in share.ops() if op.name == "foretell.all_reduce"]
    assert len(sums) == 2 * LLAMA["layers"] + 1 and all(op.inputs[0].spec.shape[-1] == LLAMA["dim"] for op in sums)
    (gather,) = [op for op in share.ops() if op.name == "foretell.all_gather"]
    assert gather.outputs[0].spec.shape == (ROWS, 300) and gather.inputs[0].spec.shape == (ROWS, 75)
    small = served_step(share, StepShape(3, 300, ((0, 20),), 4), 160)
    assert [op.inputs[0].spec.shape[-2] for op in small.ops() if op.name == "foretell.all_reduce"] == [23] * 7
    assert next(op for op in small.ops() if op.name == "foretell.all_gather").outputs[0].spec.shape == (4, 300)


def test_heads_decide_which_splits_there_are() -> None:
    with pytest.raises(UserError, match="tp 3 does not divide 8 attention heads") as caught:
        tensor_share(whole("llama3-1b"), 3)
    assert "1, 2, 4, 8" in caught.value.remedy
    assert kv_bytes(tensor_share(whole("llama3-1b"), 8)) * 2 == kv_bytes(whole("llama3-1b")), "one head of two: copied, not halved again"


def test_what_cannot_be_split_stays_whole() -> None:
    """Of latent attention the low ranks, which a norm follows; of experts the router."""
    deep = tensor_share(whole("hf:deepseek_v3"), 2)
    own = {op.module.rpartition(".")[2]: op for op in deep.ops() if short(op.name) == "mm"}
    before = {op.module.rpartition(".")[2]: op for op in whole("hf:deepseek_v3").ops() if short(op.name) == "mm"}
    assert own["kv_a_proj_with_mqa"].inputs == before["kv_a_proj_with_mqa"].inputs
    assert own["kv_b_proj"].outputs[0].spec.shape[-1] * 2 == before["kv_b_proj"].outputs[0].spec.shape[-1]
    experts = tensor_share(whole("hf:mixtral"), 2)
    assert held(experts) / held(whole("hf:mixtral")) == pytest.approx(0.5, abs=0.02)
    gates = [[op.inputs for op in trace.ops() if short(op.name) == "topk"] for trace in (experts, whole("hf:mixtral"))]
    assert gates[0] == gates[1]


def test_stages_are_the_whole_between_them() -> None:
    trace = whole("llama3-1b")
    first, second = stage_share(trace, 0, 1), stage_share(trace, 1, 3)
    assert held(first) + held(second) == held(trace) + 300 * 64 * 2, "a tied table is on both"
    assert kv_bytes(first) * 2 == kv_bytes(second)
    assert sum(op.name == ATTEND for op in second.ops()) == 2
    table = [op for op in second.ops() if short(op.name) == "embedding"]
    assert not table and any("rotary" in op.module for op in second.ops()), "angles are computed again, the table is not read"
    assert sent_bytes(trace) == TOKENS * 64 * 2
    alive = set(second.resident)
    for op in second.ops():
        alive |= set(op.allocates)
        assert set(op.frees) <= alive and {ref.storage for ref in (*op.inputs, *op.outputs)} <= alive
        alive -= set(op.frees)
    assert stage_share(trace, 0, 3) is trace


def test_few_blocks_stand_for_many() -> None:
    trace = whole("llama3-1b")
    assert len(blocks_of(trace).each) == 3
    for name in ("llama3-1b", "hf:deepseek_v3"):
        weighed = sampled(resized(whole(name), 40, 40))
        flops = sum(factor * sum(op.flops or 0 for op in one.ops()) for factor, one in weighed)
        assert flops == sum(op.flops or 0 for op in resized(whole(name), 40, 40).ops())
