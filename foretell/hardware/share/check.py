"""Is it possible? What a shared file says, against physics, the catalogue and itself. The same check when written and when added.

    complaints(shared)   → sentences, none where the file may be believed
    refuse(shared, path) → one error with the first of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from foretell.errors import FileFormatError
from foretell.hardware.catalog import GENERIC_CPU, find_reported
from foretell.hardware.catalog import devices as catalogue
from foretell.hardware.probe.summary import product_rate
from foretell.hardware.profile import OpRow
from foretell.hardware.share.file import REMEDY, STAGES, SharedProbe
from foretell.hardware.types import PEAK_DTYPES, Device

ABOVE = 1.1
"""How far above a device's peak a rate may lie: clocks above nominal, and the clock's own error."""
LEAST_OF_PEAK, LEAST_OF_BANDWIDTH = 0.2, 0.3
"""Of the peak of any one dtype that the best product reaches, and of bandwidth that large copies reach: less means other units, another
device or a machine that was in use."""
CACHES = 12.0
"""How many times as fast as memory caches may be."""
TIMED_SECONDS = 5e-6
"""Shorter rows are too short for a rate."""
CPU_FLOPS_PER_CORE: Mapping[str, float] = {"float64": 0.4e12, "float32": 1.5e12}
CPU_LOW_FLOPS_PER_CORE, CPU_BYTES_PER_CORE = 8e12, 1e12
"""What no core reaches; matrix units of CPUs multiply 16-bit numbers several times as fast."""
MOST: Mapping[str, tuple[float, float]] = {
    "memory_bytes": (1e9, 8e12), "memory_bandwidth_bytes_per_second": (5e9, 5e13), "sm_count": (1, 4096), "tdp_watts": (1, 5000),
    "l2_bytes": (1e4, 4e9),
}  # fmt: skip
"""Least and most of any device's figures."""
PEAKS = (1e9, 5e16)
LEAST_CASES: Mapping[str, int] = {
    "linear": 30, "convolution": 12, "attention": 6, "norm": 8, "unary": 12, "binary": 12, "reduction": 6, "movement": 8, "indexing": 6,
    "batched": 8, "loss": 2, "update": 2, "transformer": 1,
}  # fmt: skip
"""Families of ops without which steps cannot be predicted, and how many cases of each."""
LEAST_STEPS = 4
MOST_ZEROS = 0.05
"""Share of rows that may have taken no time: what launches nothing."""
LONGEST_SECONDS = 60.0
COPIES_BYTES_PER_SECOND = 5e12
HALVES = ("bfloat16", "float16")
"""Dtypes whose peak every catalogue entry has from a data sheet; of others some name another unit's."""
LATENCIES = (2e-10, 2e-5)
"""Least and most seconds of a load that waits for memory."""
_SIZES: Mapping[str, int] = {
    "float64": 8, "complex64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "complex128": 16,
}  # fmt: skip
_POSITIVE: Mapping[str, tuple[str, ...]] = {
    "levels": ("working_set_bytes", "bytes_per_second"), "copies": ("bytes", "seconds"), "steps": ("seconds", "host_seconds"), "power": ("watts",),
    "latency": ("working_set_bytes", "seconds"), "rates": ("side", "seconds"),
}  # fmt: skip
_UNARY = ("aten.gelu.", "aten.relu.", "aten.exp.", "aten.tanh.", "aten.silu.", "aten.sigmoid.", "aten._to_copy.", "aten.neg.", "aten.sqrt.")
"""Ops that read and write every element once."""


def refuse(shared: SharedProbe, path: str) -> None:
    found = next(complaints(shared), None)
    if found is not None:
        raise FileFormatError(f"'{path}': {found}", REMEDY)


def complaints(shared: SharedProbe) -> Iterator[str]:
    """What cannot be, the gravest first."""
    device = shared.device
    yield from _figures(shared, device)
    yield from _numbers(shared)
    yield from _missing(shared)
    yield from _references(shared, device)
    yield from _too_fast(shared, device)
    yield from _too_slow(shared, device)
    yield from _others(shared, device)


def _figures(shared: SharedProbe, device: Device) -> Iterator[str]:
    """The device is one that can be, and the one that its name says."""
    about = shared.measured.about
    for name, (least, most) in MOST.items():
        value = getattr(device, name)
        if value is not None and not least <= value <= most:
            yield f"{name} of {device.name} is {value:,.4g}, and devices have {least:,.4g} to {most:,.4g}"
    for dtype, rate in device.peak_flops_per_second.items():
        if dtype not in PEAK_DTYPES or not PEAKS[0] <= rate <= PEAKS[1]:
            yield f"the peak of {device.name} in {dtype} is {rate:,.4g} FLOP/s"
    if about.backend != device.backend:
        yield f"the backend is {about.backend}, and {device.name} has {device.backend}"
    known = next((one for one in catalogue() if one.name == device.name), None)
    reported = find_reported(about.reported_as) if device.backend != "cpu" else None
    if reported is not None and reported.name != device.name:
        yield f"it says {device.name}, and torch's name for the measured GPU, {about.reported_as}, is that of {reported.name}"
    if known is not None and known.name != GENERIC_CPU:
        yield from _unlike(device, known)
    elif known is None and device.backend == "cpu":
        yield f"{device.name} is no name for a CPU's probe"


