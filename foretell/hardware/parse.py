"""What a user writes after `--on`, as a `Cluster`.

    H100            one              H100:8, 8xH100   eight on one node
    H100:16         two nodes of 8   2x8xH100-SXM     the same, said outright
    2x8xH100@IB400  with a network   2x8xA100@4xIB200      with four cards a node
    2x1xCPU@50Mbit/100ms  joined over a wide area: what the link carries, and seconds from end to end
    16x8xH100,leaf=4,oversubscription=2   four nodes to a switch that passes on half of what they send
    8xA100@PCIe4x16 linked so inside a node      H100:1,memory=60GiB   with less memory
    2x8xH100+1x8xA100    unlike nodes side by side; ,join=Eth25 says what joins the two groups
    auto            this machine     path/to/cluster.toml (or .json)

Every assumption made on the way is a sentence in `Cluster.notes`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from foretell.errors import UnknownName, UserError
from foretell.hardware.catalog import find, meaning
from foretell.hardware.files import load
from foretell.hardware.links import joined, names_a_link, with_links
from foretell.hardware.this_machine import this_machine
from foretell.hardware.types import Cluster, Device

FORMS = "write it like H100, H100:8, 2x8xH100, H100:1,memory=60GiB, auto or cluster.toml"
_LEADING_COUNT = re.compile(r"\s*([+-]?[0-9][0-9.]*)\s*[xX*]\s*")


def parse(text: str, *, apple: bool = False) -> Cluster:
    """A hardware string as a cluster; anything wrong is one `UserError`. With `apple`, 'auto' on a Mac is the GPU of its chip."""
    if text.strip().casefold().endswith((".toml", ".json")):
        return load(text.strip())
    asked = " ".join(text.split())
    head, *options = (part.strip() for part in asked.split(","))
    if head.casefold() == "auto":
        return _with_options(this_machine(apple=apple), options, asked)
    groups = _groups(head)
    join = _join(options, asked, len(groups))
    parts = tuple(_named(group, asked) for group in groups)
    return _with_options(parts[0] if len(parts) == 1 else joined(parts, join), options, asked)


def _groups(head: str) -> list[str]:
    """What stands between '+', but for links, which belong to the '@' before them."""
    found: list[str] = []
    for piece in head.split("+"):
        if found and "@" in found[-1] and (not piece.strip() or names_a_link(piece.strip())):
            found[-1] += f"+{piece}"
        else:
            found.append(piece)
    return [piece.strip() for piece in found]


def _join(options: list[str], asked: str, groups: int) -> str | None:
    """What joins groups, taken out of the options."""
    given = [option for option in options if option.partition("=")[0].strip().casefold() == "join"]
    for option in given:
        options.remove(option)
    values = [option.partition("=")[2].strip() for option in given]
    if groups == 1 and given:
        raise UserError(
            f"'{asked}' says what joins groups and has one", "write the network of equal nodes after '@', like 2x8xH100@IB400"
        )
    if len(values) > 1 or "" in values:
        found = "twice" if len(values) > 1 else "without a link"
        raise UserError(f"'{asked}' has join {found}", "write it once, like 8xH100+8xA100,join=Eth25")
    return values[0] if values else None


def _named(head: str, asked: str) -> Cluster:
    body, at, link = (part.strip() for part in head.partition("@"))
    if at and not link:
        raise UserError(f"'{asked}' names no link after '@'", "write a link such as 2x8xH100@IB400, or leave '@' out")
    counts = []
    while match := _LEADING_COUNT.match(body):
        counts.append(_positive(match.group(1), asked))
        body = body[match.end() :]
    name, colon, after = (part.strip() for part in body.partition(":"))
    if not name:
        raise UserError(f"'{asked}' names no device", FORMS)
    if colon and counts:
        raise UserError(f"'{asked}' gives the number of devices twice", "write either 8xH100 or H100:8")
    if len(counts) > 2:
        raise UserError(f"'{asked}' has {len(counts)} counts", "write NODESxDEVICESxNAME, such as 2x8xH100")
    if name.casefold() == "auto":
        raise UserError(f"'{asked}' counts or links 'auto'", "write 'auto' for this machine as it is, or name a device")
    device = find(name)
    if len(counts) == 2:
        nodes, per_node, split = counts[0], counts[1], ""
    else:
        nodes, per_node, split = _layout(_positive(after, asked) if colon else counts[0] if counts else 1, device)
    notes = meaning(name, device) + ((split,) if split else ())
    return with_links(Cluster(device=device, nodes=nodes, devices_per_node=per_node, notes=notes), link or None)


def _layout(count: int, device: Device) -> tuple[int, int, str]:
    """Equal nodes, as full as usual for this device, and the sentence that says so."""
    if count <= device.usual_per_node:
        return 1, count, ""
    per_node = next(size for size in range(device.usual_per_node, 0, -1) if count % size == 0)
    nodes = count // per_node
    hint = f"write {nodes}x{per_node}x{device.name} or another split to say it outright"
    return nodes, per_node, f"{count} devices are taken as {nodes} nodes of {per_node}; {hint}"


def _positive(text: str, asked: str) -> int:
    if not re.fullmatch(r"\+?[0-9]{1,7}", text) or int(text) < 1:
        found = f"'{text}'" if text else "nothing"
        raise UserError(f"invalid device count {found} in '{asked}'", "give a whole number from 1 to 9999999")
    return int(text)


def _with_options(cluster: Cluster, options: list[str], asked: str) -> Cluster:
    seen: set[str] = set()
    leaf: dict[str, Any] = {}
    for option in options:
        key, equals, value = (part.strip() for part in option.partition("="))
        key = {"mem": "memory"}.get(key.casefold(), key.casefold())
        if key in _LEAF:
            if key in seen:
                raise UserError(f"'{asked}' has {key} twice", f"write it once, like 16x8xH100,{key}=4")
            leaf[_LEAF[key]] = _number(key, value, asked)
            seen.add(key)
            continue
        if key != "memory":
            known = "memory=60GiB, join=Eth25, leaf=4 and oversubscription=2"
            raise UnknownName("option", option, ["memory", "join", *_LEAF], remedy=f"in '{asked}', options are {known}")
        if not equals or not value or key in seen:
            found = "twice" if key in seen else "without an amount"
            raise UserError(f"'{asked}' has memory {found}", "write it once, like H100:1,memory=60GiB")
        seen.add(key)
        cluster = cluster.capped(value, asked)
    return replace(cluster, **leaf) if leaf else cluster


_LEAF = {"leaf": "nodes_per_leaf", "oversubscription": "oversubscription"}


def _number(key: str, value: str, asked: str) -> float:
    """Nodes of a leaf, or how often its switch is oversubscribed."""
    if key == "leaf" and re.fullmatch(r"[0-9]{1,6}", value) and int(value) > 0:
        return int(value)
    if key != "leaf" and re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?", value) and float(value) >= 1:
        return float(value)
    like = "a whole number of nodes, like leaf=4" if key == "leaf" else "a number from 1, like oversubscription=2"
    raise UserError(f"'{asked}' has {key}={value or 'nothing'}", f"write {like}")
