"""How whole models are split over ranks: what is derived from the flow of their tensors, and what the ranks send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import UserError
from foretell.plan.tensor.alike import alike
from foretell.plan.tensor.derive import Derived, derive, refusal
from foretell.plan.tensor.types import Shard
from foretell.runtime.parallel.tensor import split as tensor
from foretell.runtime.parallel.tensor.exchange import TensorGroup
from foretell.trace.flow.calls import Flow
from foretell.trace.flow.record import record
from foretell.trace.load.model import Source, load
from foretell.trace.record.step import Workload, compute_loss

RANKS = 2


# ---------------------------------------------------------------- models


def flow_of(model: str, **overrides: Any) -> Flow:
    sizes = {key: overrides.pop(key) for key in ("seq", "micro_batch") if key in overrides}
    with torch.device("meta"):
        return record(load(Source(model=model, overrides=overrides, **{"micro_batch": 2, "seq": 16, **sizes})))


def rules_of(found: Derived) -> dict[str, str]:
    return dict(found.rules)


ATTENTION = {"q": "column", "k": "column", "v": "column", "out": "row"}
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "gpt-tiny": ({}, {
        "tokens": "vocab", "blocks.*.attention.qkv": "column:3", "blocks.*.attention.out": "row",
        "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row",
    }),
    "llama-tiny": ({}, {
        "tokens": "vocab", **{f"blocks.*.attention.{name}": rule for name, rule in ATTENTION.items()},
        "blocks.*.mlp.gate": "column", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row", "head": "column",
    }),
    "vit-tiny": ({"seq": None}, {
        "blocks.*.attn.qkv": "column:3", "blocks.*.attn.proj": "row", "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row", "head": "column",
    }),
    "bert-tiny": ({}, {
        "embeddings.tokens": "vocab", **{f"blocks.*.attention.{name}": rule for name, rule in ATTENTION.items()},
        "blocks.*.up": "column", "blocks.*.down": "row", "head.bias": "split:0",
    }),
    "t5-tiny": ({"seq": 64}, {
        "tokens": "vocab", "encoder.bias.table": "column", "decoder.bias.table": "column",
        **{f"encoder.blocks.*.attention.{name}": rule for name, rule in ATTENTION.items()},
        **{f"decoder.blocks.*.attention.{name}": rule for name, rule in ATTENTION.items()},
        **{f"decoder.blocks.*.cross.{name}": rule for name, rule in ATTENTION.items()},
        "encoder.blocks.*.mlp.up": "column", "encoder.blocks.*.mlp.down": "row",
        "decoder.blocks.*.mlp.up": "column", "decoder.blocks.*.mlp.down": "row",
    }),
    "mixtral-tiny": ({}, {
        "tokens": "vocab", **{f"blocks.*.attention.{name}": rule for name, rule in ATTENTION.items()}, "head": "column",
        "blocks.*.moe.experts.gate": "column", "blocks.*.moe.experts.up": "column", "blocks.*.moe.experts.down": "row",
    }),
    "dit-tiny": ({"seq": None}, {
        "time_embedding.up": "column", "time_embedding.down": "row", "blocks.*.attn.qkv": "column:3",
        "blocks.*.attn.proj": "row", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row",
    }),
}  # fmt: skip


@pytest.mark.parametrize("model", EXPECTED)
def test_rules_follow_from_the_flow(model: str) -> None:
    overrides, rules = EXPECTED[model]
    flow = flow_of(model, **overrides)
    found = derive(flow, 2)
    assert rules_of(found) == rules
    assert refusal(found) is None
    # What is derived can be written down, and holds when it is read again.
    again = derive(flow, 2, rules=found.rules)
    assert (again.rules, again.places, again.collectives) == (found.rules, found.places, found.collectives)
    with pytest.raises(UserError, match="names no layer or parameter"):
        derive(flow, 2, rules={**found.rules, "blocks.*.nothing": "column"})


def flow_of_module(model: nn.Module, *shape: int) -> Flow:
    def loss(output: Tensor, _: Any) -> Tensor:
        return output.float().square().mean()

    return record(Workload(model, (torch.randn(*shape),), loss))


class Attention(nn.Module):
    """Fused queries, keys and values, taken apart in a way of choice."""

    def __init__(self, take: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], size: int = 48) -> None:
        super().__init__()
        self.take, self.qkv, self.out = take, nn.Linear(16, size), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.take(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, 4)).transpose(1, 2)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Any], int, str]] = {
    "parts, split": (lambda x: tuple(heads(y, 4) for y in x.split(16, dim=-1)), 48, "column:3"),
    "parts, sliced": (lambda x: (heads(x[..., :16], 4), heads(x[..., 16:32], 4), heads(x[..., 32:], 4)), 48, "column:3"),
    "parts, viewed": (lambda x: x.view(2, 8, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0), 48, "column:3"),
    "heads first": (lambda x: x.view(2, 8, 4, 3, 4).permute(3, 0, 2, 1, 4).unbind(0), 48, "column"),
    "heads first, thirds": (lambda x: tuple(y.transpose(1, 2) for y in x.view(2, 8, 4, 12).chunk(3, dim=-1)), 48, "column"),
    "every third": (lambda x: tuple(heads(x[..., i::3], 4) for i in range(3)), 48, "column"),
    "fewer keys": (lambda x: (heads(x[..., :16], 4), heads(x[..., 16:24], 2), heads(x[..., 24:], 2)), 32, "column:16+8+8"),
    "nested": (lambda x: (heads(x[..., :16], 4), *(heads(y, 2) for y in x[..., 16:].chunk(2, -1))), 32, "column:16+8+8"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_layers_are_proven_from_how_they_are_used(layout: str) -> None:
    take, size, rule = LAYOUTS[layout]
    found = derive(flow_of_module(Attention(take, size), 2, 8, 16), 2)
    assert rules_of(found) == {"qkv": rule, "out": "row"}


UNPROVEN: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "backwards": (lambda x: tuple(heads(y, 4) for y in x.flip(-1).split(16, -1)), "flip goes over the split dimension"),
    "every other": (lambda x: tuple(heads(x[..., i : i + 31 : 2], 4) for i in (0, 1, 17)), "scattered entries"),
    "shuffled": (lambda x: tuple(heads(y, 4) for y in x[..., torch.randperm(48)].split(16, -1)), "single entries"),
    "sorted": (
        lambda x: tuple(heads(y, 4) for y in x.sort(dim=-1)[0].split(16, -1)),
        "sort goes over the split dimension",
    ),
}


@pytest.mark.parametrize("layout", UNPROVEN)
def test_a_fused_layer_that_cannot_be_proven_stays_whole(layout: str) -> None:
    take, reason = UNPROVEN[layout]
    found = derive(flow_of_module(Attention(take), 2, 8, 16), 2)
    assert found.rules == {}
    assert reason in found.whole["qkv.weight"]
    error = refusal(found)
    assert error is not None and reason in error.problem and "tp 1" in error.remedy


class Tied(nn.Module):
    def __init__(self, again: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.again, self.weight = again, nn.Parameter(torch.randn(width, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, self.weight)), self.again(self.weight))


def test_a_tied_weight_that_comes_back_transposed_is_split() -> None:
    found = derive(flow_of_module(Tied(lambda w: w.t(), 32), 2, 8, 16), 2)
    assert found.places == {"weight": Shard(0, (32,))}


def test_a_tied_weight_that_would_have_to_be_split_twice_stays_whole() -> None:
    found = derive(flow_of_module(Tied(lambda w: w, 16), 2, 8, 16), 2)
    assert found.places == {}
    assert "different dimensions" in found.whole["weight"]


def test_torchs_own_encoder_layer_is_split() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    found = derive(flow_of_module(layer, 2, 8, 16), 2)
    assert found.places["self_attn.in_proj_weight"] == Shard(0, (16, 16, 16))
    assert found.places["self_attn.out_proj.weight"] == Shard(1, (16,))
    assert (found.rules["linear1"], found.rules["linear2"]) == ("column", "row")


@pytest.mark.parametrize(
    ("model", "overrides", "ranks", "path", "reason"),
    [
        ("gpt-tiny", {"dim": 96, "heads": 3}, 2, "blocks.*.attention.qkv.weight", "3 heads do not divide by 2 (blocks.*.attention.heads)"),
        ("llama-tiny", {"heads": 8, "kv_heads": 2}, 4, "blocks.*.attention.k.weight", "2 does not divide by 4 (view in blocks.*.attention)"),
        ("gpt-tiny", {"vocab_size": 511}, 2, "tokens.weight", "its 511 rows do not divide by 2"),
        ("llama-tiny", {"ffn": 353}, 2, "blocks.*.mlp.gate.weight", "its 353 outputs do not divide by 2"),
    ],
)  # fmt: skip
def test_what_does_not_divide_stays_whole_and_says_so(
    model: str, overrides: dict[str, Any], ranks: int, path: str, reason: str
) -> None:
    found = derive(flow_of(model, **overrides), ranks)
    assert found.whole[path] == reason
    assert path not in found.places
    assert any(reason in line for line in found.report())


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("resnet-tiny", "only 1% of its layers can be split over tp 2: none of them is a linear layer"),
        ("unet-tiny", "none of its layers can be split over tp 2: none of them is a linear layer"),
        ("ssm-tiny", "none of its layers can be split over tp 2: conv1d has no rule (conv1d in blocks.*.mixer.conv)"),
        ("lstm-tiny", "none of its layers can be split over tp 2: none of them is a linear layer"),
    ],
)
def test_a_model_without_layers_to_split_is_refused(model: str, problem: str) -> None:
    found = derive(flow_of(model, seq=None if "net" in model else 16), 2)
    error = refusal(found)
    assert error is not None and error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            {"blocks.*.attention.qkv": "column", "blocks.*.attention.out": "row"},
            "pieces of it are used apart, of 128+128+128",
        ),
        ({"blocks.*.mlp.down": "row"}, "its input is not split"),
        ({"blocks.*.mlp.up": "column"}, "blocks.*.mlp.down.weight is whole and cannot follow"),
        ({"blocks.*.mlp.up": "sideways"}, "'sideways' is no rule"),
        ({"blocks.*.attention.qkv": "column:5"}, "does not say how the 384"),
        ({"blocks.*.attention.qkv": "column:383+1"}, "does not divide by 2"),
        ({"blocks.0.mlp.up": "column", "blocks.1.mlp.up": "column:2"}, "two rules"),
    ],
)
def test_rules_that_would_be_wrong_are_refused(rules: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        derive(flow_of("gpt-tiny"), 2, rules=rules)
    assert problem in str(caught.value)


def test_rules_that_are_given_are_all_there_is() -> None:
    rules = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
    found = derive(flow_of("gpt-tiny"), 2, rules=rules)
    assert rules_of(found) == rules
    assert set(found.places) == {"blocks.*.mlp.up.weight", "blocks.*.mlp.up.bias", "blocks.*.mlp.down.weight"}


def test_a_models_own_plan_is_followed_where_it_holds() -> None:
    flow = flow_of("llama-tiny")
    own = {
        **{f"blocks.*.attention.{name}": style for name, style in zip("qkv", ["colwise"] * 3, strict=True)},
        "blocks.*.attention.out": "rowwise", "head": "colwise_gather_output", "blocks.*.unknown": "colwise", "x": "moe",
    }  # fmt: skip
    found = derive(flow, 2, own=own)
    assert rules_of(found) == EXPECTED["llama-tiny"][1]
    assert found.notes == ("agrees with the model's own plan",)
    wrong = derive(flow, 2, own={**own, "blocks.*.attention.out": "colwise"})
    assert rules_of(wrong) == EXPECTED["llama-tiny"][1]
    assert "blocks.*.attention.out as column, which is not followed" in wrong.notes[0]


def test_without_sequence_and_loss_nothing_is_split_between_layers() -> None:
    found = derive(flow_of("llama-tiny"), 2, sequence=False, loss=False)
    assert (found.sequence, found.loss) == ((), False)
    assert "head.weight" not in found.places
    kinds = Counter((exchange.kind, exchange.phase) for exchange in found.collectives)
    # Two regions in each of four blocks: a sum where each ends, and one in backward where it begins; the table's own.
    assert kinds == {("all-reduce", "forward"): 9, ("all-reduce", "backward"): 8}


def test_positions_that_do_not_divide_are_split_by_sample() -> None:
    assert derive(flow_of("gpt-tiny", seq=16), 2).sequence == ("positions",)
    assert derive(flow_of("gpt-tiny", seq=15), 2).sequence == ("samples",)
    assert derive(flow_of("gpt-tiny", seq=15, micro_batch=3), 2).sequence == ()


def test_blocks_that_make_the_same_calls_are_alike() -> None:
    paths = [f"blocks.{index}" for index in range(4)]
    flow = flow_of("gpt-tiny")
    assert set(alike(flow, paths).values()) == {"blocks.0"}
    with torch.device("meta"):
        workload = load(Source(model="gpt-tiny", micro_batch=2, seq=16))
    workload.model.blocks[2].norm2.eps = 1e-3
    assert alike(record(workload), paths) == {**dict.fromkeys(paths, "blocks.0"), "blocks.2": "blocks.2"}


# ---------------------------------------------------------------- what is counted is what is sent


class Messages(TorchDispatchMode):
    """Counts exchanges and the bytes of the whole tensor in each."""

    NAMES: ClassVar[dict[str, str]] = {
        "all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter",
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.found = "forward", Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.NAMES.get(func.__name__.split(".")[0]) if func.namespace == "_c10d_functional" else None
        if name is not None:
            times = RANKS if name == "all-gather" else 1
            self.found[name, self.phase, args[0].numel() * args[0].element_size() * times] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dry_mesh() -> Iterator[Any]:
    """Two ranks of which only this one is there: messages go nowhere."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


