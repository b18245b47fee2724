"""Outputs against the fp64 oracle: rounding is let pass, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from foretell.tune.verify import compare
from foretell.tune.verify.inside.calls import raw_of


def judged(found: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor) -> str:
    wrong, _ = compare.problem(raw_of(found), raw_of(oracle), raw_of(eager))
    return wrong.check if wrong is not None else ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_only_rounding_is_let_pass_at_any_scale(dtype: torch.dtype, scale: float) -> None:
    if dtype == torch.float16 and scale == 1e-6:
        pytest.skip("below what fp16 has")
    torch.manual_seed(0)
    oracle = torch.randn(64, 64, dtype=torch.float64) * scale
    eager = oracle.to(dtype)
    assert judged(eager, eager, oracle) == ""
    assert judged(torch.nextafter(eager, 2 * eager), eager, oracle) in ("", "accuracy")
    assert judged((oracle * (1 + 64 * compare.EPSILON[str(dtype)[6:]])).to(dtype), eager, oracle) != ""
    assert judged(torch.zeros_like(eager), eager, oracle) == "values"
    one = eager.clone()
    one[3, 4] = one[3, 4] + scale
    assert judged(one, eager, oracle) == "values"


def test_less_precision_is_named() -> None:
    torch.manual_seed(0)
    oracle = torch.randn(50, 50, dtype=torch.float64)
    assert judged(oracle.bfloat16().float(), oracle.float(), oracle) == "accuracy"


def test_what_is_not_finite_must_be_so_in_the_same_places() -> None:
    oracle = torch.tensor([1.0, float("inf"), float("nan"), 2.0], dtype=torch.float64)
    eager = oracle.float()
    assert judged(eager.clone(), eager, oracle) == ""
    for place, value in ((0, float("nan")), (1, float("nan")), (1, float("-inf")), (2, 1.0), (3, float("inf"))):
        other = eager.clone()
        other[place] = value
        assert judged(other, eager, oracle) == "nonfinite"


def test_kinds_and_integers() -> None:
    whole = torch.arange(6)
    assert judged(whole.clone(), whole, whole) == ""
    assert judged(whole.flip(0), whole, whole) == "values"
    assert judged(whole.int(), whole, whole) == "kind"
    assert judged(whole.reshape(2, 3), whole, whole) == "kind"
    empty = torch.zeros(0, 4)
    assert judged(empty, empty, empty.double()) == ""
