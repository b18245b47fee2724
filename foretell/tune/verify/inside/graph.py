"""The aten ops of a forward as data: what comes in, each op with its arguments, what goes out. For templates that are written from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.tune.verify.inside.calls import name_of, outputs_of


class AtenRecorder(TorchDispatchMode):
    """Every tensor has a number; those made inside are kept alive, so that no number is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.ops: list[dict[str, Any]] = []

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = len(self.alive)
            self.alive.append(tensor)
        return self.numbers[id(tensor)]

    def told(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            return {"t": self.number(one)}
        if isinstance(one, list | tuple):
            return [self.told(inner) for inner in one]
        return one if one is None or isinstance(one, bool | int | float | str) else str(one)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {"args": self.told(args), "kwargs": {name: self.told(one) for name, one in (kwargs or {}).items()}}
        found = function(*args, **(kwargs or {}))
        tensors = [one for one in outputs_of(found) if isinstance(one, Tensor)]
        name = str(function).removeprefix("aten.")
        self.ops.append({"op": name, **given, "outputs": [self.number(one) for one in tensors], "shapes": [list(one.shape) for one in tensors]})
        return found


def graph_of(module: nn.Module, arguments: Sequence[Any]) -> dict[str, Any]:
    """One forward without gradients."""
    recorder = AtenRecorder()
    inputs, plain = [], 0
    for place, one in enumerate(arguments):
        if isinstance(one, Tensor):
            inputs.append({**_said(recorder, one), "argument": place})
        else:
            plain += 1
    for name, tensor in module.state_dict(keep_vars=True).items():
        inputs.append({**_said(recorder, tensor), "state": name, "learned": bool(tensor.requires_grad)})
    with torch.no_grad(), recorder:
        outputs = outputs_of(module(*arguments))
    tensors = [one for one in outputs if isinstance(one, Tensor)]
    told = [_said(recorder, one) for one in tensors] if len(tensors) == len(outputs) else []
    return {"inputs": inputs, "plain": plain, "ops": recorder.ops, "outputs": told, "arguments": len(arguments)}


def _said(recorder: AtenRecorder, tensor: Tensor) -> dict[str, Any]:
    return {"t": recorder.number(tensor), "shape": list(tensor.shape), "dtype": name_of(tensor.dtype)}
