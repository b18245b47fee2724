"""What a server's step is traced as: a packed forward in which attention is one op, told apart by its layer.

The op stands for whatever a step needs of it: attention over pages, of the sequences that are in the step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.trace.record.attributes import keep_arguments
from foretell.trace.record.step import Workload
from foretell.trace.serving.packed import How, Packed

ATTEND = "foretell_serving.attend.default"
"""Inputs: queries, keys, values, each (tokens, heads, size)."""

_library = torch.library.Library("foretell_serving", "DEF")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, int window) -> Tensor")


def _shape(query: Tensor, key: Tensor, value: Tensor, layer: int, window: int) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_library.impl("attend", _shape, "Meta")
_library.impl("attend", _shape, "CPU")
keep_arguments(torch.ops.foretell_serving.attend.default, (4,))  # the window


class PackedForward(nn.Module):
    """A decoder, called as a server calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.packed = Packed(model)
        self.model = model
        known = getattr(getattr(model, "config", None), "max_position_embeddings", None) or getattr(model, "context", None)
        self.context: int | None = known if isinstance(known, int) else None
        """Tokens of a sequence that the model's positions allow, where it says so."""

    def forward(self, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        return self.packed(tokens, positions, keep, _attend)


def _attend(how: How, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    found: Tensor = torch.ops.foretell_serving.attend(query, key, value, how.layer, how.window or 0)
    return found


def served(workload: Workload, tokens: int, rows: int) -> Workload:
    """One packed step of so many tokens, of which so many rows sample."""
    if not 1 <= rows <= tokens:
        raise UserError(f"a step of {tokens} tokens that samples {rows}", "at least one, at most as many as there are tokens")
    batch = {
        "tokens": torch.zeros(tokens, dtype=torch.int64), "positions": torch.zeros(tokens, dtype=torch.int64),
        "keep": torch.zeros(rows, dtype=torch.int64),
    }  # fmt: skip
    return replace(workload, model=PackedForward(workload.model), batch=batch, loss=None, losses=None)
