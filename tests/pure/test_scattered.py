"""Ops that go by data: their probe cases, what they are counted as, and how near the shipped profile comes to measured ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from foretell.hardware import parse
from foretell.hardware.probe import journal as journals
from foretell.hardware.probe.alone import measure
from foretell.hardware.probe.cases import scattered
from foretell.hardware.probe.cases.families import CUDA_ONLY, Draw
from foretell.hardware.probe.cases.scattered import SCATTERED
from foretell.hardware.probe.clock import Clock
from foretell.hardware.probe.harvest import Harvest
from foretell.price.bands import Band, Evidence
from foretell.price.kernels.features import Described, Shape, describe, product_of
from foretell.price.kernels.laws import by_laws, laws_of
from foretell.price.kernels.memory_bound import goes_by_data
from foretell.price.kernels.products import Product
from foretell.trace.types import TensorSpec

H200 = parse("H200").device
SHIPPED = Path(scattered.__file__).parents[2] / "profiles"


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


def shape_of(name: str, inputs: list[TensorSpec], *outputs: TensorSpec, attrs: tuple[object, ...] = ()) -> Shape:
    return Shape(f"aten.{name}.default", tuple(inputs), outputs, attrs)


@pytest.mark.parametrize("family", sorted(SCATTERED))
def test_every_case_runs_and_has_an_op_to_time(family: str) -> None:
    for index in range(6):
        torch.manual_seed(index)
        call = SCATTERED[family][0](Draw(1000 + index, "cpu", 0.001))
        harvest = Harvest(Clock("cpu", 1e-5, 1))
        with harvest:
            call()
        names = {row.name.split(".")[1] for row in harvest.rows.values()}
        assert names & {"_grouped_mm", "cumsum", "index", "index_select", "gather", "index_put", "index_add", "embedding", "_embedding_bag"}


def test_a_cpu_is_not_asked_for_what_gpus_alone_have() -> None:
    assert "experts" in CUDA_ONLY
    ran = [content["case"][0] for _, content, ok in measure("cpu", 1.0, SCATTERED) if ok]
    assert ran and "experts" not in ran


def test_gradients_of_experts_weights_are_a_product_for_each() -> None:
    """Rows of all experts lie one below another: what is multiplied for one is its share of them."""
    op = shape_of("_grouped_mm", [spec(16, 400), spec(400, 32), spec(4, dtype="int32")], spec(4, 16, 32))
    assert product_of("_grouped_mm", op) == Product(4, 16, 32, 100, "c", "c")
    few, many = (
        describe(shape_of("_grouped_mm", [spec(64, 512), spec(512, 64), spec(n, dtype="int32")], spec(n, 64, 64)), H200) for n in (4, 64)
    )
    assert few is not None and many is not None and many.terms["each"] == 16 * few.terms["each"]


def test_bags_read_the_rows_they_name_and_not_the_table() -> None:
    index, offsets = spec(2000, dtype="int64"), spec(100, dtype="int64")
    small, large = (describe(shape_of("_embedding_bag", [spec(n, 64), index, offsets], spec(100, 64)), H200) for n in (10_000, 1_000_000))
    assert small is not None and large is not None and small.kind == "gather" and small.terms == large.terms
    assert small.terms["chain"] == pytest.approx(20e-8)
    back = describe(shape_of("_embedding_bag_backward", [spec(100, 64), index, offsets], spec(10_000, 64)), H200)
    assert back is not None and back.kind == "sorted"


def test_running_sums_go_down_columns_one_after_another() -> None:
    found = {}
    for shape, dim in (((32, 5000), 1), ((5000, 8), 1), ((5000, 32), 0), ((5000, 2), 0), ((4, 5000, 1), 1), ((5000, 1), 0)):
        one = spec(*shape)
        seen = describe(shape_of("cumsum", [one], one, attrs=(dim,)), H200)
        assert seen is not None
        found[seen.key, shape] = seen.terms
    assert [key for key, _ in found] == ["cumsum:last", "cumsum:short", "cumsum:other", "cumsum:narrow", "cumsum:narrow", "cumsum:one"]
    assert found["cumsum:other", (5000, 32)]["down"] == pytest.approx(5e-4) and found["cumsum:narrow", (4, 5000, 1)]["columns"] == pytest.approx(4e-9)


def test_many_added_at_few_places_wait_for_each_other() -> None:
    def terms(rows: int, dtype: str) -> dict[str, float]:
        base, source = spec(rows, 16, dtype=dtype), spec(100_000, 16, dtype=dtype)
        found = describe(shape_of("index_add", [base, spec(100_000, dtype="int64"), source], base), H200)
        assert found is not None
        return dict(found.terms)

    assert terms(10, "float32")["crowd"] == pytest.approx(1000 * terms(10_000, "float32")["crowd"])
    assert "crowd_low" in terms(10, "bfloat16") and "crowd" not in terms(10, "bfloat16")


def test_a_step_that_goes_by_data_is_less_certain() -> None:
    assert goes_by_data("index_put") and goes_by_data("_grouped_mm") and goes_by_data("index_add_")
    assert not goes_by_data("embedding") and not goes_by_data("mm") and not goes_by_data("add")
    band = Band(low=-0.2, high=0.2, slopes={"scattered": 2.0})
    (low, high), (less, more) = (band.factors(Evidence(scattered_share=share).features) for share in (0.0, 0.4))
    assert less < low and more > high


def test_laws_say_within_a_factor_of_two_what_held_out_cases_took() -> None:
    """Every fifth probe case is left out of the laws; bytes alone, what was said before there were laws, are off by far more."""
    about, entries = journals.read(SHIPPED / f"{H200.name}.rows.jsonl.gz")
    kept = [entry for entry in entries if entry.stage == "ops" and entry.content["case"][0] in SCATTERED]
    measured = journals.measured(about, kept, "quick")
    laws_from, tested = [], []
    for row, (family, index) in zip(measured.rows, measured.groups, strict=True):
        told = describe(Shape(row.name, row.inputs, row.outputs, row.attrs), H200)
        if told is not None and told.family == "stream":
            (tested if (sum(map(ord, family)) + index) % 5 == 0 else laws_from).append((told, row.seconds))
    laws = laws_of([told for told, _ in laws_from], np.array([seconds for _, seconds in laws_from]))
    took = np.array([seconds for _, seconds in tested])
    by_law = np.abs(np.log(by_laws([told for told, _ in tested], laws) / took))
    by_bytes = np.abs(np.log(np.array([told.base for told, _ in tested]) / took))
    assert len(tested) > 150
    assert np.median(by_law) < 0.2 < 0.5 < np.median(by_bytes)
    assert np.mean(by_law < np.log(2)) > 0.9 > 0.5 > np.mean(by_bytes < np.log(2))


def test_resized_pictures_wait_in_turn_where_channels_do_not_lie_side_by_side() -> None:
    """A thread goes through pictures and channels of one place, at the pace of memory where the cache does not hold them."""

    def seen(*shape: int, attrs: tuple[object, ...] = ()) -> Described:
        batch, channels, *size = shape
        found = describe(shape_of("upsample_bilinear2d", [spec(*shape)], spec(batch, channels, *(2 * n for n in size)), attrs=attrs), H200)
        assert found is not None
        return found

    few, many, beside = seen(8, 64, 14, 14), seen(231, 64, 18, 18), seen(231, 64, 18, 18, attrs=("layout:l",))
    assert few.terms["sweep"] == pytest.approx(512e-9) and few.terms["sweep_far"] == 0.0
    assert 0.3 * many.terms["sweep"] < many.terms["sweep_far"] < many.terms["sweep"]
    assert "sweep" not in beside.terms and beside.key == "upsample_bilinear2d:last" and many.key == "upsample_bilinear2d"
    assert "sweep" in seen(231, 3, 18, 18, attrs=("layout:l",)).terms, "too few channels"
