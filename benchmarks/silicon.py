"""Predicted against measured: products, attention and collectives of devices that are not here.

    python benchmarks/silicon.py --gemm FILE --attention FILE --nccl FILE --json OUT [--held-out] [--leave-out]

FILEs are CSV tables (plain or .gz) with the columns of NVIDIA's AIConfigurator (benchmarks/silicon_rows.py names them). OUT gets
`predictions`: kind (gemm, attention, nccl), device, row (the first after the header is 0), measured, predicted, low, high, in ms;
`unknown`: devices and rows that nothing is known of. A device that the catalogue has and no table was fitted to is predicted from
its data sheet and its generation.

    --held-out   each third of the rows, drawn by a seed, is predicted by factors fitted to the other two thirds
    --leave-out  every device is predicted as if there were no table of it
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import numpy as np  # noqa: E402
import silicon_fit as fit  # noqa: E402
import silicon_rows as rows  # noqa: E402

from foretell.errors import UserError  # noqa: E402
from foretell.hardware import catalog, silicon, wires  # noqa: E402
from foretell.hardware.parse import parse  # noqa: E402
from foretell.hardware.types import Device  # noqa: E402
from foretell.price.calibrate.kin import held_back, kin_of  # noqa: E402
from foretell.price.kernels.elsewhere import Correction  # noqa: E402
from foretell.price.kernels.ops import OpModel  # noqa: E402
from foretell.price.network import collectives  # noqa: E402

SEED, THIRDS = 20261117, 3
CATALOGUE_BAND = (0.75, 1.3)
"""Of a kernel on a device without a table of its own: what nine of ten rows of devices left out stay within."""
TABLE_BAND, FORMULA_BAND = (0.9, 1.12), (0.65, 1.45)
"""The same of collectives, with and without a table."""
Prediction = dict[str, Any]
Row = TypeVar("Row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gemm", "attention", "nccl", "json"):
        parser.add_argument(f"--{name}", type=Path, required=name == "json")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    asked = parser.parse_args()
    try:
        found, unknown = predictions(asked.gemm, asked.attention, asked.nccl, held_out=asked.held_out, leave_out=asked.leave_out)
    except UserError as error:
        sys.exit(f"{error.problem}; {error.remedy}")
    asked.json.write_text(json.dumps({"predictions": found, "unknown": unknown}) + "\n", encoding="utf-8")
    print("\n".join([*summary(found), *(neighbours(found) if asked.held_out else [])]))


def predictions(
    gemm: Path | None, attention: Path | None, nccl: Path | None, *, held_out: bool = False, leave_out: bool = False
) -> tuple[list[Prediction], list[str]]:
    found: list[Prediction] = []
    unknown: list[str] = []
    for kind, kernels in (("gemm", rows.products(gemm) if gemm else []), ("attention", rows.attentions(attention) if attention else [])):
        for name in dict.fromkeys(kernel.device for kernel in kernels):
            mine = [kernel for kernel in kernels if kernel.device == name]
            device = rows.device_of(name)
            if device is None:
                unknown.append(f"{kind}: {name}, {len(mine)} rows: not in the catalogue")
                continue
            if held_out:
                dealt = [(_fitted(seen, device), asked) for seen, asked in _dealt(mine)]
            else:
                dealt = [(_groups(device, leave_out), mine)]
            alone = leave_out or not (silicon.measured_elsewhere(device.name) or device.name == fit.BASIS)
            longer = held_back(device, _near(device, leave_out)) if alone and not held_out else 1.0
            found += [{"kind": kind, **row} for groups, asked in dealt for row in _priced(asked, device, groups, longer)]
    messages = rows.messages(nccl) if nccl else []
    by_device = [[message for message in messages if message.device == name] for name in dict.fromkeys(message.device for message in messages)]
    for third in range(THIRDS) if held_out else ():
        dealt_messages = [[*_dealt(some)][third] for some in by_device]
        fitted = wires.made(fit.tables([message for seen, _ in dealt_messages for message in seen], {}))
        for _, asked_messages in dealt_messages:
            found += _joined(asked_messages, unknown, fitted)
    for some in () if held_out else by_device:
        found += _joined(some, unknown, None, leave_out)
    return found, list(dict.fromkeys(unknown))


def _joined(
    messages: Sequence[rows.Message], unknown: list[str], fitted: Mapping[str, wires.Wires] | None, leave_out: bool = False
) -> list[Prediction]:
    """Collectives of one device, by the tables fitted to others of its rows where there are such."""
    device = rows.device_of(messages[0].device)
    if device is None:
        unknown.append(f"nccl: {messages[0].device}, {len(messages)} rows: not in the catalogue")
        return []
    own = fitted[device.name] if fitted is not None else None if leave_out else wires.table(device.name)
    return _carried(messages, device, own, leave_out)


def _dealt(every: Sequence[Row]) -> Iterator[tuple[list[Row], list[Row]]]:
    """Two thirds to fit and one to predict, for each third."""
    dealt = np.random.default_rng(SEED).permutation(len(every)) % THIRDS
    for third in range(THIRDS):
        yield [row for row, at in zip(every, dealt, strict=True) if at != third], [row for row, at in zip(every, dealt, strict=True) if at == third]


# ---------------------------------------------------------------- kernels


def _groups(device: Device, leave_out: bool) -> Mapping[str, Correction]:
    """The factors of a device; without a table of its own, those of its generation's other devices."""
    if not leave_out:
        known = silicon.measured_elsewhere(device.name)
        own = {**(known.groups if known else {}), **silicon.other_kernels(device.name)}
        if own:
            return {group: Correction.from_dict(one) for group, one in own.items()}
    near = _near(device, leave_out)
    known = silicon.measured_elsewhere(near.name)
    groups = {**(known.groups if known else {}), **silicon.other_kernels(near.name)}
    return {group: Correction.from_dict(one) for group, one in groups.items()}


