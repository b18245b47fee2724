"""Links: published rates of real machines, what stands after '@', who is joined by what, and files that keep it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import UnknownName, UserError
from foretell.hardware import Cluster, Device, Link, Tier, devices, find, link, load, parse, save
from foretell.hardware.links import links, network, usual
from foretell.hardware.types import HOST_KINDS, INTER_KINDS, INTRA_KINDS
from foretell.units import GIB

PUBLISHED = [
    # text, both-way GB/s between devices as the vendor prints it, Gb/s of a node's network, who prints it
    ("2x8xV100", 300, 4 * 100, "DGX-1 with V100: 4 EDR cards"),
    ("2x16xV100-32GB", 300, 8 * 100, "DGX-2: 8 EDR cards"),
    ("2x8xA100", 600, 8 * 200, "DGX A100: 8 HDR cards for the GPUs"),
    ("2x8xA100-40GB", 600, 8 * 200, "DGX A100"),
    ("2x8xH100", 900, 8 * 400, "DGX H100: 8 NDR cards"),
    ("2x8xH200", 900, 8 * 400, "DGX H200: 8 NDR cards"),
    ("2x8xB200", 1800, 8 * 400, "DGX B200: 8 NDR cards"),
    ("2x8xB300", 1800, 8 * 800, "DGX B300: 8 XDR cards"),
    ("36x4xGB200", 1800, 4 * 400, "GB200 NVL72: 4 cards in each of 18 trays"),
    ("36x4xGB300", 1800, 4 * 800, "GB300 NVL72"),
    ("2x8xMI300X", 896, 8 * 400, "eight MI300X: 7 links of 128 GB/s each"),
    ("2x8xMI355X", 1075, 8 * 400, "eight MI355X: 7 links of 153.6 GB/s each"),
]


@pytest.mark.parametrize(("text", "both_ways", "gigabits", "who"), PUBLISHED, ids=lambda value: str(value))
def test_the_usual_links_are_those_of_the_published_machines(
    text: str, both_ways: float, gigabits: float, who: str
) -> None:
    cluster = parse(text)
    assert cluster.intra and cluster.inter
    assert 2 * cluster.intra.bytes_per_second / 1e9 == pytest.approx(both_ways, rel=1e-3), who
    node = cluster.cards_per_node * cluster.inter.bytes_per_second
    assert node * 8 / 1e9 == gigabits, who
    assert cluster.per_device_network_bytes_per_second == node / cluster.devices_per_node


@pytest.mark.parametrize(("name", "transfers"), [("PCIe3x16", 8e9), ("PCIe4x16", 16e9), ("PCIe5x16", 32e9)])
def test_pcie_is_lanes_times_transfers_times_coding(name: str, transfers: float) -> None:
    assert link(name).bytes_per_second == pytest.approx(transfers * 16 * 128 / 130 / 8, rel=1e-4)


def test_links_of_one_kind_get_faster_with_the_generation() -> None:
    for family in (["NVLink2", "NVLink3", "NVLink4", "NVLink5"], ["PCIe3", "PCIe4", "PCIe5", "PCIe6"]):
        rates = [link(name).bytes_per_second for name in family]
        assert all(later > earlier for earlier, later in pairwise(rates))


def test_only_switches_that_can_add_and_copy_say_so() -> None:
    assert {item.name for item in links() if item.multicast} == {"NVLink4", "NVLink5"}


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_has_links_with_sources(device: Device) -> None:
    known = usual(device, device.usual_per_node)
    assert known.source and known.intra.kind in INTRA_KINDS and known.network.kind in INTER_KINDS
    assert (known.host is None) == (device.backend in ("cpu", "mps")), "those share one memory with their host"
    for item in (known.intra, known.network, *([known.host] if known.host else [])):
        assert item.sources["bytes_per_second"] and item.sources["latency_seconds"]
        assert 1e8 < item.bytes_per_second < 1e12 and 1e-7 < item.latency_seconds < 1e-4
    if known.host:
        assert known.host.kind in HOST_KINDS
        assert known.host.bytes_per_second < device.memory_bandwidth_bytes_per_second / 4
    if "PCIe" in device.name:
        assert known.intra.kind == "pcie"
    if "SXM" in device.name:
        assert known.intra.kind == "nvlink"


def test_every_usual_row_names_devices_of_the_catalogue() -> None:
    from foretell.hardware.links import _tables

    named = [name for row in _tables()["usual"] for name in row.get("devices", ())]
    assert len(named) == len(set(named))
    assert all(find(name).name == name for name in named)
    assert {device.name for device in devices() if device.backend in ("cuda", "rocm")} == set(named)


# ---------------------------------------------------------------- what stands after '@'


@pytest.mark.parametrize(
    ("text", "name", "cards", "gigabytes_per_device"),
    [
        ("2x8xH100@IB400", "IB400", 8, 50),
        ("2x8xH100@8xIB400", "IB400", 8, 50),
        ("2x8xA100@4xIB200", "IB200", 4, 12.5),
        ("2x8xA100@4xHDR", "IB200", 4, 12.5),
        ("2x8xA100@1600", None, 0, 0),
        ("2x8xA100@8xRoCE200", "RoCE200", 8, 25),
        ("2x8xA100@roce 200", "RoCE200", 8, 25),
        ("2x8xA100@EFA100", "EFA100", 4, 6.25),  # p4d: 400 Gb/s
        ("2x8xH100@EFA100", "EFA100", 32, 50),  # p5: 3200 Gb/s
        ("2x4xV100-32GB@4xOPA100", "OPA100", 4, 12.5),
        ("2x8xMI250X@Slingshot200", "Slingshot200", 4, 12.5),
        ("4x1x4090@Eth10", "Eth10", 1, 1.25),
        ("2x4xH100@IB400", "IB400", 4, 50),
        ("2x8xL4", "Eth100", 1, 12.5 / 8),
        ("2x8xT4@Ethernet25", "Eth25", 1, 25 / 64),
    ],
)
def test_a_network_after_the_at_sign(text: str, name: str | None, cards: int, gigabytes_per_device: float) -> None:
    if name is None:
        with pytest.raises(UnknownName):
            parse(text)
        return
    cluster = parse(text)
    assert cluster.inter and (cluster.inter.name, cluster.cards_per_node) == (name, cards)
    assert cluster.per_device_network_bytes_per_second == pytest.approx(gigabytes_per_device * 1e9)


def test_a_link_inside_the_node_may_be_said_too() -> None:
    both = parse("2x8xA100@PCIe4x16+2xIB100")
    assert (
        both.intra
        and both.inter
        and (both.intra.name, both.inter.name, both.cards_per_node) == ("PCIe4x16", "IB100", 2)
    )
    assert both.link == "PCIe4x16+2xIB100"
    bridged = parse("2xRTX-3090@NVLink3x4")
    assert bridged.intra and bridged.intra.bytes_per_second == 56.25e9 and bridged.inter is None


def test_two_bridged_cards_are_faster_than_eight() -> None:
    two, eight = parse("H100-NVL:2").intra, parse("H100-NVL:8").intra
    assert two and eight and (two.kind, eight.kind) == ("nvlink", "pcie")


def test_a_mesh_without_a_switch_is_slower_between_two() -> None:
    mesh, switch = parse("8xMI300X").intra, parse("8xH100").intra
    assert mesh and switch
    assert mesh.between_two * 7 == mesh.bytes_per_second
    assert switch.between_two == switch.bytes_per_second


def test_what_is_assumed_is_said() -> None:
    assert any("assumed to be 8xIB400" in note for note in parse("2x8xH100").notes)
    assert any("8 cards per node" in note for note in parse("2x8xH100@IB400").notes)
    for quiet in ("2x8xH100@8xIB400", "8xH100", "H100"):
        assert not any("assumed" in note or "card" in note for note in parse(quiet).notes)
    rack = parse("72xGB200").notes
    assert any("join 72 devices" in note for note in rack)
    assert not any("network" in note for note in rack), "inside a rack the network is not used"
    assert any("network" in note for note in parse("144xGB200").notes)


def test_the_hint_of_a_note_says_the_same_outright() -> None:
    note = next(note for note in parse("2x8xH100").notes if "outright" in note)
    outright = parse(note.split("write ")[1].split(" ")[0])
    assumed = parse("2x8xH100")
    assert replace(outright, notes=(), link=None) == replace(assumed, notes=(), link=None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x8xH100@IB4000", "IB400"), ("2x8xH100@infinibandd400", "networks are"), ("2x8xH100@NVLink", "NVLink4"),
        ("2x8xH100@fast", "Slingshot200"), ("2x8xH100@IB", "IB400"),
    ],
)  # fmt: skip
def test_an_unknown_link_lists_candidates(text: str, said: str) -> None:
    with pytest.raises(UnknownName) as caught:
        parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert "NVLink5" in caught.value.detail and "Eth10" in caught.value.detail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2x8xH100@IB400+IB200", "twice"), ("2x8xH100@NVLink4+PCIe5", "twice"), ("2x8xH100@0xIB400", "no network card"),
        ("2x8xH100@4xNVLink4", "not a network"), ("8xH100@NVLink-C2C", "host"), ("2x8xH100@IB400+", "unknown link ''"),
    ],
)  # fmt: skip
def test_a_link_that_makes_no_sense_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value) and caught.value.remedy


def test_every_network_name_parses_with_and_without_a_count() -> None:
    for item in links():
        if item.kind in INTER_KINDS:
            assert network(item.name) == (None, item)
            assert network(f"3x{item.name.lower()}") == (3, item)


# ---------------------------------------------------------------- who is joined by what


def naive_level(ranks: list[int], size: int) -> str:
    if len(set(ranks)) < 2:
        return "device"
    return "intra" if all(first // size == second // size for first in ranks for second in ranks) else "inter"


@pytest.mark.parametrize(("text", "size"), [("4x8xH100", 8), ("5x6xA100", 6), ("36x4xGB200", 72), ("3x1xL4", 1)])
def test_levels_agree_with_brute_force(text: str, size: int) -> None:
    cluster, draw = parse(text), random.Random(0)
    for _ in range(200):
        start = draw.randrange(cluster.count)
        width = draw.choice([2, 4, 8, 40])
        near = list(range(start, min(cluster.count, start + width)))
        ranks = draw.sample(near, draw.randint(1, len(near)))
        assert cluster.level(ranks) == naive_level(ranks, size)
        domains, most = cluster.spread(ranks)
        places = [rank // size for rank in ranks]
        assert (domains, most) == (len(set(places)), max(map(places.count, places)))


def test_ranks_outside_are_refused() -> None:
    with pytest.raises(UserError, match="rank 16"):
        parse("2x8xH100").level([0, 16])


def unlike() -> Cluster:
    return Cluster.side_by_side((parse("2x8xH100@8xIB400"), parse("1x4xA100-40GB@2xIB200")))


def test_unlike_groups_side_by_side() -> None:
    cluster = unlike()
    assert (cluster.count, cluster.nodes, cluster.device.name) == (20, 3, "A100-SXM-40GB")
    assert cluster.level(range(8)) == "intra" and cluster.level([7, 8]) == "inter"
    assert cluster.level(range(16, 20)) == "intra" and cluster.level([15, 16]) == "inter"
    links = [link for group in cluster.groups for link in (group.intra, group.inter)]
    assert [link.name for link in links if link] == ["NVLink4", "IB400", "NVLink3", "IB200"]
    # between groups at the slower group's rate; the island of A100 has two cards for four devices
    assert cluster.per_device_network_bytes_per_second == 2 * 25e9 / 4
    capped = cluster.capped("20GiB", "here")
    assert {group.device.memory_bytes for group in capped.groups} == {20 * GIB}


def test_memory_levels() -> None:
    cluster = parse("H100")
    hbm = cluster.tier("hbm")
    assert hbm and (hbm.bytes, hbm.read_bytes_per_second) == (cluster.device.memory_bytes, 3.35e12)
    assert cluster.tier("host") is None and cluster.tier("disk") is None
    host = Tier(name="host", bytes=2 * 1024 * GIB, read_bytes_per_second=4e11, write_bytes_per_second=4e11)
    assert replace(cluster, tiers=(host,)).tier("host") == host


# ---------------------------------------------------------------- files


def full() -> Cluster:
    plain = parse("2x2xH200@2xIB400")
    host = Tier(
        name="host", bytes=10**12, read_bytes_per_second=3e11, write_bytes_per_second=2e11, sources={"bytes": "me"}
    )
    rates = tuple(tuple(0.0 if row == column else 1e9 * (1 + row + column) for column in range(4)) for row in range(4))
    return replace(plain, tiers=(host,), matrix=rates, region="FR", carbon_g_per_kwh=40.0)


@pytest.mark.parametrize("cluster", [full(), unlike(), parse("144xGB200"), parse("8xA100@PCIe4"), parse("CPU")])
def test_links_survive_a_file(cluster: Cluster, tmp_path: Path) -> None:
    save(cluster, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == cluster


def test_a_file_from_before_links_still_reads(tmp_path: Path) -> None:
    device = find("A100").to_dict()
    del device["launch_overhead_seconds"], device["price_per_hour"]
    old = {
        "schema_version": 1,
        "nodes": 2,
        "devices_per_node": 8,
        "link": None,
        "notes": ["A100 means"],
        "device": device,
    }
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    cluster = load(path)
    assert cluster.intra == link("NVLink3") and cluster.inter == link("IB200") and cluster.cards_per_node == 8
    assert any("assumed to be 8xIB200" in note for note in cluster.notes)


def test_a_file_may_name_links_or_give_their_figures(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'device = "H100"\nnodes = 2\ndevices_per_node = 4\nintra = "NVLink4"\ninter = "2xRoCE100"\nregion = "france"\n'
        "[host_link]\nname = 'mine'\nkind = 'pcie'\nbytes_per_second = 5e10\nlatency_seconds = 3e-6\n"
        "[[tiers]]\nname = 'host'\nbytes = '512GiB'\nread_bytes_per_second = 1e11\nwrite_bytes_per_second = 1e11\n"
    )
    cluster = load(path)
    assert cluster.per_device_network_bytes_per_second == 2 * 12.5e9 / 4
    assert cluster.host_link and cluster.host_link.bytes_per_second == 5e10
    assert str(path) in cluster.host_link.sources["bytes_per_second"]
    host = cluster.tier("host")
    assert host and host.bytes == 512 * GIB


def test_cards_in_a_file_leave_nothing_to_assume(tmp_path: Path) -> None:
    path = tmp_path / "cards.toml"
    path.write_text('device = "H100-SXM-80GB"\nnodes = 2\ndevices_per_node = 8\nlink = "IB200"\ncards_per_node = 2\n')
    cluster = load(path)
    assert cluster.per_device_network_bytes_per_second == 2 * 25e9 / 8 and cluster.notes == ()


def test_groups_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "islands.toml"
    path.write_text(
        'inter = "Eth100"\n[[groups]]\ndevice = "H100"\ndevices_per_node = 8\n'
        '[[groups]]\ndevice = "A100"\nnodes = 2\ndevices_per_node = 8\nlink = "4xIB200"\n'
    )
    cluster = load(path)
    assert (cluster.count, [group.device.name for group in cluster.groups]) == (24, ["H100-SXM-80GB", "A100-SXM-80GB"])
    between, inside = cluster.inter, cluster.groups[1].inter
    assert between and inside and (between.name, inside.name) == ("Eth100", "IB200")


WIRE = {"name": "w", "kind": "pcie", "bytes_per_second": 1e9, "latency_seconds": 1e-6}
WRONG: dict[str, tuple[list[str], dict[str, Any]]] = {
    "missing": (
        ["device.vendor", "device.sm_count", "device.memory_bytes", "host_link.latency_seconds", "'nodes' is 0"],
        {"nodes": 0, "host_link": {"name": "x", "kind": "pcie", "bytes_per_second": 1e9},
         "device": {"name": "a", "backend": "cuda", "memory_bandwidth_bytes_per_second": 1,
                    "peak_flops_per_second": {"float32": 1}}},
    ),
    "no device": (["'device' is missing", "unknown link 'IB401'"], {"inter": "IB401"}),
    "link and inter": (["'link' is 'IB200'", "'inter' is IB400"], {"device": "H100", "link": "IB200", "inter": "IB400"}),
    "cards twice": (["'8xIB400'", "'cards_per_node' is 4"], {"device": "H100", "inter": "8xIB400", "cards_per_node": 4}),
    "cards twice, by link": (["'link' is '8xIB400'", "'cards_per_node' is 4"],
                             {"device": "H100", "link": "8xIB400", "cards_per_node": 4}),
    "wrong place": (["intra is IB400", "inter is NVLink4", "host_link is IB100"],
                    {"device": "H100", "intra": "IB400", "inter": "NVLink4", "host_link": "IB100"}),
    "domain": (["devices_per_domain is 9"], {"device": "H100", "devices_per_node": 4, "devices_per_domain": 9}),
    "count": (["'count' is 3", "there are 8 devices"], {"device": "H100", "devices_per_node": 8, "count": 3}),
    "matrix": (["matrix is not 2 rows"], {"device": "H100", "devices_per_node": 2, "matrix": [[0, 1]]}),
    "matrix zero": (["from rank 0 to 1"], {"device": "H100", "devices_per_node": 2, "matrix": [[0, 0], [1, 0]]}),
    "matrix text": (["'matrix'"], {"device": "H100", "matrix": "fast"}),
    "region": (["unknown region 'Atlantis'"], {"device": "H100", "region": "Atlantis"}),
    "carbon": (["carbon_g_per_kwh is -1"], {"device": "H100", "carbon_g_per_kwh": -1}),
    "price": (["price_per_hour is -2"], {"device": "H100", "price_per_hour": -2}),
    "link figures": (["bytes_per_second is 0", "kind is 'string'"],
                     {"device": "H100", "intra": {**WIRE, "kind": "string", "bytes_per_second": 0}}),
    "pair above": (["pair_bytes_per_second is above"], {"device": "H100", "intra": {**WIRE, "pair_bytes_per_second": 2e9}}),
    "tiers": (["tiers.read_bytes_per_second", "tiers.write_bytes_per_second"],
              {"device": "H100", "tiers": [{"name": "host", "bytes": 1}]}),
    "tier name": (["name is 'l3'"], {"device": "H100", "tiers": [
        {"name": "l3", "bytes": 1, "read_bytes_per_second": 1, "write_bytes_per_second": 1}]}),
    "tier amount": (["'lots' is not an amount"], {"device": "H100", "tiers": [
        {"name": "host", "bytes": "lots", "read_bytes_per_second": 1, "write_bytes_per_second": 1}]}),
    "groups": (["group 1: unknown device 'H1000'", "group 2: the field 'device' is missing"],
               {"groups": [{"device": "H1000"}, {"nodes": 2}]}),
    "groups and more": (["'price_per_hour' beside 'groups'"], {"groups": [{"device": "H100"}], "price_per_hour": 3}),
    "groups disagree": (["'nodes' is 5, but the groups give 1"], {"groups": [{"device": "H100"}], "nodes": 5}),
    "groups a number": (["'groups' is 3"], {"groups": 3}),
    "groups nested": (["groups inside"], {"groups": [{"groups": [{"device": "H100"}]}]}),
    "unknown names": (["'nodez'", "'device.memry_bytes'"], {"nodez": 2, "device": {"memry_bytes": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_all_that_is_wrong_is_told_at_once(case: str, tmp_path: Path) -> None:
    named, data = WRONG[case]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        load(path)
    text = str(caught.value)
    assert all(item in text for item in named), text
    assert str(path) in text and "\n" not in text and caught.value.remedy


def test_the_remedy_of_an_unknown_field_names_the_near_one(tmp_path: Path) -> None:
    path = tmp_path / "near.json"
    path.write_text(json.dumps({"device": "H100", "device_per_node": 8}))
    with pytest.raises(UserError, match="instead of 'device_per_node', devices_per_node"):
        load(path)


def test_types_refuse_nonsense() -> None:
    with pytest.raises(UserError, match="latency_seconds"):
        Link(name="x", kind="pcie", bytes_per_second=1.0, latency_seconds=-1.0)
    with pytest.raises(UserError, match="no group"):
        Cluster.side_by_side(())
    with pytest.raises(UserError, match=r"nodes is 0.*cards_per_node is 0"):
        Cluster(device=find("H100"), nodes=0, cards_per_node=0)


# ---------------------------------------------------------------- unlike groups


def test_unlike_nodes_in_one_string() -> None:
    cluster = parse("2x8xH100@8xIB400+1x4xA100-40GB@2xIB200")
    assert replace(cluster, notes=()) == replace(unlike(), notes=())
    assert [part.link for part in cluster.groups] == ["8xIB400", "2xIB200"]


def test_a_link_after_plus_belongs_to_the_at_sign_before_it() -> None:
    one = parse("2x8xA100@PCIe4x16+4xIB100")
    assert not one.groups and one.intra and one.inter and (one.intra.name, one.cards_per_node) == ("PCIe4x16", 4)
    two = parse("2x8xA100@PCIe4x16+4xIB100+8xH100")
    assert [part.device.name for part in two.groups] == ["A100-SXM-80GB", "H100-SXM-80GB"]
    with pytest.raises(UserError, match="unknown link 'IB999'"):
        parse("2x8xA100@PCIe4x16+4xIB999")


def test_groups_of_one_fabric_are_joined_by_the_slower_and_it_is_said() -> None:
    cluster = parse("8xH100+8xA100")
    assert cluster.inter and cluster.inter.name == "IB200" and "joined by IB200" in " ".join(cluster.notes)
    assert [(part.inter and part.inter.name, part.cards_per_node) for part in cluster.groups] == [("IB400", 8), ("IB200", 8)]
    assert cluster.per_device_network_bytes_per_second == 25e9
    assert cluster.boundary(range(16)) == ""


def test_unlike_fabrics_are_joined_by_ethernet_and_it_is_said() -> None:
    cluster = parse("2x8xH100@8xIB400+2x8xH100@8xRoCE200")
    assert cluster.inter and cluster.inter.name == "Eth25" and "do not reach each other" in " ".join(cluster.notes)
    # one Ethernet card for eight devices, not eight
    assert cluster.per_device_network_bytes_per_second == 25e9 / 8 / 8
    assert cluster.boundary(range(16)) == "" and "only Eth25 joins" in cluster.boundary([15, 16])
    said = parse("2x8xH100@8xIB400+2x8xH100@8xRoCE200,join=2xEth100")
    assert said.inter and (said.inter.name, said.join_cards) == ("Eth100", 2)
    assert said.per_device_network_bytes_per_second == 2 * 12.5e9 / 8 and "assumed" not in " ".join(said.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH100,join=Eth25", "says what joins groups and has one"),
        ("8xH100+8xA100,join=", "join without a link"),
        ("8xH100+8xA100,join=Eth25,join=IB200", "join twice"),
        ("8xH100+8xA100,join=PCIe4x16", "joins devices of one node"),
        ("8xH100+", "names no device"),
        ("8xH100+8xA1000", "unknown device 'A1000'"),
        ("2x8xH100@8xIB400+2x8xH100@8xRoCE200,join=IB400", "group 2 .* has cards of RoCE200"),
        ("8xMI300X@NVLink4", "NVLink4, which MI300X"),
        ("8xH100@IFx7", "unknown link|does not have"),
    ],
)  # fmt: skip
def test_a_cluster_that_does_not_add_up_is_one_clear_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse(text)
    assert "\n" not in caught.value.problem and caught.value.remedy


def test_a_cluster_of_groups_survives_its_file(tmp_path: Path) -> None:
    for text in ("8xH100+8xA100", "2x8xH100@8xIB400+2x8xH100@8xRoCE200,join=2xEth100", "H100+MI300X+CPU"):
        cluster = parse(text)
        save(cluster, tmp_path / "c.json")
        assert load(tmp_path / "c.json") == cluster


def test_groups_in_a_file_are_joined_as_in_a_string(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[[groups]]\ndevice = "H100"\ndevices_per_node = 8\n[[groups]]\ndevice = "A100"\ndevices_per_node = 8\n')
    found, same = load(path), parse("8xH100+8xA100")
    assert (found.inter, found.groups[1].inter) == (same.inter, same.groups[1].inter)
    path.write_text('inter = "2xEth100"\njoin_cards = 3\n' + path.read_text())
    with pytest.raises(UserError, match="'join_cards' is 3"):
        load(path)


def test_which_devices_are_where() -> None:
    cluster = parse("2x8xH100+8xA100+8xH100")
    assert [device.name for device in cluster.devices] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    assert [cluster.part_of(rank).device.name[:4] for rank in (0, 15, 16, 23, 24)] == ["H100", "H100", "A100", "A100", "H100"]
