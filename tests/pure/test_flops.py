"""Counting rules against PyTorch's own counter, against sums done by hand, and against the known total of a GPT."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from foretell.trace import flops as module
from foretell.trace.flops import flops
from foretell.trace.types import TensorSpec

NAMES = Path(__file__).resolve().parents[1] / "data" / "cuda_op_names.json"
"""Every op of the recorded CUDA training steps of 24 architectures."""

POSITIONS = {
    "aten.convolution.default": (3, 4, 5, 6, 7, 8),
    "aten.convolution_backward.default": (4, 5, 6, 7, 8, 9, 10),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (3, 4),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (6, 7),
    "aten._fft_r2c.default": (1,), "aten._fft_c2r.default": (1,), "aten._fft_c2c.default": (1,),
}  # fmt: skip


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, Tensor):
        return [TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for part in value for found in specs(part)] if isinstance(value, (list, tuple)) else []


class Seen(TorchDispatchMode):
    """Counts every op that really runs by our rules."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = str(func)
        values = [args[i] for i in POSITIONS.get(name, ()) if i < len(args)]
        attrs = tuple(x for value in values for x in (value if isinstance(value, (list, tuple)) else [value]))
        count = flops(name, specs([args, kwargs]), specs(output), attrs)
        assert count is not None, f"{name} has no rule"
        self.total += count
        self.by_name[name] += count
        return output


def counted(step: Callable[[], Any]) -> tuple[Seen, int]:
    """The ops of `step` by our rules, and the total by PyTorch's counter."""
    with FlopCounterMode(display=False) as theirs, Seen() as ours:
        step()
    return ours, theirs.get_total_flops()


def rand(*shape: int, **options: Any) -> Tensor:
    return torch.rand(*shape, **options)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize(
    "step",
    [
        lambda: rand(3, 5) @ rand(5, 7),
        lambda: rand(2, 3, 5) @ rand(2, 5, 7),
        lambda: torch.addmm(rand(7), rand(3, 5), rand(5, 7)),
        lambda: torch.baddbmm(rand(2, 3, 7), rand(2, 3, 5), rand(2, 5, 7)),
        lambda: F.linear(rand(2, 3, 5), rand(7, 5), rand(7)),
    ],
)
def test_matrix_products_agree_with_pytorch(step: Callable[[], Any]) -> None:
    ours, theirs = counted(step)
    products = sum(count for name, count in ours.by_name.items() if "mm" in name)
    assert products == theirs > 0


def test_products_that_pytorch_does_not_count() -> None:
    assert flops("aten.mv.default", [spec(3, 5), spec(5)], [spec(3)], ()) == 2 * 3 * 5
    assert flops("aten.addmv.default", [spec(3), spec(3, 5), spec(5)], [spec(3)], ()) == 2 * 3 * 5
    assert flops("aten.dot.default", [spec(5), spec(5)], [spec()], ()) == 2 * 5
    assert flops("aten.matmul.default", [spec(4, 1, 3, 5), spec(2, 5, 7)], [spec(4, 2, 3, 7)], ()) == 2 * 8 * 3 * 5 * 7


def test_complex_products_count_four_times() -> None:
    real = flops("aten.bmm.default", [spec(2, 3, 5), spec(2, 5, 7)], [spec(2, 3, 7)], ())
    a, b, c = (spec(*shape, dtype="complex64") for shape in ((2, 3, 5), (2, 5, 7), (2, 3, 7)))
    assert flops("aten.bmm.default", [a, b], [c], ()) == 4 * (real or 0) > 0


@pytest.mark.parametrize(
    ("left", "right", "output"),
    [
        ((20, 5), (4, 5, 7), (20, 7)),  # tokens of each group by the matrix of that group
        ((5, 20), (20, 7), (4, 5, 7)),  # gradient of the matrices: tokens are summed
        ((4, 7, 5), (5, 20), (7, 20)),
    ],
)
def test_grouped_products_do_each_token_once(left: Any, right: Any, output: Any) -> None:
    inputs = [spec(*left), spec(*right), spec(4, dtype="int32")]
    assert flops("aten._grouped_mm.default", inputs, [spec(*output)], ()) == 2 * 20 * 5 * 7


