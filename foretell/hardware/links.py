"""Links by name, and the links a device usually comes with: `catalog/links.toml`.

    network("4xIB200")     → 4 cards and the Link of one
    with_links(cluster)    → the cluster with its usual links, and a note where one was assumed

After '@' in a hardware string stands a network, `IB400` or `4xIB200`; a link inside the node,
`PCIe4x16`; or both, joined by '+'.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from foretell.errors import InternalError, UnknownName, UserError
from foretell.hardware.catalog import normalise
from foretell.hardware.types import INTER_KINDS, INTRA_KINDS, Cluster, Device, Link

_CARDS = re.compile(r"\s*([0-9]{1,4})\s*[xX*]\s*(.+)")
_ORDINARY = ("ethernet", "omnipath")
"""Networks of which a node has one card unless told otherwise."""
_BETWEEN_FABRICS = "Eth25"
"""What is assumed to join groups whose own networks differ in kind: every node has Ethernet."""


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The links a device comes with on a full node."""

    intra: Link
    host: Link | None
    network: Link
    cards: int
    """Network cards of a usual node (`Device.usual_per_node` devices)."""
    domain: int | None
    efa: tuple[int, str] | None
    source: str

    def cards_for(self, devices_per_node: int, device: Device, link: Link) -> int:
        """Network cards of a node with so many devices: as many for each as on a usual node, at least one."""
        if link.kind in _ORDINARY:
            return 1
        full = self.efa[0] if self.efa and self.efa[1] == link.name else self.cards
        return max(1, round(full * devices_per_node / device.usual_per_node))


def links() -> tuple[Link, ...]:
    """Every link known by name, those of a node first."""
    return tuple({link.name: link for link in _by_name().values()}.values())


_WIDE = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([kmg])bit(?:/([0-9]{1,5}(?:\.[0-9]{1,3})?)ms)?\s*", re.IGNORECASE)
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
WIDE_LATENCY = 30e-3
"""Seconds from one end of a wide-area link to the other where nobody said: a continent."""


def wide(name: str) -> Link | None:
    """A link over a wide area, said by what it carries and how long a message is under way: `50Mbit/100ms`."""
    match = _WIDE.fullmatch(name)
    if match is None or not float(match.group(1)) > 0:
        return None
    rate, scale, delay = match.groups()
    latency = float(delay) * 1e-3 if delay is not None else WIDE_LATENCY
    told = "as given" if delay is not None else f"assumed: {WIDE_LATENCY * 1e3:g} ms from one end to the other"
    return Link(
        name=f"{float(rate):g}{scale.upper() if scale.lower() != 'k' else 'k'}bit/{latency * 1e3:g}ms", kind="ethernet",
        bytes_per_second=float(rate) * _BITS[scale.lower()] / 8, latency_seconds=latency,
        sources={"bytes_per_second": "as given", "latency_seconds": told},
    )  # fmt: skip


def link(name: str) -> Link:
    """The link a name means; `UnknownName` with the candidates otherwise."""
    found = wide(name) or _by_name().get(normalise(name))
    if found is None:
        known = [item.name for item in links()]
        networks = ", ".join(f"{row['family']}{'/'.join(map(str, row['gigabits']))}" for row in _tables()["network"])
        error = UnknownName("link", name, known, remedy=f"networks are {networks}; or what a long way carries, such as 1Gbit/30ms")
        error.detail = f"known links: {', '.join(known)}"
        raise error
    return found


def names_a_link(text: str) -> bool:
    """Whether a word is meant as a link, known or not: `4xIB200`, `PCIe4x16`, `IB12345`."""
    if wide(text) is not None:
        return True
    match = _CARDS.fullmatch(text)
    family, *_ = re.split(r"[^a-z]", normalise(match.group(2) if match else text))
    return family != "" and family in {re.split(r"[^a-z]", name)[0] for name in _by_name()}


