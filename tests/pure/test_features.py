"""An op in numbers: sizes, bytes and layouts against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretell.hardware import parse
from foretell.hardware.types import Device
from foretell.price.kernels.features import FREE, Described, Shape, describe, launches, product_of
from foretell.price.kernels.memory_bound import KINDS, kind_of, mover
from foretell.price.kernels.products import ENGINES, Product, Tiling, aligned_bytes, best_tiling, engine_of
from foretell.trace.types import TensorSpec

H200 = parse("H200").device
ROUND = replace(
    H200, sm_count=100, memory_bandwidth_bytes_per_second=1e12, l2_bytes=10**7,
    peak_flops_per_second={"float32": 1e13, "bfloat16": 1e15, "tf32": 5e14},
)  # fmt: skip


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape, dtype)


def told(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], *attrs: object, device: Device = ROUND) -> Described:
    found = describe(Shape(f"aten.{name}.default", tuple(inputs), tuple(outputs), attrs), device)
    assert found is not None
    return found


# ---------------------------------------------------------------- what launches


@pytest.mark.parametrize("name", ["view", "t", "slice", "expand", "empty", "detach"])
def test_views_and_empty_tensors_are_free(name: str) -> None:
    op = Shape(f"aten.{name}.default", (spec(4, 4),), (spec(4, 4),), ())
    assert name in FREE and not launches(op) and describe(op, ROUND) is None


def test_an_op_without_tensors_is_nothing() -> None:
    assert describe(Shape("aten.add.Tensor", (), (), ()), ROUND) is None


def test_an_op_whose_rule_finds_no_operands_moves_its_bytes() -> None:
    assert told("mm", [spec(4, 4)], [spec(4, 4)]).family == "stream"
    assert told("convolution", [spec(4, 4)], []).family == "stream"


# ---------------------------------------------------------------- products


def test_sizes_of_products() -> None:
    mm = Shape("aten.mm.default", (spec(8, 16), spec(16, 32)), (spec(8, 32),), ("layout:ct",))
    assert product_of("mm", mm) == Product(1, 8, 32, 16, "c", "t")
    addmm = Shape("aten.addmm.default", (spec(32), spec(8, 16), spec(16, 32)), (spec(8, 32),), ("layout:cct",))
    assert product_of("addmm", addmm) == Product(1, 8, 32, 16, "c", "t")
    bmm = Shape("aten.bmm.default", (spec(5, 8, 16), spec(5, 16, 32)), (spec(5, 8, 32),), ())
    assert product_of("bmm", bmm) == Product(5, 8, 32, 16, "c", "c")
    grouped = Shape("aten._grouped_mm.default", (spec(400, 16), spec(4, 16, 32), spec(4, dtype="int32")), (spec(400, 32),), ())
    assert product_of("_grouped_mm", grouped) == Product(4, 100, 32, 16, "c", "c")


@pytest.mark.parametrize(
    ("m", "n", "k", "left", "right", "expected"),
    [
        (64, 64, 64, "c", "c", 16), (63, 64, 64, "c", "c", 16), (63, 64, 64, "t", "c", 2), (64, 50257, 64, "c", "t", 2),
        (64, 64, 1150, "c", "t", 4), (64, 1150, 64, "c", "c", 4), (64, 64, 60, "c", "t", 8),
    ],
)  # fmt: skip
def test_alignment_is_of_rows_in_memory(m: int, n: int, k: int, left: str, right: str, expected: int) -> None:
    """In bf16 a row of k elements begins at multiples of 2k bytes; the result's rows have n elements."""
    assert aligned_bytes(Product(1, m, n, k, left, right), 2) == expected


def test_the_engine_follows_from_dtype_and_alignment() -> None:
    even, odd = Product(1, 64, 64, 64, "c", "t"), Product(1, 64, 63, 64, "c", "t")
    assert [engine_of(even, "bfloat16", 2), engine_of(odd, "bfloat16", 2)] == ["fast", "odd_rows"]
    assert [engine_of(even, "tf32", 4), engine_of(odd, "tf32", 4)] == ["tf32", "tf32_odd"]
    assert engine_of(odd, "float32", 4) == "plain"
    assert engine_of(odd._replace(right="c"), "bfloat16", 2) == "odd"


def tiled(batch: int, m: int, n: int, k: int, device: Device = ROUND) -> Tiling:
    return best_tiling(Product(batch, m, n, k, "c", "c"), "fast", "bfloat16", 2, device)


