"""What a manifest says besides its files and tensors, read with distrust. No torch.

    plan       as a plan file has it; here only what is read without the plan itself
    data       where the run was in its samples
    optimizer  settings by groups of parameters, and state that is no tensor
    base       of adapters: a digest of the weights they were trained on
    used       of replicas that come and go: steps of each that are in the weights
    versions, date, schedule; nonfinite: names of tensors that may hold NaN
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.plan.types import AXES, Mesh

MOST_DEEP = 48
"""Lists and objects within each other."""
LARGEST = 2**60
"""No count of steps, samples or bytes is larger."""


def check(about: Mapping[str, Any], world: int) -> None:
    """Raise ValueError for what is of another form than it is written in; what is left out is not missed here."""
    if not is_shallow(about):
        raise ValueError(f"it is nested more than {MOST_DEEP} deep")
    for name in ("plan", "data", "optimizer", "versions", "schedule"):
        _kind(about, name, dict, name)
    for name in ("date", "base"):
        _kind(about, name, str, name)
    if not _are_texts(about.get("nonfinite") or []):
        raise ValueError(f"nonfinite is {_short(about['nonfinite'])}")
    if not isinstance(used := about.get("used", []), list) or not all(is_whole(one) for one in used):
        raise ValueError(f"used is {_short(used)}")
    _plan(about.get("plan", {}), world)
    _data(about.get("data", {}))
    _optimizer(about.get("optimizer", {}))
    for name, version in about.get("versions", {}).items():
        if not isinstance(version, str):
            raise ValueError(f"the version of {name} is {version!r}")


def _kind(values: Mapping[str, Any], name: str, kind: type, where: str) -> None:
    if name in values and not isinstance(values[name], kind):
        raise ValueError(f"{where} is {_short(values[name])}")


def _plan(plan: Mapping[str, Any], world: int) -> None:
    for name, kind in (("mesh", dict), ("model", dict), ("optimizer", str), ("precision", str)):
        _kind(plan, name, kind, f"plan.{name}")
    _kind(plan.get("model", {}), "model", str, "plan.model.model")
    mesh = plan.get("mesh", {})
    for axis, size in mesh.items():
        if axis not in AXES or not is_whole(size, least=1):
            raise ValueError(f"plan.mesh has {axis} {_short(size)}")
    if mesh and Mesh(**mesh).world != world:
        raise ValueError(f"plan.mesh has {Mesh(**mesh).world} ranks, and {world} saved")


def _data(data: Mapping[str, Any]) -> None:
    for name in ("epoch", "position"):
        if name in data and not is_whole(data[name]):
            raise ValueError(f"data.{name} is {_short(data[name])}")
    if "seed" in data and not is_whole(data["seed"], least=-LARGEST * 8):
        raise ValueError(f"data.seed is {_short(data['seed'])}")
    _kind(data, "digest", str, "data.digest")


def _optimizer(optimizer: Mapping[str, Any]) -> None:
    _kind(optimizer, "groups", list, "optimizer.groups")
    _kind(optimizer, "state", dict, "optimizer.state")
    for number, group in enumerate(optimizer.get("groups", ())):
        if not isinstance(group, dict) or not isinstance(group.get("values"), dict):
            raise ValueError(f"optimizer.groups[{number}] is {_short(group)}")
        if not _are_texts(group.get("names", [])):
            raise ValueError(f"optimizer.groups[{number}].names is {_short(group['names'])}")
    for name, values in optimizer.get("state", {}).items():
        if not isinstance(values, dict):
            raise ValueError(f"optimizer.state of {_short(name)} is {_short(values)}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def is_whole(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """A whole number within bounds; true and false are none."""
    return type(value) is int and least <= value <= most


def whole(value: Any, what: str, least: int = 0, most: int = LARGEST) -> int:
    if not is_whole(value, least, most):
        raise ValueError(f"{what} is {_short(value)}")
    return int(value)


def is_shallow(value: Any) -> bool:
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if isinstance(one, dict | list):
            if depth > MOST_DEEP:
                return False
            left += [(part, depth + 1) for part in (one.values() if isinstance(one, dict) else one)]
    return True


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a name that stands twice would be read differently by others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, dict | list) else f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."