def network(text: str) -> tuple[int | None, Link]:
    """`4xIB200` → 4 cards of IB200; `IB200` → None (as many as usual) of IB200."""
    match = _CARDS.fullmatch(text)
    if match is None:
        return None, link(text.strip())
    found = link(match.group(2).strip())
    if found.kind not in INTER_KINDS:
        raise UserError(
            f"'{text.strip()}' counts a link that is not a network", f"write it like {found.name} or 4xIB200"
        )
    if int(match.group(1)) < 1:
        raise UserError(f"'{text.strip()}' has no network card", "write it like 4xIB200")
    return int(match.group(1)), found


def usual(device: Device, devices_per_node: int) -> Usual:
    """The links of a device, by its name, else by its backend."""
    row = _usual_row(device)
    name = row["intra"]
    if devices_per_node == 2:
        name = row.get("pair", name)
    elif devices_per_node > 8:
        name = row.get("intra_of_16", name)
    cards, card = network(row["network"])
    efa = network(row["efa"]) if "efa" in row else None
    return Usual(
        intra=link(name),
        host=link(row["host"]) if "host" in row else None,
        network=card,
        cards=cards or 1,
        domain=row.get("domain"),
        efa=(efa[0] or 1, efa[1].name) if efa else None,
        source=row["source"],
    )


def with_links(cluster: Cluster, asked: str | None = None, cards: int | None = None) -> Cluster:
    """The cluster with what was asked after '@' and, for the rest, the usual links of its device.

    `cards` is the number of network cards per node where something else than `asked` gives it.
    """
    device, per_node = cluster.device, cluster.devices_per_node
    known = usual(device, per_node)
    given = _asked(asked)
    intra = given["intra"][1] if "intra" in given else known.intra
    domain = _domain(known.domain, per_node) if "intra" not in given else None
    counted, inter = given.get("inter", (None, None))
    if cards is not None and counted not in (None, cards):
        raise UserError(f"'link' is '{asked}', but 'cards_per_node' is {cards}", "give the number of cards once")
    cards, notes = counted or cards, []
    if inter is None and cluster.nodes > 1:
        inter, cards = known.network, cards or known.cards_for(per_node, device, known.network)
        if domain is None or cluster.count > domain:
            notes.append(
                f"the network between nodes is assumed to be {cards}x{inter.name} per node; "
                f"write {cluster.nodes}x{per_node}x{device.name}@{cards}x{inter.name} or another to say it outright"
            )
    elif inter is not None and cards is None:
        cards = known.cards_for(per_node, device, inter)
        notes.append(cards_note(inter, cards))
    if domain is not None and cluster.nodes > 1:
        notes.append(f"{intra.name} is assumed to join {domain} devices across nodes, as in a full rack")
    return replace(
        cluster,
        link=asked,
        intra=intra,
        inter=inter,
        cards_per_node=cards or 1,
        devices_per_domain=domain,
        host_link=known.host,
        notes=(*cluster.notes, *notes),
    )


def joined(
    groups: tuple[Cluster, ...], asked: str | None = None, notes: tuple[str, ...] = (), **more: Any
) -> Cluster:
    """Unlike groups side by side, joined by what was asked, else by their own networks, else by Ethernet.

    A group of one node says nothing of a network: it gets the usual one of its device. What is assumed is a note.
    """
    found = []
    for group in groups:
        if group.inter is not None:
            found.append(group)
            continue
        known = usual(group.device, group.devices_per_node)
        cards = known.cards_for(group.devices_per_node, group.device, known.network)
        found.append(replace(group, inter=known.network, cards_per_node=cards))
    if asked is not None:
        count, inter = network(asked)
        if inter.kind not in INTER_KINDS:
            raise UserError(f"'{asked}' joins devices of one node, not groups", "write a network such as join=Eth25")
        return Cluster.side_by_side(tuple(found), inter, notes=notes, join_cards=count, **more)
    plain = Cluster.side_by_side(tuple(found), notes=notes, **more)
    kinds = {group.inter.kind for group in found if group.inter is not None}
    between = plain.inter or link(_BETWEEN_FABRICS)
    why = "" if len(kinds) == 1 else f": {' and '.join(sorted(kinds))} do not reach each other"
    if why or any(group.inter is None for group in groups):
        told = f"groups are assumed to be joined by {between.name}{why}; write ,join={between.name} or another to say it outright"
        notes = (*notes, told)
    return Cluster.side_by_side(tuple(found), between, notes=notes, **more)