def test_grouped_products_of_equal_groups_are_batched_products() -> None:
    inputs = [spec(4, 3, 5), spec(4, 5, 7)]
    assert flops("aten._grouped_mm.default", inputs, [spec(4, 3, 7)], ()) == 2 * 4 * 3 * 5 * 7


# ---------------------------------------------------------------- convolutions

CONVOLUTIONS = [
    pytest.param(nn.Conv1d(4, 6, 3), (2, 4, 11), id="1d"),
    pytest.param(nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 11, 9), id="2d-stride"),
    pytest.param(nn.Conv2d(4, 6, (3, 5), dilation=2), (2, 4, 13, 12), id="2d-dilation"),
    pytest.param(nn.Conv3d(4, 6, 3, bias=False), (2, 4, 5, 6, 7), id="3d"),
    pytest.param(nn.ConvTranspose1d(4, 6, 3), (2, 4, 11), id="1d-transposed"),
    pytest.param(nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 6), id="2d-transposed"),
]


@pytest.mark.parametrize("input_needs_gradient", [True, False])
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS)
def test_convolutions_agree_with_pytorch(layer: nn.Module, shape: tuple[int, ...], input_needs_gradient: bool) -> None:
    data = rand(*shape, requires_grad=input_needs_gradient)
    output: list[Tensor] = []
    ours, theirs = counted(lambda: output.append(layer(data)))
    assert ours.total == theirs > 0
    grad = rand(*output[0].shape)
    backward, theirs_backward = counted(lambda: output[0].backward(grad))
    assert backward.by_name["aten.convolution_backward.default"] == theirs_backward
    assert theirs_backward == theirs * (1 + input_needs_gradient)


def test_frozen_filter_costs_no_gradient_of_its_own() -> None:
    layer = nn.Conv2d(4, 6, 3)
    layer.weight.requires_grad_(False)
    output = layer(rand(2, 4, 9, 9, requires_grad=True))
    ours, theirs = counted(lambda: output.backward(rand(*output.shape)))
    assert ours.by_name["aten.convolution_backward.default"] == theirs == 2 * 2 * 6 * 4 * 9 * 7 * 7


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_cost_what_as_many_separate_convolutions_cost(kind: Any) -> None:
    """PyTorch's counter takes the gradient of a grouped filter for one of all channels: compare with parts."""

    def step(layer: nn.Module, channels: int) -> Callable[[], Any]:
        data = rand(2, channels, 9, 9, requires_grad=True)
        return lambda: layer(data).sum().backward()

    whole, _ = counted(step(kind(8, 16, 3, stride=2, groups=4, bias=False), 8))
    part, theirs = counted(step(kind(2, 4, 3, stride=2, bias=False), 2))
    for name in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert whole.by_name[name] == 4 * part.by_name[name] > 0
    assert part.by_name["aten.convolution.default"] + part.by_name["aten.convolution_backward.default"] == theirs


def test_convolution_without_batch_and_with_a_layout_flag() -> None:
    weight, attrs = spec(6, 4, 3), (1, 0, 1, False, 0, 1)
    assert flops("aten.convolution.default", [spec(4, 11), weight], [spec(6, 9)], attrs) == 2 * 6 * 4 * 3 * 9
    inputs = [spec(2, 6, 9), spec(2, 4, 11), weight]
    both = flops("aten.convolution_backward.default", inputs, [], (*attrs, True, True, False))
    assert both == flops("aten.convolution_backward.default", inputs, [], (*attrs, True, True, False, True))
    assert both == 2 * 2 * 2 * 6 * 4 * 3 * 9
    assert flops("aten.convolution_backward.default", inputs, [], (*attrs, False, False, True, True)) == 0


def test_convolution_without_its_attributes_is_not_guessed() -> None:
    assert flops("aten.convolution.default", [spec(2, 4, 11), spec(6, 4, 3)], [spec(2, 6, 9)], ()) is None


# ---------------------------------------------------------------- attention

