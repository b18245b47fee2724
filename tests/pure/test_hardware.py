"""Names, strings and files become the right cluster; every bad one is a clear line; no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretell.cli import main
from foretell.errors import FileFormatError, InternalError, UnknownName, UserError
from foretell.hardware import Cluster, Device, catalog, devices, find, generations, load, overhead, parse, save
from foretell.hardware.catalog import names, normalise
from foretell.hardware.overheads import FIELDS, rows
from foretell.hardware.this_machine import from_properties, physical_cores, usable_ram
from foretell.hardware.types import PROVENANCES
from foretell.price.analytic import family
from foretell.units import GIB, MIB

FIGURES = (
    "memory_bytes", "memory_nominal_bytes", "memory_bandwidth_bytes_per_second", "peak_flops_per_second",
    "l2_bytes", "sm_count", "tdp_watts",
)  # fmt: skip
ASKED_FOR = (
    "V100-SXM-16GB", "V100-SXM-32GB", "A100-PCIe-40GB", "A100-SXM-40GB", "A100-PCIe-80GB", "A100-SXM-80GB",
    "H100-PCIe-80GB", "H100-SXM-80GB", "H100-NVL-94GB", "H100-96GB", "H200", "B200", "B300", "GB200", "GB300", "L4",
    "L40S", "A10", "T4", "P100", "GTX-1080-Ti", "RTX-2080-Ti", "RTX-3090", "RTX-4070", "RTX-4090", "RTX-5090", "MI250X",
    "MI300X", "MI355X", "M1-Max", "M1-Ultra", "M2-Max", "M2-Ultra", "M3-Max", "M3-Ultra", "M4-Max", "CPU",
)  # fmt: skip


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_is_complete_and_sane(device: Device) -> None:
    assert all(device.sources.get(name) for name in FIGURES), "every figure has a source"
    assert 0.6 * device.memory_nominal_bytes < device.memory_bytes <= device.memory_nominal_bytes
    assert 4 * GIB < device.memory_bytes < 600 * GIB
    assert 20e9 < device.memory_bandwidth_bytes_per_second < 10e12
    assert device.peak("float32") == device.peak_flops_per_second["float32"]
    assert all(1e11 < rate < 2e16 for rate in device.peak_flops_per_second.values())
    assert device.peak("bfloat16") >= device.peak("float32") >= device.peak("float64") or device.backend == "cpu"
    assert (device.backend == "cuda") == (device.compute_capability is not None)
    assert 1 <= device.usual_per_node <= 8
    if device.backend in ("cuda", "rocm"):
        assert device.l2_bytes and 1 * MIB <= device.l2_bytes <= 256 * MIB
        assert device.tdp_watts and 50 <= device.tdp_watts <= 1500
        # Arithmetic intensity at which the device turns compute-bound: a wrong power of ten shows here.
        fast = max(device.peak("float16"), device.peak("bfloat16"))
        least = 70 if (device.compute_capability or (9, 0)) >= (7, 0) else 10  # before tensor cores
        assert least < fast / device.memory_bandwidth_bytes_per_second < 430


def test_the_devices_that_must_be_known_are() -> None:
    for name in ASKED_FOR:
        assert find(name)


PUBLISHED_RUNS = {
    "A100": "A100-SXM-80GB", "A100 (Ampere, memory not stated)": "A100-SXM-80GB", "A100-40GB": "A100-SXM-40GB",
    "A100-80GB": "A100-SXM-80GB", "B200": "B200", "B300": "B300", "GB200": "GB200", "GB300": "GB300",
    "H100": "H100-SXM-80GB", "H100-SXM-80GB": "H100-SXM-80GB", "H100-SXM-96GB-HBM2e-500W": "H100-SXM-96GB",
    "MI250X-GCD-64GB": "MI250X-GCD-64GB", "MI300X-192GB": "MI300X", "RTX4070-12GB": "RTX-4070",
    "RTX4090-24GB": "RTX-4090", "V100-16GB": "V100-SXM-16GB", "V100-32GB": "V100-SXM-32GB",
    "H200-141GB": "H200-SXM-141GB", "MI355X-288GB": "MI355X",
}  # fmt: skip
"""What tables of published training runs call their GPUs."""


@pytest.mark.parametrize("name", PUBLISHED_RUNS)
def test_names_of_published_runs_are_known(name: str) -> None:
    assert find(name).name == PUBLISHED_RUNS[name]


def test_the_h100_of_the_torchtitan_tables() -> None:
    part, usual = find("H100-SXM-96GB-HBM2e-500W"), find("H100")
    assert (part.tdp_watts, part.memory_bandwidth_bytes_per_second) == (500, 2.4e12)
    assert part.peak("bfloat16") == usual.peak("bfloat16"), "their MFU counts against 989 TFLOP/s"
    assert part.memory_bytes > usual.memory_bytes


def test_launch_overhead_is_assumed_until_somebody_measures() -> None:
    for device in devices():
        assert device.launch_overhead_seconds and 1e-7 < device.launch_overhead_seconds < 1e-4
        assert device.assumed("launch_overhead_seconds")


def test_h200_is_what_torch_reported_and_nothing_else_claims_to_be_verified() -> None:
    assert find("H200").memory_bytes == 150_109_880_320
    assert [device.name for device in devices() if device.verified] == ["H200-SXM-141GB"]


def test_memory_is_below_what_the_message_printed() -> None:
    assert find("H100").memory_bytes < 79.10 * GIB
    assert find("H100").memory_bytes > 79.09 * GIB


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("H100", "H100-SXM-80GB"), ("A100", "A100-SXM-80GB"), ("V100", "V100-SXM-16GB"), ("MI250X", "MI250X-GCD-64GB"),
        ("h100_sxm", "H100-SXM-80GB"), ("rtx 4090", "RTX-4090"), ("RTX4090", "RTX-4090"), ("m3 max", "M3-Max-36GB"),
    ],
)  # fmt: skip
def test_a_name_means_the_usual_part(name: str, means: str) -> None:
    assert find(name).name == means
    notes = parse(name).notes
    told = any(note.startswith(f"{name} means {means}") for note in notes)
    assert told == (normalise(name) != normalise(means))


def test_every_name_is_found_by_itself_in_any_spelling() -> None:
    for name in names():
        assert find(name.lower().replace("-", "_")) is find(name.upper().replace("-", " "))


def test_an_unknown_device_names_near_ones() -> None:
    with pytest.raises(UnknownName) as caught:
        find("H10O")
    assert "H100" in caught.value.near and "'H10O'" in str(caught.value)
    assert "`foretell hardware` lists all" in caught.value.remedy and not caught.value.detail, "no list of all devices for a typo"


@pytest.mark.parametrize(
    ("text", "device", "nodes", "per_node", "link"),
    [
        ("H100", "H100-SXM-80GB", 1, 1, None),
        ("H100:8", "H100-SXM-80GB", 1, 8, None),
        ("8xH100", "H100-SXM-80GB", 1, 8, None),
        (" 8 x MI300X ", "MI300X", 1, 8, None),
        ("2x8xH100", "H100-SXM-80GB", 2, 8, None),
        ("2x8xH100-SXM@IB400", "H100-SXM-80GB", 2, 8, "IB400"),
        ("3X16xA100", "A100-SXM-80GB", 3, 16, None),
        ("H100:16", "H100-SXM-80GB", 2, 8, None),
        ("H100:12", "H100-SXM-80GB", 2, 6, None),
        ("72xGB200", "GB200", 18, 4, None),
        ("4090:2", "RTX-4090", 1, 2, None),
        ("2x4xH200@4xIB200,memory=100GiB", "H200-SXM-141GB", 2, 4, "4xIB200"),
        ("cpu", "CPU", 1, 1, None),
    ],
)
def test_a_string_is_the_right_cluster(text: str, device: str, nodes: int, per_node: int, link: str | None) -> None:
    cluster = parse(text)
    assert (cluster.device.name, cluster.nodes, cluster.devices_per_node, cluster.link) == (
        device, nodes, per_node, link,
    )  # fmt: skip
    assert cluster.count == nodes * per_node


def test_an_assumed_layout_is_said() -> None:
    assert any("2 nodes of 8" in note for note in parse("H100:16").notes)
    assert not any("nodes of" in note for note in parse("2x8xH100").notes + parse("H100:8").notes)


def test_memory_can_be_capped() -> None:
    cluster = parse("H100:1,memory=60GiB")
    assert cluster.device.memory_bytes == 60 * GIB
    assert any("60.0 GiB" in note for note in cluster.notes)
    assert "user" in cluster.device.sources["memory_bytes"]
    assert parse("2x8xH100,mem=60GB").device.memory_bytes == 60 * 10**9
    assert find("H100").memory_bytes > 79 * GIB, "the catalogue is not changed"


BAD_STRINGS = {
    "": "''", "   ": "''", "H100:0": "'0'", "0xH100": "'0'", "2x0xH100": "'0'", "-1xH100": "'-1'", "H100:-8": "'-8'",
    "H100:abc": "'abc'", "H100:": "nothing", "1.5xH100": "'1.5'", "H100:1.5": "'1.5'", "H100:8:2": "'8:2'",
    "2x2x2xH100": "3 counts", "8xH100:8": "twice", "8x": "no device", ":8": "no device", "@IB400": "no device",
    "H100@": "no link", "H1000": "'H1000'", "8xB2000": "'B2000'", "H100x8": "'H100x8'", "auto:8": "'auto:8'",
    "H100,memory": "without an amount", "H100,memory=": "without an amount", "H100,memory=lots": "memory=lots",
    "H100,memory=2TiB": "79.1 GiB", "H100,memory=0": "0 bytes", "H100,memory=60": "60 bytes",
    "H100,memory=-5GiB": "memory=-5GiB", "H100,memory=1GiB,mem=2GiB": "twice", "H100,colour=red": "'colour=red'",
    "H100,": "option", "nowhere.toml": "'nowhere.toml'", "nowhere.json": "'nowhere.json'", "H100\n:0": "'0'",
    "9" * 5000 + "xH100": "invalid device count", "H100,memory=" + "9" * 400: "not an amount",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_STRINGS, ids=lambda text: repr(text[:30]))
def test_a_bad_string_is_one_line_with_what_was_asked_and_a_remedy(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert BAD_STRINGS[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy and caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["H100", "2x8xH200@IB400", "MI300X:4", "M4-Max", "CPU", "A100:1,memory=20GiB"])
def test_a_cluster_survives_its_file(text: str, tmp_path: Path) -> None:
    cluster = parse(text)
    save(cluster, tmp_path / "cluster.json")
    assert parse(str(tmp_path / "cluster.json")) == cluster


def test_a_toml_file_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.TOML"
    path.write_text('nodes = 2\ndevices_per_node = 4\ndevice = "H100"\nlink = "RoCE100"\nmemory = "40GiB"\n')
    cluster = parse(str(path))
    assert (cluster.count, cluster.link, cluster.device.memory_bytes) == (8, "RoCE100", 40 * GIB)
    assert any("H100 means" in note for note in cluster.notes)


def card(**changes: Any) -> dict[str, Any]:
    table = {
        "name": "mine", "vendor": "me", "backend": "cuda", "compute_capability": [9, 0], "memory_bytes": 10 * GIB,
        "memory_bandwidth_bytes_per_second": 1e12, "peak_flops_per_second": {"float32": 1e13}, "sm_count": 10,
    }  # fmt: skip
    return {key: value for key, value in {**table, **changes}.items() if value != "absent"}


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"device": card()}))
    device = load(path).device
    assert (device.memory_nominal_bytes, device.compute_capability, device.verified) == (10 * GIB, (9, 0), False)
    assert str(path) in device.sources["memory_bytes"]


BAD_FILES: dict[str, tuple[str, Any]] = {
    "unknown field": ("'node'", {"node": 2, "device": "H100"}),
    "no device": ("'device'", {"nodes": 2}),
    "unknown device": ("'H1000'", {"device": "H1000"}),
    "device a number": ("'device'", {"device": 8}),
    "no nodes": ("'nodes'", {"nodes": 0, "device": "H100"}),
    "half a node": ("'devices_per_node'", {"devices_per_node": 0.5, "device": "H100"}),
    "yes nodes": ("'nodes'", {"nodes": True, "device": "H100"}),
    "contradiction": ("'count'", {"nodes": 2, "devices_per_node": 8, "count": 8, "device": "H100"}),
    "more memory": ("memory=1TiB", {"memory": "1TiB", "device": "H100"}),
    "memory a number": ("'memory'", {"memory": 60, "device": "H100"}),
    "empty link": ("'link'", {"link": " ", "device": "H100"}),
    "notes a text": ("'notes'", {"notes": "hello", "device": "H100"}),
    "newer": ("schema_version", {"schema_version": 2, "device": "H100"}),
    "device field unknown": ("'device.memory'", {"device": card(memory=1)}),
    "device field missing": ("'device.sm_count'", {"device": card(sm_count="absent")}),
    "memory missing": ("'device.memory_bytes'", {"device": card(memory_bytes="absent")}),
    "memory negative": ("memory_bytes", {"device": card(memory_bytes=-1)}),
    "memory a text": ("memory_bytes", {"device": card(memory_bytes="10GiB")}),
    "memory vast": ("memory_bytes", {"device": card(memory_bytes=10**400)}),
    "memory above nominal": ("memory_nominal_bytes", {"device": card(memory_nominal_bytes=9 * GIB)}),
    "bandwidth zero": ("memory_bandwidth", {"device": card(memory_bandwidth_bytes_per_second=0)}),
    "bandwidth not a number": ("memory_bandwidth", {"device": card(memory_bandwidth_bytes_per_second=float("nan"))}),
    "unknown dtype": ("peak_flops_per_second", {"device": card(peak_flops_per_second={"float32": 1e13, "half": 1})}),
    "no float32": ("float32", {"device": card(peak_flops_per_second={"float16": 1e13})}),
    "peak a number": ("peak_flops_per_second", {"device": card(peak_flops_per_second=1e13)}),
    "backend": ("backend", {"device": card(backend="tpu")}),
    "capability": ("compute_capability", {"device": card(compute_capability="9.0")}),
    "verified": ("verified", {"device": card(verified="yes")}),
    "a list": ("list", [1, 2]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_line_that_names_the_field(case: str, tmp_path: Path) -> None:
    named, data = BAD_FILES[case]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        parse(str(path))
    assert named in str(caught.value) and "\n" not in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", b'{"device":'), ("a.toml", b"device = "), ("b.json", b"\xff\xfe"), ("c.json", b"")]
)
def test_a_broken_file_is_a_file_format_error(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileFormatError, match=name):
        parse(str(tmp_path / name))


def test_a_file_cut_anywhere_never_crashes(tmp_path: Path) -> None:
    save(parse("H100"), tmp_path / "whole.json")
    whole = (tmp_path / "whole.json").read_text().rstrip()
    for length in range(0, len(whole), 37):
        (tmp_path / "cut.json").write_text(whole[:length])
        with pytest.raises(UserError):
            load(tmp_path / "cut.json")


def reported(name: str, memory: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, total_memory=memory, multi_processor_count=132, **more)


def test_auto_takes_the_smallest_real_memory() -> None:
    cluster = from_properties(
        [reported("NVIDIA H200", 150_109_880_320, L2_cache_size=60 * MIB), reported("NVIDIA H200", 150_000_000_000)]
    )
    assert (cluster.count, cluster.device.name, cluster.device.memory_bytes) == (2, "H200-SXM-141GB", 150_000_000_000)
    assert cluster.device.verified and not cluster.device.assumed("memory_bytes")
    assert "NVIDIA H200" in cluster.notes[0]


def test_auto_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UnknownName, match="GTX 1080"):
        from_properties([reported("NVIDIA GeForce GTX 1080", 8 * GIB)])
    with pytest.raises(UserError, match="unlike"):
        from_properties([reported("NVIDIA H200", GIB), reported("NVIDIA H100 PCIe", GIB)])


@pytest.mark.parametrize(
    ("why", "fake"), [("not installed", None), ("no GPU", SimpleNamespace(is_available=lambda: False))]
)
def test_auto_without_a_gpu_is_this_cpu(why: str, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake and SimpleNamespace(cuda=fake))
    cluster = parse("auto")
    assert (cluster.device.backend, cluster.count, cluster.device.sm_count) == ("cpu", 1, physical_cores())
    assert cluster.device.memory_bytes == (usable_ram() or find("CPU").memory_bytes)
    assert any(why in note for note in cluster.notes)


def test_auto_with_fake_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties: Callable[[int], SimpleNamespace] = lambda index: reported("Tesla T4", 15 * GIB - index)  # noqa: E731
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=properties)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    cluster = parse("auto,memory=8GiB")
    assert (cluster.device.name, cluster.count, cluster.device.memory_bytes) == ("T4", 2, 8 * GIB)


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_every_device_has_overheads(device: Device) -> None:
    found = overhead(device, "2.11.0+cu130")
    assert set(found.provenance) == set(found.sources) == set(FIELDS)
    assert all(source for source in found.sources.values())
    gpu = device.backend in ("cuda", "rocm", "xpu")
    assert (400 * MIB <= found.context_bytes <= 900 * MIB) if gpu else found.context_bytes == 0
    hopper_or_later = device.compute_capability is not None and device.compute_capability[0] >= 9
    if device.backend == "cuda":
        assert found.cublas_workspace_bytes == (32 * MIB if hopper_or_later else 8_519_680)
    assert json.loads(json.dumps(found.to_dict()))


def test_overheads_claim_no_measurement_that_was_not_made() -> None:
    assert {row["provenance"] for row in rows()} <= set(PROVENANCES)
    assert all(row["source"] and row["bytes"] >= 0 and row["figure"] in FIELDS for row in rows())
    for row in rows():
        if row["provenance"] == "measured":
            assert "device" in row and "torch" in row, "a measurement names its device and torch version"


def test_the_most_particular_overhead_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"figure": "context_bytes", "provenance": "measured", "source": "here"}
    more = (
        {**measured, "device": "H200-SXM-141GB", "torch": "2.14", "bytes": 7},
        {**measured, "device": "H200-SXM-141GB", "torch": "2.1", "bytes": 8},
    )
    original = rows()
    monkeypatch.setattr("foretell.hardware.overheads.rows", lambda: original + more)
    assert overhead(find("H200"), "2.14.0+cu130").context_bytes == 7
    assert overhead(find("H200"), "2.11.0+cu130").provenance["context_bytes"] == "measured"
    assert overhead(find("H200"), "2.1.2").context_bytes == 8
    assert overhead(find("H200"), "2.12.0").provenance["context_bytes"] == "assumed"
    assert overhead(find("H100"), "2.11.0").provenance["context_bytes"] == "assumed"


def test_an_architecture_nobody_knows_gets_the_careful_figures() -> None:
    future = replace(find("B200"), name="C100", compute_capability=(13, 0))
    assert overhead(future, "3.0").context_bytes >= overhead(find("B200"), "3.0").context_bytes
    assert overhead(future, "3.0").cublas_workspace_bytes == 32 * MIB


def test_nccl_only_where_devices_talk() -> None:
    found = overhead(find("H100"), "2.11.0")
    assert found.nccl_for(parse("H100")) == 0
    assert found.nccl_for(parse("H100:8")) == GIB
    assert found.nccl_for(parse("2x8xH100")) == 3 * GIB // 2


def test_types_refuse_nonsense() -> None:
    with pytest.raises(UserError, match="nodes"):
        Cluster(device=find("H100"), nodes=0)
    with pytest.raises(UserError, match="memory_bytes"):
        replace(find("H100"), memory_bytes=0)


# ---------------------------------------------------------------- foretell hardware


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("FORETELL_PRICES", "COLUMNS", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str, status: int = 0) -> str:
        assert main(["hardware", *words]) == status
        found = capsys.readouterr()
        return found.out or found.err

    return run


def test_the_list_has_every_device_and_fits_a_narrow_screen(told: Callable[..., str]) -> None:
    lines = told().splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1 : 1 + len(devices())]}
    assert set(rows) == {device.name for device in devices()}
    assert rows["H100-SXM-80GB"] == ["H100-SXM-80GB", "79.1", "3,350", "989", "700", "NVLink4", "3.99", "-"]
    assert rows["T4"][3] == "-", "it has no bfloat16 units"
    assert rows["M4-Max-36GB"][1].startswith("~") and rows["H200-SXM-141GB"][1] == "139.8"
    assert max(len(line) for line in lines[: 1 + len(devices())]) <= 80


def test_one_device_shows_the_source_of_every_figure(told: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = " ".join(told("h200").split())
    device = find("H200")
    for name in (*FIGURES, "launch_overhead_seconds"):
        assert device.sources[name] in text
    for said in ("139.8 GiB", "4,800 GB/s", "989.4 TFLOP/s", "450 GB/s one way", "63.02 GB/s", "8xIB400", "$4.50", "481 g",
                 "h200 means H200-SXM-141GB", "also called H200"):  # fmt: skip
        assert said in text, said


def test_a_cluster_shows_its_links(told: Callable[..., str]) -> None:
    text = " ".join(told("2x8xA100@4xIB200").split())
    assert "16 devices: 2 nodes of 8 A100-SXM-80GB" in text and "4xIB200 100 GB/s one way" in text


def test_json_of_hardware(told: Callable[..., str]) -> None:
    found = json.loads(told("--json"))
    assert {"schema_version", "versions", "assumptions", "devices"} <= set(found)
    assert [row["name"] for row in found["devices"]] == [device.name for device in devices()]
    assert all(row["sources"] and row["usual_links"]["source"] and row["price"]["source"] for row in found["devices"])
    one = json.loads(told("2x8xH100", "--json"))
    assert one["hardware"]["per_device_network_bytes_per_second"] == 50e9
    assert one["hardware"]["device"]["price"]["dollars_per_hour"] == 3.99
    assert any("assumed to be 8xIB400" in note for note in one["assumptions"])
    wrong = json.loads(told("H1O0", "--json", status=2))
    assert "H100" in wrong["error"]["remedy"]


def test_hardware_nobody_knows_is_an_error_with_candidates(told: Callable[..., str]) -> None:
    assert "did you mean H100" in told("H10O", status=2)
    assert "IB400" in told("2x8xH100@IB40", status=2)


def test_the_list_needs_no_torch() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'rich') if name in sys.modules]"
    code = f"import sys; from foretell.cli import main; main(['hardware']); main(['hardware', 'H100', '--json']); print({heavy})"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_importing_the_room_leaves_torch_out() -> None:
    code = "import sys, foretell.hardware as h; h.parse('2x8xH100'); h.devices(); print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["TPUv4", "tpu-v5p", "Jetson-Orin", "trn2", "Gaudi3"])
def test_devices_of_other_kinds_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match="CUDA and ROCm") as caught:
        parse(name)
    assert "did you mean" not in str(caught.value)


# ---------------------------------------------------------------- generations, and what links reach


def test_every_device_has_a_generation_and_measured_kin_that_are_devices() -> None:
    known = generations.generations()
    assert {family(device) for device in catalog.devices()} <= set(known)
    assert all(catalog.find(name).name == name for one in known.values() for name in (*one.kin, *one.power_limited))
    assert all(0 < part <= 1 for one in known.values() for part in (one.product, one.product8, one.stream))
    assert all(one.source for one in known.values())
    assert {device.backend for device in catalog.devices()} <= set(generations.nearest())


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), (132, 2048)), ((8, 6), (84, 1536)), ((8, 8), (16, 1536)), ((11, 0), (160, 2048)), ((13, 0), (48, 1536)), ((6, 0), (80, 2048))],
)
def test_an_unknown_capability_is_taken_for_the_newest_that_is_older(capability: tuple[int, int], expected: tuple[int, int]) -> None:
    assert generations.multiprocessors(capability) == expected


def test_only_one_part_has_more_multiprocessors_than_its_capability_says() -> None:
    """A GB200 has 152 and is priced with the 148 of a B200: four more would stage a little more."""
    known = [(one, one.compute_capability) for one in catalog.devices() if one.backend == "cuda" and (one.compute_capability or (0, 0)) >= (8, 0)]
    more = [device.name for device, number in known if number and device.sm_count > generations.multiprocessors(number).multiprocessors]
    assert more == ["GB200"]


@pytest.mark.parametrize(
    "row",
    [{}, {"link": "X", "fraction": 0.5}, {"link": "X", "fraction": -0.5, "source": "s"}, {"link": "X", "fraction": "half", "source": "s"},
     {"link": "X", "fraction": 0.5, "source": "s", "odd": 1}],
)  # fmt: skip
def test_a_row_of_the_catalogue_that_is_wrong_is_an_error(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_files", lambda: ({"switch": [row]},))
    with pytest.raises(InternalError, match="table 'switch'"):
        catalog.table("switch", {"link": str, "fraction": float, "source": str})