def cards_note(inter: Link, cards: int) -> str:
    """What to print where nobody said how many network cards a node has."""
    plural = "card" if cards == 1 else "cards"
    return f"{inter.name} is taken as {cards} {plural} per node; write {cards}x{inter.name} to say it outright"


def _asked(text: str | None) -> dict[str, tuple[int | None, Link]]:
    """What stands after '@', by the place it is for."""
    found: dict[str, tuple[int | None, Link]] = {}
    for part in text.split("+") if text else ():
        count, item = network(part)
        place = "inter" if item.kind in INTER_KINDS else "intra"
        if place == "intra" and item.kind not in INTRA_KINDS:
            raise UserError(f"'{part.strip()}' joins a device and its host, not devices", "write a link such as @IB400")
        if place in found:
            what = "between nodes" if place == "inter" else "inside a node"
            raise UserError(f"'@{text}' gives the link {what} twice", "write one, such as @IB400 or @PCIe4x16+IB400")
        found[place] = (count, item)
    return found


def _domain(devices: int | None, per_node: int) -> int | None:
    """Whole nodes of a domain; None where it is no more than one node."""
    whole = (devices or 0) // per_node * per_node
    return whole if whole > per_node else None


def _usual_row(device: Device) -> dict[str, Any]:
    rows = _tables()["usual"]
    for row in rows:
        if device.name in row.get("devices", ()):
            return dict(row)
    for row in rows:
        if device.backend in row.get("backends", ()):
            return dict(row)
    raise InternalError(f"links.toml has no usual links for {device.name}")


@cache
def _tables() -> dict[str, Any]:
    text = (resources.files("foretell.hardware") / "catalog" / "links.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def _by_name() -> dict[str, Link]:
    found: dict[str, Link] = {}

    def add(item: Link, names: list[str]) -> None:
        for key in map(normalise, names):
            if key in found:
                raise InternalError(f"links.toml gives '{key}' to {found[key].name} and to {item.name}")
            found[key] = item

    for row in _tables()["link"]:
        add(_inside(row), [row["name"], *row.get("aliases", ())])
    for row in _tables()["network"]:
        for rate in row["gigabits"]:
            families = [row["family"], *row.get("aliases", ())]
            add(_card(row, rate), [f"{family}{rate}" for family in families])
    for alias, name in _tables()["network_aliases"].items():
        add(found[normalise(name)], [alias])
    return found


def _inside(row: dict[str, Any]) -> Link:
    sources = {"bytes_per_second": row["source"], "latency_seconds": row["latency_source"]}
    pair = row.get("pair_gb_per_s")
    if pair:
        sources["pair_bytes_per_second"] = row["source"]
    return Link(
        name=row["name"],
        kind=row["kind"],
        bytes_per_second=row["gb_per_s"] * 1e9,
        latency_seconds=row["latency_us"] * 1e-6,
        multicast=row.get("multicast", False),
        pair_bytes_per_second=pair * 1e9 if pair else None,
        sources=sources,
    )


def _card(row: dict[str, Any], gigabits: int) -> Link:
    source = f"nominal: {gigabits} Gb/s each way on one card"
    return Link(
        name=f"{row['family']}{gigabits}",
        kind=row["kind"],
        bytes_per_second=gigabits * 1e9 / 8,
        latency_seconds=row["latency_us"] * 1e-6,
        sources={"bytes_per_second": source, "latency_seconds": row["latency_source"]},
    )
