"""From a plan and a model to an optimizer whose states are where the plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from foretell.plan.states import form_of, streamed, tiers
from foretell.plan.types import MASTER, Plan
from foretell.runtime.offload import forms, layout, shards
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.train.numbers.clip import local


def optimizer(
    model: nn.Module, plan: Plan, blocks: Sequence[str], parameters: Mapping[str, nn.Parameter], ranks: Ranks,
    learning_rate: float | None, scratch: str | Path | None = None,
) -> Offloaded:  # fmt: skip
    """The optimizer of a model that is sharded already, where it is: a rank has the states of its own pieces. Those on disk
    are in `scratch`."""
    several = ranks.world > 1
    first = shards.narrow(model, parameters) if several and plan.precision == MASTER else None
    where, away = tiers(plan, blocks), streamed(plan, blocks)
    groups = layout.group(list(parameters), blocks)
    units = [
        layout.unit(path, {name: local(parameters[name]).numel() for name in held}, where[path], cpu_share=plan.cpu_share, streamed=path in away)
        for path, held in groups.items()
    ]
    weights = next(iter(parameters.values())).dtype
    form = forms.form(form_of(plan), weights)
    found = Offloaded(
        parameters, units, form, device=ranks.device, lr=learning_rate if learning_rate is not None else 1e-4,
        decoupled=plan.optimizer.startswith("adamw"), weight_decay=1e-2 if plan.optimizer.startswith("adamw") else 0.0,
        source=first, threads=shards.threads(ranks), agree=shards.agreed(ranks) if several else None,
        folder=scratch,
    )  # fmt: skip
    # Gradients of pieces are made on streams that belong to `fully_shard`; only when backward returns has compute waited for
    # them all. So with several ranks updates begin after backward, whether there is clipping or not.
    found.early = plan.clip is None and not several
    if several:
        found.together = shard.gathered_early(model, blocks)
        found.before_gathers = shard.holds_gathers(model)
    return found


def place_rest(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """What is no trained parameter to the device: the others follow one by one, and in their own format."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = placed(buffer)
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.requires_grad:
                parameter.data = placed(parameter.data)
