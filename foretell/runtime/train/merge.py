"""Adapters of a checkpoint merged into the weights they were trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretell.checkpoint.convert import DTYPES, Written, refuse_taken, written_weights
from foretell.checkpoint.format import TensorMeta
from foretell.checkpoint.pretrained import load_into
from foretell.checkpoint.read import Reader
from foretell.checkpoint.store import SavedCheckpoint
from foretell.checkpoint.tree import dtype_name, dtype_of
from foretell.errors import UserError
from foretell.plan import file as plans
from foretell.plan.types import Plan
from foretell.runtime.parallel.adapted import put_on
from foretell.runtime.train import folder as folders
from foretell.runtime.train.folder import RunSettings
from foretell.runtime.train.prepare import build
from foretell.runtime.train.save import MODEL
from foretell.trace.adapters.layers import AdaptedLinear
from foretell.trace.adapters.merge import BASES, MergedLayer, merge_layer


@dataclass(frozen=True, kw_only=True)
class MergedModel:
    """What was written, and what that lost layer by layer."""

    written: Written
    base: str
    layers: tuple[MergedLayer, ...]

    def to_json(self) -> dict[str, Any]:
        return {**self.written.to_json(), "base": self.base, "layers": [asdict(one) for one in self.layers]}


def plan_of(saved: SavedCheckpoint) -> Plan:
    """The plan of a checkpoint that has adapters; any other is refused."""
    plan = plans.from_json(saved.about.get("plan") or {}, f"the plan of {saved.path}")
    if plan.adapters is None:
        raise UserError(f"{saved.path} has no adapters: there is nothing to merge, or it is merged already", "a checkpoint of a run with adapters")
    return plan


def merge(saved: SavedCheckpoint, out: Path, *, base: str | None = None, init_from: str | None = None, dtype: str | None = None) -> MergedModel:
    """The whole model with its adapters merged, written as Hugging Face keeps weights."""
    plan = plan_of(saved)
    base = base or ("dequantised" if plan.base else "original")
    _check(plan, base, dtype, out)
    settings = folders.read_settings(saved.path.parent.parent) or RunSettings()
    settings = replace(settings, init_from=init_from or settings.init_from)
    model, originals, names = _trained_model(saved, plan, settings)
    low = dtype_of(dtype) if dtype is not None else torch.bfloat16 if plan.base or plan.precision == "bf16" else None
    merged: dict[str, Tensor] = {}
    layers = []
    for path, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            weight = originals[path]
            merged[f"{path}.weight"], told = merge_layer(path, layer, weight, base, low or weight.dtype)
            layers.append(told)
    state = {name: value for name, value in model.state_dict().items() if name in names}
    found = {name: merged.get(name, state.get(name)) for name in names}
    ready = {name: _as(value, low) for name, value in found.items() if value is not None}
    listed = {name: TensorMeta(tuple(value.shape), dtype_name(value.dtype)) for name, value in ready.items()}
    return MergedModel(written=written_weights(out, listed, ready.__getitem__), base=base, layers=tuple(layers))


def _check(plan: Plan, base: str, dtype: str | None, out: Path) -> None:
    if base not in BASES:
        raise UserError(f"--base {base} is not known", f"one of {', '.join(BASES)}")
    if base != "original" and not plan.base:
        raise UserError(f"--base {base} is of packed weights, and the base of these adapters is not packed", "leave --base out")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype {dtype} is not one to write weights in", f"give one of {', '.join(DTYPES)}")
    refuse_taken(out)


def _trained_model(saved: SavedCheckpoint, plan: Plan, settings: RunSettings) -> tuple[nn.Module, dict[str, Tensor], list[str]]:
    """The model with the checkpoint's adapters, its weights before these were put on, and the names of its own tensors."""
    model = build(plan, settings.seed).model
    if settings.init_from is not None:
        load_into(model, Path(settings.init_from), may_miss=settings.init_missing)
    names = list(model.state_dict())
    before = {path: module.weight for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), nn.Parameter)}
    digest = put_on(model, plan)
    if saved.about.get("base") != digest:
        raise UserError(
            f"the adapters of {saved.path} were trained on another base: its digest is {saved.about.get('base')} and that of the model {digest}",
            "give the weights they were trained on with --init-from",
        )
    reader = Reader(saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(reader.whole(f"{MODEL}/{name}"))
    return model, {path: weight.detach() for path, weight in before.items()}, names


def _as(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return (value.to(dtype) if dtype is not None and value.is_floating_point() else value).detach().contiguous()

