"""Loss scaling"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


class Scaler:
    """fp16 has a narrow range: the loss is multiplied so that gradients do not vanish. A step whose gradients overflow is
    left out, and the scale halved; after 2000 good steps it is doubled. As torch.amp.GradScaler, on any number of ranks."""

    def __init__(self) -> None:
        self.scale, self.good, self.bad = torch.full((), 65536.0), torch.zeros((), dtype=torch.int32), torch.zeros(())

    def to(self, device: torch.device) -> None:
        self.scale, self.good, self.bad = self.scale.to(device), self.good.to(device), self.bad.to(device)

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, and learn whether one of them, on any rank, is not finite."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]  # if: several
        self.bad.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, self.bad, self.scale.reciprocal())
        dist.all_reduce(self.bad, dist.ReduceOp.MAX)  # if: several

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update, unless gradients overflowed, and adapt the scale."""
        if not self.bad:
            optimizer.step()
        torch._amp_update_scale_(self.scale, self.good, self.bad, 2.0, 0.5, 2000)


SCALER = Scaler()
