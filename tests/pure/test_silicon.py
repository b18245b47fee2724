"""Devices that are not here, by what others measured on them: factors on carried kernels, tables of collectives."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.hardware import catalog, silicon, wires
from foretell.hardware.lookup import find_profile
from foretell.hardware.parse import parse
from foretell.price.calibrate.kin import held_back, kin_of
from foretell.price.kernels import elsewhere
from foretell.price.kernels.features import describe
from foretell.price.kernels.ops import OpModel
from foretell.price.kernels.shapes import Shape
from foretell.price.machine import machine
from foretell.price.network.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    P2P,
    collective,
    fabric,
    without_table,
)
from foretell.price.speeds import profile_for
from foretell.quantities import ASSUMED, MEASURED
from foretell.trace.types import TensorSpec

ROOT = Path(__file__).resolve().parents[2]
MEASURED_ELSEWHERE = ("A100-SXM-80GB", "H100-SXM-80GB", "B200", "GB200", "L40S", "RTX-PRO-6000")


def product(m: int, n: int, k: int, letters: str = "ct") -> Shape:
    left, right = TensorSpec((m, k), "bfloat16"), TensorSpec((k, n), "bfloat16")
    return Shape("aten.mm.default", (left, right), (TensorSpec((m, n), "bfloat16"),), (f"layout:{letters}",))


def model(name: str) -> OpModel:
    device = catalog.find(name)
    found = machine(device, profile_for(parse(name), find_profile))
    assert found is not None
    return found.ops


# ---------------------------------------------------------------- products

PUBLISHED = [
    ("A100-SXM-80GB", 4096, 12288, 1536, 0.60), ("H100-SXM-80GB", 4096, 12288, 1536, 0.60), ("B200", 4096, 12288, 1536, 0.5),
]  # fmt: skip
"""Shares of the peak that a product of this size reaches at least in the public table, whatever the device."""


@pytest.mark.parametrize(("name", "m", "n", "k", "share"), PUBLISHED)
def test_large_products_reach_what_the_table_shows(name: str, m: int, n: int, k: int, share: float) -> None:
    device = catalog.find(name)
    shape = product(m, n, k)
    reached = 2 * m * n * k / model(name).seconds([shape])[shape] / device.peak("bfloat16")
    assert share < reached < 1


@pytest.mark.parametrize("device", ["A100", "H100", "H200", "B200", "V100", "MI300X", "RTX-4090"])
def test_products_never_beat_the_peak(device: str) -> None:
    """But for consumer cards, whose clocks go above nominal."""
    most = 1.1 if device.startswith("RTX") else 1.0
    found = catalog.find(device)
    known = machine(found, profile_for(parse(device), find_profile))
    assert known is not None
    for m, n, k in ((64, 64, 64), (1000, 1000, 1000), (4096, 4096, 4096), (8192, 129, 513), (1, 4096, 4096)):
        shape = product(m, n, k)
        assert 2 * m * n * k / known.ops.seconds([shape])[shape] / known.slower.get("gemm", 1.0) <= most * found.peak("float16")


def test_a_factor_learned_from_one_layout_serves_the_others() -> None:
    basis = find_profile("H200-SXM-141GB")
    assert basis is not None
    device = replace(catalog.find("H200"), name="slow")
    carried = OpModel.from_dict(device, basis.ops)
    shapes = [product(m, n, k) for m in (256, 1024, 3072) for n in (512, 2048, 8192) for k in (512, 1536, 4096, 12288)]
    known = carried.seconds(shapes)
    described = [found for shape in shapes if (found := describe(shape, device)) is not None]
    taught = elsewhere.learn(described, [known[s] for s in shapes], [1.3 * known[s] for s in shapes])
    corrected = OpModel(device, carried.families, {"16-bit": taught})
    for letters in ("cc", "tc", "ct"):
        other = product(1536, 3072, 2048, letters)
        ratio = corrected.seconds([other])[other] / carried.seconds([other])[other]
        assert ratio == pytest.approx(1.3, rel=0.02)
    plain = Shape("aten.mm.default", (TensorSpec((512, 512), "float32"),) * 2, (TensorSpec((512, 512), "float32"),), ("tf32",))
    assert corrected.seconds([plain]) == carried.seconds([plain]), "no table speaks of float32"


@pytest.mark.parametrize("name", MEASURED_ELSEWHERE)
def test_a_device_measured_elsewhere_says_so(name: str) -> None:
    profile = find_profile(name)
    assert profile is not None and profile.device == name and profile.elsewhere["basis"] == "H200-SXM-141GB"
    assert any("memory-bound" in line for line in profile.missing), "what the table lacks is named"
    known = machine(catalog.find(name), profile)
    assert known is not None and "measured elsewhere (NVIDIA AIConfigurator" in known.notes[0]
    assert known.provenance == ASSUMED, "the step as a whole was not measured"
    told = silicon.measured_elsewhere(name)
    assert told is not None and told.groups["16-bit"]["accuracy"]["median"] < 0.08


def test_a_device_without_a_table_takes_its_generations() -> None:
    cluster = parse("A100-SXM-40GB")
    profile = profile_for(cluster, find_profile)
    assert profile is not None and profile.device == "A100-SXM-80GB"
    known = machine(cluster.device, profile)
    assert known is not None and "of A100-SXM-80GB, at the catalogue's rates of A100-SXM-40GB" in known.notes[0]
    assert kin_of(catalog.find("MI300X")) == ("H200-SXM-141GB",)


def test_fewer_watts_for_a_flop_hold_products_back() -> None:
    big, small = catalog.find("H100-SXM-80GB"), catalog.find("H100-PCIe-80GB")
    assert held_back(small, big) == pytest.approx((756 / 350 / (989.4 / 700)) ** 0.6)
    assert held_back(big, big) == 1.0 == held_back(big, small), "more watts than the measured one has do not make it faster"
    assert held_back(catalog.find("RTX-PRO-6000"), catalog.find("L40S")) < 1, "unless that one waited for power"


def test_a_board_with_fewer_watts_falls_lower_on_the_same_law() -> None:
    known = [machine(catalog.find(name), find_profile("H100-SXM-80GB")) for name in ("H100-SXM-80GB", "H100-SXM-96GB")]
    usual, limited = (one.clocks for one in known if one is not None and one.clocks is not None)
    assert limited.compute == pytest.approx(usual.compute * 700 / 500) and limited.slower(0.0) == 1.0
    assert limited.slower(0.7) > usual.slower(0.7) and known[1] is not None and known[1].slower["gemm"] == 1.0, "not held back twice"


# ---------------------------------------------------------------- collectives


def test_a_table_answers_inside_a_node() -> None:
    known = wires.table("H100-SXM-80GB")
    assert known is not None
    size, seconds = known.curves[ALL_GATHER][8][-1]
    found = collective(ALL_GATHER, size, fabric(parse("H100:8")))
    assert (found.algorithm, found.provenance) == ("measured", MEASURED)
    assert found.seconds == pytest.approx(seconds)
    assert 1.2e-3 < collective(ALL_GATHER, 512 * 2**20, fabric(parse("H100:8"))).seconds < 1.5e-3, "0.38 GB/ms in the public table"


@pytest.mark.parametrize("on", ["A100:8", "H100:8", "H200:8", "B200:8", "GB200:4", "RTX-PRO-6000:8", "L40S:8", "V100:8", "RTX-4090:4"])
def test_larger_messages_take_longer_and_two_thirds_of_the_link_is_the_most(on: str) -> None:
    group = fabric(parse(on))
    for operation in (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, P2P):
        taken = [collective(operation, 4.0**power, group).seconds for power in range(8, 15)]
        assert all(later > 0.85 * earlier for earlier, later in itertools.pairwise(taken))
    assert group.intra is not None
    assert collective(ALL_GATHER, 2**29, group).bus_bytes_per_second < 0.8 * group.intra.bytes_per_second


def test_between_and_beyond_the_measured_numbers_of_ranks() -> None:
    three, two, four = (collective(ALL_GATHER, 2**24, fabric(parse(f"H100:{n}"))).seconds for n in (3, 2, 4))
    assert two < three < four
    rack, tray = fabric(parse("18x4xGB200")), fabric(parse("GB200:4"))
    assert collective(ALL_GATHER, 2**28, rack).seconds > collective(ALL_GATHER, 2**28, tray).seconds
    assert collective(P2P, 2**24, fabric(parse("H100:8"))).seconds == pytest.approx(
        wires.table("H100-SXM-80GB").seconds(ALL_TO_ALL, 2**25, 2)  # type: ignore[union-attr]
    )


def test_a_link_without_a_table_is_scaled_from_its_kind_and_assumed() -> None:
    found = collective(ALL_GATHER, 2**28, fabric(parse("V100:8")))
    assert (found.algorithm, found.provenance) == ("scaled", ASSUMED)
    own, other = fabric(parse("A100:8"), 8), without_table(parse("A100:8"), 8, "A100-SXM-80GB")
    for size in (2**22, 2**24, 2**26, 2**28):
        assert collective(ALL_GATHER, size, other).seconds == pytest.approx(collective(ALL_GATHER, size, own).seconds, rel=0.3)


def test_more_than_two_cards_over_pcie_talk_through_the_processors() -> None:
    """As if nobody had measured that device: the public table of it, which had no part in the figure, is met within a third."""
    name = "RTX-PRO-6000"
    two, four, eight = (without_table(parse(f"{name}:{count}"), count, name) for count in (2, 4, 8))
    assert two.inside() > 1.5 * four.inside() == 1.5 * eight.inside() == 1.5 * 22e9
    for group in (two, four, eight):
        for size in (2**24, 2**28):
            measured = collective(ALL_GATHER, size, fabric(parse(f"{name}:{group.local}"))).seconds
            assert collective(ALL_GATHER, size, group).seconds == pytest.approx(measured, rel=0.33)


def test_a_curve_is_met_where_it_was_measured() -> None:
    curve = ((1024.0, 1e-5), (4096.0, 2e-5), (65536.0, 8e-5))
    assert [wires.along(curve, size) for size, _ in curve] == pytest.approx([seconds for _, seconds in curve])
    assert wires.along(curve, 2048) == pytest.approx(math.sqrt(2) * 1e-5)
    assert (wires.along(curve, 1), wires.along(curve, 2 * 65536)) == (1e-5, 16e-5)


# ---------------------------------------------------------------- the benchmark


def silicon_benchmark(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "silicon.py"), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_benchmark_writes_a_prediction_for_every_known_row(tmp_path: Path) -> None:
    gemm, nccl, out = tmp_path / "g.csv", tmp_path / "n.csv", tmp_path / "out.json"
    gemm.write_text(
        "device,stack,kernel,dtype,m,n,k,ms\nh100_sxm,x,y,bfloat16,4096,4096,4096,0.19\nq9,x,y,bfloat16,64,64,64,1\n", encoding="utf-8"
    )
    nccl.write_text("device,nccl,op,dtype,gpus,elements,ms\nh100_sxm,2.29,all_gather,half,8,268435456,1.4\n", encoding="utf-8")
    ran = silicon_benchmark("--gemm", gemm, "--nccl", nccl, "--json", out)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(row["kind"], row["device"], row["row"]) for row in found["predictions"]] == [("gemm", "h100_sxm", 0), ("nccl", "h100_sxm", 0)]
    for row in found["predictions"]:
        assert row["low"] < row["predicted"] < row["high"]
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.15)
    assert found["unknown"] == ["gemm: q9, 1 rows: not in the catalogue"]
    assert "16-bit, 512 or more" in ran.stdout
    gemm.write_text("device,dtype,m,n,k\n", encoding="utf-8")
    ran = silicon_benchmark("--gemm", gemm, "--json", out)
    assert ran.returncode == 1 and "has no column ms" in ran.stderr and "Traceback" not in ran.stderr


def test_of_rows_held_out_each_is_predicted_once_by_the_others(tmp_path: Path) -> None:
    from benchmarks import silicon as benchmark

    sizes = [2**power for power in range(16, 28)]
    rows = [f"h100_sxm,2.29,all_gather,int8,8,{size},{1e-3 * size / 2**20 if size != 2**20 else 5}" for size in sizes]
    nccl = tmp_path / "n.csv"
    nccl.write_text("\n".join(["device,nccl,op,dtype,gpus,elements,ms", *rows]) + "\n", encoding="utf-8")
    found, unknown = benchmark.predictions(None, None, nccl, held_out=True)
    assert sorted(row["row"] for row in found) == list(range(len(sizes))) and not unknown
    (odd,) = (row for row in found if row["bytes"] == 2**20)
    assert odd["predicted"] < 0.1 < odd["measured"], "what was wrong of one row alone is not known to its own prediction"


def test_what_neighbours_do_not_share() -> None:
    from benchmarks import silicon as benchmark

    row = {"kind": "gemm", "device": "x", "group": "16-bit", "predicted": 1.0}
    found = [{**row, "product": [m, 512, 512], "measured": math.exp(left)} for m, left in ((1024, 0.5), (1025, 0.6), (2048, 0.1))]
    assert benchmark.neighbours(found) == [f"x: 1 pairs of rows one apart in m; {0.1 / math.sqrt(2):.1%} of each is not shared"]
    assert benchmark.neighbours(found[1:]) == []