def test_a_full_wave_costs_as_much_as_its_last_tile() -> None:
    """100 cores: 100 tiles of 256 × 256 are one wave; one row more begins another."""
    whole, more = tiled(100, 256, 256, 8192), tiled(100, 257, 256, 8192)
    assert (whole.rows, whole.columns, whole.parts, whole.waves) == (256, 256, 1, 1.0)
    flops, fetched = 2 * 256 * 256 * 8192, 2 * (256 + 256) * 8192
    least = max(flops / (1e13 * ENGINES["fast"].rate), fetched / (1e10 * ENGINES["fast"].near))
    assert least < whole.computing < 1.1 * least
    assert more.computing > 1.15 * whole.computing


def test_few_tiles_and_a_long_inner_dimension_are_split() -> None:
    assert tiled(1, 64, 64, 65536).parts > 1
    assert tiled(1, 64, 64, 128).parts == 1
    alone = 2 * (64 + 64) * 65536 / (1e10 * ENGINES["fast"].near)  # one core fetches all rows and columns
    assert alone / 100 < tiled(1, 64, 64, 65536).computing < alone / 10


def test_moving_is_bytes_over_bandwidth() -> None:
    moved = 2 * (4096 * 64 + 64 * 4096 + 4096 * 4096)  # more than the cache of 10 MB
    assert tiled(1, 4096, 4096, 64).moving == pytest.approx(moved / 1e12 / ENGINES["fast"].far)


def test_a_product_never_beats_the_peak() -> None:
    for size in (128, 1000, 4096, 16384):
        assert tiled(1, size, size, size, H200).seconds > 2 * size**3 / H200.peak("bfloat16")


# ---------------------------------------------------------------- attention, convolutions, recurrences


def test_attention_counts_tiles_of_128() -> None:
    q = spec(2, 3, 300, 64)
    d = told("_scaled_dot_product_flash_attention", [q, q, q], [q, spec(2, 3, 300, dtype="float32")])
    assert d.terms["exact"] == pytest.approx(2 * 3 * 300 * 300 * 4 * 64 / 1e15)
    assert d.terms["pairs"] == pytest.approx(2 * 3 * 9 * 128 * 128 * 4 * 64 / 1e15)
    assert d.terms["blocks"] == pytest.approx(18 / 100 * 1e-6)
    assert d.terms["moved"] == pytest.approx((4 * 2 * 3 * 300 * 64 * 2 + 2 * 3 * 300 * 4) / 1e12)
    causal = told("_scaled_dot_product_flash_attention", [q, q, q], [q], 0.0, True)
    assert causal.terms["exact"] == pytest.approx(d.terms["exact"] / 2)
    assert causal.terms["pairs"] == pytest.approx(d.terms["pairs"] * 6 / 9)  # 1 + 2 + 3 tiles of 3 × 3


def test_small_heads_are_padded_and_short_rows_waste_their_tile() -> None:
    q = spec(100, 4, 16, 8)
    d = told("_scaled_dot_product_flash_attention", [q, q, q], [q])
    assert d.terms["pairs"] / d.terms["exact"] == pytest.approx((128 / 16) ** 2 * 32 / 8)


def test_a_convolution_counts_taps_places_and_channels() -> None:
    x, w, y = spec(4, 64, 56, 56), spec(128, 64, 3, 3), spec(4, 128, 28, 28)
    attrs = (2, 2, 1, 1, 1, 1, False, 0, 0, 1, False)
    d = told("convolution", [x, w], [y], *attrs)
    assert d.terms["flops"] == pytest.approx(2 * 4 * 28 * 28 * 128 * 64 * 9 / 1e15)
    moved = 2 * (4 * 64 * 56 * 56 + 128 * 64 * 9 + 4 * 128 * 28 * 28)
    assert d.terms["moved"] == d.terms["turned"] == pytest.approx(moved / 1e12)
    back = told("convolution_backward", [y, x, w], [x, w], *attrs[:-1], True, True, False, True)
    assert back.terms["flops"] == pytest.approx(2 * d.terms["flops"])
    assert {"data", "weights"} < set(back.terms) and "turned" not in back.terms  # channels last
    first = told("convolution_backward", [y, x, w], [w], *attrs[:-1], False, True, False, True)
    assert "data" not in first.terms and first.terms["flops"] == pytest.approx(d.terms["flops"])


def test_one_filter_per_channel_runs_without_matrix_units() -> None:
    x, w = spec(2, 32, 14, 14), spec(32, 1, 7, 7)
    d = told("convolution", [x, w], [x], 1, 1, 3, 3, 1, 1, False, 0, 0, 32, True)
    assert d.terms["taps"] == pytest.approx(2 * 2 * 14 * 14 * 32 * 49 / 1e13)
    assert "product" not in d.terms