KERNELS = [f"aten._scaled_dot_product_{kernel}_attention" for kernel in ("cudnn", "flash", "efficient")]


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_by_hand(kernel: str) -> None:
    query, key, value = spec(2, 8, 10, 16), spec(2, 8, 12, 16), spec(2, 8, 12, 16)
    forward = 4 * 2 * 8 * 10 * 12 * 16
    assert flops(f"{kernel}.default", [query, key, value], [query], (0.0, False)) == forward
    assert flops(f"{kernel}.default", [query, key, value], [query], ()) == forward
    assert flops(f"{kernel}.default", [query, key, value], [query], (1.0, False)) == forward  # dropout is no flag
    halves = (24 - 10) / 12 if "flash" in kernel else 1  # to flash, fewer queries are the last rows of a square
    assert flops(f"{kernel}.default", [query, key, value], [query], (0.0, True)) == forward // 2 * halves
    inputs = [query, query, key, value, query, spec(2, 8, 10)]
    assert flops(f"{kernel}_backward.default", inputs, [query, key, value], (0.1, False)) == forward * 5 // 2
    assert flops(f"{kernel}_backward.default", inputs, [query, key, value], (0.1, True)) == forward * 5 // 4 * halves


def test_attention_with_fewer_heads_and_other_values() -> None:
    inputs = [spec(2, 8, 10, 16), spec(2, 2, 12, 16), spec(2, 2, 12, 32)]
    assert flops(f"{KERNELS[0]}.default", inputs, [spec(2, 8, 10, 32)], ()) == 2 * 2 * 8 * 10 * 12 * (16 + 32)
    backward = flops(f"{KERNELS[0]}_backward.default", [spec(2, 8, 10, 32), *inputs], [], ())
    assert backward == 2 * 2 * 8 * 10 * 12 * (3 * 16 + 2 * 32)


# ---------------------------------------------------------------- recurrent layers and FFT


@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers(packed: bool) -> None:
    """Two layers of an LSTM: every token meets 4·h·(input + h) weights in each."""
    tokens, hidden = 7 * 3, 16
    batch = (tokens,) if packed else (7, 3)
    data, output, state = spec(*batch, 8), spec(*batch, hidden), spec(2, 3, hidden)
    weights = []
    for size in (8, hidden):
        weights += [spec(4 * hidden, size), spec(4 * hidden, hidden), spec(4 * hidden), spec(4 * hidden)]
    buffer = spec(sum(weight.numel for weight in weights))
    forward = 2 * tokens * 4 * hidden * ((8 + hidden) + (hidden + hidden))
    assert flops("aten._cudnn_rnn.default", [data, *weights, buffer, state, state], [output], ()) == forward
    inputs = [data, *weights, buffer, state, state, output, output, state, state, spec(999, dtype="uint8")]
    assert flops("aten._cudnn_rnn_backward.default", inputs, [data, state, state, *weights], ()) == 2 * forward


def test_fft_counts_by_points() -> None:
    signal = rand(3, 16, 32)
    with Seen() as ours:
        torch.fft.irfft2(torch.fft.rfft2(signal), s=(16, 32))
        torch.fft.fft(torch.complex(signal, signal), dim=1)
    names = ("aten._fft_r2c.default", "aten._fft_c2r.default", "aten._fft_c2c.default")
    real = 5 * 3 * 512 * math.log2(512) / 2
    assert [ours.by_name[name] for name in names] == [real, real, 5 * 3 * 512 * math.log2(16)]
    assert flops(names[0], [spec(3, 16)], [spec(3, 9, dtype="complex64")], ()) is None  # of which dimension?