BOTH_WAYS = ("gpt-tiny",)
WHOLE = pytest.mark.slow(reason="a sequence left whole is held for another model, and the rules of this one are")
ALIKE = ("llama-tiny", "vit-tiny", "bert-tiny", "t5-tiny", "dit-tiny")
LINE = pytest.mark.slow(reason="another model; its rules are held, and the exchanges of others")


@pytest.mark.parametrize(
    ("model", "sequence"),
    [
        pytest.param(model, sequence, id=f"{model}-{sequence}", marks=LINE if model in ALIKE else () if sequence or model in BOTH_WAYS else WHOLE)
        for model in ("gpt-tiny", "llama-tiny", "vit-tiny", "bert-tiny", "t5-tiny", "mixtral-tiny", "dit-tiny")
        for sequence in (True, False)
    ],
)
def test_exchanges_are_those_of_a_dry_run(model: str, sequence: bool, dry_mesh: Any) -> None:
    sizes = {"seq": None if model in ("vit-tiny", "dit-tiny") else 16 if model != "t5-tiny" else 64}
    found = derive(flow_of(model, **sizes), RANKS, sequence=sequence)
    with FakeTensorMode():
        workload = load(Source(model=model, micro_batch=2, **sizes))
        applied = tensor.apply(workload.model, found, TensorGroup(dry_mesh, found.setting))
        with Messages() as messages:
            loss = compute_loss(workload)
            messages.phase = "backward"
            loss.backward()
    counted = Counter((exchange.kind, exchange.phase, exchange.nbytes) for exchange in found.collectives)
    assert messages.found == counted
    for name, parameter in workload.model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        place = applied.places.get(name)
        assert parameter.to_local().numel() == parameter.numel() // (1 if place is None else RANKS)


