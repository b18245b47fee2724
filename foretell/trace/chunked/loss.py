"""Cross entropy of a linear layer's outputs, computed for one chunk of the rows after another, with gradients by hand.

    chunk of hidden rows ─► product ─► cast, scaled ─► log_softmax ─► nll ─┐ sum
             gradient of hidden ◄─ product ◄─ … ◄─ gradient of logits ◄────┘ ─► added to that of the weight

Forward makes the gradients as it goes, for a loss of gradient 1; backward multiplies them with the gradient it is given. So no
product is computed twice, and after forward the logits are gone. Ops and dtypes of a chunk are those of the plain loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.trace.adapters.functions import no_autocast

_SUM = 2
"""How ATen numbers the reduction of a loss."""
Change = tuple[str, Any]
"""What happens to logits before the loss: ("to", dtype), ("mul", number) or ("div", number)."""


@dataclass(frozen=True)
class LossOfChunks:
    """What is computed of the rows."""

    chunks: int
    dtype: torch.dtype
    """Of the product."""
    changes: tuple[Change, ...] = ()
    mean: bool = True
    """Over targets that are not ignored; otherwise the sum."""
    ignore_index: int = -100
    smoothing: float = 0.0
    with_gradients: bool = True


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of `rows` Wᵀ + bias and whole-number targets.

    The gradient of the weight is summed over chunks in the weight's own dtype; that of a frozen weight is not made."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, what: LossOfChunks) -> Tensor:
        asked = [wanted and what.with_gradients for wanted in ctx.needs_input_grad[:3]]
        counted = (targets != what.ignore_index).sum() if what.mean else None
        work = _Chunks(weight, bias, what, counted, asked)
        of_rows = torch.empty_like(rows, dtype=what.dtype) if asked[0] else None
        size = -(-rows.shape[0] // what.chunks) or 1
        for start in range(0, max(rows.shape[0], 1), size):
            place = slice(start, start + size)
            work.chunk(rows[place], targets[place], None if of_rows is None else of_rows[place])
        ctx.save_for_backward(of_rows, work.of_weight, work.of_bias)
        ctx.dtype = rows.dtype
        assert work.total is not None
        return work.total if counted is None else work.total / counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        of_rows, of_weight, of_bias = (None if one is None else one.mul_(gradient) for one in ctx.saved_tensors)
        return None if of_rows is None else of_rows.to(ctx.dtype), of_weight, of_bias, None, None


class _Chunks:
    """The sums over the chunks that were computed."""

    def __init__(self, weight: Tensor, bias: Tensor | None, what: LossOfChunks, counted: Tensor | None, asked: list[bool]) -> None:
        self.what, self.asked = what, asked
        self.weight, self.bias = weight.to(what.dtype), None if bias is None else bias.to(what.dtype)
        self.dtype = weight.dtype
        self.scale = None if counted is None else 1.0 / counted
        self.total: Tensor | None = None
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def chunk(self, rows: Tensor, targets: Tensor, of_rows: Tensor | None) -> None:
        what, dtypes = self.what, []
        with no_autocast(rows):
            rows = rows.to(what.dtype)
            logits = F.linear(rows, self.weight, self.bias)
        for kind, value in what.changes:
            dtypes.append(logits.dtype)
            logits = logits.to(value) if kind == "to" else logits * value if kind == "mul" else logits / value
        dtypes.append(logits.dtype)
        logs = torch.log_softmax(logits, -1)
        del logits
        loss, weighed = torch.ops.aten.nll_loss_forward(logs, targets, None, _SUM, what.ignore_index)
        loss = self._smoothed(loss, logs, targets)
        self.total = loss if self.total is None else self.total + loss
        if not any(self.asked):
            return
        gradient = self._of_logs(logs, targets, weighed)
        gradient = torch.ops.aten._log_softmax_backward_data(gradient, logs, -1, dtypes.pop())
        del logs
        for kind, value in reversed(what.changes):
            dtype = dtypes.pop()
            gradient = gradient.to(dtype) if kind == "to" else gradient * value if kind == "mul" else gradient / value
        with no_autocast(rows):
            self._add(rows, gradient, of_rows)

    def _of_logs(self, logs: Tensor, targets: Tensor, weighed: Tensor) -> Tensor:
        """The gradient of log-probabilities."""
        what = self.what
        scale = torch.ones_like(weighed) if self.scale is None else self.scale.to(logs.dtype)
        gradient = torch.ops.aten.nll_loss_backward(scale, logs, targets, None, _SUM, what.ignore_index, weighed)
        if what.smoothing:
            gradient.mul_(1 - what.smoothing)
            gradient.sub_(((targets != what.ignore_index) * (scale * what.smoothing / logs.shape[-1])).unsqueeze(-1))
        return gradient

    def _smoothed(self, loss: Tensor, logs: Tensor, targets: Tensor) -> Tensor:
        if not self.what.smoothing:
            return loss
        even = -(logs.sum(-1) * (targets != self.what.ignore_index)).sum()
        return (1 - self.what.smoothing) * loss + even * (self.what.smoothing / logs.shape[-1])

    def _add(self, rows: Tensor, gradient: Tensor, of_rows: Tensor | None) -> None:
        if of_rows is not None:
            of_rows.copy_(gradient @ self.weight)
        if self.asked[1]:
            if self.of_weight is None:
                self.of_weight = (gradient.t() @ rows).to(self.dtype)
            elif self.dtype == gradient.dtype:
                self.of_weight.addmm_(gradient.t(), rows)
            else:
                self.of_weight.add_(gradient.t() @ rows)
        if self.asked[2]:
            self.of_bias = gradient.sum(0).to(self.dtype) if self.of_bias is None else self.of_bias.add_(gradient.sum(0))