def test_a_recurrence_counts_its_turns() -> None:
    data, state = spec(5, 7, 64), spec(2, 5, 32)
    weights = [spec(128, 64), spec(128, 32), spec(128, 32), spec(128, 32)]
    d = told("_cudnn_rnn", [data, *weights, state], [spec(5, 7, 32), state])
    assert d.terms["turns"] == pytest.approx(2 * 7 * 1e-6)
    assert d.terms["flops"] == pytest.approx(2 * 35 * 128 * (64 + 3 * 32) / 1e15)


# ---------------------------------------------------------------- what moves bytes


def test_bytes_read_and_written() -> None:
    add = told("add", [spec(1000, 64), spec(1000, 64)], [spec(1000, 64)])
    assert add.terms["read"] == pytest.approx(2 * 128e3 / 1e12) and add.terms["written"] == pytest.approx(128e3 / 1e12)
    assert add.base == pytest.approx(2e-6 + 384e3 / 1e12)
    zeros = told("zeros_like", [spec(1000, 64)], [spec(1000, 64)])
    assert "read" not in zeros.terms


def test_bytes_by_layout() -> None:
    x = spec(100, 64)
    assert told("add", [x, x], [x], "layout:ct").terms["swapped"] == pytest.approx(12800 / 1e12)
    assert told("add", [x, x], [x], "layout:ss").terms["strided"] == pytest.approx(25600 / 1e12)
    assert told("add", [spec(100, 63)] * 2, [x], "layout:cs").terms["ragged"] == pytest.approx(12600 / 1e12)
    picture = spec(2, 8, 4, 4)
    assert told("add", [picture, picture], [picture], "layout:ll").terms["read"] == pytest.approx(1024 / 1e12)
    assert "last" in told("add", [picture, picture], [picture], "layout:cl").terms


def test_a_copy_reads_its_source_alone() -> None:
    x = spec(100, 64)
    terms = told("copy_", [x, x], [x]).terms
    assert terms["read"] == terms["written"] == pytest.approx(12800 / 1e12)
    into = told("copy_", [x, x], [x], "layout:sc").terms
    assert into["written_apart"] == into["read"] == pytest.approx(12800 / 1e12) and "written" not in into


def test_of_a_table_the_rows_picked_are_read() -> None:
    table, index, out = spec(50000, 64), spec(10, dtype="int64"), spec(10, 64)
    terms = told("index_select", [table, index], [out]).terms
    assert terms["read"] == pytest.approx((10 * 128 + 80) / 1e12)
    assert terms["indices"] == pytest.approx(10e-9 * 1.32)
    added = told("index_add", [table, index, out], [table]).terms
    assert added["atoms_low"] == pytest.approx(10 * 64 * 1e-11 * 1.32)


def test_a_block_for_each_row_or_elements_one_by_one() -> None:
    """One index of rows of whole 16 bytes goes by rows; scalars, odd rows and several indices by elements."""
    index, whole = spec(10, dtype="int64"), told("index", [spec(500, 64), spec(10, dtype="int64")], [spec(10, 64)])
    assert whole.key == "index" and "indices" in whole.terms
    scalars = told("index", [spec(16), index], [spec(10)])
    odd = told("index_select", [spec(500, 3), index], [spec(10, 3)])
    several = told("index", [spec(500, 8, 64), index, index], [spec(10, 64)])
    assert [d.key for d in (scalars, odd, several)] == ["each:index", "each:index_select", "each:index"]
    assert all("indices" not in d.terms and d.kind == "pointwise" for d in (scalars, odd, several))
    near, far = (told("index", [spec(size), index], [spec(10)]).terms["read"] for size in (1000, 10**9))
    assert far == pytest.approx(near + 10 * (32 - 2) / 1e12)


def test_a_table_of_integers_is_no_index() -> None:
    table, index = spec(10_000_000, 64, dtype="int64"), spec(10, dtype="int64")
    terms = told("index_select", [table, index], [spec(10, 64, dtype="int64")]).terms
    assert terms["indices"] == pytest.approx(10e-9 * 1.32) and terms["read"] == pytest.approx((10 * 512 + 80) / 1e12)


def test_rows_and_lanes_of_norms() -> None:
    x, w = spec(1000, 64), spec(64)
    assert told("native_layer_norm", [x, w, w], [x]).terms["rows"] == pytest.approx(1000e-9 * 1.32)
    assert told("native_layer_norm", [x, w, w], [x]).terms["odd_rows"] == 0
    assert told("native_layer_norm", [spec(1000, 63), w], [x]).terms["odd_rows"] == pytest.approx(1000e-9 * 1.32)
    picture = spec(4, 16, 8, 8)
    assert told("native_batch_norm", [picture, spec(16)], [picture, spec(16)]).terms["channel"] == pytest.approx(4 * 64e-9)


