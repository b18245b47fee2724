"""The engine gives the tokens that `generate` gives, whatever else it does meanwhile: pieces of prompts, lost pages, shared pages."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell import zoo
from foretell.errors import ModelError, UserError
from foretell.serve.engine import CANCELLED, LENGTH, STOP, ServingEngine, StepLimits
from foretell.serve.sampling import Sampling, choose
from foretell.trace.serving.packed import NAME, Packed
from tests.further import further

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
OLD = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
QUICK: dict[str, dict[str, Any]] = {
    "llama": {}, "gpt2": OLD, "gemma2": {"head_dim": 12, "sliding_window": 24}, "mistral": {"sliding_window": 24}, "qwen3": {"head_dim": 12},
    "gpt_neox": {}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48}, "mixtral": {"num_local_experts": 4},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "qwen2": {}, "gemma": {"head_dim": 12}, "gemma3_text": {"head_dim": 12, "sliding_window": 24}, "phi": {}, "phi3": {}, "olmo": {}, "olmo2": {},
    "cohere": {}, "starcoder2": {"sliding_window": 24}, "granite": {}, "stablelm": {"hidden_size": 64}, "glm": {"head_dim": 12},
    "nemotron": {}, "persimmon": {},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "deepseek_v3": {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
}  # fmt: skip
BUILT: list[nn.Module] = []
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def built(name: str) -> Any:
    """Of sharp weights: the likeliest token is so by far, and texts are varied."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    settings = {**COMMON, **{**QUICK, **MORE}[name]}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    BUILT.append(model)
    return model


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Of any length; every third begins as the one before it."""
    draw = random.Random(seed)
    found = [[draw.randrange(1, 97) for _ in range(draw.randrange(2, 60))] for _ in range(count)]
    for place in range(2, count, 3):
        found[place] = (found[place - 1][:40] + found[place])[:60]
    return found


def alone(model: Any, prompt: list[int], most: int) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False, eos_token_id=None, pad_token_id=0)
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Models are kept for other tests, which call them themselves."""
    yield
    for model in BUILT:
        Packed(model).release()


FULL = pytest.mark.slow(reason="a hundred prompts of what ten show, and further families")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *further([(name, 10) for name in QUICK], [(name, 10) for name in ("llama", "gpt2", "gemma2", "opt")], "four families show it"),
        *(pytest.param(name, 100, marks=FULL) for name in QUICK),
        *(pytest.param(name, 10, marks=FULL) for name in MORE),
    ],
)
def test_tokens_are_those_of_generate(name: str, count: int) -> None:
    model, asked = built(name), prompts(count)
    before = model.config._attn_implementation
    engine = ServingEngine(model, pages=24, size=8, limits=StepLimits(running=5, tokens=32))
    answers = engine.generate(asked, Sampling(most=20))
    engine.close()
    assert model.config._attn_implementation == before != NAME
    assert engine.scheduler.preemptions and sum(one.scheduled.shared for one in answers), "pages were lost, and shared"
    assert [one.ids for one in answers] == [alone(model, prompt, 20) for prompt in asked]
    assert engine.scheduler.pages.held == 0 and {one.ended for one in answers} == {LENGTH}


