"""Adapters held to the bit: against peft where it is installed, and against plain formulas run by autograd everywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.trace.adapters.layers import AdaptedLinear
from foretell.trace.adapters.put import adapt
from foretell.trace.recipe import ADAPTED, Adapters
from tests.further import further

STEPS, RANK, ALPHA = 20, 4, 12.0
ALPHAS = (ALPHA, 2.0)
"""Scales of 3, and of a half: a power of two is applied elsewhere."""
FAMILIES = ("llama", "gpt2", "qwen2", "bert", "vit")
KINDS = ("lora", "rslora", "dora")
TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), "gpt2": ("c_attn", "c_proj", "c_fc"),
    "qwen2": ("q_proj", "v_proj", "down_proj"), "bert": ("query", "key", "value", "dense"), "vit": ("q_proj", "v_proj", "fc1", "fc2"),
}  # fmt: skip


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 6))
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name in ("llama", "qwen2"):
        kind = "Llama" if name == "llama" else "Qwen2"
        config = getattr(transformers, f"{kind}Config")(**small, num_key_value_heads=1)
        return getattr(transformers, f"{kind}ForCausalLM")(config), {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, **drop)
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    if name == "bert":
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**small, **off, max_position_embeddings=8))
        return model, {"input_ids": ids, "labels": torch.tensor([0, 1])}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**small, **off, image_size=8, patch_size=4))
    return model, {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])}


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {path: one for path, one in model.named_modules() if isinstance(one, AdaptedLinear)}


def shaken(model: nn.Module) -> None:
    """Factors as after some steps: with B zero, half of what could be wrong is hidden."""
    torch.manual_seed(1)
    for layer in layers_of(model).values():
        nn.init.normal_(layer.lora_B, std=0.1)


def steps_of(model: nn.Module, batch: dict[str, Tensor], trained: dict[str, nn.Parameter], autocast: bool) -> dict[str, Tensor]:
    """The first output, the first gradients and the parameters after 20 steps."""
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    model.train()
    for step in range(STEPS):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(**batch)
        output.loss.backward()
        if step == 0:
            found["output"] = output.logits.detach().clone()
            found |= {f"gradient of {name}": p.grad.clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return found | {name: p.detach() for name, p in trained.items()}


def equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def both(name: str, adapters: Adapters, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A model with our adapters, and the plain one it was made from."""
    plain, batch = family(name)
    plain = plain.to(dtype)
    model = copy.deepcopy(plain)
    adapt(model, adapters)
    shaken(model)
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    return model, plain, cast


# ---------------------------------------------------------------- peft


def of_peft(plain: nn.Module, model: nn.Module, adapters: Adapters) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The same adapters by peft, and its parameters by our names."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, lora_dropout=adapters.dropout, target_modules=list(adapters.targets),
        use_rslora=adapters.kind == "rslora", use_dora=adapters.kind == "dora", fan_in_fan_out=type(plain).__name__.startswith("GPT2"),
    )  # fmt: skip
    theirs = peft.get_peft_model(plain, config)
    found: dict[str, nn.Parameter] = {}
    for path, layer in layers_of(model).items():
        one = theirs.base_model.model.get_submodule(path)
        pairs = {"lora_A": one.lora_A["default"].weight, "lora_B": one.lora_B["default"].weight}
        if adapters.kind == "dora":
            pairs["lora_magnitude"] = one.lora_magnitude_vector["default"].weight
        for key, parameter in pairs.items():
            with torch.no_grad():
                parameter.copy_(getattr(layer, key))
            found[f"{path}.{key}"] = parameter
    return theirs, found