def test_short_rows_share_a_block() -> None:
    """Threads of a row that is summed or softmaxed: as many as it has elements, up to a number."""
    sums = {n: told("sum", [spec(1000, n)], [spec(1000)]).terms["rows"] for n in (2, 3, 4, 16, 64)}
    assert sums[2] == sums[3] == pytest.approx(sums[16] / 8) and sums[4] == pytest.approx(sums[16] / 4) and sums[64] == sums[16]
    soft = {n: told("_softmax", [spec(1000, n)], [spec(1000, n)]).terms["rows"] for n in (3, 4, 32, 64)}
    assert soft[3] == soft[4] == pytest.approx(soft[32] / 8) and soft[64] == soft[32]
    assert told("sum", [spec(1000, 2)], [spec(2)]).terms["rows"] == pytest.approx(1000e-9 * 1.32)


def test_reductions_differ_by_what_they_keep() -> None:
    x = spec(100, 64)
    assert [told("sum", [x], [out]).key for out in (spec(64), spec(100), spec())] == ["sum:last", "sum:first", "sum:all"]


def test_lists_count_tensors_and_chunks() -> None:
    sizes = [spec(65536, dtype="float32"), spec(65537, dtype="float32"), spec(1, dtype="float32")]
    d = told("_foreach_add_", sizes, [])
    assert d.kind == "lists"
    assert d.terms["tensors"] == pytest.approx(3e-8) and d.terms["chunks"] == pytest.approx(4e-8 * 1.32)


def test_every_kind_has_a_number_and_every_stream_op_the_same_features() -> None:
    x = spec(8, 16)
    names = ("add", "sum", "native_layer_norm", "embedding", "_foreach_add_", "index_add", "copy_", "zeros", "never_heard_of")
    found = [mover(name, Shape(f"aten.{name}.default", (x, spec(8, dtype="int64")), (x,), ()), ROUND) for name in names]
    assert {kind_of(name) for name in names} <= set(KINDS)
    assert len({frozenset(d.values) for d in found}) == 1
    assert kind_of("never_heard_of") == "pointwise" and kind_of("relu_") == "pointwise" and kind_of("clone") == "copy"


# ---------------------------------------------------------------- other kernels at other sizes


def test_many_small_products_take_small_tiles_and_no_padded_depth() -> None:
    """A batch of 3 x 3 matrices fills tiles of 32 x 32 by 8, not 64 x 64 by 32."""
    x = spec(65536, 3, 3, dtype="float32")
    tiny = told("bmm", [x, x], [x])
    assert (tiny.values["rows"], tiny.values["columns"]) == (32, 32)
    deep = told("bmm", [spec(65536, 3, 32, dtype="float32"), spec(65536, 32, 3, dtype="float32")], [x])
    assert deep.terms["tiling"] > 1.2 * tiny.terms["tiling"]
    wide = told("mm", [spec(4096, 4096, dtype="float32")] * 2, [spec(4096, 4096, dtype="float32")])
    assert wide.values["rows"] >= 64 and wide.values["columns"] >= 64


@pytest.mark.parametrize(
    ("rows", "length", "many"),
    [
        (8192, 20000, True), (49152, 4096, True), (4001, 400, True), (4001, 399, False), (4000, 799, False), (4000, 800, True),
        (799, 3000, True), (200, 2999, False), (199, 5000, True), (80, 8000, True), (40, 9999, False), (21, 10000, True), (20, 19999, False),
        (1, 20000, True), (1, 19999, False), (534412, 36, False),
    ],
)  # fmt: skip
def test_long_rows_are_chosen_from_by_several_blocks(rows: int, length: int, many: bool) -> None:
    found = told("topk", [spec(rows, length, dtype="float32")], [spec(rows, 8, dtype="float32"), spec(rows, 8, dtype="int64")], -1)
    assert found.key == ("topk:blocks" if many else "topk:last" if rows > 1 else "topk:one")
    assert ("chosen_rows" in found.terms) == many


def test_every_digit_of_a_number_is_a_pass_over_it() -> None:
    for dtype, digits in (("bfloat16", 2), ("float32", 4), ("int64", 8)):
        x = spec(8192, 2000, dtype=dtype)
        found = told("topk", [x], [spec(8192, 8, dtype=dtype)], -1)
        assert found.terms["read"] == pytest.approx((digits + 1) * x.nbytes / ROUND.memory_bandwidth_bytes_per_second)
        assert found.terms["chosen_rows"] == pytest.approx(digits * 8192e-9 * 132 / ROUND.sm_count)


