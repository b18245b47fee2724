"""Boosted trees against brute force, against functions that are known, and against damaged files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foretell.errors import FileFormatError, InternalError
from foretell.price.kernels.trees import CHUNK, Floats, Trees, fit

EXACT: dict[str, Any] = {
    "rate": 1.0,
    "l2": 0.0,
    "min_leaf": 1,
    "row_share": 1.0,
    "feature_share": 1.0,
    "loss": "squared",
}
"""One tree of these settings is a plain least-squares tree."""


def one_by_one(model: Trees, x: Floats) -> list[float]:
    """`predict` as the description of the arrays has it, row by row and question by question."""
    out = []
    for row in x:
        value = model.base
        for asked, thresholds, leaves in zip(model.questions, model.thresholds, model.leaves, strict=True):
            leaf = int("0" + "".join("1" if row[f] > t else "0" for f, t in zip(asked, thresholds, strict=True)), 2)
            value += leaves[leaf]
        out.append(value)
    return out


def squares(*parts: Floats) -> float:
    return sum(float(((part - part.mean()) ** 2).sum()) for part in parts if len(part))


def waves(rows: int, seed: int, noise: float = 0.0) -> tuple[Floats, Floats]:
    """Log2 of m and n, and the log of how many waves of 128 × 128 tiles 132 processors need, over the ideal."""
    rng = np.random.default_rng(seed)
    m, n = np.exp2(rng.uniform(5, 13, (2, rows)))
    y = np.log(np.ceil(np.ceil(m / 128) * np.ceil(n / 128) / 132) * 132 * 128 * 128 / (m * n))
    return np.stack([np.log2(m), np.log2(n), np.log2(m * n)], axis=1), y + noise * rng.standard_normal(rows)


def linear(x: Floats, y: Floats, at: Floats) -> Floats:
    solved = np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]
    return np.asarray(np.c_[at, np.ones(len(at))] @ solved)


def rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


# ---------------------------------------------------------------- splits, against brute force


@pytest.mark.parametrize("seed", range(8))
def test_the_first_question_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(40, 4)), 1)
    y = rng.normal(size=40) + (x[:, seed % 4] > 0.3)
    left_over = {
        (f, value): squares(y[x[:, f] <= value], y[x[:, f] > value])
        for f in range(4)
        for value in np.unique(x[:, f])[:-1]
    }
    model = fit(x, y, "abcd", depth=1, trees=1, **EXACT)
    assert rms(y - model.predict(x)) ** 2 * 40 == pytest.approx(min(left_over.values()), rel=1e-4)
    feature, value = min(left_over, key=left_over.__getitem__)
    assert model.questions.tolist() == [[feature]]
    assert value < model.thresholds[0, 0] < x[x[:, feature] > value, feature].min()
    yes = x[:, feature] > value
    assert model.base + model.leaves[0] == pytest.approx([y[~yes].mean(), y[yes].mean()], abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_second_question_is_the_best_for_both_leaves_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(50, 3)), 1)
    y = rng.normal(size=50)
    model = fit(x, y, "abc", depth=2, trees=1, **EXACT)
    first = x[:, model.questions[0, 0]] > model.thresholds[0, 0]
    least = min(
        squares(*(y[(first == a) & ((x[:, f] > value) == b)] for a in (False, True) for b in (False, True)))
        for f in range(3)
        for value in np.unique(x[:, f])[:-1]
    )
    assert rms(y - model.predict(x)) ** 2 * 50 == pytest.approx(least, rel=1e-4)


def test_a_weight_of_three_is_a_row_three_times() -> None:
    rng = np.random.default_rng(5)
    x, y, times = rng.normal(size=(30, 2)), rng.normal(size=30), rng.integers(1, 4, 30)
    weighted = fit(x, y, "ab", depth=1, trees=1, weights=times, **EXACT)
    repeated = fit(x.repeat(times, 0), y.repeat(times), "ab", depth=1, trees=1, **EXACT)
    assert weighted.questions.tolist() == repeated.questions.tolist()
    assert weighted.predict(x) == pytest.approx(repeated.predict(x), abs=1e-4)


def test_leaves_are_drawn_towards_their_parent_and_small_ones_keep_its_value() -> None:
    x = np.array([[0.0]] * 6 + [[1.0]] * 2)
    y = np.array([0.0] * 6 + [4.0] * 2)
    # Mean 1. As by two further rows at the parent's zero: (6 × -1) / (6 + 2) and (2 × 3) / (2 + 2).
    drawn = fit(x, y, ["a"], depth=1, trees=1, **{**EXACT, "l2": 2.0})
    assert drawn.leaves[0] == pytest.approx([-0.75, 1.5])
    assert fit(x, y, ["a"], depth=1, trees=1, **{**EXACT, "min_leaf": 3}).leaves[0] == pytest.approx([-1.0, 0.0])


def test_a_leaf_is_drawn_towards_the_leaf_it_came_from() -> None:
    x = np.array([[0, 0]] * 8 + [[1, 0]] * 6 + [[1, 1]] * 2)
    y = np.array([0.0] * 8 + [4.0] * 6 + [8.0] * 2)
    model = fit(x, y, "ab", depth=2, trees=1, **{**EXACT, "l2": 2.0})
    assert model.questions.tolist() == [[0, 1]]
    # Mean 2.5; first question: -20 / 10 and 20 / 10; then (9 + 2 × 2) / 8 and (11 + 2 × 2) / 4. No row is (0, 1).
    assert model.leaves[0] == pytest.approx([(-20 + 2 * -2) / 10, -2.0, 13 / 8, 15 / 4])


def test_a_question_that_parts_off_too_few_rows_counts_nothing() -> None:
    x = np.array([[0, 0]] * 4 + [[0, 1]] * 5 + [[1, 1]])
    y = np.array([0.0] * 4 + [1.0] * 5 + [50.0])
    for columns in (x, 1 - x):
        assert fit(columns, y, "ab", depth=1, trees=1, **EXACT).questions.tolist() == [[0]]
        assert fit(columns, y, "ab", depth=1, trees=1, **{**EXACT, "min_leaf": 2}).questions.tolist() == [[1]]


def test_questions_that_all_do_harm_still_make_a_tree() -> None:
    rows = [(flag, other, y) for flag in (0, 1) for other in range(9) for y in (0.0, 0.0, 1.0)]
    x, y = np.array(rows)[:, :2], np.array(rows)[:, 2]
    # Every side of every question has the same mean, so drawing both towards zero loses on each of them.
    model = fit(x, y, "ab", trees=3, l2=1.0, row_share=1.0)
    assert np.ptp(model.predict(x)) < 0.05


def test_a_threshold_lies_between_values_however_near() -> None:
    for values in ([*1e6 + np.arange(8) / 8], [1.0, 1.0 + 2e-9], [-1e250, 1e250]):
        x, y = np.array(values)[:, None], np.random.default_rng(0).normal(size=len(values))
        # As many questions as there are gaps: every value has a leaf of its own.
        model = fit(x, y, ["a"], depth=len(values) - 1, trees=1, **EXACT)
        assert model.predict(x) == pytest.approx(y, abs=1e-5)
        back = Trees.from_dict(json.loads(json.dumps(model.to_dict())))
        assert back.predict(x).tolist() == model.predict(x).tolist()


def test_last_bits_decide_nothing() -> None:
    """Logarithms of two CPUs differ there: nothing is learned from it, and no answer hangs on it."""
    near = np.array([1.0, np.nextafter(1.0, 2.0)])[:, None]
    assert np.ptp(fit(near, np.array([0.0, 1.0]), ["a"], depth=1, trees=1, **EXACT).predict(near)) == 0
    x, y = np.log(np.arange(1.0, 60.0))[:, None], np.arange(59.0)
    model = fit(x, y, ["a"], trees=5)
    for other in (np.nextafter(x, -np.inf), np.nextafter(x, np.inf)):
        assert model.predict(other).tolist() == model.predict(x).tolist()


def test_thresholds_part_the_rows_evenly() -> None:
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(4000, 1)) * 4)
    model = fit(x, np.sin(9 * np.log(x[:, 0])), ["a"], bins=16, depth=4, trees=60)
    cuts = np.unique(model.thresholds)
    counts = np.diff(np.searchsorted(np.sort(x[:, 0]), [-np.inf, *cuts, np.inf]))
    assert len(cuts) == 15
    assert counts.min() >= 249 and counts.max() <= 251


# ---------------------------------------------------------------- what it learns


def test_waves_are_learned_far_better_than_by_a_line() -> None:
    x, y = waves(3000, 0, noise=0.02)
    at, truth = waves(1000, 1)
    by_trees, by_line = rms(fit(x, y, ["m", "n", "mn"]).predict(at) - truth), rms(linear(x, y, at) - truth)
    assert by_trees < by_line / 5


@pytest.mark.slow(reason="noise leaves what is learned alone in test_ops.py")
def test_noise_of_two_percent_is_averaged_out() -> None:
    rng = np.random.default_rng(3)
    x, at = rng.uniform(0, 1, (4000, 6)), rng.uniform(0, 1, (1000, 6))

    def curve(x: Floats) -> Floats:
        return np.asarray(x[:, 0] ** 2 + 0.5 * (x[:, 1] > 0.4) * x[:, 2])

    model = fit(x, curve(x) + 0.02 * rng.standard_normal(4000), [f"f{i}" for i in range(6)])
    assert rms(model.predict(at) - curve(at)) < 0.02


@pytest.mark.slow(reason="many rows; what is learned of waves is tested above")
def test_outliers_weigh_little_and_a_rare_corner_is_learned() -> None:
    rng = np.random.default_rng(4)

    def truth(x: Floats) -> Floats:
        return np.asarray(np.log1p(4 * x[:, 0]) + 1.0 * (x[:, 1] > 0.97))

    x, at = rng.uniform(0, 1, (2000, 4)), rng.uniform(0, 1, (2000, 4))
    y = truth(x) + 0.02 * rng.standard_normal(2000)
    y[rng.permutation(2000)[:60]] += 2.0
    off = {loss: fit(x, y, "abcd", loss=loss).predict(at) - truth(at) for loss in ("huber", "squared")}
    assert rms(off["huber"]) < rms(off["squared"]) / 2
    corner = at[:, 1] > 0.975
    assert np.median(np.abs(off["huber"][corner])) < 0.1


def test_what_only_grows_is_predicted_to_grow() -> None:
    x = np.linspace(1, 30, 1500)[:, None]
    model = fit(x, np.log(x[:, 0]), ["size"])
    coarse = model.predict(np.linspace(1, 30, 60)[:, None])
    assert (np.diff(coarse) > 0).all()
    assert model.predict([[0.0], [-1e9], [1e9]]).tolist() == model.predict([[1.0], [1.0], [30.0]]).tolist()


def test_features_that_say_nothing_are_not_asked() -> None:
    rng = np.random.default_rng(6)
    x = np.c_[np.full(500, 7.0), rng.integers(0, 2, 500), np.zeros(500)]
    model = fit(x, 3.0 * x[:, 1], ["same", "flag", "none"])
    assert set(model.questions.ravel()) == {1}
    assert model.predict([[7, 0, 0], [7, 1, 0]]) == pytest.approx([0, 3], abs=1e-3)


@pytest.mark.parametrize("loss", ["huber", "squared"])
def test_nothing_to_learn_needs_no_trees(loss: str) -> None:
    constant = fit([[1.0], [2.0], [3.0]], [5.0, 5.0, 5.0], ["a"], loss=loss)
    alike = fit([[1.0], [1.0], [1.0]], [4.0, 5.0, 6.0], ["a"], loss=loss)
    for model in (constant, alike):
        assert len(model.leaves) == 0
        assert Trees.from_dict(json.loads(json.dumps(model.to_dict()))).predict([[9.0]]).tolist() == [5.0]


# ---------------------------------------------------------------- validation, folds, seeds


@pytest.mark.parametrize("patience", [1, 3, 30])
def test_trees_end_where_the_validation_error_is_least(patience: int) -> None:
    x, y = waves(400, 0, noise=0.3)
    held = waves(40, 1, noise=0.3)
    model = fit(x, y, ["m", "n", "mn"], trees=150, rate=0.3, validation=held, patience=patience)
    whole = fit(x, y, ["m", "n", "mn"], trees=150, rate=0.3)
    left = held[1] - whole.base
    errors = [float(np.abs(left).mean())]
    for tree in range(150):
        one = slice(tree, tree + 1)
        left -= replace(
            whole, base=0.0, questions=whole.questions[one], thresholds=whole.thresholds[one], leaves=whole.leaves[one]
        ).predict(held[0])
        errors.append(float(np.abs(left).mean()))
    # The first tree after which so many others bring nothing lower.
    kept = next(n for n in range(120) if min(errors[n + 1 : n + 1 + patience]) >= errors[n] == min(errors[: n + 1]))
    assert patience > 1 or kept < int(np.argmin(errors))
    assert model.leaves.tolist() == whole.leaves[:kept].tolist()
    assert model.questions.tolist() == whole.questions[:kept].tolist()


@pytest.mark.slow(reason="two fits of many rows; that trees end where the error of that share is least is tested above")
def test_a_share_for_validation_is_not_fitted() -> None:
    rng = np.random.default_rng(8)
    x, y = rng.uniform(size=(300, 5)), rng.normal(size=300)
    settings: dict[str, Any] = {"l2": 0.0, "min_leaf": 1, "depth": 8}
    assert len(fit(x, y, "abcde", validation=0.3, **settings).leaves) < 40
    off = fit(x, y, "abcde", **settings).predict(x) - y
    assert rms(off) < 0.2 * rms(y)


def test_a_seed_gives_the_same_trees_and_another_others() -> None:
    x, y = waves(300, 0, noise=0.02)
    first, again, other = (fit(x, y, ["m", "n", "mn"], trees=20, seed=seed).to_dict() for seed in (1, 1, 2))
    assert first == again
    assert first != other


# ---------------------------------------------------------------- predicting and storing


def test_prediction_is_what_the_arrays_say() -> None:
    x, y = waves(CHUNK + 100, 0)
    model = fit(x, y, ["m", "n", "mn"], trees=30, depth=5)
    assert model.predict(x)[-200:] == pytest.approx(one_by_one(model, x[-200:]), abs=1e-12)
    assert model.predict(x[:0]).shape == (0,)


@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(0, 6), st.floats(1e-6, 1e6))
@hypothesis_settings(max_examples=25, deadline=None)
def test_a_stored_model_predicts_the_same(seed: int, depth: int, trees: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(50, 3)) * scale, rng.normal(size=50) / scale
    model = fit(x, y, "abc", depth=depth, trees=trees, seed=seed)
    back = Trees.from_dict(json.loads(json.dumps(model.to_dict(), allow_nan=False)))
    assert back.features == ("a", "b", "c")
    assert back.predict(x).tolist() == model.predict(x).tolist()


@pytest.mark.slow(reason="as many trees as a device has; a stored model predicts the same above")
def test_a_file_stays_small() -> None:
    x, y = waves(2000, 0, noise=0.02)
    model = fit(x, y, ["m", "n", "mn"])
    assert len(json.dumps(model.to_dict(), separators=(",", ":"))) < 12 * model.leaves.size


STORED = fit(*waves(200, 0), ["m", "n", "mn"], trees=2, depth=2).to_dict()


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = copy.deepcopy(STORED)
    change(data)
    return data


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([1, 2], "not a list"),
        (broken(lambda d: d.pop("leaves")), "lack leaves"),
        (broken(lambda d: (d.pop("base"), d.pop("questions"))), "lack base, questions"),
        (broken(lambda d: d.update(features="mn")), "features are not a list of names"),
        (broken(lambda d: d.update(features=[1, 2, 3])), "features are not a list of names"),
        (broken(lambda d: d.update(features=["m"])), "questions are not about features 0 to 0"),
        (broken(lambda d: d["questions"][0].__setitem__(0, -1)), "questions are not about features 0 to 2"),
        (broken(lambda d: d["questions"][0].__setitem__(0, 0.5)), "questions are not about features 0 to 2"),
        (broken(lambda d: d["thresholds"].pop()), "thresholds are 1 × 2, and 2 trees of depth 2 need 2 × 2"),
        (broken(lambda d: [row.pop() for row in d["leaves"]]), "leaves are 2 × 3, and 2 trees of depth 2 need 2 × 4"),
        (broken(lambda d: d["leaves"][1].pop()), "leaves have rows of unlike length"),
        (broken(lambda d: d["leaves"][1].__setitem__(0, "1.5")), "leaves hold something that is no finite number"),
        (broken(lambda d: d["leaves"][1].__setitem__(0, None)), "leaves hold something that is no finite number"),
        (broken(lambda d: d["thresholds"][1].__setitem__(0, float("nan"))), "thresholds hold something that is no"),
        (broken(lambda d: d.update(base=True)), "base hold something that is no finite number"),
        (broken(lambda d: d.update(base=[1.0])), "base are nested 1 deep, not 0"),
        (broken(lambda d: d.update(leaves=[1.0, 2.0])), "leaves are nested 1 deep, not 2"),
        (broken(lambda d: d.update(questions=[[0] * 99999])), "ask 99999 questions each"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_the_reason(data: Any, problem: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        Trees.from_dict(data)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("x", "y", "settings", "problem"),
    [
        ([[1.0], [2.0]], [1.0], {}, "do not match"),
        ([[1.0, 2.0]], [1.0], {}, "1 rows of 2 features, and 1 names"),
        (np.zeros((0, 1)), [], {}, "0 rows"),
        ([[float("nan")]], [1.0], {}, "finite"),
        ([[1.0]], [float("inf")], {}, "finite"),
        ([[1.0]], [1.0], {"weights": [0.0]}, "weights positive"),
        ([[1.0]], [1.0], {"loss": "absolute"}, "cannot be fitted with"),
        ([[1.0]], [1.0], {"depth": 0}, "cannot be fitted with"),
        ([[1.0], [2.0]], [1.0, 2.0], {"validation": 0.0}, "share of 0.0 to validation"),
        ([[1.0], [2.0]], [1.0, 2.0], {"validation": 1.0}, "share of 1.0 to validation"),
    ],
)
def test_what_cannot_be_fitted_is_refused(x: Any, y: Any, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InternalError) as caught:
        fit(x, y, ["a"], **settings)
    assert problem in str(caught.value)


def test_what_cannot_be_predicted_is_refused() -> None:
    model = fit([[1.0], [2.0]], [1.0, 2.0], ["a"], trees=1)
    with pytest.raises(InternalError, match=r"shape \(1, 2\)"):
        model.predict([[1.0, 2.0]])
