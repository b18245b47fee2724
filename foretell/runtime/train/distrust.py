"""What a checkpoint says of the optimizer and the samples, checked before anything of a run is changed.

Checksums find damage. They do not find a file that was written wrong, or changed by somebody who made them anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from foretell.checkpoint.about import LARGEST
from foretell.checkpoint.format import OLDER, Damaged, TensorMeta
from foretell.checkpoint.store import SavedCheckpoint
from foretell.checkpoint.tree import dtype_of
from foretell.runtime.offload.forms import CODE, FIRST, SCALE, SECOND
from foretell.trace.moments import codes, rows

_NEEDED = {"adam": ("step", FIRST, SECOND), "adamw": ("step", FIRST, SECOND), "momentum": ("momentum_buffer",)}
"""Optimizer → what its state has, once there is any; a moment may be in codes."""


def data_of(saved: SavedCheckpoint, count: int | None) -> Mapping[str, Any]:
    """Where the run was among `count` samples."""
    data = saved.about.get("data", {})
    if not all(name in data for name in ("epoch", "position", "digest")):
        raise Damaged(f"{saved.path} does not say where the run was in its data", OLDER)
    if data["epoch"] * (count or 0) + data["position"] > LARGEST:
        raise Damaged(f"{saved.path} is at sample {data['position']} of epoch {data['epoch']}, which no run is", OLDER)
    return data  # type: ignore[no-any-return]


def check_settings(saved: SavedCheckpoint, values: Mapping[str, Any], live: Mapping[str, Any], flags: Sequence[str]) -> None:
    """Settings of a group of parameters, beside those that the optimizer here has."""
    for name, value in values.items():
        if name in flags or not _alike(value, live.get(name)):
            raise Damaged(f"{saved.path} has {name} {str(value)[:40]!a} among the settings of its optimizer", OLDER)


def _alike(value: Any, live: Any) -> bool:
    if isinstance(live, bool | str):
        return type(value) is type(live)
    if isinstance(live, tuple | list):  # betas
        return isinstance(value, list) and len(value) == len(live) and all(_is_number(one) and 0 <= one < 1 for one in value)
    if isinstance(live, Tensor | int | float):
        return _is_number(value) and value >= 0
    return value is None or isinstance(value, bool | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    """One that the arithmetic of any device takes."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def check_states(saved: SavedCheckpoint, states: Mapping[str, Mapping[str, TensorMeta]], weights: Mapping[str, TensorMeta], optimizer: str) -> None:
    """State that is tensors (by parameter and key), and state that is none; `weights` are those of the model by name."""
    plain = saved.about.get("optimizer", {}).get("state", {})
    for name in {*states, *plain}:
        tensors, others = states.get(name, {}), plain.get(name, {})
        lacks = [key for key in _NEEDED.get(optimizer.partition("-")[0], ()) if not {key, key + CODE} & {*tensors, *others}]
        if name not in weights or lacks:
            why = f"no {lacks[0]} of it" if name in weights else "no such weight"
            raise Damaged(f"{saved.path} has states of {name} and {why}", OLDER)
        for key, spec in tensors.items():
            if not _fits(key, spec, math.prod(weights[name].shape), weights[name]):
                raise Damaged(f"{saved.path} has {key} of {name} as {spec}, and the weight is {weights[name]}", OLDER)
        for key, value in others.items():
            if value is not None and not isinstance(value, bool) and not _is_number(value):
                raise Damaged(f"{saved.path} has {str(value)[:40]!a} as {key} of {name}", OLDER)


def _fits(key: str, spec: TensorMeta, elements: int, weight: TensorMeta) -> bool:
    if key == "step":
        return math.prod(spec.shape) == 1 and dtype_of(spec.dtype).is_floating_point
    if key.endswith((CODE, SCALE)) and any(rows.shapes(weight.shape, one).get(key) == tuple(spec) for one in rows.BLOCKS if len(weight.shape) > 1):
        return True
    if key.endswith(SCALE):
        return math.prod(spec.shape) == codes.padded(elements) // codes.BLOCK
    moment = key in (FIRST, SECOND, "momentum_buffer")
    return spec.shape == weight.shape and dtype_of(spec.dtype).is_floating_point >= moment