@pytest.mark.parametrize("name", ["llama3-1b", "gpt2"])
def test_models_of_the_zoo_and_ones_own_take_positions(name: str) -> None:
    """Against their own forward over the whole text, time after time."""
    sizes = {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 61, **({"kv_heads": 2, "ffn": 64} if name != "gpt2" else {"context": 64})}
    torch.manual_seed(2)
    model = zoo.load(zoo.get(name)).build(**{**zoo.get(name).config, **sizes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.dim() > 1 else 1)
    asked = [[one % 61 for one in prompt[:30]] for prompt in prompts(6)]
    answers = ServingEngine(model, pages=12, size=8, limits=StepLimits(running=4, tokens=16)).generate(asked, Sampling(most=12))
    for prompt, answer in zip(asked, answers, strict=True):
        text = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        assert answer.ids == text[len(prompt) :]


def test_an_answer_is_the_same_alone_and_among_others() -> None:
    """Drawn ones too: by the seed of the request and the place of the token."""
    model, asked = built("llama"), prompts(8, seed=4)
    how = [Sampling(most=15, temperature=1.5, top_k=20, top_p=0.9, seed=number, logprobs=2) for number in range(8)]
    limits = StepLimits(running=8, tokens=64)
    among = ServingEngine(model, pages=100, limits=limits).generate(asked, how)
    for prompt, one, answer in zip(asked, how, among, strict=True):
        (single,) = ServingEngine(model, pages=100, limits=limits, check=False).generate([prompt], [one])
        assert single.ids == answer.ids
        assert [token.logprob for token in single.tokens] == pytest.approx([token.logprob for token in answer.tokens], abs=1e-4)
    again = ServingEngine(model, pages=100, limits=limits).generate(asked[:1], [Sampling(most=15, temperature=1.5, seed=99)])
    assert again[0].ids != among[0].ids


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    drawn = [choose(logits, [(Sampling(temperature=1.0, seed=seed), 3)])[0].id for seed in range(4000)]
    shares = logits[0].softmax(-1)
    assert [drawn.count(one) / 4000 for one in range(4)] == pytest.approx(shares.tolist(), abs=0.025)
    assert {choose(logits, [(Sampling(temperature=9.0, top_k=2, seed=seed), 0)])[0].id for seed in range(200)} == {1, 2}
    assert {choose(logits, [(Sampling(temperature=1.0, top_p=0.6, seed=seed), 0)])[0].id for seed in range(200)} == {2}
    (told,) = choose(logits, [(Sampling(logprobs=2), 0)])
    assert told.id == 2 and [one for one, _ in told.likeliest] == [2, 1] and told.logprob == pytest.approx(float(shares.log()[2]))


def test_an_answer_ends_at_its_stop_and_where_nobody_wants_it() -> None:
    model, prompt = built("llama"), prompts(1)[0]
    whole = alone(model, prompt, 12)
    engine = ServingEngine(model, pages=100, limits=StepLimits(running=4, tokens=64))
    stop = next(place for place in range(1, 12) if whole[place] not in whole[:place])
    (answer,) = engine.generate([prompt], Sampling(most=12, stop_tokens=(whole[stop],)))
    assert answer.ended == STOP and answer.ids == whole[:stop]
    one, other = (engine.submit(prompt, Sampling(most=12)) for _ in range(2))
    engine.step()
    engine.cancel(one)
    while not engine.idle:
        engine.step()
    assert one.ended == CANCELLED and len(one.ids) < 2 and other.ids == whole and engine.scheduler.pages.held == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"prompt": [1] * 250, "most": 20}, "room for 256"), ({"prompt": [1, 97], "most": 2}, "the model has 97"),
        ({"prompt": [-1], "most": 2}, "token -1"), ({"prompt": [], "most": 2}, "at least one"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused(given: dict[str, Any], told: str) -> None:
    engine = ServingEngine(built("llama"), pages=100, limits=StepLimits(running=4, tokens=64), check=False)
    with pytest.raises(UserError, match=told):
        engine.submit(given["prompt"], Sampling(most=given["most"]))
    assert engine.idle


@pytest.mark.parametrize(
    "changed", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"most": 0}, {"logprobs": 21}]
)
def test_a_way_to_sample_that_is_none_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Sampling(**changed)


class Strange(nn.Module):
    """A decoder that a server cannot take apart."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(50, 16)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.table(tokens)[:, None]
        more: dict[str, Any] = {"both": {}, "mask": {"attn_mask": torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()}}.get(
            self.kind, {"is_causal": True}
        )
        found = torch.nn.functional.scaled_dot_product_attention(x, x, x, **more)[:, 0]
        if self.kind == "sum":
            found = found.cumsum(1)
        return found @ self.table.weight.t()


@pytest.mark.parametrize(
    ("kind", "told"), [("both", "not causal"), ("mask", "mask of its own"), ("sum", "off its own forward")],
)  # fmt: skip
def test_a_model_whose_tokens_meet_elsewhere_too_is_refused(kind: str, told: str) -> None:
    """What pages do not know is found by comparing one prompt with the model's own forward."""
    torch.manual_seed(0)
    with pytest.raises(ModelError, match=told):
        ServingEngine(Strange(kind), pages=8, limits=StepLimits(running=2, tokens=16))


@pytest.mark.parametrize("name", ["mamba", "t5", "gpt_oss"])
def test_what_has_no_pages_is_refused_by_name(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    more = {"num_local_experts": 4} if name == "gpt_oss" else {}
    config = transformers.AutoConfig.for_model(name, **{**COMMON, **more, "d_model": 48, "d_ff": 96, "d_kv": 12, "num_layers": 2, "num_heads": 4})
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    with pytest.raises(ModelError):
        ServingEngine(kind.from_config(config), pages=8, limits=StepLimits(running=2, tokens=16))