def _near(device: Device, leave_out: bool) -> Device:
    """The device that speaks for one whose own table is not to be used, or does not exist."""
    return catalog.find(kin_of(device, device.name if leave_out else "")[0])


def _fitted(kernels: Iterable[rows.Kernel], device: Device) -> Mapping[str, Correction]:
    found = fit.fitted(kernels, device)
    return {group: one for group, one in found.items() if device.name != fit.BASIS or group != "16-bit"}


def _priced(kernels: Sequence[rows.Kernel], device: Device, groups: Mapping[str, Correction], longer: float) -> list[Prediction]:
    basis = fit.carried(device)
    model = OpModel(device, basis.families, groups)
    known = model.seconds(kernel.shape for kernel in kernels)
    out = []
    for kernel in kernels:
        seconds = known[kernel.shape] * longer
        low, high = groups[kernel.group].band(seconds) if kernel.group in groups else CATALOGUE_BAND
        row = _row(kernel.device, kernel.number, kernel.group, kernel.seconds, seconds, low, high)
        (m, k), n = kernel.shape.inputs[0].shape[-2:], kernel.shape.outputs[0].shape[-1]
        out.append({**row, "product": [m, n, k]} if len(kernel.shape.inputs) == 2 else row)
    return out


def _row(device: str, number: int, group: str, measured: float, seconds: float, low: float, high: float) -> Prediction:
    return {
        "device": device, "row": number, "group": group, "measured": measured * 1e3, "predicted": seconds * 1e3,
        "low": seconds * low * 1e3, "high": seconds * high * 1e3,
    }  # fmt: skip


# ---------------------------------------------------------------- collectives


def _carried(
    messages: Sequence[rows.Message], device: Device, table: wires.Wires | None, leave_out: bool
) -> list[Prediction]:
    out = []
    for message in messages:
        cluster = parse(f"{device.name}:{max(2, message.ranks)}")
        if leave_out:
            group = collectives.without_table(cluster, message.ranks, device.name)
        else:
            group = replace(collectives.fabric(cluster, message.ranks), **({"table": table} if table is not None else {}))
        seconds = collectives.collective(message.operation, message.nbytes, group).seconds
        low, high = TABLE_BAND if table is not None else FORMULA_BAND
        row = _row(message.device, message.number, f"{message.operation}:{message.ranks}", message.seconds, seconds, low, high)
        out.append({"kind": "nccl", "bytes": message.nbytes, **row})
    return out


# ---------------------------------------------------------------- what it comes to


def summary(found: Sequence[Prediction]) -> list[str]:
    """Errors by kind and device."""
    lines = [f"{'kind':<10} {'device':<20} {'group':<20} {'rows':>5} {'median':>7} {'p90':>7} {'bias':>7} {'held':>5}"]
    keys = sorted({(row["kind"], row["device"], group) for row in found for group in _classes(row)})
    for kind, device, group in keys:
        some = [row for row in found if (row["kind"], row["device"]) == (kind, device) and group in _classes(row)]
        ratio = np.array([row["predicted"] / row["measured"] for row in some])
        error = np.abs(ratio - 1)
        held = np.mean([row["low"] <= row["measured"] <= row["high"] for row in some])
        lines.append(
            f"{kind:<10} {device:<20} {group:<20} {len(some):>5} {np.median(error):>7.1%} {np.quantile(error, 0.9):>7.1%} "
            f"{np.median(ratio) - 1:>+7.1%} {held:>5.0%}"
        )
    return lines


def neighbours(found: Sequence[Prediction]) -> list[str]:
    """How much of the error of large 16-bit products two rows do not share whose first size alone differs, by one: what no smooth law of
    the sizes can say. The median of log(measured / predicted) of one over that of the other, over the root of two."""
    lines = []
    large = [row for row in found if row.get("group") == "16-bit" and LARGE in _classes(row)]
    for device in dict.fromkeys(row["device"] for row in large):
        left = {tuple(row["product"]): math.log(row["measured"] / row["predicted"]) for row in large if row["device"] == device}
        apart = [abs(left[m + 1, n, k] - one) / math.sqrt(2) for (m, n, k), one in left.items() if (m + 1, n, k) in left]
        if apart:
            lines.append(f"{device}: {len(apart)} pairs of rows one apart in m; {np.median(apart):.1%} of each is not shared")
    return lines


LARGE = "16-bit, 512 or more"


def _classes(row: Prediction) -> tuple[str, ...]:
    if row["kind"] == "nccl":
        size = row["bytes"]
        return ("4 MiB and more" if size >= 4 * 2**20 else "below 1 MiB" if size < 2**20 else "1 to 4 MiB",)
    group = str(row["group"])
    return (group, f"{group}, 512 or more") if "product" in row and min(row["product"]) >= 512 else (group,)


if __name__ == "__main__":
    main()
