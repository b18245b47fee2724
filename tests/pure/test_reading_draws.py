"""Numbers that a step draws into an empty tensor, checks of what is not known, and pieces of one tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.step import Workload


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        size = (800,)[int(torch.empty(1).uniform_(0.0, 1.0).item())]  # as detectors choose a size
        flag = torch.empty(2).fill_(3.0)
        self.sizes = [size, int(flag[1].item())]
        return self.layers[int(torch.empty(1).uniform_(0.0, 3.0).item())](x)


def test_a_draw_into_an_empty_tensor_is_known() -> None:
    made: list[Draws] = []

    def build() -> Workload:
        made.append(Draws())
        return Workload(made[-1], torch.randn(2, 8), lambda output, _: output.mean())

    trace = capture(build, Recipe())
    assert made[-1].sizes == [800, 3]
    used = {op.module for op in trace.programs["micro_first"].ops if op.module.startswith("layers.")}
    assert used == {"layers.1"}, "one number is drawn in the middle"


class Checks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        torch._check_tensor_all(y.sum() == y.shape[0], lambda: "a check of what is not known")
        return y


def test_a_check_of_what_is_not_known_holds() -> None:
    trace = capture(lambda: Workload(Checks(), torch.randn(2, 8), lambda output, _: output.mean()), Recipe())
    assert trace.meta["assumed"]


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.places: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        rows = [y[:, at] for at in range(4)]
        self.places = [row.storage_offset() for row in rows]
        made = [row * 2 for row in rows]
        assert all(one.storage_offset() == 0 and one.untyped_storage().nbytes() == one.numel() * one.itemsize for one in made)
        return torch.stack(made)


def test_pieces_lie_where_they_are_and_what_is_made_of_them_does_not() -> None:
    made: list[Pieces] = []

    def build() -> Workload:
        made.append(Pieces())
        return Workload(made[-1], torch.randn(2, 4, 8), lambda output, _: output.mean())

    capture(build, Recipe())
    assert made[-1].places == [0, 8, 16, 24]