# ---------------------------------------------------------------- per element


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "count"),
    [
        ("aten.add.Tensor", [spec(4, 1), spec(5)], [spec(4, 5)], 20),
        ("aten.add_.Tensor", [spec(4, 5), spec(5)], [spec(4, 5)], 20),
        ("aten.lt.Scalar", [spec(4, 5)], [spec(4, 5, dtype="bool")], 20),
        ("aten.add.Tensor", [spec(4, dtype="int64"), spec(4, dtype="int64")], [spec(4, dtype="int64")], 0),
        ("aten.mul.Tensor", [spec(4, dtype="complex64"), spec(4)], [spec(4, dtype="complex64")], 8),
        ("aten.__iand__.Tensor", [spec(4, dtype="bool")], [spec(4, dtype="bool")], 0),
        ("aten.__rshift__.Tensor", [spec(4, dtype="int64")] * 2, [spec(4, dtype="int64")], 0),
        ("aten.gelu_backward.default", [spec(4, 5), spec(4, 5)], [spec(4, 5)], 20),
        ("aten.sum.dim_IntList", [spec(4, 5)], [spec(4)], 20),
        ("aten.max.default", [spec(4, 5)], [spec()], 20),
        ("aten.max.other", [spec(4, 1), spec(1, 5)], [spec(4, 5)], 20),
        ("aten.native_layer_norm.default", [spec(4, 5), spec(5)], [spec(4, 5), spec(4, 1)], 140),
        ("aten.cudnn_batch_norm_backward.default", [spec(4, 5, 2)] * 2, [spec(4, 5, 2)], 320),
        ("aten._log_softmax_backward_data.default", [spec(4, 5)] * 2, [spec(4, 5)], 80),
        ("aten.mse_loss.default", [spec(4, 5)] * 2, [spec()], 60),
        ("aten.upsample_bilinear2d.default", [spec(1, 1, 2, 2)], [spec(1, 1, 4, 4)], 128),
        ("aten.upsample_bilinear2d_backward.default", [spec(1, 1, 4, 4)], [spec(1, 1, 2, 2)], 128),
        ("aten._softmax.default", [spec(4, 5)], [spec(4, 5)], 100),
        ("aten.nll_loss_forward.default", [spec(4, 5), spec(4, dtype="int64")], [spec(), spec()], 4),
        ("aten.index_add_.default", [spec(9, 2), spec(4, dtype="int64"), spec(4, 2)], [spec(9, 2)], 8),
        ("aten.view.default", [spec(4, 5)], [spec(20)], 0),
        ("aten.embedding.default", [spec(9, 5), spec(4, dtype="int64")], [spec(4, 5)], 0),
        ("aten._to_copy.default", [spec(4)], [spec(4, dtype="bfloat16")], 0),
        ("foretell.begin", [], [], 0),
    ],
)
def test_per_element(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], count: int) -> None:
    assert flops(name, inputs, outputs, ()) == count


def test_adam_does_twelve_per_parameter() -> None:
    parameters, steps = [spec(4, 5), spec(5)], [spec(), spec()]
    assert flops("aten._fused_adamw_.default", [*parameters * 4, *steps], [], ()) == 12 * 25
    assert flops("aten._fused_sgd_.default", parameters * 3, [], ()) == 6 * 25


@pytest.mark.parametrize(
    ("name", "lists", "extra"),
    [
        ("add_.Scalar", 1, 0), ("add_.List", 2, 0), ("mul_.Tensor", 1, 1), ("lerp_.Scalar", 2, 0),
        ("lerp_.List", 3, 0), ("addcdiv_.ScalarList", 3, 0), ("addcmul_.Tensor", 3, 1), ("sqrt_.default", 1, 0),
    ],
)  # fmt: skip
def test_foreach_counts_its_first_list(name: str, lists: int, extra: int) -> None:
    """Equal shapes, and an even number of them: shapes alone would not tell one list from two."""
    first = [spec(4, 5)] * 6
    assert flops(f"aten._foreach_{name}", first * lists + [spec()] * extra, [], ()) == 120
    assert flops(f"aten._foreach_{name}".replace("_.", "."), first * lists + [spec()] * extra, first, ()) == 120


def test_foreach_norm_reads_all_of_its_list() -> None:
    assert flops("aten._foreach_norm.Scalar", [spec(4, 5), spec(5)], [spec(), spec()], ()) == 25


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("linalg_cholesky_ex", 3 * 125 / 3), ("linalg_lu_factor_ex", 3 * 125 * 2 / 3), ("_linalg_det", 3 * 125 * 2 / 3),
        ("linalg_inv_ex", 3 * 250), ("linalg_qr", 3 * 500), ("_linalg_eigh", 3 * 9 * 125), ("_linalg_svd", 3 * 22 * 125),
    ],
)  # fmt: skip
def test_factorisations_count_cubes(name: str, count: float) -> None:
    square = spec(3, 5, 5)
    assert flops(f"aten.{name}.default", [square], [square], ()) == round(count)