def test_where_short_rows_begin_makes_no_difference_to_a_sum() -> None:
    for length, odd in ((3, False), (127, False), (129, True), (128, False)):
        found = told("sum", [spec(1000, length)], [spec(1000)], -1)
        assert bool(found.terms["odd_rows"]) is odd
    assert told("native_layer_norm", [spec(1000, 3)], [spec(1000, 3)]).terms["odd_rows"]


def test_a_mask_is_read_for_every_head() -> None:
    q, mask, lse = spec(2, 8, 512, 64), spec(2, 1, 512, 384), spec(2, 8, 512, 1, dtype="float32")
    k = spec(2, 8, 384, 64)
    plain = told("_scaled_dot_product_cudnn_attention", [q, k, k], [q, lse])
    with_mask = told("_scaled_dot_product_cudnn_attention", [q, k, k, mask], [q, lse])
    assert "masked" not in plain.terms and with_mask.key == f"{plain.key}:masked"
    assert with_mask.terms["masked"] == pytest.approx(2 * 8 * 512 * 384 * 2 / ROUND.memory_bandwidth_bytes_per_second)
    assert with_mask.terms["moved"] == pytest.approx(plain.terms["moved"])
    back = told("_scaled_dot_product_cudnn_attention_backward", [q, q, k, k, q, lse, mask], [q, k, k])
    assert back.terms["masked"] == with_mask.terms["masked"]
    square = spec(2, 1, 64, 64)
    assert "masked" not in told("_scaled_dot_product_cudnn_attention_backward", [square, square, square, square, square, lse], [square] * 3).terms


def test_known_statistics_are_applied_number_by_number() -> None:
    x, c, none = spec(4, 64, 56, 56), spec(64, dtype="float32"), spec(0, dtype="float32")
    taken = told("native_batch_norm", [x, c, c, c, c], [x, c, c])
    known = told("native_batch_norm", [x, c, c, c, c], [x, none, none])
    assert taken.terms["channel"] and taken.kind == "channels"
    assert "channel" not in known.terms and known.kind == "pointwise" and known.key == "kept:native_batch_norm"


def test_channels_that_lie_together_are_another_kernel() -> None:
    x, c = spec(4, 64, 56, 56, dtype="float32"), spec(64, dtype="float32")
    first = told("cudnn_batch_norm", [x, c, c, c, c], [x, c, c])
    last = told("cudnn_batch_norm", [x, c, c, c, c], [x, c, c], "layout:lcccc")
    assert (first.key, last.key) == ("cudnn_batch_norm", "cudnn_batch_norm:last")


def test_a_logsumexp_is_several_kernels() -> None:
    x, y = spec(1000, 500, dtype="float32"), spec(1000, dtype="float32")
    one, rate = told("logsumexp", [x], [y], -1), ROUND.memory_bandwidth_bytes_per_second
    assert one.terms["read"] == pytest.approx(4 * x.nbytes / rate) and one.terms["written"] == pytest.approx((2 * x.nbytes + y.nbytes) / rate)
    assert one.terms["one"] == pytest.approx(9 * told("sum", [x], [y], -1).terms["one"])


@pytest.mark.parametrize(
    ("channels", "weight", "groups", "key"),
    [
        (64, (64, 1, 3, 3), 64, "forward:each:first:full:all"),
        (64, (64, 1, 5, 5), 64, "forward:each:first:full:all:five"),
        (64, (64, 1, 7, 7), 64, "forward:each:first:full:all:wide"),
        (64, (128, 1, 3, 3), 64, "forward:each:first:full:all:more"),
        (256, (256, 8, 3, 3), 32, "forward:bundle:first:full:all:own"),
        (144, (144, 72, 3, 3), 2, "forward:bundle:first:full:all"),
        (256, (256, 8, 1, 1), 32, "forward:bundle:first:full:all:point"),
    ],
)
def test_kernels_of_grouped_convolutions_differ_by_filter(channels: int, weight: tuple[int, ...], groups: int, key: str) -> None:
    """Measured on an H200: a 7x7 depthwise gradient took four times what 3x3 ones teach, two filters a channel up to eight times."""
    data, filters, out = (spec(*shape, dtype="float32") for shape in ((8, channels, 56, 56), weight, (8, weight[0], 56, 56)))
    pad = weight[-1] // 2
    assert told("convolution", [data, filters], [out], 1, 1, pad, pad, 1, 1, False, 0, 0, groups, False).key == key
