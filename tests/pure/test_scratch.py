"""Scratch rules against what one H200 measured (torch 2.11, cuDNN 9.19), and on hand-worked cases.

`tests/data/scratch_h200.json` holds rows [op, inputs, outputs, attrs, measured bytes(, times seen)]; a tensor is
[dtype letter, *shape]. Its four parts:

* grid, conv: ops called alone on contiguous (or, if attrs say so, channels_last) tensors;
* model, model_conv: distinct ops of recorded training steps, the smallest measurement of each. The recordings do not
  say whether inputs were contiguous, so attrs cannot either.

A measurement can exceed the request: above 1 MiB the allocator hands out up to 1 MiB more than was asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

from foretell.hardware.generations import multiprocessors
from foretell.price.kernels.scratch import _RULES, extra_output_bytes, scratch
from foretell.price.kernels.scratch_data import CONTIGUOUS_INPUTS, reduction_staging
from foretell.trace.types import Op, Ref, TensorSpec

MIB = 1 << 20
HOPPER = (9, 0)
DTYPES = {
    "b": "bfloat16", "f": "float32", "h": "float16", "l": "int64", "i": "int32", "o": "bool", "c": "complex64",
    "d": "float64", "u": "uint64",
}  # fmt: skip
ROWS: dict[str, list[list[Any]]] = json.loads((Path(__file__).parents[1] / "data" / "scratch_h200.json").read_text())


def tensors(rows: list[list[Any]]) -> tuple[Ref, ...]:
    return tuple(Ref(i, TensorSpec(tuple(shape), DTYPES[letter])) for i, (letter, *shape) in enumerate(rows))


def make(name: str, inputs: list[list[Any]], outputs: list[list[Any]], *attrs: Any, phase: str = "backward") -> Op:
    return Op("aten." + name, tensors(inputs), tensors(outputs), "", phase, None, attrs=attrs)


def of_row(row: list[Any]) -> Op:
    return make(row[0], row[1], row[2], *row[3])


def marked(op: Op, *inputs: int) -> Op:
    return replace(op, attrs=(*op.attrs, *(f"strided:{i}" for i in inputs)))


def total(op: Op) -> int:
    """What the allocator counts: every buffer rounded up to 512 bytes."""
    return sum(-(-size // 512) * 512 for size in scratch(op, HOPPER))


def slack(op: Op) -> int:
    return MIB * sum(size > MIB for size in scratch(op, HOPPER))


def close(op: Op, measured: int) -> bool:
    return 0.98 * measured - slack(op) <= total(op) <= 1.2 * measured


# -- attention, reductions, norms, embeddings and sorts ----------------------------------------------------------------
#
# Reductions, flash attention, norms and the embedding's sums follow the launchers' source. Read off these rows are the
# parts of cuDNN's and cutlass's workspaces, and the constants of cub's temporaries (sort, scan, select, top-k).


@pytest.mark.parametrize("row", [r for r in ROWS["grid"] if r[4] > MIB], ids=lambda r: f"{r[0]}-{r[1][0]}")
def test_large_buffers_of_single_ops(row: list[Any]) -> None:
    assert close(of_row(row), row[4])


@pytest.mark.parametrize("row", [r for r in ROWS["grid"] if r[4] <= MIB], ids=lambda r: f"{r[0]}-{r[1][0]}")
def test_small_buffers_of_single_ops(row: list[Any]) -> None:
    assert 0.98 * row[4] <= total(of_row(row)) <= row[4] + 64 * 1024


NO_COPIES = {
    "_scaled_dot_product_cudnn_attention_backward.default", "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_efficient_attention_backward.default", "_softmax_backward_data.default",
    "_safe_softmax.default", "_fft_c2r.default", "roll.default",
}  # fmt: skip


@pytest.mark.parametrize(
    "row", [r for r in ROWS["model"] if r[0] in NO_COPIES and r[4] > MIB], ids=lambda r: f"{r[0]}-{r[1][0]}"
)
def test_large_buffers_inside_models(row: list[Any]) -> None:
    """Flash backward with heads below 32 is the one fitted case here: a single measurement, two tensors unexplained."""
    assert close(of_row(row), row[4])


def test_a_sum_of_another_dtype_casts_all_of_it_first() -> None:
    """432 MiB were recorded on an H200 for the mask that a max over 2,048 points is undone with."""
    mask = make("sum.dim_IntList", [["o", 27, 1024, 2048]], [["l", 27, 1024, 1]], 2, True)
    assert max(scratch(mask, HOPPER)) == 432 * MIB
    low = make("sum.dim_IntList", [["h", 27, 1024, 2048]], [["f", 27, 1024, 1]], 2, True)
    assert sum(scratch(low, HOPPER)) < MIB, "16 bits are summed in fp32 without a copy"


def test_sums_inside_models() -> None:
    """Every sum is exact up to the slack, but for the two layouts a recording does not show."""
    wrong = [row for row in ROWS["model"] if row[0] == "sum.dim_IntList" and not close(of_row(row), row[4])]
    # three over (N, H, W) of what must have been channels_last: the mark explains them
    low = [row for row in wrong if total(of_row(row)) < row[4]]
    assert all(row[3][:3] == [0, 2, 3] and close(marked(of_row(row), 0), row[4]) for row in low)
    assert len(low) == 3
    # one over (N, H, W) of a channels-last shape whose memory was not
    assert [row[1] for row in wrong if row not in low] == [[["f", 32, 7, 7, 1024]]]


@pytest.mark.parametrize(
    "row",
    [r for r in ROWS["model"] if "aten." + r[0] in CONTIGUOUS_INPUTS and r[4] > MIB],
    ids=lambda r: f"{r[0]}-{r[1][0]}",
)
def test_norms_and_embeddings_differ_by_whole_copies(row: list[Any]) -> None:
    """Recordings lack strides: some choice of non-contiguous inputs must explain the measurement.

    The choice is made by looking at the measurement, so this says that copies explain it, not that we would know.
    """
    op = of_row(row)
    needed = CONTIGUOUS_INPUTS[op.name]
    choices = chain.from_iterable(combinations(needed, n) for n in range(len(needed) + 1))
    assert any(close(marked(op, *choice), row[4]) for choice in choices)


# -- convolutions: thresholds were read off these very rows, so these are fits; no shape was held out ------------------


def accuracy(rows: list[tuple[Op, int]]) -> tuple[float, float, int]:
    """Share of the large ones predicted at 0.9 or more, predicted over measured in all, and the worst shortfall."""
    large = [(op, measured) for op, measured in rows if measured > MIB]
    enough = sum(total(op) >= 0.9 * measured for op, measured in large) / len(large)
    ratio = sum(total(op) for op, _ in rows) / sum(measured for _, measured in rows)
    return enough, ratio, max(measured - total(op) for op, measured in rows)


def test_convolutions_of_the_grid() -> None:
    """Layouts known. Above 16 MiB nothing is short by more than 2 %, but 13 % of those are over by more than 20 %."""
    rows = [(of_row(row), row[4]) for row in ROWS["conv"]]
    enough, ratio, short = accuracy(rows)
    assert enough >= 0.98
    assert 1.0 <= ratio <= 1.08
    assert short <= 2.2 * MIB
    large = [total(op) / measured for op, measured in rows if measured > 16 * MIB]
    assert min(large) >= 0.98
    assert sum(over <= 1.2 for over in large) / len(large) >= 0.86
    nothing = [op for op, measured in rows if measured <= 512]
    assert sum(total(op) == 0 for op in nothing) / len(nothing) >= 0.89


def known_strides(op: Op) -> Op:
    """What the recorded models' code says: gradients that come back through a permute or out of a concatenation.

    Patch embeddings and stems (up to 4 channels in, with a bias) are followed by a permute in ViT, DiT and ConvNeXt,
    U-Net concatenates what its transposed convolutions return, and the SSM transposes before its 1-d convolution.
    """
    backward = "backward" in op.name
    dims = len(op.inputs[0].spec.shape) - 2
    if dims == 1:
        return marked(op, 1 if backward else 0)
    transposed, bias = op.attrs[3 * dims], backward and op.attrs[4 * dims + 4]
    few = backward and op.inputs[1].spec.shape[1] <= 4 and op.inputs[2].spec.shape[2] > 1
    return marked(op, 0) if backward and (transposed or (few and bias)) else op


def test_convolutions_inside_models_as_recorded() -> None:
    """Without strides, one large one in seven falls short of 0.9, the worst by 130 MiB (U-Net, gradient of a slice)."""
    enough, ratio, short = accuracy([(of_row(row), row[4]) for row in ROWS["model_conv"]])
    assert enough >= 0.85
    assert 0.99 <= ratio <= 1.01
    assert short <= 131 * MIB


def test_convolutions_inside_models_with_strides() -> None:
    enough, ratio, short = accuracy([(known_strides(of_row(row)), row[4]) for row in ROWS["model_conv"]])
    assert enough >= 0.91
    assert 1.0 <= ratio <= 1.06
    assert short <= 8.1 * MIB


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_most_ops_need_nothing() -> None:
    assert scratch(make("mm.default", [["f", 8, 8], ["f", 8, 8]], [["f", 8, 8]]), HOPPER) == ()
    assert scratch(make("no_such_op.default", [["f", 8]], [["f", 8]]), HOPPER) == ()
    image, filters, result = ["b", 8, 64, 56, 56], ["b", 64, 64, 1, 1], ["b", 8, 64, 56, 56]
    pointwise = make("convolution.default", [image, filters], [result], 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 0)
    assert scratch(pointwise, HOPPER) == ()


def test_flash_backward_has_separate_buffers() -> None:
    q = ["b", 4, 12, 1000, 64]
    op = make("_scaled_dot_product_flash_attention_backward.default", [q, q, q, q, q], [q, q, q])
    assert scratch(op, HOPPER) == (4 * 48 * 1024, 4 * 48 * 1024 * 64)


def test_shared_keys_cost_their_gradients_per_query_head() -> None:
    q, k = ["b", 2, 32, 2048, 64], ["b", 2, 8, 2048, 64]
    op = make("_scaled_dot_product_cudnn_attention_backward.default", [q, q, k, k, q], [q, k, k])
    alone = make("_scaled_dot_product_cudnn_attention_backward.default", [q, q, q, q, q], [q, q, q])
    assert sum(scratch(op, HOPPER)) - sum(scratch(alone, HOPPER)) == 2 * op.inputs[1].spec.nbytes


def test_marks_add_copies() -> None:
    x, weight = ["f", 16, 256, 1152], ["f", 1152]
    op = make("native_layer_norm.default", [x, weight, weight], [x])
    assert scratch(op, HOPPER) == ()
    assert scratch(marked(op, 0), HOPPER) == (op.inputs[0].spec.nbytes,)
    assert scratch(marked(op, 1), HOPPER) == ()


def test_reduction_by_hand() -> None:
    """(8192, 768) over rows: 6 blocks of 32 x 4 threads with vectors of 4; 2048 values a thread make 128 splits."""
    spec = TensorSpec((8192, 768), "bfloat16")
    assert reduction_staging(spec, frozenset((0,)), 4, multiprocessors(HOPPER)) == (4 * 768 * 128 * 32 * 4, 4 * 6)
    assert reduction_staging(spec, frozenset((1,)), 4, multiprocessors(HOPPER)) == ()
    assert reduction_staging(spec, frozenset(), 4, multiprocessors(HOPPER)) == ()


def test_unnamed_dimensions_are_read_from_shapes_and_doubt_costs_more() -> None:
    tall = make("sum.dim_IntList", [["f", 8192, 768]], [["f", 768]])
    assert scratch(tall, HOPPER) == scratch(replace(tall, attrs=(0, False)), HOPPER) != ()
    square = make("sum.dim_IntList", [["f", 4096, 4096]], [["f", 4096]])
    along, across = (sum(scratch(replace(square, attrs=(dim, False)), HOPPER)) for dim in (1, 0))
    assert sum(scratch(square, HOPPER)) == max(along, across) > min(along, across)


def test_convolution_without_attrs_reads_shapes() -> None:
    x, w, y = ["b", 8, 64, 56, 56], ["b", 128, 64, 3, 3], ["b", 8, 128, 28, 28]
    given = make("convolution.default", [x, w], [y], 2, 2, 1, 1, 1, 1, 0, 0, 0, 1, 0)
    assert scratch(make("convolution.default", [x, w], [y]), HOPPER) == scratch(given, HOPPER)
    assert total(make("convolution_backward.default", [y, x, w], [x, w])) >= total(given)


def test_outputs_larger_than_their_shape() -> None:
    q = ["f", 2, 4, 197, 64]
    name = "_scaled_dot_product_efficient_attention.default"
    assert extra_output_bytes(make(name, [q, q, q], [q, ["f", 2, 4, 197]])) == 4 * 8 * 27
    assert extra_output_bytes(make(name, [q, q, q], [q, ["f", 2, 4, 224]])) == 0
    assert extra_output_bytes(make("_unique2.default", [["l", 1000]], [["l", 600]])) == 8 * 400
    assert extra_output_bytes(make("mm.default", [["f", 8, 8]], [["f", 8, 8]])) == 0


def test_unknown_devices_are_taken_for_the_next_older() -> None:
    assert multiprocessors((9, 9)) == multiprocessors(HOPPER)
    assert multiprocessors((1, 0)) == multiprocessors((7, 0))


def test_every_rule_says_where_it_comes_from() -> None:
    assert all(rule.__doc__ for rule in _RULES.values())


def test_needs_no_torch() -> None:
    code = "import sys, foretell.price.kernels.scratch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_indices_are_copied_as_the_index_kernel_wants_them() -> None:
    """int32 as int64; indices of unlike shapes at their common shape; the accumulating put sorts as many as that."""
    plain = make("index.Tensor", [["f", 16], ["l", 4096, 2]], [["f", 4096, 2]], phase="forward")
    narrow = make("index.Tensor", [["f", 16], ["i", 4096, 2]], [["f", 4096, 2]], phase="forward")
    assert scratch(plain, HOPPER) == () and scratch(narrow, HOPPER) == (8 * 4096 * 2,)
    alike = make("index.Tensor", [["f", 64, 50], ["l", 64, 32], ["l", 64, 32]], [["f", 64, 32]], phase="forward")
    unlike = make("index.Tensor", [["f", 64, 50], ["l", 64, 1], ["l", 64, 32]], [["f", 64, 32]], phase="forward")
    assert scratch(alike, HOPPER) == () and scratch(unlike, HOPPER) == (8 * 64 * 32,)
    both = make("index.Tensor", [["f", 64, 50], ["l", 64, 1], ["l", 1, 32]], [["f", 64, 32]], phase="forward")
    assert scratch(both, HOPPER) == (8 * 64 * 32, 8 * 64 * 32)
    put = make("index_put.default", [["f", 64, 50], ["l", 64, 1], ["l", 1, 32], ["f", 64, 32]], [["f", 64, 50]], True)
    assert scratch(put, HOPPER)[:4] == (8 * 64 * 32,) * 4


def test_a_loss_of_logits_holds_two_tensors_of_their_size() -> None:
    mean = make("binary_cross_entropy_with_logits.default", [["f", 512, 80], ["f", 512, 80]], [["f"]], phase="forward")
    each = make("binary_cross_entropy_with_logits.default", [["f", 512, 80], ["f", 512, 80]], [["f", 512, 80]], phase="forward")
    assert scratch(mean, HOPPER) == (4 * 512 * 80,) * 2 and scratch(each, HOPPER) == (4 * 512 * 80,)
