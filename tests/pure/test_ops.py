"""Seconds of ops: laws and trees recover made-up devices, beyond what was measured and for ops never measured."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from foretell.hardware import parse
from foretell.hardware.profile import OpRow
from foretell.price.kernels.features import Shape, describe
from foretell.price.kernels.laws import by_laws, laws_of
from foretell.price.kernels.ops import LEAST_ROWS, Family, FoldModel, OpModel, learn, short
from foretell.price.kernels.shapes import Described
from foretell.trace.types import TensorSpec

DEVICE = parse("H200").device
BANDWIDTH = DEVICE.memory_bandwidth_bytes_per_second


def row(shape: Shape, seconds: float) -> OpRow:
    return OpRow(*shape, seconds, 0.0, 0.0)


def product(m: int, n: int, k: int) -> Shape:
    a, b, c = (TensorSpec(size, "bfloat16") for size in ((m, k), (k, n), (m, n)))
    return Shape("aten.mm.default", (a, b), (c,), ())


def pointwise(name: str, numel: int) -> Shape:
    x = TensorSpec((numel,), "float32")
    return Shape(f"aten.{name}.default", (x,), (x,), ())


def tile_law(shape: Shape) -> float:
    """A device of 132 cores that always works in tiles of 96 × 160, each core a bit slower for shallow products."""
    m, k = shape.inputs[0].shape
    n = shape.inputs[1].shape[1]
    waves = math.ceil(math.ceil(m / 96) * math.ceil(n / 160) / 132)
    return 3e-6 + waves * (2 * 96 * 160 * k / (4e14 / 132) * (1 + 300 / k) + 1e-6)


def draw(count: int, seed: int, make: Callable[[random.Random], Shape]) -> list[Shape]:
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]


def sized(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))) / 8) * 8


def a_product(rng: random.Random) -> Shape:
    return product(sized(rng, 64, 8192), sized(rng, 64, 8192), sized(rng, 64, 8192))


def errors(model: OpModel, shapes: list[Shape], truth: Callable[[Shape], float]) -> list[float]:
    found = model.seconds(shapes)
    return [abs(found[shape] / truth(shape) - 1) for shape in shapes]


@pytest.fixture(scope="module")
def products() -> OpModel:
    return learn([row(shape, tile_law(shape)) for shape in draw(700, 1, a_product)], DEVICE)


def test_another_tiling_is_learned_from_measured_rows(products: OpModel) -> None:
    accuracy = products.families["gemm"].accuracy
    assert accuracy["rows"] == 700
    assert accuracy["trees_mean"] < 0.6 * accuracy["plain_mean"]
    fresh = sorted(errors(products, draw(200, 2, a_product), tile_law))
    assert fresh[100] < accuracy["plain_median"] / 2
    assert sum(fresh) / 200 == pytest.approx(accuracy["trees_mean"], rel=0.4)  # what is claimed is what is found


def test_groups_are_held_out_together() -> None:
    """Rows of a group share a secret factor: known to trees that saw the group, unknown to held-out ones."""
    rng = random.Random(3)
    shapes, secrets = draw(60, 3, a_product), [math.exp(rng.gauss(0, 0.5)) for _ in range(60)]
    rows = [row(shape, tile_law(shape) * secret) for shape, secret in zip(shapes, secrets, strict=True) for _ in range(4)]
    apart = learn(rows, DEVICE, groups=[number // 4 for number in range(240)]).families["gemm"].accuracy
    mixed = learn(rows, DEVICE).families["gemm"].accuracy
    assert mixed["trees_mean"] < 0.5 * apart["trees_mean"]


def test_noise_leaves_the_laws_alone() -> None:
    """Where nothing but noise is left over, trees do worse and are not kept."""
    rng = random.Random(4)
    shapes = draw(120, 4, lambda r: pointwise("exp", sized(r, 10**4, 10**8)))
    rows = [row(s, (2e-6 + 16 * s.inputs[0].numel / BANDWIDTH) * math.exp(rng.gauss(0, 0.3))) for s in shapes]
    family = learn(rows, DEVICE).families["stream"]
    assert family.accuracy["trees_mean"] >= family.accuracy["plain_mean"]
    assert all(part.trees is None for part in family.parts)


def test_few_rows_make_laws_and_no_trees() -> None:
    shapes = draw(LEAST_ROWS - 1, 5, a_product)
    family = learn([row(s, tile_law(s)) for s in shapes], DEVICE).families["gemm"]
    assert all(part.trees is None for part in family.parts) and "trees_mean" not in family.accuracy
    single = learn([row(shapes[0], 1e-3)], DEVICE)
    assert single.seconds([shapes[0]])[shapes[0]] == pytest.approx(1e-3, rel=0.3)


# ---------------------------------------------------------------- laws


def stream_law(launch: float, passes: float) -> Callable[[Shape], float]:
    return lambda shape: launch + passes * 8 * shape.inputs[0].numel / BANDWIDTH


LAWS = {"exp": stream_law(2e-6, 1.0), "tanh": stream_law(3e-6, 2.0), "sin": stream_law(2e-6, 4.0)}


@pytest.fixture(scope="module")
def streams() -> OpModel:
    rows = []
    for number, (name, law) in enumerate(LAWS.items()):
        for shape in draw(80, number, lambda rng, name=name: pointwise(name, sized(rng, 10**3, 10**7))):  # type: ignore[misc]
            rows.append(row(shape, law(shape)))
    return learn(rows, DEVICE)


@pytest.mark.parametrize("name", LAWS)
def test_a_law_goes_on_beyond_what_was_measured(streams: OpModel, name: str) -> None:
    """Thirty times the largest size measured."""
    shape = pointwise(name, 3 * 10**8)
    assert streams.seconds([shape])[shape] == pytest.approx(LAWS[name](shape), rel=0.25)


def test_a_name_never_measured_is_like_others_of_its_kind(streams: OpModel) -> None:
    shape = pointwise("never_heard_of", 10**8)
    least, most = (law(shape) for law in (LAWS["exp"], LAWS["sin"]))
    assert 0.9 * least < streams.seconds([shape])[shape] < 1.1 * most


def test_a_family_never_measured_has_the_plain_estimate(streams: OpModel) -> None:
    shape = product(512, 512, 512)
    described = describe(shape, DEVICE)
    assert described is not None and streams.seconds([shape]) == {shape: described.base}


def test_ops_that_launch_nothing_take_no_time(streams: OpModel) -> None:
    shape = Shape("aten.view.default", (TensorSpec((4,), "float32"),), (TensorSpec((4,), "float32"),), ())
    assert streams.seconds([shape]) == {shape: 0.0}


def made(key: str, **terms: float) -> Described:
    return Described("stream", key, "pointwise", 1e-6, terms, {})


def test_coefficients_are_recovered() -> None:
    rng = np.random.default_rng(0)
    rows = [made("a", one=1e-6, read=x, rows=y) for x, y in np.exp(rng.uniform(-16, -9, (200, 2)))]
    seconds = np.array([2.5e-6 + 1.5 * r.terms["read"] + 0.2 * r.terms["rows"] for r in rows])
    law = laws_of(rows, seconds)["a"]
    assert law == pytest.approx({"one": 2.5, "read": 1.5, "rows": 0.2}, rel=0.02)


def test_no_coefficient_is_below_zero() -> None:
    rng = np.random.default_rng(1)
    rows = [made("a", one=1e-6, read=x, rows=y) for x, y in np.exp(rng.uniform(-12, -9, (200, 2)))]
    seconds = np.array([1e-6 + 3 * r.terms["read"] for r in rows]) * np.exp(rng.normal(0, 0.2, 200))
    for law in laws_of(rows, seconds).values():
        assert min(law.values()) >= 0
        assert law["read"] == pytest.approx(3, rel=0.15)


def test_a_term_never_seen_under_a_key_counts_as_elsewhere() -> None:
    rng = np.random.default_rng(2)
    sizes = np.exp(rng.uniform(-12, -9, 100))
    rows = [made("a", read=x) for x in sizes[:50]] + [made("b", read=x, strided=y) for x, y in zip(sizes[50:], sizes, strict=False)]
    seconds = np.array([r.terms["read"] + 5 * r.terms.get("strided", 0.0) for r in rows])
    laws = laws_of(rows, seconds)
    found = by_laws([made("a", read=1e-5, strided=1e-5), made("c", read=1e-5, strided=1e-5)], laws)
    assert found == pytest.approx(6e-5, rel=0.1)


# ---------------------------------------------------------------- as data


def test_through_json_and_back(products: OpModel, streams: OpModel) -> None:
    for model, shapes in ((products, draw(50, 6, a_product)), (streams, [pointwise(n, 12345) for n in (*LAWS, "new")])):
        again = OpModel.from_dict(DEVICE, json.loads(json.dumps(model.to_dict())))
        assert again.seconds(shapes) == model.seconds(shapes)
        assert again.families.keys() == model.families.keys()
        for name, family in again.families.items():
            assert family.accuracy == pytest.approx(model.families[name].accuracy, abs=1e-5)


@pytest.mark.slow(reason="a seed gives the same trees in test_trees.py")
def test_the_same_seed_gives_the_same_model() -> None:
    rows = [row(s, tile_law(s)) for s in draw(60, 7, a_product)]
    first, again, other = (learn(rows, DEVICE, seed=seed).to_dict() for seed in (1, 1, 2))
    assert first == again != other


def test_answers_do_not_depend_on_company(products: OpModel) -> None:
    shapes = draw(20, 8, a_product)
    alone = {s: OpModel(DEVICE, products.families).seconds([s])[s] for s in shapes}
    assert OpModel(DEVICE, products.families).seconds(shapes) == pytest.approx(alone, rel=1e-12)


def test_a_slower_device_is_learned_from_its_own_rows() -> None:
    slow = replace(DEVICE, memory_bandwidth_bytes_per_second=BANDWIDTH / 10)
    rows = [row(s, LAWS["exp"](s) * 10) for s in draw(80, 9, lambda rng: pointwise("exp", sized(rng, 10**3, 10**7)))]
    shape = pointwise("exp", 10**6)
    assert learn(rows, slow).seconds([shape])[shape] == pytest.approx(10 * LAWS["exp"](shape), rel=0.1)


# ---------------------------------------------------------------- corrected from another probe


@pytest.mark.slow(reason="a second fit; another tiling is learned from rows above")
def test_a_few_rows_correct_what_a_fuller_probe_says(products: OpModel, streams: OpModel) -> None:
    """A device 1.4 times as slow, known by 40 products: others are told so well as the fuller probe tells its own."""
    fuller = OpModel(DEVICE, {**products.families, **streams.families})
    few, asked = draw(40, 11, a_product), draw(60, 12, a_product)
    rows = [row(shape, 1.4 * tile_law(shape)) for shape in few]
    found = learn(rows, DEVICE, basis=fuller)
    assert found.families["gemm"].basis is fuller.families["gemm"] and found.families["stream"] is fuller.families["stream"]

    def off(model: OpModel, scale: float) -> float:
        seconds = model.seconds(asked)
        return float(np.median([abs(seconds[shape] / (scale * tile_law(shape)) - 1) for shape in asked]))

    assert off(found, 1.4) < off(fuller, 1.0) + 0.01
    assert off(learn(rows, DEVICE), 1.4) > 1.5 * off(found, 1.4), "alone they say less"
    again = OpModel.from_dict(DEVICE, json.loads(json.dumps(found.to_dict())))
    assert list(again.seconds(asked).values()) == pytest.approx(list(found.seconds(asked).values()), rel=1e-9)


def test_a_probe_that_says_nothing_of_a_device_is_left_aside() -> None:
    nonsense = OpModel(DEVICE, {"gemm": Family((FoldModel({"": {"one": 1.0}}, None),), {})})
    rows = [row(shape, tile_law(shape)) for shape in draw(120, 13, a_product)]
    found = learn(rows, DEVICE, basis=nonsense).families["gemm"]
    assert found.basis is None and found.to_dict() == learn(rows, DEVICE).families["gemm"].to_dict()


def test_rows_that_launched_nothing_correct_nothing(streams: OpModel) -> None:
    shapes = [pointwise("add", 2**power) for power in range(10, 28)]
    rows = [row(shape, seconds) for shape, seconds in streams.seconds(shapes).items()]
    none = [row(pointwise("sin", 2**power), 1e-9) for power in range(10, 28)]
    assert learn([*rows, *none], DEVICE, basis=streams).seconds(shapes) == learn(rows, DEVICE, basis=streams).seconds(shapes)


def test_short_names() -> None:
    assert short("aten.mm.default") == "mm" and short("mm") == "mm"


def test_a_mask_counts_as_its_bytes_until_one_was_measured() -> None:
    """No row has one: its own seconds are added; a row that has says how often it counts."""

    def one(heads: int, mask: float) -> Described:
        terms = {"one": 1e-6, "moved": heads * 1e-6} | ({"masked": mask} if mask else {})
        return Described("attention", f"fused:low{':masked' if mask else ''}", "forward", 1e-6, terms, {})

    plain = [one(heads, 0.0) for heads in range(1, 30)]
    laws = laws_of(plain, np.array([3e-6 + heads * 2e-6 for heads in range(1, 30)]))
    alone, more = by_laws([one(10, 0.0), one(10, 5e-5)], laws)
    assert more - alone == pytest.approx(5e-5)
    both = [*plain, *(one(heads, heads * 1e-6) for heads in range(1, 30))]
    laws = laws_of(both, np.array([(3e-6 + heads * 2e-6) for heads in range(1, 30)] + [3e-6 + heads * 5e-6 for heads in range(1, 30)]))
    alone, more = by_laws([one(10, 0.0), one(10, 1e-5)], laws)
    assert more - alone == pytest.approx(3e-5, rel=0.05)


def test_a_key_never_measured_has_the_law_of_what_it_begins_with() -> None:
    def one(key: str, value: float) -> Described:
        return Described("stream", key, "copy", 1e-6, {"one": value}, {})

    laws = {"": {"one": 1.0}, "a": {"one": 2.0}, "a:b": {"one": 3.0}, "*copy": {"one": 4.0}}
    assert by_laws([one(key, 1e-3) for key in ("a:b:c", "a:x", "x:a")], laws).tolist() == pytest.approx([3e-3, 2e-3, 4e-3])


def test_an_older_profile_has_the_term_by_its_older_name() -> None:
    one = Described("stream", "cudnn_batch_norm", "channels", 1e-6, {"one": 1e-6, "channel": 1e-3}, {})
    assert by_laws([one], {"": {"one": 1.0, "lane": 2.0}})[0] == pytest.approx(1e-6 + 2e-3)
    assert by_laws([one], {"": {"one": 1.0, "lane": 2.0, "channel": 0.0}})[0] == pytest.approx(1e-6)
