"""Adapters: the layers they go on, their arithmetic and gradients, and the 4-bit base they may stand on."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from foretell.errors import ModelError
from foretell.trace import types
from foretell.trace.adapters import nf4 as packing
from foretell.trace.adapters.layers import AdaptedLinear
from foretell.trace.adapters.put import adapt as put
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.recipe import ADAPTED, ALPHA, Adapters, Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload
from foretell.zoo.language import gpt
from tests.further import further

DIM, LAYERS, RANK = 64, 2, 4
PER_BLOCK = {
    "attention.qkv": (DIM, 3 * DIM),
    "attention.out": (DIM, DIM),
    "mlp.up": (DIM, 4 * DIM),
    "mlp.down": (4 * DIM, DIM),
}
"""Inputs and outputs of the linear layers of one block."""
BASE_WEIGHTS = LAYERS * sum(ins * outs for ins, outs in PER_BLOCK.values())
TRAINABLE = LAYERS * sum(RANK * (ins + outs) for ins, outs in PER_BLOCK.values())
PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA (Dettmers et al. 2023), appendix E."""


def adapt(model: nn.Module, rank: int, nf4: bool) -> None:
    put(model, Adapters(rank=rank), ((ADAPTED, "nf4"),) if nf4 else ())


def nf4_quantize(weight: Tensor, double: bool = False) -> tuple[Tensor, ...]:
    return packing.nf4_quantize(weight, double)


def nf4_dequantize(packed: Tensor, scales: Tensor, nested: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return packing.nf4_dequantize(packed, scales, nested, shape, dtype)


def tiny() -> gpt.GPT:
    torch.manual_seed(0)
    return gpt.build(vocab_size=50, context=16, layers=LAYERS, dim=DIM, heads=4)


def adapted(model: Any = None, *, nf4: bool = False, trained: bool = False) -> Any:
    """An adapted model; `trained` gives B values, as after some steps."""
    model = tiny() if model is None else model
    adapt(model, RANK, nf4)
    for layer in layers_of(model).values():
        if trained:
            nn.init.normal_(layer.lora_B, std=0.1)
    return model


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def tokens() -> Tensor:
    return torch.arange(24).view(2, 12)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model(tokens()).double().square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---------------------------------------------------------------- arithmetic


def test_before_training_the_model_computes_what_it_did() -> None:
    plain = tiny()
    expected = plain(tokens())
    assert torch.equal(adapted(plain)(tokens()), expected)


def test_after_training_it_does_not() -> None:
    assert not torch.allclose(adapted(trained=True)(tokens()), tiny()(tokens()))


def test_only_adapters_train() -> None:
    model = adapted()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(trainable) == {
        f"blocks.{block}.{path}.lora_{which}" for block in range(LAYERS) for path in PER_BLOCK for which in "AB"
    }
    assert sum(p.numel() for p in trainable.values()) == TRAINABLE
    assert set(gradients(model)) == set(trainable)


def test_gradients_are_those_of_a_merged_weight() -> None:
    plain, model = tiny().double(), adapted(tiny().double(), trained=True)
    pairs = {path: (layer.lora_A.detach(), layer.lora_B.detach()) for path, layer in layers_of(model).items()}
    leaves = {path: tuple(t.clone().requires_grad_() for t in pair) for path, pair in pairs.items()}
    merged = {
        f"{path}.weight": plain.get_submodule(path).weight.detach() + ALPHA / RANK * b @ a
        for path, (a, b) in leaves.items()
    }
    functional_call(plain, merged, (tokens(),)).square().mean().backward()
    found = gradients(model)
    for path, (a, b) in leaves.items():
        assert a.grad is not None and a.grad.abs().max() > 0
        torch.testing.assert_close(found[f"{path}.lora_A"], a.grad)
        torch.testing.assert_close(found[f"{path}.lora_B"], b.grad)


def test_adapters_of_a_low_precision_base_are_fp32() -> None:
    model = adapted(tiny().bfloat16(), trained=True)
    layer = model.blocks[0].mlp.up
    assert layer.lora_A.dtype == layer.lora_B.dtype == torch.float32
    x = torch.randn(3, DIM, dtype=torch.bfloat16)
    base = F.linear(x, layer.weight, layer.bias)
    expected = (base + x.float() @ layer.lora_A.T @ layer.lora_B.T * (ALPHA / RANK)).bfloat16()
    assert torch.equal(layer(x), expected)


# ---------------------------------------------------------------- which layers


def test_blocks_stay_what_they_were() -> None:
    stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    for model in (tiny(), stack):
        before = find_blocks(model)
        adapt(model, 2, False)
        assert find_blocks(model) == before


def test_without_blocks_all_but_the_head() -> None:
    stack = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    assert set(layers_of(adapted(stack))) == {"0", "2"}
    assert not stack[4].weight.requires_grad
    assert set(layers_of(adapted(nn.Linear(8, 8)))) == {""}


def test_layers_outside_the_blocks_are_left_alone() -> None:
    model = tiny()
    model.head = nn.Linear(DIM, 5)
    adapted(model)
    assert type(model.head) is nn.Linear
    assert not model.head.weight.requires_grad


def test_no_linear_layer_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ModelError, match="no linear layer") as caught:
        adapt(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()), 4, False)
    assert caught.value.remedy


