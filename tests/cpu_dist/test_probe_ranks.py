"""The probe of ranks, for real: three gloo processes on this machine, told to be nodes of two and of one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import UserError
from foretell.hardware import load
from foretell.hardware.probe import journal, machine, ranks
from foretell.hardware.profile import Profile, own_path, save
from foretell.hardware.profile import load as load_profile
from foretell.hardware.types import Cluster
from tests import forks

ROOT = Path(__file__).resolve().parents[2]

FITTED = {"gemm": {"parts": [{"laws": {"": {}}, "trees": None}], "accuracy": {}}}
"""The least that a profile of ops has."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """`foretell probe` on three ranks, with the variables that torchrun sets."""
    place = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORETELL_CACHE", str(place / "cache"))
        about = machine.about("cpu")
        known = {item.name: getattr(about, item.name) for item in fields(about)}
        save(Profile(**known, mode="quick", ops=FITTED), own_path(about))
    port = free_port()
    children = []
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0)]):
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FORETELL_CACHE": str(place / "cache"),
            "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node), "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        children.append(forks.Command("probe", "--json", "--out", str(place / "cluster.json"), env=env))
    done = []
    for child in children:
        out, err = child.communicate(timeout=120)
        done.append(subprocess.CompletedProcess(child.args, child.returncode, out, err))
    return place, done


def test_every_rank_ends_well_and_only_the_first_speaks(probed: tuple[Path, list[Any]]) -> None:
    _, done = probed
    assert [child.returncode for child in done] == [0, 0, 0], [child.stderr for child in done]
    assert done[1].stdout == "" and done[2].stdout == ""
    found = json.loads(done[0].stdout)["probe"]
    assert found["ranks"] == 3 and found["nodes"] == 2 and found["backend"] == "gloo"


def test_the_file_is_hardware_with_a_rate_for_every_pair(probed: tuple[Path, list[Any]]) -> None:
    place, done = probed
    cluster = load(place / "cluster.json")
    assert cluster.count == 3 and [group.devices_per_node for group in cluster.groups] == [2, 1]
    assert cluster.domain_of(1) == (0, 0) and cluster.domain_of(2) == (1, 0)
    assert cluster.matrix is not None
    told = json.loads(done[0].stdout)["probe"]["pairs"]
    assert {(row["source"], row["target"]) for row in told} == {(a, b) for a in range(3) for b in range(3) if a != b}
    for row in told:
        assert cluster.matrix[row["source"]][row["target"]] == row["bytes_per_second"]
        assert 1e6 < row["bytes_per_second"] < 1e12 and 1e-6 < row["latency_seconds"] < 1
    assert any("3 ranks on 2 nodes" in note for note in cluster.notes)


def test_every_collective_is_measured_at_every_size(probed: tuple[Path, list[Any]]) -> None:
    place, done = probed
    rows = json.loads(done[0].stdout)["probe"]["collectives"]
    assert {row["op"] for row in rows} == set(ranks.COLLECTIVES)
    for op in ranks.COLLECTIVES:
        sizes = [row["bytes"] for row in rows if row["op"] == op]
        assert len(sizes) == len(ranks.SIZES["gloo"]) and sizes == sorted(sizes)
        assert all(abs(size / asked - 1) < 0.02 for size, asked in zip(sizes, ranks.SIZES["gloo"], strict=True))
    assert all(row["seconds"] > 0 and row["ranks"] == 3 and row["nodes"] == 2 for row in rows)
    kept = [entry.content for entry in journal.read(place / "cluster.rows.jsonl.gz")[1] if entry.stage == "collective"]
    assert kept == rows


def test_the_users_own_profile_gains_collectives_and_links(probed: tuple[Path, list[Any]]) -> None:
    place, done = probed
    told = json.loads(done[0].stdout)["probe"]
    profile = load_profile(told["profile"])
    assert Path(told["profile"]).is_relative_to(place / "cache")
    assert list(profile.collectives) == told["collectives"] and profile.ops == FITTED
    assert profile.links == load(place / "cluster.json").matrix


def test_nothing_else_is_left_behind(probed: tuple[Path, list[Any]]) -> None:
    place, _ = probed
    assert sorted(path.name for path in place.iterdir() if path.name != "cache") == ["cluster.json", "cluster.rows.jsonl.gz"]


# ---------------------------------------------------------------- merging, without processes


def fact(node: int, local: int, device: str = "H100") -> dict[str, Any]:
    from foretell.hardware import find

    return {"host": f"n{node}", "node": node, "local": local, "kind": "cuda", "device": find(device).to_dict()}


def pair(source: int, target: int, rate: float, latency: float = 1e-5) -> dict[str, Any]:
    return {"source": source, "target": target, "bytes_per_second": rate, "latency_seconds": latency}


def test_equal_nodes_become_one_cluster_with_measured_latencies(tmp_path: Path) -> None:
    facts = [fact(rank // 2, rank % 2) for rank in range(4)]
    pairs = [
        pair(a, b, 400e9 if a // 2 == b // 2 else 45e9, 2e-6 if a // 2 == b // 2 else 9e-6)
        for a in range(4) for b in range(4) if a != b
    ]  # fmt: skip
    cluster, notes = ranks.merge(facts, pairs)
    assert (cluster.nodes, cluster.devices_per_node, cluster.groups) == (2, 2, ())
    assert cluster.intra is not None and cluster.intra.latency_seconds == 2e-6 and not cluster.intra.assumed("latency_seconds")
    assert cluster.inter is not None and cluster.inter.latency_seconds == 9e-6
    assert cluster.matrix is not None and cluster.matrix[0] == (0.0, 400e9, 45e9, 45e9)
    assert len(notes) == 1 and same_after_a_file(cluster, tmp_path)


def test_unlike_nodes_stand_side_by_side(tmp_path: Path) -> None:
    facts = [fact(0, 0), fact(0, 1), fact(1, 0, "A100")]
    pairs = [pair(a, b, 1e9 * (1 + a + 3 * b)) for a in range(3) for b in range(3) if a != b]
    cluster, _ = ranks.merge(facts, pairs)
    assert [group.device.name for group in cluster.groups] == ["H100-SXM-80GB", "A100-SXM-80GB"]
    assert cluster.count == 3 and cluster.matrix is not None and cluster.matrix[2][1] == 6e9
    assert same_after_a_file(cluster, tmp_path)


def same_after_a_file(cluster: Cluster, place: Path) -> bool:
    from foretell.hardware import save as write

    write(cluster, place / "c.json")
    return load(place / "c.json") == cluster


def test_pairs_that_were_not_measured_are_like_those_that_were() -> None:
    facts = [fact(rank // 2, rank % 2) for rank in range(4)]
    pairs = [pair(0, 1, 100e9), pair(1, 0, 300e9), pair(0, 2, 10e9), pair(2, 0, 30e9), pair(1, 3, 20e9)]
    cluster, notes = ranks.merge(facts, pairs)
    assert cluster.matrix is not None
    assert cluster.matrix[2][3] == 200e9 and cluster.matrix[3][0] == 20e9
    assert any("5 of 12 pairs were measured" in note for note in notes)


def test_many_ranks_measure_some_pairs_the_same_on_each() -> None:
    assert len(ranks.pairs_to_measure(8)) == 56
    many = ranks.pairs_to_measure(256)
    assert len(many) == ranks.MOST_PAIRS == len(set(many)) and many == ranks.pairs_to_measure(256)
    assert {a for a, _ in many} == set(range(256))


def test_ranks_that_are_numbered_across_nodes_are_put_in_order() -> None:
    """Ranks 0 and 2 on one node, 1 on the other: a cluster numbers them node by node."""
    moved = ranks._renumbered([pair(0, 2, 5e9), pair(0, 1, 1e9), pair(1, 2, 2e9)], [0, 2, 1])
    assert [(row["source"], row["target"], row["bytes_per_second"]) for row in moved] == [(0, 1, 5e9), (0, 2, 1e9), (2, 1, 2e9)]


def test_a_half_set_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"RANK, MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        ranks.probe_ranks("cpu")
