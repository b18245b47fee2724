"""The zoo's list of models, and its text and graph models: sizes, training, causality, references."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from foretell import zoo
from foretell.zoo.graphs import graphsage
from foretell.zoo.language import bert, gpt, llama, mixtral, ssm, t5

MODULES = ("gpt", "llama", "mixtral", "bert", "t5", "lstm", "ssm", "graphsage")
LARGER = pytest.mark.slow(reason="products in bf16 take seconds on most CPUs; the others have the same layers")
ALIKE = pytest.mark.slow(reason="the loss of another falls; its weights get gradients and it is traced below")
DEEPER = pytest.mark.slow(reason="more layers of a smaller one")
SMALL = [e.name for e in zoo.ENTRIES.values() if e.small and e.module in MODULES]


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def make(name: str, **changes: object) -> tuple[nn.Module, dict[str, Tensor]]:
    entry = zoo.get(name)
    module = zoo.load(entry)
    model = module.build(**{**entry.config, **changes})
    return model, module.batch(model, 2, entry.seq, entry.image)


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    accepted = inspect.signature(model.forward).parameters
    return model(**{k: v for k, v in batch.items() if k in accepted})


def parameters(name: str) -> int:
    entry = zoo.get(name)
    with torch.device("meta"):
        return sum(p.numel() for p in zoo.load(entry).build(**entry.config).parameters())


def bert_size(layers: int, dim: int) -> int:
    embeddings = (30522 + 512 + 2) * dim + 2 * dim
    block = 4 * (dim * dim + dim) + (4 * dim * dim + 4 * dim) + (4 * dim * dim + dim) + 2 * 2 * dim
    head = dim * dim + dim + 2 * dim + 30522
    return embeddings + layers * block + head


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, causal: bool) -> Tensor:
    """Softmax attention over (batch, heads, time, head_dim), one head and one query at a time."""
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        for t in range(q.shape[2]):
            keys = t + 1 if causal else k.shape[2]
            scores = torch.einsum("bd,bsd->bs", q[:, head, t], k[:, head, :keys]) * scale
            if bias is not None:
                scores = scores + bias[:, head, t, :keys]
            weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
            out[:, head, t] = torch.einsum("bs,bsd->bd", weights, v[:, head, :keys])
    return out


def heads_of(x: Tensor, heads: int) -> Tensor:
    return torch.stack(x.chunk(heads, dim=-1), dim=1)


def merge(x: Tensor) -> Tensor:
    return torch.cat(x.unbind(dim=1), dim=-1)


class TestList:
    def test_listing_does_not_import_torch(self) -> None:
        code = "import sys, foretell.zoo as z; z.names(); z.get('gpt2'); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_names_match_entries(self) -> None:
        assert len(zoo.names()) == len(set(zoo.names()))
        assert all(zoo.get(name).name == name for name in zoo.names())

    def test_unknown_name(self) -> None:
        with pytest.raises(KeyError):
            zoo.get("gpt5")

    def test_entries_are_sound(self) -> None:
        for entry in zoo.ENTRIES.values():
            assert entry.domain and "\n" not in entry.summary
            assert bool(entry.paper) == bool(entry.task and entry.motif and entry.trap), entry.name
            hash(entry)

    def test_every_family_has_a_small_variant(self) -> None:
        assert {e.module for e in zoo.ENTRIES.values()} == {e.module for e in zoo.ENTRIES.values() if e.small}

    @pytest.mark.parametrize("name", [e.name for e in zoo.ENTRIES.values() if e.module in MODULES])
    def test_config_names_parameters_of_build(self, name: str) -> None:
        entry = zoo.get(name)
        accepted = inspect.signature(zoo.load(entry).build).parameters
        assert set(entry.config) <= set(accepted)
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in accepted.values())

    @pytest.mark.parametrize("name", MODULES)
    def test_public_functions(self, name: str) -> None:
        module = zoo.load(next(e for e in zoo.ENTRIES.values() if e.module == name))
        functions = {n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
        assert functions == {"build", "batch", "loss"}


class TestSizes:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("gpt2", 124_439_808),
            pytest.param("gpt2-medium", 354_823_168, marks=DEEPER),
            pytest.param("gpt2-large", 774_030_080, marks=DEEPER),
            pytest.param("gpt2-xl", 1_557_611_200, marks=DEEPER),
            ("llama3-1b", 1_235_814_400),
            ("llama3-8b", 8_030_261_248),
            pytest.param("llama3-70b", 70_553_706_496, marks=DEEPER),
            ("mixtral-8x7b", 46_702_792_704),
            ("bert-base", bert_size(12, 768)),
            ("bert-large", bert_size(24, 1024)),
            ("t5-small", 60_506_624),
            pytest.param("t5-base", 222_903_552, marks=DEEPER),
            pytest.param("t5-large", 737_668_096, marks=DEEPER),
            ("lstm-lm", 33_556_078),
            ("mamba-130m", 129_135_360),
            ("graphsage", 206_895),
        ],
    )
    def test_exact(self, name: str, expected: int) -> None:
        assert parameters(name) == expected

    @pytest.mark.parametrize(
        ("name", "billions"), [
                ("gpt3-6.7b", 6.7), pytest.param("gpt3-13b", 12.85, marks=DEEPER), pytest.param("gpt3-175b", 174.6, marks=DEEPER),
                pytest.param("llama3-405b", 405.9, marks=DEEPER),
            ],
    )
    def test_close(self, name: str, billions: float) -> None:
        assert parameters(name) / 1e9 == pytest.approx(billions, rel=0.01)

    def test_bert_base_is_110m(self) -> None:
        assert bert_size(12, 768) == 109_514_298


class TestTraining:
    @pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "lstm-tiny" else ALIKE) for name in SMALL])
    def test_loss_falls(self, name: str) -> None:
        model, batch = make(name)
        loss_of = zoo.load(zoo.get(name)).loss
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if name in ("lstm-tiny", "graphsage-tiny") else 3e-3)
        losses = []
        for _ in range(20):
            loss = loss_of(run(model, batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < (0.95 if name == "graphsage-tiny" else 0.8) * losses[0]

    @pytest.mark.parametrize("name", SMALL)
    def test_first_loss_is_that_of_a_guess(self, name: str) -> None:
        model, batch = make(name)
        classes = getattr(model, "vocab_size", None) or model.classes
        loss = zoo.load(zoo.get(name)).loss(run(model, batch), batch)
        assert loss.item() == pytest.approx(math.log(classes), rel=0.2)

    @pytest.mark.parametrize("name", SMALL)
    def test_every_parameter_gets_a_gradient(self, name: str) -> None:
        model, batch = make(name)
        zoo.load(zoo.get(name)).loss(run(model, batch), batch).backward()
        assert [n for n, p in model.named_parameters() if p.grad is None] == []

    @pytest.mark.slow(reason="every parameter gets a gradient above; these models are traced in test_tensor_derive.py and test_stages.py")
    @pytest.mark.parametrize("name", SMALL)
    def test_traces_under_fake_tensors(self, name: str) -> None:
        with FakeTensorMode():
            model, batch = make(name)
            loss = zoo.load(zoo.get(name)).loss(run(model, batch), batch)
            loss.backward()
        assert loss.shape == ()

    @pytest.mark.parametrize("name", [pytest.param(name, marks=LARGER if name not in ("mixtral-tiny", "lstm-tiny") else ()) for name in SMALL])
    def test_autocast(self, name: str) -> None:
        model, batch = make(name)
        with torch.autocast("cpu", torch.bfloat16):
            output = run(model, batch)
        loss = zoo.load(zoo.get(name)).loss(output, batch)
        loss.backward()
        assert output.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss)

    @pytest.mark.parametrize("name", SMALL)
    def test_blocks_are_one_module_list_per_stack(self, name: str) -> None:
        model, _ = make(name)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        assert len(lists) == (2 if name.startswith("t5") else 1)
        assert all(len(blocks) == zoo.get(name).config["layers"] for blocks in lists)


class TestCausality:
    @pytest.mark.parametrize(
        ("name", "changes", "key"),
        [
            ("gpt-tiny", {}, "input_ids"),
            ("llama-tiny", {}, "input_ids"),
            ("mixtral-tiny", {"routing": "loop"}, "input_ids"),
            ("mixtral-tiny", {"capacity_factor": 2.0}, "input_ids"),
            ("lstm-tiny", {}, "input_ids"),
            ("ssm-tiny", {}, "input_ids"),
            ("t5-tiny", {}, "decoder_input_ids"),
        ],
    )
    def test_earlier_logits_ignore_a_later_token(self, name: str, changes: dict[str, object], key: str) -> None:
        model, batch = make(name, **changes)
        model.eval()
        cut = batch[key].shape[1] // 2
        before = run(model, batch)
        batch[key][:, cut] = (batch[key][:, cut] + 1) % model.vocab_size
        after = run(model, batch)
        torch.testing.assert_close(after[:, :cut], before[:, :cut], rtol=1e-4, atol=1e-5)
        assert (after[:, cut] - before[:, cut]).abs().max() > 1e-4
        assert (after[:, cut + 1] - before[:, cut + 1]).abs().max() > 1e-5

    def test_bert_looks_both_ways(self) -> None:
        model, batch = make("bert-tiny")
        model.eval()
        before = run(model, batch)
        batch["input_ids"][:, 64] = (batch["input_ids"][:, 64] + 1) % model.vocab_size
        assert ((run(model, batch) - before).abs().amax(dim=-1) > 1e-6).all()

    def test_t5_encoder_reaches_the_whole_decoder(self) -> None:
        model, batch = make("t5-tiny")
        before = run(model, batch)
        batch["input_ids"][:, -1] = (batch["input_ids"][:, -1] + 1) % model.vocab_size
        assert ((run(model, batch) - before).abs().amax(dim=-1) > 1e-6).all()


class TestAttention:
    def test_gpt(self) -> None:
        attention = gpt.Attention(24, 3, 0.0)
        x = torch.randn(2, 7, 24)
        q, k, v = (heads_of(y, 3) for y in attention.qkv(x).chunk(3, dim=-1))
        expected = attention.out(merge(naive_attention(q, k, v, 8**-0.5, None, causal=True)))
        torch.testing.assert_close(attention(x), expected)

    def test_bert(self) -> None:
        attention = bert.Attention(24, 3, 0.0)
        x = torch.randn(2, 7, 24)
        q, k, v = (heads_of(proj(x), 3) for proj in (attention.q, attention.k, attention.v))
        expected = attention.out(merge(naive_attention(q, k, v, 8**-0.5, None, causal=False)))
        torch.testing.assert_close(attention(x), expected)

    def test_llama_groups_queries_and_rotates(self) -> None:
        dim, heads, kv_heads, size, theta = 32, 4, 2, 8, 100.0
        attention = llama.Attention(dim, heads, kv_heads, 0.0)
        x = torch.randn(2, 7, dim)

        def rotated(y: Tensor) -> Tensor:
            pairs = torch.complex(y[..., : size // 2], y[..., size // 2 :])
            turn = torch.tensor([[t * theta ** (-2 * i / size) for i in range(size // 2)] for t in range(7)])
            pairs = pairs * torch.polar(torch.ones_like(turn), turn)
            return torch.cat((pairs.real, pairs.imag), dim=-1)

        q, k = rotated(heads_of(attention.q(x), heads)), rotated(heads_of(attention.k(x), kv_heads))
        v = heads_of(attention.v(x), kv_heads)
        shared = [head * kv_heads // heads for head in range(heads)]
        y = naive_attention(q, k[:, shared], v[:, shared], size**-0.5, None, causal=True)
        actual = attention(x, *llama.Rotary(size, theta)(x))
        torch.testing.assert_close(actual, attention.out(merge(y)), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("bidirectional", [True, False])
    def test_t5_adds_the_bias_and_does_not_scale(self, bidirectional: bool) -> None:
        attention = t5.Attention(24, 3, 8, 0.0)
        bias = t5.RelativeBias(3, bidirectional)(7)
        x = torch.randn(2, 7, 24)
        q, k, v = (heads_of(proj(x), 3) for proj in (attention.q, attention.k, attention.v))
        y = naive_attention(q, k, v, 1.0, bias, causal=not bidirectional)
        torch.testing.assert_close(attention(x, x, bias), attention.out(merge(y)))


class TestT5Buckets:
    def test_bidirectional(self) -> None:
        bucket = t5.RelativeBias(2, bidirectional=True).bucket(torch.tensor([0, -1, -7, 1, 7, -127, -5000, 127, 5000]))
        assert bucket.tolist() == [0, 1, 7, 17, 23, 15, 15, 31, 31]

    def test_causal(self) -> None:
        bucket = t5.RelativeBias(2, bidirectional=False).bucket(torch.tensor([0, 3, 500, -1, -15, -16, -127, -5000]))
        assert bucket.tolist() == [0, 0, 0, 1, 15, 16, 31, 31]

    def test_grows_with_distance_and_uses_every_bucket(self) -> None:
        bucket = t5.RelativeBias(2, bidirectional=False).bucket(-torch.arange(200))
        assert (bucket.diff() >= 0).all()
        assert bucket.unique().tolist() == list(range(32))


class TestScan:
    @staticmethod
    def loop(a: Tensor, b: Tensor) -> Tensor:
        h, states = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            h = a[:, t] * h + b[:, t]
            states.append(h)
        return torch.stack(states, dim=1)

    @pytest.mark.parametrize("time", [1, 2, 3, 8, 37])
    def test_equals_a_loop_with_gradients(self, time: int) -> None:
        a, b, grad = torch.rand(3, 2, time, 3, 4, dtype=torch.float64).unbind()
        a, b = a.requires_grad_(), b.requires_grad_()
        expected = self.loop(a, b)
        actual = ssm.LinearScan.apply(a, b)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            torch.autograd.grad(actual, (a, b), grad), torch.autograd.grad(expected, (a, b), grad)
        )

    def test_mixer_recurrence(self) -> None:
        mixer = ssm.Mixer(dim=4, state=3, expand=2, kernel=4)
        mixer.reset_parameters(0.02)
        x, dt = torch.randn(2, 9, 8), torch.rand(2, 9, 8)
        b, c = torch.randn(2, 9, 3), torch.randn(2, 9, 3)
        h = torch.zeros(2, 8, 3)
        for t in range(9):
            decay = (dt[:, t, :, None] * -torch.arange(1.0, 4.0)).exp()
            h = decay * h + dt[:, t, :, None] * b[:, t, None, :] * x[:, t, :, None]
            expected = torch.einsum("bds,bs->bd", h, c[:, t]) + x[:, t]
            torch.testing.assert_close(mixer.recur(x, dt, b, c)[:, t], expected, rtol=1e-4, atol=1e-5)

    def test_step_sizes_start_in_range(self) -> None:
        mixer = ssm.Mixer(dim=64, state=3, expand=2, kernel=4)
        mixer.reset_parameters(0.02)
        dt = F.softplus(mixer.dt_proj.bias)
        assert 0.9e-3 < dt.min() < 5e-3
        assert 0.03 < dt.max() < 0.101


class TestMoE:
    def pair(self, capacity_factor: float, top_k: int = 2) -> tuple[mixtral.MoE, mixtral.MoE]:
        one = mixtral.MoE(8, 16, 4, top_k, "capacity", capacity_factor)
        two = mixtral.MoE(8, 16, 4, top_k, "loop", capacity_factor)
        for p in one.parameters():
            nn.init.normal_(p)
        two.load_state_dict(one.state_dict())
        return one, two

    @pytest.mark.parametrize("top_k", [1, 2, 4])
    def test_ample_capacity_equals_the_loop(self, top_k: int) -> None:
        one, two = self.pair(capacity_factor=4.0, top_k=top_k)
        x = torch.randn(2, 11, 8)
        torch.testing.assert_close(one(x), two(x), rtol=1e-4, atol=1e-4)
        one(x).square().sum().backward()
        two(x).square().sum().backward()
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-2)

    def test_loop_is_the_weighted_sum_of_the_top_experts(self) -> None:
        moe = self.pair(1.0)[1]
        x = torch.randn(1, 5, 8)
        for t in range(5):
            score = moe.router(x[0, t]).exp()
            best = score.argsort(descending=True)[:2].tolist()
            expected = sum(score[e] * moe.experts.one(e, x[0, t]) for e in best) / score[best].sum()
            torch.testing.assert_close(moe(x)[0, t], expected, rtol=1e-4, atol=1e-4)

    def test_overflow_is_dropped_in_token_order(self) -> None:
        moe, loop = self.pair(capacity_factor=1.0, top_k=1)
        moe.router.weight.data.zero_()
        moe.router.weight.data[2] = 1.0
        loop.load_state_dict(moe.state_dict())
        x = torch.rand(1, 16, 8)
        torch.testing.assert_close(moe(x)[:, :4], loop(x)[:, :4], rtol=1e-4, atol=1e-4)
        assert (moe(x)[:, 4:] == 0).all()
        assert (loop(x)[:, 4:] != 0).any(dim=-1).all()

    def test_first_choices_come_before_second_ones(self) -> None:
        moe, loop = self.pair(capacity_factor=1.0, top_k=2)
        moe.router.weight.data = 10 * torch.eye(4, 8)
        loop.load_state_dict(moe.state_dict())
        x = torch.zeros(1, 8, 8)
        x[0, :4, 0], x[0, :4, 1] = 1.0, 1.1
        x[0, 4:, 0], x[0, 4:, 2] = 1.1, 1.0
        torch.testing.assert_close(moe(x)[:, 4:], loop(x)[:, 4:], rtol=1e-4, atol=1e-4)
        assert ((moe(x) - loop(x))[:, :4].abs().amax(dim=-1) > 1e-3).all()

    def test_unknown_routing(self) -> None:
        with pytest.raises(ValueError, match="routing"):
            mixtral.MoE(8, 16, 4, 2, "magic", 1.0)

    def test_loop_model_trains(self) -> None:
        model, batch = make("mixtral-tiny", routing="loop")
        mixtral.loss(run(model, batch), batch).backward()
        assert all(p.grad is not None for p in model.parameters())


class TestGraphSAGE:
    def test_layer_takes_the_mean_of_neighbours(self) -> None:
        model = graphsage.build(nodes=3, edges=3, layers=1, features=4, classes=5)
        x = torch.randn(3, 4)
        output = model(x, torch.tensor([[0, 1, 0], [2, 2, 1]]))
        layer = model.blocks[0]
        means = torch.stack((torch.zeros(4), x[0], (x[0] + x[1]) / 2))
        torch.testing.assert_close(output, layer.neighbours(means) + layer.own(x))

    def test_graphs_of_a_batch_stay_apart(self) -> None:
        model = graphsage.build(nodes=10, edges=40, features=4, classes=5)
        batch = graphsage.batch(model, 3)
        assert batch["x"].shape == (30, 4)
        source, target = batch["edge_index"] // 10
        assert torch.equal(source, target)
        assert source.bincount().tolist() == [40, 40, 40]


class TestBatches:
    @pytest.mark.parametrize("name", [n for n in SMALL if zoo.get(n).domain == "text"])
    def test_shapes_follow_the_request(self, name: str) -> None:
        model, _ = make(name)
        batch = zoo.load(zoo.get(name)).batch(model, 3, 32, None)
        assert batch["input_ids"].shape == (3, 32)
        assert run(model, batch).shape == (*batch["targets"].shape, model.vocab_size)

    @pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
    def test_longer_than_the_learned_positions(self, name: str) -> None:
        model, _ = make(name)
        with pytest.raises(ValueError, match="positions"):
            zoo.load(zoo.get(name)).batch(model, 1, 129, None)

    def test_causal_targets_are_the_next_tokens(self) -> None:
        _, batch = make("llama-tiny")
        assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])

    def test_bert_hides_what_it_asks_for(self) -> None:
        model, _ = make("bert-tiny")
        batch = bert.batch(model, 64)
        asked = batch["targets"] != -100
        assert (batch["input_ids"][asked] == model.mask_token).all()
        assert asked.float().mean().item() == pytest.approx(0.15, abs=0.03)
        assert asked.any(dim=1).all()

    def test_t5_decoder_reads_its_targets_shifted(self) -> None:
        _, batch = make("t5-tiny")
        assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["targets"][:, :-1])
        assert (batch["decoder_input_ids"][:, 0] == 0).all()