@pytest.mark.parametrize("nf4", [False, True])
def test_a_shared_layer_and_a_shared_weight_are_adapted_once(nf4: bool) -> None:
    model = tiny()
    model.alias = model.blocks[0].mlp  # registered after the blocks, and one more path to the same layers
    model.blocks[1].mlp.up = model.blocks[0].mlp.up
    model.blocks[1].mlp.down.weight = model.blocks[0].mlp.down.weight
    full = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p.shape[0] >= DIM)
    adapted(model, nf4=nf4)
    assert model.blocks[1].mlp.up is model.blocks[0].mlp.up is model.alias.up
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == TRAINABLE - RANK * 5 * DIM
    gradients(model)
    if nf4:
        packed = sum(p.numel() for name, p in model.named_parameters() if name.endswith("base_codes"))
        assert packed == full // 2 == (BASE_WEIGHTS - 8 * DIM * DIM) // 2


@pytest.mark.parametrize("nf4", [False, True])
def test_layers_that_are_read_but_never_called_are_left_alone(nf4: bool) -> None:
    layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, batch_first=True)
    model = adapted(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nf4=nf4)
    assert set(layers_of(model)) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    model(torch.randn(2, 5, DIM)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


class Doubled(nn.Linear):
    """A user's own layer, with an attribute whose name is close at hand."""

    scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("nf4", [False, True])
def test_a_layer_of_the_users_own_keeps_its_forward_and_hooks(nf4: bool) -> None:
    layer, calls = Doubled(DIM, DIM), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    model = adapted(nn.Sequential(layer, nn.Linear(DIM, DIM)), nf4=nf4)
    x = torch.randn(3, DIM)
    torch.testing.assert_close(model[0](x), 2 * F.linear(x, model[0].weight, layer.bias))
    assert calls == [1]


# ---------------------------------------------------------------- NF4


def test_codebook_is_the_published_one() -> None:
    assert packing.CODEBOOK == PUBLISHED


def nearest(weight: Tensor) -> Tensor:
    """Quantise and dequantise, written another way: the nearest published value, block by block."""
    blocks = weight.view(-1, 64)
    scale = blocks.abs().max(dim=1, keepdim=True).values
    code = torch.tensor(PUBLISHED)
    return (code[(blocks[..., None] / scale[..., None] - code).abs().argmin(dim=-1)] * scale).view_as(weight)


def expected_error() -> float:
    """Mean |error| of NF4 on a standard normal: over the largest of 64, the rest a normal cut off there."""
    normal, code = torch.distributions.Normal(0.0, 1.0), torch.tensor(PUBLISHED)
    edges = torch.linspace(1.0, 6.0, 101)
    weights = ((2 * normal.cdf(edges) - 1) ** 64).diff()
    total = 0.0
    for largest, weight in zip((edges[1:] + edges[:-1]) / 2, weights, strict=True):
        x = torch.linspace(-1, 1, 1001) * largest
        density = normal.log_prob(x).exp()
        error = (x - largest * code[(x[:, None] / largest - code).abs().argmin(dim=1)]).abs()
        total += float(weight * (error * density).sum() / density.sum())
    return total * 63 / 64  # the largest itself has no error


def test_round_trip() -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    back = nf4_dequantize(*nf4_quantize(weight), weight.shape, torch.float32)
    torch.testing.assert_close(back, nearest(weight), rtol=0, atol=4e-6)
    expected = expected_error()
    assert expected == pytest.approx(0.0727, abs=5e-4)
    assert float((weight - back).abs().mean()) == pytest.approx(expected, rel=0.01)
    again = nf4_dequantize(*nf4_quantize(back), weight.shape, torch.float32)
    torch.testing.assert_close(again, back, rtol=0, atol=1e-6)


def test_size_is_four_and_a_half_bits() -> None:
    plain, double = nf4_quantize(torch.randn(512, 64)), nf4_quantize(torch.randn(512, 64), True)
    assert [part.dtype for part in double] == [torch.uint8, torch.uint8, torch.float32]
    assert sum(part.nbytes for part in plain) == 512 * 64 // 2 + 4 * 512 * 64 // 64 == 512 * 64 * 4.5 / 8
    assert sum(part.nbytes for part in double) == 512 * 64 // 2 + 512 + 4 * (512 // 256) + 4


@pytest.mark.parametrize("shape", [(1, 1), (7, 9), (3, 64), (5, 13)])
def test_any_number_of_weights(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    for double in (False, True):
        real, fake = nf4_quantize(weight, double), nf4_quantize(weight.to("meta"), double)
        assert [part.shape for part in real] == [part.shape for part in fake]
    back = nf4_dequantize(*nf4_quantize(weight), shape, torch.float32)
    assert back.shape == weight.shape
    assert (weight - back).abs().max() <= weight.abs().max() * 0.16  # half the widest gap of the table is 0.152


def test_zeros_stay_zeros_and_low_precision_is_rounded_last() -> None:
    assert not nf4_dequantize(*nf4_quantize(torch.zeros(2, 64)), (2, 64), torch.float32).any()
    packed = nf4_quantize(torch.randn(4, 64))
    exact = nf4_dequantize(*packed, (4, 64), torch.float32)
    assert torch.equal(nf4_dequantize(*packed, (4, 64), torch.bfloat16), exact.bfloat16())


def test_operators_pass_torchs_own_checks() -> None:
    torch.library.opcheck(torch.ops.foretell.nf4_quantize.default, (torch.randn(7, 9), True))
    torch.library.opcheck(torch.ops.foretell.nf4_dequantize.default, (*nf4_quantize(torch.randn(7, 9)), (7, 9), torch.bfloat16))


def test_gradients_are_those_of_the_dequantised_weight() -> None:
    layer = adapted(nn.Linear(DIM, 3 * DIM), nf4=True, trained=True)
    x = torch.randn(2, 5, DIM, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    a, b = (t.detach().clone().requires_grad_() for t in (layer.lora_A, layer.lora_B))
    output, expected = layer(x), F.linear(twin, layer.weight + ALPHA / RANK * b @ a, layer.bias)
    torch.testing.assert_close(output, expected)
    seed = torch.randn_like(output)
    output.backward(seed)
    expected.backward(seed)
    for found, right in ((x, twin), (layer.lora_A, a), (layer.lora_B, b)):
        torch.testing.assert_close(found.grad, right.grad, rtol=1e-4, atol=1e-5)


def test_base_is_close_to_the_original_and_saves_only_the_packed_weight() -> None:
    plain = nn.Linear(DIM, 3 * DIM)
    layer = adapted(copy.deepcopy(plain), nf4=True)
    x = torch.randn(5, DIM, requires_grad=True)
    error = (layer(x) - plain(x)).std() / plain(x).std()
    assert 0.01 < error < 0.15
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        inner = x * 1
        seen = weakref.ref(inner)
        output = layer.lora_base(inner)
    del inner
    assert output.requires_grad and seen() is None
    assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in (layer.base_codes, layer.base_scales, layer.base_nested))


def test_under_autocast_the_product_is_bf16_and_the_result_as_the_input() -> None:
    layer = adapted(nn.Linear(DIM, DIM), nf4=True)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, DIM).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(x)
        assert found.dtype == dtype
        assert torch.equal(found, F.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()).to(dtype))


