"""Fit what public tables of measured kernels and collectives say of each device, and keep it in the package.

    python benchmarks/silicon_fit.py --gemm FILE --attention FILE --nccl FILE [--devices a100_sxm,...]

Products and attention become factors on what is carried over from the H200's probe (foretell/hardware/silicon/*.json.gz),
collectives become tables of seconds by size and number of ranks (foretell/hardware/catalog/collectives.json). All rows are
fitted; how well rows held out are met is kept beside each factor.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import silicon_rows as rows

from foretell.hardware import catalog, silicon, wires
from foretell.hardware.links import usual
from foretell.hardware.lookup import find_profile
from foretell.hardware.types import Device
from foretell.price.analytic import family
from foretell.price.kernels import elsewhere
from foretell.price.kernels.features import describe
from foretell.price.kernels.ops import OpModel
from foretell.price.kernels.shapes import Shape

BASIS = "H200-SXM-141GB"
SOURCE = "NVIDIA AIConfigurator (github ai-dynamo/aiconfigurator, Apache-2.0), commit 095f58a"
DATE = "2026-08-21"
LEAST_ROWS = 50
FLASH_2 = ("ampere", "ada")
"""Generations on which the tables' flash attention is the one that PyTorch has."""
LACKS = ("memory-bound ops", "convolutions", "attention backward", "float32 products", "host", "power")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gemm", "attention", "nccl"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--devices", default="")
    asked = parser.parse_args()
    kernels = [*rows.products(asked.gemm), *rows.attentions(asked.attention)]
    messages = rows.messages(asked.nccl)
    stacks = _stacks(asked.gemm, asked.attention)
    if not asked.devices:
        wires.write(tables(messages, libraries(asked.nccl)), SOURCE, DATE)
    for name in sorted({kernel.device for kernel in kernels}):
        if asked.devices and name not in asked.devices.split(","):
            continue
        device = rows.device_of(name)
        if device is None:
            print(f"{name}: not in the catalogue")
            continue
        mine = [kernel for kernel in kernels if kernel.device == name]
        groups = fitted(mine, device)
        own = device.name == BASIS
        for which, chosen in (
            (silicon.PYTORCH, {group: one for group, one in groups.items() if _of_pytorch(group, own)}),
            (silicon.OTHERS, {group: one for group, one in groups.items() if not _of_pytorch(group, own) and (group != "16-bit")}),
        ):
            if chosen:
                found = silicon.Elsewhere(
                    device=device.name, basis=BASIS, source=SOURCE, date=DATE, stacks=stacks[name], lacks=LACKS,
                    groups={group: one.to_dict() for group, one in chosen.items()},
                )  # fmt: skip
                silicon.write(found, which)
        print(device.name, {group: (round(one.accuracy["median"], 3), round(one.accuracy["p90"], 3)) for group, one in groups.items()}, flush=True)


def _of_pytorch(group: str, probed: bool) -> bool:
    """Whether plans are priced by a group: where the device itself was probed, that is known better."""
    return group in ("16-bit", "8-bit", "flash-2") and not probed


def fitted(kernels: Iterable[rows.Kernel], device: Device) -> dict[str, elsewhere.Correction]:
    """A factor for every group with enough rows."""
    groups: dict[str, list[tuple[Shape, float]]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.group, []).append((kernel.shape, kernel.seconds))
        if kernel.group == "prefill:flash" and family(device) in FLASH_2 and _plain(kernel.shape):
            groups.setdefault("flash-2", []).append((_in_pytorch(kernel.shape), kernel.seconds))
    model = carried(device)
    return {group: learn(some, model) for group, some in sorted(groups.items()) if len(some) >= LEAST_ROWS}


def carried(device: Device) -> OpModel:
    """What the basis's profile says of this device."""
    profile = find_profile(BASIS)
    assert profile is not None, "the basis has a profile that travels with the package"
    return OpModel.from_dict(device, profile.ops)


def learn(some: list[tuple[Shape, float]], model: OpModel) -> elsewhere.Correction:
    shapes = [shape for shape, _ in some]
    known = model.seconds(shapes)
    described = [found for shape in shapes if (found := describe(shape, model.device)) is not None]
    return elsewhere.learn(described, [known[shape] for shape in shapes], [seconds for _, seconds in some])


def _plain(shape: Shape) -> bool:
    return shape.inputs[1].dtype == "bfloat16" and not any(str(attr).startswith("window:") for attr in shape.attrs)


def _in_pytorch(shape: Shape) -> Shape:
    return shape._replace(attrs=tuple(attr for attr in shape.attrs if not str(attr).startswith(elsewhere.KERNEL)))


TWINS = {"GB200": "B200", "B200": "GB200", "H100-SXM-80GB": "H200-SXM-141GB", "H200-SXM-141GB": "H100-SXM-80GB"}
"""Devices with the same links: sizes that one table lacks take their shape from the other."""


def tables(messages: Iterable[rows.Message], libraries: Mapping[str, str]) -> dict[str, Any]:
    """Device → its library, its link and, by operation and ranks, seconds by bytes: the middle of what was measured of a size."""
    sums: dict[str, dict[tuple[str, int], dict[int, list[float]]]] = {}
    for one in messages:
        device = rows.device_of(one.device)
        if device is not None:
            sums.setdefault(device.name, {}).setdefault((one.operation, one.ranks), {}).setdefault(one.nbytes, []).append(one.seconds)
    plain: dict[str, Curves] = {
        device: {which: {size: math.exp(mean(map(math.log, some))) for size, some in sizes.items()} for which, sizes in by_which.items()}
        for device, by_which in sums.items()
    }
    found: dict[str, Any] = {}
    for device, curves in sorted(plain.items()):
        row = found[device] = {"software": libraries.get(device, ""), "link": usual(catalog.find(device), 8).intra.name}
        for (operation, ranks), curve in sorted(curves.items()):
            whole = filled(curve, plain.get(TWINS.get(device, ""), {}).get((operation, ranks), {}))
            row.setdefault(operation, {})[str(ranks)] = [[size, float(f"{seconds:.5g}")] for size, seconds in sorted(whole.items())]
    return found


Curves = dict[tuple[str, int], dict[int, float]]


def filled(curve: Mapping[int, float], twin: Mapping[int, float]) -> dict[int, float]:
    """With the sizes that only the twin has, as much longer as at the sizes around them."""
    both = sorted(curve.keys() & twin.keys())
    if len(both) < 2:
        return dict(curve)
    logs = [math.log(curve[size] / twin[size]) for size in both]
    places = [math.log(size) for size in both]
    more = {size: seconds * math.exp(float(np.interp(math.log(size), places, logs))) for size, seconds in twin.items() if size not in curve}
    return {**curve, **more}


def libraries(path: Path) -> dict[str, str]:
    return {device.name: f"NCCL {row['nccl']}" for row in rows.read(path, ("device", "nccl")) if (device := rows.device_of(row["device"]))}


def _stacks(*paths: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for path in paths:
        for row in rows.read(path, ("device", "stack")):
            found.setdefault(row["device"], set()).add(row["stack"])
    return {device: tuple(sorted(names)) for device, names in found.items()}


if __name__ == "__main__":
    main()
