"""Traced forwards as row-wise programs: what is one, and why others are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foretell.tune.search.rowwise.program import COLUMN, FULL, ROW, SCALAR, NotRowWise
from tests.pure import row_tasks as tasks


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


X = torch.randn(6, 8)


@pytest.mark.parametrize(("function", "told"), [
    (lambda x: x.mean(0, keepdim=True) + x, "a reduction over dims"), (lambda x: x.sum() + x, "a reduction over dims"),
    (lambda x: x.cumsum(-1), "the op cumsum"), (lambda x: x @ x.T, "the op"), (lambda x: x + torch.arange(8), "the op arange"),
    (lambda x: x, "not computed"), (lambda x: x > 0, "not computed"), (lambda x: x.add_(1) * 2, "changes an input"),
    (lambda x: (x * 2).view(-1, 8).mul_(3), "changes an input, or what others see"), (lambda x: x**2.5, "a power of 2.5"),
    (lambda x: x.view(2, 3, 8).mean(-1), "where rows are"), (lambda x: x.mean(-1, keepdim=True).expand(6, 8), "repeats a number"),
    (lambda x: torch.dropout(x, 0.5, True), "the op"),
])  # fmt: skip
def test_what_is_no_program_of_rows(function: Callable[[Tensor], Tensor], told: str) -> None:
    with pytest.raises(NotRowWise, match=told):
        tasks.program(Of(function), [X.clone()])


def test_a_number_of_each_row_is_not_taken_for_one_of_each_column() -> None:
    """x + x.mean(-1) of a square tensor adds a mean to each column."""
    square = torch.randn(8, 8)
    with pytest.raises(NotRowWise, match="beside"):
        tasks.program(Of(lambda x: x + x.mean(-1)), [square])
    assert tasks.program(Of(lambda x: x + x.mean(-1, keepdim=True)), [square]).reduces


def test_inputs_have_kinds() -> None:
    found = tasks.program(Of(lambda x, r, c, s: (x + r) * c * s), [X, torch.randn(6, 1), torch.randn(8), torch.randn(())])
    assert [one.kind for one in found.inputs] == [FULL, ROW, COLUMN, SCALAR]
    with pytest.raises(NotRowWise, match="beside one of"):
        tasks.program(Of(lambda x, y: x.view(2, 3, 8) + y), [X, torch.randn(2, 1, 8)])
    with pytest.raises(NotRowWise, match="int64"):
        tasks.program(Of(lambda x, y: x + y), [X, torch.ones(6, 8, dtype=torch.int64)])


def test_what_depends_on_no_row_is_flat() -> None:
    assert tasks.program(Of(lambda x: torch.sigmoid(x) * 2), [X]).flat
    assert not tasks.program(Of(lambda x, c: x * c), [X, torch.randn(8)]).flat
    assert not tasks.program(Of(lambda x: x.softmax(-1)), [X]).flat


def test_the_same_value_is_computed_once() -> None:
    found = tasks.program(Of(lambda x: torch.exp(x) + torch.exp(x)), [X])
    assert [node.op for node in found.nodes].count("exp") == 1