def test_a_computed_weight_cannot_be_packed() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ModelError, match="'0' is computed"):
        adapt(model, 2, True)
    adapt(model, 2, False)
    model(torch.randn(2, 8)).sum().backward()


# ---------------------------------------------------------------- traced


def trace(recipe: Recipe, *, nf4: bool, build: Callable[[], nn.Module] = tiny) -> types.Trace:
    def workload() -> Workload:
        model = build()
        adapt(model, RANK, nf4)
        return Workload(model, gpt.batch(model, 4, 16), gpt.loss)

    return capture(workload, recipe)


def bytes_of(traced: types.Trace, role: str) -> int:
    return sum(storage.nbytes for storage in traced.storages.values() if storage.role == role)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("recompute", further(["none", "full", "selective"], ["none", "full"], "all blocks are computed again here"))
def test_traced_step_has_gradients_and_moments_of_adapters_alone(nf4: bool, recompute: str) -> None:
    traced = trace(Recipe(recompute=recompute), nf4=nf4)
    assert traced.meta["trainable"] == TRAINABLE
    assert bytes_of(traced, types.GRADIENT) == 4 * TRAINABLE
    steps = 4 * 2 * len(PER_BLOCK) * LAYERS
    assert bytes_of(traced, types.OPTIMIZER) == 2 * 4 * TRAINABLE + steps
    whole = sum(p.numel() for p in tiny().parameters())
    base = BASE_WEIGHTS // 2 + 4 * BASE_WEIGHTS // 64 if nf4 else 4 * BASE_WEIGHTS
    assert bytes_of(traced, types.PARAMETER) == 4 * (whole - BASE_WEIGHTS + TRAINABLE) + base
    assert bytes_of(traced, types.BUFFER) == 0


