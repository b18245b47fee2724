"""Rows of public tables of measured kernels and collectives, as ops that foretell prices.

The tables' columns are those of NVIDIA's AIConfigurator (Apache-2.0), commit 095f58a of 2026-08-21:

    gemm       device, stack, kernel, dtype, m, n, k, ms
    attention  device, stack, phase, kernel, dtype, kv_dtype, batch, isl, step, heads, kv_heads, head_dim, window, ms
    nccl       device, nccl, op, dtype, gpus, elements, ms
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import NamedTuple

from foretell.errors import UnknownName, UserError
from foretell.hardware import catalog
from foretell.hardware.types import Device
from foretell.price.kernels.shapes import Shape
from foretell.trace.types import TensorSpec

DEVICES = {
    "a100_sxm": "A100-SXM-80GB", "h100_sxm": "H100-SXM-80GB", "h200_sxm": "H200-SXM-141GB", "b200_sxm": "B200", "gb200": "GB200",
    "l40s": "L40S", "rtx_pro_6000_server": "RTX-PRO-6000", "b60": "Arc-Pro-B60", "b300_sxm": "B300", "gb300": "GB300",
    "h100_pcie": "H100-PCIe-80GB", "a100_pcie": "A100-PCIe-80GB", "gh200": "GH200-96GB", "mi300x": "MI300X", "a10": "A10", "l4": "L4",
}  # fmt: skip
"""Names in the tables → names in the catalogue; others are looked up as they are."""
PRODUCTS = {"bfloat16": "16-bit", "float16": "16-bit", "half": "16-bit", "fp8": "8-bit", "fp8_block": "8-bit-blocks", "nvfp4": "4-bit"}
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "fp8": "float8_e4m3fn", "int8": "int8"}
OPERATIONS = {"all_gather": "all_gather", "all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all"}
WIDTHS = {"half": 2, "bfloat16": 2, "int8": 1, "float": 4, "float32": 4}


class Kernel(NamedTuple):
    """One measured product or attention."""

    device: str
    number: int
    """Of the row in its file, the first after the header being 0."""
    group: str
    shape: Shape
    seconds: float


class Message(NamedTuple):
    """One measured collective."""

    device: str
    number: int
    operation: str
    ranks: int
    nbytes: int
    """Of the larger buffer of a rank."""
    seconds: float


def device_of(name: str) -> Device | None:
    """The catalogue's device; None where it has none."""
    try:
        return catalog.find(DEVICES.get(name, name))
    except UnknownName:
        return None


def read(path: Path, needed: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of a CSV file, compressed or not."""
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read '{path}': {error}", "give a CSV table, plain or .gz") from None
    table = csv.DictReader(text.splitlines())
    lacking = [name for name in needed if name not in (table.fieldnames or ())]
    if lacking:
        raise UserError(f"'{path}' has no column {', '.join(lacking)}", "give a table with the columns that `--help` names")
    return list(table)


def products(path: Path) -> list[Kernel]:
    """Products of a table: m×k by the transpose of n×k."""
    found = []
    for number, row in enumerate(read(path, ("device", "dtype", "m", "n", "k", "ms"))):
        group = PRODUCTS.get(row["dtype"])
        if group is None:
            continue
        m, n, k = (int(row[name]) for name in ("m", "n", "k"))
        found.append(Kernel(row["device"], number, group, product(group, m, n, k), float(row["ms"]) / 1e3))
    return found


def product(group: str, m: int, n: int, k: int) -> Shape:
    attrs: tuple[str, ...] = ("layout:ct",)
    if group == "16-bit":
        dtype, result, name = "bfloat16", "bfloat16", "aten.mm.default"
    else:
        dtype, result, name = "float8_e4m3fn", "bfloat16", "aten._scaled_mm.default"
        attrs = attrs if group == "8-bit" else (*attrs, f"kernel:{group}")
    return Shape(name, (TensorSpec((m, k), dtype), TensorSpec((k, n), dtype)), (TensorSpec((m, n), result),), attrs)


def attentions(path: Path) -> list[Kernel]:
    """Prefill (causal) and decode of a table."""
    found = []
    needed = ("device", "phase", "kernel", "dtype", "kv_dtype", "batch", "isl", "step", "heads", "kv_heads", "head_dim", "window", "ms")
    for number, row in enumerate(read(path, needed)):
        b, tokens, before, h, kv, size = (int(row[name]) for name in ("batch", "isl", "step", "heads", "kv_heads", "head_dim"))
        first = row["phase"] == "context"
        queries, keys = (tokens, tokens + before) if first else (1, tokens + before)
        dtype, cached = DTYPES.get(row["dtype"], "bfloat16"), DTYPES.get(row["kv_dtype"], "bfloat16")
        q, k = TensorSpec((b, h, queries, size), dtype), TensorSpec((b, kv, keys, size), cached)
        window = (f"window:{row['window']}",) if row["window"] not in ("", "0") else ()
        group = ("prefill" if first else "decode") + f":{family(row['kernel'])}"
        shape = Shape(
            "aten._scaled_dot_product_flash_attention.default", (q, k, k), (q,), (0.0, first, f"kernel:{group}", *window)
        )
        found.append(Kernel(row["device"], number, group, shape, float(row["ms"]) / 1e3))
    return found


def family(kernel: str) -> str:
    """One name for kernels of one kind: tables name the phase and the engine too."""
    return "triton" if "triton" in kernel else "flashinfer" if "flashinfer" in kernel else "flash"


def messages(path: Path) -> list[Message]:
    """Collectives of a table, which counts the elements of the larger buffer."""
    found = []
    for number, row in enumerate(read(path, ("device", "op", "dtype", "gpus", "elements", "ms"))):
        operation = OPERATIONS.get(row["op"], row["op"])
        nbytes = int(row["elements"]) * WIDTHS[row["dtype"]]
        found.append(Message(row["device"], number, operation, int(row["gpus"]), nbytes, float(row["ms"]) / 1e3))
    return found
