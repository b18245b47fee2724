"""What each stage of an ejected pipeline leaves out, and whether plain hooks can make it one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.plan.blocks import stages_of
from foretell.plan.types import Plan
from foretell.runtime.parallel.pipeline.stages import chart
from foretell.trace.flow.stages import fake_of
from foretell.trace.record.step import Workload, compute_loss

_OTHER = "run it with `foretell run`, or plan without a pipeline"


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """For the script's stages."""

    layers: dict[str, tuple[list[int], int | None]]
    """Layers beside the blocks → the stages that have them, and the width of a table's rows where it is one."""
    tied: tuple[str, ...]
    """Parameters that the first and the last stage hold."""


def leaving(workload: Workload, plan: Plan, blocks: Sequence[str]) -> Leaving:
    """Look at the model as the runtime would cut it; raises what the script cannot do."""
    assert plan.pipeline is not None
    cuts = plan.pipeline.cuts
    if not isinstance(workload.batch, dict) or not all(isinstance(v, Tensor) for v in workload.batch.values()):
        raise UserError("a pipeline of plain PyTorch takes its batch as named tensors, and this model's is none", _OTHER)
    course = chart(workload.model, workload.batch, workload.loss, cuts, schedule=plan.pipeline.schedule)
    for stage in course.stages[1:]:
        if stage.receives != (0,):
            raise UserError(
                f"{cuts[stage.index - 1]} takes {len(stage.receives or ())} tensors from the stage before, or not as its "
                "first argument, and a plain stage hands on one",
                _OTHER,
            )
    flow = course.flow
    last = flow.stages - 1
    for name, stages in flow.ties.items():
        if set(stages) != {0, last}:
            raise UserError(f"{name} is shared by stages {', '.join(map(str, stages))}, and a plain script joins only the first and the last", _OTHER)
    for name in flow.parameters:
        if not any(name.startswith(f"{path}.") for path in flow.modules):
            raise UserError(f"{name} belongs to no layer that a stage could leave out", _OTHER)
    every = stages_of(plan, blocks)
    shapes = _shapes(workload, set(flow.modules))
    layers: dict[str, tuple[list[int], int | None]] = {}
    for path, called in flow.modules.items():
        holders = sorted(index for index in range(flow.stages) if any(n.startswith(f"{path}.") for n in flow.held(index)))
        before = min(called) < last
        width = _width(workload.model.get_submodule(path), path, shapes) if before else None
        if path not in blocks:
            layers[path] = (holders, width)
        elif width is not None or [path in every[index] for index in holders] != [True]:
            raise UserError(f"{path} is used by several stages, or changes the shape of what it is given", _OTHER)
    for block in blocks:
        if block not in flow.modules:
            raise UserError(f"{block} does not lie whole within a stage", _OTHER)
    return Leaving(layers=layers, tied=tuple(flow.ties))


def _width(module: nn.Module, path: str, shapes: dict[str, tuple[Any, Any]]) -> int | None:
    """How its stand-in finds the shape of its output: that of its input, with a width behind it for a table."""
    given, made = shapes.get(path, (None, None))
    if given == made:
        return None
    if isinstance(module, nn.Embedding):
        return int(module.embedding_dim)
    raise UserError(
        f"{path} ({type(module).__name__}) changes the shape of what it is given before the stage begins, and a plain "
        "stand-in does not know how",
        _OTHER,
    )


def _shapes(workload: Workload, paths: set[str]) -> dict[str, tuple[Any, Any]]:
    """Shapes of each layer's first argument and of its output."""
    found: dict[str, tuple[Any, Any]] = {}
    handles = []

    def watch(path: str) -> Any:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            given = tuple(args[0].shape) if args and isinstance(args[0], Tensor) else None
            found.setdefault(path, (given, tuple(output.shape) if isinstance(output, Tensor) else "no tensor"))

        return hook

    for path in paths:
        handles.append(workload.model.get_submodule(path).register_forward_hook(watch(path)))
    try:
        with fake_of(workload.model, workload.batch) as batch, torch.no_grad():
            compute_loss(Workload(workload.model, batch, workload.loss))
    finally:
        for handle in handles:
            handle.remove()
    return found
