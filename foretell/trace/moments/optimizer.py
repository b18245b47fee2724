"""AdamW with moments in codes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foretell.errors import InternalError
from foretell.trace.moments import rows
from foretell.trace.moments.update import coded_adamw_

_NAMES = [rows.FIRST + rows.CODE, rows.FIRST + rows.SCALE, rows.SECOND + rows.CODE, rows.SECOND + rows.SCALE]


def tables(model: nn.Module) -> list[Tensor]:
    """Embeddings: few of their rows get a gradient in a step, and their moments stay as they are."""
    return [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]


def names_of_tables(model: nn.Module) -> frozenset[str]:
    """The same by every name they have."""
    found = {id(one) for one in tables(model)}
    return frozenset(name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in found)


class CodedAdamW(torch.optim.Optimizer):
    """`AdamW(fused=True)`, or Adam, whose moments are codes where a parameter is large and not one of `whole`."""

    def __init__(
        self, parameters: Any, state_format: str, whole: Collection[Tensor] = (), *, decoupled: bool = True, lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float | None = None,
    ) -> None:  # fmt: skip
        self.state_format, self._whole = state_format, {id(one) for one in whole}
        decay = (1e-2 if decoupled else 0.0) if weight_decay is None else weight_decay
        super().__init__(parameters, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "amsgrad": False, "maximize": False, "foreach": None,
            "capturable": False, "differentiable": False, "fused": True, "decoupled_weight_decay": decoupled,
        })  # fmt: skip

    def has_codes(self, parameter: Tensor) -> bool:
        """Whether its moments are codes."""
        plain = parameter.is_floating_point() and parameter.is_contiguous()
        return plain and id(parameter) not in self._whole and rows.has_codes(parameter.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        skip = getattr(self, "found_inf", None)
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            if any(one.grad.is_sparse for one in trained):
                raise RuntimeError("AdamW does not support sparse gradients")
            for one in trained:
                if not self.state[one]:
                    self._begin(one)
            steps = [self.state[one]["step"] for one in trained]
            if steps:
                torch._foreach_add_(steps, 1)
                self._update(group, trained, skip)
                if skip is not None:
                    torch._foreach_sub_(steps, [skip] * len(steps))
        return loss

    def _update(self, group: dict[str, Any], trained: list[Tensor], skip: Tensor | None) -> None:
        beta1, beta2 = group["betas"]
        some = [one for one in trained if not self.has_codes(one)]
        if some:
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                *self._lists(some, ["exp_avg", "exp_avg_sq"]), [], [self.state[one]["step"] for one in some],
                lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
                maximize=False, grad_scale=None, found_inf=skip,
            )  # fmt: skip
        some = [one for one in trained if self.has_codes(one)]
        if some:
            coded_adamw_(
                *self._lists(some, _NAMES), [self.state[one]["step"] for one in some], skip, group["lr"], beta1, beta2,
                group["eps"], group["weight_decay"], group["decoupled_weight_decay"],
            )  # fmt: skip

    def _lists(self, some: list[Tensor], names: list[str]) -> list[list[Tensor]]:
        """Parameters, gradients and what is kept under names: what of them is on this rank."""
        kept = [[_local(self.state[one][name]) for one in some] for name in names]
        return [[_local(one) for one in some], [_local(one.grad) for one in some if one.grad is not None], *kept]

    def _begin(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        if not self.has_codes(parameter):
            for name in (rows.FIRST, rows.SECOND):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            return
        count = rows.leading(parameter.shape)
        for name, (shape, dtype) in rows.shapes(parameter.shape, self.state_format).items():
            local = torch.zeros((*_local(parameter).shape[:count], *shape[count:]), dtype=getattr(torch, dtype), device=parameter.device)
            state[name] = spread(local, parameter, shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As given: torch would cast codes and scales to the format of the weights."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [one for group in self.param_groups for one in group["params"]]
        if len(numbers) != len(parameters):
            raise ValueError("loaded state dict has a different number of parameters")
        kept = state_dict["state"]
        self.state = defaultdict(dict, {
            one: {name: value.to(one.device) if isinstance(value, Tensor) else value for name, value in kept[number].items()}
            for number, one in zip(numbers, parameters, strict=True) if number in kept
        })  # fmt: skip
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: value for name, value in given.items() if name != "params"})


def spread(local: Tensor, parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A piece of what is kept for the rows of a parameter, as a part of the whole where the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    if any(getattr(placement, "dim", 0) >= rows.leading(parameter.shape) for placement in parameter.placements):
        raise InternalError(f"rows of {tuple(parameter.shape)} are cut, and blocks of codes with them")
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