def _unlike(device: Device, known: Device) -> Iterator[str]:
    for name in ("backend", "compute_capability"):
        if getattr(device, name) != getattr(known, name):
            yield f"{name} is {getattr(device, name)}, and {known.name} has {getattr(known, name)}"
    pairs: list[tuple[str, float, float, float]] = [
        ("sm_count", device.sm_count, known.sm_count, 0.05),
        ("memory_bytes", device.memory_bytes, known.memory_nominal_bytes, 0.15),
        ("memory_bandwidth_bytes_per_second", device.memory_bandwidth_bytes_per_second, known.memory_bandwidth_bytes_per_second, 0.1),
        *((f"peak {dtype}", device.peak(dtype), rate, 0.1) for dtype, rate in known.peak_flops_per_second.items()),
    ]
    for name, said, usual, off in pairs:
        if abs(said / usual - 1) > off:
            yield f"{name} is {said:,.4g}, and {known.name} has {usual:,.4g}"


def _numbers(shared: SharedProbe) -> Iterator[str]:
    """Positive where it must be, and not longer than anybody waits."""
    measured = shared.measured
    rows = measured.rows
    for row in rows:
        if row.seconds > LONGEST_SECONDS or row.host_seconds > LONGEST_SECONDS:
            yield f"one {row.name} takes {max(row.seconds, row.host_seconds):,.4g} s: seconds in other units?"
            return
    if rows and sum(row.seconds <= 0 for row in rows) > MOST_ZEROS * len(rows):
        yield f"{sum(row.seconds <= 0 for row in rows)} of {len(rows)} rows take no time"
    for part, names in _POSITIVE.items():
        for entry in getattr(measured, part):
            for name in names:
                if not entry[name] > 0:
                    yield f"{part} has {name} {entry[name]!r}, which is not positive"
    for entry in shared.collectives:
        if not (entry["seconds"] > 0 and entry["bytes"] > 0 and entry["ranks"] > 1):
            yield f"collectives has {entry['op']} of {entry['ranks']} ranks, {entry['bytes']!r} bytes and {entry['seconds']!r} s"
    for name in ("device_seconds", "host_seconds"):
        value = measured.launch.get(name)
        if value is not None and not 0 <= value < 1e-2:
            yield f"an empty op takes {value!r} s ({name}): seconds in other units?"
    if any(value <= 0 for value in measured.clocks.values()):
        yield f"clocks are {dict(measured.clocks)}"


def _missing(shared: SharedProbe) -> Iterator[str]:
    measured = shared.measured
    strange = [stage for stage in measured.missing if stage not in STAGES]
    if strange:
        yield f"it lacks '{strange[0]}', which is no stage of a probe"
    cases = Counter(case.family for case in measured.cases)
    short = [f"{family} ({cases[family]} of {least})" for family, least in LEAST_CASES.items() if cases[family] < least]
    if short:
        yield f"too few measured cases: {', '.join(short)}; let the probe finish"
    if len(measured.steps) < LEAST_STEPS:
        yield f"{len(measured.steps)} reference steps, and {LEAST_STEPS} are needed; let the probe finish"
    for name in ("launch", "levels", "copies"):
        if not getattr(measured, name):
            yield f"{name} were not measured; let the probe finish"


def _references(shared: SharedProbe, device: Device) -> Iterator[str]:
    """Reference steps are the probe's own: what a file names is traced when it is added, so it must name nothing else."""
    from foretell.hardware.probe.cases.steps import configs

    known = configs("cpu" if device.backend == "cpu" else "cuda", large=True)
    for step in shared.measured.steps:
        if step["config"] not in known:
            yield f"the reference step {str(step['config'].get('model'))!r} is none that a probe runs"
            return


