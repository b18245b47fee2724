"""Kernels in models: what is recognised and what is left, the same numbers, and nothing of it left behind."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretell import zoo
from foretell.errors import UnknownName, UserError
from foretell.kernels.swap import rotary as swap_rotary
from foretell.kernels.swap.apply import Applied, apply
from foretell.trace.load.model import Source, load
from foretell.zoo.language import llama
from tests.kernel_cases import MINE, Seen

ALL = MINE
TINY = {"vocab_size": 64, "context": 16, "layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


class TheirNorm(nn.Module):
    """As models of a hub write it: float32 inside, back to what came."""

    def __init__(self, width: int, eps: float = 1e-6, plus: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon, self.plus = eps, plus

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.plus + self.weight) * wide.to(hidden.dtype)


class NormOfAll(TheirNorm):
    """No RMSNorm: the mean is of the whole tensor."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean() + self.variance_epsilon)


class SometimesNorm(TheirNorm):
    """RMSNorm but where values say otherwise."""

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.abs().max() > 1e6:
            return hidden
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class NormInTraining(TheirNorm):
    """RMSNorm in evaluation."""

    def forward(self, hidden: Tensor) -> Tensor:
        scale = 1.1 if self.training else 1.0
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * scale


class Gate(nn.Module):
    def __init__(self, act: Any, fused: bool = False) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 32 if fused else 16)
        self.other = nn.Identity() if fused else nn.Linear(8, 16)
        self.down, self.act, self.fused = nn.Linear(16, 8), act, fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.wide(x).chunk(2, dim=-1)
        else:
            gate, up = self.wide(x), self.other(x)
        return self.down(up * self.act(gate))


class GateTwice(Gate):
    """The activated gate is used once more."""

    def forward(self, x: Tensor) -> Tensor:
        active = self.act(self.wide(x))
        return self.down(active * self.other(x) + active)


class GateInTraining(Gate):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.down(self.act(self.wide(x)) * self.other(x))
        return self.down(self.wide(x) * self.other(x))


class GateThatCounts(Gate):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.down(self.act(self.wide(x)) * self.other(x))


class GateThatNotes(Gate):
    def __init__(self, act: Any) -> None:
        super().__init__(act)
        self.notes: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(x)
        return self.down(self.act(self.wide(x)) * self.other(x))


class GateThatTells(Gate):
    def forward(self, x: Tensor) -> Tensor:
        print("called")
        return self.down(self.act(self.wide(x)) * self.other(x))


