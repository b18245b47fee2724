"""Hardware files: a cluster in TOML or JSON that a person can write, read and share.

    schema_version = 1
    nodes = 2
    devices_per_node = 8
    device = "H100"          # a catalogue name, or a table with the fields of `Device`
    memory = "60GiB"         # optional cap

What `save` writes, `load` reads back as the same cluster.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from foretell.errors import FileFormatError, UnknownName, UserError
from foretell.hardware.catalog import find, meaning
from foretell.hardware.types import Cluster, Device

SCHEMA_VERSION = 1

_CLUSTER_FIELDS = ("schema_version", "nodes", "devices_per_node", "count", "link", "notes", "device", "memory")
_DEVICE_FIELDS = tuple(item.name for item in fields(Device))
_DEVICE_REQUIRED = tuple(
    item.name for item in fields(Device) if item.default is MISSING and item.default_factory is MISSING
)


def load(path: str | Path) -> Cluster:
    """Read a hardware file; each fault is one error that names the field."""
    return from_dict(_read(Path(path)), str(path))


def from_dict(data: dict[str, Any], path: str) -> Cluster:
    """A cluster from a file's fields; `path` is what errors call it."""
    _check_names(data, _CLUSTER_FIELDS, path)
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise FileFormatError(f"{path}: schema_version is {version!r}", f"this foretell reads {SCHEMA_VERSION}")
    if "device" not in data:
        raise UserError(f"{path}: the field 'device' is missing", "give a name such as 'H100' or a table of figures")
    device, notes = data["device"], tuple(_strings(data.get("notes", []), "notes", path))
    if isinstance(device, str):
        found = find(device)
        notes = notes or meaning(device, found)
    elif isinstance(device, dict):
        found = _device(device, path)
    else:
        raise UserError(f"{path}: 'device' is {device!r}", "give a name such as 'H100' or a table of figures")
    counts = {name: _count(data.get(name, 1), name, path) for name in ("nodes", "devices_per_node")}
    cluster = Cluster(device=found, link=_link(data.get("link"), path), notes=notes, **counts)
    if data.get("count", cluster.count) != cluster.count:
        raise UserError(
            f"{path}: 'count' is {data['count']!r}, but nodes x devices_per_node is {cluster.count}",
            "leave 'count' out or make them agree",
        )
    if "memory" not in data:
        return cluster
    if not isinstance(data["memory"], str):
        raise UserError(f"{path}: 'memory' is {data['memory']!r}", "give an amount with a unit, like '60GiB'")
    return cluster.capped(data["memory"], path)


def save(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as JSON; `load` gives the same cluster back."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **cluster.to_dict()}, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the hardware file '{path}': {error.strerror}", "check the path, or name a device such as H100"
        ) from None
    except UnicodeDecodeError:
        raise FileFormatError(f"'{path}' is not a text file", "a hardware file is TOML or JSON in UTF-8") from None
    kind = "TOML" if path.suffix.casefold() == ".toml" else "JSON"
    try:
        data = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0] if str(error) else "it cannot be read"
        raise FileFormatError(f"'{path}' is not {kind}: {problem}", "correct it or write it anew") from None
    if not isinstance(data, dict):
        raise FileFormatError(f"'{path}' holds a {type(data).__name__}", "a hardware file is a table of fields")
    return data


def _device(data: dict[str, Any], path: str) -> Device:
    _check_names(data, _DEVICE_FIELDS, path, prefix="device.")
    for name in _DEVICE_REQUIRED:
        if name not in data and not (name in ("compute_capability", "l2_bytes", "tdp_watts") or _given(name, data)):
            raise UserError(
                f"{path}: the field 'device.{name}' is missing", "add it; foretell.hardware.Device says what it means"
            )
    values = {"compute_capability": None, "l2_bytes": None, "tdp_watts": None, **data}
    values.setdefault("memory_nominal_bytes", values["memory_bytes"])
    for name in ("name", "vendor", "backend"):
        if not isinstance(values[name], str) or not values[name].strip():
            raise UserError(f"{path}: 'device.{name}' is {values[name]!r}", "give a text")
    for name in ("peak_flops_per_second", "sources"):
        if not isinstance(values.get(name, {}), dict):
            raise UserError(f"{path}: 'device.{name}' is {values[name]!r}", "give a table")
    if not isinstance(values.get("verified", False), bool):
        raise UserError(f"{path}: 'device.verified' is {values['verified']!r}", "give true or false")
    capability = values["compute_capability"]
    if capability is not None:
        if not isinstance(capability, list) or [type(part) for part in capability] != [int, int]:
            raise UserError(f"{path}: 'device.compute_capability' is {capability!r}", "give two numbers, like [9, 0]")
        values["compute_capability"] = (capability[0], capability[1])
    try:
        device = Device(**values)
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from None
    given = {name: f"given in {path}" for name in data if name not in ("sources", "name", "vendor", "backend")}
    return device if device.sources else replace(device, sources=given)


def _given(name: str, data: dict[str, Any]) -> bool:
    return name == "memory_nominal_bytes" and "memory_bytes" in data


def _check_names(data: dict[str, Any], known: tuple[str, ...], path: str, prefix: str = "") -> None:
    for name in data:
        if name not in known:
            raise UnknownName(f"field in {path}", prefix + name, [prefix + item for item in known], "or remove it")


def _count(value: object, name: str, path: str) -> int:
    if type(value) is not int or value < 1:
        raise UserError(f"{path}: '{name}' is {value!r}", "give a whole number of at least 1")
    return value


def _link(value: object, path: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: 'link' is {value!r}", "give a text such as 'IB400', or leave it out")
    return value


def _strings(value: object, name: str, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"{path}: '{name}' is {value!r}", "give a list of sentences")
    return value
