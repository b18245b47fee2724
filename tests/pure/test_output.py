"""Where in a model's output its loss is: tuples, dicts and objects, with gradients and without."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretell.errors import ModelError
from foretell.trace.load.output import loss_in, loss_of
from foretell.trace.record.step import Workload, compute_loss

WEIGHT = torch.ones(3, requires_grad=True)
LOSS, OTHER, LOGITS = WEIGHT.sum(), (2 * WEIGHT).sum(), 5 * WEIGHT
Pair = namedtuple("Pair", "logits cost")


@dataclass
class Said:
    logits: Tensor
    cost: Tensor


@dataclass
class Named:
    loss: Tensor
    cost: Tensor


FOUND: dict[str, tuple[Any, str]] = {
    "itself": (LOSS, "{}"), "its loss": (Named(LOSS, OTHER), "{}.loss"), "a dict's loss": ({"loss": LOSS, "part": OTHER}, "{}['loss']"),
    "of a tuple": ((LOGITS, LOSS, 3.0), "{}[1]"), "beside what is detached": ([OTHER.detach(), LOSS], "{}[1]"),
    "of a named tuple": (Pair(LOGITS, LOSS), "{}[1]"), "of an object": (Said(LOGITS, LOSS), "{}.cost"),
    "of a dict": ({"out": LOGITS, "objective": LOSS, "steps": torch.tensor(3)}, "{}['objective']"),
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "no scalar": LOGITS, "none in it": (LOGITS, 3.0), "two of them": (LOSS, OTHER), "two beside others": {"a": LOSS, "b": OTHER, "out": LOGITS},
    "nothing": None, "text": "loss", "a dict of nothing": {},
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_loss_is_found_and_read_as_code_would(name: str) -> None:
    output, read = FOUND[name]
    found = loss_of(output)
    assert found is not None and found.loss is LOSS and found.read == read
    assert eval(read.format("output"), {"output": output}) is LOSS


@pytest.mark.parametrize("name", REFUSED)
def test_none_is_guessed(name: str) -> None:
    assert loss_of(REFUSED[name]) is None


def test_a_dict_of_losses_alone_is_summed() -> None:
    found = loss_of({"boxes": LOSS, "classes": OTHER})
    assert found is not None and found.loss.item() == 9.0 and found.read == "sum({}.values())"


def test_an_evaluation_reads_it_where_training_did() -> None:
    """Without gradients the accuracy in front looks like a loss."""
    model = nn.Linear(1, 1)
    assert loss_in(model, (OTHER.detach(), LOSS)) is LOSS
    with torch.no_grad():
        assert loss_in(model, (torch.tensor(0.5), torch.tensor(2.0))).item() == 2.0


def test_a_refusal_says_what_there_was() -> None:
    class Two(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.sum() * self.weight.sum(), self.weight.sum()

    with pytest.raises(ModelError, match=r"returned tuple with \[0\] of shape \(2, 4\), \[1\] of shape \(\), \[2\]"):
        compute_loss(Workload(Two(3, 4), (torch.ones(2, 3),)))
