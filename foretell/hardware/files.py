"""Hardware files: a cluster in TOML or JSON that a person can write, read and share.

    schema_version = 1
    nodes = 2
    devices_per_node = 8
    device = "H100"          # a catalogue name, or a table with the fields of `Device`
    memory = "60GiB"         # optional cap
    link = "4xIB200"         # optional, as after '@'; or `inter`, `intra`, `host_link` as names or tables
    price_per_hour = 2.5     # optional, US dollars for one device
    nodes_per_leaf = 4       # optional: nodes to a switch, with oversubscription = 2.0 where it passes on half of what they send
    region = "FR"            # optional, for the carbon of its electricity; or carbon_g_per_kwh

Unlike groups side by side are `[[groups]]`, each with such fields; `inter` beside them joins them. What `save` writes, `load`
reads back as the same cluster. All that is missing or contradictory is told at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from foretell.errors import FileFormatError, UserError, near_names
from foretell.files import write_atomically
from foretell.hardware.catalog import find, meaning
from foretell.hardware.links import cards_note, link, network, usual, with_links
from foretell.hardware.links import joined as side_by_side
from foretell.hardware.types import Cluster, Device, Link, Tier
from foretell.units import parse_bytes

SCHEMA_VERSION = 1

_CLUSTER_FIELDS = (
    "schema_version", "count", "memory", "price_per_hour", *(item.name for item in fields(Cluster)),
)  # fmt: skip
_GROUPS_FIELDS = (
    "schema_version", "count", "memory", "notes", "inter", "groups", "matrix", "region", "carbon_g_per_kwh", "link",
    "join_cards",
)  # fmt: skip
_DERIVED = ("nodes", "devices_per_node", "cards_per_node", "device")
"""What a saved cluster of groups repeats from its groups."""
_MAY_BE_LEFT_OUT = ("compute_capability", "l2_bytes", "tdp_watts")

Kind = TypeVar("Kind", Device, Link, Tier)
Value = TypeVar("Value")


def load(path: str | Path) -> Cluster:
    """Read a hardware file; what is wrong with it is one error that names every field."""
    return from_dict(_read(Path(path)), str(path))


def save(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as JSON; `load` gives the same cluster back."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **cluster.to_dict()}, indent=2)
    write_atomically(path, text + "\n", parents=False)


def from_dict(data: dict[str, Any], path: str) -> Cluster:
    """A cluster from a file's fields; `path` is what errors call it."""
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise FileFormatError(f"{path}: schema_version is {version!r}", f"this foretell reads {SCHEMA_VERSION}")
    faults = _Faults(path)
    cluster = _cluster(data, faults)
    faults.report()
    assert cluster is not None
    return cluster