@pytest.mark.parametrize("way", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", further(FAMILIES, FAMILIES[:2], "two families hold the arithmetic"))
def test_outputs_gradients_and_updates_are_pefts(name: str, kind: str, way: str) -> None:
    adapters = Adapters(kind=kind, rank=RANK, alpha=ALPHA, targets=TARGETS[name])
    model, plain, batch = both(name, adapters, torch.bfloat16 if way == "bf16" else torch.float32)
    theirs, named = of_peft(plain, model, adapters)
    mine = {key: p for key, p in model.named_parameters() if p.requires_grad}
    assert set(mine) == set(named) and {p.dtype for p in named.values()} == {torch.float32}
    equal(steps_of(model, batch, mine, way == "autocast"), steps_of(theirs, batch, named, way == "autocast"))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_draws_what_peft_draws(kind: str) -> None:
    adapters = Adapters(kind=kind, rank=RANK, alpha=ALPHA, targets=TARGETS["llama"], dropout=0.2)
    model, plain, batch = both("llama", adapters, torch.float32)
    theirs, named = of_peft(plain, model, adapters)
    mine = {key: p for key, p in model.named_parameters() if p.requires_grad}
    equal(steps_of(model, batch, mine, False), steps_of(theirs, batch, named, False))


@pytest.mark.parametrize("way", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_over_four_bits_they_are_pefts_over_bitsandbytes(kind: str, way: str) -> None:
    """Rows of 64, so that its CPU kernels, which begin a block with every row, say what its formulas say."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    plain = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)
    model = copy.deepcopy(plain)
    adapters = Adapters(kind=kind, rank=RANK, alpha=ALPHA, targets=("0", "2"))
    adapt(model, adapters, ((ADAPTED, "nf4"),))
    shaken(model)
    for name in ("0", "2"):
        one = plain.get_submodule(name)
        packed = bnb.nn.Linear4bit(one.in_features, one.out_features, compute_dtype=dtype, quant_type="nf4", compress_statistics=False)
        given = one.weight.detach().clone()
        packed.weight = bnb.nn.Params4bit(given, requires_grad=False, quant_type="nf4", compress_statistics=False, module=packed)
        packed.bias = nn.Parameter(one.bias.detach().clone())
        setattr(plain, name, packed.to("cpu"))
    plain.is_loaded_in_4bit = True  # as transformers says it, or peft takes the layers for plain ones
    theirs, named = of_peft(plain, model, adapters)
    assert "bnb" in type(theirs.base_model.model.get_submodule("0")).__module__
    mine = {key: p for key, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(48, 64, dtype=dtype)
    found = []
    for net, trained in ((model, mine), (theirs, named)):
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        told = []
        for _ in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                output = net(x)
            output.float().square().mean().backward()
            told += [output.detach().clone(), *(p.grad.clone() for p in trained.values() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        found.append(told)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ---------------------------------------------------------------- plain formulas


class Plain(nn.Module):
    """The formulas of the papers, left to autograd."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.adapter, self.kind = layer.lora_adapter, layer.lora_adapter.kind
        self.rows, self.bias = layer.lora_rows().detach(), layer.bias.detach() if layer.bias is not None else None
        self.by_rows = type(layer).__mro__[2] is nn.Linear
        self.lora_A, self.lora_B = nn.Parameter(layer.lora_A.detach().clone()), nn.Parameter(layer.lora_B.detach().clone())
        if self.kind.startswith("dora"):
            self.lora_magnitude = nn.Parameter(layer.lora_magnitude.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.by_rows:
            base = F.linear(x, self.rows, self.bias)
        else:
            base = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.rows.t()).view(*x.shape[:-1], -1)
        x, scale = x.to(self.lora_A.dtype), self.adapter.scale
        update = F.linear(F.linear(x, self.lora_A), self.lora_B)
        if not self.kind.startswith("dora"):
            return (base + update * scale).to(base.dtype)
        weight = self.rows.to(x.dtype)
        change = F.linear(F.linear(torch.eye(x.shape[-1], dtype=x.dtype), self.lora_A), self.lora_B).T
        norm = torch.linalg.norm(weight + scale * change.detach(), dim=1)
        share = (self.lora_magnitude / norm).view(1, -1)
        less = base - self.bias if self.bias is not None else base
        return (base + ((share - 1) * less + share * update * scale)).to(base.dtype)


@pytest.mark.parametrize("dtype", further([torch.float32, torch.bfloat16], [torch.float32], "the same formulas with fewer digits"))
@pytest.mark.parametrize(("alpha", "kind"), further(
    [(alpha, kind) for alpha in ALPHAS for kind in KINDS], [(ALPHA, "lora"), (ALPHA, "rslora"), (ALPHA, "dora"), (2.0, "lora")],
    "a power of two with the scale of another kind",
))  # fmt: skip
@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_outputs_gradients_and_updates_are_those_of_the_plain_formulas(name: str, alpha: float, kind: str, dtype: torch.dtype) -> None:
    adapters = Adapters(kind=kind, rank=RANK, alpha=alpha, targets=TARGETS[name])
    model, plain, batch = both(name, adapters, dtype)
    for path, layer in layers_of(model).items():
        where, _, last = path.rpartition(".")
        setattr(plain.get_submodule(where), last, Plain(layer))
    mine = {key: p for key, p in model.named_parameters() if p.requires_grad}
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    theirs = {key: p.requires_grad_() for key, p in plain.named_parameters() if "lora_" in key}
    equal(steps_of(model, batch, mine, False), steps_of(plain, batch, theirs, False))


def test_a_norm_without_the_product_is_the_norm() -> None:
    torch.manual_seed(0)
    for shape in ((24, 16), (16, 40)):
        layers = []
        for kind in ("dora", "dora-norm"):
            torch.manual_seed(3)
            layer: Any = nn.Linear(shape[1], shape[0])
            holder = nn.Sequential(layer)
            adapt(holder, Adapters(kind=kind, rank=RANK))
            shaken(holder)
            layers.append(layer)
        exact, short = (layer.lora_norms(torch.float32) for layer in layers)
        torch.testing.assert_close(short, exact, rtol=2e-6, atol=0)
        x = torch.randn(5, shape[1])
        torch.testing.assert_close(layers[1](x), layers[0](x), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what is kept


def kept_by(layer: nn.Module, x: Tensor) -> int:
    """Bytes that backward will need and that are no parameter, the input counted once."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = layer(x)
    del held
    return sum(saved.values())


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_backward_keeps_the_input_and_the_small_product(kind: str, nf4: bool) -> None:
    layer: Any = nn.Linear(64, 128, bias=False).bfloat16()
    holder = nn.Sequential(layer)
    adapt(holder, Adapters(kind=kind, rank=RANK), ((ADAPTED, "nf4"),) if nf4 else ())
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    own = 32 * 64 * 2 + 32 * RANK * 4  # x as it came, and x Aᵀ in fp32
    result = 32 * 128 * 2 + 128 * 4 if kind == "dora" else 0  # what was there before, and the norms
    assert kept_by(layer, x) <= own + result
