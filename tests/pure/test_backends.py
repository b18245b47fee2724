"""`fit` on devices that are neither CUDA's nor ROCm's: this CPU against a real run on it, Apple chips by the catalogue."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from foretell import api
from foretell.api import backends
from foretell.errors import UnknownName, UserError
from foretell.hardware import parse
from foretell.hardware.catalog import devices, find
from foretell.hardware.lookup import find_profile
from foretell.price.machine import machine
from foretell.quantities import ASSUMED, MEASURED
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.on_cpu import measure_on_cpu
from foretell.units import GIB

this_machine: Any = import_module("foretell.hardware.this_machine")
TINY: dict[str, Any] = {"seq": 128, "micro_batch": 2}


def test_a_cpu_holds_what_a_real_run_on_it_holds() -> None:
    answer = api.fit("gpt-tiny", hardware="auto", **TINY)
    tensors, _ = measure_on_cpu(Source(model="gpt-tiny", **TINY), Recipe(precision="fp32"))
    assert answer.memory.allocated_bytes == pytest.approx(tensors, rel=0.02)
    assert answer.memory.capacity_bytes == this_machine.usable_ram() and answer.verdict == "fits"
    assert answer.time is not None and answer.mfu is None, "a CPU's peak is assumed: no share of it is told"
    inference = api.fit("gpt-tiny", hardware="auto", infer=True, precision="fp32", **TINY)
    tensors, _ = measure_on_cpu(Source(model="gpt-tiny", **TINY), Recipe(precision="fp32", mode="infer"))
    assert inference.memory.allocated_bytes == pytest.approx(tensors, rel=0.02)


def test_seconds_of_a_cpu_are_measured_only_where_it_was_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = find_profile("CPU")
    assert known is not None and known.cores is not None
    cluster = parse("auto")
    same = replace(cluster, device=replace(cluster.device, sm_count=known.cores))

    def provenance(name: str, where: Any) -> str:
        monkeypatch.setattr(backends, "cpu_name", lambda: name)
        found = machine(where.device, backends.profile_of(where)("CPU"))
        assert found is not None
        return found.provenance

    assert provenance(known.reported_as, same) == MEASURED
    assert provenance("a CPU that nobody probed", same) == ASSUMED
    more = replace(cluster, device=replace(cluster.device, sm_count=known.cores + 6))
    assert provenance(known.reported_as, more) == ASSUMED, "as many cores too"
    assert provenance(known.reported_as, parse("CPU")) == ASSUMED, "the catalogue's CPU is nobody's"
    monkeypatch.setattr(backends, "cpu_name", lambda: "a CPU that nobody probed")
    other = machine(same.device, backends.profile_of(same)("CPU"))
    assert other is not None and other.slower == {} and "`foretell probe`" in other.notes[0]


@pytest.mark.parametrize("fourth", [0, *(pytest.param(n, marks=pytest.mark.slow(reason="other chips of the same catalogue")) for n in (1, 2, 3))])
def test_every_apple_chip_is_answered_for_by_the_catalogue(fourth: int) -> None:
    chips = [device for device in devices() if device.backend == "mps"]
    assert len(chips) > 20
    chips = chips[fourth::4]
    answers = {chip.name: api.fit("gpt-tiny", hardware=chip.name, **TINY) for chip in chips}
    for chip in chips:
        answer = answers[chip.name]
        assert answer.verdict == "fits" and answer.memory.capacity_bytes == chip.memory_bytes
        assert answer.time is not None and answer.time.provenance == ASSUMED
        assert any("never measured on such a device" in one for one in answer.assumptions)
    assert len({answer.memory.allocated_bytes for answer in answers.values()}) == 1


def test_attention_is_written_out_where_no_fused_kernel_is_known() -> None:
    """In training its weights are kept: a matrix of positions for each head and layer, in bf16."""
    seq, layers = 512, 4
    asked: dict[str, Any] = {"seq": seq, "micro_batch": 1, "overrides": {"layers": layers}}
    fused, plain = (api.fit("gpt2", hardware=on, **asked) for on in ("A100", "M2-Max"))
    kept = layers * 12 * seq * seq * 2
    more = plain.memory.categories["activations"] - fused.memory.categories["activations"]
    assert kept <= more <= 2.5 * kept


@pytest.mark.parametrize(
    ("chip", "ram", "name"),
    [("Apple M2", 16, "M2-16GB"), ("Apple M2", 24, "M2-16GB"), ("Apple M1 Max", 64, "M1-Max-64GB"), ("Apple M3 Pro", 18, "M3-Pro-18GB")],
)
def test_auto_on_a_mac_is_the_gpu_of_its_chip(chip: str, ram: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = int(0.7 * ram * GIB)
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False), backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: True)),
        mps=SimpleNamespace(recommended_max_memory=lambda: usable),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(this_machine, "cpu_name", lambda: chip)
    monkeypatch.setattr(this_machine, "usable_ram", lambda: ram * GIB)
    cluster = parse("auto", apple=True)
    assert (cluster.device.name, cluster.device.memory_bytes, cluster.count) == (name, usable, 1)
    assert cluster.device.peak_flops_per_second == find(name).peak_flops_per_second and chip in cluster.notes[0]
    assert parse("auto").device.backend == "cpu", "what runs plans runs them on the CPU"
    with pytest.raises(UnknownName, match="unknown Apple chip 'Apple M99'"):
        this_machine.from_chip("Apple M99", None, usable)


@pytest.mark.parametrize("on", ["CPU", "M2"])
def test_what_is_not_known_of_them_is_refused(on: str) -> None:
    with pytest.raises(UserError, match=r"what torch\.compile makes for .* is not predicted yet"):
        api.fit("gpt-tiny", hardware=on, compile=True)