def _too_fast(shared: SharedProbe, device: Device) -> Iterator[str]:
    for row in shared.measured.rows:
        found = product_rate(row)
        if found is None or row.seconds < TIMED_SECONDS:
            continue
        dtype, rate = found
        if rate > _most_flops(device, dtype):
            most = _most_flops(device, dtype) / ABOVE
            yield f"one {row.name} in {dtype} runs at {rate / 1e12:,.4g} TFLOP/s, and {device.name} reaches {most / 1e12:,.4g}"
            return
    for product in (one for one in shared.measured.rates if one["dtype"] in HALVES):
        rate, most = 2.0 * product["side"] ** 3 / product["seconds"], _most_flops(device, product["dtype"])
        if rate > most:
            yield f"a product in {product['dtype']} runs at {rate / 1e12:,.4g} TFLOP/s, and {device.name} reaches {most / ABOVE / 1e12:,.4g}"
            return
    most, cache = _most_bytes(device), device.l2_bytes or 0
    large = [level for level in shared.measured.levels if level["working_set_bytes"] > 4 * cache]
    for level in large if device.backend != "cpu" else ():
        if level["bytes_per_second"] > most:
            yield f"memory moves {level['bytes_per_second'] / 1e9:,.4g} GB/s, and {device.name} reaches {most / ABOVE / 1e9:,.4g}"
            return
    for level in shared.measured.levels:
        if level["bytes_per_second"] > CACHES * most:
            yield f"caches move {level['bytes_per_second'] / 1e9:,.4g} GB/s, and those of {device.name} cannot"
            return
    for name, touched, seconds in _streams(shared.measured.rows, 4 * cache):
        if touched / seconds > (most if device.backend != "cpu" else CACHES * most):
            yield f"one {name} moves {touched / seconds / 1e9:,.4g} GB/s, and {device.name} reaches {most / ABOVE / 1e9:,.4g}"
            return


def _too_slow(shared: SharedProbe, device: Device) -> Iterator[str]:
    """Wrong units, another device's rows, or a machine that was in use. A CPU's peak is assumed, so it may be far from it."""
    best: dict[str, float] = {}
    for row in shared.measured.rows:
        found = product_rate(row)
        if found is not None and found[0] in PEAK_DTYPES:
            best[found[0]] = max(best.get(found[0], 0.0), found[1] / device.peak(found[0]))
    share = 1.0 if device.backend != "cpu" else 0.05
    reached = max(best.values(), default=0.0)
    if reached < LEAST_OF_PEAK * share:
        why = "seconds in other units, another device, or one that was in use"
        yield f"the best product reaches {100 * reached:.2g} % of the peak of {device.name}: {why}"
    fastest = max((level["bytes_per_second"] for level in shared.measured.levels), default=0.0)
    if fastest < LEAST_OF_BANDWIDTH * share * device.memory_bandwidth_bytes_per_second:
        told = f"{fastest / 1e9:,.4g} GB/s of the {device.memory_bandwidth_bytes_per_second / 1e9:,.0f} that {device.name} has"
        yield f"memory moves at most {told}: other units, or a device that was in use"


def _others(shared: SharedProbe, device: Device) -> Iterator[str]:
    for copy in shared.measured.copies:
        if copy["bytes"] / copy["seconds"] > COPIES_BYTES_PER_SECOND:
            yield f"a copy ({copy['name']}) moves {copy['bytes'] / copy['seconds'] / 1e9:,.4g} GB/s"
            return
    limit = 1.5 * (device.tdp_watts or MOST["tdp_watts"][1])
    for point in shared.measured.power if device.backend != "cpu" else ():
        if point["watts"] > limit:
            yield f"{point['name']} draws {point['watts']:,.4g} W, and {device.name} has {device.tdp_watts:,.0f}"
            return
    for load in shared.measured.latency:
        if not LATENCIES[0] <= load["seconds"] <= LATENCIES[1]:
            yield f"a load from {load['working_set_bytes']:,.0f} bytes takes {load['seconds']:.3g} s: seconds in other units?"
            return
    for entry in shared.collectives:
        if entry["bytes"] / entry["seconds"] > 2 * device.memory_bandwidth_bytes_per_second:
            yield f"{entry['op']} moves {entry['bytes'] / entry['seconds'] / 1e9:,.4g} GB/s, which is more than the memory of {device.name} does"
            return
    links = shared.links
    if links is not None and (any(len(row) != len(links) for row in links) or any(rate < 0 for row in links for rate in row)):
        yield "links is no square table of rates"


def _most_flops(device: Device, dtype: str) -> float:
    if device.backend == "cpu":
        return device.sm_count * CPU_FLOPS_PER_CORE.get(dtype, CPU_LOW_FLOPS_PER_CORE)
    return ABOVE * device.peak(dtype)


def _most_bytes(device: Device) -> float:
    return device.sm_count * CPU_BYTES_PER_CORE if device.backend == "cpu" else ABOVE * device.memory_bandwidth_bytes_per_second


def _streams(rows: Iterable[OpRow], least: float) -> Iterator[tuple[str, float, float]]:
    """Name, bytes and seconds of rows that read and write every element once, larger than caches."""
    for row in rows:
        if row.name.startswith(_UNARY) and len(row.inputs) == len(row.outputs) == 1 and row.seconds > TIMED_SECONDS:
            specs: tuple[Any, ...] = (*row.inputs, *row.outputs)
            touched = sum(spec.numel * _SIZES.get(spec.dtype, 1) for spec in specs)
            if row.inputs[0].numel == row.outputs[0].numel and touched > least:
                yield row.name, touched, row.seconds