def test_traced_dequantised_weights_are_temporaries_of_one_op() -> None:
    traced = trace(Recipe(), nf4=True)
    ops = traced.programs["micro_first"].ops
    places = [index for index, op in enumerate(ops) if op.name == "foretell.nf4_dequantize.default"]
    by_phase = [sum(ops[index].phase == phase for index in places) for phase in ("forward", "backward")]
    count = len(PER_BLOCK) * LAYERS
    assert by_phase == [count, count - 1]  # nothing below the first layer needs a gradient
    for index in places:
        (weight,) = ops[index].allocates
        ins, outs = PER_BLOCK[".".join(ops[index].module.split(".")[2:])]
        assert ops[index].outputs[0].spec == types.TensorSpec((outs, ins), "bfloat16")
        dies = next(place for place in range(index, len(ops)) if weight in ops[place].frees)
        life = [op for op in ops[index + 1 : dies + 1] if op.allocates]  # views allocate nothing
        assert [op.name for op in life] in (["aten.addmm.default"], ["aten.mm.default"])
        assert traced.storages[weight].role == types.TEMPORARY


def test_meta_tensors() -> None:
    with torch.device("meta"):
        model = adapted(tiny(), nf4=True)
        model(torch.zeros(2, 12, dtype=torch.int64)).sum().backward()
    assert model.blocks[1].mlp.up.lora_A.grad.device.type == "meta"


# ---------------------------------------------------------------- transformers


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=DIM, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=DIM, intermediate_size=2 * DIM, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


TRAINABLE_OF = {
    "gpt2": TRAINABLE,
    "llama": 2 * RANK * DIM * (2 * (1 + 1) + 2 * (1 + 0.5) + 3 * (1 + 2)),  # q and o, k and v, three of the MLP
}


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models(name: str, nf4: bool) -> None:
    model = hugging_face(name)
    expected = model(input_ids=tokens()).logits
    adapted(model, nf4=nf4)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == TRAINABLE_OF[name]
    assert type(model.lm_head) is nn.Linear
    output = model(input_ids=tokens(), labels=tokens())
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=0.1 if nf4 else 1e-6)
    output.loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_packed_conv1d_reads_as_its_transposed_weight() -> None:
    pytest.importorskip("transformers")
    plain = hugging_face("gpt2").transformer.h[0].mlp.c_fc
    layer = copy.deepcopy(plain)
    adapt(layer, RANK, True)
    assert layer.weight.shape == plain.weight.shape == (DIM, 4 * DIM)
    torch.testing.assert_close(layer.weight, nearest(plain.weight.detach().T.contiguous()).T, rtol=0, atol=1e-6)
    x = torch.randn(3, DIM)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)


@pytest.mark.parametrize("nf4", further([False, True], [True], "the bases of adapters are packed here"))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models_trace(name: str, nf4: bool) -> None:
    def workload() -> Workload:
        model = hugging_face(name)
        adapt(model, RANK, nf4)
        ids = torch.zeros((2, 12), dtype=torch.int64)
        return Workload(model, {"input_ids": ids, "labels": ids})

    traced = capture(workload, Recipe())
    assert traced.meta["trainable"] == TRAINABLE_OF[name]
    assert bytes_of(traced, types.GRADIENT) == 4 * TRAINABLE_OF[name]
