"""Memory that attention takes for itself while it runs: cuDNN's, flash and memory-efficient kernels, forward and backward."""

from __future__ import annotations

from math import ceil

from foretell.hardware.generations import Multiprocessors
from foretell.price.kernels.scratch_data import Buffers, input_specs, round_up
from foretell.trace.types import Op
from foretell.units import DTYPE_BYTES


def cudnn(op: Op, _: Multiprocessors) -> Buffers:
    """Forward: cuDNN asks for 16 bytes or so."""
    return (16,)


def cudnn_backward(op: Op, _: Multiprocessors) -> Buffers:
    """One workspace: fp32 dq, the row sums of dO*O, and dk, dv per query head where query heads share keys."""
    query, key, value = input_specs(op)[1:4]
    batch, heads, rows, size = query.shape
    workspace = 4 * batch * heads * rows * (size + 1) + 16
    if key.shape[1] != heads:
        workspace += batch * heads * key.shape[2] * (size + value.shape[3]) * DTYPE_BYTES[key.dtype]
    return (workspace,)


def flash(op: Op, dev: Multiprocessors) -> Buffers:
    """Partial outputs and row sums where keys are split over blocks, as num_splits_heuristic of flash_api decides."""
    query, key = input_specs(op)[:2]
    dropout = next((value for value in op.attrs if isinstance(value, float)), 0.0)
    batch, heads, rows, size = query.shape
    blocks = batch * heads * ceil(rows / 64)
    columns = ceil(key.shape[2] / (256 if size <= 64 else 128 if size <= 128 else 64))
    splits = 1 if dropout else _flash_splits(blocks, dev.multiprocessors * 2, columns)
    if splits == 1:
        return ()
    total = 4 * splits * batch * heads * rows
    return (total, total * _head(size))


def _flash_splits(blocks: int, slots: int, columns: int) -> int:
    if blocks >= 0.8 * slots:
        return 1
    able = [n for n in range(1, min(128, slots, columns) + 1) if n == 1 or ceil(columns / n) != ceil(columns / (n - 1))]
    waves = {n: blocks * n / slots for n in able}
    efficiency = {n: wave / ceil(wave) for n, wave in waves.items()}
    return min(n for n in able if efficiency[n] >= 0.85 * max(efficiency.values()))


def _head(size: int) -> int:
    return round_up(size, 32) if size <= 128 else round_up(size, 64)


def flash_backward(op: Op, _: Multiprocessors) -> Buffers:
    """flash_api: softmax_d and fp32 dq_accum, rows padded to 128, head to 32; dk, dv per query head if keys are shared.

    Heads below 32 were measured with two more tensors of the size of dO.
    """
    grad, query, key = input_specs(op)[:3]
    batch, heads, rows, size = query.shape
    softmax = 4 * batch * heads * round_up(rows, 128)
    shared = batch * heads * key.shape[2] * size * DTYPE_BYTES[key.dtype] if key.shape[1] != heads else 0
    small = grad.nbytes if size < 32 else 0
    return (small, small, softmax, softmax * _head(size), shared, shared)


def efficient(op: Op, _: Multiprocessors) -> Buffers:
    """Forward: an fp32 accumulator where the output is narrower and the head exceeds what registers hold (128)."""
    value = op.inputs[2].spec
    wide = value.shape[-1] > 128 and value.dtype != "float32"
    return (4 * op.outputs[0].spec.numel,) if wide and op.outputs else ()


def efficient_backward(op: Op, _: Multiprocessors) -> Buffers:
    """cutlass: dq in fp32 tiles, each with a 16-byte lock, and delta. In fp32 delta is computed outside, from dO*O."""
    specs = input_specs(op)
    grad, query, key, value = specs[:4]
    batch, heads, rows, size = query.shape
    delta = 4 * batch * heads * rows
    block = 64 if size <= 64 else 128
    tiles = ceil(rows / block) * (1 if 96 < size <= 128 else ceil(size / 64))
    width = 128 if 96 < size <= 128 else 64
    workspace = batch * heads * tiles * (4 * block * width + 16)
    if size > 128 and query.dtype != "float32":
        wide = round_up(size, 128) + round_up(value.shape[3], 128)
        workspace += 4 * batch * heads * round_up(key.shape[2], 64) * wide
    if query.dtype == "float32" and grad.nbytes + delta > workspace:
        return (grad.nbytes, delta, delta)
    return (delta, workspace)
