"""Weights and keys and values of few bits: held as small as foretold, near enough to 16 bits, and the tokens of a model that has those values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from foretell.errors import UserError
from foretell.lower.serving_formats import KV, WEIGHTS
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.formats import GROUP, KvPool, narrowed, pool_bytes
from foretell.serve.sampling import Sampling
from foretell.serve.start import Setup, started
from foretell.trace.serving.packed import Cached

LIMITS = StepLimits(running=5, tokens=32)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}, "mixtral": {"num_local_experts": 4},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def built(name: str) -> Any:
    """Sharp, so that the likeliest token is so by far."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **{**sizes, **KINDS[name]})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return model


def prompts(count: int) -> list[list[int]]:
    source = torch.Generator().manual_seed(3)
    found = [torch.randint(1, 97, (3 + 5 * place % 50,), generator=source).tolist() for place in range(count)]
    return [*found, [*found[-1][:24], 5, 6, 7]]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_tokens_are_those_of_a_model_with_those_values(name: str, kind: str) -> None:
    """`generate` of a copy whose weights were rounded in the same way, prompts in pieces, pages lost and shared."""
    model = built(name)
    plain = copy.deepcopy(model)
    narrowed(model, kind)
    held = {path: value.clone() for path, value in _values(model).items()}
    changed = 0
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            apart = (held[path] - parameter).abs().max() / parameter.abs().max().clamp_min(1e-30)
            changed += bool(apart > 0)
            assert apart < {"int8": 0.005, "int4": 0.08, "fp8": 0.04}[kind]
            parameter.copy_(held[path])
    assert changed >= 3 * len(plain.base_model.layers if name != "gpt2" else plain.base_model.h)
    engine = ServingEngine(model, pages=24, size=8, limits=LIMITS)
    answers = engine.generate(prompts(7), Sampling(most=16))
    engine.close()
    alone = [plain.generate(torch.tensor([one]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(one) :].tolist()
             for one in prompts(7)]  # fmt: skip
    assert [one.ids for one in answers] == alone


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by the names that they had."""
    found = {}
    for path, module in model.named_modules():
        for key in {*module._parameters, *getattr(module, "parametrizations", {})}:
            value = getattr(module, key, None)
            if isinstance(value, torch.Tensor) and "parametrizations" not in path:
                found[f"{path}.{key}".lstrip(".")] = value.detach()
    return found


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_of_few_bits_say_the_same_however_they_are_computed(kind: str) -> None:
    """Rounded token by token: neither pieces of prompts nor lost or shared pages change an answer; and logits stay near those of 16 bits."""
    model = built("llama")
    roomy = ServingEngine(model, pages=200, size=8, limits=StepLimits(running=1, tokens=200), share=False, kv=kind)
    wanted = [one.ids for one in roomy.generate(prompts(7), Sampling(most=16))]
    tight = ServingEngine(model, pages=9, size=8, limits=LIMITS, kv=kind)
    assert [one.ids for one in tight.generate(prompts(7), Sampling(most=16))] == wanted
    assert tight.scheduler.preemptions
    source = torch.Generator().manual_seed(0)
    pool, exact = (KvPool([Cached(2, 16, 16, None)], 4, 8, torch.float32, torch.device("cpu"), kv) for kv in (kind, "bf16"))
    key, value = (torch.randn(6, 2, 16, generator=source) * torch.tensor([0.1, 1.0, 40.0]).repeat(2)[:, None, None] for _ in range(2))
    slots = torch.tensor([3, 9, 0, 31, 17, 4])
    for one in (pool, exact):
        one.write(0, slots, key, value)
    for mine, its in zip(pool.read(0, slots, torch.float32), exact.read(0, slots, torch.float32), strict=True):
        assert torch.equal(its, key) or torch.equal(its, value)
        each = (mine - its).abs() / its.abs().amax(-1, keepdim=True)
        assert float(each.max()) < {"int8": 0.5 / 127 + 1e-3, "fp8": 0.07}[kind]


def test_bytes_are_those_of_the_forecast() -> None:
    """16-bit scales and all: of weights in blocks by bits, of a token's keys and values exactly."""
    size = 4 * GROUP
    for kind, how in WEIGHTS.items():
        block = nn.ModuleList([nn.Sequential(nn.Linear(size, size, bias=False, dtype=torch.bfloat16))])
        narrowed(block, kind)
        assert sum(one.nbytes for one in block.parameters()) * 8 / size**2 == pytest.approx(how.bits, rel=0.006), kind
    layers = [Cached(2, 64, 64, None), Cached(2, 64, 32, None)]
    for kind, how in KV.items():
        each = {"": 2}.get(how.dtype, 1)
        wanted = sum(one.heads * ((one.key + one.value) * each + 2 * how.scale_bytes) for one in layers)
        pool = KvPool(layers, 3, 16, torch.bfloat16, torch.device("cpu"), kind)
        assert pool.nbytes == 48 * wanted == 48 * pool_bytes(layers, kind, torch.bfloat16), kind


def test_a_format_that_nothing_runs_is_refused() -> None:
    asked = Setup(model="gpt2", overrides={"layers": 1, "dim": 32, "heads": 2}, weights=None, tokenizer=None, device="cpu", dtype="auto", pages=8,
                  size=16, running=2, tokens=16, share=True, queue=4, seed=0, weight_format="int8", kv="fp8")  # fmt: skip
    found = started(asked).about()
    assert (found["weights"], found["kv"]) == ("int8", "fp8")
    for more, words in (({"weight_format": "int3"}, "weights in int3 are not known"), ({"kv": "fp4"}, "keys and values in fp4"),
                        ({"tp": 2}, "formats are of one rank")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            started(Setup(**{**vars(asked), **more}))