class Pyramid(nn.Module):
    """Blocks of one name and different widths, one of which has an odd number of heads."""

    def __init__(self) -> None:
        super().__init__()
        widths = (12, 16)
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.TransformerEncoderLayer(width, width // 4, 2 * width, 0.0, batch_first=True) for _ in range(2)
            )
            for width in widths
        )
        self.between = nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.stages[0]:
            x = block(x)
        x = self.between(x)
        for block in self.stages[1]:
            x = block(x)
        return x


@pytest.mark.slow(reason="a long dry run; rules of every model are held above")
def test_blocks_of_different_width_are_split_each_in_its_way() -> None:
    found = derive(flow_of_module(Pyramid(), 2, 8, 12), 2)
    assert found.rules["stages.0.*.linear1"] == found.rules["stages.1.*.linear1"] == "column"
    assert found.rules["stages.1.*.self_attn.in_proj_weight"] == "column:3"
    assert "3 heads do not divide by 2" in found.whole["stages.0.*.self_attn.in_proj_weight"]
    assert found.place("stages.1.0.self_attn.in_proj_weight") == Shard(0, (16, 16, 16))
    assert found.place("stages.0.1.linear1.weight") == Shard(0, (24,))
    assert found.place("stages.0.1.self_attn.in_proj_weight") is None
    assert derive(flow_of_module(Pyramid(), 2, 8, 12), 2, rules=found.rules).places == found.places