class _Faults:
    """What is wrong with a file, gathered so that one error tells all of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[str] = []
        self.remedies: list[str] = []
        self.detail = ""

    def add(self, problem: str, remedy: str = "") -> None:
        self.problems.append(problem)
        if remedy and remedy not in self.remedies:
            self.remedies.append(remedy)

    def attempt(self, work: Callable[[], Value], where: str = "") -> Value | None:
        """What `work` gives; what it refuses becomes a fault."""
        try:
            return work()
        except UserError as error:
            self.add(f"{where}: {error.problem}" if where else error.problem, error.remedy)
            self.detail = self.detail or error.detail
            return None

    def names(self, data: dict[str, Any], known: tuple[str, ...], prefix: str = "") -> None:
        for name in data:
            if name not in known:
                near = near_names(name, known)
                hint = (
                    f"instead of '{prefix}{name}', {' or '.join(prefix + item for item in near[:2])}?" if near else ""
                )
                self.add(f"unknown field '{prefix}{name}'", hint or f"remove '{prefix}{name}'")

    def report(self) -> None:
        if self.problems:
            raise UserError(f"{self.path}: {'; '.join(self.problems)}", "; ".join(self.remedies), self.detail)


def _cluster(data: dict[str, Any], faults: _Faults) -> Cluster | None:
    """The cluster, or None where something was at fault."""
    before = len(faults.problems)
    faults.names(data, _CLUSTER_FIELDS)
    cluster = _side_by_side(data, faults) if data.get("groups") else _equal_nodes(data, faults)
    if cluster is None:
        return None
    if data.get("count", cluster.count) != cluster.count:
        faults.add(
            f"'count' is {data['count']!r}, but there are {cluster.count} devices",
            "leave 'count' out or make them agree",
        )
    if "memory" in data and not isinstance(data["memory"], str):
        faults.add(f"'memory' is {data['memory']!r}", "give an amount with a unit, like '60GiB'")
    elif "memory" in data:
        whole = cluster
        cluster = faults.attempt(lambda: whole.capped(data["memory"], faults.path)) or whole
    return cluster if len(faults.problems) == before else None


def _equal_nodes(data: dict[str, Any], faults: _Faults) -> Cluster | None:
    device, notes = _device_of(data, faults)
    counts: dict[str, Any] = {name: _count(data.get(name, 1), name, faults) for name in ("nodes", "devices_per_node")}
    given: dict[str, Any] = {name: _link(data[name], name, faults) for name in ("intra", "host_link") if name in data}
    given |= {"tiers": _tiers(data, faults), **_common(data, faults)}
    given |= {name: data[name] for name in ("nodes_per_leaf", "oversubscription") if name in data}
    asked = _text(data.get("link"), "link", faults)
    cards, inter = _inter(data, faults)
    given_cards = cards if "inter" not in data else None
    if device is None:
        return None
    plain = Cluster(device=device, notes=notes, **counts)
    linked = faults.attempt(lambda: with_links(plain, asked, given_cards)) or plain
    if "inter" in data:
        if asked and inter and linked.inter and inter.name != linked.inter.name:
            faults.add(f"'link' is {asked!r}, but 'inter' is {inter.name}", "give one of 'link' and 'inter'")
        given |= {"inter": inter, "notes": notes}
        if inter is not None and cards is None:
            cards = usual(device, plain.devices_per_node).cards_for(plain.devices_per_node, device, inter)
            given["notes"] = (*notes, cards_note(inter, cards))
    given["cards_per_node"] = cards or linked.cards_per_node
    if "intra" in data or "devices_per_domain" in data:
        given["devices_per_domain"] = data.get("devices_per_domain")
    return faults.attempt(lambda: replace(linked, link=asked, **given))


def _side_by_side(data: dict[str, Any], faults: _Faults) -> Cluster | None:
    """Groups; what a saved file repeats of them must agree."""
    unsaid = {item.name: item.default for item in fields(Cluster)}
    extra = [
        name for name in data
        if name in _CLUSTER_FIELDS and name not in (*_GROUPS_FIELDS, *_DERIVED) and data[name] and data[name] != unsaid.get(name)
    ]  # fmt: skip
    if extra:
        faults.add(f"{_listed(extra)} beside 'groups'", "give them inside each group")
    rows = data["groups"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        faults.add(f"'groups' is {rows!r}", "give a list of tables")
        return None
    found = []
    for index, row in enumerate(rows):
        inner = _Faults(faults.path)
        found.append(_cluster(row, inner))
        for problem in inner.problems:
            faults.add(f"group {index + 1}: {problem}")
        faults.remedies += [remedy for remedy in inner.remedies if remedy not in faults.remedies]
    counted, inter = _inter({name: data[name] for name in ("inter",) if name in data}, faults)
    common = _common(data, faults)
    if counted is not None and data.get("join_cards", counted) != counted:
        faults.add(f"'inter' is {data['inter']!r}, but 'join_cards' is {data['join_cards']!r}", "give the number of cards once")
    common["join_cards"] = counted if counted is not None else data.get("join_cards")
    groups = tuple(group for group in found if group is not None)
    if len(groups) != len(rows):
        return None
    notes = tuple(_strings(data.get("notes", []), "notes", faults))
    if "inter" in data:
        joined = faults.attempt(lambda: Cluster.side_by_side(groups, inter, notes=notes, **common))
    else:
        joined = faults.attempt(lambda: side_by_side(groups, notes=notes, **common))
    if joined is None:
        return None
    if "inter" in data and inter is None:
        joined = replace(joined, inter=None)
    for name in _DERIVED[:3]:
        if name in data and data[name] != getattr(joined, name):
            faults.add(
                f"'{name}' is {data[name]!r}, but the groups give {getattr(joined, name)}", f"leave '{name}' out"
            )
    if isinstance(data.get("device"), dict):
        device = _built(Device, data["device"], "device", faults)
        joined = replace(joined, device=device) if device else joined
    return replace(joined, link=_text(data.get("link"), "link", faults))


def _common(data: dict[str, Any], faults: _Faults) -> dict[str, Any]:
    """The fields that both kinds of cluster have."""
    from foretell.hardware.prices import carbon_g_per_kwh

    region = _text(data.get("region"), "region", faults)
    if region is not None:
        faults.attempt(lambda: carbon_g_per_kwh(region))
    carbon = data.get("carbon_g_per_kwh")
    matrix = data.get("matrix")
    if matrix is not None:
        if not isinstance(matrix, list) or not all(isinstance(row, list) for row in matrix):
            faults.add("'matrix' is not a list of rows", "give one row and one column per rank")
            matrix = None
        else:
            matrix = tuple(tuple(row) for row in matrix)
    return {"region": region, "carbon_g_per_kwh": carbon, "matrix": matrix}


def _inter(data: dict[str, Any], faults: _Faults) -> tuple[int | None, Link | None]:
    """The network between nodes and its cards, from `inter` and `cards_per_node`."""
    given = data.get("cards_per_node")
    cards = _count(given, "cards_per_node", faults) if given is not None else None
    value = data.get("inter")
    if not isinstance(value, str):
        return cards, _link(value, "inter", faults)
    counted = faults.attempt(lambda: network(value), "inter")
    if counted is None:
        return cards, None
    if cards is not None and counted[0] is not None and counted[0] != cards:
        faults.add(f"'inter' is {value!r}, but 'cards_per_node' is {cards}", "give the number of cards once")
    return counted[0] or cards, counted[1]


def _link(value: object, name: str, faults: _Faults) -> Link | None:
    """A link as its name or a table of its figures."""
    if value is None:
        return None
    if isinstance(value, str):
        return faults.attempt(lambda: link(value), name)
    if isinstance(value, dict):
        return _built(Link, value, name, faults)
    faults.add(f"'{name}' is {value!r}", "give a name such as 'NVLink4' or a table of figures")
    return None


def _tiers(data: dict[str, Any], faults: _Faults) -> tuple[Tier, ...]:
    rows = data.get("tiers", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        faults.add(f"'tiers' is {rows!r}", "give a list of tables with name, bytes and rates")
        return ()
    found = []
    for row in rows:
        amount = row.get("bytes")
        if isinstance(amount, str):
            row = {**row, "bytes": faults.attempt(partial(parse_bytes, amount), "tiers") or 1}
        found.append(_built(Tier, row, "tiers", faults))
    return tuple(tier for tier in found if tier is not None)


def _device_of(data: dict[str, Any], faults: _Faults) -> tuple[Device | None, tuple[str, ...]]:
    """The device, by name or by its figures, with the price the file gives; and the notes."""
    notes = tuple(_strings(data.get("notes", []), "notes", faults))
    device, remedy = data.get("device"), "give a name such as 'H100' or a table of figures"
    found: Device | None = None
    if "device" not in data:
        faults.add("the field 'device' is missing", remedy)
    elif isinstance(device, str):
        found = faults.attempt(lambda: find(device))
        notes = notes or (meaning(device, found) if found else ())
    elif isinstance(device, dict):
        found = _built(Device, device, "device", faults)
    else:
        faults.add(f"'device' is {device!r}", remedy)
    price = data.get("price_per_hour")
    if price is None or found is None:
        return found, notes
    if found.price_per_hour not in (None, price):
        faults.add(
            f"'price_per_hour' is {price!r}, but 'device.price_per_hour' is {found.price_per_hour}", "give one of them"
        )
    sources = {**found.sources, "price_per_hour": f"given in {faults.path}"}
    return faults.attempt(lambda: replace(found, price_per_hour=price, sources=sources)), notes


def _built(kind: type[Kind], data: dict[str, Any], where: str, faults: _Faults) -> Kind | None:
    """A device, link or tier out of its table; every missing field is named at once."""
    before = len(faults.problems)
    required = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    faults.names(data, tuple(item.name for item in fields(kind)), f"{where}.")
    values = {**dict.fromkeys(_MAY_BE_LEFT_OUT), **data} if kind is Device else dict(data)
    if kind is Device and "memory_bytes" in data:
        values.setdefault("memory_nominal_bytes", data["memory_bytes"])
    missing = [f"{where}.{name}" for name in required if name not in values]
    if missing:
        plural = "fields" if len(missing) > 1 else "field"
        verb = "are" if len(missing) > 1 else "is"
        faults.add(
            f"the {plural} {_listed(missing)} {verb} missing", f"foretell.hardware.{kind.__name__} says what they mean"
        )
    for name in ("name", "vendor", "backend", "kind"):
        if name in values and (not isinstance(values[name], str) or not values[name].strip()):
            faults.add(f"'{where}.{name}' is {values[name]!r}", f"give a text for '{name}'")
    for name, kind_of in (("peak_flops_per_second", int | float), ("sources", str)):
        table = values.get(name, {})
        if not isinstance(table, dict):
            faults.add(f"'{where}.{name}' is {table!r}", f"give a table for '{name}'")
        elif not all(isinstance(item, kind_of) and not isinstance(item, bool) for item in table.values()):
            faults.add(f"'{where}.{name}' holds other values than {'texts' if name == 'sources' else 'numbers'}", f"correct '{name}'")
    if not isinstance(values.get("verified", False), bool):
        faults.add(f"'{where}.verified' is {values['verified']!r}", "give true or false")
    capability = values.get("compute_capability")
    if capability is not None:
        if not isinstance(capability, list) or [type(part) for part in capability] != [int, int]:
            faults.add(f"'{where}.compute_capability' is {capability!r}", "give two numbers, like [9, 0]")
        else:
            values["compute_capability"] = (capability[0], capability[1])
    if len(faults.problems) > before:
        return None
    if not values.get("sources"):
        given = (name for name in data if name not in ("sources", "name", "vendor", "backend", "kind"))
        values["sources"] = dict.fromkeys(given, f"given in {faults.path}")
    return faults.attempt(lambda: kind(**values))


def _count(value: object, name: str, faults: _Faults) -> int:
    if type(value) is int and 1 <= value < 10**8:
        return value
    faults.add(f"'{name}' is {value!r}", "give a whole number of at least 1")
    return 1


def _text(value: object, name: str, faults: _Faults) -> str | None:
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    faults.add(f"'{name}' is {value!r}", f"give a text for '{name}', or leave it out")
    return None


def _strings(value: object, name: str, faults: _Faults) -> list[str]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    faults.add(f"'{name}' is {value!r}", "give a list of sentences")
    return []


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


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