class NormThatCounts(TheirNorm):
    calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class NormByAMethod(TheirNorm):
    def root(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * hidden * self.root(hidden)


class NormByAMethodThatTells(NormByAMethod):
    def root(self, x: Tensor) -> Tensor:
        print("called")
        return super().root(x)


class Block(nn.Module):
    def __init__(self, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.second = norm(8), norm(8)
        self.mixer, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.first(x))
        return x + self.mlp(self.second(x))


class NormLater(Block):
    """Something runs between the sum and its norm."""

    def forward(self, x: Tensor) -> Tensor:
        total = x + self.mixer(self.first(x))
        return self.mlp(x) + self.second(total)


def kernels_in(applied: Applied) -> dict[str, str]:
    return {one.module: one.kernel for one in applied.swapped}


def uneven(y: Tensor) -> Tensor:
    """A loss whose slope is of no symmetry, so that a norm passes it on."""
    return (y * torch.arange(y.numel()).sin().view_as(y)).sum()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    uneven(y).backward()
    return [y.detach(), x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Each as a whole to 1e-5: sums are in another order, in float32."""
    return all((one - other).norm() <= 1e-5 * other.norm() + 1e-6 for one, other in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- what is recognised


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        (nn.RMSNorm(8), "rms_norm"), (nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), "rms_norm"), (TheirNorm(8), "rms_norm"),
        (TheirNorm(8, plus=1.0), "rms_norm"), (nn.LayerNorm(8), "layer_norm"), (nn.LayerNorm(8, bias=False), "layer_norm"),
        (Gate(nn.SiLU()), "swiglu"), (Gate(nn.functional.silu), "swiglu"), (Gate(nn.functional.gelu), "geglu"), (Gate(nn.GELU("tanh")), "geglu_tanh"),
        (Gate(nn.SiLU(), fused=True), "swiglu"), (NormByAMethod(8), "rms_norm"), (Block(), "add_layer_norm"),
        (Block(nn.RMSNorm), "add_rms_norm"), (Block(TheirNorm), "add_rms_norm"),
    ],
)  # fmt: skip
def test_modules_are_known_by_what_they_compute(module: nn.Module, kernel: str) -> None:
    x = torch.randn(2, 3, 8)
    wanted = step(module, x)
    applied = apply(module, ALL, anywhere=True)
    assert kernels_in(applied)["the model"] == kernel
    with Seen() as seen:
        found = step(module, x)
    op = "gated" if "glu" in kernel else kernel
    assert f"foretell_kernels::{op}" in {one.name() for one, _ in seen.calls}
    assert close(found, wanted)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (NormOfAll(8), "does not compute RMSNorm"), (SometimesNorm(8), "runs .*max"), (NormInTraining(8), "does not compute RMSNorm"),
        (nn.RMSNorm((2, 8)), "over 2 dimensions"), (Gate(nn.ReLU()), ""), (Gate(nn.Dropout(0.5)), ""), (GateTwice(nn.SiLU()), ""),
        (GateThatCounts(nn.SiLU()), ""), (GateThatNotes(nn.SiLU()), ""), (GateThatTells(nn.SiLU()), ""), (NormThatCounts(8), "more than return"),
        (NormByAMethodThatTells(8), "more than return"), (GateInTraining(nn.SiLU()), ""), (NormLater(), ""), (nn.Linear(8, 8), ""),
    ],
)  # fmt: skip
def test_what_computes_something_else_is_left(module: nn.Module, why: str) -> None:
    applied = apply(module, ALL, anywhere=True)
    assert "the model" not in kernels_in(applied) and "forward" not in vars(module)
    assert getattr(module, "notes", []) == [] and getattr(module, "calls", 0) == 0
    if why:
        assert re.search(why, applied.left[0].why)


def test_a_forward_that_was_replaced_is_left() -> None:
    module = nn.LayerNorm(8)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert "replaced already" in str(apply(module, ALL, anywhere=True))


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    def one(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
        return x * cos.unsqueeze(unsqueeze_dim) + half * sin.unsqueeze(unsqueeze_dim)

    return one(q), one(k)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = (layer(x).view(*x.shape[:2], -1, 4).transpose(1, 2) for layer in (self.q, self.k))
        q, k = turned(q, k, cos, sin)
        return q.sum(1) + k.sum(1)


def test_a_function_that_turns_queries_and_keys_is_known_and_its_file_stays_as_it_is() -> None:
    module, x = Attention(), torch.randn(2, 3, 8)
    angle = torch.randn(1, 3, 4)
    wanted = module(x, angle.cos(), angle.sin())
    before, plain = dict(globals()), Attention.forward
    applied = apply(module, ["rotary"], anywhere=True)
    with Seen() as seen:
        found = module(x, angle.cos(), angle.sin())
    assert [one.name() for one, _ in seen.calls] == ["foretell_kernels::rotary"] and torch.allclose(found, wanted)
    assert globals() == before and Attention.forward is plain
    ops = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes if "foretell" in str(node.target))
        return graph

    assert torch.allclose(torch.compile(module, backend=backend, fullgraph=True)(x, angle.cos(), angle.sin()), wanted)
    assert ops == ["foretell_kernels.rotary.default"]
    applied.revert()
    assert torch.equal(module(x, angle.cos(), angle.sin()), wanted)


def test_another_way_of_turning_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "turned", lambda q, k, cos, sin: (q * cos.unsqueeze(1), k * cos.unsqueeze(1)))
    assert swap_rotary.find_rotary(Attention()) is None


# ---------------------------------------------------------------- the same model


def test_a_model_is_the_same_and_has_its_own_forwards_back() -> None:
    torch.manual_seed(0)
    model = llama.build(**{**TINY, "layers": 1})
    batch = llama.batch(model, 2, 16)

    def trained(one: nn.Module) -> list[Tensor]:
        one.zero_grad()
        llama.loss(one(batch["input_ids"]), batch).backward()
        return [p.grad.clone() for p in one.parameters() if p.grad is not None]

    wanted, state = trained(model), {name: one.clone() for name, one in model.state_dict().items()}
    kept = dict(model.named_parameters()), dict(model.named_modules())
    applied = apply(model, ALL, anywhere=True)
    assert {*kernels_in(applied).values()} == {"add_rms_norm", "rms_norm", "swiglu"}
    assert all(kept[0][name] is one for name, one in model.named_parameters()) and all(kept[1][name] is one for name, one in model.named_modules())
    assert state.keys() == model.state_dict().keys()
    assert close(trained(model), wanted)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert close(trained(compiled), wanted)
    applied.revert()
    assert all("forward" not in vars(one) for one in model.modules())
    assert all(torch.equal(one, other) for one, other in zip(trained(model), wanted, strict=True))
    assert close(trained(compiled), wanted)  # compiled anew


@pytest.mark.slow(reason="each kind of module is held above, and a whole model")
def test_all_small_models_of_the_zoo_are_the_same() -> None:
    """In float32, loss and all gradients as one: alone, those that are zero but for rounding are not comparable."""
    seen = 0
    for entry in (one for one in zoo.ENTRIES.values() if one.small):
        torch.manual_seed(0)
        work = load(Source(model=entry.name, micro_batch=2))
        names = inspect.signature(work.model.forward).parameters
        state = {name: one.clone() for name, one in work.model.state_dict().items()}

        def stepped(work: Any = work, entry: Any = entry, names: Any = names, state: Any = state) -> tuple[float, list[Tensor]]:
            torch.manual_seed(1)
            work.model.load_state_dict(state)
            work.model.train()
            work.model.zero_grad()
            given = {name: one.clone() if isinstance(one, Tensor) else one for name, one in work.batch.items()}
            loss = zoo.load(entry).loss(work.model(**{name: one for name, one in given.items() if name in names}), given)
            loss.backward()
            return loss.item(), [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in work.model.parameters()]

        applied = apply(work.model, ALL, anywhere=True)
        if not applied.swapped:
            continue
        loss, gradients = stepped()
        applied.revert()
        wanted, own = stepped()
        size, apart = (sum(float(one.norm()) ** 2 for one in some) ** 0.5 for some in (own, [a - b for a, b in zip(gradients, own, strict=True)]))
        assert abs(loss - wanted) <= 1e-5 * abs(wanted) and apart <= 1e-4 * size, entry.name
        seen += 1
    assert seen >= 40


@pytest.mark.slow(reason="norms, gates and rotary functions written as transformers writes them are held above")
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3"])
def test_models_of_transformers_are_the_same(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    tokens = torch.randint(0, 64, (2, 16))

    def trained(one: nn.Module) -> list[Tensor]:
        one.zero_grad()
        one(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return [p.grad.clone() for p in one.parameters() if p.grad is not None]

    wanted = trained(model)
    applied = apply(model, ALL, anywhere=True)
    found = [one.kernel for one in applied.swapped]
    assert found.count("rotary") == 2 and found.count("swiglu") + found.count("geglu_tanh") == 2 and found.count("rms_norm") >= 5
    assert close(trained(model), wanted)
    assert close(trained(torch.compile(model, backend="eager", fullgraph=True)), wanted)
    applied.revert()
    assert all(torch.equal(one, other) for one, other in zip(trained(model), wanted, strict=True))


def test_copies_are_their_own_and_a_file_has_the_plain_forwards() -> None:
    model = nn.Sequential(nn.LayerNorm(8), Gate(nn.SiLU()))
    applied = apply(model, ALL, anywhere=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    assert other[0].forward.__self__ is other[0] and other(torch.randn(2, 8)).std() > 0
    read = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (read, torch.load(file, weights_only=False)):
        with Seen() as seen:
            one(torch.randn(2, 8))
        assert seen.calls == []
    applied.revert()


def test_revert_leaves_what_somebody_put_in_since() -> None:
    module = nn.LayerNorm(8)
    applied = apply(module, ALL, anywhere=True)
    theirs = lambda x: x  # noqa: E731
    module.forward = theirs  # type: ignore[method-assign]
    applied.revert()
    assert module.forward is theirs


# ---------------------------------------------------------------- which calls are taken


def calls(module: nn.Module, x: Tensor) -> int:
    with Seen() as seen:
        module(x)
    return len(seen.calls)


def test_calls_that_nobody_verified_go_to_the_module() -> None:
    module = nn.LayerNorm(8)
    apply(module, ["layer_norm"])
    assert calls(module, torch.randn(4, 8)) == 0  # a CPU
    module = nn.LayerNorm(8)
    apply(module, ["layer_norm"], anywhere=True)
    assert calls(module, torch.randn(4, 8)) == 1
    assert calls(module, torch.randn(8, 4).t()) == 0  # strides
    assert calls(module, torch.randn(4, 8, dtype=torch.bfloat16)) == 0  # another format than the weight

    class Wrapped(Tensor):
        pass

    assert calls(module, torch.randn(4, 8).as_subclass(Wrapped)) == 0
    assert torch.func.vmap(module)(torch.randn(3, 4, 8)).shape == (3, 4, 8)
    assert calls(module.double(), torch.randn(4, 8).double()) == 1


def test_autocast_gives_what_it_gave() -> None:
    """On a CPU autocast leaves norms in bfloat16, so that none of their calls is taken, and a gate's are."""
    x = torch.randn(4, 8)
    for module, taken in ((nn.LayerNorm(8), 0), (Gate(nn.SiLU()), 1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = module(x.bfloat16())
            apply(module, ALL, anywhere=True)
            assert calls(module, x.bfloat16()) == taken
            found = module(x.bfloat16())
        assert found.dtype == wanted.dtype and torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_what_is_computed_again_is_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Gate(nn.SiLU()), Block(nn.RMSNorm))
    x = torch.randn(4, 8)
    wanted = step(model, x)
    apply(model, ALL, anywhere=True)
    for reentrant in (False, True):
        model.zero_grad()
        again = x.clone().requires_grad_()
        y = checkpoint(model, again, use_reentrant=reentrant)
        uneven(y).backward()
        assert close([y.detach(), again.grad, *(one.grad for one in model.parameters())], wanted)


def test_a_hook_on_a_norm_that_would_be_folded_still_runs() -> None:
    block, seen = Block(), []
    apply(block, ["add_layer_norm"], anywhere=True)
    block.second.register_forward_hook(lambda *_: seen.append(1))
    block(torch.randn(2, 8))
    assert seen == [1]


def test_a_hook_that_keeps_a_projection_is_not_written_over() -> None:
    gate, kept = Gate(nn.SiLU()), []
    apply(gate, ["swiglu"], once=True, anywhere=True)
    gate.wide.register_forward_hook(lambda module, given, made: kept.append((made, made.detach().clone())))
    gate(torch.randn(2, 8)).sum().backward()
    assert torch.equal(*kept[0])


@pytest.mark.parametrize("once", [False, True])
def test_places_are_taken_where_graphs_are_gone_through_once(once: bool) -> None:
    gate, x = Gate(nn.SiLU()), torch.randn(2, 8)
    wanted = step(gate, x)
    apply(gate, ["swiglu"], once=once, anywhere=True)
    with Seen() as seen:
        assert close(step(gate, x), wanted)
    assert [one.name() for one, _ in seen.calls] == ["foretell_kernels::gated", "foretell_kernels::gated_backward" + "_" * once]
    total = gate(x).sum()
    total.backward(retain_graph=True)
    if once:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
    else:
        total.backward()


# ---------------------------------------------------------------- what is on, and what cannot be


def test_nothing_is_on_before_it_is_measured() -> None:
    model = nn.Sequential(nn.LayerNorm(8))
    applied = apply(model)
    assert applied.swapped == () and "not measured to be faster" in applied.left[0].why


@pytest.mark.parametrize(("capability", "triton", "why"), [((7, 5), True, "8.0 and above"), ((9, 0), False, "need Triton")])
def test_a_gpu_that_cannot_run_them_is_said(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: bool, why: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    applied = apply(nn.Sequential(nn.LayerNorm(8)), ["layer_norm"])
    assert applied.swapped == () and why in applied.left[0].why


def test_bad_input_says_what_to_try() -> None:
    with pytest.raises(UnknownName, match="rms_norm"):
        apply(nn.LayerNorm(8), ["rms_nrm"])
    with pytest.raises(UserError, match="torch module"):
        apply([nn.LayerNorm(8)])  # type: ignore[arg-type]
