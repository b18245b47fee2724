"""Predictions for screens: usual ones, ones with more to say than there is room for, with and without times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foretell.quantities import (
    FITS,
    NO,
    Cost,
    Energy,
    Holder,
    Memory,
    Mfu,
    Phase,
    Prediction,
    Remedy,
    Run,
    Throughput,
    Time,
)
from foretell.report import command
from foretell.report.terminal import bar
from foretell.units import GIB

WIDTHS = (40, 60, 80, 100, 120, 200)
TYPED = ("fit", "llama3-8b", "--on", "8xH100")
SGD = Remedy(change="plain SGD", flag="--optimizer sgd", saves_bytes=15 * GIB, fits=True, costs="another optimizer", verdict=FITS,
             device_bytes=47 * GIB, margin_bytes=3 * GIB)  # fmt: skip
FULL = Remedy(change="recompute every block", flag="--recompute full", saves_bytes=20 * GIB, fits=True, verdict=FITS)
CLOSE = Remedy(change="two samples at a time", flag="--micro-batch 2", saves_bytes=4 * GIB, fits=False, verdict=NO, margin_bytes=-8 * GIB)
FAR = Remedy(change="recompute some ops", flag="--recompute selective", saves_bytes=2 * GIB, fits=False, verdict=NO, margin_bytes=-10 * GIB)


def memory(categories: dict[str, int], *, unused: int, context: int, capacity: int, **changes: Any) -> Memory:
    allocated = sum(categories.values())
    reserved, device = allocated + unused, allocated + unused + context
    values: dict[str, Any] = {
        "allocated_bytes": allocated, "reserved_bytes": reserved, "device_bytes": device, "capacity_bytes": capacity,
        "margin_bytes": capacity - device, "host_bytes": GIB, "categories": categories,
        "bands": {
            "allocated_bytes": (allocated - GIB // 2, allocated + GIB // 2),
            "reserved_bytes": (reserved - GIB // 2, reserved + GIB), "device_bytes": (device - GIB, device + 2 * GIB),
        },
        "holders": tuple(Holder(name=f"blocks.*.part{i}", category="activations", bytes=(9 - i) * GIB) for i in range(7)),
        "phases": (
            Phase(name="init", allocated_bytes=1, reserved_bytes=1, device_bytes=1, host_bytes=0),
            Phase(name="first_step", allocated_bytes=9, reserved_bytes=9, device_bytes=9, host_bytes=0),
        ),
        "provenance": {"allocated_bytes": "counted", "reserved_bytes": "counted", "device_bytes": "measured: on such a device"},
    }  # fmt: skip
    return Memory(**{**values, **changes})


CATEGORIES = {
    "parameters": 8 * GIB, "gradients": 8 * GIB, "optimizer": 16 * GIB, "activations": 20 * GIB, "logits": 4 * GIB,
    "temporaries": 2 * GIB, "workspace": GIB // 8, "inputs": 64,
}  # fmt: skip


def prediction(verdict: str, *, capacity: int = 80 * GIB, **changes: Any) -> Prediction:
    """62.1 GiB of device memory, on eight devices."""
    values: dict[str, Any] = {
        "verdict": verdict,
        "model": {
            "source": "llama3-8b",
            "description": "llama3-8b, micro-batch 1 × 8192 tokens",
            "recipe": {"optimizer": "adamw-fused", "precision": "fsdp-bf16", "recompute": "none", "accumulate": 1},
        },
        "hardware": {"nodes": 1, "devices_per_node": 8, "device": {"name": "H100-SXM-80GB"}},
        "parameters": 8_030_261_248,
        "memory": memory(CATEGORIES, unused=3 * GIB, context=GIB, capacity=capacity),
        "remedies": (SGD, FULL, CLOSE),
        "assumptions": ("H100 means H100-SXM-80GB", "eager PyTorch"),
        "versions": {"foretell": "0.1.0"},
    }
    return Prediction(**{**values, **changes})


def overfull(verdict: str) -> Prediction:
    """More of everything than a screen can hold, with names nobody foresaw."""
    base = prediction(verdict, capacity=40 * GIB if verdict == NO else 80 * GIB)
    long = "a sentence that goes on and on, about what was taken to be true " * 6
    name = "/home/someone/projects/a-rather-long-folder/models/transformer.py:build_the_large_one"
    return replace(
        base,
        model={**base.model, "source": name, "description": f"{name}, micro-batch 1\n\x1b[31mred"},
        memory=replace(
            base.memory,
            holders=tuple(Holder(name="model." * 40 + str(i), category="activations", bytes=GIB) for i in range(30)),
            provenance={"device_bytes": long},
        ),
        remedies=tuple(
            Remedy(change=long, flag=f"--set a_long_setting_name_{i}={i}", saves_bytes=GIB, fits=False, costs=long)
            for i in range(20)
        ),
        assumptions=tuple(f"{i}: {long}" for i in range(50)),
    )


ONE = {"nodes": 1, "devices_per_node": 1, "device": {"name": "H200-SXM-141GB"}}
TIME = Time(
    step_seconds=0.142, low_seconds=0.131, high_seconds=0.155, binds="compute", provenance="measured", phases={},
    breakdown={"gemm": 0.0866, "attention": 0.017, "memory": 0.0341, "communication": 0.0014, "waiting_for_host": 0.0029},
    device_seconds=0.138, host_seconds=0.05,
)  # fmt: skip
MFU = Mfu(value=0.521, hfu=0.521, flops_per_step=1, peak_flops_per_second=1e15, peak_dtype="bfloat16", convention="2 each")
RUN = Run(
    amount=1e12, unit="tokens", steps=122_070_313, seconds=17_333_984.0, low_seconds=15_991_211.0, high_seconds=18_920_898.0,
    joules=1.06e10, money=19_741.0, carbon_kilograms=1300.0, device_years=0.549, embodied_carbon_kilograms=12.0,
)  # fmt: skip
"""1T tokens, 8192 a step."""


def timed(base: Prediction, **changes: Any) -> Prediction:
    """With all that is known of speed, on as many devices as it has."""
    count = command.device_count(base)
    values: dict[str, Any] = {
        "time": TIME, "mfu": MFU,
        "throughput": Throughput(
            unit="tokens", per_step=8192 * count, per_second=8192 * count / 0.142, per_second_per_device=8192 / 0.142
        ),
        "energy": Energy(
            joules_per_step=87.0 * count, low_joules=78.3 * count, high_joules=95.7 * count, watts_per_device=612, provenance="measured"
        ),
        "cost": Cost(
            per_hour=4.1 * count, per_step=4.1 * count * 0.142 / 3600, per_billion=4.1 * 0.142 / 3600 / 8192 * 1e9, unit="tokens",
            currency="USD", source="assumed: a cloud, of one day; yours may differ",
        ),
    }  # fmt: skip
    return replace(base, **{**values, **changes})


def timed_overfull(verdict: str) -> Prediction:
    odd = replace(TIME, breakdown={**dict.fromkeys(bar._TIME_LOOKS, 0.02), "new": 0.01}, provenance="assumed: " + "for reasons " * 30)
    return timed(overfull(verdict), time=odd, run=RUN, mfu=replace(MFU, hfu=0.7))
