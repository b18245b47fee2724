"""The few figures of a probe that people ask for first. Plain data in, plain data out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foretell.hardware.profile import Measured, OpRow

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten._scaled_mm.", "aten._grouped_mm.")


def summary(measured: Measured) -> dict[str, Any]:
    """Best matrix product per dtype, memory, launches, copies, watts; None where it was not measured."""
    rates = [level["bytes_per_second"] for level in measured.levels]
    copies = fastest(measured.copies)
    watts = [point["watts"] for point in measured.power]
    return {
        "device": measured.about.device,
        "reported_as": measured.about.reported_as,
        "mode": measured.mode,
        "partial": bool(measured.missing),
        "missing": list(measured.missing),
        "notes": list(measured.notes),
        "cases": len(measured.cases),
        "rows": len(measured.rows),
        "product_flops_per_second": products(measured.rows),
        "memory_bytes_per_second": rates[-1] if rates else None,
        "cache_bytes_per_second": max(rates) if rates else None,
        "load_seconds": loads(measured.latency) or None,
        "rate_flops_per_second": dtype_rates(measured.rates) or None,
        "launch": dict(measured.launch) or None,
        "copy_bytes_per_second": copies,
        "idle_watts": next((point["watts"] for point in measured.power if point["name"] == "idle"), None),
        "most_watts": max(watts) if watts else None,
        "reference_steps": len(measured.steps),
    }


def loads(latency: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Working set in bytes → seconds of a load that waits for the one before, from small to large."""
    return {int(row["working_set_bytes"]): float(row["seconds"]) for row in sorted(latency, key=lambda row: row["working_set_bytes"])}


def dtype_rates(rates: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Dtype → FLOP/s of the best square product."""
    return {str(row["dtype"]): 2.0 * float(row["side"]) ** 3 / float(row["seconds"]) for row in rates}


def products(rows: Iterable[OpRow]) -> dict[str, float]:
    """Dtype → the best rate of any matrix product measured, in FLOP/s."""
    best: dict[str, float] = {}
    for found in map(product_rate, rows):
        if found is not None:
            best[found[0]] = max(best.get(found[0], 0.0), found[1])
    return dict(sorted(best.items(), key=lambda item: -item[1]))


def product_rate(row: OpRow) -> tuple[str, float] | None:
    """Dtype and FLOP/s of a matrix product; None of other ops."""
    if not row.name.startswith(_PRODUCTS) or row.seconds <= 0 or not row.outputs:
        return None
    place = 1 if "addmm" in row.name else 0
    left = row.inputs[place] if len(row.inputs) > place else None
    if left is None or not left.shape or left.dtype.startswith("complex"):
        return None
    out = row.outputs[0]
    groups = out.shape[0] if "_grouped_mm" in row.name and len(left.shape) < len(out.shape) else 1  # share what is multiplied
    return "tf32" if "tf32" in row.attrs else left.dtype, 2 * out.numel * left.shape[-1] / groups / row.seconds


def fastest(copies: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Kind of copy → bytes per second of the largest that was measured."""
    largest: dict[str, Mapping[str, Any]] = {}
    for row in copies:
        if row["name"] not in largest or row["bytes"] >= largest[row["name"]]["bytes"]:
            largest[row["name"]] = row
    return {name: row["bytes"] / row["seconds"] for name, row in largest.items()}