def test_factorisations_of_tall_matrices_and_of_complex_ones() -> None:
    assert flops("aten._linalg_svd.default", [spec(20, 3)], [spec(20, 3), spec(3), spec(3, 3)], ()) == 22 * 20 * 9
    assert flops("aten._linalg_svd.default", [spec(3, 20)], [spec(3, 3), spec(3), spec(3, 20)], ()) == 22 * 20 * 9
    assert flops("aten._linalg_eigh.default", [spec(4, 4, dtype="complex64")], [spec(4)], ()) == 4 * 9 * 64


def test_solving_counts_triangles_for_every_right_side() -> None:
    matrix, sides, pivots = spec(2, 6, 6), spec(2, 6, 3), spec(2, 6, dtype="int32")
    assert flops("aten.linalg_solve_triangular.default", [matrix, sides], [sides], ()) == 2 * 36 * 3
    assert flops("aten.linalg_lu_solve.default", [matrix, pivots, sides], [sides], ()) == 2 * 2 * 36 * 3
    assert flops("aten._linalg_solve_ex.default", [matrix, sides], [sides], ()) == 2 * (216 * 2 // 3 + 2 * 36 * 3)


def test_distances_of_all_pairs_count_every_coordinate() -> None:
    left, right, apart = spec(2, 10, 3), spec(2, 7, 3), spec(2, 10, 7)
    assert flops("aten._cdist_forward.default", [left, right], [apart], ()) == 2 * 10 * 7 * 3 * 3
    assert flops("aten._cdist_backward.default", [apart, left, right, apart], [left], ()) == 2 * 10 * 7 * 3 * 3


# ---------------------------------------------------------------- coverage


def test_every_op_of_the_recorded_cuda_steps_has_a_rule() -> None:
    names = json.loads(NAMES.read_text(encoding="utf-8"))
    assert len(names) > 150 and names == sorted(set(names))
    assert [name for name in names if module._rule(name) is None] == []


@pytest.mark.parametrize("name", ["aten.linalg_svd.default", "mine.add.Tensor", "add", "aten.nonsense_.default", ""])
def test_an_unknown_op_is_not_counted_as_nothing(name: str) -> None:
    assert flops(name, [spec(4, 5), spec(4, 5)], [spec(4, 5)], ()) is None
    assert module._rule(name) is None


def test_every_rule_is_of_one_family_and_of_a_real_op() -> None:
    found = Counter(name for names, _ in module._families() for name in names.split())
    assert [name for name, times in found.items() if times > 1] == []
    real = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    real |= {name.partition(".")[0] for name in real}
    real |= {name if name.endswith("__") else name.replace("_.", ".").removesuffix("_") for name in real}
    ours = {"_foreach_clone", *(name for name in found if name.startswith(("foretell.", "profiler.")))}
    assert sorted(set(found) - real - ours) == []


# ---------------------------------------------------------------- a whole model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def test_a_gpt_does_six_times_its_weights_per_token_and_attention() -> None:
    width, heads, layers, vocabulary, batch, length = 384, 6, 2, 512, 2, 96
    embedding = nn.Embedding(vocabulary, width)
    blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
    head = nn.Linear(width, vocabulary, bias=False)
    tokens = torch.randint(vocabulary, (batch, length))
    with Seen() as ours:
        logits = head(blocks(embedding(tokens)))
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()

    weights = layers * 12 * width**2 + width * vocabulary
    attention = layers * (1 + 2.5) * 4 * batch * length**2 * width / 2
    known = 6 * weights * batch * length + attention
    assert sum(count for name, count in ours.by_name.items() if "attention" in name) == attention
    assert sum(count for name, count in ours.by_name.items() if "mm" in name) == known - attention
    assert known < ours.total < 1.01 * known
