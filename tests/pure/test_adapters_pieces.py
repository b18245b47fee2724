"""Layers with an adapter that are computed in pieces, since a copy in the adapter's dtype were large: the numbers of the whole, and the
bytes of a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.adapters import functions
from foretell.trace.adapters.formats import pack, unpack
from foretell.trace.adapters.layers import add_adapter, pack_base
from foretell.trace.adapters.put import adapt
from foretell.trace.load.model import Source
from foretell.trace.recipe import Adapters, Recipe
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu

STEPS = ("first_step", "steady_step")
PIECE = 40_000
WIDE = {"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "ffn": 160, "vocab_size": 64, "context": 512}


def layer_of(packed: str, bias: bool, kind: str = "lora") -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(128, 384, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    if packed:
        pack_base("layer", layer, packed, {})
    add_adapter(layer, Adapters(kind=kind, rank=8), packed=bool(packed))
    nn.init.normal_(layer.lora_B)
    return layer


def once(layer: Any, x: Tensor, gradient: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    found = layer(x)
    found.backward(gradient)
    return [found.detach(), x.grad, layer.lora_A.grad, layer.lora_B.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", ["", "nf4", "int8"])
def test_pieces_have_the_numbers_of_the_whole(packed: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients of inputs to the bit; those of A and B but for which kernel a product of another shape takes."""
    layer = layer_of(packed, bias)
    x, gradient = torch.randn(2, 150, 128, dtype=torch.bfloat16), torch.randn(2, 150, 384, dtype=torch.bfloat16)
    assert not layer.lora_in_pieces(x)
    whole = once(layer, x, gradient)
    monkeypatch.setattr(functions, "PIECE_BYTES", PIECE)
    assert layer.lora_in_pieces(x)
    in_pieces = once(layer, x, gradient)
    assert all(map(torch.equal, whole[:2], in_pieces[:2]))
    for one, other in zip(whole[2:], in_pieces[2:], strict=True):
        assert (one - other).norm() <= 1e-6 * one.norm() > 0


def test_what_cannot_be_cut_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "PIECE_BYTES", 1)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert layer_of("", False).lora_in_pieces(x) and layer_of("", False, "rslora").lora_in_pieces(x)
    assert not layer_of("", False, "dora").lora_in_pieces(x)
    assert not layer_of("", False).lora_in_pieces(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer_of("nf4", False).lora_in_pieces(x)
    dropping = layer_of("", False)
    dropping.lora_adapter = Adapters(rank=8, dropout=0.1)
    assert not dropping.lora_in_pieces(x) and dropping.eval().lora_in_pieces(x)


class Own(nn.Linear):
    """A user's own layer, which does more than a product."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_layer_of_the_users_own_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "PIECE_BYTES", 1)
    model = nn.Sequential(Own(128, 64, dtype=torch.bfloat16), nn.Linear(64, 8, dtype=torch.bfloat16))
    adapt(model, Adapters(rank=2, targets=("0",)))
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    assert not model[0].lora_in_pieces(x)  # type: ignore[operator]
    assert (model[0](x) - nn.functional.linear(x, model[0].weight, model[0].bias)).mean() > 0.9  # type: ignore[arg-type]


def test_pieces_are_equal_parts_that_cover_all() -> None:
    for count in (1, 7, 100, 1001):
        for others in (1, 64, 20_000):
            found = functions.pieces(count, others, torch.float32)
            assert [place for some in found for place in range(count)[some]] == list(range(count))
    assert [some.stop - some.start for some in functions.pieces(40_000, 14_336, torch.float32)] == [8_000] * 5


@pytest.mark.parametrize("how", [
    {"base": (("adapted", "nf4"),), "recompute": "full"}, {"base": ()},
    pytest.param({"base": (), "recompute": "selective"}, marks=pytest.mark.slow(reason="recomputed whole, and not at all")),
])  # fmt: skip
def test_bytes_are_those_of_a_real_step(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "PIECE_BYTES", PIECE)
    unpack(*pack(torch.zeros(64), "nf4"), (64,), torch.float32, "nf4")
    source = Source(model="llama3-8b", overrides=WIDE, seq=512)
    recipe = Recipe(precision="bf16", adapters=Adapters(rank=4), optimizer="sgd", **how)
    assert measure_on_cpu(source, recipe)[0] == peak_live(trace_as_cpu(source, recipe), STEPS)


def test_no_copy_in_the_dtype_of_the_adapter_is_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward of a layer that goes from 160 to 64, and back."""
    source, recipe = Source(model="llama3-8b", overrides=WIDE, seq=512), Recipe(precision="bf16", adapters=Adapters(rank=4))

    def largest() -> int:
        trace = trace_as_cpu(source, recipe)
        sizes = [
            trace.storages[number].nbytes for op in trace.programs["micro_first"].ops for number in op.allocates
            if "mlp" in op.module and trace.storages[number].role in (types.TEMPORARY, types.ACTIVATION)
            and any(ref.storage == number and ref.spec.dtype == "float32" for ref in op.outputs)
        ]  # fmt: skip
        return max(sizes)

    whole = largest()
    monkeypatch.setattr(functions, "PIECE_BYTES", PIECE)
    assert largest() <= PIECE < whole == 512 * 160 * 4


def test_three_numbers_in_bf16_are_one_in_fp32() -> None:
    """What a compiled adapter computes on units for bf16 is as exact as in fp32: against fp64."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(64, 33) * 10.0**power for power in (-20, -3, 0, 4, 20)])
    parts = functions.parts_of(x)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts.float().view(-1, 3, 33).sum(1), x)
    wide, narrow = torch.randn(50, 700).bfloat16(), torch.randn(700, 8)
    exact = wide.double() @ narrow.double()
    off = (functions.by_parts(wide, narrow) - exact).abs().max(), (wide.float() @ narrow - exact).abs().max()
    assert off[0] <= 2 * off[1], off


def test_gradients_by_parts_are_those_in_fp32() -> None:
    torch.manual_seed(1)
    x, gradient = torch.randn(2, 30, 48).bfloat16(), torch.randn(2, 30, 64).bfloat16().float()
    a, b = torch.randn(4, 48), torch.randn(64, 4)
    small = torch.nn.functional.linear(x.float(), a)
    for scale in (0.5, 0.3):
        ours = functions.of_parts(x, a, b, small, gradient, scale, True)
        plain = functions.of_low_rank(x, a, b, small, gradient * scale, torch.float32, True)
        for one, other in zip(ours, plain, strict=True):
            assert one is not None and other is not None and one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 2e-5, atol=1e-4)
