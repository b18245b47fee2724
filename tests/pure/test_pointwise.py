"""Chains of pointwise steps: what they compute, what they refuse. tests/gpu/test_papers.py has the kernels that are written from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foretell.errors import UnknownName, UserError
from foretell.kernels.papers.pointwise import CASTS, STEPS, Along, chain

NORMALISE = chain("float", ("sub", "mean"), ("div", "std"), ("clamp", -1.5, 1.5), "half")


def test_a_chain_of_one_tensor() -> None:
    x, scale = torch.randn(3, 5), torch.randn(3, 5)
    found = chain(("mul", "scale"), ("add", 0.5), "gelu")(x, scale=scale)
    assert torch.equal(found, F.gelu(x * scale + 0.5))


def test_a_batch_of_crops() -> None:
    torch.manual_seed(0)
    images = [torch.randint(0, 256, (3, 20 + k, 30), dtype=torch.uint8) for k in range(3)]
    crops = [image[:, 2:12, 5 + k : 17] for k, image in enumerate(images)]
    mean, std = torch.tensor([100.0, 120.0, 140.0]), torch.tensor([50.0, 60.0, 70.0])
    found = NORMALISE(crops, mean=Along(0, mean), std=Along(-3, std))
    for one, crop in zip(found, crops, strict=True):
        want = ((crop.float() - mean[:, None, None]) / std[:, None, None]).clamp(-1.5, 1.5).half()
        assert one.dtype == torch.float16 and torch.equal(one, want)


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_the_one_of_torch(name: str) -> None:
    x = torch.rand(50, dtype=torch.float64) + 0.1
    count, own, text = STEPS[name]
    given = (0.3, 0.7)[:count]
    found = chain((name, *given))(x)
    assert torch.equal(found, own(x, *given)) and text.count("{a}") == min(1, count) and text.count("{b}") == max(0, count - 1)
    assert chain(name).dtype(torch.float32) == torch.float32 if not count else True


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_decides_the_result(name: str) -> None:
    steps = chain(name, "square")
    assert steps(torch.ones(2)).dtype == steps.dtype(torch.float32) == CASTS[name]


def test_gradients_reach_operands() -> None:
    x, a = (torch.rand(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    b = torch.rand(3, dtype=torch.float64, requires_grad=True)
    steps = chain(("mul", "a"), "tanh", ("add", "b"))
    assert torch.autograd.gradcheck(lambda x, a, b: steps(x, a=a, b=Along(1, b)), (x, a, b))


@pytest.mark.parametrize(
    ("steps", "kind", "told"),
    [
        ((("mull", 2),), UnknownName, "mul"), (("add",), UserError, "0 operands"), ((("clamp", 1),), UserError, "1 operands"),
        ((("add", "a b"),), UserError, "numbers or names"),
    ],
)  # fmt: skip
def test_chains_that_are_none(steps: Any, kind: type[UserError], told: str) -> None:
    with pytest.raises(kind, match=told):
        chain(*steps)


@pytest.mark.parametrize(
    ("x", "operands", "told"),
    [
        (torch.ones(3), {}, "operands"),
        (torch.ones(3), {"a": torch.ones(2)}, "does not fit"),
        (torch.ones(3), {"a": Along(1, torch.ones(3))}, "does not fit"),
        ([torch.ones(3), torch.ones(3)], {"a": torch.ones(3)}, "does not fit"),
        ([torch.ones(3), torch.ones(3).half()], {"a": torch.ones(1)}, "several formats"),
        (torch.ones(1, 1, 1, 1, 1), {"a": torch.ones(1)}, "5 dimensions"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(x: Any, operands: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        chain(("add", "a"))(x, **operands)
